"""The test rig: a scripted upstream, two ways to start the gateway, a raw client, and the account they must all keep.

Nothing here uses an HTTP library, because tests want to say exactly which byte is sent when, and how a connection ends.
What the upstream saw is the oracle; the gateway's own gauges are compared with it and never believed alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import lines_dialect
import pytest
import tomli_w

from aiogw import config as aiogw_config
from aiogw.app import Gateway
from aiogw.canonical import ResponseHead
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import Dialect
from aiogw.errors import UpstreamFault
from aiogw.record import JsonFormatter

LOG_SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parent.parent / "etc" / "log.schema.json").read_text())
)
TRANSCRIPTS = Path(__file__).parent / "transcripts" / "vllm-0.32"

ALL_DIALECTS = (*DIALECTS, lines_dialect.LINES)
# Instead of the plain process, where a test is about the third dialect.
LINES_DAEMON = (str(Path(__file__).parent / "lines_daemon.py"),)
# The same with sockets that it inherits.
ACTIVATED_DAEMON = (str(Path(__file__).parent / "activated_daemon.py"),)

# Long enough for a loaded machine: it only ever passes in full when a test fails.
PATIENCE_SECONDS = 8.0

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates")

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


async def eventually(
    condition: Callable[[], Any], timeout: float = PATIENCE_SECONDS, *, what: str | Callable[[], str] = ""
) -> Any:
    """Wait until ``condition`` (a plain or an async function) returns something true, and return that."""
    deadline = time.monotonic() + timeout
    attempt = 0
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {timeout:g} s: {told or inspect.getsource(condition).strip()}")
        # Mostly it only takes a few turns of the loop; a daemon takes longer and wants the processor meanwhile.
        await asyncio.sleep(0 if attempt < 10 else min(0.002, attempt * 0.00005))
        attempt += 1


def make_certificate(directory: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate for ``name`` that signs itself, and its key."""
    paths = directory / f"{name}.pem", directory / f"{name}-key.pem"
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    command = ["openssl", "req", "-x509", *options, *names, "-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return paths


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def set_reset_on_close(sock: socket.socket) -> None:
    """Make the next close of ``sock`` an RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# -- what a vLLM says -----------------------------------------------------------------------------------------------


def chunk(delta: Mapping[str, Any] | None = None, *, finish: str | None = None, usage: bool = False) -> bytes:
    """One event of a chat stream, as vLLM writes it."""
    document: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1796095065,
        "model": "reasoning",
        "choices": [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }
    if usage:
        document["usage"] = {"prompt_tokens": 20, "total_tokens": 22, "completion_tokens": 2}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
FIRST_EVENT = chunk({"role": "assistant", "content": ""})
STREAM = (
    FIRST_EVENT,
    chunk({"content": "Hello"}),
    chunk({"content": " world"}),
    chunk({"content": ""}, finish="stop"),
    chunk(usage=True),
    DONE,
)
TEXT = "Hello world"
# What prompts, answers and keys of the tests are known by; no log of any test may have it.
SAID = re.compile(r"tag:\d|Hello|canary|sk-\w")
WHOLE = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1796095065,
        "model": "reasoning",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "reasoning": None, "tool_calls": []},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 20, "total_tokens": 22, "completion_tokens": 2},
    },
    separators=(",", ":"),
).encode()


def vllm_error(message: str, status: int) -> bytes:
    """The body of a refusal, as vLLM writes it."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 422: "UnprocessableEntityError"}
    error = {"message": message, "type": kinds.get(status, "InternalServerError"), "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def head(status: int, *headers: str, reason: str = "Whatever") -> bytes:
    """A response head; ``headers`` are whole lines."""
    return "\r\n".join((f"HTTP/1.1 {status} {reason}", *headers, "", "")).encode()


def whole(body: bytes, *headers: str, status: int = 200, content_type: str = "application/json") -> bytes:
    return head(status, f"content-type: {content_type}", f"content-length: {len(body)}", *headers) + body


def framed(data: bytes) -> bytes:
    """``data`` as one chunk of the chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
STREAM_HEAD = head(200, "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked", reason="OK")


# -- the upstream ---------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """One request as the upstream got it; ``raw`` is every byte of it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    raw: bytes

    @property
    def tag(self) -> int | None:
        found = re.search(rb"tag:(\d+)", self.body)
        return int(found[1]) if found else None

    def header(self, name: str) -> str | None:
        """The value of a field that must not come twice."""
        values = [value for given, value in self.headers if given == name]
        assert len(values) <= 1, (name, values)
        return values[0] if values else None


class Exchange:
    """One request at the upstream, and the means to answer it in whatever way a test can think of.

    In flight from the first byte of its head until ``finished`` (its response is all written) or ``aborted`` (its
    connection ended before).  Times are of the monotonic clock.
    """

    def __init__(self, connection: UpstreamConnection, request: Request) -> None:
        self.connection = connection
        self.request = request
        self.started_at = time.monotonic()
        self.finished_at: float | None = None
        self.aborted_at: float | None = None
        self.paused_at: float | None = None

    def __repr__(self) -> str:
        state = "aborted" if self.aborted else "finished" if self.finished else "in flight"
        return f"<Exchange tag={self.request.tag} {state}>"

    @property
    def tag(self) -> int | None:
        return self.request.tag

    @property
    def finished(self) -> bool:
        return self.finished_at is not None

    @property
    def aborted(self) -> bool:
        return self.aborted_at is not None

    def write(self, data: bytes) -> None:
        """Raw bytes, sent in this very call if the kernel has room."""
        self.connection.transport.write(data)

    def finish(self, data: bytes = b"") -> None:
        """Write the end of the response.  The account is settled first: the gateway may react to the bytes at once."""
        self._settle()
        self.write(data)
        self.connection.next_request()

    def answer(self, body: bytes = WHOLE, *headers: str, status: int = 200) -> None:
        self.finish(whole(body, *headers, status=status))

    def begin_stream(self, *events: bytes) -> None:
        self.write(STREAM_HEAD + b"".join(map(framed, events)))

    def event(self, event: bytes) -> None:
        self.write(framed(event))

    def end_stream(self, *events: bytes) -> None:
        self.finish(b"".join(map(framed, events)) + LAST_CHUNK)

    def stream(self, events: Iterable[bytes] = STREAM) -> None:
        self.begin_stream()
        self.end_stream(*events)

    def respond(self, *, stream: bool) -> None:
        """The standard answer, in either form."""
        self.stream() if stream else self.answer()

    def close(self) -> None:
        """End the connection in order, after what has been written: FIN."""
        self._settle()
        self.connection.transport.close()

    def reset(self) -> None:
        """Break the connection off: RST."""
        self._settle()
        self.connection.reset()

    def half_close(self) -> None:
        """Send FIN but go on reading."""
        self._settle()
        self.connection.transport.write_eof()

    def stop_reading(self) -> None:
        self.connection.transport.pause_reading()

    def _settle(self) -> None:
        if self.finished_at is None and self.aborted_at is None:
            self.finished_at = time.monotonic()
            self.connection.upstream.ended(self)


Script = Callable[[Exchange], Awaitable[None] | None]


class UpstreamConnection(asyncio.Protocol):
    """One connection at the upstream: requests one after another; a second one too early is a fault of the gateway."""

    def __init__(self, upstream: ScriptedUpstream) -> None:
        self.upstream = upstream
        self.transport: asyncio.Transport
        self.exchanges: list[Exchange] = []
        self.ended_by_peer_at: float | None = None
        self.closed = False
        self.received = 0
        self._buffer = bytearray()
        self._counted = False
        self._task: asyncio.Task[None] | None = None

    @property
    def current(self) -> Exchange | None:
        """The request that is in flight here."""
        last = self.exchanges[-1] if self.exchanges else None
        return None if last is None or last.finished or last.aborted else last

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX and sock.fileno() >= 0:
            set_reset_on_close(sock)
        self.transport.abort()

    def close(self) -> None:
        self.transport.close()

    def next_request(self) -> None:
        """Look at what came while the last request was in flight."""
        self._parse()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.upstream.connections.append(self)
        if self.upstream.greeting is not None:
            self.upstream.greeting(self)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._buffer += data
        if self.current is not None:
            self.upstream.violations.append(f"{data[:80]!r} came while {self.current} was in flight")
            return
        self._parse()

    def eof_received(self) -> bool:
        self._peer_ended()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._peer_ended()

    def _peer_ended(self) -> None:
        if self.ended_by_peer_at is None:
            self.ended_by_peer_at = time.monotonic()
        current = self.current
        if current is not None:
            current.aborted_at = self.ended_by_peer_at
            self.upstream.ended(current)
        if self._counted:
            # It left before its request was complete.
            self._counted = False
            self.upstream.in_flight -= 1
            self.upstream.incomplete += 1

    def _parse(self) -> None:
        if not self._buffer:
            return
        if not self._counted:
            self._counted = True
            self.upstream.in_flight += 1
            self.upstream.peak = max(self.upstream.peak, self.upstream.in_flight)
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        method, target, version = lines[0].split(" ")
        assert version == "HTTP/1.1"
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
        length = int(dict(headers)["content-length"])
        if self.upstream.on_head is not None and not self.exchanges:
            self.upstream.on_head(self)
        if len(self._buffer) < end + 4 + length:
            return
        raw = bytes(self._buffer[: end + 4 + length])
        del self._buffer[: end + 4 + length]
        self._counted = False
        exchange = Exchange(self, Request(method, target, headers, raw[end + 4 :], raw))
        self.exchanges.append(exchange)
        self.upstream.began(exchange)
        result = self.upstream.script(exchange) if self.upstream.script is not None else None
        if result is not None:
            self._task = asyncio.ensure_future(result)


class ScriptedUpstream:
    """A fake vLLM in the test's own loop.

    ``script`` is called with every request; without one (None) requests are held, and the test takes them from
    ``exchanges`` or with ``await exchange(n)`` and answers them itself.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.greeting: Callable[[UpstreamConnection], None] | None = None
        self.on_head: Callable[[UpstreamConnection], None] | None = None
        self.connections: list[UpstreamConnection] = []
        self.exchanges: list[Exchange] = []
        self.violations: list[str] = []
        self.in_flight = 0
        self.peak = 0
        self.incomplete = 0
        self.url = ""
        self.address: Address = ""
        self._server: asyncio.Server | None = None

    async def start(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: str | None = None,
        certificate: tuple[Path, Path] | None = None,
    ) -> ScriptedUpstream:
        """Listen; with a ``certificate`` and its key, speak TLS as ``localhost``."""
        loop = asyncio.get_running_loop()
        if path is not None:
            self._server = await loop.create_unix_server(lambda: UpstreamConnection(self), path)
            self.address = path
            self.url = f"unix:{path}"
        else:
            context = None
            if certificate is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*certificate)
            self._server = await loop.create_server(
                lambda: UpstreamConnection(self), host, port, backlog=1024, ssl=context
            )
            port = self._server.sockets[0].getsockname()[1]
            self.address = (host, port)
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            if context is not None:
                self.url = f"https://localhost:{port}"
        return self

    async def start_again(self) -> None:
        """After a stop, at the same address."""
        host, port = self.address
        assert isinstance(port, int)
        await self.start(host=host, port=port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self.connections:
            if not connection.closed:
                connection.transport.abort()
        await eventually(lambda: all(connection.closed for connection in self.connections))

    def began(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def ended(self, _exchange: Exchange) -> None:
        self.in_flight -= 1

    @property
    def tags(self) -> list[int | None]:
        """The tags of the requests in the order in which they were complete here."""
        return [exchange.tag for exchange in self.exchanges]

    @property
    def finished(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.finished]

    @property
    def aborted(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.aborted]

    @property
    def open_connections(self) -> list[UpstreamConnection]:
        return [connection for connection in self.connections if not connection.closed]

    async def exchange(self, number: int, timeout: float = PATIENCE_SECONDS) -> Exchange:
        """The request with this number, from 0, once it is there."""
        await eventually(lambda: len(self.exchanges) > number, timeout, what=lambda: f"{number} in {self.exchanges}")
        return self.exchanges[number]

    async def tagged(self, tag: int, timeout: float = PATIENCE_SECONDS) -> Exchange:
        """The request with this tag, once it is there."""

        def find() -> Exchange | None:
            return next((exchange for exchange in self.exchanges if exchange.tag == tag), None)

        return await eventually(find, timeout, what=lambda: f"tag {tag} in {self.exchanges}")


def answer(exchange: Exchange) -> None:
    """A script: the standard answer, streamed if the request asks for it."""
    exchange.respond(stream=b'"stream":true' in exchange.request.body)


# -- the client -----------------------------------------------------------------------------------------------------


@dataclass
class Response:
    """What a client got.  ``complete``: the response ended as its framing says; ``reset``: an RST ended it."""

    status: int
    headers: list[tuple[str, str]]
    raw_head: bytes
    version: str
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = False
    reset: bool = False

    def header(self, name: str) -> str | None:
        """The value of a field that must not come twice."""
        values = [value for given, value in self.headers if given == name]
        assert len(values) <= 1, (name, values)
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """A client's connection: nothing is read unless a test asks for it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self.reset_seen = False

    @classmethod
    async def connect(cls, address: Address, *, receive_buffer: int | None = None) -> RawClient:
        unix = isinstance(address, str)
        family = socket.AF_UNIX if unix else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    async def send(self, data: bytes) -> None:
        await asyncio.wait_for(self._loop.sock_sendall(self.sock, data), PATIENCE_SECONDS)

    async def request(
        self, method: str, target: str, body: bytes | None = None, *headers: str, version: str = "1.1"
    ) -> None:
        """Send one request; ``headers`` are whole lines, and Host and Content-Length are only added if missing."""
        await self.send(request_bytes(method, target, body, *headers, version=version))

    async def post(self, target: str, body: bytes, *headers: str) -> None:
        await self.request("POST", target, body, "content-type: application/json", *headers)

    def close(self) -> None:
        """Leave with FIN (the kernel makes it an RST if something is left unread)."""
        self.sock.close()

    def reset(self) -> None:
        """Leave with RST."""
        if self.sock.family != socket.AF_UNIX:
            set_reset_on_close(self.sock)
        self.sock.close()

    def half_close(self) -> None:
        """Send FIN and go on listening."""
        self.sock.shutdown(socket.SHUT_WR)

    def leave(self, how: str) -> None:
        {"fin": self.close, "rst": self.reset, "half-close": self.half_close}[how]()

    async def read_head(self, timeout: float = PATIENCE_SECONDS) -> Response:
        """The head of the next response, interim ones included."""
        raw = await self._until(b"\r\n\r\n", timeout)
        lines = raw[:-4].decode("latin-1").split("\r\n")
        version, status, _reason = lines[0].split(" ", 2)
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
        return Response(status=int(status), headers=headers, raw_head=raw, version=version)

    async def response(self, timeout: float = PATIENCE_SECONDS, *, to: str = "POST") -> Response:
        """The whole next response, however it ends."""
        response = await self.read_head(timeout)
        await self.read_body(response, timeout, to=to)
        return response

    async def read_body(self, response: Response, timeout: float = PATIENCE_SECONDS, *, to: str = "POST") -> None:
        """The rest of ``response``, whose head has been read."""
        length = response.header("content-length")
        try:
            if response.header("transfer-encoding") == "chunked":
                while (data := await self.read_chunk(timeout)) != b"":
                    response.chunks.append(data)
                    response.body += data
                response.complete = True
            elif to == "HEAD" or response.status in (204, 304):
                response.complete = True
            elif length is not None:
                while len(response.body) < int(length):
                    response.body += await self._some(int(length) - len(response.body), timeout)
                response.complete = True
            else:
                while True:
                    response.body += await self._some(1 << 16, timeout)
        except EOFError:
            response.complete = length is None and response.header("transfer-encoding") is None
            response.reset = self.reset_seen

    async def read_chunk(self, timeout: float = PATIENCE_SECONDS) -> bytes:
        """The next chunk of a chunked body; empty for the last one."""
        line = await self._until(b"\r\n", timeout)
        size = int(line, 16)
        data = await self._exactly(size + 2, timeout)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def read_event(self, timeout: float = PATIENCE_SECONDS) -> bytes:
        """The next chunk, which is expected to be whole events."""
        data = await self.read_chunk(timeout)
        assert data.endswith(b"\n") or data == b"", data
        return data

    async def ended(self, timeout: float = PATIENCE_SECONDS) -> bool:
        """Wait for the end of the connection; False if bytes come instead."""
        try:
            self._buffer += await self._some(1 << 16, timeout)
        except EOFError:
            return True
        return False

    async def rest(self, timeout: float = PATIENCE_SECONDS) -> bytes:
        """All that comes until the end of the connection."""
        data = b""
        with contextlib.suppress(EOFError):
            while True:
                data += await self._some(1 << 16, timeout)
        return data

    def quiet(self) -> bool:
        """Whether nothing is there to be read, not even an end."""
        if self._buffer:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        return False

    async def _some(self, limit: int, timeout: float) -> bytes:
        """At least one byte; EOFError at the end of the connection."""
        if self._buffer:
            data, self._buffer = self._buffer[:limit], self._buffer[limit:]
            return data
        try:
            data = await asyncio.wait_for(self._loop.sock_recv(self.sock, limit), timeout)
        except ConnectionError:
            self.reset_seen = True
            raise EOFError from None
        if not data:
            raise EOFError
        return data

    async def _exactly(self, size: int, timeout: float) -> bytes:
        data = b""
        while len(data) < size:
            data += await self._some(size - len(data), timeout)
        return data

    async def _until(self, end: bytes, timeout: float) -> bytes:
        data = b""
        while end not in data:
            data += await self._some(1 << 16, timeout)
        found, _, rest = data.partition(end)
        self._buffer = rest + self._buffer
        return found + end


def request_bytes(method: str, target: str, body: bytes | None = None, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", *headers]
    names = {line.partition(":")[0].lower() for line in headers}
    if "host" not in names:
        lines.append("host: gateway.test")
    if body is not None and not names & {"content-length", "transfer-encoding"}:
        lines.append(f"content-length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


# -- the surfaces ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Surface:
    """How one surface asks, answers and refuses; all that the tests need to know of it."""

    name: str
    path: str

    def body(
        self, tag: int = 0, *, stream: bool = False, model: str = "reasoning", padding: int = 0, **more: Any
    ) -> bytes:
        """A request that says ``tag:N``, with ``padding`` bytes of more text."""
        text = f"tag:{tag} " + "x" * padding
        document: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}]}
        if self.name == "anthropic":
            document["max_tokens"] = 16
        if stream:
            document["stream"] = True
        return json.dumps(document | more, separators=(",", ":")).encode()

    @property
    def stream_type(self) -> str:
        return "text/event-stream; charset=utf-8"

    @property
    def models_path(self) -> str:
        return {"openai": "/v1/models", "anthropic": "/llm/v1/models"}[self.name]

    def text(self, response: Response) -> str:
        """What the model said in a complete response, whole or streamed."""
        streamed = (response.header("content-type") or "").startswith("text/event-stream")
        if self.name == "openai":
            if not streamed:
                return response.json["choices"][0]["message"]["content"]
            choices = [choice for document in _documents(response.body) for choice in document.get("choices", ())]
            return "".join(choice["delta"].get("content") or "" for choice in choices)
        if not streamed:
            return "".join(block["text"] for block in response.json["content"] if block["type"] == "text")
        deltas = [document["delta"] for document in _documents(response.body) if "delta" in document]
        return "".join(delta.get("text", "") for delta in deltas)

    def says_end(self, response: Response) -> bool:
        """Whether a stream told its client that the answer is all there."""
        return b"[DONE]" in response.body if self.name == "openai" else b'"message_stop"' in response.body

    def error(self, response: Response) -> dict[str, Any]:
        """The error of a refusal, after checking that the document has this surface's shape."""
        document = response.json
        if self.name == "openai":
            assert response.header("content-type") == "application/problem+json"
            assert document["status"] == response.status
            assert document["type"].startswith("urn:aiogw:problem:")
            assert document["title"]
            assert document["detail"] == document["error"]["message"]
            assert document["request_id"] == response.header("x-request-id")
        else:
            assert (response.header("content-type") or "").startswith("application/json")
            assert document["type"] == "error"
            assert document["request_id"] == response.header("request-id") == response.header("x-request-id")
        assert document["error"]["message"]
        assert document["error"]["type"]
        return document["error"]

    def code(self, response: Response) -> str | None:
        """The kind of a refusal as this surface tells it to programs; None where it has no such member."""
        if self.name != "openai":
            return None
        return response.json["type"].removeprefix("urn:aiogw:problem:").replace("-", "_")

    def in_band_error(self, response: Response) -> dict[str, Any] | None:
        """The error told inside a stream, if there is one; it must be the last event."""
        events = [event for event in response.body.split(b"\n\n") if event]
        for number, event in enumerate(events):
            data = b"".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
            if data in (b"", b"[DONE]"):
                continue
            document = json.loads(data)
            if "error" in document:
                assert number == len(events) - 1
                if self.name == "anthropic":
                    assert event.startswith(b"event: error\n")
                    assert document["type"] == "error"
                return document["error"]
        return None


def _documents(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[6:])


class LinesSurface(Surface):
    """The surface of tests/lines_dialect.py."""

    @property
    def stream_type(self) -> str:
        return "application/x-ndjson"

    @property
    def models_path(self) -> str:
        return "/lines/models"

    def body(
        self, tag: int = 0, *, stream: bool = False, model: str = "reasoning", padding: int = 0, **more: Any
    ) -> bytes:
        document: dict[str, Any] = {"model": model, "prompt": f"tag:{tag} " + "x" * padding}
        if stream:
            document["stream"] = True
        return json.dumps(document | more, separators=(",", ":")).encode()

    def text(self, response: Response) -> str:
        return "".join(json.loads(line).get("text", "") for line in response.body.splitlines())

    def says_end(self, response: Response) -> bool:
        return any("end" in json.loads(line) for line in response.body.splitlines())

    def error(self, response: Response) -> dict[str, Any]:
        (line,) = response.body.splitlines()
        document = json.loads(line)
        assert response.header("content-type") == "application/x-ndjson"
        assert document["request"] == response.header("x-request-id")
        assert document["kind"]
        return {"message": document["why"], "type": document["kind"]}

    def code(self, response: Response) -> str | None:
        kind = response.json["kind"]
        assert isinstance(kind, str)
        return kind

    def in_band_error(self, response: Response) -> dict[str, Any] | None:
        lines = [json.loads(line) for line in response.body.splitlines()]
        assert not any("kind" in line for line in lines[:-1])
        return {"message": lines[-1]["why"], "type": lines[-1]["kind"]} if lines and "kind" in lines[-1] else None


OPENAI = Surface("openai", "/v1/chat/completions")
ANTHROPIC = Surface("anthropic", "/llm/v1/messages")
LINES = LinesSurface("lines", "/lines/chat")
SURFACES = (OPENAI, ANTHROPIC, LINES)

everywhere = pytest.mark.parametrize(
    ("surface", "process"),
    [(OPENAI, False), (ANTHROPIC, False), (LINES, False), (OPENAI, True), (LINES, True)],
    ids=("openai", "anthropic", "lines", "openai-daemon", "lines-daemon"),
)
"""All surfaces with the gateway in the test's loop, and some with the real process."""

PLACES = ((OPENAI, False), (ANTHROPIC, False), (OPENAI, True))
"""The surfaces and whether the gateway is the real process, for tests that vary something else with it."""

everywhere_both_ways = pytest.mark.parametrize(
    ("surface", "stream", "process"),
    [
        (OPENAI, False, False),
        (OPENAI, True, False),
        (ANTHROPIC, False, False),
        (ANTHROPIC, True, False),
        (LINES, False, False),
        (LINES, True, False),
        (OPENAI, True, True),
    ],
    ids=(
        "openai-whole",
        "openai-stream",
        "anthropic-whole",
        "anthropic-stream",
        "lines-whole",
        "lines-stream",
        "openai-stream-daemon",
    ),
)
"""The same, whole and streamed."""


# -- the gateway ----------------------------------------------------------------------------------------------------

SERVER: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "admin_listen": "127.0.0.1:0",
    "max_connections": 800,
    "header_timeout_seconds": 10,
    "keepalive_timeout_seconds": 75,
    "body_timeout_seconds": 10,
    "body_min_bytes_per_second": 1 << 16,
    "max_body_bytes": 4 << 20,
    "body_memory_bytes": 64 << 20,
    "response_buffer_bytes": 1 << 16,
    "client_stall_timeout_seconds": 5,
    "drain_timeout_seconds": 5,
    "first_sign_seconds": 0,
    "sign_interval_seconds": 10,
    "models_refresh_seconds": 0,
    "log_level": "info",
    "log_format": "json",
}
ADMISSION: dict[str, Any] = {
    "engine_slots": 8,
    "cap": 1,
    "queue_limit": 8,
    "queue_timeout_seconds": 10,
    "retry_after_min_seconds": 1,
    "retry_after_max_seconds": 60,
    "abort_settle_seconds": 0,
}


