"""Whose key a request shows: one of several, in either field, and never a word on why not."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogw import auth
from aiogw.auth import ANYBODY, Authenticator, Holder, Keyring
from aiogw.errors import InvalidKey

ALICE = Holder(name="alice", models=None, queue_places=4)
BOB = Holder(name="bob", models=frozenset({"small"}), queue_places=0)
CAROL = Holder(name="carol", models=None, queue_places=1)
KEYS = {ALICE: b"sk-alice", BOB: b"sk-bob", CAROL: b"sk-carol"}
RING = Keyring.of(KEYS)


def holder(authorization: list[str] | None = None, x_api_key: list[str] | None = None) -> Holder:
    return Authenticator(RING).holder(authorization or [], x_api_key or [])


@pytest.mark.parametrize("one", list(KEYS), ids=lambda one: one.name)
def test_a_key_has_its_holder(one: Holder) -> None:
    """Each key is found, wherever it is among the others, in either field and in both."""
    key = KEYS[one].decode()
    assert RING.holder_of(KEYS[one]) is one
    assert holder([f"Bearer {key}"]) is one
    assert holder([f"bearer  {key} "]) is one
    assert holder([], [key]) is one
    assert holder([f"Bearer {key}"], [key]) is one
    assert holder([f"Bearer {key}"], [""]) is one
    assert holder(["Bearer "], [key]) is one
    assert holder([""], [key, key]) is one


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [
        ([], []),
        ([""], [""]),
        (["Bearer"], []),
        (["Bearer "], []),
        (["Bearer sk-nobody"], []),
        ([], ["sk-nobody"]),
        (["Bearer sk-alic"], []),
        (["Bearer sk-alicee"], []),
        (["Bearer SK-ALICE"], []),
        (["sk-alice"], []),
        (["Basic sk-alice"], []),
        (["Bearer Bearer sk-alice"], []),
        (["Bearersk-alice"], []),
        (["Bearer sk-alice,"], []),
        (["Bearer sk-alice sk-alice"], []),
        (["Bearer sk-alice", "Bearer sk-bob"], []),
        (["Bearer sk-alice"], ["sk-bob"]),
        (["Bearer sk-alice"], ["sk-nobody"]),
        (["Basic c2st"], ["sk-alice"]),
        ([], ["sk-alice", "sk-bob"]),
        ([], ["Bearer sk-alice"]),
        (["Bearer \udcff"], []),
        ([], ["\u00a0sk-alice\u00a0"]),
        ([], ["sk-alice\u2003"]),
        (["\u00a0Bearer sk-alice"], []),
        (["Bearer \u00a0sk-alice\x1f"], []),
    ],
    ids=repr,
)
def test_anything_else_is_one_and_the_same_error(authorization: list[str], x_api_key: list[str]) -> None:
    """Absent, wrong, malformed and contradictory cannot be told apart."""
    with pytest.raises(InvalidKey) as caught:
        holder(authorization, x_api_key)
    assert repr(caught.value) == repr(InvalidKey())


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_nothing_that_is_not_a_key_is_taken_for_one(authorization: list[str], x_api_key: list[str]) -> None:
    """Whatever stands in the fields, it is an error of the one kind."""
    with pytest.raises(InvalidKey):
        holder(authorization, x_api_key)


@pytest.mark.parametrize("shown", [[], ["sk-nobody"], ["sk-alice"], ["sk-carol"], ["sk-alice", "sk-bob"]], ids=repr)
def test_the_work_does_not_depend_on_what_is_shown(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One digest is made and compared with all of them, found or not."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(auth, "compare_digest", compare)
    try:
        holder([], shown)
    except InvalidKey:
        pass
    assert [one for one, _ in compared] == list(RING._digests)
    assert len({other for _, other in compared}) == 1


def test_without_a_keyring_nobody_is_asked() -> None:
    """Whatever a client shows is then not looked at."""
    assert Authenticator(None).holder(["Bearer x"], ["y"]) is ANYBODY
    assert Authenticator(None).holder([], []) is ANYBODY


def test_a_keyring_without_keys_lets_nobody_in() -> None:
    """Not even those who show nothing."""
    with pytest.raises(InvalidKey):
        Authenticator(Keyring.of({})).holder([], [])


def test_the_keyring_can_be_replaced() -> None:
    """A key that is gone opens nothing from the next request on, and a new one does."""
    authenticator = Authenticator(RING)
    authenticator.keyring = Keyring.of({BOB: b"new"})
    assert authenticator.holder([], ["new"]) is BOB
    for key in ("sk-alice", "sk-bob"):
        with pytest.raises(InvalidKey):
            authenticator.holder([], [key])


def test_no_key_is_kept() -> None:
    """Neither the keys nor what they hash to is in what is printed of a keyring, and the keys are nowhere in it."""
    shown = repr(RING) + repr(Authenticator(RING)) + repr(vars(Authenticator(RING)))
    for key, digest in zip(KEYS.values(), RING._digests, strict=True):
        assert key.decode() not in shown
        assert repr(digest) not in shown
        assert digest.hex() not in shown
    assert "alice" in shown
