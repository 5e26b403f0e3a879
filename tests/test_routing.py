"""A model name leads to one upstream, by equality and nothing cleverer; what upstreams tell of models is added."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from aiogw.canonical import Engine, ModelCard
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import LocalEndpoint
from aiogw.errors import UnknownModel
from aiogw.routing import LATEST, Route, Routes

CREATED = 1_700_000_000


def route(model: str, upstream: str = "reasoning", *, of: str | None = None, **engine: Any) -> Route:
    """The route of a model, or of an alias ``of`` one."""
    return Route(model=model, upstream=upstream, address=f"{upstream}:80", engine=Engine(model=of or model, **engine))


def routes(*more: Route) -> Routes:
    return Routes([route("org/big"), route("small", "embeddings"), *more], created=CREATED)


ROUTES = routes()


def test_a_model_is_found_by_its_name() -> None:
    """The route and the engine of a model are those it was configured with."""
    assert route("small", "embeddings") == ROUTES.find("small")
    assert Engine(model="org/big") == ROUTES.find_engine("org/big")


def test_the_models_keep_the_order_of_the_configuration() -> None:
    """O13: lists of models look the same after every restart, also before any upstream has been asked."""
    assert (ModelCard(id="org/big", created=CREATED), ModelCard(id="small", created=CREATED)) == ROUTES.models


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


def test_what_is_not_allowed_is_not_there() -> None:
    """A model that somebody may not use is unknown to them, like one that does not exist, and not on their list."""
    allowed = frozenset({"small", "nothing"})
    assert ROUTES.find("small", allowed) == ROUTES.find("small")
    assert [card.id for card in ROUTES.models_in(allowed)] == ["small"]
    assert ROUTES.models_in(None) == ROUTES.models
    for model in ("org/big", "nothing", "other"):
        with pytest.raises(UnknownModel) as caught:
            ROUTES.find_engine(model, allowed)
        assert (caught.value.model, caught.value.known) == (model, ("small",))


# -- aliases --------------------------------------------------------------------------------------------------------

ALIAS = route("claude-big", of="org/big")


def test_an_alias_leads_where_its_model_leads() -> None:
    """The client's name is kept beside the upstream's."""
    found = routes(ALIAS).find("claude-big")
    assert ("claude-big", "org/big", "reasoning:80") == (found.model, found.engine.model, found.address)


def test_an_alias_is_listed_with_what_it_stands_for() -> None:
    """M3, O13: as a card of its own, with the members of its model's."""
    known = routes(ALIAS)
    card = {"id": "org/big", "created": 5, "max_model_len": 40960, "owned_by": "vllm"}
    known.learn("reasoning", [card])
    expected = ModelCard(id="claude-big", created=5, max_model_len=40960, alias_of="org/big", members=card)
    assert expected == known.models[-1]
    assert 40960 == known.find("claude-big").engine.max_model_len


# -- what upstreams tell --------------------------------------------------------------------------------------------


def test_what_is_learned_is_in_the_list() -> None:
    """O13: of the models that are configured, at the upstream that has them, and of no others."""
    known = routes()
    big = {"id": "org/big", "created": 5, "max_model_len": 40960, "permission": [{"x": 1}]}
    known.learn("reasoning", [big, {"id": "small", "created": 6}, {"id": "unheard-of", "created": 7}])
    assert (
        ModelCard(id="org/big", created=5, max_model_len=40960, members=big),
        ModelCard(id="small", created=CREATED),
    ) == known.models
    with pytest.raises(UnknownModel):
        known.find("unheard-of")


def test_a_later_list_replaces_the_earlier() -> None:
    """An engine that was started again with another context length is believed, and one that is silent on it."""
    known = routes()
    for length, expected in ((40960, 40960), (8192, 8192), (None, None), (131072, 131072)):
        card = {"id": "org/big"} | ({} if length is None else {"max_model_len": length})
        known.learn("reasoning", [card])
        assert expected == known.find("org/big").engine.max_model_len == known.models[0].max_model_len
    known.learn("reasoning", [])
    assert known.find("org/big").engine.max_model_len is None


def test_one_upstream_tells_nothing_of_another() -> None:
    """Each list replaces its own only."""
    known = routes()
    known.learn("reasoning", [{"id": "org/big", "max_model_len": 1000}])
    known.learn("embeddings", [{"id": "small", "max_model_len": 512}, {"id": "org/big", "max_model_len": 7}])
    assert [1000, 512] == [card.max_model_len for card in known.models]


