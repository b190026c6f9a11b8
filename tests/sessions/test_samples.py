"""``POST /sessions/{id}/samples``: every token against the engine's journal, or a 422."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest

from openai_.chat.chatting import Chat, chatting
from plugged import until
from sessions.speaking import said_by, samples_of, speak, talk

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

RECORDING = ("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache")
WHY: list[dict[str, Any]] = [{"role": "user", "content": "Why?"}]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def refused(chat: Chat, session: str, **body: Any) -> tuple[int, dict[str, Any]]:
    return await chat.refused(f"/sessions/{session}/samples", **body)


async def test_a_conversation_is_one_sample_of_what_the_engine_sampled(start: Start) -> None:
    async with chatting(start, "First.", "Second one.", "Third.") as chat:
        name = (await chat.post("/sessions"))["session_id"]
        empty = await samples_of(chat.running.client, name)
        assert (empty.samples, empty.empty_reason) == ([], "no_records")
        await talk(chat, f"/sessions/{name}", "Why?", "And?", "Then?")
        reply = await samples_of(chat.running.client, name, max_seq_len=None, metadata=None)
        (sample,) = reply.samples
        said_by(sample, *chat.entries)
        last = chat.entries[-1]
        assert sample.tokens == [*last.input_ids, *last.output_ids] == reply.metadata["accumulated_token_ids"]
        assert sample.start == len(chat.entries[0].input_ids)
        assert sample.about["response"] == chat.read(sample.tokens[sample.start :])
        assert sample.about["status"] == "completed"
        assert sample.about["weight_versions"] == ["default"] * 3
        assert sample.about["metadata"] == {"leaf": {"node_id": 2, "parent": 1, "path_node_ids": [0, 1, 2]}}
        assert (reply.empty_reason, sample.about["reward"]) == (None, None)


async def test_a_sample_is_cut_where_a_turn_passes_the_longest_length(start: Start) -> None:
    async with chatting(start, "First word.", "Second word.") as chat:
        await talk(chat, "/sessions/a", "Why?", "And?")
        one, two = chat.entries
        first, second = (len(entry.input_ids) + len(entry.output_ids) for entry in (one, two))
        inside_first, inside_second = len(one.input_ids) + 2, len(two.input_ids) + 1
        for limit, length, status in (
            (second, second, "completed"),
            (second - 1, second - 1, "truncated"),
            (inside_second, inside_second, "truncated"),
            (len(two.input_ids), first, "completed"),
            (first, first, "completed"),
            (inside_first, inside_first, "truncated"),
        ):
            (sample,) = (await samples_of(chat.running.client, "a", max_seq_len=limit)).samples
            assert (len(sample.tokens), sample.about["status"]) == (length, status)
            said_by(sample, *([one, two] if length > first else [one]))
        reply = await samples_of(chat.running.client, "a", max_seq_len=len(one.input_ids))
        assert (reply.samples, reply.empty_reason) == ([], "all_truncated")
        for wrong in (0, -1, 1.5, "7", True):
            assert (await refused(chat, "a", max_seq_len=wrong))[0] == 400
        assert (await refused(chat, "a", metadata=[]))[0] == 400
        deep = {"metadata": orjson.loads(b'{"reward":' + b"[" * 250 + b"]" * 250 + b"}")}
        assert (await samples_of(chat.running.client, "a", **deep)).samples
        deeper = {"metadata": orjson.loads(b'{"reward":' + b"[" * 400 + b"]" * 400 + b"}")}
        assert (await refused(chat, "a", **deeper))[0] == 400
        assert (await refused(chat, "a", include_retries="yes"))[0] == 400


async def test_branches_are_samples_and_what_they_share_is_trained_on_once(start: Start) -> None:
    async with chatting(start, "Root.", "Left.", "Right.", "More left.") as chat:
        root = await speak(chat, "/sessions/a", WHY)
        left = await speak(chat, "/sessions/a", [*root, user("left?")])
        await speak(chat, "/sessions/a", [*root, user("right?")])
        await speak(chat, "/sessions/a", [*left, user("more?")])
        at_root, at_left, at_right, at_more = chat.entries
        agent = {"reward": 0.5, "note": "n", "leaf": "mine"}
        reply = await samples_of(chat.running.client, "a", metadata=agent)
        longer, shorter = reply.samples
        said_by(longer, at_left, at_more)
        said_by(shorter, at_root, at_right)
        assert longer.tokens[: len(at_root.input_ids)] == list(at_root.input_ids)
        for sample in reply.samples:
            assert (sample.about["reward"], sample.about["metadata"]["note"]) == (0.5, "n")
            assert sample.about["metadata"]["leaf"] != "mine"
        assert reply.metadata["agent"] == agent


async def test_a_turn_that_was_tried_again_is_no_sample_unless_asked_for(start: Start) -> None:
    async with chatting(start, "Root.", "Try one.", "Try two.", "On.") as chat:
        root = await speak(chat, "/sessions/a", WHY)
        await speak(chat, "/sessions/a", [*root, user("q")])
        again = await speak(chat, "/sessions/a", [*root, user("q")])
        await speak(chat, "/sessions/a", [*again, user("r")])
        at_root, at_one, at_two, at_on = chat.entries
        (sample,) = (await samples_of(chat.running.client, "a")).samples
        said_by(sample, at_root, at_two, at_on)
        longer, shorter = (await samples_of(chat.running.client, "a", include_retries=True)).samples
        said_by(longer, at_two, at_on)
        said_by(shorter, at_root, at_one)


async def test_a_group_has_one_prompt_and_each_sample_is_its_own(start: Start) -> None:
    async with chatting(start, "same", "other", "same", "same") as chat:
        for name in "abcd":
            await talk(chat, f"/sessions/{name}", "Why?")
        for name, entry in zip("abcd", chat.entries, strict=True):
            (sample,) = (await samples_of(chat.running.client, name)).samples
            said_by(sample, entry)


async def test_a_turn_that_was_not_completed_is_the_last_one(start: Start) -> None:
    async with chatting(start, "one two three four five", "More.") as chat:
        cut = await speak(chat, "/sessions/a", WHY, max_tokens=3)
        (sample,) = (await samples_of(chat.running.client, "a")).samples
        assert sample.about["status"] == "truncated"
        await speak(chat, "/sessions/a", [*cut, user("And?")])
        (sample,) = (await samples_of(chat.running.client, "a")).samples
        said_by(sample, chat.entries[0])
        assert sample.about["status"] == "truncated"


async def test_a_session_with_a_loss_has_no_samples(start: Start) -> None:
    """Evicted: a sample would be missing."""
    async with chatting(start, "word " * 20, flags=("--radix-tree-max-size", "150")) as chat:
        for number in range(4):
            await talk(chat, "/sessions/a", f"Question {number}?")
        assert (await chat.running.client.get("/trajectories/a")).json()["complete"] is False
        status, error = await refused(chat, "a")
        assert (status, error["code"]) == (422, "INEXACT_SESSION")
        assert "lost" in error["message"]
        assert error["message"].endswith("(GET /trajectories/a has what is kept)")
        assert (await chat.running.client.get("/sessions/a")).json()["metadata"]["complete"] is False


async def test_tokens_without_logprobs_are_no_sample(start: Start) -> None:
    async with start(*RECORDING) as running:
        body = {"text": "Hi", "return_logprob": False, "sampling_params": {"max_new_tokens": 2}}
        assert (await running.client.post("/sessions/a/generate", json=body)).status_code == 200
        answer = await running.client.post("/sessions/a/samples")
        assert answer.status_code == 422
        assert "no_logprobs" in answer.json()["error"]["message"]
        (record,) = (await running.client.get("/sessions/a")).json()["records"]
        assert (record["exact"], record["inexact_reason"]) == (False, "no_logprobs")
        pairs = record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]
        assert [pair[0] for pair in pairs] == [None] * len(pairs)


async def test_refusal_names_the_path_of_the_session(start: Start) -> None:
    """Percent-encoded, so that it can be copied."""
    async with start(*RECORDING) as running:
        body = {"text": "Hi", "return_logprob": False, "sampling_params": {"max_new_tokens": 2}}
        await running.client.post("/generate", json=body, headers={"x-session-id": "my run/{session}"})
        answer = await running.client.post("/sessions/my%20run/%7Bsession%7D/samples")
        assert answer.status_code == 422
        path = "/trajectories/my%20run/%7Bsession%7D"
        assert answer.json()["error"]["message"].endswith(f"(GET {path} has what is known)")
        assert (await running.client.get(path)).status_code == 200


async def test_a_turn_that_still_runs_is_not_in_a_sample(start: Start) -> None:
    async with chatting(start, "Done.", "word " * 2000, tokens_per_second=100) as chat:
        done = await speak(chat, "/sessions/a", WHY)
        body = {"messages": [*done, user("And?")], "stream": True}
        async with chat.running.client.stream("POST", "/sessions/a/v1/chat/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                if "word" in line:
                    break
            assert (await chat.trajectories("a"))[0][
                "finish_reason"
            ] is None  # which records what was told so far
            (sample,) = (await samples_of(chat.running.client, "a")).samples
            said_by(sample, chat.entries[0])


async def test_only_the_kept_part_of_an_answer_is_trained_on(start: Start) -> None:
    """A search agent cuts an answer behind a tag, and goes on with the result."""
    async with start(*RECORDING) as running:
        client, base = running.client, "/sessions/a/generate"
        one = {"text": "Hello", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
        first = (await client.post(base, json=one)).json()
        ids = first["output_ids"]
        asked = first["meta_info"]["prompt_tokens"]
        tokenizer = running.router.components.get("tokenizer")
        kept = tokenizer.decode(ids[:5])
        more = {**one, "text": f"Hello{kept} found:"}
        assert (await client.post(base, json=more)).status_code == 200
        (sample,) = (await samples_of(client, "a")).samples
        assert sample.tokens[asked : asked + 5] == ids[:5]
        assert sample.loss_mask[:6] == [1, 1, 1, 1, 1, 0]
        assert sample.loss_mask[-1] == 1
        assert sample.about["metadata"]["leaf"]["path_node_ids"] == [0, 1]


async def test_stream_behind_its_kept_part_is_no_sample_of_its_own(start: Start, tmp_path: Path) -> None:
    """An agent goes on behind a tag while the engine has not noticed: the part is trained on, and once."""
    flags = ("--trajectory-log", str(tmp_path / "log"))
    async with chatting(start, "word " * 30, "More.", tokens_per_second=100, flags=flags) as chat:
        client, told = chat.running.client, ""
        async with client.stream(
            "POST", "/sessions/a/generate", json={"text": "Hi", "stream": True}
        ) as stream:
            lines = stream.aiter_lines()
            async for line in lines:
                if "word word" in line:
                    told = orjson.loads(line.removeprefix("data: "))["text"]
                    break
            await chat.post("/sessions/a/generate", text=f"Hi{told} found:")
            assert [line async for line in lines][-2] == "data: [DONE]"
        (sample,) = (await samples_of(client, "a", include_retries=True)).samples
        one, two = chat.entries
        assert len(one.output_ids) > sum(sample.loss_mask) - len(two.output_ids) > 0
        assert sample.about["metadata"]["leaf"]["path_node_ids"] == [0, 1]
        (record,) = await chat.trajectories("a")
        assert record["tokens"] == sample.tokens
        shown = (await client.get("/sessions/a")).json()
        assert [each["parent"] for each in shown["records"]] == [None, 0]
        copytree(tmp_path / "log", tmp_path / "copy")
        checkpoint = ("--hf-checkpoint", chat.engine.checkpoint, "--trajectory-log", str(tmp_path / "copy"))
        async with start("--plugin", "radix_cache", *checkpoint) as again:
            assert (await again.client.get("/sessions/a")).json() == shown
            assert (await samples_of(again.client, "a")).samples == [sample]


async def test_a_turn_whose_client_gave_up_and_asked_again_is_no_sample(start: Start) -> None:
    """Its beginning is there, and aborted: one sample, as miles' first client wants it."""
    async with chatting(start, "word " * 2000, tokens_per_second=100) as chat:
        with pytest.raises(httpx.ReadTimeout):
            await chat.running.client.post(
                "/sessions/a/v1/chat/completions", json={"messages": WHY}, timeout=0.3
            )
        await until(lambda: not any(worker.in_flight for worker in chat.running.router.pool))
        await speak(chat, "/sessions/a", WHY, max_tokens=3)
        assert len(await chat.trajectories("a")) == 2
        (sample,) = (await samples_of(chat.running.client, "a")).samples
        said_by(sample, chat.entries[1])
        _, aborted = (await samples_of(chat.running.client, "a", include_retries=True)).samples
        assert aborted.about["status"] == "aborted"


