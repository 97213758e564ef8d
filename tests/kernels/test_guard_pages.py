"""The native kernels touch nothing outside of their operands: their tests run between pages that fault when touched.

`guard_pages.c` is preloaded into a process of its own, where each of XLA's buffers ends (or begins) at such a page.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNEL_TESTS = (
    "adapters",
    "added_keys",
    "native",
    "bounds",
    "int4",
    "int4_widened",
    "chain",
    "deterministic",
    "fill_pages",
    "levels",
    "recurrence",
    "top_k",
)
ONE_TOO_FAR = """
import ctypes, jax.numpy as jnp
array = jnp.arange(1024, dtype=jnp.int32).block_until_ready()
at, size = array.unsafe_buffer_pointer(), array.nbytes
first, last = ctypes.string_at(at, 1), ctypes.string_at(at + size - 1, 1)
print("inside", flush=True)
ctypes.string_at({outside}, 1)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"),
]


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process with guarded buffers."""
    library = tmp_path_factory.mktemp("guard") / "guard_pages.so"
    command = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", str(HERE / "guard_pages.c"), "-o", str(library)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    paths = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels"))
    return {**os.environ, "LD_PRELOAD": str(library), "GUARD_REPORT": "1", "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(("side", "outside"), [({}, "at + size"), ({"GUARD_FRONT": "1"}, "at - 1")])
def test_one_byte_too_far_is_a_fault(preloaded: dict[str, str], side: dict[str, str], outside: str) -> None:
    command = [sys.executable, "-c", ONE_TOO_FAR.format(outside=outside)]
    done = subprocess.run(command, env=preloaded | side, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "inside\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("side", [{}, {"GUARD_FRONT": "1"}], ids=["behind", "in front"])
def test_the_kernels_touch_nothing_outside(preloaded: dict[str, str], side: dict[str, str]) -> None:
    files = [str(HERE / f"test_{name}.py") for name in KERNEL_TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=ROOT, env=preloaded | side, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    reports = [int(count) for count in re.findall(r"guarded (\d+) allocations", done.stderr)]
    assert max(reports) > 1000, done.stderr[-400:]
