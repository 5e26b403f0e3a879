"""Model name to upstream: a dictionary and nothing cleverer; pure, and no other way to choose a destination exists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve, frozen

from aiogw.canonical import Engine, ModelCard
from aiogw.errors import UnknownModel

# The last second that has a date: anything later is no Unix time in seconds.
LATEST = 253_402_300_799

Models = frozenset[str] | None
"""The names somebody may use; None: all."""


@frozen(kw_only=True)
class Route:
    """Where requests for one model go: the upstream by ``upstream``'s name, its gate and connections by ``address``.

    ``model`` is what clients say, ``engine.model`` what the upstream says; they differ for an alias.
    """

    model: str
    upstream: str
    address: str
    engine: Engine


class Routes:
    """The routes by the model name a client uses; ``created`` is the Unix time of models that do not tell theirs."""

    def __init__(self, routes: Iterable[Route], *, created: int) -> None:
        self._created = created
        self._cards: dict[str, dict[str, Mapping[str, Any]]] = {}
        self.replace(routes)

    def replace(self, routes: Iterable[Route]) -> None:
        """Serve these models from now on; what upstreams have shown of theirs is still known."""
        self._configured = {route.model: route for route in routes}
        self._routes = dict(self._configured)
        upstreams = {route.upstream for route in self._configured.values()}
        self._cards = {name: cards for name, cards in self._cards.items() if name in upstreams}
        for name in self._cards:
            self._fill_lengths(name)
        self.models = self._list_models()

    def learn(self, upstream: str, cards: Iterable[Mapping[str, Any]]) -> None:
        """Take in the model cards ``upstream`` shows: for the lists, and for the context length where none is set.

        Only adds to what the configuration says; a model it does not name is not served, whoever shows it.
        """
        self._cards[upstream] = {card["id"]: card for card in cards if isinstance(card.get("id"), str)}
        self._fill_lengths(upstream)
        self.models = self._list_models()

    def _fill_lengths(self, upstream: str) -> None:
        for model, route in self._configured.items():
            length = self._card(route).get("max_model_len")
            if route.upstream == upstream and route.engine.max_model_len is None:
                known = length if type(length) is int and length > 0 else None
                self._routes[model] = evolve(route, engine=evolve(route.engine, max_model_len=known))

    def _card(self, route: Route) -> Mapping[str, Any]:
        return self._cards.get(route.upstream, {}).get(route.engine.model, {})

    def _list_models(self) -> tuple[ModelCard, ...]:
        return tuple(self._model_card(route) for route in self._routes.values())

    def _model_card(self, route: Route) -> ModelCard:
        members = self._card(route)
        created = members.get("created")
        return ModelCard(
            id=route.model,
            created=created if type(created) is int and 0 <= created <= LATEST else self._created,
            max_model_len=route.engine.max_model_len,
            alias_of=route.engine.model if route.engine.model != route.model else None,
            members=members,
        )

    def find(self, model: str, allowed: Models = None) -> Route:
        """The route of ``model``, by equality; raises UnknownModel, which is also what one that is not allowed is."""
        route = self._routes.get(model)
        if route is None or (allowed is not None and model not in allowed):
            known = tuple(one for one in self._routes if allowed is None or one in allowed)
            raise UnknownModel(model=model, known=known)
        return route

    def find_engine(self, model: str, allowed: Models = None) -> Engine:
        return self.find(model, allowed).engine

    def models_in(self, allowed: Models) -> tuple[ModelCard, ...]:
        """The cards of those models that are allowed."""
        return self.models if allowed is None else tuple(card for card in self.models if card.id in allowed)
