"""The middlewares around a handler that is a stand-in for the relay; the whole path is tested end to end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from pytest_aiohttp import AiohttpClient
from specimens import OCCUPANCY

from aiogw.auth import Authenticator
from aiogw.bodies import BodyBudget
from aiogw.canonical import CanonicalRequest, Engine
from aiogw.dialects import DIALECTS
from aiogw.errors import ClientGone, QueueFull
from aiogw.middleware import (
    CALL,
    BodyLimits,
    authenticate,
    canonicalise,
    detect_dialect,
    keep_record,
    render_errors,
)
from aiogw.record import RequestRecord
from aiogw.routing import Route, Routes

ROUTES = Routes(
    [Route(model="reasoning", upstream="reasoning", address="host:80", engine=Engine(model="reasoning"))], created=0
)
MAX_BODY_BYTES = 4096
LIMITS = BodyLimits(max_bytes=MAX_BODY_BYTES, timeout_seconds=5, min_bytes_per_second=65536)
BODY = {"model": "reasoning", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/llm/v1/messages"}
FULL = QueueFull(upstream="reasoning", retry_after_seconds=9, occupancy=OCCUPANCY)

Handle = Callable[[CanonicalRequest], Awaitable[None]]
Client = TestClient[web.Request, web.Application]


class Pipeline:
    """The middlewares as the gateway lines them up; ``handle`` is what comes behind them."""

    def __init__(self) -> None:
        self.records: asyncio.Queue[RequestRecord] = asyncio.Queue()
        self.seen: list[CanonicalRequest] = []
        self.handle: Handle | None = None
        self.budget = BodyBudget(limit_bytes=2 * MAX_BODY_BYTES)

    def application(self) -> web.Application:
        application = web.Application(
            middlewares=[
                keep_record(self.records.put_nowait),
                detect_dialect(DIALECTS),
                render_errors,
                authenticate(Authenticator(None)),
                canonicalise(routes=ROUTES, limits=lambda: LIMITS, budget=self.budget),
            ]
        )
        application.router.add_route("*", "/{path:.*}", self._behind)
        return application

    async def _behind(self, request: web.Request) -> web.Response:
        self.seen.append(request[CALL].request)
        if self.handle is not None:
            await self.handle(request[CALL].request)
        return web.Response(text="relayed")

    async def record(self) -> RequestRecord:
        """The record of the one request that there was."""
        async with asyncio.timeout(5):
            record = await self.records.get()
        assert self.records.empty()
        return record


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.fixture
async def client(pipeline: Pipeline, aiohttp_client: AiohttpClient) -> Client:
    return await aiohttp_client(pipeline.application())


each_surface = pytest.mark.parametrize(("surface", "path"), PATHS.items(), ids=list(PATHS))


@each_surface
async def test_a_request_arrives_in_canonical_form(pipeline: Pipeline, client: Client, surface: str, path: str) -> None:
    """The handler finds the call, and the record knows what it asks for."""
    async with client.post(path, json=BODY, headers={"x-request-id": "mine-1"}) as response:
        assert (200, "relayed") == (response.status, await response.text())
    (request,) = pipeline.seen
    assert (surface, "reasoning", True, 1) == (request.surface, request.model, request.stream, request.sequences)
    record = await pipeline.record()
    assert ("mine-1", surface, "POST", path, "reasoning", True, 1, len(json.dumps(BODY)), 200, "completed") == (
        record.request_id,
        record.surface,
        record.method,
        record.path,
        record.model,
        record.stream,
        record.sequences,
        record.request_bytes,
        record.status,
        record.outcome,
    )
    assert record.duration_seconds is not None


@each_surface
async def test_an_error_wears_the_surfaces_form(pipeline: Pipeline, client: Client, surface: str, path: str) -> None:
    """What the handler raises becomes the dialect's document, with the request's id, and the record's outcome."""

    async def refuse(_request: CanonicalRequest) -> None:
        raise FULL

    pipeline.handle = refuse
    async with client.post(path, json=BODY, headers={"x-request-id": "mine-1"}) as response:
        assert (503, "9", "mine-1") == (
            response.status,
            response.headers["retry-after"],
            response.headers["x-request-id"],
        )
        document = await response.json(content_type=None)
    assert FULL.message == document["error"]["message"]
    assert "mine-1" == document["request_id"]
    record = await pipeline.record()
    assert (503, "queue_full", surface) == (record.status, record.outcome, record.surface)
    assert record.response_bytes > 0


