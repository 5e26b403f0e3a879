"""Another revision of the gateway, taken out of git into a folder of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from attrs import frozen

from benchmark.processes import ROOT


class NoRevision(Exception):
    """What was asked for cannot be compared with; the text says why."""


@frozen(kw_only=True)
class Revision:
    """``name`` is what the columns are called; ``title`` says what it is."""

    name: str
    title: str


def revision(asked: str) -> Revision:
    """What ``asked``, a branch, tag or commit, is at this moment; raises NoRevision."""
    if _git("rev-parse", "--is-inside-work-tree") is None:
        raise NoRevision(f"{ROOT} is not a git checkout (or there is no git): nothing to compare with")
    name = _git("rev-parse", "--verify", "--quiet", "--short", "--end-of-options", f"{asked}^{{commit}}")
    if name is None:
        raise NoRevision(f"git knows no revision {asked!r}; git log --oneline lists them")
    if _git("cat-file", "-e", f"{name}:aiogw/__main__.py") is None or _git("cat-file", "-e", f"{name}:etc") is None:
        raise NoRevision(f"{asked} ({name}) has no gateway that could be started")
    return Revision(name=name, title=_git("log", "-1", "--format=%s", name) or "")


def work_tree() -> str:
    """The commit that the work tree is of, and whether anything has been changed since."""
    commit = _git("rev-parse", "--short", "HEAD")
    if commit is None:
        return "not a git checkout"
    return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit


def take_out(revision: Revision, directory: Path) -> Path:
    """The source tree of ``revision``, in ``directory``; nothing is left of it in the repository."""
    tree = directory / revision.name
    tree.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision.name, "aiogw", "etc"], stdout=subprocess.PIPE)
    unpacked = subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout)
    if archive.returncode or unpacked.returncode:
        raise NoRevision(f"{revision.name} could not be taken out of git")
    return tree


def _git(*arguments: str) -> str | None:
    """What git prints; None when it says no, or is not there."""
    try:
        said = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, timeout=30)
    except OSError:
        return None
    return said.stdout.strip() if said.returncode == 0 else None
