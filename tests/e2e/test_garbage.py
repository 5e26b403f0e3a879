"""What a request leaves behind in memory: nothing that only the garbage collector could find."""

from __future__ import annotations

import gc

import pytest
from rig import Rig, RunningGateway, Surface, answer

REQUESTS = 10


@pytest.mark.parametrize(("model", "status"), [("reasoning", 200), ("nobody", 404), ("broken", 502)])
async def test_a_request_leaves_no_cycle(rig: Rig, surface: Surface, stream: bool, model: str, status: int) -> None:
    """All of a request goes when it ends, served or refused: thousands of refusals give the collector nothing to do."""
    # R23
    upstream = await rig.upstream(answer)
    broken = await rig.upstream(lambda exchange: exchange.close())
    others = {"broken": upstream_like(broken.url)}
    gateway = await rig.gateway(upstream, others=others)
    await ask_often(rig, gateway, surface, model, status, stream=stream)  # what is made once is not what is counted
    gc.collect()
    gc.disable()
    try:
        await ask_often(rig, gateway, surface, model, status, stream=stream)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("aiogw.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert left == []


def upstream_like(url: str) -> dict[str, object]:
    """An upstream without a gate, for another model."""
    times = {f"{name}_timeout_seconds": 5 for name in ("connect", "first_byte", "idle")}
    return {"url": url, "models": ["broken"], "admission": "unlimited", **times}


async def ask_often(
    rig: Rig, gateway: RunningGateway, surface: Surface, model: str, status: int, *, stream: bool
) -> None:
    for _ in range(REQUESTS):
        response = await rig.ask(gateway, surface, 1, stream=stream, model=model)
        assert response.status == status
    await gateway.settled()
