"""The connections of a running gateway: how many, what one too many is told, and how it is without descriptors."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Iterator

import pytest
from rig import (
    OPENAI,
    Daemon,
    RawClient,
    Response,
    Rig,
    answer,
    configuration,
    eventually,
    set_reset_on_close,
    upstream_table,
)


async def test_one_connection_too_many(rig: Rig, process: bool) -> None:
    """Beyond max_connections a client is told to come back, in words that both SDKs read; nobody else notices."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process, server={"max_connections": 3})
    kept = [await rig.client(gateway) for _ in range(3)]
    for tag, client in enumerate(kept):
        await client.post(OPENAI.path, OPENAI.body(tag))
        assert (await client.response()).status == 200
    refused = await rig.client(gateway)
    response = await refused.response()
    assert (response.status, response.header("connection"), response.complete) == (503, "close", True)
    assert (response.header("retry-after"), response.header("x-should-retry")) == ("1", "true")
    document = json.loads(response.body)
    assert document["type"] == "error"
    assert document["error"] == {"type": "overloaded_error", "message": "too many connections; try again"}
    assert await refused.ended()
    assert not refused.reset_seen

    metrics = await gateway.metrics()
    assert metrics["aiogw_connections", frozenset()] == metrics["aiogw_connections_limit", frozenset()] == 3
    assert metrics["aiogw_connections_refused_total", frozenset({("reason", "limit")})] == 1
    assert metrics["aiogw_connections_refused_total", frozenset({("reason", "descriptors")})] == 0
    await kept[0].post(OPENAI.path, OPENAI.body(7))
    assert (await kept[0].response()).status == 200
    kept[1].close()

    async def there_is_room() -> bool:
        return await gateway.metric("aiogw_connections") == 2

    await eventually(there_is_room)
    assert (await rig.ask(gateway, OPENAI, 8)).status == 200


async def test_a_request_sent_at_once_is_refused_in_order(rig: Rig) -> None:
    """A client that has sent its request before it was refused reads the answer, not a reset."""
    gateway = await rig.gateway(await rig.upstream(answer), process=True, server={"max_connections": 1})
    only = await rig.post(gateway, OPENAI)
    assert (await only.response()).status == 200
    responses = []
    for tag in range(20):
        client = await rig.client(gateway)
        with contextlib.suppress(ConnectionError):
            await client.post(OPENAI.path, OPENAI.body(tag, padding=4000))
        responses.append(await client.response())
    assert {response.status for response in responses} == {503}
    assert all(response.complete for response in responses)


@contextlib.contextmanager
def descriptors(daemon: Daemon, spare: int) -> Iterator[int]:
    """Let ``daemon`` have only ``spare`` descriptors more than it has."""
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    limit = daemon.open_files + spare
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


async def test_descriptors_run_out_for_a_while(rig: Rig) -> None:
    """G22: under the pressure of hundreds of clients the log has a few lines, and 2 s after it all is as before."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream, server={"log_level": "info"})
    lines_before = len(daemon.lines)
    with descriptors(daemon, 10) as limit:
        clients: list[RawClient] = [await rig.client(daemon) for _ in range(300)]
        await eventually(lambda: daemon.open_files >= limit - 1)
        told: list[Response] = [await client.response() for client in clients[50:]]
        assert {response.status for response in told} == {503}
        assert {response.header("retry-after") for response in told} == {"1"}
        for client in clients:
            set_reset_on_close(client.sock)
            client.close()
        ended_at = time.monotonic()

    async def served() -> bool:
        return (await rig.ask(daemon, OPENAI, 1)).status == 200

    await eventually(served)
    assert time.monotonic() - ended_at < 2
    told_lines = [line for line in daemon.lines[lines_before:] if '"logger":"aiogw.access"' not in line]
    assert 1 <= len(told_lines) <= 6, told_lines
    assert all("turned connections away (descriptors: " in line for line in told_lines), told_lines
    assert await daemon.metric("aiogw_connections_refused_total", reason="descriptors") >= 250


async def test_a_limit_that_descriptors_do_not_allow(rig: Rig) -> None:
    """What cannot work is said at the start, with both numbers."""
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    daemon = await rig.daemon(await rig.upstream(), server={"max_connections": allowed + 1})
    needed = allowed + 1 + 1 + 64 + 64
    said = (
        f"max_connections may need {needed} open files, and the limit is {allowed} (LimitNOFILE): only {allowed - 129} "
    )
    await eventually(lambda: any(said in line for line in daemon.lines), what=said)
    assert await daemon.metric("aiogw_connections_limit") == allowed - 129


FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from aiogw.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("unlimited", [False, True], ids=["gate", "no-gate"])
async def test_the_silent_do_not_take_the_descriptors_of_the_others(rig: Rig, unlimited: bool) -> None:
    """Dozens of connections that say nothing leave enough for who is served, for the upstream and for the probes."""
    upstream = await rig.upstream(answer)
    admission = {"admission": "unlimited"} if unlimited else {}
    text = configuration({"reasoning": upstream_table(upstream.url, **admission)}, max_connections=200)
    daemon = Daemon(rig.config_file(text), program=("-c", FEW_DESCRIPTORS))
    await daemon.start()
    try:
        running = await rig.client(daemon)
        await running.request("GET", OPENAI.models_path)
        assert (await running.response(to="GET")).status == 200
        silent = [await rig.client(daemon) for _ in range(80)]
        assert (await silent[-1].response()).status == 503
        assert (await daemon.admin("/livez")).status == 200
        assert await daemon.metric("aiogw_connections_limit") == (8 if unlimited else 16)
        assert await daemon.metric("aiogw_connections") == (8 if unlimited else 16)
        for tag in range(3):
            await running.post(OPENAI.path, OPENAI.body(tag))
            assert (await running.response()).status == 200
        assert await daemon.metric("aiogw_connections_refused_total", reason="descriptors") == 0
        assert upstream.tags == [0, 1, 2]
    finally:
        await daemon.stop()


@pytest.mark.parametrize("admin", [False, True], ids=["clients", "admin"])
async def test_the_admin_listener_has_room_of_its_own(rig: Rig, admin: bool) -> None:
    """Metrics and probes are served while clients have all connections there are, and the other way round."""
    gateway = await rig.gateway(await rig.upstream(answer), process=True, server={"max_connections": 2})
    crowd = [await rig.client(gateway.admin_address if admin else gateway) for _ in range(80)]
    await crowd[-1].read_head()
    if admin:
        assert (await rig.ask(gateway, OPENAI, 1)).status == 200
    else:
        assert (await gateway.admin("/livez")).status == 200
    for client in crowd:
        client.close()

    async def served() -> bool:
        return (await gateway.admin("/livez")).status == 200

    await eventually(served)
