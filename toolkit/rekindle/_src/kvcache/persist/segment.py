"""Segments: batches of pages on disk, each an Orbax checkpoint of two files, never changed once it is there.

    pages   the payloads one after another, leaf by leaf
    index   the pages (digest, parent, tokens, checksum) and their model; ends with a digest of itself

Files are read directly: pages that lie one after another are one read. An index is never trusted: that it
belongs to this model, and each page to its tokens, is verified before a page becomes known (`verify` in identity.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.atomic_checkpoint import ITEM, write_checkpoint
from rekindle._src.core.records import IntArray
from rekindle._src.kvcache.digest import DIGEST_SIZE
from rekindle.errors import StoreError
from rekindle_kernels import private_files, system

Payload = tuple[Any, ...]
Memory = Callable[[int], NDArray[np.uint8]]  # so many bytes, to be filled
MAX_PAGE_SIZE = 1 << 16  # tokens
MAX_VISITS = 1 << 30  # of a page; a record has 32 bits for them
LAST_TIME = 1e11  # seconds since the epoch, in the year 5138
_LENGTH = 8  # bytes before the header that say how long it is
_LONGEST_HEADER = 1 << 20  # bytes; that of a model with 100 layers has some 10,000
_AXES, _END = 8, 1 << 40  # of an array of a page: its axes at most, and above each size
_LONGEST_NAME, _LARGEST_NUMBER = 40, 8  # characters of a dtype's name, and bytes of one of its numbers


class Page(NamedTuple):
    """A page's record, without its payload."""

    digest: bytes
    parent: bytes  # digest of the page before it, or of the root
    tokens: IntArray
    visits: int
    last_use: float  # seconds since the epoch


class LeafSpec(NamedTuple):
    """One array of a payload, without its page axis."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _dtype(self.dtype).itemsize


def record_type(page_size: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("digest", "u1", (DIGEST_SIZE,)),
            ("parent", "u1", (DIGEST_SIZE,)),
            ("sum", "<u4"),
            ("visits", "<i4"),
            ("used", "<f8"),
            ("tokens", "<i4", (page_size,)),
        ]
    )


def records_of(pages: Sequence[Page], page_size: int) -> NDArray[Any]:
    records = np.zeros(len(pages), record_type(page_size))
    for record, page in zip(records, pages, strict=True):
        record["digest"] = np.frombuffer(page.digest, np.uint8)
        record["parent"] = np.frombuffer(page.parent, np.uint8)
        record["tokens"] = page.tokens
        record["visits"], record["used"] = page.visits, page.last_use
    return records


def pages_of(records: NDArray[Any]) -> list[Page]:
    """Return the pages of records. No digest is of their visits and times, so those are put within bounds."""
    return [
        Page(digest.tobytes(), parent.tobytes(), tokens, min(max(0, int(visits)), MAX_VISITS), _time(float(used)))
        for digest, parent, tokens, visits, used in zip(
            *(records[name] for name in ("digest", "parent", "tokens", "visits", "used")), strict=True
        )
    ]


def _time(value: float) -> float:
    """Return a time in seconds since the epoch; 0 for a number that can't be a time in the past."""
    return value if 0 <= value < LAST_TIME else 0.0


def saved_at(header: Mapping[str, object]) -> float:
    """Return when an index was written, in seconds since the epoch; 0 if it does not say."""
    value = header.get("saved")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value < LAST_TIME else 0.0


def encode(header: Mapping[str, object], records: NDArray[Any]) -> bytes:
    text = json.dumps({**header, "page_size": records.dtype["tokens"].shape[0], "count": len(records)}).encode()
    body = len(text).to_bytes(_LENGTH, "little") + text + records.tobytes()
    return body + blake2b(body, digest_size=DIGEST_SIZE).digest()


