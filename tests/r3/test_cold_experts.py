"""Memory has room for no tokens and no rows: all experts are in a store, and come back as they were."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import safetensors.numpy

from deadlines import until
from r3.replays import PROMPT, Replay, replaying, rows_in
from r3.telling import base64_of, leaf_of, telling, turn
from r3.versioned import moved, versioned_experts
from radix_cache.shelf import Shelf
from slime_engine.model import NgramModel
from slime_r3 import pieces

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

NEXT = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
QUERY = "?return_routed_experts=true"
NO_ROOM = ("--radix-tree-max-size", "1", "--r3-max-bytes", "1", "--middleware-paths")


def on_disk(path: Path) -> tuple[str, ...]:
    """Flags of a store whose memory has one block, and whose disk has 2 MB."""
    store = ("slime_tiered_store", "--store-memory-bytes", "4096", "--store-ssd", str(path / "disk"))
    return (*NO_ROOM, *store, "--store-ssd-bytes", str(2 << 20))


async def demoted(replay: Replay) -> dict[str, Any]:
    """Wait until memory has neither tokens nor rows; return the sizes of the rows."""
    kept = replay.running.router.components.get("ownership")._trajectories
    rows = replay.running.router.components.get("token_rows").as_dict
    await until(lambda: not kept.segments and not any(one["bytes"] for one in rows().values()))
    sizes: dict[str, Any] = (await replay.stats())["routed_experts"]
    return sizes


@pytest.fixture
def shelved() -> tuple[str, ...]:
    return (*NO_ROOM, "radix_cache.shelf")


def shelf_of(replay: Replay) -> Shelf:
    shelf: Shelf = replay.running.router.components.get("cold_store")
    return shelf


async def test_turns_forks_and_streams_share_rows_in_the_store(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    async with replaying(start, model, checkpoint, *on_disk(tmp_path)) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        await demoted(replay)
        turns = [text + NEXT + way for way in ("on", "back")]
        ends = [turns[0] + (await replay.generate(turns[0], "s"))["text"]]
        known = (await replay.generate(turns[1], "s", stream=True))[-1]
        ends.append(turns[1] + known["text"])
        await demoted(replay)
        first = (await replay.check(text, "s"))["token_length"] - 1
        assert known["meta_info"]["routed_experts_start_len"] == first  # the engine tells no known row again
        lengths = [(await replay.check(end, "s"))["token_length"] for end in ends]
        rows = first + sum(length - 1 - first for length in lengths)
        sizes = await demoted(replay)
        assert (sizes["bytes"], sizes["stored_bytes"], sizes["turns"]) == (0, 6 * rows, 3)  # a byte each
        assert (sizes["dropped"], sizes["missing"]) == (0, {})


async def test_samples_of_a_prompt_share_its_rows_in_the_store(
    start: Start, model: NgramModel, checkpoint: str, shelved: tuple[str, ...]
) -> None:
    async with replaying(start, model, checkpoint, *shelved) as replay:
        answers = []
        for number in range(3):
            text = PROMPT + (await replay.generate(PROMPT, f"s{number}"))["text"]
            await demoted(replay)  # the rows of the prompt are compared with some that are not in memory
            answers.append(await replay.check(text, f"s{number}"))
        prompt = answers[0]["loss_mask"].index(1)
        own = sum(answer["token_length"] - 1 - prompt for answer in answers)
        assert (await demoted(replay))["stored_bytes"] == 6 * (prompt + own)


async def test_each_format_and_the_samples_are_as_before_the_demotion(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path
) -> None:
    async with replaying(start, model, checkpoint, *on_disk(tmp_path)) as replay:
        ends: dict[str, Any] = {"sampling_params": {"max_new_tokens": 2000}}  # with EOS
        text = PROMPT + (await replay.generate(PROMPT, "s", **ends))["text"] + NEXT
        await replay.generate(text + "a", "s", **ends)
        await replay.generate(text + "b", "s", **ends, return_routed_experts=False)
        client = replay.running.client
        await demoted(replay)
        first, second = (await client.get(f"/trajectories/s{QUERY}")).json()["trajectories"]
        replay.check_experts(first)
        assert (second["exact"], second["routed_experts_reason"]) == (True, "not_told")
        wanted = replay.rows(first["tokens"])
        headers = {"accept": "application/octet-stream"}
        await demoted(replay)
        with np.load(BytesIO((await client.get(f"/trajectories/s{QUERY}", headers=headers)).content)) as file:
            assert file["routed_experts"].dtype == np.uint8
            assert file["routed_experts"].tolist() == wanted.tolist()
            assert file["experts_offsets"].tolist() == [0, len(wanted), len(wanted)]
        headers = {"accept": "application/x-safetensors"}
        question = {"text": first["text"], "session_id": "s", "return_routed_experts": True}
        await demoted(replay)
        body = (await client.post("/retrieve_from_text", json=question, headers=headers)).content
        assert safetensors.numpy.load(body)["routed_experts"].tolist() == wanted.tolist()
        await demoted(replay)
        answer = await client.post("/sessions/s/samples", json={"include_retries": True})
        tensors = safetensors.numpy.load(answer.content)
        about = [one["metadata"] for one in json.loads(tensors["_samples_meta"].tobytes())["samples"]]
        reasons = [(one["experts_exact"], one["routed_experts_reason"]) for one in about]
        assert sorted(reasons) == [(False, "not_told"), (True, None)]
        number = reasons.index((True, None))
        told = tensors[f"rollout_routed_experts.{number}"]
        assert told.tolist() == replay.rows(tensors[f"tokens.{number}"].tolist()).tolist()


async def test_rows_of_each_turn_are_those_of_its_own_weights(
    start: Start, model: NgramModel, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versioned_experts(monkeypatch)
    async with replaying(start, model, checkpoint, *on_disk(tmp_path)) as replay:
        text, ends = PROMPT, []
        for version in (1, 2):
            update = {"new_version": str(version), "abort_all_requests": False}
            await replay.running.client.post("/update_weight_version", json=update)
            text += (await replay.generate(text, "s"))["text"]
            await demoted(replay)
            record = await replay.retrieve(text, "s")
            assert record["experts_exact"], record["routed_experts_reason"]
            ends.append(record["token_length"])
            assert moved(replay, record) == [1] * (ends[0] - 1) + [2] * (ends[-1] - ends[0])
            text += NEXT


async def test_rows_of_all_widths_are_read_from_several_records(
    start: Start,
    model: NgramModel,
    checkpoint: str,
    shelved: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record has three rows of one byte a value, or one row of two or four. One context has all of them."""
    monkeypatch.setattr(pieces, "_RECORD_BYTES", 20)
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2", *shelved) as (client, _):
        sizes = client.running.router.components.get("token_rows").as_dict
        values, tokens = np.empty((0, 6), int), [*range(5, 13)]
        for highest in (8, 300, 70_000, 9):
            start_len = len(values)
            new = np.arange((len(tokens) + 1 - start_len) * 6).reshape(-1, 6) * 7919 % highest
            new[0, 0] = highest - 1
            meta = {"routed_experts": base64_of(new), "routed_experts_start_len": start_len}
            values = np.concatenate([values, new])
            await turn(client, 0, meta, "s", given=tokens)
            await until(lambda: not sizes()["routed_experts"]["bytes"])
            leaf = await leaf_of(client, "s")
            assert rows_in(leaf["routed_experts"]).reshape(-1, 6).tolist() == values.tolist()
            tokens = [*leaf["tokens"], 20]
            text = client.engine.tokenizer.decode(leaf["tokens"][:10])
            body = {"text": text, "session_id": "s", "return_routed_experts": True}
            first = (await client.running.client.post("/retrieve_from_text", json=body)).json()
            assert rows_in(first["routed_experts"]).reshape(-1, 6).tolist() == values[:9].tolist()


