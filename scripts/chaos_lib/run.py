"""One chaos run from its first request to the last check."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import frozen

from chaos_lib.audit import (
    Audit,
    ScrapeCheck,
    check_clients,
    check_lines,
    check_metrics,
    check_order,
    check_upstream,
    endings,
)
from chaos_lib.client import Clients, Conversation, Result
from chaos_lib.gateway import GatewayProcess
from chaos_lib.plan import MAX_BODY_BYTES, Plan, plan, simple
from chaos_lib.stub import Stub

RECOUNTED = (str(Path(__file__).with_name("recount.py")),)

HEAVIEST = 3
# So many ask one after another all the time; a queue for most of them, so that there is an order to keep.
STEADY_CLIENTS = 28
# And so many more at once, now and then, which the queue cannot all take.
BURST_CLIENTS = 40
REQUESTS_BETWEEN_BURSTS = 400
REQUESTS_BETWEEN_OUTAGES = 700
OUTAGE_SECONDS = 0.05
REFUSED_PAUSE_SECONDS = 0.02
QUEUE_LIMIT = 32
# Enough for a queue that moves, not for one behind requests that hang; slots that settle long make it move slowly.
QUEUE_TIMEOUT_SECONDS = 0.25
QUEUE_TIMEOUT_SETTLES = 2
SILENCE_SECONDS = 0.3
# Now and then the gateway stands still for longer than its upstream may be silent, and what came meanwhile must count.
REQUESTS_BETWEEN_STALLS = 2000
STALL_OF_GATEWAY_SECONDS = SILENCE_SECONDS + 0.1
STALL_SECONDS = 0.5
DRAINING_CLIENTS = 20
DRAINED_ANSWER_MS = 400

REFUSED_IN_DRAIN = ((503, "draining"), (503, "queue_timeout"), (503, "queue_too_slow"))

MIN_ABNORMAL = 0.3
MIN_SCRAPES = 200
REQUESTS_PER_SCRAPE = 10
# By this share of all scrapes they may lag behind the requests before the clients wait for them.
SCRAPES_BEHIND = 0.02
# The goal, and what a busy machine is allowed to make of it: who is wrong for ever is still found.
GAUGES_ZERO_SECONDS = 0.1
GAUGES_ZERO_AT_LAST_SECONDS = 3.0


@frozen(kw_only=True)
class Options:
    requests: int
    seed: int
    cap: int
    engine_slots: int
    engine_lag_seconds: float
    settle_seconds: float
    scrapes: int | None


class ChaosRun:
    """Starts the stub and the gateway, lets the clients loose, and audits."""

    program: tuple[str, ...] = ("-m", "aiogw")

    def __init__(self, options: Options, directory: Path, progress: Callable[[str], None]) -> None:
        self._options = options
        self._progress = progress
        self._directory = directory
        self._results: list[Result] = []
        self._asked = 0
        self._done = False
        self._own_faults: list[str] = []
        self._stood_still: list[tuple[float, float]] = []
        self._scrapes_in_time = asyncio.Event()
        self._queue_timeout_seconds = QUEUE_TIMEOUT_SECONDS + QUEUE_TIMEOUT_SETTLES * options.settle_seconds
        self._scrapes = self._new_scrapes()
        self.audit = Audit()
        self.summary = ""

    def _new_scrapes(self) -> ScrapeCheck:
        return ScrapeCheck(queue_timeout_seconds=self._queue_timeout_seconds, heaviest=HEAVIEST)

    async def run(self) -> None:
        options = self._options
        asyncio.get_running_loop().set_exception_handler(self._take_fault)
        self._stub = Stub(
            cap=options.cap,
            engine_slots=options.engine_slots,
            engine_lag_seconds=options.engine_lag_seconds,
            seed=options.seed,
        )
        await self._stub.start()
        program = self.program if options.scrapes is None else RECOUNTED
        self._gateway = GatewayProcess(self._directory, self._configuration(), program=program)
        try:
            await self._gateway.start()
            self._clients = Clients(port=self._gateway.port, cap=options.cap, stall_seconds=STALL_SECONDS)
            self._stub.on_start = self._clients.request_started
            self._stub.before_finish = self._clients.slot_frees
            await self._measure()
        finally:
            self._gateway.kill()
            self._stub.stop()

    def _take_fault(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._own_faults.append(f"{context['message']}: {context.get('exception')!r}")

    def _configuration(self) -> dict[str, Any]:
        options = self._options
        server = {
            "listen": "127.0.0.1:0",
            "admin_listen": "127.0.0.1:0",
            "max_connections": 4096,
            "header_timeout_seconds": 10,
            "keepalive_timeout_seconds": 75,
            "body_timeout_seconds": 10,
            "body_min_bytes_per_second": 1 << 16,
            "max_body_bytes": MAX_BODY_BYTES,
            "body_memory_bytes": 1 << 30,
            "response_buffer_bytes": 1 << 16,
            "client_stall_timeout_seconds": STALL_SECONDS,
            "drain_timeout_seconds": 10,
            "first_sign_seconds": 0.1,
            "sign_interval_seconds": 0.1,
            "models_refresh_seconds": 0,
            "log_level": "info",
            "log_format": "json",
        }
        admission = {
            "engine_slots": options.engine_slots,
            "cap": options.cap,
            "queue_limit": QUEUE_LIMIT,
            "queue_timeout_seconds": self._queue_timeout_seconds,
            "retry_after_min_seconds": 1,
            "retry_after_max_seconds": 60,
            "abort_settle_seconds": options.settle_seconds,
        }
        upstream = {
            "url": f"http://127.0.0.1:{self._stub.port}",
            "models": ["reasoning"],
            "connect_timeout_seconds": 2,
            "first_byte_timeout_seconds": SILENCE_SECONDS,
            "idle_timeout_seconds": SILENCE_SECONDS,
            "admission": admission,
        }
        return {"server": server, "auth": {"mode": "none"}, "upstreams": {"reasoning": upstream}}

    async def _measure(self) -> None:
        options, gateway, audit = self._options, self._gateway, self.audit
        # What is made once and kept is made now: numbers from `requests` on are not the chaos's own.
        for extra, surface in enumerate(("openai", "anthropic")):
            await self._one(simple(options.requests + extra, surface=surface))
        await gateway.metrics()
        files_before, resident_before = await self._settled_files(None), gateway.resident_kib()[0]

        began = time.monotonic()
        await self._let_loose()
        seconds = time.monotonic() - began

        await self._check_gauges()
        metrics = await self._final_metrics()
        self._check_remains(files_before, await self._settled_files(set(files_before.values())), resident_before)
        results_before = list(self._results)
        log_before, _ = gateway.read_log()
        check_metrics(audit, log_before, metrics)

        await self._drain()
        log, bad_lines = gateway.read_log()
        self._check_cap()
        check_lines(audit, self._results, log)
        self._check_conservation(log)
        late = self._late(log)
        check_clients(audit, results_before, log_before, self._stub.account, late)
        left_at_grant = self._clients.left_at_grant
        check_upstream(audit, self._results, log, self._stub.account, left_at_grant, late, self._stood_still)
        check_order(audit, log, self._stub.account, late)
        scrapes = self._scrapes
        few = [] if scrapes.count >= (options.scrapes or MIN_SCRAPES) else [f"only {scrapes.count} scrapes"]
        found = f"{scrapes.count} scrapes, at most {scrapes.busiest} slots and {scrapes.deepest} waiting"
        audit.add("every scrape agrees with itself", found, scrapes.faults + few)
        if options.scrapes is not None:
            found = f"{scrapes.recounted} of {scrapes.count} scrapes"
            audit.add("every scrape equals an independent recount", found, scrapes.unlike)
        audit.add(
            "no error in the log, each line as its schema", f"{sum(1 for _ in gateway.log_lines())} lines", bad_lines
        )
        audit.add("no fault of the chaos itself", "", self._own_faults)
        self.summary = self._summary(log, seconds)

    # -- the load ---------------------------------------------------------------------------------------------------

    async def _let_loose(self) -> None:
        options = self._options
        plans = (plan(options.seed, number) for number in range(options.requests))
        scraping = asyncio.ensure_future(self._scrape())
        steady = [asyncio.ensure_future(self._client(plans)) for _ in range(STEADY_CLIENTS)]
        extras: list[asyncio.Future[None]] = []
        bursts = outages = stalls = 1
        while not all(task.done() for task in steady):
            await asyncio.sleep(0.01)
            if self._asked >= bursts * REQUESTS_BETWEEN_BURSTS:
                bursts += 1
                extras += [asyncio.ensure_future(self._client(plans, requests=1)) for _ in range(BURST_CLIENTS)]
            if self._asked >= outages * REQUESTS_BETWEEN_OUTAGES:
                outages += 1
                await self._stub.outage(OUTAGE_SECONDS)
            if self._asked >= stalls * REQUESTS_BETWEEN_STALLS:
                stalls += 1
                began_at = time.monotonic()
                await self._gateway.stand_still(STALL_OF_GATEWAY_SECONDS)
                self._stood_still.append((began_at, time.monotonic()))
            self._progress(f"{self._asked} of {options.requests} requests, {self._scrapes.count} scrapes")
        await asyncio.gather(*steady, *extras)
        self._done = True
        await scraping

    async def _client(self, plans: Iterator[Plan], requests: int | None = None) -> None:
        kept: Conversation | None = None
        while requests is None or requests > 0:
            one = next(plans, None)
            if one is None:
                break
            await self._scrapes_in_time.wait()
            self._asked += 1
            result, kept = await self._clients.ask(one, kept)
            self._results.append(result)
            if requests is not None:
                requests -= 1
            elif result.status == 503:
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)
        if kept is not None:
            self._clients.drop(kept)

    async def _one(self, one: Plan) -> None:
        result, kept = await self._clients.ask(one, None)
        self._results.append(result)
        if kept is not None:
            self._clients.drop(kept)

    async def _scrape(self) -> None:
        """As many scrapes as the requests ask for, spread over the run."""
        while not self._done:
            behind = self._scrapes_due() - self._scrapes.count
            if behind <= SCRAPES_BEHIND * self._scrapes_wanted:
                self._scrapes_in_time.set()
            else:
                self._scrapes_in_time.clear()
            if behind <= 0:
                await asyncio.sleep(0.002)
                continue
            held_before = self._stub.holding()
            scrape = await self._gateway.scrape()
            self._scrapes.take(scrape.samples)
            if scrape.recount is not None:
                self._scrapes.recount(scrape.samples, scrape.recount)
            held = held_before & self._stub.holding()
            self._scrapes.held_throughout(scrape.samples, sum(one.weight for one in held))

    @property
    def _scrapes_wanted(self) -> int:
        return self._options.scrapes or max(MIN_SCRAPES, self._options.requests // REQUESTS_PER_SCRAPE)

    def _scrapes_due(self) -> float:
        """A few more than are wanted, so that none of them has to be taken when the load has ended."""
        return (1 + 2 * SCRAPES_BEHIND) * self._scrapes_wanted * len(self._results) / self._options.requests + 1

    def _late(self, log: list[dict[str, Any]]) -> set[str]:
        """The requests under which the stub stood still; of one that it never saw, the gateway's log says when."""
        stub = self._stub
        late = {one.request_id for one in stub.account if stub.was_late(one.started_at, one.ended_at)}
        to_monotonic = time.monotonic() - time.time()
        for line in log:
            if line["outcome"] == "upstream_timeout":
                ended_at = datetime.fromisoformat(line["time"]).timestamp() + to_monotonic
                if stub.was_late(ended_at - line["duration_seconds"], ended_at):
                    late.add(line["request_id"])
        return late

    # -- the checks -------------------------------------------------------------------------------------------------

    async def _check_gauges(self) -> None:
        """From the moment in which the last socket of a client is closed, which is now."""
        began = time.monotonic()
        names = [
            f'aiogw_{name}{{upstream="reasoning"}}'
            for name in ("slots_in_use", "slots_settling", "queue_requests", "queue_oldest_wait_seconds")
        ]
        while True:
            metrics = await self._gateway.metrics()
            seconds = time.monotonic() - began
            left = [f"{name} is still {metrics[name]:g}" for name in names if metrics[name]]
            if not left or seconds > GAUGES_ZERO_AT_LAST_SECONDS + self._options.settle_seconds:
                break
        found = f"{seconds * 1000:.0f} ms after the last socket closed"
        if self._clients.open:
            left.append(f"{len(self._clients.open)} connections of clients are open")
        goal = GAUGES_ZERO_SECONDS + self._options.settle_seconds
        note = "" if seconds <= goal else f" (the goal is {goal * 1000:.0f}: a busy machine?)"
        self.audit.add("all gauges are zero", found + note, left)

    async def _final_metrics(self) -> dict[str, float]:
        """When every ended request has been counted: the last line may be a turn of the loop behind the last gauge."""
        last: float = -1
        while True:
            metrics = await self._gateway.metrics()
            ended = sum(value for name, value in metrics.items() if name.startswith("aiogw_requests_total"))
            if ended == last:
                return metrics
            last = ended
            await asyncio.sleep(0.2)

    async def _settled_files(self, expected: set[str] | None) -> dict[str, str]:
        """The gateway's descriptors once the stub has closed what was kept; ``expected`` are waited for."""
        self._stub.drop_idle()
        deadline = time.monotonic() + GAUGES_ZERO_AT_LAST_SECONDS
        while True:
            await asyncio.sleep(0.1)
            files = self._gateway.open_files()
            if expected is None or set(files.values()) <= expected or time.monotonic() > deadline:
                return files

    def _check_remains(self, before: dict[str, str], after: dict[str, str], resident_before: int) -> None:
        gateway, audit = self._gateway, self.audit
        more = [f"{number}: {name}" for number, name in after.items() if name not in before.values()]
        audit.add("no descriptor is left", f"{len(before)} before, {len(after)} after", more)
        stuck = gateway.close_wait()
        audit.add("no socket in CLOSE_WAIT", len(stuck), stuck)
        now, most = gateway.resident_kib()
        grown = f"{resident_before / 1024:.1f} MiB before, {now / 1024:.1f} after, {most / 1024:.1f} at most"
        audit.add("resident memory", grown)

    async def _drain(self) -> None:
        """SIGTERM while some run and some wait: the ones finish, the others are refused."""
        first = self._options.requests + 2
        plans = [simple(first + number, delay_ms=DRAINED_ANSWER_MS // 2) for number in range(DRAINING_CLIENTS)]
        began_at = time.monotonic()
        asking = [asyncio.ensure_future(self._one(one)) for one in plans]
        waiting = 'aiogw_queue_requests{upstream="reasoning"}'
        deadline = time.monotonic() + GAUGES_ZERO_AT_LAST_SECONDS
        # By the estimate of what came before, some may be told at once that it would take too long.
        while (await self._gateway.metrics())[waiting] + sum(task.done() for task in asking) < (
            DRAINING_CLIENTS - self._options.cap
        ):
            if time.monotonic() > deadline:
                break
        self._gateway.terminate()
        await asyncio.gather(*asking)
        self._gateway.hang_up()
        code = await self._gateway.exit_code(15)
        results = self._results[-DRAINING_CLIENTS:]
        served = [result for result in results if result.status == 200 and result.complete]
        refused = [result for result in results if (result.status, result.code) in REFUSED_IN_DRAIN]
        late = self._stub.was_late(began_at, time.monotonic())
        faults = [
            f"{result.request_id}: {result.status} {result.code} {result.lost}"
            for result in results
            if result not in served and result not in refused and not (late and result.code == "upstream_timeout")
        ]
        if code != 0:
            faults.append(f"it ended with {code}")
        found = f"{len(served)} served, {len(refused)} refused, exit code {code}"
        self.audit.add("a stop serves who runs and refuses who waits", found, faults)

    def _check_cap(self) -> None:
        options, stub, audit = self._options, self._stub, self.audit
        found = f"at most {stub.peak} of {options.cap} in {len(stub.account)} grants"
        audit.add("never more sequences than the cap at the upstream", found, [", ".join(ids) for ids in stub.over_cap])
        found = f"at most {stub.engine_peak} of {options.engine_slots}, up to {options.engine_lag_seconds:g} s late"
        audit.add("never more in the engine than it has slots", found, [", ".join(ids) for ids in stub.over_slots])
        audit.add("no request before the last answer has ended", "", stub.too_early)
        held = [one.request_id for one in stub.account if one.ended is None]
        audit.add("nothing is left at the upstream", "", held)

    def _check_conservation(self, log: list[dict[str, Any]]) -> None:
        ended = endings(log)
        abnormal = 1 - ended["completed"] / len(log)
        arrived = sum(result.head_sent for result in self._results)
        lines = {line["request_id"] for line in log}
        unseen = sum(result.head_sent and result.request_id not in lines for result in self._results)
        told = sum(ended.values())
        faults = [] if arrived == told + unseen else [f"{arrived} arrived, {told} ended and {unseen} were never seen"]
        if abnormal < MIN_ABNORMAL:
            faults.append(f"only {abnormal:.0%} ended abnormally")
        found = f"{arrived} sent = {told} ended + {unseen} unseen; {abnormal:.0%} abnormal"
        self.audit.add("conservation", found, faults)

    def _summary(self, log: list[dict[str, Any]], seconds: float) -> str:
        ended = endings(log)
        width = max(len(name) for name in ended)
        lines = [f"      {name:{width}}  {count:7}" for name, count in sorted(ended.items())]
        stub, requests = self._stub, self._options.requests
        lines.append(
            f"{requests} requests in {seconds:.0f} s ({requests / seconds:.0f} a second), {stub.outages} outages, "
            f"{len(self._clients.left_at_grant)} left in the tick of their grant"
        )
        return "\n".join(lines)
