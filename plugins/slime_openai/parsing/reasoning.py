"""Reasoning: the thoughts at the beginning of a model's output, split from its answer.

The form is ``<think>\\nthoughts\\n</think>\\n\\nanswer`` in the chat templates of Qwen3, QwQ, DeepSeek-R1 and GLM-4.5.
Magistral (``[THINK]``) and Kimi-VL-Thinking (``◁think▷``) have other tags. When a template writes thoughts again, it
strips the newlines around them. So these newlines belong neither to the thoughts nor to the answer.

Only thoughts at the beginning of an answer count: a later tag is content. If no tag ends the thoughts, the answer was
cut short, and all text behind the start tag is thoughts.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_openai.parsing.deltas import Writer
from slime_openai.parsing.source import NEWLINES, SPACE, Reading, Source

__all__ = ["REASONING_FORMATS", "ReasoningFormat", "choose_reasoning"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thoughts from ``start`` to ``end``. ``always``: the model thinks from its first token on, even without a tag.

    ``calls``: the tag that begins a call. This tag ends the thoughts, too, since some models omit ``end`` before a
    call.
    """

    name: str
    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    calls: str | None = None

    def starts_inside(self, prompt: str, prefilled: str = "") -> bool:
        """Return True when the answer to ``prompt`` begins within thoughts.

        ``prefilled``: the end of the prompt that already belongs to the answer (``continue_final_message``).
        """
        opened, closed = prefilled.rfind(self.start), prefilled.rfind(self.end)
        if opened != closed:
            return opened > closed
        asked = prompt.rstrip().removesuffix(prefilled.strip()).rstrip()
        return asked.endswith(self.start) or (self.always and not asked.endswith(self.end))

    def read(self, source: Source, writer: Writer, *, inside: bool, calls: bool) -> Reading[None]:
        """Read the thoughts, if there are any. ``inside``: the text begins within them. ``calls``: calls may follow."""
        if not (yield from source.attempt(self._opening(source))) and not inside:
            return
        yield from source.run(NEWLINES)
        source.take()
        also = (self.calls,) if calls and self.calls else ()
        mark = yield from source.pass_on(writer.reasoning, self.end, *also)
        if mark is None:
            return
        writer.end_reasoning()
        if mark == self.end:
            yield from source.expect(mark)
            yield from source.run(NEWLINES)
            source.take()

    def _opening(self, source: Source) -> Reading[None]:
        yield from source.run(SPACE)
        yield from source.expect(self.start)


#: Formats by their names in SGLang's ``--reasoning-parser`` (``parser/reasoning_parser.py``).
REASONING_FORMATS = {
    format.name: format
    for format in (
        ReasoningFormat("deepseek-r1", always=True),
        ReasoningFormat("deepseek-v3"),
        ReasoningFormat("glm45"),
        ReasoningFormat("interns1"),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("nemotron_3"),
        ReasoningFormat("qwen3", calls="<tool_call>"),
        ReasoningFormat("qwen3-thinking", always=True, calls="<tool_call>"),
        ReasoningFormat("step3", always=True),
    )
}


def choose_reasoning(template: str) -> ReasoningFormat | None:
    """Return the format of thoughts in a chat template; None if the template writes no thoughts.

    The template does not tell if an answer begins within thoughts: the prompt of the answer does.
    """
    if "◁think▷" in template:
        return REASONING_FORMATS["kimi"]
    if "[THINK]" in template:
        return REASONING_FORMATS["mistral"]
    if "<think>" not in template and "</think>" not in template:
        return None
    return REASONING_FORMATS["deepseek-v3" if "<｜Assistant｜>" in template else "qwen3"]
