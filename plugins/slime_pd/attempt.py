"""One generation at two workers: both get the request at once, and if one fails, the other's request is aborted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from router_core import Exchange, Worker
from router_core.errors import HTTPError, WorkerTimeout
from router_core.reply import BodySource, Reply
from router_core.request import Request
from router_core.sender import Sender
from slime_pd.bodies import FirstPiece, MergedStream
from slime_pd.bootstrap import bootstrap_fields
from slime_pd.pd_merge import Prefilled
from slime_sglang.facts import dp_rank
from slime_sglang.generation import with_fields

if TYPE_CHECKING:
    from slime_control.contracts import PendingAborts
    from slime_retries.contracts import Breaking

__all__ = ["Attempt", "Pair"]

#: Seconds to wait for the end of the prefill after the decode worker, which needs the KV cache, has answered.
_OVERDUE_S = 10.0
#: Seconds to wait for the prefill worker after a 5xx of the decode worker: a failed prefill may be the cause.
_CAUSE_WAIT_S = 0.2
#: Fields that ask for arrays. Each worker knows only a part of such an array.
_ROWS = (b'"return_routed_experts":', b'"return_indexer_topk":')


class Pair:
    """State of an exchange, kept for its next attempts. ``part``: the inner exchange that leases the prefill worker.

    ``asked``: the servers that got the request (see ``Worker.server``). ``failed``: the servers of failed attempts. A
    failure counts for both servers of a pair: the server that reports a broken transfer may not have caused it.
    """

    __slots__ = ("asked", "failed", "part")

    def __init__(self, exchange: Exchange) -> None:
        self.part = Exchange(exchange.request, session=None, parent=exchange)
        self.asked: set[Worker] = set()
        self.failed: list[Worker] = []
        exchange.on_close(self.part.close)


class Attempt:
    """One attempt to get an answer from a pair of workers; ``inner`` sends a request to one worker."""

    def __init__(
        self, inner: Sender, breakers: Breaking | None, exchange: Exchange, pair: Pair, request: Request
    ) -> None:
        assert exchange.worker is not None and pair.part.worker is not None  # narrowing: both are chosen  # noqa: PT018
        self._inner = inner
        self._breakers = breakers
        self._exchange = exchange
        self._pair = pair
        self._part = pair.part
        self._part.request = self._request = request
        self._prefill, self._decode = pair.part.worker, exchange.worker
        self._both = anyio.CancelScope()
        self._prefill_done = anyio.Event()
        self._prefilled = Prefilled({})
        self._reply: Reply | None = None
        self._stream: FirstPiece | None = None
        self._failure: tuple[Exchange, Reply | HTTPError] | None = None
        self._asks_rows = False

    async def settled(self, pending_aborts: PendingAborts, *, may_rename: bool) -> None:
        """Return when earlier attempts have ended at these workers, or this attempt has a new rid.

        An engine may know the rid of an aborted request for some seconds, and refuses another request with this rid.
        Once there is a reply, the client may know the rid, so the rid stays. Raises Aborted.
        """
        both = (self._prefill.server, self._decode.server)
        again = [worker for worker in both if worker in self._pair.asked]
        self._pair.asked.update(both)
        is_unknown = self._request is self._exchange.request and self._exchange.reply is None
        if again and may_rename and is_unknown and pending_aborts.rename(self._request):
            return
        for worker in again:
            await pending_aborts.settled(worker, self._exchange)

    async def run(self, body: bytes, count: int | None = None) -> Reply:
        """Return the decode worker's reply with the prefill worker's fields, or a failed worker's reply.

        ``count``: the number of sequences if ``body`` is a batch; otherwise None. Raises HTTPError.
        """
        prefill, rank = self._prefill.server, dp_rank(self._prefill)
        self._asks_rows = any(field in body for field in _ROWS)
        body = with_fields(body, bootstrap_fields(count, prefill))
        to_decode = body if rank is None else with_fields(body, b'"disagg_prefill_dp_rank":%d' % rank)
        if self._breakers is not None:
            self._breakers.begin(prefill, self._request)
        try:
            async with anyio.create_task_group() as both:
                self._both = both.cancel_scope
                both.start_soon(self._ask_prefill, body)
                both.start_soon(self._ask_decode, to_decode)
            if self._failure is not None:
                return self._failed(*self._failure)
            assert self._reply is not None  # narrowing: nothing has failed
            self._merge(self._reply)
        except BaseException:
            self._give_up()
            raise
        self._pair.failed.clear()
        return self._reply

    async def _ask_prefill(self, body: bytes) -> None:
        worker, request, breakers = self._prefill.server, self._request, self._breakers
        try:
            reply = await self._inner.send(self._part, request, body)
        except BaseException as error:
            if breakers is not None:
                breakers.ended(worker, request, well=False)
            if not isinstance(error, HTTPError):
                raise
            self._fail(self._part, error)
            return
        if not 200 <= reply.status < 300:
            self._fail(self._part, reply)
            return
        if breakers is not None:
            breakers.answered(worker, request, reply)
        try:
            told = await reply.read()
            if request.path == "/generate":
                self._prefilled = (Prefilled.streamed if _streams(reply) else Prefilled.whole)(told)
        except HTTPError as error:
            self._fail(self._part, error)
        finally:
            reply.close()
        self._part.release()  # the prefill worker has handed over the keys and values of the prompt
        self._prefill_done.set()

    async def _ask_decode(self, body: bytes) -> None:
        try:
            self._reply = reply = await self._inner.send(self._exchange, self._request, body)
            if not 200 <= reply.status < 300:
                if reply.status >= 500:  # perhaps because the prefill worker has died
                    with anyio.move_on_after(_CAUSE_WAIT_S):
                        await self._prefill_done.wait()
                self._fail(self._exchange, reply)
            elif _streams(reply):
                reply.pass_through(self._first_piece)
                if self._stream is not None:
                    # If the stream fails here, the request at the prefill worker is cancelled.
                    await self._stream.begin()
                await self._expect_prefill()
            else:
                await reply.read()
                await self._expect_prefill()
        except HTTPError as error:
            self._fail(self._exchange, error)

    def _first_piece(self, source: BodySource) -> BodySource:
        self._stream = FirstPiece(source)
        return self._stream

    async def _expect_prefill(self) -> None:
        with anyio.move_on_after(_OVERDUE_S):
            await self._prefill_done.wait()
            return
        late = (
            f"worker {self._prefill.name} has not ended its prefill, though {self._decode.name} has answered"
        )
        if self._breakers is not None:
            self._breakers.failed(self._prefill.server, self._request, late)
        self._fail(self._part, WorkerTimeout(late))

    def _fail(self, where: Exchange, how: Reply | HTTPError) -> None:
        """End the attempt with ``how``, one worker's reply or error. Cancel the request at the other worker."""
        if self._failure is None:
            self._failure = where, how
            self._both.cancel()
        elif isinstance(how, Reply):
            if self._breakers is not None and where.worker is not None:
                self._breakers.answered(where.worker.server, self._request, how)  # both have failed
            how.close()

    def _failed(self, where: Exchange, how: Reply | HTTPError) -> Reply:
        """Return or raise ``how``. The exchange keeps the lease on the failed worker, and releases the other lease."""
        exchange, at_prefill = self._exchange, where is self._part
        self._pair.failed += (self._prefill.server, self._decode.server)
        if self._reply is not None and self._reply is not how:
            self._reply.close()
        self._part.release()
        if at_prefill:
            exchange.lease(self._prefill)
        if self._breakers is not None and at_prefill:
            self._breakers.ended(self._decode.server, self._request, well=False)
        if isinstance(how, HTTPError):
            raise how
        return how

    def _give_up(self) -> None:
        self._part.release()
        if self._breakers is not None:
            self._breakers.ended(self._prefill.server, self._request, well=False)
        replies = [self._reply, self._failure[1] if self._failure is not None else None]
        for reply in replies:
            if isinstance(reply, Reply):
                reply.close()

    def _merge(self, reply: Reply) -> None:
        """Merge the prefill worker's fields into ``reply``."""
        prefilled, whole, stream = self._prefilled, reply.body, self._stream
        if whole is not None:
            if prefilled.adds_to(whole):
                reply.replace_body(prefilled.merge(whole))
        elif stream is not None and prefilled.adds_to_stream(stream.first, asks_rows=self._asks_rows):
            reply.pass_through(lambda source: MergedStream(source, prefilled))


def _streams(reply: Reply) -> bool:
    return (reply.header(b"content-type") or b"").startswith(b"text/event-stream")
