"""The registry of dialects: what is served is what is listed here."""

from __future__ import annotations

from aiogw.dialects.anthropic import ANTHROPIC
from aiogw.dialects.base import Dialect
from aiogw.dialects.openai import OPENAI

DIALECTS: tuple[Dialect, ...] = (OPENAI, ANTHROPIC)


def detect(path: str, dialects: tuple[Dialect, ...] = DIALECTS) -> Dialect:
    """The dialect below whose mount ``path`` lies; the first one answers for paths below none, with its own 404."""
    for dialect in dialects:
        if path == dialect.mount or path.startswith(dialect.mount + "/"):
            return dialect
    return dialects[0]
