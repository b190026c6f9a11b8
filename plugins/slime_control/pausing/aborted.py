"""The answer to a ``/generate`` request that is aborted in the router.

It is the answer that SGLang gives to an aborted request that never ran.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import orjson

from router_core.reply import Reply

__all__ = ["aborted_reply", "answer_rids"]

#: Largest number of sequences in an answer. Without a limit, a small request could ask for a huge answer.
_MANY = 1 << 14


def answer_rids(document: Any) -> list[str]:
    """Return the rids of ``document``, a request's body; a random rid if it has no valid rid."""
    rid = document.get("rid") if isinstance(document, dict) else None
    if isinstance(rid, list) and rid and all(isinstance(each, str) for each in rid):
        return rid
    return [rid if isinstance(rid, str) else uuid4().hex]


def aborted_reply(document: dict[str, Any], rids: list[str]) -> Reply | None:
    """Return an answer with an aborted output for each sequence of ``document``; None if these are too many to list."""
    count, is_list = _sequences(document)
    if count > _MANY:
        return None
    outputs = []
    for index in range(count):
        rid = rids[index] if len(rids) == count else f"{rids[0]}_{index}"
        reason = {"type": "abort", "message": "Aborted while generation was paused."}
        about = {"id": rid, "finish_reason": reason, "completion_tokens": 0}
        outputs.append({"text": "", "output_ids": [], "meta_info": about})
    if not document.get("stream"):
        return Reply.from_json(outputs if is_list else outputs[0])
    numbered = [output | {"index": index} for index, output in enumerate(outputs)] if is_list else outputs
    events = [b"data: %s\n\n" % orjson.dumps(output) for output in numbered]
    return Reply(200, [(b"content-type", b"text/event-stream")], b"".join((*events, b"data: [DONE]\n\n")))


def _sequences(document: dict[str, Any]) -> tuple[int, bool]:
    """Return the number of sequences, and True when they are answered as a list."""
    text, ids, embeds = (document.get(name) for name in ("text", "input_ids", "input_embeds"))
    prompts, is_list = 1, False
    if isinstance(text, list):
        prompts, is_list = len(text), True
    elif isinstance(ids, list) and ids and not isinstance(ids[0], int):
        prompts, is_list = len(ids), True
    elif isinstance(embeds, list) and isinstance(_first(_first(embeds)), list):
        prompts, is_list = len(embeds), True
    sampling = document.get("sampling_params")
    one = sampling[0] if isinstance(sampling, list) and sampling else sampling
    copies = one.get("n") if isinstance(one, dict) else None
    if isinstance(copies, int) and copies > 1:
        return prompts * copies, True
    return prompts, is_list


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None
