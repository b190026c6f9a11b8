"""Any JSON at any route: it is answered, holds nobody else up, and leaves nothing behind.

The suite asks some hundred requests. To ask others, and more::

    SLIME_ROUTER_BODIES=5000 pytest -s tests/surface/test_any_json.py
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import orjson
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, Phase, given, settings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Answering

from router_core.cli import build
from router_core.router import Router
from slime_engine.model import load_model
from slime_http.serving import serving
from surface.any_json import AnyRequest, asked
from surface.laborious import BATCH, LABORIOUS
from surface.loop_steps import MOST, LoopSteps

# The router has a thread of its own here, and takes its jitter from ``random`` whenever it wants.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

_FEW = 60
#: Requests from one collection of garbage to the next.
_COLLECTED = 25
_BODIES = int(os.environ.get("SLIME_ROUTER_BODIES", _FEW))
_SETTINGS = settings(
    max_examples=_BODIES,
    deadline=None,
    database=None,
    derandomize=_BODIES == _FEW,  # the same ones in each run of the suite; a long one asks others
    phases=(Phase.generate,),  # a body is told in a few words as it is
    suppress_health_check=list(HealthCheck),
)
#: All that may be loaded together, in the order of an operator's command line.
_PLUGINS = ("limits", "sessions", "state", "models", "radix_cache", "openai", "r3", "policies", "retries")
#: Of a request that seems to hold the event loop up.
_TRIES = 3
#: Pauses, which are undone after each case; until then nobody waits for it.
_PAUSES = ("/pause_generation", "/release_memory_occupation")
_UNDONE = ("/continue_generation", "/resume_memory_occupation")

#: The engine's answer.
_WORD = "a"
(_TOKEN,) = load_model().tokenizer.encode(_WORD)


def _output(name: str, prompt: object) -> dict[str, Any]:
    about = {
        "id": name,
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": len(prompt) if isinstance(prompt, list) else 1,
        "completion_tokens": 1,
        "weight_version": "1",
        "output_token_logprobs": [[-0.5, _TOKEN, None]],
    }
    return {"text": _WORD, "output_ids": [_TOKEN], "meta_info": about}


def _outputs(body: dict[str, Any]) -> list[dict[str, Any]] | dict[str, Any]:
    """One token for each prompt, as the engine would name it."""
    prompts = body.get("input_ids", body.get("text"))
    rid, sampling = body.get("rid"), body.get("sampling_params")
    copies = sampling.get("n", 1) if isinstance(sampling, dict) else 1
    is_batch = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    if not is_batch and copies == 1:
        return _output(str(rid), prompts)
    each = prompts if is_batch and isinstance(prompts, list) else [prompts]
    return [_output(f"{rid}_{place}", one) for place, one in enumerate(each) for _ in range(copies)]


async def _generate(request: Request) -> Response:
    content = await request.body()
    try:
        body = orjson.loads(content)
        outputs = _outputs(body)
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return Response(b'{"error":{"message":"wanted prompts"}}', 400, media_type="application/json")
    if not body.get("stream"):
        return Response(orjson.dumps(outputs), media_type="application/json")
    events = (
        [{**one, "index": place} for place, one in enumerate(outputs)]
        if isinstance(outputs, list)
        else [outputs]
    )
    told = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events)
    return Response(told + b"data: [DONE]\n\n", media_type="text/event-stream")


async def _anything(request: Request) -> Response:
    await request.body()
    facts = b'{"success":true,"message":"ok","is_generation":true,"weight_version":"1","model_path":"m"}'
    return Response(facts, media_type="application/json")


_ENGINE = Starlette(
    routes=[
        Answering("/generate", _generate, methods=["POST", "PUT"]),
        Answering("/{path:path}", _anything, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
    ]
)


class ServedApart:
    """A router before an engine, each with an event loop of its own, and the steps that the router's takes."""

    def __init__(
        self, router: Router, client: httpx.Client, portal: BlockingPortal, steps: LoopSteps
    ) -> None:
        self.router = router
        self.client = client
        self._asked = 0
        self._steps = steps
        self._portal = portal
        self._tasks = portal.call(self._count_tasks)

    async def _count_tasks(self) -> int:
        return len(asyncio.all_tasks())

    def ask(self, asked: AnyRequest) -> httpx.Response:
        self._asked += 1
        if self._asked % _COLLECTED == 0:
            gc.collect()
        route = asked.route
        return self.client.request(
            route.method,
            route.path,
            content=asked.body.data,
            headers=[("content-type", "application/json"), *asked.headers],
        )

    def steps_taken(self) -> tuple[int, int, str]:
        """See :class:`LoopSteps`."""
        return self._portal.call(self._steps.taken)

    def left_behind(self) -> dict[str, object]:
        """Return what is left of the requests so far, five seconds later."""
        return self._portal.call(self._left_behind)

    async def _left_behind(self) -> dict[str, object]:
        left: dict[str, object] = {}
        with anyio.move_on_after(5):
            while left := self._found():  # noqa: ASYNC110  # nothing says so
                await anyio.sleep(0.005)
        return left

    def _found(self) -> dict[str, object]:
        router = self.router
        kept = router.components.get("trajectories")._trajectories
        control = router.components.get("pending_aborts")
        held = {plugin: getattr(hook, "__self__", None) for plugin, hook in router.hooks.pre_request}
        counts = {
            "leases": sum(worker.in_flight for worker in router.pool),
            "exchanges": len(list(router.clients.exchanges)),
            "running turns": len(kept._sessions._running),
            "pinned segments": kept.segments - _length(kept._ages.oldest),
            "names": len(control.under_way._by_rid),
            "at the gate": control.gate.waiting,
            "aborts": len(control._abort_sender._under_way),
            "slots": held["limits"].slots.held + held["limits"].slots.waiting,  # type: ignore[union-attr]
            "watches": len(held["radix_cache"]._interruptions._watches),  # type: ignore[union-attr]
            "streams": len(held["radix_cache"]._streams._running),  # type: ignore[union-attr]
            "tasks": len(asyncio.all_tasks()) - self._tasks,
        }
        return {what: count for what, count in counts.items() if count}


