"""The other processes of a session, as the one that leads it sees them: here none. `Team` is for several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle._src.execution.device_calls import CallRecorder
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.host import HostTier
from rekindle._src.programs.programs import Programs

if TYPE_CHECKING:
    from rekindle._src.processes.facts import ProcessReport

Say = Callable[[str], object]


class OtherProcesses(CallRecorder):
    """Stands for no other process: nothing is sent or divided, and this process has whole pages and all weights."""

    @property
    def agreement(self) -> Callable[[ProcessReport], int] | None:
        """A function that agrees with the others on the number of KV pages with room in all; None without others."""
        return None

    def begin(self, programs: Programs, say: Say = lambda stage: None) -> None:
        """Wait until all others have their weights. `say` is called with the reason for the wait."""

    def host(self, budget: int) -> HostTier:
        return HostTier(budget)

    def disk(self, folder: Path, budget: int, identity: Identity) -> DiskTier:
        return DiskTier(folder, budget, identity)

    def load_weights(self, weights: object, load: Callable[[], str]) -> None:
        """Have all others read other weights while `load` does so here, which returns their fingerprint."""
        load()

    def watch(self, watcher: Callable[[BaseException], object]) -> None:
        """Call `watcher`, from any thread, when another process is lost."""

    def close(self) -> None:
        """Tell the others that the session ends."""
