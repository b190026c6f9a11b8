"""Commands and answers of pages that a beginner follows, run as they stand, and those of the README."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from deadlines import HANG_S
from routers import Start
from slime_testing import Running

pytest.importorskip("openai", reason="the SDK of OpenAI is not installed")
pytest.importorskip("agents", reason="openai-agents is not installed")

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent.parent
#: Pages, and how many answers each shows.
PAGES = {"first-ten-minutes.md": 8, "how-to/openai-agents.md": 2, "how-to/moe.md": 2}
README = (ROOT / "README.md").read_text()
_ADDRESS = "http://127.0.0.1:30000"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CURL = re.compile(r"^ *(curl .*)$", re.MULTILINE)


def flags(text: str) -> list[str]:
    """The words after the page's first ``slime-router`` with an engine inside."""
    (line, *_) = re.findall(r"^ *slime-router (--plugin engine .*)$", text, re.MULTILINE)
    return shlex.split(line, comments=True)


def write_script(page: str, folder: Path) -> None:
    """Write the scripted answers that the page shows, if any."""
    (folder / "loop.jsonl").write_text("".join(re.findall(r'^ {4}(\{"when": .*\n)', page, re.MULTILINE)))


async def curl(command: str, running: Running) -> Any:
    """The JSON that ``curl URL [-d BODY]`` gets."""
    words = shlex.split(command)
    assert words[0] == "curl"
    path = words[1].removeprefix(_ADDRESS)
    assert path.startswith("/")
    if len(words) == 2:
        return (await running.client.get(path)).json()
    assert words[2] == "-d"
    # curl's own type, which is not that of JSON
    kind = {"content-type": "application/x-www-form-urlencoded"}
    return (await running.client.post(path, content=words[3], headers=kind)).json()


async def python(code: str, running: Running) -> str:
    """The output of a program."""
    program = code.replace(_ADDRESS, running.url)
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=HANG_S
        )
    )
    return done.stdout


def shows(told: Any, real: Any) -> bool:
    """``told`` is ``real``, but for fields of objects that it leaves out."""
    if isinstance(told, dict):
        return all(key in real and shows(value, real[key]) for key, value in told.items())
    if isinstance(told, list):
        return len(told) == len(real) and all(map(shows, told, real))
    return bool(told == real)


@pytest.mark.parametrize("name", PAGES)
async def test_each_command_of_a_page_has_the_answer_that_it_shows(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / name).read_text()
    monkeypatch.chdir(tmp_path)
    write_script(page, tmp_path)
    answer: Any = None
    compared = 0
    async with start(*flags(page)) as running:
        for language, code in _BLOCK.findall(page):
            if language == "sh" and code.startswith("curl "):
                answer = await curl(code, running)
            elif language == "python":
                answer = await python(code, running)
            elif language == "json":
                assert shows(json.loads(code), answer), answer
                compared += 1
            elif language == "text":
                assert code == answer
                compared += 1
        if name == "first-ten-minutes.md":
            session = await curl(f"curl {_ADDRESS}/trajectories/ada", running)
            versions = {
                version for each in session["trajectories"] for version in each["generation_versions"]
            }
            assert versions == {-1, "default"}
    assert compared == PAGES[name]


async def test_both_requests_of_the_readme_have_the_answers_that_it_tells(start: Start) -> None:
    generate, retrieve = _CURL.findall(README)
    (shown,) = re.findall(r'^    (\{"exact".*?\})$', README, re.MULTILINE | re.DOTALL)
    async with start(*flags(README)) as running:
        assert (await curl(generate, running))["text"] == " x = <think>"
        assert shows(json.loads(shown), await curl(retrieve, running))
        tokenised = await curl(f"curl {_ADDRESS}/tokenize -d '{json.dumps({'prompt': '<think>'})}'", running)
    assert tokenised["tokens"] == [1276]


def test_a_wrong_answer_does_not_pass() -> None:
    assert not shows({"exact": True, "tokens": [1, 2]}, {"exact": True, "tokens": [1, 2, 3]})
    assert not shows({"exact": True}, {"exact": False})
    assert not shows({"parent": None}, {})
