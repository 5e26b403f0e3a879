"""Configuration: strict, without defaults, and all faults at once, each with the full path of its key."""

from __future__ import annotations

import copy
import datetime
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import attrs
import pytest
import tomli_w
from cattrs.errors import AttributeValidationNote, BaseValidationError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiogw import config
from aiogw.canonical import Engine
from aiogw.config import (
    AdmissionConfig,
    AuthConfig,
    Config,
    ConfigError,
    DialectConfig,
    KeyConfig,
    ListenAddress,
    ServerConfig,
    UpstreamAddress,
    UpstreamConfig,
)
from aiogw.config.faults import value_faults
from aiogw.config.values import (
    Aliases,
    Count,
    CredentialName,
    FilePath,
    Members,
    Names,
    Positive,
    RetrySeconds,
    Seconds,
    SecondsOrNever,
    Text,
)

EXAMPLE = Path(__file__).parent.parent / "etc" / "gateway.toml"

TEXT = """
[server]
listen = "127.0.0.1:8080"
admin_listen = "127.0.0.1:9464"
max_connections = 1024
header_timeout_seconds = 10
keepalive_timeout_seconds = 75
body_timeout_seconds = 10
body_min_bytes_per_second = 65536
max_body_bytes = 67108864
body_memory_bytes = 268435456
response_buffer_bytes = 4194304
client_stall_timeout_seconds = 60
drain_timeout_seconds = 30.5
first_sign_seconds = 2
sign_interval_seconds = 10
models_refresh_seconds = 60
log_level = "info"
log_format = "text"

[server.tls]
certificate = "/etc/aiogw/tls.pem"
key = "/etc/aiogw/tls-key.pem"

[auth]
mode = "keys"

[auth.keys.reasoning]
file = "/etc/aiogw/keys/reasoning"
models = "all"
queue_places = 4

[upstreams.reasoning]
url = "http://reasoning-predictor.llm-serving:80"
models = ["reasoning", "org/big"]
connect_timeout_seconds = 5
first_byte_timeout_seconds = 600
idle_timeout_seconds = 120
aliases = { claude-reasoning = "reasoning" }
credential_file = "/etc/aiogw/keys/upstream"
watch_engine_seconds = 15

[upstreams.reasoning.admission]
engine_slots = 8
cap = 6
queue_limit = 32
queue_timeout_seconds = 60
retry_after_min_seconds = 1
retry_after_max_seconds = 60
abort_settle_seconds = 0.2

# Nothing of it as it is where nothing is said.
[upstreams.reasoning.dialect]
images = false
image_urls = true
tool_images = true
system_anywhere = true
reasoning_field = "reasoning_content"
thinking_on = { chat_template_kwargs = { thinking = true } }
thinking_off = { chat_template_kwargs = { thinking = false } }
thinking_budget = true
reasoning_efforts = ["none", "high"]
show_unrequested_thinking = true
continuous_usage = false
accounting = true
repeat_reasoning_as = "reasoning_text"
count_tokens = "estimate"
max_model_len = 40960
body_defaults = { top_k = 20, stop = ["</s>"] }

[upstreams.embeddings]
url = "https://embeddings"
models = ["embeddings"]
connect_timeout_seconds = 5
first_byte_timeout_seconds = 60
idle_timeout_seconds = 60
admission = "unlimited"
"""
BASE = tomllib.loads(TEXT)

Key = tuple[str, ...]
# Written as one string in TOML, whatever attributes their classes have.
WRITTEN_AS_TEXT = (ListenAddress, UpstreamAddress)


def tables_of(type_: Any) -> Iterator[type[Any]]:
    """The configuration classes in ``type_``."""
    if isinstance(type_, type) and attrs.has(type_):
        if type_ not in WRITTEN_AS_TEXT:
            yield type_
        return
    for inner in get_args(type_):
        yield from tables_of(inner)


