"""Fixtures for all tests that need sockets."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("rig")

from rig import LINES, SURFACES, Rig, Surface, rigged  # noqa: E402 - after its asserts have been announced

from aiogw.record import JsonFormatter, TextFormatter  # noqa: E402


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A handler that a command has set up writes to the standard error of its test, which is closed after it."""
    root = logging.getLogger()
    level = root.level
    yield
    root.handlers[:] = [one for one in root.handlers if not isinstance(one.formatter, JsonFormatter | TextFormatter)]
    root.setLevel(level)


@pytest.fixture
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """What starts upstreams, gateways and clients, and checks afterwards that nothing is left of them."""
    async with rigged(tmp_path) as one:
        parameters = getattr(request.node, "callspec", None)
        one.third_dialect = parameters is not None and parameters.params.get("surface") is LINES
        yield one


@pytest.fixture(params=SURFACES, ids=lambda surface: surface.name)
def surface(request: pytest.FixtureRequest) -> Surface:
    return request.param


@pytest.fixture(params=(False, True), ids=("whole", "stream"))
def stream(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=(False, True), ids=("in-process", "daemon"))
def process(request: pytest.FixtureRequest) -> bool:
    """Whether the gateway is to be the real process."""
    return request.param
