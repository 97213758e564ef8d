"""Cached pages for other sessions: at an address, for those who know the secret, and from there into host memory.

`PageSource` is the receiving side of a connection, `SharedPages` the sending one, and `Puller` adds the pages that came
to the tree.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from rekindle._src.channels import greeting
from rekindle._src.channels.bulk import BulkChannel
from rekindle._src.channels.channel import MessageKind
from rekindle._src.core import words
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.prefix import Prefix, is_namespace, key_of
from rekindle._src.kvcache import Node, PrefixCache, Tiers
from rekindle._src.kvcache.digest import (
    DIGEST_SIZE,
    LOOKUP_SECRET,
    page_digest,
    page_keys,
)
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.persist.identity import Identity, shown, verify
from rekindle._src.kvcache.persist.segment import (
    Memory,
    Page,
    Payload,
    decode,
    encode,
    from_bytes,
    leaves_in,
    pages_of,
    records_of,
)
from rekindle._src.kvcache.persist.snapshot import connected
from rekindle._src.kvcache.tiers.host import HostHold
from rekindle._src.kvcache.tiers.restoring import likeliest
from rekindle._src.kvcache.tiers.side_tiers import SideStore
from rekindle._src.kvcache.writer import CacheWriter, PageRecord, SessionLoop, in_slices
from rekindle.errors import ConfigError, ProcessLost, RekindleError, SnapshotRefused, StoreError

log = logging.getLogger("rekindle.cache")
WANTED = np.dtype([("digest", "u1", (DIGEST_SIZE,)), ("key", "<u8")])
CONNECT_SECONDS, SILENCE = 5.0, 30.0
MOST_WANTED = 1 << 16  # pages in one message


class PageAddress(NamedTuple):
    """The address at which a session shares its pages, and the secret that it expects."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"


class Introduction(NamedTuple):
    """The other side's first message."""

    refused: str | None  # the reason why its pages don't fit
    sealed: bool  # True if it wants seals
    memory: Any  # the memory that it offers to share
    lookup: bytes  # the secret of its pages' lookup keys


def introduction(identity: Identity, *, sealed: bool, memory: Any = None, lookup: bytes = b"") -> bytes:
    """Return the first message of both sides: the identity of their pages, and True if payloads have to be sealed."""
    fields = {
        **identity.fields(), "leaves": identity.leaves, "sealed": sealed, "memory": memory, "lookup": lookup.hex(),
    }  # fmt: skip
    return json.dumps(fields).encode()


def read_introduction(identity: Identity, content: bytes) -> Introduction:
    """Read the other side's introduction and compare it with `identity`. Raise StoreError if it is malformed."""
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"what came is no introduction: {error}") from error
    if not isinstance(header, dict):
        raise StoreError("what came is no introduction")
    leaves, reason = leaves_in(header), identity.mismatch(Identity.stored_in(header))
    if reason is None and leaves != identity.leaves:
        reason = f"its pages are laid out as {shown(leaves)}, this session's as {shown(identity.leaves)}"
    try:
        lookup = bytes.fromhex(header.get("lookup", ""))
    except (TypeError, ValueError) as error:
        raise StoreError(f"what came is no introduction: {error}") from error
    return Introduction(reason, bool(header.get("sealed", True)), header.get("memory"), lookup)


