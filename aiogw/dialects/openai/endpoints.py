"""What there is below the mount, and what to say of what there is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiogw.canonical import Document, ModelCard, Operation
from aiogw.dialects.base import Endpoint, LocalEndpoint, RelayEndpoint
from aiogw.dialects.openai.errors import encode
from aiogw.errors import MethodNotAllowed, UnknownEndpoint, UnknownModel

MOUNT = "/v1"

_OPERATIONS = {
    "/v1/chat/completions": Operation.CHAT,
    "/v1/completions": Operation.COMPLETIONS,
    "/v1/responses": Operation.RESPONSES,
    "/v1/embeddings": Operation.EMBEDDINGS,
    "/v1/score": Operation.SCORE,
    "/v1/rerank": Operation.RERANK,
    "/v1/audio/transcriptions": Operation.TRANSCRIPTIONS,
    "/v1/audio/translations": Operation.TRANSLATIONS,
    "/v1/chat/completions/batch": Operation.BATCH,
    "/v1/chat/completions/render": Operation.RENDER,
    "/v1/chat/completions/derender": Operation.RENDER,
    "/v1/completions/render": Operation.RENDER,
    "/v1/completions/derender": Operation.RENDER,
    "/v1/responses/render": Operation.RENDER,
}
_RELAYED = {path: RelayEndpoint(operation=operation, path=path) for path, operation in _OPERATIONS.items()}
_HINT = "OpenAI clients use the base URL http(s)://HOST:PORT/v1, Anthropic clients http(s)://HOST:PORT/llm."


def find_endpoint(method: str, path: str) -> Endpoint:
    """By path alone; raises UnknownEndpoint, or MethodNotAllowed where only the method is wrong."""
    relayed = _RELAYED.get(path)
    if relayed is not None:
        if method != "POST":
            raise MethodNotAllowed(method=method, path=path, allowed=("POST",))
        return relayed
    if path == "/v1/models" or path.startswith("/v1/models/"):
        if method not in ("GET", "HEAD"):
            raise MethodNotAllowed(method=method, path=path, allowed=("GET", "HEAD"))
        # The rest whole: ids contain slashes.
        return _MODELS if path == "/v1/models" else _model(path.removeprefix("/v1/models/"))
    raise UnknownEndpoint(method=method, path=path, hint=_hint(path))


def _card(model: ModelCard) -> dict[str, Any]:
    """The upstream's own card under the name clients use, with all it says (``max_model_len`` matters to clients)."""
    card = {"id": model.id, "object": "model", "created": model.created, "owned_by": "aiogw", **model.members}
    card["id"] = model.id
    if model.max_model_len is not None:
        card["max_model_len"] = model.max_model_len
    if model.alias_of is not None:
        card["root"] = model.alias_of
    return card


def _json(document: Any) -> Document:
    return Document(status=200, content_type="application/json", body=encode(document))


def _list_models(models: tuple[ModelCard, ...], _query: Mapping[str, str]) -> Document:
    return _json({"object": "list", "data": [_card(model) for model in models]})


def _model(model_id: str) -> LocalEndpoint:
    def answer(models: tuple[ModelCard, ...], _query: Mapping[str, str]) -> Document:
        for model in models:
            if model.id == model_id:
                return _json(_card(model))
        raise UnknownModel(model=model_id, known=tuple(model.id for model in models))

    return LocalEndpoint(answer=answer)


_MODELS = LocalEndpoint(answer=_list_models)


def _hint(path: str) -> str:
    if path in ("/v1/messages", "/v1/messages/count_tokens"):
        return f"Anthropic's Messages API is at /llm{path}. {_HINT}"
    if path.startswith("/v1/responses/"):
        return f"A stored response belongs to one engine, and nothing in the request says which. {_HINT}"
    if path.startswith("/v1/v1"):
        return f"The /v1 is doubled: the client adds one to a base URL that already has it. {_HINT}"
    if f"/v1{path}" in _RELAYED or path == "/models":
        return f"The /v1 is missing. {_HINT}"
    return _HINT
