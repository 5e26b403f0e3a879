"""The command line, from arguments to exit code: 0 done, 1 cannot run, 2 usage or configuration."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rig import RawClient, eventually

from aiogw import __version__, cli, config

EXAMPLE = Path(__file__).parent.parent / "etc" / "gateway.toml"


COMMAND = [sys.executable, "-m", "aiogw"]


def run(*arguments: str | Path, timeout: float = 30, given: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a shell would start it."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Writes the example with some of its text replaced, and listening wherever there is room."""

    def write(*replacements: tuple[str, str]) -> Path:
        text = EXAMPLE.read_text()
        for old, new in (("127.0.0.1:8080", "127.0.0.1:0"), ("127.0.0.1:9464", "127.0.0.1:0"), *replacements):
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "gateway.toml"
        path.write_text(text)
        return path

    return write


# -- check and show -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("check", "--config", EXAMPLE), ("--config", EXAMPLE, "check")])
def test_check_says_nothing_of_a_good_file(capsys: pytest.CaptureFixture[str], order: tuple[str | Path, ...]) -> None:
    """A valid configuration is exit code 0 and no word."""
    assert 0 == cli.main([str(argument) for argument in order])
    assert ("", "") == capsys.readouterr()


FAULTY = (
    ("cap = 6", 'cap = "six"\ncapp = 6'),
    ("queue_limit = 32\n", ""),
    ('log_level = "info"', 'log_level = "a\\nb"'),
)


@pytest.mark.parametrize("command", [("check",), ("show",), ("run",), ()], ids=["check", "show", "run", "default"])
def test_each_fault_is_one_line(
    capsys: pytest.CaptureFixture[str], file: Callable[..., Path], command: tuple[str, ...]
) -> None:
    """Every command tells all faults on standard error, with their paths, and does nothing else."""
    path = file(*FAULTY)
    assert 2 == cli.main([*command, "--config", str(path)])
    out, err = capsys.readouterr()
    assert "" == out
    expected = ["server.log_level"]
    expected += [f"upstreams.reasoning.admission.{key}" for key in ("cap", "capp", "queue_limit")]
    places = [line.split(": ", 2) for line in err.splitlines()]
    assert expected == sorted(key for _, key, _ in places)
    lines = [int(place.removeprefix(f"{path}:").partition(":")[0]) for place, _, _ in places]
    assert lines == sorted(lines)


def test_show_prints_what_is_in_effect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its output is a configuration that means the same, and passes check."""
    assert 0 == cli.main(["show", "--config", str(EXAMPLE)])
    out, err = capsys.readouterr()
    assert "" == err
    shown = tmp_path / "shown.toml"
    shown.write_text(out)
    assert config.load(EXAMPLE) == config.load(shown)
    assert 0 == cli.main(["check", "--config", str(shown)])


# -- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "the following arguments are required: --config"),
        (("check",), "the following arguments are required: --config"),
        (("--config",), "expected one argument"),
        (("serve", "--config", "x"), "invalid choice: 'serve'"),
        (("--config", "x", "--port=80"), "unrecognized arguments: --port=80"),
        (("--config", "-"), "run needs a file"),
        (("run", "--config", "-"), "run needs a file"),
        (("explain", ""), "no request has this id: ''"),
        (("explain", "a b"), "no request has this id: 'a b'"),
        (("status",), "--admin or --config"),
        *(
            (("status", "--admin", text), f"expected http://HOST:PORT, HOST:PORT or unix:/PATH, found {text!r}")
            for text in ("", "unix:", "unix:x", "http://", "http://[::1", "ftp://x:1", "x:99999", "x:0", "a:b:c")
        ),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str) -> None:
    """Exit code 2, and what was expected."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert 2 == caught.value.code
    out, err = capsys.readouterr()
    assert "" == out
    assert expected in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version needs no configuration."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert 0 == caught.value.code
    assert (f"aiogw {__version__}\n", "") == capsys.readouterr()


