"""The upstreams that are served, each with its gate: built from a configuration, and led over to another one at work.

A lane outlives a reload as long as its upstream is the same, by an address it still has requests at, or else by name:
so nobody loses a slot or a place, and no engine gets more than its cap because a name has changed.  Nothing here may
know a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from attrs import define, frozen

from aiogw import assembly
from aiogw.admission.door import Gate
from aiogw.admission.gate import UpstreamGate
from aiogw.admission.readings import GateStatistics, Limits
from aiogw.config import Config
from aiogw.credentials import Credentials
from aiogw.upstream.endpoints import Endpoint, NameUnknown, Upstream, UpstreamPlan, find_endpoints


class CannotReload(Exception):
    """A configuration that is valid and cannot be taken while the gateway runs; the text says what and why."""


@define(eq=False, kw_only=True)
class Lane:
    gate: UpstreamGate
    upstream: Upstream


@frozen(kw_only=True)
class Change:
    """What becomes of one upstream; ``endpoints`` None: nobody knows its addresses yet; ``lane`` None: it is new."""

    plan: UpstreamPlan
    limits: Limits | None
    addresses: tuple[str, ...]
    endpoints: Mapping[str, Endpoint] | None
    lane: Lane | None


Changes = list[Change]


class Lanes:
    """The lanes by the name of their upstream; ``gate`` is the door to all of them."""

    def __init__(self) -> None:
        self.gate = Gate({})
        self.upstreams: dict[str, Upstream] = {}
        self._serving: dict[str, Lane] = {}
        self._retired: dict[str, Lane] = {}

    async def prepare(self, config: Config, credentials: Credentials) -> Changes:
        """All that may fail or take time; changes nothing.  Raises CannotReload."""
        planned = []
        for name, upstream in config.upstreams.items():
            plan = assembly.plan(name, upstream, credentials)
            try:
                endpoints = await find_endpoints(plan)
            except NameUnknown:
                endpoints = None
            planned.append((plan, upstream, endpoints))
        lanes = self._match({plan.name: endpoints or {} for plan, _, endpoints in planned})
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
        known = [*self._serving.items(), *self._retired.items()]
        self._retired = {}
        for name, lane in known:
            if lane in serving.values():
                continue
            if lane.gate.idle:
                lane.upstream.close()
            else:
                lane.upstream.retire()
                self._retired[name] = lane
        self._serving = serving
        self.upstreams = {one: serving[change.plan.name].upstream for change in changes for one in change.addresses}
        self.gate.replace({one: serving[change.plan.name].gate for change in changes for one in change.addresses})
        for change in changes:
            lane = serving[change.plan.name]
            lane.gate.resize(upstream=change.plan.name, limits=change.limits, endpoints=lane.upstream.answering())

    def statistics(self) -> dict[str, GateStatistics]:
        """A reading of each, those included that are no longer served and not empty yet."""
        return {name: lane.gate.statistics() for name, lane in self._living()}

    def place_seconds(self) -> dict[str, float]:
        """How long each queue takes to move up by one place, by the estimate that clients are told."""
        return {name: lane.gate.place_seconds() for name, lane in self._living()}

    def at_work(self, upstream: str) -> int:
        """Sequences at the engines of an upstream, as far as they went through here."""
        reading = self._serving[upstream].gate.statistics()
        return reading.slots_in_use + reading.slots_settling

    def serving(self) -> dict[str, Upstream]:
        return {name: lane.upstream for name, lane in self._serving.items()}

    def close(self) -> None:
        for lane in (*self._serving.values(), *self._retired.values()):
            lane.upstream.close()

    def _living(self) -> Iterator[tuple[str, Lane]]:
        yield from self._serving.items()
        yield from ((name, lane) for name, lane in self._retired.items() if not lane.gate.idle)

    def _match(self, endpoints: Mapping[str, Mapping[str, Endpoint]]) -> dict[str, Lane]:
        """The lane that each upstream goes on in: whose requests are at one of its addresses, or else its namesake."""
        living = dict(self._living())
        at_work = {
            address: lane
            for lane in living.values()
            for address, one in lane.gate.statistics().endpoints.items()
            if one.slots_in_use
        }
        found: dict[str, Lane] = {}
        for name, addresses in endpoints.items():
            lanes = {at_work[address] for address in addresses if address in at_work}
            if len(lanes) > 1 or lanes & set(found.values()):
                raise CannotReload(
                    f"upstreams.{name}: its addresses move between upstreams while requests are at them; reload "
                    "again when they have ended, or restart"
                )
            if lanes:
                found[name] = lanes.pop()
        for name in endpoints.keys() & living.keys():
            if name not in found and living[name] not in found.values():
                found[name] = living[name]
        return found


def _new_lane(change: Change) -> Lane:
    upstream = Upstream(change.plan)
    gate = UpstreamGate(loop=asyncio.get_running_loop(), upstream=change.plan.name, limits=change.limits, endpoints={})
    upstream.on_change = gate.set_endpoints
    return Lane(gate=gate, upstream=upstream)
