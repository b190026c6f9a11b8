"""``--dp-aware``: each data-parallel rank is a choice of its own, and its server is one worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
import pytest

from holding import add_ready, quarantine, ready, stale
from pd.halves import PROMPT, disaggregated
from plugged import until
from router_core import SettingsError, Worker
from router_core.cli import build
from router_core.pool import WorkerPool
from routers import Start
from slime_engine.app import make_app
from slime_engine.engine import EngineHost
from slime_engine.model import NgramModel
from slime_engine.settings import Settings
from slime_http.serving import serving
from slime_sglang.facts import dp_rank
from slime_sglang.ranks import ranks_told, split
from slime_testing import FakeEngine, Running

pytestmark = pytest.mark.anyio

_POOL = WorkerPool(lambda worker, change: None)

SAMPLING = {"max_new_tokens": 3, "ignore_eos": True}


class RankServer(FakeEngine):
    """An engine that tells how many ranks it has; an ``old`` one only at the old path."""

    def __init__(self, ranks: Any = 2, old: bool = False) -> None:
        super().__init__()
        self.rest = lambda _: {"text": "x", "meta_info": {}}
        self.other = lambda _: (200, b'{"success":true}')
        self.answers["/model_info"] = 200, b'{"weight_version":"1"}'
        self.set_ranks(ranks)
        if old:
            self.answers["/server_info"] = 404, b""
        self.url = ""

    def set_ranks(self, ranks: Any) -> None:
        for path in ("/server_info", "/get_server_info"):
            self.answers[path] = 200, orjson.dumps({"dp_size": ranks})

    @property
    def told(self) -> list[int]:
        """The ranks of its generations, under both names."""
        ranks = [body["routed_dp_rank"] for body in self.asked]
        assert ranks == [body["data_parallel_rank"] for body in self.asked]
        return ranks

    @property
    def paths(self) -> list[str]:
        """The paths of its other requests."""
        return [call.path for call in self.calls]

    @property
    def rank_headers(self) -> list[list[str]]:
        """The values of the header of the rank: those of each generation, then those of each other request."""
        headers = [*self.headers, *(call.headers for call in self.calls)]
        return [one.getlist("x-data-parallel-rank") for one in headers]


@asynccontextmanager
async def before(
    start: Start, *servers: RankServer, flags: tuple[str, ...] = ("--dp-aware",)
) -> AsyncIterator[Running]:
    """A router with ``servers``. At the end no lease is left."""
    quiet = ("--disable-health-check", "--policy", "round_robin")  # who is quarantined for a test stays so
    async with start(*quiet, *flags) as running, anyio.create_task_group() as tasks:
        over = anyio.Event()

        async def serve(server: RankServer, ready: anyio.Event) -> None:
            async with serving(server.app) as server.url:
                ready.set()
                await over.wait()

        for server in servers:
            ready = anyio.Event()
            tasks.start_soon(serve, server, ready)
            await ready.wait()
            await running.router.add_worker(server.url)
        yield running
        await until(lambda: not any(worker.load for worker in running.router.pool))
        over.set()


async def shown(running: Running) -> dict[str, dict[str, Any]]:
    told = (await running.client.get("/workers")).json()
    assert told["total"] == len(told["workers"]) == sum(told["stats"].values())
    return {worker["url"]: worker for worker in told["workers"]}


# choices


@pytest.mark.parametrize("old", [False, True])
async def test_each_rank_is_a_choice_and_is_told_to_its_server(start: Start, old: bool) -> None:
    server, single = RankServer(3, old=old), RankServer(1)
    async with before(start, server, single) as running:
        assert set(await shown(running)) == {*(f"{server.url}@{rank}" for rank in range(3)), single.url}
        for _ in range(8):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
        assert Counter(server.told) == {0: 2, 1: 2, 2: 2}
        assert [sorted(body) for body in single.asked] == [["rid", "text"]] * 2


async def test_each_rank_has_its_own_load_and_the_server_that_of_all(start: Start) -> None:
    server = RankServer(2)
    server.delay = anyio.Event()
    async with before(start, server) as running, anyio.create_task_group() as tasks:

        async def ask() -> None:
            await running.client.post("/generate", json={"text": "a"})

        for _ in range(3):
            tasks.start_soon(ask)
        await until(lambda: len(server.asked) == 3)
        loads = {url: worker["load"] for url, worker in (await shown(running)).items()}
        assert sorted(loads.values()) == [1, 2]
        (worker,) = running.router.pool
        assert worker.load == 3
        assert (await running.client.get(f"/workers/{worker.id}")).json()["load"] == 3
        server.delay.set()


async def test_a_session_keeps_its_rank(start: Start) -> None:
    server = RankServer(4)
    async with before(start, server) as running:
        for _ in range(5):
            await running.client.post("/generate", json={"text": "a"}, headers={"X-Session-Id": "s"})
    assert len(set(server.told)) == 1


async def test_a_rank_that_a_client_names_is_replaced(start: Start) -> None:
    server = RankServer(2)
    async with before(start, server) as running:
        for _ in range(2):
            await running.client.post(
                "/generate", json={"text": ["a"], "routed_dp_rank": 9, "data_parallel_rank": 9}
            )
    assert sorted(server.told) == [0, 1]


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank"])
async def test_a_rank_that_a_client_names_is_taken_out_where_there_is_only_one(
    start: Start, name: str
) -> None:
    server = RankServer(1)
    async with before(start, server) as running:
        deeper = {"custom": {name: 1}}
        for fields in ({name: 0}, {name: None, **deeper}, deeper):
            await running.client.post("/generate", json={"rid": "a", "text": "a", **fields})
    alone = {"rid": "a", "text": "a"}
    assert server.asked == [alone, {**alone, **deeper}, {**alone, **deeper}]


async def test_other_requests_are_not_touched(start: Start) -> None:
    server = RankServer(2)
    async with before(start, server) as running:
        await running.client.post("/tokenize", content=b'{"prompt": "a"}')
    assert [call.body for call in server.calls if call.path == "/tokenize"] == [b'{"prompt": "a"}']


async def test_without_the_flag_nobody_is_asked_and_nothing_is_added(start: Start) -> None:
    server = RankServer(2)
    async with before(start, server, flags=()) as running:
        assert set(await shown(running)) == {server.url}
        await running.client.post("/generate", json={"text": "a"})
    assert sorted(server.asked[0]) == ["rid", "text"]
    assert not {"/server_info", "/get_server_info"} & set(server.paths)


# without asking


async def test_each_server_has_as_many_ranks_as_the_flag_says(start: Start) -> None:
    server = RankServer(2)
    async with before(start, server, flags=("--intra-node-data-parallel-size", "4")) as running:
        assert set(await shown(running)) == {f"{server.url}@{rank}" for rank in range(4)}
        for _ in range(8):
            body = {"text": "a", "routed_dp_rank": 9}
            headers = {"X-Data-Parallel-Rank": "9"}
            assert (await running.client.post("/generate", json=body, headers=headers)).status_code == 200
        assert Counter(server.told) == {0: 2, 1: 2, 2: 2, 3: 2}
        assert [one for one in server.rank_headers if one] == [[str(rank)] for rank in server.told]
        pool = running.router.pool
        quarantine(pool, pool.find(server.url), "a test")
        ready(pool, pool.find(server.url))
        await running.router.add_worker(server.url)
        assert len(await shown(running)) == 4
    assert not {"/server_info", "/get_server_info"} & {*server.paths}


async def test_a_rank_is_told_in_a_header_whatever_the_path(start: Start) -> None:
    server = RankServer(1)
    async with before(start, server, flags=("--dp-aware", "--intra-node-data-parallel-size", "2")) as running:
        for _ in range(2):
            await running.client.post("/inference/v1/generate", json={"token_ids": [1]})
        told = [
            call.headers.getlist("x-data-parallel-rank")
            for call in server.calls
            if call.path.startswith("/inference")
        ]
        assert sorted(told) == [["0"], ["1"]]


async def test_clients_header_does_not_choose_the_rank(start: Start) -> None:
    server = RankServer(2)
    headers = {"X-Data-Parallel-Rank": "1"}
    async with before(start, server) as running:
        for path in ("/generate", "/v1/chat/completions"):
            await running.client.post(path, json={"text": "a"}, headers=headers)
        assert set(map(tuple, server.rank_headers)) == {()}
        await running.client.post("/elsewhere", json={}, headers=headers)
        assert server.rank_headers[-1] == ["1"]


async def test_single_rank_is_no_choice(start: Start) -> None:
    server = RankServer(2)
    async with before(start, server, flags=("--intra-node-data-parallel-size", "1")) as running:
        await running.client.post("/generate", json={"text": "a"})
    assert set(map(tuple, server.rank_headers)) == {()}
    with pytest.raises(SettingsError, match="--intra-node-data-parallel-size: wanted a number above 0"):
        build(["--intra-node-data-parallel-size", "0"])


# the server


async def test_failure_at_one_rank_is_retried_at_another_server(start: Start) -> None:
    failing, well = RankServer(4), RankServer(2)
    failing.rest = lambda _: (503, b"")
    flags = ("--dp-aware", "--retry-initial-backoff-ms", "1")
    async with before(start, failing, well, flags=flags) as running:
        for _ in range(6):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
    assert len(well.asked) == 6
    assert len(failing.asked) <= 6


async def test_a_breaker_is_of_the_server(start: Start) -> None:
    failing, well = RankServer(2), RankServer(1)
    failing.rest = lambda _: (500, b"")
    flags = ("--dp-aware", "--cb-failure-threshold", "2", "--retry-initial-backoff-ms", "1")
    async with before(start, failing, well, flags=flags) as running:
        for _ in range(6):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
        assert len(failing.asked) == 2
        about = await shown(running)
        assert [about[f"{failing.url}@{rank}"]["is_healthy"] for rank in range(2)] == [False, False]
        assert about[f"{failing.url}@1"]["reason"] == "circuit breaker open"


async def test_control_calls_go_to_the_server_once(start: Start) -> None:
    server, other = RankServer(4), RankServer(2)
    async with before(start, server, other) as running:
        said = (await running.client.post("/flush_cache")).json()
        assert sorted(said["workers"]) == sorted([server.url, other.url])
        update = {"model_path": "/w", "weight_version": "2"}
        assert (await running.client.post("/update_weights_from_disk", json=update)).status_code == 200
        for one in (server, other):
            assert Counter(one.paths)["/flush_cache"] == Counter(one.paths)["/update_weights_from_disk"] == 1
        assert {worker["weight_version"] for worker in (await shown(running)).values()} == {"2"}


async def test_probes_go_to_the_server_once(start: Start) -> None:
    server = RankServer(8)
    flags = ("--dp-aware", "--health-check-interval-secs", "0.3")
    async with start(*flags) as running, serving(server.app) as url:
        await running.router.add_worker(url)
        await anyio.sleep(1.0)
        assert 1 <= Counter(server.paths)["/health"] <= 6


async def test_a_server_that_is_not_well_offers_no_rank(start: Start) -> None:
    server, other = RankServer(2), RankServer(2)
    async with before(start, server, other) as running:
        quarantine(running.router.pool, running.router.pool.find(server.url), "a test")
        for _ in range(4):
            await running.client.post("/generate", json={"text": "a"})
        assert sorted(other.told) == [0, 0, 1, 1]
        assert {worker["state"] for url, worker in (await shown(running)).items() if server.url in url} == {
            "quarantined"
        }


# coming and going


async def test_a_server_leaves_with_all_its_ranks_whatever_names_it(start: Start) -> None:
    servers = [RankServer(2) for _ in range(4)]
    async with before(start, *servers) as running:
        client, pool = running.client, running.router.pool
        about = await shown(running)
        told = await client.delete(f"/workers/{about[f'{servers[0].url}@1']['id']}")
        assert told.status_code == 202
        await client.delete(f"/workers/{pool.find(servers[1].url).id}")
        await client.post("/remove_worker", params={"url": servers[2].url})
        assert set(await shown(running)) == {f"{servers[3].url}@{rank}" for rank in range(2)}
        listed = (await client.get("/list_workers")).json()
        assert listed == {"urls": [servers[3].url]}


async def test_a_rank_is_shown_by_its_id(start: Start) -> None:
    server = RankServer(2)
    async with before(start, server) as running:
        for url, worker in (await shown(running)).items():
            assert (await running.client.get(f"/workers/{worker['id']}")).json() == worker
            assert url == worker["url"]


async def test_a_server_drains_until_all_its_ranks_are_done(start: Start) -> None:
    server = RankServer(2)
    server.delay = anyio.Event()
    async with before(start, server) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: running.client.post("/generate", json={"text": "a"}))
        await until(lambda: len(server.asked) == 1)
        rank = next(iter((await shown(running)).values()))["id"]
        await running.client.delete(f"/workers/{rank}", params={"drain": "true"})
        await anyio.sleep(0.2)
        assert {worker["state"] for worker in (await shown(running)).values()} == {"draining"}
        server.delay.set()
        await until(lambda: len(running.router.pool) == 0)


async def test_a_server_that_comes_back_with_other_ranks_offers_those(start: Start) -> None:
    server = RankServer(2)
    async with before(start, server) as running:
        server.set_ranks(3)
        await running.router.add_worker(server.url)
        assert len(await shown(running)) == 3
        ids = {worker["id"] for worker in (await shown(running)).values()}
        await running.router.add_worker(server.url)  # as many: they stay who they are
        assert {worker["id"] for worker in (await shown(running)).values()} == ids
        server.set_ranks(1)
        await running.router.add_worker(server.url)
        assert set(await shown(running)) == {server.url}


async def test_a_server_that_comes_back_as_another_process_is_counted_again(start: Start) -> None:
    server = RankServer(2)
    async with before(start, server) as running:
        pool = running.router.pool
        quarantine(pool, pool.find(server.url), "a test")
        server.set_ranks(4)
        ready(pool, pool.find(server.url))
        await until(lambda: len(pool.routable()) == 4)
        quarantine(pool, pool.find(server.url), "a test")
        server.answers["/server_info"] = 500, b""
        ready(pool, pool.find(server.url))  # it does not say: it stays as it was known
        await until(lambda: server.paths.count("/server_info") == 3)
        await anyio.sleep(0.05)
        assert len(pool.routable()) == 4


async def test_a_server_that_does_not_say_its_ranks_yet_is_waited_for(start: Start) -> None:
    server = RankServer(2)
    server.answers["/server_info"] = 500, b""
    flags = ("--dp-aware", "--worker-startup-check-interval", "0.05")
    async with before(start, server, flags=flags) as running:
        assert [worker["state"] for worker in (await shown(running)).values()] == ["joining"]
        server.set_ranks(2)
        await until(lambda: running.router.pool.healthy == 1)
        assert len(await shown(running)) == 2


@pytest.mark.parametrize("told", [None, 0, -1, "4", 1.5, True, 1 << 40, [2]])
async def test_nonsense_about_ranks_is_one(start: Start, told: Any) -> None:
    server = RankServer(told)
    async with before(start, server) as running:
        assert set(await shown(running)) == {server.url}


@pytest.mark.parametrize("body", [b"", b"{", b"[8]", b'"8"', b"{}"])
def test_an_answer_that_says_nothing_of_ranks_says_one(body: bytes) -> None:
    assert ranks_told(body) == 1


def test_a_pool_counts_servers_and_finds_ranks() -> None:
    pool = WorkerPool(lambda worker, change: None)
    server = add_ready(pool, Worker("http://127.0.0.1:1"))
    split(pool, server, 3)
    assert len(pool) == 1
    assert list(pool) == [server]
    ranks = pool.routable()
    assert [rank.name for rank in ranks] == [f"http://127.0.0.1:1@{number}" for number in range(3)]
    assert all(rank in pool and rank.server is server for rank in ranks)
    assert all(pool.find(rank.id) is pool.find(rank.name) is rank for rank in ranks)
    stale(pool, ranks[1], "a test")
    assert server.state == "stale"
    pool.remove(ranks[2])
    assert len(pool) == 0
    assert ranks[0] not in pool


def test_ranks_are_called_the_same_after_a_restart() -> None:
    one, two = (Worker("http://127.0.0.1:1", id="known") for _ in range(2))
    split(_POOL, one, 3)
    split(_POOL, two, 3)
    assert [target.id for target in one.targets] == [target.id for target in two.targets]


def test_a_server_that_gets_more_ranks_keeps_the_count_of_those_it_has() -> None:
    server = Worker("http://127.0.0.1:1")
    split(_POOL, server, 2)
    one, two = server.targets
    two.in_flight += 1
    split(_POOL, server, 4)
    assert server.targets[:2] == (one, two)
    assert len({target.id for target in server.targets}) == 4
    assert [dp_rank(target) for target in server.targets] == [0, 1, 2, 3]
    assert server.load == 1
    split(_POOL, server, 1)
    assert server.choices == (server,)


# engines


@asynccontextmanager
async def engine(model: NgramModel, **settings: Any) -> AsyncIterator[tuple[str, EngineHost]]:
    app = make_app(Settings(**settings), lambda: model)
    async with serving(app) as url:
        yield url, app.state.host


async def test_an_engine_uses_the_rank_that_it_is_told(start: Start, model: NgramModel) -> None:
    async with (
        engine(model, dp_size=4) as (url, host),
        start("--dp-aware", "--policy", "round_robin") as running,
    ):
        await running.router.add_worker(url)
        answers = []
        for number in range(8):
            body = {"text": PROMPT, "rid": f"r{number}", "sampling_params": SAMPLING}
            answers.append((await running.client.post("/generate", json=body)).json())
        entries = [entry.as_json() for entry in host.engine.journal.entries()]
        assert [entry["dp_rank"] for entry in entries] == [
            answer["meta_info"]["dp_rank"] for answer in answers
        ]
        assert Counter(entry["dp_rank"] for entry in entries) == dict.fromkeys(range(4), 2)


async def test_pairs_are_of_ranks_and_the_decode_engine_finds_the_one_that_read(
    start: Start, model: NgramModel
) -> None:
    flags = ("--dp-aware", "--policy", "round_robin")
    async with disaggregated(start, model, *flags, dp_size=3) as pairs:
        for number in range(9):
            output = await pairs.generate(rid=f"r{number}", sampling_params=SAMPLING)
            assert len(output["output_ids"]) == 3
        batch = await pairs.generate(text=[PROMPT, "Why?"], sampling_params=SAMPLING)
        assert len(batch) == 2
        for half in pairs.halves:
            ranks = Counter(entry["dp_rank"] for entry in half.journal() if entry["rid"].startswith("r"))
            assert ranks == dict.fromkeys(range(3), 3)
        stats = (await pairs.running.client.get("/workers")).json()["stats"]
        assert stats == {"regular_count": 0, "prefill_count": 3, "decode_count": 3}
        assert pairs.loads() == [0, 0]


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank"])
async def test_a_rank_that_a_client_names_reaches_no_half_with_a_single_one(
    start: Start, model: NgramModel, name: str
) -> None:
    async with disaggregated(start, model, "--dp-aware", prefill={"dp_size": 2}) as pairs:
        output = await pairs.generate(sampling_params=SAMPLING, **{name: 1})
        assert len(output["output_ids"]) == 3


async def test_the_decode_engine_refuses_another_rank_than_the_one_that_read(
    start: Start, model: NgramModel
) -> None:
    """So that the test above proves something."""
    async with disaggregated(start, model, dp_size=2) as pairs, anyio.create_task_group() as tasks:
        prefill, decode = pairs.halves
        told = {
            "text": PROMPT,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.port,
            "bootstrap_room": 7,
        }

        async def read() -> None:
            body = {**told, "rid": "r", "routed_dp_rank": 1}
            assert (await pairs.running.client.post(f"{prefill.url}/generate", json=body)).status_code == 200

        tasks.start_soon(read)
        for rank, status in ((0, 500), (1, 200)):
            body = {**told, "disagg_prefill_dp_rank": rank, "sampling_params": SAMPLING}
            answer = await pairs.running.client.post(f"{decode.url}/generate", json=body)
            assert answer.status_code == status
