"""XLA's interface for foreign functions (xla/ffi/api/c_api.h, version 0.1), as far as the kernels use it.

XLA asks for the version that a kernel was written for when the kernel is registered, and refuses one that is too old:
it promises to take a version for a year. `build.builds` is false then.
"""

from __future__ import annotations

from rekindle_kernels.native.layout import Field, Layout, words

API_VERSION = (0, 1, 0)  # the oldest that has all of this; XLA takes any that is not newer than its own

# What a kernel is called with. It embeds the records of its operands and of its results: each is a count and an array
# of addresses of buffers. XLA's frame does not have `team`: it stands in those that a chain makes, for its threads.
CALL_FRAME = words(
    "CallFrame",
    {"size": 0, "extension": 1, "api": 2, "context": 3, "operands": 9, "result_count": 12, "results": 14, "team": 15},
)
BUFFER = words("Buffer", {"data": 3, "rank": 4, "dims": 5})
EXTENSION = Layout(
    "Extension", {"kind": Field(8, "int32"), "next": Field(16, "word"), "metadata": Field(24, "word")}, size=32
)
METADATA_KIND = 1  # of the extension with which XLA asks for the version
METADATA = Layout(
    "Metadata", {"major": Field(24, "int32"), "minor": Field(28, "int32"), "patch": Field(32, "int32")}, size=40
)
API = words("Api", {"schedule": 17, "threads": 18})  # functions: six words of header, and eleven others before them

# What the two functions are called with.
SCHEDULE = words("Schedule", {"size": 0, "extension": 1, "context": 2, "task": 3, "data": 4})
THREADS = words("Threads", {"size": 0, "extension": 1, "context": 2, "count_at": 3, "count": 4})
THREADS_SIZE = 32  # bytes that XLA knows of: where the count goes is ours
