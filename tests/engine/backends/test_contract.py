"""The contract of a backend, as clients and trainers see it through the engine."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from deadlines import HANG_S
from engine.backends.kinds import Kind, logits_after
from engine.served import JSONDict, Served
from slime_engine.backend import Query
from slime_engine.model import log_softmax
from slime_engine.settings import Settings

pytestmark = pytest.mark.anyio

PROMPT = [70, 101, 40, 7, 300, 44, 81, 12, 500, 9, 33, 77]
OTHER = [5, 60, 61, 300, 2, 90]
#: Far from finished when a test does something to it.
ENDLESS = {"max_new_tokens": 3000, "ignore_eos": True}


def body(ids: list[int] = PROMPT, tokens: int = 12, /, **params: Any) -> JSONDict:
    chosen = {"max_new_tokens": tokens, "ignore_eos": True, **params}
    return {"input_ids": ids, "return_logprob": True, "sampling_params": chosen}


def logprobs(answer: JSONDict) -> list[float]:
    return [one[0] for one in answer["meta_info"]["output_token_logprobs"]]


def same(kind: Kind, one: JSONDict, two: JSONDict) -> None:
    """Two answers have the same tokens, and logprobs as far as the backend can repeat them."""
    assert one["output_ids"] == two["output_ids"]
    np.testing.assert_allclose(logprobs(one), logprobs(two), atol=kind.tolerance, rtol=0)


async def recomputed(kind: Kind, entry: JSONDict) -> list[float]:
    """Return the logprob of each sampled token, computed from nothing with the weights of its version."""
    backends = {one: await kind.updated(one) for one in set(entry["output_versions"])}
    context, found = list(entry["input_ids"]), []
    for token_id, version in zip(entry["output_ids"], entry["output_versions"], strict=True):
        logits = await logits_after(backends[version], context, version)
        found.append(float(log_softmax(logits / (entry["temperature"] or 1.0))[token_id]))
        context.append(token_id)
    return found


async def is_true(kind: Kind, engine: Served, answer: JSONDict) -> None:
    """An answer is what the journal has, and what the weights say."""
    (entry,) = await engine.journal(answer["meta_info"]["id"])
    assert entry["output_ids"] == answer["output_ids"]
    assert entry["output_logprobs"] == logprobs(answer)
    assert entry["finish_reason"] == answer["meta_info"]["finish_reason"]
    truth = await recomputed(kind, entry)
    np.testing.assert_allclose(entry["output_logprobs"], truth, atol=kind.tolerance, rtol=0)


async def test_logprobs_are_of_the_distribution_that_is_sampled_from(kind: Kind) -> None:
    async with kind.serve() as engine:
        size = engine.host.engine.backend.vocab_size
        answer = await engine.generate(**body(temperature=0.7, sampling_seed=3), top_logprobs_num=size)
        for (logprob, token_id, _), top in zip(
            answer["meta_info"]["output_token_logprobs"],
            answer["meta_info"]["output_top_logprobs"],
            strict=True,
        ):
            assert sorted(one[1] for one in top) == list(range(size))
            assert np.exp([one[0] for one in top]).sum() == pytest.approx(1.0, abs=1e-9)
            assert logprob in [one[0] for one in top if one[1] == token_id]
        await is_true(kind, engine, answer)


async def test_samples_follow_the_distribution(kind: Kind) -> None:
    async with kind.serve() as engine:
        answers = await engine.generate(**body(PROMPT, 1, n=400, sampling_seed=1, temperature=0.5))
        truth = np.exp(log_softmax(await logits_after(await kind.updated("1"), PROMPT) / 0.5))
    likely = np.flatnonzero(truth > 0.02)
    counts = np.bincount([one["output_ids"][0] for one in answers], minlength=len(truth))[likely] / 400
    spread = np.sqrt(truth[likely] * (1 - truth[likely]) / 400)
    assert len(likely) > 2
    assert (np.abs(counts - truth[likely]) < 5 * spread).all()


async def test_a_seed_repeats_a_sample(kind: Kind) -> None:
    async with kind.serve() as engine:
        one, two, other = [
            await engine.generate(**body(PROMPT, 20, sampling_seed=seed)) for seed in (7, 7, 8)
        ]
        same(kind, one, two)
        assert one["output_ids"] != other["output_ids"]


async def test_greedy_decoding_is_what_each_step_from_nothing_gives(kind: Kind) -> None:
    async with kind.serve() as engine:
        answer = await engine.generate(**body(temperature=0))
    backend, context = await kind.updated("1"), list(PROMPT)
    for token_id in answer["output_ids"]:
        logits = await logits_after(backend, context)
        assert logits[token_id] >= logits.max() - kind.tolerance
        context.append(token_id)


async def test_a_batch_is_as_its_sequences_alone(kind: Kind) -> None:
    bodies = [
        body(ids, 16, sampling_seed=seed) for seed, ids in enumerate((PROMPT, OTHER, OTHER[:1], PROMPT[2:]))
    ]
    async with kind.serve() as engine:
        alone = []
        for each in bodies:
            alone.append(await engine.generate(**each))
            await engine.post("/flush_cache")
        together: dict[int, JSONDict] = {}

        async def ask(place: int) -> None:
            together[place] = await engine.generate(**bodies[place])

        async with anyio.create_task_group() as tasks:
            for place in range(len(bodies)):
                tasks.start_soon(ask, place)
    for place, answer in enumerate(alone):
        same(kind, answer, together[place])


async def test_prompt_logprobs_are_those_of_sampling_the_same_tokens(kind: Kind) -> None:
    async with kind.serve() as engine:
        answer = await engine.generate(**body(PROMPT, 90, sampling_seed=2))
        whole = PROMPT + answer["output_ids"]
        for start in (len(PROMPT) - 1, 0):
            scored = await engine.generate(**body(whole, 1), logprob_start_len=start, top_logprobs_num=2)
            told = scored["meta_info"]["input_token_logprobs"]
            assert [one[1] for one in told] == whole[start:]
            assert told[0][0] is None
            sampled = [one[0] for one in told[-len(answer["output_ids"]) :]]
            np.testing.assert_allclose(sampled, logprobs(answer), atol=kind.tolerance, rtol=0)
            assert scored["meta_info"]["cached_tokens"] <= start
            await is_true(kind, engine, scored)


async def test_a_prefix_is_computed_once(kind: Kind) -> None:
    async with kind.serve() as engine:
        first = await engine.generate(**body(PROMPT, 8, sampling_seed=1))
        assert first["meta_info"]["cached_tokens"] == 0
        known = len(PROMPT) + 7  # the last sampled token has not been through the model
        turn = PROMPT + first["output_ids"] + OTHER
        second = await engine.generate(**body(turn, 8, sampling_seed=2))
        again = await engine.generate(**body(PROMPT, 8, sampling_seed=1))
        other = await engine.generate(**body(OTHER, 1))
        reused = [answer["meta_info"]["cached_tokens"] for answer in (second, again, other)]
        assert reused == ([known, len(PROMPT) - 1, 0] if kind.reuses_prefixes else [0, 0, 0])
        same(kind, first, again)
        for answer in (second, again):
            await is_true(kind, engine, answer)
        await engine.post("/flush_cache")
        flushed = await engine.generate(**body(turn, 8, sampling_seed=2))
        assert flushed["meta_info"]["cached_tokens"] == 0
        same(kind, second, flushed)


async def test_a_running_sequence_shares_its_prefix(kind: Kind) -> None:
    async with kind.serve() as engine:
        answers = await engine.generate(**body(PROMPT, 6, n=3, sampling_seed=1))
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        shared = len(PROMPT) - 1 if kind.reuses_prefixes else 0
        assert cached == [0, shared, shared]
        for answer in answers:
            await is_true(kind, engine, answer)


async def test_an_abort_returns_the_tokens_so_far(kind: Kind) -> None:
    async with kind.serve() as engine:
        async with engine.asking(**body() | {"sampling_params": ENDLESS, "rid": "a"}) as answers:
            await engine.until(lambda s: "a" in s.running and s.running["a"].completion_tokens > 4)
            await engine.post("/abort_request", rid="a")
        (answer,) = answers
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) > 4
        answer["output_ids"] = answer["output_ids"][:40]
        (entry,) = await engine.journal("a")
        assert entry["output_logprobs"] == logprobs(answer)
        cut = {
            **entry,
            "output_ids": answer["output_ids"],
            "output_versions": ["1"] * len(answer["output_ids"]),
        }
        truth = await recomputed(kind, cut)
        np.testing.assert_allclose(entry["output_logprobs"][:40], truth, atol=kind.tolerance, rtol=0)
        later = await engine.generate(**body())
        await is_true(kind, engine, later)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_changes_no_sample(kind: Kind, mode: str) -> None:
    async with kind.serve(tokens_per_second=200) as engine:
        wanted = await engine.generate(**body(PROMPT, 40, sampling_seed=5))
        async with engine.asking(**body(PROMPT, 40, sampling_seed=5), rid="a") as answers:
            for count in (2, 12, 25):
                await engine.until(lambda s: "a" in s.running and s.running["a"].completion_tokens > count)  # noqa: B023
                await engine.post("/pause_generation", mode=mode)
                sampled = (await engine.journal("a"))[0]["output_ids"]
                await anyio.sleep(0.02)
                assert (await engine.journal("a"))[0]["output_ids"] == sampled
                await engine.post("/continue_generation")
        same(kind, wanted, answers[0])


async def test_released_keys_and_values_are_computed_again(kind: Kind) -> None:
    """Of a sequence that runs, and of one that has ended."""
    async with kind.serve(tokens_per_second=200) as engine:
        wanted = await engine.generate(**body(PROMPT, 40, sampling_seed=5))
        async with engine.asking(**body(PROMPT, 40, sampling_seed=5), rid="a") as answers:
            await engine.until(lambda s: "a" in s.running and s.running["a"].completion_tokens > 8)
            await engine.post("/release_memory_occupation")
            sampled = (await engine.journal("a"))[0]["output_ids"]
            for tag in ("weights", "cuda_graph"):
                await engine.post("/resume_memory_occupation", tags=[tag])
            await anyio.sleep(0.02)
            assert (await engine.journal("a"))[0]["output_ids"] == sampled
            await engine.post("/resume_memory_occupation", tags=["kv_cache"])
        same(kind, wanted, answers[0])
        await is_true(kind, engine, answers[0])
        for released, found in ((["weights"], len(PROMPT) - 1), (["kv_cache"], 0), (None, 0)):
            await engine.post("/release_memory_occupation", tags=released)
            await engine.post("/resume_memory_occupation")
            later = await engine.generate(**body(PROMPT, 1, sampling_seed=5))
            assert later["meta_info"]["cached_tokens"] == (found if kind.reuses_prefixes else 0)
            assert later["output_ids"] == wanted["output_ids"][:1]


async def test_an_update_changes_the_weights_and_the_version(kind: Kind) -> None:
    async with kind.serve() as engine:
        old = await engine.generate(**body(PROMPT, 20, sampling_seed=4))
        update = await engine.post("/update_weights_from_disk", **kind.update)
        assert update.json()["success"] is True
        assert (await engine.get("/model_info"))["weight_version"] == "2"
        new = await engine.generate(**body(PROMPT, 20, sampling_seed=4))
        assert (old["meta_info"]["weight_version"], new["meta_info"]["weight_version"]) == ("1", "2")
        assert new["meta_info"]["cached_tokens"] == 0
        assert logprobs(old) != logprobs(new)
        for answer in (old, new):
            await is_true(kind, engine, answer)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_sequence_goes_on_under_new_weights(kind: Kind, mode: str) -> None:
    async with kind.serve(tokens_per_second=200) as engine:
        async with engine.asking(**body(PROMPT, 40, sampling_seed=5), rid="a") as answers:
            await engine.until(lambda s: "a" in s.running and s.running["a"].completion_tokens > 10)
            await engine.post("/pause_generation", mode=mode)
            await engine.post("/update_weights_from_disk", **kind.update)
            await engine.post("/continue_generation")
        (answer,) = answers
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["1", "2"]
        assert spans[1]["start"] == spans[0]["end"] > 10
        await is_true(kind, engine, answer)


async def test_everything_at_once_is_as_the_journal_has_it(kind: Kind) -> None:
    answers: dict[str, JSONDict] = {}
    async with kind.serve(max_running_requests=5) as engine:

        async def ask(number: int) -> None:
            await anyio.sleep(0.01 * (number % 4))
            ids = [PROMPT, OTHER, PROMPT + OTHER, OTHER + PROMPT][number % 4]
            params = {"sampling_seed": number, "temperature": [0.0, 0.7, 1.0][number % 3]}
            asked = body(ids, 5 + number % 7, **params) | {"rid": f"r{number}"}
            if number % 2:
                answers[f"r{number}"] = (await engine.stream(**asked))[-1]
            else:
                answers[f"r{number}"] = await engine.generate(**asked)

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(ask, number)
            for _ in range(3):
                await anyio.sleep(0.03)
                await engine.post("/pause_generation", mode="in_place")
                await engine.post("/update_weights_from_disk", **kind.update)
                await engine.post("/continue_generation")
        for answer in answers.values():
            await is_true(kind, engine, answer)


async def test_rank_reuses_only_what_it_has_computed(kind: Kind) -> None:
    async with kind.serve(dp_size=2) as engine:
        found = []
        for rank in (0, 1, 0, 1):
            answer = await engine.generate(**body(PROMPT, 3), routed_dp_rank=rank)
            found.append(answer["meta_info"]["cached_tokens"])
            await is_true(kind, engine, answer)
        shared = len(PROMPT) - 1 if kind.reuses_prefixes else 0
        assert found == [0, 0, shared, shared]


async def test_a_released_sequence_harms_no_other(kind: Kind) -> None:
    """A sequence is released while the model computes for it, as by an abort."""
    backend = kind.load(Settings())
    one, two = backend.begin(), backend.begin()
    queries = [Query(one, PROMPT, len(PROMPT)), Query(two, OTHER, len(OTHER))]
    rows: list[Any] = []

    async def compute() -> None:
        rows.extend(await backend.logits(queries, "1"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(compute)
        await anyio.lowlevel.checkpoint()
        backend.release(one)
    (later,) = await backend.logits([Query(two, [*OTHER, 8], len(OTHER) + 1)], "1")
    fresh = await kind.updated("1")
    for found, ids in ((rows[1][0], OTHER), (later[0], [*OTHER, 8])):
        truth = await logits_after(fresh, ids)
        np.testing.assert_allclose(found, truth, atol=max(kind.tolerance, 1e-9), rtol=0)


async def test_logits_that_were_dropped_can_be_asked_for_again(kind: Kind) -> None:
    """As after a pause in the middle of a step; also under other weights."""
    backend = kind.load(Settings())
    run = backend.begin()
    for context in (PROMPT, PROMPT, [*PROMPT, 5], [*PROMPT, 5]):
        (rows,) = await backend.logits([Query(run, context, len(context))], "1")
        truth = await logits_after(await kind.updated("1"), context)
        np.testing.assert_allclose(rows[0], truth, atol=max(kind.tolerance, 1e-9), rtol=0)
    await backend.update_weights("disk", kind.update)
    (rows,) = await backend.logits([Query(run, [*PROMPT, 5], len(PROMPT) + 1)], "2")
    truth = await logits_after(await kind.updated("2"), [*PROMPT, 5], "2")
    np.testing.assert_allclose(rows[0], truth, atol=max(kind.tolerance, 1e-9), rtol=0)


async def test_a_decode_engine_continues_what_a_prefill_engine_began(kind: Kind) -> None:
    answers: dict[str, JSONDict] = {}
    async with (
        kind.serve(disaggregation_mode="prefill") as first,
        kind.serve(disaggregation_mode="decode") as second,
        anyio.create_task_group() as tasks,
    ):

        async def ask(name: str, engine: Served) -> None:
            port = first.client.base_url.port
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 5}
            answers[name] = await engine.generate(**body(PROMPT, 9, sampling_seed=3), **room)

        tasks.start_soon(ask, "prefill", first)
        tasks.start_soon(ask, "decode", second)
        with anyio.fail_after(HANG_S):
            while len(answers) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.002)
        await is_true(kind, first, answers["prefill"])
        await is_true(kind, second, answers["decode"])
    assert answers["prefill"]["output_ids"] == answers["decode"]["output_ids"][:1]
    assert len(answers["decode"]["output_ids"]) == 9
