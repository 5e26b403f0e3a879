"""What was measured, what was wanted, and the table of both."""

from __future__ import annotations

import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import field, frozen

Value = float | int | str | None

MESSAGES_MOUNT = "/llm"

# The Rust routers: what a goal "below both" or "as the better one" is held against.
ROUTERS = ("sglang-router", "vllm-router")


@frozen(kw_only=True)
class Reference:
    """What a goal is relative to in the same run: one of ``programs``, ``choose`` says which."""

    name: str
    programs: tuple[str, ...]
    choose: Callable[[Iterable[float]], float] = min

    def value(self, figure: Figure) -> float | None:
        values = [value for name in self.programs if isinstance(value := figure.others.get(name), int | float)]
        return self.choose(values) if values else None


HAPROXY = Reference(name="HAProxy", programs=("HAProxy",))
CHEAPER_ROUTER = Reference(name="better router", programs=ROUTERS)
DEARER_ROUTER = Reference(name="dearer router", programs=ROUTERS, choose=max)


@frozen(kw_only=True)
class Goal:
    """A bound for aiogw's value, or for how many times that of ``of`` it is."""

    sign: str
    bound: float | int | str
    of: Reference | None
    issue: int

    def __str__(self) -> str:
        times = f" x {self.of.name}" if self.of is not None else ""
        sign = f"{self.sign} " if self.sign != "=" else ""
        return f"{sign}{self.bound}{times} (#{self.issue})"

    def met(self, figure: Figure) -> bool | None:
        """None: there is nothing to compare with."""
        compare: Callable[[Value, Value], bool] = _COMPARE[self.sign]
        if figure.aiogw is None:
            return None
        if self.of is None:
            return compare(figure.aiogw, self.bound)
        reference = self.of.value(figure)
        # Zero is what was too small to be measured: nothing can be held against it.
        return compare(figure.aiogw, float(self.bound) * reference) if reference else None


_COMPARE: dict[str, Callable[..., bool]] = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}


def at_most(bound: float, *, issue: int) -> Goal:
    return Goal(sign="<=", bound=bound, of=None, issue=issue)


def at_least(bound: float, *, issue: int) -> Goal:
    return Goal(sign=">=", bound=bound, of=None, issue=issue)


def exactly(bound: int | str, *, issue: int) -> Goal:
    return Goal(sign="=", bound=bound, of=None, issue=issue)


def ratio_at_most(bound: float, *, of: Reference = HAPROXY, issue: int) -> Goal:
    return Goal(sign="<=", bound=bound, of=of, issue=issue)


def ratio_at_least(bound: float, *, of: Reference = HAPROXY, issue: int) -> Goal:
    return Goal(sign=">=", bound=bound, of=of, issue=issue)


@frozen(kw_only=True)
class Curve:
    """What a cost does as the work grows.  ``lines``: for each program, the cost by size; for a plot."""

    name: str
    title: str
    size: str
    cost: str
    lines: Mapping[str, Mapping[int, float]]


@frozen(kw_only=True)
class Figure:
    """One row of the table.

    ``clock`` says what the value hangs on: ``cpu`` time and a ``count`` hold on a busy machine, ``wall`` time suffers.
    ``aiogw`` None: there is no such value.  ``others``: the values of the other programs.  ``curve``: what the figure
    was read from, if it is to be drawn.  Not ``measured``: ``name`` says why.
    """

    name: str
    unit: str
    clock: str
    aiogw: Value
    others: Mapping[str, Value] = field(factory=dict)
    goals: tuple[Goal, ...] = ()
    curve: Curve | None = None
    measured: bool = True

    def ratio_to(self, name: str) -> float | None:
        other = self.others.get(name)
        if isinstance(self.aiogw, str | None) or isinstance(other, str | None) or not other:
            return None
        return self.aiogw / other


LEFT_ALIGNED = ("figure", "unit", "clock", "goal", "met")


