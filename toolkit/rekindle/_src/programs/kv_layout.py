"""The layout of keys and values in device memory, which the engine sees as an opaque pytree, one entry per layer.

Axes: P pages, n pages of a transfer, S tokens per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rekindle._src.models.config import ModelConfig
from rekindle._src.programs.packing import Paging
from rekindle_kernels import (
    AttentionInputs,
    AttentionOptions,
    LayerKV,
    abstract_pages,
    fill_pages,
    gather_pages,
    paged_attention,
    write_kv,
)

KV = tuple[LayerKV, ...]
Payload = tuple[Any, ...]  # [n, layers, …] for each leaf of a layer


def abstract(model: ModelConfig, pages: int, page_size: int, dtype: str) -> KV:
    """Return shapes and dtypes of every layer's pages. Nothing is allocated."""
    layer = abstract_pages(pages, model.num_kv_heads, page_size, model.head_dim, dtype)
    return (layer,) * model.num_layers


def page_bytes(model: ModelConfig, page_size: int, dtype: str) -> int:
    """Return the bytes of one page over all layers."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract(model, 1, page_size, dtype)))


class PagedAttention:
    """The model's `attend` over pages: writes the step's keys and values, then attends over each sequence's pages."""

    def __init__(
        self,
        model: ModelConfig,
        kv: Sequence[LayerKV],
        paging: Paging,
        rows: int,
        implementation: str | None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.kv, self._deterministic = list(kv), deterministic
        self._model, self._paging, self._rows, self._implementation = model, paging, rows, implementation

    def __call__(self, layer: int, q: Array, k: Array, v: Array, /) -> Array:
        step, spec = self._paging, self._model.attention[layer]
        self.kv[layer] = write_kv(self.kv[layer], k, v, step.page_ids, step.offsets)
        inputs = AttentionInputs(q, self.kv[layer], step.page_table, step.lengths, step.cu_lengths, step.num_prefills)
        options = AttentionOptions(
            self._rows, spec.scale, spec.sliding_window, spec.soft_cap, deterministic=self._deterministic
        )
        return paged_attention(inputs, options, implementation=self._implementation)


def payload_layout(kv: KV) -> list[tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of each array of one page's payload, as `gather` returns them for a single page."""
    return [((1, len(kv), *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(kv[0])]


def gather(kv: KV, ids: Array) -> Payload:
    """Return the pages `ids` [n] of every layer, in their stored dtype."""
    layers = [jax.tree.leaves(gather_pages(layer, ids)) for layer in kv]
    return tuple(jnp.stack(leaves, axis=1) for leaves in zip(*layers, strict=True))


def scatter(kv: KV, ids: Array, pages: Sequence[Payload]) -> KV:
    """Write payloads of `gather`, one for each page, to the pages `ids`; ids that pad the transfer are 0."""

    return fill_pages(kv, ids, pages)
