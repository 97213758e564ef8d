"""Drafts of what the session has seen: an index over the texts of its requests, prompts and outputs.

A table keeps, for each run of `SIZE` tokens, the place after its latest occurrence in any text. Runs share its entries,
the later one wins, and what an entry says is compared with the text itself. A token costs one entry and one look-up,
and the table never grows. Texts are kept in order of use and leave the index, the oldest first, when their bytes exceed
what it has.

A request sees texts of its own namespace alone, as it does with pages.
"""

from __future__ import annotations

import dataclasses
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from rekindle._src.core.prefix import SHARED, PageNamespace
from rekindle._src.core.records import IntArray
from rekindle._src.drafts.kind import DraftKind
from rekindle._src.drafts.repeats import (
    BITS,
    MASK,
    SIZE,
    FollowedText,
    RepeatChances,
    RepeatDrafter,
    are_texts,
    keys_of,
    last_key,
)
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.drafting.proposal import RequestDrafts
from rekindle._src.scheduling.sequence import Limits, Sequence

SUFFIX_BYTES = 16 << 20  # half for the table: a million runs of tokens, and two million tokens of texts
DEPTH = 16  # tokens by which two places are compared, at most
_PLACES = 24  # bits of a place in its text
_PLACE = (1 << _PLACES) - 1
_EMPTY = array("i")
_TEXT_BYTES = 512  # of a text without its tokens


class IndexedText:
    """A text in the index: a request's, as far as it is known."""

    __slots__ = ("namespace", "number", "place", "tokens")

    def __init__(self, number: int, namespace: PageNamespace, tokens: array[int]) -> None:
        self.number, self.namespace, self.tokens = number, namespace, tokens
        self.place = 0  # the entry of its last tokens, before it was added

    @property
    def bytes(self) -> int:
        """The bytes that it takes."""
        return _TEXT_BYTES + sys.getsizeof(self.tokens)


def mixed_in(namespace: PageNamespace) -> int:
    """Return the number that a namespace mixes into the keys of its runs. It is the same in every process."""
    return namespace.key & MASK


