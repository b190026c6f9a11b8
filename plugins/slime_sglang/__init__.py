"""A library for plugins: what SGLang's ``/generate`` answers say, and which of them are evidence. No I/O."""

from slime_sglang.evidence import CONTRADICTION, contradiction
from slime_sglang.sequences import PER_TOKEN, AnswerSoFar, is_abort, sampled_ids, whole_answer

__all__ = [
    "CONTRADICTION",
    "PER_TOKEN",
    "AnswerSoFar",
    "contradiction",
    "is_abort",
    "sampled_ids",
    "whole_answer",
]
