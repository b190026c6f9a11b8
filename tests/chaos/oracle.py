"""An oracle that compares the engines' journals with the records that clients got from the router."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from chaos.conversations import Conversation, Heard
from slime_engine.journal_file import fold

__all__ = ["JournalReader", "Oracle"]

Entry = dict[str, Any]
Shown = Callable[[list[int]], str]

_PROMPT = -1


class JournalReader:
    """The journal that an engine, and the one after it, writes at ``path``; read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._entries: dict[str, Entry] = {}

    def entries(self) -> Iterable[Entry]:
        """All entries until now."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            fold(whole.splitlines(), into=self._entries)
        return self._entries.values()

    def unfinished(self) -> set[str]:
        """The rids of sequences that have no end."""
        return {entry["rid"] for entry in self.entries() if entry["finish_reason"] is None}


class Oracle:
    """Holds answers against ``entries``; ``shown`` gives the text that a client sees of ids."""

    def __init__(self, entries: Iterable[Entry], shown: Shown) -> None:
        self._decode = shown
        by_rid: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            by_rid[entry["rid"]].append(entry)
        self._runs = {rid: list(_runs(own)) for rid, own in by_rid.items()}
        self._by_input: dict[tuple[int, ...], list[Entry]] = defaultdict(list)
        for runs in self._runs.values():
            for run in runs:
                self._by_input[tuple(run["input_ids"])].append(run)

    def _shown(self, ids: list[int]) -> str:
        """Without the half character at the end, which a client does not see before it is whole."""
        return self._decode(ids).rstrip("\ufffd")

    def source(self, heard: Heard) -> Entry | None:
        """The entry that an answer tells of; for one that broke off, its beginning."""
        size = len(heard.output_ids)
        for run in self._runs.get(heard.rid, ()):
            same_end = not heard.whole or len(run["output_ids"]) == size
            if (
                same_end
                and run["output_ids"][:size] == heard.output_ids
                and run["output_logprobs"][:size] == heard.logprobs
                and heard.prompt_tokens in (None, len(run["input_ids"]))
            ):
                return run
        return None

    def judge(self, conversation: Conversation, said: dict[str, Any]) -> str | None:
        """Return the fault in the router's record of a conversation's text; None when there is none."""
        columns = [said[key] for key in ("tokens", "loss_mask", "rollout_logp", "generation_versions")]
        if {len(column) for column in columns} != {said["token_length"]}:
            return "lengths differ"
        if said["exact"] != (said["inexact_reason"] is None):
            return "exact and its reason disagree"
        if not said["exact"]:
            return None
        rows = list(zip(*columns, strict=True))
        turns = [
            list(self._readings(conversation, number, said["tokens"]))
            for number in range(len(conversation.heard))
        ]
        missing = [
            heard.rid for heard, readings in zip(conversation.heard, turns, strict=True) if not readings
        ]
        if missing:
            return f"no engine consumed and sampled that in {', '.join(missing)}"
        wanted = [_rows(said["tokens"], choice) for choice in product(*turns)]
        if rows in wanted:
            return None
        pairs = enumerate(zip(rows, wanted[0], strict=True))
        place, told, true = next((place, one, two) for place, (one, two) in pairs if one != two)
        rids = ", ".join(f"{one.rid} ({one.text[-10:]!r})" for one in conversation.heard)
        return f"token {place} of {len(rows)}, of {rids}, is said to be {told}, and was {true}"

    def _readings(
        self, conversation: Conversation, number: int, tokens: list[int]
    ) -> Iterator[tuple[Entry, int]]:
        """The entries that turn ``number`` may be in ``tokens``, and how many of their sampled tokens are there.

        Text is all that a client says: another sample of the session may read alike, and further; and a fork, which
        has said nothing yet, goes on from any of the group.
        """
        rid = conversation.heard[number].rid
        own = self._runs.get(rid, [])
        session = f"{conversation.session}."
        for size in {len(run["input_ids"]) for run in own}:
            for run in self._by_input[tuple(tokens[:size])]:
                if run["rid"].startswith(session) or not rid.startswith(session):
                    yield from ((run, kept) for kept in self._kept(run, conversation, number, tokens))
        for run in own:
            if number < len(conversation.heard) - 1 and self._begins_anew(run, conversation, number):
                yield run, 0

    def _kept(self, run: Entry, conversation: Conversation, number: int, tokens: list[int]) -> list[int]:
        start, sampled = len(run["input_ids"]), run["output_ids"]
        if not sampled or tokens[:start] != run["input_ids"]:
            return []
        heard, later = conversation.heard[number], tokens[start:]
        pairs = enumerate(zip(sampled, later, strict=False))
        common = next((place for place, (one, two) in pairs if one != two), min(len(sampled), len(later)))
        if number == len(conversation.heard) - 1:  # nothing comes behind it
            whole = common == len(later) and heard.text in (self._decode(later), self._shown(later))
            return [common] if whole and (not heard.kept_whole or common == len(sampled)) else []
        told = heard.text.rstrip("\ufffd")
        if heard.kept_whole and common == len(sampled):
            return [common] if self._shown(sampled).startswith(told) else []
        # As far as the text that follows reads like the tokens; those that show nothing may have been left out.
        follows = conversation.settled[heard.place :]
        kept = [size for size in range(common + 1) if follows.startswith(self._shown(sampled[:size]))]
        longest = [size for size in kept if self._shown(sampled[:size]) == self._shown(sampled[: kept[-1]])]
        if heard.text != heard.told:  # cut by the client, within a token maybe
            return longest
        reached = [size for size in kept if self._shown(sampled[:size]).startswith(told)]
        if heard.reason is None:  # the router has heard as much as its client at least, and maybe more
            return reached or longest
        return [size for size in reached if size in longest]

    def _begins_anew(self, run: Entry, conversation: Conversation, number: int) -> bool:
        """Return True when no whole token was kept: the prompt is then tokenised anew, and has nothing of this turn."""
        heard = conversation.heard[number]
        shown = (self._shown(run["output_ids"][: size + 1]) for size in range(len(run["output_ids"])))
        first = next(filter(None, shown), "")
        return not heard.kept_whole and not conversation.settled.startswith(first or "-", heard.place)


def _runs(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Each entry, and those that went on from an aborted one as if it had been one."""
    yield from entries
    for first in entries:
        if first["aborted"] and first["output_ids"]:
            context = first["input_ids"] + first["output_ids"]
            rest = [entry for entry in entries if entry["input_ids"] == context]
            for run in _runs(rest):
                yield run | {
                    "input_ids": first["input_ids"],
                    **{key: first[key] + run[key] for key in run if key.startswith("output_")},
                }


def _rows(tokens: list[int], turns: Sequence[tuple[Entry, int]]) -> list[tuple[Any, ...]]:
    mask, logprobs, versions = [0] * len(tokens), [0.0] * len(tokens), [_PROMPT] * len(tokens)
    for run, kept in turns:
        start = len(run["input_ids"])
        mask[start : start + kept] = [1] * kept
        logprobs[start : start + kept] = run["output_logprobs"][:kept]
        versions[start : start + kept] = run["output_versions"][:kept]
    return list(zip(tokens, mask, logprobs, versions, strict=True))
