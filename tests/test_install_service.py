"""``scripts/install-service`` into root folders: installs, does nothing twice, upgrades, keeps what is yours."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from test_packaging import ROOT, copy_source

VERSION = Path("aiogw") / "__init__.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that a test may change."""
    return copy_source(tmp_path_factory.mktemp("service") / "source")


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with an installation in it; with a blank in its name, which pip cannot have in a first line."""
    root = tmp_path_factory.mktemp("service") / "a root"
    install(source, root)
    return root


@pytest.fixture
def root(installed: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test that changes it; its virtual environment is still that of the original."""
    return Path(shutil.copytree(installed, tmp_path / "root", symlinks=True))


def interpreter() -> str:
    """One that is not in a home, where the service could not run it."""
    homes = ("/root/", "/home/", "/run/user/")
    folders = [*os.environ["PATH"].split(":"), "/usr/bin"]
    found = [path for folder in folders if os.access(path := f"{folder}/python3", os.X_OK)]
    places = {path: run_python(path, "import os, sys; print(os.path.realpath(sys.executable))") for path in found}
    return next(path for path, place in places.items() if not place.startswith(homes))


def run_python(path: str | Path, script: str) -> str:
    return subprocess.run([path, "-c", script], capture_output=True, text=True, timeout=60, check=False).stdout