def upstream_table(url: str, *, models: Iterable[str] = ("reasoning",), **changes: Any) -> dict[str, Any]:
    """The table of one upstream; ``changes`` are keys of it or of its admission."""
    table: dict[str, Any] = {
        "url": url,
        "models": list(models),
        "connect_timeout_seconds": 2,
        "first_byte_timeout_seconds": 10,
        "idle_timeout_seconds": 10,
    }
    admission: Any = dict(ADMISSION)
    for key, value in changes.items():
        if key == "admission":
            admission = value
        else:
            (admission if key in ADMISSION else table)[key] = value
    return table | {"admission": admission}


NO_KEYS = {"mode": "none"}


def configuration(
    upstreams: Mapping[str, Mapping[str, Any]], *, auth: Mapping[str, Any] = NO_KEYS, **server: Any
) -> str:
    return tomli_w.dumps({"server": SERVER | server, "auth": auth, "upstreams": upstreams})


class RunningGateway:
    """What both kinds have in common; ``address`` is where clients come in, ``admin_address`` where metrics are."""

    address: Address
    admin_address: Address

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.announced_errors: list[str] = []

    @property
    def url(self) -> str:
        assert not isinstance(self.address, str)
        return f"http://{self.address[0]}:{self.address[1]}"

    async def stop(self) -> None:
        raise NotImplementedError

    async def reload(self, text: str) -> bool:
        """Have it take ``text`` as its configuration; whether it did."""
        raise NotImplementedError

    def check_log(self) -> None:
        """After the stop: the log has no error that was not announced, and nothing of what was said."""
        raise NotImplementedError

    def expect_error(self, part: str) -> None:
        """Announce that the log will have an error that contains ``part``."""
        self.announced_errors.append(part)

    async def record(self, **members: Any) -> dict[str, Any]:
        """The log line of the request that has these members, once it is there."""

        def find() -> dict[str, Any] | None:
            return next((one for one in self.records if members.items() <= one.items()), None)

        return await eventually(find, what=lambda: f"{members} in {self.records}")

    async def admin(self, path: str) -> Response:
        client = await RawClient.connect(self.admin_address)
        try:
            await client.request("GET", path, None, "connection: close")
            return await client.response()
        finally:
            client.close()

    async def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        response = await self.admin("/metrics")
        assert response.status == 200
        # Read by hand, because this is asked for thousands of times; that others can read it is tested elsewhere.
        samples = re.findall(r"^(aiogw_\w+)(?:\{(.*)\})? (\S+)$", response.body.decode(), re.MULTILINE)
        return {
            (name, frozenset(re.findall(r'(\w+)="(.*?)"', labels))): float(value) for name, labels, value in samples
        }

    async def metric(self, name: str, **labels: str) -> float:
        return (await self.metrics()).get((name, frozenset(labels.items())), 0.0)

    async def waiting(self, count: int, upstream: str = "reasoning") -> None:
        """Wait until ``count`` requests are in the queue."""

        async def reached() -> bool:
            return await self.metric("aiogw_queue_requests", upstream=upstream) == count

        await eventually(reached, what=f"{count} waiting")

    async def settled(self) -> None:
        """Wait until no slot is held and nobody waits."""

        async def gauges() -> dict[Any, float]:
            names = ("aiogw_slots_in_use", "aiogw_queue_requests")
            return {key: value for key, value in (await self.metrics()).items() if key[0] in names and value}

        async def zero() -> bool:
            return not await gauges()

        await eventually(zero, what="all gauges at zero")


