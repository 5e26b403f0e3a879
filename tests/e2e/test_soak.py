"""scripts/soak in short: a minute of chaos after which the gateway is what it was before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "scripts" / "soak"
PATIENCE_SECONDS = 180


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Measured for coverage the gateway is slower, and its memory that of the measurement.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, str(SOAK), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment, check=False
    )


def test_a_minute_leaves_nothing() -> None:
    """No task, descriptor, slot or error, and no more memory than after the warm-up."""
    done = soak("--minutes", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    resident memory" in done.stdout
    assert "requests: " in done.stderr  # it shows how far it is


def test_too_short_a_soak_proves_nothing() -> None:
    """The checks can fail: memory that has hardly been looked at is not said to be stable."""
    done = soak("--minutes", "0.01")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL  resident memory" in done.stdout
