"""A fake engine that aborts sequences, and the events of a sequence as SGLang's ``TokenizerManager`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from slime_engine.detokenizer import IncrementalText
from slime_engine.language import ModelTokenizer
from slime_engine.sampling import SamplingParams, parse_sampling_params
from slime_testing import FakeEngine

__all__ = ["ABORT", "SHAPES", "AbortingEngine", "SequenceEvents", "Shape", "logprob_of"]

#: The forms of the event of an abort. ``running``: an ordinary event whose finish reason is the abort. ``waiting``: an
#: abort in SGLang's waiting queue, to which running sequences may have to return. ``unread``: as ``waiting``, in one
#: event with the deltas that were not sent yet. ``bare``: only an id and the finish reason, as in older versions.
Shape = Literal["running", "waiting", "unread", "bare"]
SHAPES: tuple[Shape, ...] = ("running", "waiting", "unread", "bare")
ABORT: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}


def logprob_of(place: int) -> float:
    """Return the logprob at ``place``. All differ, and six of seven are no float32 values, so that rounding shows."""
    return -(place + 1) / 7


@dataclass(frozen=True)
class SequenceEvents:
    """The events of one sequence. ``pieces`` are the texts of its ``ids``; the first id has the place ``begin``."""

    ids: Sequence[int]
    pieces: Sequence[str]
    incremental: bool
    has_logprobs: bool = True
    rid: str = "r"
    prompt_tokens: int = 4
    version: str = "1"
    begin: int = 0

    def event(self, told: int, end: int, reason: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return an ordinary event with the tokens until ``end``; earlier events have ``told`` of them."""
        places = range(told if self.incremental else 0, end)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": self.prompt_tokens,
            "weight_version": self.version,
            "completion_tokens": end,
        }
        if self.has_logprobs:
            meta["output_token_logprobs"] = [
                [logprob_of(self.begin + place), self.ids[place], None] for place in places
            ]
            meta["output_token_logprobs_length"] = end
        text = "".join(self.pieces[place] for place in places)
        return {"text": text, "output_ids": [self.ids[place] for place in places], "meta_info": meta}

    def whole(self, reason: dict[str, Any], end: int | None = None) -> dict[str, Any]:
        """Return the answer to an unstreamed request, of all tokens or of those until ``end``."""
        return replace(self, incremental=False).event(0, len(self.ids) if end is None else end, reason)

    def queued(self, told: int, end: int) -> dict[str, Any]:
        """Return the event of an abort in the waiting queue. If ``incremental``, it has the deltas not yet ``told``."""
        event = self.whole(ABORT, end)
        meta = event["meta_info"]
        del meta["prompt_tokens"]
        event["output_ids"] = event["output_ids"][-1:]
        if self.incremental and told < end:
            unread = self.event(told, end)
            event["text"] = unread["text"] + event["text"]
            event["output_ids"] = unread["output_ids"] + event["output_ids"]
            if self.has_logprobs:
                name = "output_token_logprobs"
                meta[name] = unread["meta_info"][name] + meta[name]
        return event