class InProcessGateway(RunningGateway):
    """In the test's own loop, which is asyncio's; through the composition root, so with the real runner."""

    def __init__(self, text: str, dialects: tuple[Dialect, ...]) -> None:
        super().__init__()
        self._text = text
        self._gateway = Gateway(self._read_config(), reread=self._read_config, dialects=dialects)
        self._errors: list[str] = []
        self._said: list[str] = []
        self._strange: list[str] = []
        self._handler = _Collect(self)
        self._logger = logging.getLogger()
        self._levels = (logging.getLogger("aiogw").level, self._logger.level)

    @property
    def gateway(self) -> Gateway:
        return self._gateway

    async def start(self) -> InProcessGateway:
        self._logger.addHandler(self._handler)
        logging.getLogger("aiogw").setLevel(logging.INFO)
        await self._gateway.start()
        self.address, self.admin_address = (_bound(address) for address in self._gateway.addresses)
        return self

    async def stop(self) -> None:
        await self._gateway.stop()

    async def reload(self, text: str) -> bool:
        self._text = text
        return await self._gateway.reload()

    def _read_config(self) -> aiogw_config.Config:
        return aiogw_config.loads(self._text)

    def check_log(self) -> None:
        self._logger.removeHandler(self._handler)
        logging.getLogger("aiogw").setLevel(self._levels[0])
        _check_errors(self._errors, self.announced_errors)
        assert not self._said, self._said[0]
        assert not self._strange, self._strange[0]

    def take(self, record: logging.LogRecord) -> None:
        line = JsonFormatter().format(record)
        if SAID.search(line):
            self._said.append(line)
        self._strange += _unlike_the_schema(line)
        if record.levelno >= logging.ERROR:
            self._errors.append(logging.Formatter().format(record))
        if record.name == "aiogw.access":
            self.records.append(record.fields)  # type: ignore[attr-defined]


