"""Small claims that were wrong: counts of cut texts, white space, sessions named twice, adapters, unknown fields."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from radix_cache.claims import AS_IDS, NEXT, PROMPT, STREAMED, ask, in_pieces, session_of, trained, until
from radix_cache.scripted import Client, ScriptedEngine, bits, routed
from sessions.speaking import samples_of
from slime_engine.tokenizer import corpus_documents
from slime_radix_cache.tokens.encoding import Encoder

if TYPE_CHECKING:
    from pathlib import Path

    from routers import Start

pytestmark = pytest.mark.anyio

MINE, LAST = [5, 6], [7, 8]


@pytest.mark.parametrize("session", ["s", None])
async def test_an_empty_text_is_not_exact(client: Client, session: str | None) -> None:
    """No engine consumed or sampled anything of it, before and after a generation."""
    for _ in range(2):
        answer = await client.retrieve("", session_id=session)
        assert (answer["exact"], answer["inexact_reason"]) == (False, "uncovered_text")
        assert (answer["tokens"], answer["loss_mask"], answer["rollout_logp"]) == ([], [], [])
        await client.generate(PROMPT, MINE, "s")


async def test_candidates_of_a_cut_text_count_all_that_read_so(client: Client) -> None:
    tokenizer = client.engine.tokenizer
    for words in (tokenizer.encode("harbour"), in_pieces(client, "harbour")):
        await ask(client, PROMPT, [*words, *MINE])
    answer = await client.retrieve(PROMPT + "harbour")
    assert answer["exact"]
    assert (answer["candidates"], answer["candidates_relation"]) in [(2, "eq"), (2, "gte"), (1, "gte")]


async def test_candidates_of_a_cut_text_count_a_whole_one_too(client: Client) -> None:
    tokenizer = client.engine.tokenizer
    await ask(client, PROMPT, tokenizer.encode("harbour"))
    await ask(client, PROMPT, [*in_pieces(client, "harbour"), *MINE])
    answer = await client.retrieve(PROMPT + "harbour")
    assert answer["exact"]
    assert (answer["candidates"], answer["candidates_relation"]) in [(2, "eq"), (2, "gte"), (1, "gte")]


async def test_candidates_count_a_prompt_that_another_text_led_to_first(client: Client) -> None:
    """A special token in the middle is written out by whoever decodes the ids, and not by whoever heard the text."""
    tokenizer = client.engine.tokenizer
    [special] = tokenizer.encode("<|endoftext|>")
    said = await client.generate(PROMPT, [5, special, 6], "a")
    await client.generate(PROMPT + said["text"] + NEXT, [7], "a")
    prompt, _, _ = client.last()
    await client.give(prompt, [client.engine.eos], "b")
    answer = await client.retrieve(tokenizer.decode(prompt))
    assert (answer["exact"], answer["tokens"]) == (True, [*prompt, client.engine.eos])
    assert (answer["candidates"], answer["candidates_relation"]) == (2, "eq")  # the prompt alone reads alike


@pytest.fixture
async def plain(
    start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path
) -> Any:  # an async generator of a Client
    """A router with a template that puts nothing around a content."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = tmp_path / "tokenizer_config.json"
    config.write_bytes(orjson.dumps(orjson.loads(config.read_bytes()) | {"chat_template": template}))
    async with routed(start, engine, str(tmp_path)) as client:
        yield client


async def test_white_space_that_a_client_wrote_is_not_dropped(plain: Client) -> None:
    await ask(plain, "hello", MINE, "s")
    said = plain.engine.tokenizer.decode(MINE)
    for space in (" ", "\n\n", " \n"):
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": said + space}]
        answer = (
            await plain.running.client.post(
                "/retrieve_from_messages_template", json={"messages": messages, "session_id": "s"}
            )
        ).json()
        assert answer["response"] == "hello" + said + space
        assert (answer["exact"], answer["inexact_reason"]) == (False, "uncovered_text")


