"""Inflating request bodies: whole or refused, however they are cut, and never much at a time."""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogw.contentcoding import MAX_MEMBERS, STEP_BYTES, Inflater, content_coding
from aiogw.errors import MalformedBody, UnsupportedCoding


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


PACKERS = {"gzip": (gzip.compress,), "deflate": (zlib.compress, raw_deflate)}
PACKED = [(coding, pack) for coding, packers in PACKERS.items() for pack in packers]
each_packer = pytest.mark.parametrize(("coding", "pack"), PACKED, ids=["gzip", "zlib", "raw"])


def inflate(coding: str, *pieces: bytes) -> list[bytes]:
    inflater = Inflater(coding)
    steps = [step for piece in pieces for step in inflater.feed(piece)]
    inflater.end()
    return steps


@pytest.mark.parametrize(
    ("fields", "coding"),
    [
        ([], None),
        ([""], None),
        (["identity"], None),
        (["Identity"], None),
        (["gzip"], "gzip"),
        (["GZip"], "gzip"),
        (["deflate"], "deflate"),
    ],
)
def test_the_codings_that_are_known(fields: list[str], coding: str | None) -> None:
    """R43: one of two, in any case, or none."""
    assert coding == content_coding(fields)


@pytest.mark.parametrize("fields", [["br"], ["gzip", "gzip"], ["gzip, identity"], ["identity", "identity"], ["\x00"]])
def test_the_codings_that_are_not(fields: list[str]) -> None:
    """Any other, and more than one, is refused by its name, which is shown in quotes."""
    with pytest.raises(UnsupportedCoding) as caught:
        content_coding(fields)
    assert repr(", ".join(fields)) in caught.value.message
    assert "gzip or deflate" in caught.value.message


@each_packer
@given(body=st.binary(max_size=200), places=st.lists(st.integers(0, 250), max_size=6))
@settings(max_examples=50, deadline=None)
def test_where_it_is_cut_makes_no_difference(coding: str, pack: object, body: bytes, places: list[int]) -> None:
    """A body inflates to what it was made from, in whatever pieces it comes, empty ones included."""
    packed = pack(body)  # type: ignore[operator]
    cuts = [0, *sorted(min(place, len(packed)) for place in places), len(packed)]
    pieces = [packed[start:end] for start, end in pairwise(cuts)]
    assert body == b"".join(inflate(coding, *pieces))


@each_packer
def test_a_prefix_is_not_a_body(coding: str, pack: object) -> None:
    """R44: wherever it is cut off, it is refused; a sum that is not there checks nothing."""
    packed = pack(b"hello " * 20)  # type: ignore[operator]
    for length in range(len(packed)):
        with pytest.raises(MalformedBody):
            inflate(coding, packed[:length])


@each_packer
def test_a_bomb_comes_in_steps(coding: str, pack: object) -> None:
    """R44: what inflates to megabytes comes in steps of a bounded size, and no step is taken unasked."""
    packed = pack(b"\0" * (8 << 20))  # type: ignore[operator]
    inflater = Inflater(coding)
    steps = inflater.feed(packed)
    assert STEP_BYTES >= len(next(steps)) > 0
    sizes = [len(step) for step in steps]
    assert (8 << 20) == STEP_BYTES + sum(sizes)
    assert STEP_BYTES >= max(sizes)
    inflater.end()


def test_members() -> None:
    """Gzip may have several members, up to a limit; deflate is one."""
    members = [gzip.compress(b"%d," % number) for number in range(MAX_MEMBERS)]
    whole = b"".join(members)
    assert b"".join(b"%d," % number for number in range(MAX_MEMBERS)) == b"".join(inflate("gzip", whole))
    assert inflate("gzip", *members) == inflate("gzip", whole)
    with pytest.raises(MalformedBody):
        inflate("gzip", whole + members[0])
    with pytest.raises(MalformedBody):
        inflate("deflate", zlib.compress(b"1") + zlib.compress(b"2"))


def test_nothing_is_no_body() -> None:
    """A coding of no bytes at all has said too little."""
    with pytest.raises(MalformedBody):
        inflate("gzip")
