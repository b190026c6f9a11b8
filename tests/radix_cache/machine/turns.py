"""One request of a client: its shape, how it is sent, and what is heard of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson

from radix_cache.machine.adversary import Adversary, Attempt
from radix_cache.machine.expert_audit import check_heard
from radix_cache.machine.experts import WAYS
from radix_cache.machine.facts import Asked, Fact
from radix_cache.machine.reading import Detokenizer
from radix_cache.machine.worlds import World
from radix_cache.scripted import bits

if TYPE_CHECKING:
    from radix_cache.machine.rollouts import Conversation

__all__ = ["HeardSequence", "Turn", "parameters_of", "say"]


@dataclass
class HeardSequence:
    """One sequence as a client heard it; ``ended`` is false when it left before the end.

    ``events``: what it got, as it was. ``odd``: the figures of an event do not agree.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: dict[str, Any] | None = None
    ended: bool = False
    odd: bool = False
    prompt_tokens: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: dict[str, Any], *, incremental: bool) -> None:
        meta = event["meta_info"]
        self.events.append(event)
        self.reason = meta["finish_reason"]
        self.ended = self.reason is not None
        late = "prompt_tokens" not in meta and self.prompt_tokens is not None
        self.prompt_tokens = meta.get("prompt_tokens", self.prompt_tokens)
        if "text" not in event:  # nothing but the reason
            return
        ids = event.get("output_ids") or []
        triples = [one for one, _, _ in meta.get("output_token_logprobs") or ()]
        if late:  # out of the queue: all text, all logprobs, the last id; nothing is new
            self.odd |= event["text"] != self.text or ids != self.ids[-1:] or triples != self.logprobs
            return
        self.odd |= len(triples) not in (0, len(ids))
        if incremental:
            self.text += event["text"]
            self.ids = self.ids + ids
            self.logprobs = self.logprobs + triples
        else:
            self.text, self.ids, self.logprobs = event["text"], ids, triples
        self.odd |= len(self.ids) != meta.get("completion_tokens", 0)