def test_the_configured_length_counts() -> None:
    """What the operator wrote is not overruled, in the engine or in the list."""
    known = routes(route("set", max_model_len=100))
    known.learn("reasoning", [{"id": "set", "max_model_len": 999}])
    assert 100 == known.find("set").engine.max_model_len == known.models[-1].max_model_len


CARDS: list[dict[str, Any]] = [
    {},
    {"id": None},
    {"id": 7},
    {"id": ["org/big"]},
    {"id": "org/big", "max_model_len": "40960"},
    {"id": "org/big", "max_model_len": 0},
    {"id": "org/big", "max_model_len": -1},
    {"id": "org/big", "max_model_len": True},
    {"id": "org/big", "max_model_len": 1e9},
    {"id": "org/big", "created": "now"},
    {"id": "org/big", "created": True},
    {"id": "org/big", "created": -1},
    {"id": "org/big", "created": LATEST + 1},
    {"id": "org/big", "created": 10**30},
    {"id": "org/big", "object": None, "root": {"\ud83d": [1.5]}, "data": [[]]},
]


@pytest.mark.parametrize("card", CARDS, ids=repr)
def test_a_strange_card_is_listed_all_the_same(card: dict[str, Any]) -> None:
    """M3, O13: what cannot be a length or a time is not taken for one, and every surface can show the list."""
    known = routes(ALIAS)
    known.learn("reasoning", [card])
    assert known.find("org/big").engine.max_model_len is None
    assert CREATED == known.models[0].created
    for dialect in DIALECTS:
        for tail in ("", "/org/big", "/claude-big"):
            endpoint = dialect.endpoint("GET", f"{dialect.mount}{'' if dialect.mount == '/v1' else '/v1'}/models{tail}")
            assert isinstance(endpoint, LocalEndpoint)
            json.loads(endpoint.answer(known.models, {}).body)


def test_the_last_second_is_one() -> None:
    """M3: a time that has a date is shown as one."""
    known = routes()
    known.learn("reasoning", [{"id": "org/big", "created": LATEST}])
    assert LATEST == known.models[0].created


def test_a_card_of_v1_has_all_that_the_upstream_says() -> None:
    """O13: unknown members, too; the name is the client's, and an alias says what it stands for."""
    known = routes(ALIAS)
    card = {
        "id": "org/big",
        "object": "model",
        "created": 5,
        "owned_by": "vllm",
        "root": "/models/big",
        "parent": None,
        "max_model_len": 40960,
        "permission": [{"id": "modelperm-1"}],
    }
    known.learn("reasoning", [card])
    (openai,) = [dialect for dialect in DIALECTS if dialect.mount == "/v1"]
    endpoint = openai.endpoint("GET", "/v1/models")
    assert isinstance(endpoint, LocalEndpoint)
    shown = json.loads(endpoint.answer(known.models, {}).body)["data"]
    assert [
        card,
        {"id": "small", "object": "model", "created": CREATED, "owned_by": "aiogw"},
        card | {"id": "claude-big", "root": "org/big"},
    ] == shown


def test_learning_changes_no_other_route() -> None:
    """A request that is under way keeps the engine it was decoded for."""
    known = routes()
    before = known.find("org/big")
    known.learn("reasoning", [{"id": "org/big", "max_model_len": 5}])
    assert before == route("org/big")
    assert evolve(before, engine=evolve(before.engine, max_model_len=5)) == known.find("org/big")


# -- other routes ---------------------------------------------------------------------------------------------------


def test_routes_are_replaced_and_what_upstreams_told_is_still_known() -> None:
    """At a reload: of those that are still served, and at once, not after the next time they are asked."""
    known = routes()
    card = {"id": "org/big", "created": 5, "max_model_len": 40960}
    known.learn("reasoning", [card])
    known.learn("embeddings", [{"id": "small", "max_model_len": 512}])
    known.replace([route("org/big"), route("alias", of="org/big")])
    assert 40960 == known.find("alias").engine.max_model_len
    assert [40960, 40960] == [model.max_model_len for model in known.models]
    with pytest.raises(UnknownModel):
        known.find("small")
    known.replace([route("small", "embeddings")])
    assert known.find("small").engine.max_model_len is None
