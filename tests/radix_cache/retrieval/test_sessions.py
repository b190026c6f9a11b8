"""``GET /trajectories/{session}``: the leaves of a session, held against the journal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import httpx
import pytest

from radix_cache.rolled import RolledSession, journals, roll, truth
from radix_cache.scripted import Client, ScriptedEngine, bits, routed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class SessionRollouts:
    """Sessions of rollout code, and what the engine's journal says of them."""

    client: httpx.AsyncClient
    engine: str

    async def generate(self, text: str, session: str, **parameters: Any) -> Any:
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": 12, "temperature": 1.2, "ignore_eos": True} | parameters,
            "session_id": session,
        }
        answer = await self.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def trajectories(self, session: str) -> list[dict[str, Any]]:
        answer = await self.client.get(f"/trajectories/{quote(session, safe='')}")
        assert answer.status_code == 200, answer.text
        document = answer.json()
        assert (document["session_id"], document["complete"]) == (session, True)
        records: list[dict[str, Any]] = document["trajectories"]
        return records

    async def journal(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = (await self.client.get(f"{self.engine}/journal")).json()["entries"]
        return entries

    async def set_weights(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        assert (await self.client.post(f"{self.engine}/update_weight_version", json=body)).status_code == 200


@pytest.fixture
async def rollouts(start: Start) -> AsyncIterator[SessionRollouts]:
    async with start("--plugin", "engine", "--engine-seed", "3", "--plugin", "radix_cache") as running:
        (engine,) = (await running.client.get("/list_workers")).json()["urls"]
        yield SessionRollouts(running.client, engine)


def is_of(record: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Return True when ``record`` ends with the tokens of the journal's ``entry``."""
    sampled = len(entry["output_ids"])
    return (
        record["tokens"] == entry["input_ids"] + entry["output_ids"]
        and record["loss_mask"][-sampled:] == [1] * sampled
        and bits(record["rollout_logp"][-sampled:]) == bits(entry["output_logprobs"])
        and record["generation_versions"][-sampled:] == entry["output_versions"]
    )


def is_dropped(entry: dict[str, Any], record: dict[str, Any]) -> bool:
    """Return True when nothing that ``entry`` sampled is in ``record``."""
    start = len(entry["input_ids"])
    return record["tokens"][:start] != entry["input_ids"] or not record["loss_mask"][start]


class TestTrajectories:
    async def test_a_conversation_is_one_record_however_many_turns_it_had(
        self, rollouts: SessionRollouts
    ) -> None:
        text = PROMPT
        for turn in range(3):
            text += (await rollouts.generate(text, "s"))["text"] + (NEXT if turn < 2 else "")
        (record,) = await rollouts.trajectories("s")
        first, second, last = await rollouts.journal()
        assert is_of(record, last)
        assert record["exact"]
        assert record["inexact_reason"] is None
        assert record["text"] == text == record["prompt"] + record["response"]
        assert record["prompt"] == PROMPT
        assert record["prompt_length"] == len(first["input_ids"])
        assert record["prompt_length"] + record["response_length"] == len(record["tokens"])
        assert sum(record["loss_mask"]) == sum(len(entry["output_ids"]) for entry in (first, second, last))
        assert record["finish_reason"] == last["finish_reason"]
        assert record["parent"] is None

    async def test_a_record_is_what_its_text_retrieves(self, rollouts: SessionRollouts) -> None:
        text = PROMPT + (await rollouts.generate(PROMPT, "s"))["text"] + NEXT
        await rollouts.generate(text, "s", stop=["e", "t"])
        (record,) = await rollouts.trajectories("s")
        asked = {"text": record["text"], "session_id": "s"}
        answer = (await rollouts.client.post("/retrieve_from_text", json=asked)).json()
        assert answer.pop("response") == record["text"]
        assert answer == {key: record[key] for key in answer}

    async def test_samples_of_one_prompt_share_it(self, rollouts: SessionRollouts) -> None:
        answers = await rollouts.generate(PROMPT, "group", n=4)
        records = await rollouts.trajectories("group")
        entries = await rollouts.journal()
        assert len(records) == len(entries) == 4
        assert sorted(record["response"] for record in records) == sorted(one["text"] for one in answers)
        assert all(any(is_of(record, entry) for entry in entries) for record in records)
        prompt = len(entries[0]["input_ids"])
        assert [record["parent"] for record in records] == [None, *[{"index": 0, "tokens": prompt}] * 3]

    async def test_a_fork_shares_what_was_before_it(self, rollouts: SessionRollouts) -> None:
        """The second turn is taken twice; the first one is no leaf."""
        text = PROMPT + (await rollouts.generate(PROMPT, "s"))["text"] + NEXT
        await rollouts.generate(text, "s")
        await rollouts.generate(text, "s")
        await rollouts.generate("another beginning", "s")
        records = await rollouts.trajectories("s")
        _, one, two, other = await rollouts.journal()
        assert [is_of(*pair) for pair in zip(records, (one, two, other), strict=True)] == [True] * 3
        assert [record["parent"] for record in records] == [
            None,
            {"index": 0, "tokens": len(one["input_ids"])},
            None,
        ]

    async def test_a_fork_inside_a_response_shares_what_was_kept_of_it(
        self, rollouts: SessionRollouts
    ) -> None:
        """Both go on from the first response: one from all of it, one from a few tokens."""
        first = await rollouts.generate(PROMPT, "s")
        await rollouts.generate(PROMPT + first["text"] + NEXT, "s")
        (entry, *_) = await rollouts.journal()
        kept = [*entry["input_ids"], *entry["output_ids"][:5]]
        body = {"input_ids": [*kept, 300], "session_id": "s", "sampling_params": {"max_new_tokens": 4}}
        assert (await rollouts.client.post("/generate", json=body)).status_code == 200
        _, forked = await rollouts.trajectories("s")
        assert forked["parent"] == {"index": 0, "tokens": len(kept)}
        assert forked["loss_mask"][: len(kept) + 1] == [0] * len(entry["input_ids"]) + [1] * 5 + [0]

    async def test_weights_are_told_by_token(self, rollouts: SessionRollouts) -> None:
        await rollouts.set_weights("6")
        first = await rollouts.generate(PROMPT, "s")
        await rollouts.set_weights("7")
        await rollouts.generate(PROMPT + first["text"] + NEXT, "s")
        (record,) = await rollouts.trajectories("s")
        one, two = await rollouts.journal()
        begins, resumes = len(one["input_ids"]), len(two["input_ids"])
        assert record["weight_versions"] == [
            {"version": "6", "start": begins, "end": begins + len(one["output_ids"])},
            {"version": "7", "start": resumes, "end": resumes + len(two["output_ids"])},
        ]

    async def test_weights_that_change_within_a_response_are_told_by_token(self, client: Client) -> None:
        spans = [{"version": "6", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 3}]
        client.engine.meta = {"weight_versions": spans, "weight_version": "7"}
        await client.generate(PROMPT, [5, 6, 7], session="s")
        (record,) = (await client.running.client.get("/trajectories/s")).json()["trajectories"]
        begins = len(client.engine.consumed[0])
        assert record["weight_versions"] == [
            {"version": "6", "start": begins, "end": begins + 2},
            {"version": "7", "start": begins + 2, "end": begins + 3},
        ]
        assert record["generation_versions"] == [-1] * begins + ["6", "6", "7"]

    async def test_an_unknown_session_is_told_so(self, rollouts: SessionRollouts) -> None:
        await rollouts.generate(PROMPT, "s")
        for path in ("/trajectories/other", "/trajectories/"):
            answer = await rollouts.client.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "SESSION_NOT_FOUND"

    @pytest.mark.parametrize("session", ["a b", "a/b", "100%?x=1#y", "a%2Fb", "é ☔", "/"])
    async def test_any_name_of_a_session_can_be_asked_for(
        self, rollouts: SessionRollouts, session: str
    ) -> None:
        await rollouts.generate(PROMPT, session)
        assert len(await rollouts.trajectories(session)) == 1

    async def test_reading_changes_nothing(self, rollouts: SessionRollouts) -> None:
        await rollouts.generate(PROMPT, "s", n=2)
        stats = (await rollouts.client.get("/cache_stats")).json()
        before = await rollouts.trajectories("s")
        assert await rollouts.trajectories("s") == before
        after = (await rollouts.client.get("/cache_stats")).json()
        assert after["retrieved"] == stats["retrieved"]
        kept = ("entries", "tokens", "bytes", "evictions", "requests")
        assert [after[key] for key in kept] == [stats[key] for key in kept]

    async def test_rest_of_a_broken_stream_is_a_leaf_without_an_end(
        self, client: Client, engine: ScriptedEngine
    ) -> None:
        """And asking for it does not break it off."""
        engine.hold, engine.hold_after = anyio.Event(), 3
        engine.script.append([5, 6, 7, 8])
        body = {"text": PROMPT, "session_id": "s", "stream": True}
        async with client.running.client.stream("POST", "/generate", json=body) as reply:
            events = reply.aiter_lines()
            while '"completion_tokens":3' not in await anext(events):
                pass
            (part,) = (await client.running.client.get("/trajectories/s")).json()["trajectories"]
            assert part["tokens"][-3:] == [5, 6, 7]
            assert part["finish_reason"] is None
            engine.hold.set()
            assert [line async for line in events]
        (whole,) = (await client.running.client.get("/trajectories/s")).json()["trajectories"]
        assert whole["tokens"][-4:] == [5, 6, 7, 8]
        assert whole["finish_reason"] == {"type": "length", "length": 4}

    @pytest.fixture
    async def crowded(self, start: Start, engine: ScriptedEngine, checkpoint: str) -> AsyncIterator[Client]:
        """There is room for a conversation of some tokens only."""
        async with routed(start, engine, checkpoint, "--radix-tree-max-size", "40") as client:
            yield client

    async def test_where_the_end_had_to_go_the_rest_is_not_taken_for_a_whole(self, crowded: Client) -> None:
        text = PROMPT + (await crowded.generate(PROMPT, [5, 6], session="s"))["text"] + NEXT
        await crowded.generate(text, [7, 8], session="s")
        prompt = len(crowded.engine.consumed[0])
        await crowded.generate("x" * 10, [5] * 15, session="other")
        answer = (await crowded.running.client.get("/trajectories/s")).json()
        assert answer["complete"] is False
        (record,) = answer["trajectories"]
        assert (record["exact"], record["inexact_reason"]) == (False, "evicted")
        assert len(record["tokens"]) == prompt + 2
        assert (await crowded.running.client.get("/trajectories/other")).json()["complete"] is True

    async def test_a_session_of_which_nothing_is_left_is_unknown(self, crowded: Client) -> None:
        await crowded.generate(PROMPT, [5, 6], session="s")
        await crowded.generate("x" * 10, [5] * 39, session="other")
        assert (await crowded.running.client.get("/trajectories/s")).status_code == 404

    async def test_a_large_session_is_the_same(self, client: Client) -> None:
        """It is written in a thread."""
        for number in range(4):
            await client.generate(f"{number}", list(range(300, 400)) * 50, session="s")
        records = (await client.running.client.get("/trajectories/s")).json()["trajectories"]
        journal = zip(client.engine.consumed, client.engine.sampled, strict=True)
        for record, (consumed, (ids, logprobs)) in zip(records, journal, strict=True):
            assert record["tokens"] == consumed + ids
            assert bits(record["rollout_logp"][-5000:]) == bits(logprobs)

    async def test_a_response_without_logprobs_is_not_exact(self, client: Client) -> None:
        await client.generate(PROMPT, [5, 6], session="s", return_logprob=False)
        (record,) = (await client.running.client.get("/trajectories/s")).json()["trajectories"]
        assert (record["exact"], record["inexact_reason"]) == (False, "no_logprobs")
        assert record["rollout_logp"][-2:] == [None, None]


async def test_every_session_of_many_conversations_is_one_exact_record(start: Start) -> None:
    """Of every kind, together: the leaf is where the client stopped, whatever it did to the text on its way."""
    async with start("--plugin", "engine", "--engine-seed", "1", "--plugin", "radix_cache") as running:
        kinds = ("template", "strip", "cut", "append")
        rollouts = [
            RolledSession(f"{kind}/{n}", Random(f"{kind}{n}"), kind) for kind in kinds for n in range(4)
        ]
        async with anyio.create_task_group() as tasks:
            for rollout in rollouts:
                tasks.start_soon(roll, running.client, rollout, 3)
        entries = await journals(running.client)
        for rollout in rollouts:
            path = f"/trajectories/{quote(rollout.name, safe='')}"
            *others, record = (await running.client.get(path)).json()["trajectories"]
            # A response that was cut within its first token is in no later context: a leaf of its own.
            dropped = [entry for entry in map(entries.__getitem__, rollout.rids) if is_dropped(entry, record)]
            assert all(is_of(*pair) for pair in zip(others, dropped, strict=True))
            tokens, known = truth(rollout, entries)
            assert record["exact"], record["inexact_reason"]
            assert record["text"] == rollout.text
            assert record["tokens"] == tokens
            assert record["loss_mask"] == [mask for mask, _, _ in known]
            assert bits(record["rollout_logp"]) == bits([logprob for _, logprob, _ in known])
            assert record["generation_versions"] == [version for _, _, version in known]
            assert record["prompt_length"] == record["loss_mask"].index(1)