@AS_IDS
@STREAMED
async def test_the_header_names_the_session_that_generates(
    client: Client, as_ids: bool, streamed: bool
) -> None:
    prompt: Any = client.engine.tokenizer.encode(PROMPT) if as_ids else PROMPT
    await ask(client, prompt, MINE, "header", streamed=streamed, session_id="body")
    assert len((await session_of(client, "header"))["trajectories"]) == 1
    assert (await session_of(client, "body"))["trajectories"] == []


@pytest.mark.parametrize("header", ["x-session-id", "x-smg-routing-key"])
async def test_the_header_names_the_session_that_retrieves(client: Client, header: str) -> None:
    await ask(client, PROMPT, MINE, headers={header: "header"}, session_id="body")
    content = client.engine.tokenizer.decode(MINE)
    questions: dict[str, Any] = {
        "/retrieve_from_text": {"text": PROMPT + content},
        "/retrieve_from_messages_template": {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": content},
            ]
        },
    }
    for path, body in questions.items():
        answer = await client.running.client.post(
            path, json=body | {"session_id": "body"}, headers={header: "header"}
        )
        assert trained(answer.json()) == MINE, path
        if path == "/retrieve_from_text":
            assert answer.json()["exact"]


async def test_an_empty_session_header_hides_no_other_one(client: Client) -> None:
    """Generating takes the first that names one, and so does retrieving."""
    await ask(client, PROMPT, in_pieces(client, "harbour"), "b")
    headers = [("x-session-id", ""), ("x-session-id", "a")]
    body = {"text": PROMPT + "harbour"}
    answer = (await client.running.client.post("/retrieve_from_text", json=body, headers=headers)).json()
    assert (answer["inexact_reason"], trained(answer)) == ("other_session", [])


async def test_the_session_header_comes_before_the_routing_key(client: Client) -> None:
    headers = {"x-session-id": "session", "x-smg-routing-key": "key"}
    await ask(client, PROMPT, MINE, headers=headers, session_id="body")
    body = {"text": PROMPT + client.engine.tokenizer.decode(MINE), "session_id": "body"}
    answer = await client.running.client.post("/retrieve_from_text", json=body, headers=headers)
    assert answer.json()["exact"]
    assert len((await session_of(client, "session"))["trajectories"]) == 1


@pytest.mark.parametrize("reason", ["stop", 7, {}, {"type": None}], ids=str)
async def test_records_show_whatever_end_an_engine_tells(
    start: Start, engine: ScriptedEngine, checkpoint: str, reason: Any
) -> None:
    async with routed(start, engine, checkpoint, "--plugin", "sessions") as client:
        engine.meta = {"finish_reason": reason}
        await ask(client, PROMPT, MINE, "s")
        answer = await client.running.client.get("/sessions/s")
        assert answer.status_code == 200, answer.text
        (record,) = answer.json()["records"]
        assert record["exact"] is isinstance(reason, dict)
        assert record["response"]["choices"][0]["finish_reason"] is None


