"""The real process with inherited sockets, as from systemd: ``python activated_daemon.py FD... -- ARGUMENTS``.

What systemd does between fork and exec, done in the process that is then the daemon.
"""

from __future__ import annotations

import fcntl
import os
import sys

from aiogw.cli import main

FIRST = 3


def activate(descriptors: list[int]) -> None:
    # Moved out of the way first: one of them may lie where another one belongs.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in descriptors]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, FIRST + number)
    for descriptor in high:
        os.close(descriptor)
    os.environ["LISTEN_PID"] = str(os.getpid())
    os.environ["LISTEN_FDS"] = str(len(descriptors))


if __name__ == "__main__":
    end = sys.argv.index("--")
    activate([int(argument) for argument in sys.argv[1:end]])
    sys.exit(main(sys.argv[end + 1 :]))
