"""Runs a command as if on an older processor: `python older_processor.py x86-64-v3 COMMAND…`.

`REKINDLE_NATIVE_LEVEL` masks instructions for rekindle's own kernels alone; XLA, llama.cpp and OpenVINO ask the
processor. Here CPUID itself says less, to the command and all that it starts, so that everybody chooses what an older
one would run. Its memory, its caches and its clock remain those of this one. Needs Linux on a processor whose CPUID can
be made to fault (`cpuid_fault` in /proc/cpuinfo) and a C compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("older_processor.c")
FLAGS = {"x86-64-v3": (), "x86-64-v3-vnni": ("-DKEEP_AVX_VNNI=1",)}  # by level


def reason_against() -> str | None:
    """Why no command can be run like that here."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("\n\n")[0].split()
    except OSError:
        return "there is no /proc/cpuinfo"
    return None if "cpuid_fault" in flags else "this processor's CPUID can't be made to fault"


def compiled(level: str, folder: Path) -> Path:
    """The library that is preloaded."""
    library = folder / "older_processor.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *FLAGS[level], "-o", library, SOURCE, "-ldl"], check=True)
    return library


def main(level: str, command: list[str]) -> int:
    reason = reason_against()
    if reason:
        sys.exit(f"{level}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        masked = {"LD_PRELOAD": str(compiled(level, Path(folder))), "REKINDLE_NATIVE_LEVEL": level}
        return subprocess.run(command, env={**os.environ, **masked}).returncode


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in FLAGS:
        sys.exit(f"{__doc__}\nlevels: {', '.join(FLAGS)}")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
