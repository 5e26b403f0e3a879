"""What lies in the files a configuration names: keys, upstreams' credentials and CAs, our certificate; checked.

Only here is a secret ever read.  Nothing of it may get into a fault, a log line or a repr.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import ssl
import stat
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from attrs import field, frozen

from aiogw.auth import Holder, Keyring
from aiogw.config import Config, ConfigError, Finding, Key
from aiogw.config.faults import dotted

# The room that systemd makes for what LoadCredential= names, and guards by itself.
DIRECTORY_VARIABLE = "CREDENTIALS_DIRECTORY"

MAX_SECRET_BYTES = 8192
# What can stand in a header field behind "Bearer ".
_SECRET = re.compile(rb"[!-~]+")


# A file, or else a credential of systemd's.
_Source = tuple[str | None, str | None]


class _Unusable(Exception):
    """One file cannot be used; the text says why, and never what is in it."""


@frozen(kw_only=True)
class Credentials:
    """``keyring`` None: nobody is asked for a key.  ``server_context`` None: clients come in plain HTTP.

    The others are by the name of their upstream.
    """

    keyring: Keyring | None
    server_context: ssl.SSLContext | None = field(repr=False)
    upstreams: Mapping[str, str] = field(repr=False)
    ssl_contexts: Mapping[str, ssl.SSLContext]


def load(config: Config) -> Credentials:
    """Read all files that ``config`` names; raises ConfigError with every fault found."""
    findings: list[Finding] = []
    secrets = _holders_secrets({name: (key.file, key.credential) for name, key in config.auth.keys.items()}, findings)
    keys: dict[Holder, bytes] = {}
    for holder, key in config.auth.keys.items():
        if holder in secrets:
            models = None if key.models == "all" else frozenset(key.models)
            keys[Holder(name=holder, models=models, queue_places=key.queue_places)] = secrets[holder]
    tls = config.server.tls
    server_context = None if tls is None else _server_context(tls.certificate, tls.key, findings)
    upstream_credentials: dict[str, str] = {}
    ssl_contexts: dict[str, ssl.SSLContext] = {}
    for name, upstream in config.upstreams.items():
        path: Key = ("upstreams", name)
        secret_of_upstream = _upstream_secret(path, upstream.credential_file, upstream.credential, findings)
        if secret_of_upstream is not None:
            upstream_credentials[name] = secret_of_upstream
        if upstream.speaks_tls:
            with _told_in(findings, (*path, "ca_file")):
                ssl_contexts[name] = _ssl_context(upstream.ca_file)
    if findings:
        raise ConfigError(findings)
    return Credentials(
        keyring=Keyring.of(keys) if config.auth.mode == "keys" else None,
        server_context=server_context,
        upstreams=upstream_credentials,
        ssl_contexts=ssl_contexts,
    )


def faults(tables: Mapping[str, Any], told: Container[Key]) -> list[Finding]:
    """What is wrong with the files that are named in ``tables`` with other faults, those at the keys ``told`` apart."""

    def at(*key: str) -> Any:
        value: Any = tables
        for step in key:
            value = value.get(step) if isinstance(value, dict) else None
        return value

    def names(*key: str) -> list[str]:
        return list(value) if isinstance(value := at(*key), dict) else []

    def text(*key: str) -> str | None:
        return value if isinstance(value := at(*key), str) and key not in told else None

    findings: list[Finding] = []
    holders = {one: ("auth", "keys", one) for one in names("auth", "keys")}
    sources = {one: (text(*path, "file"), text(*path, "credential")) for one, path in holders.items()}
    _holders_secrets(sources, findings)
    _server_context(text("server", "tls", "certificate"), text("server", "tls", "key"), findings)
    for path in (("upstreams", one) for one in names("upstreams")):
        _upstream_secret(path, text(*path, "credential_file"), text(*path, "credential"), findings)
        if (ca_file := text(*path, "ca_file")) is not None:
            with _told_in(findings, (*path, "ca_file")):
                _ssl_context(ca_file)
    return findings


def _holders_secrets(sources: Mapping[str, _Source], findings: list[Finding]) -> dict[str, bytes]:
    """The keys by who holds them, no two the same."""
    secrets: dict[str, bytes] = {}
    owners: dict[bytes, str] = {}
    for holder, (file, credential) in sources.items():
        path: Key = ("auth", "keys", holder)
        if file is not None or credential is not None:
            with _told_in(findings, (*path, "credential" if file is None else "file")):
                secret = _secret(file, credential)
                if secret in owners:
                    raise _Unusable(f"the same key as {owners[secret]}")
                owners[secret] = dotted(path)
                secrets[holder] = secret
    return secrets


def _upstream_secret(path: Key, file: str | None, credential: str | None, findings: list[Finding]) -> str | None:
    if file is not None or credential is not None:
        with _told_in(findings, (*path, "credential" if file is None else "credential_file")):
            return _secret(file, credential).decode()
    return None


@contextlib.contextmanager
def _told_in(findings: list[Finding], key: Key) -> Iterator[None]:
    try:
        yield
    except _Unusable as error:
        findings.append(Finding(key=key, text=str(error)))


def _secret(file: str | None, credential: str | None) -> bytes:
    """The one line of a file, without its end."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if file is not None:
        path = Path(file)
    elif directory is None:
        raise _Unusable(
            f"${DIRECTORY_VARIABLE} is not set, as systemd does for a unit with LoadCredential={credential}:PATH"
        )
    else:
        path = Path(directory) / (credential or "")
    with _opened(path, private=True) as opened:
        content = opened.read(MAX_SECRET_BYTES + 1)
    if len(content) > MAX_SECRET_BYTES:
        raise _Unusable(f"{path} is longer than a key of {MAX_SECRET_BYTES} bytes")
    line = content.removesuffix(b"\n").removesuffix(b"\r")
    if not line:
        raise _Unusable(f"{path} is empty")
    if b"\n" in line:
        raise _Unusable(f"{path} has several lines; expected one with the key and nothing else")
    if not _SECRET.fullmatch(line):
        raise _Unusable(f"{path} holds what no key can: expected printable ASCII without spaces")
    return line


