"""The encoded rows of pictures that a session keeps."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from hashlib import sha256

import numpy as np

from rekindle._src.capabilities.pictures.encoder import Rows
from rekindle._src.capabilities.pictures.reading import framed
from rekindle._src.core.pictures import EncodedRows, RowsOrigin
from rekindle._src.core.store import Store


class KeptRows:
    """Rows of pictures by digest and salt, in host memory and on disk.

    Requests with a salt find those rows alone that came with the same salt, so that the time to a first token tells
    nobody else that a picture was sent.
    """

    def __init__(self, most: int, store: Store | None) -> None:
        self._most, self._store, self._size = most, store, 0
        self._rows: OrderedDict[bytes, Rows] = OrderedDict()
        self._lock = threading.Lock()

    def at_hand(self, digest: bytes, salt: str | None) -> EncodedRows | None:
        """Return rows that are in host memory."""
        return self._at_hand(_key(digest, salt))

    def get(self, digest: bytes, salt: str | None) -> EncodedRows | None:
        """Return rows that are in host memory or on disk."""
        key = _key(digest, salt)
        kept = self._at_hand(key)
        if kept is not None:
            return kept
        rows = self._stored(key)
        if rows is None:
            return None
        self._hold(key, rows)
        return EncodedRows(rows, RowsOrigin.DISK)

    def put(self, digest: bytes, salt: str | None, rows: Rows) -> None:
        """Keep rows."""
        key = _key(digest, salt)
        self._hold(key, rows)
        if self._store is not None:
            content = io.BytesIO()
            np.save(content, rows.view(np.uint16) if rows.dtype.itemsize == 2 else rows)
            try:
                self._store.put(key.hex(), content.getvalue())
            except OSError as error:
                self._store.warn_once("write", f"the rows of pictures can't be stored now: {error}")

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return self._size

    def _at_hand(self, key: bytes) -> EncodedRows | None:
        with self._lock:
            rows = self._rows.get(key)
            if rows is not None:
                self._rows.move_to_end(key)
            return None if rows is None else EncodedRows(rows, RowsOrigin.MEMORY)

    def _hold(self, key: bytes, rows: Rows) -> None:
        with self._lock:
            if key not in self._rows:
                self._rows[key] = rows
                self._size += rows.nbytes
            while self._size > self._most and len(self._rows) > 1:
                _, oldest = self._rows.popitem(last=False)
                self._size -= oldest.nbytes

    def _stored(self, key: bytes) -> Rows | None:
        if self._store is None:
            return None
        try:
            content = self._store.get(key.hex())
            return None if content is None else np.load(io.BytesIO(content), allow_pickle=False)
        except (OSError, ValueError) as error:
            self._store.warn_once("read", f"stored rows of pictures can't be read, and are computed: {error}")
            return None


def _key(digest: bytes, salt: str | None) -> bytes:
    if salt is None:
        return digest
    return sha256(framed(b"salt") + framed(digest) + framed(salt.encode("utf-8", "surrogatepass"))).digest()
