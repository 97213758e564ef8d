"""Bounds of pages, and the choice among them, as native calls."""

from __future__ import annotations

from jax import Array

from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import NOT_BUILT, call, unavailable
from rekindle_kernels.native.kernel_table import BOUND_PACKED, BOUND_PAGES, CHOOSE_PAGES, DTYPES, Variant
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions
from rekindle_kernels.ops.page_bounds import BoundCall
from rekindle_kernels.ops.registry import READS_ALL, Implementation
from rekindle_kernels.packed_pages import PACKED
from rekindle_kernels.pages import LayerKV

LANES = 16  # numbers of a vector


def _variant(dtype: str, head_dim: int) -> Variant:
    """Return the kernel for bounds of pages of a dtype."""
    return (
        BOUND_PACKED.variant(dtype.replace("-", ""), head_dim)
        if dtype in PACKED
        else BOUND_PAGES.variant(dtype, head_dim)
    )


def bound(kv: LayerKV, page_ids: Array, offsets: Array, most: int) -> LayerKV:
    """Implement `ops.page_bounds.bound_pages`."""
    operands = {"pages": kv.pages, "scales": kv.scales, "bounds": kv.bounds, "page_ids": page_ids, "offsets": offsets}
    if kv.values is not None:
        operands["values"] = kv.values
    (bounds,) = call(_variant(kv.dtype.name, kv.head_dim), operands)
    return kv._replace(bounds=bounds)


def bounds_pages(wanted: BoundCall) -> str | None:
    """Why pages can't be bounded natively."""
    dtype = wanted.kv_dtype.name
    whole = 2 * LANES if dtype in PACKED else LANES
    if dtype not in DTYPES and dtype not in PACKED:
        return f"pages of {dtype} are none of {', '.join((*DTYPES, *PACKED))}"
    if wanted.head_dim % whole:
        return f"the head size {wanted.head_dim} is not a multiple of {whole}"
    return unavailable(wanted) or (None if builds(_variant(dtype, wanted.head_dim).name) else NOT_BUILT)


def choose(q: Array, inputs: AttentionInputs, options: AttentionOptions) -> Array:
    """Return the pages that decode rows choose, int32 [R·K, most_pages], for float32 queries [T, H, D] as they are."""
    kv, most = inputs.kv, options.most_pages
    assert kv.bounds is not None, "the pages have bounds"
    assert most is not None, "rows choose pages"
    operands = {"q": q, "bounds": kv.bounds, "page_table": inputs.page_table, "lens": inputs.kv_lens}
    settings = {
        "decode_rows": options.decode_rows,
        "page_size": kv.page_size,
        "rotated": kv.values is not None,
        "scale": options.scale,
    }
    sizes = {"J": options.decode_rows * kv.kv_heads, "B": most}
    (chosen,) = call(CHOOSE_PAGES.variant(kv.head_dim), operands, settings, sizes)
    return chosen


def chooses(wanted: AttentionCall) -> str | None:
    """Why rows can't choose pages natively; None if they can, or if they read all of them."""
    if wanted.most_pages is None:
        return None
    if wanted.deterministic:
        return READS_ALL
    return None if builds(CHOOSE_PAGES.variant(wanted.head_dim).name) else NOT_BUILT


BOUND_PAGES_NATIVELY = Implementation("native", bound, bounds_pages)
