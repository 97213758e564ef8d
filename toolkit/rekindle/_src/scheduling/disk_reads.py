"""Requests whose cached pages are still on disk: they wait outside the queue until the pages are read."""

from __future__ import annotations

from rekindle._src.core.records import Status
from rekindle._src.scheduling.page_ledger import Fetch, PageLedger
from rekindle._src.scheduling.sequence import Sequence


class DiskReads:
    """The sequences that wait for pages from disk. Each one loads once per admission; pages that fail are computed."""

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger
        self._waiting: dict[Sequence, tuple[Fetch, Status]] = {}
        self._loaded: dict[Sequence, Fetch | None] = {}  # until admission: the loaded pages are held in host memory

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def loaded(self, sequence: Sequence) -> bool:
        """True if pages were read for the sequence, which is about to be admitted."""
        return self._loaded.get(sequence) is not None

    def start(self, sequence: Sequence) -> bool:
        """Start to read the sequence's pages from disk, if that pays. True if the sequence now waits for them."""
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
        """Take out the sequences whose pages have been read."""
        loaded = [sequence for sequence, (fetch, _) in self._waiting.items() if fetch.finished]
        for sequence in loaded:
            self._loaded[sequence], sequence.status = self._waiting.pop(sequence)
        return loaded

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that was admitted, and so holds its pages itself, or that ended."""
        fetch = self._loaded.pop(sequence, None)
        if sequence in self._waiting:
            fetch, _ = self._waiting.pop(sequence)
        if fetch is not None:
            fetch.release()
