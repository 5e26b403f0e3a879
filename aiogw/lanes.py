"""The upstreams that are served, each with its gate: built from a configuration, and led over to another one at work.

A lane outlives a reload as long as its upstream is the same, by its name or, when that has gone, by an address it still
has requests at: so nobody loses a slot or a place, and no engine gets more than its cap because a name has changed.
Nothing here may know a client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping

from attrs import define, evolve, frozen

from aiogw import assembly
from aiogw.admission.door import Gate
from aiogw.admission.gate import UpstreamGate
from aiogw.admission.readings import EndpointStatistics, GateStatistics, Limits
from aiogw.config import Config
from aiogw.credentials import Credentials
from aiogw.upstream.endpoints import Endpoint, NameUnknown, Upstream, UpstreamPlan, find_endpoints

log = logging.getLogger(__name__)


class CannotReload(Exception):
    """A configuration that is valid and cannot be taken while the gateway runs; the text says what and why."""


@define(eq=False, kw_only=True)
class Lane:
    gate: UpstreamGate
    upstream: Upstream

    def statistics(self) -> GateStatistics:
        """The gate's, with what it knows nothing of: endpoints that are left out, and which are not reached."""
        reading = self.gate.statistics()
        endpoints = dict(reading.endpoints)
        for name, slots in self.upstream.left_out().items():
            endpoints.setdefault(name, EndpointStatistics(left_out=True, slots=slots, slots_in_use=0))
        for name, since in self.upstream.unreached().items():
            if name in endpoints:
                endpoints[name] = evolve(endpoints[name], unreached_since=since)
        return evolve(reading, endpoints=endpoints)


@frozen(kw_only=True)
class Change:
    """What becomes of one upstream; ``lane`` None: it is new."""

    plan: UpstreamPlan
    limits: Limits | None
    addresses: tuple[str, ...]
    endpoints: Mapping[str, Endpoint]
    lane: Lane | None


Changes = list[Change]

SWEEP_SECONDS = 1.0