class _Collect(logging.Handler):
    def __init__(self, gateway: InProcessGateway) -> None:
        super().__init__()
        self._take = gateway.take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)


class Daemon(RunningGateway):
    """The real process, on uvloop: ``python -m aiogw --config FILE``; ``lines`` is its log.

    ``program`` are other arguments for Python in place of ``-m aiogw``.  ``sockets`` are inherited as from systemd, and
    ``environment`` is added to ours.
    """

    def __init__(
        self,
        config_path: Path,
        *,
        program: tuple[str, ...] = ("-m", "aiogw"),
        sockets: Sequence[socket.socket] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.config_path = config_path
        self._descriptors = [sock.fileno() for sock in sockets]
        self._program = (*ACTIVATED_DAEMON, *map(str, self._descriptors), "--") if sockets else program
        self._environment = os.environ | dict(environment or {})
        self.lines: list[str] = []
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]

    async def start(self) -> Daemon:
        # A socket or a file that is left to the garbage collector shows in the log, which must not have it.
        options = ("-W", "always::ResourceWarning")
        command = (sys.executable, *options, *self._program, "--config", str(self.config_path))
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 22,
            pass_fds=self._descriptors,
            env=self._environment,
        )
        self._reading = asyncio.ensure_future(self._read())
        server = tomllib.loads(self.config_path.read_text())["server"]
        if server["log_level"] in ("debug", "info"):
            self.address = await self._announced("listening on ")
            self.admin_address = await self._announced("metrics and health on ")
        else:
            # It announces nothing, so it has to be a Unix socket, and its file says that it is there.
            self.address, self.admin_address = (server[key].removeprefix("unix:") for key in ("listen", "admin_listen"))
            await eventually(lambda: os.path.exists(self.admin_address), 20)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def exit_code(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Wait for its end."""
        try:
            code = await asyncio.wait_for(self._process.wait(), timeout)
        except TimeoutError:
            raise AssertionError(f"still running after {timeout:g} s:\n" + "\n".join(self.lines[-20:])) from None
        await self._reading
        return code

    async def reload(self, text: str) -> bool:
        said = len(self.lines)
        self.config_path.write_text(text)
        self.signal(signal.SIGHUP)

        def answer() -> re.Match[str] | None:
            lines = (re.search("the configuration is (not )?taken", line) for line in self.lines[said:])
            return next((line for line in lines if line), None)

        return (await eventually(answer, what="the configuration is taken, or not"))[1] is None

    async def stop(self) -> None:
        if self.running:
            self.signal(signal.SIGTERM)
        try:
            code = await self.exit_code()
        except BaseException:
            self._process.kill()
            await self._process.wait()
            await self._reading
            raise
        assert code == 0, "\n".join(self.lines)

    def check_log(self) -> None:
        # A line in neither format did not come from the log: a traceback, or Python's word about what was left open.
        fine = "(debug|info|warning)"
        good = re.compile(rf'\{{"time":"\S+","level":"{fine}",.*\}}|\S+Z {fine} [\w.]+: .*')
        _check_errors([line for line in self.lines if not good.fullmatch(line)], self.announced_errors)
        said = [line for line in self.lines if SAID.search(line)]
        assert not said, said[0]
        strange = [fault for line in self.lines if line.startswith("{") for fault in _unlike_the_schema(line)]
        assert not strange, strange[0]

    async def _read(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            text = line.decode().rstrip("\n")
            self.lines.append(text)
            if text.startswith("{"):
                document = json.loads(text)
                if document["logger"] == "aiogw.access":
                    self.records.append(document)

    async def _announced(self, phrase: str) -> Address:
        def find() -> re.Match[str] | None:
            if not self.running:
                raise AssertionError("it ended:\n" + "\n".join(self.lines))
            matches = (re.search(rf"{phrase}(?:unix:(/[^\" ]+)|https?://(.*):(\d+))", line) for line in self.lines)
            return next((match for match in matches if match), None)

        found = await eventually(find, 20, what=lambda: f"{phrase!r} in {self.lines}")
        return found[1] or (found[2].strip("[]"), int(found[3]))


def _bound(address: Any) -> Address:
    return address if isinstance(address, str) else (address[0], address[1])


def _unlike_the_schema(line: str) -> list[str]:
    return [f"{error.json_path}: {error.message} in {line}" for error in LOG_SCHEMA.iter_errors(json.loads(line))]


def _check_errors(errors: list[str], announced: list[str]) -> None:
    unannounced = [error for error in errors if not any(part in error for part in announced)]
    assert not unannounced, f"{len(unannounced)} errors in the log; first: " + "\n".join(unannounced[:2])


# -- all of it ------------------------------------------------------------------------------------------------------


class Rig:
    """Starts what a test needs, ends it in the right order, and checks that nothing is left behind.

    With ``third_dialect`` the real process serves lines_dialect.py, too; a gateway in the test's loop always does.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.third_dialect = False
        self._files_before = 0
        self._upstreams: list[ScriptedUpstream] = []
        self._gateways: list[RunningGateway] = []
        self._forgotten: list[RunningGateway] = []
        self._clients: list[RawClient] = []

    async def upstream(self, script: Script | None = None, **options: Any) -> ScriptedUpstream:
        upstream = await ScriptedUpstream(script).start(**options)
        self._upstreams.append(upstream)
        return upstream

    async def gateway(
        self,
        upstream: ScriptedUpstream | str,
        *,
        process: bool = False,
        dialects: tuple[Dialect, ...] = ALL_DIALECTS,
        others: Mapping[str, Mapping[str, Any]] | None = None,
        server: Mapping[str, Any] | None = None,
        auth: Mapping[str, Any] = NO_KEYS,
        **changes: Any,
    ) -> RunningGateway:
        """A gateway before ``upstream``, or an address; ``changes`` are keys of its table, ``server`` of [server]."""
        url = upstream if isinstance(upstream, str) else upstream.url
        tables = {"reasoning": upstream_table(url, **changes)} | dict(others or {})
        return await self.start(configuration(tables, auth=auth, **(server or {})), process=process, dialects=dialects)

    async def daemon(self, upstream: ScriptedUpstream | str, **options: Any) -> Daemon:
        gateway = await self.gateway(upstream, process=True, **options)
        assert isinstance(gateway, Daemon)
        return gateway

    async def activated(
        self,
        upstream: ScriptedUpstream,
        *,
        sockets: Sequence[socket.socket] = (),
        environment: Mapping[str, str] | None = None,
        server: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Daemon:
        """The real process as systemd starts it."""
        text = configuration({"reasoning": upstream_table(upstream.url, **changes)}, **(server or {}))
        daemon = Daemon(self.config_file(text), sockets=sockets, environment=environment)
        await daemon.start()
        self._gateways.append(daemon)
        return daemon

    def forget(self, gateway: RunningGateway) -> None:
        """The test stops ``gateway`` itself; its log is looked at all the same."""
        self._gateways.remove(gateway)
        self._forgotten.append(gateway)

    async def start(self, text: str, *, process: bool, dialects: tuple[Dialect, ...] = ALL_DIALECTS) -> RunningGateway:
        gateway: RunningGateway
        if process:
            path = self.config_file(text)
            gateway = Daemon(path, program=LINES_DAEMON) if self.third_dialect else Daemon(path)
        else:
            gateway = InProcessGateway(text, dialects)
        await gateway.start()  # type: ignore[attr-defined]
        self._gateways.append(gateway)
        return gateway

    def config_file(self, text: str) -> Path:
        path = self.directory / f"gateway-{len(self._gateways) + len(self._forgotten)}.toml"
        path.write_text(text)
        return path

    async def client(self, gateway: RunningGateway | Address, **options: Any) -> RawClient:
        address = gateway.address if isinstance(gateway, RunningGateway) else gateway
        client = await RawClient.connect(address, **options)
        self._clients.append(client)
        return client

    async def post(
        self, gateway: RunningGateway, surface: Surface, tag: int = 0, *headers: str, **more: Any
    ) -> RawClient:
        """A new client that has sent one request."""
        client = await self.client(gateway)
        await client.post(surface.path, surface.body(tag, **more), *headers)
        return client

    async def ask(
        self, gateway: RunningGateway, surface: Surface, tag: int = 0, *headers: str, **more: Any
    ) -> Response:
        """One request and its response, on a connection of its own."""
        client = await self.post(gateway, surface, tag, *headers, **more)
        response = await client.response()
        client.close()
        return response

    async def queued(
        self, gateway: RunningGateway, surface: Surface, tags: Iterable[int], *, before: int = 0, **more: Any
    ) -> list[RawClient]:
        """Clients whose requests wait in this order behind ``before`` others."""
        clients = []
        for number, tag in enumerate(tags):
            clients.append(await self.post(gateway, surface, tag, **more))
            await gateway.waiting(before + number + 1)
        return clients

    async def check_usable(self, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
        """As many requests as there are slots are served at once: whatever happened before gave every slot back."""
        cap = int(await gateway.metric("aiogw_slots_limit", upstream="reasoning"))
        upstream.script = None
        before = len(upstream.exchanges)
        clients = [await self.post(gateway, OPENAI, 900 + number) for number in range(cap)]
        await upstream.exchange(before + cap - 1)
        for exchange in upstream.exchanges[before:]:
            exchange.answer()
        for client in clients:
            response = await client.response()
            assert (response.status, response.complete) == (200, True)
            client.close()

    def begin(self) -> None:
        gc.collect(1)
        gc.disable()
        self._files_before = open_files()

    async def end(self) -> None:
        """Whatever the test did: every slot is back, nobody waits, the upstream is idle, no descriptor is left."""
        for client in self._clients:
            if not client.closed:
                client.close()
        async with contextlib.AsyncExitStack() as stack:
            for gateway in self._gateways + self._forgotten:
                stack.callback(gateway.check_log)
            # What was never awaited or retrieved is only told when it is collected.  The two young generations hold all
            # of this test's objects, since nothing was collected meanwhile; the rest of the process is not looked at.
            stack.callback(gc.enable)
            stack.callback(gc.collect, 1)
            for upstream in self._upstreams:
                stack.push_async_callback(upstream.stop)
            for gateway in self._gateways:
                stack.push_async_callback(gateway.stop)
            for gateway in self._gateways:
                if not isinstance(gateway, Daemon) or gateway.running:
                    await gateway.settled()
            for upstream in self._upstreams:
                await eventually(lambda upstream=upstream: upstream.in_flight == 0, what=f"{upstream.exchanges} ended")
                assert upstream.violations == []
        await eventually(lambda: open_files() <= self._files_before, what=_open_files_told)


def _open_files_told() -> str:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return "descriptors closed; open are " + ", ".join(names)


@contextlib.asynccontextmanager
async def rigged(directory: Path) -> AsyncIterator[Rig]:
    rig = Rig(directory)
    rig.begin()
    failed = True
    try:
        yield rig
        failed = False
    finally:
        try:
            await rig.end()
        except AssertionError:
            # A test that failed in its middle leaves a mess, which would only hide the reason.
            if not failed:
                raise


# -- one connection to an upstream, without a gateway ----------------------------------------------------------------


def resident_bytes(daemon: Daemon, *, peak: bool = False) -> int:
    """Now, or the most that ever was."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(re.findall(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)[0]) << 10


class Outcome:
    """What a connection tells of one response, checked as it comes: in order, and one end."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.data = b""
        self.steps = 0
        self.ended = False
        self.error: UpstreamFault | None = None
        self.untouched: bool | None = None
        self.over = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Outcome {self.head} {self.data[:40]!r} ended={self.ended} error={self.error}>"

    def response_step(self, head: ResponseHead | None, data: bytes, ended: bool) -> None:
        assert not self.over.is_set()
        assert (self.head is None) == (head is not None)
        self.head = self.head or head
        self.data += data
        self.steps += 1
        self.ended = ended
        if ended:
            self.over.set()

    def response_data(self, data: bytes) -> None:
        assert data
        self.response_step(None, data, False)

    def response_failed(self, error: UpstreamFault, *, untouched: bool | None = None) -> None:
        assert not self.over.is_set()
        self.error = error
        self.untouched = untouched
        self.over.set()

    async def end(self) -> Outcome:
        await asyncio.wait_for(self.over.wait(), PATIENCE_SECONDS)
        return self


class FakeTransport(asyncio.Transport):
    """A transport without a wire: what is written is kept, and closing is told in the next turn of the loop."""

    def __init__(self, protocol: asyncio.Protocol, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._protocol = protocol
        self._loop = loop
        self.sock: socket.socket | None = None
        self.written = b""
        self.unsent = 0
        self.reading = True
        self.closing = False
        self.aborted = False
        self.lost = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.written += b"".join(list_of_data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.sock if name == "socket" else default

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self._loop.call_soon(self.lose)

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def lose(self, error: Exception | None = None) -> None:
        """The connection has ended, whoever wanted it."""
        if not self.lost:
            self.closing = self.lost = True
            self._protocol.connection_lost(error)
