"""The features of this processor, and the levels of processors that kernels are compiled for.

Features have LLVM's names. `REKINDLE_NATIVE_LEVEL` names a level beyond which native kernels use none, so that what an
older processor would run can be tested and measured on a newer one. XLA's own code is not masked by it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rekindle_kernels.native import cpuid

MASK = "REKINDLE_NATIVE_LEVEL"
V3 = frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Linux's names of features, where LLVM has others.
LINUX = {
    "abm": "lzcnt", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8", "asimd": "neon", "asimddp": "dotprod",
    "avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni", "bmi1": "bmi",
}  # fmt: skip
MACOS = {"AdvSIMD": "neon", "FEAT_DotProd": "dotprod", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16"}
DOT_PRODUCTS = {
    "bfloat16": ("avx512bf16", "bf16"),
    "int8": ("avx512vnni", "dotprod"),
    "float32": ("avx512bf16",),  # by AMX, as three bfloat16 each: gemm_split
}  # features, any of which has them
MULTIPLIED = tuple(DOT_PRODUCTS)  # dtypes of matrices that a native kernel multiplies many rows by, somewhere


class Prefetch(NamedTuple):
    """How kernels ask for memory before they read it."""

    cache: int  # the level of cache that it is brought into, 1 or 2; 0 leaves it to the processor's own prefetcher
    ahead: int  # bytes by which weights are asked for before they are read


class Prefetching(NamedTuple):
    """How products prefetch weights. Products of one row choose by the kind of weights, unless an output has many."""

    wide: Prefetch  # 16 bits and more
    int8: Prefetch
    grouped: Prefetch  # 4, 6 and 8 bits in groups, for several rows, too
    several: Prefetch  # for several rows at once, and what is no weight

    @classmethod
    def read(cls, written: Mapping[str, Sequence[int]]) -> Prefetching:
        """Read the prefetching from a manifest, by kind."""
        return cls(**{kind: Prefetch(*how) for kind, how in written.items()})


USUAL = Prefetching(*[Prefetch(1, 8 << 10)] * 4)
SECOND = Prefetching(*[Prefetch(2, 8 << 10)] * 4)._replace(grouped=USUAL.grouped)


@dataclass(frozen=True, slots=True)
class Level:
    """Processors for which the same machine code is compiled."""

    name: str
    machine: str  # as `platform.machine` says it
    cpu: str  # LLVM's name for those that have the least of it
    extra: tuple[str, ...]  # features beyond that
    features: frozenset[str]  # all that kernels and their choice look at
    prefetch: Prefetching = USUAL  # where nothing else was measured to be faster

    @property
    def flags(self) -> str:
        """`extra` as LLVM reads it."""
        return ",".join(f"+{name}" for name in self.extra)

    @property
    def suffix(self) -> str:
        """The ending of its symbols."""
        return self.name.replace("-", "_").replace(".", "_")


def _x86(name: str, base: str, features: frozenset[str], *extra: str, prefetch: Prefetching = USUAL) -> Level:
    return Level(name, "x86_64", base, extra, features | {*extra}, prefetch)


def _arm(name: str, *features: str) -> Level:
    return Level(name, "aarch64", "generic", features, frozenset(features))


LEVELS = (  # of one machine the best first
    _x86("x86-64-v4-bf16", "x86-64-v4", V4, "avx512vnni", "avx512bf16", prefetch=SECOND),  # as a Zen 4 likes it
    _x86("x86-64-v4-vnni", "x86-64-v4", V4, "avx512vnni"),
    _x86("x86-64-v4", "x86-64-v4", V4),
    _x86("x86-64-v3-vnni", "x86-64-v3", V3, "avxvnni"),
    _x86("x86-64-v3", "x86-64-v3", V3),
    _arm("armv8.6-i8mm-bf16", "neon", "dotprod", "i8mm", "bf16"),
    _arm("armv8.2-dotprod", "neon", "dotprod"),
    _arm("armv8", "neon"),
)
IDENTIFYING = {
    "vendor_id", "cpu family", "model", "stepping", "flags", "features", "cpu implementer", "cpu architecture",
    "cpu variant", "cpu part", "cpu revision",
}  # fmt: skip
building_for: Level | None = None  # set in processes that compile for others
prefetching: Prefetching | None = None  # set in processes that compile with another one than the level's


def level_called(name: str) -> Level:
    """Return the level of that name. Raises ValueError for an unknown one."""
    for level in LEVELS:
        if level.name == name:
            return level
    raise ValueError(f"{name!r} is not a level of processors; there are {', '.join(level.name for level in LEVELS)}")


def machine() -> str:
    """Return the kind of this processor, by Linux's name."""
    name = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


