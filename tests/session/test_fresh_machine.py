"""A machine whose installation brought no kernels: they are compiled before the first text, and serve from then on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle_kernels import unavailable_reason
from rekindle_kernels.native import build, library

pytestmark = pytest.mark.skipif(not build.can_compile() or unavailable_reason("cpu") is not None, reason="no numba")
SCRIPT = Path(__file__).parents[1] / "helpers" / "fresh_machine.py"


def serve(mode: str, folder: Path, *options: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), mode, str(folder), *options]
    variables = {**os.environ, library.FOLDER: str(folder / "none"), **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"stderr": done.stderr}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "all"])
def test_a_session_begins_and_ends_with_the_same_kernels(mode: str, tmp_path: Path) -> None:
    """Other processes compile them, and this one needs no numba; float32 tokens are those of the plain loop."""
    for found in (serve(mode, tmp_path), serve(mode, tmp_path)):
        assert found["at_first"] and all(found["at_first"].values()) and all(found["at_last"].values())
        assert (found["wrong"], found["refused"], found["numba"]) == (0, [], False)
        assert found["unforeseen"] == [], "`kernels_for` names all that programs call"


@pytest.mark.slow
def test_a_busy_machine_does_not_keep_a_session_waiting_and_the_next_process_has_the_kernels(tmp_path: Path) -> None:
    """A first `open` waited for nine minutes and more where others had both cores."""
    found = serve("lazy", tmp_path, "--busy")
    assert not any(found["at_first"].values()) and not any(found["at_last"].values()), "one arithmetic to the end"
    assert found["wrong"] == 0 and found["stderr"].count("native kernels are not compiled after") == 1
    (tmp_path / "go").touch()
    found = serve("all", tmp_path)
    assert all(found["at_first"].values()) and (found["wrong"], found["refused"]) == (0, [])
    assert found["origins"] == ["compiled"], "programs without kernels are not kept"


@pytest.mark.slow
def test_without_a_compiler_plain_programs_serve_from_beginning_to_end_and_it_is_said(tmp_path: Path) -> None:
    found = serve("lazy", tmp_path, "--without-compiler")
    assert not any(found["at_first"].values()) and not any(found["at_last"].values())
    assert found["wrong"] == 0
    assert found["stderr"].count("no native kernels") == 1