@each_surface
async def test_a_bug_is_told_without_its_words(
    pipeline: Pipeline, client: Client, surface: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets a fixed sentence, the log the traceback and the id to find it by."""

    async def fail(_request: CanonicalRequest) -> None:
        raise RuntimeError("the database password is hunter2")

    pipeline.handle = fail
    async with client.post(path, json=BODY, headers={"x-request-id": "mine-1"}) as response:
        assert 500 == response.status
        assert "hunter2" not in await response.text()
    assert "internal_error" == (await pipeline.record()).outcome
    (line,) = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert line.fields["request_id"] == "mine-1"  # type: ignore[attr-defined]
    assert line.exc_info


@each_surface
async def test_what_is_answered_here_goes_no_further(
    pipeline: Pipeline, client: Client, surface: str, path: str
) -> None:
    """Models are listed, and a wrong path is refused in the surface's form, without the handler."""
    mount = path.partition("/v1")[0] + "/v1"
    for tail, status in (("/models", 200), ("/models/reasoning", 200), ("/models/x", 404), ("/nothing", 404)):
        async with client.get(f"{mount}{tail}?limit=20") as response:
            assert status == response.status
            assert response.headers["x-request-id"].startswith("req_")
            assert "json" in response.content_type
        assert surface == (await pipeline.record()).surface
    assert [] == pipeline.seen


@each_surface
async def test_a_path_of_nobody_is_answered_by_the_first(
    pipeline: Pipeline, client: Client, surface: str, path: str
) -> None:
    """Below no mount the first dialect has the word, whichever the client meant."""
    async with client.post(f"/nowhere{path}", json=BODY) as response:
        assert (404, "application/problem+json") == (response.status, response.content_type)
    assert ("openai", "not_found") == ((record := await pipeline.record()).surface, record.outcome)


@each_surface
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_body_that_is_too_large(
    pipeline: Pipeline, client: Client, surface: str, path: str, chunked: bool
) -> None:
    """It is refused by its announced length, or as soon as too much has come."""

    async def pieces() -> object:
        for _ in range(5):
            yield b" " * 1000

    async with client.post(path, data=pieces() if chunked else b" " * 5000) as response:
        assert 413 == response.status
        assert f"{MAX_BODY_BYTES} bytes" in (await response.json(content_type=None))["error"]["message"]
    assert "request_too_large" == (await pipeline.record()).outcome
    assert [] == pipeline.seen


@each_surface
@pytest.mark.parametrize(("model", "logged"), [("gpt-4", "gpt-4"), ("ü" * 201, "ü" * 200)], ids=["short", "long"])
async def test_an_unknown_model_is_on_record(
    pipeline: Pipeline, client: Client, surface: str, path: str, model: str, logged: str
) -> None:
    """What was asked for is what the operator looks for, and no client fills the log with it."""
    async with client.post(path, json={**BODY, "model": model}) as response:
        assert 404 == response.status
    record = await pipeline.record()
    assert ("model_not_found", logged) == (record.outcome, record.model)
    assert [] == pipeline.seen


async def test_a_body_of_just_the_limit(pipeline: Pipeline, client: Client) -> None:
    """The limit itself is allowed."""
    body = json.dumps(BODY).encode()
    async with client.post(PATHS["openai"], data=body + b" " * (MAX_BODY_BYTES - len(body))) as response:
        assert 200 == response.status
    assert MAX_BODY_BYTES == (await pipeline.record()).request_bytes


async def test_a_body_that_cannot_be_unpacked(pipeline: Pipeline, client: Client) -> None:
    """A broken encoding is the client's fault."""
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    async with client.post(PATHS["openai"], data=b"this is not gzip", headers=headers) as response:
        assert 400 == response.status
    assert "invalid_body" == (await pipeline.record()).outcome
    assert [] == pipeline.seen


async def test_a_client_that_is_given_up(pipeline: Pipeline, client: Client) -> None:
    """Its connection is broken off, without a response that nobody would read, and the reason is told."""

    async def give_up(_request: CanonicalRequest) -> None:
        raise ClientGone(code="client_stalled")

    pipeline.handle = give_up
    with pytest.raises(aiohttp.ClientConnectionError):
        await client.post(PATHS["openai"], json=BODY)
    record = await pipeline.record()
    assert ("client_stalled", None, 0) == (record.outcome, record.status, record.response_bytes)


async def test_a_client_that_leaves(pipeline: Pipeline, client: Client) -> None:
    """The handler is cancelled, and the record says why there was no answer."""
    waiting = asyncio.Event()

    async def wait(_request: CanonicalRequest) -> None:
        waiting.set()
        await asyncio.Event().wait()

    pipeline.handle = wait
    post = asyncio.ensure_future(client.post(PATHS["openai"], json=BODY))
    async with asyncio.timeout(5):
        await waiting.wait()
    post.cancel()
    with pytest.raises(asyncio.CancelledError):
        await post
    record = await pipeline.record()
    assert ("client_gone", None) == (record.outcome, record.status)
