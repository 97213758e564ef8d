"""Seconds from a command to its first text: on a fresh machine, in a second process, and with kernels but no programs.

    python tests/bench/first_text.py [--model tiny] [--rounds 5]

Each round begins with an empty cache folder, and its second process waits until the kernels are compiled. What a text
waited for is in the line that `rekindle generate` prints at its end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def once(cache: Path, model: str) -> tuple[float, str]:
    """Seconds to the first byte of text, and the line at the end."""
    paths = os.pathsep.join([str(ROOT / "toolkit"), str(ROOT / "kernels")])
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": paths}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package comes with bytecode
    command = [sys.executable, "-m", "rekindle", "generate", "Once upon a time", "--max-tokens", "32", "--model", model]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=cache) as child:
        assert child.stdout is not None and child.stderr is not None
        os.read(child.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        child.stdout.read()
        lines = child.stderr.read().decode().splitlines()
    return seconds, lines[-1] if lines else f"ended with status {child.returncode}"


def compiling(cache: Path) -> bool:
    """Whether processes still compile kernels into this cache."""
    commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return any(b"background_build" in command and str(cache).encode() in command for command in commands)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"fresh machine": [], "second process": [], "kernels, no programs": []}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, seconds in found.items():
                if name == "kernels, no programs":
                    shutil.rmtree(Path(folder, "rekindle", "programs"), ignore_errors=True)
                first, said = once(Path(folder), arguments.model)
                seconds.append(first)
                print(f"{name:22}{first:6.2f} s  {said}", flush=True)
                while compiling(Path(folder)):
                    time.sleep(0.2)
    for name, seconds in found.items():
        print(f"{name:22}median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}")


if __name__ == "__main__":
    main()
