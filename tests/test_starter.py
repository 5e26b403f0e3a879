"""``aiogw init``: a first configuration from what an engine says of itself, that check accepts and nobody loses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tomllib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from broken_configurations import SOUND
from rig import Exchange, ScriptedUpstream
from test_config import TEXT

from aiogw import cli, config, starter
from aiogw.config.commented import commented

EXAMPLE = Path(__file__).parent.parent / "etc" / "gateway.toml"


def card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": 4096}


MODELS = {"object": "list", "data": [card("Qwen/Qwen3-8B.fp8"), card("lora"), card("lora")]}


@contextlib.asynccontextmanager
async def engine(answers: Mapping[str, Any]) -> AsyncIterator[ScriptedUpstream]:
    """Answers each path with its document, or with its status where that is a number."""

    def script(exchange: Exchange) -> None:
        answer = answers.get(exchange.request.target, 404)
        if isinstance(answer, int):
            exchange.answer(b'{"error": {"message": "no"}}', status=answer)
        else:
            exchange.answer(json.dumps(answer).encode())

    upstream = await ScriptedUpstream(script).start()
    try:
        yield upstream
    finally:
        await upstream.stop()


async def init(upstream: ScriptedUpstream | str, *arguments: str | Path) -> int:
    """The command, in a thread, since it has an event loop of its own."""
    url = upstream if isinstance(upstream, str) else upstream.url
    return await asyncio.to_thread(cli.main, ["init", "--from", url, *map(str, arguments)])


async def test_it_is_accepted_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's models and version are in it, the slots are those that were named, and check has nothing to say."""
    file = tmp_path / "gateway.toml"
    async with engine({"/v1/models": MODELS, "/version": {"version": "0.32.0"}}) as upstream:
        assert 0 == await init(upstream, "--engine-slots", "8", "--output", file)
        assert ("", "") == capsys.readouterr()
        assert 0 == cli.main(["check", "--config", str(file)])
        ((name, made),) = config.load(file).upstreams.items()
        assert ("qwen3-8b-fp8", ("Qwen/Qwen3-8B.fp8", "lora")) == (name, made.models)
        assert upstream.url == str(made.url)
        assert isinstance(made.admission, config.AdmissionConfig)
        assert (8, 7) == (made.admission.engine_slots, made.admission.cap)
        assert file.read_text().startswith(f'# Made by "aiogw init" for vLLM 0.32.0 at {upstream.url}.\n')


async def test_its_numbers_are_those_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file it goes to standard output; all but address, names and slots is as in the commented example."""
    async with engine({"/v1/models": MODELS}) as upstream:
        assert 0 == await init(upstream, "--engine-slots", "8")
    made = tomllib.loads(capsys.readouterr().out)
    expected = tomllib.loads(EXAMPLE.read_text())
    assert expected["server"] == made["server"]
    ours, theirs = made["upstreams"]["qwen3-8b-fp8"], expected["upstreams"]["reasoning"]
    named = {"url", "models", "admission", "aliases", "dialect"}
    assert {k: v for k, v in theirs.items() if k not in named} == {k: v for k, v in ours.items() if k not in named}
    assert theirs["admission"] | {"cap": 7} == ours["admission"]


async def test_a_file_is_never_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there stays, and the engine is not even asked; with --force it is replaced."""
    file = tmp_path / "gateway.toml"
    file.write_text("mine")
    async with engine({"/v1/models": MODELS}) as upstream:
        assert 1 == await init(upstream, "--engine-slots", "8", "--output", file)
        assert ("", f"aiogw: {file} exists; --force overwrites it\n") == capsys.readouterr()
        assert ("mine", []) == (file.read_text(), upstream.exchanges)
        assert 0 == await init(upstream, "--engine-slots", "8", "--output", file, "--force")
    config.load(file)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"/v1/models": {"data": []}}, "serves no model"),
        ({"/v1/models": {"data": [{"id": ""}, {"id": 3}]}}, "serves no model"),
        ({"/v1/models": "text"}, "its list of models is not one"),
        ({"/v1/models": 404}, "no list of models"),
        ({"/v1/models": 401}, "no list of models"),
    ],
    ids=["none", "nameless", "no-list", "no-such-path", "no-key"],
)
async def test_an_engine_that_tells_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: Mapping[str, Any], expected: str
) -> None:
    """Exit code 1, one line that says why, and no file."""
    file = tmp_path / "gateway.toml"
    async with engine(answers) as upstream:
        assert 1 == await init(upstream, "--engine-slots", "8", "--output", file)
    out, err = capsys.readouterr()
    assert ("", 1) == (out, err.count("\n"))
    assert err.startswith("aiogw: ")
    assert expected in err
    assert not file.exists()


