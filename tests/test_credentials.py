"""The files with keys, credentials and CAs: who may read them, what may be in them, and that nothing of it is told."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rig import configuration, make_certificate, needs_openssl, upstream_table

from aiogw import cli, config, credentials
from aiogw.config import ConfigError
from aiogw.credentials import Credentials

CANARY = "canary-sk-1234"


def secret(path: Path, text: str | bytes = CANARY + "\n", mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def holder(**members: Any) -> dict[str, Any]:
    return {"models": "all", "queue_places": 4, **members}


def keys(**holders: Path | dict[str, Any]) -> dict[str, Any]:
    tables = {name: holder(file=str(one)) if isinstance(one, Path) else one for name, one in holders.items()}
    return {"mode": "keys", "keys": tables}


def text(auth: dict[str, Any] | None = None, url: str = "http://engine", **upstream: Any) -> str:
    return configuration({"reasoning": upstream_table(url, **upstream)}, auth=auth or {"mode": "none"})


def load(auth: dict[str, Any] | None = None, url: str = "http://engine", **upstream: Any) -> Credentials:
    return credentials.load(config.loads(text(auth, url, **upstream)))


def faults_of(*arguments: Any, **upstream: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **upstream)
    assert CANARY not in str(caught.value)
    assert caught.value.__context__ is None
    return caught.value.faults


# -- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "\n", "\r\n"], ids=repr)
def test_a_key_is_the_one_line_of_its_file(tmp_path: Path, end: str) -> None:
    """With or without an end of line, as editors and shells write it."""
    ring = load(keys(alice=secret(tmp_path / "alice", CANARY + end))).keyring
    assert ring is not None
    found = ring.holder_of(CANARY.encode())
    assert found is not None
    assert (found.name, found.models, found.queue_places) == ("alice", None, 4)
    assert ring.holder_of((CANARY + end + "x").encode()) is None


def test_a_holder_has_what_the_configuration_says(tmp_path: Path) -> None:
    """Models by name, and its places."""
    table = holder(file=str(secret(tmp_path / "k")), models=["reasoning"], queue_places=0)
    ring = load(keys(alice=table)).keyring
    assert ring is not None
    (alice,) = ring.holders
    assert (alice.models, alice.queue_places) == (frozenset({"reasoning"}), 0)


def test_no_keys() -> None:
    """Where no key is asked for there is no keyring, and no file is read."""
    assert load().keyring is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "{} is empty"),
        ("\n", "{} is empty"),
        ("\r\n", "{} is empty"),
        (f"{CANARY}\n\n", "{} has several lines; expected one with the key and nothing else"),
        (f"{CANARY}\nother\n", "{} has several lines; expected one with the key and nothing else"),
        (f"\n{CANARY}", "{} has several lines; expected one with the key and nothing else"),
        (f" {CANARY}", "{} holds what no key can: expected printable ASCII without spaces"),
        (f"{CANARY} \n", "{} holds what no key can: expected printable ASCII without spaces"),
        (f"{CANARY}\0", "{} holds what no key can: expected printable ASCII without spaces"),
        (f"{CANARY}é", "{} holds what no key can: expected printable ASCII without spaces"),
        (f"\ufeff{CANARY}", "{} holds what no key can: expected printable ASCII without spaces"),
        (CANARY * 1000, "{} is longer than a key of 8192 bytes"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_file_that_holds_no_key(tmp_path: Path, content: str, expected: str) -> None:
    """What is wrong is said, and never what is there."""
    path = secret(tmp_path / "alice", content)
    assert faults_of(keys(alice=path)) == [f"auth.keys.alice.file: {expected.format(path)}"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o610, 0o601], ids=oct)
def test_a_key_that_others_can_get_at(tmp_path: Path, mode: int) -> None:
    """The fault has the command that puts it right, which does."""
    path = secret(tmp_path / "a key", mode=mode)
    (fault,) = faults_of(keys(alice=path))
    start = f"auth.keys.alice.file: {path} is open to others (mode {mode:04o}): "
    assert fault.startswith(start)
    command = fault.removeprefix(start)
    assert command.startswith("chmod 600 ")
    subprocess.run(command, shell=True, check=True, timeout=10)
    assert load(keys(alice=path)).keyring is not None


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda path: None, "{}: no such file or directory"),
        (lambda path: path.mkdir(0o700), "{}: is a directory"),
        (lambda path: os.mkfifo(path, 0o600), "{} is not a file"),
        (lambda path: path.symlink_to(path), "{}: too many levels of symbolic links"),
    ],
    ids=["missing", "directory", "pipe", "loop"],
)
def test_what_is_no_file(tmp_path: Path, prepare: Callable[[Path], object], expected: str) -> None:
    """Nothing is waited for, and each has its reason."""
    path = tmp_path / "alice"
    prepare(path)
    assert faults_of(keys(alice=path)) == [f"auth.keys.alice.file: {expected.format(path)}"]


def test_two_holders_of_one_key(tmp_path: Path) -> None:
    """Nobody could say whose request it is: the fault names both and not the key."""
    auth = keys(alice=secret(tmp_path / "a"), bob=secret(tmp_path / "b", "other"), carol=secret(tmp_path / "c", CANARY))
    assert faults_of(auth) == ["auth.keys.carol.file: the same key as auth.keys.alice"]


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    """Those of keys, of credentials and of a CA, each at its place."""
    missing = str(tmp_path / "missing")
    auth = keys(**{"a b": secret(tmp_path / "a", "")}, bob=secret(tmp_path / "b", mode=0o644))
    faults = faults_of(auth, "https://engine", credential_file=missing, ca_file=missing)
    assert [fault.partition(": ")[0] for fault in faults] == [
        'auth.keys."a b".file',
        "auth.keys.bob.file",
        "upstreams.reasoning.credential_file",
        "upstreams.reasoning.ca_file",
    ]


# -- systemd's credentials ------------------------------------------------------------------------------------------


def test_a_credential_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the folder that systemd names, whose files are guarded by more than their mode."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    secret(tmp_path / "alice", mode=0o440)
    secret(tmp_path / "up", "canary-up", mode=0o440)
    loaded = load(keys(alice=holder(credential="alice")), credential="up")
    assert loaded.keyring is not None
    assert loaded.keyring.holder_of(CANARY.encode()) is not None
    assert loaded.upstreams == {"reasoning": "canary-up"}
    assert load(keys(alice=tmp_path / "alice")).keyring is not None
    assert faults_of(keys(alice=holder(credential="bob"))) == [
        f"auth.keys.alice.credential: {tmp_path / 'bob'}: no such file or directory"
    ]


def test_only_what_is_in_that_folder_is_guarded_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path or a link that leads out of it does not excuse a file that is open to others."""
    folder = tmp_path / "credentials"
    folder.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))
    secret(tmp_path / "alice", mode=0o644)
    (folder / "link").symlink_to(tmp_path / "alice")
    for path in (folder / ".." / "alice", folder / "link", tmp_path / "alice"):
        (fault,) = faults_of(keys(alice=path))
        assert "is open to others (mode 0644)" in fault


