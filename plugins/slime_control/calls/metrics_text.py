"""Prometheus metrics of several engines in one text (text exposition format 0.0.4).

Names are written as the SGLang gateway writes them, with underscores for colons: ``sglang_num_running_reqs``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["CONTENT_TYPE", "Family", "families_in", "merged"]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*"
_ABOUT = re.compile(rb"#[ \t]+(HELP|TYPE)[ \t]+(" + _NAME + rb")(?:[ \t]+(.*))?")
_SAMPLE = re.compile(
    rb"(" + _NAME + rb")(?:[ \t]*\{((?:[^\"{}]|\"(?:[^\"\\]|\\.)*\")*)\}[ \t]*|[ \t]+)"
    rb"([0-9A-Za-z.+-]+(?:[ \t]+-?[0-9]+)?)"
)
_LABEL = re.compile(rb"[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*(\"(?:[^\"\\]|\\.)*\")[ \t]*(?:,|\Z)")
#: Suffixes of sample names, by the type of the metric.
_SUFFIXES = {
    b"histogram": (b"_bucket", b"_sum", b"_count"),
    b"summary": (b"_sum", b"_count"),
    b"counter": (b"_total",),
}


@dataclass(slots=True)
class Family:
    """One metric. ``about``: the texts of its HELP and TYPE lines. ``samples``: whole lines, with labels."""

    about: dict[bytes, bytes] = field(default_factory=dict)
    samples: list[bytes] = field(default_factory=list)


def families_in(text: bytes, worker: str) -> dict[bytes, Family]:
    """Return the metrics in ``text`` by name. Each sample gets the label ``worker_addr="{worker}"``. O(bytes).

    A sample's own label ``worker_addr`` becomes ``exported_worker_addr``, as in Prometheus. Raises ValueError.
    """
    label = b'worker_addr="%b"' % _escaped(worker)
    found: dict[bytes, Family] = {}
    for number, raw in enumerate(text.split(b"\n"), 1):
        line = raw.strip(b" \t\r")
        if line.startswith(b"#"):
            about = _ABOUT.fullmatch(line)
            if about is not None:
                family = found.setdefault(_plain(about[2]), Family())
                family.about.setdefault(about[1], about[3] or b"")
        elif line:
            sample = _SAMPLE.fullmatch(line)
            if sample is None:
                raise ValueError(f"line {number} is no Prometheus sample")
            name, labels = _plain(sample[1]), _others(sample[2] or b"")
            inside = b"%b,%b" % (label, labels) if labels else label
            family = found.setdefault(_family_of(name, found), Family())
            family.samples.append(b"%b{%b} %b" % (name, inside, sample[3]))
    return found


def merged(parts: Iterable[Mapping[bytes, Family]], notes: Iterable[str] = ()) -> bytes:
    """Return one text of all ``parts``, with the first HELP and TYPE of each metric. ``notes`` become comments."""
    whole: dict[bytes, Family] = {}
    for part in parts:
        for name, family in part.items():
            known = whole.setdefault(name, Family())
            known.about = {**family.about, **known.about}
            known.samples += family.samples
    lines = [b"# " + " ".join(note.split()).encode("utf-8", "replace") for note in notes]
    for name, family in whole.items():
        if family.samples:
            lines += [
                b"# %b %b %b" % (kind, name, family.about[kind])
                for kind in (b"HELP", b"TYPE")
                if kind in family.about
            ]
            lines += family.samples
    return b"\n".join((*lines, b""))


def _plain(name: bytes) -> bytes:
    return name.replace(b":", b"_")


def _escaped(value: str) -> bytes:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").encode()


def _others(labels: bytes) -> bytes:
    """Return a sample's own labels, with ``worker_addr`` renamed. Raises ValueError."""
    labels = labels.strip(b" \t,")
    if b"worker_addr" not in labels:
        return labels
    pairs: list[bytes] = []
    place = 0
    while place < len(labels):
        label = _LABEL.match(labels, place)
        if label is None:
            raise ValueError("a sample's labels cannot be read")
        pairs.append(b"%b%b=%b" % (b"exported_" * (label[1] == b"worker_addr"), label[1], label[2]))
        place = label.end()
    return b",".join(pairs)


def _family_of(name: bytes, known: Mapping[bytes, Family]) -> bytes:
    """Return the name of the metric that a sample called ``name`` belongs to."""
    if name in known:
        return name
    for kind, suffixes in _SUFFIXES.items():
        for suffix in suffixes:
            base = name.removesuffix(suffix)
            if base != name and base in known and known[base].about.get(b"TYPE") == kind:
                return base
    return name
