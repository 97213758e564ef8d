"""Compiles native kernels ahead: at installation for this processor, or for the levels of processors of a wheel.

`python -m rekindle_kernels.native.build_library`. Needs numba, and no JAX. As many processes as there are processors
compile one kernel after the other, since numba then compiles what kernels share once. LLVM ends a process where it
can't compile a kernel; that one is left out at that level, and XLA does its work.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rekindle_kernels import int4_format
from rekindle_kernels.native import cpu, kernel_files, kernel_table, library, object_loader
from rekindle_kernels.native.chain_plan import CHAIN, ENTRIES, SLOTS

HEAD_DIMS = (64, 128, 256, 32, 80, 96)
PACKED_HEAD_DIM = 32  # packed pages take multiples of this size
AHEAD = "int8int4"  # the format of packed pages that is compiled ahead
UNLINKED = "linux-x86_64"  # there `object_loader` does what a linker would
_SUFFIXES = {"linux": "so", "darwin": "so", "win32": "dll"}
# A DLL needs no C library of a compiler's: it takes these functions from two that every Windows has.
_IMPORTS = {
    "kernel32": ("GetCurrentThreadId", "Sleep", "SwitchToThread"),
    "msvcrt": ("free", "malloc", "memcpy", "memmove", "memset"),
}
# What kernels call of POSIX, by functions of kernel32: Windows sleeps whole milliseconds, and at times fifteen of them.
# `__chkstk` touches each page of a large frame in turn, since Windows makes a thread's stack longer page by page.
_WINDOWS_FORMS = """
@_fltused = global i32 0
declare dllimport i32 @SwitchToThread()
declare dllimport i32 @GetCurrentThreadId()
declare dllimport void @Sleep(i32)
define i64 @sched_yield(i64 %any) {
  %yielded = call i32 @SwitchToThread()
  ret i64 0
}
define i64 @pthread_self(i64 %any) {
  %id = call i32 @GetCurrentThreadId()
  %wide = zext i32 %id to i64
  ret i64 %wide
}
define i64 @usleep(i64 %microseconds) {
  %more = add i64 %microseconds, 999
  %milliseconds = udiv i64 %more, 1000
  %narrow = trunc i64 %milliseconds to i32
  call void @Sleep(i32 %narrow)
  ret i64 0
}
module asm ".globl __chkstk"
module asm "__chkstk:"
module asm "  pushq %r10"
module asm "  pushq %r11"
module asm "  leaq 24(%rsp), %r10"
module asm "  movq %r10, %r11"
module asm "  subq %rax, %r11"
module asm "0:"
module asm "  subq $4096, %r10"
module asm "  cmpq %r11, %r10"
module asm "  jb 1f"
module asm "  testb $0, (%r10)"
module asm "  jmp 0b"
module asm "1:"
module asm "  testb $0, (%r11)"
module asm "  popq %r11"
module asm "  popq %r10"
module asm "  ret"
"""
_JOB = struct.Struct("=i")
_WINDOW = 16 << 20  # bytes that packing sees at once: all of a library, which unpacking then has memory for


class ObjectFolder(NamedTuple):
    """The object files of one level's kernels. Their folder may also have files from other sources and compilers."""

    folder: Path
    level: cpu.Level
    linked: bool

    def path(self, name: str, system: str) -> Path:
        """Return the file of a kernel for a system; it is complete or absent."""
        compilers = "-".join(importlib.metadata.version(package) for package in ("numba", "llvmlite"))
        kind = f"{system}-{self.level.suffix}{'' if self.linked else '-unlinked'}"
        return self.folder / f"{library.source_digest()}-{compilers}" / kind / f"{name}.o"


