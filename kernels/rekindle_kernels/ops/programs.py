"""Whole programs: fusing a step's calls, the kernels that a stored program needs, and the folder of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rekindle_kernels import gpus, tuning
from rekindle_kernels.native import background_build, build, chain, cpu, kernel_files, library
from rekindle_kernels.native import kernel_table as table
from rekindle_kernels.native.background_build import BackgroundBuild
from rekindle_kernels.ops.registry import current_platform

Step = TypeVar("Step", bound=Callable[..., Any])
# A product of two rows in bfloat16 took 3.7 ms on two cores of a Zen 4 by XLA:CPU, 3.8 ms without AVX-512; in groups of
# four bits 35 and 33, by "int8-weight" 5 and 12, and by "int8", which it multiplies as integers, 2.5 and 2.6.
_UNPACKED_BY_XLA = frozenset({"int4", "int8-weight"})


@dataclass(frozen=True, slots=True)
class Traits:
    """The behaviour of programs on a platform, for code that chooses their shapes."""

    single_rows: bool  # a program for one row is faster than one for two
    skips_padding: bool  # tokens that pad a program are not computed
    unpacks: frozenset[str] = frozenset()  # `LinearOptions.quantize` of weights that every product unpacks first
    bfloat16: bool = True  # products take it; without that, float16 is twice as fast at least, and half as large
    fast_bfloat16: bool = True  # products of many rows take less than half as long in it as in float32


def traits(implementation: str | None = None, *, platform: str | None = None) -> Traits:
    """Return the traits of programs that run with `implementation` (None: for each call the first that supports it)."""
    is_native = _uses_native(implementation, platform)
    by_xla = not is_native and (platform or current_platform()) == "cpu"
    unpacks = _UNPACKED_BY_XLA if by_xla else frozenset[str]()
    by_gpu = (platform or current_platform()) == "gpu"
    multiplies = not by_gpu or gpus.multiplies_bfloat16()
    return Traits(
        single_rows=is_native,
        skips_padding=is_native and chain.chains(),
        unpacks=unpacks,
        bfloat16=multiplies,
        fast_bfloat16=cpu.has_amx() if (platform or current_platform()) == "cpu" else multiplies,
    )


def gpu_path() -> str:
    """Describe the GPU at hand by its compute capability, and which kernels serve on it; empty without a GPU."""
    row = gpus.generation()
    return "" if row is None else f"compute capability {tuning.compute_capability()}: {gpus.path(row)}"


def fuse(function: Step, *, implementation: str | None = None, platform: str | None = None) -> Step:
    """Return `function`, to be jitted, with runs of operations joined into one call each where possible."""
    fused: Any = chain.chained(function) if _uses_native(implementation, platform) else function
    return fused


def unavailable_reason(platform: str | None = None) -> str | None:
    """Return why the kernels for this platform can't be used here, so that XLA does their work; None if they can.

    Calls that a kernel does not support go to XLA in any case.
    """
    return build.unavailable_reason() if (platform or current_platform()) == "cpu" else None


def kernels_origin() -> str:
    """Describe the origin of the native kernels."""
    built = library.find()
    if built is None:
        place = kernel_files.folder()
        return f"numba compiles them for this processor when a model needs them, and keeps them in {place}"
    level = next(iter(built.levels))
    measured = f"as measured on {built.processor or 'this processor'}" if built.prefetch else "as for all of its level"
    prefetch = _in_words(built.prefetch or cpu.level_called(level).prefetch)
    return f"{built.origin or 'in the package, for'} {level}, prefetching {measured} ({prefetch}): {built.path}"


def _in_words(prefetching: cpu.Prefetching) -> str:
    """Describe how each kind of weights is prefetched; kinds that are alike come together."""
    kinds: dict[cpu.Prefetch, list[str]] = {}
    for kind, choice in zip(("16 bits", "8 bits", "4 bits", "several or long rows"), prefetching, strict=True):
        kinds.setdefault(choice, []).append(kind)
    return "; ".join(
        f"{', '.join(names)}: {f'{ahead >> 10} KiB ahead into cache level {cache}' if cache else 'none'}"
        for (cache, ahead), names in kinds.items()
    )


def environment() -> dict[str, Any]:
    """Return the settings of this process that implementations depend on, for a compiled program's key."""
    return {"native": build.unavailable_reason() is None, "chains": chain.chains(), **build.identity()}


