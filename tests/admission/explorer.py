"""A deterministic event loop that runs a small scenario over the real gate in every order its callbacks can have.

A loop of asyncio runs what is ready in the order in which it became ready.  This one may run it in any order, may let
time pass first, and may cancel any handler between any two callbacks: wherever there is more than one way to go on, it
asks.  ``explore`` answers in all the ways there are, depth first.  The answers are a schedule's number, so that
``replay`` runs exactly that one again, with a trace.

What must hold is checked after every callback against an account that only knows what the requests did and were told.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from aiogw.admission.capacity import ONE_ENDPOINT
from aiogw.admission.door import Gate
from aiogw.admission.gate import Admission, UpstreamGate
from aiogw.admission.readings import Limits
from aiogw.errors import (
    Draining,
    GatewayError,
    InternalFault,
    QueuePlacesTaken,
    QueueTimeout,
    TooManySequences,
    UpstreamUnavailable,
)

ADDRESS = "reasoning:80"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# No scenario takes a tenth of this: a schedule that does has callbacks that bring each other back for ever.
MAX_STEPS = 1000


# -- what is run ----------------------------------------------------------------------------------------------------


@frozen
class Ask:
    """One request.  Times are virtual seconds; ``hold_seconds`` None: it holds its slots until its client leaves.

    At most ``places`` of those of one ``holder`` may wait at once.

    What its grant does is one of

        wakes     resolves a future: the handler's task holds the slots and gives them back
        sends     puts it on the wire, as the relay does: the upstream's end gives the slots back, not the handler
        fails     finds no upstream: leaves, inside the call
        raises    raises
        bounces   finds, one step later, that its endpoint refuses connections, which then goes; waits again
        ends X    makes request X leave, then goes on as ``wakes``: a slot can be booked for one who is made to leave
        enters X  lets request X begin, inside the call, then goes on as ``wakes``
    """

    name: str
    weight: int = 1
    at_seconds: float = 0
    hold_seconds: float | None = 1
    grant: str = "wakes"
    holder: str | None = None
    places: int | None = None


@frozen
class Event:
    """Something that happens to the gate itself at its time, in whatever order with what else happens then."""

    name: str
    at_seconds: float
    call: Callable[[World], None]


def _drain(world: World) -> None:
    world.draining = True
    world.gate.drain()


def drain(at_seconds: float) -> Event:
    return Event("drain", at_seconds, _drain)


def resize(at_seconds: float, *, cap: int, queue_limit: int = 2) -> Event:
    def call(world: World) -> None:
        world.cap, world.queue_limit = cap, queue_limit
        world.tell_limits()

    return Event(f"cap {cap}", at_seconds, call)


def endpoints(at_seconds: float, **slots: int) -> Event:
    """From then on these answer, and no others."""

    def call(world: World) -> None:
        world.endpoints = dict(slots)
        world.upstream_gate.set_endpoints(world.endpoints)

    return Event(f"endpoints {slots}", at_seconds, call)


@frozen(kw_only=True)
class Scenario:
    """A few requests, what happens meanwhile, and what the explorer may do to them.

    ``cancellations``: so many handlers may be cancelled in one schedule, each at any moment.  ``slow``: time may pass
    while callbacks are ready, so that timers come due before what was ready earlier has run.  ``detours`` None: every
    order; else at most so many choices that are not the real loop's, cancellations not counted.
    """

    name: str
    asks: tuple[Ask, ...]
    cap: int = 1
    queue_limit: int = 2
    timeout_seconds: float = 8
    settle_seconds: float = 0
    endpoints: Mapping[str, int | None] = ONE_ENDPOINT
    events: tuple[Event, ...] = ()
    cancellations: int = 1
    slow: bool = False
    detours: int | None = None

    def largest(self, cap: int) -> int:
        slots = [slots for slots in self.endpoints.values() if slots is not None]
        return min(cap, max(slots, default=cap))

    def limits(self, *, cap: int, queue_limit: int) -> Limits:
        return Limits(
            cap=cap,
            largest=self.largest(cap),
            queue_limit=queue_limit,
            queue_timeout_seconds=self.timeout_seconds,
            retry_after_min_seconds=1,
            retry_after_max_seconds=60,
            abort_settle_seconds=self.settle_seconds,
        )


# -- the loop -------------------------------------------------------------------------------------------------------


class Choices:
    """Takes the given choices, then the first option each time, and remembers how many there were."""

    def __init__(self, given: Sequence[int] = (), detours: int | None = None) -> None:
        self._given = given
        self._detours = detours
        self.taken: list[int] = []
        self.options: list[int] = []

    def choose(self, ordinary: int, free: int) -> int:
        """One of ``ordinary + free`` options; choosing an ordinary one other than the first is a detour."""
        if self._detours == 0:
            # Only the first and the free ones are left.
            choice = self._next(1 + free)
            return choice if choice == 0 else ordinary + choice - 1
        choice = self._next(ordinary + free)
        if self._detours is not None and 0 < choice < ordinary:
            self._detours -= 1
        return choice

    def _next(self, options: int) -> int:
        if options == 1:
            return 0
        position = len(self.taken)
        choice = self._given[position] if position < len(self._given) else 0
        assert choice < options, "this number is not of this scenario, or the code under test is not deterministic"
        self.taken.append(choice)
        self.options.append(options)
        return choice

    def following(self) -> list[int] | None:
        """The choices of the next schedule, depth first; None after the last."""
        taken = list(self.taken)
        while taken:
            if taken[-1] + 1 < self.options[len(taken) - 1]:
                taken[-1] += 1
                return taken
            taken.pop()
        return None


def described(handle: asyncio.Handle) -> str:
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"{owner.get_name()} goes on"
    whose = getattr(owner, "name", None)
    if whose is None and handle._args:
        whose = getattr(handle._args[0], "number", None)
    return f"{callback.__qualname__}" if whose is None else f"{callback.__qualname__} {whose}"


class ExplorerLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as tasks, futures, timers and the gate need; ``step`` is one turn of it."""

    def __init__(self, choices: Choices, *, slow: bool, trace: list[str] | None) -> None:
        self._choices = choices
        self._slow = slow
        self._trace = trace
        self._now = 0.0
        self.ready: list[asyncio.Handle] = []
        self.timers: list[asyncio.TimerHandle] = []
        self.complaints: list[str] = []

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.timers.append(timer)
        return timer

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """What TimerHandle.cancel calls; ``step`` forgets the cancelled ones."""

    def step(self, interference: Sequence[tuple[str, Callable[[], object]]]) -> bool:
        """Run one callback, let time pass to the next timers, or interfere; False when all is at rest."""
        if any(handle.cancelled() for handle in self.ready):
            self.ready = [handle for handle in self.ready if not handle.cancelled()]
        if any(timer.cancelled() for timer in self.timers):
            self.timers = [timer for timer in self.timers if not timer.cancelled()]
        ordinary = len(self.ready)
        if self.timers and (self._slow or not self.ready):
            ordinary += 1
        if not ordinary:
            return False
        choice = self._choices.choose(ordinary, len(interference))
        if choice >= ordinary:
            what, call = interference[choice - ordinary]
            self._note(what)
            call()
        elif choice == len(self.ready):
            self._pass_time()
        else:
            handle = self.ready.pop(choice)
            if self._trace is not None:
                self._note(described(handle))
            handle._run()
        return True

    def _note(self, what: str) -> None:
        if self._trace is not None:
            self._trace.append(what)

    def _pass_time(self) -> None:
        self._now = min(timer.when() for timer in self.timers)
        # A timer that is due has its place behind what is ready, as in the real loop, but may be run before it.
        self.ready += sorted(
            (timer for timer in self.timers if timer.when() <= self._now), key=lambda timer: timer.when()
        )
        self.timers = [timer for timer in self.timers if timer.when() > self._now]
        self._note(f"it is {self._now:g} s")


