"""The table of what GPUs of each generation can run, which kernels, defaults and reports read.

Rows for which no GPU has run anything yet say what the compilers for that generation say.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle_kernels import tuning


@dataclass(frozen=True, slots=True)
class Generation:
    """NVIDIA GPUs from one compute capability up to the next row's."""

    capability: float
    examples: str
    triton: bool = True  # Triton compiles for it; below, its matrix products would become scalar code
    bfloat16: bool = True  # it multiplies bfloat16; below, XLA widens both matrices to float32 in memory first
    float8: bool = True  # Triton converts float8_e4m3fn
    mosaic: bool = False  # it has the matrix instructions of the prefill in Mosaic GPU


GENERATIONS = (
    Generation(7.0, "V100", triton=False, bfloat16=False, float8=False),
    Generation(7.5, "T4, RTX 20", triton=False, bfloat16=False, float8=False),
    Generation(8.0, "A100", float8=False),
    Generation(8.6, "A10, RTX 30", float8=False),
    Generation(8.9, "L4, RTX 40"),
    Generation(9.0, "H100, H200", mosaic=True),
    Generation(10.0, "B200"),
    Generation(12.0, "RTX 50"),
)


def generation(capability: float | None = None) -> Generation | None:
    """Return the row of a capability, by default of the GPU at hand; None without a GPU. Older ones have the first."""
    capability = tuning.compute_capability() if capability is None else capability
    if capability is None:
        return None
    return next((row for row in reversed(GENERATIONS) if row.capability <= capability), GENERATIONS[0])


def without_triton() -> str | None:
    """Return why no kernel that Triton compiles can serve on the GPU at hand; None if they can, or without a GPU."""
    row = generation()
    return None if row is None or row.triton else _lacks("Triton needs 8.0")


def without_float8() -> str | None:
    """Return why no kernel can read pages of float8_e4m3fn on the GPU at hand; None if they can, or without a GPU."""
    row = generation()
    return None if row is None or row.float8 else _lacks("float8_e4m3fn needs 8.9, use float8_e5m2 or int8")


def without_mosaic() -> str | None:
    """Return why the prefill in Mosaic GPU can't serve on the GPU at hand; None if it can, or without a GPU."""
    row = generation()
    return None if row is None or row.mosaic else _lacks("the kernel's matrix instructions are those of 9.0")


def _lacks(need: str) -> str:
    return f"the GPU has compute capability {tuning.compute_capability()}; {need}"


def multiplies_bfloat16() -> bool:
    """True if products in bfloat16 are no slower than in float16 on the GPU at hand, or without a GPU."""
    row = generation()
    return row is None or row.bfloat16


def path(row: Generation) -> str:
    """Describe what serves on GPUs of a generation."""
    if row.triton:
        return "Triton kernels for attention, four bits and experts; XLA for the rest"
    return "XLA for everything, with an attention of its own; four bits are widened tile by tile"
