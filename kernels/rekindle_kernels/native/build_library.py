"""Compiles native kernels ahead: at installation for this processor, or for the levels of processors of a wheel.

`python -m rekindle_kernels.native.build_library`. Needs numba, and no JAX. As many processes as there are processors
compile one kernel after the other, since numba then compiles what kernels share once. LLVM ends a process where it
can't compile a kernel; that one is left out at that level, and XLA does its work.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle_kernels import int4_format
from rekindle_kernels.native import cpu, kernel_table, library, object_loader
from rekindle_kernels.native.chain_plan import CHAIN, ENTRIES, SLOTS

HEAD_DIMS = (64, 128, 256, 32, 80, 96)
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


def all_kernels(head_dims: Iterable[int] = HEAD_DIMS) -> list[str]:
    """Return the names of all kernels that models of these head sizes use, the likeliest first."""
    names, attention = [CHAIN], list[tuple[int, int, str]]()
    for spec in kernel_table.KERNELS.values():
        dtypes: tuple[str, ...] = kernel_table.WRITTEN if spec is kernel_table.WRITE_KV else kernel_table.DTYPES
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
        if spec.parameters == kernel_table.DTYPE_AND_HEAD_DIM:
            for rank, dtype in enumerate(dtypes):
                attention += [(rank, at, spec.variant(dtype, size).name) for at, size in enumerate(head_dims)]
        elif spec.parameters:
            names += [spec.variant(dtype).name for dtype in dtypes]
        else:
            names.append(spec.variant().name)
    return [*names, *(name for _, _, name in sorted(attention))]


def likely_kernels() -> list[str]:
    """Return those that an installation waits for: pages of float32 and int8 for the commonest heads, none of
    float16. Those of adapters and of states are compiled where a session has some."""
    common = {f"_{dtype}_{size}" for dtype in ("float32", "int8") for size in HEAD_DIMS[:3]}
    specs = kernel_table.KERNELS.values()
    attention = {spec.kind for spec in specs if spec.parameters == kernel_table.DTYPE_AND_HEAD_DIM}
    rare = {spec.kind for spec in (*kernel_table.ADAPTERS, *kernel_table.RECURRENT)}

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
    room: int | None = None,
    whole: bool = False,
) -> Path:
    """Compile the kernels; the folder `target` then holds the library and its manifest. Returns the library's path.

    Of a library with `room` for so many bytes once it is compressed, the last kernels are left out if need be.
    `prefetch` is what `tuned` returned, and goes into the manifest.
    What is not begun after `limit` seconds of a process's own time on a core is left out: that is as much on a busy
    machine as on an idle one. So is what is not begun after `longest` seconds, and what can't be compiled; if the
    library has to be `whole`, RuntimeError is raised then. `linker` is the compiler driver that links, if one is
    needed, with its options; it has to be one for `system`.
    """
    machines = {level.machine for level in levels}
    assert len(machines) == 1, f"one library is for one kind of processor, not for {' and '.join(sorted(machines))}"
    platform = library.platform_tag(levels[0].machine, system)
    linked = linker is not None or platform != UNLINKED
    program = shlex.split(linker or _linker()) if linked else []
    started, found = time.perf_counter(), dict[str, dict[cpu.Level, Path]]()  # object files, by kernel
    failed = list[str]()
    deadline = time.monotonic() + longest
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            names = [name for name in kernels if fits(name, level)]
            paths = _compiled(names, level, Path(folder), linked, system, limit, deadline)
            for name, path in zip(names, paths, strict=True):
                if path is None:
                    failed.append(f"{name} for {level.name}")
                    print(f"{failed[-1]} is left out: it failed to compile, or there was no time", file=sys.stderr)
                else:
                    found.setdefault(name, {})[level] = path
        if whole and failed:
            raise RuntimeError(f"kernels that were not compiled: {', '.join(failed)}")
        kept = {name: without_copies(found[name]) for name in kernels if name in found}
        if room is not None:
            kept = likeliest(kept, room)
        made = {level.name: [name for name in kept if level in kept[name]] for level in levels}
        # Those of a kernel lie together, where compressing finds what they have in common.
        objects = {library.symbol(name, level): path for name, paths in kept.items() for level, path in paths.items()}
        target.mkdir(parents=True, exist_ok=True)
        place = target / f"kernels-{platform}.{_SUFFIXES[system] if linked else 'objects'}"
        extents: dict[str, tuple[int, int]] = {}
        # A process may have the old one mapped: it keeps that.
        new = target / f".{place.name}.{os.getpid()}"
        if linked:
            if system == "darwin":
                program += ["-Wl,-install_name,@rpath/" + place.name]  # else the name of this moment's file
            own = Path(folder) / place.name  # a DLL says its name, and the linker leaves files next to it
            _link(own, [_common_object(Path(folder), levels[0], system), *objects.values()], program, system)
            shutil.copyfile(own, new)
        else:
            with new.open("wb") as file:
                for symbol, path in objects.items():
                    extents[symbol] = file.tell(), file.write(path.read_bytes())
        os.replace(new, place)
    seconds, count = time.perf_counter() - started, sum(map(len, made.values()))
    manifest = {
        "platform": platform,
        "sources": library.source_digest(),
        "library": place.name,
        "digest": hashlib.blake2b(place.read_bytes(), digest_size=16).hexdigest(),
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
    """Return the object files of a kernel without those that equal the one which would be found in their place.

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


