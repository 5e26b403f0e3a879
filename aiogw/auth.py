"""Who may ask for what: the holders of keys, and which of them a request shows the key of.

Pure, and no key is kept here: only what it hashes to.  Nothing here may know where a key is stored, a dialect or the
gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from hmac import compare_digest

from attrs import field, frozen

from aiogw.errors import InvalidKey


@frozen(kw_only=True)
class Holder:
    """Whose request it is.

    ``models`` are the names it may use, None: all.  ``queue_places`` is how many places of one upstream's queue it may
    occupy at once, None: as many as there are.
    """

    name: str | None
    models: frozenset[str] | None
    queue_places: int | None


# Where no key is asked for.
ANYBODY = Holder(name=None, models=None, queue_places=None)


@frozen(kw_only=True)
class Keyring:
    """All keys, by their SHA-256 digests; ``holders`` are in the same order."""

    holders: tuple[Holder, ...]
    _digests: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def of(cls, keys: Mapping[Holder, bytes]) -> Keyring:
        return cls(holders=tuple(keys), digests=tuple(sha256(key).digest() for key in keys.values()))

    def holder_of(self, key: bytes) -> Holder | None:
        """The holder of ``key``, after the same work whichever it is, and if it is none."""
        digest = sha256(key).digest()
        # One place for those who are not it, and one for who is: a sum or a branch takes 20 ns longer for a match.
        found: list[Holder | None] = [None, None]
        for one, holder in zip(self._digests, self.holders, strict=True):
            found[compare_digest(one, digest)] = holder
        return found[True]


class Authenticator:
    """Tells whose a request is by the ``keyring`` of the moment, which may be replaced; None: no key is asked for."""

    def __init__(self, keyring: Keyring | None) -> None:
        self.keyring = keyring

    def holder(self, authorization: Iterable[str], x_api_key: Iterable[str]) -> Holder:
        """The holder of the one key in these header fields; raises InvalidKey, one and the same for whatever is wrong.

        No key is looked for like any other, since how long that took would tell one from the other.
        """
        if self.keyring is None:
            return ANYBODY
        holder = self.keyring.holder_of(_shown_key(authorization, x_api_key))
        if holder is None:
            raise InvalidKey
        return holder


def _shown_key(authorization: Iterable[str], x_api_key: Iterable[str]) -> bytes:
    """The key a request shows, in one field or in several; empty, which is nobody's, if there is none or more than one.

    An empty field is none: a client whose key is configured for one field may send the other without a value.
    """
    shown = {_bearer_token(value) for value in authorization} | {value.strip(" \t") for value in x_api_key}
    shown.discard("")
    key = shown.pop() if len(shown) == 1 else None
    return b"" if key is None else key.encode("utf-8", "surrogateescape")


def _bearer_token(value: str) -> str | None:
    """The token; None where it is something else that is shown."""
    # All that HTTP knows as white space: Python has more, which may be part of a key that is nobody's.
    scheme, _, token = value.strip(" \t").partition(" ")
    return token.strip(" \t") if scheme.lower() == "bearer" else "" if not scheme else None
