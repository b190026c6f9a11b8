"""A causal language model of transformers, and its passes over the next tokens of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime_engine.hf.attention import RAGGED, Segment
from slime_engine.hf.experts import ExpertsRecorder
from slime_engine.hf.kv import KVRows, KVRun
from slime_engine.language import FloatArray

__all__ = ["Network", "Part"]

#: Number of tokens for which the engine's attention is compared with the library's.
_CHECKED = 24
#: Largest allowed difference of logits, relative to their standard deviation, or to 1 if the deviation is less.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Part:
    """The next ``ids`` of a sequence in a pass. Logits are wanted after each of the last ``wanted`` ids."""

    run: KVRun
    ids: Sequence[int]
    wanted: int


class Network:
    """Runs ``model`` in inference mode. Raises ValueError if its attention or its experts are not supported."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.recorder = ExpertsRecorder(model)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self._check()

    def forward(self, parts: Sequence[Part]) -> list[FloatArray]:
        """Compute all parts in one pass. Return the wanted logits of each part, shape ``[wanted, vocab_size]``.

        Raises FloatingPointError when logits are not finite.
        """
        segments: list[Segment] = []
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        for part in parts:
            segments.append(Segment(part.run.rows, len(ids), len(part.ids)))
            positions.extend(range(part.run.rows.length, part.run.rows.length + len(part.ids)))
            ids.extend(part.ids)
            keep.extend(range(len(ids) - part.wanted, len(ids)))
        logits = self._logits(ids, positions, segments, keep)
        experts = self.recorder.take(len(ids)) if self.recorder.layers else None
        for part, segment in zip(parts, segments, strict=True):
            end = segment.begin + segment.size
            part.run.append(part.ids, [] if experts is None else list(experts[segment.begin : end]))
        if not np.isfinite(logits).all():
            raise FloatingPointError("the model's logits are not finite; its weights may be damaged")
        starts = np.cumsum([0, *(part.wanted for part in parts)])
        return [logits[begin : begin + part.wanted] for part, begin in zip(parts, starts, strict=False)]

    def _logits(
        self, ids: list[int], positions: list[int], segments: list[Segment], keep: list[int]
    ) -> FloatArray:
        device = self.model.device
        with torch.inference_mode():
            found = self.model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                logits_to_keep=torch.tensor(keep, dtype=torch.long, device=device),
                use_cache=False,
                segments=segments,
            ).logits
        logits: FloatArray = found[0].double().cpu().numpy()
        return logits

    def _check(self) -> None:
        """Compute some tokens in three passes, and compare the logits with those of the library's own attention."""
        name = type(self.model).__name__
        ids = [place * 7 % self.vocab_size for place in range(_CHECKED)]
        self.model.set_attn_implementation("eager")
        with torch.inference_mode():
            row = torch.tensor([ids], device=self.model.device)
            truth = self.model(input_ids=row, use_cache=False).logits[0]
        self.model.set_attn_implementation(RAGGED)
        rows, pieces = (
            KVRows(),
            (range(_CHECKED - 3), range(_CHECKED - 3, _CHECKED - 1), range(_CHECKED - 1, _CHECKED)),
        )
        try:
            found = []
            for places in pieces:
                size = len(places)
                segment = Segment(rows, 0, size)
                found.append(
                    self._logits([ids[place] for place in places], [*places], [segment], [*range(size)])
                )
                rows.length += size
        except (NotImplementedError, TypeError) as error:
            raise ValueError(f"{name} is not supported by this engine: {error}") from None
        finally:
            self.recorder.clear()
        wanted = truth.double().cpu().numpy()
        difference = float(np.abs(np.concatenate(found) - wanted).max())
        if not difference <= _TOLERANCE * max(1.0, float(wanted.std())):
            raise ValueError(
                f"{name} is not supported by this engine: its logits differ by {difference:.3g} from the library's"
            )