class PageSource:
    """A connection, made at once. Every method raises ProcessLost if the other side is gone. Use it in one thread."""

    def __init__(self, address: PageAddress, identity: Identity) -> None:
        """Raise ProcessRefused without the right secret, SnapshotRefused if the pages are of another model."""
        self._identity = identity
        self._page_bytes = sum(leaf.nbytes for leaf in identity.leaves)
        try:
            connection = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        except OSError as error:
            raise ProcessLost(f"no pages are shared at {address!r}: {error}. Check the address") from error
        try:
            keys = greeting.call(connection, address.secret)
            self._channel = BulkChannel(connection, keys, silence=SILENCE)
            self._channel.send(MessageKind.IDENTITY, introduction(identity, sealed=self._channel.sealed))
            peer = read_introduction(identity, self._next(MessageKind.IDENTITY))
            if peer.refused is not None:
                raise SnapshotRefused(f"pages of {address!r} can't be used: {peer.refused}. Open both sessions alike")
            self.lookup: bytes = peer.lookup  # for `page_keys`: the other session looks its pages up by these keys
            self._channel.sealed = self._channel.sealed or peer.sealed
            if self._channel.take_memory(peer.memory):
                self._channel.send(MessageKind.MAPPED)
        except BaseException:
            connection.close()
            raise

    def list_pages(self, most: int) -> list[Page]:
        """Return up to `most` verified pages that the other session likely needs again, parents before children."""
        self._channel.send(MessageKind.LIST, most.to_bytes(8, "little"))
        header, records = decode(self._next(MessageKind.LISTED))
        reason = self._identity.mismatch(Identity.stored_in(header))
        if reason is not None:
            raise SnapshotRefused(f"pages can't be used: {reason}. Open both sessions alike")
        verify(self._identity, records, leaves_in(header))
        return connected(pages_of(records[:most]), self._identity.root)

    def fetch(self, digests: Sequence[bytes], keys: Sequence[int], memory: Memory) -> Iterator[tuple[int, Payload]]:
        """Yield the payloads of the pages that the other session has, each with its index in `digests`.

        `keys` are the pages' lookup keys in the other session. `memory(size)` allocates the bytes that a payload is
        received into.
        """
        for start in range(0, len(digests), MOST_WANTED):
            part = slice(start, start + MOST_WANTED)
            for index, payload in self._fetch(digests[part], keys[part], memory):
                yield start + index, payload

    def _fetch(self, digests: Sequence[bytes], keys: Sequence[int], memory: Memory) -> Iterator[tuple[int, Payload]]:
        wanted = np.zeros(len(digests), WANTED)
        wanted["digest"] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_SIZE)
        wanted["key"] = keys
        self._channel.send(MessageKind.WANT, wanted.tobytes())
        missing = np.ones(len(digests), np.bool_)
        while True:
            kind, content = self._receive()
            if kind is MessageKind.SENT:
                return
            if kind is not MessageKind.PAGES or len(content) % 4:
                raise ProcessLost(f"a {kind.name} message came in place of pages")
            indexes = np.frombuffer(content, "<i4")
            if not len(indexes):  # without end they would keep this thread
                raise ProcessLost("a message without pages came in place of pages")
            if indexes.min() < 0 or indexes.max() >= len(missing) or len(np.unique(indexes)) < len(indexes):
                raise ProcessLost("pages came that were not asked for")
            if not missing[indexes].all():
                raise ProcessLost("a page came twice")
            missing[indexes] = False
            buffers = [memory(self._page_bytes) for _ in indexes]
            views: list[Any] = [memoryview(buffer) for buffer in buffers]  # type: ignore[arg-type]
            self._channel.receive_into(views)
            for index, buffer in zip(indexes.tolist(), buffers, strict=True):
                yield index, from_bytes(buffer, self._identity.leaves)

    def _next(self, expected: MessageKind) -> bytes:
        kind, content = self._receive()
        if kind is not expected:
            raise ProcessLost(f"a {kind.name} message came in place of {expected.name}")
        return content

    def _receive(self) -> tuple[MessageKind, bytes]:
        kind, content = self._channel.receive()
        if kind is MessageKind.FAILED:
            raise SnapshotRefused(f"the other session gives no pages: {content.decode(errors='replace')[:1000]}")
        return kind, content

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


CONNECTIONS = 32  # at once, by peers that know the secret; further ones are refused
GREETINGS = 32  # connections at once that have not shown yet that they know it
# Read from the device between two steps, and sent together. Larger pieces delay steps, smaller ones move less.
PIECE_BYTES = 16 << 20
MOST_LISTED = 1 << 16
_LOOK_SECONDS = 0.2