def test_a_credential_without_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault says what would have to be in the unit."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert faults_of(keys(alice=holder(credential="alice"))) == [
        "auth.keys.alice.credential: $CREDENTIALS_DIRECTORY is not set, as systemd does for a unit with "
        "LoadCredential=alice:PATH"
    ]


# -- upstreams ------------------------------------------------------------------------------------------------------


def test_an_upstreams_credential(tmp_path: Path) -> None:
    """It is read like a key, and is one of its upstream's alone."""
    loaded = load(credential_file=str(secret(tmp_path / "up")))
    assert loaded.upstreams == {"reasoning": CANARY}
    assert loaded.keyring is None
    assert load().upstreams == {}
    (fault,) = faults_of(None, credential_file=str(secret(tmp_path / "open", mode=0o644)))
    assert fault.startswith("upstreams.reasoning.credential_file: ")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_certificate(tmp_path_factory.mktemp("ca"))[0].read_text()


@needs_openssl
def test_a_ca_of_ones_own(tmp_path: Path, certificate: str) -> None:
    """It is trusted alone, and verification is never off: certificate and name."""
    path = secret(tmp_path / "ca.pem", certificate, mode=0o644)
    context = load(None, "https://engine", ca_file=str(path)).ssl_contexts["reasoning"]
    assert context.cert_store_stats()["x509_ca"] == 1
    for one in (context, load(None, "https://engine").ssl_contexts["reasoning"]):
        assert (one.verify_mode, one.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert load().ssl_contexts == {}


@needs_openssl
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "holds no certificate in PEM, or a broken one"),
        ("hello\n", "holds no certificate in PEM, or a broken one"),
        (
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "holds no certificate in PEM, or a broken one",
        ),
        ("key", "holds no certificate in PEM, or a broken one"),
        (None, ": no such file or directory"),
    ],
    ids=["empty", "text", "broken", "key", "missing"],
)
def test_what_is_no_ca(tmp_path: Path, content: str | None, expected: str) -> None:
    """It is said at the start, and not with the first request."""
    path = tmp_path / "ca.pem"
    if content == "key":
        command = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    elif content is not None:
        path.write_text(content)
    (fault,) = faults_of(None, "https://engine", ca_file=str(path))
    assert fault.startswith(f"upstreams.reasoning.ca_file: {path}")
    assert fault.endswith(expected)


