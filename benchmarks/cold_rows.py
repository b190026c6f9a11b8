"""Answers with the routed experts of long samples, from a router's memory and from its store.

    python -m benchmarks.cold_rows [--only npz] [--rounds N] [--directory DIR]

An answer is npz, msgpack, JSON or ``samples``. ``samples`` is the answer of ``/sessions/{id}/samples``, with int32
rows. The other forms are answers of ``/retrieve_from_text``.

A sample has about 80,000 tokens, of which 1,024 are sampled. A row has the experts of one token: 8 in each of 94
layers, a byte each. All rows take 60 MB. There are three routers. ``memory`` has no store. ``store's memory`` has a
store whose memory holds all blocks. ``SSD`` has a store whose memory has room for 4 MiB only, so blocks are read from a
file on the disk. When a download from ``SSD`` begins, the page cache has no page of this file. ``grown``: the peak of
the router's resident memory (``VmHWM``) less the memory before. The client reads as fast as it can and drops what it
gets. From each router, one answer in npz and one ``samples`` are compared with the rows that the worker sent. The
router has one core, the worker and the client the other.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio
import httpx
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load

from benchmarks.options import Options, add_directory, flags, read
from benchmarks.peers import Running, router, started
from benchmarks.processes import LOAD_CORE, leave_cleanly, quick_worker, require
from benchmarks.report import EXACT, Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer

__all__ = ["main"]

_LAYERS, _TOP_K, _EXPERTS = 94, 8, 128
_TOKENS, _SAMPLED, _TEXTS = 79_787, 1_024, 4
_SETTLE_S = 120.0
#: The bytes of the store's memory, by the name of the router; 0: there is no store.
_PEERS = {"memory": 0, "store's memory": 256 << 20, "SSD": 4 << 20}
_TINY_PEERS = {"SSD": 4 << 20}
_NPZ, _SAMPLES = "npz", "samples"
#: The forms, each with the ``Accept`` of its request.
_FORMS = {
    _NPZ: "application/octet-stream",
    "msgpack": "application/x-msgpack",
    "JSON": "application/json",
    _SAMPLES: "*/*",
}
_SESSION = "rollout"
_AT_ONCE = (1, 8)
_COLUMNS = (
    Column("mb", "MB", 1),
    Column("ms", "ms"),
    Column("before_mb", "MB before"),
    Column("grown_mb", "grown MB", 1),
    Column("cpu_ms", "ms CPU"),
    Column(EXACT, "exact %"),
)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn: its request, its answer, its text, and its experts."""

    request: bytes
    answer: bytes
    text: str
    experts: npt.NDArray[np.uint8]


