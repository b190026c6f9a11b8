"""The turn that a conversation continues from, and the reply's ``history`` field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from openai_.chat.chatting import chatting
from openai_.chat.remembered import ASK, is_continued, said, user
from openai_.chat_models.families import LLAMA, MISTRAL, QWEN2_5
from slime_openai.prompts import rendering, turn_tokens

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


async def test_the_suffix_is_what_the_template_writes_behind_an_answer(start: Start) -> None:
    """For templates that leave old turns alone, all of the prompt reads as if it were rendered at once."""
    for family in (QWEN2_5, LLAMA):
        async with chatting(start, "One.", "Two.", "Three.", family=family) as chat:
            messages = [{"role": "system", "content": "Be brief."}, user("a")]
            for turn in "bcd":
                document = await chat.post(messages=messages, **ASK)
                rendered = family.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
                assert chat.read(document["prompt_token_ids"]) == rendered
                messages += [said(document), user(turn)]


async def test_many_turns_of_a_local_template_read_as_if_rendered_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the new messages are rendered, and the ids of the end of a turn are kept for three turns."""
    monkeypatch.setattr(turn_tokens, "_CLEARED_EVERY", 3)
    monkeypatch.setattr(rendering, "_COMPARED_EVERY", 1 << 30)
    async with chatting(start, "One.", "Two.", family=QWEN2_5) as chat:
        messages = [{"role": "system", "content": "Be brief."}, user("a")]
        before = None
        for turn in "bcdefghi":
            document = await chat.post(messages=messages, **ASK)
            rendered = QWEN2_5.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            assert chat.read(document["prompt_token_ids"]) == rendered
            assert before is None or is_continued(document, before)
            before = document
            messages += [said(document), user(turn)]


async def test_without_a_session_the_content_leads_to_the_turn_before(start: Start) -> None:
    async with chatting(start, "One.", "Two.") as chat:
        first = await chat.post(messages=[user("a")], **ASK)
        assert first["history"] == "fresh"
        second = await chat.post(messages=[user("a"), said(first), user("b")], **ASK)
        assert is_continued(second, first)


async def test_a_session_goes_on_from_its_own_turn_among_those_that_read_alike(start: Start) -> None:
    async with chatting(start, "The same words.") as chat:
        first = {
            name: await chat.post(messages=[user("a")], session_id=name, **ASK)
            for name in ("one", "two", "three")
        }
        spelt = {name: tuple(document["choices"][0]["token_ids"]) for name, document in first.items()}
        assert len(set(spelt.values())) > 1, "the engine spells them in different ways"
        for name, document in first.items():
            messages = [user("a"), said(document), user("b")]
            assert is_continued(await chat.post(messages=messages, session_id=name, **ASK), document)


async def test_parallel_branches_of_a_session_are_a_tree(start: Start) -> None:
    """Sub-agents: two of them go on from the same turn, and a third one begins anew."""
    async with chatting(start, "Root.", "Left.", "Right.", "Alone.", "Left again.") as chat:
        root = await chat.post(messages=[user("a")], session_id="s", **ASK)
        left = await chat.post(messages=[user("a"), said(root), user("l")], session_id="s", **ASK)
        right = await chat.post(messages=[user("a"), said(root), user("r")], session_id="s", **ASK)
        alone = await chat.post(messages=[user("z")], session_id="s", **ASK)
        more = [user("a"), said(root), user("l"), said(left), user("m")]
        again = await chat.post(messages=more, session_id="s", **ASK)
        assert is_continued(left, root)
        assert is_continued(right, root)
        assert is_continued(again, left)
        assert alone["history"] == "fresh"
        leaves = await chat.trajectories("s")
        assert all(leaf["exact"] for leaf in leaves)
        assert sorted(leaf["tokens"] for leaf in leaves) == sorted(
            document["prompt_token_ids"] + document["choices"][0]["token_ids"]
            for document in (right, alone, again)
        )


@pytest.mark.parametrize(
    "changed",
    [
        [user("A"), {"role": "assistant", "content": "One."}, user("b")],
        [user("a"), {"role": "assistant", "content": "One, or so."}, user("b")],
        [{"role": "system", "content": "s"}, user("a"), {"role": "assistant", "content": "One."}, user("b")],
    ],
    ids=["question", "answer", "system prompt"],
)
async def test_other_words_are_another_conversation(start: Start, changed: list[dict[str, Any]]) -> None:
    async with chatting(start, "One.", "Two.") as chat:
        first = await chat.post(messages=[user("a")], session_id="s", **ASK)
        second = await chat.post(messages=changed, session_id="s", **ASK)
        assert not is_continued(second, first)
        assert second["history"] == "fresh"