@pytest.mark.parametrize("how", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_a_ca_that_is_no_file(tmp_path: Path, how: Callable[[Path], None]) -> None:
    """Nothing is waited for."""
    how(tmp_path / "ca.pem")
    (fault,) = faults_of(None, "https://engine", ca_file=str(tmp_path / "ca.pem"))
    assert fault.startswith(f"upstreams.reasoning.ca_file: {tmp_path / 'ca.pem'}")
    assert fault.endswith(("is not a file", "is a directory"))


# -- our own certificate --------------------------------------------------------------------------------------------


def tls_text(certificate: Path, key: Path) -> str:
    tls = {"certificate": str(certificate), "key": str(key)}
    return configuration({"reasoning": upstream_table("http://engine")}, tls=tls)


@needs_openssl
def test_a_certificate_for_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` reads it as a start would: both files missing, the key open to others, another certificate's key."""
    certificate, key = tmp_path / "localhost.pem", tmp_path / "localhost-key.pem"
    path = tmp_path / "gateway.toml"
    path.write_text(tls_text(certificate, key))

    def faults() -> list[str]:
        for command in ("check", "run"):
            assert cli.main([command, "--config", str(path)]) == 2
        told = capsys.readouterr().err.splitlines()
        assert told[: len(told) // 2] == told[len(told) // 2 :]
        return [line.partition(": ")[2] for line in told[: len(told) // 2]]

    assert faults() == [
        f"server.tls.certificate: {certificate}: no such file or directory",
        f"server.tls.key: {key}: no such file or directory",
    ]
    make_certificate(tmp_path)
    key.chmod(0o640)
    assert faults() == [f"server.tls.key: {key} is open to others (mode 0640): chmod 600 {key}"]
    key.chmod(0o600)
    assert cli.main(["check", "--config", str(path)]) == 0
    (tmp_path / "other").mkdir()
    make_certificate(tmp_path / "other")[0].rename(certificate)
    assert faults() == [
        f"server.tls.certificate: {certificate} cannot be used with {key}: the key belongs to another certificate"
    ]
    key.unlink()
    os.mkfifo(key, 0o600)
    assert faults() == [f"server.tls.key: {key} is not a file"]


@needs_openssl
def test_a_certificates_key_from_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What systemd has put into its folder is guarded by more than its mode."""
    certificate, key = make_certificate(tmp_path)
    key.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert credentials.load(config.loads(tls_text(certificate, key))).server_context is not None


# -- the command line, and what is printed --------------------------------------------------------------------------


def test_check_says_what_is_wrong_with_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All faults on standard error and exit code 2; a start says them, too, and does not happen."""
    path = tmp_path / "gateway.toml"
    path.write_text(text(keys(alice=secret(tmp_path / "alice", mode=0o640), bob=tmp_path / "bob")))
    for command in ("check", "run"):
        assert cli.main([command, "--config", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        first, second = err.splitlines()
        alice, bob = (
            1 + path.read_text().split("\n").index(f'file = "{tmp_path / name}"') for name in ("alice", "bob")
        )
        assert first.startswith(f"{path}:{alice}:8: auth.keys.alice.file: ")
        assert first.endswith(f"chmod 600 {tmp_path / 'alice'}")
        assert second == f"{path}:{bob}:8: auth.keys.bob.file: {tmp_path / 'bob'}: no such file or directory"
    (tmp_path / "alice").chmod(0o600)
    secret(tmp_path / "bob", "other")
    assert cli.main(["check", "--config", str(path)]) == 0


FAULTY = """
[server.tls]
certificate = "{0}/none.pem"
key = 3
[auth]
mode = "keys"
[auth.keys.a]
file = "{0}/none"
models = "al"
queue_places = -1
[auth.keys.b]
fil = "{0}/open"
models = "all"
queue_places = 1
[auth.keys.c]
file = "relative"
models = "all"
queue_places = 1
[auth.keys.d]
file = "{0}/good"
[auth.keys.e]
file = "{0}/same"
[upstreams.u]
credential_file = "{0}/nowhere"
[upstreams.v]
url = "https://v"
ca_file = "{0}/none.ca"
"""


def test_faults_of_files_are_told_with_all_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with a file does not wait until all else is right, and is told once."""
    secret(tmp_path / "open", "x" * 40, mode=0o644)
    secret(tmp_path / "good")
    secret(tmp_path / "same")
    path = tmp_path / "gateway.toml"
    path.write_text(FAULTY.format(tmp_path))
    lines = path.read_text().split("\n")
    for command in ("check", "run"):
        assert cli.main([command, "--config", str(path)]) == 2
        told = [line.removeprefix(f"{path}:").split(": ", 2) for line in capsys.readouterr().err.splitlines()]
        for key, value, words in (
            ("server.tls.certificate", "/none.pem", "no such file or directory"),
            ("server.tls.key", "3", "not empty"),
            ("auth.keys.a.file", '/none"', "no such file or directory"),
            ("auth.keys.a.models", "al", '"all"'),
            ("auth.keys.a.queue_places", "-1", "at least 0"),
            ("auth.keys.b.fil", "/open", "did you mean file?"),
            ("auth.keys.b.fil", "/open", "chmod 600"),
            ("auth.keys.c.file", "relative", "absolute path"),
            ("auth.keys.e.file", "/same", "the same key as auth.keys.d"),
            ("upstreams.u.credential_file", "/nowhere", "no such file or directory"),
            ("upstreams.v.ca_file", "/none.ca", "no such file or directory"),
        ):
            (found,) = [one for one in told if one[1] == key and words in one[2]]
            assert value in lines[int(found[0].split(":")[0]) - 1]
        assert len(set(map(tuple, told))) == len(told)


@pytest.mark.parametrize("table", ["3", '"alice"', "[]", "{ alice = 3 }", "{ alice = { file = 3 } }"])
@pytest.mark.parametrize("place", ["upstreams", "auth", "auth.keys", "server", "server.tls"])
def test_what_is_no_table_names_no_file(tmp_path: Path, place: str, table: str) -> None:
    """However broken the tables are, each fault is a line."""
    (tmp_path / "gateway.toml").write_text(f"{place} = {table}")
    assert cli.main(["check", "--config", str(tmp_path / "gateway.toml")]) == 2


def test_show_prints_where_keys_are_and_not_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It needs not even be able to read them."""
    path = tmp_path / "gateway.toml"
    shown = text(keys(alice=secret(tmp_path / "alice")), credential_file=str(secret(tmp_path / "up", CANARY + "-up")))
    path.write_text(shown)
    assert cli.main(["show", "--config", str(path)]) == 0
    out, _ = capsys.readouterr()
    assert f'file = "{tmp_path / "alice"}"' in out
    assert f'credential_file = "{tmp_path / "up"}"' in out
    assert CANARY not in out
    (tmp_path / "alice").unlink()
    assert cli.main(["show", "--config", str(path)]) == 0


def test_no_secret_is_in_what_is_printed_of_a_value(tmp_path: Path) -> None:
    """Of the configuration, and of all that was read."""
    loaded = config.loads(
        text(keys(alice=secret(tmp_path / "alice")), credential_file=str(secret(tmp_path / "up", CANARY + "-up")))
    )
    read = credentials.load(loaded)
    assert read.upstreams == {"reasoning": CANARY + "-up"}
    shown = repr(loaded) + str(loaded) + repr(read) + str(read) + tomli_w.dumps({"x": str(read)})
    assert "alice" in shown
    assert CANARY not in shown
