"""Followers of requests with captures: each wanted position is delivered once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rekindle._src.capabilities.captures.kept import CapturedPositions, KeptCaptures, parts_by_page
from rekindle._src.core.captured import CapturedPart
from rekindle._src.core.records import Request, Row, RowResult
from rekindle._src.core.report import Report
from rekindle._src.scheduling.followers import Follower

CAPTURED: Report[CapturedPart] = Report("captured")  # at positions that the request wants


class CaptureFollower(Follower):
    """Delivers what each wanted position has captured once: after a preemption, positions are computed again."""

    __slots__ = ("_delivered", "_tapped")

    def __init__(self, tapped: CapturedPositions) -> None:
        self._tapped = tapped
        self._delivered = 0  # positions before it were delivered

    def reusable(self, known: int) -> int:
        return min(known, self._tapped.next_wanted(self._delivered))

    def take(self, row: Row, output: RowResult) -> RowResult:
        before, self._delivered = self._delivered, max(self._delivered, row.start + row.length)
        if before <= row.start:
            return output
        parts = [part.behind(before) for part in CAPTURED.of(output)]
        return output.reporting(CAPTURED, *[part for part in parts if part is not None])


class CaptureFileFollower(CaptureFollower):
    """Delivers captures and keeps them: pages with kept captures may come from the cache."""

    __slots__ = ("_answer", "_from_cache", "_kept", "_names", "_parts", "_request")
    keeps = True

    def __init__(self, request: Request, tapped: CapturedPositions, kept: KeptCaptures) -> None:
        super().__init__(tapped)
        self._request, self._kept = request, kept
        self._names: tuple[bytes | None, list[bytes]] = None, []  # of the prompt's pages, with the cache's root
        self._answer = (-1, -1), 0  # the latest of `reusable`, and what it was for
        self._from_cache: CapturedPart | None = None  # to be delivered with the first row
        self._parts: defaultdict[int, list[CapturedPart]] = defaultdict(list)  # by page, until it is published

    def reusable(self, known: int) -> int:
        if self._answer[0] != (self._kept.version, self._delivered):
            reached = self._kept.reach(self._prompt_names(), self._tapped.keys, self._tapped, self._delivered)
            self._answer = (self._kept.version, self._delivered), reached
        return min(known, self._answer[1])

    def _prompt_names(self) -> list[bytes]:
        root, names = self._names
        if root != self._kept.root_key:
            request = self._request
            names = self._kept.names(request.prefix(self._kept.page_size).first(request.prompt_length))
            self._names = self._kept.root_key, names
        return names

    def begin(self, start: int) -> None:
        self._parts.clear()
        self._from_cache = None
        size, keys = self._kept.page_size, self._tapped.keys
        positions = self._tapped.wanted_in(self._delivered, start)
        if not len(positions):
            return
        names, pages = self._prompt_names(), positions // size
        read = [self._kept.get(names[page], keys, positions[pages == page] % size) for page in np.unique(pages)]
        self._kept.use(names)
        arrays = {key: np.concatenate([lines[key] for lines in read]) for key in keys}
        self._from_cache = CapturedPart(positions, arrays)

    def take(self, row: Row, output: RowResult) -> RowResult:
        for captured in CAPTURED.of(output):
            for page, part in parts_by_page(captured, self._kept.page_size):
                self._parts[page].append(part)
        output, first = super().take(row, output), self._from_cache
        if first is None:
            return output
        self._from_cache = None
        return output.reporting(CAPTURED, CapturedPart.joined([first, *CAPTURED.of(output)]))

    def published(self, names: Sequence[bytes]) -> None:
        for page in [page for page in self._parts if page < len(names)]:
            part = CapturedPart.joined(self._parts.pop(page))
            self._kept.put(names[page], part.positions % self._kept.page_size, dict(part.arrays))
        self._kept.use(names)