@pytest.mark.parametrize(
    "text",
    [None, "[server", "", "[server]\nlisten = 3"],
    ids=["missing", "syntax", "empty", "wrong"],
)
def test_a_process_that_cannot_start_has_no_traceback(tmp_path: Path, text: str | None) -> None:
    """A file that is missing or no configuration is exit code 2, with a line for each fault and nothing else."""
    path = tmp_path / "gateway.toml"
    if text is not None:
        path.write_text(text)
    done = run("--config", path)
    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr
    for line in done.stderr.splitlines():
        assert line.startswith(f"{path}:")


def test_a_key_that_cannot_be_used_is_told_where_its_file_is_named(
    capsys: pytest.CaptureFixture[str], file: Callable[..., Path]
) -> None:
    """What only shows when the files are read has its line and column, too."""
    holder = '[auth.keys.alice]\nfile = "/nonexistent/alice"\nmodels = "all"\nqueue_places = 1\n'
    path = file(('mode = "none"', f'mode = "keys"\n{holder}'))
    line = 1 + path.read_text().split("\n").index('file = "/nonexistent/alice"')
    assert 2 == cli.main(["check", "--config", str(path)])
    expected = f"{path}:{line}:8: auth.keys.alice.file: /nonexistent/alice: no such file or directory\n"
    assert ("", expected) == capsys.readouterr()


# -- standard input and output --------------------------------------------------------------------------------------


def test_a_configuration_from_standard_input(file: Callable[..., Path]) -> None:
    """check and show read it there, for what is made by another program; a fault has its line and column."""
    text = file().read_text()
    done = run("check", "--config", "-", given=text)
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
    assert config.loads(text) == config.loads(run("show", "--config", "-", given=text).stdout)
    done = run("check", "--config", "-", given="a = 1 2")
    assert (2, "<stdin>:1:7: not valid TOML: expected the end of the line\n") == (done.returncode, done.stderr)


def test_a_fault_of_files_from_standard_input_has_its_place(file: Callable[..., Path]) -> None:
    """What only shows when the files are read is looked up in a text that can be read only once."""
    holder = '[auth.keys.alice]\nfile = "/nonexistent/alice"\nmodels = "all"\nqueue_places = 1\n'
    text = file(('mode = "none"', f'mode = "keys"\n{holder}')).read_text()
    line = 1 + text.split("\n").index('file = "/nonexistent/alice"')
    done = run("check", "--config", "-", given=text)
    assert (2, f"<stdin>:{line}:8: auth.keys.alice.file: ") == (done.returncode, done.stderr.partition("/non")[0])


@pytest.mark.parametrize(
    ("command", "code"), [(("check", "--config", "-"), 2), (("explain", "x"), 1)], ids=["check", "explain"]
)
def test_standard_input_that_is_closed(command: tuple[str, ...], code: int) -> None:
    """It is said, and not with a traceback."""
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *COMMAND, *command], capture_output=True, text=True, timeout=30, check=False
    )
    assert (code, "") == (done.returncode, done.stdout)
    assert re.fullmatch(".*: bad file descriptor\n", done.stderr)


WRITERS = [("schema",), ("show", "--config", str(EXAMPLE)), ("show", "--config", str(EXAMPLE), "--client", "curl")]


