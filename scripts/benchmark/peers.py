"""The programs of a run, each a real process: the stub upstream, the gateway, and HAProxy as what it is compared with.

Whatever is started here is stopped here, by its own process id.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w
from attrs import frozen

from benchmark.load import KEY, connect

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_SECONDS = 20
STOP_TIMEOUT_SECONDS = 5
SCRAPE_INTERVAL_SECONDS = 1

# Debian puts haproxy where only root looks.
PROGRAM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
HAPROXY_MISSING = "HAProxy is not installed: the figures stand alone (to have it beside them: apt-get install haproxy)"

# The queueing anchor: one server, a hard cap, a bounded queue, and one thread as the gateway has one.
HAPROXY_CONFIG = """\
global
    maxconn 8192
    nbthread 1
defaults
    mode http
    timeout client 60s
    timeout connect 5s
    timeout server 60s
    timeout queue {queue_timeout_ms:.0f}ms
    option abortonclose
    option http-keep-alive
    # Without this it holds the events of a stream back, to send several at once.
    option http-no-delay
frontend front
    bind 127.0.0.1:{port}
    default_backend reasoning
backend reasoning
    http-reuse always
    # maxqueue only moves a request on to the backend's own, unbounded queue: with one server the bound must be a rule.
    http-request return status 503 hdr Retry-After 1 if {{ queue(reasoning) ge {queue_limit} }}
    server stub 127.0.0.1:{upstream_port} maxconn {cap}
