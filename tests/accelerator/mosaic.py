"""Mosaic GPU's compiler without a GPU: registers, spills, shared memory, and the copies described to the driver.

XLA holds such a kernel as a module that the CUDA plugin compiles. The plugin exports the function that does so, which
JAX's bridge to PyTorch calls. It asks libcuda for the GPU; no_cuda.c answers in its place.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import compilers

HERE = Path(__file__).parent
CALL = "mosaic_gpu_v2"


@dataclass(frozen=True)
class MosaicKernel:
    """A kernel's use of a multiprocessor, and its parts."""

    name: str
    registers: int  # per thread, when it starts; warpgroups then take more or fewer
    spilled: int  # bytes per thread, stores and loads
    shared: int  # bytes per program
    ptx: str
    copies: tuple[str, ...]  # of each copy by the TMA its swizzle and box, as "swizzle 128 box 2 16 64"
    serialized: bool  # ptxas gave up letting matrix instructions run alongside others

    def counts(self, instruction: str) -> int:
        return len(re.findall(re.escape(instruction), self.ptx))


def reason() -> str | None:
    """Why there is no compiler; None if there is one."""
    if compilers.folder("gpu") is None:
        return f"there is no compiler for gpu: {compilers.FETCH}"
    if shutil.which("gcc") is None:
        return "there is no gcc to build a stand-in for libcuda"
    return None


def places() -> dict[str, str]:
    """Return environment variables for the compiler to find its libraries with."""
    root = compilers.folder("gpu")
    assert root is not None, compilers.FETCH
    runtime = next(root.glob("jax_cuda*_plugin/libmosaic_gpu_runtime.so"))
    return {"MOSAIC_GPU_CUDA_ROOT": str(next(root.glob("nvidia/cu*"))), "MOSAIC_GPU_RUNTIME_LIB_PATH": str(runtime)}


def compiled(lowered: Any) -> MosaicKernel:
    """Compile the one Mosaic GPU kernel of a lowered program for an H100."""
    root = compilers.folder("gpu")
    assert root is not None, compilers.FETCH
    module, arguments = _module(lowered)
    cuda = next(root.glob("nvidia/cu*"))
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "cuda_sdk_lib").symlink_to(cuda)  # where the compiler looks for libdevice
        (at / "module").write_bytes(module)
        plugin = next(root.glob("jax_plugins/xla_cuda*/xla_cuda_plugin.so"))
        command = [sys.executable, HERE / "mosaic_worker.py", _libcuda(), plugin, at / "module", str(arguments)]
        done = subprocess.run(
            command, cwd=at, env=os.environ | places() | {"MOSAIC_GPU_DUMP_PTX": "1"}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-500:]
        begin, end = done.stdout.index("//"), done.stdout.rindex("}") + 1
        ptx, said = done.stdout[begin:end], done.stdout[:begin] + done.stdout[end:]
        (at / "kernel.ptx").write_text(ptx)
        ptxas = [cuda / "bin" / "ptxas", "-v", "-arch=sm_90a", at / "kernel.ptx", "-o", os.devnull]
        resources = subprocess.run(ptxas, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", resources)
    name = re.search(r"\.entry (\w+)", ptx)
    assert registers is not None and name is not None, resources
    assert "copy wrong" not in said, said
    return MosaicKernel(
        name[1], int(registers[1]), sum(map(int, re.findall(r"(\d+) bytes spill", resources))),
        sum(map(int, re.findall(r"^shared (\d+)", said, re.MULTILINE))), ptx,
        tuple(re.findall(r"^copy right (.*)", said, re.MULTILINE)), "wgmma" in resources and "serialized" in resources,
    )  # fmt: skip


@functools.cache
def _libcuda() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="no_cuda"))
    built = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *flags, "-o", built, HERE / "no_cuda.c"], check=True)
    return built


def _module(lowered: Any) -> tuple[bytes, int]:
    """The kernel's module and how many arrays it takes and gives."""
    found: list[tuple[bytes, int]] = []

    def look(operation: Any) -> None:
        for region in operation.regions:
            for block in region.blocks:
                for each in block.operations:
                    attributes = each.operation.attributes
                    if each.operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == CALL:
                        config = attributes["mhlo.backend_config"]
                        arrays = len(each.operation.operands) + len(each.operation.results)
                        found.append((config["module"].value_bytes, arrays))
                    look(each.operation)

    look(lowered.compiler_ir("stablehlo").operation)
    assert len(found) == 1, f"there are {len(found)} kernels"
    return found[0]
