"""The programs of a run as processes: started, waited for, stopped by their own ids, and what the kernel says of them.

Which programs there are is not known here.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from attrs import frozen

from benchmark.load import connect

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_SECONDS = 20
STOP_TIMEOUT_SECONDS = 5
# Debian puts haproxy where only root looks.
PROGRAM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class ProgramFailed(Exception):
    """A program that did not start; the text says which, and what it printed."""


@frozen(kw_only=True)
class Program:
    """A running program and where it accepts requests.

    ``speaks``: the surfaces it can be asked in.  ``admin_port``: where it has /metrics, if it is a gateway.
    """

    name: str
    port: int
    pid: int
    speaks: tuple[str, ...]
    admin_port: int | None = None

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


# A program of the comparison, started with a setting and stopped at the end of the ``async with``.
Launcher = Callable[[Setting], AbstractAsyncContextManager[Program]]


# -- processes ------------------------------------------------------------------------------------------------------


@contextmanager
def process(
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


async def ready(started: subprocess.Popen[bytes], name: str, log: Path, port: int, *, path: str | None) -> None:
    """Wait until ``port`` accepts and, where there is a ``path`` to ask for, says 200."""
    with suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            while started.poll() is None:
                if await _answers(port, path):
                    return
                await asyncio.sleep(0.002)
    raise ProgramFailed(f"{name} did not start: {last_words(log)}")


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


def last_words(log: Path) -> str:
    """The end of what it printed, as one line of whole words."""
    words = "; ".join(line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip())
    if len(words) > 300:
        words = f"... {words[-300:].partition(' ')[2]}"
    return words or "it printed nothing"


def free_ports(count: int) -> list[int]:
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


def processor_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_busy_seconds() -> float:
    """The time all processors of the machine have spent on anything, stolen time included."""
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