def kernels_for(
    matrices: Iterable[str],
    pages: str,
    head_dim: int | Iterable[int],
    scaled: Iterable[tuple[str, str, int]] = (),
    adapters: str | None = None,
    recurrent: bool = False,
    bounded: bool = False,
) -> list[str]:
    """Return the names of the native kernels that a model's steps call, for matrices and pages of these dtypes.

    `head_dim` is the size of the pages' heads, or the sizes where layers differ. `scaled` are the dtypes of matrices
    with scales, each with that of the scales and the inputs of a group, if there are any; matrices in groups that it
    omits have float16. `adapters` is the dtype of
    adapters, if steps may have any, `recurrent` is True for models with states, and `bounded`
    where rows choose pages. The result may have too many; a
    missing kernel is compiled when a program that calls it is traced.
    """
    matrices, scaled = set(matrices), set(scaled)
    kinds = [dtype for dtype in table.DTYPES if dtype in matrices]
    kernels = [table.MATVEC.variant(dtype) for dtype in kinds]
    kernels += [table.GEMM.variant(dtype) for dtype in kinds if cpu.multiplies_many(dtype)]
    for stored in table.GROUPED:
        own = sorted((scale, group) for dtype, scale, group in scaled if dtype == stored) or [("float16", 0)]
        variants = dict.fromkeys(table.grouped(stored, group).variant(scale) for scale, group in own)
        kernels += variants if stored in matrices else []
    always = (table.RMS_NORM, table.GATED_ROWS, table.ROPE, table.ARGMAX, table.SAMPLE, table.GATE)
    kernels += [spec.variant() for spec in (*always, *(table.RECURRENT if recurrent else ()))]
    kernels += [spec.variant(adapters) for spec in table.ADAPTERS if adapters in table.ADAPTED]
    sizes = [size for size in ([head_dim] if isinstance(head_dim, int) else head_dim) if size % 16 == 0]
    packed = pages.replace("-", "")
    if packed in table.PACKED_KEYS:
        kernels += [spec.variant(packed, size) for size in sizes if size % 32 == 0 for spec in table.PACKED]
    if pages in table.DTYPES and sizes:
        kernels += [spec.variant(pages, size) for size in sizes for spec in (table.DECODE, table.PREFILL)]
        kernels += [table.WRITE_KV.variant(pages)] if pages in table.WRITTEN else []
    if bounded:
        kernels += [table.CHOOSE_PAGES.variant(size) for size in sizes]
        kernels += [table.BOUND_PAGES.variant(pages, size) for size in sizes if pages in table.DTYPES]
    else:
        kernels = [kernel for kernel in kernels if kernel.spec not in table.BOUNDED]
    return [chain.CHAIN, *(kernel.name for kernel in kernels)]


def build_kernels(names: Iterable[str]) -> BackgroundBuild | None:
    """Begin to compile the missing kernels in other processes; None if there is nothing to do."""
    return background_build.begun(names)


def kernels_in(executable: bytes) -> list[str]:
    """Return names of registered kernels that a serialised executable calls; perhaps too many, never too few."""
    return build.called_by(executable)


def ensure_kernels(names: Iterable[str]) -> None:
    """Register these kernels with XLA, built if necessary, before a stored program that calls them is loaded."""
    for name in names:
        build.ensure(name)


def kernel_being_compiled() -> str:
    """Return the name of the kernel that this process is compiling now, for progress displays; empty if none."""
    return build.compiling


def configure(*, cache_folder: str | Path) -> None:
    """Store machine code that this process builds from now on below `cache_folder`, and look for it there.

    The default is `rekindle_kernels` in the user's cache folder.
    """
    kernel_files.cache_folder = Path(cache_folder)


def _uses_native(implementation: str | None, platform: str | None) -> bool:
    applies = implementation in (None, "native")
    return applies and (platform or current_platform()) == "cpu" and build.unavailable_reason() is None
