"""The gateway and the stub upstream behind it, each a process: what is measured, and what it is measured with."""

from __future__ import annotations

import asyncio
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from attrs import frozen

from benchmark.load import KEY, connect
from benchmark.processes import ROOT, Program, ProgramFailed, Setting, free_ports, last_words, process, ready

SCRAPE_INTERVAL_SECONDS = 1
BODY_MEMORY = re.compile(rb"^aiogw_body_memory_bytes (\S+)", re.MULTILINE)
MAX_CONNECTIONS = 12_000


@contextmanager
def stub_upstream(directory: Path) -> Iterator[Program]:
    log = directory / "stub.log"
    command = [sys.executable, str(Path(__file__).with_name("stub.py"))]
    with process(command, log, pipes=True) as started:
        assert started.stdout is not None
        said = started.stdout.readline()
        if not said:
            raise ProgramFailed(f"the stub upstream did not start: {last_words(log)}")
        yield Program(name="direct", port=int(said), pid=started.pid, speaks=("openai",))


@frozen(kw_only=True)
class Gateway:
    """``python -m aiogw`` of a source tree with all switched on: keys, a log line for each request, metrics scraped."""

    name: str = "aiogw"
    root: Path = ROOT

    @asynccontextmanager
    async def __call__(self, setting: Setting) -> AsyncIterator[Program]:
        port, admin_port = free_ports(2)
        path, log = setting.directory / f"{self.name}.toml", setting.directory / f"{self.name}.log"
        key_file = setting.directory / "key"
        key_file.touch(mode=0o600)
        key_file.write_text(KEY)
        try:
            path.write_text(tomli_w.dumps(self._config(setting, port, admin_port, key_file)))
        except KeyError as error:
            raise ProgramFailed(f"the etc/gateway.toml of {self.name} has no {error}, which is needed here") from None
        except (TypeError, OSError, tomllib.TOMLDecodeError) as error:
            raise ProgramFailed(f"{self.name} has no etc/gateway.toml that can be used here: {error}") from None
        command = [sys.executable, "-m", "aiogw", "--config", str(path)]
        with process(command, log, root=self.root) as started:
            await ready(started, self.name, log, admin_port, path="/readyz")
            scraping = asyncio.create_task(_scrape(admin_port))
            try:
                yield Program(
                    name=self.name,
                    port=port,
                    pid=started.pid,
                    speaks=("openai", "anthropic"),
                    admin_port=admin_port,
                )
                if scraping.done():
                    raise ProgramFailed(f"{self.name} was no longer scraped: {scraping.exception()!r}")
            finally:
                scraping.cancel()
                await asyncio.gather(scraping, return_exceptions=True)

    def _config(self, setting: Setting, port: int, admin_port: int, key_file: Path) -> dict[str, Any]:
        # From the file that this tree ships, so that it has this tree's keys, and whatever is added to it one day is on
        # without anybody thinking of the benchmark.
        config = tomllib.loads((self.root / "etc" / "gateway.toml").read_text())
        config["server"] |= {
            "listen": f"127.0.0.1:{port}",
            "admin_listen": f"127.0.0.1:{admin_port}",
            # Some scenarios have more clients than the file allows.
            "max_connections": MAX_CONNECTIONS,
            "log_level": "info",
            "log_format": "json",
            "drain_timeout_seconds": 1,
        }
        # More places than there are: it is the queue that fills.
        holder = {"file": str(key_file), "models": "all", "queue_places": setting.queue_limit + 1}
        config["auth"] = {"mode": "keys", "keys": {"bench": holder}}
        upstream = config["upstreams"]["reasoning"]
        upstream["url"] = f"http://127.0.0.1:{setting.upstream_port}"
        upstream["admission"] |= {
            "engine_slots": setting.cap + 1,
            "cap": setting.cap,
            "queue_limit": setting.queue_limit,
            "queue_timeout_seconds": setting.queue_timeout_seconds,
        }
        config["upstreams"] = {"reasoning": upstream}
        return config


async def _scrape(admin_port: int) -> None:
    """Ask for the metrics as Prometheus does, though more often than anybody lets it."""
    while True:
        await asyncio.sleep(SCRAPE_INTERVAL_SECONDS)
        await _metrics(admin_port, encoding="gzip")


async def body_memory_bytes(program: Program) -> float | None:
    """What a gateway says that it holds of request bodies; None if it says nothing of the kind."""
    if program.admin_port is None:
        return None
    found = BODY_MEMORY.search(await _metrics(program.admin_port, encoding="identity"))
    return float(found[1]) if found else None


async def _metrics(admin_port: int, *, encoding: str) -> bytes:
    connection = await connect(admin_port)
    head = f"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\naccept-encoding: {encoding}\r\n\r\n"
    answer = await connection.send(head.encode())
    connection.abort()
    if answer.status != 200:
        raise ConnectionError(f"/metrics answered {answer.status}")
    return answer.body
