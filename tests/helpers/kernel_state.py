"""The native kernels that a process has loaded, which some tests replace or forget."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from rekindle_kernels.native import build, kernel_files, library


class KernelState(NamedTuple):
    """The names of kernels that are ready, that failed, and that were not compiled in time."""

    ready: set[str]
    failed: set[str]
    put_off: set[str]


def begin_with(monkeypatch: pytest.MonkeyPatch, *, ready: set[str] | None = None, failed: str = "") -> KernelState:
    """Replace the kernels that the process has. Those that are ready stay so unless `ready` names others."""
    state = KernelState(build._ready if ready is None else ready, {failed} - {""}, set())
    monkeypatch.setattr(build, "_ready", state.ready)
    monkeypatch.setattr(build, "_failed", state.failed)
    monkeypatch.setattr(build, "_put_off", state.put_off)
    return state


def look_for_library_again() -> None:
    """Let the process look for the installation's library as if it had not yet."""
    library._find.cache_clear()


def store(name: str, code: bytes) -> None:
    """Keep object code as compiling does."""
    kernel_files.write(name, build.digest(name), code)


def stored(name: str) -> bytes | None:
    """Return object code that was kept; None if there is none, or others could have written it."""
    return kernel_files.read(name, build.digest(name))
