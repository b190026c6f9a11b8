"""Chats whose prompt is given as token ids, and SGLang's ``meta_info`` in the answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from openai_.chat.chatting import Chat, chatting
from openai_.chat.remembered import ASK, is_continued, said, user
from openai_.chat.scripted import scripted
from openai_.chat_models.families import QWEN2_5, QWEN3, Family
from openai_.drift.rollouts import TOOLS
from slime_engine.journal import JournalEntry

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
#: There are many ways to spell it.
WORDS = "The same words, as always."
CALL = '<think>\nhm 日\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'


def spelt_oddly(family: Family, text: str) -> list[int]:
    """Ids that say ``text``, as the tokenizer would not: a token for each byte of what is no markup."""
    tokenizer = family.tokenizer
    whole = tokenizer.encode(text)
    one = {written: token for token, written in enumerate(tokenizer.token_bytes) if len(written) == 1}
    ids: list[int] = []
    for token in whole:
        written = tokenizer.token_bytes[token]
        ids += [token] if token in tokenizer.special_ids else [one[bytes([byte])] for byte in written]
    assert ids != whole
    assert tokenizer.decode(ids) == text
    return ids


def prompt(family: Family, *messages: dict[str, Any]) -> list[int]:
    text = family.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return spelt_oddly(family, text)


async def answered(chat: Chat, streamed: bool, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first choice of a whole answer, or the last chunk of a streamed one; and what was said."""
    if not streamed:
        document = await chat.post(**body)
        return document["choices"][0], document["choices"][0]["message"]
    chunks = await chat.streamed(**body)
    message: dict[str, Any] = {"content": "", "tool_calls": [], "reasoning_content": ""}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key, "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return chunks[-1]["choices"][0], message


def assert_told(meta: dict[str, Any], entry: JournalEntry) -> None:
    """``meta`` is the engine's own."""
    sampled = zip(entry.output_logprobs, entry.output_ids, strict=True)
    assert [tuple(each[:2]) for each in meta["output_token_logprobs"]] == list(sampled)
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(entry.input_ids), len(entry.output_ids))
    assert (meta["id"], meta["weight_version"]) == (entry.rid, "7")
    assert meta["finish_reason"] == entry.finish_reason
    assert "cached_tokens" in meta


@STREAMED
async def test_ids_are_sent_as_they_are_and_recorded(start: Start, streamed: bool) -> None:
    async with chatting(start, CALL, family=QWEN3, weight_version="7", moe_layers=2) as chat:
        ids = prompt(QWEN3, user("How is the weather?"))
        body: dict[str, Any] = {
            "messages": [user("Something else.")],
            "tools": TOOLS,
            "input_ids": ids,
            "session_id": "s",
            "return_meta_info": True,
            "return_routed_experts": True,
            "routed_experts_start_len": 3,
            "return_indexer_topk": True,
            "no_stop_trim": False,
            "logprobs": True,
            "max_tokens": 400,
        }
        choice, message = await answered(chat, streamed, **body)
        (entry,) = chat.entries
        (record,) = await chat.trajectories("s")
    assert list(entry.input_ids) == ids
    assert message["content"] == "", "not null"
    assert message["reasoning_content"] == "hm 日"
    [call] = message["tool_calls"]
    assert orjson.loads(call["function"]["arguments"]) == {"place": "Zürich"}
    assert choice["finish_reason"] == "tool_calls"
    meta = choice["meta_info"]
    assert_told(meta, entry)
    assert meta["routed_experts"]
    assert meta["routed_experts_start_len"] == 3
    assert "routed_experts" not in choice, "they are told once"
    assert record["exact"]
    assert record["tokens"] == [*ids, *entry.output_ids]
    assert record["loss_mask"] == [0] * len(ids) + [1] * len(entry.output_ids)


