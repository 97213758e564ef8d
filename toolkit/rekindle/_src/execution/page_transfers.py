"""Copies between the device and the tiers below it: of KV pages, many in each transfer, and of side caches' entries."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from rekindle._src.core.records import LostPage, PageCopy, PageMove
from rekindle._src.execution.device_calls import DeviceCalls, Leaving
from rekindle._src.programs import host_pages, page_memory
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import COPY, GATHER, Helper
from rekindle._src.programs.host_pages import PageParts
from rekindle._src.programs.packing import PageBatch
from rekindle._src.programs.side_caches import DevicePlan
from rekindle.errors import StoreError

MEASURE_EVERY = 16  # of so many steps that restore pages, one is timed


class PayloadStore(Protocol):
    """Page payloads by digest, off the device; called from the dispatching and the fetching thread."""

    def put(self, digest: bytes, payload: paged.Payload) -> None:
        """Keep a copy: the arrays are views into the memory of a whole transfer.

        With several processes, each one puts and gets the part of a page that its devices have.
        """

    def get(self, digest: bytes) -> paged.Payload:
        """Return a payload. Raises KeyError when it is gone."""
        ...

    def record_copy(self, pages: int, seconds: float) -> None:
        """Report that copying `pages` pages to the device took `seconds`."""


class PageTransfers:
    """Reads pages out of the device and fills them from the host."""

    def __init__(self, calls: DeviceCalls, host_tier: PayloadStore | None) -> None:
        self._calls, self._host_tier = calls, host_tier
        self._whole, self._packing = calls.programs.recipes.parts, calls.programs.packing
        self._parts = PageParts.of(self._whole, calls.programs.recipes.kv)
        self._sizes = calls.programs.lattice.moved_pages
        self._fills = tuple(fill.pages for fill in reversed(calls.programs.lattice.fills))
        self._layout = self._parts.layout
        self._restores = 0

    def read_out(self, moves: Sequence[PageMove]) -> Leaving:
        """Begin to copy pages out of the device, before a later step may overwrite them."""
        batches = self._packing.batches(moves, self._sizes) if moves else ()
        return [(batch, self._gather(batch)) for batch in batches]

    def read_whole(self, moves: Sequence[PageMove]) -> list[paged.Payload]:
        """Return the content of pages, as views of whole transfers.

        Pages are whole even where several processes hold parts of them.
        """
        if moves and self._calls.programs.moved_by_host([Helper(GATHER.kind, size) for size in self._sizes]):
            return _each(page_memory.read_pages(self._calls.at_rest(), [move.page for move in moves]), len(moves))
        payloads: dict[int, paged.Payload] = {}
        batches = self._packing.batches(moves, self._sizes)
        for batch, payload in [
            (each, self._calls.collect(each.ids, [move.digest for move in each.moves if move.digest]))
            for each in batches
        ]:
            self._calls.arrive(payload)
            arrays = self._whole.to_host(payload)
            for move, at in zip(batch.moves, batch.places, strict=True):
                payloads[move.page] = tuple(array[at : at + 1] for array in arrays)
        return [payloads[move.page] for move in moves]

    def store(self, leaving: Leaving) -> None:
        """Hand the pages that were read out to the host tier; waits for the copies."""
        for batch, payload in leaving:
            assert self._host_tier is not None, "a page was offloaded without a host tier"
            for move, page in zip(batch.moves, self._arrived(batch, payload), strict=True):
                self._host_tier.put(move.digest, page)

    def restore(self, moves: Sequence[PageMove]) -> tuple[LostPage, ...]:
        """Fill pages from the host tier; returns the failed ones, with a missing or unfitting payload."""
        if not moves:
            return ()
        payloads: dict[PageMove, paged.Payload] = {}
        lost: list[LostPage] = []
        for move in moves:
            try:
                payloads[move] = self._payload(move)
            except Exception as error:
                lost.append(LostPage(move, error))
        # Measuring waits for the device, so it is done now and then; the very first transfer compiles its program.
        measured = self._restores % MEASURE_EVERY == 1
        self._restores += 1
        if measured:
            self._calls.wait(self._calls.kv)
        start = time.perf_counter()
        if payloads and self._calls.programs.moved_by_host(self._calls.programs.lattice.fills):
            ids = [move.page for move in payloads]
            page_memory.fill_pages(self._calls.at_rest(), ids, list(payloads.values()))
        else:
            for batch in self._packing.batches(tuple(payloads), self._fills):
                pages = {place: payloads[move] for move, place in zip(batch.moves, batch.places, strict=True)}
                self._fill(batch, pages)
        if measured and payloads:
            self._calls.wait(self._calls.kv)
            assert self._host_tier is not None, "a page is restored without a host tier"
            self._host_tier.record_copy(len(payloads), time.perf_counter() - start)
        return tuple(lost)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages on the device, in the order of the calls."""
        if not copies:
            return
        sources = {copy.page: copy.source for copy in copies}
        for batch in self._packing.batches([PageMove(page, b"") for page in sources], (COPY.pages,)):
            from_ids = np.zeros_like(batch.ids)
            for move, place in zip(batch.moves, batch.places, strict=True):
                from_ids[place] = self._packing.page_id(sources[move.page])
            self._calls.copy(from_ids, batch.ids)

    def _gather(self, batch: PageBatch) -> paged.Payload:
        """Begin to read the pages of a batch out of the device."""
        return self._calls.gather(batch.ids, [move.digest for move in batch.moves])

    def _arrived(self, batch: PageBatch, payload: paged.Payload) -> list[paged.Payload]:
        """Wait for a payload, and return the part of each page in it."""
        self._calls.arrive(payload)
        arrays = self._parts.to_host(payload)
        return [tuple(array[place : place + 1] for array in arrays) for place in batch.places]

    def _fill(self, batch: PageBatch, pages: Mapping[int, paged.Payload]) -> None:
        """Fill the pages of a batch, each with the payload for its place among them."""
        if self._calls.programs.recipes.pinned:
            doubled = {place: self._parts.to_scatter(page) for place, page in pages.items()}
            self._calls.scatter_pinned(batch.ids, host_pages.joined(doubled, len(batch.ids)))
        else:
            joined = self._packing.in_call(pages, len(batch.ids), _joined)
            leaving = [self._parts.to_scatter(page) for page in joined]
            self._calls.scatter(batch.ids, leaving, [move.digest for move in batch.moves])

    def _payload(self, move: PageMove) -> paged.Payload:
        """Return the host tier's payload of a page. Raises `StoreError` if there is none, or its layout differs."""
        payload = _stored(self._host_tier, move, "page")
        layout = [(leaf.shape, leaf.dtype) for leaf in payload]
        if layout != self._layout:
            raise StoreError(
                f"page {move.digest.hex()} has arrays {_describe(layout)} where this session's pages have "
                f"{_describe(self._layout)}. Submit the request again; the page is computed then"
            )
        return payload


