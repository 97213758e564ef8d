"""Calls of the operating system that differ: one function each, with a form for POSIX and one for Windows.

Files that may be removed while they are read, locks, memory, limits of a process and groups of processes. Both modules
have the same functions, and nothing else of the packages asks for `fcntl`, `resource`, `termios` or `msvcrt`, or for a
function of `os` that one of the systems lacks. Imports Python's own modules alone, so that helper processes may.
"""

# ruff: noqa: F403, F405  `__all__` is the one list of the names, which a test compares with both modules

from __future__ import annotations

import sys

if sys.platform == "win32":
    from rekindle_kernels.system.windows import *
else:
    from rekindle_kernels.system.posix import *

__all__ = [
    "address_space_limit",
    "advise_huge_pages",
    "anonymous_memory",
    "code_memory",
    "echo_off",
    "end_after",
    "end_after_processor_time",
    "end_lease",
    "forbid_core_dumps",
    "free_memory",
    "give_back",
    "is_lease_breaking",
    "kill",
    "limit_memory",
    "make_executable",
    "most_descriptors",
    "nameless_file",
    "open_file",
    "open_nameless",
    "own_group",
    "owner",
    "peak_memory",
    "read_at",
    "receive_into",
    "replace",
    "reuse_address",
    "send_views",
    "sync",
    "total_memory",
    "try_lease",
    "try_lock",
]
