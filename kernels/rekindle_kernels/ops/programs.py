"""Whole programs: fusing a step's calls, the kernels that a stored program needs, and where kernels are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rekindle_kernels import native
from rekindle_kernels.native import background_build, build, cpu, library
from rekindle_kernels.native.background_build import BackgroundBuild
from rekindle_kernels.ops.registry import current_platform

Step = TypeVar("Step", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Traits:
    """How programs behave on a platform, for code that chooses their shapes."""

    single_rows: bool  # a program for one row is faster than one for two
    skips_padding: bool  # tokens that pad a program are not computed


def traits(implementation: str | None = None, *, platform: str | None = None) -> Traits:
    """The traits of programs whose operations run with `implementation` (None: the first that supports each call)."""
    uses = _uses_native(implementation, platform)
    return Traits(single_rows=uses, skips_padding=uses and native.chains())


def fuse(function: Step, *, implementation: str | None = None, platform: str | None = None) -> Step:
    """`function`, to be jitted, with runs of operations as one call each; unchanged where nothing can be joined."""
    fused: Any = native.chained(function) if _uses_native(implementation, platform) else function
    return fused


def unavailable_reason(platform: str | None = None) -> str | None:
    """Why the kernels for this platform can't be used on this machine, so that XLA does their work; None if they can.

    Calls that a kernel does not support are XLA's all the same.
    """
    return native.unavailable_reason() if (platform or current_platform()) == "cpu" else None


def kernels_origin() -> str:
    """Where the native kernels are from, in words."""
    found = library.find()
    if found is None:
        return f"numba compiles them for this processor when a model needs them, and keeps them in {build.folder()}"
    level = next(iter(found.levels))
    cache, ahead = found.prefetch or cpu.level_called(level).prefetch
    measured = f"as measured on {found.processor or 'this processor'}" if found.prefetch else "as for all of its level"
    prefetch = f"prefetching {ahead >> 10} KiB ahead into cache level {cache}, {measured}"
    return f"{found.origin or 'in the package, for'} {level}, {prefetch}: {found.path}"


def environment() -> dict[str, Any]:
    """The settings of this process that implementations depend on; they belong into a compiled program's key."""
    return {"native": native.unavailable_reason() is None, "chains": native.chains(), **build.identity()}


def kernels_for(
    matrices: Iterable[str], pages: str, head_dim: int, scaled: Iterable[tuple[str, str]] = ()
) -> list[str]:
    """The native kernels that a model's steps call, by their names: for matrices and pages of these dtypes.

    `scaled` are the dtypes of matrices with scales, each with that of the scales; those in groups that it leaves out
    have float16. It may name too many; one that it leaves out is compiled when a program that calls it is traced.
    """
    return native.kernels_for(matrices, pages, head_dim, scaled)


def build_kernels(names: Iterable[str]) -> BackgroundBuild | None:
    """Begin to compile those kernels that are not there yet, in other processes; None if there is nothing to do."""
    return background_build.begun(names)


def kernels_in(executable: bytes) -> list[str]:
    """Names of the registered kernels that a serialised executable calls; it may name too many, never too few."""
    return native.called_by(executable)


def ensure_kernels(names: Iterable[str]) -> None:
    """Register these kernels with XLA, building them if need be: before a stored program that calls them is loaded."""
    for name in names:
        native.ensure(name)


def kernel_being_compiled() -> str:
    """The kernel that this process is compiling now, by its name, for progress displays; empty if there is none."""
    return build.compiling


def configure(*, cache_folder: str | Path) -> None:
    """Keep machine code that this process builds from now on below `cache_folder`, and look for it there.

    The default is `rekindle_kernels` in the user's cache folder.
    """
    build.cache_folder = Path(cache_folder)


def _uses_native(implementation: str | None, platform: str | None) -> bool:
    named = implementation in (None, "native")
    return named and (platform or current_platform()) == "cpu" and native.unavailable_reason() is None