class AbortingEngine(FakeEngine):
    """Samples ``tape`` for every prompt. An earlier prompt with the beginning of the tape after it gets the rest.

    Each sequence takes the next of ``cuts``, a place on the tape. When all tokens before this place are sampled, the
    sequence is aborted in the form of ``shape``, even if the last token is a stop token. With None, a sequence ends by
    its parameters or with the tape. ``tape`` may be a function of the sequence's number, from 0. Each request has a
    weight version of its own.
    """

    tokenizer: ModelTokenizer

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        tape: list[int] | Callable[[int], list[int]],
        cuts: Sequence[int | None] = (),
        shape: Shape = "running",
        *,
        incremental: bool = False,
    ) -> None:
        super().__init__(tokenizer)
        self.tape_of = tape if callable(tape) else lambda _: tape
        self.cuts = list(cuts)
        self.shape = shape
        self.incremental = incremental
        self.pieces = 997  # bytes: so streams are cut anywhere
        self.rest = self._generation

    def uninterrupted(self, **parameters: Any) -> tuple[list[int], str, dict[str, Any]]:
        """Return the ids, the text and the finish reason of a sequence that is not aborted."""
        tape = self.tape_of(0)
        pieces, reason = self._sample(tape, 0, self._parsed(parameters), None)
        return tape[: len(pieces)], "".join(pieces), reason

    def _generation(self, body: dict[str, Any]) -> list[dict[str, Any]] | list[list[dict[str, Any]]]:
        given, rid = body["input_ids"], body.get("rid", "made")
        is_batch = isinstance(given[0], list)
        prompts = given if is_batch else [given]
        parameters = body.get("sampling_params") or {}
        each = parameters if isinstance(parameters, list) else [parameters] * len(prompts)
        copies = each[0].get("n") or 1
        wanted = [pair for pair in zip(prompts, each, strict=True) for _ in range(copies)]
        if not is_batch and copies == 1:
            return list(self._sequence(body, *wanted[0], rid))
        return [list(self._sequence(body, *pair, f"{rid}_{place}")) for place, pair in enumerate(wanted)]

    def _sequence(
        self, body: dict[str, Any], prompt: list[int], parameters: dict[str, Any], rid: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the outputs; the last is the answer of an unstreamed request."""
        tape = self.tape_of(len(self.consumed))
        begin = max((self._sampled_behind(known, prompt, tape) for known in self.consumed), default=0)
        pieces, reason = self._sample(
            tape, begin, self._parsed(parameters), self.cuts.pop(0) if self.cuts else None
        )
        end = len(pieces)
        ids = tape[begin : begin + end]
        self.consumed.append(prompt)
        self.sampled.append((ids, [logprob_of(begin + place) for place in range(end)]))
        streams = bool(body.get("stream"))
        told = SequenceEvents(
            ids, pieces, self.incremental and streams, bool(body.get("return_logprob")), rid, len(prompt),
            str(len(self.asked)), begin,
        )  # fmt: skip
        shape = self.shape if reason is ABORT and end else "running"
        before = end if shape in ("waiting", "bare") else max(0, end - 1)
        outputs = [told.event(count - 1, count) for count in range(1, before + 1)]
        if shape == "running":
            outputs.append(told.event(before, end, reason))
        elif shape == "bare":
            outputs.append({"meta_info": {"id": rid, "finish_reason": reason}})
        else:
            outputs.append(told.queued(before, end) | ({} if streams else {"output_ids": ids}))
        for output in outputs:
            self.edit(output, output is outputs[-1])
            yield output

    @staticmethod
    def _sampled_behind(known: list[int], prompt: list[int], tape: list[int]) -> int:
        """Return how many tokens of the tape follow ``known`` in ``prompt``; 0 if anything else follows."""
        size = len(prompt) - len(known)
        return size if size > 0 and prompt == known + tape[:size] else 0

    def _parsed(self, parameters: dict[str, Any]) -> SamplingParams:
        return parse_sampling_params(parameters, len(self.tokenizer.token_bytes))

    def _sample(
        self, tape: list[int], begin: int, params: SamplingParams, cut: int | None
    ) -> tuple[list[str], dict[str, Any]]:
        """Return the text of each token from place ``begin`` of the tape, and the finish reason."""
        if cut is not None and cut <= begin:
            return [], ABORT
        text, tail, pieces = IncrementalText(self.tokenizer, params), b"", list[str]()
        limit = min(params.max_new_tokens, len(tape) - begin)
        stops = frozenset() if params.ignore_eos else self.tokenizer.eos_ids | params.stop_token_ids
        for size, token in enumerate(tape[begin : begin + limit], 1):
            tail += self.tokenizer.token_bytes[token]
            matched = (
                token if token in stops else next((one for one in params.stop if one.encode() in tail), None)
            )
            reason: dict[str, Any] | None = None
            if begin + size == cut:
                reason = ABORT
            elif size == limit:
                reason = {"type": "length", "length": limit}
            elif matched is not None:
                reason = {"type": "stop", "matched": matched}
            pieces.append(text.add([token]) if reason is None else text.finish([token], reason))
            if reason is not None:
                return pieces, reason
        return pieces, {"type": "length", "length": 0}
