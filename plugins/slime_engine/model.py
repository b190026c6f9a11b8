"""The language model: interpolated trigrams over token ids, one set of weights per version string.

Each step has a distribution over the whole vocabulary, without zeros. :meth:`NgramModel.logprobs` repeats, bit for bit,
the log-probabilities that the engine reported when it sampled. Exceptions are requests with penalties, biases,
``min_new_tokens`` or a grammar, which change the logits. So the model is an oracle: it can check the tokens that a
router reports as sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from slime_engine.language import FloatArray
from slime_engine.tokenizer import EngineTokenizer, corpus_documents, train_tokenizer
from slime_engine.training_stream import training_stream

__all__ = ["FloatArray", "NgramModel", "load_model", "log_softmax"]

IntArray = npt.NDArray[np.int64]

#: Share of the unigram distribution that is spread evenly, so that no token is impossible.
_FLOOR = 5e-4
#: Factor on the counts of special tokens in unigrams, and of the start of a turn in bigrams. So these tokens come
#: mostly from trigrams.
_SPECIAL_DISCOUNT = 0.02
#: Weight given to a shorter context, per distinct token that was seen after the longer context
#: (Witten & Bell 1991).
_BACK_OFF_TO_UNIGRAM = 0.15
_BACK_OFF_TO_BIGRAM = 1.0
#: Standard deviation of the offset that a version adds to the logit of a token.
_VERSION_SPREAD = 0.25
_KEPT_VERSIONS = 64


@cache
def load_model() -> NgramModel:
    """Train tokenizer and model from the corpus in the package, in less than a second.

    Only the first call in a process trains them. Later calls return the same model.
    """
    documents = corpus_documents()
    tokenizer = train_tokenizer(documents)
    return NgramModel(tokenizer, training_stream(tokenizer, documents))


def log_softmax(logits: FloatArray) -> FloatArray:
    """Return the log-probabilities of ``logits``; ``-inf`` stays ``-inf``."""
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


class NgramModel:
    """``p(token | two tokens before it, weight version)``; immutable, except for a cache of the versions' offsets.

    The trigram estimate is blended with the bigram estimate, which is blended with the unigram estimate. A version
    adds a fixed offset to the logit of each token. The offset depends only on the version string and the token.
    """

    #: The model honours no parameter by itself: the sampler enforces all grammars.
    obeys: frozenset[str] = frozenset()

    def __init__(self, tokenizer: EngineTokenizer, stream: Sequence[Sequence[int]]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        pad = [tokenizer.pad_id] * 2
        tokens = np.array([token for ids in stream for token in (*pad, *ids)], dtype=np.int64)
        self._bigrams = self._bigram_table(tokens)
        self._trigrams = self._trigram_table(tokens)
        self._offsets: dict[str, FloatArray] = {}

    def _bigram_table(self, tokens: IntArray) -> FloatArray:
        size = self.vocab_size
        unigrams = np.bincount(tokens, minlength=size).astype(np.float64)
        unigrams[list(self.tokenizer.special_ids)] *= _SPECIAL_DISCOUNT
        unigrams = (1 - _FLOOR) * unigrams / unigrams.sum() + _FLOOR / size
        pairs = np.bincount(tokens[:-1] * size + tokens[1:], minlength=size * size)
        counts = pairs.reshape(size, size).astype(np.float64)
        counts[:, self.tokenizer.start_of_turn_id] *= _SPECIAL_DISCOUNT
        # At least 1: a token that nothing ever followed gets the unigrams, instead of a division by 0.
        kinds = np.maximum((counts > 0).sum(axis=1, keepdims=True), 1) * _BACK_OFF_TO_UNIGRAM
        return np.asarray((counts + kinds * unigrams) / (counts.sum(axis=1, keepdims=True) + kinds))

    def _trigram_table(self, tokens: IntArray) -> dict[int, tuple[float, IntArray, FloatArray]]:
        """Return, for each pair of tokens that occurs, the bigrams' share, the next tokens, and their shares."""
        size = self.vocab_size
        triples = (tokens[:-2] * size + tokens[1:-1]) * size + tokens[2:]
        found, counts = np.unique(triples, return_counts=True)
        contexts, followers = np.divmod(found, size)
        starts = np.flatnonzero(np.diff(contexts, prepend=-1))
        sizes = np.diff(starts, append=len(counts))
        kinds = sizes * _BACK_OFF_TO_BIGRAM
        totals = np.add.reduceat(counts, starts) + kinds
        shares = counts / np.repeat(totals, sizes)
        table = {}
        for context, share, start, end in zip(
            contexts[starts].tolist(), (kinds / totals).tolist(), starts, starts + sizes, strict=True
        ):
            table[context] = (share, followers[start:end], shares[start:end])
        return table

    def _offset(self, version: str) -> FloatArray:
        offset = self._offsets.get(version)
        if offset is None:
            seed = int.from_bytes(hashlib.blake2b(version.encode(), digest_size=8).digest(), "big")
            offset = np.random.default_rng(seed).normal(0.0, _VERSION_SPREAD, self.vocab_size)
            if len(self._offsets) >= _KEPT_VERSIONS:
                del self._offsets[next(iter(self._offsets))]
            self._offsets[version] = offset
        return offset

    def logits(self, before: int, last: int, version: str) -> FloatArray:
        """Return finite logits, shape ``[vocab_size]``, after tokens ``before, last``; the caller owns the array."""
        share_followers = self._trigrams.get(before * self.vocab_size + last)
        if share_followers is None:
            weights: FloatArray = self._bigrams[last].copy()
        else:
            bigram_share, followers, shares = share_followers
            weights = self._bigrams[last] * bigram_share
            weights[followers] += shares
        np.log(weights, out=weights)
        weights += self._offset(version)
        return weights

    def next_logits(self, context: Sequence[int], version: str, end: int | None = None) -> FloatArray:
        """Return :meth:`logits` after ``context[:end]``, which may be empty."""
        pad = self.tokenizer.pad_id
        end = len(context) if end is None else end
        return self.logits(context[end - 2] if end > 1 else pad, context[end - 1] if end else pad, version)

    def logprobs(
        self, ids: Sequence[int], version: str | Sequence[str], *, start: int = 0, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-probability of each id of ``ids[start:]``, given all ids before it, as a trainer computes it.

        ``version`` is one string, or one per token of ``ids[start:]``. ``temperature`` divides the logits;
        0 stands for greedy sampling, whose log-probabilities are those at temperature 1.
        """
        versions = [version] * (len(ids) - start) if isinstance(version, str) else version
        result = []
        for position, one_version in zip(range(start, len(ids)), versions, strict=True):
            logits = self.next_logits(ids, one_version, position)
            if temperature > 0:
                logits /= temperature
            result.append(float(log_softmax(logits)[ids[position]]))
        return result
