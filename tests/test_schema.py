"""The JSON schema for editors: it takes what the gateway takes, and underlines what the gateway refuses."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli_w
from broken_configurations import SOUND
from jsonschema import Draft202012Validator

from aiogw import cli, config
from aiogw.config.descriptions import DESCRIPTIONS
from aiogw.config.schema import schema

ROOT = Path(__file__).parent.parent
VALIDATOR = Draft202012Validator(schema())


def demo() -> str:
    """What scripts/demo writes, with the addresses that its shell fills in."""
    found = re.search(r"<<TOML\n(.*?)\nTOML\n", (ROOT / "scripts" / "demo").read_text(), re.DOTALL)
    assert found
    text = re.sub(r"\$\(upstream_url (\w+)\)", r"http://\1:1", found[1])
    return text.replace("$port", "8080").replace("$admin_port", "9464")


TEXTS = {"shipped": (ROOT / "etc" / "gateway.toml").read_text(), "demo": demo(), "corpus": SOUND}


def test_the_schema_is_one() -> None:
    """Its own schema has nothing to say against it, and the command prints it."""
    Draft202012Validator.check_schema(schema())


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It needs no configuration."""
    assert 0 == cli.main(["schema"])
    out, err = capsys.readouterr()
    assert "" == err
    assert schema() == json.loads(out)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_the_gateway_takes_is_valid(text: str) -> None:
    """The configurations that come with aiogw, and what show makes of them."""
    loaded = config.loads(text)
    for one in (text, config.dumps(loaded)):
        assert [] == [error.message for error in VALIDATOR.iter_errors(tomllib.loads(one))]


def at(*key: str | int) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    def find(document: Any) -> tuple[Any, Any]:
        for name in key[:-1]:
            document = document[name]
        return document, key[-1]

    return find


UPSTREAM, ENDPOINTS = ("upstreams", "reasoning"), ("upstreams", "embeddings", "endpoints")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("server", "listen"), 8080),
        (("server", "listen"), "localhost"),
        (("server", "max_connections"), "1024"),
        (("server", "max_connections"), True),
        (("server", "first_sign_seconds"), -1),
        (("server", "log_level"), "loud"),
        (("server", "tls"), {"certificate": "c"}),
        (("auth", "mode"), "maybe"),
        (("auth", "keys", "alice", "models"), []),
        (("auth", "keys", "alice", "file"), "relative"),
        (("auth", "keys", "alice", "kee"), "k"),
        (("upstreams", "x"), "http://x"),
        ((*UPSTREAM, "url"), "reasoning:80"),
        ((*UPSTREAM, "url"), ...),
        ((*UPSTREAM, "models"), [""]),
        ((*UPSTREAM, "aliases"), {"a": 1}),
        ((*UPSTREAM, "admission"), "unlimitd"),
        ((*UPSTREAM, "admission", "cap"), "6"),
        ((*UPSTREAM, "admission", "cap"), 6.5),
        ((*UPSTREAM, "admission", "cap"), 0),
        ((*UPSTREAM, "admission", "cap"), ...),
        ((*UPSTREAM, "admission", "retry_after_max_seconds"), 61),
        ((*UPSTREAM, "dialect", "images"), "yes"),
        ((*UPSTREAM, "dialect", "image"), True),
        ((*UPSTREAM, "dialect", "count_tokens"), "never"),
        (ENDPOINTS, []),
        ((*ENDPOINTS, 1, "engine_slots"), "2"),
        (("colour",), "red"),
        (("server",), ...),
    ],
    ids=str,
)
def test_what_the_gateway_refuses_is_not_valid(key: tuple[str | int, ...], value: Any) -> None:
    """A wrong type, a value out of range, a key too many, and one too few; ``...`` takes a key away."""
    document = tomllib.loads(SOUND)
    table, name = at(*key)(document)
    if value is ...:
        del table[name]
    else:
        table[name] = value
    assert not VALIDATOR.is_valid(document)
    with pytest.raises(config.ConfigError):
        config.loads(tomli_w.dumps(document))


def test_every_key_is_described() -> None:
    """Each key of each table has a sentence, and no sentence is of a key that has gone."""
    classes = {cls for _, cls in config.tables()}
    assert classes == set(DESCRIPTIONS)
    for cls in classes:
        assert {one.name for one in attrs.fields(cls)} == set(DESCRIPTIONS[cls])
        for sentence in DESCRIPTIONS[cls].values():
            assert re.fullmatch(r"\S.*\.", sentence), sentence


def test_capabilities_have_their_defaults() -> None:
    """An editor shows what holds where nothing is said, and no limit has such a thing."""
    definitions = schema()["$defs"]
    dialect = definitions["DialectConfig"]["properties"]
    assert True is dialect["images"]["default"]
    assert "upstream" == dialect["count_tokens"]["default"]
    for table in ("ServerConfig", "AdmissionConfig", "EndpointConfig"):
        assert not [key for key, one in definitions[table]["properties"].items() if "default" in one]
