"""Takes pages from a session that shares them into this one's host memory, and adds them to its tree."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.host import Host
from rekindle._src.kvcache.digest import (
    LOOKUP_SECRET,
    is_salted,
    page_digest,
    page_keys,
    root_lookup_key,
    salt_key,
)
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.tiers.host import Held
from rekindle._src.kvcache.tiers.restoring import likeliest
from rekindle._src.session.cache_writer import CacheWriter, in_slices
from rekindle._src.session.page_sharing import PageAddress, Source, parts
from rekindle.errors import ProcessLost, RekindleError

log = logging.getLogger("rekindle.cache")

WARM_PAGES = 4096  # the most that a new session takes from each neighbour


class Pulled(NamedTuple):
    """The pages that were taken."""

    tokens: int  # that these pages add to this session's tree
    pages: int
    bytes: int
    seconds: float
    held: Held  # the pages stay in host memory until it is released


class _Missing(NamedTuple):
    """The pages of a prompt that this session lacks."""

    root_key: bytes  # of this session's tree at the look-up
    present: int  # leading pages that are here
    digests: list[bytes]
    before: list[bytes]  # the digests of the latest that are here


class Puller:
    """Takes pages for one session. Its methods block, in any thread but the session's own."""

    def __init__(self, host: Host, writer: CacheWriter) -> None:
        self._host = host
        self._cache, self._tiers = parts(writer)
        self._beside = writer.state_tiers

    @property
    def identity(self) -> Identity:
        """The model and layout that the pages belong to."""
        assert self._tiers.identity is not None, "checked by `parts`"
        return self._tiers.identity

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(leaf.nbytes for leaf in self.identity.leaves)

    @property
    def budget(self) -> int:
        """Bytes of host memory for pages."""
        return self._tiers.host.budget

    def prefix(self, address: PageAddress, tokens: IntArray, salt: str | None = None) -> Pulled:
        """Take the leading pages of `tokens` that are not here. Raise the errors of `Source` if none arrived."""
        start, identity, host = time.perf_counter(), self.identity, self._tiers.host
        missing = self._missing(tokens, salt)
        held = Held(host, missing.digests)
        arrived: set[int] = set()

        def keys_of(pages: slice, lookup: bytes) -> list[int]:
            return page_keys(tokens, self._cache.page_size, previous=salt_key(salt), secret=lookup)[pages]

        try:
            if missing.digests:
                with Source(address, identity) as source:
                    wanted = slice(missing.present, missing.present + len(missing.digests))
                    source_keys = keys_of(wanted, source.lookup)
                    for index, payload in source.fetch(missing.digests, source_keys, host.memory):
                        host.put(missing.digests[index], payload, owned=True)
                        arrived.add(index)
        except ProcessLost:
            if not arrived:  # pages that came before the connection broke are of use
                held.release()
                raise
        except BaseException:
            held.release()
            raise
        leading = 0
        while leading in arrived:
            leading += 1
        if leading and self._cache.states is not None:
            end = missing.present + leading
            last = [*missing.before, *missing.digests[:leading]][-self._cache.states.reach :]
            self._take_beside(address, last, partial(keys_of, slice(end - len(last), end)))
        grafted = self._host.ask(partial(self._graft, tokens, salt, missing, leading)) if leading else 0
        seconds = time.perf_counter() - start
        return Pulled(grafted * identity.page_size, len(arrived), len(arrived) * self.page_bytes, seconds, held)

    def likeliest(self, address: PageAddress, most: int | None = None) -> Pulled:
        """Take the pages that the other session is likeliest to need again: `most` bytes, or half of host memory."""
        start, identity, host, cache = time.perf_counter(), self.identity, self._tiers.host, self._cache
        room = (host.budget // 2 if most is None else most) - host.nbytes
        count = min(WARM_PAGES, room // self.page_bytes)
        root_key = cache.root_key
        arrived: list[Page] = []
        if count > 0:
            with Source(address, identity) as source:
                listed = source.list_pages(count)
                keys, source_keys = _keys(listed, identity), _keys(listed, identity, source.lookup)
                listed = [page for page in listed if page.digest in keys]
                existing = self._local([(keys[page.digest], page.digest) for page in listed])
                by_digest = {page.digest: page for page in listed}
                digests = [digest for digest in likeliest(listed) if digest not in existing]
                for index, payload in source.fetch(digests, [source_keys[digest] for digest in digests], host.memory):
                    host.put(digests[index], payload, owned=True, cold=True)
                    arrived.append(by_digest[digests[index]])
                wanted = [page.digest for page in arrived]
                self._take_beside(address, wanted, lambda _: [source_keys[digest] for digest in wanted])
                stored = existing | {page.digest for page in arrived}
                order = [page for page in listed if page.digest in stored]

                def graft() -> int:
                    return snapshot.graft(cache, order) if cache.root_key == root_key else 0

                if arrived:
                    self._host.ask(graft)
        seconds, size = time.perf_counter() - start, identity.page_size
        return Pulled(len(arrived) * size, len(arrived), len(arrived) * self.page_bytes, seconds, Held(host, ()))

    def _take_beside(self, address: PageAddress, digests: Sequence[bytes], keys: Callable[[bytes], list[int]]) -> None:
        """Take what the other session has beside pages, `keys` being theirs by its secret; do without if that fails."""
        tiers = self._beside
        if tiers is None or tiers.identity is None or not digests:
            return
        try:
            with Source(address, tiers.identity) as source:
                for index, payload in source.fetch(digests, keys(source.lookup), tiers.host.memory):
                    tiers.host.put(digests[index], payload, owned=True)
        except RekindleError as error:
            log.debug("pages came without what is beside them: %s", error)

    def _missing(self, tokens: IntArray, salt: str | None) -> _Missing:
        cache, tiers, size = self._cache, self._tiers, self._cache.page_size

        def look() -> tuple[bytes, list[bytes]]:
            """Return the tree's root, and the digests of the root of `tokens` and of leading pages that are here."""
            here = [cache.digest_of(cache.root_of(salt))]
            for node in cache.find(tokens, salt):
                if not (node.page or tiers.has(cache.digest_of(node))):
                    break
                here.append(cache.digest_of(node))
            return cache.root_key, here

        root_key, here = self._host.ask(look)
        count, parent, reach = len(here) - 1, here[-1], 0 if cache.states is None else cache.states.reach
        digests = []
        most = count + self.budget // max(1, self.page_bytes)
        for page in range(count, min(len(tokens) // size, most)):
            parent = page_digest(parent, tokens[page * size : (page + 1) * size])
            digests.append(parent)
        return _Missing(root_key, count, digests, here[max(1, len(here) - reach) :])

    def _graft(self, tokens: IntArray, salt: str | None, missing: _Missing, leading: int) -> int:
        """Add the pages to the tree, on the session's loop. Return how many."""
        cache = self._cache
        if cache.root_key != missing.root_key:  # the weights were swapped meanwhile
            return 0
        stop = (missing.present + leading) * cache.page_size
        nodes = cache.graft(tokens[:stop], after=cache.root_of(salt))
        if nodes is None:
            return 0
        for node in nodes:
            node.last_use = node.last_use or cache.clock()
        return leading

    def _local(self, named: Sequence[tuple[int, bytes]]) -> set[bytes]:
        """Return the digests of the pages that are on any tier of this session."""
        cache, tiers = self._cache, self._tiers

        def look(part: Sequence[tuple[int, bytes]]) -> list[bytes]:
            nodes = ((digest, cache.by_digest(key, digest)) for key, digest in part)
            return [digest for digest, node in nodes if (node is not None and node.page) or tiers.has(digest)]

        return set(in_slices(self._host, named, look))


def _keys(pages: Sequence[Page], identity: Identity, secret: bytes = LOOKUP_SECRET) -> dict[bytes, int]:
    """Return lookup keys by digest, of pages whose parents come before them, in the process with this `secret`."""
    keys: dict[bytes, tuple[int, int]] = {identity.root: (0, 0)}
    for page in pages:
        if page.parent not in keys and is_salted(page.parent, identity.root):
            keys[page.parent] = root_lookup_key(page.parent), 0
        parent = keys.get(page.parent)
        if parent is not None:
            key, depth = parent
            page_key = page_keys(page.tokens, identity.page_size, first=depth, previous=key, secret=secret)
            keys[page.digest] = page_key[0], depth + 1
    return {page.digest: keys[page.digest][0] for page in pages if page.digest in keys}
