"""Recorded experts that a trainer replays: its logprobs are those of the rollout. With other experts they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from engine.backends.kinds import Kind
from engine.served import CHAT, JSONDict, Served

pytest.importorskip("torch", reason="needs torch: pip install 'slime-router[transformers-engine]'")

from engine.backends.replayed import (  # after the check for torch
    ReplayedRollouts,
    ReplayTrainer,
    decoded,
    differences,
    experts_of,
    perturbed,
    rolling,
)

pytestmark = pytest.mark.anyio
qwen3_moe = pytest.mark.parametrize("kind", ["qwen3_moe"], indirect=True)

#: Largest difference of two computations of one logprob in float32. With wrong experts most differ by more than SEEN.
NOISE, SEEN = 1e-4, 1e-2
NEXT = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def trainer(kind: Kind) -> ReplayTrainer:
    """The weights of version 1."""
    assert kind.checkpoint is not None
    return ReplayTrainer(kind.checkpoint)


@pytest.fixture
def updated(kind: Kind) -> ReplayTrainer:
    """The weights of version 2."""
    return ReplayTrainer(Path(kind.update["model_path"]))


def check(trainer: ReplayTrainer, record: JSONDict) -> None:
    """Assert that the experts of ``record`` reproduce its logprobs, and that other experts do not."""
    experts = experts_of(record)
    assert differences(trainer, record, experts).max() <= NOISE
    assert np.mean(differences(trainer, record, perturbed(experts)) > SEEN) > 0.8


def check_each_row(trainer: ReplayTrainer, record: JSONDict) -> None:
    """Assert that no row could be another one: with one row changed, a logprob after it differs."""
    experts = experts_of(record)
    changed = np.repeat(experts[None], len(experts), axis=0)
    places = np.arange(len(experts))
    changed[places, places] = perturbed(experts)
    assert differences(trainer, record, changed).max(axis=1).min() > 10 * NOISE


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"], indirect=True)
async def test_turns_of_a_session(kind: Kind, trainer: ReplayTrainer) -> None:
    """Qwen3-MoE and Mixtral normalise the weights of the chosen experts, OLMoE does not."""
    async with rolling(kind) as rollouts:
        text = CHAT
        for _ in range(3):
            text += (await rollouts.generate(text, "s"))["text"]
            check(trainer, await rollouts.record(text, "s"))
            text += NEXT


@qwen3_moe
async def test_turns_at_two_engines(kind: Kind, trainer: ReplayTrainer) -> None:
    """The engine that did not have the last turn computes it again, and tells only the rows that are new."""
    async with rolling(kind, "--policy", "round_robin") as rollouts:
        text = CHAT
        for _ in range(4):
            answer = await rollouts.generate(text)
            text += answer["text"]
            record = await rollouts.record(text)
            check(trainer, record)
            text += NEXT
        check_each_row(trainer, record)
        assert answer["meta_info"]["routed_experts_start_len"] > len(CHAT)
        assert rollouts.passes() == [2, 2]


@qwen3_moe
async def test_forks(kind: Kind, trainer: ReplayTrainer) -> None:
    """Two answers to one prefix, and another continuation from the middle of an answer."""
    async with rolling(kind) as rollouts:
        prefix = CHAT + (await rollouts.generate(CHAT, "s"))["text"] + NEXT
        answers = [await rollouts.generate(prefix, "s") for _ in range(2)]
        records = [await rollouts.record(prefix + answer["text"], "s") for answer in answers]
        given = records[0]["tokens"][:-5]
        body = {
            "input_ids": given,
            "session_id": "s",
            "sampling_params": {"max_new_tokens": 9, "ignore_eos": True},
        }
        cut = (await rollouts.running.client.post("/generate", json=body)).json()
        assert cut["meta_info"]["routed_experts_start_len"] == len(given)
        path = "/trajectories/s?return_routed_experts=true"
        leaves = (await rollouts.running.client.get(path)).json()["trajectories"]
        assert [leaf["token_length"] - len(given) for leaf in leaves][-1] == 9
        for record in (*records, *leaves):
            check(trainer, record)


@qwen3_moe
async def test_rows_of_other_tokens_are_no_rows_of_these(kind: Kind, trainer: ReplayTrainer) -> None:
    async with rolling(kind) as rollouts:
        answers = await rollouts.generate(CHAT, "s", sampling_params={"n": 2})
        one, other = [await rollouts.record(CHAT + answer["text"], "s") for answer in answers]
        shifted = np.roll(experts_of(one), 1, axis=0)
        assert np.median(differences(trainer, one, shifted)) > SEEN
        # the first answer has the rows of the second one
        assert np.median(differences(trainer, one, experts_of(other))[1:]) > SEEN


@qwen3_moe
@pytest.mark.parametrize("incremental", [False, True])
async def test_streams(kind: Kind, trainer: ReplayTrainer, incremental: bool) -> None:
    async with rolling(kind, incremental_streaming_output=incremental) as rollouts:
        text = CHAT
        for _ in range(3):
            events = await rollouts.generate(text, "s", stream=True)
            assert len(events) > 3
            text += "".join(event["text"] for event in events) if incremental else events[-1]["text"]
            check(trainer, await rollouts.record(text, "s"))
            text += NEXT


@qwen3_moe
async def test_batches_and_several_samples(kind: Kind, trainer: ReplayTrainer) -> None:
    async with rolling(kind) as rollouts:
        known = CHAT + (await rollouts.generate(CHAT, "s"))["text"] + NEXT
        prompts = [known, CHAT, CHAT + "Once upon"]
        pairs = [*zip(prompts, await rollouts.generate(prompts, "s"), strict=True)]
        both = await rollouts.generate(prompts, "s", sampling_params={"n": 2})
        pairs += zip([prompt for prompt in prompts for _ in range(2)], both, strict=True)
        pairs += [(known, answer) for answer in await rollouts.generate(known, "s", sampling_params={"n": 3})]
        assert len(pairs) == 3 + 6 + 3
        for prompt, answer in pairs:
            record = await rollouts.record(prompt + answer["text"], "s")
            assert record["tokens"][-12:] == answer["output_ids"]
            check(trainer, record)


async def resumed(
    rollouts: ReplayedRollouts, text: str, engine: Served, update: JSONDict | None = None, **more: Any
) -> Any:
    """Return the answer to ``text``, which ``engine`` begins and aborts after some tokens."""
    found: list[Any] = []

    async def generate() -> None:
        found.append(await rollouts.generate(text, None, 30, **more))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await engine.until(lambda state: any(one.completion_tokens > 8 for one in state.running.values()))
        if update is None:
            await engine.post("/pause_generation", mode="abort")  # the other engine continues
        else:
            await rollouts.control("/pause_generation", mode="abort")
            await rollouts.control("/update_weights_from_disk", **update)
            await rollouts.control("/continue_generation")
    return found[0]


RESUMING = ("--policy", "round_robin", "--resume-aborted", "--abort-retry-wait-s", "0")


@qwen3_moe
@pytest.mark.parametrize("mode", ["whole", "cumulative", "incremental"])
async def test_an_answer_of_two_attempts(kind: Kind, trainer: ReplayTrainer, mode: str) -> None:
    settings: dict[str, Any] = {"incremental_streaming_output": mode == "incremental"}
    async with rolling(kind, *RESUMING, tokens_per_second=200, **settings) as rollouts:
        text = CHAT + (await rollouts.generate(CHAT))["text"] + NEXT
        first = rollouts.engines[rollouts.passes().index(0)]
        answer = await resumed(rollouts, text, first, stream=mode != "whole")
        if mode == "incremental":
            text += "".join(event["text"] for event in answer)
        else:
            text += (answer if mode == "whole" else answer[-1])["text"]
        sampled = [len([*engine.host.engine.journal.entries()][-1].output_ids) for engine in rollouts.engines]
        assert sum(sampled) == 30
        assert min(sampled) > 8
        check(trainer, await rollouts.record(text))


@qwen3_moe
@pytest.mark.parametrize("stream", [False, True])
async def test_pairs_of_prefill_and_decode(kind: Kind, trainer: ReplayTrainer, stream: bool) -> None:
    async with rolling(kind, pd=True) as rollouts:
        text = CHAT
        for tokens in (12, 1):  # a single token is the prefill engine's
            answer = await rollouts.generate(text, "s", tokens, stream=stream)
            text += (answer[-1] if stream else answer)["text"]
            check(trainer, await rollouts.record(text, "s"))
            text += NEXT
        assert rollouts.passes() == [2, 2]


# Updates of the weights: each row is of the turn in which its token was sampled.


@qwen3_moe
async def test_an_update_between_two_turns(
    kind: Kind, trainer: ReplayTrainer, updated: ReplayTrainer
) -> None:
    async with rolling(kind) as rollouts:
        text = CHAT + (await rollouts.generate(CHAT, "s"))["text"]
        await rollouts.control("/update_weights_from_disk", **kind.update)
        answer = await rollouts.generate(text + NEXT, "s", return_routed_experts=True)
        record = await rollouts.record(text + NEXT + answer["text"], "s")
        assert {*record["generation_versions"]} == {-1, "1", "2"}
        experts = experts_of(record)
        assert differences(trainer, record, experts, "1").max() <= NOISE
        # The second turn was sampled after another routing of the first one. The answer itself tells that.
        assert np.median(differences(updated, record, experts, "2")) > SEEN
        of_the_pass = decoded(answer["meta_info"]["routed_experts"])
        assert differences(updated, record, of_the_pass, "2").max() <= NOISE
        assert np.median(differences(trainer, record, of_the_pass, "1")) > SEEN


@qwen3_moe
async def test_an_update_within_an_answer(kind: Kind, trainer: ReplayTrainer, updated: ReplayTrainer) -> None:
    async with rolling(kind, *RESUMING, tokens_per_second=200) as rollouts:
        answer = await resumed(rollouts, CHAT, rollouts.engines[0], kind.update)
        record = await rollouts.record(CHAT + answer["text"])
        assert {*record["generation_versions"]} == {-1, "1", "2"}
        experts = experts_of(record)
        assert differences(trainer, record, experts, "1").max() <= NOISE
        assert np.median(differences(updated, record, experts, "2")) > SEEN


@qwen3_moe
async def test_turns_after_an_update_have_rows_of_the_new_weights(
    kind: Kind, trainer: ReplayTrainer, updated: ReplayTrainer
) -> None:
    """Prompts that were known before the update, of the same session and of others."""
    async with rolling(kind) as rollouts:
        first = CHAT + (await rollouts.generate(CHAT, "s"))["text"]
        await rollouts.control("/update_weights_from_disk", **kind.update)
        for prompt, session in [
            (CHAT, "s"), (CHAT + "Once", "s"), (CHAT, "t"), (first + NEXT, "t"), (first[:-3] + NEXT, "t")
        ]:  # fmt: skip
            record = await rollouts.record(
                prompt + (await rollouts.generate(prompt, session))["text"], session
            )
            assert {*record["generation_versions"]} == {-1, "2"}
            check(updated, record)
        check(trainer, await rollouts.record(first, "s"))
