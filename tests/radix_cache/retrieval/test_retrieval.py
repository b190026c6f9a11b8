"""``/retrieve_from_messages_template``, and what else retrieval is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import httpx
import orjson
import pytest

from radix_cache.scripted import Client, ScriptedEngine, bits, routed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


class TestMessages:
    MESSAGES: ClassVar = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Why?"}]

    async def ask(self, client: httpx.AsyncClient, **body: Any) -> Any:
        answer = await client.post("/retrieve_from_messages_template", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, client: Client, messages: list[dict[str, Any]], **options: Any) -> str:
        text: str = client.engine.tokenizer.apply_chat_template(messages, **options)
        return text

    async def test_messages_give_the_tokens_of_their_text(self, client: Client) -> None:
        http = client.running.client
        prompt = self.text(client, self.MESSAGES, add_generation_prompt=True)
        await client.generate(prompt, [5, 6, client.engine.eos], session="s")
        asked = await self.ask(http, messages=self.MESSAGES, add_generation_prompt=True, session_id="s")
        assert asked["exact"]
        assert asked["response"] == prompt
        content = client.engine.tokenizer.decode([5, 6])
        messages = [*self.MESSAGES, {"role": "assistant", "content": content}]
        answer = await self.ask(http, messages=messages, session_id="s")
        tokens, mask, logprobs = client.last()
        assert answer["exact"], answer["inexact_reason"]
        assert (answer["tokens"], answer["loss_mask"]) == (tokens, mask)
        assert bits(answer["rollout_logp"]) == logprobs
        assert (
            answer["response"] == prompt + content + "<|im_end|>"
        )  # no engine has seen a line break after it
        assert answer["finish_reason"] == {"type": "stop", "matched": client.engine.eos}

    async def test_text_that_no_engine_has_seen_is_inexact(self, client: Client) -> None:
        messages = [*self.MESSAGES, {"role": "assistant", "content": "Never said."}]
        answer = await self.ask(client.running.client, messages=messages)
        assert answer["inexact_reason"] == "uncovered_text"
        assert answer["response"] == self.text(client, messages)

    async def test_tools_and_variables_reach_the_template(self, client: Client) -> None:
        tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
        answer = await self.ask(
            client.running.client, messages=self.MESSAGES, tools=tools, chat_template_kwargs={"unused": 1}
        )
        assert answer["response"] == self.text(client, self.MESSAGES, tools=tools)

    async def test_long_conversations_are_the_same(self, client: Client) -> None:
        """They are rendered in a thread."""
        messages = self.MESSAGES * 100
        answer = await self.ask(client.running.client, messages=messages)
        assert answer["response"] == self.text(client, messages)

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({}, '"messages" must be a list of at least one message, got nothing'),
            ({"messages": []}, "got an empty list"),
            ({"messages": "hi"}, "got str"),
            ({"messages": [{"content": "hi"}]}, '"messages"[0] must be an object with a string "role"'),
            ({"messages": ["hi"]}, '"messages"[0]'),
            ({"messages": [{"role": "user", "content": 5}]}, "the chat template refuses these messages: "),
            ({"messages": MESSAGES, "tools": {}}, '"tools" must be a list of objects, got dict'),
            ({"messages": MESSAGES, "tools": ["x"]}, '"tools" must be a list of objects, got str'),
            ({"messages": MESSAGES, "add_generation_prompt": 1}, '"add_generation_prompt" must be true'),
            ({"messages": MESSAGES, "chat_template_kwargs": []}, "must be an object"),
            ({"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}, "must not have"),
            ({"messages": MESSAGES, "session_id": 5}, '"session_id" must be a string'),
            ([], 'wanted a JSON object with "messages", got an empty list'),
        ],
    )
    async def test_invalid_request_gets_one_clear_error(self, client: Client, body: Any, said: str) -> None:
        answer = await client.running.client.post("/retrieve_from_messages_template", json=body)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]

    async def test_a_tokenizer_without_a_template_is_named_as_the_reason(
        self, start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path
    ) -> None:
        shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
        config = tmp_path / "tokenizer_config.json"
        bare = {
            key: value for key, value in orjson.loads(config.read_bytes()).items() if key != "chat_template"
        }
        config.write_bytes(orjson.dumps(bare))
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        async with routed(start, engine, str(tmp_path)) as client:
            answer = await client.running.client.post(
                "/retrieve_from_messages_template", json={"messages": self.MESSAGES}
            )
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]


class TestOptions:
    async def test_routed_experts_are_said_not_to_be_recorded(self, client: Client) -> None:
        await client.generate(PROMPT, [5])
        answer = await client.retrieve(PROMPT, return_routed_experts=True)
        assert (answer["routed_experts"], answer["routed_experts_reason"]) == (None, "not_recorded")
        assert "routed_experts" not in await client.retrieve(PROMPT)

    @pytest.mark.parametrize("name", ["return_logp", "return_routed_experts"])
    async def test_a_switch_is_true_or_false(self, client: Client, name: str) -> None:
        answer = await client.running.client.post("/retrieve_from_text", json={"text": "", name: "no"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f'"{name}" must be true or false, got str'

    async def test_the_end_is_told_of_a_text_that_ends_with_a_whole_response(self, client: Client) -> None:
        text = PROMPT + (await client.generate(PROMPT, [5, 6]))["text"]
        assert (await client.retrieve(text))["finish_reason"] == {"type": "length", "length": 2}
        for other in (PROMPT, PROMPT + client.engine.tokenizer.decode([5]), text + "x", ""):
            assert (await client.retrieve(other))["finish_reason"] is None