@cache
def identity() -> str:
    """Return the text that tells this processor from others, as far as LLVM looks at it."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        named = (line.partition(":") for line in first.splitlines())
        kept = {name.strip(): value.strip() for name, _, value in named if name.strip().lower() in IDENTIFYING}
        if kept.keys() & {"flags", "Features"}:
            return repr(sorted(kept.items()))
    except OSError:
        pass
    told = _sysctl("machdep.cpu", "hw.optional") if sys.platform == "darwin" else ""
    if told:
        return told
    if machine() == "x86_64":
        return cpuid.identity(cpuid.own())
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def prefetch() -> Prefetching:
    """How the kernels that are being compiled ask for memory."""
    level = building_for or next(iter(levels()), None)
    return prefetching or (USUAL if level is None else level.prefetch)


def usable_cores() -> int:
    """Return how many of its cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def model_name() -> str:
    """Return the processor's name, as its maker writes it; empty where the system does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def has_feature(name: str) -> bool:
    """True if native kernels may use the instructions that LLVM calls `name`."""
    return name in _used()


def on_arm() -> bool:
    """True if native kernels are AArch64 code."""
    return has_feature("neon")


def has_amx() -> bool:
    """True if products of many rows may use AMX; Linux gives it to a process that asks."""
    return has_feature("amx-int8") and has_feature("amx-bf16") and sys.platform == "linux"


def multiplies_many(dtype: str, level: Level | None = None) -> bool:
    """True if a native kernel multiplies many rows by a matrix of this dtype, at this level or at the one in use."""
    features = _used() if level is None else level.features
    if dtype == "float32" and "avx512bf16" in features and level is None:
        return has_amx()  # which is asked on the machine alone
    return dtype in DOT_PRODUCTS and (not features.isdisjoint(DOT_PRODUCTS[dtype]) or _widens(dtype, features))


def multiplies_widened(dtype: str) -> bool:
    """True if native kernels multiply many rows by numbers of this dtype that are widened to 16 or 32 bits, for want of
    anything better."""
    return _widens(dtype, _used())


def _widens(dtype: str, features: frozenset[str]) -> bool:
    return {"avx2", "fma"} <= features and features.isdisjoint(DOT_PRODUCTS.get(dtype, ()))


def _used() -> frozenset[str]:
    return features() if building_for is None else building_for.features


def features() -> frozenset[str]:
    """Return the features that native kernels may use here."""
    masked = mask()
    return _own_features() if masked is None else _own_features() & masked.features


def mask() -> Level | None:
    """Return the level that REKINDLE_NATIVE_LEVEL names. Raises ValueError for an unknown one."""
    name = os.environ.get(MASK)
    return level_called(name) if name else None


def levels() -> tuple[Level, ...]:
    """Return the levels that may run here, the best first."""
    own, kind = features(), machine()
    return tuple(level for level in LEVELS if level.machine == kind and level.features <= own)


@cache
def _own_features() -> frozenset[str]:
    """Return the features that the processor has and the system allows: by Linux's file, else by asking macOS or the
    processor itself."""
    try:
        return features_of_linux(Path("/proc/cpuinfo").read_text())
    except (OSError, StopIteration):
        if machine() == "aarch64":
            return frozenset({"neon"}) | features_of_macos(_sysctl("hw.optional") if sys.platform == "darwin" else "")
    try:
        return features_of_x86(cpuid.own()) if machine() == "x86_64" else frozenset()
    except OSError:  # the system gives no memory for code, in which kernels would be, too
        return frozenset()


def features_of_linux(cpuinfo: str) -> frozenset[str]:
    """Return the features in the text of /proc/cpuinfo. Raises StopIteration where it has none."""
    lines = cpuinfo.splitlines()
    flags = next(line for line in lines if line.startswith(("flags", "Features"))).split(":", 1)[1].split()
    of_intel = any(line.startswith("vendor_id") and line.endswith("GenuineIntel") for line in lines)
    return _without_slow(frozenset(LINUX.get(name, name) for name in flags), of_intel=of_intel)


def features_of_x86(processor: cpuid.Processor) -> frozenset[str]:
    """Return the features that a processor names by CPUID; AMX is not among them, since only Linux gives it."""
    names = cpuid.features(processor) - {"amx-bf16", "amx-int8"}
    return _without_slow(names, of_intel=cpuid.vendor(processor) == "GenuineIntel")


def _without_slow(names: frozenset[str], *, of_intel: bool) -> frozenset[str]:
    """Return the features without products of bfloat16 pairs on processors that multiply float32 faster.

    Intel's processors since Sapphire Rapids multiply pairs of bfloat16 by AMX. Where a virtual machine hides that, what
    is left, `vdpbf16ps`, is half as fast as float32 (two cycles for 32 products, where two FMAs take one): it does not
    count.
    """
    slow = of_intel and "avx512_fp16" in names and "amx-bf16" not in names
    return names - {"avx512bf16"} if slow else names


def features_of_macos(told: str) -> frozenset[str]:
    """Return the features in what `sysctl hw.optional` prints on an Arm processor."""
    lines = (line.partition(":") for line in told.splitlines())
    there = {name.strip().rpartition(".")[2] for name, _, value in lines if value.strip() == "1"}
    return frozenset(MACOS[name] for name in there & MACOS.keys())


def _sysctl(*names: str) -> str:
    """Return the output of `sysctl` on macOS; empty where it can't be called."""
    try:
        return subprocess.run(["/usr/sbin/sysctl", *names], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