# -- the requests and the account -----------------------------------------------------------------------------------


class Request:
    """A handler at the gate, in the relay's shape: every end may call ``leave``, and its last act does."""

    def __init__(self, world: World, ask: Ask) -> None:
        self._world = world
        self.ask = ask
        self.name = ask.name
        self.weight = ask.weight
        self.account = "not there"
        self.number = -1
        self.deadline = float("inf")
        self.endpoint = ""
        self.task: asyncio.Task[None] | None = None
        self._admission: Admission | None = None
        self._at_upstream: asyncio.TimerHandle | None = None
        self._raised = False
        self.bounces = 1
        self._ended: asyncio.Future[GatewayError | None] = world.loop.create_future()

    def begin(self) -> None:
        self.task = self._world.loop.create_task(self._serve(), name=self.name)

    def begin_now(self) -> None:
        """Begin inside somebody else's grant: at the gate at once, and a task for the rest."""
        self._enter()
        self.begin()
        # Cancelled before its first step, a task never comes to its own finally.
        self.task.add_done_callback(lambda _task: self._close())

    @property
    def cancellable(self) -> bool:
        return self.task is not None and not self.task.done()

    async def _serve(self) -> None:
        try:
            if self.number < 0:
                self._enter()
            if self.account == "turned away":
                return
            error = await self._ended
            if error is None and self.ask.grant != "sends":
                await self._hold()
        finally:
            self._close()

    def _enter(self) -> None:
        world = self._world
        self.number = next(world.arrivals)
        self.deadline = world.loop.time() + world.scenario.timeout_seconds
        waiting = len(world.waiting())
        taken = self.ask.places is not None and world.waiting_of(self.ask.holder) >= self.ask.places
        self.account = "waits"
        try:
            self._admission = world.gate.enter(
                ADDRESS,
                self.weight,
                granted=self._granted,
                refused=self._refused,
                holder=self.ask.holder,
                places=self.ask.places,
            )
        except GatewayError as error:
            self.account = "turned away"
            world.refusals += 1
            world.note(f"{self.name} is turned away: {error.code}")
            world.law(isinstance(error, Draining) == world.draining, "draining is the answer of a gate that drains")
            if not world.draining and not world.unservable(self, error):
                world.law(waiting >= world.queue_limit or taken, "nobody is refused while there is a place")
                world.law(isinstance(error, QueuePlacesTaken) <= taken, "no share is taken before all of it is")
            return
        world.law(not world.draining, "nobody is let in during a drain")

    async def _hold(self) -> None:
        loop = self._world.loop
        sleeping = loop.create_future()
        timer = None
        if self.ask.hold_seconds is not None:
            timer = loop.call_later(self.ask.hold_seconds, self._wake, sleeping)
        try:
            await sleeping
        except asyncio.CancelledError:
            self._leave(aborted=True)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        self._leave()

    def _wake(self, sleeping: asyncio.Future[None]) -> None:
        if not sleeping.done():
            sleeping.set_result(None)

    def _close(self) -> None:
        at_upstream, self._at_upstream = self._at_upstream, None
        if at_upstream is not None:
            at_upstream.cancel()
        self._leave(aborted=at_upstream is not None)
        self._ended.cancel()

    def _leave(self, *, aborted: bool = False) -> None:
        world = self._world
        if self.account == "holds":
            if aborted and world.scenario.settle_seconds:
                until = world.loop.time() + world.scenario.settle_seconds
                world.settling.append((self.weight, until, self.endpoint))
            world.note(f"{self.name} {'is aborted' if aborted else 'leaves'}")
            self.account = "left"
        elif self.account == "waits":
            world.note(f"{self.name} gives up waiting")
            self.account = "left"
        if self._admission is not None:
            self._admission.leave(aborted=aborted)

    # -- the gate's calls -------------------------------------------------------------------------------------------

    def _granted(self, admission: Admission) -> None:
        world = self._world
        world.note(f"{self.name} is granted")
        world.law(self.account == "waits", f"no grant to the departed: {self.name} {self.account}")
        world.law(not world.draining, "no grant during a drain")
        world.law(world.loop.time() < self.deadline, "no grant at or after the deadline")
        world.law(not any(map(self._overtakes, world.waiting())), "grants in the order of arrival")
        world.grants += 1
        self.account = "holds"
        self._admission = admission
        self.endpoint = admission.endpoint
        world.law(world.held() + world.surely_settling() <= world.cap, "slots in use never exceed the cap")
        world.law(self.endpoint in world.endpoints, "no grant at an endpoint that is not there")
        world.law(world.free(self.endpoint) >= 0, "slots in use never exceed those of an endpoint")
        world.law(
            world.free(self.endpoint) + self.weight >= max(world.free(name) for name in world.endpoints),
            "the endpoint with the most free slots",
        )
        kind, _, other = self.ask.grant.partition(" ")
        if kind == "fails":
            self._leave()
            self._finish(InternalFault())
        elif kind == "raises":
            self.account = "left"
            self._raised = True
            raise RuntimeError("the grant's own mistake")
        elif kind == "sends":
            if self.ask.hold_seconds is not None:
                self._at_upstream = world.loop.call_later(self.ask.hold_seconds, self._upstream_ended)
        elif kind == "bounces":
            self.bounces -= 1
            if self.bounces < 0:
                self._finish(None)
            else:
                self._at_upstream = world.loop.call_later(0, self._bounced)
        elif kind == "ends":
            world.requests[other].end()
        elif kind == "enters":
            world.requests[other].begin_now()
        if kind in ("wakes", "ends", "enters"):
            self._finish(None)

    def _overtakes(self, other: Request) -> bool:
        """Whether the other has come earlier and waits; not if it is just leaving, and will be told next."""
        world = self._world
        leaving = world.loop.time() >= other.deadline or other.weight > world.largest_now()
        return other.number < self.number and not leaving

    def _refused(self, error: GatewayError) -> None:
        world = self._world
        world.note(f"{self.name} is refused: {error.code}")
        if isinstance(error, InternalFault):
            world.law(self._raised, "a bug is told to the one who had it")
        else:
            world.refusals += 1
            world.law(self.account == "waits", f"no refusal to the departed: {self.name} {self.account}")
            world.law(isinstance(error, Draining) == world.draining, "draining is the answer of a gate that drains")
            late = world.loop.time() >= self.deadline
            world.law(isinstance(error, QueueTimeout) <= late, "no time-out before the deadline")
            timely = isinstance(error, QueueTimeout | Draining)
            world.law(timely or world.unservable(self, error), f"no reason to be refused: {error.code}")
        self.account = "refused"
        self._leave()
        self._finish(error)

    # -- other ends -------------------------------------------------------------------------------------------------

    def _upstream_ended(self) -> None:
        self._at_upstream = None
        self._leave()
        self._world.loop.call_soon(self._finish, None)

    def _bounced(self) -> None:
        """Its endpoint refuses connections, which everybody is told before it tries to wait again."""
        world = self._world
        self._at_upstream = None
        if self.endpoint in world.endpoints:
            world.endpoints = {name: slots for name, slots in world.endpoints.items() if name != self.endpoint}
            world.upstream_gate.set_endpoints(world.endpoints)
        world.note(f"{self.name} waits again, if it can")
        self.account = "waits"
        if self._admission is None or not self._admission.put_back():
            self.account = "holds"
            self._leave()
            self._finish(InternalFault())

    def _finish(self, error: GatewayError | None) -> None:
        # Cancelling a task cancels the future it awaits at once, and until its finally has run the gate may still call.
        if not self._ended.done():
            self._ended.set_result(error)

    def end(self) -> None:
        """Made to leave by somebody else's grant."""
        self._leave()
        self._finish(InternalFault())


