"""Named numbers in memory: a layout is declared once, and Python and machine code both read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SIZES = {"word": 8, "int32": 4, "float32": 4}  # bytes; a word is an integer or an address
WORD = SIZES["word"]


class RecordField(NamedTuple):
    """A number's place, in bytes from the start of its record, and its type: a key of SIZES."""

    offset: int
    kind: str


@dataclass(frozen=True, eq=False)
class RecordLayout:
    """The fields of a record in memory, by name."""

    name: str
    fields: Mapping[str, RecordField]
    size: int  # bytes

    def offset(self, name: str) -> int:
        """Return bytes from the begin of the record to a field."""
        return self.fields[name].offset

    def index(self, name: str) -> int:
        """Return a field's place among fields of its own size."""
        field = self.fields[name]
        return field.offset // SIZES[field.kind]

    def pack(self, values: Mapping[str, float]) -> np.ndarray:
        """Return the record as an int32 array; float32 fields are stored as their bits. Each field needs a value."""
        assert set(values) == set(self.fields), f"{self.name} has {', '.join(self.fields)}, not {', '.join(values)}"
        record = np.zeros(self.size // 4, np.int32)
        for name, value in values.items():
            offset, kind = self.fields[name]
            assert kind != "word", f"{self.name}.{name} takes eight bytes"
            record.view(kind)[offset // 4] = value
        return record


def consecutive(name: str, kinds: Mapping[str, str]) -> RecordLayout:
    """Fields that follow each other, all of them of one size."""
    fields, offset = {}, 0
    for field, kind in kinds.items():
        fields[field] = RecordField(offset, kind)
        offset += SIZES[kind]
    return RecordLayout(name, fields, offset)


def words(name: str, indices: Mapping[str, int], size: int = 0) -> RecordLayout:
    """Words at given places, counted in words; `size` words altogether, by default up to the last one."""
    fields = {field: RecordField(WORD * index, "word") for field, index in indices.items()}
    return RecordLayout(name, fields, WORD * (size or 1 + max(indices.values())))


# XLA's interface for foreign functions (xla/ffi/api/c_api.h, version 0.1), as far as the kernels use it.
#
# XLA asks for the version that a kernel was written for when the kernel is registered, and refuses one that is too old:
# it promises to take a version for a year. `build.builds` is false then.
API_VERSION = (0, 1, 0)  # the oldest that has all of this; XLA takes any that is not newer than its own

# What a kernel is called with. It embeds the records of its operands and of its results: each is a count and an array
# of addresses of buffers. XLA's frame does not have `team`: it stands in those that a chain makes, for its threads.
CALL_FRAME = words(
    "CallFrame",
    {"size": 0, "extension": 1, "api": 2, "context": 3, "operands": 9, "result_count": 12, "results": 14, "team": 15},
)
BUFFER = words("Buffer", {"data": 3, "rank": 4, "dims": 5})
EXTENSION = RecordLayout(
    "Extension",
    {"kind": RecordField(8, "int32"), "next": RecordField(16, "word"), "metadata": RecordField(24, "word")},
    size=32,
)
METADATA_KIND = 1  # of the extension with which XLA asks for the version
METADATA = RecordLayout(
    "Metadata",
    {"major": RecordField(24, "int32"), "minor": RecordField(28, "int32"), "patch": RecordField(32, "int32")},
    size=40,
)
API = words("Api", {"schedule": 17, "threads": 18})  # functions: six words of header, and eleven others before them

# What the two functions are called with.
SCHEDULE = words("Schedule", {"size": 0, "extension": 1, "context": 2, "task": 3, "data": 4})
THREADS = words("Threads", {"size": 0, "extension": 1, "context": 2, "count_at": 3, "count": 4})
THREADS_SIZE = 32  # bytes that XLA knows of: where the count goes is ours
