"""A rollout function for slime: an agent with a tool, which sends and reads text. slime trains on the exact tokens.

The README of this directory has the command.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from functools import cache
from typing import Any

from slime_radix_cache.client import AsyncClient

MAX_TURNS = 4
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
#: The text between a call and the next answer: the tool's result, as the chat template of Qwen writes it.
RESULT = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"

router_at = cache(AsyncClient)  # one client for all samples


def multiply(call: str) -> str:
    """Return the product that the model asked for, or what is wrong with its call."""
    try:
        arguments = json.loads(call)["arguments"]
        return str(arguments["a"] * arguments["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"wrong call: {error!r}"


async def generate(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Play the turns of ``sample``, a ``slime.utils.types.Sample`` whose prompt is text, and fill in its tokens."""
    router = router_at(f"http://{args.sglang_router_ip}:{args.sglang_router_port}")
    left = sampling_params["max_new_tokens"] - sum(
        sample.loss_mask or ()
    )  # some were sampled before an abort
    for turn in range(1, MAX_TURNS + 1):
        parameters = {**sampling_params, "max_new_tokens": left}
        answer = await router.generate(sample.prompt + sample.response, parameters, session=sample.session_id)
        sample.response += answer["text"]
        left -= answer["meta_info"]["completion_tokens"]
        call = CALL.search(answer["text"])
        ended = answer["meta_info"]["finish_reason"]["type"] != "stop"  # too long, or aborted
        if ended or call is None or turn == MAX_TURNS or left <= 0:
            break
        sample.response += RESULT.format(multiply(call[1]))
    # Sets tokens, loss mask, logprobs, weight versions and status. Raises NotExact if the tokens are not exact.
    return await router.fill(sample, session=sample.session_id)
