"""The tokenizer: exact, the same everywhere, and what transformers makes of its files."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from slime_engine.model import NgramModel
from slime_engine.tokenizer import MARKUP, EngineTokenizer, corpus_documents

TEXTS = [
    "",
    " ",
    "Hello, world",
    "naïve café — Ångström",
    "京都と東京、谢谢",
    "🙂🦊 family: 👩‍👩‍👧",
    "a\n\n  b\r\n\tc   ",
    "<think>2 + 2</think><tool_call>{}</tool_call>",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<think <|im_start |>",
    "\u0000\u200b\ufffd",
]
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é <b>'\"&"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I call it.",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"city": "Zürich"}}},
                {"type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
            ],
        },
        {"role": "tool", "content": "cold"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"city": "<ö>"}}}]


@pytest.fixture(scope="module")
def tokenizer(model: NgramModel) -> EngineTokenizer:
    return model.tokenizer


@pytest.fixture(scope="module")
def huggingface(tokenizer: EngineTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        from transformers import AutoTokenizer  # a second to import: only here

        directory = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(directory)
        return AutoTokenizer.from_pretrained(str(directory))


@pytest.mark.parametrize("text", [*TEXTS, *corpus_documents()[::5]])
def test_decoding_gives_back_what_was_encoded(tokenizer: EngineTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes[one] for one in ids).decode() == text


def test_markup_is_one_token_and_only_special_tokens_are_skipped(tokenizer: EngineTokenizer) -> None:
    ids = tokenizer.encode("<|im_start|><think>a</think><|im_end|>")
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_markup_can_be_spelt_out_in_ordinary_tokens(tokenizer: EngineTokenizer) -> None:
    spelt_out = tokenizer.encode_plain("<think>")
    assert [tokenizer.token_bytes[one] for one in spelt_out] == [b"<", b"think", b">"]
    assert tokenizer.encode(tokenizer.decode(spelt_out)) != spelt_out
    for markup in MARKUP:
        assert tokenizer.decode(tokenizer.encode_plain(markup)) == markup


def test_every_process_trains_the_same_tokenizer(tmp_path: Path) -> None:
    written = []
    for number in range(3):
        directory = tmp_path / str(number)
        program = (
            "import sys, pathlib; from slime_engine.tokenizer import *;"
            "train_tokenizer(corpus_documents()).save(pathlib.Path(sys.argv[1]))"
        )
        environment = os.environ | {"PYTHONHASHSEED": str(number), "RAYON_NUM_THREADS": str(number + 1)}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        subprocess.run([sys.executable, "-c", program, str(directory)], env=environment, check=True)
        written.append({file.name: file.read_bytes() for file in directory.iterdir()})
    assert set(written[0]) == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert written[0] == written[1] == written[2]


def test_transformers_encodes_and_decodes_alike(tokenizer: EngineTokenizer, huggingface: Any) -> None:
    assert len(huggingface) == tokenizer.vocab_size
    for text in [*TEXTS, *corpus_documents()]:
        assert huggingface.encode(text, add_special_tokens=False) == tokenizer.encode(text)
        assert huggingface.encode(text) == tokenizer.encode(text, add_special_tokens=True)
    dice = random.Random(5)
    for _ in range(300):
        ids = [dice.randrange(tokenizer.vocab_size) for _ in range(dice.randrange(12))]
        for skip in (False, True):
            theirs = huggingface.decode(ids, skip_special_tokens=skip)
            assert theirs == tokenizer.decode(ids, skip_special_tokens=skip)


def test_transformers_knows_the_special_tokens(tokenizer: EngineTokenizer, huggingface: Any) -> None:
    assert huggingface.eos_token == "<|im_end|>"
    assert huggingface.eos_token_id in tokenizer.eos_ids
    assert huggingface.pad_token_id == tokenizer.pad_id
    assert set(huggingface.all_special_ids) == tokenizer.special_ids


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_transformers_renders_chats_alike(
    tokenizer: EngineTokenizer, huggingface: Any, messages: Any, tools: Any, add_generation_prompt: bool
) -> None:
    theirs = huggingface.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    ours = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    assert ours == theirs
    assert ours.endswith("<|im_start|>assistant\n" if add_generation_prompt else "<|im_end|>\n")


def test_importing_the_package_stays_light() -> None:
    program = (
        "import sys, slime_engine; print(sorted({'numpy', 'tokenizers', 'transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert output.stdout.strip() == "[]"


def test_an_engine_needs_no_transformers() -> None:
    program = (
        "import sys, slime_engine.app, slime_engine.model as m; m.load_model();"
        "print('transformers' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert output.stdout.strip() == "False"
