"""Drafts that are computed on the device before a step, for all of its rows in one call.

`ModelDrafter` is that of a small model with the same tokenizer; `heads.py` has those that read the model's own states.

The step that checks drafts is planned before they are made: how many are worth it follows from how often those at each
place were right, and from what such steps took. The small model drafts them on the device before the rows run.

A small model has pages of its own at the ids of the model's, in which it keeps what it computed of a text. `contents`
says for each page of which text that is; so the pages of a prefix that requests share are computed once, and a page
that came back from memory or disk, or belongs to another text by now, is known to lack it. Tokens that are missing are
computed before the first draft, some hundred in a step. While drafts don't pay for a request, nothing is computed for
it: it rests, and tries again after a pause that grows. When that happens to several requests in a row, the drafter
rests, and afterwards tries with one request alone.

It proposes for a row whose tokens are all known. So a request asks for the result of its step to be read before the
next one is planned, while drafts pay.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from rekindle._src.core.records import DraftTask, IntArray, Row
from rekindle._src.programs.draft_model import DRAFTS
from rekindle._src.scheduling.drafting.drafter import DraftableRow, Drafter
from rekindle._src.scheduling.drafting.proposal import Acceptance, Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Sequence

_SHORTEST, _LONGEST, _LONGER = 32, 1024, 4  # steps of a pause, and by how much the next one is longer
_PLAIN, _PERIOD = 8, 1024  # in the first of so many steps nothing is drafted, so that plain steps are timed
_PATIENCE = 2  # steps in a row that wait for a request and have no drafts, after which the request rests
_REQUESTS = 3  # requests that rested in a row, after which the drafter rests
_PROVEN = 8  # steps in a row with drafts of a request, after which they are known to pay
FAR = -1  # the request can't draft in its next step
_EXPECTED = 0.6  # the chance of a draft before any was seen
_DOUBTED = 2.0  # observations that count after a pause
_FILLED = 256  # tokens that are computed in addition before one step
_WITH_DRAFTS = 2  # tokens that the call which drafts computes, too


class PageContent(NamedTuple):
    """The tokens whose entries a page of the small model has."""

    before: int  # the key of the tokens before it
    tokens: IntArray  # at its beginning


class WeightsDrafts(RequestDrafts):
    """How often the drafts for a request were right, and whether there are some for its next step."""

    __slots__ = ("acceptance", "declined_after", "drafter", "near", "pause", "rests_until", "row")

    def __init__(self, drafter: WeightsDrafter) -> None:
        super().__init__()
        self.drafter, self.acceptance = drafter, Acceptance()
        self.near = FAR  # the drafter's `wakes` if the request can draft in its next step
        self.rests_until, self.pause = 0, _SHORTEST  # the step after which it may draft again, and steps of a rest
        self.row = 0  # steps in a row with drafts of this drafter, or, below 0, that waited for nothing
        self.declined_after = -1  # the step after which a step had no drafts for it, since they didn't pay

    @property
    def awake(self) -> bool:
        """True while it is drafted for."""
        drafter = self.drafter
        return drafter.awake and drafter.step >= self.rests_until and drafter.takes(self)

    @property
    def asks(self) -> bool:
        return self.near == self.drafter.wakes and self.awake and not self.drafter.crowded

    def declined(self) -> None:
        self.declined_after = self.drafter.step

    def learn(self, drafted: int, accepted: int) -> None:
        super().learn(drafted, accepted)
        for place in range(min(accepted + 1, drafted)):
            self.acceptance.add(place < accepted)
            self.drafter.places[place].add(place < accepted)

    def chances(self, count: int) -> list[float]:
        """Return how likely each of its next drafts is right if those before it are."""
        return [self.acceptance.chance(place.chance(_EXPECTED)) for place in self.drafter.places[:count]]


class WeightsDrafter(Drafter):
    """A drafter whose tokens the runner computes before the rows of a step. It rests while its drafts don't pay."""

    def __init__(self, positions: int) -> None:
        """`positions` are those that it has."""
        self._positions = positions
        self.places = [Acceptance() for _ in range(DRAFTS)]  # of all requests
        self.step = 0  # the latest that was planned
        self.wakes = 0  # how often it began to draft
        self._pause, self._rest = _SHORTEST, 0
        self._failed = 0  # requests that rested in a row
        self._trial: WeightsDrafts | None = None  # the request by which it is tried if drafts pay again
        # The requests that the step being planned waited for, and whether it has drafts.
        self._waited, self._drafts = list[WeightsDrafts](), False
        self._measures = True  # nothing is drafted, so that plain steps are timed

    @property
    def awake(self) -> bool:
        return not self._rest and not self._measures

    def takes(self, drafts: WeightsDrafts) -> bool:
        """True if it drafts for a request. After several failed, it tries again with the first one that asks."""
        if self._failed < _REQUESTS:
            return True
        if self._trial is None:
            self._trial = drafts
        return self._trial is drafts

    def end(self, sequence: Sequence) -> None:
        if sequence.drafting.get(self.name) is self._trial:
            self._trial = None

    def _chains(self, sequences: Items[Sequence], rows: Items[Row]) -> dict[Sequence, tuple[Row, list[Row]]]:
        """Return for each sequence its first row, and the rows whose tokens are drafted here."""
        chains: dict[Sequence, tuple[Row, list[Row]]] = {}
        for sequence, row in zip(sequences, rows, strict=True):
            _, chain = chains.setdefault(sequence, (row, []))
            if row.draft and sequence.drafter == self.name:
                chain.append(row)
        return chains

    def _note_request(self, drafts: WeightsDrafts, *, has_drafts: bool) -> None:
        """Note whether the step waited for a request's token, and whether it drafts for it."""
        if has_drafts:
            self._drafts = True
            drafts.row = max(0, drafts.row) + 1
            if drafts.row == _PROVEN:
                self._pause, self._failed, drafts.pause = _SHORTEST, 0, _SHORTEST
        elif drafts.asks:
            self._waited.append(drafts)

    def planned(self, step: int) -> None:
        slept, before, self.step = not self.awake, self.step, step
        self._measures = step % _PERIOD < _PLAIN
        if self._rest:
            self._rest -= 1
            if not self._rest:
                for place in self.places:
                    place.doubt(_DOUBTED)
        elif self._waited and not self._drafts:
            self._missed(self._waited, before)
        self._waited, self._drafts = [], False
        self.wakes += slept and self.awake

    def _missed(self, requests: Items[WeightsDrafts], before: int) -> None:
        """Count a step that waited for requests and has no drafts. After `_PATIENCE` in a row a request rests."""
        known = self._failed
        for drafts in requests:
            drafts.row = min(0, drafts.row) - 1
            if drafts.row > -_PATIENCE:
                continue
            drafts.row, self._trial = 0, None
            if drafts.declined_after != before:  # their program is being made
                drafts.rests_until = self.step + _SHORTEST
                continue
            drafts.rests_until = self.step + drafts.pause
            drafts.pause = min(_LONGER * drafts.pause, _LONGEST)
            drafts.acceptance.doubt(_DOUBTED)
            self._failed += 1
        if self._failed >= max(known + 1, _REQUESTS):
            self._rest = self._pause
            self._pause = min(_LONGER * self._pause, _LONGEST)