def walk(cls: type[Any], path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every key below ``cls`` with its type, those of the upstream tables at ``upstreams.reasoning``."""
    hints = get_type_hints(cls)
    for field in attrs.fields(cls):
        type_ = hints[field.name]
        key = (*path, field.name)
        yield key, type_
        for inner in tables_of(type_):
            is_table_of_tables = get_origin(type_) not in (None, *_UNIONS)
            yield from walk(inner, (*key, "reasoning") if is_table_of_tables else key)


_UNIONS = {get_origin(int | str), get_origin(get_type_hints(UpstreamConfig)["admission"])}
TYPES = dict(walk(Config))
KEYS = [pytest.param(key, id=".".join(key)) for key in TYPES]
DIALECT = ("upstreams", "reasoning", "dialect")
# Names and capabilities; all else is a limit or an address, and nobody but the operator can know those.
OPTIONAL = [key for key in TYPES if key[:3] in (DIALECT, (*DIALECT[:2], "aliases"))]
HOLDER = ("auth", "keys", "reasoning")
# Of two places for a secret one is chosen, and what is said of a CA goes with https only.
UNSAID = {(*HOLDER, "credential"), (*DIALECT[:2], "credential"), (*DIALECT[:2], "ca_file")}
OPTIONAL += [*UNSAID, HOLDER[:2], (*HOLDER, "file"), (*DIALECT[:2], "credential_file")]
# Instead of url, and what goes with it.
ALTERNATIVES = [("upstreams", "reasoning", key) for key in ("endpoints", "resolve")]
OPTIONAL += [*ALTERNATIVES, ("upstreams", "reasoning", "watch_engine_seconds"), ("server", "tls")]


def of_type(*types: Any) -> list[Any]:
    return [pytest.param(key, id=".".join(key)) for key, type_ in TYPES.items() if type_ in types]


def changed(key: Key, value: Any, *more: tuple[Key, Any]) -> dict[str, Any]:
    """The base configuration with other values at some keys; ``...`` takes a key away."""
    document = copy.deepcopy(BASE)
    for path, new in ((key, value), *more):
        table = document
        for name in path[:-1]:
            table = table.setdefault(name, {})
        if new is ...:
            del table[path[-1]]
        else:
            table[path[-1]] = new
    return document


def faults_of(document: dict[str, Any] | str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.loads(document if isinstance(document, str) else tomli_w.dumps(document))
    assert caught.value.faults
    assert "\n".join(caught.value.faults) == str(caught.value)
    return caught.value.faults


def attempt(document: dict[str, Any]) -> list[str]:
    """The faults of ``document``, none if it loads."""
    try:
        load(document)
    except ConfigError as error:
        return error.faults
    return []


def load(document: dict[str, Any]) -> Config:
    return config.loads(tomli_w.dumps(document))


def url(value: Any) -> dict[str, Any]:
    return changed(("upstreams", "reasoning", "url"), value)


def listen(value: Any) -> dict[str, Any]:
    return changed(("server", "listen"), value)


# -- what is accepted -----------------------------------------------------------------------------------------------


def test_the_example_is_valid() -> None:
    """The configuration that comes with aiogw loads, and is the homelab of the spec: eight slots, six used."""
    admission = config.load(EXAMPLE).upstreams["reasoning"].admission
    assert isinstance(admission, config.AdmissionConfig)
    assert (8, 6) == (admission.engine_slots, admission.cap)


def test_values_arrive_as_they_were_written() -> None:
    """Numbers keep their type, lists become tuples, addresses are taken apart, and the order of upstreams stays."""
    loaded = config.loads(TEXT)
    assert ["reasoning", "embeddings"] == list(loaded.upstreams)
    assert ListenAddress(host="127.0.0.1", port=8080) == loaded.server.listen
    assert 30.5 == loaded.server.drain_timeout_seconds
    assert "info" == loaded.server.log_level
    reasoning = loaded.upstreams["reasoning"]
    assert UpstreamAddress(scheme="http", host="reasoning-predictor.llm-serving", port=80) == reasoning.url
    assert ("reasoning", "org/big") == reasoning.models
    assert 6 == reasoning.admission.cap  # type: ignore[union-attr]
    assert "unlimited" == loaded.upstreams["embeddings"].admission


def test_the_walk_finds_every_table() -> None:
    """The tests below, which walk over the classes, miss none of the keys of the base configuration."""

    def keys(table: dict[str, Any], path: Key = ()) -> Iterator[Key]:
        for name, value in table.items():
            yield (*path, name)
            if isinstance(value, dict) and TYPES.get((*path, name)) not in (Aliases, Members):
                yield from keys(value, (*path, name))

    written = {key for key in keys(BASE) if "embeddings" not in key} - {("upstreams", "reasoning"), HOLDER}
    assert written == set(TYPES) - UNSAID - set(ALTERNATIVES)


# An upstream has either a url or endpoints, and engine_slots stand with whichever it is: one of them is asked for.
ALLOWED = {
    UpstreamConfig: [
        *("url", "endpoints", "resolve", "credential", "credential_file", "ca_file"),
        *("watch_engine_seconds", "aliases", "dialect"),
    ],
    AdmissionConfig: ["engine_slots"],
    AuthConfig: ["keys"],
    KeyConfig: ["file", "credential"],
    ServerConfig: ["tls"],
}


def test_no_limit_has_a_default() -> None:
    """Nothing but names and capabilities has a value that nobody wrote."""
    classes = {Config, *(cls for type_ in TYPES.values() for cls in tables_of(type_))} - {DialectConfig}
    assert 4 <= len(classes)
    for cls in classes:
        assert ALLOWED.get(cls, []) == [field.name for field in attrs.fields(cls) if field.default is not attrs.NOTHING]


def test_every_capability_has_the_default_that_is_documented() -> None:
    """What the configuration does not say of an engine is what ``canonical.Engine`` says of a current vLLM."""
    expected = attrs.asdict(Engine(model=""), filter=lambda attribute, _: attribute.name != "model")
    assert expected == attrs.asdict(DialectConfig())
    assert DialectConfig() == config.loads(TEXT).upstreams["embeddings"].dialect
    assert {} == config.loads(TEXT).upstreams["embeddings"].aliases


def test_a_configuration_cannot_be_changed() -> None:
    """What is in effect is what was loaded."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.loads(TEXT).server.max_body_bytes = 1  # type: ignore[misc, assignment]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("server", "client_stall_timeout_seconds"), 0.001),
        (("server", "first_sign_seconds"), 0),
        (("server", "first_sign_seconds"), 0.0),
        (("server", "models_refresh_seconds"), 0.001),
        (("server", "max_body_bytes"), 1),
        (("server", "body_memory_bytes"), 2**63 - 1),
        (("server", "body_memory_bytes"), 67108864),
        (("server", "header_timeout_seconds"), 0.001),
        (("server", "body_min_bytes_per_second"), 1),
        (("upstreams", "reasoning", "admission", "queue_limit"), 0),
        (("upstreams", "reasoning", "admission", "cap"), 7),
        (("upstreams", "reasoning", "admission", "cap"), 1),
        (("upstreams", "reasoning", "admission", "retry_after_max_seconds"), 1),
        (("upstreams", "reasoning", "admission", "retry_after_min_seconds"), 60),
        (("upstreams", "reasoning", "admission"), "unlimited"),
        (("server", "log_level"), "debug"),
        (("server", "log_format"), "json"),
        (("server", "log_format"), "auto"),
    ],
)
def test_the_ends_of_a_range_are_in_it(key: Key, value: Any) -> None:
    """The smallest and the largest of what is allowed is allowed, and kept as it is."""
    found: Any = load(changed(key, value))
    for name in key:
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert (value, type(value)) == (found, type(found))


# -- what is refused, by its path -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [pytest.param(key, id=".".join(key)) for key in TYPES if key not in OPTIONAL])
def test_a_missing_key_is_refused_by_its_path(key: Key) -> None:
    """There is no key without which aiogw starts, and the one that is missing is named in full."""
    assert [f"{'.'.join(key)}: missing; it has no default"] == faults_of(changed(key, ...))


@pytest.mark.parametrize("key", [pytest.param(key, id=".".join(key)) for key in OPTIONAL if key[:3] == DIALECT])
def test_a_capability_that_is_not_named_is_the_default(key: Key) -> None:
    """Each key of the dialect table can be left out by itself, and so can the table."""
    reasoning = load(changed(key, ...)).upstreams["reasoning"]
    if key == DIALECT:
        assert DialectConfig() == reasoning.dialect
        return
    assert getattr(DialectConfig(), key[-1]) == getattr(reasoning.dialect, key[-1])
    assert getattr(config.loads(TEXT).upstreams["reasoning"].dialect, key[-1]) != getattr(reasoning.dialect, key[-1])


@pytest.mark.parametrize("value", ["8", True, False, -1, 0.0, 2.9, 8.0, [8], {}, float("nan"), float("inf")], ids=repr)
@pytest.mark.parametrize("key", of_type(Positive, Positive | None, Count, RetrySeconds))
def test_a_whole_number_is_nothing_else(key: Key, value: Any) -> None:
    """Strings, booleans, floats (also round ones), arrays and tables are not converted, and negative is no amount."""
    fault = faults_of(changed(key, value))[0]
    assert fault.startswith(f"{'.'.join(key)}: expected a whole number")
    assert ", found " in fault


@pytest.mark.parametrize("key", of_type(Positive, Positive | None, RetrySeconds))
def test_an_amount_is_at_least_one(key: Key) -> None:
    """Zero slots, bytes or seconds make no sense where at least one is needed."""
    fault = faults_of(changed(key, 0))[0]
    assert fault.startswith(f"{'.'.join(key)}: expected a whole number")
    assert fault.endswith("found an integer (0)")


@pytest.mark.parametrize("key", of_type(RetrySeconds))
def test_nobody_is_told_to_wait_longer_than_clients_do(key: Key) -> None:
    """Above 60 seconds Claude Code gives up, so such a Retry-After cannot be configured."""
    assert f"{'.'.join(key)}: expected a whole number from 1 to 60, found an integer (61)" in faults_of(
        changed(key, 61)
    )


