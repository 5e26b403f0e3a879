"""Ids of messages and tool calls as clients see them, without a table and without state; knows no document."""

from __future__ import annotations

import base64
import re
import secrets

_PLAIN = re.compile(r"[a-zA-Z0-9_-]+")
_UPSTREAM_PREFIX = re.compile(r"(?:chatcmpl|cmpl|gen|resp|msg)[-_]")

# What only the gateway writes in front of an id; an upstream's own id that begins so is encoded as well, which keeps
# the encoding reversible for every text.
_ENCODED = "toolu_aiogw64_"


def message_id(upstream_id: str | None) -> str:
    """``msg_`` and the upstream's id without its own prefix, or a fresh one."""
    if not upstream_id:
        return f"msg_{secrets.token_hex(12)}"
    prefix = _UPSTREAM_PREFIX.match(upstream_id)
    return f"msg_{upstream_id[prefix.end() if prefix else 0 :]}"


def generated_tool_id(message: str, ordinal: int) -> str:
    """An id for the ``ordinal``-th call of a message whose upstream gave none, or gave one twice."""
    return f"toolu_{message.removeprefix('msg_')}_{ordinal}"


def shown_tool_id(upstream_id: str) -> str:
    """The id as the client gets it.

    Anthropic's pattern allows no colon or dot.  Kimi K2 makes up ``functions.Bash:0`` and stops calling tools once its
    history has other ids (vllm#46344), so what has to change must come back: see ``upstream_tool_id``.
    """
    if _PLAIN.fullmatch(upstream_id) and not upstream_id.startswith(_ENCODED):
        return upstream_id
    return _encoded(upstream_id)


def upstream_tool_id(shown_id: str) -> str:
    """The id as the upstream wrote it; an id that ``shown_tool_id`` did not make is its own."""
    if not shown_id.startswith(_ENCODED):
        return shown_id
    digits = shown_id.removeprefix(_ENCODED)
    try:
        decoded = base64.urlsafe_b64decode(digits + "=" * (-len(digits) % 4)).decode()
    except ValueError:
        return shown_id
    return decoded if _encoded(decoded) == shown_id else shown_id


def _encoded(text: str) -> str:
    return _ENCODED + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