@dataclass
class Turn:
    """``prompts`` to continue, ``copies`` times each; sent as ids when they are ``given``.

    ``heard`` is all of the answer, None when there was none; ``so_far`` what is heard of it now. ``known``: how many
    facts there were when it was asked. ``leave``: the characters after which the client has heard enough of a
    stream. ``abort``: somebody asks for the abort, through the router. ``lie``: what the engine gets wrong, and in
    which of its attempts. ``media``: the request is passed on untouched.
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
    lie: str = ""
    media: bool = False
    adapters: list[str | None] = field(default_factory=list)
    fields: tuple[str, ...] = ()
    conversations: list[Conversation] = field(default_factory=list)
    heard: list[HeardSequence] | None = None
    so_far: list[HeardSequence] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.prompts) * self.copies

    def decide(self, world: World, lies: Iterator[str], *, aborts: bool) -> None:
        """Draw all that is not said yet; ``lies`` are told in turn."""
        luck = self.luck
        self.stream = luck.random() < 0.4
        if luck.random() < world.lies:
            self.lie = f"{next(lies)}@{luck.choice((0, 0, 0, 1, self.size - 1))}"
        if self.size == 1 and not self.lie:
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
        if self.abort or self.lie.startswith("id") or luck.random() < 0.5:
            body["rid"] = f"t{self.name}-"
        told = luck.choice((None, True, None, True, None, True, None, True, None, True, None, False))
        if told is not None and "logprobs" not in self.lie:
            body["return_logprob"] = told
        if luck.random() < 0.2:
            body["logprob_start_len"] = luck.choice((-1, 0, 2))
        self.body = body
        self._decide_on_what_is_odd(world)
        self._name_the_session(world)
        body |= Random(self.name).choice(WAYS)  # luck of its own: the rest is played as without experts

    def _decide_on_what_is_odd(self, world: World) -> None:
        luck, body = self.luck, self.body
        if world.adapters and luck.random() < 0.7:
            self.adapters = [luck.choice(world.adapters) for _ in self.prompts]
            body["lora_path"] = self.adapters[0] if len(self.prompts) == 1 else self.adapters
        if luck.random() < world.fields:
            self.fields = (luck.choice(("mystery", "riddle")),)
            if self.fields[0] == "mystery":
                body["mystery"] = {"x": 1}
            else:
                for one in self.parameters:
                    one["riddle"] = 1
        if self.given is None and luck.random() < world.media:
            self.media, self.lie = True, ""
            body["image_data"] = "data:image/png;base64,"

    def _name_the_session(self, world: World) -> None:
        """In a header, which comes before what the body says, or in the body."""
        self.headers = {"x-turn": self.name, "x-lie": self.lie}
        if self.session is None:
            return
        place = self.luck.random() if world.headers else 0.0
        if place < 0.6:
            self.headers["x-session-id"] = self.session
        elif place < 0.8:
            self.headers["x-smg-routing-key"] = self.session
        else:
            self.body["session_id"] = self.session
            return
        if world.headers and self.luck.random() < 0.3:
            self.body["session_id"] = "nobody"

    def asked(self, place: int, reader: Detokenizer) -> Asked:
        """Return the content of its prompt number ``place``."""
        return Asked(
            self.texts(reader)[place],
            self.session,
            self.parameters[place],
            given=self.given is not None,
            adapter=self.adapters[place] if self.adapters else None,
            fields=self.fields,
        )

    def shapes(self) -> Iterator[str]:
        """Its kinds, for counting."""
        yield "turns"
        if self.given is not None:
            yield "input_ids"
        if self.stream:
            yield "streamed"
        if len(self.prompts) > 1:
            yield "batch"
        if self.copies > 1:
            yield "n"
        if self.leave is not None:
            yield "left"
        if self.abort:
            yield "abort asked"
        if self.lie:
            yield "lie"
        if self.media:
            yield "media"
        if self.fields:
            yield "unknown field"

    def check(self, facts: Sequence[Fact], attempts: Sequence[Attempt], reader: Detokenizer) -> None:
        """Check that a fact says, in one go, what was heard; note how much of each fact is sure to be recorded."""
        assert self.given is None or len(attempts) <= self.size, "who sends tokens handles aborts"
        self._check_bytes(attempts)
        unheard = list(facts)
        for conversation, prompt, heard in zip(
            self.conversations, self._of_each(reader), self.heard or [], strict=False
        ):
            conversation.prompt, conversation.text = prompt, prompt + heard.text
            conversation.failed = not heard.ids and not heard.text
            if conversation.failed or self.media:
                continue
            fact = self._fact_of(heard, prompt, unheard)
            unheard.remove(fact)
            if fact.lies:
                continue
            assert not heard.odd or any(one.lie for one in attempts), (self, heard)  # an aborted one, before
            assert heard.prompt_tokens in (None, len(fact.consumed)), (self, heard, fact)
            fact.sure = len(heard.ids)
            if not heard.ended:
                continue
            assert fact.retell(heard.text), (self, heard, fact)
            if all(attempt.tells in (None, "asked", "none") for attempt in attempts):
                check_heard(fact, heard.events[-1]["meta_info"])
            if self.abort:
                assert heard.reason is not None
                assert heard.reason["type"] == "abort"
        if self.heard is None:
            for conversation in self.conversations:
                conversation.failed = True
        for fact in unheard:  # aborted attempts, of which the client has not heard
            all_ended = self.heard and all(one.ended for one in self.heard)
            fact.sure = len(fact.sampled) if all_ended and not fact.lies else 0

    def _check_bytes(self, attempts: Sequence[Attempt]) -> None:
        """Check that one attempt's events are passed on unchanged, though it contradicts itself."""
        if len(attempts) != self.size or self.heard is None:
            return
        for heard, attempt in zip(self.heard, attempts, strict=True):
            if attempt.reason["type"] != "abort":
                told = [{key: value for key, value in one.items() if key != "index"} for one in heard.events]
                assert told == attempt.said[: len(told)], (self, told, attempt.said)
                assert not heard.ended or len(told) == len(attempt.said)

    def _fact_of(self, heard: HeardSequence, prompt: str, facts: Sequence[Fact]) -> Fact:
        honest = (one for one in reversed(facts) if _is_of(heard, prompt, one))
        lying = (one for one in facts if one.prompt == prompt and one.lies)
        fact = next(honest, None) or next(lying, None)
        assert fact is not None, (self, heard, facts)
        return fact

    def texts(self, reader: Detokenizer) -> list[str]:
        """Return the prompts as text."""
        return self.prompts if self.given is None else [reader.decode(one) for one in self.given]

    def _of_each(self, reader: Detokenizer) -> list[str]:
        return [text for text in self.texts(reader) for _ in range(self.copies)]


def _is_of(heard: HeardSequence, prompt: str, fact: Fact) -> bool:
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


async def say(turn: Turn, client: httpx.AsyncClient, engine: Adversary) -> list[HeardSequence] | None:
    """Send the request and hear the answer; None when there was none."""
    if not turn.abort:
        return await _hear(turn, client, engine)
    engine.holding[turn.name] = anyio.Event()
    heard: list[HeardSequence] | None = None
    async with anyio.create_task_group() as tasks:

        async def ask_for_the_abort() -> None:
            await engine.holding[turn.name].wait()
            await client.post("/abort_request", json={"rid": turn.body["rid"]})

        tasks.start_soon(ask_for_the_abort)
        heard = await _hear(turn, client, engine)
    assert len(engine.of(turn.name)) == 1, "an abort that was asked for is not undone"
    return heard


async def _hear(turn: Turn, client: httpx.AsyncClient, engine: Adversary) -> list[HeardSequence] | None:
    heard = turn.so_far = [HeardSequence() for _ in range(turn.size)]
    async with client.stream("POST", "/generate", json=turn.body, headers=turn.headers) as reply:
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
