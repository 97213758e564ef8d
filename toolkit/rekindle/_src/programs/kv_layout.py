"""The layout of keys and values in device memory, which the engine sees as an opaque pytree, one entry per layer.

A page id stands for a page of every layer that keeps all of its pages, and each layer's array has the shape that
`ModelConfig.caches` gives it. Layers that give back the pages that their window has passed have ids of their
own: they are `windows`. In transfers, layers of one kind with equal page shapes are one array.

Axes: P pages, n pages of a transfer, S tokens per page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.models.config import Cache, ModelConfig, Pages
from rekindle.errors import ConfigError
from rekindle_kernels import (
    PACKED,
    AttentionInputs,
    AttentionOptions,
    LayerKV,
    RaggedBatch,
    abstract_pages,
    bound_pages,
    fill_pages,
    gather_pages,
    paged_attention,
    write_kv,
)

if TYPE_CHECKING:
    from rekindle._src.models.nn.forward import Compute


class Paging(NamedTuple):
    """The paging of a step for attention: the slots its tokens are written to, and the pages its sequences read."""

    page_ids: Array  # [R + T]
    offsets: Array  # [R + T]
    page_table: Array  # [N, W]
    lengths: Array  # [N]
    cu_lengths: Array  # [S + 1]
    num_prefills: Array  # []
    # Of side caches by their names. "states": two slots for each sequence [N], of the state that it reads, and of that
    # which it writes; and its place in a chain of drafts, if there may be some. "windows": `page_ids` and `page_table`
    # of layers that give pages back
    sides: Mapping[str, tuple[Array, ...]]


class Layer(NamedTuple):
    """The arrays of one layer: of its pages, and of each side cache that has some here."""

    pages: LayerKV | None = None  # None: it has `windows`, or attends to the pages of another layer, or to none
    states: tuple[Array, ...] = ()  # [slots, …] for each part of its state, scratch slot first
    windows: LayerKV | None = None  # its pages, if it gives back pages that its window has passed


KV = tuple[Layer, ...]
Payload = tuple[Any, ...]  # of each group of layers, [n, layers, …] for each leaf of a layer


def abstract(model: ModelConfig, pages: int, page_size: int, dtype: str, slots: Mapping[str, int] | None = None) -> KV:
    """Return shapes and dtypes of every layer's pages, and of the `slots` of side caches. Nothing is allocated.

    Layers with a window have pages of their own if there are slots of "windows"; otherwise they share all others'.
    Raises ConfigError if pages of the model can't have this dtype.
    """
    slots = slots or {}
    windows = slots.get("windows", 0)

    # All pages that move together have bounds, if some are read by them.
    bounded = any(spec.budget is not None for spec in model.attention)

    def layer(cache: Cache, windowed: bool) -> Layer:
        shapes = () if cache.state is None else cache.state.shapes
        states: tuple[Any, ...] = tuple(
            jax.ShapeDtypeStruct((slots.get("states", 1), *shape), jnp.float32) for shape in shapes
        )
        own = cache.pages
        if not isinstance(own, Pages):
            return Layer(states=states)
        check_format(own, dtype, model.model_type)
        apart = windowed and windows > 0
        count = windows if apart else pages
        sizes = count, own.heads, page_size, own.key_size
        kept = abstract_pages(*sizes, dtype, latent=own.latent, bounded=bounded and not apart)
        return Layer(states=states, windows=kept) if apart else Layer(states=states, pages=kept)

    return tuple(map(layer, model.caches, model.windowed))


def check_format(pages: Pages, dtype: str, model_type: str) -> None:
    """Raise ConfigError for pages that a packed format can't hold."""
    if dtype not in PACKED:
        return
    if pages.latent:
        why = f"has a width for keys and one for values, but in this {model_type} model values are a part of the keys"
        raise ConfigError("kv_dtype", dtype, why, "Use kv_dtype='int8'")
    if pages.key_size % 2:
        why = f"packs two numbers in a byte, and heads of this {model_type} model have {pages.key_size}"
        raise ConfigError("kv_dtype", dtype, why, "Use kv_dtype='int8'")


def page_bytes(model: ModelConfig, page_size: int, dtype: str, slots: Mapping[str, int] | None = None) -> int:
    """Return the bytes of one page over all layers, except layers with pages in `slots` of a side cache."""
    kv = abstract(model, 1, page_size, dtype, slots)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages_of(kv)))


def state_bytes(model: ModelConfig) -> int:
    """Return the bytes of one sequence's states over all layers."""
    return sum(4 * math.prod(shape) for spec in model.states if spec is not None for shape in spec.shapes)


def pages_of(kv: KV, *, windows: bool = False) -> tuple[LayerKV, ...]:
    """Return the pages of layers that keep all of them, or the pages of the other layers."""
    pages = (layer.windows if windows else layer.pages for layer in kv)
    return tuple(each for each in pages if each is not None)


def groups_of(kv: KV, *, windows: bool = False) -> list[list[int]]:
    """Return the numbers of layers with pages, or with `windows`, of each shape, in order of their first layers."""
    groups: dict[Any, list[int]] = {}
    for number, layer in enumerate(kv):
        pages = layer.windows if windows else layer.pages
        if pages is not None:
            groups.setdefault(pages.pages.shape[1:], []).append(number)
    return list(groups.values())


