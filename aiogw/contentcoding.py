"""Undoing the Content-Encoding of a request body, in steps that nobody has to wait long for.

aiohttp could do it, but takes a gzip that was cut off for a whole one, and knows codings or not by what is installed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from aiogw.errors import MalformedBody, UnsupportedCoding

KNOWN = ("gzip", "deflate")

# What a step may give rise to: some tens of milliseconds of a bomb's two seconds.
STEP_BYTES = 1 << 18

# Each one more copies what is behind it.  Clients send one.
MAX_MEMBERS = 100


def content_coding(fields: list[str]) -> str | None:
    """The one coding that the Content-Encoding ``fields`` name, None for plain bytes; raises UnsupportedCoding."""
    given = ", ".join(fields)
    coding = given.lower()
    if coding in ("", "identity"):
        return None
    if coding not in KNOWN:
        raise UnsupportedCoding(coding=given, known=KNOWN)
    return coding


class Inflater:
    """Inflates one body; every method may raise MalformedBody."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._members = 0
        self._member: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What ``data`` inflates to, in steps; a step is only taken when it is asked for."""
        while data:
            if self._member is None:
                self._member = self._begin(data[0])
            member = self._member
            try:
                step = member.decompress(data, STEP_BYTES)
                while step:
                    yield step
                    step = b"" if member.eof else member.decompress(member.unconsumed_tail, STEP_BYTES)
            except zlib.error:
                raise MalformedBody(reason=f"it is not what its Content-Encoding, {self._coding}, says") from None
            data = member.unused_data
            if member.eof:
                self._member = None

    def end(self) -> None:
        """There is nothing more."""
        if self._member is not None or self._members == 0:
            raise MalformedBody(reason=f"its {self._coding} ends too early")

    def _begin(self, first_byte: int) -> zlib._Decompress:
        self._members += 1
        if self._members > (MAX_MEMBERS if self._coding == "gzip" else 1):
            raise MalformedBody(reason=f"there is too much behind its {self._coding}")
        if self._coding == "gzip":
            return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        # RFC 9110 means the zlib format by "deflate", and some senders do not.
        wrapped = first_byte & 0xF == 8
        return zlib.decompressobj(wbits=zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
