"""The colours of both themes have the contrast that WCAG 2.2 AA asks for."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

STATIC = files("slime_dashboard") / "static"
STYLE = "".join((STATIC / name).read_text() for name in ("style.css", "trajectory.css"))
#: Texts, and the grounds on which they stand: 4.5 to 1.
TEXTS = [
    *((text, ground) for text in ("text", "muted") for ground in ("ground", "surface", "raised")),
    *((kind, f"{kind}-ground") for kind in ("ok", "warn", "bad", "info")),
    *((text, "surface") for text in ("accent", "warn", "bad")),
    ("accent-text", "accent"),
    *(("text", ground) for ground in ("prompt", "sampled", "reused", "differs-ground")),
    *(("text", f"bin-{number}") for number in range(6)),
    *(("text", f"version-{number}") for number in range(8)),
    *(("differs", ground) for ground in ("differs-ground", "raised")),
]
#: Parts of controls and of plots, and the focus: 3 to 1.
PARTS = [
    *((part, "surface") for part in ("control", "focus", "series-1", "series-2", "series-3", "series-4")),
    ("series-bad", "surface"),
    ("focus", "ground"),
    *((part, "surface") for part in ("prompt-line", "sampled-line", "reused-line", "differs")),
]


def colours(theme: str) -> dict[str, str]:
    """The custom properties of a theme."""
    blocks = re.findall(r'^:root(\[data-theme="dark"\])? \{(.*?)^\}', STYLE, re.MULTILINE | re.DOTALL)
    wanted = [text for dark, text in blocks if not dark]
    if theme == "dark":
        wanted += [text for dark, text in blocks if dark]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", "\n".join(wanted)))


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_high_enough(theme: str) -> None:
    known = colours(theme)
    assert len(known) > 20
    low = []
    for pairs, least in ((TEXTS, 4.5), (PARTS, 3.0)):
        for one, other in pairs:
            dark, bright = sorted((luminance(known[one]), luminance(known[other])))
            if (contrast := (bright + 0.05) / (dark + 0.05)) < least:
                low.append(f"{one} on {other}: {contrast:.2f}")
    assert low == []


def test_dark_theme_changes_each_colour() -> None:
    assert colours("light").keys() == colours("dark").keys()
    same = {name for name, value in colours("light").items() if colours("dark")[name] == value}
    assert same == set()
