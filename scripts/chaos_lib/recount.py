"""The gateway of a chaos run, and beside it a second account of its gate, told with every scrape.

A recount cannot be taken from another process at the instant of a scrape.  So the real gateway runs here, through its
own command line, and an account is kept from what passes its door alone: who enters, whose callback is called, who
leaves, what is logged.  It asks neither gate nor queue for anything.  Each answer to ``/metrics`` carries the account
of the same step of the loop in a header; whoever scrapes compares the two.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from attrs import define
from prometheus_async.aio.web import server_stats

from aiogw import app, cli
from aiogw.admission.door import Gate
from aiogw.admission.gate import Admission, UpstreamGate
from aiogw.errors import GatewayError, InternalFault

HEADER = "x-chaos-recount"


@define(eq=False)
class Claim:
    """One request; it was ``entered`` between these two moments, in which the gate looked at its own clock."""

    weight: int
    entered: tuple[float, float]


class Recount:
    """Sets of claims, moved by events only."""

    def __init__(self, *, settles: bool) -> None:
        self._settles = settles
        self._claims: dict[Admission, Claim] = {}
        self._waiting: dict[Claim, None] = {}
        self._holding: set[Claim] = set()
        self._settling: dict[Admission, Claim] = {}
        self._grants = 0
        self._refusals: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._waits = self._durations = 0
        self.events = 0

    def document(self) -> dict[str, Any]:
        return {
            "slots_in_use": sum(claim.weight for claim in self._holding),
            "slots_settling": sum(claim.weight for claim in self._settling.values()),
            "queue_requests": len(self._waiting),
            "grants_total": self._grants,
            "refusals_total": self._refusals,
            "requests_total": self._ended,
            "queue_wait_seconds_count": self._waits,
            "request_duration_seconds_count": self._durations,
        }

    def oldest_seconds(self) -> tuple[float, float]:
        """At least and at most."""
        now, oldest = time.monotonic(), next(iter(self._waiting), None)
        return (0.0, 0.0) if oldest is None else (now - oldest.entered[1], now - oldest.entered[0])

    def watch(self) -> None:
        """Put an ear on each door."""
        enter, leave, settled = Gate.enter, Admission.leave, UpstreamGate._settled

        def watched_enter(
            gate: Gate,
            address: str,
            weight: int,
            *,
            granted: Callable[[Admission], None],
            refused: Callable[[GatewayError], None],
            **whose: Any,
        ) -> Admission:
            began_at = time.monotonic()
            claim = Claim(weight=weight, entered=(began_at, began_at))
            self._waiting[claim] = None

            def told_granted(admission: Admission) -> None:
                self._granted(claim, admission)
                granted(admission)

            def told_refused(error: GatewayError) -> None:
                self._refused(claim, error)
                refused(error)

            try:
                admission = enter(gate, address, weight, granted=told_granted, refused=told_refused, **whose)
            except GatewayError as error:
                self._refused(claim, error)
                raise
            claim.entered = (began_at, time.monotonic())
            if claim in self._waiting:
                self._claims[admission] = claim
            return admission

        def watched_leave(admission: Admission, *, aborted: bool = False) -> None:
            self._left(admission, aborted=aborted)
            leave(admission, aborted=aborted)

        def watched_settled(gate: UpstreamGate, admission: Admission) -> None:
            self.events += 1
            del self._settling[admission]
            settled(gate, admission)

        Gate.enter = watched_enter  # type: ignore[assignment, method-assign]
        Admission.leave = watched_leave  # type: ignore[assignment, method-assign]
        UpstreamGate._settled = watched_settled  # type: ignore[assignment, method-assign]
        log = logging.Handler()
        log.emit = self._logged  # type: ignore[method-assign]
        logging.getLogger("aiogw.access").addHandler(log)

    def _granted(self, claim: Claim, admission: Admission) -> None:
        self.events += 1
        del self._waiting[claim]
        self._holding.add(claim)
        self._claims[admission] = claim
        self._grants += 1

    def _refused(self, claim: Claim, error: GatewayError) -> None:
        self.events += 1
        self._waiting.pop(claim, None)
        self._holding.discard(claim)
        if not isinstance(error, InternalFault):
            self._refusals[error.code] += 1

    def _left(self, admission: Admission, *, aborted: bool) -> None:
        claim = self._claims.pop(admission, None)
        if claim is None:
            return
        self.events += 1
        self._waiting.pop(claim, None)
        if claim in self._holding:
            self._holding.discard(claim)
            if aborted and self._settles:
                self._settling[admission] = claim

    def _logged(self, record: logging.LogRecord) -> None:
        self.events += 1
        told = record.fields  # type: ignore[attr-defined]
        upstream = told.get("upstream", "-")
        self._ended[f'outcome="{told["outcome"]}",surface="{told["surface"]}",upstream="{upstream}"'] += 1
        if upstream != "-":
            self._durations += 1
            self._waits += "wait_seconds" in told


def main() -> int:
    config = tomllib.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    (upstream,) = config["upstreams"].values()
    recount = Recount(settles=upstream["admission"]["abort_settle_seconds"] > 0)
    recount.watch()

    async def told_stats(request: web.Request) -> web.Response:
        events, account, (least, _) = recount.events, recount.document(), recount.oldest_seconds()
        response = await server_stats(request)
        account["oldest_seconds"] = least, recount.oldest_seconds()[1]
        if recount.events != events:
            raise RuntimeError("the metrics were not rendered in one step of the loop")
        response.headers[HEADER] = json.dumps(account)
        return response

    app.server_stats = told_stats  # type: ignore[attr-defined]
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