async def test_each_turn_tells_the_weights_that_it_was_sampled_under(start: Start) -> None:
    async with chatting(start, "First.", "Second.") as chat:
        said = await speak(chat, "/sessions/a", WHY)
        update = {"model_path": chat.engine.checkpoint, "weight_version": "7"}
        answer = await chat.running.client.post("/update_weights_from_disk", json=update)
        assert answer.status_code == 200, answer.text
        await speak(chat, "/sessions/a", [*said, user("And?")])
        (sample,) = (await samples_of(chat.running.client, "a")).samples
        assert sample.about["weight_versions"] == ["default", "7"]
        said_by(sample, *chat.entries)


async def test_branches_behind_a_cut_share_only_what_they_kept(start: Start) -> None:
    """The earlier leaf trains on what both have; the later one on what only it has. Of another session's, too."""
    async with start(*RECORDING) as running:
        client = running.client
        one = {"text": "Hello", "sampling_params": {"max_new_tokens": 10, "temperature": 0}}
        first = (await client.post("/sessions/a/generate", json=one)).json()
        tokenizer = running.router.components.get("tokenizer")
        few = {"max_new_tokens": 3}
        for session in ("a", "b"):
            for kept in (2, 4, 6):
                text = f"Hello{tokenizer.decode(first['output_ids'][:kept])} so {kept}"
                body = {"text": text, "sampling_params": few}
                assert (await client.post(f"/sessions/{session}/generate", json=body)).status_code == 200
            samples = (await samples_of(client, session, include_retries=True)).samples
            assert len(samples) == 3
            asked = first["meta_info"]["prompt_tokens"]
            masks = {}
            for sample in samples:
                whole = [0] * sample.start + sample.loss_mask
                same = [
                    one == two for one, two in zip(sample.tokens[asked:], first["output_ids"], strict=False)
                ]
                kept = same.index(False) if False in same else len(same)
                masks[kept] = whole[asked : asked + kept]
            assert masks == {2: [1, 1], 4: [0, 0, 1, 1], 6: [0, 0, 0, 0, 1, 1]}


