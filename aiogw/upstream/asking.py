"""One question of the gateway's own to an upstream, on a connection of its own: no slot, and in nobody's way.

Nothing here may know what is asked, or why.
"""

from __future__ import annotations

import asyncio

from aiogw.canonical import ResponseHead
from aiogw.errors import UpstreamBroken, UpstreamFault
from aiogw.upstream.answer import read_error
from aiogw.upstream.pool import UpstreamPool, request_fields


async def ask(
    upstream: str, pool: UpstreamPool, path: str, *, accept: str, max_bytes: int, timeout_seconds: float
) -> bytes:
    """The body of the upstream's 200 to ``GET path``; raises UpstreamFault, also for any other status, or TimeoutError.

    The time for the answer begins with the connection, whose own time-out says whether the upstream is reached.
    """
    answer = _Answer(upstream, path, max_bytes)
    # A connection of its own, before and after: those that are kept are for requests that hold a slot.
    fields = request_fields([("accept", accept), ("connection", "close")], b"")
    call = pool.send(path, fields, b"", answer, method="GET", on=await pool.connect())
    try:
        async with asyncio.timeout(timeout_seconds):
            return await answer.body
    finally:
        call.abort()


class _Answer:
    """Collects one response; see ``upstream.pool.ResponseListener``."""

    def __init__(self, upstream: str, path: str, max_bytes: int) -> None:
        self.body: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._upstream = upstream
        self._path = path
        self._max_bytes = max_bytes
        self._head: ResponseHead | None = None
        self._pieces = bytearray()

    def response_step(self, head: ResponseHead | None, data: bytes, ended: bool) -> None:
        self._head = head or self._head
        self._pieces += data
        if self.body.done():
            return
        if len(self._pieces) > self._max_bytes:
            reason = f"its answer to {self._path} is too long"
            self.body.set_exception(UpstreamBroken(upstream=self._upstream, reason=reason))
        elif ended and self._head is not None:
            if self._head.status == 200:
                self.body.set_result(bytes(self._pieces))
            else:
                self.body.set_exception(read_error(self._upstream, self._head, bytes(self._pieces)))

    def response_data(self, data: bytes) -> None:
        self.response_step(None, data, False)

    def response_failed(self, error: UpstreamFault) -> None:
        if not self.body.done():
            self.body.set_exception(error)
