"""Tokens of scripted answers, in the markup of the engine's chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass

from slime_engine.errors import BadRequest
from slime_engine.grammars import Bound
from slime_engine.language import ModelTokenizer
from slime_engine.script import Conditions, Entry, Script
from slime_engine.tokenizer import END_OF_TURN, START_OF_TURN

__all__ = ["ScriptedAnswers"]

_ASSISTANT, _TOOL_RESULT = "assistant\n", "<tool_response>"


class ScriptedAnswers:
    """Finds the scripted answer to a prompt. It keeps no state between prompts.

    Prompts are read in the markup of the engine's chat template, which is ChatML. A prompt without markup counts as one
    user message.
    """

    def __init__(self, script: Script, tokenizer: ModelTokenizer) -> None:
        self._script = script
        self._tokenizer = tokenizer
        (self._start,) = tokenizer.encode(START_OF_TURN)
        self._head = list(tokenizer.encode(_ASSISTANT))
        self._free = {
            entry.line: list(tokenizer.encode(self._message(entry) + END_OF_TURN)) for entry in script.entries
        }

    def ids(self, prompt_ids: list[int], bound: Bound | None) -> list[int]:
        """Return the tokens of the answer, with its end token. Return ``[]`` when no entry matches: the model answers.

        A prompt that already holds the beginning of the answer gets the rest. If the prompt holds another beginning,
        the entry does not match. Under a grammar, the answer is the entry's calls as JSON, in the form of
        :mod:`slime_engine.forced_form`, or the entry's content if the entry has no calls. Raises BadRequest when the
        grammar does not allow that answer.
        """
        prompt = _read(self._tokenizer.decode(prompt_ids, skip_special_tokens=False))
        begun = self._begun(prompt_ids)
        for entry in self._script.entries:
            if not _holds(entry.when, prompt):
                continue
            answer = self._free[entry.line] if bound is None else self._bound(entry, bound)
            if answer[: len(begun)] == begun:
                return answer[len(begun) :]
        return []

    def _bound(self, entry: Entry, bound: Bound) -> list[int]:
        calls = [{"name": call.name, "parameters": call.arguments} for call in entry.calls]
        # json writes the white space that the grammar requires
        text = json.dumps(calls, ensure_ascii=False) if calls else entry.content
        answer = list(self._tokenizer.encode(text + END_OF_TURN))
        if not bound.fits(answer):
            place = f"{self._script.path}:{entry.line}"
            raise BadRequest(f"The scripted answer ({place}) is not what the request's grammar allows.")
        return answer

    def _message(self, entry: Entry) -> str:
        """Return the assistant's message as the chat template writes it, without the markup around it."""
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in entry.calls]
        said = {"reasoning_content": entry.reasoning, "content": entry.content, "tool_calls": calls}
        message = {"role": "assistant", **{key: value for key, value in said.items() if value}}
        asked = [{"role": "user", "content": ""}]
        before = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        whole = self._tokenizer.apply_chat_template([*asked, message])
        return whole.removeprefix(before).rstrip("\n").removesuffix(END_OF_TURN)

    def _begun(self, prompt_ids: list[int]) -> list[int]:
        """Return the tokens of the answer that the prompt already holds."""
        if self._start not in prompt_ids:
            return []
        last = len(prompt_ids) - prompt_ids[::-1].index(self._start)
        head = prompt_ids[last : last + len(self._head)]
        return prompt_ids[last + len(self._head) :] if head == self._head else []


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The parts of a prompt that conditions test. ``tool``: the tool results at the end, or None.

    ``user``: the last message; None if it is a tool's result.
    """

    text: str
    user: str | None
    tool: str | None
    turn: int


def _read(text: str) -> _Prompt:
    *turns, last = text.split(START_OF_TURN)
    if not last.startswith(_ASSISTANT):
        turns.append(last)
    said = [turn.partition("\n")[2].removesuffix("\n").removesuffix(END_OF_TURN) for turn in turns]
    if len(turns) == 1:  # no markup
        said = turns
    results = []
    while said and said[-1].startswith(_TOOL_RESULT):
        results.append(said.pop())
    turn = 1 + sum(each.startswith(_ASSISTANT) for each in turns)
    if results:
        return _Prompt(text, None, "\n".join(reversed(results)), turn)
    return _Prompt(text, said[-1] if said else "", None, turn)


def _holds(when: Conditions, prompt: _Prompt) -> bool:
    return (
        (when.user is None or (prompt.user is not None and when.user in prompt.user))
        and (when.tool is None or (prompt.tool is not None and when.tool in prompt.tool))
        and (when.prompt is None or when.prompt.search(prompt.text) is not None)
        and when.turn in (None, prompt.turn)
    )
