"""Runs Python in a process of its own, which can import what this one can."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(*arguments: str, timeout: float = 550, **environment: str) -> str:
    """Run `python ARGUMENTS` and return its output; fail with its stderr if it fails."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **paths, **environment}, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-4000:]}"
    return done.stdout
