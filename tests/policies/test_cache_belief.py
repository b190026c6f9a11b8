"""``cache_aware`` is corrected by answers: what engines had in their caches, against what it believed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from starlette.responses import Response, StreamingResponse

from policies.asking import asking, ready
from router_core import Exchange, Worker
from router_core.reply import Reply
from router_core.types import ASGIApp, Receive, Scope, Send
from routers import Start
from slime_engine.app import make_app
from slime_engine.settings import Settings as EngineSettings
from slime_http.serving import serving
from slime_policies import CacheAware, Settings
from slime_policies.cached_tokens import CachedTokens
from slime_policies.horizons import Horizons
from slime_testing import FakeEngine

_TOKENS = 1000


def talk(number: int) -> Exchange:
    text = "".join(random.Random(number).choices("abcdef ", k=4 * _TOKENS))
    return asking(b'{"text": "%s"}' % text.encode())


def send(policy: CacheAware, number: int, to: Sequence[Worker], cached: int | None) -> Worker:
    exchange = talk(number)
    chosen = policy(exchange, to)
    if cached is not None:
        policy.answered(exchange, _TOKENS, cached)
    return chosen


def after(numbers: Sequence[int], cached: int) -> tuple[CacheAware, Worker, Worker]:
    """A policy after conversations 1 to 6 on the first of two workers, of which ``numbers`` came back to it."""
    one, two = ready(0, 0)
    policy = CacheAware(Settings())
    for number in range(1, 7):
        send(policy, number, [one], 0)
    for number in numbers:
        send(policy, number, [one], cached)
    one.in_flight = 1
    return policy, one, two


def test_evicted_conversations_go_to_the_worker_with_the_least_load() -> None:
    policy, one, two = after([4, 5, 6], 0)
    assert [policy(talk(number), [one, two]) for number in (1, 2)] == [two, two]
    assert [policy(talk(number), [one, two]) for number in (5, 6)] == [one, one]  # used again since


@pytest.mark.parametrize(
    ("numbers", "cached"),
    [([4, 5, 6], _TOKENS), ([4, 5, 6], 600), ([4, 5], 0)],
    ids=["as believed", "a little less", "twice only"],
)
def test_belief_stays_without_clear_evidence(numbers: Sequence[int], cached: int) -> None:
    policy, one, two = after(numbers, cached)
    assert [policy(talk(number), [one, two]) for number in (1, 2)] == [one, one]


def test_requests_sent_at_once_are_no_evidence_of_eviction() -> None:
    one, two = ready(0, 0)
    policy = CacheAware(Settings())
    send(policy, 1, [one], 0)
    group = [talk(2) for _ in range(8)]
    for exchange in group:
        policy(exchange, [one])
    for exchange in group:
        policy.answered(exchange, _TOKENS, 0)
    one.in_flight = 1
    assert policy(talk(1), [one, two]) is one


def test_evicted_conversation_stays_evicted_when_another_worker_uses_it() -> None:
    policy, one, two = after([4, 5, 6], 0)
    assert policy(talk(1), [one, two]) is two
    one.in_flight, two.in_flight = 0, 1
    assert policy(talk(1), [one, two]) is two


@pytest.mark.parametrize("forgets_all", [True, False])
def test_answers_to_requests_before_forgetting_are_ignored(forgets_all: bool) -> None:
    one, two = ready(0, 0)
    policy = CacheAware(Settings())
    exchanges = []
    for number in (1, 2, 3):
        send(policy, number, [one], 0)
        exchanges.append(talk(number))
        policy(exchanges[-1], [one])
    if forgets_all:
        policy.forget_all()
    else:
        policy.forget(one)
    send(policy, 7, [one], 0)
    for exchange in exchanges:
        policy.answered(exchange, _TOKENS, 0)
    one.in_flight = 1
    assert policy(talk(7), [one, two]) is one


def test_answers_to_requests_that_the_policy_did_not_place_are_ignored() -> None:
    CacheAware(Settings()).answered(talk(1), _TOKENS, 0)


def test_horizons_tell_which_workers_have_evicted_a_use() -> None:
    horizons = Horizons()
    assert horizons.evicted_by(0) == horizons.evicted_by(5) == 0
    horizons.move(1, 10)
    horizons.move(4, 20)
    horizons.move(4, 15)  # never back
    assert [horizons.evicted_by(used) for used in (10, 11, 20, 21)] == [5, 4, 4, 0]
    horizons.drop(4)
    horizons.drop(8)
    assert [horizons.evicted_by(used) for used in (10, 11)] == [1, 0]
    horizons.drop(1)
    assert horizons.evicted_by(1) == 0


ANSWERS = [
    b'{"text":"x","meta_info":{"id":"a","prompt_tokens":12,"completion_tokens":1,"cached_tokens":8}}',
    b'{"usage": {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}, "n": 1}}',
    b'data: {"text":"\\"cached_tokens\\": 5,","meta_info":{"cached_tokens":8,"prompt_tokens":12}}\n\ndata: '
    b'{"meta_info":{"cached_tokens":9,"prompt_tokens":13}}\n\n',
]


@pytest.mark.parametrize("answer", ANSWERS, ids=["generate", "OpenAI", "stream"])
def test_numbers_are_found_however_an_answer_is_cut(answer: bytes) -> None:
    for size in (1, 2, 7, 30, len(answer)):
        found: list[tuple[int, int]] = []
        tap = CachedTokens(Reply(200, [], b""), lambda prompt, cached: found.append((prompt, cached)))  # noqa: B023
        for begin in range(0, len(answer), size):
            tap.feed(answer[begin : begin + size])
        tap.close(True)
        assert found == [(12, 8)]


def test_numbers_of_a_body_that_a_plugin_has_read_are_found_at_its_end() -> None:
    found: list[tuple[int, int]] = []
    reply = Reply(200, [], ANSWERS[0])
    tap = CachedTokens(reply, lambda prompt, cached: found.append((prompt, cached)))
    tap.close(False)
    assert found == [(12, 8)]


# through a router


@pytest.mark.anyio
@pytest.mark.parametrize("streamed", [False, True])
async def test_answers_pass_unchanged(start: Start, streamed: bool) -> None:
    body = b'{"text": "y", "meta_info" : {"prompt_tokens": 9 ,"cached_tokens":0}}\n'

    def reply(_: object) -> Response:
        pieces = [body[begin : begin + 20] for begin in range(0, len(body), 20)]
        return StreamingResponse(pieces, media_type="text/event-stream") if streamed else Response(body)

    engine = FakeEngine()
    engine.rest = reply
    engine.other = lambda call: reply(call) if call.method == "POST" else (200, b"{}")
    async with serving(engine.app) as url, start("--policy", "cache_aware", "--worker-urls", url) as running:
        for path in ("/generate", "/v1/embeddings"):
            answer = await running.client.post(path, json={"text": "z" * 100, "stream": streamed})
            assert answer.content == body


class Counting:
    """An app that counts its generations."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.count += scope["type"] == "http" and scope["path"] == "/generate"
        await self._app(scope, receive, send)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "more", [{}, {"stream": True}, {"return_logprob": True}], ids=["whole", "stream", "logprobs"]
)
async def test_conversations_that_an_engine_evicted_are_spread_again(
    start: Start, more: dict[str, object]
) -> None:
    prompts = [[random.Random(seed).randrange(300, 1200) for _ in range(1000)] for seed in range(12)]
    small = Counting(make_app(EngineSettings(kv_cache_tokens=4096, page_size=16)))
    other = Counting(make_app(EngineSettings(kv_cache_tokens=4096, page_size=16)))
    async with serving(small) as one, serving(other) as two, start("--policy", "cache_aware") as running:

        async def ask(number: int) -> None:
            payload = {"input_ids": prompts[number], "sampling_params": {"max_new_tokens": 1}, **more}
            answer = await running.client.post("/generate", json=payload)
            assert answer.status_code == 200

        await running.client.post("/add_worker", json={"url": one})
        for number in [*range(12), 5, 6, 7]:  # the cache holds four
            await ask(number)
        await running.client.post("/add_worker", json={"url": two})
        for number in (7, 1, 2, 3, 4):
            await ask(number)
        assert (small.count, other.count) == (18, 2)


EXACT = ("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache", "--plugin", "openai")
CHAT = {"messages": [{"role": "user", "content": "Hi " * 300}], "max_tokens": 600, "ignore_eos": True}


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_the_openai_plugin_reads_are_told(
    start: Start, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(
        CacheAware, "answered", lambda self, exchange, prompt, cached: told.append((prompt, cached))
    )
    async with start(*EXACT, "--policy", "cache_aware") as running:
        answer = await running.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert answer.status_code == 200
    [(prompt, cached)] = told
    assert (prompt > 300, cached) == (True, 0)
