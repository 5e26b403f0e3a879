"""A model name leads to one upstream, by equality and nothing cleverer."""

from __future__ import annotations

import pytest

from aiogw.canonical import Engine, ModelCard
from aiogw.errors import UnknownModel
from aiogw.routing import Route, Routes


def route(model: str, upstream: str = "reasoning") -> Route:
    return Route(model=model, upstream=upstream, address=f"{upstream}:80", engine=Engine(model=model))


ROUTES = Routes([route("org/big"), route("small", "embeddings")], created=1_700_000_000)


def test_a_model_is_found_by_its_name() -> None:
    """The route and the engine of a model are those it was configured with."""
    assert route("small", "embeddings") == ROUTES.find("small")
    assert Engine(model="org/big") == ROUTES.find_engine("org/big")


def test_the_models_keep_the_order_of_the_configuration() -> None:
    """Lists of models look the same after every restart."""
    assert (
        ModelCard(id="org/big", created=1_700_000_000),
        ModelCard(id="small", created=1_700_000_000),
    ) == ROUTES.models


@pytest.mark.parametrize("model", ["", "Small", "small ", "big", "org/", "org/big/", "*", "\ud83d"])
def test_a_name_that_is_not_equal_is_unknown(model: str) -> None:
    """Case, blanks and prefixes count, and the error names what is served."""
    with pytest.raises(UnknownModel) as caught:
        ROUTES.find(model)
    assert (model, ("org/big", "small")) == (caught.value.model, caught.value.known)
    # The KeyError behind it says nothing and is not shown.
    assert caught.value.__cause__ is None
    with pytest.raises(UnknownModel):
        ROUTES.find_engine(model)
