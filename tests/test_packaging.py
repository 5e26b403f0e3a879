"""What is not code and yet ships: each tool configured in one place, files that parse, scripts that run."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import attrs
import pytest

from aiogw import __version__

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for folder in ("scripts", ".ci") for path in (ROOT / folder).iterdir() if path.is_file())
SHELL_SCRIPTS = [path for path in SCRIPTS if path.read_bytes().startswith(b"#!/usr/bin/env bash")]
SHIPPED = ROOT / "etc" / "gateway.toml"
UNIT = ROOT / "systemd" / "aiogw.service"
SOCKET = ROOT / "systemd" / "aiogw.socket"


def unit_value(name: str, unit: Path = UNIT) -> list[str]:
    """The values of a setting in the unit, in order; a setting may occur several times."""
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    return [value for key, _, value in lines if key == name]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_pyproject_has_nothing_but_the_build_and_ruff() -> None:
    """All other tools are configured in setup.cfg, and none in two places."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(pyproject) == {"build-system", "tool"}
    assert set(pyproject["tool"]) == {"ruff"}


@pytest.mark.parametrize("name", ["pytest.ini", ".pytest.ini", ".coveragerc", "mypy.ini", ".mypy.ini", "tox.ini"])
def test_no_second_home_for_configuration(name: str) -> None:
    """A file that would silently outrank setup.cfg is not there."""
    assert not (ROOT / name).exists()


def test_setup_cfg_has_no_percent_sign() -> None:
    """Setuptools interpolates the whole file, so one percent sign for another tool breaks the build."""
    assert "%" not in (ROOT / "setup.cfg").read_text()


def test_source_distribution_has_what_is_not_a_package() -> None:
    """Configuration, unit, scripts and tests are grafted into the source distribution."""
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert {f"graft {name}" for name in ("etc", "systemd", "scripts", "tests")} <= set(lines)


# What a build leaves behind is not part of the project.
NOT_SHIPPED = {"__pycache__", "aiogw.egg-info", "build", "dist"}


def source_files(*folders: str) -> set[str]:
    """The files below these folders of the checkout."""
    found = (path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path) for path in found if not NOT_SHIPPED & set(path.parts) and path.suffix != ".pyc"}


def copy_source(target: Path) -> Path:
    """The checkout without what is not shipped, so that building does not touch it."""
    ignored = shutil.ignore_patterns(*NOT_SHIPPED, "*.pyc", ".*cache", ".git", ".venv*", ".coverage*", ".hypothesis")
    return Path(shutil.copytree(ROOT, target, ignore=ignored))


