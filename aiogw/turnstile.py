"""One at a time past a place where each takes a while, with a look at the sockets in between.

Nothing here may know what is done behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets one pass in each turn of the loop, in the order in which they came.

    A burst of arrivals that is dealt with in one turn keeps the loop from its sockets for as long as all of them take,
    and a slot that becomes free meanwhile stands idle.
    """

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def wait(self) -> None:
        """Returns at once for the first of a turn."""
        if not self._taken:
            self._take()
            return
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        await place

    def _take(self) -> None:
        self._taken = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._taken = False
        while self._line:
            place = self._line.popleft()
            if not place.done():  # else its client has left meanwhile
                place.set_result(None)
                self._take()
                return
