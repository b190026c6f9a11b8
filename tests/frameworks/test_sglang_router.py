"""Trainers start slime-router as they start the SGLang gateway, from an environment with the wheels of both."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from deadlines import HANG_S
from ports import free_port
from slime_engine.app import make_app
from slime_engine.model import load_model
from slime_engine.settings import Settings
from slime_http.serving import serving
from wheels import ROOT, build_wheel

pytestmark = pytest.mark.anyio

#: slime's and miles' way: each router in a daemon process, forked by the one and spawned by the other.
TRAINER = """
import argparse, logging, multiprocessing, sys
from sglang_router.launch_router import RouterArgs

def run_router(args):
    from sglang_router.launch_router import launch_router
    launch_router(args)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", action="append", type=int)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    parser.set_defaults(router_log_level="warn", router_balance_abs_threshold=10)
    args = parser.parse_args()
    for port, method in zip(args.port, ("fork", "spawn"), strict=True):
        router_args = RouterArgs.from_cli_args(args, use_router_prefix=True)
        router_args.host, router_args.port, router_args.prometheus_port = "127.0.0.1", port, 0
        router_args.request_timeout_secs = 14400
        router_args.disable_circuit_breaker = router_args.disable_health_check = True
        context = multiprocessing.get_context(method)
        process = context.Process(target=run_router, args=(router_args,), daemon=True)
        process.start()
    sys.stdin.read()  # trains until it is told to end, and its daemons with it
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has both wheels; what they depend on is this environment's."""
    wheels = [
        build_wheel(source, tmp_path_factory.mktemp("wheel"))
        for source in (ROOT, ROOT / "shims" / "sglang_router")
    ]
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target"]
    subprocess.run([*pip, packages, *wheels], check=True, capture_output=True, timeout=120)
    return place / "bin" / "python"


def surroundings(**more: str) -> dict[str, str]:
    """The environment of a process that sees no source of this repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


@contextmanager
def started(command: list[Any], log: Path, cwd: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all that it starts; none of them is left."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=surroundings(**more),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    model = load_model()
    async with serving(make_app(Settings(), lambda: model), grace_s=0.1) as url:
        yield url


@asynccontextmanager
async def router_at(port: int, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the router at ``port``, once it serves."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
        serves = False
        with anyio.move_on_after(60):
            while not serves:
                try:
                    serves = (await client.get("/liveness")).is_success
                except httpx.ConnectError:
                    await anyio.sleep(0.05)
        assert serves, said_in(log)
        yield client


def said_in(log: Path) -> str:
    return log.read_text()


async def generated(client: httpx.AsyncClient, text: str) -> str:
    payload = {"text": text, "sampling_params": {"max_new_tokens": 5}}
    answer = await client.post("/generate", json=payload)
    assert answer.status_code == 200, answer.text
    response: str = answer.json()["text"]
    assert response
    return text + response


async def journal(url: str) -> list[dict[str, Any]]:
    """Return the journal of what the engine consumed and sampled."""
    async with httpx.AsyncClient(trust_env=False) as client:
        entries: list[dict[str, Any]] = (await client.get(f"{url}/journal")).json()["entries"]
        return entries


async def test_a_trainer_starts_a_router_for_each_of_its_models(
    python: Path, tmp_path: Path, checkpoint: str
) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    log = tmp_path / "log"
    ports = [free_port(), free_port()]
    command = [python, "trainer.py", *(word for port in ports for word in ("--port", str(port)))]
    plugins = {"SLIME_ROUTER_PLUGIN": "[radix_cache, r3]", "SLIME_ROUTER_HF_CHECKPOINT": checkpoint}
    async with engine() as first, engine() as second:
        with started(command, log, tmp_path, **plugins) as process:
            for url, port in zip((first, second), ports, strict=True):
                async with router_at(port, log) as client:
                    registered = await client.post("/workers", json={"url": url, "worker_type": "regular"})
                    assert registered.status_code == 202, registered.text
                    text = await generated(client, f"It was port {port}. ")
                    found = (await client.post("/retrieve_from_text", json={"text": text})).json()
                (entry,) = await journal(url)
                assert found["exact"] is True
                assert found["tokens"] == entry["input_ids"] + entry["output_ids"]
            assert process.stdin is not None
            process.stdin.close()
            with anyio.fail_after(HANG_S):
                assert await anyio.to_thread.run_sync(process.wait) == 0, said_in(log)
    said = said_in(log)
    assert "INFO" not in said  # --router-log-level, also where the trainer has log handlers of its own
    assert "Traceback" not in said


async def test_sglang_router_is_a_command_too(python: Path, tmp_path: Path) -> None:
    """As rllm and the gateway's docs have it."""
    log = tmp_path / "log"
    port = free_port()
    async with engine() as url:
        command = [python, "-m", "sglang_router.launch_router", "--worker-urls", url, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--policy", "cache_aware", "--log-level", "warn"]
        with started(command, log, tmp_path) as process:
            async with router_at(port, log) as client:
                assert (await client.get("/workers")).json()["total"] == 1
                await generated(client, "Once upon a time")
            assert len(await journal(url)) == 1
            process.send_signal(signal.SIGTERM)
            with anyio.fail_after(HANG_S):
                assert await anyio.to_thread.run_sync(process.wait) == 0, said_in(log)


def test_installed_wheels_run(python: Path, tmp_path: Path) -> None:
    code = "import sglang_router, router_core; print(sglang_router.__file__, router_core.__file__)"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=surroundings(), capture_output=True, text=True, check=True
    )
    places = [Path(word) for word in done.stdout.split()]
    assert len(places) == 2
    assert all(place.is_relative_to(python.parent.parent) for place in places)


def test_importing_the_arguments_imports_no_router(python: Path, tmp_path: Path) -> None:
    """Each process of a trainer does."""
    code = "import sys, sglang_router.launch_router; print(*{'router_core', 'httpx'} & set(sys.modules))"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=surroundings(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


def test_the_wheel_needs_slime_router_and_brings_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(ROOT / "shims" / "sglang_router", tmp_path)) as wheel:
        names = wheel.namelist()
        (metadata,) = [wheel.read(name).decode() for name in names if name.endswith("/METADATA")]
    assert "Requires-Dist: slime-router>=" in metadata
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"sglang_router"}
    assert "sglang_router/py.typed" in names