@pytest.mark.parametrize(
    "value", ["8", True, 0, 0.0, -1, -0.5, [8], {}, float("nan"), float("inf"), float("-inf")], ids=repr
)
@pytest.mark.parametrize("key", of_type(Seconds))
def test_seconds_are_a_positive_number(key: Key, value: Any) -> None:
    """A time-out is a positive, finite number; there is no value for never."""
    fault = faults_of(changed(key, value))[0]
    assert fault.startswith(f"{'.'.join(key)}: expected a positive number of seconds, found ")


@pytest.mark.parametrize("value", ["8", True, False, -1, -0.5, [8], {}, float("nan"), float("inf")], ids=repr)
@pytest.mark.parametrize("key", of_type(SecondsOrNever))
def test_seconds_or_never(key: Key, value: Any) -> None:
    """Where 0 means never it is said, and nothing else is taken for it."""
    fault = faults_of(changed(key, value))[0]
    assert fault.startswith(f"{'.'.join(key)}: expected a positive number of seconds, or 0 for never, found ")


@pytest.mark.parametrize("value", [0, 1, 0.0, "true", "yes", "", [True], {}], ids=repr)
@pytest.mark.parametrize("key", of_type(bool))
def test_a_switch_is_true_or_false(key: Key, value: Any) -> None:
    """Nothing that Python would take for true or false is one."""
    assert faults_of(changed(key, value))[0].startswith(f"{'.'.join(key)}: expected true or false, found ")


@pytest.mark.parametrize("value", ["", 3, True, ["reasoning"], {}], ids=repr)
@pytest.mark.parametrize("key", of_type(Text, Text | None))
def test_a_name_is_a_string_with_something_in_it(key: Key, value: Any) -> None:
    """A member of a message has a name."""
    expected = "expected a string that is not empty, found "
    assert faults_of(changed(key, value))[0].startswith(f"{'.'.join(key)}: {expected}")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "expected a table, found an integer (3)"),
        ([{}], "expected a table, found an array"),
        ({"since": datetime.date(2026, 12, 1)}, "expected values that JSON has, too ("),
        ({"deep": {"limit": float("inf")}}, "expected values that JSON has, too ("),
        ({"limit": float("nan")}, "expected values that JSON has, too ("),
    ],
    ids=repr,
)
@pytest.mark.parametrize("key", of_type(Members))
def test_members_for_a_body_are_json(key: Key, value: Any, expected: str) -> None:
    """What goes into a request must be sayable in it."""
    assert faults_of(changed(key, value))[0].startswith(f"{'.'.join(key)}: {expected}")


@pytest.mark.parametrize(
    "name", ["model", "messages", "prompt", "prompt_embeds", "input", "stream", "stream_options", "n", "best_of"]
)
@pytest.mark.parametrize("key", of_type(Members))
def test_what_decides_is_the_clients_to_say(key: Key, name: str) -> None:
    """A member by which the gateway has routed or weighed a request cannot be put into it afterwards."""
    expected = f"{name} is for the client to say: the gateway has decided by it before this is merged in"
    assert [f"{'.'.join(key)}: {expected}"] == faults_of(changed(key, {"top_k": 20, name: 1}))


@pytest.mark.parametrize("key", of_type(Members))
def test_what_decides_may_be_deeper(key: Key) -> None:
    """Only the members of the body itself decide; an argument of a template may have any name."""
    load(changed(key, {"chat_template_kwargs": {"n": 1, "stream": True}}))


@pytest.mark.parametrize(
    ("value", "place", "expected"),
    [
        (3, "", "expected a table of names and their models, found an integer (3)"),
        (["claude"], "", "expected a table of names and their models, found an array"),
        ({"claude": ""}, ".claude", 'expected a string that is not empty, found a string ("")'),
        ({"claude": 3}, ".claude", "expected a string that is not empty, found an integer (3)"),
        ({"a": "reasoning", "b c": []}, '."b c"', "expected a string that is not empty, found an array"),
        ({"": "reasoning"}, '.""', 'expected a string that is not empty, found a string ("")'),
    ],
    ids=repr,
)
def test_aliases_are_names_for_models(value: Any, place: str, expected: str) -> None:
    """An alias has a name, and a model that has one; the fault is at the alias."""
    assert f"upstreams.reasoning.aliases{place}: {expected}" in faults_of(changed((*DIALECT[:2], "aliases"), value))


@pytest.mark.parametrize("value", ["", "relative", "~/key", "/a\0b", 3, True, ["/a"], {}], ids=repr)
@pytest.mark.parametrize("key", of_type(FilePath | None))
def test_a_file_has_an_absolute_path(key: Key, value: Any) -> None:
    """Which file is meant does not depend on where aiogw was started."""
    expected = f"{'.'.join(key)}: expected the absolute path of a file, found "
    assert any(fault.startswith(expected) for fault in faults_of(changed(key, value)))


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "/a", "a\0", 3, True, ["a"], {}], ids=repr)
@pytest.mark.parametrize("key", of_type(CredentialName | None))
def test_a_credential_has_the_name_of_a_file(key: Key, value: Any) -> None:
    """It names something in systemd's folder, and nothing outside of it."""
    expected = f"{'.'.join(key)}: expected the name of a credential, as in LoadCredential=NAME:PATH, found "
    assert any(fault.startswith(expected) for fault in faults_of(changed(key, value)))


@pytest.mark.parametrize("value", ["*", "none", "", 3, True, {}], ids=repr)
def test_a_holder_may_use_named_models_or_all(value: Any) -> None:
    """All is said by its word, and no pattern is one."""
    expected = 'auth.keys.reasoning.models: expected an array of names of models, or "all", found '
    assert any(fault.startswith(expected) for fault in faults_of(changed((*HOLDER, "models"), value)))


def test_no_keys_is_said() -> None:
    """Without a word on keys nothing starts; with ``none`` there is no table of them."""
    (fault,) = faults_of(changed(("auth",), ...))
    assert fault == "auth: missing; it has no default"
    assert config.loads(TEXT).auth.keys
    assert load(changed(("auth",), {"mode": "none"})).auth == AuthConfig(mode="none")


@pytest.mark.parametrize("value", ["INFO", "trace", "", 20, True, ["info"], {}], ids=repr)
@pytest.mark.parametrize(
    "key",
    [("server", "log_level"), ("server", "log_format"), ("auth", "mode"), (*DIALECT, "count_tokens")],
    ids=".".join,
)
def test_a_choice_names_what_there_is(key: Key, value: Any) -> None:
    """A word that is not on the list is refused together with the list."""
    fault = faults_of(changed(key, value))[0]
    listed = " or ".join(f'"{word}"' for word in get_args(TYPES[key]))
    assert fault.startswith(f"{'.'.join(key)}: expected {listed}, found ")


