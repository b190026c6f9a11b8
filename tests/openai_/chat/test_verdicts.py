"""One verdict on an answer: what was recorded says it, and chat and completions repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest

from deadlines import HANG_S
from openai_.chat.chatting import Chat, chatting
from openai_.chat.remembered import ASK, is_continued, said, user
from openai_.chat_models.families import QWEN2_5
from router_core.exchange import Exchange
from router_core.registry import ComponentRegistry

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

#: Reasons that leave nothing to go on from.
UNUSABLE = ["engine_contradicts_itself", "not_recorded"]


@dataclass
class FixedJudge:
    """Says ``reasons``, whatever an engine answers."""

    reasons: list[str | None] = field(default_factory=lambda: [None] * 8)
    recorded: list[int] = field(default_factory=list)
    components: Any = None

    def of(self, exchange: Exchange) -> Sequence[str | None]:
        assert exchange.request.path == "/generate"
        self.recorded.append(self.components.get("trajectories")._trajectories.segments)
        return self.reasons


@pytest.fixture
def lost() -> set[str]:
    return set()


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, lost: set[str]) -> FixedJudge:
    """The component ``verdicts`` of all routers, and ``lost`` their ``lost_sessions``."""
    judge = FixedJudge()
    ours = {"verdicts": judge, "lost_sessions": lost}
    get = ComponentRegistry.get

    def got(registry: ComponentRegistry, name: str, cure: str = "") -> Any:
        judge.components = registry
        return ours[name] if name in ours else get(registry, name)

    monkeypatch.setattr(ComponentRegistry, "get", got)
    monkeypatch.setattr(
        ComponentRegistry, "__contains__", lambda registry, name: name in ours or name in registry._components
    )
    return judge


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_choice_has_its_own_verdict(
    start: Start, judge: FixedJudge, path: str, stream: bool
) -> None:
    judge.reasons[:] = [None, "no_logprobs", "engine_contradicts_itself"]
    asked: dict[str, Any] = {"messages": [user("a")]} if "chat" in path else {"prompt": "a"}
    async with chatting(start, "One.", family=QWEN2_5) as chat:
        if stream:
            chunks = await chat.streamed(path, **asked, n=3, **ASK)
            choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        else:
            choices = (await chat.post(path, **asked, n=3, **ASK))["choices"]
    told = {choice["index"]: (choice["exact"], choice["inexact_reason"]) for choice in choices}
    assert told == {0: (True, None), 1: (False, "no_logprobs"), 2: (False, "engine_contradicts_itself")}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_verdict_on_a_stream_is_asked_for_when_it_was_recorded(
    start: Start, judge: FixedJudge, path: str
) -> None:
    asked: dict[str, Any] = {"messages": [user("a")]} if "chat" in path else {"prompt": "a"}
    async with chatting(start, "One two three.", family=QWEN2_5) as chat:
        await chat.streamed(path, **asked, **ASK)
        recorded = chat.running.router.components.get("trajectories")._trajectories.segments
    assert set(judge.recorded) == {recorded}
    assert recorded > 1


@pytest.mark.parametrize("reason", UNUSABLE)
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_goes_on_from_an_answer_that_is_no_evidence(
    start: Start, judge: FixedJudge, lost: set[str], reason: str, stream: bool
) -> None:
    async with chatting(start, "One two three.", "More.", family=QWEN2_5) as chat:
        judge.reasons[:] = [reason]
        if stream:
            await chat.streamed(messages=[user("a")], session_id="s", **ASK)
        else:
            await chat.post(messages=[user("a")], session_id="s", **ASK)
        judge.reasons[:] = [None]
        twin = await chat.post(messages=[user("a")], session_id="other", **ASK)
        more = [user("a"), said(twin), user("b")]
        after = await chat.post(messages=more, session_id="s", **ASK)
        assert after["history"] == "fresh", "neither its own answer, nor that of another session"
        assert lost == {"s"}
        assert is_continued(await chat.post(messages=more, session_id="other", **ASK), twin)
        behind = [*more, said(after), user("c")]
        assert is_continued(await chat.post(messages=behind, session_id="s", **ASK), after)


async def test_an_answer_that_is_inexact_for_another_reason_is_gone_on_from(
    start: Start, judge: FixedJudge, lost: set[str]
) -> None:
    async with chatting(start, "One.", "Two.", family=QWEN2_5) as chat:
        judge.reasons[:] = ["no_logprobs"]
        first = await chat.post(messages=[user("a")], session_id="s", **ASK)
        more = [user("a"), said(first), user("b")]
        assert is_continued(await chat.post(messages=more, session_id="s", **ASK), first)
        assert lost == set()


@pytest.mark.parametrize("reason", [None, *UNUSABLE])
async def test_answer_cut_by_a_disconnect_gets_a_verdict_too(
    start: Start, judge: FixedJudge, lost: set[str], reason: str | None
) -> None:
    judge.reasons[:] = [reason]
    async with chatting(start, "w " * 50, "More.", tokens_per_second=50, family=QWEN2_5) as chat:
        text = await _heard(chat, 5)
        with anyio.fail_after(HANG_S):
            while any(worker.in_flight for worker in chat.running.router.pool):  # noqa: ASYNC110  # it ends when the stream does
                await anyio.sleep(0.01)
        judge.reasons[:] = [None]
        more = [user("a"), {"role": "assistant", "content": text}, user("b")]
        after = await chat.post(messages=more, session_id="s", **ASK)
        assert after["history"] == ("exact" if reason is None else "fresh")
        assert lost == (set() if reason is None else {"s"})


async def _heard(chat: Chat, pieces: int) -> str:
    body = {"messages": [user("a")], "stream": True, "session_id": "s", "max_tokens": 60}
    text = ""
    async with chat.running.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += orjson.loads(line[6:])["choices"][0]["delta"].get("content", "")
                pieces -= 1
                if not pieces:
                    break
    return text


async def test_a_session_that_lost_something_takes_only_its_own_turns(
    start: Start, judge: FixedJudge, lost: set[str]
) -> None:
    """The session is marked by a component that knows of the loss: the tokens of one of its turns were evicted, say."""
    lost.add("s")
    async with chatting(start, "One.", "Two.", family=QWEN2_5) as chat:
        other = await chat.post(messages=[user("a")], session_id="other", **ASK)
        more = [user("a"), said(other), user("b")]
        after = await chat.post(messages=more, session_id="s", **ASK)
        assert after["history"] == "fresh"
        assert is_continued(await chat.post(messages=more, session_id="unmarked", **ASK), other)
