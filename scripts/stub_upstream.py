#!/usr/bin/env python3
"""A stub of a vLLM server: it says a few sentences, holds its sequence slot meanwhile, and keeps an account of both.

It needs nothing but Python.  What it answers has the shape of a real vLLM's answers, whole and streamed:

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings
    GET  /v1/models, /health
    GET  /__stats    the account, as JSON
    POST /__reset    begin the account anew (what is in flight stays in flight)

The account is what a gateway in front is judged by:

    in_flight, max_in_flight    requests, from their last byte read to their answer's last byte written
    sequences, max_sequences    the engine slots these take: n times the number of prompts
    started, completed, aborted    an abort is a peer that closed before its answer was whole
    order, aborted_order        the NNN of every "tag:NNN" found in a body, in order of arrival and of abort

With --log, every change of it becomes a line with ``max_concurrent=N in_flight=M``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from types import TracebackType
from typing import IO, Any

TEXT = (
    "Hello! I am a stub: I hold a sequence slot for a while, say these few sentences word by word, and let go. "
    "While I speak, no more of us speak at once than the gateway’s cap allows; everyone else waits in line, "
    "in the order in which they came. Ask again, and watch the queue."
)
WORDS = re.findall(r"\s*\S+", TEXT)
FINGERPRINT = "vllm-0.32.0-stub"
TAG = re.compile(rb"tag:(\d+)")

JSON = dict[str, Any]


# -- the account ----------------------------------------------------------------------------------------------------


@dataclass
class Account:
    """What has reached this server; ``log`` gets a line per change."""

    log: IO[str] | None
    in_flight: int = 0
    sequences: int = 0
    max_in_flight: int = 0
    max_sequences: int = 0
    started: int = 0
    completed: int = 0
    aborted: int = 0
    order: list[int] = field(default_factory=list)
    aborted_order: list[int] = field(default_factory=list)

    def reset(self) -> None:
        self.max_in_flight, self.max_sequences = self.in_flight, self.sequences
        self.started = self.completed = self.aborted = 0
        self.order, self.aborted_order = [], []
        self.note("reset")

    def stats(self) -> JSON:
        return {name: value for name, value in vars(self).items() if name != "log"}

    def note(self, event: str) -> None:
        if self.log is not None:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
            self.log.write(f"{stamp} max_concurrent={self.max_in_flight} in_flight={self.in_flight} {event}\n")
            self.log.flush()


class Held:
    """One request in flight; it leaves the account once, by whichever end comes first."""

    def __init__(self, account: Account, request: Request, sequences: int) -> None:
        self.account = account
        self.sequences = sequences
        found = TAG.search(request.body)
        self.tag = int(found[1]) if found else None
        self.label = request.path if self.tag is None else f"{request.path} tag={self.tag}"
        self.over = False

    def __enter__(self) -> Held:
        account = self.account
        account.in_flight += 1
        account.sequences += self.sequences
        account.max_in_flight = max(account.max_in_flight, account.in_flight)
        account.max_sequences = max(account.max_sequences, account.sequences)
        account.started += 1
        if self.tag is not None:
            account.order.append(self.tag)
        account.note(f"started {self.label}")
        return self

    def completed(self) -> None:
        if self._left():
            self.account.completed += 1
            self.account.note(f"completed {self.label}")

    def aborted(self) -> None:
        if self._left():
            self.account.aborted += 1
            if self.tag is not None:
                self.account.aborted_order.append(self.tag)
            self.account.note(f"aborted {self.label}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.aborted()

    def _left(self) -> bool:
        if self.over:
            return False
        self.over = True
        self.account.in_flight -= 1
        self.account.sequences -= self.sequences
        return True


# -- what is answered -----------------------------------------------------------------------------------------------


class Refused(Exception):
    """An error as vLLM words it."""

    def __init__(self, status: HTTPStatus, message: str, kind: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        error = {"message": message, "type": kind or status.phrase, "param": param, "code": status.value}
        self.document = {"error": error}


def invalid(kind: str, where: str, message: str, given: str, **context: str) -> Refused:
    """A validation error in the words of vLLM, which are Python's for a dict."""
    detail: JSON = {"type": kind, "loc": where, "msg": message, "input": given}
    if context:
        detail["ctx"] = context
    return Refused(HTTPStatus.BAD_REQUEST, f"1 validation error:\n  {detail}", param=where)


