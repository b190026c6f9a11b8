"""Answers and chunks in OpenAI's schema."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from slime_openai.parsing.deltas import Arguments, CallStart, Content, Delta, Reasoning
from slime_openai.requests.fields import is_int
from slime_openai.requests.messages import Message
from slime_openai.requests.options import Options
from slime_openai.responses.outputs import Output
from slime_openai.responses.routing import routing_matrices

__all__ = [
    "DONE",
    "Frame",
    "about_output",
    "delta",
    "event",
    "message_of",
    "reason_of",
    "root_version",
    "usage",
]

DONE = b"data: [DONE]\n\n"


class Frame:
    """Members that all chunks of an answer share. ``kind``: the value of ``object``."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self._members = {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def put(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return ``choices`` with the shared members, and ``more``."""
        return {**self._members, "choices": choices, **more}


def event(document: dict[str, Any]) -> bytes:
    """Return ``document``, which may have numpy arrays, as a server-sent event."""
    return b"data: %b\n\n" % orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def message_of(reply: Message, options: Options) -> dict[str, Any]:
    """Return an assistant's message. As in SGLang, its content is never null if ``meta_info`` is wanted."""
    content = (reply.content or "") if options.return_meta_info else reply.content
    written: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning is not None:
        written["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
    return written


def delta(piece: Delta) -> dict[str, Any]:
    """Return a piece of an assistant's message in OpenAI's form."""
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, id, name):
            call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def reason_of(output: Output, options: Options) -> dict[str, Any]:
    """Return ``finish_reason``, and the stop that matched. A reason that OpenAI's API lacks becomes "length".

    Such a reason is also returned in full. Clients that ask for ``meta_info``, and so know SGLang, get "abort" for an
    abort: a trainer must not take an abort for a limit.
    """
    reason = output.reason or {"type": "length"}
    kind = reason.get("type")
    if kind in ("stop", "length"):
        matched = {"matched_stop": reason["matched"]} if "matched" in reason else {}
        return {"finish_reason": kind, **matched}
    known = "abort" if options.return_meta_info and kind == "abort" else "length"
    return {"finish_reason": known, "engine_finish_reason": reason}


def usage(
    prompt_tokens: int, outputs: Sequence[Output], samples: int, reasoning_tokens: int
) -> dict[str, Any]:
    """Return OpenAI's ``usage``. ``prompt_tokens``: tokens of all prompts, each counted once.

    ``outputs``: ``samples`` outputs of each prompt. As in SGLang, the cached tokens of a prompt are counted only in the
    first of these outputs.
    """
    metas = [output.meta for output in outputs]
    tokens = [meta.get("completion_tokens", len(one.ids)) for meta, one in zip(metas, outputs, strict=True)]
    completion = sum(tokens)
    cached = sum([meta.get("cached_tokens") or 0 for meta in metas[::samples]])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def about_output(
    output: Output, options: Options, inexact_reason: Callable[[], str | None]
) -> dict[str, Any]:
    """Return members of a complete choice that a trainer asked for, except its token ids.

    ``inexact_reason``: returns the reason why the choice is not exact, or None. The engine's ``meta_info`` contains
    ``routed_experts``, so a choice with ``meta_info`` has no member ``routed_experts`` of its own.
    """
    meta = output.meta
    members: dict[str, Any] = {}
    if options.return_token_ids:
        reason = inexact_reason()
        members |= {
            "weight_version": meta.get("weight_version"),
            "exact": reason is None,
            "inexact_reason": reason,
        }
        if meta.get("weight_versions"):
            members["weight_versions"] = meta["weight_versions"]
    if options.return_meta_info:
        members["meta_info"] = meta
    if options.return_routed_experts:
        if not options.return_meta_info:
            members["routed_experts"] = meta.get("routed_experts")
            if meta.get("routed_experts_start_len"):
                members["routed_experts_start_len"] = meta["routed_experts_start_len"]
        if options.return_token_ids:
            start = options.engine.get("routed_experts_start_len", 0)
            members["routing_matrices"] = routing_matrices(output, start)
    if options.engine.get("return_hidden_states"):
        members["hidden_states"] = meta.get("hidden_states")
    return members


def root_version(output: Output, options: Options) -> dict[str, Any]:
    """Return the member ``weight_version`` that stands beside the choices, if the client wants token ids.

    Gateways expect a number in this member. So a version that is no number is left out, such as SGLang's ``default``.
    """
    version = output.meta.get("weight_version") if options.return_token_ids else None
    is_number = is_int(version) or (isinstance(version, str) and version.isascii() and version.isdecimal())
    return {"weight_version": version} if is_number else {}
