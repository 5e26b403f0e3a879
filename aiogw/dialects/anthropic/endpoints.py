"""What there is below the mount, and what to say of what there is not; knows no document but the empty one."""

from __future__ import annotations

from collections.abc import Mapping

from aiogw.canonical import Document, ModelCard, Operation
from aiogw.dialects.anthropic.models import list_models, one_model
from aiogw.dialects.base import Endpoint, LocalEndpoint, RelayEndpoint
from aiogw.errors import MethodNotAllowed, UnknownEndpoint, quoted

MOUNT = "/llm"
COUNT_TOKENS = f"{MOUNT}/v1/messages/count_tokens"

_MESSAGES = f"{MOUNT}/v1/messages"
_MODELS = f"{MOUNT}/v1/models"

_COUNT = RelayEndpoint(operation=Operation.TOKENIZE, path="/tokenize")
_CHAT = RelayEndpoint(operation=Operation.CHAT, path="/v1/chat/completions")

_OPENAI = ("/chat/completions", "/completions", "/responses", "/embeddings")


def find_endpoint(method: str, path: str) -> Endpoint:
    """By path alone; raises UnknownEndpoint, or MethodNotAllowed where only the method is wrong."""
    if path == _MESSAGES:
        return _only("POST", method, path, _CHAT)
    if path == COUNT_TOKENS:
        return _only("POST", method, path, _COUNT)
    if path == _MODELS:
        return _only("GET", method, path, LocalEndpoint(answer=list_models))
    if path.startswith(f"{_MODELS}/") and len(path) > len(_MODELS) + 1:
        # The rest whole: ids contain slashes.
        model = path.removeprefix(f"{_MODELS}/")
        return _only("GET", method, path, LocalEndpoint(answer=one_model(model)))
    if path in (MOUNT, f"{MOUNT}/") and method == "HEAD":
        return LocalEndpoint(answer=_alive)
    raise UnknownEndpoint(method=method, path=path, hint=_hint(path))


def _only(allowed: str, method: str, path: str, endpoint: Endpoint) -> Endpoint:
    methods = ("GET", "HEAD") if allowed == "GET" else (allowed,)
    if method not in methods:
        raise MethodNotAllowed(method=method, path=path, allowed=methods)
    return endpoint


def _alive(cards: tuple[ModelCard, ...], query: Mapping[str, str]) -> Document:
    """What Claude Code asks to see whether its base URL leads anywhere."""
    return Document(status=200, content_type="text/plain", body=b"")


def _hint(path: str) -> str:
    below = path.removeprefix(MOUNT)
    if below.startswith("/v1/v1/"):
        return f"The base URL ends in {MOUNT}, without /v1: the client adds that itself."
    if below.endswith(_OPENAI):
        return f"Below {MOUNT} is Anthropic's Messages API; OpenAI clients use /v1."
    if below.startswith(("/messages", "/models")):
        return f"The version is missing: {quoted(f'{MOUNT}/v1{below}')}."
    if below.startswith("/v1/messages/batches"):
        return "Message batches are not offered here."
    if below.endswith("/") and path.rstrip("/") in (_MESSAGES, _MODELS):
        return f"Without the slash at the end there is: {path.rstrip('/')}."
    return f"There are POST {_MESSAGES}, POST {COUNT_TOKENS}, GET {_MODELS} and GET {_MODELS}/{{id}}."
