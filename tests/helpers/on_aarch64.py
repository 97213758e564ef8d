"""A plugin of pytest's with which native kernels are AArch64 code: `pytest -p helpers.on_aarch64 FILES`.

The environment says where the library is that `aarch64.build` made, and for which level. The processor seems to have
that level's features alone, so kernels are chosen as they would be there. What XLA compiles runs here, as ever.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER, LEVEL = "REKINDLE_TEST_AARCH64", "REKINDLE_TEST_AARCH64_LEVEL"


def pytest_sessionstart() -> None:
    """Not before: tests/conftest.py sets what jax reads when it is imported."""
    global _guest
    from helpers.aarch64 import Guest
    from rekindle_kernels.native import build, cpu, library

    level = cpu.level_called(os.environ[LEVEL])
    cpu.machine = lambda: level.machine
    cpu._own_features = lambda: level.features  # type: ignore[assignment]
    assert library.find() is None and cpu.levels()[0] == level
    _guest = Guest(Path(os.environ[FOLDER]), level)
    build._made = _guest.address


def pytest_unconfigure() -> None:
    if _guest is None:
        return
    _guest.close()
    print(f"called under emulation: {', '.join(f'{name} {count}' for name, count in sorted(_guest.calls.items()))}")


_guest = None
