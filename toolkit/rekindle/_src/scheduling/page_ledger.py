"""The ledger of KV pages: sequences take them from the pool and the cache, publish them, and give them back."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.prompt_hit import PromptHit
from rekindle._src.core.records import IntArray, PageCopy, PageMove, Request
from rekindle._src.kvcache.cached_path import cached_path
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.pool import PagePool, pages_for
from rekindle._src.kvcache.side import SideCache
from rekindle._src.kvcache.tiers.tiers import DiskFetch, Tiers
from rekindle._src.kvcache.tree import PrefixCache, PrefixMatch
from rekindle._src.scheduling.sequence import Sequence
from rekindle._src.scheduling.side_rules import SideRules

_NOTHING = PrefixMatch((), 0)


PageMoves = tuple[PageMove, ...]
StepMoves = tuple[PageMoves, PageMoves, PageMoves, PageMoves]


class Loan(NamedTuple):
    """A page of another sequence or of the tree; a sequence copies its first tokens when it is admitted.

    Until then the pages before it are held as well: a cached page can be evicted unless a page that follows it is held.
    """

    owner: Sequence | Node
    pages: IntArray  # up to and including the one to copy; that one alone if it is the tree's
    tokens: int

    @property
    def page(self) -> int:
        return int(self.pages[-1])


class PageLedger:
    """Offers the page pool and the prefix cache in one interface; collects the page moves of the step being planned.

    Full pages are shared. Where two sequences part within a page, the second one gets a copy of the first one's page,
    and computes the rest. If the first one is still running, the second one holds that page until it is admitted: see
    `lend`.
    """

    def __init__(
        self, pool: PagePool, cache: PrefixCache | None, page_size: int, sides: SideRules | None = None
    ) -> None:
        assert cache is None or cache.pool is pool, "the cache keeps pages of another pool"
        self.pool, self.cache, self._page_size = pool, cache, page_size
        self.sides = sides or SideRules()
        self._offload: list[PageMove] = []
        self._restore: list[PageMove] = []
        self._retired: deque[tuple[int, list[int]]] = deque()  # (last step that reads them, merged duplicates)
        self._lent: dict[Sequence, Loan] = {}
        self._copied: list[tuple[Loan, int]] = []  # copied in the step being planned: the loan and the new page
        self._copying: deque[tuple[int, Loan]] = deque()  # (the step that copies it, the loan)

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones, and cached ones that no sequence holds."""
        return self.pool.free + self.pool.cached

    @property
    def retiring(self) -> bool:
        """True if pages become free when the steps in flight are committed."""
        return bool(self._retired or self._copying)

    @property
    def least_copied(self) -> int:
        """How many tokens at the beginning of a page are worth a copy of it; 0 if none are."""
        return 0 if self.cache is None else self.cache.least_copied

    def usable(self, request: Request) -> int:
        """Return how many pages `request` could have if it were alone: all except those pinned for other prefixes."""
        cache = self.cache
        total = self.pool.total - self.pool.quarantined
        if cache is None or not cache.pinned_pages:
            return total
        # What stands for all tokens of a prompt is of no use, see `keys`.
        reusable = request.reusable if self.sides.inside else min(request.reusable, request.prompt_length - 1)
        pinned = cache.pinned_prefix(request.prefix(self._page_size).first(reusable))
        return total - cache.pinned_pages + pinned

    def keys(self, sequence: Sequence) -> list[int]:
        """Return the keys of the pages that may come from the cache."""
        if self.cache is None:
            return []
        # An entry after the last token is of no use: that token is computed, since its logits choose the next one.
        reusable = sequence.reusable if self.sides.inside else min(sequence.reusable, sequence.tokens.known - 1)
        return sequence.tokens.keys(reusable // self._page_size)

    def cached_path(self, sequence: Sequence) -> list[int]:
        """Return the keys of the leading pages that are on the device; approximate, since tokens are not compared."""
        keys = self.keys(sequence)
        return keys[: self.cache.probe(keys)] if self.cache is not None else keys

    def cached(self, sequence: Sequence) -> int:
        """Return how many leading pages are on the device; approximate, since tokens are not compared."""
        return self.cache.probe(self.keys(sequence)) if self.cache is not None else 0

    def on_device(self, keys: list[int]) -> int | None:
        """Return how many leading pages are on the device where that may be more than can be used; else None."""
        return self.cache.depth(keys) if self.cache is not None and self.sides.on_tree else None

    def uncached(self, sequence: Sequence) -> int:
        """Return how many tokens the sequence would have to compute if it were admitted now, at least 1."""
        return max(1, sequence.tokens.known - self.cached(sequence) * self._page_size)

    @property
    def may_fetch(self) -> bool:
        """True if there may be pages that have to be read from disk before a match can use them."""
        cache = self.cache
        if cache is None or not isinstance(cache.host_tier, Tiers):
            return False
        return cache.host_tier.has_disk_pages or any(map(_fetches, cache.sides))

    def fetch(self, sequence: Sequence) -> tuple[DiskFetch, ...]:
        """Start to read the sequence's cached pages from disk, and what side caches have to continue them.

        Return the reads: none if there are no such pages, or computing them is quicker.
        """
        assert self.cache is not None
        assert isinstance(self.cache.host_tier, Tiers), "ask may_fetch before"
        prompt = self.keys(sequence), sequence.tokens.prefix()
        if self.cache.host_tier.finds_stored:
            self.cache.learn(*prompt)
        digests, in_host_memory = self.cache.to_fetch(*prompt)
        fetches = [self.cache.host_tier.fetch(digests, in_host_memory)]
        if (fetches[0] is not None or not digests) and any(map(_fetches, self.cache.sides)):
            for side, needed in self.cache.sides_to_fetch(*prompt):
                if needed and _fetches(side) and isinstance(side.tier, Tiers):
                    fetches.append(side.tier.fetch(needed, 0))
        return tuple(fetch for fetch in fetches if fetch is not None)

    def acquire(self, sequence: Sequence, spare: int, *, fetched: bool = False) -> int | None:
        """Take the pages of all known tokens, if `spare` more would be left. Return the first position to compute.

        None if they do not fit. Some were `fetched` from disk before.
        """
        pages = pages_for(sequence.tokens.known, self._page_size)
        if not self.has(pages - self.cached(sequence) + spare):
            return None  # without the exact match, which a long prompt that waits would pay for in each step
        match = _NOTHING
        cache = self.cache if sequence.generates or sequence.reusable else None
        if cache is not None:
            match = cache.match(self.keys(sequence), sequence.tokens.prefix())
        count = pages - match.on_device
        if not self.has(count + spare, match):
            return None
        if cache is not None:
            sequence.pages.add(cache.lock(match))
            sequence.tree.node = match.nodes[-1] if match.nodes else cache.root_of(sequence.namespace)
            sequence.tree.generation = cache.generation
        self.sides.admit(sequence, match, fetched=fetched)
        loan = self._loan(sequence, len(match.nodes), spare=self.available - count)
        fresh = self._take(count)
        sequence.pages.add(fresh)
        if cache is not None:
            self._restore += cache.restore(match, fresh[: len(match.nodes) - match.on_device])
        sequence.tree.published = len(match.nodes)
        if loan is not None:
            self._copied.append((loan, int(sequence.pages.ids[sequence.tree.published])))
        return self._start(sequence, sequence.tree.published, 0 if loan is None else loan.tokens)

    def forecast(self, sequence: Sequence) -> PromptHit:
        """Return where `acquire` would find the leading tokens of a sequence. Nothing is taken or counted."""
        assert self.cache is not None, "no pages are shared"
        prompt, size = (self.keys(sequence), sequence.tokens.prefix()), self._page_size
        if isinstance(self.cache.host_tier, Tiers) and self.cache.host_tier.finds_stored:
            self.cache.learn(*prompt)
        path = cached_path(self.cache, *prompt)
        used = path.nodes[: path.used]
        parent = used[-1] if used else self.cache.root_of(sequence.namespace)
        node, copied = self._copyable(sequence, len(used), parent)
        cached = self._start(sequence, len(path.nodes), copied if path.used == len(path.nodes) else 0)
        tokens = Counter(place for place in path.places for _ in range(size))
        tokens["device"] += copied
        if path.places:  # the last page has the token that is computed in any case, or begins as the page to copy does
            tokens[path.places[-1]] -= tokens.total() - cached
        return PromptHit(
            tokens["device"], tokens["host"], tokens["disk"], self._start(sequence, len(used), copied),
            path.fetch_seconds, path.compute_seconds, (path.reached - len(path.nodes)) * size,
            tuple(one.key for one in (*path.nodes, node) if one is not None),
        )  # fmt: skip

    def _start(self, sequence: Sequence, pages: int, copied: int) -> int:
        """Return the first position to compute after `pages` from the cache and `copied` tokens of the next one."""
        # The last token is computed even if its page is there: its logits choose the next one.
        return max(0, min(pages * self._page_size + copied, sequence.tokens.known - 1))

    def _loan(self, sequence: Sequence, pages: int, spare: int) -> Loan | None:
        """Take the longest beginning of the page after the matched `pages`, holding one of `spare` pages if need be.

        This ends the loan that the sequence has, unless that loan is the one returned.
        """
        own = self._lent.get(sequence)
        lent = self._lent_behind(sequence, pages)
        node, tokens = self._copyable(sequence, pages, sequence.tree.node)
        if tokens > lent and node is not None:
            page = np.array([node.page], np.int32)
            if spare or not self.pool.unheld(page):
                self.give_back(sequence)
                self.pool.share(page)
                return Loan(node, page, tokens)
        if own is None or not lent:
            self.give_back(sequence)
            return None
        del self._lent[sequence]
        return own._replace(tokens=lent)

    def has(self, count: int, match: PrefixMatch = _NOTHING) -> bool:
        """True if `count` pages in addition to the match's can be taken now; ends all loans if that is necessary."""
        if count <= self.available - self.pool.unheld(match.pages):
            return True
        if not self._lent:
            return False
        lent, loans = np.unique(np.concatenate([loan.pages for loan in self._lent.values()]), return_counts=True)
        if count > self.available + self.pool.held_alone(lent, loans):
            return False  # running sequences hold most of these pages as well
        self.reclaim()
        return count <= self.available - self.pool.unheld(match.pages)

    def lend(self, owner: Sequence, waiter: Sequence, index: int, tokens: int) -> None:
        """Let a waiting sequence copy the first `tokens` of another one's page when it is admitted."""
        start = index * self._page_size
        stop = start + tokens
        if self._node(owner) is None or owner.shareable < stop or owner.namespace != waiter.namespace:
            return
        if not np.array_equal(owner.tokens.names(0, stop), waiter.tokens.names(0, stop)):
            return  # keys agreed by chance
        self.give_back(waiter)
        loan = self._lent[waiter] = Loan(owner, owner.pages.ids[: index + 1].copy(), tokens)
        self.pool.share(loan.pages)

    def copied(self, sequence: Sequence, keys: list[int]) -> int:
        """Return how many tokens a waiting sequence can copy after its first pages, which have these keys."""
        return max(self._lent_behind(sequence, len(keys)), self._in_tree(sequence, keys)[1])

    def _lent_behind(self, sequence: Sequence, pages: int) -> int:
        loan = self._lent.get(sequence)
        if loan is None or len(loan.pages) != pages + 1:
            return 0
        return max(0, min(loan.tokens, sequence.reusable - pages * self._page_size))

    def _copyable(self, sequence: Sequence, pages: int, parent: Node | None) -> tuple[Node | None, int]:
        """Return the page after `parent`, the last of `pages`, to copy from, and how many tokens; None and 0 if there
        is none."""
        node, tokens = self._in_tree(sequence, sequence.tokens.keys(pages))
        return (node, tokens) if node is not None and node.parent is parent else (None, 0)

    def _in_tree(self, sequence: Sequence, keys: list[int]) -> tuple[Node | None, int]:
        """Return a page of the tree to copy after the first pages of a sequence, and the number of common tokens."""
        start, stop = len(keys) * self._page_size, min(sequence.reusable, sequence.tokens.known - 1)
        if not self.least_copied or self.cache is None or stop - start < self.least_copied:
            return None, 0
        return self.cache.beginning(keys[-1] if keys else sequence.namespace.key, sequence.tokens.names(start, stop))

    def give_back(self, sequence: Sequence) -> None:
        """End the loan of a sequence, if it has one; it computes those tokens."""
        loan = self._lent.get(sequence)
        if loan is not None:
            self._repay(loan)
            del self._lent[sequence]

    def reclaim(self) -> None:
        """End all loans, because pages are short or their content is of no use."""
        for sequence in tuple(self._lent):
            self.give_back(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Give the sequence one more page; False if no page is free."""
        if not self.has(1):
            return False
        sequence.pages.add(self._take(1))
        return True

    def cover(self, sequence: Sequence, count: int, slots: int) -> int:
        """Return how many of `count` more rows have pages. Takes one only while each of `slots` could take one too."""
        size = self._page_size
        while sequence.epoch.planned + count > sequence.pages.count * size:
            if self.available <= slots or not self.grow(sequence):
                return sequence.pages.count * size - sequence.epoch.planned
        return count

    def publish(self, sequence: Sequence, last_step: int) -> tuple[int, int]:
        """Enter the sequence's committed full pages into the tree. Return their half-open range.

        `last_step` is the step that was planned last: merged duplicates are kept until it is committed.
        """
        published = self._publish(sequence, last_step)
        if self.sides.on_tree:
            self.sides.publish(sequence, self._node(sequence), last_step)
        return published

    def _publish(self, sequence: Sequence, last_step: int) -> tuple[int, int]:
        first, last = sequence.tree.published, sequence.shareable // self._page_size
        node = self._node(sequence)
        if self.cache is None or node is None or last <= first:
            return first, first
        size = self._page_size
        pages = sequence.pages.ids[first:last].tolist()
        published = self.cache.publish(
            node, sequence.tokens.keys(last)[first:last], sequence.tokens.names(first * size, last * size), pages
        )
        if published is None:
            return first, first
        if published.duplicates:
            sequence.pages.replace(first, published.pages)
            self._retired.append((last_step, published.duplicates))
        sequence.tree.node, sequence.tree.published = published.node, last
        for follower in sequence.extensions.followers:
            if follower.keeps:
                follower.published(self.cache.names_to(published.node))
        return first, last

    def release(self, sequence: Sequence) -> None:
        """Return all pages of a sequence that no step in flight contains, to the cache or to the pool."""
        self.sides.release(sequence)
        self.pool.release(sequence.pages.ids)
        node = self._node(sequence)
        if self.cache is not None and node is not None:
            self.cache.unreference(node)
        sequence.leave()

    def quarantine(self, sequence: Sequence) -> list[int]:
        """Never use the pages of a sequence again, nor pages lent to it. Return the miscounted ones."""
        loan = self._lent.pop(sequence, None)
        return self._quarantine(
            sequence.pages.ids if loan is None else np.concatenate([sequence.pages.ids, loan.pages])
        )

    def collect(self, oldest_step: int | None) -> list[int]:
        """Release merged duplicates that no step in flight reads; `oldest_step` is the oldest one in flight.

        Return the miscounted pages among them.
        """
        self.sides.collect(oldest_step)
        miscounted: list[int] = []
        while self._retired and _is_over(self._retired[0][0], oldest_step):
            pages = self._retired.popleft()[1]
            try:
                self.pool.release(pages)
            except AssertionError:
                miscounted += self._quarantine(pages)
        while self._copying and _is_over(self._copying[0][0], oldest_step):
            loan = self._copying.popleft()[1]
            try:
                self._repay(loan)
            except AssertionError:
                miscounted += self._quarantine(loan.pages)
        return miscounted

    def _quarantine(self, pages: IntArray | list[int]) -> list[int]:
        miscounted = self.pool.miscounted(pages)
        self.pool.quarantine(pages)
        if self.cache is not None:
            self.cache.detach([PageMove(int(page), b"") for page in pages])
        return miscounted

    def moves(self) -> StepMoves:
        """Take out the moves of the step being planned: offload and restore, of pages and then of side caches."""
        moves = tuple(self._offload), tuple(self._restore)
        self._offload, self._restore = [], []
        return *moves, *self.sides.moves()

    def copies(self, step: int) -> tuple[PageCopy, ...]:
        """Take out the copies of `step`, which is being planned; their sources are held until it is committed."""
        copied, self._copied = self._copied, []
        self._copying += ((step, loan) for loan, _ in copied)
        return tuple(PageCopy(loan.page, page) for loan, page in copied)

    def references(self, sequences: list[Sequence]) -> NDArray[np.int32]:
        """Return the reference count of each page if only `sequences` hold pages; for integrity checks."""
        counts = np.zeros(self.pool.num_pages, np.int32)
        if self.cache is not None:
            counts += self.cache.references()
        held: list[IntArray | list[int]] = [sequence.pages.ids for sequence in sequences]
        loans = [*self._lent.values(), *(loan for loan, _ in self._copied), *(loan for _, loan in self._copying)]
        for pages in (*held, *(pages for _, pages in self._retired), *(loan.pages for loan in loans)):
            np.add.at(counts, np.asarray(pages, np.int32), 1)
        return counts

    def _node(self, sequence: Sequence) -> Node | None:
        """Return the tree node that the sequence continues; None if the tree was reset after its admission."""
        if self.cache is None or sequence.tree.generation != self.cache.generation:
            return None
        return sequence.tree.node

    def _repay(self, loan: Loan) -> None:
        """Return the pages of a loan, so that those in the tree can be evicted again."""
        self.pool.release(loan.pages)
        assert self.cache is not None, "pages are lent without a cache"
        if isinstance(loan.owner, Node):
            self.cache.offer(loan.owner.key, loan.page)
            return
        full = min(len(loan.pages), loan.owner.tokens.known // self._page_size)
        for key, page in list(zip(loan.owner.tokens.keys(full), loan.pages.tolist(), strict=False))[-2:]:
            self.cache.offer(key, page)

    def _take(self, count: int) -> list[int]:
        shortage = count - self.pool.free
        if shortage > 0:
            assert self.cache is not None, f"{count} pages asked for, {self.pool.free} free"
            self._offload += self.cache.evict(shortage)
        return self.pool.take(count)


def _is_over(step: int, oldest_step: int | None) -> bool:
    """True if a step is not in flight; `oldest_step` is the oldest one in flight."""
    return oldest_step is None or step < oldest_step


def _fetches(side: SideCache) -> bool:
    """True if entries of a side cache are on disk."""
    return isinstance(side.tier, Tiers) and side.tier.has_disk_pages
