"""miles' session server: what it sends for an agent, what it wants of answers, and the sample that it makes of them.

It renders the first turn itself, and each later one as the tokens so far and its own rendering of the new messages
behind them. So every chat has ``input_ids``. With ``added_rows`` (generation is paused in place for new weights) it
asks for those rows of routed experts only that it has not got yet.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from openai_.chat_models.families import Family

__all__ = ["Message", "Refused", "Sample", "Session"]

Message = dict[str, Any]
_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}


class Refused(Exception):
    """The backend's answer that went to the agent as it is."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.text)
        self.status = answer.status_code


@dataclass
class Sample:
    """A trainer's sample: ``loss_mask`` and ``logprobs`` are as long as ``tokens``."""

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    experts: npt.NDArray[np.int32]
    status: str
    versions: list[str]


@dataclass
class _Turn:
    """One chat; ``before``: the messages that the session had."""

    before: list[Message]
    request: dict[str, Any]
    choice: dict[str, Any]

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = self.request["input_ids"]
        return ids

    @property
    def triples(self) -> list[tuple[float, int, str | None]]:
        triples: list[tuple[float, int, str | None]] = self.choice["meta_info"]["output_token_logprobs"]
        return triples

    @property
    def tokens(self) -> list[int]:
        return self.prompt + [token for _, token, _ in self.triples]


@dataclass
class Session:
    """One of its sessions; ``backend`` is a router, or an engine."""

    backend: httpx.AsyncClient
    family: Family
    name: str
    added_rows: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)

    async def ask(self, *new: Message, **agents: Any) -> Message:
        """The answer to ``new`` messages of an agent, behind those so far. Raises Refused."""
        messages = [*self.messages, *new]
        body: dict[str, Any] = {"model": "policy", "messages": messages, "tools": self.tools, **agents}
        body |= {"logprobs": True, "return_meta_info": True, "no_stop_trim": False}
        body |= {"return_routed_experts": True, "return_indexer_topk": True}
        known = self.turns[-1].tokens if self.turns else []
        body["input_ids"] = self._prompt(known, messages, new)
        if self.added_rows:
            body["routed_experts_start_len"] = max(0, len(known) - 1)
        headers = {"authorization": "Bearer none", "X-SMG-Routing-Key": self.name}
        answer = await self.backend.post("/v1/chat/completions", json=body, headers=headers)
        if answer.status_code != 200:
            raise Refused(answer)
        choice = answer.json()["choices"][0]
        meta, message = choice["meta_info"], choice["message"]
        assert message["content"] is not None
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        self.turns.append(_Turn(self.messages, body, choice))
        self.messages = [*messages, message]
        return dict(message)

    def take_back(self) -> None:
        """The agent tries its last turn again."""
        self.messages = self.turns.pop().before

    def _prompt(self, known: list[int], messages: list[Message], new: tuple[Message, ...]) -> list[int]:
        tokenizer = self.family.tokenizer
        if not known:
            text = tokenizer.apply_chat_template(messages, tools=self.tools, add_generation_prompt=True)
            return tokenizer.encode(text)
        end = "\n" if known[-1] in tokenizer.eos_ids else f"{self.family.eos}\n"
        for message in new:
            is_tool = message["role"] == "tool"
            role, content = "user" if is_tool else message["role"], message["content"]
            said = f"<tool_response>\n{content}\n</tool_response>" if is_tool else content
            end += f"<|im_start|>{role}\n{said}{self.family.eos}\n"
        return known + tokenizer.encode(f"{end}<|im_start|>assistant\n")

    def sample(self) -> Sample:
        """All turns as one sample; an AssertionError where they are none."""
        tokens = self.turns[-1].tokens
        mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
        rows: list[npt.NDArray[np.int32]] = []
        for turn in self.turns:
            assert turn.tokens == tokens[: len(turn.tokens)]
            for place, (logprob, _, _) in enumerate(turn.triples, len(turn.prompt)):
                mask[place], logprobs[place] = 1, logprob
            rows = [*(rows if self.added_rows else []), _rows(turn)]
        last = self.turns[-1].choice["finish_reason"]
        versions = [turn.choice["meta_info"]["weight_version"] for turn in self.turns]
        return Sample(tokens, mask, logprobs, np.concatenate(rows), _STATUS[last], versions)


def _rows(turn: _Turn) -> npt.NDArray[np.int32]:
    """The experts in one answer, a row for each token that was asked about."""
    told = base64.b64decode(turn.choice["meta_info"]["routed_experts"])
    count = len(turn.tokens) - 1 - turn.request.get("routed_experts_start_len", 0)
    return np.frombuffer(told, "<i4").reshape(count, -1)
