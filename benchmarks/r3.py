"""Answers with 64 MiB of routed experts: time and memory of a proxy that passes them on, or records them as well.

    python -m benchmarks.r3 --gateway-python gateway/bin/python

The answer is like the last turn of a long conversation: 31,745 tokens of prompt, 1,024 sampled tokens with logprobs,
and the experts of each token but the last, 8 in each of 48 layers. The client compares every byte of the answer. *one*:
five downloads, one after another. *32 at once*: the rate counts the bytes of all 32 downloads. ``grown`` is the peak of
the proxy's resident memory (``VmHWM``) less its memory before. *recorded*: the bytes that the router keeps
(``/cache_stats``) for each row of each answer. A row has the experts of one token. As int32, a row takes 1,536 bytes.
``exact`` is 100 % if the router returns the sampled tokens and the experts as the worker sent them. An answer that the
router has not recorded is an error.

The proxy has one core; the worker and the client, a process each, share the other.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio
import httpx
import numpy as np
import uvloop

from benchmarks.download import download
from benchmarks.options import Options, parse, present
from benchmarks.peers import Peer, Running, gateway, nginx_proxy, router, started
from benchmarks.processes import LOAD_CORE, PROXY_CORE, CoreClock, leave_cleanly, quick_worker, require
from benchmarks.report import EXACT, Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer

_LAYERS, _TOP_K, _EXPERTS = 48, 8, 128
_ROWS = 32_768  # 64 MiB in base64
_SAMPLED = 1_024
_ONE, _MANY = "one 64 MiB answer", "32 at once"
_LOADS = {_ONE: (1, 5), _MANY: (32, 1)}  # downloads at once, and how often
_TINY_LOADS = {_ONE: (1, 1), _MANY: (2, 1)}
_RECORDED = "recorded experts"
_RECORDING_ROUTER = "router, radix_cache + r3"
_START_DEADLINE_S = 30.0

_COLUMNS = (
    Column("ms", "ms"),
    Column("gb_per_s", "GB/s", 2, ratio=True),
    Column("cpu_ms", "ms CPU/GiB", ratio=True),
    Column("before_mb", "MB before"),
    Column("grown_mb", "grown MB", 1),
    Column("proxy_core", "proxy core %"),
    Column("load_core", "load core %"),
    Column("errors", "errors"),
)
_RECORDED_COLUMNS = (
    Column("answers", "answers"),
    Column("stored_mb", "MB stored", 1),
    Column("row_bytes", "bytes/row"),
    Column("int32_bytes", "as int32"),
    Column(EXACT, "exact %"),
)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn: its request, the whole answer, and what a router must have recorded of it."""

    request: bytes
    answer: bytes
    text: str
    sampled: Sequence[int]
    experts: str
    rows: int


async def main(options: Options) -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        turn = _turn(options, directory)
        loads = _LOADS if not options.tiny else _TINY_LOADS
        per_round = sum(at_once * times for at_once, times in loads.values())
        with quick_worker(directory, turn.answer) as url:
            await _listening(url)
            async with AsyncExitStack() as stack:
                peers = _peers(options, directory)
                proxies = await started(
                    stack, peers, url, directory, turn.request, lambda reply: reply.content == turn.answer
                )
                recording = [proxy for proxy in proxies if proxy.name == _RECORDING_ROUTER]
                for proxy in recording:
                    report.add(_RECORDED, "one answer", **await _stored(proxy, turn, answers=1))
                for round_ in range(1, options.rounds + 1):
                    for scenario, load in loads.items():
                        for target in [Running("direct", url), *proxies]:
                            report.add(scenario, target.name, **await _download(target, turn, *load))
                    print(f"round {round_} of {options.rounds} done", file=sys.stderr)
                    proxies = proxies[1:] + proxies[:1]
                for proxy in recording:
                    exact = {EXACT: await _exact_percent(proxy, turn)}
                    stored = await _stored(proxy, turn, answers=1 + options.rounds * per_round)
                    report.add(_RECORDED, "all of one prompt", **stored, **exact)
    for scenario in loads:
        report.show(scenario, _COLUMNS)
    report.show(_RECORDED, _RECORDED_COLUMNS)
    return report.finish(options)


def _peers(options: Options, directory: Path) -> Sequence[Peer]:
    recording = ("--plugin", "radix_cache", *options.tokenizer(directory / "tokenizer"))
    experts = ("--plugin", "r3", "--r3-shape", str(_LAYERS), str(_TOP_K))
    return present(
        [
            router("router, no plugins", "--no-default-plugins", tiny=False),
            router("router, r3", "--no-default-plugins", *experts, tiny=False),
            router(_RECORDING_ROUTER, "--no-default-plugins", *recording, *experts),
            gateway(options.gateway_python),
            nginx_proxy(),
        ],
        options,
    )


