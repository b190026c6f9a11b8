"""Generations that are continued after an abort, in both stream modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from aborting_engine import AbortingEngine
from slime_http.serving import serving

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"

if TYPE_CHECKING:
    from routers import Start


MODES = ("whole", "cumulative", "incremental")


async def told(
    start: Start, engine: AbortingEngine, checkpoint: str, mode: str, **parameters: Any
) -> list[Any]:
    """Return the client's view: the answer, or the events of a stream."""
    flags = ["--resume-aborted", "--abort-retry-wait-s", "0", "--hf-checkpoint", checkpoint]
    body = {"text": PROMPT, "stream": mode != "whole", "sampling_params": parameters}
    async with (
        serving(engine.app) as url,
        start("--plugin", "radix_cache", *flags, "--worker-urls", url) as running,
    ):
        answer = await running.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        stats = (await running.client.get("/cache_stats")).json()
        unrecorded = stats["unrecorded"]
        if mode == "whole":
            events = [answer.json()]
        else:
            lines = [line[6:] for line in answer.text.split("\n\n") if line]
            assert lines.pop() == "[DONE]"
            events = [orjson.loads(line) for line in lines]
        text = "".join(event["text"] for event in events) if mode == "incremental" else events[-1]["text"]
        kept = (await running.client.post("/retrieve_from_text", json={"text": PROMPT + text})).json()
        assert (kept["exact"], kept["candidates"]) == (True, 1 if text else 2)  # the prompt alone reads alike
        prompt, *resumed = [body["input_ids"] for body in engine.asked]
        assert all(ids == prompt + engine.tape_of(0)[: len(ids) - len(prompt)] for ids in resumed)
        sampled = (
            [one for event in events for one in event["output_ids"]]
            if mode == "incremental"
            else events[-1]["output_ids"]
        )
        assert kept["tokens"] == prompt + sampled
    assert unrecorded == {}
    return events