def all_kernels(head_dims: Iterable[int] = HEAD_DIMS) -> list[str]:
    """Return the names of all kernels that models of these head sizes use, the likeliest first."""
    names, attention = [CHAIN], list[tuple[int, int, str]]()
    for spec in kernel_table.KERNELS.values():
        dtypes: tuple[str, ...] = kernel_table.DTYPES
        if spec is kernel_table.WRITE_KV:
            dtypes = kernel_table.WRITTEN
        if spec is kernel_table.ADD_KEYS:
            dtypes = kernel_table.ADDED
        for stored, specs in (
            (int4_format.STORED, kernel_table.GROUPED),
            (int4_format.STORED_SMALLEST, kernel_table.GROUPED_SMALLEST),
        ):
            if spec in specs.values():
                dtypes = stored[str(spec.operands[spec.index("weight")].dtype)]
        if spec in kernel_table.ADAPTERS:
            dtypes = kernel_table.ADAPTED
        if spec is kernel_table.GEMM:
            dtypes = cpu.MULTIPLIED
        if spec in kernel_table.PACKED:
            sizes = [size for size in head_dims if size % PACKED_HEAD_DIM == 0]
            names += [spec.variant(AHEAD, size).name for size in sizes]
        elif spec.parameters == kernel_table.DTYPE_AND_HEAD_DIM:
            for rank, dtype in enumerate(dtypes):
                attention += [(rank, at, spec.variant(dtype, size).name) for at, size in enumerate(head_dims)]
        elif spec.parameters == kernel_table.HEAD_DIM:
            names += [spec.variant(size).name for size in head_dims]
        elif spec.parameters:
            names += [spec.variant(dtype).name for dtype in dtypes]
        else:
            names.append(spec.variant().name)
    return [*names, *(name for _, _, name in sorted(attention))]


def likely_kernels() -> list[str]:
    """Return the kernels that an installation compiles: float32 and int8 pages for the commonest head sizes.

    Kernels for float16, packed pages, bounds of pages, adapters and states are compiled by the sessions that need them.
    """
    common = {f"_{dtype}_{size}" for dtype in ("float32", "int8") for size in HEAD_DIMS[:3]}
    specs = kernel_table.KERNELS.values()
    attention = {spec.kind for spec in specs if spec.parameters == kernel_table.DTYPE_AND_HEAD_DIM}
    seldom = *kernel_table.ADAPTERS, *kernel_table.RECURRENT, *kernel_table.PACKED, *kernel_table.BOUNDED
    rare = {spec.kind for spec in seldom}

    def likely(name: str) -> bool:
        kind, _, pages = name.partition("_")
        if kind in rare:
            return False
        return kind not in attention or pages.startswith("bfloat16") or f"_{pages}" in common

    return [name for name in all_kernels() if likely(name)]


