"""An agent that knows nothing but OpenAI's SDK."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from openai import LengthFinishReasonError

from clients.rolling import call

__all__ = ["converse"]


async def converse(completions: Any, messages: list[Any], *, streamed: bool, **asked: Any) -> None:
    """Append what the model says and what its tools answer to ``messages``, until it calls none.

    ``completions``: those of a client. ``asked``: what is asked of the model with each request.
    """
    while messages[-1]["role"] != "assistant":
        said = await _ask(completions, streamed, messages=messages, **asked)
        messages.append(said.model_dump(exclude_none=True))
        for each in said.tool_calls or ():
            result = call(each.function.name, each.function.arguments)
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


async def _ask(completions: Any, streamed: bool, **asked: Any) -> Any:
    if not streamed:
        return (await completions.create(**asked)).choices[0].message
    async with completions.stream(**asked) as stream:
        with suppress(LengthFinishReasonError):  # aborted: as far as it went
            await stream.until_done()
        return stream.current_completion_snapshot.choices[0].message
