"""Published launch lines of the SGLang gateway start this router, and it serves; or it says why not.

From SGLang's page on the gateway (``docs/advanced_features/sgl_model_gateway.md``), and its router's README; and the
line with which prime-rl starts vLLM's router.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from compatibility.launching import Launched, generates, launched, our_words, without_effect
from router_core.cli import build, main
from router_core.errors import SettingsError
from routers import Start

pytestmark = pytest.mark.anyio

WORKERS = "--worker-urls http://worker1:8000 http://worker2:8001"
PAIRS = """--pd-disaggregation \\
  --prefill http://prefill1:8000 9000 --prefill http://prefill2:8000 none \\
  --decode http://decode1:8001 --decode http://decode2:8001"""

#: Lines that start, and their flags that have no effect.
LINES = {
    "regular": (
        f"python -m sglang_router.launch_router {WORKERS} --policy cache_aware --host 0.0.0.0 --port 30000",
        [],
    ),
    "cache_aware": (
        f"""python -m sglang_router.launch_router {WORKERS} \\
  --policy cache_aware \\
  --cache-threshold 0.5 \\
  --balance-abs-threshold 32 \\
  --balance-rel-threshold 1.5 \\
  --eviction-interval-secs 120 \\
  --max-tree-size 67108864""",
        ["--eviction-interval-secs"],
    ),
    "retries and breakers": (
        f"""python -m sglang_router.launch_router {WORKERS} \\
  --retry-max-retries 5 \\
  --retry-initial-backoff-ms 50 \\
  --retry-max-backoff-ms 30000 \\
  --retry-backoff-multiplier 1.5 \\
  --retry-jitter-factor 0.2 \\
  --cb-failure-threshold 5 \\
  --cb-success-threshold 2 \\
  --cb-timeout-duration-secs 30 \\
  --cb-window-duration-secs 60""",
        [],
    ),
    "without them": (
        f"python -m sglang_router.launch_router {WORKERS} --policy round_robin"
        " --disable-retries --disable-circuit-breaker",
        [],
    ),
    "limits": (
        f"""python -m sglang_router.launch_router {WORKERS} \\
  --max-concurrent-requests 256 \\
  --rate-limit-tokens-per-second 512 \\
  --queue-size 128 \\
  --queue-timeout-secs 30""",
        [],
    ),
    "health": (
        f"""python -m sglang_router.launch_router {WORKERS} \\
  --health-check-interval-secs 30 \\
  --health-check-timeout-secs 10 \\
  --health-success-threshold 2 \\
  --health-failure-threshold 3 \\
  --health-check-endpoint /health""",
        [],
    ),
    "observed": (
        f"""python -m sglang_router.launch_router {WORKERS} \\
  --prometheus-host 0.0.0.0 --prometheus-port 29000 \\
  --enable-trace --otlp-traces-endpoint localhost:4317 \\
  --request-id-headers x-request-id x-trace-id x-correlation-id \\
  --log-level debug --log-dir ./router_logs""",
        [],
    ),
    "prefill and decode": (
        f"python -m sglang_router.launch_router {PAIRS} --policy cache_aware",
        [],
    ),
    "prefill and decode with their policies": (
        f"""python -m sglang_router.launch_router {PAIRS} \\
  --prefill-policy cache_aware \\
  --decode-policy power_of_two""",
        [],
    ),
    "prefill and decode by length": (
        f"python -m sglang_router.launch_router {PAIRS} --prefill-policy bucket --bucket-adjust-interval-secs 5",
        [],
    ),
    "mini-lb": (
        "python -m sglang_router.launch_router --pd-disaggregation --mini-lb --prefill http://prefill1:8000"
        " --decode http://decode1:8001 --host 127.0.0.1 --port 8000",
        [],
    ),
    "ranks": (f"python -m sglang_router.launch_router {WORKERS} --dp-aware", []),
    "ranks of prime-rl": (
        f"vllm-router --policy consistent_hash {WORKERS} --host 0.0.0.0 --port 8000"
        " --intra-node-data-parallel-size 2 --worker-startup-timeout-secs 4200 --log-level debug",
        [],
    ),
    "hashing": (
        f"smg launch {WORKERS} --policy prefix_hash --prefix-token-count 128 --prefix-hash-load-factor 1.5",
        [],
    ),
    "tools": (
        "python -m sglang_router.launch_router --mcp-config-path /path/to/mcp-config.yaml --worker-urls http://worker1:8000",
        ["--mcp-config-path"],
    ),
    "parsers": (
        f"""smg launch {WORKERS} \\
  --model-path meta-llama/Llama-3.1-8B-Instruct \\
  --reasoning-parser deepseek-r1 \\
  --tool-call-parser json""",
        ["--model-path", "--reasoning-parser", "--tool-call-parser"],
    ),
}

#: Lines that are run as processes: they have the flags that nothing but a process reads, such as ``--log-dir``.
AS_PROCESSES = ("regular", "observed", "prefill and decode")
#: The other lines, each of which makes a router here.
WITHIN = [name for name in LINES if name not in AS_PROCESSES]