class SideTransfers:
    """Reads the entries of one side cache out of the device, and fills its slots from the host."""

    def __init__(self, calls: DeviceCalls, plan: DevicePlan, store: PayloadStore | None) -> None:
        self._calls, self._plan, self._store = calls, plan, store
        self._parts = calls.programs.recipes.parts
        self._layout = [((1, *leaf.shape), jax.numpy.dtype(leaf.dtype)) for leaf in plan.leaves]

    def read_out(self, moves: Sequence[PageMove]) -> Leaving:
        """Begin to copy entries out of the device, before a later step may overwrite them."""
        return [(batch, self._calls.read_side(self._plan, batch.ids)) for batch in self._batches(moves)]

    def store(self, leaving: Leaving) -> None:
        """Hand the entries that were read out to the host tier; waits for the copies."""
        for batch, payload in leaving:
            assert self._store is not None, "an entry was offloaded without a host tier"
            for move, entry in zip(batch.moves, self._arrived(batch, payload), strict=True):
                self._store.put(move.digest, entry)

    def restore(self, moves: Sequence[PageMove]) -> tuple[LostPage, ...]:
        """Fill slots from the host tier; returns the failed ones, with a missing or unfitting payload."""
        payloads: dict[PageMove, paged.Payload] = {}
        lost: list[LostPage] = []
        for move in moves:
            try:
                payloads[move] = self._payload(move)
            except Exception as error:
                lost.append(LostPage(move, error))
        if payloads and self._calls.programs.moved_by_host([self._plan.fill]):
            ids = [move.page for move in payloads]
            try:
                self._plan.fill_in_place(self._calls.at_rest(), ids, list(payloads.values()))
            except Exception as error:
                lost += [LostPage(move, error) for move in payloads]
            return tuple(lost)
        for batch in self._batches(tuple(payloads)):
            try:
                entries = {
                    place: self._plan.to_device(self._parts, payloads[move])
                    for place, move in zip(batch.places, batch.moves, strict=True)
                }
                self._calls.fill_side(self._plan, batch.ids, entries)
            except Exception as error:
                lost += [LostPage(move, error) for move in batch.moves]
        return tuple(lost)

    def read(self, slots: Sequence[int]) -> list[paged.Payload]:
        """Return the entries in slots; called between steps."""
        if slots and self._calls.programs.moved_by_host([self._plan.read_out]):
            return _each(self._plan.read_in_place(self._calls.at_rest(), slots), len(slots))
        leaving = self.read_out([PageMove(slot, b"") for slot in slots])
        return [entry for batch, payload in leaving for entry in self._arrived(batch, payload)]

    def _batches(self, moves: Sequence[PageMove]) -> Iterator[PageBatch]:
        """Yield the moves of one transfer after the other."""
        most = self._plan.moved
        for start in range(0, len(moves), most):
            batch = tuple(moves[start : start + most])
            ids = np.zeros(most, np.int32)
            ids[: len(batch)] = [move.page for move in batch]
            yield PageBatch(batch, tuple(range(len(batch))), ids)

    def _arrived(self, batch: PageBatch, payload: paged.Payload) -> list[paged.Payload]:
        """Wait for a payload, and return the part of each entry in it."""
        self._calls.arrive(payload)
        arrays = self._plan.to_host(self._parts, payload)
        return [tuple(array[place : place + 1] for array in arrays) for place in batch.places]

    def _payload(self, move: PageMove) -> paged.Payload:
        words = self._plan.words
        payload = _stored(self._store, move, words.entry)
        layout = [(leaf.shape, leaf.dtype) for leaf in payload]
        if layout != self._layout:
            raise StoreError(
                f"{words.entry} {move.digest.hex()} has arrays {_describe(layout)} where this session's "
                f"{words.entries} have {_describe(self._layout)}. Submit the request again; it is computed then"
            )
        return payload


