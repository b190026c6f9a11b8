"""Answers and chunks in OpenAI's words."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from slime_openai.deltas import Arguments, CallStart, Content, Delta, Reasoning
from slime_openai.messages import Message
from slime_openai.outputs import Output

__all__ = ["DONE", "Frame", "about_output", "delta", "event", "message_of", "reason_of", "usage"]

DONE = b"data: [DONE]\n\n"


class Frame:
    """What all chunks of an answer have in common. ``kind`` is the object's name."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self._members = {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def put(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """``choices`` within the frame."""
        return {**self._members, "choices": choices, **more}


def event(document: dict[str, Any]) -> bytes:
    """``document``, in which numpy arrays may be, as a server-sent event."""
    return b"data: %b\n\n" % orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def message_of(reply: Message) -> dict[str, Any]:
    """An assistant's message."""
    told: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        told["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
    return told


def delta(piece: Delta) -> dict[str, Any]:
    """A piece of an assistant's message."""
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


def reason_of(output: Output) -> dict[str, Any]:
    """``finish_reason``, and the engine's own where strict clients do not know it."""
    reason = output.reason or {"type": "length"}
    kind = reason.get("type")
    if kind in ("stop", "length"):
        matched = {"matched_stop": reason["matched"]} if "matched" in reason else {}
        return {"finish_reason": kind, **matched}
    return {"finish_reason": "length", "engine_finish_reason": reason}


def usage(prompt_tokens: int, outputs: Sequence[Output], reasoning_tokens: int) -> dict[str, Any]:
    """``prompt_tokens`` of all prompts, each counted once."""
    completion = sum(output.meta.get("completion_tokens", len(output.ids)) for output in outputs)
    cached = max((output.meta.get("cached_tokens") or 0 for output in outputs), default=0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def about_output(output: Output, inexact_reason: str | None) -> dict[str, Any]:
    """Fields of one answer for a trainer. ``inexact_reason``: the verdict on its record."""
    meta = output.meta
    told: dict[str, Any] = {
        "token_ids": output.ids,
        "weight_version": meta.get("weight_version"),
        "exact": inexact_reason is None,
        "inexact_reason": inexact_reason,
    }
    if meta.get("weight_versions"):
        told["weight_versions"] = meta["weight_versions"]
    return told
