"""SGLang's protocol: the properties of engines, their data-parallel ranks, and their answers."""

from slime_sglang.answers import PER_TOKEN, is_abort, is_aborted, read_event, sampled_ids
from slime_sglang.evidence import CONTRADICTION, contradiction
from slime_sglang.plugin import SGLang, add_options, make_plugin
from slime_sglang.sequences import AnswerSoFar, whole_answer

__all__ = [
    "CONTRADICTION",
    "PER_TOKEN",
    "AnswerSoFar",
    "SGLang",
    "add_options",
    "contradiction",
    "is_abort",
    "is_aborted",
    "make_plugin",
    "read_event",
    "sampled_ids",
    "whole_answer",
]
