"""The lines that point a client at the gateway: what they say, and that a shell, Codex or opencode reads it so."""

import json
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from aiogw import cli, clients, config

JSON = dict[str, Any]

EXAMPLE = tomllib.loads((Path(__file__).parent.parent / "etc" / "gateway.toml").read_text())
SERVER = EXAMPLE["server"] | {"listen": "127.0.0.1:8080"}
GATE = EXAMPLE["upstreams"]["reasoning"]["admission"] | {"queue_timeout_seconds": 60}


def upstream(number: int, *models: str, admission: Any = GATE, **others: Any) -> JSON:
    times = {"connect_timeout_seconds": 5, "first_byte_timeout_seconds": 600, "idle_timeout_seconds": 120}
    return {"url": f"http://engine-{number}", "models": list(models), "admission": admission, **times, **others}


EMBEDDINGS = upstream(0, "embeddings", admission="unlimited")


def document(*upstreams: JSON, auth: JSON | None = None, **server: Any) -> str:
    chosen = upstreams or (EMBEDDINGS, upstream(1, "reasoning", aliases={"claude-reasoning": "reasoning"}))
    tables = {f"engine-{number}": table for number, table in enumerate(chosen)}
    return tomli_w.dumps({"server": SERVER | server, "auth": auth or {"mode": "none"}, "upstreams": tables})


def lines(name: str, *upstreams: JSON, **server: Any) -> str:
    return clients.lines(name, config.loads(document(*upstreams, **server)))


def exported(text: str) -> dict[str, str]:
    """The environment that a shell has after it has read ``text``."""
    script = f"{text}\nexec env -0"
    done = subprocess.run(["env", "-i", "/bin/bash", "-c", script], check=True, capture_output=True, timeout=10)
    pairs = (entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry)
    return {name: value for name, value in pairs if name not in ("PWD", "SHLVL", "_")}


def test_claude_code_is_told_the_messages_surface_and_a_model_for_each_tier() -> None:
    """Claude Code gets the base URL with /llm, a token and no key, names that exist, and time-outs that outlast us."""
    assert exported(lines("claude-code")) == {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8080/llm",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": "claude-reasoning",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "claude-reasoning",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "claude-reasoning",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "claude-reasoning",
        "API_TIMEOUT_MS": "690000",
        "API_FORCE_IDLE_TIMEOUT": "0",
        "CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY": "1",
    }


def test_claude_code_takes_the_first_gated_model_where_none_is_called_claude() -> None:
    """Without a name that has claude in it, every tier is the first model of the first upstream with a gate."""
    told = exported(lines("claude-code", EMBEDDINGS, upstream(1, "reasoning", "other"), upstream(2, "third")))
    assert {told[name] for name in told if name.endswith("_MODEL")} == {"reasoning"}
    assert "CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY" not in told


