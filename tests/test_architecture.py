"""The rooms of DESIGN.md as a test: who may import whom, who may not wait, and what nobody may do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "aiogw"

VOCABULARY = ("canonical", "errors")
# The one module that knows both sides; and the one that knows all.
BELOW_RELAY = (
    "admission.door",
    "admission.gate",
    "clientstream",
    "departures",
    "dialects",
    "middleware",
    "record",
    "routing",
    "upstream",
)
BELOW_APP = (
    "",
    "admission",
    "auth",
    "bodies",
    "catalogue",
    "config",
    "credentials",
    "departures",
    "dialects",
    "enginewatch",
    "listener",
    "metrics",
    "middleware",
    "protocol",
    "record",
    "relay",
    "routing",
    "server",
    "service",
    "sockets",
    "underway",
    "upstream",
)

# Each room, from the ground up, and for each of its modules (or folders) what of aiogw it may import.  A folder's entry
# holds for all modules in it that have none of their own.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "vocabulary": {
        "": (),
        "canonical": (),
        "errors": ("errors",),
        "admission": (),
        "upstream": (),
    },
    "deciding": {
        "admission.capacity": (),
        "admission.estimate": (),
        "auth": ("errors",),
        "admission.queue": ("admission.capacity",),
        "admission.readings": ("admission.estimate", "admission.queue", "errors"),
        "bodies": ("errors",),
        "contentcoding": VOCABULARY,
        "clients": ("config",),
        "config": ("canonical", "config"),
        "dialects": (*VOCABULARY, "dialects", "sse"),
        "record": VOCABULARY,
        "routing": VOCABULARY,
        "sse": (),
        "upstream.answer": VOCABULARY,
    },
    "waiting": {
        "turnstile": (),
        "catalogue": (*VOCABULARY, "upstream"),
        "enginewatch": (*VOCABULARY, "upstream"),
        "listener": ("config", "sockets"),
        "sockets": ("config",),
        "service": ("sockets",),
        "admission.door": ("errors", "admission.gate"),
        "admission.gate": (
            "errors",
            "admission.capacity",
            "admission.estimate",
            "admission.queue",
            "admission.readings",
        ),
        "upstream.asking": (*VOCABULARY, "upstream.answer", "upstream.pool"),
        "upstream.connection": VOCABULARY,
        "upstream.endpoints": (*VOCABULARY, "upstream.asking", "upstream.pool"),
        "upstream.pool": (*VOCABULARY, "upstream.connection"),
    },
    "aiohttp.web": {
        "clientstream": (*VOCABULARY, "departures", "record"),
        "departures": (),
        "metrics": ("", "admission.readings", "enginewatch", "errors", "listener", "record"),
        "middleware": (
            *VOCABULARY,
            "auth",
            "bodies",
            "clientstream",
            "contentcoding",
            "dialects",
            "record",
            "routing",
            "turnstile",
        ),
        "protocol": (),
        "relay": (*VOCABULARY, *BELOW_RELAY),
        "underway": (*VOCABULARY, *BELOW_RELAY, "relay"),
        "server": (*VOCABULARY, "clientstream", "protocol", "record"),
        "status": (),
        "status.explain": ("status.figures",),
        "status.feed": ("status.snapshot",),
        "status.figures": (),
        "status.history": ("admission.readings", "errors", "record"),
        "status.page": ("record", "status.figures", "status.snapshot"),
        "status.reader": ("status.snapshot",),
        "status.serving": (
            "",
            "admission.readings",
            "enginewatch",
            "record",
            "status.feed",
            "status.history",
            "status.page",
            "status.snapshot",
        ),
        "status.snapshot": ("admission.readings", "enginewatch", "errors", "record", "status.history"),
        "status.tables": ("status.figures", "status.snapshot"),
        "status.terminal": ("record", "status.figures", "status.history", "status.snapshot", "status.tables"),
        "status.words": ("status.figures", "status.snapshot"),
    },
    "composition": {
        "app": (*VOCABULARY, *BELOW_APP, "assembly", "lanes", "status"),
        "lanes": (
            "admission.door",
            "admission.gate",
            "admission.readings",
            "assembly",
            "config",
            "credentials",
            "upstream.endpoints",
        ),
        "cli": ("", "app", "clients", "config", "credentials", "dialects", "record", "sockets", "starter", "status"),
        "credentials": ("auth", "config"),
        "starter": ("", "errors", "assembly", "catalogue", "config", "credentials", "upstream"),
        "assembly": (
            *VOCABULARY,
            "admission.readings",
            "config",
            "credentials",
            "middleware",
            "protocol",
            "relay",
            "routing",
            "upstream",
        ),
        "__main__": ("cli",),
    },
}
# No event loop, no clock, no socket and no log; most of the hard code is here.
PURE = (
    "auth",
    "canonical",
    "errors",
    "sse",
    "routing",
    "clients",
    "config",
    "bodies",
    "contentcoding",
    "admission.capacity",
    "admission.estimate",
    "admission.queue",
    "admission.readings",
    "dialects",
    "status.explain",
    "status.figures",
    "status.history",
    "status.snapshot",
    "status.words",
    "upstream.answer",
)
IMPURE_IMPORTS = {"asyncio", "time", "logging", "socket", "aiohttp", "uvloop", "threading", "select", "ssl"}

# Libraries that have one room, so that they can be replaced there.
HOMES = {
    "aiohttp": {
        "app",
        "clientstream",
        "middleware",
        "protocol",
        "relay",
        "server",
        "status.reader",
        "status.serving",
        "underway",
    },
    "aiohttp_sse_client": {"status.reader"},
    "cattrs": {"config", "config.faults", "config.schema", "config.values"},
    "httptools": {"upstream.connection"},
    "prometheus_async": {"app"},
    "prometheus_client": {"metrics", "enginewatch"},
    "rich": {"cli", "status.tables", "status.terminal"},
    "tomli_w": {"config", "config.commented"},
    "tomllib": {"config", "config.faults", "config.positions"},
    "uvloop": {"cli"},
}

MAX_LINES = 450


def name_of(path: Path) -> str:
    """``aiogw/admission/queue.py`` is ``admission.queue``, ``aiogw/__init__.py`` is the empty name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