@pytest.mark.parametrize("command", WRITERS, ids=["schema", "show", "client"])
def test_who_reads_no_further_is_no_fault(command: tuple[str, ...]) -> None:
    """``| head -1`` gets its line, and nothing is said of the rest."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        done = subprocess.run([*COMMAND, *command], stdout=output, stderr=subprocess.PIPE, timeout=30, check=False)
    assert (0, b"") == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("redirection", "reason"), [(">/dev/full", "no space left on device"), (">&-", "bad file descriptor")]
)
@pytest.mark.parametrize("command", WRITERS, ids=["schema", "show", "client"])
def test_what_cannot_be_written(command: tuple[str, ...], redirection: str, reason: str) -> None:
    """Half a configuration is not taken for a whole one: exit code 1, and why."""
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *COMMAND, *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=30, check=False)
    assert (1, f"aiogw: standard output: {reason}\n") == (done.returncode, done.stderr)


def test_an_encoding_that_lacks_a_sign(tmp_path: Path) -> None:
    """What a client has chosen is shown as well as the terminal can; a log that is no UTF-8 is read all the same."""
    log = tmp_path / "aiogw.log"
    line = '2026-12-01T10:00:05.000Z info aiogw.access: request request_id=a model="f\\u00fcr" outcome=completed\n'
    log.write_bytes(b"caf\xe9\n" + line.encode())
    done = subprocess.run(
        [*COMMAND, "explain", "a", log],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert "model f?r" in done.stdout
    assert done.stdout == run("explain", "a", "-", given=line).stdout.replace("für", "f?r")


def test_who_interrupts_has_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a command that waits for its input or an answer, with the exit code that shells know."""

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_explain", interrupted)
    assert 130 == cli.main(["explain", "x"])
    assert ("", "") == capsys.readouterr()


# -- running --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["listen", "admin_listen"])
def test_a_port_that_is_taken(file: Callable[..., Path], key: str) -> None:
    """Whichever of the two it is: exit code 1, and a line that says where and why."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--config", file((f'\n{key} = "127.0.0.1:0"', f'\n{key} = "{address}"')))
    assert (1, "") == (done.returncode, done.stdout)
    assert f"aiogw: cannot listen on {address}: address already in use" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "listen",
    ["unix:/nonexistent/aiogw.sock", "unix:/" + "x" * 200, "name.invalid:80", "192.0.2.1:80"],
    ids=["no-directory", "path-too-long", "no-such-name", "not-ours"],
)
def test_a_place_where_nobody_can_listen(file: Callable[..., Path], listen: str) -> None:
    """It is said, with a reason, and not with a traceback."""
    done = run("--config", file(('\nlisten = "127.0.0.1:0"', f'\nlisten = "{listen}"')))
    assert 1 == done.returncode
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("aiogw: ")]
    reason = line.removeprefix(f"aiogw: cannot listen on {listen}: ")
    assert reason not in (line, "", "None")


def test_it_runs_until_it_is_told_to_stop(file: Callable[..., Path]) -> None:
    """SIGTERM is an orderly end: exit code 0, nothing on standard output, the log on standard error."""
    command = [sys.executable, "-m", "aiogw", "--config", str(file())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "metrics and health" in line:
                break
        os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert (0, "") == (process.returncode, out)
    assert json.loads(err.splitlines()[-1])["message"] == "stopped"


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
async def test_it_runs_without_standard_streams(file: Callable[..., Path], tmp_path: Path, closed: str) -> None:
    """Who starts it with them closed has a gateway that serves, and that ends in order."""
    path = tmp_path / "gateway.sock"
    arguments = [*COMMAND, "--config", str(file(('\nlisten = "127.0.0.1:0"', f'\nlisten = "unix:{path}"')))]
    process = await asyncio.create_subprocess_exec("sh", "-c", f'exec "$@" {closed}', "sh", *arguments)
    try:
        await eventually(path.exists)
        client = await RawClient.connect(str(path))
        await client.request("GET", "/v1/models", None)
        assert 200 == (await client.response()).status
        client.close()
        process.terminate()
        assert 0 == await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


TOLD_WHILE_IT_STARTS = """
import os, signal, sys
from aiogw import cli

class Importing:
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Importing)
sys.exit(cli.main(["--config", {path!r}]))
"""


@pytest.mark.parametrize("module", ["uvloop", "aiogw.app", "aiogw.relay"])
def test_it_may_be_told_to_stop_before_it_runs(file: Callable[..., Path], module: str) -> None:
    """SIGTERM during start-up is as orderly an end, with nothing to say."""
    code = TOLD_WHILE_IT_STARTS.format(module=module, path=str(file()))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
