"""What processors say they have, and which level's kernels are chosen for it: recorded texts of Linux and macOS."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from helpers.kernel_state import look_for_library_again
from rekindle_kernels import kernels_for
from rekindle_kernels.native import build, build_library, cpu, cpuid, library, products, python_handlers

PI_4 = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\n"
GRAVITON_2 = (
    "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp "
    "cpuid asimdrdm lrcpc dcpop asimddp ssbs\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
)
GRAVITON_3 = (
    "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp "
    "cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca "
    "pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
)
ZEN_2 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2 fma movbe avx f16c abm avx2 bmi1 bmi2\n"
    "\nprocessor\t: 1\nflags\t\t: none\n"
)
M1 = """hw.optional.floatingpoint: 1
hw.optional.neon: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.FEAT_I8MM: 0
hw.optional.arm.AdvSIMD: 1
hw.optional.arm64: 1
"""
M2 = M1.replace("BF16: 0", "BF16: 1").replace("I8MM: 0", "I8MM: 1")
ARM = [level for level in cpu.LEVELS if level.machine == "aarch64"]


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str, features: frozenset[str]) -> None:
    monkeypatch.delenv(cpu.MASK, raising=False)
    monkeypatch.setattr(cpu, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "_own_features", lambda: features)


@pytest.mark.parametrize(
    ("told", "machine", "names"),
    [
        (PI_4, "aarch64", ["armv8"]),
        (GRAVITON_2, "aarch64", ["armv8.2-dotprod", "armv8"]),
        (GRAVITON_3, "aarch64", ["armv8.6-i8mm-bf16", "armv8.2-dotprod", "armv8"]),
        (ZEN_2, "x86_64", ["x86-64-v3"]),
    ],
    ids=["Raspberry Pi 4", "Graviton 2", "Graviton 3", "x86"],
)
def test_what_linux_says_gives_the_levels(
    told: str, machine: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, machine, cpu.features_of_linux(told))
    assert [level.name for level in cpu.levels()] == names
    assert cpu.on_arm() == (machine == "aarch64")


def test_the_matrix_instructions_are_seen() -> None:
    assert {"dotprod", "i8mm", "bf16"} <= cpu.features_of_linux(GRAVITON_3)
    assert not {"i8mm", "bf16"} & cpu.features_of_linux(GRAVITON_2)
    with pytest.raises(StopIteration):
        cpu.features_of_linux("processor : 0\n")


FLAGS = (
    "flags : avx avx2 bmi1 bmi2 f16c fma abm movbe avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16"
)


@pytest.mark.parametrize(
    ("vendor", "more", "counts"),
    [
        ("AuthenticAMD", "", True), ("AuthenticAMD", " avx512_fp16", True), ("GenuineIntel", "", True),
        ("GenuineIntel", " avx512_fp16 amx_bf16 amx_int8", True), ("GenuineIntel", " avx512_fp16", False),
    ],
)  # fmt: skip
def test_pairs_of_bfloat16_count_where_they_are_faster_than_float32(
    vendor: str, more: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine of an Intel processor with AMX may hide it."""
    pretend(monkeypatch, "x86_64", cpu.features_of_linux(f"vendor_id\t: {vendor}\n{FLAGS}{more}\n"))
    assert cpu.levels()[0].name == ("x86-64-v4-bf16" if counts else "x86-64-v4-vnni")
    assert cpu.multiplies_widened("bfloat16") != counts and not cpu.multiplies_widened("int8")
    assert cpu.multiplies_many("bfloat16") and cpu.multiplies_many("int8")


@pytest.mark.parametrize(
    ("told", "features"), [(M1, {"neon", "dotprod"}), (M2, {"neon", "dotprod", "i8mm", "bf16"}), ("", set())]
)
def test_what_macos_says_gives_the_features(told: str, features: set[str]) -> None:
    assert cpu.features_of_macos(told) == features


