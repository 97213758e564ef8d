"""Requests whose cached pages are still on disk: they wait aside while these are read, and nobody waits for them."""

from __future__ import annotations

from rekindle._src.core.records import Status
from rekindle._src.kvcache.tiers.tiers import DiskFetch
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.sequence import Sequence


class DiskReads:
    """Each sequence loads at most once per admission; what could not be read by then is computed."""

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger
        self._waiting: dict[Sequence, tuple[DiskFetch, Status]] = {}
        self._loaded: dict[Sequence, DiskFetch | None] = {}  # not admitted yet: what it loaded stays in host memory

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def start(self, sequence: Sequence) -> bool:
        """True if it now waits for pages."""
        if sequence in self._loaded or not self._ledger.may_fetch:
            return False
        fetch = self._ledger.fetch(sequence)
        if fetch is None:
            self._loaded[sequence] = None
            return False
        self._waiting[sequence] = fetch, sequence.status
        sequence.status = Status.LOADING
        return True

    def ready(self) -> list[Sequence]:
        """Those whose pages have arrived; they are no longer here."""
        arrived = [sequence for sequence, (fetch, _) in self._waiting.items() if fetch.done]
        for sequence in arrived:
            self._loaded[sequence], sequence.status = self._waiting.pop(sequence)
        return arrived

    def discard(self, sequence: Sequence) -> None:
        """It was admitted, and holds its pages itself, or it ended."""
        fetch = self._loaded.pop(sequence, None)
        if sequence in self._waiting:
            fetch, _ = self._waiting.pop(sequence)
        if fetch is not None:
            fetch.release()