async def test_an_engine_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not waited for without end."""
    monkeypatch.setattr(starter, "ASK_TIMEOUT_SECONDS", 0.2)
    upstream = await ScriptedUpstream().start()
    try:
        assert 1 == await init(upstream, "--engine-slots", "8")
    finally:
        await upstream.stop()
    expected = f"aiogw: no list of models from {upstream.url}: it took longer than 0.2 s\n"
    assert ("", expected) == capsys.readouterr()


async def test_a_place_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said with the system's reason."""
    file = tmp_path / "nowhere" / "gateway.toml"
    async with engine({"/v1/models": MODELS}) as upstream:
        assert 1 == await init(upstream, "--engine-slots", "8", "--output", file)
    assert ("", f"aiogw: {file}: no such file or directory\n") == capsys.readouterr()


async def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The address and the system's reason are said."""
    async with engine({}) as upstream:
        url = upstream.url
    assert 1 == await init(url, "--engine-slots", "8")
    out, err = capsys.readouterr()
    assert ("", 1) == (out, err.count("\n"))
    assert url in err
    assert "connection refused" in err


async def test_an_engine_that_wants_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown the key, whose file the configuration names; the key itself is nowhere."""
    secret = tmp_path / "key"
    secret.write_text("canary-sk-1\n")
    secret.chmod(0o600)
    async with engine({"/v1/models": MODELS}) as upstream:
        assert 0 == await init(upstream, "--engine-slots", "2", "--credential-file", secret)
        assert "Bearer canary-sk-1" == upstream.exchanges[0].request.header("authorization")
        out, _ = capsys.readouterr()
        assert str(secret) == tomllib.loads(out)["upstreams"]["qwen3-8b-fp8"]["credential_file"]
        assert "canary" not in out
        secret.chmod(0o644)
        assert 2 == await init(upstream, "--engine-slots", "2", "--credential-file", secret)
        assert f"{secret} is open to others" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--from", "http://x"], "the following arguments are required: --engine-slots"),
        (["--engine-slots", "8"], "the following arguments are required: --from"),
        (["--from", "http://x/v1", "--engine-slots", "8"], "--from: expected the address without /v1"),
        (["--from", "x:8000", "--engine-slots", "8"], '--from: expected "http://HOST[:PORT]"'),
        (["--from", "http://x", "--engine-slots", "1"], "--engine-slots: expected a whole number, at least 2"),
        (["--from", "http://x", "--engine-slots", "many"], "--engine-slots: expected a whole number, at least 2"),
    ],
)
def test_what_cannot_be_asked_has_to_be_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    """The engine does not tell its slots, and nothing is taken for them unsaid."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["init", *arguments])
    assert 2 == caught.value.code
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("text", [TEXT, SOUND, EXAMPLE.read_text()], ids=["all-keys", "endpoints", "example"])
def test_what_is_commented_is_read_back(text: str) -> None:
    """Comments or not, it means the same, and every line is a comment or fits to one above it."""
    loaded = config.loads(text)
    written = commented(loaded, "A line.\n\nAnother.")
    assert loaded == config.loads(written)
    assert written.startswith("# A line.\n#\n# Another.\n")
    assert max(map(len, written.splitlines())) <= 120
