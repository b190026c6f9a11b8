"""A router for each test, in a thread of its own: clients run their loops, or block, as they do at home."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

pytest.register_assert_rewrite("clients.rolling")

from clients.rolling import ANSWERS, RESULTS, Rolling, Rollout  # noqa: E402
from openai_.chat_models.families import QWEN3, Family, Words  # noqa: E402  # assertions are rewritten on import
from openai_.chat_models.steered import by_text, speaking  # noqa: E402
from routers import Start  # noqa: E402

# litellm would fetch a list of prices when it is imported, the agents of OpenAI would send traces there.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

_ANSWER_BEGINS = "<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def asked_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """Clients talk to the router, and to nobody else."""
    hosts: set[Any] = set()
    resolve = socket.getaddrinfo

    def noted(host: Any, *arguments: Any, **options: Any) -> Any:
        hosts.add(host)
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    yield hosts
    assert hosts <= {"127.0.0.1"}


@pytest.fixture(autouse=True, scope="module")
def swept() -> Iterator[None]:
    """Collect objects that clients leave open while their module's filters of warnings hold."""
    yield
    gc.collect()


@pytest.fixture
def rolling(start: Start) -> Iterator[Rolling]:
    with ExitStack() as stack:

        def rolled(
            *answers: Words,
            family: Family = QWEN3,
            results: tuple[str, ...] = (),
            others: Mapping[str, Sequence[Words]] = MappingProxyType({}),
        ) -> Rollout:
            def script(text: str) -> Sequence[str]:
                says = next((each for told, each in others.items() if told in text), answers)
                return [family.says(says[text.count(_ANSWER_BEGINS) - 1], text)]

            portal = stack.enter_context(start_blocking_portal(backend_options={"use_uvloop": True}))
            engine = stack.enter_context(
                portal.wrap_async_context_manager(speaking(family, by_text(family.tokenizer, script), seed=7))
            )
            running = stack.enter_context(
                portal.wrap_async_context_manager(
                    start(
                        *("--plugin", "radix_cache", "--hf-checkpoint", engine.checkpoint),
                        *("--plugin", "openai", "--worker-urls", engine.url),
                        *("--middleware-paths", "clients.payloads"),
                    )
                )
            )
            return Rollout(portal, running, engine, family, results)

        yield rolled


@pytest.fixture
def rollout(rolling: Rolling) -> Rollout:
    """The conversation that every client has, with a model that thinks."""
    return rolling(*ANSWERS, results=RESULTS)
