"""The sending side: a session's cached pages at an address, for those who know the secret."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.core import html
from rekindle._src.dispatch.host import Host
from rekindle._src.kvcache import Node, PrefixCache, Tiers
from rekindle._src.kvcache.digest import LOOKUP_SECRET
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import Page, Payload, encode, records_of
from rekindle._src.kvcache.persist.snapshot import connected
from rekindle._src.kvcache.tiers.restoring import likeliest
from rekindle._src.processes import greeting
from rekindle._src.processes.bulk import BulkChannel
from rekindle._src.processes.channel import Kind
from rekindle._src.session.cache_writer import CacheWriter, PageRecord, in_slices
from rekindle._src.session.sharing.source import SILENCE, WANTED, PageAddress, introduction, read_introduction
from rekindle.errors import ConfigError, RekindleError

log = logging.getLogger("rekindle.cache")
CONNECTIONS = 32  # at once; further ones are closed
# Read from the device between two steps, and sent together. Larger pieces delay steps, smaller ones move less.
PIECE_BYTES = 16 << 20
MOST_LISTED = 1 << 16
_LOOK_SECONDS = 0.2


class _PageRequest(NamedTuple):
    place: int  # index in the request
    record: PageRecord


class SharedPages(html.Line):
    """A session's cached pages at an address, where other sessions of the same model take them.

    Made by `await session.cache.share()`. It ends with `close()` or with its session.
    """

    def __init__(self, host: Any, writer: Any, *, at: str, port: int, secret: bytes) -> None:
        self._host: Host = host
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
        return self._closed or self._host.closing

    def close(self) -> None:
        """Stop sharing pages. Closing it again is harmless."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.close()
        with self._lock:
            live = list(self._live)
        for connection in live:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        if self.closed:
            return "<SharedPages: closed>"
        return f"<SharedPages at {self.address}: {html.count(self.sent_pages, 'page')} sent>"

    def _page_address(self) -> PageAddress:
        return PageAddress(self._at, self._port, self._secret)

    # -- its threads

    def _listen(self) -> None:
        with self._server:
            while not (self._closed or self._host.ended.filled):
                try:
                    connection, _ = self._server.accept()
                except TimeoutError:
                    continue
                except OSError:
                    break
                with self._lock:
                    full = len(self._live) >= CONNECTIONS
                    if not full:
                        self._live.add(connection)
                if full:
                    connection.close()
                    continue
                threading.Thread(target=self._serve, args=(connection,), name="rekindle sharing", daemon=True).start()
        self.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                channel = BulkChannel(connection, greeting.listen(connection, self._secret), silence=SILENCE)
                with contextlib.closing(channel):
                    self._talk(channel)
        except (RekindleError, OSError) as error:
            log.debug("a connection to shared pages has ended: %s", error)
        finally:
            with self._lock:
                self._live.discard(connection)

    def _talk(self, channel: BulkChannel) -> None:
        """Answer requests until the other side ends the connection, which raises."""
        tiers = self._tiers
        identity = tiers.identity
        assert identity is not None, "checked when sharing began"
        kind, content = channel.receive()
        if kind is not Kind.IDENTITY:
            channel.send(Kind.FAILED, b"it did not introduce itself")
            return
        peer = read_introduction(identity, content)
        beside = self._writer.state_tiers
        if peer.refused is not None and beside is not None and beside.identity is not None:
            other = read_introduction(beside.identity, content)
            if other.refused is None:  # it comes for what nodes have beside their pages
                peer, tiers, identity = other, beside, beside.identity
        channel.sealed = channel.sealed or peer.sealed
        if peer.refused is not None:
            channel.send(Kind.FAILED, peer.refused.encode())
            return
        memory = channel.offer_memory()
        channel.send(Kind.IDENTITY, introduction(identity, sealed=channel.sealed, memory=memory, lookup=LOOKUP_SECRET))
        while True:
            kind, content = channel.receive()
            if tiers.identity != identity:
                channel.send(Kind.FAILED, b"its weights were swapped")
                return
            if kind is Kind.MAPPED:
                channel.pass_memory()
            elif kind is Kind.LIST:
                pages = self._list_pages(identity, min(MOST_LISTED, int.from_bytes(content, "little")))
                records = records_of(pages, identity.page_size)
                channel.send(Kind.LISTED, encode(identity.fields() | {"leaves": identity.leaves}, records))
            elif kind is Kind.WANT and len(content) % WANTED.itemsize == 0:
                self._send(channel, self._lookup(np.frombuffer(content, WANTED)), beside=tiers is not self._tiers)
            else:
                channel.send(Kind.FAILED, b"it does not understand what came")
                return

    def _list_pages(self, identity: Identity, most: int) -> list[Page]:
        """Return the pages likeliest to be needed again, parents before children."""
        cache, writer = self._cache, self._writer
        nodes = self._host.ask(lambda: list(cache))

        def look(part: Sequence[Node]) -> list[Page]:
            return [writer.page_record(node).page for node in part if cache.has(node)]

        pages = connected(list(in_slices(self._host, nodes, look)), identity.root)
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

        return list(in_slices(self._host, requests, look))

    def _send(self, channel: BulkChannel, requests: Sequence[_PageRequest], *, beside: bool) -> None:
        """Send the contents of pages, or what is `beside` them. The next piece is read while one is being sent."""
        indexes = {entry.record.page.digest: entry.place for entry in requests}
        for pairs in self._read(requests, beside=beside):
            content = np.array([indexes[page.digest] for page, _ in pairs], "<i4").tobytes()
            pieces = [_bytes_of(leaf) for _, payload in pairs for leaf in payload]
            channel.send_followed(Kind.PAGES, content, pieces)
            self.sent_pages += len(pairs)
            self.sent_bytes += sum(len(piece) for piece in pieces)
        channel.send(Kind.SENT)

    def _read(self, requests: Sequence[_PageRequest], *, beside: bool) -> Iterator[list[tuple[Page, Payload]]]:
        tiers = self._writer.state_tiers if beside else self._tiers
        assert tiers is not None, "the other side came for it"
        identity = tiers.identity
        assert identity is not None, "checked when sharing began"

        def read(records: Sequence[PageRecord], most: int) -> list[tuple[Page, Payload]]:
            if beside:
                return self._writer.states_of([record.node for record in records])
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
            "mesh", f"data={len(cache.shards)}", "has a tree of pages per data shard, which can't be shared",
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