"""


class ProgramFailed(Exception):
    """A program that did not start; the text says which, and what it printed."""


@frozen(kw_only=True)
class Program:
    """A running program and where it accepts requests.  ``speaks``: the surfaces it can be asked in."""

    name: str
    port: int
    pid: int
    speaks: tuple[str, ...]

    def cpu_seconds(self) -> float:
        """User and system time of the process and its descendants: what holds on a busy machine."""
        return sum(_cpu_seconds(pid) for pid in _process_tree(self.pid))

    def resident_kib(self) -> float:
        return sum(_resident_kib(pid) for pid in _process_tree(self.pid))


@frozen(kw_only=True)
class Setting:
    """What the gateway and its peer are to do: ``cap`` requests at a time to the upstream, ``queue_limit`` waiting."""

    cap: int
    queue_limit: int
    queue_timeout_seconds: float
    upstream_port: int
    directory: Path


@contextmanager
def stub_upstream(directory: Path) -> Iterator[Program]:
    log = directory / "stub.log"
    command = [sys.executable, str(Path(__file__).with_name("stub.py"))]
    with _process(command, log, pipes=True) as started:
        assert started.stdout is not None
        said = started.stdout.readline()
        if not said:
            raise ProgramFailed(f"the stub upstream did not start: {_last_words(log)}")
        yield Program(name="direct", port=int(said), pid=started.pid, speaks=("openai",))


# A program of the comparison, started with a setting and stopped at the end of the ``async with``.
Launcher = Callable[[Setting], AbstractAsyncContextManager[Program]]


@frozen(kw_only=True)
class Gateway:
    """``python -m aiogw`` of the source tree ``root``, everything switched on: keys, a log line for each request, and
    metrics that are scraped."""

    name: str = "aiogw"
    root: Path = ROOT

    @asynccontextmanager
    async def __call__(self, setting: Setting) -> AsyncIterator[Program]:
        port, admin_port = _free_ports(2)
        path, log = setting.directory / f"{self.name}.toml", setting.directory / f"{self.name}.log"
        key_file = setting.directory / "key"
        key_file.touch(mode=0o600)
        key_file.write_text(KEY)
        try:
            path.write_text(tomli_w.dumps(self._config(setting, port, admin_port, key_file)))
        except (KeyError, TypeError, OSError) as error:
            raise ProgramFailed(f"{self.name} has no etc/gateway.toml that can be used here: {error!r}") from None
        command = [sys.executable, "-m", "aiogw", "--config", str(path)]
        with _process(command, log, root=self.root) as started:
            await _ready(started, self.name, log, admin_port, path="/readyz")
            scraping = asyncio.create_task(_scrape(admin_port))
            try:
                yield Program(name=self.name, port=port, pid=started.pid, speaks=("openai", "anthropic"))
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
        connection = await connect(admin_port)
        answer = await connection.send(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\naccept-encoding: gzip\r\n\r\n")
        connection.abort()
        if answer.status != 200:
            raise ConnectionError(f"/metrics answered {answer.status}")


@asynccontextmanager
async def haproxy(setting: Setting) -> AsyncIterator[Program]:
    (port,) = _free_ports(1)
    path, log = setting.directory / "haproxy.cfg", setting.directory / "haproxy.log"
    path.write_text(
        HAPROXY_CONFIG.format(
            port=port,
            cap=setting.cap,
            queue_limit=setting.queue_limit,
            queue_timeout_ms=setting.queue_timeout_seconds * 1000,
            upstream_port=setting.upstream_port,
        )
    )
    program = shutil.which("haproxy", path=PROGRAM_PATH)
    if program is None:
        raise ProgramFailed(HAPROXY_MISSING)
    with _process([program, "-f", str(path), "-db"], log) as started:
        await _ready(started, "HAProxy", log, port, path=None)
        yield Program(name="HAProxy", port=port, pid=started.pid, speaks=("openai",))


def haproxy_version() -> str | None:
    """None: it is not installed."""
    program = shutil.which("haproxy", path=PROGRAM_PATH)
    if program is None:
        return None
    said = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=10, check=False).stdout
    return said.removeprefix("HAProxy version ").split("-")[0].split(" ")[0]


# -- processes ------------------------------------------------------------------------------------------------------


@contextmanager
def _process(
    command: Sequence[str], log: Path, *, root: Path = ROOT, pipes: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """``pipes``: standard input and output are ours; otherwise the output goes to ``log``.

    Python finds the packages that lie in ``root`` before those that are installed.
    """
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else output,
            stderr=output,
            # A session of its own: Ctrl-C reaches the benchmark alone, which then stops the rest in order.
            start_new_session=True,
        )
    with started:  # closes the pipes and collects it
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                started.kill()


async def _ready(started: subprocess.Popen[bytes], name: str, log: Path, port: int, *, path: str | None) -> None:
    """Wait until ``port`` accepts and, where there is a ``path`` to ask for, says 200."""
    with suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            while started.poll() is None:
                if await _answers(port, path):
                    return
                await asyncio.sleep(0.002)
    raise ProgramFailed(f"{name} did not start: {_last_words(log)}")


async def _answers(port: int, path: str | None) -> bool:
    try:
        connection = await connect(port)
    except OSError:
        return False
    try:
        if path is None:
            return True
        answer = await connection.send(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        return answer.status == 200
    except ConnectionError:
        return False
    finally:
        connection.abort()


def _last_words(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-300:] or "it printed nothing"


def _free_ports(count: int) -> list[int]:
    """Ports that are free now; all are held until the last is found, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


# -- what the kernel says of them -----------------------------------------------------------------------------------


def _cpu_seconds(pid: int) -> float:
    """User and system time of one process.

    /proc/PID/stat has it in ticks of 10 ms, too coarse for legs of a second or two.  The kernel's clock of that process
    has it in nanoseconds; the arithmetic is that of clock_getcpuclockid(3), which Python does not offer.
    """
    with suppress(OSError):  # it has ended meanwhile
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def _resident_kib(pid: int) -> float:
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024
    return 0.0


def _process_tree(pid: int) -> list[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                # The second field is the program's name in parentheses, and may hold anything.
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                children[int(fields[1])].append(int(entry))
    tree = [pid]
    for parent in tree:  # which grows while it is walked
        tree += children[parent]
    return tree


def machine_busy_seconds() -> float:
    """The time all processors of the machine have spent on anything, stolen time included."""
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
