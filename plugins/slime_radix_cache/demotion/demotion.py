"""Segments that are demoted and promoted. No I/O.

The content of a segment never changes, so it is stored once, as a record of the trajectory log's format under the
segment's serial. Two samples with the same tokens are two segments with two serials: their logprobs, versions and
sessions are never merged. A record names its parent's serial, and has only the text after it. The few fields that may
change stay in memory, in the directory. So does all that leads from a text, from ids or from a session to a serial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from slime_radix_cache.demotion.directory import Directory, Entry, IdPlace, State
from slime_radix_cache.demotion.records import place_of, read_record, written
from slime_radix_cache.index.segments import Context, Prompt, Response, Segment, Versions
from slime_radix_cache.index.starts import id_before
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.index.unanswered import Request
from slime_radix_cache.journal.log_records import Answered, Asked
from slime_radix_cache.journal.segment_records import sampled_from, text_from, told

__all__ = ["Demotion"]

_LOST = "not_in_store"


class Demotion:
    """The demoted segments of ``trajectories``, and the serials of all segments. No method awaits.

    ``forget(serial)`` is called for each record that is not needed any more, ``on_notice()`` when the limits do not
    hold. ``demoted``: numbers of demoted segments by reason; ``promoted``: the number of those that came back.
    """

    def __init__(self, trajectories: Trajectories) -> None:
        self.directory = Directory()
        self.demoted: Counter[str] = Counter()
        self.promoted = 0
        self.forget: Callable[[int], None] = lambda serial: None
        #: Numbers of kept and demoted responses by session; the session whose first response is the latest is last.
        self.sessions: Counter[str] = Counter()
        self.on_notice: Callable[[], None] = lambda: None
        self._trajectories = trajectories
        self._serials: dict[Segment, int] = {}
        self._segments: dict[int, Segment] = {}
        self._stored: set[int] = set()
        self._next = 1
        self._restored_serial: int | None = None
        #: By session: serials of recorded beginnings of responses, each with that of a longer record of it.
        self._grown: dict[str, dict[int, int]] = {}
        #: Unanswered requests by the serial of the demoted segment that they continued; and these serials by session.
        self._requests: dict[int, list[Request]] = {}
        self._asked: dict[str, set[int]] = {}

    # Called by the trajectories.

    def added(self, segment: Segment) -> None:
        """See slime_radix_cache.index.segment_store.Demotion."""
        serial = self._restored_serial
        if serial is None:
            serial = self._next
            self._next += 1
            if isinstance(segment, Response) and segment.session is not None:
                self.sessions[segment.session] += 1
        self._serials[segment] = serial
        self._segments[serial] = segment

    def removed(self, segment: Segment) -> None:
        """See slime_radix_cache.index.segment_store.Demotion. What continues the segment is lost."""
        serial = self._serials.get(segment)
        if serial is None:
            return  # it is demoted
        self._drop(serial, segment.session if isinstance(segment, Response) else None)
        del self._serials[segment], self._segments[serial]

    def is_continued(self, segment: Segment) -> bool:
        """See slime_radix_cache.index.segment_store.Demotion."""
        return bool(self.directory.children(self._serials[segment]))

    def notice(self) -> None:
        """See slime_radix_cache.index.segment_store.Demotion."""
        self.on_notice()

    # Demotion.

    def is_stored(self, segment: Segment) -> bool:
        """Return True if the store has the record of ``segment``."""
        return self._serials.get(segment) in self._stored

    def record(self, segment: Segment) -> tuple[int, bytes]:
        """Return the serial and the record of ``segment``. O(its tokens and text)."""
        return self._serials[segment], written(told(segment, self._serials))

    def note_stored(self, serial: int) -> None:
        """Note that the store has the record with ``serial``."""
        if serial in self._segments:
            self._stored.add(serial)
        else:
            self.forget(serial)  # it was removed meanwhile

    def may_go(self, segment: Segment) -> bool:
        """Return True if ``segment`` is kept in memory, and no request and no segment in memory needs it."""
        return segment in self._serials and not segment.pins and not segment.children

    def demote(self, segment: Segment, reason: str) -> None:
        """Remove ``segment`` from memory; the store has its record. O(its text)."""
        serial = self._serials[segment]
        if isinstance(segment, Response) and segment.session is not None:
            for part, whole in self._trajectories.sessions.grown(segment):
                grown = self._grown.setdefault(segment.session, {})
                grown.setdefault(self._serials[part], self._serials[whole])
        entry = self._entry_of(segment, serial)
        del self._serials[segment], self._segments[serial]  # so that it is not removed for good
        requests = self._trajectories.demote(segment)
        self.directory.add(entry)
        self.demoted[reason] += 1
        if requests:
            self._requests[serial] = requests
            for request in requests:
                self._asked.setdefault(request.session, set()).add(serial)

    def _entry_of(self, segment: Segment, serial: int) -> Entry:
        parent = self._serials[segment.parent] if segment.parent is not None else 0
        text = text_of(segment.node)
        if not isinstance(segment, Response):
            assert isinstance(segment, Prompt)  # there are no others
            place = place_of(text, len(text))
            state = State(segment.doubt, segment.giver)
            return Entry(serial, parent, None, place, None, state, 0, ())
        place = place_of(text, segment.start)
        ids = IdPlace(segment.before, id_before(segment))
        state = State(segment.doubt, None, segment.continuation_lost, segment.is_decoded)
        return Entry(serial, parent, segment.session, place, ids, state, len(segment), segment.versions)

    # Promotion.

    def of_session(self, session: str) -> list[int]:
        """Return the serials of demoted segments that ``session`` sampled, or asked without an answer."""
        return [*(one.serial for one in self.directory.of(session)), *self._asked.get(session, ())]

    def promote(self, serials: Sequence[int], records: Sequence[bytes | None], found: list[Segment]) -> None:
        """Put segments into memory as they were, and pin them; adds them to ``found``.

        ``serials``: with those of demoted ancestors, in ascending order. A missing or wrong ``record`` is a loss.
        Segments stay demoted if something before them was demoted meanwhile.
        """
        size = len(found)
        for serial, record in zip(serials, records, strict=True):
            entry = self.directory.get(serial)
            if entry is None:
                continue  # promoted for another request, or lost with the segment before it
            if entry.parent in self.directory:
                continue  # its parent was demoted while the record was read
            told_again = read_record(record, serial)
            segment = self._promote(entry, told_again) if told_again is not None else None
            if segment is None:
                self.lose(serial)
                continue
            self._trajectories.pin((segment, len(segment)))
            found.append(segment)
        self._trajectories.reorder(found[size:], self._serials.__getitem__)
        self.promoted += len(found) - size

    def _promote(self, entry: Entry, record: Asked | Answered) -> Segment | None:
        """Return the segment of ``entry``; None if ``record`` is not that of the entry."""
        serial = entry.serial
        parent = self._segments.get(entry.parent)
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
        self._stored.add(serial)
        if self._serials[segment] != serial:
            self._merge(segment, serial)
        self._reconnect(segment, serial)
        return segment

    def _restored(self, entry: Entry, record: Asked | Answered, context: Context, text: bytes) -> Segment:
        state = entry.state
        if isinstance(record, Asked):
            return self._trajectories.restore_prompt(context, record.ids, text, state.doubt, state.giver)
        sampled = replace(sampled_from(record, text), doubt=state.doubt, is_decoded=state.is_decoded)
        response = self._trajectories.restore_response(context, text[: record.start], sampled, entry.session)
        response.continuation_lost = state.continuation_lost
        return response

    def _merge(self, segment: Segment, serial: int) -> None:
        """Make one of the promoted prompt ``serial`` and ``segment``, an equal one that was recorded meanwhile."""
        first, last = sorted((serial, self._serials[segment]))
        self.directory.adopt(last, first)
        del self._segments[self._serials[segment]]
        self._serials[segment] = first
        self._segments[first] = segment
        self._forget(last)

    def _forget(self, serial: int) -> None:
        if serial in self._stored:
            self._stored.remove(serial)
            self.forget(serial)

    def _reconnect(self, segment: Segment, serial: int) -> None:
        """Connect ``segment`` again with longer and shorter records of it, and with unanswered requests."""
        if isinstance(segment, Response) and segment.session is not None:
            for pair in self._grown.get(segment.session, {}).items():
                if serial in pair:
                    part, whole = map(self._segments.get, pair)
                    if isinstance(part, Response) and isinstance(whole, Response):
                        self._trajectories.sessions.grew(segment.session, part, whole)
        for request in self._take_requests(serial):
            self._trajectories.sessions.unanswered.restored(request, segment)

    def _take_requests(self, serial: int) -> list[Request]:
        requests = self._requests.pop(serial, [])
        for session in {request.session for request in requests}:
            asked = self._asked[session]
            asked.remove(serial)
            if not asked:
                del self._asked[session]
        return requests

    def sizes_of(self, session: str) -> list[tuple[Versions, int]]:
        """Return the versions and the number of tokens of each response of ``session``, oldest first."""
        sizes = {one.serial: (one.versions, one.tokens) for one in self.directory.of(session)}
        for response in self._trajectories.responses_of(session):
            sizes[self._serials[response]] = response.versions, len(response)
        return [sizes[serial] for serial in sorted(sizes)]

    # Losses.

    def lose(self, serial: int) -> None:
        """Mark the demoted segment with ``serial``, and all that continue it, as lost."""
        entry = self.directory.remove(serial)
        self._trajectories.lose(entry.session)
        self._trajectories.evicted[_LOST] += 1
        before = self._before(entry)
        if before is not None:
            before.continuation_lost = True
        self._take_requests(serial)
        self._stored.add(serial)  # it may be there, unreadable
        self._drop(serial, entry.session)

    def _before(self, entry: Entry) -> Response | State | None:
        """Return the nearest response before ``entry`` of the same session, or the state of a demoted one."""
        parent: Entry | None = entry
        while entry.session is not None and parent is not None:
            segment = self._segments.get(parent.parent)
            while segment is not None:
                if isinstance(segment, Response) and segment.session == entry.session:
                    return segment
                segment = segment.parent
            parent = self.directory.get(parent.parent)
            if parent is not None and parent.session == entry.session:
                return parent.state
        return None

    def _drop(self, serial: int, session: str | None) -> None:
        """Forget the segment with ``serial``, which is gone for good, and lose all that continue it."""
        for child in self.directory.children(serial):
            if child in self.directory:
                self.lose(child)
        self._forget(serial)
        if session is None:
            return
        self.sessions[session] -= 1
        if not self.sessions[session]:
            del self.sessions[session]
        grown = self._grown.get(session, {})
        behind = grown.pop(serial, None)
        for part in [part for part, whole in grown.items() if whole == serial]:
            if behind is not None:
                grown[part] = behind
            else:
                del grown[part]
        if session in self._grown and not grown:
            del self._grown[session]
