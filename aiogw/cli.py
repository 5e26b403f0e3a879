"""The command line: arguments to exit code.  0: done; 1: cannot run; 2: usage or configuration."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from aiogw import __version__, clients, config, credentials
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import Dialect

OK, CANNOT_RUN, BAD_CONFIG = 0, 1, 2


def main(arguments: Sequence[str] | None = None, *, dialects: tuple[Dialect, ...] = DIALECTS) -> int:
    """Run one command; the return value is the exit code (argparse itself exits with 2).

    ``dialects`` is the registry, for a gateway with one that is not ours.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.client is not None and options.command != "show":
        parser.error("--client: only with show")
    try:
        loaded = config.load(options.config)
        if options.command == "check":
            credentials.load(loaded)
            return OK
        if options.command == "show":
            # Who prints a client's lines need not be able to read the keys.
            return _show(loaded, options.client)
        return _run(loaded, partial(config.load, options.config), dialects)
    except config.ConfigError as error:
        for fault in error.faults:
            print(f"aiogw: {fault}", file=sys.stderr)  # noqa: T201 - the log may not be set up yet
        return BAD_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aiogw", description="The front door of a self-hosted LLM cluster.")
    parser.add_argument("--version", action="version", version=f"aiogw {__version__}")
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "check", "show"),
        default="run",
        help="run the gateway (the default), check the configuration, or show the effective configuration as TOML",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the configuration, a TOML file")
    parser.add_argument(
        "--client",
        choices=tuple(clients.CLIENTS),
        metavar="NAME",
        help=f"with show: the lines that point this client at the gateway; one of {', '.join(clients.CLIENTS)}",
    )
    return parser


def _show(loaded: config.Config, client: str | None) -> int:
    if client is None:
        sys.stdout.write(config.dumps(loaded))
        return OK
    try:
        sys.stdout.write(clients.lines(client, loaded))
    except clients.CannotReach as error:
        print(f"aiogw: {error}", file=sys.stderr)  # noqa: T201 - stdout is for the lines alone
        return CANNOT_RUN
    return OK


def _run(loaded: config.Config, reread: Callable[[], config.Config], dialects: tuple[Dialect, ...]) -> int:
    # Until the gateway has handlers of its own there is nothing to drain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(OK))
    # Imported here, so that check and show answer at once and do not need an event loop.
    import uvloop

    from aiogw.app import Gateway
    from aiogw.record import configure_logging
    from aiogw.sockets import CannotListen

    configure_logging(level=loaded.server.log_level, format_=loaded.server.log_format)

    async def serve() -> None:
        gateway = Gateway(loaded, reread=reread, dialects=dialects, environment=os.environ)
        # What is there now stays: the collector need not go through the libraries for each thousand of clients.
        gc.collect()
        gc.freeze()
        await gateway.run()

    try:
        uvloop.run(serve())
    except CannotListen as error:
        print(f"aiogw: {error}", file=sys.stderr)  # noqa: T201 - for whoever started it, as well as for the log
        return CANNOT_RUN
    return OK