@dataclass(frozen=True)
class Answer:
    """An answer to one request, both ways: ``document`` whole, or ``opening``, ``steps`` and ``closing`` as a stream.

    Each step holds the events of one moment; together they take as long as the whole document would.
    """

    sequences: int
    document: JSON
    opening: list[bytes]
    steps: list[list[bytes]]
    closing: list[bytes]


@dataclass(frozen=True)
class Asked:
    """A request's document, with the members all endpoints read the same way."""

    body: JSON
    model: str
    words: list[str]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def copies(self) -> int:
        return self.number("n") or 1

    def number(self, name: str) -> int | None:
        value = self.body.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", message, str(value))

    def required(self, name: str) -> Any:
        if name not in self.body:
            raise invalid("missing", f"body.{name}", "Field required", f"<dict of {len(self.body)} items>")
        return self.body[name]

    def said(self, *limits: str) -> tuple[list[str], str]:
        """The words of the answer, and why it ends, given the members that may limit it."""
        given = [limit for name in limits if (limit := self.number(name)) is not None]
        if given and min(given) < len(self.words):
            return self.words[: max(1, min(given))], "length"
        return self.words, "stop"

    def usage_wanted(self) -> tuple[bool, bool]:
        """Whether a stream tells its usage at the end, and whether with every event."""
        options = self.body.get("stream_options") or {}
        at_end = bool(options.get("include_usage"))
        return at_end, at_end and bool(options.get("continuous_usage_stats"))


def compact(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def event(document: JSON) -> bytes:
    return b"data: " + compact(document) + b"\n\n"


def events(documents: list[JSON]) -> list[bytes]:
    return [event(document) for document in documents]


def nulls(names: str) -> JSON:
    """The members a real answer has without saying anything by them."""
    return dict.fromkeys(names.split())


DONE = b"data: [DONE]\n\n"
serial = itertools.count(1)


def new_id(prefix: str) -> str:
    return f"{prefix}{next(serial):016x}"


def tokens_in(content: Any) -> int:
    """A prompt's size as this server's tokeniser sees it: words."""
    if isinstance(content, str):
        return len(content.split())
    if isinstance(content, dict):
        return sum(tokens_in(value) for value in content.values())
    if isinstance(content, list):
        return sum(tokens_in(item) for item in content)
    return 1


def chat_usage(prompt: int, completion: int) -> JSON:
    return {**completion_usage(prompt, completion), "completion_tokens_details": {"reasoning_tokens": 0}}


def completion_usage(prompt: int, completion: int) -> JSON:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def completion_ends(head: JSON, last: JSON, usage: JSON | None) -> list[bytes]:
    """The end of a completion stream; without usage, the fingerprint sits on ``last``, the event that comes before."""
    if usage is None:
        last["system_fingerprint"] = FINGERPRINT
        return [DONE]
    return [event({**head, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}), DONE]


def chat(asked: Asked) -> Answer:
    prompt = tokens_in(asked.required("messages"))
    words, reason = asked.said("max_tokens", "max_completion_tokens")
    copies = range(asked.copies)
    head = {"id": new_id("chatcmpl-"), "object": "chat.completion", "created": int(time.time()), "model": asked.model}

    message = {"role": "assistant", "content": "".join(words)}
    message |= nulls("refusal annotations audio function_call reasoning")
    end = {"logprobs": None, "finish_reason": reason, **nulls("stop_reason token_ids routed_experts")}
    usage = chat_usage(prompt, len(words) * len(copies))
    document = {
        **head,
        "choices": [{"index": index, "message": message, **end} for index in copies],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": {**completion_usage(prompt, usage["completion_tokens"]), "prompt_tokens_details": None, **usage},
        **nulls("prompt_logprobs prompt_token_ids prompt_text kv_transfer_params ec_transfer_params metrics"),
    }

    usage_at_end, usage_always = asked.usage_wanted()
    head["object"] = "chat.completion.chunk"

    def chunk(index: int, delta: JSON, said: int, **ending: str | None) -> JSON:
        made = {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, **ending}]}
        return made | {"usage": chat_usage(prompt, said)} if usage_always else made

    role = {"role": "assistant", "content": ""}
    opening = [chunk(i, role, 0, finish_reason=None) | nulls("prompt_token_ids prompt_text") for i in copies]
    steps = []
    for said, word in enumerate(words, 1):
        last = {"finish_reason": reason, "stop_reason": None} if said == len(words) else {"finish_reason": None}
        steps.append([chunk(i, {"content": word}, said, **last, token_ids=None) for i in copies])
    closing = completion_ends(head, steps[-1][-1], usage if usage_at_end else None)
    return Answer(len(copies), document, events(opening), [events(step) for step in steps], closing)


