"""The clients of a chaos run: sockets of their own, so that each can leave in any way at any instant."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable

import httptools
from attrs import define

from chaos_lib.plan import FAREWELLS, NEVER_GRANTED, PATHS, Plan

ANSWER_TIMEOUT_SECONDS = 30.0
KEPT_BODY_BYTES = 1 << 16


@define
class Result:
    """What became of one request as its client saw it; that it ``heard`` anything proves that the gateway saw it."""

    plan: Plan
    request_id: str
    head_sent: bool = False
    heard: bool = False
    left_at: float | None = None
    status: int | None = None
    code: str | None = None
    complete: bool = False
    in_band_error: bool = False
    said_end: bool = False
    lost: str | None = None


class Conversation:
    """One connection to the gateway; reads as it comes, through callbacks of the loop."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._reading = False
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(5)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setblocking(False)
        self.begin()

    def begin(self) -> None:
        """Forget the last response."""
        self._parser = httptools.HttpResponseParser(self)
        self._interim = False
        self.heard = False
        self.may_go_on = False
        self.status: int | None = None
        self.body = b""
        self.complete = False
        self.lost: str | None = None

    @property
    def keeps(self) -> bool:
        """Whether another request may be sent on it."""
        return self.complete and self.lost is None and self._reading and bool(self._parser.should_keep_alive())

    async def send(self, data: bytes) -> None:
        self.stop_reading()
        with contextlib.suppress(ConnectionError):
            await self._loop.sock_sendall(self.sock, data)
        self._start_reading()

    def send_now(self, data: bytes) -> None:
        """As much as the kernel takes at once, which is all of what is small."""
        with contextlib.suppress(OSError):
            self.sock.send(data)
        self._start_reading()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for ``condition``, which whatever arrives may change, or the end of the connection; False: in vain."""
        deadline = self._loop.time() + seconds
        while not condition() and self.lost is None:
            left = deadline - self._loop.time()
            if left <= 0:
                return False
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(left, self.wake)
            await self._waiter
            timer.cancel()
        return True

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self, farewell: str) -> None:
        """In this very call: a FIN, an RST, or a FIN of one who goes on listening."""
        if self.lost is not None:
            return
        if farewell == "half":
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        else:
            self.close(reset=farewell == "rst")
        self.wake()

    def close(self, *, reset: bool = False) -> None:
        self.stop_reading()
        if self.sock.fileno() >= 0:
            if reset:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sock.close()
        self.lost = self.lost or "left"

    def stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.sock)

    def _start_reading(self) -> None:
        if not self._reading and self.sock.fileno() >= 0:
            self._reading = True
            self._loop.add_reader(self.sock, self._readable)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data, self.lost = b"", "reset"
        if data:
            self.heard = True
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self.lost = f"not HTTP: {error}"
        else:
            self.lost = self.lost or "end"
        if self.lost is not None:
            self.close()
        self.wake()

    # -- httptools --------------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._interim = status < 200
        if self._interim:
            self.may_go_on = True
        else:
            self.status = status

    def on_body(self, data: bytes) -> None:
        if len(self.body) < KEPT_BODY_BYTES:
            self.body += data

    def on_message_complete(self) -> None:
        if not self._interim:
            self.complete = True


class Clients:
    """Everybody who asks, and who of them waits in which order.

    ``request_started`` and ``slot_frees`` are what the upstream tells; they are how a client can leave just then.
    """

    def __init__(self, *, port: int, cap: int, stall_seconds: float) -> None:
        self._port = port
        self._cap = cap
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        # In the order in which they were sent, those that the upstream has not seen: near enough the gateway's queue.
        self._waiting: OrderedDict[str, Callable[[], None] | None] = OrderedDict()
        self._on_start: dict[str, Callable[[], None]] = {}
        self.left_at_grant: set[str] = set()
        self.open: set[Conversation] = set()

    def request_started(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        leave = self._on_start.pop(request_id, None)
        if leave is not None:
            leave()

    def slot_frees(self) -> str | None:
        """The bytes that free a slot are about to be written: whoever is next and wants to leave at its grant does.

        Returns who has left.
        """
        if self._waiting:
            request_id, leave = next(iter(self._waiting.items()))
            if leave is not None:
                del self._waiting[request_id]
                self._on_start.pop(request_id, None)
                self.left_at_grant.add(request_id)
                leave()
                return request_id
        return None

    async def ask(self, plan: Plan, kept: Conversation | None) -> tuple[Result, Conversation | None]:
        """One request to its end; ``kept`` is a connection it may use, and one that can be kept is returned."""
        result = Result(plan=plan, request_id=plan.request_id)
        if kept is not None and not (plan.stays and kept.keeps and kept.lost is None):
            self.drop(kept)
            kept = None
        if kept is None:
            talk = Conversation(self._port, receive_buffer=4096 if plan.client == "stop_reading" else None)
            self.open.add(talk)
        else:
            talk = kept
            talk.begin()
        try:
            await self._converse(plan, talk, result)
        finally:
            self._waiting.pop(result.request_id, None)
            self._on_start.pop(result.request_id, None)
        result.heard = talk.heard
        result.status = talk.status
        result.complete = talk.complete
        result.lost = talk.lost
        self._read(plan, talk, result)
        if plan.stays and talk.keeps:
            return result, talk
        self.drop(talk)
        return result, None

    def drop(self, talk: Conversation) -> None:
        talk.close()
        self.open.discard(talk)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _converse(self, plan: Plan, talk: Conversation, result: Result) -> None:
        if plan.client == "not_http":
            await talk.send(b"\x16\x03\x01 hello, is this TLS?\r\n\r\n")
            await talk.until(lambda: talk.complete, ANSWER_TIMEOUT_SECONDS)
            return
        head, body = self._request(plan, result.request_id)
        leaver = self._leaver(plan, talk, result)
        if plan.client in ("leave_at_once", "truncated"):
            talk.send_now(head + body[: len(body) // 2] if plan.client == "truncated" else head + body)
            result.head_sent = True
            if plan.client == "truncated":
                await asyncio.sleep(plan.leave_after_seconds)
            leaver()
            await self._end(talk)
            return
        if plan.expects:
            await talk.send(head)
            result.head_sent = True
            await talk.until(lambda: talk.may_go_on or talk.complete, ANSWER_TIMEOUT_SECONDS)
            if not talk.may_go_on:
                return
            self._enqueue(plan, result.request_id, leaver)
            await talk.send(body)
        else:
            self._enqueue(plan, result.request_id, leaver)
            result.head_sent = True
            await talk.send(head + body)
        await self._listen(plan, talk, result, leaver)

    def _enqueue(self, plan: Plan, request_id: str, leave: Callable[[], None]) -> None:
        if plan.client in NEVER_GRANTED:
            return
        self._waiting[request_id] = leave if plan.client == "leave_at_grant" else None
        if plan.client in ("leave_at_grant", "leave_running"):
            self._on_start[request_id] = lambda: self._loop.call_later(plan.leave_after_seconds, leave) and None

    def _leaver(self, plan: Plan, talk: Conversation, result: Result) -> Callable[[], None]:
        def leave() -> None:
            if result.left_at is None and talk.lost is None and not talk.complete:
                result.left_at = time.monotonic()
                talk.leave(plan.farewell)

        assert plan.farewell in FAREWELLS
        return leave

    async def _listen(self, plan: Plan, talk: Conversation, result: Result, leave: Callable[[], None]) -> None:
        if plan.client in ("leave_queued", "bad_chunks"):
            if not await talk.until(lambda: talk.complete, plan.leave_after_seconds):
                leave()
        elif plan.client in ("leave_midstream", "stop_reading"):
            await talk.until(lambda: talk.complete or len(talk.body) > 0, ANSWER_TIMEOUT_SECONDS)
            if plan.client == "stop_reading" and not talk.complete and talk.lost is None:
                talk.stop_reading()
                await asyncio.sleep(self._stall_seconds + 0.4)
                # It has long been given up; nothing of that can reach it.
                talk.close(reset=plan.farewell == "rst")
                return
            leave()
        await self._end(talk)

    async def _end(self, talk: Conversation) -> None:
        """Wait for the whole answer; one who has only half left is to be told at least the end of the connection."""
        if not await talk.until(lambda: talk.complete, ANSWER_TIMEOUT_SECONDS):
            talk.lost = "no answer"

    def _request(self, plan: Plan, request_id: str) -> tuple[bytes, bytes]:
        body = plan.body(self._cap)
        path = PATHS[plan.surface] + ("/nowhere" if plan.client == "wrong_path" else "")
        lines = [
            f"{'PUT' if plan.client == 'wrong_method' else 'POST'} {path} HTTP/1.1",
            "host: chaos",
            "content-type: application/json",
            f"x-request-id: {request_id}",
        ]
        if plan.client == "bad_chunks":
            lines.append("transfer-encoding: chunked")
            body = b'5\r\n{"mod\r\nzz\r\n'
        elif plan.client == "too_large":
            lines.append(f"content-length: {10 << 20}")
            body = b"{"
        else:
            lines.append(f"content-length: {len(body)}")
        if plan.expects:
            lines.append("expect: 100-continue")
        return "\r\n".join([*lines, "", ""]).encode(), body

    def _read(self, plan: Plan, talk: Conversation, result: Result) -> None:
        body = talk.body
        if plan.surface == "openai":
            result.said_end = b"[DONE]" in body
            result.in_band_error = b'\ndata: {"error"' in body or body.startswith(b'data: {"error"')
            _, found, rest = body.partition(b"urn:aiogw:problem:")
            result.code = rest.split(b'"', 1)[0].decode().replace("-", "_") if found else None
        else:
            result.said_end = b"message_stop" in body
            result.in_band_error = b"event: error\n" in body