class TestAdapters:
    """``lora_path`` is a part of the policy."""

    @AS_IDS
    @STREAMED
    @pytest.mark.parametrize(
        ("first", "second"), [("A", "B"), ("A", None), (None, "B")], ids=["AB", "A-", "-B"]
    )
    async def test_tokens_of_another_adapter_have_mask_0(
        self, client: Client, first: str | None, second: str | None, as_ids: bool, streamed: bool
    ) -> None:
        tokenizer = client.engine.tokenizer
        await ask(client, PROMPT, MINE, "s", streamed=streamed, lora_path=first)
        text = PROMPT + tokenizer.decode(MINE) + NEXT
        prompt: Any = tokenizer.encode(PROMPT) + MINE + tokenizer.encode(NEXT) if as_ids else text
        await ask(client, prompt, LAST, "s", streamed=streamed, lora_path=second)
        assert client.engine.consumed[-1] == tokenizer.encode(PROMPT) + MINE + tokenizer.encode(NEXT)
        answer = await client.retrieve(text + tokenizer.decode(LAST), session_id="s")
        (record,) = (await session_of(client, "s"))["trajectories"]
        for told in (answer, record):
            assert (told["exact"], trained(told)) == (True, LAST)
            size = len(told["tokens"]) - len(LAST)
            assert bits(told["rollout_logp"][:size]) == bits([0.0] * size)
            assert told["generation_versions"][:size] == [-1] * size
        assert trained(await client.retrieve(PROMPT + tokenizer.decode(MINE), session_id="s")) == MINE

    async def test_a_sample_of_one_adapter_keeps_no_token_from_that_of_another(
        self, start: Start, engine: ScriptedEngine, checkpoint: str
    ) -> None:
        """Both go on from what A sampled: the sample of B, which comes first, does not train on it."""
        tokenizer, mine, last = engine.tokenizer, [*MINE, engine.eos], [*LAST, engine.eos]
        async with routed(start, engine, checkpoint, "--plugin", "sessions") as client:
            await ask(client, PROMPT, mine, "s", lora_path="A")
            for adapter in ("B", "A"):
                text = PROMPT + tokenizer.decode(MINE) + NEXT.replace("and?", adapter)
                await ask(client, text, last, "s", lora_path=adapter)
            samples = (await samples_of(client.running.client, "s", include_retries=True)).samples
        masks = {}
        for sample in samples:
            response = zip(sample.tokens[sample.start :], sample.loss_mask, strict=True)
            adapter = "A" if sample.about["metadata"]["leaf"]["node_id"] == 2 else "B"
            masks[adapter] = [token for token, is_trained in response if is_trained]
        assert masks == {"A": mine + last, "B": last}

    async def test_one_adapter_keeps_its_mask(self, client: Client) -> None:
        tokenizer = client.engine.tokenizer
        await ask(client, PROMPT, MINE, "s", lora_path="A")
        text = PROMPT + tokenizer.decode(MINE) + NEXT
        await ask(client, text, LAST, "s", lora_path="A")
        answer = await client.retrieve(text + tokenizer.decode(LAST), session_id="s")
        assert (answer["exact"], trained(answer)) == (True, MINE + LAST)

    async def test_each_prompt_of_a_batch_has_its_adapter(self, client: Client) -> None:
        tokenizer = client.engine.tokenizer
        meta = {"finish_reason": {"type": "length", "length": 2}, "completion_tokens": 2}
        outputs = [
            {
                "text": tokenizer.decode(ids),
                "output_ids": ids,
                "meta_info": meta | {"output_token_logprobs": [[-0.5, one, None] for one in ids]},
            }
            for ids in (MINE, LAST)
        ]
        client.engine.script.append((200, orjson.dumps(outputs)))
        body = {"text": [PROMPT, "else"], "lora_path": ["A", None]}
        await client.running.client.post("/generate", json=body, headers={"x-session-id": "s"})
        for prompt, ids, kept in ((PROMPT, MINE, True), ("else", LAST, False)):
            text = prompt + tokenizer.decode(ids) + NEXT
            await ask(client, text, [9, 10], "s", lora_path="A")
            answer = await client.retrieve(text + tokenizer.decode([9, 10]), session_id="s")
            assert trained(answer) == [*(ids if kept else []), 9, 10]

    async def test_a_record_outlives_a_restart_with_its_adapters(
        self, start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path
    ) -> None:
        flags = ("--trajectory-log", str(tmp_path / "log"))
        text = PROMPT + engine.tokenizer.decode(MINE) + NEXT
        async with routed(start, engine, checkpoint, *flags) as client:
            await ask(client, PROMPT, MINE, "s", lora_path="A")
        async with routed(start, engine, checkpoint, *flags) as client:
            await ask(client, text, LAST, "s", lora_path="B")
            (record,) = (await session_of(client, "s"))["trajectories"]
            assert trained(record) == LAST


