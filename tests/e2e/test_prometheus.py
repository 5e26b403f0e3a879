"""The dashboard and the rules against a real Prometheus that scrapes the real process: every query finds its data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rig import OPENAI, SURFACES, Exchange, Rig, answer, configuration, eventually, upstream_table

ETC = Path(__file__).parents[2] / "etc"
DASHBOARD = json.loads((ETC / "grafana" / "aiogw.json").read_text())
RULES = ETC / "prometheus" / "aiogw.rules.yml"
# Grafana's variables as its "All" and a short interval make them.
VARIABLES = {"$upstream": ".*", "$__rate_interval": "5s"}
SELECTOR = re.compile(r"(?:\bup(?=\{)|\b(?:upstream:)?(?:aiogw|process)_[\w:]+)(?:\{[^}]*\})?")
ENGINE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="reasoning"} 7
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="reasoning"} 3
"""
# Each scrape is a row of the answers below; the machine of a CI may be slow.
SCRAPE_SECONDS = 0.25
PATIENCE_SECONDS = 45.0


class Prometheus:
    """The real one, with a directory and a port of its own."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def ask(self, path: str, **parameters: str) -> Any:
        async with self._session.get(f"{self._url}/api/v1/{path}", params=parameters) as response:
            document = await response.json()
            assert document["status"] == "success", (path, parameters, document)
            return document["data"]

    async def values(self, query: str) -> list[str]:
        """Of each series; NaN, as of a quantile of nothing, is no value."""
        return [one["value"][1] for one in (await self.ask("query", query=query))["result"] if one["value"][1] != "NaN"]

    async def found(self, queries: Iterable[str]) -> list[str]:
        """Those of the queries that have data, once all of them do or patience is at an end."""
        wanted, deadline = list(queries), time.monotonic() + PATIENCE_SECONDS
        while True:
            found = [query for query in wanted if await self.values(query)]
            if found == wanted or time.monotonic() > deadline:
                return found
            await asyncio.sleep(SCRAPE_SECONDS)

    async def alerts(self) -> dict[str, list[str]]:
        """The texts of the alerts that fire or are about to, by their names."""
        alerts = (await self.ask("alerts"))["alerts"]
        return {one["labels"]["alertname"]: list(one["annotations"].values()) for one in alerts}


@contextlib.asynccontextmanager
async def prometheus(directory: Path, target: str) -> AsyncIterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program, "prometheus is missing: install the Debian package of that name"
    seconds = f"{SCRAPE_SECONDS * 1000:.0f}ms"
    config = {
        "global": {"scrape_interval": seconds, "scrape_timeout": seconds, "evaluation_interval": seconds},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "aiogw", "static_configs": [{"targets": [target]}]}],
    }
    # YAML reads JSON.
    (directory / "prometheus.yml").write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        "--web.listen-address=127.0.0.1:0",
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert process.stderr is not None
    lines: list[str] = []

    async def read() -> None:
        while line := await process.stderr.readline():  # type: ignore[union-attr]
            lines.append(line.decode())

    reading = asyncio.ensure_future(read())

    def ready() -> str | None:
        assert process.returncode is None, "".join(lines)
        addresses = (re.search(r'msg="Listening on" address=(127\.0\.0\.1:\d+)', line) for line in lines)
        told = any("Server is ready" in line for line in lines)
        return next((found[1] for found in addresses if found and told), None)

    try:
        address = await eventually(ready, PATIENCE_SECONDS, what=lambda: "".join(lines))
        async with aiohttp.ClientSession() as session:
            yield Prometheus(f"http://{address}", session)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await reading


def troubled(exchange: Exchange) -> None:
    """A script: most are answered; some are broken off, refused, or take their time."""
    request = exchange.request
    if request.target == "/metrics":
        exchange.answer(ENGINE, "content-type: text/plain")
    elif request.method == "GET":
        exchange.answer(b"")
    elif exchange.tag == 1:
        exchange.reset()
    elif exchange.tag == 2:
        exchange.answer(b'{"error":{"message":"no"}}', status=500)
    elif exchange.tag != 3:
        answer(exchange)


async def traffic(rig: Rig, gateway: Any) -> None:
    """Of all kinds, until cancelled: answers, faults, full queues, time-outs, departures, and what is no request."""
    while True:
        for tag in (0, 1, 2):
            for surface in SURFACES[:2]:
                for stream in (False, True):
                    await rig.ask(gateway, surface, tag, stream=stream)
        # Two take the slots and keep them, two wait for a second in vain, one finds the queue full.
        held = [await rig.post(gateway, OPENAI, 3) for _ in range(5)]
        client = await rig.client(gateway)
        await client.send(b"nonsense\r\n\r\n")
        await client.response()
        await asyncio.gather(*(one.response() for one in held[2:]))
        for one in (*held, client):
            one.close()
        await gateway.waiting(0)


@pytest.fixture
async def watched(rig: Rig, tmp_path: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes a gateway with two endpoints, one of them dead, under traffic of all kinds."""
    upstream = await rig.upstream(troubled)
    dead = await rig.upstream()
    table = upstream_table(
        "", cap=2, queue_limit=2, queue_timeout_seconds=1, abort_settle_seconds=0.05, watch_engine_seconds=0.1
    )
    del table["url"], table["admission"]["engine_slots"]
    table["endpoints"] = [{"url": url, "engine_slots": 3} for url in (upstream.url, dead.url)]
    await dead.stop()
    gateway = await rig.start(configuration({"reasoning": table}), process=True)
    host, port = gateway.admin_address
    async with prometheus(tmp_path, f"{host}:{port}") as one:
        load = asyncio.ensure_future(traffic(rig, gateway))
        try:
            yield one
            if load.done():
                load.result()
        finally:
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load


def dashboard_queries(panels: Iterable[Mapping[str, Any]]) -> list[str]:
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    return queries


async def test_every_query_has_data(watched: Prometheus) -> None:
    """Those of the dashboard and the recording rules give numbers, and what an alert looks at is there to look at.

    Of what is in trouble here, the alerts are on their way, with texts that are filled in.
    """
    queries = dashboard_queries(DASHBOARD["panels"])
    assert len(queries) > 30
    assert not [query for query in queries if "$" in query]
    rules = [rule for group in (await watched.ask("rules"))["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if rule["type"] == "alerting"]
    queries += [rule["name"] for rule in rules if rule["type"] == "recording"]
    queries += [selector for alert in alerts for selector in SELECTOR.findall(alert["query"])]
    assert queries == await watched.found(queries)
    for alert in alerts:
        assert set(alert["annotations"]) == {"summary", "description", "action"}, alert["name"]
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert SELECTOR.search(alert["query"])
    expected = {"AiogwEndpointOut", "AiogwQueueFull", "AiogwQueueTimeouts", "AiogwUpstreamErrors", "AiogwEngineQueues"}
    texts: dict[str, list[str]] = {}

    async def told() -> bool:
        texts.update(await watched.alerts())
        return expected <= texts.keys()

    await eventually(told, PATIENCE_SECONDS, what=lambda: f"{expected} in {texts.keys()}")
    assert not [text for all_ in texts.values() for text in all_ if "{{" in text or "error" in text.partition("<")[2]]


def test_the_dashboard_is_one() -> None:
    """Panels have titles, units and legends, no two at one place, and ask the chosen Prometheus only."""
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "upstream"]
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
