"""Models read with ``from_pretrained``, one at a time and whole."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

__all__ = ["load_whole"]

#: While ``from_pretrained`` runs, the library replaces ``PreTrainedModel.tie_weights`` for the process. Two loads that
#: overlap in two threads can leave it replaced for good: models loaded later then lack their tied weights.
_ONE_AT_A_TIME = threading.Lock()


def load_whole(kind: Any, path: Path, **more: Any) -> Any:
    """Return the model of ``kind`` in ``path`` as float32.

    Raises ValueError if weights are missing, unexpected or of a wrong shape.
    """
    with _ONE_AT_A_TIME:
        model, report = kind.from_pretrained(
            str(path), dtype=torch.float32, local_files_only=True, output_loading_info=True, **more
        )
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(name):
            raise ValueError(f"{path} does not fit the model: {name} {sorted(map(str, report[name]))[:5]}")
    return model
