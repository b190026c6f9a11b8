"""A Sender that counts the tokens of each request at its worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from router_core import Exchange, Reply, Worker
from router_core.reply import BodySource
from router_core.request import Request
from router_core.sender import Sender
from slime_policies.request_tokens import MeanLength
from slime_policies.tokens_in_flight import TokensInFlight
from slime_sglang.usage import UsageTap

__all__ = ["Counting"]


class Counting:
    """Counts the tokens of each request at its worker, even if no policy chose that worker for this request.

    No policy is called, for example, for a request whose session keeps its worker.

    Answers are watched for their first bytes and their lengths. ``load_of`` returns the loads in which the requests of
    a worker are counted, or None if they are not counted.
    """

    def __init__(self, inner: Sender, load_of: Callable[[Worker], TokensInFlight | None]) -> None:
        self._inner = inner
        self._load_of = load_of

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """See :class:`router_core.sender.Sender`."""
        self._inner.choose(exchange, but)
        self._count(exchange)

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """See :class:`router_core.sender.Sender`."""
        counted = self._count(exchange)
        reply = await self._inner.send(exchange, request, body)
        if counted is not None:
            load, counted_as = counted
            _watch(reply, load, counted_as)
        return reply

    def _count(self, exchange: Exchange) -> tuple[TokensInFlight, Exchange] | None:
        worker = exchange.worker
        load = self._load_of(worker) if worker is not None else None
        if worker is None or load is None:
            return None
        # The prefill worker of a pair has an exchange of its own. The policy was called with its parent exchange, which
        # is the client's.
        is_part = worker.server.worker_type == "prefill" and exchange.parent is not None
        counted_as = exchange.parent if is_part and exchange.parent is not None else exchange
        load.count(counted_as, worker)
        return load, counted_as


def _watch(reply: Reply, load: TokensInFlight, exchange: Exchange) -> None:
    """Watch ``reply`` for its first byte, and for the length of a single completion."""
    usage = _Usage(load.mean_length, learns=reply.status == 200 and load.is_single(exchange))
    if reply.body is None and (reply.header(b"content-type") or b"").startswith(b"text/event-stream"):
        reply.pass_through(lambda source: _Watched(source, lambda: load.begin(exchange), usage))
        return
    load.begin(exchange)  # without a stream, an engine sends the head only when the answer is complete
    if reply.body is not None:
        usage.feed(reply.body)
        usage.close(True)
    elif usage.learns:
        reply.tap(usage)


class _Usage:
    """A tap, which sees each piece of an answer. It learns the length of a complete answer."""

    def __init__(self, mean_length: MeanLength, *, learns: bool) -> None:
        self.learns = learns
        self._mean_length = mean_length
        self._tap = UsageTap(self._learn, numbered=True)

    def feed(self, chunk: bytes) -> None:
        if self.learns:
            self._tap.feed(chunk)

    def close(self, complete: bool) -> None:
        if self.learns and complete:
            self.learns = False
            self._tap.close(complete)

    def _learn(self, usage: Mapping[str, int]) -> None:
        if tokens := usage.get("completion_tokens"):
            self._mean_length.learn(tokens)


class _Watched:
    """The body ``source``; ``begin`` is called at its first piece."""

    def __init__(self, source: BodySource, begin: Callable[[], object], usage: _Usage) -> None:
        self._source = source
        self._begin = begin
        self._has_begun = False
        self._usage = usage

    @property
    def finished(self) -> bool:
        return self._source.finished

    async def read(self) -> bytes:
        piece = await self._source.read()
        self._see(piece)
        if self._source.finished or not piece:
            self._usage.close(True)
        return piece

    async def pump(self, take: Callable[[bytes], bool]) -> None:
        """Pass pieces on to ``take`` by the pump of ``source``, if ``source`` has one."""

        def seen(piece: bytes) -> bool:
            taken = take(piece)
            if taken:  # else ``read`` returns the piece
                self._see(piece)
            return taken

        if (pump := getattr(self._source, "pump", None)) is not None:
            await pump(seen)

    def _see(self, piece: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begin()
        self._usage.feed(piece)

    def close(self) -> None:
        self._source.close()
