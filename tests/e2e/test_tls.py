"""TLS with clients: it serves and notices departures as in the clear, and a certificate is replaced while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rig import (
    FIRST_EVENT,
    OPENAI,
    PATIENCE_SECONDS,
    STREAM,
    Rig,
    RunningGateway,
    answer,
    configuration,
    eventually,
    request_bytes,
    set_reset_on_close,
    upstream_table,
)

from aiogw import config, listener
from aiogw.app import Gateway
from aiogw.config import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates")


class Certificate:
    """A certificate for localhost that signs itself, made anew at will."""

    def __init__(self, directory: Path) -> None:
        self.certificate, self.key = directory / "tls.pem", directory / "tls-key.pem"
        self.renew()

    @property
    def table(self) -> dict[str, Any]:
        return {"tls": {"certificate": str(self.certificate), "key": str(self.key)}}

    def renew(self) -> None:
        options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", *options, *names, "-out", str(self.certificate), "-keyout", str(self.key)]
        subprocess.run(command, check=True, capture_output=True, timeout=30)

    def trusting(self) -> ssl.SSLContext:
        """A client's side that trusts this certificate as it is now, and nothing else."""
        return ssl.create_default_context(cafile=str(self.certificate))


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path)


class TlsClient:
    """A client's connection over TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, gateway: RunningGateway, context: ssl.SSLContext, **options: Any) -> TlsClient:
        assert not isinstance(gateway.address, str)
        return cls(*await asyncio.open_connection(*gateway.address, ssl=context, **options))

    def post(self, tag: int, **more: Any) -> None:
        body = OPENAI.body(tag, **more)
        self.writer.write(request_bytes("POST", OPENAI.path, body, "content-type: application/json"))

    async def status(self) -> int:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
        return int(head.split(b" ")[1])

    def leave(self, how: str) -> None:
        if how == "rst":
            set_reset_on_close(self.writer.get_extra_info("socket"))
            self.writer.transport.abort()
        else:
            # close_notify, then FIN.
            self.writer.close()


@pytest.fixture
def clients() -> Iterator[list[TlsClient]]:
    """Whoever is in it is closed at the end."""
    made: list[TlsClient] = []
    yield made
    for client in made:
        client.writer.transport.abort()


async def test_https_is_served(rig: Rig, process: bool, certificate: Certificate) -> None:
    """An ordinary client is served over TLS, whole answers and streams, many on one connection."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process, server=certificate.table)
    assert not isinstance(gateway.address, str)
    url = f"https://localhost:{gateway.address[1]}{OPENAI.path}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=certificate.trusting())) as session:
        for tag in range(3):
            for stream in (False, True):
                body = OPENAI.body(tag, stream=stream, padding=200_000)
                async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
                    text = await response.text()
                    assert (response.status, "Hello" in text) == (200, True)
    assert await gateway.metric("aiogw_connections") <= 1


