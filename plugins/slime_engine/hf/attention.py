"""Attention for sequences of different lengths in one pass, without padding.

All tokens of a pass are in one row. All layers but the attention work on the whole row. The attention here computes
each sequence by itself, over its own keys and values. It serves models that dispatch through transformers'
AttentionInterface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slime_engine.hf.kv import KVRows

__all__ = ["RAGGED", "Segment", "register"]

#: The name of the implementation.
RAGGED = "slime_ragged"
#: Arguments that change nothing here: there is no dropout, and positions are in the rotary embedding already.
_HARMLESS = frozenset(
    (
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    )
)


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one sequence in a pass: ``size`` tokens from place ``begin`` on.

    ``rows``: the keys and values of the sequence's tokens before these.
    """

    rows: KVRows
    begin: int
    size: int


def register() -> None:
    """Make the implementation known to transformers."""
    AttentionInterface.register(RAGGED, _attend)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: list[Segment],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of ``query``, shape ``[1, heads, tokens, head_dim]``, as ``[1, tokens, heads, head_dim]``.

    Raises NotImplementedError for a kind of attention that this function does not know.
    """
    unknown = [name for name, given in more.items() if given is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None:
        raise NotImplementedError(f"attention with {', '.join(unknown) or 'a mask'} is not supported")
    parts = []
    for segment in segments:
        here = slice(segment.begin, segment.begin + segment.size)
        keys, values = segment.rows.extended(module.layer_idx, key[0, :, here], value[0, :, here])
        parts.append(_attend_one(query[0, :, here], keys, values, scaling, sliding_window))
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of one sequence's last tokens, shape ``[heads, tokens, head_dim]``."""
    heads, tokens, _ = query.shape
    if tokens == 1:
        if window is not None:
            keys, values = keys[:, -window:], values[:, -window:]
        # Query heads that share a key head are computed as if they were tokens, so that no key is copied.
        grouped = query.reshape(keys.shape[0], heads // keys.shape[0], -1)
        attended = scaled_dot_product_attention(grouped[None], keys[None], values[None], scale=scaling)
        return attended[0].reshape(heads, 1, -1)
    places = torch.arange(keys.shape[1], device=keys.device)
    own = places[-tokens:, None]
    mask = places <= own
    if window is not None:
        mask &= places > own - window
    return scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=True
    )[0]