class ModelDrafts(WeightsDrafts):
    """How the drafts of the small model fared, and the part of the request's text that it has."""

    __slots__ = ("contents", "epoch", "keys", "pages", "rows", "since")
    words = "drafts of the small model"

    def __init__(self, drafter: WeightsDrafter) -> None:
        super().__init__(drafter)
        self.keys = [0]  # of the text before each page
        self.contents: dict[int, PageContent] | None = None  # those by which `pages` were looked at
        self.epoch = 0
        self.pages: IntArray = np.empty(0, np.int32)  # full ones that have the request's text
        self.rows: tuple[Row, ...] = ()  # the latest drafts, whose tokens are known when they were checked
        self.since = 0  # the place of the first of them


class ModelDrafter(WeightsDrafter):
    """Plans the work of a small model with the same tokenizer, which computes texts of its own."""

    name = "model"

    def __init__(self, page_size: int, positions: int) -> None:
        super().__init__(positions)
        self._size = page_size
        self.contents: dict[int, PageContent] = {}

    def begin(self, sequence: Sequence) -> RequestDrafts | None:
        text = sequence.text()
        return ModelDrafts(self) if not len(text) or text.min() >= 0 else None  # pictures are no text

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        room, proposals = _FILLED, list[Proposal | None]()
        for sequence, skip, most in rows:
            drafts = self._of(sequence)
            count = min(most, DRAFTS, self._positions - sequence.known)
            missing = sequence.known - self._computed(sequence, drafts) - _WITH_DRAFTS
            if skip or count <= 0 or missing > room or not drafts.awake:
                proposals.append(None)
                continue
            room -= max(0, missing)
            proposals.append(Proposal([0] * count, drafts.chances(count)))  # the small model writes the tokens
        return proposals

    def tasks(self, sequences: Items[Sequence], rows: Items[Row]) -> tuple[DraftTask, ...]:
        tasks, room = list[DraftTask](), _FILLED
        for sequence, (row, chain) in self._chains(sequences, rows).items():
            drafts = sequence.drafting.get(self.name)
            if not isinstance(drafts, ModelDrafts):
                continue
            known, computed = sequence.known, self._computed(sequence, drafts)
            missing = known - computed
            self._note_request(drafts, has_drafts=bool(chain))
            if chain:
                end = known
            elif not drafts.awake or known >= self._positions:
                drafts.near = FAR
                continue
            else:
                end = computed if missing <= _WITH_DRAFTS else computed + min(missing, room)
            room -= max(0, end - computed - (_WITH_DRAFTS if chain else 0))
            drafts.near = self.wakes if known - end <= _WITH_DRAFTS else FAR
            if end > computed:
                tokens = sequence.tokens(computed, end)
                tasks.append(DraftTask(row, computed, tokens, tuple(chain)))
                self._note(sequence, drafts, computed, end)
                drafts.rows, drafts.since = tuple(chain), end
        return tuple(tasks)

    def lost(self) -> None:
        self.contents = {}

    def _of(self, sequence: Sequence) -> ModelDrafts:
        drafts = sequence.drafting[self.name]
        assert isinstance(drafts, ModelDrafts), f"{sequence.id} has drafts of another kind"
        return drafts

    def _computed(self, sequence: Sequence, drafts: ModelDrafts) -> int:
        """Return how many tokens of a request's text the small model has in its pages."""
        size, contents, ids = self._size, self.contents, sequence.pages
        if drafts.contents is not contents or drafts.epoch != sequence.epoch:
            drafts.contents, drafts.epoch = contents, sequence.epoch
            drafts.pages, drafts.rows = drafts.pages[:0], ()
        if drafts.rows:
            # All but the last draft were inputs. Of these it has those that are the text.
            inputs = [int(row.token_ids[0]) for row in drafts.rows[:-1] if row.token_ids is not None]
            since, drafts.rows = drafts.since, ()
            right = _common(
                np.array(inputs, np.int32), sequence.tokens(since, min(sequence.known, since + len(inputs)))
            )
            self._note(sequence, drafts, since, since + right)
        full = len(drafts.pages)
        full = _common(drafts.pages, ids[:full])
        while full * size < sequence.known:
            content = contents.get(int(ids[full])) if full < len(ids) else None
            if content is None or content.before != self._key(sequence, drafts, full):
                break
            text = sequence.tokens(full * size, min(sequence.known, (full + 1) * size))
            count = _common(content.tokens, text)
            if count < size:
                drafts.pages = ids[:full].copy()
                return full * size + count
            full += 1
        if full != len(drafts.pages):
            drafts.pages = ids[:full].copy()
        return full * size

    def _note(self, sequence: Sequence, drafts: ModelDrafts, start: int, end: int) -> None:
        """Note that the small model computes the tokens from `start` to `end` of a request's text."""
        size, ids = self._size, sequence.pages
        for page in range(start // size, -(-end // size) if end > start else 0):
            tokens = sequence.tokens(page * size, min(end, (page + 1) * size)).copy()
            self.contents[int(ids[page])] = PageContent(self._key(sequence, drafts, page), tokens)

    def _key(self, sequence: Sequence, drafts: ModelDrafts, page: int) -> int:
        """Return the key of the text before a page."""
        keys, size = drafts.keys, self._size
        while len(keys) <= page:
            place = len(keys) - 1
            keys.append(hash((keys[-1], sequence.tokens(place * size, (place + 1) * size).tobytes())))
        return keys[page]


def _common(one: IntArray, other: IntArray) -> int:
    """Return how many leading numbers of two arrays are the same."""
    count = min(len(one), len(other))
    if one[:count].tobytes() == other[:count].tobytes():  # as most are: a tenth of the time
        return count
    differing = np.flatnonzero(one[:count] != other[:count])
    return int(differing[0]) if len(differing) else count
