"""Build hook of the wheel: with ``SLIME_ROUTER_COMPILE=1`` it compiles the hot modules with mypyc.

The setting ``modules`` in pyproject.toml lists them. Their sources stay in the wheel, for tracebacks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SWITCH = "SLIME_ROUTER_COMPILE"
#: Only a compiled wheel needs these.
_TOOLS = ["mypy[mypyc]>=1.18", "setuptools>=75"]
#: Runs in the source tree. Arguments: the directory for the C code, the one for the results, and the modules.
_COMPILE = """
import sys
from mypyc.build import mypycify
from setuptools import setup
generated, built, level, *modules = sys.argv[1:]
options = ["--config-file=pyproject.toml", "--cache-dir=/dev/null", "--no-warn-unused-ignores"]
options += ["--ignore-missing-imports", *modules]
extensions = mypycify(
    options, opt_level=level, debug_level="0", group_name="slime_router", target_dir=generated
)
arguments = ["-q", "build_ext", "--build-lib", built, "--build-temp", generated]
setup(name="slime-router", ext_modules=extensions, packages=[], script_args=arguments)
"""


class CompilingHook(BuildHookInterface):  # type: ignore[type-arg]  # of any builder's configuration
    """Adds the compiled form of each hot module, beside its source."""

    PLUGIN_NAME = "custom"

    @property
    def _is_on(self) -> bool:
        return os.environ.get(_SWITCH, "0") not in ("", "0")

    def dependencies(self) -> list[str]:
        """Return the requirements of a compiled wheel: the tools, and the router's own dependencies for their types."""
        if not self._is_on:
            return []
        typed = [each for each in self.metadata.core.dependencies if not each.startswith("transformers")]
        return [*_TOOLS, *typed]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules, and put them into the wheel, which is then one for this platform."""
        if not self._is_on or version == "editable":
            return
        compiler, *_ = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
        if shutil.which(compiler) is None:
            wanted = f"{_SWITCH} wants a C compiler and Python's headers, and found no {compiler}"
            sys.exit(f"{wanted}: install gcc, or leave the variable unset")
        self._built = Path(tempfile.mkdtemp())
        modules: list[str] = self.config["modules"]
        level = os.environ.get(f"{_SWITCH}_LEVEL", "3")
        generated, results = self._built / "c", self._built / "lib"
        command = [sys.executable, "-c", _COMPILE, str(generated), str(results), level, *modules]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{_SWITCH}: the modules cannot be compiled:\n{done.stdout}{done.stderr}")
        for path in results.rglob("*.so"):
            build_data["force_include"][str(path)] = path.relative_to(results).as_posix()
        build_data |= {"pure_python": False, "infer_tag": True}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the build directory."""
        if self._is_on and version != "editable":
            shutil.rmtree(self._built)
