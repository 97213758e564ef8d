"""Bounds of the keys of pages: `bound_pages(kv, page_ids, offsets)` keeps them, and attention chooses pages by them.

The product of a query with any key of a page is at most the sum, over the head's numbers, of the larger of its products
with the page's smallest and largest numbers there. A decode row with `AttentionOptions.most_pages` attends, in each kv
head, to the page that its own key is on and to those pages before it that can have the largest share of attention: of
each query head the softmax of these bounds, added up over the heads that share the keys. Of pages that are alike the
first come first.

A page has bounds once its last key is written; they are made of all keys as they are stored, so they do not depend on
what was written there before. Pages in transfers carry theirs along.

Axes: T tokens, R decode rows, H query heads, K kv heads, D head size, P pages, W page-table width, B chosen pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from rekindle_kernels.ops.registry import Registry, current_platform
from rekindle_kernels.packed_pages import PackedDtype
from rekindle_kernels.pages import LayerKV

BOUND_PAGES = Registry("bound_pages")  # run(kv, page_ids, offsets, most) -> LayerKV


@dataclass(frozen=True, slots=True)
class BoundCall:
    """The static facts that select an implementation."""

    platform: str
    head_dim: int
    kv_dtype: jnp.dtype | PackedDtype  # LayerKV.dtype


def bound_pages(
    kv: LayerKV,
    page_ids: Array,
    offsets: Array,
    *,
    most: int | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> LayerKV:
    """Return `kv` with bounds of the pages that tokens [T] have just filled, if its pages have bounds at all.

    `most` is how many pages these tokens can fill; None is one for each.
    """
    if kv.bounds is None:
        return kv
    assert not kv.latent, "latent pages have no bounds"
    call = BoundCall(platform or current_platform(), kv.head_dim, kv.dtype)
    most = min(most or page_ids.shape[0], page_ids.shape[0])
    with jax.named_scope("write_kv"):
        bounded: LayerKV = BOUND_PAGES.choose(call, implementation).run(kv, page_ids, offsets, most)
    return bounded