class AllSideTransfers:
    """The transfers of all side caches of a session; each move names its side cache."""

    def __init__(self, calls: DeviceCalls, stores: Sequence[PayloadStore | None]) -> None:
        plans = calls.programs.recipes.sides
        padded = [*stores, *[None] * (len(plans) - len(stores))]
        self._sides = tuple(SideTransfers(calls, plan, store) for plan, store in zip(plans, padded, strict=True))

    def read_out(self, moves: Sequence[PageMove]) -> list[Leaving]:
        """Begin to copy entries out of the device, before a later step may overwrite them."""
        return [side.read_out(own) for side, own in self._each(moves)] if moves else []

    def store(self, leaving: Sequence[Leaving]) -> None:
        """Hand the entries that were read out to the host tiers; waits for the copies."""
        for side, own in zip(self._sides, leaving, strict=False):
            side.store(own)

    def restore(self, moves: Sequence[PageMove]) -> tuple[LostPage, ...]:
        """Fill slots from the host tiers; returns the failed ones, with a missing or unfitting payload."""
        return tuple(lost for side, own in self._each(moves) for lost in side.restore(own)) if moves else ()

    def read(self, side: int, slots: Sequence[int]) -> list[paged.Payload]:
        """Return the entries in slots of a side cache; called between steps."""
        return self._sides[side].read(slots)

    def _each(self, moves: Sequence[PageMove]) -> Iterator[tuple[SideTransfers, list[PageMove]]]:
        for number, side in enumerate(self._sides):
            yield side, [move for move in moves if move.side == number]


def _stored(store: PayloadStore | None, move: PageMove, kind: str) -> paged.Payload:
    assert store is not None, f"a {kind} is restored without a host tier"
    try:
        return store.get(move.digest)
    except KeyError:
        raise StoreError(
            f"{kind} {move.digest.hex()} left the host tier before it was restored. Raise host_memory"
        ) from None


def _joined(pages: Sequence[paged.Payload]) -> paged.Payload:
    """Return the payload of several pages that lie in different devices."""
    return tuple(map(np.concatenate, zip(*pages, strict=True)))


def _each(whole: paged.Payload, count: int) -> list[paged.Payload]:
    """Return the payloads of `count` pages, as views of one for all of them; a model without pages has no arrays."""
    return [tuple(array[at : at + 1] for array in whole) for at in range(count)]


def _describe(layout: list[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in layout)


MAX_BYTES = 256 << 20  # resident from then on; half a second of one core at the slowest measured
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: maps as a write would, without changing the content


def prefault(leaves: Sequence[Any], pages: int) -> threading.Thread | None:
    """Start to prefault the first `pages` of each leaf, which the pool hands out first; returns the thread.

    On CPU, the system maps and zeroes memory only when it is first written. That is right for pages that may never be
    used. The pages of a restored prefix are written all at once by its first request, which waited for the system for
    80 of its 230 ms (48 pages, 63 MB, on huge pages).

    The thread keeps addresses only. If the memory is freed meanwhile, the system refuses the call or maps it in vain.
    """
    if jax.default_backend() != "cpu" or sys.platform != "linux" or not pages:
        return None
    page_bytes = sum(leaf.nbytes // leaf.shape[0] for leaf in leaves)
    count = min(pages, MAX_BYTES // page_bytes)
    ranges = [(leaf.unsafe_buffer_pointer(), leaf.nbytes // leaf.shape[0] * (count + 1)) for leaf in leaves]

    def work() -> None:
        libc = ctypes.CDLL(None)
        for start, size in ranges:
            first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, start + size
            length = -(-(last - first) // mmap.PAGESIZE) * mmap.PAGESIZE
            if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _POPULATE_WRITE):
                return  # the kernel is too old, or the memory was freed

    thread = threading.Thread(target=work, name="rekindle prefault", daemon=True)
    thread.start()
    return thread
