"""Hooks of a caller inside a model: listeners at the sites that its layers name, and deltas of its matrices.

A layer names each array that others may read or change, and each half that it adds to the residual stream
(`nn/forward.py`). These are the possible sites of a layer, in the order of a pass:

    embedding        of layer 0 alone: the embeddings of tokens, before everything else
    residual_before  the stream before the first layer; before any other, it is the residual of the one before
    q, k, v          as attention takes them
    attention        the output of attention, or of what mixes tokens in its place
    gates, experts   the experts that were chosen, after their weights
    mlp              the output of the MLP, or of the experts in its place
    mlp_experts      the output of experts that a layer has in addition to its MLP
    layer_embedding  the layer's own embedding of the token
    attention_input, mlp_input, mlp_experts_input
                     the stream as that half alone reads it, before its norm if it norms its input itself
    heads            the output of each head, before they are joined; `models/differentiable.py` alone names it
    residual         the stream after the layer

**A new listener** is a function that is asked, while a program is traced, for each site and layer, and returns the
function that its array goes through, or None where it does not listen. It is passed to the call of a model, and a
feature of steps returns it from `StepPart.hooks`. To read (a capture, the hidden states of a drafter), it keeps the
array, returns it as it is, and the program returns the kept arrays. To change (steering, an encoder's rows in the place
of embeddings, at `embedding`), it returns another array of the same shape and dtype. For the gradient at a site, it
adds an array of zeros that is an argument of the differentiated function. Listeners hear an array in their order; each
gets the result of the one before. Where one listens to a half, the half is computed before it is added; where none
does, the layer runs in its fused form, so that a program without listeners is the one without sites.

A **delta** is an addition to the products of one matrix, such as the products of two narrow matrices. `Linear` and
`Stack` declare it as `delta`, and `merge` gives a model its deltas by the paths of these layers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import EllipsisType, MappingProxyType
from typing import Protocol

from jax import Array

Listener = Callable[[str, int], Callable[[Array], Array] | None]
STREAM_SITES = ("residual_before", "residual")


class Weight(Protocol):
    """A parameter of a layer."""

    def __getitem__(self, index: EllipsisType, /) -> Array:
        """Return its array."""
        ...


class Norm(Protocol):
    """The norm of a layer's input, `RMSNorm`, as a delta takes it."""

    eps: float

    @property
    def weight(self) -> Weight: ...

    def __call__(self, x: Array) -> Array: ...


class Delta(Protocol):
    """An addition to the product of a linear layer."""

    def add(self, y: Array, x: Array, gate: str | None = None, norm: Norm | None = None) -> Array:
        """Return y [T, out] plus the addition for x [T, in], normed if there is a norm; gated [T, out / 2] if an
        activation is named.
        """
        ...


class ExpertsDelta(Protocol):
    """An addition to the products of a stack of experts."""

    @property
    def needed(self) -> Array:
        """A bool: if it is false, nothing is added."""
        ...

    def add_to_rows(self, y: Array, x: Array, sizes: Array, tokens: Array) -> Array:
        """Return y [M, out] plus the addition for x [M, in].

        The first sizes[0] rows are of expert 0, the next sizes[1] of expert 1, …, and row m belongs to tokens[m].
        """
        ...


Deltas = Mapping[str, Delta | ExpertsDelta]  # by the paths of matrices, such as "layers.0.attention.qkv"
NO_DELTAS: Deltas = MappingProxyType({})


def functions_at(listeners: Sequence[Listener], site: str, layer: int) -> list[Callable[[Array], Array]]:
    """Return the functions that the array of a site goes through."""
    functions = (listener(site, layer) for listener in listeners)
    return [function for function in functions if function is not None]


def heard(listeners: Sequence[Listener], site: str, layer: int, array: Array) -> Array:
    """Return the array of a site as the listeners leave it."""
    for function in functions_at(listeners, site, layer):
        array = function(array)
    return array


def stream_at(streams: dict[int, Array], layers: Container[int]) -> Listener:
    """Return a listener that keeps the inputs of these layers in the residual stream, by layer; the output of the last
    layer is the input of one more."""

    def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
        place = {"residual_before": 0, "residual": layer + 1}.get(site, -1)

        def keep(array: Array) -> Array:
            streams[place] = array
            return array

        return keep if place in layers else None

    return listener


def keeping(kept: dict[tuple[str, int], Array], sites: Container[str]) -> Listener:
    """Return a listener that keeps the arrays of these sites, by site and layer."""

    def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
        def keep(array: Array) -> Array:
            kept[site, layer] = array
            return array

        return keep if site in sites else None

    return listener