class TestUnknownFields:
    """A field that the router does not know to be harmless makes a record inexact, by name."""

    @AS_IDS
    @STREAMED
    @pytest.mark.parametrize(
        ("body", "name"),
        [
            ({"positional_embed_overrides": [1]}, "positional_embed_overrides"),
            ({"mystery": {"x": 1}}, "mystery"),
            ({"sampling_params": {"riddle": 1}}, "riddle"),
            ({"zebra": 1, "sampling_params": {"ant": 1}}, "ant"),
        ],
    )
    async def test_a_record_is_inexact_by_the_name_of_the_field(
        self, client: Client, body: dict[str, Any], name: str, as_ids: bool, streamed: bool
    ) -> None:
        tokenizer = client.engine.tokenizer
        prompt: Any = tokenizer.encode(PROMPT) if as_ids else PROMPT
        await ask(client, prompt, MINE, "s", streamed=streamed, **body)
        text = PROMPT + tokenizer.decode(MINE)
        assert not body.keys() - client.engine.asked[-1].keys()
        for told in [
            await client.retrieve(text, session_id="s"),
            *(await session_of(client, "s"))["trajectories"],
        ]:
            assert (told["exact"], told["inexact_reason"]) == (False, f"unknown_field:{name}")
        await ask(client, text + NEXT, LAST, "s")
        assert client.engine.consumed[-1] == tokenizer.encode(PROMPT) + MINE + tokenizer.encode(NEXT)
        for told in [
            await client.retrieve(text + NEXT + tokenizer.decode(LAST), session_id="s"),
            *(await session_of(client, "s"))["trajectories"],
        ]:
            assert (told["exact"], told["inexact_reason"]) == (False, f"unknown_field:{name}")

    async def test_an_empty_field_is_not_one(self, client: Client) -> None:
        await ask(client, PROMPT, MINE, "s", mystery=None, sampling_params={"riddle": None})
        text = PROMPT + client.engine.tokenizer.decode(MINE)
        assert (await client.retrieve(text, session_id="s"))["exact"]

    async def test_known_fields_are_harmless(self, client: Client) -> None:
        known: dict[str, Any] = {
            "rid": "r",
            "priority": 3,
            "extra_key": None,
            "sampling_params": {"temperature": 0.7},
        }
        await ask(client, PROMPT, MINE, "s", **known)
        text = PROMPT + client.engine.tokenizer.decode(MINE)
        assert (await client.retrieve(text, session_id="s"))["exact"]

    async def test_the_name_outlives_a_restart(
        self, start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path
    ) -> None:
        flags = ("--trajectory-log", str(tmp_path / "log"))
        async with routed(start, engine, checkpoint, *flags) as client:
            await ask(client, PROMPT, MINE, "s", mystery=1)
        async with routed(start, engine, checkpoint, *flags) as client:
            answer = await client.retrieve(PROMPT + engine.tokenizer.decode(MINE), session_id="s")
            assert answer["inexact_reason"] == "unknown_field:mystery"


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
async def test_retrieval_in_mid_stream_gives_no_half_character(client: Client, incremental: bool) -> None:
    """The text of a stream so far ends where a character ends; what its half has begun is not of that text."""
    engine = client.engine
    half = [engine.tokenizer.token_bytes.index(bytes([one])) for one in "☔".encode()]
    ids = [*MINE, *half, *LAST]
    engine.hold, engine.hold_after, engine.incremental = anyio.Event(), len(MINE) + 1, incremental
    text = PROMPT + engine.tokenizer.decode(MINE)

    async def is_exact() -> bool:
        return (await client.retrieve(text, session_id="s"))["exact"] is True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: ask(client, PROMPT, ids, "s", streamed=True))
        await until(is_exact)
        answer = await client.retrieve(text, session_id="s")
        (record,) = (await session_of(client, "s"))["trajectories"]
        engine.hold.set()
    assert answer["tokens"] == engine.tokenizer.encode(PROMPT) + MINE
    assert "\ufffd" not in record["text"]
    answer = await client.retrieve(text, session_id="s")
    assert answer["tokens"] == engine.tokenizer.encode(PROMPT) + MINE


def test_a_tokenizer_that_rewrites_line_ends_is_refused() -> None:
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Replace("\r\n", "\n")
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus_documents()[:3], trainer)
    bpe.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    wrapper: Any = PreTrainedTokenizerFast  # its annotations are missing
    tokenizer = wrapper(tokenizer_object=bpe, clean_up_tokenization_spaces=False, eos_token="<|im_end|>")
    assert tokenizer.decode(tokenizer.encode("a\r\nb")) == "a\nb"
    assert Encoder(tokenizer).refused == "lossy_tokenizer"
