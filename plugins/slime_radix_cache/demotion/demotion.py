"""Segments that are demoted (moved to the store) and promoted (moved back to memory). No I/O.

The content of a segment never changes, so it is stored once, as a record in the trajectory log's format. Two samples
with the same tokens are two segments with two serials: their logprobs, versions and sessions are never merged. A record
names its parent's serial, and has only the text that differs from the parent's. The directory, in memory, has the few
fields that may change. It also has what leads from a text, from ids or from a session to a serial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from slime_radix_cache.demotion.asked import AskedRequests
from slime_radix_cache.demotion.directory import Directory, Entry
from slime_radix_cache.demotion.grown_records import GrownRecords
from slime_radix_cache.demotion.key_ranges import KeyRanges
from slime_radix_cache.demotion.numbered import NumberedSegments, is_beginning
from slime_radix_cache.demotion.records import packed_record, place_of, read_record
from slime_radix_cache.demotion.runs import Runs
from slime_radix_cache.index.losses import digests_in
from slime_radix_cache.index.segments import Context, Response, Segment, Versions
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.journal.log_records import Answered, Asked
from slime_radix_cache.journal.segment_records import sampled_from, segment_record, text_from

__all__ = ["Demotion"]

_LOST = "not_in_store"


class Demotion:
    """The demoted segments of ``trajectories``, and the serials of all segments. No method awaits.

    Callbacks: ``forget(serial)`` is called for each record that is not needed any more, ``gone(serial)`` for each
    segment that is removed for good, ``on_notice()`` when a limit is exceeded, ``on_change(entry)`` when a demoted
    segment changes, and ``damaged(serial)`` for each record that is damaged in the store.

    ``memory``: the segments in memory. ``demoted``: counts of demotions by reason. ``promoted``: count of promotions.
    """

    def __init__(self, trajectories: Trajectories) -> None:
        self.directory = Directory()
        self.memory = NumberedSegments()
        self.runs = Runs()
        self.demoted: Counter[str] = Counter()
        self.promoted = 0
        self.forget: Callable[[int], None] = lambda serial: None
        self.gone: Callable[[int], None] = lambda serial: None
        self.damaged: Callable[[int], None] = lambda serial: None
        #: How many responses each session has, in memory and demoted. In the order of the sessions' first responses.
        self.sessions: Counter[str] = Counter()
        self.on_notice: Callable[[], None] = lambda: None
        self.on_change: Callable[[Entry], None] = lambda entry: None
        #: Returns True if other routers may have continued what is saved.
        self.is_shared: Callable[[], bool] = lambda: False
        self._trajectories = trajectories
        self._restored_serial: int | None = None
        self.grown = GrownRecords(trajectories, self.memory)
        #: Serials of segments and side records that are gone for good, if notes about them may still come, or come
        #: again. Those that this run recorded and removed by itself are not among them.
        self.dropped: set[int] = set()
        #: Keys of records of rows that a router has dropped.
        self.dropped_rows = KeyRanges()
        self._asked = AskedRequests()

    # Called by the trajectories.

    def added(self, segment: Segment) -> None:
        """See slime_radix_cache.index.segment_store.Demotion."""
        serial = self._restored_serial
        if serial is not None:
            self.memory.add(segment, serial, is_new=False)
            return
        if isinstance(segment, Response) and segment.session is not None:
            self.sessions[segment.session] += 1
        self.memory.add(segment, self.runs.next_serial(), is_new=True)

    def removed(self, segment: Segment) -> None:
        """See slime_radix_cache.index.segment_store.Demotion. Demoted segments that continue ``segment`` are lost."""
        serial = self.memory.serials.get(segment)
        if serial is None:
            return  # the segment is being demoted
        self.grown.removed(segment, serial)
        self._drop(serial, segment.session if isinstance(segment, Response) else None)
        self.memory.remove(segment)

    def is_continued(self, segment: Segment) -> bool:
        """See slime_radix_cache.index.segment_store.Demotion."""
        is_known_elsewhere = (
            self.is_shared() and self.memory.is_saved(segment) and is_beginning(segment)
        )  # other routers may continue it
        return is_known_elsewhere or bool(self.directory.children(self.memory.serials[segment]))

    def notice(self) -> None:
        """See slime_radix_cache.index.segment_store.Demotion."""
        self.on_notice()

    # Demotion.

    def is_stored(self, segment: Segment) -> bool:
        """Return True if the store has the record of ``segment``."""
        return self.memory.serials.get(segment) in self.memory.sizes

    def record(self, segment: Segment) -> tuple[int, bytes]:
        """Return the serial and the record of ``segment``. O(its tokens and text)."""
        return self.memory.serials[segment], packed_record(segment_record(segment, self.memory.serials))

    def note_stored(self, serial: int, size: int) -> None:
        """Note that the store has the record with ``serial``, of ``size`` bytes."""
        if serial in self.memory.segments:
            self.memory.sizes[serial] = size
        else:
            self.forget(serial)  # the segment was removed meanwhile

    def may_go(self, segment: Segment) -> bool:
        """Return True if ``segment`` is in memory, and no request and no segment in memory needs it."""
        return segment in self.memory.serials and not segment.pins and not segment.children

    def demote(self, segment: Segment, reason: str) -> None:
        """Remove ``segment`` from memory, if :meth:`may_go` is True and the segment was saved as it is now.

        O(1) if no unanswered request continues ``segment``.
        """
        if not self.may_go(segment) or not self.memory.is_saved(segment):
            return
        entry = self.memory.entry_of(segment)
        if entry != self.memory.noted[entry.serial]:
            return  # the segment has changed since it was saved
        self.grown.note(segment)
        self.memory.remove(segment)  # now, so that the method ``removed`` does not drop it for good
        del self.memory.sizes[entry.serial]
        self._asked.add(entry.serial, self._trajectories.demote(segment))
        self.directory.add(entry)
        self.demoted[reason] += 1

    def has(self, serial: int) -> bool:
        """Return True if the segment with ``serial`` is in memory or demoted."""
        serial = self.memory.current(serial)
        return serial in self.directory or serial in self.memory.segments

    def restore(self, entry: Entry) -> None:
        """Add the entry of a segment that an earlier run or another router demoted.

        Entries of earlier runs come in the order of their serials.
        """
        self.directory.add(entry)
        if entry.session is not None:
            self.sessions[entry.session] += 1

    # Promotion.

    def of_session(self, session: str) -> list[int]:
        """Return the serials of demoted segments that ``session`` sampled, or continued with an unanswered request."""
        return [*(one.serial for one in self.directory.of(session)), *self._asked.of(session)]

    def session_of(self, key: bytes) -> str | None:
        """Return a session that needs the record ``key`` of a demoted segment; None if none is known."""
        return self.directory.session_of(self.runs.serial(key)) if self.runs.knows(key) else None

    def promote(self, serials: Sequence[int], records: Sequence[bytes | None], found: list[Segment]) -> None:
        """Put segments into memory as they were, pin them, and add them to ``found``.

        ``serials``: in ascending order, including demoted ancestors; segments are promoted in this order. A missing or
        wrong record is a loss. A segment whose parent is demoted at that moment stays demoted: call this again for it.
        """
        size = len(found)
        for serial, record in zip(serials, records, strict=True):
            entry = self.directory.get(serial)
            if entry is None:
                continue  # promoted for another request, or lost with the segment before it
            if entry.parent in self.directory:
                continue  # its parent was demoted while the record was read, or comes later in ``serials``
            content = read_record(record, serial)
            segment = self._promote(entry, content) if content is not None else None
            if segment is None:
                if record is not None:  # else the store has counted the loss
                    self.damaged(serial)
                self.lose(serial)
                continue
            self._trajectories.pin((segment, len(segment)))
            found.append(segment)
        self._trajectories.reorder(found[size:], self.memory.serials.__getitem__)
        self.promoted += len(found) - size

    def _promote(self, entry: Entry, record: Asked | Answered) -> Segment | None:
        """Return the segment of ``entry``; None if ``record`` is not the entry's record."""
        serial = entry.serial
        parent = self.memory.segments.get(entry.parent)
        if (parent is None) != (entry.parent == 0):
            return None
        context: Context = (parent, record.kept) if parent is not None else None
        text = text_from(record, parent)
        start = record.start if isinstance(record, Answered) else None
        is_other_kind = (start is None) != (entry.ids is None)
        if is_other_kind or place_of(text, start if start is not None else len(text)) != entry.text:
            return None
        self.directory.remove(serial)
        self._restored_serial, segment = serial, None
        try:
            segment = self._restored(entry, record, context, text)
        finally:
            self._restored_serial = None
        self.memory.sizes[serial], self.memory.noted[serial] = entry.size, entry
        if self.memory.serials[segment] != serial:
            self._merge(segment, serial)
        self._reconnect(segment, serial)
        return segment

    def _restored(self, entry: Entry, record: Asked | Answered, context: Context, text: bytes) -> Segment:
        state = entry.state
        if isinstance(record, Asked):
            return self._trajectories.restore_prompt(context, record.ids, text, state.doubt, state.giver)
        sampled = sampled_from(record, text)._replace(doubt=state.doubt, is_decoded=state.is_decoded)
        response = self._trajectories.restore_response(context, text[: record.start], sampled, entry.session)
        if state.continuation_lost:
            response.continuation_lost = True
        return response

    def _merge(self, segment: Segment, serial: int) -> None:
        """Merge the promoted prompt ``serial`` with ``segment``, an equal prompt that was recorded meanwhile."""
        other = self.memory.serials[segment]
        # The serial that stays must be in the log: notes about the prompt's children name it as their parent.
        first, last = sorted((serial, other)) if self.memory.is_saved(segment) else (serial, other)
        moved = self.directory.children(last)
        self.directory.adopt(last, first)
        for child in filter(None, map(self.directory.get, moved)):
            self.on_change(child)
        self.memory.merge(segment, first, last)
        if self.is_shared():
            self.memory.sizes.pop(last, None)  # another router may need the record
        else:
            self._forget(last)

    def _forget(self, serial: int) -> None:
        if self.memory.sizes.pop(serial, None) is not None:
            self.forget(serial)

    def _reconnect(self, segment: Segment, serial: int) -> None:
        """Reconnect ``segment`` with other records of its response, and with unanswered requests that continue it."""
        if isinstance(segment, Response):
            self.grown.connect(serial)
        for request in self._asked.take(serial):
            self._trajectories.sessions.unanswered.restored(request, segment)

    def sizes_of(self, session: str) -> list[tuple[Versions, int]]:
        """Return the versions and the number of tokens of each response of ``session``, oldest first."""
        sizes = {one.serial: (one.versions, one.tokens) for one in self.directory.of(session)}
        for response in self._trajectories.responses_of(session):
            sizes[self.memory.serials[response]] = response.versions, len(response)
        return [sizes[serial] for serial in sorted(sizes)]

    # Losses.

    def lose(self, serial: int) -> None:
        """Mark the demoted segment with ``serial``, and all that continue it, as lost."""
        entry = self.directory.remove(serial)
        self._trajectories.lose(entry.session, *digests_in(entry.marks))
        self._trajectories.evicted[_LOST] += 1
        before = self._before(entry)
        if isinstance(before, Response):
            before.continuation_lost = True
        elif before is not None:
            before.state.continuation_lost = True
            self.on_change(before)
        self._asked.take(serial)
        self.memory.sizes[serial] = entry.size  # so that _forget drops the record, if it is there
        self._drop(serial, entry.session)

    def _before(self, entry: Entry) -> Response | Entry | None:
        """Return the session's nearest response before ``entry``, in memory or as an entry; None if there is none."""
        parent: Entry | None = entry
        while entry.session is not None and parent is not None:
            segment = self.memory.segments.get(parent.parent)
            while segment is not None:
                if isinstance(segment, Response) and segment.session == entry.session:
                    return segment
                segment = segment.parent
            parent = self.directory.get(parent.parent)
            if parent is not None and parent.session == entry.session:
                return parent
        return None

    def _drop(self, serial: int, session: str | None) -> None:
        """Forget the segment with ``serial``, which is gone for good. Demoted segments that continue it are lost."""
        for child in self.directory.children(serial):
            if child in self.directory:
                self.lose(child)
        self._forget(serial)
        self.gone(serial)
        if not self.runs.is_own(serial):
            self.dropped.add(serial)
        self.grown.serials.remove(serial)
        if session is None:
            return
        self.sessions[session] -= 1
        if not self.sessions[session]:
            del self.sessions[session]