class World:
    """One run of a scenario: the gate, the requests, and an account of its own."""

    def __init__(
        self, scenario: Scenario, choices: Choices, gate: type[UpstreamGate], trace: list[str] | None = None
    ) -> None:
        self.scenario = scenario
        self.cap = scenario.cap
        self.draining = False
        self.arrivals = itertools.count()
        self.queue_limit = scenario.queue_limit
        self.endpoints = dict(scenario.endpoints)
        self.grants = 0
        self.refusals = 0
        self.settling: list[tuple[int, float, str]] = []
        self._trace = trace
        self._broken: str | None = None
        self._cancellations = scenario.cancellations
        self.loop = ExplorerLoop(choices, slow=scenario.slow, trace=trace)
        limits = scenario.limits(cap=self.cap, queue_limit=self.queue_limit)
        self.upstream_gate = gate(loop=self.loop, upstream="reasoning", limits=limits, endpoints=self.endpoints)
        self.gate = Gate({ADDRESS: self.upstream_gate})
        self.requests = {ask.name: Request(self, ask) for ask in scenario.asks}

    # -- the account ------------------------------------------------------------------------------------------------

    def waiting(self) -> list[Request]:
        """Who waits, by the account, in the order of arrival."""
        waiting = [request for request in self.requests.values() if request.account == "waits"]
        return sorted(waiting, key=lambda request: request.number)

    def waiting_of(self, holder: str | None) -> int:
        return sum(request.ask.holder == holder for request in self.waiting())

    def held(self) -> int:
        return sum(request.weight for request in self.requests.values() if request.account == "holds")

    def surely_settling(self) -> int:
        return sum(weight for weight, until, _where in self.settling if until > self.loop.time())

    def tell_limits(self) -> None:
        limits = self.scenario.limits(cap=self.cap, queue_limit=self.queue_limit)
        self.upstream_gate.resize(upstream="reasoning", limits=limits, endpoints=self.endpoints)

    def taken(self, endpoint: str) -> int:
        held = (one for one in self.requests.values() if one.account == "holds" and one.endpoint == endpoint)
        now = self.loop.time()
        settling = sum(weight for weight, until, where in self.settling if where == endpoint and until > now)
        return sum(one.weight for one in held) + settling

    def free(self, endpoint: str) -> float:
        slots = self.endpoints[endpoint]
        return float("inf") if slots is None else slots - self.taken(endpoint)

    def room(self) -> float:
        """What the cap leaves: of all slots, and at the endpoints that answer, one fewer than they have."""
        free = self.cap - self.held() - self.upstream_gate.statistics().slots_settling
        if None in self.endpoints.values():
            return free
        if not self.endpoints:
            return 0
        spare = max(1, sum(self.endpoints.values()) - 1) - sum(self.taken(name) for name in self.endpoints)
        return min(free, spare, max(self.free(name) for name in self.endpoints))

    def unservable(self, request: Request, error: GatewayError) -> bool:
        """Whether no room could ever be enough; then the error has to say whether waiting would have helped."""
        heavy = request.weight > self.scenario.largest(self.cap)
        self.law(isinstance(error, TooManySequences) == heavy, "too heavy is who could never be served")
        return isinstance(error, TooManySequences | UpstreamUnavailable) and request.weight > self.largest_now()

    def largest_now(self) -> int:
        if None in self.endpoints.values():
            return self.cap
        slots = self.endpoints.values()
        return min(self.cap, max(1, sum(slots) - 1), max(slots)) if slots else 0

    def note(self, what: str) -> None:
        if self._trace is not None:
            self._trace.append(f"    {what}")

    def law(self, holds: bool, law: str) -> None:
        """The first law that is broken is the one to tell; not raised here, because the gate survives what raises."""
        if not holds and self._broken is None:
            self._broken = law
            self.note(f"BROKEN: {law}")

    def check(self) -> None:
        """What must hold between any two callbacks."""
        gate = self.upstream_gate.statistics()
        waiting = self.waiting()
        held = self.held()
        self.law(gate.slots_in_use <= held, f"no leak: {gate.slots_in_use} slots in use, {held} are held")
        self.law(gate.slots_in_use >= held, f"no double release: {gate.slots_in_use} slots in use, {held} are held")
        surely = self.surely_settling()
        self.law(gate.slots_settling >= surely, "what was aborted settles for its whole time")
        self.law(gate.slots_settling <= sum(weight for weight, _, _ in self.settling), "only the aborted settle")
        self.law(len(waiting) == gate.waiting, f"{gate.waiting} wait, not {len(waiting)}")
        bounced = any(request.bounces < 1 for request in waiting)
        shrunk = self.queue_limit < self.scenario.queue_limit
        self.law(shrunk or bounced or gate.waiting <= self.queue_limit, "waiting never exceeds the limit")
        self.law(not (waiting and self.draining), "nobody waits during a drain")
        for ask in self.scenario.asks:
            share = float("inf") if ask.places is None else ask.places
            self.law(bounced or self.waiting_of(ask.holder) <= share, f"no more of {ask.holder} wait than may")
        self.law(all(one.weight <= self.largest_now() for one in waiting), "nobody waits for what there could never be")
        if waiting:
            self.law(waiting[0].weight > self.room(), f"no lost wake-up: {waiting[0].name} waits and would fit")
        armed = [
            timer
            for timer in (*self.loop.timers, *self.loop.ready)
            if not timer.cancelled() and getattr(timer._callback, "__self__", None) is self.upstream_gate
        ]
        expected = len(waiting) + len(self.upstream_gate._settling)
        self.law(len(armed) == expected, f"{len(armed)} timers of the gate are armed, not {expected}")
        self.law(not self.loop.complaints, f"the loop complained: {self.loop.complaints}")

    def check_at_the_end(self) -> None:
        for request in self.requests.values():
            if request.task is None:
                continue
            self.law(request.task.done(), f"no lost wake-up: {request.name} {request.account} for ever")
            if request.task.done() and not request.task.cancelled() and request.task.exception() is not None:
                self.law(False, f"{request.name} failed: {request.task.exception()!r}")
        gate = self.upstream_gate.statistics()
        counts = (gate.slots_in_use, gate.slots_settling, gate.waiting)
        self.law(counts == (0, 0, 0), f"all counts are zero at the end: {counts}")
        self.law((self.grants, self.refusals) == (gate.grants_total, sum(gate.refusals_total.values())), "totals")

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for ask in self.scenario.asks:
            if any(f"enters {ask.name}" == other.grant for other in self.scenario.asks):
                continue
            request = self.requests[ask.name]
            if ask.at_seconds:
                self._at(ask.at_seconds, request.begin)
            else:
                request.begin()  # its first step is ready, with those of all the others
        for event in self.scenario.events:
            self._at(event.at_seconds, event.call, self)
        asyncio._set_running_loop(self.loop)
        try:
            for _ in range(MAX_STEPS):
                if not self._step():
                    self.check_at_the_end()
                    break
                self.check()
                if self._broken is not None:
                    break
            else:
                self.law(False, f"at rest after {MAX_STEPS} steps")
        finally:
            asyncio._set_running_loop(None)
            self._clear_away()
        if self._broken is not None:
            raise LawBrokenError(self._broken)

    def _at(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        if seconds:
            self.loop.call_later(seconds, call, *args)
        else:
            self.loop.call_soon(call, *args)

    def _step(self) -> bool:
        interference = []
        if self._cancellations:
            interference = [
                (f"{request.name} is cancelled", lambda request=request: self._cancel(request))
                for request in self.requests.values()
                if request.cancellable
            ]
        if self.loop.step(interference):
            return True
        # All is at rest.  Those who hold until their client leaves now see it leave; after that it is the end.
        patient = [one for one in self.requests.values() if one.account == "holds" and one.cancellable]
        for request in patient:
            request.task.cancel()
        return bool(patient)

    def _cancel(self, request: Request) -> None:
        self._cancellations -= 1
        request.task.cancel()

    def _clear_away(self) -> None:
        """A run that was given up leaves tasks behind, which would complain when they are collected."""
        for request in self.requests.values():
            if request.task is not None and not request.task.done():
                request.task._log_destroy_pending = False
                with contextlib.suppress(Exception):
                    request.task.get_coro().close()


# -- the search -----------------------------------------------------------------------------------------------------


class LawBrokenError(Exception):
    """A law of the gate does not hold in some schedule."""


class ScheduleError(AssertionError):
    """A schedule in which a law is broken: its ``number`` for ``replay``, and its trace in the message."""

    def __init__(self, number: str, law: str, trace: list[str]) -> None:
        super().__init__("\n".join([f"schedule {number}: {law}", *trace]))
        self.number = number
        self.law = law


@frozen
class Exploration:
    """What was explored: how many schedules, and whether these are all there are."""

    schedules: int
    complete: bool
    longest: int = field(default=0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Grants that raise are meant, and the gate logs each."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def explore(
    scenario: Scenario,
    *,
    gate: type[UpstreamGate] = UpstreamGate,
    limit: int | None = None,
    each: Callable[[str], object] = lambda number: None,
) -> Exploration:
    """Run all schedules of ``scenario``, or the first ``limit``; raises ScheduleError for the first with a fault.

    ``each`` is told the number of each schedule that was good.
    """
    given: list[int] | None = []
    schedules = longest = 0
    with _quiet():
        while given is not None:
            if schedules == limit:
                return Exploration(schedules, complete=False, longest=longest)
            choices = Choices(given, scenario.detours)
            try:
                World(scenario, choices, gate).run()
            except LawBrokenError:
                replay(_number(scenario, choices), [scenario], gate=gate)
                raise AssertionError("a fault that does not show again") from None
            schedules += 1
            each(_number(scenario, choices))
            longest = max(longest, len(choices.taken))
            given = choices.following()
    return Exploration(schedules, complete=True, longest=longest)


def replay(number: str, scenarios: Sequence[Scenario], *, gate: type[UpstreamGate] = UpstreamGate) -> list[str]:
    """Run the one schedule again; returns its trace, or raises ScheduleError with it.

    A number is the scenario's name, ``#``, and a digit for each choice; further choices are 0.
    """
    name, _, digits = number.partition("#")
    (scenario,) = (scenario for scenario in scenarios if scenario.name == name)
    trace: list[str] = []
    choices = Choices([DIGITS.index(digit) for digit in digits], scenario.detours)
    try:
        with _quiet():
            World(scenario, choices, gate, trace).run()
    except LawBrokenError as broken:
        raise ScheduleError(number, str(broken), trace) from None
    return trace


def _number(scenario: Scenario, choices: Choices) -> str:
    digits = "".join(DIGITS[choice] for choice in choices.taken)
    return f"{scenario.name}#{digits.rstrip('0')}"
