"""Seconds from a command to its first text: on a fresh machine, in a second process, and with kernels but no programs.

    python first_text.py [--model tiny] [--rounds 5] [--python VENV/bin/python]

Each round begins with an empty cache folder, and its second process waits until the kernels are compiled. What a text
waited for is in the line that `rekindle generate` prints at its end. With --python, what is installed there is timed
instead of this source tree: a wheel, say, in an environment without numba.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

ABOUT = """
import importlib.util, rekindle
from rekindle_kernels.native import library
found = library.find()
kernels = "none prebuilt" if found is None else f"prebuilt for {next(iter(found.levels))}"
numba = "numba" if importlib.util.find_spec("numba") else "no numba"
print(f"rekindle {rekindle.__version__} in {rekindle.__path__[0]}; kernels: {kernels}, {numba}")
"""


def variables(cache: Path, *, installed: bool) -> dict[str, str]:
    """The environment of a process that has its caches in a folder."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")  # an installed package comes with bytecode
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    paths = {} if installed else {"PYTHONPATH": os.pathsep.join(harness.PATHS[:2])}
    return {**kept, **paths, "REKINDLE_CACHE": str(cache)}


def once(python: str, cache: Path, model: str, environment: dict[str, str]) -> tuple[float, str]:
    """Seconds to the first byte of text, and the line at the end."""
    command = [python, "-m", "rekindle", "generate", "Once upon a time", "--max-tokens", "32", "--model", model]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=cache) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        os.read(child.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        child.stdout.read()
        lines = child.stderr.read().decode().splitlines()
    if child.returncode:
        raise SystemExit("\n".join([*lines, f"ended with status {child.returncode}"]))
    return seconds, lines[-1] if lines else ""


def compiling(cache: Path) -> bool:
    """True if processes still compile kernels into this cache."""
    commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return any(b"background_build" in command and str(cache).encode() in command for command in commands)


def main() -> None:
    python_help = "the Python of an environment in which rekindle is installed"
    given = harness.options(__doc__, model="tiny", rounds=5, python=(str, python_help))
    python, installed = given.python or sys.executable, given.python is not None
    times: dict[str, list[float]] = {"fresh machine": [], "second process": [], "kernels, no programs": []}
    with tempfile.TemporaryDirectory() as folder:
        environment = variables(Path(folder, "rekindle"), installed=installed)
        subprocess.run([python, "-c", ABOUT], env=environment, cwd=folder, check=True)
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            environment = variables(Path(folder, "rekindle"), installed=installed)
            for name, seconds in times.items():
                if name == "kernels, no programs":
                    shutil.rmtree(Path(folder, "rekindle", "programs"), ignore_errors=True)
                first, said = once(python, Path(folder), given.model, environment)
                seconds.append(first)
                print(f"{name:22}{first:6.2f} s  {said}", flush=True)
                while compiling(Path(folder)):
                    time.sleep(0.2)
    for name, seconds in times.items():
        print(f"{name:22}median {harness.spread(seconds, '.2f')} s")


if __name__ == "__main__":
    main()
