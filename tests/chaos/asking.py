"""The clients: they ask over HTTP, and write down what each request came to."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from chaos.conversations import Conversation, Heard
from chaos.faults import pause

__all__ = ["DEADLINE_S", "AskedOnce", "Broken", "Crowd"]

#: Nobody waits longer; the router's own deadlines, added up, are shorter.
DEADLINE_S = 60.0
_ATTEMPTS = 6
_STATUSES = frozenset({408, 429, 502, 503, 504})


class Broken(Exception):
    """A request did not come to its end: ``outcome`` says how, ``heard`` what came before."""

    def __init__(self, outcome: str, heard: Heard | None = None) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.heard = heard


@dataclass(slots=True)
class AskedOnce:
    """A request and what became of it, or ``under way``."""

    rids: list[str]
    asked_at: float
    outcome: str = "under way"
    heard: list[Heard] = field(default_factory=list)


class Crowd:
    """All clients of one router. ``wrong`` has what no client may ever see."""

    def __init__(self, http: aiohttp.ClientSession, tokens: int) -> None:
        self._http = http
        self._tokens = tokens
        self.asked: list[AskedOnce] = []
        self.wrong: list[tuple[str, str]] = []
        self.finished: list[Conversation] = []
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def outcomes(self, session: str) -> Counter[str]:
        """Return the outcomes of all requests of ``session``."""
        return Counter(one.outcome for one in self.asked if one.rids[0].rpartition(".")[0] == session)

    # One conversation.

    async def play(self, conversation: Conversation, turns: int, pause_s: float) -> None:
        """Talk for some turns, or fewer when ``hurry`` is set; a turn that fails again and again ends it."""
        random = conversation.random
        for turn in range(turns):
            if turn:
                if self.hurry.is_set():
                    break
                conversation.say()
            await pause(self.hurry, random.uniform(0, 2 * pause_s))
            if turn and random.random() < 0.06:
                branch = conversation.fork(f"{conversation.session}f{turn}")
                await self._turn(branch)
                await self._finish(branch)
            if not await self._turn(conversation):
                break
        await self._finish(conversation)

    async def _finish(self, conversation: Conversation) -> None:
        """Ask at once, in the middle of it all, for the tokens of what has been said."""
        conversation.said = await self.retrieve(conversation)
        self.finished.append(conversation)

    async def retrieve(self, conversation: Conversation) -> dict[str, Any]:
        """Return the router's record of the conversation's text."""
        question = {"text": conversation.settled, "session_id": conversation.session}
        async with self._http.post("/retrieve_from_text", json=question) as answer:
            said: dict[str, Any] = await answer.json()
        return said

    async def _turn(self, conversation: Conversation) -> bool:
        """Ask until there is an answer to go on from."""
        random = conversation.random
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(random.uniform(0.1, 0.4 * 2**attempt))
            manner = random.choices(
                ("whole", "stream", "batch", "leave stream", "leave whole"), (45, 35, 8, 8, 4)
            )[0]
            if attempt:
                manner = "stream" if manner.endswith("stream") else "whole"
            heard = await self._answer(conversation, manner)
            if heard is None:
                continue
            if heard.kept_whole and heard.told and random.random() < 0.1:
                conversation.take(heard, random.randint(1, len(heard.told)))  # only a part of it is wanted
            else:
                conversation.take(heard)
            return True
        conversation.failed = True
        return False

    async def _answer(self, conversation: Conversation, manner: str) -> Heard | None:
        random = conversation.random
        rids = [conversation.rid() for _ in range(3 if manner == "batch" else 1)]
        leaves = manner.startswith("leave")
        text: Any = [conversation.text] * 3 if manner == "batch" else conversation.text
        body = {
            "text": text,
            "rid": rids if manner == "batch" else rids[0],
            "stream": manner.endswith("stream"),
            "sampling_params": {
                "max_new_tokens": 20_000 if leaves else random.randint(1, 2 * self._tokens),
                "ignore_eos": leaves,
            },
        }
        if random.random() < 0.5:
            body["return_logprob"] = True
        asked = AskedOnce(rids, self._loop.time())
        self.asked.append(asked)
        leave_at = random.randint(1, self._tokens) if manner == "leave stream" else None
        kept: Heard | None = None
        try:
            async with asyncio.timeout(random.uniform(0.1, 1) if manner == "leave whole" else DEADLINE_S):
                if body["stream"]:
                    asked.heard = [await self._stream(body, conversation.session, asked, leave_at)]
                else:
                    asked.heard = await self._whole(body, conversation.session, asked)
            asked.outcome = "left" if leave_at is not None else "200"
            kept = asked.heard[0]
            if not kept.whole and leave_at is None:
                asked.outcome = "aborted 200"
            for other in (one for one in asked.heard[1:] if one.told):
                branch = conversation.fork(conversation.session)
                branch.take(other)
                await self._finish(branch)
        except TimeoutError:
            asked.outcome = "left"
            if manner != "leave whole":
                asked.outcome = "waited for ever"
                self.wrong.append(("waited for ever", f"{rids}: no end within {DEADLINE_S:g} s"))
        except Broken as broken:
            asked.outcome = broken.outcome
            kept = broken.heard
            asked.heard = [kept] if kept is not None else []
        except aiohttp.ClientError as error:
            asked.outcome = "no answer"
            self.wrong.append(("no answer", f"{rids}: {error!r}"))
        if kept is not None and not kept.whole and (not kept.told or random.random() < 0.5):
            return None  # begin anew
        return kept

    # One request.

    async def _whole(self, body: dict[str, Any], session: str, asked: AskedOnce) -> list[Heard]:
        headers = {"x-session-id": session}
        async with self._http.post("/generate", data=orjson.dumps(body), headers=headers) as answer:
            try:
                raw = await answer.read()
            except aiohttp.ClientPayloadError:
                raise Broken("cut off") from None
            self._check_status(answer.status, raw, asked)
        try:
            document = orjson.loads(raw)
            documents = document if isinstance(document, list) else [document]
            return [self._heard(rid, one, asked) for rid, one in zip(asked.rids, documents, strict=True)]
        except (ValueError, KeyError, TypeError):
            raise Broken("garbled") from None

    async def _stream(
        self, body: dict[str, Any], session: str, asked: AskedOnce, leave_at: int | None
    ) -> Heard:
        heard: Heard | None = None
        headers = {"x-session-id": session}
        events, sense = 0, True
        async with self._http.post("/generate", data=orjson.dumps(body), headers=headers) as answer:
            if answer.status != 200:
                self._check_status(answer.status, await answer.read(), asked)
            if answer.content_type != "text/event-stream":
                raise Broken("garbled")
            done = False
            try:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = orjson.loads(line[6:])
                        if "error" in event:
                            raise Broken("error event", heard)
                        heard = self._heard(asked.rids[0], event, asked)
                        events += 1
                        if leave_at is not None and events >= leave_at:
                            answer.close()
                            return heard
                    done = done or line == b"data: [DONE]\n"
                    sense = sense and line.startswith((b"data: ", b"\n"))
            except aiohttp.ClientPayloadError:
                raise Broken("cut off", heard) from None
        if not sense:
            raise Broken("garbled", heard)
        if not done or heard is None or heard.reason is None:
            self.wrong.append(
                ("a stream that looks whole has no end", f"{asked.rids}: {done=}, {events} events, {heard}")
            )
            raise Broken("no end", heard)
        return heard

    def _check_status(self, status: int, raw: bytes, asked: AskedOnce) -> None:
        """An error must be clear. Raises Broken."""
        if status == 200:
            return
        try:
            error = orjson.loads(raw)["error"]
            clear = bool(error["message"] and error["code"] and error["type"])
        except (ValueError, KeyError, TypeError):
            clear = False
        if not clear or status not in _STATUSES:
            self.wrong.append(("an error that is not clear", f"{asked.rids}: {status} {raw[:300]!r}"))
        raise Broken(str(status))

    def _heard(self, rid: str, document: dict[str, Any], asked: AskedOnce) -> Heard:
        meta = document["meta_info"]
        return Heard(
            rid=rid,
            told=document["text"],
            text=document["text"],
            output_ids=document["output_ids"],
            logprobs=[triple[0] for triple in meta.get("output_token_logprobs", ())],
            prompt_tokens=meta.get("prompt_tokens"),
            reason=meta["finish_reason"],
            asked_at=asked.asked_at,
            heard_at=self._loop.time(),
        )
