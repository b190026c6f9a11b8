"""An agent with tools that uses OpenAI's unmodified SDK; then the training sample of its conversation.

The README of this directory has the command.
"""

from __future__ import annotations

import json
import sys
import uuid
from itertools import groupby
from typing import Any

from openai import OpenAI

from slime_radix_cache.client import Client


def where_am_i() -> str:
    """Return a city, in place of a real tool."""
    return "Oslo"


def weather(city: str) -> str:
    """Return the weather of ``city``, in place of a real tool."""
    return f"{city}: rain all day"


FUNCTIONS: dict[str, Any] = {"where_am_i": where_am_i, "weather": weather}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
MAX_TURNS = 8
TOOLS: Any = [
    {"type": "function", "function": {"name": "where_am_i", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
]


def answer(openai: OpenAI, question: str) -> str:
    """Return the model's answer to ``question``. Before, call the tools that the model asks for."""
    model = openai.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        reply = openai.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return f"no answer after {MAX_TURNS} turns"


def main(url: str) -> None:
    """Run the agent against the router at ``url``, and print the sample."""
    session = f"rollout-{uuid.uuid4().hex}"  # each rollout needs its own session
    with OpenAI(base_url=f"{url}/sessions/{session}/v1", api_key="none") as openai:
        print(answer(openai, "Do I need an umbrella?"))
    with Client(url) as router:
        (sample,) = router.trajectories(session)  # one leaf: the agent went back to no earlier turn
    print(f"\nexact: {sample['exact']}, {len(sample['tokens'])} tokens, {sample['loss_mask'].sum()} sampled")
    columns = zip(sample["loss_mask"], sample["tokens"], sample["rollout_logp"], strict=True)
    for mask, group in groupby(columns, key=lambda column: column[0]):
        run = list(group)
        print(f"loss mask {mask}: tokens {[int(token) for _, token, _ in run]}")
        if mask:
            print(f"    mean logprob {sum(logprob for _, _, logprob in run) / len(run):.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
