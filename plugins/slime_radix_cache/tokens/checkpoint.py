"""Files of a model's checkpoint: its tokenizer, and the tokens that end a response."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import orjson

from router_core.errors import SettingsError
from router_core.registry import ComponentRegistry
from router_core.types import Tokenizer
from slime_radix_cache.tokens.hub import hub_failure

__all__ = ["eos_ids", "load_tokenizer", "offer_tokenizer"]

logger = logging.getLogger(__name__)

#: SGLang uses the EOS ids of both files and of the tokenizer.
_CONFIGS = ("config.json", "generation_config.json")
#: Llama's end of a message. SGLang treats it as an EOS if the vocabulary has it.
_END_OF_MESSAGE = "<|eom_id|>"
#: A model on the Hugging Face Hub: ``name``, or ``organization/name``.
_MODEL_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
#: Each tokenizer has a file whose name matches one of these patterns.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_WANTED = "a directory with tokenizer files, or the name of a model on the Hugging Face Hub"


def offer_tokenizer(components: ComponentRegistry, path: str) -> None:
    """Register the tokenizer at ``path``, see :func:`load_tokenizer`. Raises SettingsError."""
    if "tokenizer" in components:
        raise SettingsError(
            "--hf-checkpoint: another plugin offers a tokenizer already: leave the flag out, or put"
            " --plugin radix_cache before --plugin engine"
        )
    components.register("tokenizer", load_tokenizer(path))


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer at ``path`` with transformers. Raises SettingsError."""
    is_local = Path(path).exists()
    if not is_local and not _MODEL_NAME.fullmatch(path):
        raise SettingsError(f"--hf-checkpoint {path}: no such directory; wanted {_WANTED}")
    if is_local and not Path(path).is_dir():
        raise SettingsError(f"--hf-checkpoint {path}: not a directory; wanted {_WANTED}")
    logger.info("loading the tokenizer of %s", path)  # logged first, since it may take many seconds
    unreachable = None if is_local else hub_failure()
    logging.getLogger("transformers").addFilter(_is_wanted)
    from transformers import AutoTokenizer  # slow to import, and only needed with --hf-checkpoint

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=unreachable is not None)
    except Exception as error:
        if unreachable is not None:
            raise SettingsError(
                f"--hf-checkpoint {path}: neither a directory here nor a model in the cache, and {unreachable};"
                f" wanted {_WANTED}"
            ) from error
        if is_local and not any(match for name in _TOKENIZER_FILES for match in Path(path).glob(name)):
            raise SettingsError(
                f"--hf-checkpoint {path}: no tokenizer files in this directory; wanted tokenizer.json (or"
                " tokenizer.model, or vocab.json and merges.txt) and tokenizer_config.json of the engine's model"
            ) from None
        first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")
        raise SettingsError(
            f"--hf-checkpoint {path}: cannot load a tokenizer: {first}; wanted {_WANTED}"
        ) from error
    loaded: Tokenizer = tokenizer  # transformers annotates its methods more widely
    return loaded


def _is_wanted(record: logging.LogRecord) -> bool:
    """Return False for the warning that PyTorch is missing, which transformers logs when it is imported."""
    return not record.getMessage().startswith("PyTorch was not found")


def eos_ids(tokenizer: Tokenizer, path: str = "") -> frozenset[int]:
    """Return the ids that end a response, from ``tokenizer`` and the files of the checkpoint ``path``."""
    own: Any = tokenizer
    found = set(getattr(own, "eos_ids", ())) | _ids(getattr(own, "eos_token_id", None))
    if hasattr(own, "get_added_vocab"):
        found |= _ids(own.get_added_vocab().get(_END_OF_MESSAGE))
    for file in _configs(path) if path else ():
        found |= _ids(orjson.loads(file.read_bytes()).get("eos_token_id"))
    return frozenset(found)


def _configs(path: str) -> list[Path]:
    from transformers.utils.hub import cached_file  # slow to import; a checkpoint may be a name on the Hub

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    offline = not Path(path).exists() and hub_failure() is not None
    files = (cached_file(path, name, local_files_only=offline, **quiet) for name in _CONFIGS)
    return [Path(file) for file in files if file is not None]


def _ids(value: Any) -> set[int]:
    return {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
