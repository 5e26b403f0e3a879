"""The command line: arguments to exit code.

0: done; 1: cannot run, or not found; 2: usage or configuration; 75: not well now (``status``), try later; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from aiogw import __version__, clients, config, credentials
from aiogw.config.values import upstream_address
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import Dialect

OK, CANNOT_RUN, BAD_CONFIG, TRY_LATER, INTERRUPTED = 0, 1, 2, 75, 130


def main(arguments: Sequence[str] | None = None, *, dialects: tuple[Dialect, ...] = DIALECTS) -> int:
    """Run one command; the return value is the exit code (argparse itself exits with 2).

    ``dialects`` is the registry, for a gateway with one that is not ours.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the encoding is another one, a sign or two are lacking
    parser = _parser()
    try:
        return _command(parser, parser.parse_args(arguments), dialects)
    except KeyboardInterrupt:
        return INTERRUPTED


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace, dialects: tuple[Dialect, ...]) -> int:
    if options.command == "explain":
        return _explain(options.id, options.file)
    if options.command == "schema":
        return _schema()
    if options.command == "init":
        return _init(options)
    watches = options.command in ("top", "status")
    if watches and options.admin is not None:
        return _watch(options, options.admin)
    if options.config == config.STANDARD_INPUT and options.command in (None, "run"):
        parser.error("run needs a file, which is read again on SIGHUP, and not standard input")
    if options.config is None:
        parser.error(f"the following arguments are required: {'--admin or ' if watches else ''}--config")
    try:
        if watches:
            return _watch(options, str(config.load(options.config).server.admin_listen))
        if options.command == "show":
            # Who prints a client's lines need not be able to read the keys.
            return _show(config.load(options.config), options.client)
        read = partial(config.load, options.config, also=credentials.faults)
        loaded = read()
        if options.command == "check":
            credentials.load(loaded)
            return OK
        return _run(loaded, read, dialects)
    except config.ConfigError as error:
        for fault in config.place(error, options.config).faults:
            # As compilers do: the place comes first, so that editors find it.
            print(fault, file=sys.stderr)  # noqa: T201 - the log may not be set up
        return BAD_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aiogw", description="The front door of a self-hosted LLM cluster.")
    parser.add_argument("--version", action="version", version=f"aiogw {__version__}")
    file = {"type": Path, "metavar": "FILE", "help": "the configuration, a TOML file; -: standard input"}
    parser.add_argument("--config", **file)  # type: ignore[arg-type]
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help="run, if none is named")

    def command(name: str, says: str, *, of_config: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")
        if of_config:
            # Before the command or after it; the default is the parser's above.
            one.add_argument("--config", default=argparse.SUPPRESS, **file)  # type: ignore[arg-type]
        return one

    command("run", "run the gateway, until SIGTERM")
    command("check", "check the configuration, and say all that is wrong with it, and where")
    show = command("show", "show the configuration in effect, as TOML")
    show.add_argument(
        "--client",
        choices=tuple(clients.CLIENTS),
        metavar="NAME",
        help=f"the lines that point this client at the gateway; one of {', '.join(clients.CLIENTS)}",
    )
    where = "its admin address: http://HOST:PORT or unix:/PATH; without it, the one of --config"
    command("top", "watch a gateway at work").add_argument("--admin", type=_admin, metavar="URL", help=where)
    status = command("status", "say what a gateway does at this moment; exit code 75 when it is not well")
    status.add_argument("--admin", type=_admin, metavar="URL", help=where)
    status.add_argument("--json", action="store_true", help="the whole status document")
    explain = command("explain", "tell the story of one request, from the gateway's log", of_config=False)
    explain.add_argument("id", type=_request_id, metavar="ID", help="its x-request-id")
    explain.add_argument("file", metavar="FILE", nargs="?", type=Path, help="the log; without it, or -, standard input")
    init = command("init", "ask an engine for its models, and write a first configuration", of_config=False)
    init.add_argument(
        "--from", dest="url", required=True, type=_upstream, metavar="URL", help="where it is: http://HOST:PORT"
    )
    init.add_argument(
        "--engine-slots",
        required=True,
        type=_slots,
        metavar="N",
        help="sequences it works on at once, which it does not tell: replicas times --max-num-seqs of vLLM",
    )
    init.add_argument("--credential-file", type=Path, metavar="FILE", help="the file with its key, if it wants one")
    init.add_argument("--output", type=Path, metavar="FILE", help="where to write it; without it, standard output")
    init.add_argument("--force", action="store_true", help="overwrite FILE")
    command("schema", "print a JSON schema of the configuration, for editors", of_config=False)
    return parser


def _upstream(text: str) -> config.UpstreamAddress:
    try:
        return upstream_address(text, None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _admin(text: str) -> str:
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not (text.startswith("unix:/") if text.startswith("unix:") else good):
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, HOST:PORT or unix:/PATH, found {text!r}")
    return text


def _request_id(text: str) -> str:
    from aiogw.record import request_id_from

    if request_id_from(text) != text:
        raise argparse.ArgumentTypeError(f"no request has this id: {text!r}")
    return text


def _slots(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 2 since cap is below it, found {text!r}")
    return int(text)


def _say(text: object) -> None:
    print(f"aiogw: {text}", file=sys.stderr)  # noqa: T201 - stdout is for data, and the log is not set up


def _write(text: str) -> int:
    """Print ``text``, all of it, or say why not; the return value is an exit code."""
    if sys.stdout is None:
        _say(f"standard output: {os.strerror(errno.EBADF).lower()}")
        return CANNOT_RUN
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # who reads no further has what was wanted
            _say(f"standard output: {(error.strerror or str(error)).lower()}")
            return CANNOT_RUN
    return OK


def _show(loaded: config.Config, client: str | None) -> int:
    if client is None:
        return _write(config.dumps(loaded))
    try:
        return _write(clients.lines(client, loaded))
    except clients.CannotReach as error:
        _say(error)
        return CANNOT_RUN


def _schema() -> int:
    from aiogw.config.schema import schema

    return _write(json.dumps(schema(), indent=2) + "\n")


def _init(options: argparse.Namespace) -> int:
    from aiogw.starter import CannotAsk, first_configuration

    output: Path | None = options.output
    file: Path | None = options.credential_file
    # What the parts of a gateway log is for its log; here the one line below says it.
    logging.getLogger("aiogw").addHandler(logging.NullHandler())
    exists = f"{output} exists; --force overwrites it"
    if output is not None and output.exists() and not options.force:
        _say(exists)
        return CANNOT_RUN
    try:
        text = asyncio.run(
            first_configuration(
                options.url,
                engine_slots=options.engine_slots,
                credential_file=None if file is None else str(file.absolute()),
            )
        )
        if output is None:
            return _write(text)
        with output.open("w" if options.force else "x", encoding="utf-8") as writing:
            writing.write(text)
    except FileExistsError:
        _say(exists)
    except OSError as error:
        _say(f"{output}: {(error.strerror or str(error)).lower()}")
    except CannotAsk as error:
        _say(error)
    except config.ConfigError as error:
        for fault in error.faults:
            _say(fault)
        return BAD_CONFIG
    else:
        return OK
    return CANNOT_RUN


def _watch(options: argparse.Namespace, admin: str) -> int:
    from aiogw.status import reader, words

    address = reader.AdminAddress(admin)
    if options.command == "top":
        return _top(address)
    try:
        told = asyncio.run(reader.ask(address))
    except reader.CannotAsk as error:
        _say(error)
        return CANNOT_RUN
    return _write(words.as_json(told) if options.json else words.summary(told)) or (
        OK if words.is_well(told) else TRY_LATER
    )


def _top(address: object) -> int:
    from aiogw.status import reader

    assert isinstance(address, reader.AdminAddress)
    try:
        from rich.console import Console

        from aiogw.status import terminal
    except ImportError as error:
        _say(f"top needs {error.name}: pip install 'aiogw[top]'")
        return CANNOT_RUN
    console = Console()
    if not console.is_terminal:
        _say("top needs a terminal; for scripts there is status")
        return CANNOT_RUN
    try:
        asyncio.run(reader.ask(address))  # nothing is worth waiting for at an address that is none
        asyncio.run(terminal.watch(reader.follow(address), console))
    except reader.CannotAsk as error:
        _say(error)
        return CANNOT_RUN
    except KeyboardInterrupt:
        pass
    return OK


def _explain(request_id: str, file: Path | None) -> int:
    from aiogw.status.explain import ASK, Reading, tell
    from aiogw.status.figures import plain

    source = 0 if file is None or str(file) == "-" else file
    try:
        # Whatever the locale is: the log is UTF-8, and what is around it need not be.
        with open(source, encoding="utf-8", errors="replace", closefd=source != 0) as lines:
            reading = Reading(lines)
            story = list(tell(reading, request_id))
    except OSError as error:
        _say(f"{source or 'standard input'}: {(error.strerror or str(error)).lower()}")
        return CANNOT_RUN
    if not story:
        _say(f"no line about {plain(request_id)} in {reading}; {ASK}")
        return CANNOT_RUN
    return _write("".join(f"{plain(line)}\n" for line in story))


def _run(loaded: config.Config, reread: Callable[[], config.Config], dialects: tuple[Dialect, ...]) -> int:
    # Until the gateway has handlers of its own there is nothing to drain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(OK))
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # A socket in the place of one that is closed: libuv ends the process when it is to close that.
            os.open(os.devnull, os.O_RDWR)
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
        _say(error)
        return CANNOT_RUN
    return OK
