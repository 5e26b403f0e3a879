"""The client's faults: the request cannot be served as it was sent; nothing of the gate or an upstream."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from aiogw.errors.base import GatewayError, quoted, without_quotes


@frozen(kw_only=True)
class ClientFault(GatewayError):
    """The request cannot be served as it was sent; sending it again unchanged is useless."""


@frozen(kw_only=True)
class MalformedRequest(ClientFault):
    """Its connection cannot go on: whoever sent it may be of another mind about where the next one begins."""

    reason: str

    code = "malformed_request"
    title = "Not a request"
    status = 400

    @property
    def message(self) -> str:
        return f"This cannot be read as a request: {self.reason}"

    @property
    def detail(self) -> str | None:
        return without_quotes(self.reason)


@frozen(kw_only=True)
class MalformedBody(ClientFault):
    reason: str

    code = "invalid_body"
    title = "Body not readable"
    status = 400

    @property
    def message(self) -> str:
        return f"The request body could not be read: {self.reason}"

    @property
    def detail(self) -> str | None:
        return without_quotes(self.reason)


@frozen(kw_only=True)
class InvalidField(ClientFault):
    """``path`` is dotted and zero-based, as in ``messages.3.content.1.type``: no name in it is a client's own.

    What ``reason`` repeats of a client's words it has in quotation marks (``quoted``).
    """

    path: str
    reason: str

    code = "invalid_request"
    title = "Invalid request"
    status = 400

    @property
    def message(self) -> str:
        return f"{self.path}: {self.reason}"

    @property
    def detail(self) -> str | None:
        return f"{self.path}: {without_quotes(self.reason)}"

    @property
    def param(self) -> str | None:
        return self.path


@frozen(kw_only=True)
class InvalidKey(ClientFault):
    """Without fields, so that nothing can be learned from it."""

    code = "invalid_api_key"
    title = "Key not valid"
    status = 401

    @property
    def message(self) -> str:
        return "A valid key is needed here, and only one: as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"


@frozen(kw_only=True)
class UnknownModel(ClientFault):
    model: str
    known: tuple[str, ...]

    code = "model_not_found"
    title = "Unknown model"
    status = 404

    @property
    def message(self) -> str:
        return f"The model {quoted(self.model)} is not served here. Known models: {', '.join(self.known)}"

    @property
    def param(self) -> str | None:
        return "model"


@frozen(kw_only=True)
class UnknownEndpoint(ClientFault):
    """``reason``: why there is nothing, where the path as such is right."""

    method: str
    path: str
    hint: str
    reason: str | None = None

    code = "not_found"
    title = "No such endpoint"
    status = 404

    @property
    def message(self) -> str:
        why = "" if self.reason is None else f", because {self.reason}"
        return f"There is no {quoted(f'{self.method} {self.path}')} here{why}. {self.hint}"

    @property
    def detail(self) -> str | None:
        return self.reason


@frozen(kw_only=True)
class MethodNotAllowed(ClientFault):
    method: str
    path: str
    allowed: tuple[str, ...]

    code = "method_not_allowed"
    title = "Method not allowed"
    status = 405

    @property
    def message(self) -> str:
        return f"{quoted(self.path)} takes {' or '.join(self.allowed)}, not {quoted(self.method)}"


@frozen(kw_only=True)
class BodyTimeout(ClientFault):
    timeout_seconds: float
    min_bytes_per_second: int

    code = "body_timeout"
    title = "Request too slow"
    status = 408

    @property
    def message(self) -> str:
        more = f"a second more for every {self.min_bytes_per_second} bytes that have come"
        return f"The request body came too slowly: it has {self.timeout_seconds:g} s, and {more}"

    @property
    def figures(self) -> Mapping[str, float]:
        return {
            "body_timeout_seconds": self.timeout_seconds,
            "body_min_bytes_per_second": self.min_bytes_per_second,
        }


@frozen(kw_only=True)
class BodyTooLarge(ClientFault):
    limit_bytes: int

    code = "request_too_large"
    title = "Request too large"
    status = 413

    @property
    def message(self) -> str:
        return f"The request body is larger than the {self.limit_bytes} bytes this gateway accepts"

    @property
    def figures(self) -> Mapping[str, float]:
        return {"max_body_bytes": self.limit_bytes}


@frozen(kw_only=True)
class UnsupportedCoding(ClientFault):
    coding: str
    known: tuple[str, ...]

    code = "unsupported_encoding"
    title = "Content-Encoding not known"
    status = 415

    @property
    def message(self) -> str:
        return f"Content-Encoding may be {' or '.join(self.known)}, not {quoted(self.coding)}"


@frozen(kw_only=True)
class TooManySequences(ClientFault):
    upstream: str
    sequences: int
    cap: int

    code = "too_many_sequences"
    title = "Request heavier than the cap"
    status = 422

    @property
    def message(self) -> str:
        return (
            f"The request asks for {self.sequences} sequences at once (n times the number of prompts), but at most "
            f"{self.cap} run at the upstream {self.upstream!r}: send it in smaller parts"
        )

    @property
    def figures(self) -> Mapping[str, float]:
        return {"cap": self.cap}