@contextlib.contextmanager
def _opened(path: Path, *, private: bool) -> Iterator[IO[bytes]]:
    """A file and nothing else; one that is ``private`` nobody else may read or write, unless systemd guards it."""
    try:
        # A named pipe would be waited for without O_NONBLOCK.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise _Unusable(f"{path} is not a file")
            if private and mode & (stat.S_IRWXG | stat.S_IRWXO) and not _is_guarded(path):
                raise _Unusable(
                    f"{path} is open to others (mode {stat.S_IMODE(mode):04o}): chmod 600 {shlex.quote(str(path))}"
                )
            yield file
    except OSError as error:
        raise _Unusable(f"{path}: {_reason(error)}") from None
    except ValueError:  # a NUL in it
        raise _Unusable(f"{str(path)!r} is not the path of a file") from None


def _is_guarded(path: Path) -> bool:
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return directory is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))


def _server_context(certificate: str | None, key: str | None, findings: list[Finding]) -> ssl.SSLContext | None:
    """TLS for clients by this certificate chain and its key, both PEM files; None where there is something wrong."""
    found_before = len(findings)
    for name, path, private in (("certificate", certificate, False), ("key", key, True)):
        if path is not None:
            with _told_in(findings, ("server", "tls", name)), _opened(Path(path), private=private):
                pass
    if certificate is None or key is None or len(findings) > found_before:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    with _told_in(findings, ("server", "tls", "certificate")):
        try:
            # A password, so that an encrypted key is an error: OpenSSL would ask for it on the terminal, and wait.
            context.load_cert_chain(certificate, key, password="")
        except OSError as error:
            raise _Unusable(f"{certificate} cannot be used with {key}: {_tls_reason(error)}") from None
    return context


def _tls_reason(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return _reason(error)
    # All else that OpenSSL can say here is "PEM lib", whatever is wrong.
    mismatch = error.reason == "KEY_VALUES_MISMATCH"
    return "the key belongs to another certificate" if mismatch else "not in PEM form, or encrypted"


def _ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """One that takes only certificates that are good for the host's name, by the given CA or those of the system."""
    if ca_file is not None:
        with _opened(Path(ca_file), private=False):
            pass
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise _Unusable(f"{ca_file} holds no certificate in PEM, or a broken one") from None
    except OSError as error:
        raise _Unusable(f"{ca_file}: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
