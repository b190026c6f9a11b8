"""Plain words for the reasons why tokens, or their routed experts, are not exact."""

from __future__ import annotations

__all__ = ["experts_words", "reason_words"]

_TOKENS = {
    "uncovered_text": "no engine has consumed the end of this text in this context",
    "cut_inside_token": "the text ends inside a sampled token, so the rest of that token was tokenised again",
    "no_logprobs": "tokens and mask are exact, but a sampled token has no logprob",
    "other_session": "only another session, or a request without a session, sampled tokens of this text",
    "engine_contradicts_itself": "a field of an engine's answer contradicts another field, or the request",
    "lossy_tokenizer": "the tokenizer loses text, so requests are passed on untouched",
    "evicted": "a later response of this session was evicted, or was not recorded",
}
_UNKNOWN_FIELD = "unknown_field:"
_EXPERTS = {
    "not_told": "an answer had no rows of experts",
    "not_recorded": "a turn was recorded without the plugin r3, by an earlier run, or by another router",
    "starts_later": "the client asked only for the rows of later tokens",
    "other_adapter": "turns of this context were sampled with several LoRA adapters",
    "other_weight_version": "the rows were computed, or may have been computed, under other weights than the tokens",
    "mis_sized": "the size of the rows does not fit the tokens",
    "shape_unknown": "the shape of a row is not known; set --r3-shape",
    "sizes_disagree": "engines sent rows of different sizes; set --r3-shape",
    "dropped": "the rows were dropped to keep to --r3-max-bytes",
    "not_kept": "the store could not take the rows in time",
    "not_in_store": "the store has lost the rows",
    "not_consumed": "no engine has answered to the last tokens",
}


def reason_words(reason: str) -> str:
    """Return a clause for the ``inexact_reason`` of tokens; the reason itself if this module does not know it."""
    if reason.startswith(_UNKNOWN_FIELD):
        name = reason.removeprefix(_UNKNOWN_FIELD)
        return f"a request had the field {name!r}, which is not known to be harmless"
    return _TOKENS.get(reason, reason)


def experts_words(reason: str) -> str:
    """Return a clause for the ``routed_experts_reason``."""
    return _EXPERTS.get(reason) or reason_words(reason)
