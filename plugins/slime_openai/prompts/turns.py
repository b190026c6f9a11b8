"""Recording of turns in the history."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from router_core.types import Tokenizer
from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.history import Asking, History
from slime_openai.prompts.identity import unreachable_key
from slime_openai.prompts.question import Question
from slime_openai.prompts.turn_tokens import Prompt
from slime_openai.requests.messages import Message
from slime_openai.responses.outputs import Output

__all__ = ["Turns"]


#: For at most this many stop tokens, it is cached whether they are special tokens.
_TOKENS = 1 << 10


class Turns:
    """Puts turns into the history. ``decode``: returns the text of ids, with special tokens."""

    def __init__(
        self, history: History, tokenizer: Tokenizer, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._history = history
        self._decode = decode
        self._is_special = lru_cache(_TOKENS)(
            lambda token: not tokenizer.decode([token], skip_special_tokens=True)
        )

    def asking(self, question: Question) -> Asking:
        """Begin the request that asks ``question``."""
        return self._history.asking(question.session, question.place)

    def record(
        self, question: Question, prompt: Prompt, output: Output, reply: Message, *, is_usable: bool
    ) -> None:
        """Record ``output``, which the client got as the message ``reply``.

        An unusable answer makes no turn: its tokens are not known for certain. An answer without tokens makes none
        either. In a session, an answer to ids that the client gave makes a turn that no request continues: nothing
        proves that the ids spell the client's messages. This turn shows that the session has asked ``question``, so the
        session will not continue another session's answer to ``question``.
        """
        ids, reason = output.ids, output.reason or {}
        if not is_usable:
            if ids or output.text:
                self._history.lose(question.session)
            return
        if not ids:
            return
        if prompt.origin == "given":
            self._add_unreachable(question)
            return
        key, count, whole = question.with_reply(reply, prompt.begun)
        first = prompt.parent.count if prompt.parent is not None else 0
        text = self._decode(ids)
        matched = reason.get("matched")
        hidden, ending = self._ending(ids, matched, text)
        closed = (
            isinstance(matched, int) and matched not in question.stop_token_ids and self._is_special(matched)
        )
        self._history.add(
            Turn(
                prompt.parent,
                key,
                count,
                question.session,
                prompt.asked,
                array("i", ids).tobytes(),
                whole,
                prompt.text + text,
                ending,
                hidden,
                closed,
                question.place,
                question.answers(first, count - 1),
            )
        )

    def _add_unreachable(self, question: Question) -> None:
        """Add a turn that no conversation leads to. This turn shows that the session has asked ``question``."""
        session, place = question.session, question.place
        if session is not None:
            key, reply = unreachable_key(place), Message("assistant")
            turn = Turn(None, key, question.asked + 1, session, b"", b"", reply, "", "", 0, False, place, b"")
            self._history.add(turn)

    def _ending(self, ids: Sequence[int], matched: Any, text: str) -> tuple[int, str]:
        """Return the number of last ``ids`` that spell the stop token or stop string, and the text of this ending."""
        if isinstance(matched, int) and ids[-1] == matched:
            return 1, self._decode([matched])
        if isinstance(matched, str) and matched and text.endswith(matched):
            for hidden in range(1, len(matched) + 1):
                ending = self._decode(ids[-hidden:])
                if ending == matched:
                    return hidden, matched
                if len(ending) > len(matched):
                    break
        if isinstance(matched, str):
            return (
                0,
                matched,
            )  # it begins inside a token, or is not at the end, or has several tokens a character
        return 0, ""