def run(*command: str | Path, cwd: Path) -> str:
    """Its standard output, without anything of the checkout on Python's path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    done = subprocess.run(
        [str(one) for one in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@attrs.frozen
class Built:
    sdist: Path
    wheel: Path
    environment: Path
    """A virtual environment in which the wheel is installed."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source distribution, the wheel that is made from it and not from the checkout, and an installation."""
    folder = tmp_path_factory.mktemp("built")
    environment, source, unpacked = folder / "venv", copy_source(folder / "source"), folder / "unpacked"
    run(sys.executable, "-m", "venv", environment, cwd=folder)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    (requirement,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    run(*pip, requirement, cwd=folder)
    build = "from setuptools import build_meta; build_meta.build_{}(" + repr(str(folder)) + ")"
    run(python, "-c", build.format("sdist"), cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (inner,) = unpacked.iterdir()
    run(python, "-c", build.format("wheel"), cwd=inner)
    (wheel,) = folder.glob("*.whl")
    run(*pip, wheel, cwd=folder)
    return Built(sdist=sdist, wheel=wheel, environment=environment)


def test_source_distribution_is_complete(built: Built) -> None:
    """Whoever has it can test, check and install as from the checkout."""
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert not source_files("aiogw", "etc", "systemd", "scripts", "tests", ".ci") - inside
    assert {"README.rst", "ARCHITECTURE.rst", "CHANGES.rst", "LICENSE", "setup.cfg", "pyproject.toml"} <= inside


def test_wheel_is_complete(built: Built) -> None:
    """It has every file of the package and nothing of the tests; etc/ and systemd/ go to share/aiogw."""
    with zipfile.ZipFile(built.wheel) as archive:
        inside = set(archive.namelist())
    assert {name for name in inside if ".dist-info/" not in name and ".data/" not in name} == source_files("aiogw")
    shared = {name.partition(".data/data/share/aiogw/")[2] for name in inside if ".data/" in name}
    assert shared == source_files("etc", "systemd")


def test_what_is_installed_runs(built: Built, tmp_path: Path) -> None:
    """Far from any checkout: the command, the configuration that comes along, and the gateway with its status page."""
    aiogw, shared = built.environment / "bin" / "aiogw", built.environment / "share" / "aiogw"
    assert run(aiogw, "--version", cwd=tmp_path) == f"aiogw {__version__}\n"
    assert run(aiogw, "check", "--config", shared / "etc" / "gateway.toml", cwd=tmp_path) == ""
    assert json.loads(run(aiogw, "schema", cwd=tmp_path))["title"] == "aiogw"
    found = run(
        built.environment / "bin" / "python", "-c", "import aiogw.app as app; print(app.__file__)", cwd=tmp_path
    )
    assert Path(found.strip()).is_relative_to(built.environment)


def test_shipped_configuration_has_the_documented_keys() -> None:
    """The shipped configuration is TOML with the cluster of the documentation, one gated upstream and one without."""
    config = tomllib.loads(SHIPPED.read_text())
    assert set(config) == {"server", "auth", "upstreams"}
    assert set(config["upstreams"]) == {"reasoning", "embeddings"}
    admission = config["upstreams"]["reasoning"]["admission"]
    assert (admission["engine_slots"], admission["cap"]) == (8, 6)
    assert config["upstreams"]["embeddings"]["admission"] == "unlimited"
    optional = {"aliases", "dialect"}
    assert set(config["upstreams"]["reasoning"]) == set(config["upstreams"]["embeddings"]) | optional


@pytest.mark.parametrize("setting", ["ExecStartPre", "ExecStart"])
def test_unit_runs_the_installed_command(setting: str) -> None:
    """The unit checks and runs the same configuration with the same program."""
    (value,) = unit_value(setting)
    program, *arguments = shlex.split(value)
    assert program == "/opt/aiogw/bin/aiogw"
    assert arguments[-2:] == ["--config", "/etc/aiogw/gateway.toml"]
    assert arguments[:-2] == (["check"] if setting == "ExecStartPre" else [])


def test_unit_waits_for_the_drain() -> None:
    """Systemd gives the daemon longer to stop than the shipped drain takes."""
    (stop,) = unit_value("TimeoutStopSec")
    assert int(stop) > tomllib.loads(SHIPPED.read_text())["server"]["drain_timeout_seconds"]
    assert unit_value("KillSignal") == ["SIGTERM"]


def test_unit_has_each_section_once() -> None:
    """The unit parses, with its three sections."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(UNIT)
    assert parser.sections() == ["Unit", "Service", "Install"]


def systemd_analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    assert program, "systemd-analyze is missing: install the Debian package systemd"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30, check=False)


def test_unit_is_hardened() -> None:
    """Systemd rates the unit's exposure at 1.1 of 10 or less."""
    done = systemd_analyze("security", "--offline=yes", "--threshold=11", "--no-pager", str(UNIT))
    assert done.returncode == 0, done.stdout + done.stderr


def test_units_are_verified(tmp_path: Path) -> None:
    """Systemd finds nothing to say about service and socket, once the program they name is there."""
    copies = []
    for unit in (UNIT, SOCKET):
        copies.append(tmp_path / unit.name)
        copies[-1].write_text(unit.read_text().replace("/opt/aiogw/bin/aiogw", "/bin/true"))
    done = systemd_analyze("verify", *map(str, copies))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_unit_and_daemon_speak_with_each_other() -> None:
    """The daemon says when it is ready and that it lives, hears of a reload, and inherits a socket."""
    assert (unit_value("Type"), unit_value("NotifyAccess")) == (["notify"], ["main"])
    assert int(unit_value("WatchdogSec")[0]) >= 10
    assert unit_value("ExecReload") == ["/bin/kill -HUP $MAINPID"]
    assert unit_value("ListenStream", SOCKET) == [tomllib.loads(SHIPPED.read_text())["server"]["listen"]]
    assert unit_value("Wants")[-1] == unit_value("Also")[0] == SOCKET.name


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_script_is_executable(path: Path) -> None:
    """Every script runs by its name and says with what."""
    assert os.access(path, os.X_OK)
    assert path.read_bytes().startswith((b"#!/usr/bin/env bash\n", b"#!/usr/bin/env python3\n"))


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=name_of)
def test_shell_script_is_sound(path: Path) -> None:
    """Every shell script parses, and stops at the first thing that fails."""
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=10, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nset -euo pipefail\n" in path.read_text()
