"""The only door: all the gates of one gateway, by the addresses of their upstreams; decides nothing itself.

Later several gateways may share one cap; nothing outside ``admission`` may come to depend on what is behind the door.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiogw.admission.gate import Admission, UpstreamGate
from aiogw.errors import GatewayError


class Gate:
    """All the gates of one gateway, by the normalised address of their upstream.

    The key is the address so that two names for one address cannot become two gates for the same slots.
    """

    def __init__(self, gates: Mapping[str, UpstreamGate]) -> None:
        self._gates = dict(gates)
        self._left: set[UpstreamGate] = set()

    def replace(self, gates: Mapping[str, UpstreamGate]) -> None:
        """From now on enter through ``gates``; who is in one that is not among them goes on undisturbed."""
        gone = {*self._gates.values(), *self._left} - set(gates.values())
        self._gates = dict(gates)
        self._left = {gate for gate in gone if not gate.idle}

    def enter(
        self,
        address: str,
        weight: int,
        *,
        granted: Callable[[Admission], None],
        refused: Callable[[GatewayError], None],
        holder: str | None = None,
        places: int | None = None,
    ) -> Admission:
        """Ask for ``weight`` slots at ``address``.

        ``holder`` is whose request it is, of whom at most ``places`` may wait there at once; None: any number.
        ``granted`` is called with the admission once the slots are held, possibly before this returns; ``refused`` at
        most once, when the wait ends without a grant, or when ``granted`` raised.  Both are called in the step in
        which it happens.  Raises QueueFull, Draining or TooManySequences when there is nothing to wait for.
        """
        return self._gates[address].enter(weight, granted, refused, holder, places)

    def drain(self) -> None:
        for gate in {*self._gates.values(), *self._left}:
            gate.drain()
