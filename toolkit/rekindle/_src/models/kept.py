"""Arrays of a forward pass that are kept for the backward pass, which computes the others again.

A backward pass traces the forward one once more. Where that names an array that was kept, it goes on with the kept one:
its derivatives are those of the array that is named, whose numbers are not computed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import Array
from jax.extend.core import Literal

Keep = Callable[[Array], Array]  # of an array that could be kept: returns the array to go on with


def keep_nothing(array: Array) -> Array:
    """Compute the array again in the backward pass."""
    return array


class ResultRecorder:
    """Collects the arrays that a forward pass names."""

    def __init__(self, wanted: Sequence[bool] | None = None) -> None:
        """`wanted` are the arrays to collect, in the order that they are named in; None: all."""
        self._wanted, self._count = wanted, 0
        self.arrays: list[Array] = []

    def __call__(self, array: Array) -> Array:
        if self._wanted is None or self._wanted[self._count]:
            self.arrays.append(array)
        self._count += 1
        return array


class ResultReplayer:
    """Returns the arrays that were collected, where a backward pass names them again."""

    def __init__(self, wanted: Sequence[bool], arrays: Sequence[Array]) -> None:
        self._wanted, self._arrays = iter(wanted), iter(arrays)

    def __call__(self, array: Array) -> Array:
        return _known(array, next(self._arrays)) if next(self._wanted) else array


@jax.custom_vjp
def _known(computed: Array, kept: Array) -> Array:
    """Return the kept array. Derivatives flow to the computed one."""
    return kept


def _known_forward(computed: Array, kept: Array) -> tuple[Array, None]:
    return kept, None


def _known_backward(_: None, change: Array) -> tuple[Array, None]:
    return change, None


_known.defvjp(_known_forward, _known_backward)


def read_operands(function: Callable[..., object], *operands: object) -> list[bool]:
    """Return whether the results of a function depend on each of its operands' leaves, by shapes alone."""
    program = jax.make_jaxpr(function)(*operands).jaxpr
    read = {variable for variable in program.outvars if not isinstance(variable, Literal)}
    for equation in reversed(program.eqns):
        if not read.isdisjoint(equation.outvars):
            read.update(variable for variable in equation.invars if not isinstance(variable, Literal))
    return [variable in read for variable in program.invars]
