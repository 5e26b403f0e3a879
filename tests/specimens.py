"""One instance of every leaf of the error tree, made from its fields, so that a new error is covered by existing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import attrs

from aiogw.errors import GatewayError, Occupancy

# An upstream at which nothing is free.
OCCUPANCY = Occupancy(slots_in_use=5, slots_settling=1, cap=6, waiting=8, queue_limit=8)


def leaves(root: type[GatewayError] = GatewayError) -> Iterator[type[GatewayError]]:
    """The classes below ``root`` that have none below themselves, in the order in which they were written."""
    # attrs makes a slotted class anew; the one it started from lingers as a subclass until it is collected.
    below = [cls for cls in root.__subclasses__() if getattr(sys.modules[cls.__module__], cls.__name__, None) is cls]
    if not below:
        yield root
    for cls in below:
        yield from leaves(cls)


def specimen(cls: type[GatewayError]) -> GatewayError:
    """An instance of ``cls`` whose texts are recognisable: the field ``upstream`` is ``the-upstream``."""
    hints = get_type_hints(cls)
    return cls(**{field.name: _value(field.name, hints[field.name]) for field in attrs.fields(cls)})


def specimens() -> list[GatewayError]:
    return [specimen(cls) for cls in leaves()]


def _value(name: str, type_: Any) -> Any:
    if type(None) in get_args(type_):
        return _value(name, get_args(type_)[0])
    if attrs.has(type_):
        return type_(
            **{field.name: _value(field.name, get_type_hints(type_)[field.name]) for field in attrs.fields(type_)}
        )
    if get_origin(type_) is tuple:
        return (f"the-{name}-1", f"the-{name}-2")
    if get_origin(type_) is Mapping:
        return {"message": f"the-{name}", "type": "BadRequestError", "param": None, "code": 400}
    # Numbers that no two fields share, so that a test can look for them in a sentence.
    number = 31 + sum(name.encode()) % 29
    if name.endswith("status"):
        number = 400
    return {str: f"the-{name}", int: number, float: number + 0.5}[type_]
