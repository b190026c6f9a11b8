"""Limits of what is kept, rows that engines told wrongly, and what a restart leaves."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugged import until
from r3.replays import MOE, PROMPT, Replay, replaying
from r3.telling import answer_of, base64_of, leaf_of, telling, turn, zeros
from slime_engine.app import make_app
from slime_engine.model import NgramModel
from slime_engine.settings import Settings as EngineSettings
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

NEXT = "<|im_end|>\n"


async def conversation(replay: Replay, session: str) -> str:
    """The text of two turns."""
    first = PROMPT + session
    text = first + (await replay.generate(first, session))["text"] + NEXT
    return f"{text}{(await replay.generate(text, session))['text']}"


async def test_the_oldest_rows_are_dropped_and_that_is_said(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint, "--r3-max-bytes", "300") as replay:
        texts = {session: await conversation(replay, session) for session in ("a", "b", "c", "d")}
        answers = {session: await replay.retrieve(text, session) for session, text in texts.items()}
        reasons = [answer["routed_experts_reason"] for answer in answers.values()]
        assert reasons == ["dropped", "dropped", "dropped", None]
        assert all(answer["exact"] for answer in answers.values())
        replay.check_experts(answers["d"])
        stats = (await replay.stats())["routed_experts"]
        assert 0 < stats["bytes"] <= 300
        assert stats["dropped"] >= 3


async def test_all_kinds_of_rows_share_the_limit(start: Start, model: NgramModel, checkpoint: str) -> None:
    """Each answer has as many rows of both kinds. The limit holds those of two and a half answers."""
    limit = 5 * 9 * 6
    async with telling(start, checkpoint, model, "--r3-max-bytes", str(limit)) as (client, _):
        for number, session in enumerate("abcd"):
            meta = {name: zeros(9 * 6) for name in ("routed_experts", "indexer_topk")}
            await turn(client, 10, meta, session, given=[20 + number] * 8)
            stats = (await client.stats())["token_rows"]
            assert stats["routed_experts"]["bytes"] + stats["indexer_topk"]["bytes"] <= limit
        assert [stats[name]["dropped"] for name in ("routed_experts", "indexer_topk")] == [2, 1]
        assert stats["indexer_topk"]["bytes"] == 3 * 9 * 6


async def test_a_continued_context_is_newer_than_others(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint, "--r3-max-bytes", "600") as replay:
        texts = {session: await conversation(replay, session) for session in ("a", "b")}
        texts["a"] += NEXT
        texts["a"] += (await replay.generate(texts["a"], "a"))["text"]
        await conversation(replay, "c")
        reasons = [
            (await replay.retrieve(texts[session], session))["routed_experts_reason"] for session in "ab"
        ]
        assert reasons == [None, "dropped"]


async def test_rows_go_with_their_segments(start: Start, model: NgramModel, checkpoint: str) -> None:
    async with replaying(start, model, checkpoint) as replay:
        await conversation(replay, "a")
        assert (await replay.stats())["routed_experts"]["bytes"] > 0
        assert (await replay.running.client.delete("/sessions/a")).status_code == 204
        assert (await replay.stats())["routed_experts"] | {"missing": {}} == {
            "turns": 0, "bytes": 0, "stored_bytes": 0, "dropped": 0, "missing": {},
        }  # fmt: skip


async def test_after_a_restart_experts_are_not_recorded(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    log = ("--trajectory-log", str(tmp_path / "log"))
    async with replaying(start, model, checkpoint, *log) as replay:
        text = await conversation(replay, "a")
        await replay.check(text, "a")
    async with replaying(start, model, checkpoint, *log) as replay:
        answer = await replay.retrieve(text, "a")
        assert answer["exact"]
        assert (answer["experts_exact"], answer["routed_experts_reason"]) == (False, "not_recorded")
        text += NEXT
        text += (await replay.generate(text, "a"))["text"]
        await replay.check(text, "a")  # the same weights: the new answer has the rows of all tokens


@pytest.mark.parametrize("told", [True, False], ids=["rows of both turns", "rows of the second"])
@pytest.mark.parametrize("adapters", [("A", "A"), ("A", "B"), ("A", None), (None, "B")])
async def test_rows_of_one_adapter_are_no_rows_of_another(
    start: Start, model: NgramModel, checkpoint: str, adapters: tuple[str | None, ...], told: bool
) -> None:
    """The second adapter routes the first turn in its own way, and samples from that."""
    is_same = len({*adapters}) == 1
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2") as (client, engine):
        given, reason = list(range(5, 13)), {"type": "length", "length": 2}
        for adapter, rows in zip(adapters, (9 if told else 0, 3 if told else 12), strict=True):
            meta = {"routed_experts": zeros(rows * 6)} if rows else {}
            engine.script.append((200, answer_of(client, [6, 7], len(given), reason, meta)))
            body: dict[str, Any] = {"input_ids": given, "session_id": "s", "lora_path": adapter}
            assert (await client.running.client.post("/generate", json=body)).status_code == 200
            given = [*given, 6, 7, 20]
        leaf = await leaf_of(client, "s")
        assert leaf["exact"]
        assert leaf["routed_experts_reason"] == (None if is_same else "other_adapter")
        text = engine.tokenizer.decode([*range(5, 13), 6, 7])
        body = {"text": text, "session_id": "s", "return_routed_experts": True}
        first = (await client.running.client.post("/retrieve_from_text", json=body)).json()
        assert first["exact"]
        assert first["experts_exact"] == (told or is_same)


@pytest.mark.parametrize("versions", [["1"], ["1", "2"], ["2", "1"]])
async def test_rows_fill_a_gap_if_one_version_sampled_both_turns(
    start: Start, model: NgramModel, checkpoint: str, versions: list[str]
) -> None:
    """An engine whose weights change within an answer may have computed its prompt again."""
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2") as (client, engine):
        await turn(client, 10, {}, "s")
        spans = [{"version": one, "start": place, "end": place + 1} for place, one in enumerate(versions)]
        meta: dict[str, Any] = {"routed_experts": zeros(12 * 6), "weight_version": versions[-1]}
        if len(versions) > 1:
            meta["weight_versions"] = spans
        given, reason = [*range(5, 13), 6, 7, 20], {"type": "length", "length": 2}
        engine.script.append((200, answer_of(client, [6, 7], len(given), reason, meta)))
        body = {"input_ids": given, "session_id": "s"}
        assert (await client.running.client.post("/generate", json=body)).status_code == 200
        leaf = await leaf_of(client, "s")
        assert leaf["exact"]
        assert leaf["routed_experts_reason"] == (None if versions == ["1"] else "not_told")


@pytest.mark.parametrize("retractions", [None, 0, 1])
@pytest.mark.parametrize("spans", [["1", "2"], [None], ["2"]])
async def test_rows_of_several_versions_need_proof_of_no_retraction(
    start: Start, model: NgramModel, checkpoint: str, spans: list[str | None], retractions: int | None
) -> None:
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2") as (client, _):
        meta: dict[str, Any] = {"routed_experts": zeros(9 * 6), "weight_version": spans[-1]}
        if len(spans) > 1:
            meta["weight_versions"] = [
                {"version": one, "start": place, "end": place + 1} for place, one in enumerate(spans)
            ]
        if retractions is not None:
            meta["num_retractions"] = retractions
        leaf = await turn(client, 10, meta, "s")
        is_known = spans == ["2"] or retractions == 0 or (spans == [None] and retractions is None)
        assert leaf["routed_experts_reason"] == (None if is_known else "other_weight_version")


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"routed_experts": zeros(9 * 6)}, None),
        ({"routed_experts": zeros(8 * 6)}, "mis_sized"),
        ({"routed_experts": zeros(9 * 5)}, "mis_sized"),
        ({"routed_experts": zeros(10 * 6)}, "mis_sized"),
        ({"routed_experts": "AAAA"}, "mis_sized"),
        ({"routed_experts": "no base64!"}, "mis_sized"),
        ({"routed_experts": [1, 2]}, "mis_sized"),
        ({"routed_experts": zeros(9 * 6), "routed_experts_start_len": 1}, "mis_sized"),
        ({"routed_experts": zeros(8 * 6), "routed_experts_start_len": 1}, "starts_later"),
        ({"routed_experts": ""}, "not_told"),
        ({"routed_experts": None}, "not_told"),
        ({}, "not_told"),
    ],
)
async def test_rows_that_do_not_fit_the_tokens_are_not_recorded(
    start: Start, model: NgramModel, checkpoint: str, meta: dict[str, Any], reason: str | None
) -> None:
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2") as (client, _):
        leaf = await turn(client, 10, meta, "s")
        assert leaf["routed_experts_reason"] == reason


async def test_without_a_shape_rows_of_two_sizes_are_no_evidence(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with telling(start, checkpoint, model) as (client, _):
        await turn(client, 10, {"routed_experts": zeros(9 * 6)}, "a")
        assert (await turn(client, 7, {"routed_experts": zeros(6 * 6)}, "b"))["experts_exact"]
        assert (await turn(client, 11, {"routed_experts": zeros(10 * 4)}, "c"))["routed_experts"] is None
        leaf = await leaf_of(client, "a")
        assert (leaf["experts_exact"], leaf["routed_experts_reason"]) == (False, "sizes_disagree")


async def test_without_a_shape_two_lengths_confirm_the_size_of_a_row(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with telling(start, checkpoint, model) as (client, _):
        for session, tokens in (("a", 10), ("b", 10), ("c", 11)):
            leaf = await turn(client, tokens, {"routed_experts": zeros((tokens - 1) * 6)}, session)
            is_confirmed = session == "c"  # as many rows as before may be truncated to the same size
            assert leaf["routed_experts_reason"] == (None if is_confirmed else "shape_unknown")
        for session, tokens in (("a", 10), ("b", 10), ("c", 11)):
            assert (await leaf_of(client, session))["routed_experts_shape"] == [tokens - 1, 6]


async def test_truncated_experts_are_no_smaller_rows(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with telling(start, checkpoint, model) as (client, _):
        leaf = await turn(client, 10, {"routed_experts": zeros(9 * 4)}, "a")  # of 9 * 6 values
        assert leaf["routed_experts_reason"] == "shape_unknown"
        # Nothing is believed to be known, so all rows are asked for. An old engine does not say where they begin.
        given = [*leaf["tokens"], 9]
        meta = {"routed_experts": zeros((len(given) + 1) * 6)}
        reason = {"type": "length", "length": 2}
        client.engine.script.append((200, answer_of(client, [6, 7], len(given), reason, meta)))
        await client.running.client.post("/generate", json={"input_ids": given, "session_id": "a"})
        assert "routed_experts_start_len" not in client.engine.asked[-1]
        assert (await leaf_of(client, "a"))["routed_experts_reason"] == "sizes_disagree"


async def test_rows_that_contradict_a_shape_told_later_are_dropped(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with telling(start, checkpoint, model) as (client, _):
        for tokens in (10, 11):
            await turn(client, tokens, {"routed_experts": zeros((tokens - 1) * 4)}, f"s{tokens}")
        assert (await leaf_of(client, "s10"))["experts_exact"]
        async with serving(make_app(EngineSettings(**MOE), lambda: model)) as url:
            await client.running.client.post("/workers", json={"url": url})
            await until(lambda: client.running.router.pool.healthy == 2)
            leaf = await leaf_of(client, "s10")
            assert (leaf["experts_exact"], leaf["routed_experts_reason"]) == (False, "mis_sized")
            body = {"input_ids": leaf["tokens"], "sampling_params": {"max_new_tokens": 1}}
            client.engine.script.append([5])  # either worker may get it
            await client.running.client.post("/generate", json=body)
            assert (await leaf_of(client, "s11"))["routed_experts_reason"] == "mis_sized"


async def test_workers_say_the_shape(start: Start, model: NgramModel, checkpoint: str) -> None:
    async with replaying(start, model, checkpoint) as replay:
        answer = await replay.check(await conversation(replay, "a"), "a")
        assert answer["routed_experts_shape"][1:] == [MOE["moe_layers"], MOE["moe_topk"]]


async def test_the_indexers_choices_are_recorded_likewise(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with telling(start, checkpoint, model) as (client, _):
        told = list(range(9 * 6))
        meta = {"indexer_topk": base64_of(told), "indexer_topk_num_layers": 3}
        await turn(client, 10, meta, "s")
        rows = (await client.stats())["token_rows"]["indexer_topk"]
        assert (rows["turns"], rows["bytes"]) == (1, 9 * 6)
        # a second answer, of another length, confirms the size of a row
        await turn(client, 12, {"indexer_topk": zeros(11 * 6), "indexer_topk_num_layers": 3}, "t")
        path = "/trajectories/s?return_indexer_topk=true"
        (leaf,) = (await client.running.client.get(path)).json()["trajectories"]
        assert (leaf["indexer_exact"], leaf["indexer_topk_reason"]) == (True, None)
        assert (leaf["indexer_topk_shape"], leaf["indexer_topk"]) == ([9, 3, 2], base64_of(told))
        assert "routed_experts" not in leaf
        body = {"text": client.engine.tokenizer.decode(leaf["tokens"]), "session_id": "s"}
        wanted = {"return_indexer_topk": True, "return_routed_experts": True}
        for question in (body, {**body, **wanted}):
            answer = (await client.running.client.post("/retrieve_from_text", json=question)).json()
            assert answer["exact"], answer["inexact_reason"]
            assert answer.get("indexer_topk") == (base64_of(told) if question != body else None)
        assert (answer["experts_exact"], answer["routed_experts_reason"]) == (False, "not_told")
        headers = {"accept": "application/octet-stream"}
        packed = (await client.running.client.get(path, headers=headers)).content
        with np.load(BytesIO(packed)) as arrays:
            assert arrays["indexer_topk"].reshape(-1).tolist() == told
            assert arrays["indexer_offsets"].tolist() == [0, 9]


async def test_messages_give_their_experts(start: Start, model: NgramModel, checkpoint: str) -> None:
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2") as (client, engine):
        messages = [{"role": "user", "content": "Why?"}]
        prompt = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        count = len(engine.tokenizer.encode(prompt))
        reason, meta = {"type": "stop", "matched": engine.eos}, {"routed_experts": zeros((count + 2) * 6)}
        engine.script.append((200, answer_of(client, [5, 6, engine.eos], count, reason, meta)))
        content = (await client.running.client.post("/generate", json={"text": prompt})).json()["text"]
        body = {
            "messages": [*messages, {"role": "assistant", "content": content}],
            "return_routed_experts": True,
        }
        answer = (await client.running.client.post("/retrieve_from_messages_template", json=body)).json()
        assert answer["exact"], answer["inexact_reason"]
        assert answer["experts_exact"], answer["routed_experts_reason"]
        assert answer["routed_experts"] == zeros((answer["token_length"] - 1) * 6)
