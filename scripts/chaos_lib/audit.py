"""What must hold at the end of a chaos run: three accounts of the same requests, compared one by one.

The clients say what they sent and got, the upstream's stub what it held and when, the gateway's log and metrics what it
believes.  A check that fails names the requests it concerns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

from attrs import define, field, frozen

from chaos_lib.client import Result
from chaos_lib.plan import MALFORMED, UPSTREAM_WAYS
from chaos_lib.stub import Held

NAMED = 10
REFUSED_AT_THE_GATE = ("queue_full", "queue_timeout", "queue_too_slow", "draining", "too_many_sequences")
REFUSED_BEFORE = (
    "invalid_body",
    "invalid_request",
    "model_not_found",
    "request_too_large",
    "not_found",
    "method_not_allowed",
)
# What is no request is counted and has no line of its own; the gate never hears of it.
NOT_REQUESTS = 'aiogw_requests_total{outcome="malformed_request",surface="-",upstream="-"}'
LEFT = ("client_gone", "client_stalled")
UPSTREAM_FAILED = ("upstream_unavailable", "upstream_timeout", "upstream_broken", "upstream_error", "upstream_auth")
# A request that reaches the upstream later than this after its client had left, though it had waited, was granted to
# nobody.  Less is a call that was under way, or a busy machine between two lines of it.
AFTERWARDS_SECONDS = 0.1
WAITED_SECONDS = 0.001
# Of those whose FIN or RST was there before the bytes that freed their slot, so many may still be seen: a grant that
# somebody else's end had just caused was already on its way.  Without a look at the client it would be nearly all.
MAX_GRANTED_TO_THE_DEPARTED = 0.03
# Two requests whose order at the upstream differs from their order in the queue by more than this have overtaken: what
# lies between a grant and the stub's clock is less, except where the stub itself was late, which it notes.
ORDER_SECONDS = 0.08
# uvloop's clock counts milliseconds.
CLOCK_SECONDS = 0.002


@frozen(kw_only=True)
class Check:
    """One line of the table; ``faults`` are what was found, request ids first of all."""

    name: str
    found: str
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.faults


@define
class Audit:
    """The checks so far."""

    checks: list[Check] = field(factory=list)

    def add(self, name: str, found: object, faults: Iterable[str] = ()) -> None:
        self.checks.append(Check(name=name, found=str(found), faults=tuple(faults)))

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def table(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{'ok  ' if check.passed else 'FAIL'}  {check.name:{width}}  {check.found}")
            lines += [f"        {fault}" for fault in check.faults[:NAMED]]
            if len(check.faults) > NAMED:
                lines.append(f"        and {len(check.faults) - NAMED} more")
        return "\n".join(lines)


def endings(log: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """How requests ended, in the words of the conservation law."""
    return Counter(ending(line) for line in log)


def ending(line: Mapping[str, Any]) -> str:
    outcome = str(line["outcome"])
    if outcome in LEFT:
        return f"left: {outcome} ({line['phase']})"
    if outcome in UPSTREAM_FAILED:
        return f"upstream failed: {outcome}"
    if outcome in REFUSED_AT_THE_GATE:
        return f"refused: {outcome}"
    return f"invalid: {outcome}" if outcome in REFUSED_BEFORE else outcome


def was_granted(line: Mapping[str, Any]) -> bool:
    """By its log line alone."""
    return "wait_seconds" in line and line["phase"] != "queue"


def check_lines(audit: Audit, results: Iterable[Result], log: Iterable[Mapping[str, Any]]) -> None:
    """Every request that was certainly seen has one line, none has two, and nobody else has any."""
    lines = Counter(line["request_id"] for line in log)
    ended = set(UPSTREAM_FAILED) | set(REFUSED_AT_THE_GATE) | set(REFUSED_BEFORE) | set(LEFT) | {"completed"}
    faults = [f"{line['request_id']}: outcome {line['outcome']}" for line in log if line["outcome"] not in ended]
    unseen = 0
    for result in results:
        count = lines.pop(result.request_id, 0)
        # One who left before it was told anything may have done so before the gateway accepted its connection.
        unseen += result.head_sent and not result.heard and count == 0
        least = int(result.head_sent and (result.heard or result.left_at is None))
        if not least <= count <= int(result.head_sent):
            faults.append(f"{result.request_id}: {count} lines, heard {result.heard}, lost {result.lost}")
    faults += [f"{request_id}: nobody sent it" for request_id in lines]
    audit.add("one log line for each complete request", f"{unseen} left before they could be seen", faults)


def check_metrics(audit: Audit, log: Iterable[Mapping[str, Any]], metrics: Mapping[str, float]) -> None:
    """The counters say what the log says."""
    expected: Counter[str] = Counter()
    for line in log:
        upstream = line.get("upstream", "-")
        labels = f'outcome="{line["outcome"]}",surface="{line["surface"]}",upstream="{upstream}"'
        expected[f"aiogw_requests_total{{{labels}}}"] += 1
        if upstream != "-":
            expected['aiogw_request_duration_seconds_count{upstream="reasoning"}'] += 1
            expected['aiogw_queue_wait_seconds_count{upstream="reasoning"}'] += "wait_seconds" in line
        if line["outcome"] in REFUSED_AT_THE_GATE:
            expected[f'aiogw_refusals_total{{reason="{line["outcome"]}",upstream="reasoning"}}'] += 1
        expected['aiogw_grants_total{upstream="reasoning"}'] += was_granted(line)
    counted = ("aiogw_requests_total", "aiogw_refusals_total", "aiogw_grants_total", *(n for n in expected))
    told = {name: value for name, value in metrics.items() if name.startswith(counted) and name != NOT_REQUESTS}
    faults = [
        f"{name}: {told.get(name, 0):g}, the log says {expected.get(name, 0)}"
        for name in sorted(told.keys() | expected.keys())
        if told.get(name, 0) != expected.get(name, 0)
    ]
    audit.add("metrics agree with the log", f"{len(told)} series", faults)


def check_clients(
    audit: Audit,
    results: Iterable[Result],
    log: Iterable[Mapping[str, Any]],
    account: Iterable[Held],
    late: Set[str],
) -> None:
    """What each client got is what the log says it got, and what its plan allows.

    ``late``: the requests under which the stub itself stood still, so that no clock says much of them.
    """
    seen: defaultdict[str, list[str | None]] = defaultdict(list)
    for held in account:
        seen[held.request_id].append(held.ended)
    lines = {line["request_id"]: line for line in log}
    unlike, unplanned, told_badly = [], [], []
    for result in results:
        plan = result.plan
        line = lines.get(result.request_id)
        if result.lost == "no answer" or (result.lost or "").startswith("not HTTP"):
            told_badly.append(f"{result.request_id}: {result.lost}")
        if line is None:
            continue
        outcome = line["outcome"]
        if result.status is not None and line.get("status") != result.status:
            unlike.append(f"{result.request_id}: got {result.status}, the log says {line.get('status')}")
        if not plan.stays:
            continue
        if result.code is not None and result.code != outcome and result.status != 200:
            unlike.append(f"{result.request_id}: got {result.code}, the log says {outcome}")
        fine = result.complete and result.status == 200 and not result.in_band_error
        if fine != (outcome == "completed"):
            how = f"{result.status}, {'complete' if result.complete else result.lost}"
            unlike.append(f"{result.request_id}: {outcome}, and its client got {how}")
        elif fine and plan.stream and plan.upstream != "bad_json" and not result.said_end:
            unlike.append(f"{result.request_id}: completed, and the stream does not say so")
        if not result.complete and result.status is None:
            told_badly.append(f"{result.request_id}: {outcome}, and not a word to its client ({result.lost})")
        excused = outcome == "upstream_timeout" and result.request_id in late
        if not excused and outcome not in _allowed(plan.client, plan.upstream):
            unplanned.append(f"{result.request_id}: {outcome}, and the upstream says {seen[result.request_id]}")
    audit.add("clients got what the log says", "", unlike)
    audit.add("every client that stayed was answered", "", told_badly)
    audit.add("outcomes are those that were provoked", "", unplanned)


def _allowed(client: str, upstream: str) -> set[str]:
    if client in MALFORMED:
        return MALFORMED[client]
    gate = set(REFUSED_AT_THE_GATE) - {"too_many_sequences", "draining"}
    # Any request may meet the listener while it is closed, or be in its backlog when it closes.
    return UPSTREAM_WAYS[upstream][1] | gate | {"upstream_unavailable", "upstream_broken"}


def check_upstream(
    audit: Audit,
    results: Iterable[Result],
    log: Iterable[Mapping[str, Any]],
    account: Iterable[Held],
    left_at_grant: Set[str],
    late: Set[str],
    stood_still: Iterable[tuple[float, float]],
) -> None:
    """The upstream saw each granted request once, nobody who was refused or left in the queue, and the same ends.

    ``stood_still``: when the gateway did; a connection that it was making for a grant was made afterwards.
    """
    seen: defaultdict[str, list[Held]] = defaultdict(list)
    for held in account:
        seen[held.request_id].append(held)
    left_at = {result.request_id: result.left_at for result in results if result.left_at is not None}
    # One that found a free slot was granted as soon as it was read, its end lying behind it.
    waited = {line["request_id"] for line in log if line.get("wait_seconds", 0) > WAITED_SECONDS}
    left_waiting = left_at_grant & waited
    # On a kept connection the grant and the request are one step; a connection that has to be made takes its time.
    departed = [
        held.request_id for held in account if held.kept and held.request_id in left_waiting and not held.on_its_way
    ]
    few = len(departed) <= max(2, MAX_GRANTED_TO_THE_DEPARTED * len(left_waiting))
    found = f"{len(departed)} of {len(left_waiting)} that left just then were seen"
    audit.add("no grant to the departed", found, () if few else departed)
    ghosts, repeated, unlike = [], [], []
    afterwards = 0
    for line in log:
        request_id, outcome = line["request_id"], line["outcome"]
        visits = seen.pop(request_id, [])
        if visits and not was_granted(line):
            ghosts.append(f"{request_id}: {ending(line)}, and the upstream has seen it")
        # A kept connection that died under it entitles it to a fresh one, once, if nothing had been said.
        again_allowed = visits and visits[0].kept and visits[0].ended == "cut" and not visits[0].began
        if len(visits) > (2 if again_allowed else 1):
            repeated.append(f"{request_id}: {len(visits)} times")
        if visits and request_id in left_at and line["wait_seconds"] > WAITED_SECONDS:
            after_seconds = visits[0].started_at - left_at[request_id]
            afterwards += after_seconds > 0
            stopped = any(begin <= left_at[request_id] <= end for begin, end in stood_still)
            if after_seconds > AFTERWARDS_SECONDS and request_id not in late and not (stopped and not visits[0].kept):
                told = f"reached the upstream {after_seconds * 1000:.0f} ms after its client had left"
                ghosts.append(f"{request_id}: {told}")
        if outcome == "completed" and (not visits or visits[-1].ended != "finished"):
            unlike.append(f"{request_id}: completed, and the upstream says {[visit.ended for visit in visits]}")
    ghosts += [f"{request_id}: at the upstream, and not in the log" for request_id in seen]
    audit.add("nobody who had left or been refused reached the upstream", f"{afterwards} while they left", ghosts)
    audit.add("no request was sent twice", "", repeated)
    audit.add("what completed is what the upstream finished", "", unlike)


def check_order(audit: Audit, log: Iterable[Mapping[str, Any]], account: Iterable[Held], late: Set[str]) -> None:
    """In the order of the stub's clock, no grant went past one that had entered earlier and stayed."""
    waits = {line["request_id"]: line["wait_seconds"] for line in log if "wait_seconds" in line}
    starts = sorted(
        (held for held in account if held.request_id in waits and held.request_id not in late),
        key=lambda held: held.started_at,
    )
    faults = []
    youngest: Held | None = None  # of those that started clearly before the one that is looked at
    entered_youngest = float("-inf")
    before = 0
    compared = 0
    for held in starts:
        while starts[before].started_at < held.started_at - ORDER_SECONDS:
            one = starts[before]
            before += 1
            # Its start tells its grant only if no connection had to be made for it.
            if one.kept and one.started_at - waits[one.request_id] > entered_youngest:
                youngest, entered_youngest = one, one.started_at - waits[one.request_id]
        compared += waits[held.request_id] > ORDER_SECONDS
        if youngest is not None and entered_youngest > held.started_at - waits[held.request_id] + ORDER_SECONDS:
            faults.append(f"{held.request_id}: overtaken by {youngest.request_id}")
    found = f"{compared} that waited more than {ORDER_SECONDS * 1000:g} ms, {len(starts)} of {len(waits)} with a clock"
    audit.add("nobody overtook in the queue", found, faults)


