"""Conversations that outlive the process, in the store to which ``radix_cache`` demotes (moves) trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from router_core.errors import HTTPError
from slime_journal.record_frames import Frames, Torn
from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.history import Asking, History
from slime_openai.prompts.identity import Key
from slime_openai.prompts.log_records import CHATS, Said
from slime_openai.prompts.question import Question
from slime_openai.prompts.turn_records import said_of, turn_of
from slime_openai.responses.evidence import LostSessions

if TYPE_CHECKING:
    from slime_radix_cache.contracts import SideRecords

__all__ = ["StoredHistory"]

_DIGEST_BYTES = 16


class Behind(NamedTuple):
    """The first part of each stored turn. ``parent``: the key of the parent's record, or empty.

    The name of this class is stored, too, so the name must not change.
    """

    parent: bytes


_FRAMES = Frames((Behind, Said))


class StoredHistory(History):
    """A history that also has the turns in a store; without a store, a plain history.

    A turn is stored when an answer of its session is demoted, when the turn is evicted, or when the router stops. A
    stored turn comes back into memory for a question that may continue it.
    """

    def __init__(self, max_bytes: int, lost: LostSessions) -> None:
        super().__init__(max_bytes, lost)
        self._records: SideRecords | None = None
        self._reader = b""
        self._names = 0
        #: Turns in memory by the keys of their records.
        self._by_record: dict[bytes, Turn] = {}
        #: The number of requests in flight at each place.
        self._asked: Counter[bytes] = Counter()
        self._is_loading = False

    def keep_in(self, records: SideRecords, reader: str) -> None:
        """Begin to keep turns in ``records``, for routers with the same ``reader`` (see :func:`log_records.reader`)."""
        self._records, self._reader = records, f"{CHATS.format} {reader}".encode()
        self._names = _mask(self._reader, b"answer")

    def add(self, turn: Turn) -> None:
        """See History."""
        if self._records is not None:
            for one in reversed(turn.chain()):
                if one.record not in self._records:  # a new turn, or its session was forgotten
                    self._record(one, self._records)
                self._by_record[one.record] = one
        super().add(turn)

    def _record(self, turn: Turn, records: SideRecords) -> None:
        self._by_record.pop(turn.record, None)
        parent = turn.parent.record if turn.parent is not None else b""
        name, place = _masked(turn.key, self._names), _masked(turn.place, self._places(turn.session))
        turn.record = records.add(turn.session, name, place, parent, partial(_written, turn, parent))

    def _places(self, session: str | None) -> int:
        """Return the mask for places of ``session``, see :func:`_masked`."""
        asked_by = (b"nobody",) if session is None else (b"session", session.encode("utf-8", "surrogatepass"))
        return _mask(self._reader, *asked_by)

    async def load(self, question: Question) -> bool:
        """See History. Raises HTTPError if the question may get several answers, and the store cannot note this."""
        records = self._records
        if records is None:
            return True
        asked_by = self._places(question.session)
        place = _masked(question.place, asked_by)
        behind = list(zip(question.keys[1:], question.messages, strict=True))
        answers = [key for key, message in behind if message.role == "assistant"]
        names = [_masked(key, self._names) for key in answers]
        # Also load the turns in which the session asked at these places. History.find needs them to decide which turns
        # of other sessions this session may continue.
        places = [_masked(key, asked_by) for key, _ in behind] if question.session is not None else []
        is_known = not answers or self._knows(answers[-1], question.session)
        is_known = is_known or await _succeeds(records.look())
        if question.samples > 1 or self._asked[place] > 1 or records.has_answers(place):
            await records.ask_again(
                place
            )  # also if `look` failed, since the request is sent to the engine even then
        return is_known and await _succeeds(self._load(records, names, places))

    async def _load(self, records: SideRecords, names: list[bytes], places: list[bytes]) -> None:
        """Load the turns whose records have one of ``names``, or one of ``places`` of the session that asks.

        Another router may still have to copy some of these records to the store. Such records are left out if none of
        them is the session's own, and none is the parent of a turn that was read. The session then continues another
        turn, or none.
        """
        keys = [key for key in records.find([*names, *places]) if key not in self._by_record]
        coming = {key for key in keys if records.is_coming(key)}
        if coming and coming.isdisjoint(records.find(places)):
            there = [key for key in keys if key not in coming]
            missing = self._restore(records, there, await records.fetch(there))
            if not any(map(records.is_coming, missing)):
                return
        if keys:
            self._restore(records, keys, await records.fetch(keys))

    def _knows(self, key: Key, session: str | None) -> bool:
        """Return True if a turn of ``session`` (None: of any session) with ``key`` is in memory."""
        return any(session is None or turn.session == session for turn in self._turns.get(key, ()))

    def _restore(
        self, records: SideRecords, keys: Sequence[bytes], contents: Iterable[bytes | None]
    ) -> list[bytes]:
        """Add the turns of ``keys``, except turns whose parent is not in memory. Return the keys of these parents."""
        missing: list[bytes] = []
        found = {key: read for key, content in zip(keys, contents, strict=True) if (read := _read(content))}
        self._is_loading = True
        try:
            for key, (behind, said) in sorted(found.items(), key=lambda one: one[1][1].messages):
                parent = self._by_record.get(behind.parent)
                if key in self._by_record or key not in records:
                    continue  # it was loaded or forgotten meanwhile
                if behind.parent and parent is None:
                    missing.append(behind.parent)
                    continue
                turn = turn_of(said, parent)
                turn.record = key
                self.add(turn)
                self._turns[turn.key].sort(key=lambda turn: turn.record)
        finally:
            self._is_loading = False
        return missing

    def asking(self, session: str | None, place: Key) -> Asking:
        """See History."""
        asking = super().asking(session, place)
        if self._records is not None:
            name = _masked(place, self._places(session))
            self._asked[name] += 1
            asking.on_end = partial(self._end, name)
        return asking

    def _end(self, name: bytes) -> None:
        self._asked[name] -= 1
        if not self._asked[name]:
            del self._asked[name]

    def _make_room(self) -> None:
        """Evict turns as History does, but not during a load. The limit holds again from the next answer on."""
        if not self._is_loading:
            super()._make_room()

    def _is_anyones(self, turn: Turn) -> bool:
        """See History. If turns without a session are lost, a client without a session may mean one of the lost turns.

        So its request may continue only turns without a session, and turns that this run of the router recorded. If no
        such turn is lost, the request may continue any turn.
        """
        records = self._records
        return (
            records is None
            or turn.session is None
            or not records.has_lost(None)
            or records.is_own(turn.record)
        )

    def _is_latest(self, turn: Turn) -> bool:
        """See History. Another router may have the later answer."""
        return self._records is None or not self._records.has_later_elsewhere(turn.record)

    def _note_eviction(self, turn: Turn) -> None:
        """Note that the session of ``turn`` has lost a turn. With a store, save the turn instead: it is not lost."""
        if self._records is None:
            super()._note_eviction(turn)
            return
        self._by_record.pop(turn.record, None)
        self._records.save_soon(turn.record)


async def _succeeds(call: Awaitable[None]) -> bool:
    """Return False if ``call`` raises HTTPError."""
    try:
        await call
    except HTTPError:
        return False
    return True


def _written(turn: Turn, parent: bytes) -> bytes:
    return b"".join(_FRAMES.write([Behind(parent), said_of(turn, 0, 0)]))


def _read(content: bytes | None) -> tuple[Behind, Said] | None:
    """Return the two parts of the record ``content``; None if it is missing or damaged."""
    try:
        ((_, _, (behind, said)),) = _FRAMES.read(memoryview(content or b""))
    except (Torn, ValueError):
        return None
    return behind, said


def _mask(*parts: bytes) -> int:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest())


def _masked(key: Key, mask: int) -> bytes:
    """Return the key that ``mask`` makes of ``key``. Both are digests, so XOR makes another key for each mask."""
    return (int.from_bytes(key) ^ mask).to_bytes(_DIGEST_BYTES)
