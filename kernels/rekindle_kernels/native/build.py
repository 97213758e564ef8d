"""Machine code of the native kernels: from a library that the wheel brought, or compiled by numba once per machine.

What numba compiled is kept as an object file and loaded without numba, on x86-64 by `object_loader`.

Importing numba takes half a second and compiling a kernel up to one and a half; loading an object takes milliseconds,
and elsewhere llvmlite. The file's name is a digest of what the code depends on: the sources, the versions, the CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any

import jax

from rekindle_kernels.native import cpu, kernel_files, library, object_loader, python_handlers
from rekindle_kernels.native.chain_plan import ENTRIES, slot

PREFIX = "rekindle_"
PYTHON = python_handlers.HANDLERS  # kernels that need no machine code
OLDEST = (0, 48)  # llvmlite: 0.45 to 0.47 end the process over some kernels, those before have no bfloat16
log = logging.getLogger(__name__)
_lock = threading.Lock()
compiling: str = ""  # the kernel that is being compiled now
_failed: set[str] = set()
_ready: set[str] = set()  # kernels
_put_off: set[str] = set()  # kernels that were not compiled in time


def unavailable_reason() -> str | None:
    """Why native kernels can't be used here; None if they can."""
    if not python_handlers.may_run():
        return "no Windows has run native kernels yet: set REKINDLE_NATIVE=1 to try them"
    if os.environ.get("REKINDLE_NATIVE", "1") == "0":
        return "REKINDLE_NATIVE=0 turns them off: unset it"
    if library.find() is not None:
        return None
    if any(importlib.util.find_spec(name) is None for name in ("numba", "llvmlite")):
        return "none were installed for this processor: install rekindle here again, or pip install 'numba>=0.66'"
    version = importlib.metadata.version("llvmlite")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return f"llvmlite {version} is older than {OLDEST[0]}.{OLDEST[1]}: pip install --upgrade 'numba>=0.66'"
    return None


def identity() -> dict[str, str]:
    """Return the facts that machine code depends on here, in addition to the sources and the processor."""
    found, masked = library.find(), cpu.mask()
    levels = "" if found is None else next(iter(found.levels))
    without = {"without": ",".join(sorted(_put_off))} if _put_off else {}
    return {"mask": masked.name if masked else "", "level": levels, "library": found.digest if found else "", **without}


def ensure(name: str) -> str:
    """Register kernel `name` with XLA, building it if need be; the name of its target."""
    target = f"{PREFIX}{name}"
    with _lock:
        if name not in _ready:
            address = python_handlers.address_of(PYTHON[name]) if name in PYTHON else _made(name)
            jax.devices("cpu")  # a kernel that is refused before this starts would keep the backend from starting
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(ctypes.c_void_p(address)), platform="cpu")
            assert not library.entries()[slot(name)], f"two kernels have the entry of {name}: rename one"
            library.entries()[slot(name)] = address
            _ready.add(name)
    return target


def called_by(executable: bytes) -> list[str]:
    """Return the kernels of this process that a serialised executable calls, by the names of their targets in it."""
    found = {name.decode() for name in re.findall(PREFIX.encode() + b"([a-z][a-z0-9_]*)", executable)}
    with _lock:
        exact = found & _ready
        # A name that no kernel has may be one that runs into what follows it: then any kernel that it begins with.
        return sorted(exact | {name for name in _ready for other in found - exact if other.startswith(name)})


def builds(name: str) -> bool:
    """True if kernel `name` is or can be registered. A failure is said once; XLA then does the work."""
    if name in _failed:
        return False
    try:
        ensure(name)
    except Exception as error:
        _say(name, error)
        return False
    return True


def is_there(name: str) -> bool:
    """True if nothing has to be compiled for kernel `name`: it is ready, stored, in a library, or refused."""
    known = name in PYTHON or name in _ready or name in _failed
    return known or library.address(name) is not None or _stored(name) is not None


def can_compile() -> bool:
    """True if kernels can be compiled here, and are there for other processes then."""
    return importlib.util.find_spec("numba") is not None and kernel_files.is_trusted()


def keep(name: str) -> None:
    """Compile kernel `name` and store it. Raises where it can't be compiled."""
    _store(name, _compile(name))