#: Lines that do not start, and the flag or value that is named.
REFUSED = {
    "python -m sglang_router.launch_router --worker-urls grpc://127.0.0.1:20000"
    " --model-path meta-llama/Llama-3.1-8B-Instruct --reasoning-parser deepseek-r1": "grpc://127.0.0.1:20000",
    "python -m sglang_router.launch_router --mini-lb --worker-urls http://worker1:8000": "--mini-lb",
    "python -m sglang_router.launch_router --pd-disaggregation --prefill http://prefill1:30001 port": "--prefill",
    "python -m sglang_router.launch_router --backend openai --worker-urls https://api.openai.com"
    " --history-backend memory": "--backend",
}


@pytest.mark.parametrize("name", AS_PROCESSES)
async def test_a_published_line_starts_a_router_that_serves(
    name: str, workers: dict[str, str], tmp_path: Path
) -> None:
    line, idle = LINES[name]
    async with launched(our_words(line, workers), tmp_path) as router:
        await generates(router.client)
        assert sorted(router.idle_flags()) == sorted(idle)


@pytest.mark.parametrize("name", WITHIN)
async def test_a_published_line_makes_a_router_that_serves(
    name: str, start: Start, workers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    line, idle = LINES[name]
    async with start(*our_words(line, workers)) as running:
        await generates(running.client)
    assert sorted(without_effect(caplog.messages)) == sorted(idle)


@pytest.mark.parametrize(("line", "named"), REFUSED.items())
def test_a_published_line_for_what_is_not_here_is_refused_by_name(line: str, named: str) -> None:
    with pytest.raises(SettingsError) as refused:
        build(our_words(line, {}))
    assert named in str(refused.value)


async def test_the_key_of_a_published_line_is_asked_for(workers: dict[str, str], tmp_path: Path) -> None:
    line = 'python -m sglang_router.launch_router --api-key "your-router-api-key" --worker-urls http://worker1:8000'
    async with launched(our_words(line, workers), tmp_path) as router:
        assert (await router.client.post("/generate", json={"text": "Hi"})).status_code == 401
        await generates(router.client, Authorization="Bearer your-router-api-key")
    assert "your-router-api-key" not in router.log.read_text()


async def test_control_plane_keys_are_required_and_calls_are_audited(
    workers: dict[str, str], tmp_path: Path
) -> None:
    line = f"""smg launch {WORKERS} --log-level warn \\
  --control-plane-api-keys 'admin1:PlatformAdmin:admin:super-secret-key' 'key2:Service Account:user:secret123' \\
  --control-plane-audit-enabled"""
    async with launched(our_words(line, workers), tmp_path) as router:
        await generates(router.client)
        asked = {None: 401, "secret123": 403, "super-secret-key": 200}
        for key, status in asked.items():
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert (await router.client.get("/workers", headers=headers)).status_code == status
    said = router.log.read_text()
    assert "secret" not in said
    lines = [json.loads(line.partition(" control_plane_audit ")[2]) for line in said.splitlines()]
    assert [(line["principal"], line["outcome"]) for line in lines] == [
        (None, "denied"),
        ("key2", "denied"),
        ("admin1", "success"),
    ]


async def test_the_log_goes_to_a_file_as_well(workers: dict[str, str], tmp_path: Path) -> None:
    line = f"python -m sglang_router.launch_router {WORKERS} --log-level debug --log-dir ./router_logs"
    for _ in range(2):  # the second is appended
        async with launched(our_words(line, workers), tmp_path) as router:
            await generates(router.client)
    (file,) = (tmp_path / "router_logs").iterdir()
    assert file.name == "slime-router.log"
    said = file.read_text()
    assert said.count("listening on") == 2
    assert said.startswith(f"{date.today():%Y}-")
    assert router.log.read_text() in said


def test_a_directory_for_logs_that_cannot_be_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--log-dir", str(tmp_path / "file" / "logs")]) == 2
    assert capsys.readouterr().err.startswith(
        f"slime-router: --log-dir: wanted a directory, got {tmp_path}/file/logs: Not a directory"
    )


# browsers


async def test_pages_of_an_allowed_site_may_call(workers: dict[str, str], tmp_path: Path) -> None:
    line = (
        "python -m sglang_router.launch_router --worker-urls http://worker1:8000"
        " --cors-allowed-origins http://localhost:3000 https://example.com --api-key k"
    )
    key = {"Authorization": "Bearer k"}
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-session-id"}

    async def asked(router: Launched, origin: str) -> list[str | None]:
        # A browser sends no key with its first question.
        before = await router.client.options("/generate", headers={"Origin": origin, **preflight})
        answer = await router.client.post("/generate", json={"text": "Hi"}, headers={"Origin": origin, **key})
        assert answer.status_code == 200
        return [reply.headers.get("access-control-allow-origin") for reply in (before, answer)]

    async with launched(our_words(line, workers), tmp_path) as router:
        await generates(router.client, **key)
        assert await asked(router, "https://example.com") == ["https://example.com"] * 2
        assert await asked(router, "https://elsewhere.example") == [None, None]
