"""Requests that were damaged at random, against the whole gateway: never an error of its own, a hang or a lost slot."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from typing import Any

import pytest
from rig import ANTHROPIC, LINES, OPENAI, RawClient, Rig, Surface, answer

REQUESTS = 150
CLIENTS = 5

RICH: dict[str, dict[str, Any]] = {
    "openai": {
        "n": 1,
        "stop": ["x"],
        "seed": 12345678901234567890,
        "stream_options": {"include_usage": False},
        "tools": [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}],
        "logit_bias": {"50256": -100},
    },
    "anthropic": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "tag:1"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"p": [1, 2.5, None]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "ok"}]},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}},
                ],
            },
        ],
        "tools": [{"name": "ls", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "w"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "metadata": {"user_id": "{}"},
        "stop_sequences": ["x"],
        "temperature": 1,
    },
    "lines": {"max_tokens": 5},
}

# What stands in for a value, as text, since not all of it is JSON that Python would write.
VALUES = [
    b"null",
    b"true",
    b"0",
    b"-1",
    b"1e999",
    b"1e-5",
    b"9" * 400,
    b"NaN",
    b'""',
    b'"x"',
    b'"\\ud83d"',
    b"[]",
    b"{}",
]
VALUES += [
    b"[[]]",
    b'[{"type":"x"}]',
    b'{"type":"tool_use"}',
    b"[" * 3000 + b"]" * 3000,
    b'"\xff"',
    b'"\x00"',
    b"1" * 5000,
]
MARK = "\u2603"


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every container in ``document`` with each of its keys."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [place for key, value in items for place in ((document, key), *places(value))]


def damaged(surface: Surface, dice: random.Random) -> bytes:
    """A request in which a value was replaced or taken away, or some of whose bytes were."""
    sent = json.loads(surface.body(1, stream=dice.random() < 0.5, **RICH[surface.name]))
    document = copy.deepcopy(sent)
    for _ in range(dice.randrange(3)):
        if here := places(document):
            container, key = dice.choice(here)
            if dice.random() < 0.3:
                del container[key]
            else:
                container[key] = MARK
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    while (mark := f'"{MARK}"'.encode()) in body:
        body = body.replace(mark, dice.choice(VALUES), 1)
    for _ in range(dice.choice((0, 0, 0, 1, 5))):
        start = dice.randrange(len(body) + 1)
        body = body[:start] + dice.randbytes(dice.randrange(3)) + body[start + dice.randrange(4) :]
    return body


@pytest.mark.parametrize("surface", [OPENAI, ANTHROPIC, LINES], ids=lambda surface: surface.name)
@pytest.mark.parametrize("accounting", [False, True], ids=["plain", "edited"])
async def test_damaged_requests(rig: Rig, surface: Surface, accounting: bool) -> None:
    """Q6, E18: each is served, or refused in its surface's shape as the client's fault, on the same connection."""
    dice = random.Random(f"{surface.name} {accounting}")
    upstream = await rig.upstream(answer)
    dialect = {"accounting": accounting, "body_defaults": {"top_k": 1} if accounting else {}}
    gateway = await rig.gateway(upstream, cap=2, dialect=dialect, server={"first_sign_seconds": 0.001})
    statuses: Counter[int] = Counter()

    async def ask(client: RawClient) -> None:
        for _ in range(REQUESTS // CLIENTS):
            body = damaged(surface, dice)
            await client.post(surface.path, body)
            response = await client.response()
            assert response.status < 500, (response.status, response.body, body)
            assert response.complete
            if response.status != 200:
                assert surface.error(response)
            statuses[response.status] += 1

    clients = [await rig.client(gateway) for _ in range(CLIENTS)]
    await asyncio.gather(*map(ask, clients))
    # Neither is the fuzz toothless, nor does it break everything.
    assert statuses[200] > REQUESTS // 10
    assert sum(statuses.values()) - statuses[200] > REQUESTS // 10
    assert upstream.peak <= 2
    await rig.check_usable(gateway, upstream)
