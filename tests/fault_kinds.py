"""The kinds of fault a network can have, as data: what each does to a link, and what may come of it.

Which peers a link has is not known here, so what may come of a fault is said of the exchange as such.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from fault_proxy import DOWN, FAR, NEAR, UP, Flow, Link, Step


class Effect(Enum):
    """What may become of the exchange."""

    NONE = "it is as if the fault had not been"
    LOST = "it cannot be completed, and nobody may take it for complete"
    OPEN = "that depends on where the fault strikes: anything but a hang or a lie about the shape"


@dataclass(frozen=True)
class Kind:
    name: str
    effect: Effect
    steps: tuple[Step, ...]


# -- steps ----------------------------------------------------------------------------------------------------------


def pause(seconds: float, *, both: bool = True) -> Step:
    async def step(link: Link, _flow: Flow) -> None:
        if both:
            link.open.clear()
        await asyncio.sleep(seconds)
        link.open.set()

    return step


def in_pieces(*sizes: int, seconds: Callable[[], float] = lambda: 0.0, at_most: int = 1 << 30) -> Step:
    """From here on both ways, so many bytes at a time, each after a while; after ``at_most`` pieces all at once."""

    def way(flow: Flow) -> Callable[[bytes], Awaitable[None]]:
        lengths = itertools.chain(itertools.islice(itertools.cycle(sizes), at_most), itertools.repeat(1 << 16))

        async def forward(data: bytes) -> None:
            while data:
                size = next(lengths)
                await flow.send(data[:size])
                data = data[size:]
                await asyncio.sleep(seconds())

        return forward

    async def step(link: Link, _flow: Flow) -> None:
        for flow in link.flows.values():
            flow.forward = way(flow)

    return step


def gathered(seconds: float) -> Step:
    """What comes within so many seconds goes on in one piece."""

    async def step(_link: Link, flow: Flow) -> None:
        held: list[bytes] = []

        async def release() -> None:
            await asyncio.sleep(seconds)
            flow.forward = flow.send
            if held and not flow.closed:
                await flow.send(b"".join(held))

        async def forward(data: bytes) -> None:
            held.append(data)
            if len(held) == 1:
                # In the flow's own task, which thereby leaves the rest to the kernel's buffer.
                await release()

        flow.forward = forward

    return step


def swallow(*directions: str) -> Step:
    async def step(link: Link, _flow: Flow) -> None:
        for direction in directions:
            link.flows[direction].become_deaf()

    return step


def trickle(size: int, *, seconds: float) -> Step:
    """So many bytes more in this direction, one at a time, and nothing after them."""

    async def step(_link: Link, flow: Flow) -> None:
        left = size

        async def forward(data: bytes) -> None:
            nonlocal left
            for byte in data[:left]:
                left -= 1
                await asyncio.sleep(seconds)
                await flow.send(bytes([byte]))
            if not left:
                flow.become_deaf()

        flow.forward = forward

    return step


def stop_reading(*directions: str) -> Step:
    async def step(link: Link, flow: Flow) -> None:
        for direction in directions:
            other = link.flows[direction]
            other.deaf = True
            if other is not flow:
                other.task.cancel()
        if flow.deaf:
            await asyncio.Event().wait()

    return step


def half_close(*ends: str) -> Step:
    async def step(link: Link, _flow: Flow) -> None:
        for end in ends:
            link.half_close(link.ends[end])
            link.flows[UP if end == FAR else DOWN].become_deaf()

    return step


def close(*ends: str, reset: bool = False) -> Step:
    async def step(link: Link, _flow: Flow) -> None:
        for end in ends:
            link.close(end, reset=reset)

    return step


def edit(change: Callable[[bytes], bytes]) -> Step:
    async def step(_link: Link, flow: Flow) -> None:
        flow.edit = change

    return step


def say(data: bytes, *, towards: str) -> Step:
    """Bytes that nobody at the other end has said."""

    async def step(link: Link, flow: Flow) -> None:
        if link.ends[towards].fileno() >= 0:
            await asyncio.get_running_loop().sock_sendall(link.ends[towards], data)

    return step


def urgent(_link: Link, flow: Flow) -> Awaitable[None]:
    """A byte out of band, which is none of the stream's."""
    flow.sink.send(b"!", socket.MSG_OOB)
    return asyncio.sleep(0)