async def test_other_tools_are_another_conversation(start: Start) -> None:
    """They stand at the beginning of the prompt, where the model must see them."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with chatting(start, "One.", "Two.") as chat:
        first = await chat.post(messages=[user("a")], **ASK)
        second = await chat.post(messages=[user("a"), said(first), user("b")], tools=[tool], **ASK)
        assert second["history"] == "fresh"
        assert '"name": "f"' in chat.read(second["prompt_token_ids"])


async def test_an_answer_that_was_cut_short_is_closed_by_the_template(start: Start) -> None:
    """No end token was sampled, so the prompt has it, with mask 0."""
    async with chatting(start, "One two three four five six seven.", "Two.", family=QWEN2_5) as chat:
        first = await chat.post(messages=[user("a")], session_id="s", return_token_ids=True, max_tokens=3)
        assert first["choices"][0]["finish_reason"] == "length"
        second = await chat.post(messages=[user("a"), said(first), user("b")], session_id="s", **ASK)
        assert is_continued(second, first)
        behind = second["prompt_token_ids"][len(first["prompt_token_ids"]) + 3 :]
        assert chat.read(behind).startswith("<|im_end|>\n<|im_start|>user\nb<|im_end|>")
        (leaf,) = await chat.trajectories("s")
        size = len(first["prompt_token_ids"])
        assert leaf["loss_mask"][size : size + 4] == [1, 1, 1, 0]


async def test_a_final_message_is_continued_within_its_own_tokens(start: Start) -> None:
    async with chatting(start, "One two three four five six seven.", " and eight.", family=QWEN2_5) as chat:
        first = await chat.post(messages=[user("a")], session_id="s", return_token_ids=True, max_tokens=4)
        messages = [user("a"), said(first)]
        second = await chat.post(messages=messages, session_id="s", continue_final_message=True, **ASK)
        known = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert second["prompt_token_ids"] == known
        whole = said(first)["content"] + said(second)["content"]
        third = await chat.post(
            messages=[user("a"), {"role": "assistant", "content": whole}, user("b")], session_id="s", **ASK
        )
        assert is_continued(third, second)
        (leaf,) = await chat.trajectories("s")
        assert leaf["loss_mask"][len(first["prompt_token_ids"]) : len(known)] == [1] * 4


async def test_message_nobody_generated_is_continued_by_the_template(start: Start) -> None:
    async with chatting(start, " world.", family=QWEN2_5) as chat:
        messages = [user("a"), {"role": "assistant", "content": "Hello"}]
        document = await chat.post(messages=messages, continue_final_message=True, **ASK)
        assert document["history"] == "fresh"
        assert chat.read(document["prompt_token_ids"]).endswith("<|im_start|>assistant\nHello")


async def test_each_of_several_answers_can_be_continued(start: Start) -> None:
    async with chatting(start, "Same.", "Two.") as chat:
        first = await chat.post(messages=[user("a")], n=3, session_id="s", **ASK)
        assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
        second = await chat.post(messages=[user("a"), said(first, 2), user("b")], session_id="s", **ASK)
        assert is_continued(second, first, 2)  # the newest of three that read alike


async def test_part_of_a_stream_read_before_a_disconnect_can_be_continued(start: Start) -> None:
    async with chatting(
        start, "One two three four five six.", "Two.", tokens_per_second=40, family=QWEN2_5
    ) as chat:
        body = {"messages": [user("a")], "stream": True, "session_id": "s", "max_tokens": 60}
        text, chunks = "", 0
        async with chat.running.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += orjson.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    chunks += 1
                    if chunks == 5:
                        break
        messages = [user("a"), {"role": "assistant", "content": text}, user("b")]
        second = await chat.post(messages=messages, session_id="s", **ASK)
        assert second["history"] == "exact"
        assert chat.read(second["prompt_token_ids"]).count(text + "<|im_end|>\n<|im_start|>user\nb") == 1


async def test_a_stop_string_that_was_trimmed_stays_among_the_tokens(start: Start) -> None:
    async with chatting(start, "One </stop> two.", "Two.", family=QWEN2_5) as chat:
        first = await chat.post(messages=[user("a")], stop=["</stop>"], session_id="s", **ASK)
        assert said(first)["content"] == "One "
        second = await chat.post(messages=[user("a"), said(first), user("b")], session_id="s", **ASK)
        assert is_continued(second, first)
        assert "One </stop><|im_end|>\n<|im_start|>user\nb" in chat.read(second["prompt_token_ids"])


async def test_least_recently_used_conversation_is_evicted_and_begins_anew(start: Start) -> None:
    async with chatting(start, "One.", flags=("--history-max-bytes", "3000")) as chat:
        first = await chat.post(messages=[user("a")], **ASK)
        for number in range(5):
            await chat.post(messages=[user(f"other {number}")], **ASK)
        second = await chat.post(messages=[user("a"), said(first), user("b")], **ASK)
        assert second["history"] == "fresh"
        assert second["choices"][0]["exact"]


async def test_mistrals_tools_stay_where_they_were(start: Start) -> None:
    """Its template moves them to the last question: the tokens before stay, and the model sees the tools there too."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with chatting(start, "One.", "Two.", family=MISTRAL) as chat:
        first = await chat.post(messages=[user("a")], tools=[tool], **ASK)
        second = await chat.post(messages=[user("a"), said(first), user("b")], tools=[tool], **ASK)
        assert is_continued(second, first)
        assert chat.read(second["prompt_token_ids"]).count("[AVAILABLE_TOOLS]") == 2


async def test_with_history_by_template_old_thoughts_are_dropped_as_it_says(start: Start) -> None:
    async with chatting(
        start, "<think>\nhm\n</think>\n\nOne.", "Two.", flags=("--history", "template")
    ) as chat:
        first = await chat.post(messages=[user("a")], session_id="s", **ASK)
        second = await chat.post(messages=[user("a"), said(first), user("b")], session_id="s", **ASK)
        assert second["history"] == "template"
        assert "hm" not in chat.read(second["prompt_token_ids"])
        leaves = await chat.trajectories("s")
        assert [leaf["exact"] for leaf in leaves] == [True, True]
