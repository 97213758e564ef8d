"""A swap of a fleet's weights: one replica after another takes them, while the others answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import anyio

from rekindle._src.replicas.link import FAILURES, Link, ReplicaState
from rekindle._src.replicas.wire import ReplicaGone, Weights
from rekindle.errors import ReplicaLost

log = logging.getLogger("rekindle.fleet")
LOOK = 0.05  # seconds between two searches for a replica that can take them
_OVER = (ReplicaState.DRAINING, ReplicaState.FAILED, ReplicaState.CLOSED)


class RollingSwap:
    """The swap of weights, owned by the fleet's loop.

    The first replica decides: if it can't take the weights, they are refused, and nothing has changed. After it they
    are the fleet's weights. A later replica that dies or can't take them is replaced, and its successor takes them
    before it takes requests.
    """

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links
        self.weights: Weights = Weights(0, "")  # the fleet's; a new replica begins with them
        self._turn = anyio.Lock()

    async def run(self, name: str, drain: float) -> None:
        """Swap the weights of all replicas. A replica's requests may end for `drain` seconds; then others take them."""
        async with self._turn:
            weights, deaths = Weights(self.weights.number + 1, name), 0
            while remaining := self._left(weights):
                link = next((link for link in remaining if link.takes), None)
                if link is None:  # the replicas are being opened
                    await anyio.sleep(LOOK)
                    continue
                try:
                    await link.swap(weights, drain)
                except ReplicaGone as gone:
                    deaths += 1
                    if self.weights != weights and deaths >= FAILURES:
                        raise ReplicaLost(
                            f"{deaths} replicas died while they took the weights {name!r}, the last one because it "
                            f"{gone}. The others keep theirs; try the weights in a session"
                        ) from gone
                except Exception as error:
                    if self.weights != weights:
                        raise
                    link.renew(f"could not take the weights {name!r}: {error}")
                else:
                    self._decided(weights)
            if self.weights != weights:
                raise ReplicaLost("no replica is left that could take other weights. Open another fleet")

    def _left(self, weights: Weights) -> list[Link]:
        return [link for link in self._links.values() if link.state not in _OVER and link.weights != weights]

    def _decided(self, weights: Weights) -> None:
        if self.weights != weights:
            log.info("the fleet goes on with the weights %r", weights.name)
            self.weights = weights
        for link in self._links.values():
            link.target_weights = weights
