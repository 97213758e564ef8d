"""The receiving side: a connection to a session that shares its pages."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from rekindle._src.kvcache.digest import DIGEST_SIZE
from rekindle._src.kvcache.persist.identity import Identity, shown, verify
from rekindle._src.kvcache.persist.segment import Memory, Page, Payload, decode, from_bytes, leaves_in, pages_of
from rekindle._src.kvcache.persist.snapshot import connected
from rekindle._src.processes import greeting
from rekindle._src.processes.bulk import BulkChannel
from rekindle._src.processes.channel import Kind
from rekindle.errors import ProcessLost, SnapshotRefused, StoreError

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


class Source:
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
            self._channel.send(Kind.IDENTITY, introduction(identity, sealed=self._channel.sealed))
            peer = read_introduction(identity, self._next(Kind.IDENTITY))
            if peer.refused is not None:
                raise SnapshotRefused(f"pages of {address!r} can't be used: {peer.refused}. Open both sessions alike")
            self.lookup: bytes = peer.lookup  # for `page_keys`: the other session looks its pages up by these keys
            self._channel.sealed = self._channel.sealed or peer.sealed
            if self._channel.take_memory(peer.memory):
                self._channel.send(Kind.MAPPED)
        except BaseException:
            connection.close()
            raise

    def list_pages(self, most: int) -> list[Page]:
        """Return up to `most` verified pages that the other session likely needs again, parents before children."""
        self._channel.send(Kind.LIST, most.to_bytes(8, "little"))
        header, records = decode(self._next(Kind.LISTED))
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
        self._channel.send(Kind.WANT, wanted.tobytes())
        missing = np.ones(len(digests), np.bool_)
        while True:
            kind, content = self._receive()
            if kind is Kind.SENT:
                return
            if kind is not Kind.PAGES or len(content) % 4:
                raise ProcessLost(f"a {kind.name} message came in place of pages")
            indexes = np.frombuffer(content, "<i4")
            if not len(indexes):
                continue
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

    def _next(self, expected: Kind) -> bytes:
        kind, content = self._receive()
        if kind is not expected:
            raise ProcessLost(f"a {kind.name} message came in place of {expected.name}")
        return content

    def _receive(self) -> tuple[Kind, bytes]:
        kind, content = self._channel.receive()
        if kind is Kind.FAILED:
            raise SnapshotRefused(f"the other session gives no pages: {content.decode(errors='replace')[:1000]}")
        return kind, content

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
