"""examples/openai_agent, run as its README says: the router with a script, and the agent in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys

import anyio
import pytest

from deadlines import HANG_S
from routers import Start
from wheels import ROOT

pytest.importorskip("openai", reason="the SDK of OpenAI is not installed")

EXAMPLE = ROOT / "examples" / "openai_agent"


@pytest.mark.anyio
async def test_the_agent_prints_an_exact_sample_of_all_its_turns(start: Start) -> None:
    engine = ("--plugin", "engine", "--engine-script", str(EXAMPLE / "answers.jsonl"))
    async with start(*engine, "--plugin", "radix_cache", "--plugin", "openai") as running:
        with anyio.fail_after(HANG_S):
            done = await anyio.run_process(
                [sys.executable, str(EXAMPLE / "agent.py"), running.url],
                check=False,
                stderr=subprocess.STDOUT,
            )
        printed = done.stdout.decode()
        assert done.returncode == 0, printed
        (worker,) = (await running.client.get("/workers")).json()["workers"]
        entries = (await running.client.get(f"{worker['url']}/journal")).json()["entries"]
    assert printed.startswith(
        'where_am_i({}) -> Oslo\nweather({"city": "Oslo"}) -> Oslo: rain all day\n'
        "Yes, take one: it rains in Oslo all day.\n\n"
    )
    last = entries[-1]
    told = re.search(r"exact: True, (\d+) tokens, (\d+) sampled", printed)
    assert told is not None
    assert int(told[1]) == len(last["input_ids"]) + len(last["output_ids"])
    assert int(told[2]) == sum(len(entry["output_ids"]) for entry in entries)
    sampled = re.findall(r"^loss mask 1: tokens (.*)$", printed, re.MULTILINE)
    assert sampled == [str(entry["output_ids"]) for entry in entries]
    assert len(entries) == 3
