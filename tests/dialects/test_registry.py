"""The registry of dialects: a path leads to one of them."""

from __future__ import annotations

import pytest
from attrs import evolve

from aiogw.dialects import DIALECTS, detect
from aiogw.dialects.openai import OPENAI


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_mount_and_what_is_below_it(dialect: object) -> None:
    """The mount itself, with and without a slash, and everything under it belong to its dialect."""
    for path in ("", "/", "/v1/models", "//", "/a b"):
        assert dialect is detect(f"{dialect.mount}{path}")  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/", "", "/v1x", "/llmx", "/V1/models", "/metrics", "*", "/x/v1"])
def test_a_path_below_no_mount(path: str) -> None:
    """The first dialect answers for it, so that even a wrong path gets an error in a form that is somebody's."""
    assert DIALECTS[0] is detect(path)


def test_openai_is_the_first() -> None:
    """What most clients speak is what a lost one is answered in."""
    assert OPENAI is DIALECTS[0]


def test_other_dialects_can_be_served() -> None:
    """Who serves decides what is registered; the order is that of the registry given."""
    one = evolve(OPENAI, name="one", mount="/one")
    other = evolve(OPENAI, name="other", mount="/other")
    assert other is detect("/other/v1", (one, other))
    assert one is detect("/v1", (one, other))
