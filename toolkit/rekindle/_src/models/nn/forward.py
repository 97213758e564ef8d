"""One forward pass, as layers see it: rope tables, attention, and the sites at which others listen.

T tokens (flat: a whole ragged batch), E hidden size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import jax
from jax import Array

import rekindle_kernels
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.hooks import Listener, functions_at, heard
from rekindle._src.models.nn import rope
from rekindle._src.models.nn.linear import RMSNorm
from rekindle_kernels import RaggedBatch

States = tuple[Array, ...]
Compute = Callable[[States, RaggedBatch], tuple[Array, States]]


class Attend(Protocol):
    """Attention, supplied by the caller, who chooses the place of keys and values: pages, a dense cache, or nowhere.

    It is called once per layer with this call's queries [T, H, D], keys and values [T, K, D], normed and rotated; it
    stores the keys and values, applies `config.attention[layer]` and returns [T, H, D]. Layers with `sinks` in their
    spec pass them [H]. A layer that attends to the pages of another has no keys and values. One with latent pages has
    no values, and gets [T, H, value_size].
    """

    def __call__(
        self, layer: int, q: Array, k: Array | None, v: Array | None, sinks: Array | None = None, /
    ) -> Array: ...


class Recur(Protocol):
    """The place of each sequence's states; the caller supplies it in addition to `Attend` for models with states.

    `compute(states, batch)` gets arrays of states, and how the step's tokens belong to sequences, and these to states.
    It returns its result and the arrays after it.
    """

    def recur(self, layer: int, compute: Compute, /) -> Array: ...


class RopeTables:
    """The cosines and sines of a step's positions, computed once per distinct rope and shared by the layers.

    `own` also has arrays that one layer alone reads, such as its embeddings of the tokens; in most models, none.
    """

    own: tuple[Array, ...] = ()  # one per layer

    def __init__(self, config: ModelConfig, positions: Array, lengths: Array | None = None) -> None:
        with jax.named_scope("rope"):
            self.tables = {spec: rope.tables(spec, positions, lengths) for spec in config.ropes}

    def rotated(self, heads: Array, spec: rope.RopeSpec) -> Array:
        """Return heads [T, H, D] rotated; only equally ordered ones may be multiplied with each other."""
        cos, sin, *_ = self.tables[spec]
        ordered = rope.halves(heads, spec.dim) if spec.interleaved else heads
        return rekindle_kernels.rope(ordered, ordered, cos, sin, heads=heads.shape[1])[0]

    @classmethod
    def of(cls, tables: dict[rope.RopeSpec, tuple[Array, ...]], own: tuple[Array, ...] = ()) -> RopeTables:
        """Return an object with tables that were computed before."""
        instance = cls.__new__(cls)
        instance.tables, instance.own = tables, own
        return instance

    def split(
        self,
        qk: Array,
        qkv: Array,
        heads: int,
        spec: rope.RopeSpec | None,
        norm: RMSNorm | None,
        *,
        implementation: str | None = None,
    ) -> tuple[Array, Array, Array]:
        """Return q [T, H, D] and k [T, K, D], normed and rotated, of qk [T, ≥ H + K, D], and v [T, K, D] of qkv."""
        cos, sin, *factor = (None, None) if spec is None else self.tables[spec]
        if norm is not None and norm.deterministic and (spec is None or spec.dim % rope.ROTATED):
            qk, norm = norm(qk[..., : norm.weight.shape[0], :]), None  # a native rotation would have normed them
        weight, eps = (None, 0.0) if norm is None else (norm.weight[...], norm.eps)
        if spec is not None and spec.interleaved:
            assert norm is None, "the norm's weights would have to be reordered, too"
            qk = rope.halves(qk, spec.dim)
        q, k, v = rekindle_kernels.rope(
            qk, qkv, cos, sin, heads=heads, norm=weight, eps=eps, implementation=implementation
        )
        return (q * factor[0][..., None, None].astype(q.dtype) if factor else q), k, v


class Half(Protocol):
    """A half of a layer, such as attention or an MLP. It reads norm(x), and adds its result to the residual if any."""

    def __call__(
        self, x: Array, step: ForwardPass, residual: Array | None = None, norm: RMSNorm | None = None, /
    ) -> Array: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardPass:
    """One pass through the layers, as one of them sees it: where it attends, and where it names its sites.

    See `models/hooks.py` for the sites and for what listeners do.
    """

    tables: RopeTables
    caller: Attend
    listeners: Sequence[Listener] = ()
    layer: int = 0

    def of(self, layer: int) -> ForwardPass:
        """Return the pass for a layer."""
        return dataclasses.replace(self, layer=layer)

    def attend(self, q: Array, k: Array | None, v: Array | None, *sinks: Array) -> Array:
        """Attend as the caller does, to the layer's pages; see `Attend`."""
        q = self.at("q", q)
        k = None if k is None else self.at("k", k)
        v = None if v is None else self.at("v", v)
        return self.caller(self.layer, q, k, v, *sinks)

    def recur(self, compute: Compute) -> Array:
        """Compute with the layer's states; see `Recur`."""
        return cast(Recur, self.caller).recur(self.layer, compute)

    @property
    def own(self) -> Array:
        """The array that this layer alone reads."""
        return self.tables.own[self.layer]

    def at(self, site: str, array: Array) -> Array:
        """Name a site. Return its array as the listeners leave it."""
        return heard(self.listeners, site, self.layer, array)

    def output(self, site: str, half: Half, x: Array, norm: RMSNorm | None = None) -> Array:
        """Compute a half of norm(x), which is a site, for a layer that adds more to the stream than its output."""
        return self.at(site, half(self.at(f"{site}_input", x), self, None, norm))

    def add(self, site: str, half: Half, x: Array, norm: RMSNorm | None = None, *, read: Array | None = None) -> Array:
        """Add a half, which is a site, to the stream: return x plus the half of norm(x), or of norm(read).

        Without a listener, the half itself adds x.
        """
        read = x if read is None else read
        if not self._functions(site) and not self._functions(f"{site}_input"):
            return half(read, self, x, norm)
        return x + self.output(site, half, read, norm)

    def _functions(self, site: str) -> list[Callable[[Array], Array]]:
        return functions_at(self.listeners, site, self.layer)