def test_claude_code_takes_names_that_say_their_tier() -> None:
    """A name with claude and a tier in it serves that tier, wherever it is, and the first such name serves the rest."""
    large = upstream(1, "large", aliases={"Claude-Sonnet-4-5": "large", "claude-opus-4-5": "large"})
    small = upstream(2, "claude-3-haiku")
    told = exported(lines("claude-code", large, small))
    assert told["ANTHROPIC_MODEL"] == "Claude-Sonnet-4-5"
    assert told["ANTHROPIC_DEFAULT_SONNET_MODEL"] == "Claude-Sonnet-4-5"
    assert told["ANTHROPIC_DEFAULT_OPUS_MODEL"] == "claude-opus-4-5"
    assert told["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "claude-3-haiku"


@pytest.mark.parametrize("name", ["reasoning", "claude_reasoning", "anthropic-reasoning"])
def test_claude_code_is_told_the_context_length_where_it_believes_it(name: str) -> None:
    """A known context length is exported for names that do not begin as Anthropic's own do."""
    told = exported(lines("claude-code", upstream(1, name, dialect={"max_model_len": 32768})))
    assert told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"


def test_claude_code_is_not_told_a_context_length_that_it_would_ignore() -> None:
    """For a name like Anthropic's own the line is there as a comment, with what would have to change."""
    text = lines("claude-code", upstream(1, "claude-reasoning", dialect={"max_model_len": 32768}))
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in exported(text)
    assert "# export CLAUDE_CODE_MAX_CONTEXT_TOKENS=32768" in text


def test_codex_gets_a_provider_that_speaks_responses() -> None:
    """Codex gets a whole config.toml, with an idle time-out that outlasts queue and first byte."""
    assert tomllib.loads(lines("codex")) == {
        "model": "reasoning",
        "model_provider": "aiogw",
        "model_providers": {
            "aiogw": {
                "name": "aiogw",
                "base_url": "http://127.0.0.1:8080/v1",
                "wire_api": "responses",
                "stream_idle_timeout_ms": 690000,
            }
        },
    }


def test_codex_is_told_the_context_length() -> None:
    """A known context length is Codex's window."""
    told = tomllib.loads(lines("codex", upstream(1, "reasoning", dialect={"max_model_len": 32768})))
    assert told["model_context_window"] == 32768


def without_comment(text: str) -> JSON:
    first, rest = text.split("\n", 1)
    assert first.startswith("//")
    found: JSON = json.loads(rest)
    return found


def test_opencode_gets_a_provider_with_the_models_that_generate() -> None:
    """The document for opencode has gated models and their aliases, and none that only embeds."""
    assert without_comment(lines("opencode")) == {
        "$schema": "https://opencode.ai/config.json",
        "model": "aiogw/reasoning",
        "provider": {
            "aiogw": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "aiogw",
                "options": {
                    "baseURL": "http://127.0.0.1:8080/v1",
                    "headerTimeout": 690000,
                    "chunkTimeout": 690000,
                },
                "models": {"reasoning": {}, "claude-reasoning": {}},
            }
        },
    }


@pytest.mark.parametrize(("length", "output"), [(8192, 2048), (262144, 32000), (1, 1)])
def test_opencode_is_told_how_much_it_may_ask_for(length: int, output: int) -> None:
    """With a known context length an answer may take a quarter of it, and never more than opencode takes unasked."""
    told = without_comment(lines("opencode", upstream(1, "reasoning", dialect={"max_model_len": length})))
    assert told["provider"]["aiogw"]["models"]["reasoning"]["limit"] == {"context": length, "output": output}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("open-webui", {"OPENAI_API_BASE_URLS": "http://127.0.0.1:8080/v1", "OPENAI_API_KEYS": "none"}),
        ("openai", {"OPENAI_BASE_URL": "http://127.0.0.1:8080/v1", "OPENAI_API_KEY": "none"}),
        ("anthropic", {"ANTHROPIC_BASE_URL": "http://127.0.0.1:8080/llm", "ANTHROPIC_API_KEY": "none"}),
    ],
)
def test_what_is_configured_by_its_environment_gets_that(name: str, expected: dict[str, str]) -> None:
    """Open WebUI and the SDKs get an address and a key, and nothing else."""
    assert exported(lines(name)) == expected


def test_the_sdks_are_told_the_names_of_the_models() -> None:
    """For an SDK the model is in the program, so its lines name what there is in a comment."""
    assert lines("openai").splitlines()[0].endswith("its models: reasoning, claude-reasoning")


def curl_commands(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines()]