async def test_several_answers_have_each_their_own_meta_info(start: Start) -> None:
    async with chatting(start, "One two.", family=QWEN2_5, weight_version="7") as chat:
        body: dict[str, Any] = {"input_ids": prompt(QWEN2_5, user("a")), "n": 2, "return_meta_info": True}
        choices = (await chat.post(messages=[user("a")], **body))["choices"]
        by_rid = {entry.rid: entry for entry in chat.entries}
    assert len({choice["meta_info"]["id"] for choice in choices}) == 2
    for choice in choices:
        assert_told(choice["meta_info"], by_rid[choice["meta_info"]["id"]])


async def test_the_template_is_not_asked(start: Start, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    refusing = "{% if messages[0].content == 'No.' %}{{ raise_exception('no') }}{% endif %}"
    template.write_text(refusing + QWEN2_5.template)
    async with chatting(start, "Yes.", family=QWEN2_5, flags=("--chat-template", str(template))) as chat:
        status, _ = await chat.refused(messages=[user("No.")])
        assert status == 400
        document = await chat.post(messages=[user("No.")], input_ids=prompt(QWEN2_5, user("a")), **ASK)
    assert document["choices"][0]["message"]["content"] == "Yes."
    assert document["history"] == "given"
    assert document["prompt_token_ids"] == chat.consumed[0]


@pytest.mark.parametrize("prefilled", [None, "<think>\nPerhaps"])
async def test_an_answer_that_begins_within_thoughts_is_read_so(start: Start, prefilled: str | None) -> None:
    ids = [*prompt(QWEN3, user("a")), *QWEN3.tokenizer.encode(prefilled or "<think>\n")]
    messages, more = [user("a")], dict[str, Any]()
    if prefilled is not None:
        messages.append({"role": "assistant", "content": prefilled})
        more = {"continue_final_message": True}
    async with chatting(start, "it is.\n</think>\n\nYes.", family=QWEN3) as chat:
        message = (await chat.post(messages=messages, input_ids=ids, **more))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("it is.", "Yes.")


@pytest.mark.parametrize("killed", [False, True])
async def test_no_chat_goes_on_from_given_ids_or_from_anothers_answer(
    start: Start, killed: bool, tmp_path: Path
) -> None:
    """The client only claims what the ids say. An equal answer of another session is not this one's."""
    log = ("--trajectory-log", str(tmp_path))
    asked = [user("a")]
    async with chatting(start, WORDS, family=QWEN2_5, flags=log) as chat:
        given = await chat.post(messages=asked, input_ids=prompt(QWEN2_5, *asked), session_id="s", **ASK)
        if not killed:
            await _assert_closed(chat, given)
    if killed:
        async with chatting(start, WORDS, family=QWEN2_5, flags=log) as chat:
            await _assert_closed(chat, given)


async def _assert_closed(chat: Chat, given: dict[str, Any]) -> None:
    more = [user("a"), said(given), user("b")]
    assert (await chat.post(messages=more, session_id="fork", **ASK))["history"] == "fresh"
    other = await chat.post(messages=[user("a")], session_id="other", **ASK)
    assert said(other) == said(given)
    after = await chat.post(messages=more, session_id="s", **ASK)
    assert after["history"] == "fresh"
    assert not is_continued(after, other)
    assert not is_continued(after, given)
    assert after["choices"][0]["exact"]
    assert is_continued(await chat.post(messages=more, session_id="other", **ASK), other)
    own = await chat.post(messages=[*more, said(after), user("c")], session_id="s", **ASK)
    assert is_continued(own, after)
    document = (await chat.running.client.get("/trajectories/s")).json()
    assert document["complete"], "nothing was lost"


async def test_the_turn_before_a_given_one_is_gone_on_from(start: Start) -> None:
    """The answer to given ids then comes from the template, tokenised."""
    async with chatting(start, WORDS, family=QWEN2_5) as chat:
        first = await chat.post(messages=[user("a")], session_id="s", **ASK)
        more = [user("a"), said(first), user("b")]
        given = await chat.post(messages=more, input_ids=prompt(QWEN2_5, *more), session_id="s", **ASK)
        after = await chat.post(messages=[*more, said(given), user("c")], session_id="s", **ASK)
        known = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert after["history"] == "template"
        assert after["prompt_token_ids"][: len(known)] == known
        records = await chat.trajectories("s")
    assert [record["exact"] for record in records] == [True, True]


async def test_given_ids_of_the_turn_before_are_one_sample(start: Start) -> None:
    async with chatting(start, "One.", "Two.", family=QWEN2_5) as chat:
        ids = prompt(QWEN2_5, user("a"))
        for text in "bc":
            document = await chat.post(messages=[user("?")], input_ids=ids, session_id="s", **ASK)
            ids = [*ids, *document["choices"][0]["token_ids"]]
            leaf = list(ids)
            ids += QWEN2_5.tokenizer.encode(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        (record,) = await chat.trajectories("s")
        sampled = sum(map(len, chat.sampled))
    assert record["exact"]
    assert record["tokens"] == leaf
    assert sum(record["loss_mask"]) == sampled


async def _asked(
    start: Start, answer: dict[str, Any], *bodies: dict[str, Any]
) -> tuple[FakeEngine, list[Any]]:
    """An engine that has ``answer`` for each of ``bodies``, and for one more, and what the router makes of it."""
    async with scripted(start, answer, *(answer for _ in bodies)) as (running, engine):
        answers = []
        for body in bodies:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            reply = await running.client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            if body.get("stream"):
                *events, _ = reply.text.strip().split("\n\n")
                answers.append(orjson.loads(events[-1].removeprefix("data: ")))
            else:
                answers.append(reply.json())
    return engine, answers


@STREAMED
async def test_an_abort_is_passed_on_to_a_client_that_gives_ids(start: Start, streamed: bool) -> None:
    """As on ``/generate``: a trainer that ends its rollout by aborting all engines must not wait for new attempts."""
    meta = {
        "id": "r",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "completion_tokens": 1,
        "prompt_tokens": 2,
        "output_token_logprobs": [[-0.5, 39, None]],
        "indexer_topk": "AAAA",
        "indexer_topk_num_layers": 1,
    }
    asked = {"messages": [user("a")], "input_ids": [5, 6], "lora_path": "adapter", "stream": streamed}
    asked |= {"return_indexer_topk": True, "return_meta_info": True}
    without = {key: value for key, value in asked.items() if key != "return_meta_info"}
    engine, (told, plain) = await _asked(
        start, {"text": "H", "output_ids": [39], "meta_info": meta}, asked, without
    )
    assert len(engine.asked) == 2, "each is asked once"
    for body in engine.asked:
        assert body["input_ids"] == [5, 6]
        assert (body["lora_path"], body["return_indexer_topk"]) == ("adapter", True)
        assert not body.keys() & {"messages", "return_meta_info"}
    assert told["choices"][0]["finish_reason"] == "abort"
    assert told["choices"][0]["meta_info"] == meta
    assert plain["choices"][0]["finish_reason"] == "length"
    assert plain["choices"][0]["engine_finish_reason"]["type"] == "abort"


@STREAMED
@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]])
async def test_an_abort_of_a_completion_of_ids_is_passed_on(
    start: Start, streamed: bool, prompt: Any
) -> None:
    """As of a chat: TRL and rllm's gateway send ids there."""
    meta = {
        "id": "r",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "completion_tokens": 1,
        "prompt_tokens": 2,
        "output_token_logprobs": [[-0.5, 39, None]],
    }
    asked = {"prompt": prompt, "stream": streamed, "return_meta_info": True}
    answer = {"text": "H", "output_ids": [39], "meta_info": meta}
    engine, (told,) = await _asked(start, answer, asked)
    assert len(engine.asked) == 1, "it is asked once"
    assert told["choices"][0]["finish_reason"] == "abort"
