"""A stub of one vLLM-style upstream that keeps its own account, and is fast enough not to be what is measured.

It runs in a process of its own, prints the port it listens on, and ends when its standard input does, so that it cannot
outlive whoever started it.  It answers ``POST`` on any path as a chat completion, whole or as an event stream, and is
told what to do next by its client:

    POST /__prepare  {"hold_ms": 20, "interval_ms": 10, "events": 1000, "engines": 10, "event_bytes": 0}
                     forget the account, behave like this (only while nothing is in flight, which the account in the
                     answer tells); with event_bytes, events have that size and only the members it takes
    POST /__account  {}
                     the account so far, as JSON

A ``GET`` is answered with the list of its one model, and is not in the account.

Everything it sends carries ``@NANOSECONDS@`` of the monotonic clock, which all processes of a machine share: so a
client knows how old a byte is when it arrives.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import deque
from typing import Any, cast

import uvloop

TAG = re.compile(rb"tag:(\d+)")
STREAM = re.compile(rb'"stream"\s*:\s*true')
INCLUDE_USAGE = re.compile(rb'"include_usage"\s*:\s*true')
CONTINUOUS_USAGE = re.compile(rb'"continuous_usage_stats"\s*:\s*true')
LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)

# The documents have the members vLLM 0.32 sends, so that what has to be read and written is of the true size.
WHOLE = (
    b'{"id":"chatcmpl-91f0a5674f7cb29b","object":"chat.completion","created":1796095090,"model":"reasoning","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"@%d@ Hello from the stub.","refusal":null,"annotations":'
    b'null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"stop","stop_reason":null,'
    b'"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-84f2f0b8","usage":'
    b'{"prompt_tokens":20,"total_tokens":32,"completion_tokens":12,"prompt_tokens_details":null,'
    b'"completion_tokens_details":{"reasoning_tokens":0}},"prompt_logprobs":null,"prompt_token_ids":null,'
    b'"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
)
CHUNK = (
    b'data: {"id":"chatcmpl-91f0a5674f7cb29b","object":"chat.completion.chunk","created":1796095090,'
    b'"model":"reasoning","choices":%b%b}\n\n'
)
FIRST_CHOICE = b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
CHOICE = b'[{"index":0,"delta":{"content":"@%d@"},"logprobs":null,"finish_reason":null,"token_ids":null}]'
LAST_CHOICE = (
    b'[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null}]'
)
USAGE = (
    b',"usage":{"prompt_tokens":20,"total_tokens":%d,"completion_tokens":%d,'
    b'"completion_tokens_details":{"reasoning_tokens":0}}'
)

SHORT_CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"@%d@%b"},"finish_reason":null}]}\n\n'
MODELS = b'{"object":"list","data":[{"id":"reasoning","object":"model","created":1796095090,"owned_by":"vllm"}]}'


class Account:
    """What reached the upstream; written by it, so it holds whatever a gateway believes.

    ``handovers_us``: for each request that took over a slot, how long that had been idle.  Slots are all alike, so the
    one that became idle first counts as the one that is taken.
    """

    def __init__(self) -> None:
        self.in_flight = self.max_in_flight = self.started = self.completed = self.aborted = self.events = 0
        self.busy_seconds = 0.0
        self.order: list[int] = []
        self.aborted_at: dict[int, float] = {}
        self.handovers_us: list[float] = []
        self._idle_since: deque[float] = deque()
        self._last_step_at = time.monotonic()

    def start(self, tag: int) -> None:
        now = self._step(+1)
        self.started += 1
        self.order.append(tag)
        if self._idle_since:
            self.handovers_us.append((now - self._idle_since.popleft()) * 1e6)

    def complete(self) -> None:
        self.completed += 1
        self._idle_since.append(self._step(-1))

    def abort(self, tag: int) -> None:
        self.aborted += 1
        self.aborted_at[tag] = self._step(-1)

    def document(self) -> dict[str, Any]:
        now = self._step(0)
        return {"now": now, **{name: value for name, value in vars(self).items() if not name.startswith("_")}}

    def _step(self, change: int) -> float:
        now = time.monotonic()
        self.busy_seconds += self.in_flight * (now - self._last_step_at)
        self._last_step_at = now
        self.in_flight += change
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        return now


class Stub:
    """What all connections share: how to behave, and the account."""

    def __init__(self) -> None:
        self.account = Account()
        self.hold_seconds = 0.0
        self.interval_seconds = 0.01
        self.events = 0
        self.engines = 1
        self.padding: bytes | None = None

    def control(self, path: bytes, body: bytes) -> dict[str, Any]:
        if path == b"/__prepare" and not self.account.in_flight:
            order = json.loads(body)
            self.hold_seconds = order["hold_ms"] / 1000
            self.interval_seconds = order["interval_ms"] / 1000
            self.events = order["events"]
            self.engines = order["engines"]
            self.padding = None
            if order["event_bytes"]:
                self.padding = b"x" * max(0, order["event_bytes"] - len(SHORT_CHUNK % (time.monotonic_ns(), b"")))
            self.account = Account()
        return self.account.document()


class StubConnection(asyncio.Protocol):
    """One connection: requests one after the other, as a gateway's upstream side sends them."""

    def __init__(self, stub: Stub, loop: asyncio.AbstractEventLoop) -> None:
        self._stub = stub
        self._loop = loop
        self._buffer = bytearray()
        self._wanted_bytes = 0
        self._tag = 0
        self._timer: asyncio.TimerHandle | None = None
        self._events_left = 0
        self._events_sent = 0
        self._next_at = 0.0
        self._include_usage = self._continuous_usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an instance of asyncio's class: uvloop's transports only behave like it.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._stub.account.abort(self._tag)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) < self._wanted_bytes:
            return
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._buffer[:head_end])
        found = LENGTH.search(head)
        self._wanted_bytes = head_end + 4 + (int(found[1]) if found else 0)
        if len(self._buffer) < self._wanted_bytes:
            return
        body = bytes(self._buffer[head_end + 4 : self._wanted_bytes])
        del self._buffer[: self._wanted_bytes]
        self._wanted_bytes = 0
        path = head.split(b" ", 2)[1]
        if path.startswith(b"/__"):
            self._write_document(json.dumps(self._stub.control(path, body)).encode())
        elif head.startswith(b"GET "):
            self._write_document(MODELS)
        else:
            self._begin(body)

    def _begin(self, body: bytes) -> None:
        found = TAG.search(body)
        self._tag = int(found[1]) if found else 0
        self._stub.account.start(self._tag)
        if STREAM.search(body):
            self._events_left = self._stub.events
            self._events_sent = 0
            self._include_usage = INCLUDE_USAGE.search(body) is not None
            self._continuous_usage = CONTINUOUS_USAGE.search(body) is not None
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n" + self._chunk(FIRST_CHOICE)
            )
            self._next_at = self._first_event_at()
            self._schedule_event()
        elif self._stub.hold_seconds:
            self._timer = self._loop.call_later(self._stub.hold_seconds, self._finish_whole)
        else:
            self._finish_whole()

    def _finish_whole(self) -> None:
        self._timer = None
        self._stub.account.complete()
        self._write_document(WHOLE % time.monotonic_ns())

    def _first_event_at(self) -> float:
        """In the phase that belongs to the tag, whenever the stream was asked for.

        An engine sends the tokens of all its sequences in one step, and how many come at the same time decides what
        each costs a gateway.  So that must not hang on how fast the streams were started: here the steps of ``engines``
        follow each other, and with ten, of 32 streams three or four send at a time.
        """
        interval = self._stub.interval_seconds
        now = time.monotonic()
        return now - now % interval + interval * (1 + self._tag % self._stub.engines / self._stub.engines)

    def _schedule_event(self) -> None:
        self._timer = self._loop.call_later(max(0.0, self._next_at - time.monotonic()), self._send_event)

    def _send_event(self) -> None:
        if self._events_left:
            self._events_left -= 1
            self._events_sent += 1
            self._stub.account.events += 1
            if self._stub.padding is None:
                self._transport.write(self._chunk(CHOICE % time.monotonic_ns()))
            else:
                self._transport.write(self._framed(SHORT_CHUNK % (time.monotonic_ns(), self._stub.padding)))
            # From the time at which this one was due, not sent: the pace holds when the machine is busy.
            self._next_at += self._stub.interval_seconds
            self._schedule_event()
            return
        self._timer = None
        self._stub.account.complete()
        usage = self._framed(CHUNK % (b"[]", self._usage())) if self._include_usage else b""
        self._transport.write(self._chunk(LAST_CHOICE) + usage + self._framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _chunk(self, choice: bytes) -> bytes:
        return self._framed(CHUNK % (choice, self._usage() if self._continuous_usage else b""))

    def _usage(self) -> bytes:
        return USAGE % (20 + self._events_sent, self._events_sent)

    @staticmethod
    def _framed(payload: bytes) -> bytes:
        """One HTTP chunk for each event, as uvicorn sends them."""
        return b"%x\r\n%b\r\n" % (len(payload), payload)

    def _write_document(self, document: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(document), document)
        )


async def serve() -> None:
    loop = asyncio.get_running_loop()
    stub = Stub()
    server = await loop.create_server(lambda: StubConnection(stub, loop), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    async with server:
        await ended.wait()


if __name__ == "__main__":
    uvloop.run(serve())
