"""Engines that do half of each generation, and ranks that a request can be given to."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from engine.served import CHAT, Serve, Served
from slime_engine.settings import Settings

pytestmark = pytest.mark.anyio

SAMPLING = {"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 3, "temperature": 1.3}


def meeting(prefill: Served, room: Any = 7, **more: Any) -> dict[str, Any]:
    url = urlsplit(str(prefill.client.base_url))
    where = {"bootstrap_host": url.hostname, "bootstrap_port": url.port, "bootstrap_room": room}
    return {"text": CHAT, "sampling_params": SAMPLING, **where, **more}


async def both(prefill: Served, decode: Served, body: dict[str, Any]) -> tuple[Any, Any]:
    """Return the answers of both engines to ``body``."""
    answers: dict[str, Any] = {}

    async def ask(name: str, engine: Served) -> None:
        answers[name] = await engine.generate(**body)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "prefill", prefill)
        tasks.start_soon(ask, "decode", decode)
    return answers["prefill"], answers["decode"]


async def test_two_halves_say_what_a_whole_engine_says(serve: Serve) -> None:
    async with (
        serve() as whole,
        serve(disaggregation_mode="prefill") as prefill,
        serve(disaggregation_mode="decode") as decode,
    ):
        wanted = await whole.generate(
            text=CHAT, sampling_params=SAMPLING, return_logprob=True, top_logprobs_num=2
        )
        body = meeting(prefill, return_logprob=True, top_logprobs_num=2)
        read, written = await both(prefill, decode, body)
        assert read["output_ids"] == wanted["output_ids"][:1]
        for key in ("text", "output_ids"):
            assert written[key] == wanted[key]
        for key in ("output_token_logprobs", "output_top_logprobs", "finish_reason", "prompt_tokens"):
            assert written["meta_info"][key] == wanted["meta_info"][key]
        assert (await decode.get("/server_info"))["disaggregation_mode"] == "decode"
        assert (await prefill.get("/model_info"))["disaggregation_mode"] == "prefill"


async def test_journal_of_decode_half_has_the_first_token_and_its_version(serve: Serve) -> None:
    async with (
        serve(disaggregation_mode="prefill", weight_version="6") as prefill,
        serve(disaggregation_mode="decode", weight_version="7") as decode,
    ):
        _, written = await both(prefill, decode, meeting(prefill))
        (entry,) = await decode.journal()
        assert entry["output_ids"] == written["output_ids"]
        assert entry["output_versions"] == ["6", *["7"] * 7]
        # As a real engine, it knows nothing of the other one's weights.
        assert written["meta_info"]["weight_version"] == "7"
        assert "weight_versions" not in written["meta_info"]


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2])
async def test_a_short_answer_may_end_with_the_first_token(serve: Serve, max_new_tokens: int) -> None:
    async with (
        serve(disaggregation_mode="prefill") as prefill,
        serve(disaggregation_mode="decode") as decode,
    ):
        sampling = SAMPLING | {"max_new_tokens": max_new_tokens}
        _, written = await both(prefill, decode, meeting(prefill, sampling_params=sampling))
        # Of none there is one all the same: the first half hands over nothing else.
        assert written["meta_info"]["completion_tokens"] == max(max_new_tokens, 1)
        assert written["meta_info"]["finish_reason"] == {"type": "length", "length": max_new_tokens}


async def test_rooms_of_a_batch_are_counted_on_from_one(serve: Serve) -> None:
    async with (
        serve(disaggregation_mode="prefill") as prefill,
        serve(disaggregation_mode="decode") as decode,
    ):
        for room in (10, [21, 22]):
            read, written = await both(prefill, decode, meeting(prefill, room, text=[CHAT, "Why?"]))
            assert [one["output_ids"] for one in read] == [one["output_ids"][:1] for one in written]


@pytest.mark.parametrize("room", ["7", [7], [1, 2, 3], True])
async def test_a_room_that_fits_nothing_is_refused(serve: Serve, room: Any) -> None:
    async with serve(disaggregation_mode="decode") as decode:
        await decode.generate(400, **meeting(decode, room))


async def test_batch_with_one_room_for_two_sequences_is_refused(serve: Serve) -> None:
    async with serve(disaggregation_mode="decode") as decode:
        answer = await decode.generate(400, **meeting(decode, [5, 5], text=[CHAT, CHAT]))
    assert answer == {"error": {"message": "The rooms in bootstrap_room must differ."}}


async def test_room_has_one_unfinished_sequence(serve: Serve) -> None:
    async with (
        serve(disaggregation_mode="prefill") as prefill,
        serve(disaggregation_mode="decode") as decode,
        prefill.asking(**meeting(prefill, rid="first")) as first,
    ):
        await prefill.until(lambda scheduler: len(scheduler.handing) == 1)
        refused = await prefill.generate(400, **meeting(prefill, [8, 7], text=["Why?", "Who?"]))
        assert refused["error"]["message"] == "bootstrap_room 7 is the room of another unfinished request."
        await prefill.until(lambda scheduler: [one.rid for one in scheduler.unfinished()] == ["first"])
        await decode.generate(**meeting(prefill))
        await decode.until(lambda scheduler: bool(first))
        read, _ = await both(prefill, decode, meeting(prefill))  # the room is free again
        assert read["output_ids"] == first[0]["output_ids"]


async def test_a_second_half_wants_a_room_and_an_address(serve: Serve) -> None:
    async with serve(disaggregation_mode="decode") as decode:
        answer = await decode.generate(400, text=CHAT)
        assert answer == {"error": {"message": "A decode engine needs bootstrap_room."}}
        answer = await decode.generate(500, **meeting(decode, bootstrap_port=None))
        assert "bootstrap_port is not given" in answer["error"]["message"]


async def test_a_first_half_that_is_not_there_fails_the_second(serve: Serve) -> None:
    async with serve(disaggregation_mode="decode") as decode:
        answer = await decode.generate(500, **meeting(decode, bootstrap_port=9))
        assert answer == {"error": {"message": "The prefill engine did not hand over: ConnectError"}}


async def test_decode_half_refuses_the_token_of_another_prompt(serve: Serve) -> None:
    async with (
        serve(disaggregation_mode="prefill") as prefill,
        serve(disaggregation_mode="decode") as decode,
        prefill.asking(**meeting(prefill)),
    ):
        answer = await decode.generate(500, **meeting(prefill, text="Why?"))
        assert answer["error"]["message"] == "The prefill engine handed over the token of another prompt."
        assert not decode.host.engine.scheduler.unfinished()


async def test_a_first_half_that_nobody_takes_waits_until_it_is_aborted(serve: Serve) -> None:
    async with serve(disaggregation_mode="prefill") as prefill, anyio.create_task_group() as tasks:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await prefill.generate(**meeting(prefill, rid="mine")))

        tasks.start_soon(ask)
        await prefill.until(lambda scheduler: len(scheduler.handing) == 1)
        await prefill.post("/abort_request", rid="mi")
        await prefill.until(lambda scheduler: not scheduler.handing)
        await anyio.sleep(0.05)
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_decode_half_aborted_with_its_first_token_tells_that_token(serve: Serve) -> None:
    async with serve(disaggregation_mode="prefill") as prefill, serve(disaggregation_mode="decode") as decode:
        await decode.post("/pause_generation", mode="in_place")
        answers: list[Any] = []
        body = meeting(prefill, rid="mine", return_logprob=True)

        async def ask() -> None:
            answers.append(await both(prefill, decode, body))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await decode.until(lambda scheduler: any(one.given for one in scheduler.waiting.values()))
            await decode.post("/abort_request", rid="mine")
        read, written = answers[0]
        assert written["output_ids"] == read["output_ids"]
        for key in ("output_token_logprobs", "completion_tokens", "prompt_tokens"):
            assert written["meta_info"][key] == read["meta_info"][key]
        assert written["meta_info"]["finish_reason"]["type"] == "abort"


async def test_without_a_room_a_prefill_engine_does_all(serve: Serve) -> None:
    async with serve(disaggregation_mode="prefill") as prefill:
        assert len((await prefill.generate(text=CHAT, sampling_params=SAMPLING))["output_ids"]) == 8


# ranks


async def test_requests_take_the_ranks_in_turn_unless_they_name_one(serve: Serve) -> None:
    async with serve(dp_size=3) as engine:
        for number in range(4):
            await engine.generate(text=CHAT, rid=f"r{number}", sampling_params={"max_new_tokens": 1})
        named = await engine.generate(text=CHAT, routed_dp_rank=2, sampling_params={"max_new_tokens": 1})
        older = await engine.generate(text=CHAT, data_parallel_rank=1, sampling_params={"max_new_tokens": 1})
        assert [entry["dp_rank"] for entry in await engine.journal()] == [0, 1, 2, 0, 2, 1]
        assert (named["meta_info"]["dp_rank"], older["meta_info"]["dp_rank"]) == (2, 1)
        assert (await engine.get("/server_info"))["dp_size"] == 3
        await engine.generate(400, text=CHAT, routed_dp_rank=3)


async def test_rank_that_is_no_number_is_refused(serve: Serve) -> None:
    async with serve(disaggregation_mode="prefill") as prefill:
        error = await prefill.get("/kv_transfer/1", 400, dp_rank="x")
    assert error["error"]["message"] == "dp_rank must be an integer, got 'x'."


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        ValueError, match="disaggregation_mode must be one of null, prefill, decode, got 'both'"
    ):
        Settings(disaggregation_mode="both")  # type: ignore[arg-type]  # what the command line may bring
