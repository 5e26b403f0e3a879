"""The gateway with one more signal: on SIGUSR1 its log tells how many tasks it has, and which.

``python counted.py --config FILE``, for those who look from outside whether something was left behind.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from types import FrameType

from aiogw.cli import main


def tell(_number: int, _frame: FrameType | None) -> None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    tasks = asyncio.all_tasks(loop)
    names = sorted(getattr(task.get_coro(), "__qualname__", "?") for task in tasks)
    logging.getLogger("aiogw.counted").warning("tasks %d: %s", len(tasks), ", ".join(names))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell)
    sys.exit(main(sys.argv[1:]))
