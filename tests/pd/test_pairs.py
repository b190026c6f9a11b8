"""The pair that gets a generation, and what follows when one of the two fails. The workers follow a script."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import anyio
import orjson
import pytest

import slime_pd.attempt
from core.servers import Wire, answer
from deadlines import HANG_S
from holding import drain, quarantine, withheld
from pd.stand_ins import DROP, HANG, StandIn, between, refusal, said, stream
from plugged import until
from router_core import Exchange, hookimpl
from router_core.cli import build
from router_core.errors import SettingsError
from router_core.workers import WorkerType
from routers import BARE, Start
from slime_policies.plugin import PairPolicies
from slime_sglang.facts import bootstrap_port

pytestmark = pytest.mark.anyio


def pair() -> tuple[StandIn, StandIn]:
    return StandIn("prefill"), StandIn("decode")


# what is sent


async def test_both_get_the_bytes_of_the_client_and_where_to_meet_behind_them(start: Start) -> None:
    prefill, decode = pair()
    body = b'{"rid": "r",  "text":"caf\xc3\xa9", "sampling_params": {"temperature": 1e-5}}'
    async with between(start, prefill, decode) as running:
        await running.client.post("/generate?x=1", content=body, headers={"X-Own": "1"})
    (read,), (written,) = prefill.generations, decode.generations
    assert read.body == written.body
    assert read.line == written.line == b"POST /generate?x=1 HTTP/1.1"
    assert read.values(b"x-own") == written.values(b"x-own") == [b"1"]
    assert read.body.startswith(
        body[:-1] + b',"bootstrap_host":"127.0.0.1","bootstrap_port":9000,"bootstrap_room":'
    )
    assert decode.bodies[0]["bootstrap_room"] < 1 << 63


async def test_a_client_does_not_say_where_they_meet(start: Start) -> None:
    prefill, decode = pair()
    async with between(start, prefill, decode) as running:
        mine = {"text": "a", "bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 2}
        await running.client.post("/generate", json=mine)
    for told in (*prefill.bodies, *decode.bodies):
        assert told["bootstrap_host"] == "127.0.0.1"
        assert told["bootstrap_port"] == 9000
        assert told["bootstrap_room"] != 2


async def test_an_answer_with_nothing_to_add_is_passed_on_byte_for_byte(start: Start) -> None:
    prefill, decode = pair()
    body = b'{ "text" : "x", "meta_info": {"weight_version": "7", "x": 1.50} }'
    decode.rest = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-A: b\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body), body,
    )  # fmt: skip
    prefill.rest = said(weight_version="7")
    async with between(start, prefill, decode) as running:
        answer = await running.client.post("/generate", json={"text": "a"})
    assert answer.content == body
    assert answer.headers["x-a"] == "b"


async def test_openai_requests_meet_too_and_their_answers_stay(start: Start) -> None:
    prefill, decode = pair()
    async with between(start, prefill, decode) as running:
        body = {"model": "m", "prompt": ["a", "b"]}
        answer = await running.client.post("/v1/completions", json=body)
    assert answer.json() == {"text": "x", "meta_info": {}}
    assert [len(told["bootstrap_room"]) for told in (*prefill.bodies, *decode.bodies)] == [2, 2]


async def test_other_requests_go_to_one_worker_as_they_are(start: Start) -> None:
    prefill, decode = pair()
    async with between(start, prefill, decode) as running:
        before = [len(each.others) for each in (prefill, decode)]
        await running.client.post("/tokenize", json={"prompt": "a"})
        asked = [each.others[count:] for each, count in zip((prefill, decode), before, strict=True)]
        (request,) = [one for others in asked for one in others if b"/tokenize" in one.line]
        assert request.body == b'{"prompt":"a"}'


async def test_body_that_is_no_object_is_refused(start: Start) -> None:
    async with between(start, *pair()) as running:
        answer = await running.client.post("/generate", content=b"[1]")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "wanted a JSON object as the body"


# who is asked


async def test_a_session_keeps_its_prefill_worker_and_not_its_decode_worker(start: Start) -> None:
    prefills = [StandIn("prefill") for _ in range(3)]
    decodes = [StandIn("decode") for _ in range(2)]
    async with between(start, *prefills, *decodes, flags=("--policy", "round_robin")) as running:
        for _ in range(6):
            await running.client.post("/generate", json={"text": "a"}, headers={"X-Session-Id": "s"})
        assert sorted(len(each.generations) for each in prefills) == [0, 0, 6]
        assert [len(each.generations) for each in decodes] == [3, 3]
        (kept,) = [each for each in prefills if each.generations]
        quarantine(running.router.pool, kept.worker, "a test")
        await running.client.post("/generate", json={"text": "a"}, headers={"X-Session-Id": "s"})
        assert sorted(len(each.generations) for each in prefills) == [0, 1, 6]


async def test_each_half_has_its_policy(start: Start) -> None:
    prefills = [StandIn("prefill") for _ in range(2)]
    decodes = [StandIn("decode") for _ in range(2)]
    flags = ("--prefill-policy", "cache_aware", "--decode-policy", "round_robin")
    async with between(start, *prefills, *decodes, flags=flags) as running:
        for _ in range(8):
            await running.client.post("/generate", json={"text": "a long prompt, " * 40})
    assert sorted(len(each.generations) for each in prefills) == [0, 8]  # where the prompt is known
    assert [len(each.generations) for each in decodes] == [4, 4]


async def test_a_worker_that_is_not_ready_is_not_chosen(start: Start) -> None:
    prefills = [StandIn("prefill") for _ in range(2)]
    decodes = [StandIn("decode") for _ in range(2)]
    async with between(start, *prefills, *decodes) as running:
        quarantine(running.router.pool, prefills[0].worker, "a test")
        drain(running.router.pool, decodes[1].worker)
        for _ in range(6):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
    assert [len(each.generations) for each in (*prefills, *decodes)] == [0, 6, 6, 0]


@pytest.mark.parametrize(("kind", "missing"), [("prefill", "decode"), ("decode", "prefill")])
async def test_without_one_of_the_halves_nothing_is_generated(start: Start, kind: Any, missing: str) -> None:
    async with between(start, StandIn(kind), StandIn("regular"), flags=("--disable-retries",)) as running:
        answer = await running.client.post("/generate", json={"text": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].startswith(f"no {missing} worker can take requests")
        readiness = await running.client.get("/readiness")
        assert readiness.status_code == 503
        assert readiness.json()["reason"] == f"no {missing} worker can take requests (registered: 2)"


async def test_a_worker_of_both_halves_gets_nothing(start: Start) -> None:
    prefill, decode, regular = *pair(), StandIn("regular")
    async with between(start, prefill, decode, regular) as running:
        for _ in range(4):
            await running.client.post("/generate", json={"text": "a"})
        stats = (await running.client.get("/workers")).json()["stats"]
        assert stats == {"regular_count": 1, "prefill_count": 1, "decode_count": 1}
    assert not regular.generations


async def test_worker_registered_again_keeps_its_type_unless_it_names_another(start: Start) -> None:
    prefill, decode = pair()
    async with between(start, prefill, decode) as running:
        client, worker = running.client, prefill.worker
        for path in ("/workers", "/add_worker"):
            await client.post(path, json={"url": worker.url})
            assert (worker.worker_type, bootstrap_port(worker)) == ("prefill", 9000)
        await client.post("/workers", json={"url": worker.url, "bootstrap_port": 9001})
        assert (worker.worker_type, bootstrap_port(worker)) == ("prefill", 9001)
        await client.post("/workers", json={"url": worker.url, "worker_type": "regular"})
        assert (worker.worker_type, bootstrap_port(worker)) == ("regular", None)


async def test_bootstrap_port_changes_only_when_it_or_another_type_is_named(start: Start) -> None:
    prefill, decode = pair()
    async with between(start, prefill, decode) as running:
        client, worker = running.client, prefill.worker
        same = {"url": worker.url, "worker_type": "prefill"}
        for path in ("/workers", "/add_worker"):
            await client.post(path, json=same)
            assert bootstrap_port(worker) == 9000
        await client.post("/workers", json=same | {"bootstrap_port": None})
        assert bootstrap_port(worker) is None
        await client.put(f"/workers/{worker.id}", json={"bootstrap_port": 9001})
        assert bootstrap_port(worker) == 9001
        await client.put(f"/workers/{worker.id}", json={"bootstrap_port": None})
        assert bootstrap_port(worker) is None
        await client.post("/workers", json=same | {"bootstrap_port": 9002})
        for kind in ("decode", "prefill"):
            await client.post("/workers", json={"url": worker.url, "worker_type": kind})
            assert (worker.worker_type, bootstrap_port(worker)) == (kind, None)


# failures


@pytest.mark.parametrize("how", [refusal(500), refusal(503), refusal(429), DROP])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("streams", [False, True])
async def test_request_that_one_of_a_pair_fails_goes_to_another_pair(
    start: Start, kind: Any, how: bytes, streams: bool
) -> None:
    good = stream({"meta_info": {}}) if streams else said()
    failing, well = StandIn(kind, rest=how), StandIn(kind, rest=good)
    other = StandIn("decode" if kind == "prefill" else "prefill", rest=good)
    async with between(start, failing, well, other, flags=("--policy", "round_robin")) as running:
        for number in range(4):
            body = {"text": "a", "rid": f"r{number}", "stream": streams}
            answer = await running.client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
    assert failing.generations
    assert len(well.generations) == 4
    assert len(other.generations) > 4 or how == DROP  # given up, perhaps, before it had got it
    rooms = [told["bootstrap_room"] for told in other.bodies]
    assert len(set(rooms)) == len(rooms)


async def test_a_prefill_that_fails_ends_a_decode_that_waits_for_it(start: Start) -> None:
    prefill, decode = StandIn("prefill", rest=refusal(500)), StandIn("decode", rest=HANG)
    async with between(start, prefill, decode, flags=("--disable-retries",)) as running:
        answer = await running.client.post("/generate", json={"text": "a", "rid": "mine"})
        assert (answer.status_code, answer.json()) == (500, {"no": 500})
        assert answer.headers["x-mine"] == "yes"
        await until(lambda: decode.aborted == ["mine"])
    assert not prefill.aborted


async def test_a_decode_that_fails_ends_a_prefill_that_waits_for_it(start: Start) -> None:
    prefill, decode = StandIn("prefill", rest=HANG), StandIn("decode", rest=refusal(500))
    async with between(start, prefill, decode, flags=("--disable-retries",)) as running:
        answer = await running.client.post("/generate", json={"text": "a", "rid": "mine"})
        assert (answer.status_code, answer.json()) == (500, {"no": 500})
        await until(lambda: prefill.aborted == ["mine"])
    assert not decode.aborted


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_the_fault_of_a_client_is_told_once(start: Start, kind: Any) -> None:
    failing = StandIn(kind, rest=refusal(400))
    other = StandIn("decode" if kind == "prefill" else "prefill", rest=HANG)
    async with between(start, failing, other) as running:
        answer = await running.client.post("/generate", json={"text": "a"})
        assert (answer.status_code, answer.json()) == (400, {"no": 400})
    assert len(failing.generations) == len(other.generations) == 1


async def test_a_stream_of_the_prefill_worker_that_ends_in_an_error_is_a_failure(start: Start) -> None:
    failing = StandIn("prefill", rest=stream({"error": {"message": "out of memory"}}))
    decode = StandIn("decode", rest=stream({"meta_info": {}}))
    async with between(start, failing, decode, flags=("--disable-retries",)) as running:
        answer = await running.client.post("/generate", json={"text": "a", "stream": True})
        assert answer.status_code == 502
        assert "out of memory" not in answer.text


async def test_a_prefill_that_never_ends_fails_an_answer_that_has_come(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime_pd.attempt, "_OVERDUE_S", 0.1)
    prefill, decode = StandIn("prefill", rest=HANG), StandIn("decode")
    async with between(start, prefill, decode) as running:
        answer = await running.client.post("/generate", json={"text": "a", "rid": "mine"})
        assert answer.status_code == 504
        assert "has not ended its prefill" in answer.json()["error"]["message"]
        await until(lambda: prefill.aborted == ["mine"])


async def test_a_prefill_that_never_ends_fails_a_stream_that_has_begun(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime_pd.attempt, "_OVERDUE_S", 0.1)
    prefill, decode = StandIn("prefill", rest=HANG), StandIn("decode", rest=stream({"meta_info": {}}))
    flags = ("--cb-failure-threshold", "1")
    async with between(start, prefill, decode, flags=flags) as running:
        body = {"text": "a", "rid": "mine", "stream": True}
        with anyio.fail_after(HANG_S):
            answer = await running.client.post("/generate", json=body)
        assert answer.status_code == 504
        await until(lambda: prefill.aborted == ["mine"])
        assert [withheld(worker) for worker in running.router.pool] == [True, False]


async def test_nothing_is_held_between_two_attempts(start: Start) -> None:
    prefill, decode = (
        StandIn("prefill", rest=said(input_token_logprobs=[])),
        StandIn("decode", rest=said()[:-1] + b"!"),
    )
    flags = ("--retry-initial-backoff-ms", "60000", "--disable-circuit-breaker")
    async with between(start, prefill, decode, flags=flags) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: running.client.post("/generate", json={"text": "a"}))
        await until(lambda: len(decode.generations) == 1)
        await until(lambda: not any(worker.load for worker in running.router.pool))
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_the_only_one_of_its_half_is_left_alone_as_long_as_it_wants(start: Start, kind: Any) -> None:
    busy = b"HTTP/1.1 503 No\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
    one, other = StandIn(kind, busy), StandIn("decode" if kind == "prefill" else "prefill")
    async with between(start, one, other) as running:
        began = anyio.current_time()
        assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
        assert anyio.current_time() - began >= 0.8


async def test_the_breaker_of_the_one_that_failed_opens_and_a_probe_closes_it(start: Start) -> None:
    failing, well = StandIn("prefill", *[refusal(500)] * 2), StandIn("prefill")
    decode = StandIn("decode")
    flags = (
        "--cb-failure-threshold", "2", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "0.2",
        "--policy", "round_robin",
    )  # fmt: skip
    async with between(start, failing, well, decode, flags=flags) as running:

        def held() -> list[bool]:
            return [withheld(worker) for worker in running.router.pool]

        for _ in range(4):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
        assert len(failing.generations) == 2
        assert held() == [True, False, False]
        await until(lambda: held() == [False, False, False])  # half-open
        for _ in range(4):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
        assert len(failing.generations) > 2
        await anyio.sleep(0.3)
        assert held() == [False, False, False]
        assert failing.worker.reason is None


async def test_half_open_breaker_lets_one_attempt_through_and_reopens(start: Start) -> None:
    kinds: tuple[WorkerType, ...] = ("prefill", "decode")
    for kind in kinds:
        failing = StandIn(kind, rest=refusal(500))
        well = StandIn(failing.kind)
        other = StandIn("decode" if kind == "prefill" else "prefill")
        flags = (
            "--cb-failure-threshold",
            "1",
            "--cb-timeout-duration-secs",
            "0.2",
            "--policy",
            "round_robin",
        )
        async with between(start, failing, well, other, flags=flags) as running:
            for _ in range(4):
                assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
            worker = failing.worker
            assert withheld(worker)
            await until(lambda: not withheld(worker))  # noqa: B023  # called at once
            for _ in range(4):
                assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
            assert withheld(worker)
            assert len(failing.generations) == 2
            assert not withheld(other.worker)


async def test_an_innocent_half_keeps_its_breaker_shut(start: Start) -> None:
    failing, decode = StandIn("prefill", rest=refusal(500)), StandIn("decode")
    flags = ("--cb-failure-threshold", "1", "--cb-timeout-duration-secs", "60", "--disable-retries")
    async with between(start, failing, decode, flags=flags) as running:
        assert (await running.client.post("/generate", json={"text": "a"})).status_code == 500
        assert [withheld(worker) for worker in running.router.pool] == [True, False]


async def test_a_decode_worker_is_not_blamed_for_a_prefill_worker_that_dies(start: Start) -> None:
    class Dying(StandIn):
        async def serve(self, wire: Wire) -> None:
            while request := await wire.request():
                if request.line.startswith(b"POST /generate "):
                    await anyio.sleep(0.02)
                    return
                await wire.send(answer(b"{}"))

    prefill, decode = Dying("prefill"), StandIn("decode", rest=refusal(500))
    flags = ("--cb-failure-threshold", "1", "--disable-retries")
    async with between(start, prefill, decode, flags=flags) as running:
        assert (await running.client.post("/generate", json={"text": "a"})).status_code == 502
        assert [withheld(worker) for worker in running.router.pool] == [True, False]


async def test_without_retries_and_control_a_failure_ends_both_all_the_same(start: Start) -> None:
    prefill, decode = StandIn("prefill", refusal(500)), StandIn("decode", HANG)
    async with between(start, prefill, decode, flags=(*BARE, "--plugin", "pd")) as running:
        answer = await running.client.post("/generate", json={"text": "a", "rid": "mine"})
        assert (answer.status_code, answer.json()) == (500, {"no": 500})
        assert (await running.client.post("/generate", json={"text": "a"})).json() == {
            "text": "x",
            "meta_info": {},
        }


async def test_an_abort_between_two_attempts_ends_the_request(start: Start) -> None:
    prefill, decode = StandIn("prefill", rest=refusal(503)), StandIn("decode", rest=HANG)
    flags = (
        "--retry-initial-backoff-ms",
        "5000",
        "--retry-max-backoff-ms",
        "5000",
        "--retry-jitter-factor",
        "0",
    )
    async with between(start, prefill, decode, flags=flags) as running:
        status: list[int] = []

        async def ask() -> None:
            answer = await running.client.post("/generate", json={"text": "a", "rid": "mine"})
            status.append(answer.status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(
                lambda: len(prefill.generations) == 1 and not any(w.load for w in running.router.pool)
            )
            await running.client.post("/abort_request", json={"rid": "mine"})
        assert status == [400]
        assert len(prefill.generations) == 1


async def test_abort_while_the_previous_attempt_ends_ends_the_request(start: Start) -> None:
    prefill, decode = StandIn("prefill", refusal(503)), StandIn("decode", HANG)
    decode.abort_takes_s = 0.5
    async with between(start, prefill, decode) as running:
        status: list[int] = []

        async def ask() -> None:
            answer = await running.client.post("/generate", json={"text": "a", "rid": "mine"})
            status.append(answer.status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: bool(decode.aborted) and all(w.load for w in running.router.pool))
            await running.client.post("/abort_request", json={"rid": "mine"})
        assert status == [400]
        assert len(prefill.generations) == len(decode.generations) == 1


async def test_a_stream_passes_piece_by_piece(start: Start) -> None:
    """Nothing is to be added, so nothing is parsed: what is no JSON comes through."""
    data = b": comment\n\ndata: {no json\n\ndata: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(data)
    prefill, decode = StandIn("prefill", rest=stream({"meta_info": {}})), StandIn("decode", rest=head + data)
    async with between(start, prefill, decode) as running:
        answer = await running.client.post("/generate", json={"text": "a", "stream": True})
        assert answer.content == data


# flags


async def test_workers_of_the_command_line_are_of_their_types(start: Start) -> None:
    line = (
        "--pd-disaggregation --prefill http://127.0.0.1:9 9001 --prefill http://127.0.0.1:10 none"
        " --prefill http://127.0.0.1:11 --decode http://127.0.0.1:12"
    )
    async with start(*line.split()) as running:
        await until(lambda: len(running.router.pool) == 4)
        told = {worker.url: (worker.worker_type, bootstrap_port(worker)) for worker in running.router.pool}
    assert told == {
        "http://127.0.0.1:9": ("prefill", 9001),
        "http://127.0.0.1:10": ("prefill", None),
        "http://127.0.0.1:11": ("prefill", None),
        "http://127.0.0.1:12": ("decode", None),
    }


WRONG = {
    "--prefill http://a:1 x": "--prefill: wanted URL and a bootstrap port or none, got 'http://a:1 x'",
    "--prefill http://a:1 0": "--prefill: wanted URL and a bootstrap port or none",
    "--prefill http://a:1 1 2": "--prefill: wanted URL and a bootstrap port or none",
    "--prefill ftp://a:1": "--prefill: wanted a worker URL",
    "--decode a": "--decode: wanted a worker URL",
    "--prefill http://a:1 --decode http://a:1": "http://a:1 is named twice",
    "--prefill http://169.254.169.254": "--prefill and --decode: worker http://169.254.169.254 is at 169.254.",
    "--mini-lb": "--mini-lb: wanted --pd-disaggregation, --prefill and --decode with it",
}


@pytest.mark.parametrize(("line", "wrong"), WRONG.items())
def test_a_line_that_cannot_work_is_told_so(line: str, wrong: str) -> None:
    with pytest.raises(SettingsError) as refused:
        build(["--pd-disaggregation", *line.split()])
    assert wrong in str(refused.value)


IDLE = {
    "--pd-disaggregation --session-affinity strict": "--session-affinity has no effect: with"
    " --pd-disaggregation, auto stands for cache_aware and least_inflight",
    "--pd-disaggregation --prefill-policy random --kv-events": "--kv-events has no effect: it is for policy"
    " auto or cache_aware",
    "--prefill http://a:1": "--prefill has no effect: it is for --pd-disaggregation",
    "--decode http://a:1": "--decode has no effect: it is for --pd-disaggregation",
    "--prefill-policy bucket": "--prefill-policy has no effect: it is for --pd-disaggregation",
    "--decode-policy random": "--decode-policy has no effect: it is for --pd-disaggregation",
    "--pd-disaggregation --worker-urls http://a:1": "--worker-urls has no effect on generations: with"
    " --pd-disaggregation, generations go to the workers of --prefill and --decode",
}


@pytest.mark.parametrize(("line", "told"), IDLE.items())
def test_flags_without_effect_are_told(line: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(line.split())
    assert caplog.messages == [told]


def test_mini_lb_alone_warns_of_no_other_flag(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(SettingsError, match="--mini-lb: wanted"):
        build(["--mini-lb"])
    assert caplog.messages == []


def test_the_flags_of_a_policy_count_for_either_half(caplog: pytest.LogCaptureFixture) -> None:
    line = "--pd-disaggregation --prefill-policy cache_aware --cache-threshold 0.5 --decode-policy manual"
    with caplog.at_level(logging.WARNING):
        router, _ = build([*line.split(), "--max-idle-secs", "60"])
    assert caplog.messages == []
    policies = [plugin for _, plugin in router_plugins(router) if isinstance(plugin, PairPolicies)]
    kinds = {kind: type(policy).__name__ for kind, policy in policies[0].policies.items()}
    assert kinds == {"regular": "Auto", "prefill": "CacheAware", "decode": "Manual"}


@pytest.mark.parametrize("flag", ["--load tokens", "--cache-threshold 0.5"])
def test_flags_of_what_auto_stands_for_in_pairs_have_an_effect(
    flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        build(["--pd-disaggregation", *flag.split()])
    assert caplog.messages == []


def test_mini_lb_overrides_all_policies_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    line = "--pd-disaggregation --mini-lb --prefill http://a:1 --decode http://b:1"
    overridden = {"--policy": "round_robin", "--prefill-policy": "bucket", "--decode-policy": "manual"}
    with caplog.at_level(logging.WARNING):
        router, _ = build([*line.split(), *(word for pair in overridden.items() for word in pair)])
    why = "has no effect: with --mini-lb, all policies are random"
    assert caplog.messages == [f"{flag} {why}" for flag in overridden]
    (policies,) = [plugin for _, plugin in router_plugins(router) if isinstance(plugin, PairPolicies)]
    assert {type(policy).__name__ for policy in policies.policies.values()} == {"RandomChoice"}


def router_plugins(router: Any) -> list[tuple[str, object]]:
    """The plugins whose ``select_worker`` a router calls."""
    return [(name, function.__self__) for name, function in router.hooks._select_worker]


async def test_without_the_flag_requests_take_the_way_they_took_before(start: Start) -> None:
    async with start() as running:
        router = running.router
        assert router.pool.missing == "worker"
        hooks = (*router.hooks.pre_request, *router.hooks.sender, *router.hooks.post_response)
        assert "pd" not in [name for name, _ in hooks]
        assert orjson.loads((await running.client.get("/workers")).content)["total"] == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_while_both_are_silent_leaves_nothing_behind(
    start: Start, streams: bool
) -> None:
    """With n above 1 no name ends it: the connections are closed, which engines notice."""
    prefill, decode = StandIn("prefill", rest=HANG), StandIn("decode", rest=HANG)
    async with between(start, prefill, decode) as running:
        body = {"text": "a", "stream": streams, "sampling_params": {"n": 2}}
        with anyio.move_on_after(0.3):
            await running.client.post("/generate", json=body)
        await until(lambda: not running.router.proxy.busy_connections)
        assert not any(worker.load for worker in running.router.pool)
    assert len(prefill.generations) == len(decode.generations) == 1


async def test_a_pair_that_a_plugin_forbids_is_not_made(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbids:
        @hookimpl
        async def pre_request(self, exchange: Exchange) -> None:
            exchange.worker_filter = lambda worker: worker.worker_type == "prefill"

    module = types.ModuleType("forbids")
    monkeypatch.setattr(module, "make_plugin", lambda options: Forbids(), raising=False)
    monkeypatch.setitem(sys.modules, "forbids", module)
    flags = ("--middleware-paths", "forbids", "--disable-retries")
    async with between(start, *pair(), flags=flags) as running:
        answer = await running.client.post("/generate", json={"text": "a"})
        assert answer.status_code == 503
        said_so = "no ready decode worker is eligible for this request's model or filter: http://"
        assert answer.json()["error"]["message"].startswith(said_so)
