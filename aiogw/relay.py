"""One request from its canonical form to the last byte of its response; alone knows dialect, gate, upstream and client.

The handler's task only waits for the end.  What happens in between happens in calls: the gate's grant puts the request
on the wire, the upstream's bytes go through the encoder to the client, and the end gives the slot back first and
finishes the response second, because an idle slot is the one thing that costs a GPU.
"""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web
from attrs import frozen

from aiogw.admission.door import Gate
from aiogw.admission.gate import Admission
from aiogw.canonical import ResponseHead
from aiogw.clientstream import ClientStream
from aiogw.departures import Departures
from aiogw.dialects.base import Call, Dialect
from aiogw.errors import ClientGone, GatewayError, InternalFault, UpstreamFault, UpstreamUnavailable
from aiogw.middleware import DIALECT, HELD_BODY, HOLDER, RECORD
from aiogw.record import CLIENT_GONE, FINISH, FIRST_BYTE, QUEUE, STREAM, Progress, RequestRecord
from aiogw.routing import Route
from aiogw.upstream.answer import read_error
from aiogw.upstream.endpoints import Upstream
from aiogw.upstream.pool import UpstreamCall, UpstreamPool, request_fields

log = logging.getLogger(__name__)

# An error document is a sentence or two; a page of HTML from something in between may be longer and is cut.
MAX_ERROR_BYTES = 65536

# What a client may say to an upstream besides its body (the rest, its credentials first of all, was meant for us).
FORWARDED_HEADERS = ("accept", "user-agent", "traceparent", "tracestate", "baggage")


@frozen(kw_only=True)
class RelayLimits:
    """How much of a response may wait for a slow client, in bytes, and how long for a stuck one, in seconds.

    A streaming client hears something after ``first_sign_seconds`` in the queue (0: never), and then, whatever the
    reason for the silence, every ``sign_interval_seconds``.
    """

    response_buffer_bytes: int
    client_stall_timeout_seconds: float
    first_sign_seconds: float
    sign_interval_seconds: float