def test_curl_gets_one_command_for_each_surface() -> None:
    """The commands stream a greeting, on /v1 and on /llm."""
    openai, anthropic = curl_commands(lines("curl"))
    assert openai[:3] == ["curl", "-N", "http://127.0.0.1:8080/v1/chat/completions"]
    assert anthropic[:3] == ["curl", "-N", "http://127.0.0.1:8080/llm/v1/messages"]
    asked = {"model": "reasoning", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    assert json.loads(openai[-1]) == asked
    assert json.loads(anthropic[-1]) == asked | {"max_tokens": 1000}


@pytest.mark.parametrize(
    ("listen", "origin"),
    [
        ("0.0.0.0:8080", "http://HOST:8080"),
        ("[::]:8080", "http://HOST:8080"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("gateway.lan:80", "http://gateway.lan:80"),
        ("127.0.0.1:0", "http://127.0.0.1:PORT"),
    ],
)
def test_the_address_is_one_that_a_client_can_use(listen: str, origin: str) -> None:
    """A wildcard, or a port that the kernel chooses, becomes a placeholder; an IPv6 address has its brackets."""
    for name in clients.CLIENTS:
        assert origin in lines(name, listen=listen)


def test_curl_can_use_a_unix_socket() -> None:
    """For curl a Unix socket is an option, quoted for the shell."""
    for command in curl_commands(lines("curl", listen="unix:/run/my gateway.sock")):
        assert command[2:4] == ["--unix-socket", "/run/my gateway.sock"]
        assert command[4].startswith("http://localhost/")


@pytest.mark.parametrize("name", sorted(set(clients.CLIENTS) - {"curl"}))
def test_nothing_else_can_use_a_unix_socket(name: str) -> None:
    """A client that cannot use a Unix socket is not given lines that would not work."""
    with pytest.raises(clients.CannotReach, match=f"^{name} cannot use a Unix socket"):
        lines(name, listen="unix:/run/aiogw.sock")


def test_without_a_gate_anywhere_every_model_is_offered() -> None:
    """Where no upstream has a gate, the first one's first model is taken."""
    told = lines("codex", upstream(1, "reasoning", admission="unlimited"), EMBEDDINGS)
    assert tomllib.loads(told)["model"] == "reasoning"


def test_clients_wait_for_the_most_patient_upstream() -> None:
    """The time-outs are above the largest sum of queue and first byte, whichever upstream has it."""
    slow = upstream(2, "slow", first_byte_timeout_seconds=1000, admission=GATE | {"queue_timeout_seconds": 0.5})
    assert exported(lines("claude-code", upstream(1, "fast"), slow))["API_TIMEOUT_MS"] == "1031000"


def test_clients_wait_out_a_silence_in_mid_answer() -> None:
    """A pause between two bytes that the gateway allows is one that the client allows."""
    told = tomllib.loads(lines("codex", upstream(1, "reasoning", idle_timeout_seconds=3000)))
    assert told["model_providers"]["aiogw"]["stream_idle_timeout_ms"] == 3030000


def test_clients_keep_their_own_patience_where_it_is_enough() -> None:
    """A time-out is never set below what the client has by itself."""
    quick = upstream(1, "reasoning", first_byte_timeout_seconds=5, idle_timeout_seconds=5)
    assert exported(lines("claude-code", quick))["API_TIMEOUT_MS"] == "600000"
    assert tomllib.loads(lines("codex", quick))["model_providers"]["aiogw"]["stream_idle_timeout_ms"] == 300000
    assert without_comment(lines("opencode", quick))["provider"]["aiogw"]["options"]["chunkTimeout"] == 300000


# -- keys -----------------------------------------------------------------------------------------------------------

KEYS = {"mode": "keys", "keys": {"me": {"file": "/etc/aiogw/keys/me", "models": "all", "queue_places": 1}}}


@pytest.mark.parametrize("name", list(clients.CLIENTS))
def test_where_keys_are_asked_for_the_lines_say_where_they_come_from(name: str) -> None:
    """The lines hold no key but the name of a variable, which a comment explains; without keys there is none of it."""
    text = lines(name, auth=KEYS)
    (hint,) = [line for line in text.splitlines() if "you were given" in line]
    assert hint.lstrip("#/ ").startswith("The key")
    assert text.count("AIOGW_KEY") > 1
    assert "/etc/aiogw/keys" not in text
    assert "AIOGW_KEY" not in lines(name)


def test_a_key_arrives_where_each_client_looks_for_it() -> None:
    """Also one with characters that mean something to a shell."""
    key = "k$(a)'\"` #"
    given = f"AIOGW_KEY={shlex.quote(key)}\n"
    for name, variable in (
        ("claude-code", "ANTHROPIC_AUTH_TOKEN"),
        ("open-webui", "OPENAI_API_KEYS"),
        ("openai", "OPENAI_API_KEY"),
        ("anthropic", "ANTHROPIC_API_KEY"),
    ):
        assert exported(given + lines(name, auth=KEYS))[variable] == key
    assert tomllib.loads(lines("codex", auth=KEYS))["model_providers"]["aiogw"]["env_key"] == "AIOGW_KEY"
    document = json.loads("".join(lines("opencode", auth=KEYS).splitlines(True)[2:]))
    assert document["provider"]["aiogw"]["options"]["apiKey"] == "{env:AIOGW_KEY}"
    _, *commands = lines("curl", auth=KEYS).splitlines()
    for command in commands:
        assert '-H "authorization: Bearer $AIOGW_KEY"' in command


HOSTILE = 'it\'s $(a) `b` "c" \\ é \x7f\nexport EVIL=1 #'


def test_no_name_of_a_model_breaks_out_of_its_place() -> None:
    """Whatever a model is called, it arrives as that, and nothing else is said."""
    hostile = upstream(1, HOSTILE)
    told = exported(lines("claude-code", hostile))
    assert told["ANTHROPIC_MODEL"] == HOSTILE
    assert "EVIL" not in told
    assert tomllib.loads(lines("codex", hostile))["model"] == HOSTILE
    assert list(without_comment(lines("opencode", hostile))["provider"]["aiogw"]["models"]) == [HOSTILE]
    assert "EVIL" not in exported(lines("openai", hostile))
    [command, _] = lines("curl", hostile).splitlines()
    assert json.loads(shlex.split(command)[-1])["model"] == HOSTILE


# -- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def gateway_toml(tmp_path: Path) -> str:
    path = tmp_path / "gateway.toml"
    path.write_text(document())
    return str(path)


@pytest.mark.parametrize("name", list(clients.CLIENTS))
def test_show_prints_a_clients_lines_and_nothing_else(
    name: str, gateway_toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What show --client prints can be redirected to a file as it is."""
    assert cli.main(["show", "--client", name, "--config", gateway_toml]) == 0
    printed = capsys.readouterr()
    assert printed.out == lines(name)
    assert printed.err == ""


def test_show_without_a_client_prints_the_configuration(gateway_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --client, show is what it was."""
    assert cli.main(["show", "--config", gateway_toml]) == 0
    assert config.loads(capsys.readouterr().out) == config.loads(document())


def test_an_unknown_client_is_a_usage_error_that_names_the_known_ones(
    gateway_toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown name ends with 2 and the list."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["show", "--client", "emacs", "--config", gateway_toml])
    assert ended.value.code == 2
    complaint = capsys.readouterr().err
    assert all(name in complaint for name in ("emacs", *clients.CLIENTS))


@pytest.mark.parametrize("command", [["check"], ["run"], []])
def test_client_is_an_option_of_show_alone(
    command: list[str], gateway_toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another command --client is a usage error, and not silently ignored."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--client", "codex", "--config", gateway_toml])
    assert ended.value.code == 2
    assert "codex" in capsys.readouterr().err


def test_a_client_that_cannot_reach_the_gateway_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there are no lines to print, stdout stays empty, stderr says why, and the exit code is 1."""
    path = tmp_path / "gateway.toml"
    path.write_text(document(listen="unix:/run/aiogw.sock"))
    assert cli.main(["show", "--client", "claude-code", "--config", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "cannot use a Unix socket" in printed.err