def install(source: Path, root: Path, *arguments: str, code: int = 0, python: str | Path | None = None) -> str:
    command = [str(source / "scripts" / "install-service"), "--root", str(root), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    environment["PYTHON"] = str(python or interpreter())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (code, "") == (done.returncode, done.stdout), done.stderr
    return done.stderr


def python(root: Path, *arguments: str) -> str:
    command = [str(root / "opt" / "aiogw" / "bin" / "python"), "-m", "aiogw", *arguments]
    return subprocess.run(command, cwd=root, env={}, capture_output=True, text=True, timeout=60, check=True).stdout


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Every file with its mode and the time of its last change."""
    found = {path: path.lstat() for path in root.rglob("*") if "__pycache__" not in path.parts}
    return {str(path.relative_to(root)): (one.st_mode, one.st_mtime_ns) for path, one in found.items()}


def test_everything_is_in_its_place(installed: Path) -> None:
    """Units and configuration as they are shipped, a room for keys, and a program that the unit finds."""
    for name in ("aiogw.service", "aiogw.socket"):
        assert (ROOT / "systemd" / name).read_bytes() == (installed / "etc/systemd/system" / name).read_bytes()
    configuration = installed / "etc" / "aiogw" / "gateway.toml"
    assert (ROOT / "etc" / "gateway.toml").read_bytes() == configuration.read_bytes()
    # The service has a user of its own while it runs, and only root's rights to read.
    assert 0o644 == stat.S_IMODE(configuration.stat().st_mode)
    assert 0o700 == stat.S_IMODE((configuration.parent / "keys").stat().st_mode)
    (command,) = re.findall(
        r"^ExecStart=(\S+)", (installed / "etc/systemd/system/aiogw.service").read_text(), re.MULTILINE
    )
    program = installed / command.lstrip("/")
    assert os.access(program, os.X_OK)
    # pip's way for what cannot stand in a first line; a long name of the folder comes to the same.
    assert program.read_text().startswith("#!/bin/sh\n'''exec' \"/opt/aiogw/bin/python")
    assert [] == [one for one in program.parent.iterdir() if not one.is_symlink() and str(installed) in one.read_text()]
    assert {
        "multi-user.target.wants/aiogw.service": "/etc/systemd/system/aiogw.service",
        "sockets.target.wants/aiogw.socket": "/etc/systemd/system/aiogw.socket",
    } == {
        str(link.relative_to(installed / "etc/systemd/system")): str(link.readlink())
        for link in (installed / "etc/systemd/system").rglob("*")
        if link.is_symlink()
    }
    assert "" == python(installed, "check", "--config", str(configuration))
    watching = "import rich, aiohttp_sse_client.client; from aiogw.status import terminal"
    subprocess.run([program.parent / "python", "-c", watching], cwd=installed, env={}, timeout=60, check=True)


def test_twice_is_once(source: Path, installed: Path) -> None:
    """Nothing is written, and that is said."""
    before = files(installed)
    assert "Nothing has changed\n" == install(source, installed)
    assert before == files(installed)


def test_a_rehearsal_does_nothing(source: Path, installed: Path, tmp_path: Path) -> None:
    """--dry-run names each step, those with systemd too, and takes none."""
    told = install(source, tmp_path / "new", "--dry-run")
    assert "would run: install -m 644 etc/gateway.toml " in told
    assert not (tmp_path / "new").exists()
    before = files(installed)
    assert f"would run: rm -rf {installed}/opt/aiogw\n" in install(source, installed, "--uninstall", "--dry-run")
    assert before == files(installed)
    command = [source / "scripts" / "install-service", "--uninstall", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "would run: systemctl daemon-reload\n" in done.stderr


def test_an_upgrade_keeps_what_is_yours(source: Path, root: Path, tmp_path: Path) -> None:
    """The program and an untouched unit are new; the configuration, keys, and a unit changed by hand stay."""
    newer = Path(shutil.copytree(source, tmp_path / "newer"))
    (newer / VERSION).write_text((newer / VERSION).read_text().replace('"0.', '"99.'))
    for unit in ("aiogw.service", "aiogw.socket"):
        with (newer / "systemd" / unit).open("a") as file:
            file.write("# newer\n")
    mine = root / "etc" / "aiogw" / "gateway.toml"
    mine.write_text(mine.read_text().replace("queue_limit = 32", "queue_limit = 33"))
    (root / "etc/aiogw/keys/alice").write_text("secret")
    socket = root / "etc/systemd/system/aiogw.socket"
    socket.write_text(socket.read_text().replace("127.0.0.1:8080", "127.0.0.1:8081"))

    told = install(newer, root)
    assert f"{socket} has been changed by hand and stays" in told
    assert python(root, "--version").startswith("aiogw 99.")
    assert (root / "opt/aiogw/bin/aiogw").read_text().startswith("#!/opt/aiogw/bin/python")
    assert (root / "etc/systemd/system/aiogw.service").read_text().endswith("# newer\n")
    assert "127.0.0.1:8081" in socket.read_text()
    assert "queue_limit = 33" in mine.read_text()
    assert (root / "etc/aiogw/keys/alice").exists()

    # One that the new version does not take: it is said where, and again until it is put right.
    line = 1 + mine.read_text().split("\n").index("queue_limit = 33")
    mine.write_text(mine.read_text().replace("queue_limit = 33", "queue_limit = -1"))
    with (newer / VERSION).open("a") as file:
        file.write("# of the same version\n")
    assert f"{mine}:{line}:15: upstreams.reasoning.admission.queue_limit: expected" in install(newer, root, code=1)
    mine.write_text(mine.read_text().replace("queue_limit = -1", "queue_limit = 33"))
    install(newer, root)
    assert "Nothing has changed\n" in install(newer, root)
    (there,) = (root / "opt" / "aiogw" / "lib").glob(f"*/site-packages/{VERSION}")
    assert there.read_bytes() == (newer / VERSION).read_bytes()


def test_removed_is_all_but_the_configuration(source: Path, root: Path) -> None:
    """And a unit that was changed; that goes with --purge only.  What is not there is no fault."""
    units = root / "etc/systemd/system"
    drop_in = units / "aiogw.service.d"
    drop_in.mkdir()
    (drop_in / "override.conf").write_text("[Service]\n")
    changed = units / "aiogw.socket"
    changed.write_text(changed.read_text().replace("127.0.0.1:8080", "127.0.0.1:8081"))
    mine = [root / "etc/aiogw", changed, drop_in]
    told = install(source, root, "--uninstall")
    assert [f"{one} stays; --purge removes it" for one in mine] == told.splitlines()[1:]
    left = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    units_left = {"etc/systemd/system/aiogw.socket", "etc/systemd/system/aiogw.service.d/override.conf"}
    assert {"etc/aiogw/gateway.toml"} | units_left == left
    assert "127.0.0.1:8081" in changed.read_text()
    install(source, root, "--uninstall", "--purge")
    assert [] == list(root.iterdir())
    install(source, root, "--uninstall")


def test_what_others_have_in_the_root_stays(source: Path, root: Path) -> None:
    """Nothing is removed that was not installed, and no folder with something in it."""
    others = [root / "opt/other/file", root / "etc/systemd/system/sockets.target.wants/other.socket"]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("x")
    install(source, root, "--uninstall", "--purge")
    assert set(others) == {path for path in root.rglob("*") if not path.is_dir()}


def test_what_is_not_ours_is_left_alone(source: Path, tmp_path: Path) -> None:
    """A folder at our place that is no virtual environment is neither filled nor removed."""
    theirs = tmp_path / "opt" / "aiogw" / "precious"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x")
    for arguments in ((), ("--uninstall", "--purge")):
        assert "is left alone" in install(source, tmp_path, *arguments, code=1)
    assert theirs.exists()


@pytest.mark.parametrize("home", ["/home/alice/.pyenv/versions/3.12", "/root/.pyenv", "/run/user/1000/x"])
def test_a_python_in_a_home_is_refused(source: Path, tmp_path: Path, home: str) -> None:
    """The service has no homes, so it could not start; what to do is said, and nothing is done."""
    fake = tmp_path / "python3"
    fake.write_text(f"#!/bin/sh\ncase $2 in *realpath*) echo {home}/bin/python3; echo {home} ;; esac\n")
    fake.chmod(0o755)
    told = install(source, tmp_path / "root", code=1, python=fake)
    assert f"{home}/bin/python3" in told
    assert "PYTHON=/usr/bin/python3 " in told
    assert [] == list((tmp_path / "root").iterdir())


@pytest.mark.parametrize("arguments", [("--purge",), ("--rot",), ("now",)])
def test_wrong_usage_does_nothing(source: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Exit code 2, and how it is used."""
    assert "--uninstall" in install(source, tmp_path / "root", *arguments, code=2)
    assert not (tmp_path / "root").exists()