def completions(asked: Asked) -> Answer:
    given = asked.required("prompt")
    prompt = tokens_in(given)
    several = isinstance(given, list) and all(isinstance(item, (str, list)) for item in given)
    words, reason = asked.said("max_tokens")
    copies = range((len(given) if several else 1) * asked.copies)
    head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": asked.model}

    end = nulls("stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts")
    choice = {"text": "".join(words), "logprobs": None, "finish_reason": reason, **end}
    usage = completion_usage(prompt, len(words) * len(copies))
    document = {
        **head,
        "choices": [{"index": index, **choice} for index in copies],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": {**usage, **nulls("prompt_tokens_details completion_tokens_details")},
        **nulls("kv_transfer_params ec_transfer_params metrics"),
    }

    usage_at_end, usage_always = asked.usage_wanted()
    steps = []
    for said, word in enumerate(words, 1):
        choice = {"text": word, "logprobs": None, "finish_reason": reason if said == len(words) else None}
        choice |= nulls("stop_reason prompt_token_ids token_ids")
        told = {"usage": completion_usage(prompt, said)} if usage_always else {}
        steps.append([{**head, "choices": [{"index": index, **choice}], **told} for index in copies])
    closing = completion_ends(head, steps[-1][-1], usage if usage_at_end else None)
    return Answer(len(copies), document, [], [events(step) for step in steps], closing)


RESPONSE: JSON = json.loads("""{
    "id": null, "created_at": null, "incomplete_details": null, "instructions": null, "metadata": null, "model": null,
    "object": "response", "output": [], "parallel_tool_calls": true, "temperature": 1.0, "tool_choice": "none",
    "tools": [], "top_p": 1.0, "background": false, "max_output_tokens": null, "max_tool_calls": null,
    "previous_response_id": null, "prompt": null, "reasoning": null, "service_tier": "auto", "status": "in_progress",
    "text": null, "top_logprobs": null, "truncation": "disabled", "usage": null, "user": null, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "kv_transfer_params": null, "ec_transfer_params": null, "input_messages": null,
    "output_messages": null
}""")
RESPONSE_USAGE: JSON = json.loads("""{
    "input_tokens": 0,
    "input_tokens_details":
    {"cached_tokens": 0, "cache_write_tokens": 0, "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
    "output_tokens": 0,
    "output_tokens_details":
    {"reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []},
    "total_tokens": 0
}""")


def responses(asked: Asked) -> Answer:
    prompt = tokens_in(asked.required("input"))
    words, reason = asked.said("max_output_tokens")
    text = "".join(words)
    item_id = new_id("msg_")

    def item(status: str, content: list[JSON]) -> JSON:
        return {"id": item_id, "content": content, "role": "assistant", "status": status, "type": "message"}

    def part(text: str, logprobs: list[JSON] | None) -> JSON:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    begun = RESPONSE | {"id": new_id("resp_"), "created_at": int(time.time()), "model": asked.model}
    begun["max_output_tokens"] = asked.number("max_output_tokens")
    ended = begun | {"status": "completed", "output": [item("completed", [part(text, None)])]}
    if reason == "length":
        ended |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    counts = {"input_tokens": prompt, "output_tokens": len(words), "total_tokens": prompt + len(words)}
    ended["usage"] = RESPONSE_USAGE | counts

    numbers = itertools.count()

    def told(kind: str, **members: Any) -> bytes:
        members |= {"sequence_number": next(numbers), "type": kind}
        return b"event: %s\n" % kind.encode() + event(dict(sorted(members.items())))

    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    opening = [
        told("response.created", response=begun),
        told("response.in_progress", response=begun),
        told("response.output_item.added", item=item("in_progress", []), output_index=0),
        told("response.content_part.added", part=part("", []), **place),
    ]
    steps = [[told("response.output_text.delta", delta=word, logprobs=[], **place)] for word in words]
    closing = [
        told("response.output_text.done", text=text, logprobs=[], **place),
        told("response.content_part.done", part=part(text, None), **place),
        told("response.output_item.done", item=item("completed", [part(text, None)]), output_index=0),
        told("response.completed", response=ended),
    ]
    return Answer(1, ended, opening, steps, closing)


