"""A check that answers keep to their JSON schemas: the embedded engine leaves that to the model's script."""

from __future__ import annotations

import json

import jsonschema

from clients.rolling import Rollout

__all__ = ["bound_answers"]


def bound_answers(rollout: Rollout) -> int:
    """Count the answers bound to a JSON schema; each of them fits, to the last character. Raises ValidationError.

    For requests that came one after the other.
    """
    count = 0
    for payload, entry in zip(rollout.payloads, rollout.engine.journal(), strict=True):
        schema = payload["sampling_params"].get("json_schema")
        if schema is not None:
            assert entry.text is not None
            jsonschema.Draft202012Validator(json.loads(schema)).validate(json.loads(entry.text))
            count += 1
    return count
