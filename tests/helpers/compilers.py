"""The compilers for GPUs and a TPU v5e on a machine that has none, and what can be read from their output.

The compilers are the real ones (XLA with ptxas, libtpu), so registers, spills, shared memory, aliasing,
copies, command buffers and programs that do not fit are facts. Run times and numbers are not.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

Row = Callable[..., None]  # the fixture `row`: adds a line to the table that is printed at the end
FETCH = "`python tests/accelerator/fetch.py FOLDER` downloads the compilers; then set REKINDLE_COMPILERS=FOLDER"
# The suite's XLA_FLAGS turn optimisations off, and autotuning needs a GPU: matrix products have XLA's default tiles.
GPU_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 3, "xla_gpu_autotune_level": 0, "xla_dump_hlo_pass_re": "",
    "xla_dump_hlo_as_text": True, "xla_gpu_dump_llvmir": False,
}  # fmt: skip
# For lowering: from 0.11 on JAX wants to know the GPU that it lowers for.
H100 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"))
ABSENT = {"cuda": H100, "tpu": AbstractMesh((), ())}  # by platform
# What XLA wants to know of a GPU. Without the versions of driver and runtime it makes no command buffers.
_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory:.0f}
  shared_memory_per_block_optin: {gpu.shared_memory_of_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
_THUNK = re.compile(
    r"^(?P<indent> *)\d+: (?P<kind>k\w+) +\[[^]]*\] *(?P<name>[\w.-]*)(?:.*shared_memory: (?P<shared>\d+))?"
)
_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u32": 4,
    "f32": 4,
}  # fmt: skip
# Instructions that move an array from one place to another, and so cost its size twice.
_MOVES = ("copy", "copy-start", "pad", "transpose", "slice", "concatenate", "convert")


@dataclass(frozen=True)
class Gpu:
    """A GPU that is compiled for, as its maker describes it; sizes in bytes, rates a second."""

    name: str
    capability: float
    cores: int  # multiprocessors
    fpus: int  # of each
    threads: int  # of each, at most
    shared_memory: int  # of each
    shared_memory_of_block: int
    l2_cache: int
    memory: float
    bandwidth: float
    clock: float  # GHz

    @property
    def target(self) -> str:
        """The text that XLA reads."""
        major, minor = divmod(round(10 * self.capability), 10)
        return _TARGET.format(gpu=self, major=major, minor=minor)


# One of each generation that CUDA 13's compiler knows: 7.0 is not among them.
GPUS = {
    "t4": Gpu("Tesla T4", 7.5, 40, 64, 1024, 65536, 65536, 4 << 20, 15828320256, 320.064e9, 1.59),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8.0, 108, 64, 2048, 167936, 166912, 40 << 20, 85e9, 2039e9, 1.41),
    "a10": Gpu("NVIDIA A10", 8.6, 72, 128, 1536, 102400, 101376, 6 << 20, 23.6e9, 600e9, 1.695),
    "l4": Gpu("NVIDIA L4", 8.9, 58, 128, 1536, 102400, 101376, 48 << 20, 23.6e9, 300e9, 2.04),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9.0, 132, 128, 2048, 233472, 232448, 50 << 20, 84942979072, 3352.32e9, 1.98),
    "b200": Gpu("NVIDIA B200", 10.0, 148, 128, 2048, 233472, 232448, 126 << 20, 191e9, 8000e9, 1.965),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", 12.0, 170, 128, 1536, 102400, 101376, 96 << 20, 33.6e9, 1792e9, 2.407),
}


@dataclass(frozen=True)
class Kernel:
    """A GPU kernel's use of a multiprocessor."""

    name: str
    registers: int  # per thread
    spilled: int  # bytes per thread, stores and loads
    shared: int  # bytes per program
    wgmma: bool  # uses Hopper's matrix instructions


@dataclass(frozen=True)
class Thunk:
    """One entry of a GPU program's schedule."""

    depth: int
    kind: str  # "kCommandBuffer", "kConditional", "kCustomKernel", …
    name: str