def embeddings(asked: Asked) -> Answer:
    given = asked.required("input")
    inputs = given if isinstance(given, list) and any(isinstance(item, (str, list)) for item in given) else [given]
    data = []
    for index, text in enumerate(inputs):
        digest = hashlib.sha256(json.dumps(text).encode()).digest()
        vector: list[float] | str = [(byte - 127.5) / 127.5 for byte in digest]
        if asked.body.get("encoding_format") == "base64":
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"index": index, "object": "embedding", "embedding": vector})
    usage = completion_usage(tokens_in(given), 0) | {"prompt_tokens_details": None}
    head = {"id": new_id("embd-"), "object": "list", "created": int(time.time()), "model": asked.model}
    return Answer(len(inputs), head | {"data": data, "usage": usage}, [], [], [])


ENDPOINTS: dict[str, Callable[[Asked], Answer]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
}


@dataclass(frozen=True)
class Engine:
    """What was asked for on the command line, and the account."""

    models: list[str]
    hold_seconds: float
    words: list[str]
    account: Account
    created: int = field(default_factory=lambda: int(time.time()))

    def asked(self, body: bytes) -> Asked:
        try:
            document = json.loads(body)
        except json.JSONDecodeError as error:
            where = f"body.{error.pos}"
            raise invalid("json_invalid", where, "JSON decode error", "<dict of 0 items>", error=error.msg) from None
        except UnicodeDecodeError:
            raise invalid("json_invalid", "body", "JSON decode error", "<bytes>", error="Not UTF-8") from None
        if not isinstance(document, dict):
            raise invalid("dict_type", "body", "Input should be a valid dictionary", type(document).__name__)
        model = document.get("model") or self.models[0]
        if model not in self.models:
            message = f"The model `{model}` does not exist. Valid aliases: {', '.join(self.models)}."
            raise Refused(HTTPStatus.NOT_FOUND, message, "NotFoundError", "model")
        return Asked(document, model, self.words)

    def model_list(self) -> JSON:
        cards = []
        for model in self.models:
            card = {"id": model, "object": "model", "created": self.created, "owned_by": "vllm", "root": model}
            cards.append(card | {"parent": None, "max_model_len": 32768, "permission": []})
        return {"object": "list", "data": cards}


# -- HTTP -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes
    keep_alive: bool


class Unreadable(Exception):
    """Not a request this server can read."""


def take_request(received: bytearray) -> Request | None:
    """The first request in ``received``, taken out of it; None until it is all there."""
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    first, *lines = received[:head_end].decode("latin-1").split("\r\n")
    try:
        method, target, version = first.split(" ")
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            whole = read_chunked(received, head_end + 4)
        else:
            end = head_end + 4 + int(headers.get("content-length", "0"))
            whole = None if len(received) < end else (bytes(received[head_end + 4 : end]), end)
    except ValueError:
        raise Unreadable from None
    if whole is None:
        return None
    body, used = whole
    del received[:used]
    close = "close" in headers.get("connection", "").lower() or version == "HTTP/1.0"
    return Request(method, target.partition("?")[0], body, not close)


def read_chunked(received: bytearray, at: int) -> tuple[bytes, int] | None:
    """A chunked body that begins at ``at``, and where it ends; None until it is all there."""
    body = bytearray()
    while (line_end := received.find(b"\r\n", at)) >= 0:
        size = int(received[at:line_end].partition(b";")[0], 16)
        at = line_end + 2
        if size == 0:
            # Trailers are skipped: an empty line ends them, and it may be the very next one.
            end = received.find(b"\r\n\r\n", line_end)
            return None if end < 0 else (bytes(body), end + 4)
        if len(received) < at + size + 2:
            return None
        body += received[at : at + size]
        at += size + 2
    return None