class RelayedRequest:
    """One request at the gate, then at the upstream, then done; every method is safe to call in any of these states."""

    def __init__(
        self,
        request: web.Request,
        call: Call,
        *,
        route: Route,
        gate: Gate,
        upstream: Upstream,
        limits: RelayLimits,
        departures: Departures,
        number: int,
    ) -> None:
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._body = call.request.body
        self._held_body = request[HELD_BODY]
        self._path = call.request.path
        self._fields = request_fields(
            [
                ("content-type", call.request.content_type),
                ("x-request-id", request[RECORD].request_id),
                *((name, value) for name in FORWARDED_HEADERS if (value := request.headers.get(name)) is not None),
            ],
            call.request.body,
        )
        self._sequences = call.request.sequences
        self._signs = call.request.stream and limits.first_sign_seconds > 0
        self._limits = limits
        self._sign_timer: asyncio.TimerHandle | None = None
        self._encoder = call.encoder
        self._dialect: Dialect = request[DIALECT]
        self._record: RequestRecord = request[RECORD]
        self._holder = request[HOLDER]
        self._gate = gate
        self._upstream = upstream
        self._admission: Admission | None = None
        self._call: UpstreamCall | None = None
        self._left_at_work = False
        self._flows = False
        self._error_head: ResponseHead | None = None
        self._error_body = bytearray()
        self._last_byte_at: float | None = None
        self._ended: asyncio.Future[GatewayError | ClientGone | None] = self._loop.create_future()
        self.route = route
        self._headers = [(name, self._record.request_id) for name in self._dialect.request_id_headers]
        self.stream = ClientStream(
            request,
            headers=self._headers,
            buffer_bytes=limits.response_buffer_bytes,
            stall_timeout_seconds=limits.client_stall_timeout_seconds,
            departures=departures,
            on_full=self._client_full,
            on_drained=self._client_drained,
            on_lost=self._client_lost,
        )

    async def serve(self) -> web.StreamResponse:
        """From the gate to the last byte taken by the client.

        Raises GatewayError while it can still become an ordinary error response; later failures are said in-band.
        Cancelled when the client leaves.
        """
        record = self._record
        record.upstream = self.route.upstream
        if self._sequences == 0:
            record.granted_at = time.monotonic()
            pool = self._upstream.any_pool()
            if pool is None:
                raise UpstreamUnavailable(upstream=self.route.upstream, reason="it has no address")
            self._send(pool)
        else:
            record.entered_at = time.monotonic()
            try:
                self._admission = self._gate.enter(
                    self.route.address,
                    self._sequences,
                    granted=self._granted,
                    refused=self.fail,
                    holder=self._holder.name,
                    places=self._holder.queue_places,
                )
            except GatewayError:
                record.entered_at = None  # it has not waited, so its wait is none of the metric's
                raise
            record.position = self._admission.position
        if self._signs and not self._ended.done():
            waits = record.granted_at is None
            self._sign_in(self._limits.first_sign_seconds if waits else self._limits.sign_interval_seconds)
        error = await self._ended
        if error is not None:
            raise error
        await self.stream.drained()
        return self.stream.response()

    def fail(self, error: GatewayError) -> None:
        """End it with ``error``: the upstream is let go, the slot given back, the client told as well as still can be.

        Once the response has begun, that is in-band, in the dialect's form, or by breaking the connection off.
        """
        if self._ended.done():
            if self._ended.cancelled() and self._record.granted_at is None:
                # In this very turn: its handler has not come to leave the queue, and the gate has counted a refusal.
                self._record.fail(error)
                self._record.refused_at = time.monotonic()
            return
        self._let_go()
        self._record.fail(error)
        if self._record.granted_at is None:
            self._record.refused_at = time.monotonic()
        if not self.stream.started:
            self._ended.set_result(error)
            return
        try:
            told = self._encoder.fail(error, self._record.request_id)
        except Exception:
            log.exception("it could not be told what had failed", extra={"fields": self._named})
            told = None
        if told is None:
            self.stream.break_off()
        else:
            self.stream.send(told, last=True)
        if not self._ended.done():
            self._ended.set_result(None)

    def progress(self) -> Progress:
        if self._ended.done() or (self._record.granted_at is not None and self._call is None):
            phase = FINISH
        elif self._record.granted_at is None:
            phase = QUEUE
        else:
            phase = FIRST_BYTE if self._last_byte_at is None else STREAM
        return Progress(
            number=self._number,
            record=self._record,
            upstream=self._upstream.name,  # a reload may have given it another name than the record has
            phase=phase,
            response_bytes=self.stream.bytes_written,
            last_byte_at=self._last_byte_at,
            deadline_at=None if self._admission is None else self._admission.deadline,
        )

    def close(self) -> None:
        """Give back whatever is still held: the last thing that happens to a request, whatever happened before."""
        self._let_go()
        self._admission = None  # it calls back to here: without the cycle, all of a request goes when it ends
        self.stream.close()
        if self._sign_timer is not None:
            self._sign_timer.cancel()
        self._record.status = self.stream.status
        self._record.response_bytes = self.stream.bytes_written
        if not self._ended.done():
            self._ended.cancel()

    # -- the gate's calls -------------------------------------------------------------------------------------------

    def _granted(self, admission: Admission) -> None:
        try:
            self._begin(admission)
        except Exception:
            # Not left to the gate, which has never heard of an id.
            log.exception("it failed when its turn had come", extra={"fields": self._named})
            self.fail(InternalFault())

    def _begin(self, admission: Admission) -> None:
        self._admission = admission
        record = self._record
        record.granted_at = time.monotonic()
        if self._ended.done():
            # Cancelled in this very turn: its handler has not come to the end that would have left the queue.
            self._let_go()
            return
        record.position = admission.position
        record.endpoint = admission.endpoint
        self.stream.headers = [*self._headers, *record.queue_headers()]
        if admission.waited and self.stream.left_unnoticed():
            self._client_lost(CLIENT_GONE)
            return
        self._send(self._upstream.pool(admission.endpoint))

    def _send(self, pool: UpstreamPool) -> None:
        self._call = pool.send(self._path, self._fields, self._body, self)

    # -- the upstream's calls ---------------------------------------------------------------------------------------

    def response_step(self, head: ResponseHead | None, data: bytes, ended: bool) -> None:
        """What one read from the upstream brought.

        At the end the slot goes first: its next holder's request is on the wire before this one's last bytes are looked
        at.  They wait for the next turn of the loop, because responses that started together end together: a write to a
        client costs some 30 µs, which the slots of the others that end in this turn would stand idle.
        """
        if head is not None:
            self._held_body.release()
        now = time.monotonic()
        if data:
            self._last_byte_at = now
            if self._record.first_byte_at is None:
                self._record.first_byte_at = now
        if ended:
            self._record.answered_at = now
            self._take_call()
            self._let_go()
            self._loop.call_soon(self._step, head, data, True)
        else:
            self._step(head, data, False)

    def response_data(self, data: bytes) -> None:
        """A read that brought a token or two: the way that is gone most often by far."""
        if not self._flows:
            self.response_step(None, data, False)
            return
        self._last_byte_at = time.monotonic()
        try:
            self.stream.send(self._encoder.feed(data, last=False))
        except Exception as error:
            self._fail_on_answer(error)

    def response_failed(self, error: UpstreamFault) -> None:
        self._take_call()
        # Whoever closed the connection, only an engine that was never reached is surely not at work.
        self._left_at_work = not isinstance(error, UpstreamUnavailable)
        if self._left_at_work or not self._wait_again(error):
            self.fail(error)

    def _wait_again(self, error: UpstreamFault) -> bool:
        """Not one byte has gone out, and the endpoint is none any more: another one may have a slot, now or later."""
        if self._admission is None:
            return False
        granted_at, self._record.granted_at = self._record.granted_at, None
        endpoint, self._record.times_put_back = self._record.endpoint, self._record.times_put_back + 1
        waits = self._admission.put_back()  # it may be granted again before this returns
        if waits:
            fields = {**self._named, "endpoint": endpoint, "detail": error.detail}
            log.info("it waits again, its endpoint is gone", extra={"fields": fields})
        else:
            self._record.granted_at = granted_at
            self._record.times_put_back -= 1
        return waits

    def _step(self, head: ResponseHead | None, data: bytes, ended: bool) -> None:
        try:
            self._take(head, data, ended)
        except Exception as error:
            self._fail_on_answer(error)

    def _fail_on_answer(self, error: Exception) -> None:
        if not isinstance(error, GatewayError):
            log.error("it failed on its upstream's answer", exc_info=error, extra={"fields": self._named})
            error = InternalFault()
        self.fail(error)

    def _take(self, head: ResponseHead | None, data: bytes, ended: bool) -> None:
        if self._ended.done():
            return
        if head is not None:
            self._body = b""  # it will not be sent again, and may be large
            if 200 <= head.status < 300:
                self._encoder.begin(head)
            else:
                self._error_head = head
        if self._error_head is not None:
            self._take_error(self._error_head, data, ended)
            return
        out = self._encoder.feed(data, last=ended)
        starting = None if self.stream.started else self._encoder.head
        self.stream.send(out, head=starting, last=ended)
        self._flows = self.stream.started and self._last_byte_at is not None
        if ended:
            self._record.usage = self._encoder.usage
        if ended and not self._ended.done():
            self._ended.set_result(None)

    def _take_error(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        room = MAX_ERROR_BYTES - len(self._error_body)
        self._error_body += data[:room]
        if ended or len(data) > room:
            raise self._encoder.refused(read_error(self.route.upstream, head, bytes(self._error_body)))

    # -- signs of life ----------------------------------------------------------------------------------------------

    def _sign_in(self, seconds: float) -> None:
        self._sign_timer = self._loop.call_later(seconds, self._sign)

    def _sign(self) -> None:
        """Break the silence if there has been one for long enough; else look again when there could have been.

        A request that is at the upstream and has not begun to answer is given a whole interval before its response is
        committed: an upstream refuses within a second or two, and a status serves a client better than an event.
        """
        if self._ended.done():
            return
        interval = self._limits.sign_interval_seconds
        granted_at = self._record.granted_at
        silent_since = self.stream.written_at or granted_at
        if silent_since is not None and (rest := silent_since + interval - time.monotonic()) > 0:
            self._sign_in(rest)
            return
        if granted_at is None and self._admission is not None:
            if not self.stream.started:
                self.stream.headers = [*self._headers, *self._record.queue_headers()]
            outlook = self._admission.outlook()
            out = self._encoder.wait(outlook.ahead, outlook.estimated_seconds)
        else:
            out = self._encoder.wait(0, None)
        self.stream.send(out, head=None if self.stream.started else self._encoder.head)
        self._sign_in(interval)

    # -- the client's calls -----------------------------------------------------------------------------------------

    def _client_full(self) -> None:
        if self._call is not None:
            self._call.pause_reading()

    def _client_drained(self) -> None:
        if self._call is not None:
            self._call.resume_reading()

    def _client_lost(self, code: str) -> None:
        self._let_go()
        if self._record.refused_at is None:  # else the gate has counted it as refused, and so it stays
            self._record.outcome = code
        if not self._ended.done():
            self._ended.set_result(ClientGone(code=code))

    def _take_call(self) -> UpstreamCall | None:
        """The call, which is over, or about to be."""
        call, self._call = self._call, None
        if call is not None:
            self._record.sent_at = call.sent_at
            self._record.times_sent = call.times_sent
        return call

    @property
    def _named(self) -> dict[str, str]:
        """What each line of the log about it begins with."""
        return {"request_id": self._record.request_id, "upstream": self.route.upstream}

    def _let_go(self) -> None:
        """Abort the upstream if it is still at work, then leave the gate: in this order the engine never has more."""
        call = self._take_call()
        aborted = call.abort() if call is not None else self._left_at_work
        # Both SDKs close at the last event, which comes before the end of the response that carries it.
        aborted = aborted and not self._encoder.said_all
        if self._admission is not None:
            self._admission.leave(aborted=aborted)
