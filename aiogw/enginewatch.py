"""What an engine says of its own queue, asked in the background and told to whoever scrapes.

It finds traffic that bypasses the gateway, and engines that go on with what nobody waits for any more.  It decides
nothing: no cap is ever raised or lowered by it.  Nothing here may know a dialect or a client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from attrs import frozen
from prometheus_client.parser import text_string_to_metric_families

from aiogw.errors import GatewayError, UpstreamBroken, UpstreamUnavailable
from aiogw.upstream.asking import ask
from aiogw.upstream.endpoints import Upstream
from aiogw.upstream.pool import UpstreamPool

log = logging.getLogger(__name__)

ASK_TIMEOUT_SECONDS = 5.0
# A vLLM 0.32 with one model shows 60 to 100 KiB.
MAX_METRICS_BYTES = 4 << 20
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"


@frozen(kw_only=True)
class EngineReading:
    """Sequences at the engines of one upstream, by their own word.

    ``drift_requests`` is how many more they are than the gateway has at work there; below zero: fewer.
    """

    running_requests: int
    waiting_requests: int
    drift_requests: int


class EngineWatch:
    """Reads the engines' metrics; ``readings`` has what was read last, by upstream, and nothing that is out of date."""

    def __init__(self) -> None:
        self.readings: dict[str, EngineReading] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._silent: set[str] = set()

    def start(self, upstreams: Mapping[Upstream, float], *, at_work: Callable[[str], int]) -> None:
        """Ask each upstream every so many seconds, and from now on only these; 0: never.

        ``at_work`` is the gateway's own count of the sequences at an upstream.
        """
        for task in self._tasks:
            task.cancel()
        self.readings.clear()
        self._tasks = [
            asyncio.create_task(self._keep_asking(upstream, every_seconds, at_work))
            for upstream, every_seconds in upstreams.items()
            if every_seconds
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_asking(self, upstream: Upstream, every_seconds: float, at_work: Callable[[str], int]) -> None:
        name = upstream.name
        while True:
            try:
                pools = upstream.pools()
                if not pools:
                    raise UpstreamUnavailable(upstream=name, reason="no endpoint answers")
                answers = await asyncio.gather(*(_read(name, pool) for pool in pools))
            except (GatewayError, TimeoutError) as error:
                self.readings.pop(name, None)
                if name not in self._silent:
                    log.warning("no metrics from the upstream %s: %s", name, str(error) or "it took too long")
                self._silent.add(name)
            else:
                self._silent.discard(name)
                running, waiting = (sum(one[which] for one in answers) for which in (0, 1))
                self.readings[name] = EngineReading(
                    running_requests=running,
                    waiting_requests=waiting,
                    drift_requests=running + waiting - at_work(name),
                )
            await asyncio.sleep(every_seconds)


async def _read(upstream: str, pool: UpstreamPool) -> tuple[int, int]:
    """Running and waiting, summed over an endpoint's engines and models; raises UpstreamFault or TimeoutError."""
    body = await ask(
        upstream,
        pool,
        "/metrics",
        accept="text/plain",
        max_bytes=MAX_METRICS_BYTES,
        timeout_seconds=ASK_TIMEOUT_SECONDS,
    )
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(body.decode()):
            if family.name in (RUNNING, WAITING):
                sums[family.name] = sum(sample.value for sample in family.samples)
        return int(sums[RUNNING]), int(sums[WAITING])
    except (ValueError, OverflowError) as error:
        raise UpstreamBroken(upstream=upstream, reason=f"its metrics cannot be read ({error})") from None
    except KeyError as error:
        raise UpstreamBroken(upstream=upstream, reason=f"its metrics have no {error.args[0]}") from None
