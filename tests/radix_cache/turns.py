"""One request of a client: its shape, how it is sent, and what is heard of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson

from radix_cache.adversary import Adversary
from radix_cache.reading import Detokenizer
from radix_cache.scripted import bits

if TYPE_CHECKING:
    from radix_cache.facts import Fact
    from radix_cache.rollouts import Conversation

__all__ = ["Heard", "Turn", "parameters_of", "say"]


@dataclass
class Heard:
    """What a client heard of one sequence; ``ended`` is false when it left before the end."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: dict[str, Any] | None = None
    ended: bool = False

    def take(self, event: dict[str, Any], *, incremental: bool) -> None:
        meta = event["meta_info"]
        triples = [one for one, _, _ in meta.get("output_token_logprobs") or ()]
        assert len(triples) in (0, len(event["output_ids"]))
        if incremental:
            self.text += event["text"]
            self.ids = self.ids + event["output_ids"]
            self.logprobs = self.logprobs + triples
        else:
            self.text, self.ids, self.logprobs = event["text"], event["output_ids"], triples
        assert len(self.ids) == meta["completion_tokens"]
        self.reason = meta["finish_reason"]
        self.ended = self.reason is not None


@dataclass
class Turn:
    """``prompts`` to continue, ``copies`` times each; sent as ids when they are ``given``.

    ``known``: how many facts there were when it was asked. ``leave``: the characters after which the client has
    heard enough of a stream. ``abort``: somebody asks for the abort, through the router.
    """

    name: str
    session: str | None
    prompts: list[str]
    given: list[list[int]] | None
    parameters: list[dict[str, Any]]
    copies: int
    known: int
    luck: Random
    stream: bool = False
    leave: int | None = None
    abort: bool = False
    conversations: list[Conversation] = field(default_factory=list)
    heard: list[Heard] | None = None
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.prompts) * self.copies

    def decide(self, *, aborts: bool) -> None:
        """Draw all that is not said yet."""
        luck = self.luck
        self.stream = luck.random() < 0.4
        if self.size == 1:
            self.abort = aborts and luck.random() < 0.05
            if self.stream and not self.abort:
                self.leave = luck.choice((None, None, 1, 4))
        single = len(self.prompts) == 1
        body: dict[str, Any] = {"stream": self.stream}
        if self.given is not None:
            body["input_ids"] = self.given[0] if single else self.given
        else:
            body["text"] = self.prompts[0] if single else self.prompts
        body["sampling_params"] = self.parameters[0] if single else self.parameters
        if self.abort or luck.random() < 0.5:
            body["rid"] = f"t{self.name}-"
        told = luck.choice((None, True, None, True, None, True, None, True, None, True, None, False))
        if told is not None:
            body["return_logprob"] = told
        if luck.random() < 0.2:
            body["logprob_start_len"] = luck.choice((-1, 0, 2))
        self.body = body

    def shapes(self) -> Iterator[str]:
        """What is special about it, for counting."""
        yield "streamed" if self.stream else "whole"
        if self.given is not None:
            yield "ids"
        if len(self.prompts) > 1:
            yield "batch"
        if self.copies > 1:
            yield "n"
        if self.leave is not None:
            yield "left"
        if self.abort:
            yield "abort asked"

    def check(self, facts: Sequence[Fact], reader: Detokenizer) -> None:
        """What was heard is what a fact says, in one go; notes how much of each fact is sure to be recorded."""
        unheard = list(facts)
        for conversation, prompt, heard in zip(
            self.conversations, self._of_each(reader), self.heard or [], strict=False
        ):
            conversation.prompt, conversation.text = prompt, prompt + heard.text
            conversation.failed = not heard.ids
            if not heard.ids:
                conversation.text = prompt
                continue
            fact = next((one for one in reversed(unheard) if _is_of(heard, prompt, one)), None)
            assert fact is not None, (self, heard, facts)
            unheard.remove(fact)
            fact.sure = len(heard.ids)
            if not heard.ended:
                continue
            assert heard.text == fact.text, (self, heard, fact)
            if self.abort:
                assert heard.reason is not None
                assert heard.reason["type"] == "abort"
        if self.heard is None:
            for conversation in self.conversations:
                conversation.failed = True
        for fact in unheard:  # aborted attempts, of which the client has not heard
            fact.sure = len(fact.sampled) if self.heard and all(one.ended for one in self.heard) else 0

    def texts(self, reader: Detokenizer) -> list[str]:
        """What is asked, as text."""
        return self.prompts if self.given is None else [reader.decode(one) for one in self.given]

    def _of_each(self, reader: Detokenizer) -> list[str]:
        return [text for text in self.texts(reader) for _ in range(self.copies)]


def _is_of(heard: Heard, prompt: str, fact: Fact) -> bool:
    size = len(heard.ids)
    if (
        fact.prompt != prompt
        or fact.sampled[:size] != heard.ids
        or (heard.ended and size < len(fact.sampled))
    ):
        return False
    told = [row.logprob for row in fact.rows[:size] if row.logprob is not None]
    return bits(told) == bits(heard.logprobs)


def parameters_of(random: Random, reader: Detokenizer, special: Sequence[str]) -> dict[str, Any]:
    """Sampling parameters of every kind."""
    parameters: dict[str, Any] = {"max_new_tokens": random.randint(1, 14)}
    for name in ("ignore_eos", "no_stop_trim"):
        if random.random() < 0.2:
            parameters[name] = True
    if random.random() < 0.4:
        parameters["skip_special_tokens"] = random.random() < 0.3
    if random.random() < 0.3:
        parameters["stop"] = random.choice(("</think>", ["ab", "harbour w"], ["語 😀", "x="], special[0]))
    if random.random() < 0.2:
        ids = reader.tokenizer.encode(random.choice(("E", "</think>", " the")), add_special_tokens=False)
        parameters["stop_token_ids"] = list(ids[-1:])
    return parameters


async def say(turn: Turn, client: httpx.AsyncClient, engine: Adversary) -> list[Heard] | None:
    """Send the request and hear the answer; None when there was none."""
    headers = {"x-turn": turn.name} | ({"x-session-id": turn.session} if turn.session is not None else {})
    if not turn.abort:
        return await _hear(turn, client, engine, headers)
    engine.holding[turn.name] = anyio.Event()
    heard: list[Heard] | None = None
    async with anyio.create_task_group() as tasks:

        async def ask_for_the_abort() -> None:
            await engine.holding[turn.name].wait()
            await client.post("/abort_request", json={"rid": turn.body["rid"]})

        tasks.start_soon(ask_for_the_abort)
        heard = await _hear(turn, client, engine, headers)
    assert len(engine.of(turn.name)) == 1, "an abort that was asked for is not undone"
    return heard


async def _hear(
    turn: Turn, client: httpx.AsyncClient, engine: Adversary, headers: dict[str, str]
) -> list[Heard] | None:
    heard = [Heard() for _ in range(turn.size)]
    async with client.stream("POST", "/generate", json=turn.body, headers=headers) as reply:
        if reply.status_code == 500:
            return None
        assert reply.status_code == 200, await reply.aread()
        if not turn.stream:
            answer = orjson.loads(await reply.aread())
            for one, output in zip(heard, answer if isinstance(answer, list) else [answer], strict=True):
                one.take(output, incremental=False)
            return heard
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line[6:])
            one = heard[event.get("index", 0)]
            one.take(event, incremental=engine.incremental)
            if turn.leave is not None and len(one.text) >= turn.leave:
                return heard
    return heard
