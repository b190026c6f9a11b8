"""A special token that a client writes is one token, though an engine has sampled what it begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken, Tokenizer

from radix_cache.direct import generate, read
from radix_cache.scripted import Client, ScriptedEngine
from radix_cache.toy import EOS, sampled, trajectories
from slime_radix_cache.tokens.abilities import examine
from slime_radix_cache.tokens.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slime_engine.tokenizer import EngineTokenizer

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.anyio
async def test_an_answer_cut_where_the_model_went_on_with_its_first_character(
    client: Client, engine: ScriptedEngine
) -> None:
    kept, more = engine.tokenizer.encode("the harbour."), engine.tokenizer.encode_plain("</answer>")
    assert engine.tokenizer.decode(more[:1]) in ("<", "</")
    await client.generate(PROMPT, [*kept, engine.tokenizer.encode_plain("<")[0], *more], "s")
    text = PROMPT + "the harbour." + NEXT
    answer = await client.generate(text, [5, 6], "s")
    before, rest = engine.tokenizer.encode(PROMPT), engine.tokenizer.encode(NEXT)
    assert engine.consumed[-1] == [*before, *kept, *rest]
    known = await client.retrieve(text + answer["text"], session_id="s")
    assert (known["exact"], known["tokens"]) == (True, [*engine.consumed[-1], 5, 6])
    assert known["loss_mask"] == [0] * len(before) + [1] * len(kept) + [0] * len(rest) + [1, 1]


class TestWhereAContextMayEnd:
    """``<e>`` is special; 7, 8 and 10 are its characters."""

    def test_not_at_a_tokens_end_inside_of_it(self) -> None:
        kept = trajectories()
        generate(kept, "b", sampled(1, 7, 8, 1))
        assert generate(kept, "ba<e>b", sampled(1)) == [2, 1, EOS, 2]
        assert read(kept, "ba<e>ba") == ([2, 1, EOS, 2, 1], [0, 1, 0, 0, 1], None)

    def test_not_at_a_responses_end_inside_of_it(self) -> None:
        kept = trajectories()
        generate(kept, "b", sampled(1, 7))
        assert read(kept, "ba<") == ([2, 1, 7], [0, 1, 1], None)
        assert generate(kept, "ba<e>", sampled(1)) == [2, 1, EOS]
        assert read(kept, "ba<e>a") == ([2, 1, EOS, 1], [0, 1, 0, 1], None)

    def test_not_at_the_end_of_another_response_inside_of_it(self) -> None:
        kept = trajectories()
        generate(kept, "b", sampled(1, 7))
        generate(kept, "ba<", sampled(8, 1))
        assert generate(kept, "ba<e>", sampled(1)) == [2, 1, EOS]

    def test_at_its_end_though_it_was_sampled_in_pieces(self) -> None:
        kept = trajectories()
        generate(kept, "b", sampled(1, 7, 8, 10, 6))
        assert generate(kept, "ba<e>b", sampled(1)) == [2, 1, 7, 8, 10, 2]
        assert read(kept, "ba<e>") == ([2, 1, 7, 8, 10], [0, 1, 1, 1, 1], None)

    def test_inside_of_what_is_not_all_of_it(self) -> None:
        kept = trajectories()
        generate(kept, "b", sampled(1, 7, 8, 1))
        assert generate(kept, "ba<eb", sampled(1)) == [2, 1, 7, 8, 2]

    def test_what_is_said_of_a_text_that_nobody_consumed_ends_before_it_too(self) -> None:
        kept = trajectories()
        generate(kept, "b", sampled(1, 7, 8, 1))
        assert read(kept, "ba<e>") == ([2, 1, EOS], [0, 1, 0], "uncovered_text")


def test_places_are_inside_of_a_token_or_between_two() -> None:
    text = "é<end…><a><a".encode()
    special = SpecialTokens(["<a>", "<end…>"])
    begins = [special.around(text, place) for place in range(len(text) + 1)]
    assert begins == [*[None] * 3, *[2] * 7, None, *[10] * 2, *[None] * 3]
    assert SpecialTokens().around(text, 4) is None


def test_runs_of_spaces_are_no_special_tokens(tokenizer: EngineTokenizer, checkpoint: str) -> None:
    """Gemma's are added tokens; a line break that was sampled is kept though the client writes another behind it."""
    rust = Tokenizer.from_file(f"{checkpoint}/tokenizer.json")
    rust.add_tokens([AddedToken(run, normalized=False) for run in ("\n\n", "\n\n\n", "  ")])
    rust.add_tokens([AddedToken("<｜User｜>", normalized=True)])  # DeepSeek's are
    added = list(rust.get_added_tokens_decoder().values())

    def encode(text: str, framed: bool) -> list[int]:
        return list(rust.encode(text, add_special_tokens=framed).ids)

    def decode(ids: Sequence[int]) -> str:
        return str(rust.decode(ids, skip_special_tokens=False))

    special = examine(encode, decode, added).special
    assert special.around(b"a\n\n\nb  c", 3) is None
    for text in ("<think>", "<|im_end|>", "<｜User｜>"):
        assert special.around(f"a{text}".encode(), 2) == 1