def likeliest(kernels: Mapping[str, dict[cpu.Level, Path]], room: int) -> dict[str, dict[cpu.Level, Path]]:
    """Return the first of these kernels, whose object files take no more than `room` bytes once they are compressed."""
    kept, left = dict[str, dict[cpu.Level, Path]](), room
    for name, objects in kernels.items():
        left -= len(zlib.compress(b"".join(path.read_bytes() for path in objects.values())))
        if left < 0:
            told = f"there is room for {len(kept)} of {len(kernels)} kernels; XLA does the work of the others: "
            print(told + ", ".join(name for name in kernels if name not in kept), file=sys.stderr)
            break
        kept[name] = objects
    return kept


def _without_level(level: cpu.Level, path: Path) -> bytes:
    """Return an object file whose symbols name no level."""
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
    """True if the kernel is of those whose prefetching `tuning` measures."""
    return name.partition("_")[0] in {kernel_table.MATVEC.kind, kernel_table.INT4.kind}


def fits(name: str, level: cpu.Level) -> bool:
    """True if the kernel is one for that level: products of many rows without the instructions for it are XLA's."""
    kind, _, dtype = name.partition("_")
    return kind != kernel_table.GEMM.kind or cpu.multiplies_many(dtype, level)


def _compiled(
    names: Sequence[str],
    level: cpu.Level,
    folder: Path,
    linked: bool,
    system: str,
    limit: float = math.inf,
    deadline: float = math.inf,
) -> list[Path | None]:
    """Return the object file of each kernel, None where it failed; as many at once as there are processors."""
    import rekindle_kernels.native.compiling  # noqa: F401  imported once, before the processes part

    results: list[Path] = [folder / f"{level.suffix}-{index}.o" for index in range(len(names))]
    if sys.platform == "win32":  # it has no processes that begin as a copy of this one
        for name, path in zip(names, results, strict=True):
            if time.process_time() < limit and time.monotonic() < deadline:
                _compile(name, level, path, linked, system)
        return [path if path.exists() else None for path in results]
    jobs, ready = os.pipe()  # a process takes the next number from it
    os.set_blocking(jobs, False)
    asked_by = os.getpid()

    def work() -> None:
        with contextlib.suppress(BlockingIOError):  # no number is left
            while os.getppid() == asked_by:
                (index,) = _JOB.unpack(os.read(jobs, _JOB.size))
                if time.process_time() < limit and time.monotonic() < deadline:  # a fork's own time begins at 0
                    _compile(names[index], level, results[index], linked, system)

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
    return [path if path.exists() else None for path in results]


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


def _compile(name: str, level: cpu.Level, path: Path, linked: bool, system: str) -> None:
    """Compile one kernel; `path` is complete or absent."""
    try:
        from rekindle_kernels.native.compiling import machine_of, object_code

        cpu.building_for = level
        symbol = library.symbol(name, level)
        code = object_code(name, symbol, machine_of(level, linked=linked, system=system))
        if not linked and object_loader.load(code, symbol, {ENTRIES: 1 << 20}) is None:
            raise RuntimeError("its object code has something that object_loader does not know")
        path.with_suffix(".part").write_bytes(code)
        path.with_suffix(".part").rename(path)
    except Exception as error:
        print(f"{name}, {level.name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)


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
    parser.add_argument("--room", type=int, help="bytes of the compressed library; the rarest kernels are left out")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of a core, then no kernel is begun")
    parser.add_argument("--longest", type=float, default=math.inf, help="seconds after which no kernel is begun")
    parser.add_argument("--whole", action="store_true", help="fail where a kernel can't be compiled")
    parser.add_argument("--out", type=Path, default=library.folder())
    arguments = parser.parse_args()
    named = arguments.kernels or os.environ.get("REKINDLE_KERNEL_NAMES", "").split()
    kernels = named or all_kernels(arguments.head_dims)
    levels, origin = [cpu.level_called(name) for name in arguments.levels], "in the package, for"
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
            longest=arguments.longest, origin=origin, prefetch=chosen, room=arguments.room, whole=arguments.whole,
        )  # fmt: skip
    except (ImportError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