def build(
    target: Path,
    levels: Sequence[cpu.Level],
    kernels: Sequence[str],
    *,
    system: str = sys.platform,
    linker: str | None = None,
    limit: float = math.inf,
    longest: float = math.inf,
    origin: str = "",
    prefetch: Mapping[str, Any] | None = None,
    packed: bool = False,
    whole: bool = False,
    objects: Path | None = None,
) -> Path:
    """Compile the kernels; the folder `target` then holds the library and its manifest. Returns the library's path.

    A shared library that is `packed` is compressed as a whole: wheels have less room than all levels take.
    `prefetch` is what `tuned` returned, and goes into the manifest.
    Object files stay in the folder `objects`, if there is one, and those that it has are not compiled.
    What is not begun after `limit` seconds of a process's own time on a core is left out: that is as much on a busy
    machine as on an idle one. So is what is not begun after `longest` seconds, and what can't be compiled; if the
    library has to be `whole`, RuntimeError is raised then. `linker` is the compiler driver that links, if one is
    needed, with its options; it has to be one for `system`.
    """
    machines = {level.machine for level in levels}
    assert len(machines) == 1, f"one library is for one kind of processor, not for {' and '.join(sorted(machines))}"
    platform = library.platform_tag(levels[0].machine, system)
    linked = linker is not None or platform != UNLINKED
    assert linked or not packed, "what is unpacked is a shared library"
    program = shlex.split(linker or _linker()) if linked else []
    started, found = time.perf_counter(), dict[str, dict[cpu.Level, Path]]()  # object files, by kernel
    failed = list[str]()
    deadline = time.monotonic() + longest
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            names = [name for name in kernels if fits(name, level)]
            made_at = ObjectFolder(objects or Path(folder), level, linked)
            _compile_all(names, made_at, [system], limit, deadline)
            for name in names:
                path = made_at.path(name, system)
                if not path.exists():
                    failed.append(f"{name} for {level.name}")
                    print(f"{failed[-1]} is left out: it failed to compile, or there was no time", file=sys.stderr)
                else:
                    found.setdefault(name, {})[level] = path
        if whole and failed:
            raise RuntimeError(f"kernels that were not compiled: {', '.join(failed)}")
        kept = {name: without_copies(found[name]) for name in kernels if name in found}
        made = {level.name: [name for name in kept if level in kept[name]] for level in levels}
        # Those of a kernel lie together, where compressing finds what they have in common.
        files = {library.symbol(name, level): path for name, paths in kept.items() for level, path in paths.items()}
        target.mkdir(parents=True, exist_ok=True)
        place = target / f"kernels-{platform}.{_SUFFIXES[system] if linked else 'objects'}"
        extents: dict[str, tuple[int, int]] = {}
        if linked:
            if system == "darwin":
                program += ["-Wl,-install_name,@rpath/" + place.name]  # else the name of this moment's file
            own = Path(folder) / place.name  # a DLL says its name, and the linker leaves files next to it
            _link(own, [_common_object(Path(folder), levels[0], system), *files.values()], program, system)
            content = own.read_bytes()
        else:
            content = b""
            for symbol, path in files.items():
                code = path.read_bytes()
                extents[symbol] = len(content), len(code)
                content += code
        digest = kernel_files.digest_of(content)
        if packed:
            import lzma  # not every Python has it, and only a release needs it

            place = place.with_name(place.name + library.PACKED)
            content = lzma.compress(content, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": _WINDOW}])
        new = target / f".{place.name}.{os.getpid()}"  # a process may have the old one mapped: it keeps that
        new.write_bytes(content)
        os.replace(new, place)
    seconds, count = time.perf_counter() - started, sum(map(len, made.values()))
    manifest = {
        "platform": platform,
        "sources": library.source_digest(),
        "library": place.name,
        "digest": digest,
        "levels": made,
        "objects": extents,
        "origin": origin,
        "prefetch": prefetch,
    }
    new = target / f".{library.MANIFEST}.{os.getpid()}"
    new.write_text(json.dumps(manifest, indent=1))
    os.replace(new, target / library.MANIFEST)
    print(f"{place}: {count} kernels, {place.stat().st_size / 2**20:.1f} MiB, {seconds:.0f} s", file=sys.stderr)
    return place


def without_copies(objects: Mapping[cpu.Level, Path]) -> dict[cpu.Level, Path]:
    """Drop the object files of a kernel that equal the one a processor would find at a lower level.

    A processor takes a kernel from the best of its levels that has it. Some processors also have a level between two
    others, with features that the better one does not ask for: its kernel has to be equal, too.
    """
    kept: dict[cpu.Level, Path] = {}
    for level in reversed([level for level in cpu.LEVELS if level in objects]):
        code = _without_level(level, objects[level])
        for other in reversed(kept):
            if _without_level(other, kept[other]) != code:
                kept[level] = objects[level]
                break
            if other.features <= level.features:
                break
        else:
            kept[level] = objects[level]
    return kept


def _without_level(level: cpu.Level, path: Path) -> bytes:
    """Return the bytes of an object file with the level's name removed from its symbols."""
    return path.read_bytes().replace(library.level_name(level).encode(), b"")


def tuned(level: cpu.Level) -> dict[str, Any] | None:
    """Return the choice of `tuning` for this processor and its measurements; None if it could not measure.

    A separate process measures, because this one will fork, before which it should have no threads.
    """
    try:
        code = f"from rekindle_kernels.native import cpu, tuning; tuning.main(cpu.level_called({level.name!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        found: dict[str, Any] | None = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        print(f"prefetching is not measured: {error}".splitlines()[0], file=sys.stderr)
        return None
    return found


def reads_weights(name: str) -> bool:
    """True if `tuning` measures how this kernel prefetches."""
    return name.partition("_")[0] in {kernel_table.MATVEC.kind, kernel_table.INT4.kind}


def fits(name: str, level: cpu.Level) -> bool:
    """True if the kernel is one for that level: products of many rows without the instructions for it are XLA's."""
    kind, _, dtype = name.partition("_")
    return kind != kernel_table.GEMM.kind or cpu.multiplies_many(dtype, level)


def compile_objects(folder: Path, level: cpu.Level, kernels: Sequence[str], systems: Sequence[str]) -> None:
    """Compile a level's kernels for the shared libraries of several systems, into a folder for `build`.

    Most of the time is numba's, which does its part once for all of them.
    """
    _compile_all([name for name in kernels if fits(name, level)], ObjectFolder(folder, level, linked=True), systems)


def _compile_all(
    names: Sequence[str],
    place: ObjectFolder,
    systems: Sequence[str],
    limit: float = math.inf,
    deadline: float = math.inf,
) -> None:
    """Compile the kernels that are absent, as many at once as there are processors. One that fails stays absent."""
    import rekindle_kernels.native.compiling  # noqa: F401  imported once, before the processes part

    names = [name for name in names if not all(place.path(name, system).exists() for system in systems)]
    if not names:
        return
    for system in systems:
        place.path(names[0], system).parent.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":  # it has no processes that begin as a copy of this one
        for name in names:
            if time.process_time() < limit and time.monotonic() < deadline:
                _compile(name, place, systems)
        return
    jobs, ready = os.pipe()  # a process takes the next number from it
    os.set_blocking(jobs, False)
    asked_by = os.getpid()

    def work() -> None:
        with contextlib.suppress(BlockingIOError):  # no number is left
            while os.getppid() == asked_by:
                (index,) = _JOB.unpack(os.read(jobs, _JOB.size))
                if time.process_time() < limit and time.monotonic() < deadline:  # a fork's own time begins at 0
                    _compile(names[index], place, systems)

    try:
        os.write(ready, b"".join(map(_JOB.pack, range(len(names)))))  # a pipe holds 64 KiB
        processes = {_forked(work) for _ in range(min(cpu.usable_cores(), len(names)))}
        while processes:
            process, status = os.wait()
            processes.discard(process)
            if os.WIFSIGNALED(status):  # what it was compiling is left out; another one goes on with the rest
                processes.add(_forked(work))
    finally:
        os.close(jobs)
        os.close(ready)


def _forked(work: Callable[[], None]) -> int:
    """Return a process that does the work and ends."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork")
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return process


def _compile(name: str, place: ObjectFolder, systems: Sequence[str]) -> None:
    """Compile one kernel, where it is absent."""
    try:
        from rekindle_kernels.native.compiling import machine_of, object_codes

        cpu.building_for = level = place.level
        symbol = library.symbol(name, level)
        paths = {system: path for system in systems if not (path := place.path(name, system)).exists()}
        machines = [machine_of(level, linked=place.linked, system=system) for system in paths]
        for path, code in zip(paths.values(), object_codes(name, symbol, machines), strict=True):
            if not place.linked and object_loader.load(code, symbol, {ENTRIES: 1 << 20}) is None:
                raise RuntimeError("its object code has something that object_loader does not know")
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(code)
            part.rename(path)
    except Exception as error:
        print(f"{name}, {place.level.name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)


def _common_object(folder: Path, level: cpu.Level, system: str) -> Path:
    """Return the table of entries, which every kernel of chains finds by its symbol, and what the system lacks."""
    import llvmlite.binding as llvm

    from rekindle_kernels.native.compiling import machine_of

    machine = machine_of(level, system=system)
    export, forms = ("dllexport ", _WINDOWS_FORMS) if system == "win32" else ("", "")
    module = llvm.parse_assembly(f"@{ENTRIES} = {export}global [{SLOTS} x i64] zeroinitializer, align 64\n{forms}")
    module.triple = machine.triple  # type: ignore[attr-defined]
    path = folder / "common.o"
    path.write_bytes(machine.emit_object(module))  # type: ignore[attr-defined]
    return path


def _linker() -> str:
    """Return the system's compiler driver. Raises RuntimeError where there is none."""
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return name
    raise RuntimeError("there is no C compiler to link them (cc, gcc or clang)")


def _link(place: Path, objects: Sequence[Path], linker: Sequence[str], system: str) -> None:
    if system == "win32":
        _link_dll(place, objects, linker)
        return
    options = ["-dynamiclib"] if system == "darwin" else ["-shared", "-nostartfiles", "-Wl,-z,defs,-Bsymbolic,-s"]
    subprocess.run([*linker, *options, "-o", str(place), *map(str, objects), "-lm"], check=True)


def _link_dll(place: Path, objects: Sequence[Path], linker: Sequence[str]) -> None:
    """Link by a program with the options of Microsoft's, as `lld-link` has them."""
    imports = []
    for name, functions in _IMPORTS.items():
        stub, listed = place.with_name(f"{name}.lib"), place.with_name(f"{name}.def")
        listed.write_text("\n".join([f"LIBRARY {name}.dll", "EXPORTS", *functions, ""]))
        subprocess.run([*linker, "/lib", f"/def:{listed}", "/machine:x64", f"/out:{stub}"], check=True)
        imports.append(str(stub))
    names = place.with_suffix(".rsp")  # a command of Windows has 32,767 letters
    names.write_text("\n".join(f'"{path}"' for path in objects))
    options = ["/dll", "/noentry", "/nodefaultlib", "/machine:x64", "/opt:ref", "/Brepro", f"/out:{place}"]
    subprocess.run([*linker, *options, f"@{names}", *imports], check=True)


def main() -> None:
    own = [level.name for level in cpu.LEVELS if level.machine == cpu.machine()]
    parser = argparse.ArgumentParser(prog="python -m rekindle_kernels.native.build_library", description=__doc__)
    parser.add_argument("--levels", nargs="+", default=own, help=f"of processors; default: {' '.join(own)}")
    parser.add_argument("--here", action="store_true", help="for this processor, unless there are some")
    parser.add_argument("--kernels", nargs="+", help="default: all of them")
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS, help="head sizes of attention")
    parser.add_argument("--system", choices=tuple(_SUFFIXES), default=sys.platform, help="default: this one")
    parser.add_argument(
        "--linker", help="the compiler driver (for Windows: lld-link) that links for another system or machine"
    )
    parser.add_argument("--packed", action="store_true", help="compress the library, as a release's wheels have it")
    parser.add_argument("--objects", type=Path, help="object files stay in this folder, and are not made again")
    parser.add_argument(
        "--only-objects", nargs="+", choices=tuple(_SUFFIXES), metavar="SYSTEM", help="make these, for shared libraries"
    )
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of a core, then no kernel is begun")
    parser.add_argument("--longest", type=float, default=math.inf, help="seconds after which no kernel is begun")
    parser.add_argument("--whole", action="store_true", help="fail where a kernel can't be compiled")
    parser.add_argument("--out", type=Path, default=library.folder())
    arguments = parser.parse_args()
    named = arguments.kernels or os.environ.get("REKINDLE_KERNEL_NAMES", "").split()
    kernels = named or all_kernels(arguments.head_dims)
    levels, origin = [cpu.level_called(name) for name in arguments.levels], "in the package, for"
    if arguments.only_objects:
        if arguments.objects is None:
            parser.error("--only-objects needs --objects, the folder for them")
        for level in levels:
            compile_objects(arguments.objects, level, kernels, arguments.only_objects)
        return
    if arguments.here and arguments.objects:
        parser.error(
            "--here measures how this processor prefetches, which --objects does not tell apart: leave one out"
        )
    unlinked = not arguments.linker and library.platform_tag(levels[0].machine, arguments.system) == UNLINKED
    if arguments.packed and unlinked:
        parser.error("--packed compresses a shared library: name what links it, such as --linker cc")
    if arguments.here:
        os.environ[library.FOLDER] = str(arguments.out)
        found = library.find()
        if found is not None and next(iter(found.levels)) == cpu.levels()[0].name:
            return
        levels, kernels = [*cpu.levels()[:1]], named or likely_kernels()
        origin = "compiled at installation, for"
        if not levels:
            raise SystemExit("there are none for this kind of processor")
    measures = arguments.here and library.platform_tag() == UNLINKED and any(map(reads_weights, kernels))
    chosen = tuned(levels[0]) if measures else None
    if chosen is not None:
        cpu.prefetching = cpu.Prefetching.read(chosen["chosen"])
    try:
        build(
            arguments.out, levels, kernels, system=arguments.system, linker=arguments.linker, limit=arguments.limit,
            longest=arguments.longest, origin=origin, prefetch=chosen, packed=arguments.packed, whole=arguments.whole,
            objects=arguments.objects,
        )  # fmt: skip
    except (ImportError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
