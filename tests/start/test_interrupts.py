"""Ctrl-C in real processes: it ends each quietly, at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from deadlines import HANG_S

_PROJECT = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
_MODULE, _, _FUNCTION = _PROJECT["scripts"]["slime-router"].partition(":")
#: The same as in the script that an installation makes.
_SCRIPT = ("-c", f"import sys; from {_MODULE} import {_FUNCTION}; sys.exit({_FUNCTION}())")


#: Runs the command behind it. SIGINT is not ignored there, as it is in the background of a shell, with these tests.
_WITH_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def interrupted(command: Sequence[str], at: str, again: bool = False, **environment: str) -> tuple[int, str]:
    """Run Python with ``command``; send SIGINT, or many, once ``at`` is on stderr. Return the exit code and stderr."""
    with subprocess.Popen(
        [sys.executable, "-c", _WITH_SIGINT, sys.executable, *command],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stderr is not None
            seen = b""
            while at.encode() not in seen:
                piece = os.read(process.stderr.fileno(), 1 << 16)
                assert piece, seen.decode()
                seen += piece
            process.send_signal(signal.SIGINT)
            while again and process.poll() is None:
                time.sleep(0.02)
                process.send_signal(signal.SIGINT)
            seen += process.communicate(timeout=HANG_S)[1]
        finally:
            process.kill()  # one that hangs, too
    return process.returncode, seen.decode()


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        ((), "starlette.applications"),
        ((), "uvicorn.server"),
        ((), "slime_start.parsing"),
        ((), "slime_health.plugin"),
        (("plugins",), "slime_r3.plugin"),
        (("demo",), "tokenizers"),
        (("top", "--once"), "rich.console"),
    ],
)
def test_imports_end_quietly(arguments: Sequence[str], imported: str) -> None:
    """The interpreter names each module on stderr once it is imported."""
    code, told = interrupted(("-X", "importtime", *_SCRIPT, *arguments), f" {imported}\n")
    assert (code, told.count("Traceback")) == (130, 0), told[-2000:]


@pytest.mark.parametrize("again", [False, True], ids=["once", "repeatedly"])
def test_demo_ends_quietly_while_it_runs(again: bool) -> None:
    command = (*_SCRIPT, "demo", "--samples", "400")
    code, told = interrupted(command, "rolling out", again=again, FORCE_COLOR="1")
    assert (code, told.count("Traceback")) == (130, 0), told[-2000:]


def test_reading_a_tokenizer_ends_quietly(tmp_path: Path) -> None:
    flags = ("--port", "0", "--plugin", "radix_cache", "--hf-checkpoint", str(tmp_path))
    code, told = interrupted(("-X", "importtime", *_SCRIPT, *flags), " transformers.utils.hub\n")
    assert (code, told.count("Traceback")) == (130, 0), told[-2000:]


def test_an_ignored_signal_stays_ignored() -> None:
    """A shell ignores SIGINT for commands that it starts in the background."""
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    program = [sys.executable, "-X", "importtime", *_SCRIPT, "plugins"]
    with subprocess.Popen([*shell, *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.endswith(b" starlette.applications\n"):
                process.send_signal(signal.SIGINT)
                break
        listed, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert b"radix_cache (" in listed


def test_main_leaves_the_handlers_of_a_program_alone() -> None:
    program = (
        "import signal; from router_core.cli import main; main(['plugins'])\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    command = [sys.executable, "-c", _WITH_SIGINT, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
