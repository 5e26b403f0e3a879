"""What is generated is what the code would generate now: scripts/documents."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def documents(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "documents"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_documents_are_current() -> None:
    """The README's metrics are those of the code, and so is the dashboard what the script writes."""
    done = documents(ROOT, "--check")
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("README.rst", "scripts/documents", "etc/grafana/aiogw.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", ["README.rst", "etc/grafana/aiogw.json"])
def test_a_stale_document_is_found_and_written(copy: Path, name: str) -> None:
    """A line that is not the code's is told, and gone afterwards; nothing around it changes."""
    path = copy / name
    current = path.read_text()
    path.write_text(current.replace("aiogw_queue_limit", "aiogw_queue_length"))
    done = documents(copy, "--check")
    assert 1 == done.returncode
    assert name in done.stderr
    assert 0 == documents(copy).returncode
    assert current == path.read_text()


def test_a_readme_without_its_marks_is_not_written(copy: Path) -> None:
    """Where the table belongs is never guessed."""
    path = copy / "README.rst"
    path.write_text("no marks")
    assert 1 == documents(copy).returncode
    assert "no marks" == path.read_text()
