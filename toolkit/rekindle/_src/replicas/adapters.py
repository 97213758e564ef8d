"""The adapters of a fleet: changes of all its replicas' sessions, which know each by a name of its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import anyio

from rekindle._src.core.extension import Extension
from rekindle._src.replicas.fleet_backend import FleetBackend
from rekindle._src.replicas.link import OVER, Link, roll_out
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.session.session import Session

log = logging.getLogger("rekindle.fleet")
LINGER = 1.0  # seconds for which replicas keep what no name means: a request may be on its way
_SHOWN = 64  # characters of a user's name in the replicas' own, which has to be a name, too


class AdapterLoading(NamedTuple):
    """Replicas load an adapter."""

    name: str  # the replicas' own
    source: object  # a folder or file that all of them can read, or arrays by path
    alpha: float | None

    async def apply(self, session: Session) -> None:
        await session.load_adapter(self.name, self.source, alpha=self.alpha)


class AdapterUnloading(NamedTuple):
    """Replicas forget an adapter. Running requests keep it."""

    name: str

    async def apply(self, session: Session) -> None:
        await session.unload_adapter(self.name)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RemoteAdapterUse(Extension):
    """A request has an adapter, which replicas know under names of their own. Their caches know its weights."""

    remote: str | dict[str, float]  # the replicas' own names, as the request's option has them

    @property
    def elsewhere(self) -> Mapping[str, object]:
        return {"adapter": self.remote}


class FleetAdapters:
    """The adapters, owned by the fleet's loop; `names` and `use` may be called from any thread.

    An adapter is rolled out to all replicas; if the first one refuses it, nothing has changed.
    """

    def __init__(self, fleet: FleetBackend) -> None:
        self._fleet = fleet
        self._remote: dict[str, str] = {}  # the replicas' name by the user's
        self._number, self._sweeping = 0, False
        self._turn = anyio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._remote)

    def use(self, value: str | Mapping[str, float]) -> RemoteAdapterUse:
        """Resolve a request's option to adapters of this fleet."""
        known = self._remote
        for name in (value,) if isinstance(value, str) else value:
            if name not in known:
                names = ", ".join(map(repr, known)) or "none"
                fix = f"Load it with await fleet.load_adapter({name!r}, folder)"
                raise InvalidRequest("adapter", name, f"is not an adapter of this fleet; known: {names}", fix)
        if isinstance(value, str):
            return RemoteAdapterUse(known[value])
        return RemoteAdapterUse({known[name]: float(weight) for name, weight in value.items()})

    async def load(self, name: str, source: object, alpha: float | None) -> None:
        """Load an adapter in all replicas, and give it its name then."""
        async with self._turn:
            self._number += 1
            remote = f"{name[:_SHOWN]}#{self._fleet.sender}.{self._number}"
            loading = AdapterLoading(remote, source, alpha)

            async def give(link: Link) -> None:
                await link.make(remote, loading)
                self._fleet.changes[remote] = loading

            await roll_out(f"the adapter {name!r}", lambda: self._without(remote), give, lambda: remote in self._loaded)
            self._remote = {**self._remote, name: remote}
        self._sweep()

    async def unload(self, name: str) -> None:
        """Forget a name. Replicas forget the adapter when no request has it."""
        self.use(name)
        self._remote = {key: value for key, value in self._remote.items() if key != name}
        self._sweep()

    def _sweep(self) -> None:
        """Have replicas unload, soon, what neither a name nor a request means."""
        if not self._sweeping:
            self._sweeping = True
            self._fleet.start(self._unload_old)

    async def _unload_old(self) -> None:
        while old := self._loaded - set(self._remote.values()):
            await anyio.sleep(LINGER)
            async with self._turn:
                named = set(self._remote.values())  # one of `old` may have been loaded meanwhile
                for remote in [name for name in old - named if not self._used(name)]:
                    del self._fleet.changes[remote]
                    for link in [link for link in self._fleet.replicas.values() if remote in link.changes]:
                        try:
                            await link.undo(remote, AdapterUnloading(remote))
                        except Exception as error:  # it keeps the adapter until its end
                            log.debug("replica %s keeps the adapter %r: %s", link.name, remote, error)
        self._sweeping = False

    @property
    def _loaded(self) -> set[str]:
        """The replicas' names of the adapters that every replica has to have."""
        return {name for name, change in self._fleet.changes.items() if isinstance(change, AdapterLoading)}

    def _used(self, remote: str) -> bool:
        """True if a request has an adapter that replicas know by this name."""
        return any(
            remote == use.remote if isinstance(use.remote, str) else remote in use.remote
            for use in self._fleet.extensions(RemoteAdapterUse)
        )

    def _without(self, remote: str) -> list[Link]:
        links = self._fleet.replicas.values()
        return [link for link in links if link.state not in OVER and remote not in link.changes]