each_module = pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "aiogw")


def imports(name: str) -> Iterator[str]:
    """The full names of the modules ``name`` imports, wherever in it, also for type checkers only."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert 0 == node.level, f"{name}: relative import"
            assert node.module is not None
            for alias in node.names:
                # ``from aiogw import config`` imports a module, ``from aiogw.config import load`` one as well.
                inner = f"{node.module}.{alias.name}".removeprefix("aiogw.")
                yield f"aiogw.{inner}" if node.module.startswith("aiogw") and inner in MODULES else node.module


def own_imports(name: str) -> set[str]:
    """The modules of aiogw that ``name`` imports, without the ``aiogw.`` before them."""
    found = {one for one in imports(name) if one == "aiogw" or one.startswith("aiogw.")}
    return {one.removeprefix("aiogw").removeprefix(".") for one in found}


def below(name: str, folder: str) -> bool:
    return name == folder or (bool(folder) and name.startswith(f"{folder}."))


def entry_of(name: str) -> tuple[int, tuple[str, ...]]:
    """The height of the room of ``name``, and what it may import: the entry with the longest name counts."""
    matches = [
        (len(entry), height, allowed)
        for height, room in enumerate(ROOMS.values())
        for entry, allowed in room.items()
        if below(name, entry)
    ]
    assert matches, f"{name} is in no room: give it a line in ROOMS"
    _length, height, allowed = max(matches)
    return height, allowed


@each_module
def test_imports_are_in_the_table(name: str) -> None:
    """A module imports what its line in the table allows, and nothing that lies above its room."""
    height, allowed = entry_of(name)
    for imported in own_imports(name):
        assert any(below(imported, one) for one in allowed), f"{name} may not import {imported}"
        assert entry_of(imported)[0] <= height, f"{name} imports {imported} from above"


def test_imports_go_round_in_no_circle() -> None:
    """There is an order in which the modules can be read, each after those it builds on."""
    left = {name: own_imports(name) - {name} for name in MODULES}
    while left:
        ready = [name for name, needed in left.items() if not needed & set(left)]
        assert ready, f"a circle among {sorted(left)}"
        for name in ready:
            del left[name]


def test_the_table_has_no_dead_lines() -> None:
    """What is in the table is in the package, except for what is yet to be built."""
    for room in ROOMS.values():
        for entry, allowed in room.items():
            for one in {entry, *allowed}:
                assert one in MODULES, f"{one} is gone: take it from the table"


@pytest.mark.parametrize("pure", PURE)
def test_a_pure_module_decides_and_does_not_wait(pure: str) -> None:
    """It has no coroutine, and imports no loop, clock, socket or log."""
    names = [name for name in MODULES if below(name, pure)]
    assert names
    for name in names:
        assert not IMPURE_IMPORTS & {one.partition(".")[0] for one in imports(name)}, name
        for node in ast.walk(TREES[name]):
            waiting = isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await)
            assert not waiting, f"{name}:{node.lineno}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("library", HOMES)
def test_a_library_stays_in_its_room(library: str) -> None:
    """A library that one module hides is imported nowhere else."""
    users = {name for name in MODULES if library in {one.partition(".")[0] for one in imports(name)}}
    assert users
    assert users <= HOMES[library]


def test_a_dialect_knows_no_other() -> None:
    """Dialects meet in the canonical form: of the others, each sees only what a dialect is."""
    for name in MODULES:
        if name in ("dialects", "dialects.base") or not below(name, "dialects"):
            continue
        own = ".".join(name.split(".")[:2])
        for imported in own_imports(name):
            assert not below(imported, "dialects") or imported == "dialects.base" or below(imported, own), name


def test_the_gate_has_never_heard_of_what_passes_it() -> None:
    """Not even in a comment: admission knows upstreams, weights and callbacks."""
    words = re.compile("openai|anthropic|dialect|surface|model|aiohttp", re.IGNORECASE)
    files = [path for path in (PACKAGE / "admission").rglob("*") if path.suffix != ".pyc" and path.is_file()]
    assert files
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not words.search(line), f"{path.relative_to(ROOT)}:{number}: {line}"


@each_module
def test_a_module_says_what_it_is(name: str) -> None:
    """Every file begins with a docstring, and is short enough to be a room and not a hall."""
    assert ast.get_docstring(TREES[name])
    assert len(MODULES[name].read_text().splitlines()) <= MAX_LINES


# -- the tests ------------------------------------------------------------------------------------------------------

SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
TESTS = {path: ast.parse(source) for path, source in SOURCES.items()}
each_test_file = pytest.mark.parametrize("path", TESTS)


@each_test_file
def test_a_test_says_what_it_is_about(path: str) -> None:
    """Every test has a docstring, so that the list of them reads as the specification."""
    assert ast.get_docstring(TESTS[path])
    classes = [node for node in TESTS[path].body if isinstance(node, ast.ClassDef)]
    for node in [*TESTS[path].body, *(member for one in classes for member in one.body)]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name}"


@pytest.mark.parametrize("path", [path for path in TESTS if Path(path).name.startswith("test_")])
def test_a_test_does_not_sleep(path: str) -> None:
    """Tests wait for a condition with a deadline; where time itself is what is tested, the line has to say so."""
    lines = SOURCES[path].splitlines()
    for node in ast.walk(TESTS[path]):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep":
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                line = lines[node.lineno - 1]
                # ``sleep(0)`` is one turn of the loop and no waiting.
                constant = isinstance(argument, ast.Constant) and argument.value != 0
                assert not constant or "  # " in line, f"{path}:{node.lineno}: {line}"


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports test files by their bare name, so two of one name in different folders would collide."""
    names = [Path(path).name for path in TESTS if Path(path).name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)
