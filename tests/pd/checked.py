"""Checks of generations by pairs of engines."""

from __future__ import annotations

from typing import Any

from pd.halves import Pairs, rows

SAMPLING = {"max_new_tokens": 12, "ignore_eos": True}


def check(pairs: Pairs, output: dict[str, Any]) -> None:
    """``output`` is what one decode engine has in its journal, behind what one prefill engine read and sampled."""
    rid = output["meta_info"]["id"]
    (read,) = [entry for half in pairs.prefills for entry in half.journal(rid)]
    (written,) = [entry for half in pairs.decodes for entry in half.journal(rid)]
    assert output["output_ids"] == written["output_ids"]
    assert output["text"] == written["text"]
    assert read["input_ids"] == written["input_ids"]
    assert read["output_ids"] == written["output_ids"][:1]
    assert read["output_logprobs"] == written["output_logprobs"][:1]
    if "output_token_logprobs" in output["meta_info"]:
        assert rows(output) == list(zip(written["output_logprobs"], written["output_ids"], strict=True))