@pytest.mark.parametrize("giver", ["/sessions/a", ""])
async def test_records_of_one_response_of_another_session_are_trained_on_once(
    start: Start, giver: str
) -> None:
    """One branch continues what was recorded while the response ran, the other one the whole response."""
    async with chatting(start, "word " * 30, "More.", tokens_per_second=100) as chat:
        client, told = chat.running.client, ""
        body = {"text": "Hi", "stream": True}
        async with client.stream("POST", f"{giver}/generate", json=body) as stream:
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                is_early, told = "word word" not in told, orjson.loads(line.removeprefix("data: "))["text"]
                if is_early and "word word" in told:
                    await chat.post(
                        f"{giver}/generate", text=f"Hi{told} found:"
                    )  # which records the beginning
                    await chat.post("/sessions/b/generate", text=f"Hi{told} one:")
        await chat.post("/sessions/b/generate", text=f"Hi{told} two:")
        shorter, longer = sorted(
            (await samples_of(client, "b")).samples, key=lambda sample: len(sample.tokens)
        )
        asked, part = shorter.start, shorter.loss_mask.index(0)
        assert shorter.tokens[: asked + part] == longer.tokens[: asked + part]
        trained = [[0] * (each.start - asked) + each.loss_mask[:part] for each in (shorter, longer)]
        assert [sum(each) for each in zip(*trained, strict=True)] == [1] * part
        assert longer.loss_mask[part:].count(1) > part
