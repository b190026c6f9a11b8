"""Conversion of turns to records, and of records to turns."""

from __future__ import annotations

from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.log_records import Said
from slime_openai.requests.messages import Message, ToolCall

__all__ = ["said_of", "turn_of"]


def said_of(turn: Turn, serial: int, parent: int) -> Said:
    """Return the record of ``turn``. ``parent``: the serial number of its parent, or 0."""
    reply = turn.reply
    return Said(
        serial,
        parent,
        turn.key,
        turn.count,
        turn.session,
        turn.asked,
        turn.sampled,
        reply.content,
        reply.reasoning,
        tuple((call.name, call.arguments, call.id) for call in reply.tool_calls),
        turn.text.encode(),  # packing the text itself would make CPython keep a UTF-8 copy with it
        turn.ending,
        turn.hidden,
        turn.closed,
        turn.place,
        turn.answers,
    )


def turn_of(record: Said, parent: Turn | None) -> Turn:
    """Return the turn in ``record``."""
    calls = tuple(ToolCall(*call) for call in record.calls)
    return Turn(
        parent,
        record.key,
        record.messages,
        record.session,
        record.asked,
        record.sampled,
        Message("assistant", record.content, calls, reasoning=record.reasoning),
        record.text.decode(),
        record.ending,
        record.hidden,
        record.closed,
        record.place,
        record.answers,
    )
