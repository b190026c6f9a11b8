"""Rollouts of the conversations through the router's HTTP API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import httpx
import orjson

from slime_demo.conversations import FOLLOW_UPS, Conversation

__all__ = ["FIRST_VERSION", "SECOND_VERSION", "Refused", "Rollouts", "Sampling", "checked"]

FIRST_VERSION, SECOND_VERSION = "1", "2"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of all turns."""

    temperature: float = 1.0
    max_new_tokens: int = 64


class Refused(Exception):
    """The router or an engine refused a request; the message has the request and the reason."""


def checked(answer: httpx.Response) -> httpx.Response:
    """Return ``answer`` if it succeeded. Raises Refused otherwise."""
    if not answer.is_success:
        raise Refused(
            f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:500]}"
        )
    return answer


class Rollouts:
    """Plays all conversations at once, and updates the weights when half of the turns are done.

    ``weights`` is the ``model_path`` of the update. For a real model it is the path of the model's own weights, so
    only the version changes.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        workers: list[str],
        conversations: list[Conversation],
        sampling: Sampling,
        weights: str,
        on_turn: Callable[[], None],
    ) -> None:
        self._client = client
        self._workers = workers
        self._conversations = conversations
        self._sampling = asdict(sampling)
        self._weights = weights
        self._on_turn = on_turn
        self._half = anyio.Event()
        self._done = 0

    @property
    def turns(self) -> int:
        """Turns of all conversations together."""
        return len(self._conversations) * (1 + len(FOLLOW_UPS))

    async def run(self) -> None:
        """Play all conversations. Raises an ExceptionGroup of Refused and httpx.HTTPError."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._update_weights)
            for conversation in self._conversations:
                tasks.start_soon(self._play, conversation)

    async def _play(self, conversation: Conversation) -> None:
        for follow_up in (*FOLLOW_UPS, None):
            conversation.add_answer(await self._generate(conversation))
            self._done += 1
            self._on_turn()
            if self._done >= self.turns // 2:
                self._half.set()
            if follow_up is not None:
                conversation.add_message(follow_up)

    async def _generate(self, conversation: Conversation) -> str:
        payload = {
            "text": conversation.text,
            "rid": conversation.begin_turn(),
            "stream": conversation.streamed,
            "sampling_params": self._sampling,
        }
        headers = {"x-session-id": conversation.session}
        if not conversation.streamed:
            answer = checked(await self._client.post("/generate", json=payload, headers=headers))
            return str(answer.json()["text"])
        text = ""
        async with self._client.stream("POST", "/generate", json=payload, headers=headers) as answer:
            if not answer.is_success:
                await answer.aread()
            checked(answer)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text = orjson.loads(line[6:])["text"]  # cumulative: each event has the whole text
        return text

    async def _update_weights(self) -> None:
        """Update the weights of every engine amid generation, as a trainer does, then set the router's version."""
        await self._half.wait()
        update: dict[str, Any] = {"model_path": self._weights, "weight_version": SECOND_VERSION}
        for worker in self._workers:
            for path, body in (
                ("/pause_generation", {"mode": "in_place"}),
                ("/update_weights_from_disk", update),
                ("/continue_generation", {}),
            ):
                checked(await self._client.post(worker + path, json=body))
        checked(await self._client.post("/weight_version", json={"weight_version": SECOND_VERSION}))
