"""Halves that are processes, and a kill -9."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from pd.halves import PROMPT
from plugged import until
from routers import Start
from slime_engine.journal_file import fold

pytestmark = pytest.mark.anyio


class Process:
    """An engine that does one half; its journal outlives it."""

    def __init__(self, mode: str, journal: Path, *flags: str) -> None:
        self._journal = journal
        command = [
            sys.executable,
            "-m",
            "router_core",
            "engine",
            "--port",
            "0",
            "--disaggregation-mode",
            mode,
        ]
        self.process = subprocess.Popen(
            [*command, "--journal-file", str(journal), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    async def url(self) -> str:
        """Return its URL, once it is ready."""
        assert self.process.stdout is not None
        line = await anyio.to_thread.run_sync(self.process.stdout.readline)
        return line.decode().split()[-1]

    def entries(self) -> list[dict[str, Any]]:
        return list(fold(self._journal.read_bytes().splitlines()).values()) if self._journal.exists() else []

    def amid(self) -> list[dict[str, Any]]:
        """Return the entries that it has not finished."""
        return [entry for entry in self.entries() if entry["finish_reason"] is None]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.slow
async def test_processes_that_are_killed_cost_no_answer(start: Start, tmp_path: Path) -> None:
    with ExitStack() as ends:
        readers = [
            Process("prefill", tmp_path / f"prefill{number}", "--latency-ms", latency)
            for number, latency in enumerate(("3000", "300"))  # the first one is killed before it has read
        ]
        writers = [
            Process("decode", tmp_path / f"decode{number}", "--tokens-per-second", pace)
            for number, pace in enumerate(("40", "10"))  # and the second one before it has written
        ]
        for one in (*readers, *writers):
            ends.callback(one.kill)
        words: list[str] = []
        for reader in readers:
            url = await reader.url()
            words += ["--prefill", url, str(urlsplit(url).port)]
        for writer in writers:
            words += ["--decode", await writer.url()]
        async with start("--pd-disaggregation", *words, "--policy", "round_robin") as running:
            await until(lambda: running.router.pool.healthy == 4)
            answers: dict[str, dict[str, Any]] = {}

            async def ask(rid: str) -> None:
                sampling = {"max_new_tokens": 40, "ignore_eos": True}
                body = {"text": PROMPT, "rid": rid, "return_logprob": True, "sampling_params": sampling}
                answer = await running.client.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                answers[rid] = answer.json()

            async with anyio.create_task_group() as tasks:
                for number in range(24):
                    tasks.start_soon(ask, f"r{number}.")
                await until(lambda: len(readers[0].entries()) >= 8)
                readers[0].kill()  # while it reads
                # Its requests go to the other reader, and to the other writer than at first.
                await until(lambda: len(readers[1].entries()) == 24)
                await until(lambda: bool(writers[1].amid()))
                await anyio.sleep(0.6)
                writers[1].kill()  # while it writes
            assert not any(entry["output_ids"] for entry in readers[0].entries())
            assert any(entry["finish_reason"] is None for entry in writers[1].entries())
            written = [entry for writer in writers for entry in writer.entries()]
            for rid, answer in answers.items():
                (entry,) = [
                    one for one in written if one["rid"] == rid and one["output_ids"] == answer["output_ids"]
                ]
                assert [one[0] for one in answer["meta_info"]["output_token_logprobs"]] == entry[
                    "output_logprobs"
                ]
            assert len(answers) == 24
            await until(lambda: not any(worker.load for worker in running.router.pool))