@pytest.mark.parametrize(
    ("value", "place", "expected"),
    [
        ([], "", "expected an array of at least one name, found none"),
        ("reasoning", "", 'expected an array of at least one name, found a string ("reasoning")'),
        ({}, "", "expected an array of at least one name, found a table"),
        (["a", ""], ".1", 'expected a string that is not empty, found a string ("")'),
        (["a", 3], ".1", "expected a string that is not empty, found an integer (3)"),
        ([["a"]], ".0", "expected a string that is not empty, found an array"),
    ],
)
@pytest.mark.parametrize("key", of_type(Names))
def test_a_list_of_names_has_one(key: Key, value: Any, place: str, expected: str) -> None:
    """An upstream has at least one model, and each has a name; efforts likewise; the fault is at the one."""
    document = changed(key, value, ((*DIALECT[:2], "aliases"), ...))
    assert [f"{'.'.join(key)}{place}: {expected}"] == faults_of(document)


def test_each_wrong_name_is_a_fault() -> None:
    """All of a list are told at once, and nothing that only follows from them: the aliases are not in question."""
    expected = [
        "upstreams.reasoning.models.0: expected a string that is not empty, found an integer (3)",
        "upstreams.reasoning.models.2: expected a string that is not empty, found an array",
    ]
    assert expected == faults_of(changed((*DIALECT[:2], "models"), [3, "a", ["b"]]))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (("server",), 3, "server: expected a table, found an integer (3)"),
        (("server",), [], "server: expected a table, found an array"),
        (("upstreams",), "x", 'upstreams: expected a table, found a string ("x")'),
        (("upstreams",), [{}], "upstreams: expected a table, found an array"),
        (("upstreams",), {}, "upstreams: expected at least one upstream"),
        (("upstreams", "reasoning"), 1.5, "upstreams.reasoning: expected a table, found a float (1.5)"),
        (
            ("upstreams", "reasoning", "admission"),
            "Unlimited",
            'upstreams.reasoning.admission: expected a table with the limits, or "unlimited", '
            'found a string ("Unlimited"); did you mean unlimited?',
        ),
        (
            ("upstreams", "reasoning", "admission"),
            True,
            'upstreams.reasoning.admission: expected a table with the limits, or "unlimited", found a boolean (true)',
        ),
    ],
)
def test_something_else_in_place_of_a_table(key: Key, value: Any, expected: str) -> None:
    """A value where a table belongs is a fault like any other."""
    assert [expected] == faults_of(changed(key, value))


def test_a_date_is_not_a_number() -> None:
    """TOML's own types of time are refused by name."""
    fault = faults_of(changed(("server", "max_body_bytes"), datetime.date(2026, 12, 1)))[0]
    assert "server.max_body_bytes: expected a whole number, at least 1, found date (2026-12-01)" == fault


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (("colour",), "colour"),
        (("server", "listn"), "server.listn"),
        (("upstreams", "reasoning", "slots"), "upstreams.reasoning.slots"),
        (("upstreams", "reasoning", "admission", "max"), "upstreams.reasoning.admission.max"),
        (("upstreams", "reasoning", "dialect", "image"), "upstreams.reasoning.dialect.image"),
    ],
)
def test_an_unknown_key_is_refused_with_the_known_ones(key: Key, path: str) -> None:
    """A misspelt key is found at every level, and the right spellings are beside it."""
    owner = next(name for name in TYPES if name[:-1] == key[:-1])
    (fault,) = faults_of(changed(key, 1))
    start, known, names = fault.partition(" Known here: ")
    assert known
    assert start.startswith(f"{path}: unknown key")
    assert owner[-1] in names.split(", ")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        (("colour",), "."),
        (("upstream",), "; did you mean upstreams?"),
        (("server", "log_levle"), "; did you mean log_level?"),
        (("upstreams", "reasoning", "admission", "capp"), "; did you mean cap?"),
        (("upstreams", "reasoning", "admission", "queue_timeout"), "; did you mean queue_timeout_seconds?"),
        (("upstreams", "reasoning", "cap"), "; it belongs to [upstreams.NAME.admission]."),
        (("listen",), "; it belongs to [server]."),
        (("server", "upstreams"), "; it belongs to the top of the file."),
        (("server", "credential"), "."),
    ],
)
def test_an_unknown_key_has_a_likely_one_beside_it(key: Key, hint: str) -> None:
    """The one that looks like it in the same table, or its own name in the only table that has it; else none."""
    (fault,) = faults_of(changed(key, 1))
    assert fault.startswith(f"{'.'.join(key)}: unknown key{hint} Known here: ")


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        (("server", "log_level"), "warn", "; did you mean warning?"),
        (("server", "log_level"), "loud", ""),
        ((*DIALECT[:2], "aliases"), {"x": "org/bigg"}, "; did you mean org/big?"),
        ((*HOLDER, "models"), ["raesoning"], "; did you mean reasoning?"),
    ],
)
def test_a_value_that_is_nearly_one_of_those_allowed(key: Key, value: Any, hint: str) -> None:
    """Where the allowed values are known, the one that was probably meant is named."""
    (fault,) = faults_of(changed(key, value))
    assert fault.endswith(hint) if hint else "did you mean" not in fault


# -- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "address", "shown"),
    [
        ("http://host", UpstreamAddress(scheme="http", host="host", port=80), "http://host:80"),
        ("https://host", UpstreamAddress(scheme="https", host="host", port=443), "https://host:443"),
        ("http://host:8000/", UpstreamAddress(scheme="http", host="host", port=8000), "http://host:8000"),
        ("HTTP://Host.Example.:80//", UpstreamAddress(scheme="http", host="host.example", port=80), None),
        ("http://host/a/B/", UpstreamAddress(scheme="http", host="host", port=80, prefix="/a/B"), None),
        ("http://[::1]:80", UpstreamAddress(scheme="http", host="::1", port=80), "http://[::1]:80"),
        ("http://[0:0:0:0:0:0:0:1]", UpstreamAddress(scheme="http", host="::1", port=80), "http://[::1]:80"),
        ("http://10.0.0.1:1", UpstreamAddress(scheme="http", host="10.0.0.1", port=1), "http://10.0.0.1:1"),
        ("http://[::ffff:10.0.0.1]:1", UpstreamAddress(scheme="http", host="10.0.0.1", port=1), "http://10.0.0.1:1"),
        ("http://10.0.0.1.", UpstreamAddress(scheme="http", host="10.0.0.1", port=80), "http://10.0.0.1:80"),
        ("http://4.gpu-7", UpstreamAddress(scheme="http", host="4.gpu-7", port=80), "http://4.gpu-7:80"),
        ("http://host/a..b/.c", UpstreamAddress(scheme="http", host="host", port=80, prefix="/a..b/.c"), None),
        ("unix:/run/vllm.sock", UpstreamAddress(scheme="http", path="/run/vllm.sock"), "unix:/run/vllm.sock"),
        ("unix:///run/./x/..//vllm.sock/", UpstreamAddress(scheme="http", path="/run/vllm.sock"), None),
    ],
)
def test_an_upstreams_address_has_one_form(value: str, address: UpstreamAddress, shown: str | None) -> None:
    """R67: case, trailing dots and slashes, and the default port do not matter; a path before /v1 is kept."""
    found = load(url(value)).upstreams["reasoning"].url
    assert address == found
    assert shown in (None, str(found))
    assert found == load(url(str(found))).upstreams["reasoning"].url


