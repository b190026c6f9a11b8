"""``--journal-file``: the journal on disk says what ``GET /journal`` says, and outlives the engine."""

from __future__ import annotations

import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import httpx
import orjson
import pytest

from deadlines import HANG_S
from engine.served import CHAT, served
from slime_engine.journal_file import JournalFile, fold
from slime_engine.model import NgramModel
from slime_engine.settings import Settings
from slime_http.serving import bind, url_of


@pytest.mark.anyio
async def test_the_file_says_what_the_journal_says(tmp_path: Path, model: NgramModel) -> None:
    path = tmp_path / "journal"
    settings = Settings(journal_file=str(path))
    async with served(lambda: model, settings) as engine:
        await engine.generate(text=[CHAT, "Once"], rid=["one", "two"], sampling_params={"max_new_tokens": 9})
        await engine.stream(text=CHAT, rid="three", sampling_params={"max_new_tokens": 9})
        await engine.post("/pause_generation", mode="in_place")
        with pytest.raises(httpx.ReadTimeout):
            await engine.client.post("/generate", json={"text": CHAT, "rid": "four"}, timeout=0.3)
        await engine.until(lambda scheduler: not scheduler.waiting)
        told = await engine.journal()
    written = list(fold(path.read_bytes().splitlines()).values())
    assert written == [{key: entry[key] for key in written[0]} for entry in told]
    assert [entry["aborted"] for entry in written] == [False, False, False, True]


@pytest.mark.anyio
async def test_versions_of_a_stream_are_those_of_its_tokens(tmp_path: Path, model: NgramModel) -> None:
    path = tmp_path / "journal"
    async with served(lambda: model, Settings(journal_file=str(path))) as engine:
        endless = {"max_new_tokens": 20_000, "ignore_eos": True}
        updated = False
        # Closed, or it would be generated to its end for as long as nobody collects it.
        async with aclosing(engine.events("/generate", text=CHAT, sampling_params=endless)) as events:
            async for event in events:
                if event["meta_info"]["completion_tokens"] >= 5 and not updated:  # one may tell of many
                    updated = True
                    await engine.post("/pause_generation", mode="in_place")
                    await engine.post("/update_weights_from_disk", model_path="m", weight_version="2")
                    await engine.post("/continue_generation")
                elif event["meta_info"]["weight_version"] == "2":
                    break
        await engine.until(lambda scheduler: not scheduler.running)
        (told,) = await engine.journal()
    (written,) = fold(path.read_bytes().splitlines()).values()
    assert set(written["output_versions"]) == {"default", "2"}
    assert written["output_versions"] == told["output_versions"]


def test_answers_of_a_killed_engine_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with bind("127.0.0.1", 0) as sock:
        url = url_of(sock)
    command = [sys.executable, "-m", "router_core", "engine", "--port", url.rpartition(":")[2]]
    for seen in (3, 30):  # the second engine goes on where the first one was killed
        body = {
            "text": CHAT,
            "stream": True,
            "rid": f"seen{seen}",
            "sampling_params": {"max_new_tokens": 9999, "ignore_eos": True},
        }
        last = b""
        with subprocess.Popen([*command, "--journal-file", str(path)], stdout=subprocess.PIPE) as engine:
            try:
                assert engine.stdout is not None
                assert engine.stdout.readline().startswith(b"engine ready")
                with httpx.stream(
                    "POST", f"{url}/generate", json=body, trust_env=False, timeout=HANG_S
                ) as answer:
                    for number, line in enumerate(answer.iter_lines()):
                        if line.startswith("data: {"):
                            last = line[6:].encode()
                        if number == 2 * seen:
                            engine.kill()
                            break
            finally:
                engine.kill()
        entries = {entry["rid"]: entry for entry in fold(path.read_bytes().splitlines()).values()}
        told = orjson.loads(last)["output_ids"]
        assert len(told) >= seen
        assert entries[f"seen{seen}"]["output_ids"][: len(told)] == told
        assert entries[f"seen{seen}"]["finish_reason"] is None
    assert entries["seen3"]["output_ids"]


def test_half_a_line_of_a_killed_engine_does_not_spoil_the_next_ones(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    line = b'{"entry":"a.0","rid":"one","input_ids":[1],"temperature":1.0}'
    path.write_bytes(line + b'\n{"entry":"a.0","output_ids":[1,')
    with JournalFile(str(path)):
        pass
    with path.open("ab") as file:
        file.write(line.replace(b"a.0", b"b.0") + b"\n")
    entries = fold(path.read_bytes().splitlines())
    assert [(entry["rid"], entry["output_ids"]) for entry in entries.values()] == [("one", []), ("one", [])]


def test_a_path_without_a_directory_is_a_bad_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="journal_file"):
        Settings(journal_file=str(tmp_path / "no" / "journal"))