def decode(data: bytes) -> tuple[dict[str, object], NDArray[Any]]:
    """Parse an index into header and records. Raises StoreError if a byte differs from what `encode` wrote."""
    body, digest = data[:-DIGEST_SIZE], data[-DIGEST_SIZE:]
    if blake2b(body, digest_size=DIGEST_SIZE).digest() != digest:
        raise StoreError(f"an index of {len(data)} bytes does not match its checksum")
    length = int.from_bytes(body[:_LENGTH], "little")
    end = _LENGTH + length
    try:
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length:,} bytes")
        header = json.loads(body[_LENGTH:end].decode())
        page_size, count = header["page_size"], header["count"]
        if not (type(page_size) is int and 0 < page_size <= MAX_PAGE_SIZE and type(count) is int):
            raise ValueError(f"page_size {page_size!r}, count {count!r}")
        kind = record_type(page_size)
        if len(body) - end != count * kind.itemsize:
            raise ValueError(f"{count} records of {kind.itemsize} bytes in {len(body) - end}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"an index of {len(data)} bytes makes no sense ({error!r})") from error
    return header, np.frombuffer(body[end:], kind)


def leaves_in(header: dict[str, Any]) -> tuple[LeafSpec, ...]:
    """Return the layout of payloads that a header describes. Raises StoreError if it describes none."""
    try:
        leaves = tuple(LeafSpec(tuple(shape), _dtype(dtype).name) for shape, dtype in header.get("leaves", ()))
        sizes = [size for leaf in leaves for size in leaf.shape]
        if not all(type(size) is int and 0 <= size < _END for size in sizes) or any(
            len(leaf.shape) > _AXES for leaf in leaves
        ):
            raise ValueError("leaves of sizes that no page has")  # a product of long numbers can't even be written
        return leaves
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"an index describes no layout of pages ({error!r})") from error


def checksum(digest: bytes, data: Any) -> int:
    """Return the checksum of a page's payload. It includes the digest, so that exchanged pages are noticed."""
    return zlib.crc32(data, zlib.crc32(digest))


def leaves_of(payload: Payload) -> tuple[LeafSpec, ...]:
    return tuple(LeafSpec(tuple(leaf.shape[1:]), np.dtype(leaf.dtype).name) for leaf in payload)


def to_bytes(payload: Payload) -> bytes:
    # A view: ml_dtypes' bfloat16 offers no buffer.
    return b"".join(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).tobytes() for leaf in payload)


def from_bytes(data: NDArray[np.uint8], leaves: Sequence[LeafSpec]) -> Payload:
    """Return views of `data`, which the payload then owns."""
    payload, at = [], 0
    for leaf in leaves:
        payload.append(data[at : at + leaf.nbytes].view(_dtype(leaf.dtype)).reshape(1, *leaf.shape))
        at += leaf.nbytes
    return tuple(payload)


def fresh(size: int) -> NDArray[np.uint8]:
    """Allocate fresh memory of `size` bytes."""
    return np.empty(size, np.uint8)


