"""A native kernel called with operands by name, as an operation of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rekindle_kernels.native.build import ensure
from rekindle_kernels.native.kernel_spec import Shapes, Variant


def call(
    kernel: Variant,
    operands: Mapping[str, Any],
    settings: Mapping[str, float] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[jax.Array, ...]:
    """The results of a kernel. Operands and settings are those of its table; an optional operand may be None or left
    out. `sizes` are those of the results' axes that no operand has. Raises ValueError for an operand of another dtype,
    rank or size than the table says."""
    spec, shapes, present = kernel.spec, Shapes(kernel, sizes or {}), 0
    unknown = set(operands) - {operand.name for operand in spec.operands}
    assert not unknown, f"kernel {kernel.name} has no operand {', '.join(sorted(unknown))}"
    values: list[Any] = []
    for operand in spec.operands:
        value = operands.get(operand.name)
        if value is None:
            assert operand.optional, f"kernel {kernel.name} needs {operand.name}"
            values.append(np.zeros((1,), kernel.dtype_of(operand)))
            continue
        shapes.check(operand, value)
        present |= spec.present_bit(operand.name) if operand.optional else 0
        values.append(value)
    if spec.settings_layout is not None:
        values.append(spec.pack_settings(present, settings or {}))
    results = [shapes.of(result) for result in spec.results]
    into = {
        spec.index(result.into): index
        for index, result in enumerate(spec.results)
        if result.into is not None and operands.get(result.into) is not None
    }
    made = jax.ffi.ffi_call(ensure(kernel.name), results, input_output_aliases=into)(*values)
    return tuple(made)