def test_the_parts_of_an_address() -> None:
    """``authority`` is what goes into Host, ``key`` is what two addresses of one endpoint share."""
    plain = UpstreamAddress(scheme="http", host="host", port=443, prefix="/a")
    assert ("host:443", "host:443/a") == (plain.authority, plain.key)
    assert plain.key == UpstreamAddress(scheme="https", host="host", port=443, prefix="/a").key
    assert "[::1]:80" == UpstreamAddress(scheme="http", host="::1", port=80).authority
    socket = UpstreamAddress(scheme="http", path="/run/vllm.sock")
    assert ("localhost", "unix:/run/vllm.sock") == (socket.authority, socket.key)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "host",
        "host:80",
        "//host",
        "ftp://host",
        "http:",
        "http://",
        "http:///v2",
        "http://a..b",
        "http://" + "a" * 64,
        "http://:80",
        "http://.",
        "http://host:99999",
        "http://host:-1",
        "http://host:eighty",
        "http://host:80:80",
        "http://::1",
        "http://[::1",
        "http://[nonsense]",
        "http://[::1]x:80",
        "http://host name",
        " http://host",
        "http://host ",
        "http://host/ ",
        "http://ho\tst",
        "http://ho\nst",
        "http://ho\x01st",
        "http://host/a b",
        "http://host/\x7f",
        "http://127.1",
        "http://2130706433",
        "http://0177.0.0.1",
        "http://127.0.0.01",
        "http://127.0.0.256",
        "http://1.2.3.4.5",
        "http://host.7",
        "http://0x7f000001",
        "http://127.0.0.0X1",
        "http://host/ü",
        "http://\u2100x",
        "http://host:0",
        "unix:",
        "unix:relative.sock",
        3,
        True,
        ["http://host"],
        {},
    ],
    ids=repr,
)
def test_what_is_no_upstream_address(value: Any) -> None:
    """An address that cannot be connected to, or would be read in two ways, is refused and not repaired."""
    (fault,) = faults_of(url(value))
    assert fault.startswith("upstreams.reasoning.url: expected ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://host/v1", "expected the address without /v1, which the gateway adds by itself"),
        ("http://host/v1/", "expected the address without /v1, which the gateway adds by itself"),
        ("http://host/proxy/v1", "expected the address without /v1, which the gateway adds by itself"),
        ("http://host?a=b", "expected an address without a query or fragment"),
        ("http://host/?", "expected an address without a query or fragment"),
        ("http://host#x", "expected an address without a query or fragment"),
        ("http://user:secret@host", "expected an address without user name and password in it"),
        ("http://host/a%2fb", "expected a path that can be written in one way only"),
        ("http://host/a%20b/", "expected a path that can be written in one way only"),
        ("http://host//a", "expected a path that can be written in one way only"),
        ("http://host/a//b", "expected a path that can be written in one way only"),
        ("http://host/./a", "expected a path that can be written in one way only"),
        ("http://host/a/../b", "expected a path that can be written in one way only"),
        ("http://host/a/..", "expected a path that can be written in one way only"),
    ],
)
def test_an_address_with_too_much_in_it(value: str, expected: str) -> None:
    """What people add to an address is named, and a password is not repeated."""
    (fault,) = faults_of(url(value))
    assert fault.startswith(f"upstreams.reasoning.url: {expected}")
    assert "secret" not in fault


@pytest.mark.parametrize(
    ("value", "address", "shown"),
    [
        ("127.0.0.1:0", ListenAddress(host="127.0.0.1", port=0), "127.0.0.1:0"),
        ("LocalHost:8080", ListenAddress(host="localhost", port=8080), "localhost:8080"),
        ("[::]:65535", ListenAddress(host="::", port=65535), "[::]:65535"),
        ("[::FFFF:127.0.0.1]:80", ListenAddress(host="127.0.0.1", port=80), "127.0.0.1:80"),
        ("unix:/run/aiogw/aiogw.sock", ListenAddress(path="/run/aiogw/aiogw.sock"), "unix:/run/aiogw/aiogw.sock"),
        (
            "unix://run/x/../aiogw//aiogw.sock",
            ListenAddress(path="/run/aiogw/aiogw.sock"),
            "unix:/run/aiogw/aiogw.sock",
        ),
    ],
)
def test_where_to_listen(value: str, address: ListenAddress, shown: str) -> None:
    """A host and a port, an IPv6 address in brackets and a port, or the path of a Unix socket."""
    found = load(listen(value)).server.listen
    assert (address, shown) == (found, str(found))


@pytest.mark.parametrize(
    "value",
    [
        *("", "host", ":80", "host:", "[::1]", "::1:80", "h:65536", "h:x", "unix:x", "h:1/x", "h :1", "u@h:1"),
        *("127.1:80", "0:80", "0x7f.1:80", "127.0.0.01:80", 80, True, []),
    ],
    ids=repr,
)
def test_what_is_no_place_to_listen(value: Any) -> None:
    """There is no port that nobody wrote, and no guess at what was meant."""
    (fault,) = faults_of(listen(value))
    assert fault.startswith('server.listen: expected "HOST:PORT", "[IPV6]:PORT" or "unix:/PATH", found ')


# -- several values together ----------------------------------------------------------------------------------------

