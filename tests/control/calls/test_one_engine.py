"""Calls that would reach one engine of many are refused, with the alternative; generations go through."""

from __future__ import annotations

import pytest

from control.steered import Steered, steering
from slime_control.calls.endpoints import CALLS
from slime_control.calls.one_engine import refusal
from slime_control.calls.overview import QUESTIONS
from slime_sglang.generation import GENERATION_PATHS

pytestmark = pytest.mark.anyio

#: SGLang 0.5.15, ``http_server.py``: what controls an engine, or asks for its own state. Written down here a second
#: time, so that none is lost there.
CONTROLLING = [
    *("/add_external_corpus", "/clear_hicache_storage_backend", "/close_session", "/configure_logging"),
    *("/dump_expert_distribution_record", "/dumper/start", "/freeze_gc", "/get_load"),
    *("/get_remote_instance_transfer_engine_info", "/get_weights_by_name", "/hicache/storage-backend"),
    *("/hicache/storage-backend/clear", "/init_weights_send_group_for_remote_instance"),
    *("/list_external_corpora", "/open_session", "/remote_instance_transfer_engine_info"),
    *(
        "/remove_external_corpus",
        "/send_weights_to_remote_instance",
        "/set_internal_state",
        "/set_trace_level",
    ),
    *("/slow_down", "/start_expert_distribution_record", "/stop_expert_distribution_record"),
    *("/weights_checker", "/%67et_load", "/get_load?a=b"),
]
#: And of it, and of OpenAI's and others' endpoints, what any engine may answer.
ANYBODYS = [
    *(
        "/generate",
        "/generate_from_file",
        "/encode",
        "/classify",
        "/tokenize",
        "/detokenize",
        "/v1/completions",
    ),
    *(
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/models",
    ),
    *(
        "/v1/audio/transcriptions",
        "/v1/models/m",
        "/v1/score",
        "/v1/responses",
        "/v1/responses/r",
        "/v1/rerank",
    ),
    *("/v1/messages", "/v1/messages/count_tokens", "/ping", "/invocations", "/vertex_generate", "/api/chat"),
    *("/parse_function_call", "/separate_reasoning", "/unheard_of"),
]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_call_that_controls_one_engine_reaches_none(method: str) -> None:
    worker = Steered()
    async with steering(worker) as running:
        for path in CONTROLLING:
            answer = await running.client.request(method, path)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (501, "ONE_ENGINE_ONLY"), path
            assert "would reach one engine only" in error["message"]
    assert worker.got == []


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metricsx", "/metrics?name=a"])
async def test_the_metrics_of_one_engine_are_not_the_routers(path: str) -> None:
    worker = Steered()
    async with steering(worker) as running:
        answer = await running.client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NO_METRICS")
    assert "GET /engine_metrics" in answer.json()["error"]["message"]
    assert worker.got == []


async def test_vllms_control_calls_name_those_of_sglang() -> None:
    like = {"/pause?mode=keep": "/pause_generation", "/resume": "/continue_generation"}
    like |= {"/sleep": "/release_memory_occupation", "/update_weights": "/update_weights_from_distributed"}
    worker = Steered()
    async with steering(worker) as running:
        for path, own in like.items():
            answer = await running.client.post(path)
            assert (answer.status_code, own in CALLS) == (501, True)
            message = answer.json()["error"]["message"]
            assert "the router controls SGLang's engines only" in message
            assert message.endswith(f"; SGLang's call is POST {own}")
    assert worker.got == []


async def test_what_any_engine_may_answer_reaches_one() -> None:
    worker = Steered()
    async with steering(worker) as running:
        for path in ANYBODYS:
            assert (await running.client.post(path, json={})).status_code == 200, path


def test_nothing_that_is_answered_is_refused() -> None:
    generating = {path.decode() for path in GENERATION_PATHS}
    assert [path for path in CALLS.keys() | QUESTIONS | generating if refusal(path) is not None] == []