def _turn(options: Options, directory: Path) -> _Turn:
    tokenizer = save_tokenizer(directory / "tokenizer", options.vocabulary)
    samples = Samples(tokenizer)
    sampled = options.pick(_SAMPLED, tiny=64)
    rows = options.pick(_ROWS, tiny=256)
    prompt = samples.words(rows + 1 - sampled)
    prompt_tokens = len(tokenizer.encode(prompt).ids)
    answer = samples.answer(sampled)
    rows = prompt_tokens + sampled - 1
    ids = np.random.default_rng(1).integers(_EXPERTS, size=(rows, _LAYERS, _TOP_K), dtype="<i4")
    experts = base64.b64encode(ids.tobytes()).decode()
    payload = answer.payload("", prompt_tokens)
    del payload["meta_info"]["id"]  # the same bytes answer every request
    payload["meta_info"]["routed_experts"] = experts
    request = json.loads(request_body(prompt, sampled)) | {"return_routed_experts": True}
    return _Turn(
        json.dumps(request).encode(),
        json.dumps(payload, separators=(",", ":")).encode(),
        prompt + answer.text,
        answer.ids,
        experts,
        rows,
    )


async def _listening(url: str) -> None:
    with anyio.fail_after(_START_DEADLINE_S):
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            while True:
                try:
                    await client.get("/health")
                except httpx.TransportError:
                    await anyio.sleep(0.05)
                else:
                    return


async def _download(target: Running, turn: _Turn, at_once: int, times: int) -> dict[str, float]:
    before = peak = errors = 0
    if target.child:
        target.child.reset_peak_memory()
        before, _ = target.child.memory_bytes()
    cores, cpu_s = CoreClock(), target.cpu_s()
    times_s = []
    for _ in range(times):
        begun = perf_counter()
        downloads = (download(target.url, turn.request, turn.answer) for _ in range(at_once))
        for result in await asyncio.gather(*downloads, return_exceptions=True):
            if isinstance(result, BaseException):
                errors += 1
                print(f"{target.name}: {type(result).__name__} {result}", file=sys.stderr)
        times_s.append(perf_counter() - begun)
    cpu_s, busy = target.cpu_s() - cpu_s, cores.busy()
    if target.child:
        _, peak = target.child.memory_bytes()
    size = len(turn.answer) * at_once
    return {
        "ms": median(times_s) * 1e3,
        "gb_per_s": size / median(times_s) / 1e9,
        "cpu_ms": cpu_s / (size * times / (1 << 30)) * 1e3,
        "before_mb": before / 1e6,
        "grown_mb": (peak - before) / 1e6,
        "proxy_core": busy[PROXY_CORE] * 100,
        "load_core": busy.get(LOAD_CORE, 1.0) * 100,
        "errors": errors,
    }


async def _stored(proxy: Running, turn: _Turn, *, answers: int) -> dict[str, float]:
    """Return the size of the recorded experts, by ``/cache_stats``. ``failed`` is 0 if all ``answers`` are recorded."""
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False) as client:
        rows = (await client.get("/cache_stats")).json()["token_rows"]["routed_experts"]
    return {
        "answers": rows["turns"],
        "stored_mb": rows["bytes"] / 1e6,
        "row_bytes": rows["bytes"] / max(1, rows["turns"] * turn.rows),
        "int32_bytes": _LAYERS * _TOP_K * 4,
        "failed": sum(rows["missing"].values()) + rows["dropped"] + abs(rows["turns"] - answers),
    }


async def _exact_percent(proxy: Running, turn: _Turn) -> float:
    """Return 100 if the router returns the sampled tokens and the experts as the worker sent them, else 0."""
    question = {"text": turn.text, "return_routed_experts": True}
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60) as client:
        record = (await client.post("/retrieve_from_text", json=question)).json()
    is_right = record["exact"] and record["experts_exact"] and record["routed_experts"] == turn.experts
    is_right = is_right and record["tokens"][-len(turn.sampled) :] == turn.sampled
    is_right = is_right and record["routed_experts_shape"] == [turn.rows, _LAYERS, _TOP_K]
    return 100.0 if is_right else 0.0


if __name__ == "__main__":
    require("setpriv", "taskset")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0], rounds=3)
    os.sched_setaffinity(0, {LOAD_CORE})
    gc.disable()  # a collection here would be taken for time of the proxy
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
