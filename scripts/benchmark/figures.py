"""What was measured, what was wanted, and the table of both."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

Value = float | int | str | None


@frozen(kw_only=True)
class Goal:
    """``of_ratio``: the bound is for aiogw's value over HAProxy's, otherwise for aiogw's own."""

    sign: str
    bound: float | int | str
    of_ratio: bool
    issue: int

    def __str__(self) -> str:
        times = " x" if self.of_ratio else ""
        sign = f"{self.sign} " if self.sign != "=" else ""
        return f"{sign}{self.bound}{times} (#{self.issue})"

    def met(self, figure: Figure) -> bool | None:
        """None: there is nothing to compare with."""
        value = figure.ratio if self.of_ratio else figure.aiogw
        compare: Callable[[Value, Value], bool] = _COMPARE[self.sign]
        return None if value is None else compare(value, self.bound)


_COMPARE: dict[str, Callable[..., bool]] = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}


def at_most(bound: float, *, issue: int) -> Goal:
    return Goal(sign="<=", bound=bound, of_ratio=False, issue=issue)


def at_least(bound: float, *, issue: int) -> Goal:
    return Goal(sign=">=", bound=bound, of_ratio=False, issue=issue)


def exactly(bound: int | str, *, issue: int) -> Goal:
    return Goal(sign="=", bound=bound, of_ratio=False, issue=issue)


def ratio_at_most(bound: float, *, issue: int) -> Goal:
    return Goal(sign="<=", bound=bound, of_ratio=True, issue=issue)


def ratio_at_least(bound: float, *, issue: int) -> Goal:
    return Goal(sign=">=", bound=bound, of_ratio=True, issue=issue)


@frozen(kw_only=True)
class Figure:
    """One row of the table.

    ``clock`` says what the value hangs on: ``cpu`` time and a ``count`` hold on a busy machine, ``wall`` time suffers.
    ``aiogw`` None: it could not be measured, and ``name`` says why.
    """

    name: str
    unit: str
    clock: str
    aiogw: Value
    haproxy: Value = None
    goals: tuple[Goal, ...] = ()

    @property
    def ratio(self) -> float | None:
        if isinstance(self.aiogw, str | None) or isinstance(self.haproxy, str | None) or not self.haproxy:
            return None
        return self.aiogw / self.haproxy

    @property
    def missed(self) -> bool:
        return any(goal.met(self) is False for goal in self.goals)


HEADINGS = ("figure", "unit", "clock", "aiogw", "HAProxy", "ratio", "goal", "met")
LEFT_ALIGNED = ("figure", "unit", "clock", "goal", "met")


def table(figures: Sequence[Figure]) -> str:
    rows = [HEADINGS, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if heading in LEFT_ALIGNED else cell.rjust(width)
            for heading, cell, width in zip(HEADINGS, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _row(figure: Figure) -> tuple[str, ...]:
    words = {True: "yes", False: "NO", None: "-"}
    return (
        figure.name,
        figure.unit,
        figure.clock,
        _cell(figure.aiogw),
        _cell(figure.haproxy),
        "" if figure.ratio is None or figure.clock == "count" else f"{figure.ratio:.3f}",
        ", ".join(str(goal) for goal in figure.goals),
        ", ".join(words[goal.met(figure)] for goal in figure.goals),
    )


def _cell(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie; raises ValueError when there are none."""
    if not values:
        raise ValueError("nothing was observed")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def of_programs(name: str, unit: str, clock: str, values: Mapping[str, Value], *goals: Goal) -> Figure:
    """A row with the value of each program by its name."""
    return Figure(name=name, unit=unit, clock=clock, aiogw=values["aiogw"], haproxy=values.get("HAProxy"), goals=goals)


def p50_and_p99(name: str, unit: str, samples: Mapping[str, list[float]], *goals_of_p99: Goal) -> list[Figure]:
    return [
        of_programs(f"{name}, p50", unit, "wall", {key: quantile(each, 0.5) for key, each in samples.items()}),
        of_programs(
            f"{name}, p99", unit, "wall", {key: quantile(each, 0.99) for key, each in samples.items()}, *goals_of_p99
        ),
    ]
