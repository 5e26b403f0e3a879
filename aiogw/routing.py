"""Model name to upstream: a dictionary and nothing cleverer; pure, and no other way to choose a destination exists."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from aiogw.canonical import Engine, ModelCard
from aiogw.errors import UnknownModel


@frozen(kw_only=True)
class Route:
    """Where requests for one model go: the upstream by ``upstream``'s name, its gate and connections by ``address``."""

    model: str
    upstream: str
    address: str
    engine: Engine


class Routes:
    """The routes by the model name a client uses."""

    def __init__(self, routes: Iterable[Route], *, created: int) -> None:
        self._routes = {route.model: route for route in routes}
        self.models = tuple(ModelCard(id=model, created=created) for model in self._routes)

    def find(self, model: str) -> Route:
        """The route of ``model``, by equality; raises UnknownModel."""
        try:
            return self._routes[model]
        except KeyError:
            raise UnknownModel(model=model, known=tuple(self._routes)) from None

    def find_engine(self, model: str) -> Engine:
        return self.find(model).engine
