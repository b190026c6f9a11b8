"""Fuzzing with requests made from the API description, some fitting and some not: nothing may break."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import count
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from deadlines import HANG_S
from router_core.cli import build
from slime_control.calls.endpoints import CALLS
from slime_http.serving import serving
from surface.description import DOCUMENT

schemathesis = pytest.importorskip("schemathesis")
requests = pytest.importorskip("requests")
config, checks = schemathesis.config, schemathesis.checks

# The router has a thread of its own here, and takes its jitter from ``random`` whenever it wants.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

#: Requests of each operation, beside those that go through the limits of each parameter in turn.
EXAMPLES = int(os.environ.get("SLIME_ROUTER_FUZZ_EXAMPLES", "5"))
#: One of this many limits of parameters is tried, each in its turn: all of them in a longer run.
STRIDE = 1 if EXAMPLES > 5 else 3
#: Tokens, and answers, that an engine in Python has time for.
FEW = 4
#: The embedded engine divides by it.
LEAST_PENALTY = 1e-6
#: Fields that the embedded engine refuses: it is no half of a pair, has one rank, no processors, and a short context.
NO_SUCH_ENGINE = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor", "custom_params"),
    *("data_parallel_rank", "disagg_prefill_dp_rank", "return_hidden_states", "routed_dp_rank"),
    "routed_experts_start_len",
)
#: Names of what has another one, too.
OTHER_NAMES = ("include_stop_str_in_output", "request_id")
#: TRACE is refused before any path is looked at.
OTHER_METHODS = {"get", "put", "post", "delete", "options", "patch"}
#: A call that is answered so has changed nothing.
REFUSALS = {400, 404, 405}
#: Nobody listens there.
NOBODY = "http://127.0.0.1:1"


def described() -> Any:
    """The description for schemathesis: each request on its own, and the same ones each time."""
    generation = config.GenerationConfig(max_examples=EXAMPLES, deterministic=True, database="none")
    phases = config.PhasesConfig(
        coverage=config.CoveragePhaseConfig(unexpected_methods=OTHER_METHODS),
        stateful=config.StatefulPhaseConfig(enabled=False),
    )
    project = config.ProjectConfig(generation=generation, phases=phases)
    settings = config.SchemathesisConfig(projects=config.ProjectsConfig(default=project))
    return schemathesis.openapi.from_dict(deepcopy(DOCUMENT), config=settings)


SCHEMA = described()
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
#: A pause is undone after each case; until then nobody waits for it.
PATIENCE = ("--pause-queue-timeout-s", "0.1")
#: Operations whose answer depends on nothing that a fuzzer could not know.
SELF_CONTAINED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/retrieve_from_text",
    "/retrieve_from_messages_template",
)


class Fuzzed:
    """A router that is asked, and the statuses of what fitted, by path. ``limits`` counts the limits of parameters."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self.client = client
        self.session = requests.Session()  # the library's cases are sent with it
        self.session.trust_env = False  # it would look for proxies and passwords before each request
        self.statuses: dict[str, Counter[int]] = {}
        self.limits = count()


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    """Before an embedded engine whose context is soon full."""
    plugins = [
        part for name in ("engine", "radix_cache", "openai", "tiered_store") for part in ("--plugin", name)
    ]
    _, app = build([*plugins, "--engine-context-length", "512", "--engine-moe-layers", "1", *PATIENCE])
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(app)) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=HANG_S) as client,
    ):
        fuzzed = Fuzzed(url, client)
        yield fuzzed
    for path, statuses in fuzzed.statuses.items():  # it is no fuzz if everything is refused at the door
        assert path not in SELF_CONTAINED or statuses[200] > statuses.total() / 2, f"{path}: {statuses}"


def shorten(body: dict[str, Any]) -> None:
    """Ask for few tokens, and no more of what the engine cannot do."""
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    for name in limits or ["max_tokens"]:
        limit = body.get(name)
        if limit is None or (type(limit) is int and limit > FEW):
            body[name] = FEW
    if type(body.get("n")) is int and FEW < body["n"] <= 128:
        body["n"] = FEW
    penalty = body.get("repetition_penalty")
    if type(penalty) is float and 0 < penalty < LEAST_PENALTY:
        body["repetition_penalty"] = LEAST_PENALTY


def reconcile(body: dict[str, Any]) -> None:
    """Leave out parameters that others in ``body`` rule out, and grammars, which the embedded engine has none of."""
    for name in (
        "regex",
        "ebnf",
        "response_format",
        "json_schema",
        "lora_path",
        *NO_SUCH_ENGINE,
        *OTHER_NAMES,
    ):
        body.pop(name, None)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if not body.get("tools"):
        body.pop("tool_choice", None)
    if body.get("max_completion_tokens"):
        body.pop("max_tokens", None)
    if type(body.get("min_tokens")) is int:
        body["min_tokens"] = 0


def lead_nowhere(named: dict[str, Any]) -> None:
    """Register nobody else's machine."""
    for name in ("url", "worker_url"):
        if str(named.get(name)).startswith("http"):
            named[name] = NOBODY


def undo(fuzzed: Fuzzed, path: str, answer: Any) -> None:
    """The next case meets the router as this one did."""
    if answer.status_code in REFUSALS:
        return
    client = fuzzed.client
    if path in CALLS:
        for call in ("/continue_generation", "/resume_memory_occupation"):
            assert client.post(call, json={}).status_code == 200
    if "worker" in path:
        client.post("/remove_worker", json={"url": NOBODY})


@SCHEMA.parametrize()  # type: ignore[untyped-decorator]  # schemathesis is not installed where types are checked
def test_nothing_breaks(case: Any, fuzzed: Fuzzed) -> None:
    path, body = case.operation.path, case.body
    if case.meta.phase.name == "coverage" and next(fuzzed.limits) % STRIDE:
        return
    fits = case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE
    for named in (body, case.query):
        if isinstance(named, dict) and "worker" in path:
            lead_nowhere(named)
    if isinstance(body, dict) and path.startswith("/v1/"):
        shorten(body)
        if fits:
            reconcile(body)
    if "%0A" in case.formatted_path:
        return  # no route's path has a line break; a worker is asked
    answer = case.call(base_url=fuzzed.url, session=fuzzed.session)
    undo(fuzzed, path, answer)
    if fits:
        fuzzed.statuses.setdefault(path, Counter())[answer.status_code] += 1
    if "x-slime-exact" in answer.headers:
        return  # messages with media, which a worker answers in words of its own
    strict = path.startswith(("/v1/", "/retrieve"))
    case.validate_response(answer, checks=[*CHECKS, checks.negative_data_rejection] if strict else CHECKS)
    if answer.status_code == 405:
        told = answer.json()  # the workers', when all of them refused a control call so
        assert told.get("error", told)["message"]