def _length(segment: Any) -> int:
    number = 0
    while segment is not None:
        number, segment = number + 1, segment.newer
    return number


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApart]:
    directory = tmp_path_factory.mktemp("router")
    load_model().tokenizer.save(directory / "checkpoint")
    plugins = [part for name in _PLUGINS for part in ("--plugin", name)]
    flags = [
        *("--hf-checkpoint", str(directory / "checkpoint"), "--state-dir", str(directory / "state")),
        *("--trajectory-log", str(directory / "log"), "--max-concurrent-requests", "64"),
        *("--pause-queue-timeout-s", "0.1", "--disable-health-check", "--max-sequences-per-request", "256"),
    ]
    steps = LoopSteps()
    router, app = build([*plugins, *flags])

    @asynccontextmanager
    async def counted(url: str) -> AsyncIterator[str]:
        async with serving(app) as own:
            await router.add_worker(url)
            with steps.counting():
                yield own

    with (
        start_blocking_portal("asyncio") as engines,
        engines.wrap_async_context_manager(serving(_ENGINE)) as engine,
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(counted(engine)) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
    ):
        client.get("/health")
        served = ServedApart(router, client, portal, steps)
        served.steps_taken()
        yield served


def hold_up(served: ServedApart, asked: AnyRequest) -> str | None:
    """Ask, check all but the event loop's stalls, and return what has held it up, if anything has.

    The processor time of a long call depends on what else the machine does: it counts if it is as long again.
    """
    for _ in range(_TRIES):
        held_up, is_sure = _hold_up_once(served, asked)
        if held_up is None or is_sure:
            break
    return held_up


def _hold_up_once(served: ServedApart, asked: AnyRequest) -> tuple[str | None, bool]:
    """And whether calls alone were too many, however long they took."""
    answer = served.ask(asked)
    most, calls, where = served.steps_taken()
    if asked.route.path in _PAUSES:
        for path in _UNDONE:
            assert served.client.post(path, json={}).status_code == 200
    assert answer.status_code < 500, answer.text[:1000]
    assert served.left_behind() == {}
    assert served.client.get("/health").json()["healthy_workers"] == 1
    if most <= MOST:
        return None, True
    return f"{most:,} steps in one turn of the loop; the first {MOST:,} end at\n{where}", calls > MOST


@pytest.mark.timeout(600 if _BODIES <= _FEW else 0)
@_SETTINGS
@given(asked())
def test_any_json_is_answered_and_leaves_nothing_behind(served: ServedApart, asked: AnyRequest) -> None:
    held_up = hold_up(served, asked)
    assert held_up is None, held_up


@pytest.mark.parametrize("name", LABORIOUS)
def test_a_laborious_body_holds_nobody_up(served: ServedApart, name: str) -> None:
    held_up = hold_up(served, LABORIOUS[name])
    assert held_up is None, held_up


def test_many_answers_to_one_prompt_hold_nobody_up(served: ServedApart) -> None:
    """As many as a group has, of one prompt after the other in a batch, and the same batch again."""
    held_up = [hold_up(served, BATCH) for _ in range(4)]
    assert held_up == [None] * 4, held_up[-1]
