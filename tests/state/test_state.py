"""Workers and weights are as clients were told, again after a kill."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from control.steered import Steered
from holding import drain, is_torn, quarantine
from plugged import until
from router_core.cli import build
from router_core.errors import StartupError
from routers import Start
from slime_http.serving import serving
from slime_testing import Running


@asynccontextmanager
async def engines(*some: Steered) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(engine.app)) for engine in some]


def left_by_a_kill(directory: Path) -> Path:
    """The directory as another process would find it now."""
    copy = directory.with_name(directory.name + "+")
    shutil.copytree(directory, copy)
    return copy


def flags(directory: Path, *more: str) -> list[str]:
    return ["--plugin", "state", "--state-dir", str(directory), "--health-check-interval-secs", "600", *more]


async def workers(running: Running) -> dict[str, dict[str, Any]]:
    shown = (await running.client.get("/workers")).json()["workers"]
    return {worker["url"]: worker for worker in shown}


@pytest.mark.anyio
async def test_registered_workers_are_restored_with_ids_and_facts(start: Start, tmp_path: Path) -> None:
    async with engines(Steered("0")) as [url]:
        async with start(*flags(tmp_path / "state")) as running:
            registered = await running.client.post(
                "/workers",
                json={"url": url, "model_id": "m", "labels": {"rack": "7"}, "api_key": "secret"},
            )
            decode = {"url": "http://127.0.0.1:9", "worker_type": "prefill", "bootstrap_port": 8998}
            await running.client.post("/workers", json=decode)
            await until(lambda: b'"state": "ready"' in (tmp_path / "state" / "workers.json").read_bytes())
            copy = left_by_a_kill(tmp_path / "state")
            before = await workers(running)
        async with start(*flags(copy)) as running:
            after = await workers(running)
            assert after[url] == before[url]
            assert after[url]["state"] == "ready", "it was looked at before the first request"
            other = after["http://127.0.0.1:9"]
            assert (other["worker_type"], other["bootstrap_port"]) == ("prefill", 8998)
            assert other["state"] == "joining", "it has not answered yet"
            assert (await running.client.get(registered.json()["location"])).json()["url"] == url
            assert running.router.pool.find(url).api_key == "secret"
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200


@pytest.mark.anyio
async def test_a_model_that_a_worker_told_is_told_again(start: Start, tmp_path: Path) -> None:
    engine = Steered("0")
    engine.answers["/model_info"] = (200, b'{"weight_version":"0","model_path":"/models/a"}')
    async with engines(engine) as [url]:
        async with start(*flags(tmp_path / "state")) as running:
            await running.client.post("/workers", json={"url": url})
            await until(lambda: b'"state": "ready"' in (tmp_path / "state" / "workers.json").read_bytes())
            copy = left_by_a_kill(tmp_path / "state")
            assert (await workers(running))[url]["model_id"] == "/models/a"
        engine.answers["/model_info"] = (200, b'{"weight_version":"0","model_path":"/models/b"}')
        async with start(*flags(copy)) as running:
            assert (await workers(running))[url]["model_id"] == "/models/b"


@pytest.mark.anyio
async def test_a_worker_that_was_in_use_and_does_not_answer_is_quarantined(
    start: Start, tmp_path: Path
) -> None:
    async with engines(Steered("0")) as [url], start(*flags(tmp_path / "state")) as running:
        await running.client.post("/workers", json={"url": url})
        await until(lambda: b'"state": "ready"' in (tmp_path / "state" / "workers.json").read_bytes())
        copy = left_by_a_kill(tmp_path / "state")
    async with start(*flags(copy)) as running:
        shown = (await workers(running))[url]
        assert shown["state"] == "quarantined"
        assert shown["reason"].startswith("it was not ready when the router started: ")
        assert (await running.client.post("/generate", json={"text": "a"})).status_code == 503


@pytest.mark.anyio
async def test_removed_and_drained_workers_do_not_come_back(start: Start, tmp_path: Path) -> None:
    async with engines(Steered("0"), Steered("0"), Steered("0")) as [stays, removed, drains]:
        async with start(*flags(tmp_path / "state")) as running:
            for url in (stays, removed, drains):
                await running.client.post("/add_worker", json={"url": url})
            await running.client.post("/remove_worker", json={"url": removed})
            drain(running.router.pool, running.router.pool.find(drains))
            copy = left_by_a_kill(tmp_path / "state")
        async with start(*flags(copy)) as running:
            assert list(await workers(running)) == [stays]


@pytest.mark.anyio
async def test_workers_that_may_not_register_any_more_are_left_out(start: Start, tmp_path: Path) -> None:
    async with engines(Steered("0"), Steered("0")) as [stays, other]:
        async with start(*flags(tmp_path / "state")) as running:
            for url in (stays, other):
                await running.client.post("/add_worker", json={"url": url})
            copy = left_by_a_kill(tmp_path / "state")
        async with start(*flags(copy, "--allow-worker", stays)) as running:
            assert list(await workers(running)) == [stays]


@pytest.mark.anyio
async def test_workers_of_the_command_line_are_registered_at_each_start(start: Start, tmp_path: Path) -> None:
    async with engines(Steered("0")) as [url]:
        async with start(*flags(tmp_path / "state", "--worker-urls", url)) as running:
            await running.client.post("/remove_worker", json={"url": url})
            copy = left_by_a_kill(tmp_path / "state")
        async with start(*flags(copy, "--worker-urls", url)) as running:
            assert list(await workers(running)) == [url]


async def half_updated(start: Start, directory: Path, good: Steered, bad: Steered, *urls: str) -> Path:
    """A kill after an update that ``bad`` failed: its weights are not to be believed."""
    async with start(*flags(directory)) as running:
        for url in urls:
            await running.client.post("/add_worker", json={"url": url})
        bad.answers["/update_weights_from_disk"] = (400, b'{"success":false,"message":"no such file"}')
        update = {"model_path": "m", "weight_version": "7"}
        answer = await running.client.post("/update_weights_from_disk", json=update)
        assert answer.status_code == 207
        del bad.answers["/update_weights_from_disk"]
        bad.version = "7"  # it says so; nobody knows
        assert (good.version, running.router.weights.current) == ("7", "7")
        return left_by_a_kill(directory)


@pytest.mark.anyio
@pytest.mark.parametrize("named", [False, True])
async def test_stale_worker_stays_stale_when_the_command_line_names_it(
    start: Start, tmp_path: Path, named: bool
) -> None:
    good, bad = Steered("0"), Steered("0")
    async with engines(good, bad) as urls:
        copy = await half_updated(start, tmp_path / "state", good, bad, *urls)
        async with start(*flags(copy, *(("--worker-urls", *urls) if named else ()))) as running:
            shown = await workers(running)
            assert [shown[url]["state"] for url in urls] == ["ready", "stale"]
            assert "update_weights_from_disk" in shown[urls[1]]["reason"]
            assert is_torn(running.router.pool.find(urls[1]))
            assert (await running.client.get("/weight_version")).json()["weight_version"] == "7"
            # Registering it is a fresh start, and an update that it takes as well.
            await running.client.post("/add_worker", json={"url": urls[1]})
            assert (await workers(running))[urls[1]]["state"] == "ready"


@pytest.mark.anyio
async def test_fleet_restores_its_version_and_order_without_a_new_announcement(
    start: Start, tmp_path: Path
) -> None:
    engine = Steered("base")
    async with engines(engine) as [url]:
        async with start(*flags(tmp_path / "state")) as running:
            await running.client.post("/add_worker", json={"url": url})
            for version in ("b", "a"):
                engine.version = version
                await running.client.post("/weight_version", json={"weight_version": version})
            copy = left_by_a_kill(tmp_path / "state")
        async with start(*flags(copy)) as running:
            weights = running.router.weights
            assert (weights.current, weights.ordered) == ("a", ("base", "b", "a"))
            assert await running.router.announce_weights("a", "again") is None
            assert (await workers(running))[url]["weight_version"] == "a"


@pytest.mark.anyio
async def test_a_worker_that_lost_its_weights_meanwhile_is_stale(start: Start, tmp_path: Path) -> None:
    engine = Steered("7")
    async with engines(engine) as [url]:
        async with start(*flags(tmp_path / "state")) as running:
            await running.client.post("/add_worker", json={"url": url})
            await until(
                lambda: b'"weight_version": "7"' in (tmp_path / "state" / "workers.json").read_bytes()
            )
            copy = left_by_a_kill(tmp_path / "state")
        engine.version = "default"  # it was restarted, too
        async with start(*flags(copy)) as running:
            shown = (await workers(running))[url]
            assert (shown["state"], shown["reason"]) == (
                "stale",
                "it came back with weights 'default', not '7'",
            )


@pytest.mark.anyio
async def test_fleet_that_moved_while_the_router_was_down_is_used(start: Start, tmp_path: Path) -> None:
    """A trainer updates engines directly; a new run may begin with lower numbers."""
    both = [Steered("7"), Steered("7")]
    async with engines(*both) as urls:
        async with start(*flags(tmp_path / "state")) as running:
            for url in urls:
                await running.client.post("/add_worker", json={"url": url})
            copy = left_by_a_kill(tmp_path / "state")
        for engine in both:
            engine.version = "1"
        async with start(*flags(copy)) as running:
            await until(lambda: running.router.weights.current == "1")
            await until(lambda: all(worker.state == "ready" for worker in running.router.pool))


@pytest.mark.anyio
async def test_worker_that_fell_behind_while_the_router_was_down_is_stale(
    start: Start, tmp_path: Path
) -> None:
    both = [Steered("7"), Steered("7")]
    async with engines(*both) as urls:
        async with start(*flags(tmp_path / "state")) as running:
            for url in urls:
                await running.client.post("/add_worker", json={"url": url})
            copy = left_by_a_kill(tmp_path / "state")
        both[0].version = "6"
        async with start(*flags(copy)) as running:
            shown = await workers(running)
            assert [shown[url]["state"] for url in urls] == ["stale", "ready"]
            assert running.router.weights.current == "7"


@pytest.mark.anyio
async def test_a_quarantined_worker_waits_for_a_probe(start: Start, tmp_path: Path) -> None:
    async with engines(Steered("0")) as [url]:
        async with start(*flags(tmp_path / "state")) as running:
            await running.client.post("/add_worker", json={"url": url})
            quarantine(running.router.pool, running.router.pool.find(url), "it was slow")
            copy = left_by_a_kill(tmp_path / "state")
        async with start(*flags(copy)) as running:
            shown = (await workers(running))[url]
            assert (shown["state"], shown["reason"]) == ("quarantined", "it was slow")


@pytest.mark.anyio
async def test_a_change_is_on_the_disk_when_its_answer_comes(start: Start, tmp_path: Path) -> None:
    def kept() -> dict[str, Any]:
        content: dict[str, Any] = orjson.loads((tmp_path / "state" / "workers.json").read_bytes())
        return content

    engine = Steered("1")
    async with engines(engine) as [url], start(*flags(tmp_path / "state")) as running:
        assert kept()["workers"] == []
        await running.client.post("/add_worker", json={"url": url})
        assert [worker["url"] for worker in kept()["workers"]] == [url]
        await running.client.post(
            "/update_weights_from_disk", json={"model_path": "m", "weight_version": "2"}
        )
        assert (kept()["weight_version"], kept()["workers"][0]["weight_version"]) == ("2", "2")
        await running.client.post("/remove_worker", json={"url": url})
        assert kept()["workers"] == []


@pytest.mark.anyio
async def test_a_directory_belongs_to_one_router(start: Start, tmp_path: Path) -> None:
    async with start(*flags(tmp_path / "state")) as running:
        with pytest.raises(StartupError, match=r"another router keeps its state in .*; stop it, or give"):
            build(flags(tmp_path / "state"))
        assert (await running.client.get("/health")).status_code == 200
    async with start(*flags(tmp_path / "state")):
        pass


@pytest.mark.anyio
async def test_only_the_owner_may_read_it(start: Start, tmp_path: Path) -> None:
    async with start(*flags(tmp_path / "state")) as running:
        await running.client.post("/workers", json={"url": "http://127.0.0.1:9", "api_key": "secret"})
        directory = tmp_path / "state"
        assert [path.stat().st_mode & 0o077 for path in (directory, *directory.iterdir())] == [0, 0, 0]


@pytest.mark.anyio
async def test_a_disk_that_is_full_fails_what_is_promised_by_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(*flags(tmp_path / "state")) as running:

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        answer = await running.client.post("/weight_version", json={"weight_version": "3"})
        assert answer.json()["error"]["code"] == "PLUGIN_FAILED"
        monkeypatch.undo()
        await running.client.post("/weight_version", json={"weight_version": "4"})
    assert orjson.loads((tmp_path / "state" / "workers.json").read_bytes())["weight_version"] == "4"


@pytest.mark.anyio
async def test_state_is_saved_when_the_disk_has_room_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(*flags(tmp_path / "state")) as running:
        await running.client.post("/workers", json={"url": "http://127.0.0.1:9"})

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            running.router.pool.find("http://127.0.0.1:9").weight_version = "8"
            await until(lambda: any("cannot be saved" in record.message for record in caplog.records))
        await until(lambda: b'"weight_version": "8"' in (tmp_path / "state" / "workers.json").read_bytes())
        assert (await running.client.post("/generate", json={"text": "a"})).status_code == 503  # it serves on


WELL: dict[str, Any] = {
    "id": "1", "url": "http://10.0.0.1:1", "worker_type": "regular", "bootstrap_port": None, "model_id": None,
    "labels": {}, "api_key": None, "weight_version": "7", "state": "ready", "reason": None, "torn": False,
}  # fmt: skip
FILE: dict[str, Any] = {
    "format": "slime-router state 1", "weight_version": "7", "weight_versions": ["7"], "workers": [WELL],
}  # fmt: skip
FOREIGN: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "half of it": lambda: orjson.dumps(FILE)[:-9],
    "a list": lambda: b"[]",
    "another format": lambda: orjson.dumps({**FILE, "format": "slime-router state 2"}),
    "no workers": lambda: orjson.dumps({**FILE, "workers": None}),
    "a version that was never seen": lambda: orjson.dumps({**FILE, "weight_version": "8"}),
    "versions that are numbers": lambda: orjson.dumps({**FILE, "weight_version": None, "weight_versions": [7]}),
    "a worker that is none": lambda: orjson.dumps({**FILE, "workers": ["http://10.0.0.1:1"]}),
    "a worker with less": lambda: orjson.dumps({**FILE, "workers": [{"url": WELL["url"]}]}),
    **{
        f"a worker with {name} {value!r}": lambda name=name, value=value: orjson.dumps(  # type: ignore[misc]
            {**FILE, "workers": [{**WELL, name: value}]}
        )
        for name, value in {
            "url": "file:///etc/passwd", "id": 1, "worker_type": "gpu", "bootstrap_port": "1", "labels": [],
            "api_key": 5, "state": "happy", "torn": None, "reason": 1, "weight_version": 7,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file_ends_the_start_and_is_left_alone(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "workers.json"
    file.write_bytes(orjson.dumps(FILE))
    content = FOREIGN[kind]()
    file.write_bytes(content)
    for _ in range(2):  # the directory is free again
        with pytest.raises(StartupError, match=rf"--state-dir: {file} cannot be read \(.+\); move it away"):
            build(flags(tmp_path))
    assert file.read_bytes() == content


def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="file"):
        build(flags(tmp_path / "file"))


@pytest.mark.anyio
async def test_a_version_of_the_file_that_is_well_is_taken(start: Start, tmp_path: Path) -> None:
    """The table above is only as good as the file that it spoils."""
    (tmp_path / "workers.json").write_bytes(orjson.dumps(FILE))
    async with start(*flags(tmp_path)) as running:
        shown = (await workers(running))[WELL["url"]]
        assert (shown["id"], shown["weight_version"]) == ("1", "7")