ADMISSION = ("upstreams", "reasoning", "admission")
UPSTREAM_ENDPOINTS = ("upstreams", "reasoning", "endpoints")
# The base configuration with two endpoints in the place of its one address.
SEVERAL: list[tuple[Key, Any]] = [
    (("upstreams", "reasoning", "url"), ...),
    ((*ADMISSION, "engine_slots"), ...),
    (UPSTREAM_ENDPOINTS, [{"url": "http://a", "engine_slots": 4}, {"url": "http://b/engine", "engine_slots": 4}]),
]
CROSS_FAULTS: list[tuple[str, list[tuple[Key, Any]], str]] = [
    (
        "cap-is-all-slots",
        [((*ADMISSION, "cap"), 8)],
        "upstreams.reasoning.admission.cap: expected less than engine_slots (8), found an integer (8)",
    ),
    (
        "cap-above-slots",
        [((*ADMISSION, "cap"), 9)],
        "upstreams.reasoning.admission.cap: expected less than engine_slots (8), found an integer (9)",
    ),
    (
        "retry-after-the-wrong-way-round",
        [((*ADMISSION, "retry_after_min_seconds"), 30), ((*ADMISSION, "retry_after_max_seconds"), 29)],
        "upstreams.reasoning.admission.retry_after_min_seconds: expected at most retry_after_max_seconds (29), "
        "found an integer (30)",
    ),
    (
        "model-at-two-upstreams",
        [(("upstreams", "embeddings", "models"), ["embeddings", "org/big"])],
        'upstreams.embeddings.models.1: "org/big" is already a model of upstreams.reasoning',
    ),
    (
        "model-twice-at-one-upstream",
        [(("upstreams", "reasoning", "models"), ["reasoning", "a", "a"])],
        'upstreams.reasoning.models.2: "a" is already a model of this upstream',
    ),
    (
        "alias-that-is-a-model",
        [((*DIALECT[:2], "aliases"), {"org/big": "reasoning"})],
        'upstreams.reasoning.aliases."org/big": already a model of this upstream',
    ),
    (
        "model-that-is-an-alias-elsewhere",
        [(("upstreams", "embeddings", "models"), ["claude-reasoning"])],
        'upstreams.embeddings.models.0: "claude-reasoning" is already an alias of upstreams.reasoning',
    ),
    (
        "alias-for-two-models",
        [(("upstreams", "embeddings", "aliases"), {"claude-reasoning": "embeddings"})],
        "upstreams.embeddings.aliases.claude-reasoning: already an alias of upstreams.reasoning",
    ),
    (
        "alias-of-no-model",
        [((*DIALECT[:2], "aliases"), {"claude": "embeddings"})],
        'upstreams.reasoning.aliases.claude: expected one of upstreams.reasoning.models, found a string ("embeddings")',
    ),
    (
        "alias-of-an-alias-is-no-model",
        [((*DIALECT[:2], "aliases"), {"a": "reasoning", "b": "a"})],
        'upstreams.reasoning.aliases.b: expected one of upstreams.reasoning.models, found a string ("a")',
    ),
    (
        "one-address-twice",
        [(("upstreams", "embeddings", "url"), "HTTP://Reasoning-Predictor.LLM-serving.//")],
        "upstreams.embeddings.url: the same address as upstreams.reasoning.url (reasoning-predictor.llm-serving:80); "
        "one address has one gate, so list all its models under one upstream",
    ),
    (
        "keys-without-a-holder",
        [(HOLDER[:2], ...)],
        'auth.keys: expected at least one holder of a key, since auth.mode is "keys"',
    ),
    (
        "holders-and-no-keys",
        [(("auth", "mode"), "none")],
        'auth.keys: only with auth.mode = "keys": nobody is asked for a key',
    ),
    (
        "two-places-for-a-key",
        [((*HOLDER, "credential"), "reasoning")],
        "auth.keys.reasoning: expected one of file and credential, found both",
    ),
    (
        "no-place-for-a-key",
        [((*HOLDER, "file"), ...)],
        "auth.keys.reasoning: expected one of file and credential, found none",
    ),
    (
        "holder-of-no-model",
        [((*HOLDER, "models"), ["claude-reasoning", "reasoning", "gpt"])],
        'auth.keys.reasoning.models.2: no upstream serves "gpt"',
    ),
    (
        "two-places-for-a-credential",
        [((*DIALECT[:2], "credential"), "reasoning")],
        "upstreams.reasoning.credential_file: there is a credential, too; expected one of them",
    ),
    (
        "ca-without-tls",
        [((*DIALECT[:2], "ca_file"), "/etc/aiogw/ca.pem")],
        "upstreams.reasoning.ca_file: only for an https url",
    ),
    (
        "one-address-twice-among-endpoints",
        [
            *SEVERAL,
            (UPSTREAM_ENDPOINTS, [{"url": "http://a", "engine_slots": 4}, {"url": "http://A:80/", "engine_slots": 4}]),
        ],
        "upstreams.reasoning.endpoints.1.url: the same address as upstreams.reasoning.endpoints.0.url (a:80); one "
        "address has one gate, so list all its models under one upstream",
    ),
    (
        "an-endpoint-that-is-an-upstream",
        [*SEVERAL, (UPSTREAM_ENDPOINTS, [{"url": "https://embeddings", "engine_slots": 8}])],
        "upstreams.embeddings.url: the same address as upstreams.reasoning.endpoints.0.url (embeddings:443); "
        "one address has one gate, so list all its models under one upstream",
    ),
    (
        "url-and-endpoints",
        [*SEVERAL, (("upstreams", "reasoning", "url"), "http://c")],
        "upstreams.reasoning.endpoints: expected either url or endpoints, found both",
    ),
    (
        "resolve-without-endpoints",
        [(("upstreams", "reasoning", "resolve"), "every-address")],
        "upstreams.reasoning.resolve: needs endpoints, since each address has slots of its own",
    ),
    (
        "resolve-a-socket",
        [
            *SEVERAL,
            (("upstreams", "reasoning", "resolve"), "every-address"),
            (UPSTREAM_ENDPOINTS, [{"url": "unix:/run/a", "engine_slots": 8}]),
        ],
        "upstreams.reasoning.endpoints.0.url: expected a host name, since resolve is set, found a string "
        '("unix:/run/a")',
    ),
    (
        "endpoints-without-a-cap",
        [*SEVERAL, (("upstreams", "reasoning", "admission"), "unlimited")],
        "upstreams.reasoning.admission: expected a table with a cap, since endpoints are chosen by their free slots",
    ),
    (
        "slots-in-two-places",
        [*SEVERAL, (("upstreams", "reasoning", "admission", "engine_slots"), 8)],
        "upstreams.reasoning.admission.engine_slots: expected with each of endpoints, and not here",
    ),
    (
        "cap-of-all-endpoints",
        [*SEVERAL, (("upstreams", "reasoning", "admission", "cap"), 8)],
        "upstreams.reasoning.admission.cap: expected less than engine_slots (8), found an integer (8)",
    ),
    (
        "no-endpoint",
        [*SEVERAL, (UPSTREAM_ENDPOINTS, [])],
        "upstreams.reasoning.endpoints: expected an array of at least one table, found none",
    ),
    (
        "an-endpoint-without-slots",
        [*SEVERAL, (UPSTREAM_ENDPOINTS, [{"url": "http://a"}])],
        "upstreams.reasoning.endpoints.0.engine_slots: missing; it has no default",
    ),
    (
        "admin-where-clients-are",
        [(("server", "admin_listen"), "127.0.0.1:8080")],
        "server.admin_listen: the same address as server.listen",
    ),
]


@pytest.mark.parametrize(
    ("changes", "expected"), [pytest.param(changes, text, id=name) for name, changes, text in CROSS_FAULTS]
)
def test_values_that_do_not_go_together(changes: list[tuple[Key, Any]], expected: str) -> None:
    """What each of two values allows, both together may forbid; the fault is at the one to change."""
    assert [expected] == faults_of(changed(*changes[0], *changes[1:]))


AT_ONCE = (
    "cap-is-all-slots",
    "retry-after-the-wrong-way-round",
    "one-address-twice",
    "two-places-for-a-credential",
    "ca-without-tls",
    "admin-where-clients-are",
)


def test_several_endpoints() -> None:
    """Each has its address and its slots; all is read back as it was written."""
    loaded = load(changed(*SEVERAL[0], *SEVERAL[1:], (("upstreams", "reasoning", "resolve"), "every-address")))
    reasoning = loaded.upstreams["reasoning"]
    assert reasoning.endpoints is not None
    assert [("http://a:80", 4), ("http://b:80/engine", 4)] == [
        (str(one.url), one.engine_slots) for one in reasoning.endpoints
    ]
    assert ("a:80", "b:80/engine") == reasoning.addresses
    assert loaded == config.loads(config.dumps(loaded))


