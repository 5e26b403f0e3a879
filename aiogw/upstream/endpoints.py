"""The endpoints of one upstream: the connections of each, which of them answer, and which are not reached.

Several endpoints are one upstream with one queue.  One that refuses connections is left out until its health check
answers again.  A single address is never left out, since its requests have nowhere else to go; one that was not reached
is tried until it is.  Nothing here may know the queue: who has to, is told which endpoints there are.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial

from attrs import evolve, frozen

from aiogw.errors import UpstreamFault, UpstreamUnavailable
from aiogw.upstream.asking import ask
from aiogw.upstream.pool import Target, UpstreamPool

log = logging.getLogger(__name__)

# vLLM's and SGLang's both; it answers without looking at the engine's queue.
HEALTH_PATH = "/health"
HEALTH_INTERVAL_SECONDS = 1.0
HEALTH_TIMEOUT_SECONDS = 5.0
MAX_HEALTH_BYTES = 65536
# A cluster's DNS lets its answers live for 5 to 30 seconds.
RESOLVE_INTERVAL_SECONDS = 5.0
RESOLVE_TIMEOUT_SECONDS = 2.0


@frozen(kw_only=True)
class Endpoint:
    """One address, or with ``every_address`` one name; ``slots``: what an engine behind it runs at a time.

    ``name`` is the key of the name that an address was found for, None: it was configured as it is.
    """

    target: Target
    slots: int | None
    name: str | None = None


MakePool = Callable[[Target, Callable[[], None]], UpstreamPool]


@frozen(kw_only=True)
class UpstreamPlan:
    """What an operator has said of an upstream.

    ``endpoints`` by their normalised addresses.  ``leave_out``: one that refuses connections is none until it answers
    again; a single address has nowhere else to go, and its requests say themselves that it cannot be reached.
    ``every_address``: each of ``endpoints`` is a name, and every address it has is an endpoint.
    """

    name: str
    endpoints: Mapping[str, Endpoint]
    make_pool: MakePool
    leave_out: bool
    every_address: bool


class Upstream:
    """The endpoints of one upstream; it outlives changes of its plan, since requests on their way have hold of it.

    ``on_change`` is told the endpoints that answer, each with its slots, in the step in which that changes by itself.
    """

    def __init__(self, plan: UpstreamPlan) -> None:
        self.on_change: Callable[[Mapping[str, int | None]], None] = lambda _endpoints: None
        self._plan = plan
        self._endpoints: dict[str, Endpoint] = {}
        self._pools: dict[str, UpstreamPool] = {}
        # Each is tried until it is well again.  With ``leave_out`` it gets no request meanwhile.
        self._away: dict[str, asyncio.Task[None]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._unresolved: str | None = None

    @property
    def name(self) -> str:
        return self._plan.name

    def known(self, plan: UpstreamPlan) -> Mapping[str, Endpoint] | None:
        """The addresses of before for a plan with the same names, which cannot be looked up; None: other names."""
        if not all(one.name in plan.endpoints for one in self._endpoints.values()):
            return None
        return {
            key: _found_for(str(one.name), plan.endpoints[str(one.name)], one.target.address or "")
            for key, one in self._endpoints.items()
        }

    def take(self, plan: UpstreamPlan, endpoints: Mapping[str, Endpoint]) -> None:
        """Follow ``plan`` from now on, with the ``endpoints`` it means at the moment.

        Connections are made anew; calls that are under way go on.  ``on_change`` is not told.
        """
        self._plan = plan
        unreached = self.unreached()
        self._drop(self._endpoints)
        self._endpoints = {}
        self._replace(endpoints)
        for key, since in unreached.items():
            if key in self._pools:
                self._pools[key].unreached_since = since
        if self._resolving is not None:
            self._resolving.cancel()
        self._resolving = None
        if plan.every_address:
            self._resolving = asyncio.get_running_loop().create_task(self._keep_resolving())

    def answering(self) -> dict[str, int | None]:
        """The endpoints that are not left out, each with its slots."""
        out = self.left_out()
        return {key: endpoint.slots for key, endpoint in self._endpoints.items() if key not in out}

    def left_out(self) -> dict[str, int | None]:
        """The others, each with its slots."""
        return {key: self._endpoints[key].slots for key in self._away} if self._plan.leave_out else {}

    def unreached(self) -> dict[str, float]:
        """The endpoints to which the last attempt to connect failed, each with the moment since when they all did."""
        pools = self._pools.items()
        return {key: pool.unreached_since for key, pool in pools if pool.unreached_since is not None}

    def pool(self, endpoint: str) -> UpstreamPool:
        """The connections of an endpoint that answers."""
        return self._pools[endpoint]

    def pools(self) -> list[UpstreamPool]:
        """The connections of all endpoints that answer."""
        return [self._pools[key] for key in self.answering()]

    def any_pool(self) -> UpstreamPool | None:
        """Where to send what needs no slot; None: there is no endpoint at all."""
        return next(iter(self.pools() or self._pools.values()), None)

    def retire(self) -> None:
        """Keep no connection any more; who is on the way still gets there."""
        for pool in self._pools.values():
            pool.close()

    def close(self) -> None:
        """Keep no connection and ask nothing any more; calls that are under way go on."""
        self.retire()
        for task in (*self._away.values(), *((self._resolving,) if self._resolving else ())):
            task.cancel()
        self._away, self._endpoints = {}, {}  # who is on the way may still find that there is no way

    # -- away -------------------------------------------------------------------------------------------------------

    def _unreachable(self, key: str) -> None:
        if key in self._away or key not in self._endpoints:
            return
        self._away[key] = asyncio.get_running_loop().create_task(self._until_it_is_well(key))
        if self._plan.leave_out:
            log.warning("the endpoint %s of the upstream %s is left out until it answers", key, self.name)
            self.on_change(self.answering())

    async def _until_it_is_well(self, key: str) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_SECONDS)
            well = await (self._answers(key) if self._plan.leave_out else self._reached(key))
            # By the connections of now: a reload may have made them anew meanwhile.
            if well and self._pools[key].unreached_since is None:
                break
        del self._away[key]
        if self._plan.leave_out:
            log.info("the endpoint %s of the upstream %s answers again", key, self.name)
            self.on_change(self.answering())

    async def _answers(self, key: str) -> bool:
        try:
            await ask(
                self.name,
                self._pools[key],
                HEALTH_PATH,
                accept="*/*",
                max_bytes=MAX_HEALTH_BYTES,
                timeout_seconds=HEALTH_TIMEOUT_SECONDS,
            )
        except (UpstreamFault, TimeoutError):
            return False
        return True

    async def _reached(self, key: str) -> bool:
        """By a connection and nothing else: what need not be an engine may have no health to tell."""
        pool = self._pools[key]
        if pool.unreached_since is not None:
            try:
                (await pool.connect()).abort()
            except UpstreamUnavailable:
                return False
        return True

    # -- every address ----------------------------------------------------------------------------------------------

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_INTERVAL_SECONDS)
            try:
                found = await find_endpoints(self._plan)
            except NameUnknown as error:
                # What was known stays: a name server that fails must not stop the work.
                if self._unresolved != str(error):
                    log.warning("an address of the upstream %s cannot be found: %s", self.name, error)
                self._unresolved = str(error)
                continue
            self._unresolved = None
            if found.keys() != self._endpoints.keys():
                log.info("the upstream %s has the addresses %s", self.name, ", ".join(found))
                self._replace(found)
                self.on_change(self.answering())

    def _replace(self, endpoints: Mapping[str, Endpoint]) -> None:
        gone = {key: one for key, one in self._endpoints.items() if key not in endpoints}
        new = endpoints.keys() - self._endpoints.keys()
        self._drop(gone)
        for key in self._away.keys() - endpoints.keys():
            self._away.pop(key).cancel()
        for key in new:
            self._pools[key] = self._plan.make_pool(endpoints[key].target, partial(self._unreachable, key))
        self._endpoints = dict(endpoints)

    def _drop(self, endpoints: Mapping[str, Endpoint]) -> None:
        for key in endpoints:
            self._pools.pop(key).close()


class NameUnknown(Exception):
    """A name has no address, or nobody said which."""


async def find_endpoints(plan: UpstreamPlan) -> Mapping[str, Endpoint]:
    """The endpoints that ``plan`` means, by normalised address; raises NameUnknown."""
    if not plan.every_address:
        return plan.endpoints
    found: dict[str, Endpoint] = {}
    for name, endpoint in plan.endpoints.items():
        target = endpoint.target
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_SECONDS):
                addresses = await _addresses(target.host, target.port)
        except UnicodeError:
            raise NameUnknown(f"{target.host}: not a name that DNS could have") from None
        except (OSError, TimeoutError) as error:
            raise NameUnknown(
                f"{target.host}: {error.strerror if isinstance(error, OSError) else 'no answer'}"
            ) from None
        for address in addresses:
            host = f"[{address}]" if ":" in address else address
            found[f"{host}:{target.port}{target.prefix}"] = _found_for(name, endpoint, address)
    return found


def _found_for(name: str, endpoint: Endpoint, address: str) -> Endpoint:
    return evolve(endpoint, name=name, target=evolve(endpoint.target, address=address))


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses of ``host``, those of one family only: a pod of a dual-stack cluster has one in each."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family = found[0][0]
    return sorted({str(address[0]) for one, _, _, _, address in found if one == family})