class ScrapeCheck:
    """Compares each scrape with itself and with the one before."""

    def __init__(self, *, queue_timeout_seconds: float, heaviest: int) -> None:
        self._queue_timeout_seconds = queue_timeout_seconds
        self._heaviest = heaviest
        self._last: dict[str, float] = {}
        self.count = 0
        self.recounted = 0
        self.faults: list[str] = []
        self.unlike: list[str] = []
        self.busiest = 0
        self.deepest = 0

    def take(self, metrics: dict[str, float]) -> None:
        self.count += 1
        in_use, settling, cap, waiting, limit, oldest, grants = (
            metrics[f'aiogw_{name}{{upstream="reasoning"}}']
            for name in (
                "slots_in_use",
                "slots_settling",
                "slots_limit",
                "queue_requests",
                "queue_limit",
                "queue_oldest_wait_seconds",
                "grants_total",
            )
        )
        self.busiest = max(self.busiest, int(in_use + settling))
        self.deepest = max(self.deepest, int(waiting))
        ended: Counter[str] = Counter()
        for name, value in metrics.items():
            if value < 0:
                self._fault(f"{name} is {value:g}")
            grows = "_total" in name or "_count" in name or "_bucket" in name
            if grows and value < self._last.get(name, 0):
                self._fault(f"{name} went from {self._last[name]:g} to {value:g}")
            if name.startswith("aiogw_requests_total"):
                ended[name.partition('outcome="')[2].partition('"')[0]] += int(value)
        if in_use + settling > cap:
            self._fault(f"{in_use:g} slots in use and {settling:g} settling under a cap of {cap:g}")
        if waiting > limit:
            self._fault(f"{waiting:g} wait where {limit:g} may")
        if waiting and in_use + settling + self._heaviest <= cap:
            self._fault(f"{waiting:g} wait while {cap - in_use - settling:g} slots are free")
        if not waiting and oldest:
            self._fault(f"nobody waits, and the oldest has waited for {oldest:g} s")
        if oldest > self._queue_timeout_seconds + 1:
            self._fault(f"somebody waits for {oldest:g} s")
        certainly_granted = ended["completed"] + sum(ended[outcome] for outcome in UPSTREAM_FAILED)
        if certainly_granted > grants:
            self._fault(f"{certainly_granted} requests have ended that were granted, and {grants:g} were granted")
        for reason in REFUSED_AT_THE_GATE:
            refused = metrics.get(f'aiogw_refusals_total{{reason="{reason}",upstream="reasoning"}}', 0)
            if ended[reason] > refused:
                self._fault(f"{ended[reason]} requests have ended as {reason}, and {refused:g} were refused")
        self._last = metrics

    def recount(self, metrics: dict[str, float], account: dict[str, Any]) -> None:
        """Compare what has just been taken with the account that was kept beside the gate, each sample of either."""
        one = '{upstream="reasoning"}'
        singles = ("slots_in_use", "slots_settling", "queue_requests", "grants_total")
        counts = ("queue_wait_seconds_count", "request_duration_seconds_count")
        expected = {f"aiogw_{name}{one}": account[name] for name in (*singles, *counts)}
        for labels, count in account["requests_total"].items():
            expected[f"aiogw_requests_total{{{labels}}}"] = count
        for reason, count in account["refusals_total"].items():
            expected[f'aiogw_refusals_total{{reason="{reason}",upstream="reasoning"}}'] = count
        told = expected.keys() | {
            name for name in metrics if name.startswith(("aiogw_requests_total", "aiogw_refusals_total"))
        } - {NOT_REQUESTS}
        unlike = [
            f"scrape {self.count}: {name} is {metrics.get(name, 0):g}, the recount says {expected.get(name, 0)}"
            for name in sorted(told)
            if metrics.get(name, 0) != expected.get(name, 0)
        ]
        oldest = metrics[f"aiogw_queue_oldest_wait_seconds{one}"]
        least, most = account["oldest_seconds"]
        # The one value that moves by itself, and it is as coarse as the loop's clock.
        if not least - CLOCK_SECONDS <= oldest <= most + CLOCK_SECONDS:
            unlike.append(f"scrape {self.count}: the oldest waits {oldest:g} s, the recount says {least:g} to {most:g}")
        self.recounted += not unlike
        self.unlike += unlike

    def held_throughout(self, metrics: dict[str, float], sequences: int) -> None:
        """``sequences`` were at the upstream from before the last scrape was asked for until after it was answered."""
        counted = sum(metrics[f'aiogw_{name}{{upstream="reasoning"}}'] for name in ("slots_in_use", "slots_settling"))
        if counted < sequences:
            self._fault(f"{counted:g} slots are counted, and the upstream held {sequences} sequences all the while")

    def _fault(self, what: str) -> None:
        self.faults.append(f"scrape {self.count}: {what}")