def test_a_cap_over_names_with_any_number_of_addresses() -> None:
    """How many slots they have is known when their addresses are."""
    resolved = (("upstreams", "reasoning", "resolve"), "every-address")
    assert [] == attempt(changed(*SEVERAL[0], *SEVERAL[1:], resolved, ((*ADMISSION, "cap"), 12)))


def test_faults_of_all_kinds_come_at_once() -> None:
    """One run tells everything: missing, wrong, unknown, and what does not go together."""
    changes = [change for _name, changes, _text in CROSS_FAULTS for change in changes if _name in AT_ONCE]
    document = changed(
        ("server", "log_level"),
        ...,
        (("server", "max_body_bytes"), "8"),
        (("upstreams", "reasoning", "slots"), 8),
        (("upstreams", "embeddings", "connect_timeout_seconds"), True),
        *changes,
        ((*ADMISSION, "queue_limit"), ...),
    )
    faults = faults_of(document)
    assert {
        "server.log_level",
        "server.max_body_bytes",
        "server.admin_listen",
        "upstreams.reasoning.slots",
        "upstreams.reasoning.admission.cap",
        "upstreams.reasoning.admission.queue_limit",
        "upstreams.reasoning.admission.retry_after_min_seconds",
        "upstreams.reasoning.credential_file",
        "upstreams.reasoning.ca_file",
        "upstreams.embeddings.connect_timeout_seconds",
        "upstreams.embeddings.url",
    } == {fault.partition(":")[0] for fault in faults}
    assert 11 == len(faults)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://host", "http://HOST"),
        ("http://host", "http://host:80"),
        ("https://host", "https://host:443/"),
        ("http://host", "http://host./"),
        ("http://host/a", "http://host/a/"),
        ("http://[::1]", "http://[0:0::1]:80"),
        ("http://host:443", "https://host"),
        ("http://10.0.0.1", "http://[::ffff:10.0.0.1]"),
        ("http://10.0.0.1", "http://[::ffff:a00:1]:80/"),
        ("unix:/run/a", "unix:/run/a"),
        ("unix:/run/a", "unix:///run/./b/../a"),
    ],
)
def test_two_spellings_of_one_address(one: str, other: str) -> None:
    """Two gates for one engine would let through twice its cap, so two names for one address are refused."""
    document = changed(("upstreams", "reasoning", "url"), one, (("upstreams", "embeddings", "url"), other))
    (fault,) = faults_of(document)
    assert fault.startswith("upstreams.embeddings.url: the same address as upstreams.reasoning.url (")


@pytest.mark.parametrize(
    ("one", "other"),
    [("http://host", "http://host:81"), ("http://host/a", "http://host/b"), ("http://a", "http://b")],
)
def test_two_addresses(one: str, other: str) -> None:
    """Another port, host or path is another engine."""
    load(changed(("upstreams", "reasoning", "url"), one, (("upstreams", "embeddings", "url"), other)))


@pytest.mark.parametrize(
    ("listen", "admin_listen", "collide"),
    [
        ("0.0.0.0:9", "127.0.0.1:9", True),
        ("127.0.0.1:9", "0.0.0.0:9", True),
        ("[::]:9", "[::1]:9", True),
        ("localhost:9", "127.0.0.1:9", True),
        ("[::]:9", "localhost:9", True),
        ("0.0.0.0:9", "[::]:9", False),
        ("0.0.0.0:9", "127.0.0.1:8", False),
        ("0.0.0.0:0", "127.0.0.1:0", False),
        ("127.0.0.1:9", "127.0.0.2:9", False),
        ("10.0.0.1:9", "localhost:9", False),
        ("0.0.0.0:9", "host:9", False),
        ("unix:/a", "unix:/b", False),
    ],
)
def test_every_address_is_that_of_the_other(listen: str, admin_listen: str, collide: bool) -> None:
    """One port cannot be had on all addresses and on one of them as well; only a name is not looked up for that."""
    document = changed(("server", "listen"), listen, (("server", "admin_listen"), admin_listen))
    expected = [f"server.admin_listen: server.listen ({listen}) has this port on the same address"]
    assert (expected if collide else []) == attempt(document)


@pytest.mark.parametrize("name", ["a\nb", "<b>\t", "a\x1b[2J", "\x9b2J", "\u2028", ""], ids=ascii)
def test_a_name_is_one_line_that_can_be_printed(name: str) -> None:
    """Terminals, logs and pages show it; what is said of it is printable itself."""
    document = changed(("upstreams", name), BASE["upstreams"]["embeddings"], (("upstreams", "embeddings"), ...))
    document["auth"]["keys"] = {"ä <b>": {"file": "/k", "models": "all", "queue_places": 1}}
    (fault,) = faults_of(document)
    assert fault.endswith(": expected a name of printable characters")
    assert fault.isprintable()
    document = changed(("auth", "keys"), {name or "\n": {"file": "/k", "models": "all", "queue_places": 1}})
    (fault,) = faults_of(document)
    assert fault.startswith("auth.keys.")
    assert fault.endswith(": expected a name of printable characters")


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        (("server", "log_level"), "INFO", "info"),
        (("server", "log_format"), "JSON", "json"),
        (("upstreams", "reasoning", "admission"), "unlimted", "unlimited"),
        (("auth", "keys"), {"a": {"file": "/k", "models": "al", "queue_places": 1}}, "all"),
        (("server", "LISTEN"), "127.0.0.1:1", "listen"),
    ],
)
def test_a_word_in_another_case_or_mistyped_is_known(key: Key, value: Any, meant: str) -> None:
    """The nearest word that there is."""
    changes = [(("server", "listen"), ...)] if key[-1] == "LISTEN" else []
    (fault,) = faults_of(changed(key, value, *changes))
    assert f"; did you mean {meant}?" in fault


@pytest.mark.parametrize(
    "change",
    [
        ((*ADMISSION, "retry_after_min_seconds"), 70),
        ((*ADMISSION, "retry_after_max_seconds"), 0),
        ((*ADMISSION, "engine_slots"), 0),
        (("server", "body_memory_bytes"), 0),
    ],
    ids=lambda change: change[0][-1],
)
def test_one_cause_is_one_fault(change: tuple[Key, Any]) -> None:
    """A value that is none by itself is not compared with others."""
    (fault,) = faults_of(changed(*change))
    assert fault.startswith(".".join(change[0]) + ": expected a whole number")


def test_two_free_ports_are_two_places() -> None:
    """Port 0 is a new port each time, so both listeners may ask for one."""
    load(changed(("server", "listen"), "127.0.0.1:0", (("server", "admin_listen"), "127.0.0.1:0")))


@pytest.mark.parametrize("value", [3, True, [3], ["embeddings", 3, "x"], {}, {"a": 1}], ids=repr)
@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_value_hides_no_other_fault(key: Key, value: Any) -> None:
    """Whatever stands in one place, what is wrong elsewhere is still told."""
    document = changed(key, value)
    document["other"] = 1
    assert any(fault.startswith("other: unknown key") for fault in faults_of(document))


