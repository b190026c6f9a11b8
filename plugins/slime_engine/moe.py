"""Routed experts of a simulated mixture-of-experts model: a fixed function of token, position and layer."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slime_engine.settings import Settings

__all__ = ["encode_experts", "routed_experts"]


def routed_experts(ids: Sequence[int], start: int, settings: Settings) -> npt.NDArray[np.int32]:
    """Return experts for ``ids[start:-1]`` at each layer, int32 of shape ``[len(ids) - 1 - start, layers, topk]``.

    The last token of a context has not been through the model, hence the ``- 1``. The experts of one token
    at one layer differ from one another.
    """
    positions = np.arange(start, len(ids) - 1, dtype=np.uint64)
    tokens = np.asarray(ids[start:-1], dtype=np.uint64)
    layers = np.arange(settings.moe_layers, dtype=np.uint64)
    mixed = _mix(tokens + (positions << np.uint64(24)))[:, None] + layers
    first = (_mix(mixed) % np.uint64(settings.moe_experts)).astype(np.int32)
    steps = np.arange(settings.moe_topk, dtype=np.int32) * _stride(settings.moe_experts)
    return (first[:, :, None] + steps) % np.int32(settings.moe_experts)


def encode_experts(experts: npt.NDArray[np.int32]) -> str:
    """Return the wire form: standard base64 of little-endian int32 in C order."""
    return base64.b64encode(experts.astype("<i4", copy=False).tobytes()).decode("ascii")


def _stride(experts: int) -> int:
    """Return a step that visits all experts before it returns to the first."""
    return next(step for step in range(experts // 3 + 1, experts + 2) if math.gcd(step, experts) == 1)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash ``values`` with the finaliser of splitmix64 (Steele, Lea & Flood 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
