"""A picture of each curve, if matplotlib is there; nothing is measured here."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmark.figures import Curve, exponent

MATPLOTLIB_MISSING = "matplotlib is not installed; to have the curves drawn: .venv/bin/pip install -e '.[bench]'"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def make_place(directory: Path) -> None:
    """Where pictures can be written; raises OSError if they cannot, which is better known before all is measured."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def draw(curves: Iterable[Curve], directory: Path) -> list[Path]:
    """One PNG for each curve, all programs in it; raises OSError if they cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    return [_draw(curve, directory / f"{curve.name}.png") for curve in curves]


def _draw(curve: Curve, path: Path) -> Path:
    # Loaded after all has been measured: it takes half a second and 40 MB.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, costs in curve.lines.items():
        slope = exponent(costs)
        label = name if slope is None else f"{name}, exponent {slope:.2f}"
        own = name.startswith("aiogw")
        axes.plot(list(costs), list(costs.values()), "o-" if own else "s--", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    # A decade at least, or the noise of what is flat would fill the picture.
    costs_seen = [cost for costs in curve.lines.values() for cost in costs.values()]
    axes.set_ylim(min(costs_seen) / 3, max(costs_seen) * 3)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_title(curve.title)
    axes.set_xlabel(curve.size)
    axes.set_ylabel(curve.cost)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
