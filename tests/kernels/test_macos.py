"""Native kernels for macOS, compiled and linked here: what the loader of macOS would look at.

No Mac runs them. What is compared are the rules that a library has to follow to be loaded on an Apple processor: its
kind, the oldest system, its signature, pages that are never written and executed, and the symbols that it needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import mach_o, wheels
from rekindle_kernels.native import cpu, library
from rekindle_kernels.native.chain_plan import CHAIN, ENTRIES

pytestmark = [
    pytest.mark.skipif(find_spec("ziglang") is None, reason="the linker is not installed: pip install ziglang"),
    pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[2]
LINKER = f"{sys.executable} -m ziglang cc -target aarch64-macos.11.0"
LEVELS = [level for level in cpu.LEVELS if level.machine == "aarch64"]
KERNELS = [CHAIN, "norm", "argmax", "gemm_int8"]
# All that is taken from elsewhere is in libSystem, which every Mac has.
SYSTEM = "/usr/lib/libSystem.B.dylib"
OUTSIDE = {
    "bzero", "dyld_stub_binder", "free", "malloc", "memcpy", "memmove", "memset", "memset_pattern16", "pthread_self",
    "sched_yield",
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("macos")
    command = [sys.executable, "-m", "rekindle_kernels.native.build_library", "--system", "darwin", "--linker", LINKER]
    command += ["--levels", *(level.name for level in LEVELS), "--kernels", *KERNELS, "--out", str(folder)]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}
    environment = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "is left out" not in done.stderr, done.stderr
    return folder


def test_a_mac_would_load_the_library(built: Path) -> None:
    manifest = json.loads((built / library.MANIFEST).read_text())
    path = built / manifest["library"]
    found = mach_o.read(path)
    assert manifest["platform"] == "darwin-aarch64"
    assert (found.machine, found.kind) == (mach_o.ARM64, mach_o.LIBRARY)
    assert found.oldest == (11, 0), "as the wheel's name says"
    assert found.identity == f"@rpath/{path.name}"
    assert mach_o.is_signed(path), "Apple's processors run no code without a signature"
    assert found.text_relocations == 0
    assert not [name for name, may in found.protections.items() if may & mach_o.WRITE and may & mach_o.EXECUTE]
    assert found.protections["__TEXT"] & mach_o.EXECUTE
    assert found.needs == [SYSTEM]


def test_its_symbols_are_the_kernels_of_each_level(built: Path) -> None:
    manifest = json.loads((built / library.MANIFEST).read_text())
    found = mach_o.read(built / manifest["library"])
    made = {name: kernels for name, kernels in manifest["levels"].items() if kernels}
    assert set(made) == {level.name for level in LEVELS}
    assert "gemm_int8" in made["armv8.2-dotprod"] and "gemm_int8" not in made["armv8"]
    entries = {library.symbol(name, cpu.level_called(level)) for level, kernels in made.items() for name in kernels}
    assert {f"_{name}" for name in (*entries, ENTRIES)} <= found.defined
    assert {name.removeprefix("_") for name in found.undefined} <= OUTSIDE


def test_a_change_of_one_byte_breaks_the_signature(built: Path, tmp_path: Path) -> None:
    manifest = json.loads((built / library.MANIFEST).read_text())
    content = bytearray((built / manifest["library"]).read_bytes())
    content[0x2000] ^= 1
    (tmp_path / "changed").write_bytes(content)
    assert not mach_o.is_signed(tmp_path / "changed")


def test_a_wheel_for_macos_is_made_here(built: Path, tmp_path: Path) -> None:
    packed = wheels.contents(built, tmp_path, "macosx_11_0_arm64")
    name = json.loads(packed[library.MANIFEST])["library"]
    assert packed.keys() == {library.MANIFEST, name}
    assert packed[name] == (built / name).read_bytes()


def test_a_wheel_has_no_kernels_of_other_sources(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("platform_wheel", ROOT / ".ci" / "platform_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / library.MANIFEST).write_text(
        json.dumps({"sources": "other", "library": "k", "platform": "darwin-aarch64"})
    )
    with pytest.raises(RuntimeError, match="other sources"):
        module.add_library(tmp_path, {"force_include": {}}, checked=ROOT)
