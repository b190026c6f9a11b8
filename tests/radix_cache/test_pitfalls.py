"""PITFALLS of the first generation that touch tokens, each over a real socket."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import httpx
import orjson
import pytest

from radix_cache.scripted import Client, ScriptedEngine, bits, lifespan_free, routed
from routers import BARE
from slime_http.serving import serving
from slime_radix_cache.capture.requests import read_generation, rids_of

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


async def test_pitfall_1_the_worker_gets_input_ids_and_no_text(
    client: Client, engine: ScriptedEngine
) -> None:
    await client.generate(PROMPT, [5, 6, engine.eos], unknown={"kept": [1.5, None]})
    assert engine.asked == [
        {
            "input_ids": engine.tokenizer.encode(PROMPT),
            "return_logprob": True,
            "unknown": {"kept": [1.5, None]},
        }
    ]


async def test_tokens_that_no_tokenizer_would_give_come_back_as_sampled(
    client: Client, engine: ScriptedEngine
) -> None:
    spelt = [*engine.tokenizer.encode_plain("<think>"), engine.eos]
    assert len(spelt) > 2
    text = (await client.generate(PROMPT, spelt))["text"]
    assert text == "<think>"
    assert len(engine.tokenizer.encode(text)) == 1
    answer = await client.retrieve(PROMPT + text)
    tokens, mask, logprobs = client.last()
    assert answer["tokens"] == tokens
    assert answer["loss_mask"] == mask
    assert bits(answer["rollout_logp"]) == logprobs
    assert answer["token_length"] == answer["loss_mask_length"] == len(tokens)
    assert answer["generation_versions"] == [-1 if not one else "1" for one in mask]
    assert (answer["exact"], answer["inexact_reason"]) == (True, None)
    assert (answer["matched_length"], answer["candidates"]) == (len(PROMPT + text), 1)
    assert answer["response"] == PROMPT + text


async def test_pitfall_2_a_text_that_extends_another_keeps_its_tokens_apart(
    client: Client, engine: ScriptedEngine
) -> None:
    short, long = engine.tokenizer.encode_plain("ab"), [*engine.tokenizer.encode_plain("a"), 7, 8]
    first = await client.generate(PROMPT, short)
    first_tokens, *_ = client.last()
    second = await client.generate(PROMPT, long)
    assert (await client.retrieve(PROMPT + first["text"]))["tokens"] == first_tokens
    assert (await client.retrieve(PROMPT + second["text"]))["tokens"] == client.last()[0]


async def test_pitfall_3_two_samples_that_read_alike_are_both_kept(
    client: Client, engine: ScriptedEngine
) -> None:
    one, two = engine.tokenizer.encode("<think>"), engine.tokenizer.encode_plain("<think>")
    text = PROMPT + (await client.generate(PROMPT, one, "first"))["text"]
    first = client.last()
    await client.generate(PROMPT, two, "second")
    second = client.last()
    for session, (tokens, _, logprobs) in {"first": first, "second": second, None: second}.items():
        answer = await client.retrieve(text, session_id=session)
        assert (answer["tokens"], bits(answer["rollout_logp"])) == (tokens, logprobs)
        assert (answer["candidates"], answer["exact"]) == (2, True)


async def test_pitfall_3_asking_before_generating_poisons_nothing(
    client: Client, engine: ScriptedEngine
) -> None:
    spelt = engine.tokenizer.encode_plain("<think>")
    before = await client.retrieve(PROMPT + "<think>")
    assert (before["exact"], before["inexact_reason"]) == (False, "uncovered_text")
    assert set(before["loss_mask"]) == {0}
    await client.generate(PROMPT, spelt)
    after = await client.retrieve(PROMPT + "<think>")
    assert after["tokens"] == client.last()[0]
    assert after["exact"]


async def test_pitfall_4_a_hidden_eos_is_not_doubled(client: Client, engine: ScriptedEngine) -> None:
    text = PROMPT + (await client.generate(PROMPT, [5, 6, engine.eos]))["text"] + NEXT
    first, *_ = client.last()
    await client.generate(text, [7])
    rest = engine.tokenizer.encode(NEXT.removeprefix("<|im_end|>"))
    assert engine.consumed[-1] == first + rest
    answer = await client.retrieve(text + engine.tokenizer.decode([7]))
    assert answer["loss_mask"] == client.last()[1][: -len(rest) - 4] + [1, 1, 1] + [0] * len(rest) + [1]
    assert answer["exact"]


async def test_pitfall_4_text_that_the_client_cut_stays_a_response(
    client: Client, engine: ScriptedEngine
) -> None:
    ids = engine.tokenizer.encode("<think>") + engine.tokenizer.encode("</think>") + [5, 6, engine.eos]
    await client.generate(PROMPT, ids)
    first, *_ = client.last()
    cut = PROMPT + "<think></think>"
    kept = first[: len(first) - 3]
    answer = await client.retrieve(cut)
    assert (answer["tokens"], answer["loss_mask"][-2:], answer["exact"]) == (kept, [1, 1], True)
    await client.generate(cut + "\nresult", [7, 8])
    assert engine.consumed[-1] == kept + engine.tokenizer.encode("\nresult")
    answer = await client.retrieve(cut + "\nresult" + engine.tokenizer.decode([7, 8]))
    assert answer["exact"]
    assert sum(answer["loss_mask"]) == 4


async def test_pitfall_4_a_cut_inside_a_token_is_said_and_then_consumed(
    client: Client, engine: ScriptedEngine
) -> None:
    ids = engine.tokenizer.encode("<think>") + engine.tokenizer.encode("</think>") + [engine.eos]
    await client.generate(PROMPT, ids)
    cut = PROMPT + "<think></th"
    answer = await client.retrieve(cut)
    assert (answer["exact"], answer["inexact_reason"]) == (False, "cut_inside_token")
    await client.generate(cut, [7])
    answer = await client.retrieve(cut + engine.tokenizer.decode([7]))
    assert answer["tokens"] == client.last()[0]
    assert sum(answer["loss_mask"]) == 2
    assert answer["exact"]


async def test_pitfall_4_text_that_the_client_stripped_stays_a_response(
    client: Client, engine: ScriptedEngine
) -> None:
    spaced = engine.tokenizer.encode("a garden \n")
    text = (await client.generate(PROMPT, [*spaced, engine.eos]))["text"]
    assert text.strip() != text
    first, *_ = client.last()
    await client.generate(PROMPT + text.strip() + NEXT, [7])
    common = [
        one
        for one, _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(engine.consumed[-1], first, strict=False)
        )
    ]
    assert engine.tokenizer.decode(common) == PROMPT + text.rstrip()
    answer = await client.retrieve(PROMPT + text.strip() + NEXT + engine.tokenizer.decode([7]))
    assert answer["exact"]
    assert answer["tokens"] == client.last()[0]


async def test_a_character_spread_over_tokens_is_never_cut(client: Client, engine: ScriptedEngine) -> None:
    ids = engine.tokenizer.encode("<think>") + engine.tokenizer.encode("😀好")
    assert len(ids) > 5
    text = (await client.generate(PROMPT, ids))["text"]
    assert text == "<think>😀好"
    first, *_ = client.last()
    await client.generate(PROMPT + "<think>😀!", [7])
    known = len(first) - len(engine.tokenizer.encode("好"))
    assert engine.consumed[-1] == first[:known] + engine.tokenizer.encode("!")
    await client.generate(PROMPT + "<think>😁", [7])
    assert engine.consumed[-1] == engine.tokenizer.encode(PROMPT + "<think>") + engine.tokenizer.encode("😁")


async def test_pitfall_5_versions_are_strings_and_old_ones_are_collected(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    async with routed(start, engine, checkpoint, "--gc-threshold-k", "2") as client:
        text = PROMPT + (await client.generate(PROMPT, [5, 6]))["text"]
        for version in ("9", "10"):
            engine.meta = {"weight_version": version}
            other = PROMPT + f"{version}"
            other += (await client.generate(other, [7]))["text"]
        assert (await client.retrieve(text))["inexact_reason"] == "evicted"
        assert (await client.retrieve(other))["generation_versions"][-1] == "10"
        await client.running.client.post("/weight_version", json={"weight_version": "11"})
        await client.running.client.post("/weight_version", json={"weight_version": "12"})
        stats = await client.stats()
        assert (stats["entries"], stats["tokens"], stats["bytes"]) == (0, 0, 0)
        assert stats["evictions"] == {"weight_version": 6}


async def test_spans_of_versions_are_kept_token_by_token(client: Client, engine: ScriptedEngine) -> None:
    engine.meta = {
        "weight_version": "2",
        "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
    }
    text = PROMPT + (await client.generate(PROMPT, [5, 6, 7]))["text"]
    assert (await client.retrieve(text))["generation_versions"][-3:] == ["1", "1", "2"]


async def test_pitfall_6_without_logprobs_the_sampled_ids_are_kept_and_marked(
    client: Client, engine: ScriptedEngine
) -> None:
    spelt = engine.tokenizer.encode_plain("<think>")
    text = PROMPT + (await client.generate(PROMPT, spelt, return_logprob=False))["text"]
    assert engine.asked[-1]["return_logprob"] is False
    answer = await client.retrieve(text)
    assert answer["tokens"] == client.last()[0]
    assert answer["rollout_logp"][-len(spelt) :] == [None] * len(spelt)
    assert (answer["exact"], answer["inexact_reason"]) == (False, "no_logprobs")


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("pieces", [7, 1 << 20], ids=["torn", "together"])
async def test_pitfall_7_a_stream_passes_as_it_is_and_is_recorded(
    client: Client, engine: ScriptedEngine, incremental: bool, pieces: int
) -> None:
    engine.incremental, engine.pieces = incremental, pieces
    ids = [*engine.tokenizer.encode("<think>😀"), *engine.tokenizer.encode_plain("</think>"), engine.eos]
    engine.script.append(ids)
    stream = await client.running.client.post("/generate", json={"text": PROMPT, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = [b"data: %s\n\n" % orjson.dumps(output) for output in engine.said[-1]]
    assert stream.content == b"".join(events) + b"data: [DONE]\n\n"
    tokens, mask, logprobs = client.last()
    answer = await client.retrieve(PROMPT + "<think>😀</think>")
    assert (answer["tokens"], answer["loss_mask"], answer["exact"]) == (tokens, mask, True)
    assert bits(answer["rollout_logp"]) == logprobs


async def test_pitfall_7_what_was_streamed_until_the_worker_broke_is_kept(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.events_sent = 3
    ids = engine.tokenizer.encode("the harbour wakes before the town does")
    engine.script.append(ids)
    await client.running.client.post("/generate", json={"text": PROMPT, "stream": True})
    answer = await client.retrieve(PROMPT + engine.tokenizer.decode(ids[:3]))
    assert answer["tokens"] == engine.consumed[-1] + ids[:3]
    assert answer["exact"]


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_pitfall_7_an_error_passes_at_once_and_leaves_nothing(
    client: Client, engine: ScriptedEngine, status: int
) -> None:
    engine.script.append((status, b'{ "error": {"message": "no"} }'))
    answer = await client.running.client.post("/generate", json={"text": PROMPT})
    assert (answer.status_code, answer.content) == (status, b'{ "error": {"message": "no"} }')
    assert len(engine.asked) == 1
    assert (await client.stats())["entries"] == 0
    assert (await client.retrieve(PROMPT))["exact"] is False


MALFORMED = (
    b"",
    b"{",
    b'"text"',
    b"[]",
    b'{"text": 5}',
    b'{"text": ""}',
    b'{"text": []}',
    b'{"text": "a", "input_ids": [1]}',
    b'{"text": "a", "sampling_params": {"n": "two"}}',
    b'{"input_ids": []}',
    b'{"input_ids": 5}',
    b'{"input_ids": ["a"]}',
    b'{"input_ids": [[1], []]}',
    b'{"input_ids": [99999999999]}',
    b'{"a": 1e3}',
)


async def test_a_malformed_body_reaches_the_worker_as_it_is(start: Start, checkpoint: str) -> None:
    got: list[bytes] = []

    async def worker(scope: Any, receive: Any, send: Any) -> None:
        got.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 400, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"what"})

    async with (
        serving(lifespan_free(worker)) as url,
        start(
            *(*BARE, "--plugin", "radix_cache", "--hf-checkpoint", checkpoint),
            *("--worker-urls", url),
        ) as running,
    ):
        for body in MALFORMED:
            got.clear()
            answer = await running.client.post("/generate", content=body)
            assert (answer.status_code, answer.content) == (400, b"what")
            assert body in got
        stats = (await running.client.get("/cache_stats")).json()
    assert stats["untouched"] == {"malformed": len(MALFORMED)}


async def test_pitfall_8_an_aborted_answer_without_the_usual_keys_is_no_error(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    waiting = {"text": "", "output_ids": [], "meta_info": {"id": "r", "finish_reason": {"type": "abort"}}}
    engine.script.append((200, orjson.dumps(waiting)))
    async with routed(start, engine, checkpoint, "--abort-retries", "0") as client:
        answer = await client.running.client.post("/generate", json={"text": PROMPT})
        stats = await client.stats()
    assert answer.json() == waiting
    assert stats["unrecorded"] == {"nothing_sampled": 1}
    assert stats["entries"] == 0


async def test_pitfall_8_the_partial_tokens_of_an_aborted_answer_are_kept(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    engine.meta = {"finish_reason": {"type": "abort"}, "weight_version": None, "prompt_tokens": None}
    async with routed(start, engine, checkpoint, "--abort-retries", "0") as client:
        text = PROMPT + (await client.generate(PROMPT, [5, 6]))["text"]
        answer = await client.retrieve(text)
        sampled, *_ = client.last()
    assert (answer["tokens"], answer["exact"]) == (sampled, True)
    assert answer["generation_versions"][-2:] == [None, None]


async def test_pitfall_9_a_long_prompt_does_not_hold_up_others(
    client: Client, engine: ScriptedEngine
) -> None:
    long = " the harbour wakes" * 40_000
    began = time.thread_time()
    engine.tokenizer.encode(long)
    alone = time.thread_time() - began
    worst = 0.0

    async def probe(scope: anyio.CancelScope) -> None:
        nonlocal worst
        with scope:
            while True:
                began = time.thread_time()
                await anyio.lowlevel.checkpoint()
                worst = max(worst, time.thread_time() - began)

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(probe, scope)
        await client.retrieve(long)
        scope.cancel()
    assert alone > 0.1
    assert worst < alone / 2


@pytest.mark.parametrize(
    ("media_type", "body", "kind"),
    [
        ("text/plain", b"well", "answer_not_understood"),
        ("application/json", b"{", "answer_not_understood"),
        ("application/json", b"[{}, {}]", "answer_not_understood"),
        ("text/event-stream", b"data: {\n\n", "stream_not_understood"),
    ],
)
async def test_an_answer_that_makes_no_sense_passes_and_is_counted(
    client: Client, engine: ScriptedEngine, media_type: str, body: bytes, kind: str
) -> None:
    engine.media_type = media_type
    engine.script.append((200, body))
    answer = await client.running.client.post("/generate", json={"text": PROMPT})
    assert answer.content == body
    assert (await client.stats())["unrecorded"] == {kind: 1}


async def test_text_that_is_not_of_its_tokens_is_recorded_as_not_exact(
    client: Client, engine: ScriptedEngine
) -> None:
    told = {
        "text": "something else",
        "output_ids": [5, 6],
        "meta_info": {"output_token_logprobs": [[-1, 5], [-2, 6]]},
    }
    engine.script.append((200, orjson.dumps(told)))
    await client.running.client.post("/generate", json={"text": PROMPT})
    answer = await client.retrieve(PROMPT + "something else")
    assert answer["tokens"] == [*engine.tokenizer.encode(PROMPT), 5, 6]
    assert not any(answer["loss_mask"])
    assert (answer["exact"], answer["inexact_reason"]) == (False, "engine_contradicts_itself")
    assert (await client.stats())["contradictions"] == {"text": 1}
    assert (await client.retrieve(PROMPT + "something"))["inexact_reason"] == "cut_inside_token"


async def test_verbose_tells_of_each_turn(
    start: Start, engine: ScriptedEngine, checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "slime_radix_cache")
    async with routed(start, engine, checkpoint, "--verbose") as client:
        await client.generate(PROMPT, [5, 6], "one")
    assert "session one: 2 tokens after a prompt of" in caplog.text


async def test_logprobs_are_left_out_on_request(client: Client, engine: ScriptedEngine) -> None:
    text = PROMPT + (await client.generate(PROMPT, [5, 6]))["text"]
    assert "rollout_logp" not in await client.retrieve(text, return_logp=False)


async def test_an_engine_that_consumed_other_tokens_is_not_believed(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.meta = {"prompt_tokens": 1}
    text = PROMPT + (await client.generate(PROMPT, [5, 6]))["text"]
    assert (await client.retrieve(text))["inexact_reason"] == "engine_contradicts_itself"
    assert (await client.stats())["contradictions"] == {"prompt_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_to_another_request_is_not_believed(
    client: Client, engine: ScriptedEngine, stream: bool
) -> None:
    """Faulty engines and proxies mix up their answers; of a group all prompts are of one length."""
    engine.meta = {"id": "a"}
    for rid, ids in (("a", [5, 6]), ("b", [7, 8])):
        engine.script.append(ids)
        body = {"text": PROMPT, "rid": rid, "stream": stream}
        assert (await client.running.client.post("/generate", json=body)).status_code == 200
        answer = await client.retrieve(PROMPT + engine.tokenizer.decode(ids))
        assert answer["exact"] is (rid == "a")
    assert (await client.stats())["contradictions"] == {"id": 1}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"text": "a", "rid": "x"}, ["x"]),
        ({"text": "a"}, [None]),
        ({"text": ["a", "b"], "rid": "x"}, ["x_0", "x_1"]),
        ({"text": ["a", "b"], "rid": ["x", "y"]}, ["x", "y"]),
        ({"text": ["a"], "rid": "x"}, ["x_0"]),
        ({"text": ["a", "b"], "rid": ["x"]}, [None, None]),
        ({"text": "a", "rid": "x", "sampling_params": {"n": 2}}, [None, None]),
        ({"text": "a", "rid": 7}, [None]),
    ],
)
def test_engines_name_the_sequences_of_an_answer(body: dict[str, Any], told: list[str | None]) -> None:
    wanted = read_generation(body)
    assert not isinstance(wanted, str)
    assert rids_of(body, wanted) == told


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b"{}", '"text" must be a string, got nothing'),
        (b'{"text": 5}', '"text" must be a string, got int'),
        (b'{"text": "a", "session_id": 5}', '"session_id" must be a string, got int'),
    ],
)
async def test_a_wrong_question_is_the_clients_fault(client: Client, body: bytes, told: str) -> None:
    answer = await client.running.client.post("/retrieve_from_text", content=body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


async def test_no_text_has_no_tokens(client: Client) -> None:
    answer = await client.retrieve("")
    assert (answer["tokens"], answer["loss_mask"], answer["rollout_logp"]) == ([], [], [])
    assert (answer["token_length"], answer["exact"]) == (0, False)


async def test_a_client_that_leaves_early_pins_nothing(client: Client, engine: ScriptedEngine) -> None:
    text = PROMPT + (await client.generate(PROMPT, [5, 6]))["text"]
    engine.delay = anyio.Event()
    engine.script.append([7])
    with pytest.raises(httpx.ReadTimeout):
        await client.running.client.post("/generate", json={"text": text + NEXT}, timeout=0.2)
    engine.delay.set()
    engine.meta = {"weight_version": "2"}
    for version in range(2, 8):
        await client.running.client.post("/weight_version", json={"weight_version": str(version)})
    assert (await client.stats())["entries"] == 0