class SuffixIndex:
    """Texts, and the last place of each run of `SIZE` tokens in the texts of a namespace."""

    def __init__(self, most_bytes: int = SUFFIX_BYTES) -> None:
        self._entries = max(64, most_bytes // 16) | 1  # odd, or half of the places would hold most runs
        zeros: Any = np.zeros(self._entries, np.int64)  # pages of memory that are not written take none
        self.table: memoryview[int] = memoryview(zeros)  # of texts and places in them; 0: of none
        self._most_bytes = most_bytes - self.table.nbytes
        self.live: dict[int, IndexedText] = {}  # of requests that go on
        self.ended: OrderedDict[int, IndexedText] = OrderedDict()  # the one that was used last is the last one
        self._ended_bytes = 0
        self._texts = 0

    @property
    def bytes(self) -> int:
        """The bytes of the table and of the texts of requests that have ended; live ones add their sequences'."""
        return self.table.nbytes + self._ended_bytes

    @property
    def most_tokens(self) -> int:
        """How many tokens of texts there is room for."""
        return self._most_bytes // 4

    def entry(self, key: int, mixed: int) -> int:
        """Return the entry of a run in the table, by its key and by what its namespace mixes in."""
        return (key ^ mixed) % self._entries

    def begin(self, namespace: PageNamespace, tokens: IntArray, known: int = 0) -> IndexedText:
        """Add a text that grows by `IndexedText.tokens` and `table` alone, until `end`.

        Its first `known` tokens are not added again if the index has them, as those of an earlier request.
        """
        self._texts += 1
        first = 0
        if known > DEPTH and self._has(namespace, tokens[known - DEPTH : known]):
            first = known - DEPTH
        text = IndexedText(self._texts, namespace, array("i", tokens[first:].astype(np.int32).tobytes()))
        self.live[text.number] = text
        ids = tokens[first:].astype(np.int64)
        new = keys_of(ids)[max(0, known - first - SIZE + 1) if first else 0 :]
        entries = (new ^ mixed_in(namespace)) % self._entries
        places = np.arange(len(ids) - len(new) + 1, len(ids) + 1, dtype=np.int64)
        table = np.asarray(self.table)
        before: Any = slice(-1)
        if len(ids) and ids.min() < 0:
            before = are_texts(ids)[len(ids) - SIZE + 1 - len(new) :]
            before[-1:] = False
        table[entries[before]] = text.number << _PLACES | places[before]  # of equal ones the last
        if len(ids) >= SIZE and ids[-SIZE:].min() >= 0:
            last = self.entry(last_key(text.tokens), mixed_in(namespace))
            text.place = int(table[last])
            table[last] = text.number << _PLACES | len(ids)
        return text

    def end(self, text: IndexedText) -> None:
        """Note that a text grows no more. The oldest ones leave the index if there is no room for it."""
        if self.live.pop(text.number, None) is None:
            return
        text.tokens = array("i", text.tokens)  # without room to grow
        self.ended[text.number] = text
        self._ended_bytes += text.bytes
        while self._ended_bytes > self._most_bytes:
            _, oldest = self.ended.popitem(last=False)
            self._ended_bytes -= oldest.bytes

    def used(self, text: IndexedText) -> None:
        """Note that a text was of use: others leave the index before it."""
        if text.number in self.ended:
            self.ended.move_to_end(text.number)

    def find(self, place: int, namespace: PageNamespace, tokens: array[int]) -> tuple[IndexedText, int, int] | None:
        """Return the text that `place`, an entry of the table, is of, the place in it and by how many tokens, at most
        `DEPTH`, what precedes it is the end of `tokens`; None if those are fewer than `SIZE`, or it is of another
        namespace.
        """
        number, at = place >> _PLACES, place & _PLACE
        text = self.live.get(number) or self.ended.get(number)
        if text is None or text.namespace != namespace:
            return None
        earlier, end = text.tokens, len(tokens)
        if at >= len(earlier) and earlier is not tokens:
            return None  # nothing followed there yet
        if earlier[at - SIZE : at] != tokens[end - SIZE : end] or min(tokens[end - SIZE : end], default=-1) < 0:
            return None
        same, most = SIZE, min(DEPTH, at, end)
        while same < most and earlier[at - same - 1] == tokens[end - same - 1] >= 0:
            same += 1
        return text, at, same

    def clear(self) -> None:
        """Forget all texts, also the texts of requests that go on."""
        np.asarray(self.table)[:] = 0
        self.live.clear()
        self.ended.clear()
        self._ended_bytes = 0

    def _has(self, namespace: PageNamespace, tokens: IntArray) -> bool:
        """True if the table leads to a text with these tokens. At most `DEPTH` tokens are compared."""
        wanted = array("i", tokens.astype(np.int32).tobytes())
        key = last_key(wanted)
        match = self.find(self.table[self.entry(key, mixed_in(namespace))], namespace, wanted)
        if match is None or match[2] < len(wanted):
            return False
        self.used(match[0])
        return True


class PastLookup(FollowedText):
    """Follows what came after a request's latest tokens at their last occurrence in any text that it may see."""

    __slots__ = ("_entries", "_index", "_key", "_mixed", "_own_tokens", "_table", "source", "text")
    words = "drafts of earlier texts"

    def __init__(self, chances: RepeatChances, index: SuffixIndex, text: IndexedText) -> None:
        super().__init__(chances, text.tokens)
        self._index, self.text = index, text
        self._own_tokens, self._table = text.tokens, index.table
        self._mixed, self._entries = mixed_in(text.namespace), len(index.table)
        self.source: IndexedText | None = None  # that is followed
        self._key = last_key(self._own_tokens)
        self._follow(text.place)

    def _append(self, token: int) -> int:
        self._key = key = (self._key << BITS | token) & MASK
        tokens, table = self._own_tokens, self._table
        tokens.append(token)
        length = len(tokens)
        if length < SIZE:  # no run yet, whose entry would displace another's
            return 0
        entry = (key ^ self._mixed) % self._entries
        place = table[entry]
        table[entry] = self.text.number << _PLACES | length
        return place

    def _follow(self, place: int) -> None:
        match = self._index.find(place, self.text.namespace, self._own_tokens) if place else None
        self.ready = match is not None
        if match is None:
            self.source = self._earlier = None
            return
        self.source, self._at, same = match
        self._earlier = self.source.tokens
        self._first = self._length = same - SIZE

    def learn(self, drafted: int, accepted: int) -> None:
        super().learn(drafted, accepted)
        if accepted and self.source is not None:
            self._index.used(self.source)


class SuffixDrafter(RepeatDrafter):
    """Proposes what followed a request's latest tokens in the texts of the session, its own included."""

    name = "suffix"

    def __init__(self, most: int = 0, most_bytes: int = SUFFIX_BYTES) -> None:
        super().__init__(most)
        self.index = SuffixIndex(most_bytes)

    def begin(self, sequence: Sequence) -> RequestDrafts:
        text = self.index.begin(sequence.namespace, sequence.tokens.text(), sequence.cached_tokens)
        return PastLookup(self.chances, self.index, text)

    def end(self, sequence: Sequence) -> None:
        drafts = sequence.drafting.by_name.get(self.name)
        if isinstance(drafts, PastLookup):
            self.index.end(drafts.text)

    @property
    def most_tokens(self) -> int:
        return self.index.most_tokens

    def remember(self, texts: Iterable[IntArray]) -> None:
        for tokens in texts:
            self.index.end(self.index.begin(SHARED, tokens))

    def forget(self) -> None:
        self.index.clear()


@dataclasses.dataclass(frozen=True)
class SuffixKind(DraftKind):
    """The drafter of `drafts="suffix"`."""

    most: int = 0

    def drafter(self, limits: Limits) -> Drafter:
        return SuffixDrafter(self.most)