@dataclasses.dataclass(eq=False, slots=True)
class Segment:
    """A segment on disk, with its index in memory."""

    path: Path
    header: dict[str, object]
    records: NDArray[Any]
    leaves: tuple[LeafSpec, ...]
    page_bytes: int

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Read the index. Raises OSError if there is none, StoreError if it is damaged."""
        header, records = decode(private_files.read(path / ITEM / "index", inside=path.parent))
        leaves = leaves_in(header)
        return cls(path, header, records, leaves, sum(leaf.nbytes for leaf in leaves))

    def is_gone(self) -> bool:
        """True if its payloads were removed. An error that passes proves nothing."""
        try:
            os.stat(self.path / ITEM / "pages")
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return False

    def digests(self) -> list[bytes]:
        data = self.records["digest"].tobytes()
        return [data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE)]

    def read(self, index: int) -> Payload:
        """Read one payload and verify it. Raises StoreError if it is damaged, OSError if the file is gone."""
        (payload,) = self.read_run(index, 1)
        if isinstance(payload, StoreError):
            raise payload
        return payload

    def read_run(self, first: int, count: int, memory: Memory = fresh) -> list[Payload | StoreError]:
        """Read `count` consecutive payloads, each verified by itself. Raises OSError if the file is gone.

        Not mapped into memory: when a mapped file shrinks, reading it kills the process.
        """
        slots = [memory(self.page_bytes) for _ in range(count)]
        length = self._fill(slots, first * self.page_bytes)
        payloads: list[Payload | StoreError] = []
        for index, slot in enumerate(slots, first):
            digest = self.records[index]["digest"].tobytes()
            length -= self.page_bytes
            if length >= 0 and checksum(digest, slot) == self.records[index]["sum"]:
                payloads.append(from_bytes(slot, self.leaves))
            else:
                payloads.append(StoreError(f"page {digest.hex()} in {self.path} does not match its checksum"))
        return payloads

    def _fill(self, slots: Sequence[NDArray[np.uint8]], start: int) -> int:
        """Read from byte `start` on into the slots; returns how many bytes the file had for them."""
        views = [memoryview(slot) for slot in slots]  # type: ignore[arg-type]
        length = 0
        file = system.open_file(self.path / ITEM / "pages", os.O_RDONLY)
        try:
            while views and (count := system.read_at(file, views, start + length)):
                length += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
        finally:
            os.close(file)
        return length


def write_segment(path: Path, header: dict[str, Any], pages: Iterable[tuple[Page, Payload]]) -> None:
    """Write a new checkpoint at `path`, complete or absent. Payloads are taken one at a time."""

    def write(folder: Path) -> None:
        written: list[Page] = []
        sums: list[int] = []
        leaves: tuple[LeafSpec, ...] = ()
        with (folder / "pages").open("wb") as file:
            for page, payload in pages:
                leaves = leaves or leaves_of(payload)
                assert leaves == leaves_of(payload), "pages of different layouts in one segment"
                data = to_bytes(payload)
                file.write(data)
                sums.append(checksum(page.digest, data))
                written.append(page)
        records = records_of(written, len(written[0].tokens))
        records["sum"] = sums
        (folder / "index").write_bytes(encode(header | {"leaves": leaves}, records))

    write_checkpoint(path, write, durable=True)


def write_index(path: Path, header: dict[str, Any], pages: Sequence[Page], page_size: int) -> None:
    """Write a checkpoint that lists pages and holds no payloads."""
    data = encode(header, records_of(pages, page_size))

    def write(folder: Path) -> None:
        (folder / "index").write_bytes(data)

    write_checkpoint(path, write, durable=True)


@contextlib.contextmanager
def exclusively(pages_folder: Path) -> Iterator[bool]:
    """Yield True if this process alone may remove segments now. Other processes get False until the block ends."""
    try:
        private_files.make_folder(pages_folder)
        descriptor = system.open_file(pages_folder.parent / ".pages.lock", os.O_WRONLY | os.O_CREAT)
    except OSError:
        yield False
        return
    try:
        try:
            locked = system.try_lock(descriptor)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def size_of(path: Path) -> tuple[int, float]:
    """Return bytes and time of last use. A path that can't be read counts as just used, so that it is not removed."""
    total = 0
    try:
        for folder, _, files in os.walk(path, onerror=_raise):
            total += sum(os.stat(os.path.join(folder, file)).st_size for file in files)
        return total, path.stat().st_mtime
    except OSError:
        return total, time.time()


def age_of(name: str) -> str:
    """Return the sort key of segments: the time in the name, "" for other names."""
    return name.split("-")[1] if name.count("-") == 2 else ""


def _dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of numbers with this name. Raise TypeError or AttributeError for anything else.

    NumPy's own reader of names is a parser, and a stranger's text may be long.
    """
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isidentifier():
        raise TypeError(f"{str(name)[:_LONGEST_NAME]!r} is no dtype")
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name))
    if dtype.hasobject or dtype.kind in "USMmc" or not 1 <= dtype.itemsize <= _LARGEST_NUMBER:
        raise TypeError(f"{name!r} is no dtype of numbers")
    return dtype


def _raise(error: OSError) -> None:
    raise error