class Server(asyncio.Protocol):
    """One connection: requests one after another, each answered by a task that ends when the peer closes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.received = bytearray()
        self.task: asyncio.Task[None] | None = None
        self.held: Held | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.held is not None:
            self.held.aborted()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.proceed()

    def proceed(self) -> None:
        while self.task is None and not self.transport.is_closing():
            try:
                request = take_request(self.received)
            except Unreadable:
                self.send_head(HTTPStatus.BAD_REQUEST, "text/plain; charset=utf-8", 0, keep_alive=False)
                return
            if request is None:
                return
            self.respond(request)

    def respond(self, request: Request) -> None:
        account = self.engine.account
        match request.method, request.path:
            case "GET", "/v1/models":
                self.send_whole(request, self.engine.model_list())
            case "GET", "/health":
                self.send_head(HTTPStatus.OK, None, 0, request.keep_alive)
            case "GET", "/__stats":
                self.send_whole(request, account.stats())
            case "POST", "/__reset":
                account.reset()
                self.send_whole(request, account.stats())
            case "POST", path if path in ENDPOINTS:
                try:
                    asked = self.engine.asked(request.body)
                    answer = ENDPOINTS[path](asked)
                except Refused as refused:
                    self.send_whole(request, refused.document, refused.status)
                else:
                    self.task = asyncio.get_running_loop().create_task(self.work(request, answer, asked.stream))
            case _, path:
                known = path in ENDPOINTS or path in ("/v1/models", "/health", "/__stats", "/__reset")
                status = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
                self.send_whole(request, Refused(status, status.phrase).document, status)

    async def work(self, request: Request, answer: Answer, stream: bool) -> None:
        with Held(self.engine.account, request, answer.sequences) as self.held:
            if stream and answer.steps:
                await self.stream(request, answer)
            else:
                await asyncio.sleep(self.engine.hold_seconds)
                self.held.completed()
                self.send_whole(request, answer.document)
        self.held = self.task = None
        self.proceed()

    async def stream(self, request: Request, answer: Answer) -> None:
        assert self.held is not None
        now = asyncio.get_running_loop().time
        began = now()
        self.send_head(HTTPStatus.OK, "text/event-stream; charset=utf-8", None, request.keep_alive)
        self.send_chunks(answer.opening)
        for number, events in enumerate(answer.steps, 1):
            due = began + self.engine.hold_seconds * number / len(answer.steps)
            await asyncio.sleep(max(0.0, due - now()))
            if number == len(answer.steps):
                # As in the engine, the slot is free before the end is heard of.
                self.held.completed()
                events = [*events, *answer.closing, b""]
            self.send_chunks(events)
        if not request.keep_alive:
            self.transport.close()

    def send_chunks(self, events: list[bytes]) -> None:
        """One chunk per event, as a real server sends them; the empty one ends the body."""
        self.transport.write(b"".join(b"%x\r\n%s\r\n" % (len(payload), payload) for payload in events))

    def send_whole(self, request: Request, document: JSON, status: HTTPStatus = HTTPStatus.OK) -> None:
        payload = compact(document)
        self.send_head(status, "application/json", len(payload), request.keep_alive, payload)

    def send_head(
        self, status: HTTPStatus, content_type: str | None, length: int | None, keep_alive: bool, payload: bytes = b""
    ) -> None:
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"date: {formatdate(usegmt=True)}", "server: uvicorn"]
        if length is not None:
            lines.append(f"content-length: {length}")
        if content_type is not None:
            lines.append(f"content-type: {content_type}")
        lines.append("vary: Origin")
        if length is None:
            lines.append("transfer-encoding: chunked")
        if not keep_alive:
            lines.append("connection: close")
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + payload)
        if length is not None and not keep_alive:
            self.transport.close()


# -- the command line -----------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--hold-seconds", type=float, default=0.0, help="how long an answer holds its slot")
    parser.add_argument("--events", type=int, help="words, and so stream events, per answer (default: all it can say)")
    parser.add_argument("--model", action="append", dest="models", help="a model it serves; may be repeated")
    parser.add_argument("--log", help="file that gets a line per change of the account")
    options = parser.parse_args()
    if options.events is not None and options.events < 1:
        parser.error("--events: at least 1")
    return options


async def serve(host: str, port: int, engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # Not as a context: on leaving it, Python 3.12 and later wait for the peers to close.
    server = await loop.create_server(lambda: Server(engine), host, port, backlog=1024)
    shown = f"[{host}]" if ":" in host else host
    print(f"listening on http://{shown}:{server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()
    server.close()


def words_for(events: int | None) -> Iterator[str]:
    """As many words as asked for, beginning again when there is no more to say."""
    return iter(WORDS) if events is None else itertools.islice(itertools.cycle(WORDS), events)


def main() -> int:
    options = parse_arguments()
    try:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(open(options.log, "a", encoding="utf-8")) if options.log else None
            words = list(words_for(options.events))
            engine = Engine(options.models or ["reasoning"], options.hold_seconds, words, Account(log))
            asyncio.run(serve(options.host, options.port, engine))
    except OSError as error:
        print(f"stub_upstream: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
