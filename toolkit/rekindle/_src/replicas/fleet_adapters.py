"""The adapters of a fleet: by name on its side, and each load under a name of its own in all replicas.

A name that is loaded again means other weights for later requests. Replicas keep the old ones under their own name
until no request has them, so that a request that moves to another replica goes on with the weights that it began with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import anyio

from rekindle._src.core.records import AdapterLike
from rekindle._src.replicas.link import OVER, Link, roll_out
from rekindle._src.replicas.wire import AdapterSource
from rekindle.errors import InvalidRequest

Start = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
log = logging.getLogger("rekindle.fleet")
LINGER = 1.0  # seconds for which replicas keep what no name means: a request may be on its way


class RemoteAdapter(NamedTuple):
    """The adapter of a fleet's request, which its replicas know under names of their own."""

    name: str
    digest: str
    rank: int
    remote: str | dict[str, float]  # the replicas' own names, as the request's option has them


class FleetAdapters:
    """The adapters, owned by the fleet's loop; `names` and `find` may be called from any thread.

    An adapter is rolled out to all replicas; if the first one refuses it, nothing has changed.
    """

    def __init__(self, sender: str, links: Mapping[str, Link], used: Callable[[str], bool], start: Start) -> None:
        """Make none yet. `used` is true of a replicas' name that a request of the fleet has; `start` starts a job."""
        self._sender, self._links, self._used, self._start = sender, links, used, start
        self.sources: dict[str, AdapterSource] = {}  # that every replica has to have, by its own name
        self._remote: dict[str, str] = {}  # the replicas' name by the user's
        self._number, self._sweeping = 0, False
        self._turn = anyio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        return tuple(self._remote)

    def find(self, value: str | Mapping[str, float]) -> tuple[AdapterLike, tuple[str, ...]]:
        """Return what a request's option means now. The replicas' caches know its weights."""
        known = self._remote
        for name in (value,) if isinstance(value, str) else value:
            if name not in known:
                names = ", ".join(map(repr, known)) or "none"
                fix = f"Load it with await fleet.load_adapter({name!r}, folder)"
                raise InvalidRequest("adapter", name, f"is not an adapter of this fleet; known: {names}", fix)
        remote = (
            known[value] if isinstance(value, str) else {known[name]: float(weight) for name, weight in value.items()}
        )
        return RemoteAdapter(str(value), "", 0, remote), ()

    async def load(self, name: str, source: Any, alpha: float | None) -> None:
        """Load an adapter in all replicas, and give it its name then."""
        async with self._turn:
            self._number += 1
            remote = f"{name} #{self._sender}.{self._number}"
            entry = AdapterSource(remote, source, alpha)

            async def give(link: Link) -> None:
                await link.load_adapter(entry)
                self.sources[remote] = entry

            await roll_out(f"the adapter {name!r}", lambda: self._without(remote), give, lambda: remote in self.sources)
            self._remote = {**self._remote, name: remote}
        self._sweep()

    async def unload(self, name: str) -> None:
        """Forget a name. Replicas forget the adapter when no request has it."""
        self.find(name)
        self._remote = {key: value for key, value in self._remote.items() if key != name}
        self._sweep()

    def _sweep(self) -> None:
        """Have replicas unload, soon, what neither a name nor a request means."""
        if not self._sweeping:
            self._sweeping = True
            self._start(self._unload_old)

    async def _unload_old(self) -> None:
        while old := set(self.sources) - set(self._remote.values()):
            await anyio.sleep(LINGER)
            async with self._turn:
                named = set(self._remote.values())  # one of `old` may have been loaded meanwhile
                for remote in [name for name in old - named if not self._used(name)]:
                    del self.sources[remote]
                    for link in [link for link in self._links.values() if remote in link.adapters]:
                        try:
                            await link.unload_adapter(remote)
                        except Exception as error:  # it keeps the adapter until its end
                            log.debug("replica %s keeps the adapter %r: %s", link.name, remote, error)
        self._sweeping = False

    def _without(self, remote: str) -> list[Link]:
        return [link for link in self._links.values() if link.state not in OVER and remote not in link.adapters]
