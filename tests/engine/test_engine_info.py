"""The engine's information about itself."""

from __future__ import annotations

import threading

import anyio
import pytest

from engine.served import CHAT, Serve, Served
from slime_engine.model import NgramModel
from slime_engine.settings import Settings

pytestmark = pytest.mark.anyio


async def test_health_is_an_empty_200_and_may_generate(engine: Served) -> None:
    for path in ("/health", "/health_generate"):
        answer = await engine.client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    entry = (await engine.journal())[-1]
    assert entry["rid"].startswith("HEALTH_CHECK")


async def test_health_that_cannot_generate_is_a_503(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_engine.info._HEALTH_DEADLINE_S", 0.05)
    async with serve() as engine:
        await engine.post("/pause_generation")
        answer = await engine.client.get("/health_generate")
        assert answer.status_code == 503
        assert engine.host.engine.scheduler.waiting == {}


async def test_model_info_has_both_names_and_a_tokenizer_to_load(serve: Serve, model: NgramModel) -> None:
    async with serve(weight_version="3", model_name="tiny") as engine:
        info = await engine.get("/model_info")
        assert info == await engine.get("/get_model_info")
        assert info["model_path"] == "tiny"
        assert info["weight_version"] == "3"
        assert info["is_generation"] is True
        assert info["disaggregation_mode"] == "null"
        with_tokenizer = anyio.Path(info["tokenizer_path"])
        assert {path.name async for path in with_tokenizer.iterdir()} >= {"tokenizer_config.json"}


async def test_server_info_tells_what_a_router_asks_for(serve: Serve) -> None:
    async with serve(moe_layers=2) as engine:
        info = await engine.get("/server_info")
        assert info == await engine.get("/get_server_info")
    assert (info["dp_size"], info["tp_size"], info["page_size"], info["kv_events"]) == (1, 1, 1, None)
    assert info["enable_return_routed_experts"] is True
    assert info["served_model_name"] == "slime-ngram"


async def test_loads_count_what_runs_and_what_waits(serve: Serve, model: NgramModel) -> None:
    async with (
        serve(tokens_per_second=100, max_running_requests=2) as engine,
        anyio.create_task_group() as tasks,
    ):
        body = {"text": [CHAT] * 3, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        tasks.start_soon(lambda: engine.generate(**body))
        await engine.until(lambda s: len(s.running) == 2 and len(s.waiting) == 1)
        answer = await engine.get("/v1/loads", include="core")
        (load,) = answer["loads"]
        assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 2, 1)
        assert load["num_used_tokens"] >= 3 * len(model.tokenizer.encode(CHAT))
        (old,) = await engine.get("/get_load")
        assert (old["num_reqs"], old["num_waiting_reqs"]) == (3, 1)
        metrics = (await engine.client.get("/metrics")).text
        assert 'sglang:num_running_reqs{model_name="slime-ngram"} 2\n' in metrics
        assert 'sglang:num_queue_reqs{model_name="slime-ngram"} 1\n' in metrics
        await engine.post("/abort_request", abort_all=True)
    assert load["max_running_requests"] == 2


async def test_each_rank_has_a_load_of_its_own(serve: Serve) -> None:
    async with serve(tokens_per_second=100, dp_size=2) as engine, anyio.create_task_group() as tasks:
        body = {"text": [CHAT] * 3, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        tasks.start_soon(lambda: engine.generate(**body, routed_dp_rank=1))
        await engine.until(lambda s: len(s.running) == 3)
        answer = await engine.get("/v1/loads")
        old = await engine.get("/get_load")
        states = (await engine.get("/server_info"))["internal_states"]
        await engine.post("/abort_request", abort_all=True)
    assert answer["dp_rank_count"] == 2
    for loads in (answer["loads"], states):
        assert [(load["dp_rank"], load["num_running_reqs"]) for load in loads] == [(0, 0), (1, 3)]
    assert [(load["dp_rank"], load["num_reqs"]) for load in old] == [(0, 0), (1, 3)]


async def test_metrics_count_tokens(serve: Serve) -> None:
    async with serve() as engine:
        params = {"max_new_tokens": 7, "ignore_eos": True}
        await engine.generate(input_ids=[1, 2, 3], sampling_params=params)
        metrics = (await engine.client.get("/metrics")).text
    assert 'sglang:prompt_tokens_total{model_name="slime-ngram"} 3\n' in metrics
    assert 'sglang:generation_tokens_total{model_name="slime-ngram"} 7\n' in metrics


async def test_tokenize_and_detokenize_are_each_others_inverse(engine: Served, model: NgramModel) -> None:
    text = "naïve <|im_end|> 京都"
    ids = model.tokenizer.encode(text)
    told = (await engine.post("/tokenize", prompt=text)).json()
    assert told == {"tokens": ids, "count": len(ids), "max_model_len": 32768}
    both = (await engine.post("/tokenize", prompt=[text, ""])).json()
    assert (both["tokens"], both["count"]) == ([ids, []], [len(ids), 0])
    shown = await engine.post("/detokenize", tokens=ids, skip_special_tokens=False)
    assert shown.json() == {"text": text}
    assert (await engine.post("/detokenize", tokens=[ids])).json() == {
        "text": [text.replace("<|im_end|>", "")]
    }
    await engine.post("/tokenize", 400, prompt=1)
    await engine.post("/detokenize", 400, tokens="x")
    await engine.post("/detokenize", 400, tokens=[99999])


async def test_a_wrong_method_and_an_unknown_path_are_told_apart(engine: Served) -> None:
    assert (await engine.client.get("/generate")).status_code == 405
    assert (await engine.client.get("/nothing")).status_code == 404


@pytest.mark.parametrize(
    ("path", "name"), [("/tokenize", "prompt"), ("/generate", "text"), ("/v1/completions", "prompt")]
)
async def test_long_texts_are_tokenised_beside_the_event_loop(
    engine: Served, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    tokenizer, threads = engine.host.engine.backend.tokenizer, set[threading.Thread]()
    encode = tokenizer.encode

    def recorded(text: str) -> list[int]:
        threads.add(threading.current_thread())
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    for texts in (["Once upon a time " * 1000], ["Once " * 100] * 30):
        await engine.post(path, **{name: texts}, sampling_params={"max_new_tokens": 1}, max_tokens=1)
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    "wrong",
    [{"latency_ms": -1}, {"context_length": 0}, {"moe_topk": 9, "moe_experts": 8}, {"journal_size": 0}],
)
def test_settings_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)  # type: ignore[arg-type]  # values of several kinds
