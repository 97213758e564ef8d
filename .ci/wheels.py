#!/usr/bin/env python3
"""Make a release's wheels, one for each platform, with native kernels for all of its processors, on one machine.

`pip install -e ".[wheels]"`, then `python .ci/wheels.py --out dist` on Linux or macOS: LLVM compiles each library for
its own processors, and zig links it. `--only` names platforms, and `REKINDLE_KERNEL_NAMES` kernels for a quick try. A
run that ended early goes on where it was, if both are given the same folder of `--objects`.
`tests/project/test_wheels.py` checks what was made, in the folder that `REKINDLE_WHEELS` names.

`python .ci/wheels.py --load WHEEL` opens the library of a wheel for the machine it runs on and looks for every kernel.
It needs nothing but Python, so it runs where JAX has no wheels.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import lzma
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
INSIDE = "rekindle_kernels/native/prebuilt"  # in a wheel
LARGEST = 15 << 20  # bytes of a wheel
INTEL = ("x86-64-v4-bf16", "x86-64-v4-vnni", "x86-64-v4", "x86-64-v3-vnni", "x86-64-v3")
ARM = ("armv8.6-i8mm-bf16", "armv8.2-dotprod", "armv8")


class Platform(NamedTuple):
    """A platform that gets a wheel: the processors its kernels are compiled for, and the linker."""

    tag: str  # at the end of the wheel's name
    system: str  # as `sys.platform` says it
    levels: tuple[str, ...]  # of processors
    linker: str  # arguments of zig


PLATFORMS = {
    "linux-x86_64": Platform("manylinux_2_28_x86_64", "linux", INTEL, "cc -target x86_64-linux-gnu.2.28"),
    "linux-aarch64": Platform("manylinux_2_28_aarch64", "linux", ARM, "cc -target aarch64-linux-gnu.2.28"),
    "macos-arm64": Platform("macosx_11_0_arm64", "darwin", ARM, "cc -target aarch64-macos.11.0"),
    # No Intel Mac has AVX-VNNI or AVX512_BF16.
    "macos-x86_64": Platform(
        "macosx_11_0_x86_64", "darwin", ("x86-64-v4-vnni", "x86-64-v4", "x86-64-v3"), "cc -target x86_64-macos.11.0"
    ),
    "windows-x86_64": Platform("win_amd64", "win32", INTEL, "lld-link"),
}


def built(folder: Path, **environment: str) -> Path:
    """Return the wheel that hatchling makes in a new folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def compile_objects(platforms: Sequence[Platform], objects: Path) -> None:
    """Compile the kernels of each level, for all systems at once that have it: most of the time is the same for all."""
    for level in dict.fromkeys(level for platform in platforms for level in platform.levels):
        systems = [platform.system for platform in platforms if level in platform.levels]
        by_library("--levels", level, "--only-objects", *systems, "--objects", str(objects))
        print(f"{level} is compiled for {', '.join(systems)}", flush=True)


def by_library(*arguments: str, **environment: str) -> None:
    """Call `build_library`."""
    path = os.pathsep.join(filter(None, [str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "rekindle_kernels.native.build_library", *arguments]
    subprocess.run(command, env={**os.environ, **environment, "PYTHONPATH": path}, cwd=ROOT, check=True)


def make(platform: Platform, out: Path, folder: Path, objects: Path) -> Path:
    """Link a platform's kernels in `folder`, and put the wheel that carries them into `out`.

    Each kernel has to be there at each level, and the wheel may not exceed LARGEST.
    """
    zig = {name: str(folder.parent / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    linker = f"{shlex.quote(sys.executable)} -m ziglang {platform.linker}"
    options = ["--objects", str(objects), "--whole", "--packed", "--out", str(folder / "library")]
    by_library("--system", platform.system, "--linker", linker, "--levels", *platform.levels, *options, **zig)
    wheel = built(folder / "wheel", REKINDLE_WHEEL_LIBRARY=str(folder / "library"))
    if not wheel.name.endswith(f"-py3-none-{platform.tag}.whl"):
        raise SystemExit(f"{wheel.name} should be one for {platform.tag}")
    if wheel.stat().st_size > LARGEST:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size / 2**20:.1f} MiB, and {LARGEST >> 20} are the limit")
    return wheel.replace(out / wheel.name)


def load(wheel: Path) -> str:
    """Open a wheel's library in this process; return what it has. Raises SystemExit where something is missing."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, zipfile.ZipFile(wheel) as packed:
        manifest = json.loads(packed.read(f"{INSIDE}/manifest.json"))
        place = Path(folder, manifest["library"]).with_suffix("")
        try:
            content = lzma.decompress(packed.read(f"{INSIDE}/{manifest['library']}"))
        except lzma.LZMAError:
            content = b""
        place.write_bytes(content)
        if hashlib.blake2b(content, digest_size=16).hexdigest() != manifest["digest"]:
            raise SystemExit(f"{wheel.name}: the library is not the one that its manifest names")
        library = ctypes.CDLL(str(place))
        names = [f"{kernel} of {level}" for level, kernels in manifest["levels"].items() for kernel in kernels]
        missing = [name for name in names if not hasattr(library, _symbol(*name.split(" of ")))]
        if os.name == "nt":  # a file that is mapped can't be deleted
            ctypes.windll.kernel32.FreeLibrary(ctypes.c_void_p(library._handle))  # type: ignore[attr-defined]
    if missing or not names:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing) or 'all kernels'}")
    return f"{wheel.name}: {len(names)} kernels for {manifest['platform']}, {len(content) / 2**20:.1f} MiB"


def _symbol(kernel: str, level: str) -> str:
    """Return the symbol of a kernel at a level, in the form of `rekindle_kernels.native.library.symbol`.

    That module is not imported, since a wheel is checked without an installed rekindle.
    """
    width = max(map(len, (*INTEL, *ARM)))
    return f"rekindle_{kernel}_{level.replace('-', '_').replace('.', '_'):_<{width}}_entry"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--only", nargs="+", choices=tuple(PLATFORMS), default=tuple(PLATFORMS), help="default: all")
    parser.add_argument("--objects", type=Path, help="keep object files here; default: a folder that is removed")
    parser.add_argument("--load", nargs="+", type=Path, metavar="WHEEL", help="open these here, and make none")
    arguments = parser.parse_args()
    if arguments.load:
        for wheel in arguments.load:
            print(load(wheel))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    platforms = [PLATFORMS[name] for name in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        objects = (arguments.objects or Path(folder, "objects")).resolve()
        compile_objects(platforms, objects)
        for platform in platforms:
            wheel = make(platform, arguments.out.resolve(), Path(folder, platform.tag), objects)
            print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
