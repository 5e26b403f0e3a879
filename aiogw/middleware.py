"""What every request passes before it is relayed: record, dialect, errors, whose it is, canonical form.

This is the only module that reads a request's head and body.  It may not know the gate or an upstream.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware
from attrs import frozen

from aiogw.auth import ANYBODY, Authenticator, Holder
from aiogw.bodies import BodyBudget, HeldBody
from aiogw.canonical import Document, Engine
from aiogw.clientstream import SentResponse
from aiogw.contentcoding import Inflater, content_coding
from aiogw.dialects import detect
from aiogw.dialects.base import Call, Dialect, LocalEndpoint, RelayEndpoint
from aiogw.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientGone,
    GatewayError,
    InternalFault,
    InvalidKey,
    MalformedBody,
    MalformedRequest,
    UnknownModel,
)
from aiogw.record import CLIENT_GONE, COMPLETED, RequestRecord, request_id_from
from aiogw.routing import Routes
from aiogw.turnstile import Turnstile

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

# Of anything that a client chose, in a log line.
MAX_LOGGED_CHARACTERS = 200

RECORD = web.RequestKey("RECORD", RequestRecord)
DIALECT: web.RequestKey[Dialect] = web.RequestKey("DIALECT", Dialect)
HOLDER = web.RequestKey("HOLDER", Holder)
CALL = web.RequestKey("CALL", Call)
HELD_BODY = web.RequestKey("HELD_BODY", HeldBody)


@frozen(kw_only=True)
class BodyLimits:
    """How large a body may be when it is decoded, and how slow.

    It has ``timeout_seconds``, and a second more for every ``min_bytes_per_second`` bytes of it that have come over the
    wire.
    """

    max_bytes: int
    timeout_seconds: float
    min_bytes_per_second: int


def keep_record(observe: Callable[[RequestRecord], None]) -> Middleware:
    """Open the record of every request, and tell it once, however the request ends."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = RequestRecord(
            request_id=request_id_from(request.headers.get("x-request-id")),
            arrived_at=time.monotonic(),
            method=request.method[:MAX_LOGGED_CHARACTERS],
            path=request.path[:MAX_LOGGED_CHARACTERS],
        )
        request[RECORD] = record
        try:
            response = await handler(request)
            # A client that has gone was told none.
            if record.status is None and response.status:
                record.status = response.status
                record.response_bytes = response.content_length or 0
            return response
        except asyncio.CancelledError:
            # A response that was broken off by ourselves ends this way, too: what had gone wrong stays what is told.
            if record.outcome == COMPLETED:
                record.outcome = CLIENT_GONE
            raise
        finally:
            record.ended_at = time.monotonic()
            observe(record)

    return middleware


def detect_dialect(dialects: tuple[Dialect, ...]) -> Middleware:
    """Choose the dialect by the path alone; everything after this can speak to the client in its own words."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        dialect = detect(request.path, dialects)
        request[DIALECT] = dialect
        request[RECORD].surface = dialect.name
        return await handler(request)

    return middleware


@web.middleware
async def render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error that is still an exception here into the document its surface knows."""
    record = request[RECORD]
    try:
        return await handler(request)
    except GatewayError as error:
        # A traceback holds its frames, and they the request and the error: a cycle for every refusal, which would wait
        # for the garbage collector, body and all, just when there are thousands of them.
        error.__traceback__ = error.__context__ = None
        return _refuse(request, error)
    except ClientGone as gone:
        gone.__traceback__ = gone.__context__ = None
        if record.refused_at is None:
            record.outcome = gone.code
        if request.transport is not None:
            request.transport.abort()
        return SentResponse(status=0, keep_alive=False)
    except Exception:
        log.exception("it failed", extra={"fields": {"request_id": record.request_id}})
        return _refuse(request, InternalFault())


def authenticate(authenticator: Authenticator) -> Middleware:
    """Find out whose request it is, before anything else of it is looked at, its body and its path included.

    OPTIONS needs no key: a browser asks with it beforehand, cannot send one, and would never come to send the rest.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        holder = ANYBODY
        if request.method != "OPTIONS":
            headers = request.headers
            holder = authenticator.holder(headers.getall("authorization", ()), headers.getall("x-api-key", ()))
        request[HOLDER] = holder
        request[RECORD].key = holder.name
        return await handler(request)

    return middleware


def canonicalise(*, routes: Routes, limits: Callable[[], BodyLimits], budget: BodyBudget) -> Middleware:
    """Answer what can be answered here; of the rest, read the whole body and leave its canonical form behind.

    The body is read before the gate, because aiohttp stops reading from a connection whose body is left alone, and a
    connection that is not read cannot be seen to close (measured with aiohttp 3.14: from about 525 kB).
    """
    turnstile = Turnstile()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        dialect = request[DIALECT]
        _check_framing(request)
        endpoint = dialect.endpoint(request.method, request.path)
        if isinstance(endpoint, LocalEndpoint):
            return _respond(request, endpoint.answer(routes.models_in(request[HOLDER].models), request.query))
        held = request[HELD_BODY] = budget.hold()
        try:
            call = await _read_call(request, dialect, endpoint, routes, limits(), turnstile)
            if isinstance(call, Document):
                return _respond(request, call)
            request[CALL] = call
            del call  # this frame lives as long as the request, and the body should not
            return await handler(request)
        finally:
            held.release()

    return middleware


async def _read_call(
    request: web.Request,
    dialect: Dialect,
    endpoint: RelayEndpoint,
    routes: Routes,
    limits: BodyLimits,
    turnstile: Turnstile,
) -> Call | Document:
    """A function of its own, so that no frame that outlives it keeps the body of a request that has been sent on."""
    body = await _read_body(request, limits)
    await turnstile.wait()
    record = request[RECORD]
    record.request_bytes = len(body)
    content_type = request.headers.get("content-type", "")

    def find_engine(model: str) -> Engine:
        engine = routes.find_engine(model, allowed=request[HOLDER].models)
        record.model = model  # known from here on, also of what is refused for the rest of it
        return engine

    call = dialect.decode(endpoint, content_type, body, find_engine)
    if isinstance(call, Document):
        return call
    request[HELD_BODY].resize(len(call.request.body))
    record.stream = call.request.stream
    record.sequences = call.request.sequences
    return call


async def accept_expectation(_request: web.Request) -> None:
    """Replaces aiohttp's own handler of ``Expect``, which says 100 before anybody has looked at the length."""