def _turn(options: Options, directory: Path) -> _Turn:
    tokenizer = save_tokenizer(directory / "tokenizer", options.vocabulary)
    samples = Samples(tokenizer)
    sampled = options.pick(_SAMPLED, tiny=64)
    tokens = options.pick(_TOKENS, tiny=2_048) - sampled
    prompt = " ".join(
        samples.words(tokens // _TEXTS) for _ in range(_TEXTS)
    )  # the prose is too short for one text of this length
    prompt_tokens = len(tokenizer.encode(prompt).ids)
    answer = samples.answer(sampled)
    shape = (prompt_tokens + sampled - 1, _LAYERS, _TOP_K)
    experts = np.random.default_rng(1).integers(_EXPERTS, size=shape, dtype=np.uint8)
    payload = answer.payload("", prompt_tokens)
    payload["meta_info"]["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    asks = {"return_routed_experts": True, "session_id": _SESSION}
    request = json.loads(request_body(prompt, sampled)) | asks
    return _Turn(json.dumps(request).encode(), json.dumps(payload).encode(), prompt + answer.text, experts)


def _flags(memory_bytes: int, disk: Path) -> Sequence[str]:
    """Return a router's flags for a store in ``disk``, which gets all experts; no flags if ``memory_bytes`` is 0."""
    if not memory_bytes:
        return ()
    store = ("--plugin", "tiered_store", "--store-memory-bytes", str(memory_bytes))
    return (*store, "--r3-max-bytes", "1", "--store-ssd", str(disk), "--store-ssd-bytes", str(256 << 20))


async def _measure_peer(
    report: Report, peer: str, options: Options, turn: _Turn, worker: str, directory: Path
) -> None:
    disk, memory_bytes = directory / "disk", _PEERS[peer]
    plugins = ("--no-default-plugins", "--plugin", "radix_cache", "--plugin", "r3")
    shape = (
        "--plugin",
        "sessions",
        "--r3-shape",
        str(_LAYERS),
        str(_TOP_K),
        *options.tokenizer(directory / "tokenizer"),
    )
    proxy_of = router(peer, *plugins, *shape, *_flags(memory_bytes, disk))
    async with AsyncExitStack() as stack:
        (proxy,) = await started(
            stack, [proxy_of], worker, directory, turn.request, lambda reply: reply.content == turn.answer
        )
        async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=120) as client:
            with anyio.fail_after(_SETTLE_S):
                while memory_bytes and await _in_memory(client):  # noqa: ASYNC110  # no event reports it
                    await anyio.sleep(0.01)
            exact = await _is_exact(client, turn)
            for name in _FORMS:
                for at_once in options.pick(_AT_ONCE, tiny=(1,)):
                    scenario = f"{turn.experts.nbytes / 1e6:.0f} MB as {name}, {at_once} at once"
                    if options.wants(scenario):
                        for _ in range(options.rounds):
                            if peer == "SSD":
                                _forget_pages(disk / "blocks")
                            figures = await _download(client, proxy, turn, name, at_once)
                            report.add(scenario, peer, **figures, **{EXACT: 100.0 * exact})


async def _in_memory(client: httpx.AsyncClient) -> int:
    rows = (await client.get("/cache_stats")).json()["token_rows"]["routed_experts"]
    return int(rows["bytes"])


def _question(client: httpx.AsyncClient, turn: _Turn, form: str) -> httpx.Request:
    """Return the request for the experts of ``turn`` in ``form``."""
    if form == _SAMPLES:
        return client.build_request("POST", f"/sessions/{_SESSION}/samples")
    question = {"text": turn.text, "session_id": _SESSION, "return_routed_experts": True}
    return client.build_request(
        "POST", "/retrieve_from_text", json=question, headers={"accept": _FORMS[form]}
    )


async def _is_exact(client: httpx.AsyncClient, turn: _Turn) -> bool:
    body = (await client.send(_question(client, turn, _NPZ))).raise_for_status().content
    with np.load(BytesIO(body)) as file:
        if not np.array_equal(file["routed_experts"], turn.experts):
            return False
    body = (await client.send(_question(client, turn, _SAMPLES))).raise_for_status().content
    return np.array_equal(load(body)["rollout_routed_experts.0"], turn.experts)


async def _download(
    client: httpx.AsyncClient, proxy: Running, turn: _Turn, form: str, at_once: int
) -> dict[str, float]:
    assert proxy.child is not None  # narrowing: ``proxy`` is a router
    times_s: list[float] = []
    sizes: list[int] = []

    async def one() -> None:
        begun, size = perf_counter(), 0
        reply = await client.send(_question(client, turn, form), stream=True)
        try:
            reply.raise_for_status()
            async for piece in reply.aiter_raw():
                size += len(piece)
        finally:
            await reply.aclose()
        times_s.append(perf_counter() - begun)
        sizes.append(size)

    proxy.child.reset_peak_memory()
    before, _ = proxy.child.memory_bytes()
    cpu_s = proxy.cpu_s()
    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(one)
    _, peak = proxy.child.memory_bytes()
    return {
        "mb": sizes[0] / 1e6,
        "ms": median(times_s) * 1e3,
        "before_mb": before / 1e6,
        "grown_mb": (peak - before) / 1e6,
        "cpu_ms": (proxy.cpu_s() - cpu_s) * 1e3,
    }


def _forget_pages(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


async def _measure_all(report: Report, options: Options, parent: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as name:
        directory = Path(name)
        turn = _turn(options, directory)
        with quick_worker(directory, turn.answer) as worker:
            for number, peer in enumerate(options.pick(_PEERS, tiny=_TINY_PEERS)):
                place = directory / str(number)
                place.mkdir()
                (place / "tokenizer").symlink_to(directory / "tokenizer")
                await _measure_peer(report, peer, options, turn, worker, place)
    for scenario in report.samples:
        report.show(scenario, _COLUMNS)


def main() -> int:
    parser = flags("Routed experts of long samples, from a router's memory and from its store.")
    add_directory(parser)
    given = parser.parse_args()
    options, report = read(given), Report()
    os.sched_setaffinity(0, {LOAD_CORE})
    asyncio.run(_measure_all(report, options, given.directory))
    return report.finish(options)


if __name__ == "__main__":
    require("setpriv", "taskset")
    leave_cleanly()
    sys.exit(main())
