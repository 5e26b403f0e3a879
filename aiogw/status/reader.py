"""The live view from outside: one status document, or one after the other for as long as somebody looks.

The feed is read with aiohttp-sse-client.  It would reconnect by itself after the end of a stream, but says nothing of
it until it has, and does not survive a gateway that is not back yet; so ``follow`` takes every end for one and begins
anew with a reader of its own, which also forgets half an event.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import BaseConnector, ClientError, ClientSession, ClientTimeout, TCPConnector, UnixConnector
from attrs import frozen

from aiogw.status.snapshot import Document, merge

ASK_SECONDS = 10.0
# The feed says something every two seconds, if only that there is nothing to say.
SILENCE_SECONDS = 8.0
RECONNECT_SECONDS = 0.25
# So often a gateway is asked that answers, but has no feed for one more.
ASK_AGAIN_SECONDS = 2.0
# A line of the feed is a whole document; aiohttp's reader refuses lines of twice this size.
LINE_BYTES = 1 << 22


class CannotAsk(Exception):
    """Nobody answers there, or not as a gateway would; the text says which."""


@frozen
class AdminAddress:
    """``http://HOST:PORT``, ``HOST:PORT`` or ``unix:/PATH``."""

    text: str

    @property
    def url(self) -> str:
        if self.text.startswith("unix:"):
            return "http://localhost"
        return (self.text if "://" in self.text else f"http://{self.text}").rstrip("/")

    def connector(self) -> BaseConnector:
        if self.text.startswith("unix:"):
            return UnixConnector(path=self.text.removeprefix("unix:"))
        return TCPConnector()


async def ask(address: AdminAddress) -> Document:
    """The document of this moment; raises CannotAsk."""
    try:
        async with (
            ClientSession(connector=address.connector(), timeout=ClientTimeout(total=ASK_SECONDS)) as session,
            session.get(f"{address.url}/status.json") as response,
        ):
            if response.status != 200:
                raise CannotAsk(f"{address.text} answers with status {response.status}: is it the admin address?")
            document: Any = msgspec.json.decode(await response.read())
    except (ClientError, OSError, ValueError) as error:
        raise CannotAsk(f"{address.text} does not answer: {_reason(error)}") from None
    if not isinstance(document, dict) or "upstreams" not in document:
        raise CannotAsk(f"{address.text} has no status to tell")
    return document


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


def _lost() -> None:
    raise ConnectionError("the feed has ended")


async def follow(address: AdminAddress) -> AsyncIterator[Document | None]:
    """The document, and again whenever it has changed; None, when the connection is lost or cannot be made; no end."""
    from aiohttp_sse_client.client import EventSource

    # It logs each failed attempt as an error, into the middle of a terminal.
    logging.getLogger("aiohttp_sse_client").setLevel(logging.CRITICAL)
    async with ClientSession(connector=address.connector()) as session:
        while True:
            document: Document = {}
            try:
                async with EventSource(
                    f"{address.url}/status/events",
                    session=session,
                    on_error=_lost,
                    # aiohttp's own time-out would end any stream after five minutes.
                    timeout=ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS),
                    read_bufsize=LINE_BYTES,
                ) as events:
                    async for event in events:
                        told = msgspec.json.decode(event.data)
                        document = told if event.type == "snapshot" else merge(document, told)
                        yield document
            except (ClientError, OSError, ValueError):
                told = None if document else await _glimpse(address)
                yield told
                await asyncio.sleep(RECONNECT_SECONDS if told is None else ASK_AGAIN_SECONDS)


async def _glimpse(address: AdminAddress) -> Document | None:
    """What a gateway says of this moment that has enough watchers."""
    try:
        return await ask(address)
    except CannotAsk:
        return None
