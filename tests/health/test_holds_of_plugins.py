"""Each plugin holds and releases only its own; all learn when a worker has the weights to serve.

========================================= ==================== ====================================================
hold                                      owner                ends when
========================================= ==================== ====================================================
a probe fails                             health               probes succeed again
other weights than the fleet's            weights              a probe, or an update, finds the fleet's weights
an update was refused, or not received    control weights      the same
a control call failed                     control              the worker takes the call; then ``control weights``
the worker was stale before a restart     state                as for ``weights``; ``control`` if a call had failed
========================================= ==================== ====================================================
"""

from __future__ import annotations

from pathlib import Path

import pytest

from control.steered import RARE_PROBES, Steered, steering
from health.patient import Changes, until
from holding import stale
from own_time import OWN_TIME_UVLOOP, Backend
from plugged import routing
from router_core import Worker
from slime_control import Control
from slime_control import Settings as ControlSettings
from slime_health import Health, Settings
from slime_http.serving import serving
from slime_sglang.facts import described
from slime_state import State
from slime_testing import Running

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Backend:
    """As it serves. asyncio's own loop loses a connection that comes in the moment in which a server closes."""
    return OWN_TIME_UVLOOP


DISK = "/update_weights_from_disk"
QUICK = Settings(interval_s=0.02, timeout_s=1)
REFUSED = (400, b'{"message": "busy"}')
FAILED = (500, b"")
SILENT = (404, b"")


def holds(worker: Worker) -> dict[str, str]:
    """The holds of ``worker``, as ``GET /workers`` shows them."""
    shown: dict[str, str] = described(worker)["holds"]
    return shown


async def update(running: Running, version: str) -> int:
    body = {"model_path": "/m", "weight_version": version}
    return (await running.client.post(DISK, json=body)).status_code


async def test_update_that_a_worker_takes_ends_the_holds_of_all_plugins() -> None:
    good, other = Steered("7"), Steered("7")
    async with steering(good, other, beside={"health": Health(RARE_PROBES)}) as running:
        worker = running.router.pool.find(other.url)
        other.answers = {DISK: REFUSED, "/model_info": SILENT, "/get_model_info": SILENT}
        stale(running.router.pool, worker, "its weights are at version '6', the fleet's at '7'")
        running.router.pool.hold(worker, "mine", "a plugin of somebody else", "stale")
        assert await update(running, "8") == 207
        assert holds(worker) == {
            "weights": "its weights are at version '6', the fleet's at '7'",
            "mine": "a plugin of somebody else",
            "control weights": f"{DISK} failed: it answered 400",
        }
        del other.answers[DISK]
        assert await update(running, "9") == 200
        assert holds(worker) == {"mine": "a plugin of somebody else"}


async def test_probe_that_finds_the_weights_ends_the_holds_of_all_plugins() -> None:
    good, other, changes = Steered("7"), Steered("7"), Changes()
    beside = {"health": Health(QUICK), "changes": changes}
    async with steering(good, other, beside=beside) as running:
        worker = running.router.pool.find(other.url)
        other.answers = {DISK: REFUSED}
        assert await update(running, "8") == 207
        assert holds(worker)["control weights"] == f"{DISK} failed: it answered 400"
        await until(lambda: worker.said_version == "7")
        other.version = "8"  # by a call past the router
        await until(lambda: worker.is_healthy)
        assert holds(worker) == {}
        assert (worker.weight_version, changes.seen) == ("8", ["stale", "readmitted"])


async def test_quarantined_worker_is_readmitted_without_becoming_stale() -> None:
    good, other, changes = Steered("7"), Steered("7"), Changes()
    beside = {"health": Health(QUICK), "changes": changes}
    async with steering(good, other, beside=beside) as running:
        worker = running.router.pool.find(other.url)
        other.answers = {DISK: REFUSED, "/health": (503, b"")}
        await until(lambda: worker.state == "quarantined")
        assert await update(running, "8") == 207
        assert {"health", "control weights"} <= holds(worker).keys()
        other.version = "8"
        del other.answers["/health"]
        await until(lambda: worker.is_healthy)
        assert changes.seen == ["quarantined", "readmitted"]


@pytest.mark.parametrize("owner", ["health", "control"])
async def test_confirmed_weights_end_no_hold_of_a_worker_that_missed_a_call(owner: str) -> None:
    async with steering(Steered("7"), Steered("7"), beside={"health": Health(RARE_PROBES)}) as running:
        _, worker = running.router.pool
        running.router.pool.hold(worker, "control weights", "it was not reached", "stale")
        running.router.pool.hold(worker, owner, "a test", "quarantined" if owner == "health" else "stale")
        running.router.hooks.weights_confirmed(worker)
        kept = {"control weights": "it was not reached"} if owner == "control" else {}
        assert holds(worker) == {owner: "a test"} | kept


async def test_failed_update_is_made_up_for_by_one_that_the_worker_takes() -> None:
    """Health believes no version before that."""
    good, bad = Steered("7"), Steered("7")
    async with steering(good, bad, beside={"health": Health(QUICK)}) as running:
        worker = running.router.pool.find(bad.url)
        bad.answers[DISK] = FAILED
        assert await update(running, "8") == 207
        bad.version = "8"
        await until(lambda: worker.said_version == "8")
        assert holds(worker) == {"control": f"{DISK} failed: it answered 500"}
        del bad.answers[DISK]
        assert await update(running, "9") == 200
        assert holds(worker) == {}
        await until(lambda: worker.said_version == "9")
        assert (worker.state, worker.weight_version, holds(worker)) == ("ready", "9", {})


@pytest.mark.parametrize("how", ["update", "probe"])
@pytest.mark.parametrize("answer", [REFUSED, FAILED], ids=["refused", "failed"])
async def test_restart_keeps_a_stale_worker_held_until_it_has_the_weights(
    how: str, answer: tuple[int, bytes], tmp_path: Path
) -> None:
    """A refused update left its weights as they were. After a failed update, only an update brings the worker back."""

    def plugins(checks: Settings) -> dict[str, object]:
        control = Control(ControlSettings(10, 10))
        return {"health": Health(checks), "control": control, "state": State(tmp_path)}

    off, other = Settings(disabled=True), Steered("7")
    async with serving(Steered("7").app) as good_url, serving(other.app) as url:
        async with routing(plugins(off)) as running:
            for each in (good_url, url):
                await running.router.add_worker(each)
            other.answers[DISK] = answer
            assert await update(running, "8") == 207
        del other.answers[DISK]
        async with routing(plugins(off if how == "update" else QUICK)) as running:
            worker = running.router.pool.find(url)
            owner = "state" if answer == REFUSED else "control"
            assert holds(worker)[owner] == f"{DISK} failed: it answered {answer[0]}"
            if how == "probe":
                other.version = "8"
                await until(lambda: worker.said_version == "8")
                await until(lambda: list(holds(worker)) == ([] if owner == "state" else ["control"]))
            if holds(worker):
                assert await update(running, "9") == 200
            assert (worker.state, holds(worker)) == ("ready", {})
