"""A plugin of pytest's with which native kernels are AArch64 code, or Windows's: `pytest -p helpers.on_guest FILES`.

The environment says where the library is that `aarch64.build` or `windows.build` made, and for which level. The
processor seems to have that level's features alone, so kernels are chosen as they would be there. What XLA compiles
runs here, as ever.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.aarch64 import Guest

FOLDER, LEVEL = "REKINDLE_TEST_GUEST", "REKINDLE_TEST_GUEST_LEVEL"
CALLED = "called under emulation:"


def pytest_sessionstart() -> None:
    """Not before: tests/conftest.py sets what jax reads when it is imported."""
    global _guest
    from helpers import aarch64, windows
    from rekindle_kernels.native import build, cpu, library

    level = cpu.level_called(os.environ[LEVEL])
    vars(cpu).update(machine=lambda: level.machine, _own_features=lambda: level.features)
    assert library.find() is None and cpu.levels()[0] == level
    folder = Path(os.environ[FOLDER])
    if level.machine == "aarch64":
        _guest = aarch64.Guest(aarch64.guest(folder, level), level)
    else:
        _guest = aarch64.Guest(windows.guest(folder), level, windows.environment(folder))
    vars(build).update(_made=_guest.address)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A kernel that the library lacks would be XLA's work, and its tests would show nothing."""
    if _guest is not None and _guest.lacking:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_unconfigure() -> None:
    if _guest is not None:
        _guest.close()
        print(CALLED, ", ".join(f"{name} {count}" for name, count in sorted(_guest.calls.items())))
        print("not in the library:", ", ".join(_guest.lacking) or "none")


_guest: Guest | None = None
