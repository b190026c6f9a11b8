"""Suggestions for names that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

__all__ = ["belongs", "closest", "unknown_name"]

#: Least similarity, from 0 to 1, of a misspelt name and the name that is meant.
_SIMILAR = 0.75
#: Flags of many other commands, each with the flag and the value that have the same effect here.
_SAME_EFFECT = {
    "--verbose": ("--log-level", "debug"),
    "-v": ("--log-level", "debug"),
    "--worker": ("--worker-urls", "URL"),
}
#: Flags of engines (sglang.launch_server), which users give to the router by mistake.
_OF_ENGINES = frozenset(
    (
        "--attention-backend", "--chunked-prefill-size", "--context-length", "--cuda-graph-max-bs",
        "--disable-radix-cache", "--dtype", "--enable-metrics", "--ep-size", "--gpu-memory-utilization",
        "--kv-cache-dtype", "--load-format", "--max-model-len", "--max-running-requests",
        "--mem-fraction-static", "--model", "--quantization", "--reasoning-parser", "--schedule-policy",
        "--served-model-name", "--skip-tokenizer-init", "--tensor-parallel-size", "--tool-call-parser",
        "--tp", "--tp-size", "--trust-remote-code",
    )
)  # fmt: skip
#: Short flags of many other commands, each with the flags that may be meant. Here, only ``--help`` has a short form.
_SHORT = {"-p": ("--port", "--plugin"), "-c": ("--config",), "-H": ("--host",)}


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` that is most like ``name``, or None. Case, ``-`` and ``_`` make no difference."""
    plain = {_plain(each): each for each in known}
    found = difflib.get_close_matches(_plain(name), plain, 1, _SIMILAR)
    # In a short name, two letters in the wrong order make a large difference: "tpo".
    found = found or [each for each in plain if sorted(each) == sorted(_plain(name))]
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").strip("-")


def belongs(flag: str, plugin: str) -> str:
    """Return a message about ``flag`` of ``plugin``, which is not loaded."""
    return f"{flag} belongs to the plugin {plugin}, which is not loaded: add --plugin {plugin}"


def unknown_name(
    kind: str,
    flag: str,
    known: Iterable[str],
    elsewhere: Mapping[str, str],
    spelled: Callable[[str], str] = str,
) -> str | None:
    """Return a message about ``flag``, which is not known, with a cure; None when no other flag is like it.

    ``elsewhere``: the flags of plugins that are not loaded, each with its plugin. ``spelled`` writes a flag
    as it was given: as a flag, a key of the configuration file, or an environment variable.
    """
    same, value = _SAME_EFFECT.get(flag, ("", ""))
    if same in known:
        here = spelled(same)
        cure = f"{here} {value}" if here == same else f"{here}={value}"
        return f"unknown {kind} {spelled(flag)}: did you mean {cure}?"
    if flag in _OF_ENGINES and flag not in known and flag not in elsewhere:
        return f"{spelled(flag)} is for engines: give it to sglang.launch_server, and its address to --worker-urls"
    short = [spelled(each) for each in _SHORT.get(flag, ()) if each in known]
    if short:
        return f"unknown {kind} {spelled(flag)}: did you mean {' or '.join(short)}?"
    if flag in elsewhere:
        return belongs(spelled(flag), elsewhere[flag])
    found = closest(flag, [*known, *elsewhere])
    if found is None:
        return None
    cure = f" ({belongs('it', elsewhere[found])})" if found in elsewhere else ""
    return f"unknown {kind} {spelled(flag)}: did you mean {spelled(found)}?{cure}"
