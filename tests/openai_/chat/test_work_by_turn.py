"""The work of a turn that grows with the turns before it.

Nothing that was recorded is converted or judged again, and no message that was read is read again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from openai_.chat.chatting import chatting
from openai_.chat.remembered import ASK, user
from openai_.chat_models.families import QWEN2_5, QWEN3, Family
from openai_.drift.rollouts import TOOLS
from router_core.cli import is_compiled

if TYPE_CHECKING:
    from routers import Start

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(is_compiled(), reason="calls of compiled functions are not seen"),
]

CALL = '<tool_call>\n{"name": "time", "arguments": {"place": "Rio"}}\n</tool_call>'

KEEPERS = ("slime_openai.prompts", "slime_openai.requests", "slime_radix_cache")
#: Turns that are compared. The work of a function grows if it makes one more call for each turn between.
EARLY, LATE = 2, 6
#: A recorded turn is continued only if all answers before it came back as they were recorded.
COMPARES_THE_ANSWERS = {
    "chat_turn.Turn.chain",
    "question.Question.answers",
}
#: What the session has asked is read before anything is awaited, in case none of its own turns is continued.
READS_WHAT_WAS_ASKED = {"speakers.Speakers.contexts"}
#: The ids of all segments are compared with those of the prompt, and each segment counts as used once more.
CONTINUES_THE_CONTEXT = {
    "history.History.add",
    "matching.find_given",
    "segments.Response.__len__",
    "segment_store.SegmentStore.pin",
    "segment_store.SegmentStore.unpin",
    "segments.read_context",
    "starts.Starts._search",
    "text_index.text_of",
}


#: A template that searches for the last question sees the roles of all messages, and renders only the last ones.
SEARCHES = {"conversation._searched"}


@contextmanager
def calls() -> Iterator[Counter[str]]:
    """Count calls of the functions that keep and continue tokens, steps of generators, and calls of C from there."""
    counted: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event in ("call", "c_call") and module.startswith(KEEPERS):
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            counted[f"{module.rpartition('.')[2]}.{function}"] += 1

    sys.setprofile(note)
    try:
        yield counted
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    ("family", "searches"),
    [(QWEN2_5, set[str]()), (QWEN3, SEARCHES)],
    ids=lambda value: getattr(value, "name", ""),
)
async def test_only_comparing_and_continuing_grow_with_the_turns(
    start: Start, family: Family, searches: set[str]
) -> None:
    async with chatting(start, CALL, family=family) as chat:
        messages: list[dict[str, Any]] = [user("a")]
        counts: dict[int, Counter[str]] = {}
        for turn in range(LATE + 1):
            with calls() if turn in (EARLY, LATE) else nullcontext(Counter[str]()) as counts[turn]:
                answer = await chat.post(messages=messages, tools=TOOLS, session_id="s", **ASK)
            assert answer["history"] == ("exact" if turn else "fresh")
            message = answer["choices"][0]["message"]
            result = {"role": "tool", "content": "1", "tool_call_id": message["tool_calls"][0]["id"]}
            messages += [{key: message[key] for key in ("role", "content", "tool_calls")}, result]
    grown = {name for name, count in counts[LATE].items() if count - counts[EARLY][name] >= LATE - EARLY}
    assert grown == COMPARES_THE_ANSWERS | READS_WHAT_WAS_ASKED | CONTINUES_THE_CONTEXT | searches