class _PageRequest(NamedTuple):
    place: int  # index in the request
    record: PageRecord


class SharedPages(Drawable):
    """A session's cached pages at an address, where other sessions of the same model take them.

    Made by `await session.cache.share()`. It ends with `close()` or with its session.
    """

    # Any: the signature of a public class names no private type.
    def __init__(self, loop: Any, writer: Any, *, at: str, port: int, secret: bytes) -> None:
        self._loop: SessionLoop = loop
        self._writer: CacheWriter = writer
        self._secret = secret
        self._cache, self._tiers = parts(writer)
        try:
            self._server = socket.create_server((at, port), family=_family(at, port), backlog=CONNECTIONS)
        except OSError as error:
            raise ConfigError(
                "host", f"{at}:{port}", f"can't be listened at: {error}", "Pass an address of this machine, or port=0"
            ) from None
        self._at, self._port = at, int(self._server.getsockname()[1])
        self._server.settimeout(_LOOK_SECONDS)
        self._closed = False
        self._pending = greeting.PendingConnections(GREETINGS)
        self._live: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.sent_pages: int = 0
        self.sent_bytes: int = 0
        self._thread = threading.Thread(target=self._listen, name="rekindle sharing", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address "host:port" for other sessions' `session.cache.pull`."""
        return f"[{self._at}]:{self._port}" if ":" in self._at else f"{self._at}:{self._port}"

    @property
    def closed(self) -> bool:
        """True once it or its session was closed."""
        return self._closed or self._loop.closing

    def close(self) -> None:
        """Stop sharing pages. Closing it again is harmless."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.close()
        self._pending.close()
        with self._lock:
            live = list(self._live)
        for connection in live:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        if self.closed:
            return "<SharedPages: closed>"
        return f"<SharedPages at {self.address}: {words.count(self.sent_pages, 'page')} sent>"

    def _page_address(self) -> PageAddress:
        return PageAddress(self._at, self._port, self._secret)

    # -- its threads

    def _listen(self) -> None:
        with self._server:
            while not (self._closed or self._loop.is_over):
                try:
                    connection, (host, *_) = self._server.accept()
                except TimeoutError:
                    continue
                except OSError:
                    break
                self._pending.enter(connection, host)
                threading.Thread(target=self._serve, args=(connection,), name="rekindle sharing", daemon=True).start()
        self.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                try:
                    keys = greeting.listen(connection, self._secret)
                finally:
                    present = self._pending.leave(connection)
                if not present:
                    return  # it was shut down: its place is taken, or pages are shared no more
                channel = BulkChannel(connection, keys, silence=SILENCE)
                with contextlib.closing(channel):
                    if self._enter(connection):
                        self._talk(channel)
                    else:
                        channel.receive()
                        channel.send(MessageKind.FAILED, f"{CONNECTIONS} connections take pages already".encode())
        except (RekindleError, OSError) as error:
            log.debug("a connection to shared pages has ended: %s", error)
        finally:
            with self._lock:
                self._live.discard(connection)

    def _enter(self, connection: socket.socket) -> bool:
        """Count a connection that knows the secret. Return False if there are too many, or sharing has ended."""
        with self._lock:
            room = len(self._live) < CONNECTIONS and not self._closed
            if room:
                self._live.add(connection)
        return room

    def _talk(self, channel: BulkChannel) -> None:
        """Answer requests until the other side ends the connection, which raises."""
        tiers = self._tiers
        identity = tiers.identity
        assert identity is not None, "checked when sharing began"
        kind, content = channel.receive()
        if kind is not MessageKind.IDENTITY:
            channel.send(MessageKind.FAILED, b"it did not introduce itself")
            return
        peer = read_introduction(identity, content)
        side: SideStore | None = None
        for each in self._writer.sides if peer.refused is not None else ():
            other = read_introduction(each.identity, content)
            if other.refused is None:  # it asks for the entries of this side cache
                peer, side, tiers, identity = other, each, each.tiers, each.identity
                break
        channel.sealed = channel.sealed or peer.sealed
        if peer.refused is not None:
            channel.send(MessageKind.FAILED, peer.refused.encode())
            return
        memory = channel.offer_memory()
        channel.send(
            MessageKind.IDENTITY, introduction(identity, sealed=channel.sealed, memory=memory, lookup=LOOKUP_SECRET)
        )
        while True:
            kind, content = channel.receive()
            if tiers.identity != identity:
                channel.send(MessageKind.FAILED, b"its weights were swapped")
                return
            if kind is MessageKind.MAPPED:
                channel.pass_memory()
            elif kind is MessageKind.LIST:
                pages = self._list_pages(identity, min(MOST_LISTED, int.from_bytes(content, "little")))
                records = records_of(pages, identity.page_size)
                channel.send(MessageKind.LISTED, encode(identity.fields() | {"leaves": identity.leaves}, records))
            elif kind is MessageKind.WANT and len(content) % WANTED.itemsize == 0:
                self._send(channel, self._lookup(np.frombuffer(content, WANTED)), side)
            else:
                channel.send(MessageKind.FAILED, b"it does not understand what came")
                return

    def _list_pages(self, identity: Identity, most: int) -> list[Page]:
        """Return the pages likeliest to be needed again, parents before children."""
        cache, writer = self._cache, self._writer
        nodes = self._loop.ask(lambda: list(cache))

        def look(part: Sequence[Node]) -> list[Page]:
            return [writer.page_record(node).page for node in part if cache.has(node)]

        pages = connected(list(in_slices(self._loop, nodes, look)), identity.root)
        chosen = set(likeliest(pages, most)[:most])
        return [page for page in pages if page.digest in chosen]

    def _lookup(self, entries: np.ndarray) -> list[_PageRequest]:
        """Return the requested pages that the tree holds."""
        cache, writer = self._cache, self._writer
        requests = [
            (index, int(key), digest.tobytes())
            for index, (digest, key) in enumerate(zip(entries["digest"], entries["key"], strict=True))
        ]

        def look(part: Sequence[tuple[int, int, bytes]]) -> list[_PageRequest]:
            nodes = ((index, cache.by_digest(key, digest)) for index, key, digest in part)
            return [_PageRequest(index, writer.page_record(node)) for index, node in nodes if node is not None]

        return list(in_slices(self._loop, requests, look))

    def _send(self, channel: BulkChannel, requests: Sequence[_PageRequest], side: SideStore | None) -> None:
        """Send the contents of pages, or the entries that their nodes have in a side cache.

        The next piece is read while one is being sent.
        """
        indexes = {entry.record.page.digest: entry.place for entry in requests}
        for pairs in self._read(requests, side):
            content = np.array([indexes[page.digest] for page, _ in pairs], "<i4").tobytes()
            pieces = [_bytes_of(leaf) for _, payload in pairs for leaf in payload]
            channel.send_followed(MessageKind.PAGES, content, pieces)
            self.sent_pages += len(pairs)
            self.sent_bytes += sum(len(piece) for piece in pieces)
        channel.send(MessageKind.SENT)

    def _read(self, requests: Sequence[_PageRequest], side: SideStore | None) -> Iterator[list[tuple[Page, Payload]]]:
        identity = self._tiers.identity if side is None else side.identity
        assert identity is not None, "checked when sharing began"

        def read(records: Sequence[PageRecord], most: int) -> list[tuple[Page, Payload]]:
            if side is not None:
                return self._writer.entries_of(side, [record.node for record in records])
            return self._writer.payloads(records, most)

        count = max(1, PIECE_BYTES // max(1, sum(leaf.nbytes for leaf in identity.leaves)))
        parts = [
            [entry.record for entry in requests[start : start + count]] for start in range(0, len(requests), count)
        ]
        with ThreadPoolExecutor(1, thread_name_prefix="rekindle sharing") as reader:
            ahead = reader.submit(read, parts[0], count) if parts else None
            for following in [*parts[1:], None]:
                if ahead is None:
                    return
                pairs = ahead.result()
                ahead = None if following is None else reader.submit(read, following, count)
                if pairs:
                    yield pairs


def page_address(shared: SharedPages) -> PageAddress:
    """Return the address at which other replicas of a fleet take these pages."""
    return shared._page_address()


def parts(writer: CacheWriter) -> tuple[PrefixCache, Tiers]:
    """Return the tree and tiers for sharing pages. Raise ConfigError if the session keeps no pages off its device."""
    cache, tiers = writer.cache, writer.tiers
    if cache is None or tiers is None or tiers.identity is None or not tiers.host.budget:
        raise ConfigError(
            "host_memory", 0, "or no prefix_cache leaves no pages to share", "Open the session with both, as by default"
        )
    if not isinstance(cache, PrefixCache):
        raise ConfigError(
            "mesh", f"data={len(cache.trees)}", "has a tree of pages per data shard, which can't be shared",
            "Open the session without a data axis, or replicas of it: rekindle.fleet",
        )  # fmt: skip
    return cache, tiers


def _bytes_of(leaf: Any) -> memoryview:
    view: Any = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    return memoryview(view)


def _family(host: str, port: int) -> socket.AddressFamily:
    with contextlib.suppress(OSError):
        return socket.AddressFamily(socket.getaddrinfo(host, port or None, type=socket.SOCK_STREAM)[0][0])
    return socket.AF_INET


WARM_PAGES = 4096  # the most that a new session takes from each neighbour


class PulledPages(NamedTuple):
    """The pages that were taken."""

    tokens: int  # that these pages add to this session's tree
    pages: int
    bytes: int
    seconds: float
    held: HostHold  # the pages stay in host memory until it is released


class _MissingPages(NamedTuple):
    """The pages of a prompt that this session lacks."""

    root_key: bytes  # of this session's tree at the look-up
    present: int  # leading pages that are here
    digests: list[bytes]
    before: list[bytes]  # the digests of the latest that are here


class Puller:
    """Takes pages for one session. Its methods block, in any thread but the session's own."""

    def __init__(self, loop: SessionLoop, writer: CacheWriter) -> None:
        self._loop = loop
        self._cache, self._tiers = parts(writer)
        self._sides = writer.sides

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

    def prefix(self, address: PageAddress, wanted: Prefix) -> PulledPages:
        """Take the leading pages of a prompt that are not here. Raise the errors of `PageSource` if none arrived."""
        start, identity, host = time.perf_counter(), self.identity, self._tiers.host
        missing = self._missing(wanted)
        held = HostHold(host, missing.digests)
        arrived: set[int] = set()

        def keys_of(pages: slice, lookup: bytes) -> list[int]:
            previous = wanted.namespace.key
            return page_keys(wanted.tokens, self._cache.page_size, previous=previous, secret=lookup)[pages]

        try:
            if missing.digests:
                with PageSource(address, identity) as source:
                    lacking = slice(missing.present, missing.present + len(missing.digests))
                    source_keys = keys_of(lacking, source.lookup)
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
        if leading and self._cache.sides:
            end = missing.present + leading
            last = [*missing.before, *missing.digests[:leading]][-self._cache.sides.reach :]
            self._take_entries(address, last, partial(keys_of, slice(end - len(last), end)))
        grafted = self._loop.ask(partial(self._graft, wanted, missing, leading)) if leading else 0
        seconds = time.perf_counter() - start
        return PulledPages(grafted * identity.page_size, len(arrived), len(arrived) * self.page_bytes, seconds, held)

    def likeliest(self, address: PageAddress, most: int | None = None) -> PulledPages:
        """Take the pages that the other session is likeliest to need again: `most` bytes, or half of host memory."""
        start, identity, host, cache = time.perf_counter(), self.identity, self._tiers.host, self._cache
        room = (host.budget // 2 if most is None else most) - host.nbytes
        count = min(WARM_PAGES, room // self.page_bytes)
        root_key = cache.root_key
        arrived: list[Page] = []
        if count > 0:
            with PageSource(address, identity) as source:
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
                self._take_entries(address, wanted, lambda _: [source_keys[digest] for digest in wanted])
                stored = existing | {page.digest for page in arrived}
                order = [page for page in listed if page.digest in stored]

                def graft() -> int:
                    return snapshot.graft(cache, order) if cache.root_key == root_key else 0

                if arrived:
                    self._loop.ask(graft)
        seconds, size = time.perf_counter() - start, identity.page_size
        return PulledPages(
            len(arrived) * size, len(arrived), len(arrived) * self.page_bytes, seconds, HostHold(host, ())
        )

    def _take_entries(self, address: PageAddress, digests: Sequence[bytes], keys: Callable[[bytes], list[int]]) -> None:
        """Take the entries of the other session's side caches, or do without them if that fails.

        `keys` returns the keys of `digests` for the other session's secret.
        """
        for side in self._sides if digests else ():
            host = side.tiers.host
            try:
                with PageSource(address, side.identity) as source:
                    for index, payload in source.fetch(digests, keys(source.lookup), host.memory):
                        host.put(digests[index], payload, owned=True)
            except RekindleError as error:
                log.debug("pages came without their %s: %s", side.cache.plan.words.entries, error)

    def _missing(self, wanted: Prefix) -> _MissingPages:
        cache, tiers, size, tokens = self._cache, self._tiers, self._cache.page_size, wanted.tokens

        def look() -> tuple[bytes, list[bytes]]:
            """Return the tree's root, and the digests of the namespace's root and of leading pages that are here."""
            here = [cache.digest_of(cache.root_of(wanted.namespace))]
            for node in cache.find(wanted):
                if not (node.page or tiers.has(cache.digest_of(node))):
                    break
                here.append(cache.digest_of(node))
            return cache.root_key, here

        root_key, here = self._loop.ask(look)
        count, parent, reach = len(here) - 1, here[-1], cache.sides.reach
        digests = []
        most = count + self.budget // max(1, self.page_bytes)
        for page in range(count, min(len(tokens) // size, most)):
            parent = page_digest(parent, tokens[page * size : (page + 1) * size])
            digests.append(parent)
        return _MissingPages(root_key, count, digests, here[max(1, len(here) - reach) :])

    def _graft(self, wanted: Prefix, missing: _MissingPages, leading: int) -> int:
        """Add the pages to the tree, on the session's loop. Return how many."""
        cache = self._cache
        if cache.root_key != missing.root_key:  # the weights were swapped meanwhile
            return 0
        stop = (missing.present + leading) * cache.page_size
        nodes = cache.graft(wanted.tokens[:stop], after=cache.root_of(wanted.namespace))
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

        return set(in_slices(self._loop, named, look))


def _keys(pages: Sequence[Page], identity: Identity, secret: bytes = LOOKUP_SECRET) -> dict[bytes, int]:
    """Return lookup keys by digest, in the process with this `secret`. In `pages`, parents come first."""
    keys: dict[bytes, tuple[int, int]] = {identity.root: (0, 0)}
    for page in pages:
        if page.parent not in keys and is_namespace(page.parent, identity.root):
            keys[page.parent] = key_of(page.parent), 0
        parent = keys.get(page.parent)
        if parent is not None:
            key, depth = parent
            page_key = page_keys(page.tokens, identity.page_size, first=depth, previous=key, secret=secret)
            keys[page.digest] = page_key[0], depth + 1
    return {page.digest: keys[page.digest][0] for page in pages if page.digest in keys}
