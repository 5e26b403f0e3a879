"""The event decoder: the same events however the bytes are cut, and never more work than bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogw.sse import EventSplitter, EventTooLarge, event_data

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts/vllm-0.32").glob("*stream*.body.txt"))


def decode(pieces: list[bytes], *, max_event_bytes: int = 1 << 20) -> list[bytes]:
    splitter = EventSplitter(max_event_bytes=max_event_bytes)
    events = [event for piece in pieces for event in splitter.feed(piece)]
    events.append(splitter.rest)
    assert b"".join(events) == b"".join(pieces)
    return [data for event in events if (data := event_data(event)) is not None]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a \n\n", [b" a "]),
        (b"data: a\r\n\r\n", [b"a"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\n\r\ndata: b\r\n\ndata: c\r\n\r\n", [b"a", b"b", b"c"]),
        (b"data: a\r\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b": comment\n\ndata: a\n\n", [b"a"]),
        (b"event: x\nid: 7\nretry: 1\nother: y\ndata: a\n\n", [b"a"]),
        (b"event: x\n\ndata\n\ndata:\n\ndata: \n\n", []),
        (b"\n\n\n\ndata: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\n\ndata: [DONE]", [b"a", b"[DONE]"]),
        (b"", []),
    ],
)
def test_events_of_every_spelling(stream: bytes, expected: list[bytes]) -> None:
    """S41, S42: every line end, a BOM, optional space, joined lines, comments and unknown fields are understood."""
    assert decode([stream]) == expected
    assert decode([stream[at : at + 1] for at in range(len(stream))]) == expected


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_transcripts_cut_in_two_anywhere(path: Path, line_end: bytes) -> None:
    """S40, S41: a recorded stream gives the same events wherever one read ends and the next begins."""
    stream = path.read_bytes()[:1600].replace(b"\n", line_end)
    expected = decode([stream])
    assert len(expected) >= 2
    assert all(decode([stream[:at], stream[at:]]) == expected for at in range(len(stream)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_cut_anywhere(data: st.DataObject) -> None:
    """S40 to S42: whatever the bytes, the events do not depend on how they are cut, and no byte is lost."""
    alphabet = st.sampled_from([b"\n", b"\r", b"\r\n", b"data: ", b"data:", b"x", b":", b" ", b"\xef\xbb\xbf", b"\xe6"])
    stream = b"".join(data.draw(st.lists(alphabet, max_size=30)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decode(pieces) == decode([stream])


def test_an_event_that_is_not_complete_is_held_back_as_bytes() -> None:
    """R42, S40: a character whose bytes arrive in two reads is whole in its event."""
    splitter = EventSplitter(max_event_bytes=100)
    encoded = "data: 渐\n\n".encode()
    assert list(splitter.feed(encoded[:7])) == []
    assert splitter.rest == encoded[:7]
    assert list(splitter.feed(encoded[7:])) == [encoded]
    assert splitter.rest == b""


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_came_before_an_oversized_event_is_not_lost(size: int) -> None:
    """S44: an event over the cap is a failure, after the events before it have been handed over."""
    stream = b"data: a\n\n" + b"data: " + b"b" * 50 + b"\n\n"
    splitter = EventSplitter(max_event_bytes=40)
    events: list[bytes] = []

    def feed_all() -> None:
        for at in range(0, len(stream), size):
            events.extend(splitter.feed(stream[at : at + size]))

    with pytest.raises(EventTooLarge, match="larger than 40 bytes"):
        feed_all()
    assert events == [b"data: a\n\n"]


class Counting(EventSplitter):
    """Counts the bytes that are searched for the end of an event."""

    searched = 0

    def _blank_line_end(self, source: bytes | bytearray, position: int) -> int:
        found = super()._blank_line_end(source, position)
        self.searched += (found or len(source)) - position
        return found


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"], ids=repr)
def test_no_byte_is_searched_again(end: bytes) -> None:
    """S45: but for the one or two at the edge of each piece, however many pieces an event comes in."""
    splitter = Counting(max_event_bytes=1 << 30)
    pieces = [b"data: " + b"x" * 2000, *[b"x" * 2000] * 1000, end, b"data: short" + end]
    assert 2 == sum(len(list(splitter.feed(piece))) for piece in pieces)
    assert splitter.searched <= sum(map(len, pieces)) + 2 * len(pieces)