def test_notes_of_others_are_no_part_of_a_path() -> None:
    """A path is made of what cattrs notes on an error; whatever else is noted on it is stepped over."""
    error = ValueError("x")
    error.add_note("somebody else's")
    error.add_note(AttributeValidationNote("structuring", "cap", int))
    assert ["cap: x"] == [str(one) for one in value_faults(BaseValidationError("x", [error], Config), {}, {})]


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_syntax_error_has_its_line() -> None:
    """What is not TOML is said with the place where it stops to be."""
    (fault,) = faults_of("[server]\nlisten = \n")
    assert re.fullmatch(r"not valid TOML: expected a value: .* \(line 2, column 10\)", fault)


@pytest.mark.parametrize(
    "text",
    ["[server", "a = 1\na = 2", "a = 2026-13-45", "=", "a = " + "1" * 5000, "a = " + "[" * 50_000],
    ids=lambda t: t[:9],
)
def test_what_is_not_toml(text: str) -> None:
    """Every way not to be TOML is one fault, also those that tomllib has no error of its own for."""
    (fault,) = faults_of(text)
    assert fault.startswith("not valid TOML: ")


@pytest.mark.parametrize(
    ("misspelt", "expected"),
    [
        (("cap =", "capp ="), ["upstreams.reasoning.admission.capp: unknown key; did you mean cap?"]),
        (("\nurl =", "\nurls ="), ["upstreams.reasoning.urls: unknown key; did you mean url?"]),
        (("engine_slots =", "engineslots ="), ["admission.engineslots: unknown key; did you mean engine_slots?"]),
        (("reasoning.admission]", "reasoning.admision]"), ["reasoning.admision: unknown key; did you mean admission?"]),
        (("auth.keys", "auth.kyes"), ["auth.kyes: unknown key; did you mean keys?"]),
        # In what was put right, all else is found, by the names that the file has.
        (
            ("admission]\nengine_slots = 8\ncap = 6", "admision]\nengine_slots = 8\ncapp = 8"),
            [
                "upstreams.reasoning.admision: unknown key; did you mean admission?",
                "upstreams.reasoning.admision.capp: unknown key; did you mean cap?",
                "upstreams.reasoning.admision.capp: expected less than engine_slots (8), found an integer (8)",
            ],
        ),
        # One that is there, or that is meant twice, is no other's name.
        (("cap = 6", "cap = 6\ncapp = 7"), ["admission.capp: unknown key; did you mean cap?"]),
        (
            ("cap = 6", "capp = 6\ncapq = 6"),
            ["admission.capp: unknown key; did you mean cap?", "admission.capq: unknown key; did you mean cap?"],
        ),
    ],
    ids=lambda value: value[1][:20] if isinstance(value, tuple) else "",
)
def test_a_misspelt_key_is_one_fault(misspelt: tuple[str, str], expected: list[str]) -> None:
    """It is not missing as well under its right name, and nothing that follows from that is told."""
    assert misspelt[0] in TEXT
    faults = faults_of(TEXT.replace(*misspelt, 1))
    assert len(expected) == len(faults), faults
    for words, fault in zip(expected, faults, strict=True):
        assert words in fault


def test_an_empty_file_lacks_everything() -> None:
    """Without a line there is nothing to run with, and the tables that are missing are named."""
    tables = ("server", "auth", "upstreams")
    assert [f"{table}: missing; it has no default" for table in tables] == faults_of("")


def test_a_file_is_read(tmp_path: Path) -> None:
    """``load`` is ``loads`` of the file's text, also with line ends of other systems."""
    path = tmp_path / "gateway.toml"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert config.loads(TEXT) == config.load(path)


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda path: None, "no such file or directory"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.write_bytes(b"# \xc3\xbc\na = '\xff'"), "not UTF-8 text"),
    ],
    ids=["missing", "directory", "not-utf-8"],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, prepare: Callable[[Path], object], expected: str) -> None:
    """The file and the reason are in the fault."""
    path = tmp_path / "gateway.toml"
    prepare(path)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    place = f"{path}:2:6" if "UTF" in expected else path
    assert [f"{place}: {expected}"] == caught.value.faults


# -- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [TEXT, EXAMPLE.read_text()], ids=["base", "example"])
def test_what_is_shown_is_read_back(text: str) -> None:
    """``dumps`` writes TOML that means the same, and writes it the same way again."""
    loaded = config.loads(text)
    shown = config.dumps(loaded)
    assert loaded == config.loads(shown)
    assert shown == config.dumps(config.loads(shown))


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    upstream=NAMES.filter(str.isprintable),
    models=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    listen_at=st.sampled_from(["[::1]:80", "unix:/run/a b\"\\'/s.sock", "h:1"]),
    url_of=st.sampled_from(["unix:/run/ü.sock", "https://h.:8443/Pre-fix/", "http://[fe80::1]"]),
    seconds=st.floats(min_value=1e-9, max_value=1e9) | st.integers(1, 10**9),
)
def test_any_valid_configuration_is_read_back(
    upstream: str, models: list[str], listen_at: str, url_of: str, seconds: float
) -> None:
    """Also with names, paths and numbers that nobody sane would choose."""
    document = changed(("server", "listen"), listen_at, (("server", "drain_timeout_seconds"), seconds))
    document["upstreams"] = {upstream: {**BASE["upstreams"]["reasoning"], "models": models, "url": url_of}}
    document["upstreams"][upstream]["aliases"] = {"".join(models) + "+": models[-1]}
    loaded = load(document)
    assert seconds == loaded.server.drain_timeout_seconds
    assert tuple(models) == loaded.upstreams[upstream].models
    assert models[-1] == loaded.upstreams[upstream].aliases["".join(models) + "+"]
    assert loaded == config.loads(config.dumps(loaded))


TOML_KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TOML_VALUES = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats()
    | TOML_KEYS
    | st.text(st.characters(max_codepoint=127), max_size=30).map("http://".__add__)
    | st.dates()
    | st.times()
    | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TOML_KEYS, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=1500)
@given(key=st.sampled_from(list(TYPES)), value=TOML_VALUES)
@example(key=("upstreams", "reasoning", "url"), value="http://[::1")
@example(key=("upstreams", "reasoning", "url"), value="http://\u2100")
@example(key=("server", "listen"), value="a\nb")
@example(key=("server",), value={"\n": 1})
@example(key=("upstreams",), value={"a\nb": {}})
@example(key=("server", "drain_timeout_seconds"), value=10**400)
@example(key=(*ADMISSION, "cap"), value=10**4000)
def test_any_value_at_any_key_is_loaded_or_refused_by_its_path(key: Key, value: Any) -> None:
    """No value makes the configuration fail in another way, and each fault is one line that names its key."""
    faults = attempt(changed(key, value))
    # Of two values that do not go together, the fault may be at the other; it then names this one.
    assert not faults or any(fault.startswith(".".join(key)) or key[-1] in fault for fault in faults)
    assert [] == [fault for fault in faults if "\n" in fault]
