"""How far a long run is, for whoever watches it."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """One line on standard error, rewritten in place on a terminal, otherwise now and then."""

    def __init__(self) -> None:
        self._every_seconds = 0.2 if sys.stderr.isatty() else 10
        self._end = "" if sys.stderr.isatty() else "\n"
        self._start = "\r\x1b[K" if sys.stderr.isatty() else ""
        self._next_at = time.monotonic() + self._every_seconds

    def say(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self._every_seconds
            print(f"{self._start}{text}", end=self._end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        print(self._start, end="", file=sys.stderr, flush=True)
