"""The feed: who watches gets all changes or a fresh snapshot, and nothing is kept for anybody."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from rig import eventually

from aiogw.status import feed as feed_module
from aiogw.status.feed import Feed
from aiogw.status.snapshot import merge


class Source:
    """A document that a test changes, and a count of how often it was asked for."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {"time": 1.0, "upstreams": {}}
        self.asked = 0
        self.fails = False

    def read(self) -> dict[str, Any]:
        self.asked += 1
        if self.fails:
            raise RuntimeError("no reading")
        return self.document

    def change(self, **members: Any) -> None:
        self.document = self.document | members


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(feed_module, "INTERVAL_SECONDS", 0.01)
    return Source()


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data, *rest = event.decode().split("\n")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def following(events: AsyncGenerator[bytes, None]) -> tuple[str, dict[str, Any]]:
    return parsed(await anext(events))


async def test_a_snapshot_then_changes(source: Source) -> None:
    """Each change is what has changed, with the time; merged, they are the document."""
    feed = Feed(source.read)
    async with aclosing(feed.events()) as events:
        name, document = await following(events)
        assert ("snapshot", source.document) == (name, document)
        source.change(time=2.0, a={"x": 1, "y": 2})
        name, change = await following(events)
        assert ("change", {"time": 2.0, "a": {"x": 1, "y": 2}}) == (name, change)
        document = merge(document, change)
        source.change(time=3.0, a={"y": 2})
        name, change = await following(events)
        assert ("change", {"time": 3.0, "a": {"x": None}}) == (name, change)
        assert source.document == merge(document, change)


async def test_nobody_watches_and_nothing_is_read(source: Source) -> None:
    """Before the first watcher and after the last one, the gateway is not asked."""
    feed = Feed(source.read)
    assert 0 == source.asked
    async with aclosing(feed.events()) as one, aclosing(feed.events()) as other:
        await anext(one)
        await anext(other)
        assert (1, 2) == (source.asked, feed.watchers)
    assert 0 == feed.watchers
    task = feed._ticking
    assert task is None
    asked = source.asked
    async with aclosing(feed.events()) as again:
        source.change(time=5.0, b=1)
        assert ("snapshot", source.document) == await following(again)
    assert asked + 1 == source.asked


async def test_a_watcher_that_falls_behind_gets_a_snapshot(source: Source) -> None:
    """One that has missed a change starts anew, and the other one has had them all."""
    feed = Feed(source.read)
    async with aclosing(feed.events()) as quick, aclosing(feed.events()) as slow:
        await anext(quick)
        await anext(slow)
        for number in range(3):
            source.change(time=2.0 + number, number=number)
            assert ("change", {"time": 2.0 + number, "number": number}) == await following(quick)
        assert ("snapshot", source.document) == await following(slow)
        source.change(time=9.0, number=9)
        assert ("change", {"time": 9.0, "number": 9}) == await following(slow)


async def test_silence_is_said(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to tell, a watcher hears the time, so that it can tell silence from a dead peer."""
    monkeypatch.setattr(feed_module, "HEARTBEAT_SECONDS", 0.05)
    async with aclosing(Feed(source.read).events()) as events:
        await anext(events)
        source.change(time=7.0)
        assert ("change", {"time": 7.0}) == await following(events)


async def test_closing_ends_all(source: Source) -> None:
    """Whoever watches is not waited for when the gateway stops."""
    feed = Feed(source.read)
    events = feed.events()
    await anext(events)
    feed.close()
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    assert 0 == feed.watchers


async def test_the_last_change_is_told(source: Source) -> None:
    """How the last requests ended is known before the feed ends with the gateway."""
    feed = Feed(source.read)
    async with aclosing(feed.events()) as events:
        await following(events)
        source.change(time=2.0, ended=["a"])
        feed.close()
        assert ("change", {"time": 2.0, "ended": ["a"]}) == await following(events)
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_reading_that_fails_is_not_the_end(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    """It is in the log, and the next one is told."""
    async with aclosing(Feed(source.read).events()) as events:
        await anext(events)
        source.fails = True
        await eventually(lambda: caplog.records)
        source.fails = False
        source.change(time=3.0, c=1)
        assert ("change", {"time": 3.0, "c": 1}) == await following(events)
    assert "the status could not be read" in caplog.text
