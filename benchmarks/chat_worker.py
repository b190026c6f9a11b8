"""A worker's answers to chats: at ``/generate``, which the plugin ``openai`` calls, and at ``/v1/chat/completions``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.samples import Answer, Samples
from benchmarks.stand_in import Chunk, StandIn, Template

__all__ = ["NAME", "stand_ins"]

#: The name of a request, as text in its last question, since some proxies drop unknown fields.
NAME = "This is request {}."

_NAME_OF = re.compile(rb"This is request ([^.]+)\.")


def stand_ins(
    samples: Samples, answers: Mapping[int, Sequence[Answer]], streamed: Answer
) -> tuple[StandIn, StandIn]:
    """Return stand-ins for ``/generate`` and ``/v1/chat/completions``.

    Both stream the same text, in the same number of chunks.

    ``answers``: the whole answers, by their number of tokens. ``/v1/chat/completions`` has only the shortest.
    ``streamed``: the answer of every stream.
    """
    ids = streamed.ids
    texts = ["", *(samples.decode(ids[:n]) for n in range(1, len(ids))), streamed.text]
    engine = StandIn(
        {length: [Template(answer.payload) for answer in some] for length, some in answers.items()},
        chunks=[Chunk(_engine_chunk(streamed, texts[n], n)) for n in range(1, len(texts))],
        sampled_before=samples.spelled_ids,
    )
    chats = StandIn(
        {0: [Template(partial(_whole, answer)) for answer in answers[min(answers)]]},
        chunks=[Chunk(_chat_chunk(texts[n - 1], texts[n], last=n == len(ids))) for n in range(1, len(texts))],
        name_of=_NAME_OF,
    )
    chats.streams = engine.streams  # so that a ``Pace`` of ``engine`` advances both kinds of streams
    return engine, chats


def _engine_chunk(answer: Answer, text: str, tokens: int) -> dict[str, Any]:
    chunk = answer.chunk("stream", 0, text, tokens)
    for name in ("id", "prompt_tokens"):  # else the cache finds that the answer contradicts the request
        del chunk["meta_info"][name]
    return chunk


def _whole(answer: Answer, rid: str, prompt_tokens: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text, "reasoning_content": None, "tool_calls": None}
    tokens = len(answer.ids)
    return {
        "id": rid,
        "object": "chat.completion",
        "created": 946684800,
        "model": "stand-in",
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": answer.ids[-1],
            }
        ],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": tokens},
        "metadata": {"weight_version": "default"},
    }


def _chat_chunk(before: str, text: str, *, last: bool) -> dict[str, Any]:
    delta = {
        "role": None if before else "assistant",
        "content": None if last else text[len(before) :],
        "tool_calls": None,
    }
    return {
        "id": "stream",
        "object": "chat.completion.chunk",
        "created": 946684800,
        "model": "stand-in",
        "choices": [
            {
                "index": 0,
                "delta": delta,
                "logprobs": None,
                "finish_reason": "stop" if last else None,
                "matched_stop": None,
            }
        ],
        "usage": None,
    }