class Lanes:
    """The lanes by the name of their upstream; ``gate`` is the door to all of them."""

    def __init__(self) -> None:
        self.gate = Gate({})
        self.upstreams: dict[str, Upstream] = {}
        self._serving: dict[str, Lane] = {}
        self._retired: dict[str, Lane] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    async def prepare(self, config: Config, credentials: Credentials) -> Changes:
        """All that may fail or take time; changes nothing.  Raises CannotReload."""
        planned = []
        for name, upstream in config.upstreams.items():
            plan = assembly.plan(name, upstream, credentials)
            try:
                endpoints = await find_endpoints(plan)
            except NameUnknown as error:
                endpoints = self._without_names(plan, error)
            planned.append((plan, upstream, endpoints))
        lanes = self._match({plan.name: endpoints for plan, _, endpoints in planned})
        return [
            Change(
                plan=plan,
                limits=assembly.limits(upstream),
                addresses=upstream.addresses,
                endpoints=endpoints,
                lane=lanes.get(plan.name),
            )
            for plan, upstream, endpoints in planned
        ]

    def commit(self, changes: Changes) -> None:
        """Take what was prepared, in one step of the loop; who thereby gets a slot has it when this returns."""
        serving = {}
        for change in changes:
            lane = change.lane or _new_lane(change)
            lane.upstream.take(change.plan, change.endpoints)
            serving[change.plan.name] = lane
        for name, lane in self._serving.items():
            if lane not in serving.values():
                lane.upstream.retire()
                self._retired[name] = lane
        self._retired = {name: lane for name, lane in self._retired.items() if lane not in serving.values()}
        self._serving = serving
        self._forget_who_is_done()
        self.upstreams = {one: serving[change.plan.name].upstream for change in changes for one in change.addresses}
        self.gate.replace({one: serving[change.plan.name].gate for change in changes for one in change.addresses})
        for change in changes:
            lane = serving[change.plan.name]
            lane.gate.resize(upstream=change.plan.name, limits=change.limits, endpoints=lane.upstream.answering())

    def statistics(self) -> dict[str, GateStatistics]:
        """A reading of each, those included that are no longer served and not empty yet."""
        return {name: lane.statistics() for name, lane in self._living()}

    def newcomers_wait_seconds(self) -> dict[str, float]:
        """How long a request that came now would probably wait, at each that has a queue."""
        return {
            name: lane.gate.place_seconds() * (reading.waiting + 1) if reading.makes_newcomers_wait else 0.0
            for name, lane in self._living()
            if (reading := lane.gate.statistics()).cap is not None
        }

    def place_seconds(self) -> dict[str, float]:
        """How long each queue takes to move up by one place, by the estimate that clients are told."""
        return {name: lane.gate.place_seconds() for name, lane in self._living()}

    def at_work(self, upstream: str) -> int:
        """Sequences at the engines of an upstream that answer, as far as they went through here."""
        return sum(
            one.slots_in_use for one in self._serving[upstream].gate.statistics().endpoints.values() if not one.left_out
        )

    def serving(self) -> dict[str, Upstream]:
        return {name: lane.upstream for name, lane in self._serving.items()}

    def leaving(self) -> set[str]:
        """Those that are in the readings although nobody is sent there any more."""
        return {name for name, _ in self._living()} - self._serving.keys()

    def _without_names(self, plan: UpstreamPlan, error: NameUnknown) -> Mapping[str, Endpoint]:
        """What to do without an answer from DNS: a first start has to be possible, and a reload has to be true."""
        lane = self._serving.get(plan.name)
        if lane is None:
            log.warning("an address of the upstream %s cannot be found: %s", plan.name, error)
            return {}
        known = lane.upstream.known(plan)
        if known is None:
            raise CannotReload(f"upstreams.{plan.name}.endpoints: {error}")
        return known

    def _forget_who_is_done(self) -> None:
        """Look after the retired until none is left: a gate does not tell when it has become idle."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for name in [name for name, lane in self._retired.items() if lane.gate.idle]:
            self._retired.pop(name).upstream.close()
        if self._retired:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._forget_who_is_done)

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for lane in (*self._serving.values(), *self._retired.values()):
            lane.upstream.close()

    def _living(self) -> Iterator[tuple[str, Lane]]:
        yield from self._serving.items()
        yield from ((name, lane) for name, lane in self._retired.items() if not lane.gate.idle)

    def _match(self, endpoints: Mapping[str, Mapping[str, Endpoint]]) -> dict[str, Lane]:
        """The lane that each upstream goes on in: its namesake, or one without a name whose addresses it has.

        Requests stay where their slots are, and go on to where they have asked for.  So an address with requests at it
        cannot pass from one upstream to another: either their gates would both count its slots, or one's waiting
        requests would be sent to the other's engine.
        """
        living = dict(self._living())
        at_work = {
            address: name
            for name, lane in living.items()
            for address, one in lane.gate.statistics().endpoints.items()
            if one.slots_in_use
        }
        found: dict[str, str] = {}
        claimed: dict[str, str] = {}
        for name, addresses in endpoints.items():
            owners = {at_work[address] for address in addresses if address in at_work} - {name}
            for address in addresses:
                if claimed.setdefault(address, name) != name:
                    raise CannotReload(
                        f"upstreams.{name}: it has an address of upstreams.{claimed[address]} ({address})"
                    )
            free_to_go = len(owners) == 1 and name not in living and not owners & endpoints.keys()
            if owners and not (free_to_go and not owners & set(found.values())):
                others = ", ".join(f"upstreams.{owner}" for owner in sorted(owners))
                raise CannotReload(
                    f"upstreams.{name}: its addresses move from {others} while requests are at them; reload again when "
                    "they have ended, or restart"
                )
            if owners:
                found[name] = owners.pop()
            elif name in living:
                found[name] = name
        return {name: living[before] for name, before in found.items()}


def _new_lane(change: Change) -> Lane:
    upstream = Upstream(change.plan)
    gate = UpstreamGate(loop=asyncio.get_running_loop(), upstream=change.plan.name, limits=change.limits, endpoints={})
    upstream.on_change = gate.set_endpoints
    return Lane(gate=gate, upstream=upstream)