def _check_framing(request: web.Request) -> None:
    """Refuse what RFC 9112 (6.1) has no answer for, and the parsers let pass: others may read another length."""
    coding = request.headers.get("transfer-encoding")
    if coding is None:
        return
    if request.version < (1, 1):
        raise MalformedRequest(reason="HTTP/1.0 has no Transfer-Encoding")
    if coding.lower() != "chunked":
        raise MalformedRequest(reason="Transfer-Encoding may only be chunked")


async def _read_body(request: web.Request, limits: BodyLimits) -> bytes:
    """The whole body, decoded; raises BodyTooLarge, BodyTimeout, MalformedBody, MemoryFull, UnsupportedCoding."""
    coding = content_coding(request.headers.getall("content-encoding", []))
    held = request[HELD_BODY]
    declared = request.content_length or 0
    if declared > limits.max_bytes:
        raise BodyTooLarge(limit_bytes=limits.max_bytes)
    # All that is announced is held from the beginning, so that no upload is turned away halfway because of another.
    held.resize(declared)
    asks = request.version >= (1, 1) and request.headers.get("expect", "").lower() == "100-continue"
    if asks and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if coding is None and request.content.is_eof():
        return _body_at_once(request, limits)
    deadline = asyncio.get_running_loop().time() + limits.timeout_seconds
    # One block for all that is announced, which is only filled as it is written.  Joining pieces would take the double:
    # those of several uploads lie between each other, and what is freed of them is of no use to the next.
    body = io.BytesIO(bytes(declared))
    inflater = None if coding is None else Inflater(coding)
    size = received = 0
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            # Not request.read(): that would keep a second reference to the bytes for as long as the request waits.
            while piece := await _piece(request):
                received += len(piece)
                for step in (piece,) if inflater is None else inflater.feed(piece):
                    size += len(step)
                    if size > limits.max_bytes:
                        raise BodyTooLarge(limit_bytes=limits.max_bytes)
                    if size > held.size:
                        held.resize(size)
                    body.write(step)
                    if inflater is not None:
                        await asyncio.sleep(0)  # a bomb has many steps, and others want their turn between them
                timeout.reschedule(deadline + received / limits.min_bytes_per_second)
        if inflater is not None:
            inflater.end()
    except TimeoutError:
        raise BodyTimeout(
            timeout_seconds=limits.timeout_seconds, min_bytes_per_second=limits.min_bytes_per_second
        ) from None
    except (web.RequestPayloadError, HttpProcessingError):  # the C parser's, and the pure one's
        raise MalformedBody(reason="its framing is broken") from None
    body.truncate()
    return body.getvalue()


async def _piece(request: web.Request) -> bytes:
    """What has come of the body since the last one, empty at its end.

    Joined only where it may be in thousands of chunks, which cost less to join than to look at one by one.
    """
    if request.content_length is None:
        return await request.content.readany()
    piece, _ = await request.content.readchunk()
    return piece


def _body_at_once(request: web.Request, limits: BodyLimits) -> bytes:
    """A body that came together with its head, as nearly all do: no timer, and no copy."""
    try:
        body = request.content.read_nowait()
    except (web.RequestPayloadError, HttpProcessingError):
        raise MalformedBody(reason="its framing is broken") from None
    if len(body) > limits.max_bytes:
        raise BodyTooLarge(limit_bytes=limits.max_bytes)
    request[HELD_BODY].resize(len(body))
    return body


def _refuse(request: web.Request, error: GatewayError) -> web.Response:
    record = request[RECORD]
    record.fail(error)
    if isinstance(error, UnknownModel):
        record.model = error.model[:MAX_LOGGED_CHARACTERS]
    response = _respond(request, request[DIALECT].render_error(error, record.request_id))
    if isinstance(error, BodyTooLarge | InvalidKey):
        # aiohttp's C parser (3.14) takes a length of 2**64 - 1 for none; and of whoever has no key nothing more was
        # looked at, so that it is in doubt where the next request begins.
        response.force_close()
    return response


def _respond(request: web.Request, document: Document) -> web.Response:
    """``document`` as aiohttp sends it, with the request id where this surface's clients look for it."""
    response = web.Response(status=document.status, body=document.body)
    if not request.content.is_eof():
        # Whether the rest of a body is still to come is anybody's guess: a client that was told this instead of a 100
        # sends its next request, which would be taken for the body.
        response.force_close()
    response.headers["content-type"] = document.content_type
    response.headers["server"] = "aiogw"  # else aiohttp tells its version and Python's
    for name, value in document.headers:
        response.headers[name] = value
    record = request[RECORD]
    for name, value in record.queue_headers():
        response.headers[name] = value
    for name in request[DIALECT].request_id_headers:
        response.headers[name] = record.request_id
    return response