@dataclass(frozen=True)
class Compiled:
    """A program and what its compiler wrote."""

    executable: Any
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    thunks: tuple[Thunk, ...] = ()

    @property
    def memory(self) -> Any:
        return self.executable.memory_analysis()

    @functools.cached_property
    def text(self) -> str:
        return str(self.executable.as_text())

    @property
    def host_steps(self) -> list[str]:
        """Kinds of the entries that the host starts one by one: a single command buffer where all is one graph."""
        return [thunk.kind for thunk in self.thunks if thunk.depth == 0]

    @property
    def launched(self) -> list[str]:
        """The names of all kernels and library calls, those in branches and loops too."""
        wrappers = ("kCommandBuffer", "kConditional", "kWhile")
        return [thunk.name for thunk in self.thunks if thunk.kind not in wrappers]

    def moves(self, least: int) -> list[str]:
        """Instructions, inside fusions too, that move an array of at least so many bytes."""
        found = []
        for line in self.text.splitlines():
            matched = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = \(?(\w+)\[([\d,]*)\]\S* .*?\b([\w-]+)\(", line)
            if matched and matched[4] in _MOVES and matched[2] in _BYTES:
                sizes = [int(size) for size in matched[3].split(",") if size]
                if functools.reduce(lambda product, size: product * size, sizes, _BYTES[matched[2]]) >= least:
                    found.append(f"{matched[4]} {matched[2]}[{matched[3]}]")
        return found

    def groups(self, kind: str) -> list[list[list[int]]]:
        """Of each collective of a kind, such as "all-reduce", the groups of devices that exchange something."""
        found = []
        for line in self.text.splitlines():
            if re.search(rf" {kind}(-start)?\(", line) is None:
                continue
            listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
            counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
            if listed is not None:
                found.append([_numbers(group) for group in listed[1].strip("{}").split("},{")])
            else:
                assert counted is not None, line
                shape, dims, order = (_numbers(text or "") for text in counted.groups())
                devices = np.arange(np.prod(dims)).reshape(dims)
                found.append(devices.transpose(order or range(len(dims))).reshape(shape).tolist())
        return found

    def branched(self, kind: str) -> int:
        """How many collectives of a kind run within branches, loops or whatever else the program calls."""
        called = self.text[: self.text.index("\nENTRY")]
        return len(re.findall(rf" {kind}(?:-start)?\(", called))

    def between(self, name: str) -> int | None:
        """Return how many kernels run from one kernel of this name to the next: the kernels of a layer."""
        names = [thunk.name for thunk in self.thunks if thunk.kind not in ("kCommandBuffer", "kConditional", "kWhile")]
        if not names:
            entry = self.text[self.text.index("\nENTRY") :]
            kinds = r"= (?:\([^=]*\)|\S+) (?:fusion|custom-call|copy|sort|reduce|convolution)\("
            names = [line for line in entry.splitlines() if re.search(kinds, line)]
        places = [index for index, each in enumerate(names) if name in each and self._calls(each)]
        return places[1] - places[0] if len(places) > 1 else None

    def _calls(self, entry: str) -> bool:
        return bool(self.thunks) or "custom-call(" in entry


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def folder(platform: str) -> Path | None:
    """Where the compiler for "gpu" or "tpu" lies; None where it was not fetched."""
    root = Path(os.environ.get("REKINDLE_COMPILERS", "/nowhere")) / platform
    return root if root.is_dir() else None


@functools.cache
def _plugin(root: Path) -> None:
    sys.path.append(str(root))
    importlib.import_module(f"jax_plugins.{next(root.glob('jax_plugins/xla_cuda*')).name}").initialize()


@functools.cache
def devices(platform: str, count: int = 1, gpu: str = "h100") -> list[jax.Device]:
    """The devices of a topology that is not there: `count` GPUs of a kind, or four chips of a v5e."""
    root = folder(platform)
    assert root is not None, FETCH
    jax.devices("cpu")  # JAX looks for plugins now, and once only: this one is not to be found
    if platform == "gpu":
        _plugin(root)
        target = GPUS[gpu].target
        return topologies.get_topology_desc("", "cuda", target_config=target, topology=f"1x1x{count}").devices
    os.environ["TPU_LIBRARY_PATH"] = str(root / "libtpu" / "libtpu.so")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    return topologies.get_topology_desc("v5e:2x2", "tpu").devices


@contextmanager
def target(platform: str, gpu: str = "h100") -> Iterator[jax.Device]:
    """Inside, programs are traced for that platform, and shapes without a sharding lie on its first device."""
    device = devices(platform, gpu=gpu)[0]
    with jax.default_device(device):
        yield device


def compiled(lowered: Any, platform: str, options: Mapping[str, Any] | None = None) -> Compiled:
    """Compile; `options` are the compiler options of the program itself."""
    if platform == "tpu":
        return Compiled(lowered.compile(compiler_options=dict(options or {})))
    root = folder("gpu")
    assert root is not None, FETCH
    cuda = next(root.glob("nvidia/cu*"))
    with tempfile.TemporaryDirectory() as dump:
        places = {"xla_dump_to": dump, "xla_gpu_cuda_data_dir": str(cuda)}
        executable = lowered.compile(compiler_options={**GPU_OPTIONS, **places, **(options or {})})
        thunks, shared = _schedule(Path(dump))
        kernels = _resources(Path(dump), cuda / "bin" / "ptxas", shared)
        return Compiled(executable, kernels, thunks)


def _schedule(dump: Path) -> tuple[tuple[Thunk, ...], dict[str, int]]:
    # The second is written only where a pass changed the first.
    file = max(dump.glob("*thunk_sequence*.txt"), key=lambda path: len(path.name))
    thunks, shared = [], {}
    for line in file.read_text().splitlines():
        matched = _THUNK.match(line)
        if matched:
            thunks.append(Thunk(len(matched["indent"]), matched["kind"], matched["name"]))
            shared[matched["name"]] = int(matched["shared"] or 0)
    return tuple(thunks), shared


def _resources(dump: Path, ptxas: Path, shared: Mapping[str, int]) -> dict[str, Kernel]:
    """What ptxas says about our own kernels, which are the ones with a name that does not end in a number."""
    kernels = {}
    for file in dump.glob("*.ptx"):
        text = file.read_text()
        architecture = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        for name in re.findall(r"\.entry (\w+)\(", text):
            if not name.startswith(("paged_", "write_kv", "grouped_", "int4_")):
                continue
            assert architecture is not None, file
            command = [ptxas, "-v", f"-arch={architecture[1]}", file, "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            spills = re.findall(r"(\d+) bytes spill", said)
            registers = re.search(r"Used (\d+) registers", said)
            assert registers is not None, said
            taken = shared.get(name, 0)
            kernels[name] = Kernel(name, int(registers[1]), sum(map(int, spills)), taken, "wgmma" in text)
    return kernels
