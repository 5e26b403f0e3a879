"""What lies in the files a configuration names: clients' keys, upstreams' credentials and CAs, read and checked.

Only here is a secret ever read.  Nothing of it may get into a fault, a log line or a repr.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import ssl
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import field, frozen

from aiogw.auth import Holder, Keyring
from aiogw.config import Config, ConfigError, dotted

# The room that systemd makes for what LoadCredential= names, and guards by itself.
DIRECTORY_VARIABLE = "CREDENTIALS_DIRECTORY"

MAX_SECRET_BYTES = 8192
# What can stand in a header field behind "Bearer ".
_SECRET = re.compile(rb"[!-~]+")


class _Unusable(Exception):
    """One file cannot be used; the text says why, and never what is in it."""


@frozen(kw_only=True)
class Credentials:
    """``keyring`` None: nobody is asked for a key.  The others are by the name of their upstream."""

    keyring: Keyring | None
    upstreams: Mapping[str, str] = field(repr=False)
    ssl_contexts: Mapping[str, ssl.SSLContext]


def load(config: Config) -> Credentials:
    """Read all files that ``config`` names; raises ConfigError with every fault found."""
    faults: list[str] = []
    keys: dict[Holder, bytes] = {}
    owners: dict[bytes, str] = {}
    for holder, key in config.auth.keys.items():
        path = dotted("auth.keys", holder)
        with _told_in(faults, f"{path}.{'credential' if key.file is None else 'file'}"):
            secret = _secret(key.file, key.credential)
            if secret in owners:
                raise _Unusable(f"the same key as {owners[secret]}")
            owners[secret] = path
            models = None if key.models == "all" else frozenset(key.models)
            keys[Holder(name=holder, models=models, queue_places=key.queue_places)] = secret
    upstream_credentials: dict[str, str] = {}
    ssl_contexts: dict[str, ssl.SSLContext] = {}
    for name, upstream in config.upstreams.items():
        path = dotted("upstreams", name)
        file, credential = upstream.credential_file, upstream.credential
        if file is not None or credential is not None:
            with _told_in(faults, f"{path}.{'credential' if file is None else 'credential_file'}"):
                upstream_credentials[name] = _secret(file, credential).decode()
        if upstream.speaks_tls:
            with _told_in(faults, f"{path}.ca_file"):
                ssl_contexts[name] = _ssl_context(upstream.ca_file)
    if faults:
        raise ConfigError(faults)
    return Credentials(
        keyring=Keyring.of(keys) if config.auth.mode == "keys" else None,
        upstreams=upstream_credentials,
        ssl_contexts=ssl_contexts,
    )


@contextlib.contextmanager
def _told_in(faults: list[str], path: str) -> Iterator[None]:
    try:
        yield
    except _Unusable as error:
        faults.append(f"{path}: {error}")


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
    guarded = directory is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))
    content = _content(path, guarded=guarded)
    line = content.removesuffix(b"\n").removesuffix(b"\r")
    if not line:
        raise _Unusable(f"{path} is empty")
    if b"\n" in line:
        raise _Unusable(f"{path} has several lines; expected one with the key and nothing else")
    if not _SECRET.fullmatch(line):
        raise _Unusable(f"{path} holds what no key can: expected printable ASCII without spaces")
    return line


def _content(path: Path, *, guarded: bool) -> bytes:
    """What a file holds that nobody else may read or write, unless it is ``guarded`` by other means than its mode."""
    try:
        # A named pipe would be waited for without O_NONBLOCK.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise _Unusable(f"{path} is not a file")
            if mode & (stat.S_IRWXG | stat.S_IRWXO) and not guarded:
                raise _Unusable(
                    f"{path} is open to others (mode {stat.S_IMODE(mode):04o}): chmod 600 {shlex.quote(str(path))}"
                )
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise _Unusable(f"{path}: {_reason(error)}") from None
    if len(content) > MAX_SECRET_BYTES:
        raise _Unusable(f"{path} is longer than a key of {MAX_SECRET_BYTES} bytes")
    return content


def _ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """One that takes only certificates that are good for the host's name, by the given CA or those of the system."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise _Unusable(f"{ca_file} holds no certificate in PEM, or a broken one") from None
    except OSError as error:
        raise _Unusable(f"{ca_file}: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