class PagedAttention:
    """The model's `attend` over pages: writes the step's keys and values, then attends over each sequence's pages."""

    def __init__(
        self,
        model: ModelConfig,
        kv: Sequence[Layer],
        paging: Paging,
        rows: int,
        implementation: str | None,
        *,
        deterministic: bool = False,
        unread: Array | None = None,
        sees: Array | None = None,
    ) -> None:
        """Take the step's pages and paging. `unread` and `sees` are as in `AttentionInputs`: the first is for the last
        layer's call, the second for layers where a picture's tokens see each other.
        """
        self.kv, self._deterministic, self._unread, self._sees = list(kv), deterministic, unread, sees
        self._model, self._paging, self._rows, self._implementation = model, paging, rows, implementation

    def __call__(self, layer: int, q: Array, k: Array | None, v: Array | None, sinks: Array | None = None, /) -> Array:
        step, spec, source = self._paging, self._model.attention[layer], self._model.source(layer)
        entry, cache = self.kv[source], self._model.pages_of(layer)
        apart = entry.windows is not None
        pages = entry.windows if apart else entry.pages
        assert pages is not None, "the layer has pages"
        page_ids, page_table = step.page_ids, step.page_table
        if apart:
            page_ids, page_table = step.sides["windows"]
        if k is not None:
            assert source == layer, "the layer has pages of its own"
            pages = write_kv(pages, k, v, page_ids, step.offsets)
            if spec.budget is not None:
                pages = bound_pages(pages, page_ids, step.offsets, most=self._filled(pages.page_size, q.shape[0]))
            self.kv[layer] = entry._replace(windows=pages) if apart else entry._replace(pages=pages)
        unread = self._unread if layer == self._model.num_layers - 1 else None
        both_ways = self._sees is not None and self._model.sees_pictures_both_ways(layer)
        inputs = AttentionInputs(
            q, pages, page_table, step.lengths, step.cu_lengths, step.num_prefills, sinks, unread,
            sees=self._sees if both_ways else None,
        )  # fmt: skip
        options = AttentionOptions(
            self._rows,
            spec.scale,
            spec.sliding_window,
            spec.soft_cap,
            deterministic=self._deterministic,
            causal=spec.causal,
            value_size=cache.value_size if cache.latent else None,
            most_pages=None if spec.budget is None else spec.budget // pages.page_size,
        )
        return paged_attention(inputs, options, implementation=self._implementation)

    def _filled(self, page_size: int, tokens: int) -> int:
        """Return the most pages that the step can fill: tokens of a prompt follow one another."""
        prompts = self._paging.lengths.shape[0] - self._rows
        return self._rows + prompts + (tokens - self._rows) // page_size

    def recur(self, layer: int, compute: Compute, /) -> Array:
        """Call `compute` with the layer's states and the slots of the step's sequences, and keep its result."""
        step, entry = self._paging, self.kv[layer]
        assert entry.states, "the layer has a state"
        reads, writes, *places = step.sides["states"]
        batch = RaggedBatch(
            step.lengths,
            step.cu_lengths,
            step.num_prefills,
            self._rows,
            (reads, writes),
            places[0][: self._rows] if places else None,
        )
        out: Array
        out, states = compute(entry.states, batch)
        self.kv[layer] = entry._replace(states=tuple(states))
        return out


def payload_layout(kv: KV, *, windows: bool = False) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of each array of one page's payload, as `gather` returns them for a single page."""
    groups = [
        (len(layers), jax.tree.leaves(_pages(kv, layers[0], windows=windows)))
        for layers in groups_of(kv, windows=windows)
    ]
    return [((1, count, *leaf.shape[1:]), leaf.dtype) for count, leaves in groups for leaf in leaves]


def gather(kv: KV, ids: Array, *, windows: bool = False) -> Payload:
    """Return the pages `ids` [n] of every layer that keeps all, or of those with `windows`, in their stored dtype."""
    payload: list[Array] = []
    for numbers in groups_of(kv, windows=windows):
        layers = [jax.tree.leaves(gather_pages(_pages(kv, number, windows=windows), ids)) for number in numbers]
        payload += [jnp.stack(leaves, axis=1) for leaves in zip(*layers, strict=True)]
    return tuple(payload)


def scatter(kv: KV, ids: Array, pages: Sequence[Payload], *, windows: bool = False) -> KV:
    """Write payloads of `gather`, one for each page, to the pages `ids`; ids that pad the transfer are 0."""
    filled, at = list(kv), 0
    for numbers in groups_of(kv, windows=windows):
        layers = [_pages(kv, number, windows=windows) for number in numbers]
        stop = at + len(jax.tree.leaves(layers[0]))
        for number, layer in zip(numbers, fill_pages(layers, ids, [page[at:stop] for page in pages]), strict=True):
            entry = filled[number]
            filled[number] = entry._replace(windows=layer) if windows else entry._replace(pages=layer)
        at = stop
    return tuple(filled)


def copy(kv: KV, sources: Array, ids: Array) -> KV:
    """Write the pages `sources` to the pages `ids`; ids that pad both are 0."""
    payload = gather(kv, sources)
    return scatter(kv, ids, [tuple(leaf[at : at + 1] for leaf in payload) for at in range(ids.shape[0])])


def _pages(kv: KV, number: int, *, windows: bool) -> LayerKV:
    pages = kv[number].windows if windows else kv[number].pages
    assert pages is not None, "the layer has pages"
    return pages