async def test_curl_is_served(rig: Rig, certificate: Certificate) -> None:
    """curl trusts the certificate, speaks HTTP/1.1 after ALPN, and the log says https."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream, server=certificate.table)
    curl = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--cacert", str(certificate.certificate), "-w", "%{http_code} %{http_version}\n"),
        *("-o", "/dev/null", f"https://localhost:{daemon.address[1]}/v1/models"),
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await asyncio.wait_for(curl.communicate(), PATIENCE_SECONDS)
    assert told == b"200 1.1\n"
    assert any(f"listening on https://127.0.0.1:{daemon.address[1]}" in line for line in daemon.lines)


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["", "pipelined"])
async def test_a_departure_from_the_queue(
    rig: Rig, process: bool, how: str, pipelined: bool, certificate: Certificate, clients: list[TlsClient]
) -> None:
    """Who leaves the queue never reaches the upstream, also with the beginning of another request behind the first."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process, server=certificate.table)
    context = certificate.trusting()
    for tag in (1, 2, 3):
        clients.append(await TlsClient.connect(gateway, context))
        clients[-1].post(tag)
        if tag == 1:
            await upstream.exchange(0)
        else:
            await gateway.waiting(tag - 1)
    if pipelined:
        clients[1].writer.write(request_bytes("POST", OPENAI.path, OPENAI.body(9, padding=300_000)))
        await clients[1].writer.drain()
    clients[1].leave(how)
    await gateway.waiting(1)
    upstream.exchanges[0].answer()
    assert await clients[0].status() == 200
    (await upstream.exchange(1)).answer()
    assert await clients[2].status() == 200
    assert upstream.tags == [1, 3]


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_departure_from_a_stream(
    rig: Rig, process: bool, how: str, certificate: Certificate, clients: list[TlsClient]
) -> None:
    """Who leaves in the middle of a stream is noticed at once, and the upstream let go."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process, server=certificate.table)
    clients.append(await TlsClient.connect(gateway, certificate.trusting()))
    clients[0].post(1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)
    assert await clients[0].status() == 200
    clients[0].leave(how)
    await eventually(lambda: exchange.aborted)


async def test_a_client_that_reads_nothing(
    rig: Rig, process: bool, certificate: Certificate, clients: list[TlsClient]
) -> None:
    """A client that takes nothing of its stream is given up as in the clear."""
    upstream = await rig.upstream()
    limits = {"client_stall_timeout_seconds": 0.5, "response_buffer_bytes": 65536}
    gateway = await rig.gateway(upstream, process=process, server=certificate.table | limits)
    clients.append(await TlsClient.connect(gateway, certificate.trusting(), limit=1024))
    clients[0].post(1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(*[STREAM[1] * 1000] * 200)
    await eventually(lambda: exchange.aborted)
    assert (await gateway.record(outcome="client_stalled"))["status"] == 200


async def test_a_renewed_certificate(
    rig: Rig, process: bool, certificate: Certificate, clients: list[TlsClient]
) -> None:
    """After a reload new connections get the new certificate, those that are open go on; a bad one changes nothing."""
    upstream = await rig.upstream(answer)
    text = configuration({"reasoning": upstream_table(upstream.url)}, **certificate.table)
    gateway = await rig.start(text, process=process)
    old = certificate.trusting()
    clients.append(await TlsClient.connect(gateway, old))
    await asyncio.to_thread(certificate.renew)
    clients.append(await TlsClient.connect(gateway, old))
    assert await gateway.reload(text)
    with pytest.raises(ssl.SSLCertVerificationError):
        await TlsClient.connect(gateway, old)
    clients.append(await TlsClient.connect(gateway, certificate.trusting()))
    new = certificate.trusting()
    certificate.key.write_text("not a key")
    gateway.expect_error("not in PEM form, or encrypted")
    assert not await gateway.reload(text)
    assert await gateway.metric("aiogw_config_last_reload_successful") == 0
    pipe(certificate.certificate)
    gateway.expect_error("is not a file")
    assert not await gateway.reload(text)
    clients.append(await TlsClient.connect(gateway, new))
    for tag, client in enumerate(clients):
        client.post(tag)
        assert await client.status() == 200


def encrypt(certificate: Certificate) -> None:
    command = ["openssl", "ec", "-in", str(certificate.key), "-aes128", "-passout", "pass:secret"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=30)
    certificate.key.write_bytes(done.stdout)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def another_key(certificate: Certificate) -> None:
    before = certificate.certificate.read_text()
    certificate.renew()
    certificate.certificate.write_text(before)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda one: one.certificate.unlink(), ": no such file or directory"),
        (lambda one: pipe(one.certificate), " is not a file"),
        (lambda one: one.key.write_text(""), "not in PEM form, or encrypted"),
        (lambda one: one.certificate.write_text("x"), "not in PEM form, or encrypted"),
        (encrypt, "not in PEM form, or encrypted"),
        (another_key, "the key belongs to another certificate"),
    ],
    ids=["no-file", "pipe", "empty-key", "no-certificate", "encrypted-key", "another-key"],
)
async def test_a_certificate_that_cannot_be_used(certificate: Certificate, spoil: Any, reason: str) -> None:
    """It is a fault of the configuration that names the file and the reason, and nothing asks for a password."""
    spoil(certificate)
    text = configuration({"reasoning": upstream_table("http://127.0.0.1:1")}, **certificate.table)
    with pytest.raises(ConfigError, match=f"server.tls.certificate: {certificate.certificate}.*{reason}"):
        Gateway(config.loads(text))


async def test_what_is_no_tls(rig: Rig, process: bool, certificate: Certificate) -> None:
    """A client that speaks plain HTTP, and a scanner, are turned away and counted, without an error in the log."""
    gateway = await rig.gateway(await rig.upstream(answer), process=process, server=certificate.table)
    for data in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\0" * 100):
        client = await rig.client(gateway)
        await client.send(data)
        await eventually(client.ended)
    client = await rig.client(gateway)
    client.reset()

    async def counted() -> bool:
        return await gateway.metric("aiogw_connections_refused_total", reason="tls") == 3

    await eventually(counted)
    assert await gateway.metric("aiogw_connections") == 0


async def test_a_handshake_that_does_not_end(
    rig: Rig, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that says nothing is let go after the handshake's time, and is a connection until then."""
    monkeypatch.setattr(listener, "TLS_HANDSHAKE_SECONDS", 0.3)
    gateway = await rig.gateway(await rig.upstream(answer), server=certificate.table)
    client = await rig.client(gateway)

    async def connected() -> bool:
        return await gateway.metric("aiogw_connections") == 1

    await eventually(connected)
    assert await client.ended()


async def test_a_stop_during_a_handshake(rig: Rig, process: bool, certificate: Certificate) -> None:
    """A handshake that is under way does not keep the gateway from stopping."""
    gateway = await rig.gateway(await rig.upstream(answer), process=process, server=certificate.table)
    client = await rig.client(gateway)
    await gateway.stop()
    rig.forget(gateway)
    assert await client.ended()


async def test_hundreds_of_aborts(rig: Rig, process: bool, certificate: Certificate) -> None:
    """R63: connections that break off at any point of handshake and request leave no descriptor and no complaint."""
    gateway = await rig.gateway(await rig.upstream(answer), process=process, server=certificate.table)
    context = certificate.trusting()
    hello = ssl.MemoryBIO()
    start = context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        start.do_handshake()
    greeting = hello.read()
    for number in range(200):
        if number % 2:
            client = await TlsClient.connect(gateway, context)
            client.post(number)
            client.leave(("fin", "rst")[number // 2 % 2])
        else:
            raw = await rig.client(gateway)
            await raw.send(greeting[: len(greeting) * number // 200])
            raw.leave(("fin", "rst", "half-close")[number // 2 % 3])

    async def all_closed() -> bool:
        return await gateway.metric("aiogw_connections") == 0

    await eventually(all_closed)
    client = await TlsClient.connect(gateway, context)
    client.post(1)
    assert await client.status() == 200
    client.writer.transport.abort()