def insert(data: bytes) -> Step:
    return edit(lambda rest: data + rest)


def damaged(mask: int) -> Step:
    return edit(lambda rest: bytes([rest[0] ^ mask]) + rest[1:])


# -- the table ------------------------------------------------------------------------------------------------------

_DICE = random.Random(5)
_NOISE = random.Random(7).randbytes(64)
_PAGE = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
_BAD_GATEWAY = (
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
    % (len(_PAGE), _PAGE)
)
_EMPTY_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </x>; rel=preload\r\n\r\n"
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

SHORT_SECONDS = 0.05
"""A pause that no time-out minds."""

KINDS = (
    # Slow, in every way, and yet all there.
    Kind("latency", Effect.NONE, (pause(SHORT_SECONDS),)),
    Kind("latency-one-way", Effect.NONE, (pause(SHORT_SECONDS, both=False),)),
    Kind("stall-then-go-on", Effect.NONE, (pause(4 * SHORT_SECONDS),)),
    Kind("jitter", Effect.NONE, (in_pieces(100, 37, seconds=lambda: _DICE.uniform(0, 0.003)),)),
    Kind("bandwidth", Effect.NONE, (in_pieces(256, seconds=lambda: 0.004),)),
    Kind("single-bytes", Effect.NONE, (in_pieces(1),)),
    Kind("single-bytes-slowly", Effect.NONE, (in_pieces(1, seconds=lambda: 0.001, at_most=60),)),
    Kind("sevens", Effect.NONE, (in_pieces(7),)),
    Kind("odd-sizes", Effect.NONE, (in_pieces(1, 2, 64, 3, 500),)),
    Kind("gathered", Effect.NONE, (gathered(SHORT_SECONDS),)),
    Kind("urgent-byte", Effect.NONE, (urgent,)),
    # Silence: all is connected, and nothing comes.
    Kind("black-hole", Effect.LOST, (swallow(UP, DOWN),)),
    Kind("black-hole-up", Effect.OPEN, (swallow(UP),)),
    Kind("black-hole-down", Effect.LOST, (swallow(DOWN),)),
    Kind("not-read", Effect.LOST, (stop_reading(UP, DOWN),)),
    Kind("not-read-up", Effect.OPEN, (stop_reading(UP),)),
    Kind("not-read-down", Effect.LOST, (stop_reading(DOWN),)),
    Kind("trickle-then-silence", Effect.OPEN, (trickle(5, seconds=0.02),)),
    # Ends.
    Kind("end-near", Effect.LOST, (close(NEAR),)),
    Kind("end-far", Effect.LOST, (close(FAR),)),
    Kind("end-both", Effect.LOST, (close(NEAR, FAR),)),
    Kind("reset-near", Effect.LOST, (close(NEAR, reset=True),)),
    Kind("reset-far", Effect.LOST, (close(FAR, reset=True),)),
    Kind("reset-both", Effect.LOST, (close(NEAR, FAR, reset=True),)),
    Kind("end-near-reset-far", Effect.LOST, (close(NEAR), close(FAR, reset=True))),
    Kind("reset-near-end-far", Effect.LOST, (close(NEAR, reset=True), close(FAR))),
    Kind("half-close-near", Effect.LOST, (half_close(NEAR),)),
    Kind("half-close-far", Effect.OPEN, (half_close(FAR),)),
    Kind("half-close-both", Effect.LOST, (half_close(NEAR, FAR),)),
    Kind("half-close-then-reset", Effect.LOST, (half_close(NEAR), pause(0.02), close(NEAR, FAR, reset=True))),
    Kind("half-close-far-then-end", Effect.LOST, (half_close(FAR), pause(0.02), close(NEAR, FAR))),
    Kind("late-end", Effect.LOST, (pause(SHORT_SECONDS), close(NEAR, FAR))),
    Kind("late-reset", Effect.LOST, (pause(SHORT_SECONDS), close(NEAR, FAR, reset=True))),
    Kind("far-end-first", Effect.LOST, (close(FAR), pause(SHORT_SECONDS), close(NEAR))),
    Kind("near-end-first", Effect.LOST, (close(NEAR), pause(SHORT_SECONDS), close(FAR))),
    Kind("silence-then-reset", Effect.LOST, (swallow(UP, DOWN), pause(SHORT_SECONDS), close(NEAR, FAR, reset=True))),
    # Bytes that are not what was sent.
    Kind("bit-flipped", Effect.OPEN, (damaged(0x01),)),
    Kind("case-flipped", Effect.OPEN, (damaged(0x20),)),
    Kind("high-bit", Effect.OPEN, (damaged(0x80),)),
    Kind("byte-lost", Effect.OPEN, (edit(lambda rest: rest[1:]),)),
    Kind("run-lost", Effect.OPEN, (edit(lambda rest: rest[20:]),)),
    Kind("byte-twice", Effect.OPEN, (edit(lambda rest: rest[:1] + rest),)),
    Kind("run-twice", Effect.OPEN, (edit(lambda rest: rest[:30] + rest),)),
    Kind("all-twice", Effect.OPEN, (edit(lambda rest: rest + rest),)),
    Kind("swapped", Effect.OPEN, (edit(lambda rest: rest[1:2] + rest[:1] + rest[2:]),)),
    Kind("zeros", Effect.OPEN, (edit(lambda rest: bytes(len(rest))),)),
    Kind("reversed", Effect.OPEN, (edit(lambda rest: rest[::-1]),)),
    # Bytes that nobody has sent.
    Kind("noise", Effect.OPEN, (insert(_NOISE),)),
    Kind("nul", Effect.OPEN, (insert(b"\0"),)),
    Kind("line-end", Effect.OPEN, (insert(b"\r\n"),)),
    Kind("bare-line-feed", Effect.OPEN, (insert(b"\n"),)),
    Kind("byte-order-mark", Effect.OPEN, (insert(b"\xef\xbb\xbf"),)),
    Kind("half-a-character", Effect.OPEN, (insert(b"\xe2\x82"),)),
    Kind("chunk-size", Effect.OPEN, (insert(b"\r\nffffffff\r\n"),)),
    Kind("last-chunk", Effect.OPEN, (insert(b"\r\n0\r\n\r\n"),)),
    Kind("endless-field", Effect.OPEN, (insert(b"x: " + b"y" * 200_000),)),
    Kind("tls-alert", Effect.OPEN, (insert(b"\x15\x03\x03\x00\x02\x02\x28"),)),
    Kind("other-protocol", Effect.OPEN, (edit(lambda _rest: b"SSH-2.0-OpenSSH_9.2p1\r\n"),)),
    Kind("flood", Effect.OPEN, (insert(b"\xaa" * (1 << 17)),)),
    # Somebody in between who answers himself.
    Kind("continue", Effect.OPEN, (say(_CONTINUE, towards=NEAR),)),
    Kind("early-hints", Effect.OPEN, (say(_HINTS, towards=NEAR),)),
    Kind("early-answer", Effect.OPEN, (say(_EMPTY_OK, towards=NEAR),)),
    Kind("early-answer-then-end", Effect.OPEN, (say(_EMPTY_OK, towards=NEAR), close(NEAR, FAR))),
    Kind("bad-gateway-page", Effect.OPEN, (say(_BAD_GATEWAY, towards=NEAR), close(NEAR, FAR))),
    Kind("request-timeout", Effect.OPEN, (say(_TIMED_OUT, towards=NEAR), close(NEAR, FAR))),
    Kind("answer-to-the-answerer", Effect.OPEN, (say(_EMPTY_OK, towards=FAR),)),
)
