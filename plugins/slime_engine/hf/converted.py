"""GGUF files as checkpoint directories, converted once and kept."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_engine.hf.loading import load_whole

__all__ = ["converted"]

logger = logging.getLogger(__name__)

#: The splits of llama.cpp's pre-tokenizers (``llama-vocab.cpp``), by their names in GGUF files. transformers takes
#: the split of GPT-2 for all files with the tokenizer model ``gpt2``.
_SPLITS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
}


def converted(path: Path, cache: Path) -> Path:
    """Return a directory below ``cache`` with the model of a GGUF file as float32, and its tokenizer.

    The first call for a file converts it, which takes half a minute for 100 MB. Later calls only read the file.
    Raises ValueError for a tokenizer that is not ``gpt2``, or whose splits are not in ``_SPLITS``.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    directory = cache / f"{path.stem}-{digest[:16]}"
    if not directory.exists():
        logger.info("converting %s to %s", path.name, directory)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            made = Path(name, "model")
            _convert(path, made)
            try:
                made.rename(directory)
            except OSError:  # another process was faster
                if not directory.exists():
                    raise
    return directory


def _convert(path: Path, target: Path) -> None:
    fields = GGUFReader(path).fields
    kinds = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "pre")}
    split = _SPLITS.get(str(kinds["pre"]))
    if kinds["model"] != "gpt2" or split is None:
        raise ValueError(
            f"{path.name} has tokenizer model {kinds['model']}, pre-tokenizer {kinds['pre']}; "
            f"wanted model gpt2, pre-tokenizer {' or '.join(_SPLITS)}. "
            "Give a directory with the model's own tokenizer.json instead."
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    quantised = load_whole(AutoModelForCausalLM, path.parent, gguf_file=path.name)
    config = quantised.config
    del config.quantization_config  # else the library would not save the weights, which are float32 now
    plain: Any = AutoModelForCausalLM  # its methods have no annotations
    model = plain.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