async def test_indexers_choices_are_moved_likewise(
    start: Start, model: NgramModel, checkpoint: str, shelved: tuple[str, ...]
) -> None:
    async with telling(start, checkpoint, model, *shelved) as (client, _):
        for tokens, session in ((10, "s"), (12, "t")):  # the second answer confirms the size of a row
            told = list(range((tokens - 1) * 6))
            await turn(
                client, tokens, {"indexer_topk": base64_of(told), "indexer_topk_num_layers": 3}, session
            )
        sizes = client.running.router.components.get("token_rows").as_dict
        await until(lambda: not sizes()["indexer_topk"]["bytes"])
        assert sizes()["indexer_topk"]["stored_bytes"] == 20 * 6
        path = "/trajectories/s?return_indexer_topk=true"
        (leaf,) = (await client.running.client.get(path)).json()["trajectories"]
        assert (leaf["indexer_exact"], leaf["indexer_topk_shape"]) == (True, [9, 3, 2])
        assert leaf["indexer_topk"] == base64_of(range(9 * 6))


async def test_deleted_session_gives_back_the_records_of_its_rows(
    start: Start, model: NgramModel, checkpoint: str, shelved: tuple[str, ...]
) -> None:
    async with replaying(
        start, model, checkpoint, *shelved, order=("radix_cache", "r3", "sessions")
    ) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        await replay.generate(text + NEXT, "s")
        await demoted(replay)
        assert len(shelf_of(replay).records) > 4
        assert (await replay.running.client.delete("/sessions/s")).status_code == 204
        await until(lambda: not shelf_of(replay).records)
        assert (await replay.stats())["routed_experts"]["stored_bytes"] == 0


