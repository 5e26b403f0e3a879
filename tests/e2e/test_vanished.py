"""Clients that vanish: no FIN, no RST, no acknowledgement, as when a cable is cut or a machine loses its power."""

from __future__ import annotations

import ctypes
import socket
import struct
import time

from rig import FIRST_EVENT, OPENAI, RawClient, Rig, eventually

# <asm-generic/socket.h>; Python has no name for it.
SO_ATTACH_FILTER = 26
# BPF: return 0, which is how much of a packet is kept.
DROP_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0)

NOTICED_SECONDS = 45


def cut_off(client: RawClient) -> None:
    """From now on the client's kernel throws away whatever comes for it, unseen and unacknowledged, probes included.

    That is what a lost machine looks like to its peer, and needs neither a network namespace nor any privilege.
    """
    program = ctypes.create_string_buffer(DROP_EVERYTHING, len(DROP_EVERYTHING))
    pointer = struct.pack("HP", 1, ctypes.addressof(program))
    client.sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, pointer)


async def test_clients_that_vanish(rig: Rig) -> None:
    """Whatever they were doing, they are gone within 45 s: the idle, the queued with and without signs, the running."""
    upstream = await rig.upstream()
    server = {"first_sign_seconds": 1, "sign_interval_seconds": 2, "body_timeout_seconds": 300}
    daemon = await rig.daemon(
        upstream,
        server=server,
        cap=2,
        queue_timeout_seconds=300,
        first_byte_timeout_seconds=300,
        idle_timeout_seconds=300,
    )
    # The event loop opens a file of its own for its first connection.
    assert (await daemon.admin("/livez")).status == 200
    files_before = daemon.open_files
    streaming = await rig.post(daemon, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)
    await streaming.read_head()
    silent = await rig.post(daemon, OPENAI, 2)
    unanswered = await upstream.exchange(1)
    (with_signs,) = await rig.queued(daemon, OPENAI, [3], stream=True)
    (without,) = await rig.queued(daemon, OPENAI, [4], before=1)
    uploading = await rig.client(daemon)
    await uploading.request("POST", OPENAI.path, b"{", "content-length: 1000000")
    idle = await rig.client(daemon)
    await idle.request("GET", "/v1/models")
    assert (await idle.response()).status == 200

    clients = [streaming, silent, with_signs, without, uploading, idle]
    for client in clients:
        cut_off(client)
    cut_at = time.monotonic()
    exchange.event(FIRST_EVENT)

    def all_noticed() -> bool:
        return daemon.open_files <= files_before

    await eventually(all_noticed, NOTICED_SECONDS, what=lambda: f"{daemon.records}")
    assert time.monotonic() - cut_at > 3  # nobody was seen to leave
    assert exchange.aborted
    assert unanswered.aborted
    await daemon.settled()
    assert [record["outcome"] for record in daemon.records if record["method"] == "POST"] == ["client_gone"] * 5
    assert await daemon.metric("aiogw_body_memory_bytes") == 0
