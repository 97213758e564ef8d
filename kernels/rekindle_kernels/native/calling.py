"""A native kernel called with operands by name, as an operation of JAX, and what all such operations have in common.

XLA can't differentiate a native call. Norms, products and ropes therefore carry their plain form along, which computes
both value and derivative where a gradient is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle_kernels.native.build import ensure, unavailable_reason
from rekindle_kernels.native.kernel_table import Operand, Result, Variant

if TYPE_CHECKING:
    from rekindle_kernels.ops.registry import Facts

NOT_BUILT = "its kernel can't be built here: the log says why"
SAME_BITS = {"bfloat16": "uint16", "float16": "uint16"}  # what pages and stacks of experts are stored as on CPU


class Shapes:
    """The sizes of a call's axes, and the dtypes of its operands, collected from them."""

    def __init__(self, variant: Variant, sizes: Mapping[str, int]) -> None:
        self.variant, self.sizes = variant, dict(sizes)
        if variant.head_dim:
            self.sizes["D"] = variant.head_dim
        self._dtypes: dict[str, Any] = {}

    def check(self, operand: Operand, value: Any) -> None:
        """Note the sizes of an operand's axes. Raises ValueError if dtype, rank or a size are not the table's."""
        what, wanted = f"operand {operand.name} of kernel {self.variant.name}", self.variant.dtype_of(operand)
        if value.dtype.name not in (wanted, SAME_BITS.get(wanted)):
            raise ValueError(f"{what} is {value.dtype.name}: pass it as {wanted}")
        self._dtypes[operand.name] = value.dtype
        axes = operand.axes.split()
        if len(axes) != len(value.shape):
            raise ValueError(f"{what} has shape {list(value.shape)}: its axes are [{', '.join(axes)}]")
        for axis, size in zip(axes, value.shape, strict=True):
            known = int(axis) if axis.isdigit() else self.sizes.setdefault(axis, size)
            if known != size:
                raise ValueError(f"{what} has {size} where axis {axis} has {known}: its axes are [{', '.join(axes)}]")

    def of(self, result: Result) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of a result; a result stored in an operand's memory has that operand's dtype."""
        shape = tuple(int(axis) if axis.isdigit() else self.sizes[axis] for axis in result.axes.split())
        dtype = self._dtypes.get(result.into or "", self.variant.dtype_of(result))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def call(
    kernel: Variant,
    operands: Mapping[str, Any],
    settings: Mapping[str, float] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Array, ...]:
    """Call a kernel and return its results. Operands and settings are named in its table; an optional operand may be
    None or left out. `sizes` has the axes of results that no operand has. Raises ValueError if an operand's dtype, rank
    or size differs from the table.
    """
    spec, shapes, present = kernel.spec, Shapes(kernel, sizes or {}), 0
    unknown = set(operands) - {operand.name for operand in spec.operands}
    assert not unknown, f"kernel {kernel.name} has no operand {', '.join(sorted(unknown))}"
    values: list[Any] = []
    for operand in spec.operands:
        value = operands.get(operand.name)
        if value is None:
            assert operand.optional, f"kernel {kernel.name} needs {operand.name}"
            values += [] if operand.behind else [np.zeros((1,), kernel.dtype_of(operand))]
            continue
        shapes.check(operand, value)
        present |= spec.present_bit(operand.name) if operand.optional else 0
        values.append(value)
    if spec.settings_layout is not None:
        values.insert(spec.index("settings"), spec.pack_settings(present, settings or {}))
    results = [shapes.of(result) for result in spec.results]
    into = {
        spec.index(result.into): index
        for index, result in enumerate(spec.results)
        if result.into is not None and operands.get(result.into) is not None
    }
    made = jax.ffi.ffi_call(ensure(kernel.name), results, input_output_aliases=into)(*values)
    return tuple(made)


Out = TypeVar("Out")


class _Tracing(threading.local):
    forward = False  # nothing that this thread traces now is differentiated


_tracing = _Tracing()


@contextlib.contextmanager
def forward_only() -> Iterator[None]:
    """Let `differentiable` return `call` inside the `with` block, in this thread. Rules for derivatives
    would be a part of the time that it takes to trace a step."""
    before, _tracing.forward = _tracing.forward, True
    try:
        yield
    finally:
        _tracing.forward = before


def differentiable(call: Callable[..., Out], plain: Callable[..., Out]) -> Callable[..., Out]:
    """Return `call`, or `plain` where it is differentiated; both take the same arrays."""
    if _tracing.forward:
        return call
    either = jax.custom_jvp(call)
    either.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return either


def unavailable(call: Facts) -> str | None:
    """Why no native kernel serves a call with these facts; None if one may."""
    if call.platform != "cpu":
        return f"it runs on a CPU, not on {call.platform}"
    return _missing(os.environ.get("REKINDLE_NATIVE", "1"))


@functools.cache
def _missing(setting: str) -> str | None:
    """Return `build.unavailable_reason()`, cached: it looks for packages on disk, and every product of every layer
    asks."""
    return unavailable_reason()


def like(shape: jax.ShapeDtypeStruct) -> Array:
    """Return the shape as an array, for functions that read nothing but shape and dtype."""
    return cast(Array, shape)
