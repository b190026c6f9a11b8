"""Turns and retrievals on Trajectories themselves, without a router."""

from __future__ import annotations

from radix_cache.toy import encode, pack, unpack
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import context_ids
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.retrieval.answer import Lost, inexact_reason, record_of


def generate(kept: Trajectories, text: str, answer: Sampled, session: str | None = None) -> list[int]:
    """One turn as the plugin does it; returns what the engine consumed."""
    prompt = text.encode()
    match = kept.find_to_continue(prompt, session)
    rest = pack(*encode(prompt[match.position :].decode()))
    kept.pin(match.context)
    kept.record(match.context, rest, prompt, answer, session)
    kept.unpin(match.context)
    return unpack(context_ids(match.context) + rest)


def read(
    kept: Trajectories, text: str, session: str | None = None
) -> tuple[list[int], list[int], str | None]:
    """Tokens, loss mask and reason."""
    prompt = text.encode()
    match = kept.find_to_read(prompt, session)
    rest = pack(*encode(prompt[match.position :].decode()))
    record = record_of(match.context, rest, None if match.is_asked else session)
    lost = Lost(session is not None and kept.has_lost(session), kept.is_lost(prompt))
    reason = inexact_reason(match, prompt, record, lambda: lost)
    return record.tokens.tolist(), record.loss_mask.tolist(), reason