def refuse(name: str, error: Exception) -> None:
    """Do without kernel `name` from now on; XLA does its work."""
    if name not in _failed and name not in _ready:
        _say(name, error)


def put_off(names: Iterable[str]) -> None:
    """Do without these kernels until this process ends, although others compile them: no program may wait for them."""
    with _lock:
        late = {*names} - _ready
        _put_off.update(late)
        _failed.update(late)


def give_up(name: str, error: Exception) -> bool:
    """Use kernel `name` no more, which was registered but does not run; False where it was not in use."""
    if name in _failed or name not in _ready:
        return False
    _say(name, error)
    return True


HALF = 'Open with dtype="bfloat16", which is as small: its kernels are part of every installation'


def _say(name: str, error: Exception) -> None:
    _failed.add(name)
    reason = (str(error).strip().splitlines() or [""])[-1]
    log.warning(
        "native kernel %s can't be used (%s: %s); XLA does its work, more slowly. %s",
        name,
        type(error).__name__,
        reason,
        HALF if name.endswith("_float16") else "`rekindle doctor` checks the installation",
    )


def entry(name: str) -> str:
    """Return the symbol of kernel `name` in its object code."""
    return f"{PREFIX}{name}_entry"


def _made(name: str) -> int:
    """Return the address of the kernel's code."""
    address = library.address(name)
    if address is not None:
        return address
    code = _stored(name)
    if code is None:
        if importlib.util.find_spec("numba") is None:
            raise RuntimeError("the installation did not bring it, and pip install 'numba>=0.66' would compile it")
        code = _compile(name)
        _store(name, code)
    return _load(name, code)


def _compile(name: str) -> bytes:
    """Return object code of one kernel; the only function that needs numba."""
    global compiling
    compiling = name
    try:
        import llvmlite.binding as llvm

        from rekindle_kernels.native.compiling import object_code

        return object_code(name, entry(name), _machine(llvm))
    finally:
        compiling = ""


def _load(name: str, code: bytes) -> int:
    own = object_loader.load(code, entry(name), {ENTRIES: ctypes.addressof(library.entries())})
    return own or _load_by_llvm(name, code)


def _load_by_llvm(name: str, code: bytes) -> int:
    import llvmlite.binding as llvm

    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address: int = engine.get_function_address(entry(name))
    return address


@cache
def _engine() -> Any:
    """Return the engine that owns XLA's code. One for each kernel would take five times as long to load."""
    import llvmlite.binding as llvm

    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(llvm))


@cache
def _initialised() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    llvm.add_symbol(ENTRIES, ctypes.addressof(library.entries()))


def _machine(llvm: Any) -> Any:
    _initialised()
    name, features = _target(llvm)
    # Absolute addresses: through a table of offsets the second object of an engine found the first one's constants.
    reloc = "static" if platform.machine() in ("x86_64", "AMD64") else "default"
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=name, features=features, opt=3, reloc=reloc, codemodel="jitdefault"
    )


def _target(llvm: Any) -> tuple[str, str]:
    """Return LLVM's name and features for this processor, or for the level that masks it."""
    level = next(iter(cpu.levels()), None)
    if cpu.mask() is None:
        name, found = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        if cpu.on_arm() and level is not None:  # LLVM does not ask macOS, and ends the process where it lacks one
            found = ",".join(filter(None, (found, level.flags)))
        return name, found
    return ("generic", "") if level is None else (level.cpu, level.flags)


def digest(name: str) -> str:
    """Return a digest of everything that the code of kernel `name` depends on."""
    return hashlib.blake2b(_common() + name.encode(), digest_size=12).hexdigest()


@cache
def _common() -> bytes:
    """Return a digest of what all kernels depend on: the sources, the versions, the CPU."""
    versions = [_version(package) for package in ("numba", "llvmlite")]
    hasher = hashlib.blake2b()
    masked = cpu.mask()
    texts = [*versions, cpu.identity(), masked.name if masked else "", library.source_digest()]
    for part in [text.encode() for text in texts]:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def _version(package: str) -> str:
    """Return the installed version; empty if there is none: with a prebuilt library none is needed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _stored(name: str) -> bytes | None:
    """Return object code that was kept, if only this user can have written it."""
    return kernel_files.read(name, digest(name))


def _store(name: str, code: bytes) -> None:
    kernel_files.write(name, digest(name), code)