@pytest.mark.parametrize(("told", "best"), [(M1, "armv8.2-dotprod"), (M2, "armv8.6-i8mm-bf16"), ("", "armv8")])
def test_macos_is_asked_where_there_is_no_cpuinfo(told: str, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(self: Path) -> str:
        raise FileNotFoundError(self)

    with monkeypatch.context() as changed:
        changed.setattr(Path, "read_text", no_file)
        changed.setattr(sys, "platform", "darwin")
        changed.setattr(cpu, "machine", lambda: "aarch64")
        changed.setattr(cpu, "_sysctl", lambda *names: told)
        features = cpu._own_features.__wrapped__()
        assert not told or cpu.identity.__wrapped__() == told
    pretend(monkeypatch, "aarch64", features)
    assert cpu.levels()[0].name == best


def test_where_sysctl_is_not_there_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*arguments: object, **options: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    assert cpu._sysctl("hw.optional") == ""


def stand_in(features: set[str], vendor: str, saved: int) -> cpuid.Processor:
    """A processor with these features, whose system saves registers of these kinds; unknown leaves repeat others."""

    def leaf(number: int, below: int) -> cpuid.Registers:
        if number in (0, 0x80000000):
            ebx, edx, ecx = struct.unpack("<3I", vendor.encode())
            return cpuid.Registers(number + 7, ebx, ecx, edx)
        bits = dict.fromkeys(cpuid.Registers._fields, 0)
        for *place, register, bit in (cpuid.OSXSAVE, *(cpuid.FEATURES[name] for name in features)):
            if place == [number, below]:
                bits[register] |= 1 << bit
        if (number, below) == (7, 0):
            bits["eax"] = 1
        return cpuid.Registers(**bits)

    return cpuid.Processor(leaf, lambda: saved)


SAPPHIRE_RAPIDS = {*cpuid.FEATURES} - {"avxvnni"}
AVX, AVX512 = 0x7, 0xE7


@pytest.mark.parametrize(
    ("features", "vendor", "saved", "best"),
    [
        (SAPPHIRE_RAPIDS, "GenuineIntel", 0x600E7, "x86-64-v4-vnni"),  # its pairs of bfloat16 are AMX's, or slow
        (SAPPHIRE_RAPIDS - {"avx512_fp16"}, "AuthenticAMD", AVX512, "x86-64-v4-bf16"),
        (SAPPHIRE_RAPIDS, "GenuineIntel", AVX, "x86-64-v3"),  # Windows saves no wide registers
        (SAPPHIRE_RAPIDS, "GenuineIntel", 0x3, None),
        (cpu.V3 | {"avxvnni"}, "GenuineIntel", AVX, "x86-64-v3-vnni"),
        (cpu.V3 - {"movbe"}, "AuthenticAMD", AVX, None),
    ],
)
def test_a_processor_is_asked_where_the_system_says_nothing(
    features: set[str], vendor: str, saved: int, best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(self: Path) -> str:
        raise FileNotFoundError(self)

    processor = stand_in(features, vendor, saved)
    with monkeypatch.context() as changed:
        changed.setattr(Path, "read_text", no_file)
        changed.setattr(sys, "platform", "win32")
        changed.setattr(cpu, "machine", lambda: "x86_64")
        changed.setattr(cpuid, "own", lambda: processor)
        found = cpu._own_features.__wrapped__()
        assert cpu.identity.__wrapped__().startswith(f"{vendor} ")
    pretend(monkeypatch, "x86_64", found)
    assert [level.name for level in cpu.levels()][:1] == ([best] if best else [])


@pytest.mark.skipif(cpu.machine() != "x86_64" or sys.platform != "linux", reason="Linux's file is the reference")
def test_the_processor_names_what_linux_lists() -> None:
    flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    assert cpuid.features(cpuid.own()) == {cpu.LINUX.get(name, name) for name in flags} & cpuid.FEATURES.keys()


def test_windows_has_native_kernels_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delenv("REKINDLE_NATIVE", raising=False)
    assert not python_handlers.may_run() and not python_handlers.has_fill()
    assert build.unavailable_reason() == "no Windows has run native kernels yet: set REKINDLE_NATIVE=1 to try them"
    monkeypatch.setenv("REKINDLE_NATIVE", "1")
    assert python_handlers.may_run() and python_handlers.has_fill()


@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_kernels_of_other_processors_are_not_offered_on_arm(level: cpu.Level, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "aarch64", level.features)
    monkeypatch.setattr(products, "builds", lambda name: True)
    named = kernels_for(["bfloat16", "int8", "uint8"], "bfloat16", 64)
    has_dot, has_pairs = "dotprod" in level.features, "bf16" in level.features
    assert ("gemm_int8" in named, "gemm_bfloat16" in named) == (has_dot, has_pairs)
    assert {name for name in named if not build_library.fits(name, level)} == set()
    assert not products.has_amx()
    integers, floats = jnp.zeros((64, 64), jnp.int8), jnp.zeros((64, 64), jnp.bfloat16)
    assert products.multiplies(32, integers, quantize_rows=True) == has_dot
    assert products.multiplies(32, floats) == has_pairs and products.multiplies(4, floats)


@pytest.mark.parametrize("level", cpu.LEVELS, ids=lambda level: level.name)
def test_a_library_has_all_kernels_that_its_levels_choose(level: cpu.Level, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, level.machine, level.features)
    named = kernels_for(["float32", "bfloat16", "int8", "uint8"], "bfloat16", 64)
    assert not [name for name in named if not build_library.fits(name, level)]
    assert cpu.multiplies_many("int8") == ("gemm_int8" in named) == build_library.fits("gemm_int8", level)


@pytest.mark.parametrize(("name", "kind"), [("x86-64-v3", "matvec"), ("x86-64-v4-bf16", "gemm")])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_deterministic_products_are_of_one_kind(
    name: str, kind: str, dtype: jax.typing.DTypeLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "x86_64", cpu.level_called(name).features)
    kernels = [products._kernel(rows, jnp.zeros((64, 64), dtype), True, deterministic=True) for rows in (1, 4, 9, 512)]
    assert {kernel and kernel.name.partition("_")[0] for kernel in kernels} == {kind}


def test_what_kernels_use_is_asked_of_llvm_on_arm_whatever_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(flatten=lambda: "+neon")
    llvm = SimpleNamespace(get_host_cpu_name=lambda: "apple-m2", get_host_cpu_features=lambda: found)
    pretend(monkeypatch, "aarch64", cpu.features_of_macos(M2))
    assert build._target(llvm) == ("apple-m2", "+neon,+neon,+dotprod,+i8mm,+bf16")
    pretend(monkeypatch, "x86_64", cpu.V3)
    assert build._target(llvm) == ("apple-m2", "+neon")


def test_a_library_is_for_one_kind_of_processor(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not for aarch64 and x86_64"):
        build_library.build(tmp_path, [cpu.level_called("armv8"), cpu.level_called("x86-64-v3")], ["norm"])


@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_a_level_of_arm_is_part_of_a_programs_key(
    level: cpu.Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle_kernels import environment

    pretend(monkeypatch, "aarch64", ARM[0].features)
    monkeypatch.setenv(library.FOLDER, str(tmp_path))
    monkeypatch.setenv(cpu.MASK, level.name)
    said = {"platform": library.platform_tag("aarch64"), "sources": library.source_digest(), "library": "k.so"}
    levels = {one.name: ["norm"] for one in ARM}
    (tmp_path / library.MANIFEST).write_text(json.dumps({**said, "digest": "1", "levels": levels}))
    look_for_library_again()
    found = environment()
    look_for_library_again()
    assert (found["mask"], found["level"], found["library"]) == (level.name, level.name, "1")


def test_symbols_of_all_levels_differ() -> None:
    symbols = {library.symbol("norm", level) for level in cpu.LEVELS}
    assert len(symbols) == len(cpu.LEVELS)
    assert all(symbol.replace("_", "").isalnum() for symbol in symbols)
