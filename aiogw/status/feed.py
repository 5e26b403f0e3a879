"""The feed: who watches gets a snapshot, then changes, at most five a second; who cannot follow, a snapshot again.

Nothing is read while nobody watches.  No watcher has a queue: there is one change for all, and one that has missed it
needs the next snapshot.  Nothing here may know what a document says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

import msgspec

from aiogw.status.snapshot import Document, difference

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.2
# With nothing to tell, this often it is said that there is nothing: a watcher cannot tell silence from a dead peer.
HEARTBEAT_SECONDS = 2.0


class Feed:
    """``read`` gives the document of this moment."""

    def __init__(self, read: Callable[[], Document]) -> None:
        self._read = read
        self._watchers = 0
        self._ticking: asyncio.Task[None] | None = None
        self._ticked = asyncio.Event()
        self._closed = False
        self._number = 0
        self._document: Document = {}
        self._change = b""
        self._snapshot: bytes | None = None

    @property
    def watchers(self) -> int:
        return self._watchers

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, until the feed is closed; to be closed by whoever iterates."""
        self._watchers += 1
        try:
            if self._ticking is None:
                self._advance(self._read(), b"")
                self._ticking = asyncio.create_task(self._tick())
            seen = self._number
            yield self._snapshot_event()
            while True:
                if seen == self._number:
                    if self._closed:
                        return
                    await self._ticked.wait()
                    continue
                behind = self._number - seen
                seen = self._number
                yield self._change if behind == 1 else self._snapshot_event()
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._stop()

    def close(self) -> None:
        """End all events, after a last one: how those ended that ran until now."""
        if self._ticking is not None and not self._closed:
            self._look(heartbeat=False)
        self._closed = True
        self._ticked.set()
        self._stop()

    def _stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    async def _tick(self) -> None:
        silent_seconds = 0.0
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            silent_seconds += INTERVAL_SECONDS
            if self._look(heartbeat=silent_seconds >= HEARTBEAT_SECONDS):
                silent_seconds = 0.0

    def _look(self, *, heartbeat: bool) -> bool:
        """Tell what has changed, or with ``heartbeat`` that nothing has; whether there was something to tell."""
        try:
            document = self._read()
            change = difference(self._document, document | {"time": self._document["time"]})
        except Exception:
            log.exception("the status could not be read")
            return False
        if change or heartbeat:
            self._advance(document, event("change", {"time": document["time"], **change}))
        return bool(change) or heartbeat

    def _advance(self, document: Document, change: bytes) -> None:
        self._number += 1
        self._document, self._change, self._snapshot = document, change, None
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    def _snapshot_event(self) -> bytes:
        if self._snapshot is None:
            self._snapshot = event("snapshot", self._document)
        return self._snapshot


def event(name: str, document: Document) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(document))