async def test_lost_rows_have_a_reason_and_the_next_turn_brings_them_again(
    start: Start, model: NgramModel, checkpoint: str, shelved: tuple[str, ...]
) -> None:
    async with replaying(start, model, checkpoint, *shelved) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        await demoted(replay)
        shelf, rows = shelf_of(replay), replay.running.router.components.get("token_rows")
        prefix = rows._rows["routed_experts"].cold._prefix
        for key in [key for key in shelf.records if key.startswith(prefix)]:
            del shelf.records[key]
        answer = await replay.retrieve(text, "s")
        assert (answer["exact"], answer["experts_exact"]) == (True, False)
        assert (answer["routed_experts_reason"], answer["routed_experts"]) == ("not_in_store", None)
        text += NEXT
        text += (await replay.generate(text, "s"))["text"]
        await demoted(replay)
        await replay.check(text, "s")


async def test_store_that_does_not_answer_is_an_error_and_no_loss(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    flags = ("--r3-max-bytes", "1", "--middleware-paths", "radix_cache.shelf")
    async with replaying(start, model, checkpoint, *flags) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        sizes = replay.running.router.components.get("token_rows").as_dict
        await until(lambda: not sizes()["routed_experts"]["bytes"])
        shelf_of(replay).is_closed = True
        question = {"text": text, "session_id": "s", "return_routed_experts": True}
        for reply in (
            await replay.running.client.post("/retrieve_from_text", json=question),
            await replay.running.client.get(f"/trajectories/s{QUERY}"),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "STORE_FAILED")
        assert (await replay.retrieve(text, "s", return_routed_experts=False))["exact"]
        shelf_of(replay).is_closed = False
        await replay.check(text, "s")


async def test_rows_that_no_store_takes_in_time_are_said_to_be_not_kept(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    flags = ("--r3-max-bytes", "1", "--middleware-paths", "radix_cache.shelf")
    async with replaying(start, model, checkpoint, *flags) as replay:
        shelf = shelf_of(replay)
        shelf.refuses, shelf.wait_s = True, 0.1
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        sizes = replay.running.router.components.get("token_rows").as_dict
        await until(lambda: sizes()["routed_experts"]["dropped"] == 1)
        answer = await replay.retrieve(text, "s")
        assert (answer["exact"], answer["routed_experts_reason"]) == (True, "not_kept")
        assert sizes()["routed_experts"]["bytes"] == 0
        shelf.refuses = False
        text += NEXT
        text += (await replay.generate(text, "s"))["text"]
        await replay.check(text, "s")


async def test_requests_wait_while_the_store_takes_rows(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    flags = ("--r3-max-bytes", "1", "--middleware-paths", "radix_cache.shelf")
    async with replaying(start, model, checkpoint, *flags) as replay:
        shelf = shelf_of(replay)
        shelf.refuses = True
        await replay.generate(PROMPT, "s")
        await until(lambda: shelf.refused > 0)
        outputs: list[Any] = []

        async def generate() -> None:
            outputs.append(await replay.generate(PROMPT, "t"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            refused = shelf.refused
            await until(lambda: shelf.refused > refused)
            assert not outputs
            shelf.refuses = False
        assert outputs


async def test_rows_are_read_while_their_session_is_deleted(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    flags = ("--r3-max-bytes", "1", "--middleware-paths", "radix_cache.shelf")
    async with replaying(start, model, checkpoint, *flags, order=("radix_cache", "r3", "sessions")) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        rows = replay.running.router.components.get("token_rows")
        await until(lambda: not rows.as_dict()["routed_experts"]["bytes"])
        turns = replay.running.router.components.get("session_turns")
        (turn_,) = turns.turns("s")
        found = turns.rows("routed_experts", turn_, 10)
        assert found.shape == (9, 3, 2)
        assert (await replay.running.client.delete("/sessions/s")).status_code == 204
        taken: list[Any] = []

        async def take(rows: Any) -> None:
            taken.append(rows)

        with found.held():
            assert (await found.stream(take), taken) == ("not_in_store", [])
        assert (await replay.retrieve(text, "s"))["routed_experts"] is None
