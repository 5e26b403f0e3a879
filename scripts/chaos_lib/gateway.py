"""The gateway of a chaos run: the real process, and all that can be read of it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import tomli_w
from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_SECONDS = 20
CLOSE_WAIT = "08"
# Among them 'Task was destroyed but it is pending!', '... was never retrieved' and what ResourceWarning says.
GOOD_LEVELS = frozenset({"debug", "info", "warning"})
GOOD_LOGGERS = frozenset(
    {"aiogw.app", "aiogw.cli", "aiogw.counted", "aiogw.listener", "aiogw.server", "aiogw.upstream.pool"}
)
LOG_SCHEMA = jsonschema.Draft202012Validator(json.loads((ROOT / "etc" / "log.schema.json").read_text()))
_SAMPLE = re.compile(r"^(aiogw_\w+(?:\{.*\})?) (\S+)$", re.MULTILINE)


class GatewayFailed(Exception):
    """It did not start, or is gone; the text says what it logged last."""


@frozen
class Scrape:
    """Every sample of aiogw's own by its name and labels, as written, and the recount that came with it, if any."""

    samples: dict[str, float]
    recount: dict[str, Any] | None


class GatewayProcess:
    """``python -m aiogw --config FILE``, its log in a file; ``program`` is what stands for ``-m aiogw``."""

    def __init__(
        self, directory: Path, configuration: dict[str, Any], *, program: tuple[str, ...] = ("-m", "aiogw")
    ) -> None:
        self._program = program
        self._log = directory / "gateway.log"
        self._config = directory / "gateway.toml"
        self._log.unlink(missing_ok=True)
        self._config.write_text(tomli_w.dumps(configuration))
        self._process: subprocess.Popen[bytes]
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self.port = 0
        self.admin_port = 0

    async def start(self) -> None:
        self._spawn()
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self.admin_port:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise GatewayFailed(self._log.read_text())
            await asyncio.sleep(0.02)
            found = re.findall(r"(listening|metrics and health) on http://127.0.0.1:(\d+)", self._log.read_text())
            if len(found) == 2:
                self.port, self.admin_port = (int(port) for _, port in found)
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.admin_port)

    def _spawn(self) -> None:
        # A socket that is left to the garbage collector shows in the log.
        options = ("-W", "always::ResourceWarning")
        command = (sys.executable, *options, *self._program, "--config", str(self._config))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env=environment)

    async def metrics(self) -> dict[str, float]:
        return (await self.scrape()).samples

    async def scrape(self) -> Scrape:
        self._writer.write(b"GET /metrics HTTP/1.1\r\nhost: chaos\r\n\r\n")
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        body = (await self._reader.readexactly(int(length[1]))).decode()
        told = re.search(rb"x-chaos-recount: (.*)\r\n", head, re.IGNORECASE)
        return Scrape(
            samples={name: float(value) for name, value in _SAMPLE.findall(body)},
            recount=None if told is None else json.loads(told[1]),
        )

    def hang_up(self) -> None:
        self._writer.close()

    async def stand_still(self, seconds: float) -> None:
        """As on a machine that is suspended or crowded."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def exit_code(self, seconds: float) -> int | None:
        """Its exit code; None, and killed, if it does not end."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                return None
            await asyncio.sleep(0.01)
        return self._process.returncode

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    # -- /proc ------------------------------------------------------------------------------------------------------

    def open_files(self) -> dict[str, str]:
        """What each descriptor stands for, by its number."""
        folder = Path(f"/proc/{self._process.pid}/fd")
        found = {}
        for name in os.listdir(folder):
            try:
                found[name] = os.readlink(folder / name)
            except OSError:
                continue
        return found

    def close_wait(self) -> list[str]:
        """Its sockets whose peer has closed and that it has not: the addresses of their peers."""
        mine = {name[8:-1] for name in self.open_files().values() if name.startswith("socket:[")}
        stuck = []
        for table in ("tcp", "tcp6"):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, _, remote, state, *_rest = fields = line.split()
                if state == CLOSE_WAIT and fields[9] in mine:
                    stuck.append(f"{remote} (port {int(remote.rpartition(':')[2], 16)})")
        return stuck

    def resident_kib(self) -> tuple[int, int]:
        """Resident memory now, and the most it ever was."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        now, most = (re.search(rf"{name}:\s+(\d+)", status) for name in ("VmRSS", "VmHWM"))
        assert now is not None
        assert most is not None
        return int(now[1]), int(most[1])

    # -- its log ----------------------------------------------------------------------------------------------------

    def log_lines(self) -> Iterator[str]:
        with self._log.open(encoding="utf-8", errors="replace") as log:
            yield from (line.rstrip("\n") for line in log)

    def forget_log(self) -> None:
        """Begin the file anew; the gateway goes on writing at its end."""
        os.truncate(self._log, 0)

    async def tasks(self, seconds: float) -> list[str]:
        """What its tasks run; only counted.py tells."""
        told_before = sum(1 for _ in self._told_tasks())
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + seconds
        while len(told := list(self._told_tasks())) == told_before:
            if time.monotonic() > deadline:
                raise GatewayFailed("it does not tell its tasks")
            await asyncio.sleep(0.01)
        return told[-1].split(", ")

    def _told_tasks(self) -> Iterator[str]:
        for line in self.log_lines():
            if found := re.search(r'"tasks \d+: ([^"]*)"', line):
                yield found[1]

    def read_log(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The lines of requests, and every line that a healthy gateway does not write, or the schema does not know."""
        requests, bad = [], []
        for line in self.log_lines():
            try:
                told = json.loads(line)
                level, logger = told["level"], told["logger"]
            except (ValueError, KeyError, TypeError):
                bad.append(line)
                continue
            if level not in GOOD_LEVELS or "exception" in told or not LOG_SCHEMA.is_valid(told):
                bad.append(line)
            elif logger == "aiogw.access":
                requests.append(told)
            elif logger not in GOOD_LOGGERS:
                bad.append(line)
        return requests, bad
