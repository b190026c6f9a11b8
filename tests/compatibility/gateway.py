"""The flags of sglang-router 0.3.2, as its own parser has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GATEWAY", "TheirFlag"]


@dataclass(frozen=True)
class TheirFlag:
    """One of their flags; ``nargs`` is 1 for one value, 0 for a switch."""

    flag: str
    nargs: int | str
    default: Any
    choices: tuple[str, ...] = ()


#: All of them, by name.
GATEWAY = {
    row["flag"]: TheirFlag(**row)
    for row in json.loads((Path(__file__).parent / "gateway_0_3_2.json").read_text())
}
