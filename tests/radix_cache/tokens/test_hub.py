"""A checkpoint that is a name: the Hub is asked for it, with a deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from huggingface_hub import constants
from starlette.applications import Starlette

from router_core.errors import SettingsError
from slime_http.serving import serving
from slime_radix_cache.tokens import checkpoint, hub
from slime_radix_cache.tokens.checkpoint import eos_ids, load_tokenizer
from slime_radix_cache.tokens.hub import hub_failure


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a Hub that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(hub_failure, "__defaults__", (0.2,))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield url


def test_a_hub_that_does_not_answer_is_given_up(silent: str) -> None:
    assert hub._DEADLINE_S == 5.0
    began = time.monotonic()
    with pytest.raises(SettingsError) as caught:
        load_tokenizer("someone/some-model")
    assert time.monotonic() - began < 30  # of which transformers takes some to import
    assert str(caught.value) == (
        "--hf-checkpoint someone/some-model: neither a directory here nor a model in the cache, and"
        f" {silent} did not answer within 0.2 s; wanted a directory with tokenizer files, or the name of a model on"
        " the Hugging Face Hub"
    )


def test_a_hub_that_cannot_be_reached_is_told(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    told = hub_failure()
    assert told is not None
    assert told.startswith("http://127.0.0.1:9 cannot be reached: ")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_failure() == "HF_HUB_OFFLINE is set"


@pytest.mark.anyio
async def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Starlette()) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert await anyio.to_thread.run_sync(hub_failure) is None  # a 404 is an answer, too


def test_files_beside_a_tokenizer_are_not_asked_for_without_the_hub(silent: str) -> None:
    class Tokenizer:
        eos_token_id = 5

    began = time.monotonic()
    assert eos_ids(Tokenizer(), "someone/some-model") == {5}  # type: ignore[arg-type]  # it needs no more
    assert time.monotonic() - began < 30


def test_a_directory_does_not_need_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> str:
        raise AssertionError("asked")

    monkeypatch.setattr(checkpoint, "hub_failure", fail)
    with pytest.raises(SettingsError, match="no tokenizer files in this directory"):
        load_tokenizer(str(tmp_path))


def test_the_log_names_the_tokenizer_before_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), pytest.raises(SettingsError, match="no tokenizer files"):
        load_tokenizer(str(tmp_path))
    assert caplog.messages[0] == f"loading the tokenizer of {tmp_path}"