def table(figures: Sequence[Figure], revision: str | None = None) -> str:
    """A column for each program; with ``revision``, a ratio to that one beside the ratio to HAProxy."""
    # In the order in which they first come, each once; what was asked for has a column also if nothing is in it.
    asked = () if revision is None else (revision,)
    programs = list(dict.fromkeys((*asked, *(name for figure in figures for name in figure.others))))
    compared = [name for name in (revision, "HAProxy") if name is not None and name in programs]
    headings = ("figure", "unit", "clock", "aiogw", *programs, *(f":{name}" for name in compared), "goal", "met")
    rows = [headings, *(_row(figure, programs, compared) for figure in figures)]
    # Of what was measured: a reason may be long.
    wide = [headings, *(row for row, figure in zip(rows[1:], figures, strict=True) if figure.measured)]
    widths = [max(len(row[column]) for row in wide) for column in range(len(headings))]
    lines = [
        "  ".join(
            cell.ljust(width) if heading in LEFT_ALIGNED else cell.rjust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)


def legend(figures: Sequence[Figure], revision: str | None = None) -> list[str]:
    """What a reader of the table has to be told: of what stands in it, a line for each."""
    goals = [goal for figure in figures for goal in figure.goals]
    others = {name for figure in figures for name in figure.others}
    compared = [name for name in (revision, "HAProxy") if name is not None and name in others]
    lines = [f":{name} is the value of aiogw divided by that of {name}" for name in compared]
    if goals:
        lines.append("(#N): the goal was set in issue N of this repository")
    if any(goal.of in (CHEAPER_ROUTER, DEARER_ROUTER) for goal in goals):
        lines.append(
            f"better, dearer router: {' or '.join(ROUTERS)}, whichever has the lower or higher value in that row"
        )
    if any(figure.name.endswith(MESSAGES_MOUNT) and set(figure.others) - {revision} for figure in figures):
        lines.append("rows of /llm: the peers do not speak it, so beside aiogw's value stand theirs of /v1")
    return lines


def verdict(figures: Iterable[Figure]) -> Counter[bool | None]:
    """How many goals were met (True), missed (False), or could not be compared (None)."""
    return Counter(goal.met(figure) for figure in figures for goal in figure.goals)


def _row(figure: Figure, programs: Sequence[str], compared: Sequence[str]) -> tuple[str, ...]:
    if not figure.measured:
        return (figure.name, *[""] * (5 + len(programs) + len(compared)))
    words = {True: "yes", False: "NO", None: "-"}
    # What a count is over HAProxy's says nothing, over another revision's it does.
    ratios = (None if figure.clock == "count" and name == "HAProxy" else figure.ratio_to(name) for name in compared)
    return (
        figure.name,
        figure.unit,
        figure.clock,
        _cell(figure.aiogw),
        *(_cell(figure.others.get(name)) for name in programs),
        *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
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
    others = {program: value for program, value in values.items() if program != "aiogw"}
    return Figure(name=name, unit=unit, clock=clock, aiogw=values["aiogw"], others=others, goals=goals)


def not_measured(name: str, reason: str) -> Figure:
    return Figure(name=f"{name}: NOT MEASURED: {reason}", unit="", clock="", aiogw=None, measured=False)


def p50_and_p99(name: str, unit: str, samples: Mapping[str, list[float]], *goals_of_p99: Goal) -> list[Figure]:
    for program, each in samples.items():
        if not each:
            raise ValueError(f"{name}: there was none of {program}")
    return [
        of_programs(f"{name}, p50", unit, "wall", {key: quantile(each, 0.5) for key, each in samples.items()}),
        of_programs(
            f"{name}, p99", unit, "wall", {key: quantile(each, 0.99) for key, each in samples.items()}, *goals_of_p99
        ),
    ]


def exponent(costs: Mapping[int, float]) -> float | None:
    """With which power of the size the cost grows: the slope of the logarithms, by least squares; None without one."""
    points = [(math.log(size), math.log(cost)) for size, cost in costs.items() if cost > 0]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None
