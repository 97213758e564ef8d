"""Compiles native kernels ahead for several levels of processors: `python -m rekindle_kernels.native.build_library`.

Every kernel is compiled for every level in a process of its own, since LLVM ends the process where it can't; such a
kernel is left out at that level, and XLA does its work. The system's compiler driver links the objects.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rekindle_kernels import int4
from rekindle_kernels.native import cpu, kernel_table, library
from rekindle_kernels.native.chain_plan import CHAIN, ENTRIES, SLOTS

DTYPES = ("bfloat16", "float32", "float16", "int8")
WRITTEN = ("float32", "bfloat16")  # pages of others are XLA's to write
HEAD_DIMS = (64, 128, 32, 80, 96, 256)
SYSTEMS = {"linux": "unknown-linux-gnu", "darwin": "apple-macosx11.0.0"}


def all_kernels(head_dims: Iterable[int] = HEAD_DIMS) -> list[str]:
    """The names of all kernels that models of these head sizes use."""
    names = [CHAIN]
    for spec in kernel_table.KERNELS.values():
        dtypes: tuple[str, ...] = WRITTEN if spec is kernel_table.WRITE_KV else DTYPES
        if spec in kernel_table.GROUPED.values():
            dtypes = int4.STORED
        if spec is kernel_table.GEMM:
            dtypes = tuple(cpu.DOT_PRODUCTS)
        if spec.parameters == kernel_table.DTYPE_AND_HEAD_DIM:
            names += [spec.variant(dtype, size).name for size in head_dims for dtype in dtypes]
        elif spec.parameters:
            names += [spec.variant(dtype).name for dtype in dtypes]
        else:
            names.append(spec.variant().name)
    return names


def build(target: Path, levels: Sequence[cpu.Level], kernels: Sequence[str], *, linker: str | None = None) -> Path:
    """Compile and link; the folder `target` then holds the library and its manifest. Returns the library's path."""
    machines = {level.machine for level in levels}
    assert len(machines) == 1, f"one library is for one kind of processor, not for {' and '.join(sorted(machines))}"
    platform = library.platform_tag(*machines)
    started, made = time.perf_counter(), {level.name: list[str]() for level in levels}
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(name, level) for level in levels for name in kernels if fits(name, level)]
        objects = [_entries_object(Path(folder), levels[0])]
        for (name, level), path in zip(jobs, _compiled(jobs, Path(folder)), strict=True):
            if path is None:
                print(f"{name} can't be compiled for {level.name}", file=sys.stderr)
            else:
                made[level.name].append(name)
                objects.append(path)
        target.mkdir(parents=True, exist_ok=True)
        place = target / f"kernels-{platform}.so"
        _link(place, objects, linker)
    manifest = {
        "platform": platform,
        "sources": library.source_digest(),
        "library": place.name,
        "digest": hashlib.blake2b(place.read_bytes(), digest_size=16).hexdigest(),
        "levels": made,
    }
    (target / library.MANIFEST).write_text(json.dumps(manifest, indent=1))
    seconds, size = time.perf_counter() - started, place.stat().st_size / 2**20
    print(f"{place}: {sum(map(len, made.values()))} kernels, {size:.1f} MiB, {seconds:.0f} s", file=sys.stderr)
    return place


def fits(name: str, level: cpu.Level) -> bool:
    """Whether the kernel is one for that level: products of many rows without the instructions for it are XLA's."""
    kind, _, dtype = name.partition("_")
    return kind != kernel_table.GEMM.kind or cpu.multiplies_many(dtype, level)


def _compiled(jobs: Sequence[tuple[str, cpu.Level]], folder: Path) -> list[Path | None]:
    """The object file of each job, None where it failed; as many at once as there are processors."""
    import rekindle_kernels.native.compiling  # noqa: F401  imported once, before the processes part

    results: list[Path | None] = [None] * len(jobs)
    running: dict[int, int] = {}

    def wait() -> None:
        process = next(iter(running))
        index = running.pop(process)
        _, status = os.waitpid(process, 0)
        path = folder / f"{index}.o"
        results[index] = path if status == 0 and path.exists() else None

    for index, (name, level) in enumerate(jobs):
        if len(running) >= (os.cpu_count() or 1):
            wait()
        process = os.fork()
        if process == 0:
            _compile(name, level, folder / f"{index}.o")
        running[process] = index
    while running:
        wait()
    return results


def _compile(name: str, level: cpu.Level, path: Path) -> None:
    """Compile one kernel and end the process."""
    status = 1
    try:
        from rekindle_kernels.native.compiling import object_code

        cpu.building_for = level
        path.write_bytes(object_code(name, library.symbol(name, level), machine_of(level)))
        status = 0
    except Exception as error:
        print(f"{name}, {level.name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)


def machine_of(level: cpu.Level) -> object:
    """LLVM's target machine for code of a shared library."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # one kernel has lines of assembly, for x86
    architecture = "arm64" if sys.platform == "darwin" and level.machine == "aarch64" else level.machine
    target = llvm.Target.from_triple(f"{architecture}-{SYSTEMS[sys.platform]}")
    return target.create_target_machine(cpu=level.cpu, features=level.flags, opt=3, reloc="pic", codemodel="default")


def _entries_object(folder: Path, level: cpu.Level) -> Path:
    """The table of entries, which every kernel of chains finds by its symbol."""
    import llvmlite.binding as llvm

    machine = machine_of(level)
    module = llvm.parse_assembly(f"@{ENTRIES} = global [{SLOTS} x i64] zeroinitializer, align 64")
    module.triple = machine.triple  # type: ignore[attr-defined]
    path = folder / "entries.o"
    path.write_bytes(machine.emit_object(module))  # type: ignore[attr-defined]
    return path


def _link(place: Path, objects: Sequence[Path], linker: str | None) -> None:
    program = linker or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "cc")
    options = ["-dynamiclib"] if sys.platform == "darwin" else ["-shared", "-nostartfiles", "-Wl,-z,defs,-Bsymbolic,-s"]
    subprocess.run([program, *options, "-o", str(place), *map(str, objects), "-lm"], check=True)


def main() -> None:
    own = [level.name for level in cpu.LEVELS if level.machine == cpu.machine()]
    parser = argparse.ArgumentParser(prog="python -m rekindle_kernels.native.build_library", description=__doc__)
    parser.add_argument("--levels", nargs="+", default=own, help=f"of processors; default: {' '.join(own)}")
    parser.add_argument("--kernels", nargs="+", help="default: all of them")
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS, help="head sizes of attention")
    parser.add_argument("--linker", help="the compiler driver that links, for another machine than this one")
    parser.add_argument("--out", type=Path, default=library.folder())
    arguments = parser.parse_args()
    kernels = arguments.kernels or all_kernels(arguments.head_dims)
    build(arguments.out, [cpu.level_called(name) for name in arguments.levels], kernels, linker=arguments.linker)


if __name__ == "__main__":
    main()
