"""Responses and running requests by session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from slime_radix_cache.index.segments import Context, Response
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.index.unanswered import Unanswered

__all__ = ["Running", "Sessions", "responses_at"]


@dataclass(eq=False, slots=True)
class Running:
    """A running request of ``session`` with ``prompt``, which continues ``context``.

    ``ids``: packed ids of the whole prompt; None until they are known.
    """

    session: str
    prompt: bytes
    context: Context
    ids: bytes | None = None


class Sessions:
    """Responses and running requests of each session, oldest first. An addition takes O(1)."""

    def __init__(self) -> None:
        #: The first response of a session is kept without a list, which would take 80 bytes, until there is a second.
        self._responses: dict[str, Response | list[Response]] = {}
        self._running: dict[str, dict[Running, None]] = {}
        self.unanswered = Unanswered()

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, session: str) -> bool:
        """Return True if a response of ``session`` is kept."""
        return session in self._responses

    def newest(self) -> Iterator[str]:
        """Yield the names of the sessions that have responses; the session that was added last comes first."""
        return reversed(self._responses)

    def of(self, session: str) -> list[Response]:
        """Return the kept responses of ``session``, oldest first."""
        known = self._responses.get(session)
        return list(known) if isinstance(known, list) else [known] if known is not None else []

    def name(self, session: str) -> str:
        """Return the string object that the responses of ``session`` share as its name; ``session`` if none is kept."""
        known = self._responses.get(session)
        first = known[0] if isinstance(known, list) else known
        return first.session or session if first is not None else session

    def add(self, session: str, response: Response) -> None:
        """Add ``response``."""
        known = self._responses.get(session)
        if isinstance(known, list):
            known.append(response)
        else:
            self._responses[session] = [known, response] if known is not None else response

    def remove(self, session: str, response: Response) -> None:
        """Remove ``response``: usually the first (evicted), or the last (a longer record replaces it)."""
        known = self._responses[session]
        if not isinstance(known, list) or len(known) == 1:
            del self._responses[session]
        elif known[-1] is response:
            known.pop()
        else:
            known.remove(response)

    def sort(self, session: str, place: Callable[[Response], int]) -> None:
        """Put the responses of ``session`` in the order of ``place``."""
        known = self._responses.get(session)
        if isinstance(known, list):
            known.sort(key=place)

    def begin(self, running: Running) -> None:
        """Add a running request; :meth:`end` removes it."""
        self._running.setdefault(running.session, {})[running] = None

    def end(self, running: Running, *, is_recorded: bool) -> str | None:
        """Remove ``running``, and remember it as unanswered unless its answer ``is_recorded``.

        Returns the session of another unanswered request that had to be forgotten, or None.
        """
        own = self._running[running.session]
        del own[running]
        if not own:
            del self._running[running.session]
        if is_recorded:
            return None
        return self.unanswered.add(running.session, running.prompt, running.ids, running.context)

    def is_running(self, session: str) -> bool:
        """Return True while a request of ``session`` runs."""
        return session in self._running

    def asked(self, session: str, text: bytes, ids: bytes | None) -> Iterator[Context]:
        """Yield the contexts of those running and unanswered requests of ``session`` that fit ``text`` or ``ids``.

        A request fits if its prompt is a beginning of ``text``, or of ``ids`` (packed).
        """
        for one in self._running.get(session, ()):
            if text.startswith(one.prompt) or (ids is not None and one.ids and ids.startswith(one.ids)):
                yield one.context
        yield from self.unanswered.contexts(session, text, ids)


def responses_at(nodes: Iterable[Node], session: str) -> Iterator[Response]:
    """Yield the responses of ``session`` whose prompts end at one of ``nodes``. O(nodes and results)."""
    for node in nodes:
        if node.responses is not None:
            yield from node.begun_by(session)
