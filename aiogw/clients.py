"""What to tell a client so that it talks to this gateway: the lines to paste, with its address and models filled in.

Pure: a configuration in, text out.  What is printed is a whole file or a piece of shell as it stands, to be redirected
to where its first comment says, or sourced.  scripts/clients does just that with the real clients, so a line that is
added here is a line that was run (Open WebUI, which is too large for a script, by hand).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping

from attrs import frozen

from aiogw.config import Config, ListenAddress, UpstreamConfig

# Where no key is asked for, most clients do not start without one all the same.
_ANY_KEY = "none"
# Where one is, the lines take it from here, so that they can be shown and kept without it.
_KEY_VARIABLE = "AIOGW_KEY"
_WILDCARDS = ("0.0.0.0", "::")
# What the clients have by themselves, and so the least that is worth saying.
_CLAUDE_CODE_SECONDS = 600
_CODEX_SECONDS = _OPENCODE_SECONDS = 300
_LISTED_BY_CLAUDE_CODE = ("claude", "anthropic")
# For what is not in the time-outs: connecting, a busy machine.
_MARGIN_SECONDS = 30


class CannotReach(Exception):
    """This client has no way to this gateway; the text says why."""


@frozen(kw_only=True)
class _Model:
    name: str
    max_model_len: int | None


@frozen(kw_only=True)
class _Gateway:
    """What the lines are made from.

    ``models`` are the names that are worth offering for chat, aliases behind the models they stand for; ``patience``
    is for how long, in seconds, this gateway may make a client wait although nothing is wrong.
    """

    origin: str
    models: tuple[_Model, ...]
    patience: int
    asks_for_key: bool
    socket: str | None = None

    @property
    def first(self) -> _Model:
        return self.models[0]

    @property
    def key(self) -> str:
        """A word of a shell that stands for the key."""
        return f'"${_KEY_VARIABLE}"' if self.asks_for_key else _ANY_KEY

    def hint(self, comment: str) -> Iterator[str]:
        """The line that says where the key goes, if there is one."""
        if self.asks_for_key:
            yield f"{comment} The key that you were given is to be in its environment, as {_KEY_VARIABLE}"


def lines(name: str, config: Config) -> str:
    """The lines for the client ``name``, one of CLIENTS; raises CannotReach."""
    gateway = _gateway(config)
    if gateway.socket is not None and name != "curl":
        raise CannotReach(
            f"{name} cannot use a Unix socket (server.listen is unix:{gateway.socket}): "
            "listen on an address, or put a proxy in between"
        )
    return "".join(f"{line}\n" for line in CLIENTS[name](gateway))


def _gateway(config: Config) -> _Gateway:
    # An upstream with a gate is one that generates; what has none is most likely for embeddings.
    gated = [upstream for upstream in config.upstreams.values() if upstream.admission != "unlimited"]
    chosen = gated or list(config.upstreams.values())
    models = tuple(model for upstream in chosen for model in _models(upstream))
    patience = math.ceil(max(map(_patience, chosen))) + _MARGIN_SECONDS
    listen, scheme = config.server.listen, "http" if config.server.tls is None else "https"
    return _Gateway(
        origin=_origin(listen, scheme),
        models=models,
        patience=patience,
        asks_for_key=config.auth.mode == "keys",
        socket=listen.path,
    )


def _origin(listen: ListenAddress, scheme: str) -> str:
    if listen.path is not None:
        return f"{scheme}://localhost"
    # Where a wildcard or any free port is listened on, only the operator knows what a client should say.
    host = "HOST" if listen.host in _WILDCARDS else listen.host or ""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listen.port or 'PORT'}"


def _models(upstream: UpstreamConfig) -> Iterator[_Model]:
    for name in (*upstream.models, *upstream.aliases):
        yield _Model(name=name, max_model_len=upstream.dialect.max_model_len)


def _patience(upstream: UpstreamConfig) -> float:
    """The longest silence: in the queue and until the first byte, or between two bytes."""
    queue_timeout = 0.0 if upstream.admission == "unlimited" else upstream.admission.queue_timeout_seconds
    return max(queue_timeout + upstream.first_byte_timeout_seconds, upstream.idle_timeout_seconds)


# -- the clients ----------------------------------------------------------------------------------------------------


def _claude_code(gateway: _Gateway) -> Iterator[str]:
    claudes = [model for model in gateway.models if "claude" in model.name.lower()]
    main = claudes[0] if claudes else gateway.first

    def tier(word: str) -> str:
        return next((model.name for model in claudes if word in model.name.lower()), main.name)

    yield '# Claude Code: in the shell that starts it (or as "env" in ~/.claude/settings.json)'
    yield from gateway.hint("#")
    yield f"export ANTHROPIC_AUTH_TOKEN={gateway.key}"
    yield from _exports(
        {
            "ANTHROPIC_BASE_URL": f"{gateway.origin}/llm",
            # A key that is left over from elsewhere would win over the token.
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_MODEL": main.name,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": tier("opus"),
            "ANTHROPIC_DEFAULT_SONNET_MODEL": tier("sonnet"),
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": tier("haiku"),
            "API_TIMEOUT_MS": str(1000 * max(gateway.patience, _CLAUDE_CODE_SECONDS)),
            # Else its runtime may give up after 300 s without a first byte, whatever API_TIMEOUT_MS says.
            "API_FORCE_IDLE_TIMEOUT": "0",
        }
    )
    if any(model.name.lower().startswith(_LISTED_BY_CLAUDE_CODE) for model in gateway.models):
        yield '# /model also lists what begins with "claude", unless CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC is set'
        yield from _exports({"CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY": "1"})
    if main.max_model_len is not None:
        if main.name.startswith("claude-"):
            yield '# It takes "claude-NAME" to have 200,000 tokens; of an alias "claude_NAME" it would believe this:'
            yield f"# export CLAUDE_CODE_MAX_CONTEXT_TOKENS={main.max_model_len}"
        else:
            yield from _exports({"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(main.max_model_len)})


def _codex(gateway: _Gateway) -> Iterator[str]:
    yield "# Codex: ~/.codex/config.toml"
    yield from gateway.hint("#")
    yield f"model = {_toml(gateway.first.name)}"
    yield 'model_provider = "aiogw"'
    if gateway.first.max_model_len is not None:
        yield f"model_context_window = {gateway.first.max_model_len}"
    yield ""
    yield "[model_providers.aiogw]"
    yield 'name = "aiogw"'
    yield f"base_url = {_toml(f'{gateway.origin}/v1')}"
    yield 'wire_api = "responses"'
    if gateway.asks_for_key:
        yield f"env_key = {_toml(_KEY_VARIABLE)}"
    # The comments that tell a client its place in the queue do not count as life here: only events do.
    yield f"stream_idle_timeout_ms = {1000 * max(gateway.patience, _CODEX_SECONDS)}"


def _opencode(gateway: _Gateway) -> Iterator[str]:
    milliseconds = 1000 * max(gateway.patience, _OPENCODE_SECONDS)
    key = {"apiKey": f"{{env:{_KEY_VARIABLE}}}"} if gateway.asks_for_key else {}
    document = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"aiogw/{gateway.first.name}",
        "provider": {
            "aiogw": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "aiogw",
                "options": {
                    "baseURL": f"{gateway.origin}/v1",
                    **key,
                    "headerTimeout": milliseconds,
                    "chunkTimeout": milliseconds,
                },
                "models": {model.name: _opencode_model(model) for model in gateway.models},
            }
        },
    }
    yield "// opencode: ~/.config/opencode/opencode.json"
    yield from gateway.hint("//")
    yield json.dumps(document, indent=2, ensure_ascii=False)


def _opencode_model(model: _Model) -> dict[str, object]:
    if model.max_model_len is None:
        return {}
    # Without a limit it asks for 32,000 tokens, which an engine with a shorter context refuses.
    return {"limit": {"context": model.max_model_len, "output": max(1, min(32000, model.max_model_len // 4))}}


def _open_webui(gateway: _Gateway) -> Iterator[str]:
    yield "# Open WebUI: in the environment of its first start (later: Admin Settings, Connections)"
    yield from gateway.hint("#")
    yield from _exports({"OPENAI_API_BASE_URLS": f"{gateway.origin}/v1"})
    yield f"export OPENAI_API_KEYS={gateway.key}"


def _openai(gateway: _Gateway) -> Iterator[str]:
    yield f"# OpenAI SDK: in the program's environment; its models: {_listed(gateway)}"
    yield from gateway.hint("#")
    yield from _exports({"OPENAI_BASE_URL": f"{gateway.origin}/v1"})
    yield f"export OPENAI_API_KEY={gateway.key}"


def _anthropic(gateway: _Gateway) -> Iterator[str]:
    yield f"# Anthropic SDK: in the program's environment; its models: {_listed(gateway)}"
    yield from gateway.hint("#")
    yield from _exports({"ANTHROPIC_BASE_URL": f"{gateway.origin}/llm"})
    yield f"export ANTHROPIC_API_KEY={gateway.key}"


def _curl(gateway: _Gateway) -> Iterator[str]:
    socket = "" if gateway.socket is None else f"--unix-socket {shlex.quote(gateway.socket)} "
    yield from gateway.hint("#")
    key = f' -H "authorization: Bearer ${_KEY_VARIABLE}"' if gateway.asks_for_key else ""
    asked = {"model": gateway.first.name, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    for path, body in (("/v1/chat/completions", asked), ("/llm/v1/messages", {"max_tokens": 1000, **asked})):
        document = json.dumps(body, ensure_ascii=False)
        header = f"-H 'content-type: application/json'{key}"
        yield f"curl -N {socket}{gateway.origin}{path} {header} -d {shlex.quote(document)}"


# The name on the command line, and what makes the lines.
CLIENTS: Mapping[str, Callable[[_Gateway], Iterator[str]]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "open-webui": _open_webui,
    "openai": _openai,
    "anthropic": _anthropic,
    "curl": _curl,
}


# -- how values are written -----------------------------------------------------------------------------------------


def _exports(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        yield f"export {name}={shlex.quote(value) if value else ''}"


def _toml(text: str) -> str:
    # A TOML string is a JSON string, but for this one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _listed(gateway: _Gateway) -> str:
    # JSON, so that no name ends the comment's line.
    return ", ".join(json.dumps(model.name, ensure_ascii=False)[1:-1] for model in gateway.models)
