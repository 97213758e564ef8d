"""A machine without kernels: the first text does not wait for them, and they serve as soon as they are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rekindle._src.programs.store import ExecutableStore
from rekindle_kernels import unavailable_reason
from rekindle_kernels.native import library

pytestmark = [
    pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="no native kernels here"),
    pytest.mark.skipif(library.find() is not None, reason="its kernels are there from the start"),
]
LONGEST = 300.0  # seconds that kernels may take; half a minute on two cores that do nothing else
SCRIPT = Path(__file__).parents[1] / "helpers" / "fresh_machine.py"


def serve(mode: str, folder: Path, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), mode, str(folder)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "background"])
def test_programs_without_kernels_answer_until_those_with_them_take_over(mode: str, tmp_path: Path) -> None:
    """Float32 tokens stay those of the plain loop, in requests that run while a program is replaced too."""
    first = serve(mode, tmp_path)
    assert not first["at_first"]["r2t32"], "the first text did without"
    assert all(first["at_last"].values()), "and in the end each program calls kernels"
    assert "r1t0" in first["at_last"], "one row has a program of its own again"
    assert (first["wrong"], first["refused"], first["numba"]) == (0, [], False)
    assert first["unforeseen"] == [], "`kernels_for` names all that programs call"
    second = serve(mode, tmp_path)
    assert all(second["at_first"].values()) and second["rounds"] == 0
    assert second["wrong"] == 0


@pytest.mark.slow
def test_all_programs_wait_for_kernels_and_call_them(tmp_path: Path) -> None:
    found = serve("all", tmp_path)
    assert all(found["at_first"].values()) and found["rounds"] == 0
    assert (found["wrong"], found["numba"]) == (0, False)


@pytest.mark.slow
def test_short_processes_end_cleanly_and_come_to_kernels(tmp_path: Path) -> None:
    """Each ends while programs are being replaced; what it was making is stored all the same."""
    command = [sys.executable, "-m", "rekindle", "generate", "Once upon a time", "--max-tokens", "8"]
    environment = {**os.environ, "REKINDLE_CACHE": str(tmp_path), "REKINDLE_BACKGROUND_BUILD": "1"}
    store = ExecutableStore(tmp_path / "programs")
    wanted = {"r1t0", "r2t32"}  # whole programs, which call kernels: those that the text needs
    deadline = time.monotonic() + LONGEST
    while not wanted <= {entry.name for entry in store.entries()}:
        assert time.monotonic() < deadline, "programs without kernels served again and again"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr
