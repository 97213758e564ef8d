"""Matrices that a checkpoint stores in groups of four, six or eight bits, and how they can be kept as they are.

A reader of rows that has `packing` and `integers` can fill a matrix of `rekindle_kernels.int4` exactly. A parameter of
the model may be made of several tensors, q, k and v for example; their packings are joined to one that holds them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.manifest import Manifest, Source
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.nn.packing import Packing
from rekindle_kernels import int4


class Integers(NamedTuple):
    """Integers [outputs, inputs], scales and minimums [outputs, groups], as `rekindle_kernels.int4` defines them.

    Scales and minimums that are integers with steps come from `int4.stepped`.
    """

    integers: NDArray[Any]  # uint8 from 0 to 15, which may be indices of a codebook, or int8
    scales: NDArray[Any]
    minimums: NDArray[Any] | None = None


class GroupedRows(Protocol):
    """A reader of rows of a matrix in groups."""

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix; None if there is none."""
        ...

    def integers(self, start: int, stop: int) -> Integers:
        """Return the stored integers of the rows [start, stop), in the groups of `packing`."""
        ...


def are_grouped(rows: object) -> TypeGuard[GroupedRows]:
    """True if the type of `rows` has groups. A protocol's own check looks at each member: 0.1 s for a small model."""
    return hasattr(type(rows), "integers")


def packing_for(group: int, *, minimum: bool, dtype: Any) -> Packing | None:
    """Return the packing for groups of `group` inputs, which may be cut into smaller ones; None if none fits."""
    fitting = [size for size in int4.GROUPS if group % size == 0]
    scales = "float16" if np.dtype(dtype) == np.float16 else "float32"
    return Packing(max(fitting), minimum, scales) if fitting else None


def stored_kinds(
    declared: Manifest, entries: Mapping[str, TensorEntry], *, eight: bool = True, steps: bool = True
) -> tuple[tuple[str, str], ...]:
    """Return the kinds, as `Precision.kinds` has them, of the matrices that a checkpoint stores in groups.

    Groups have integers of four bits for 32 inputs and more; with `eight` also for 16, or of six or eight bits, or
    codebooks. Without `steps`, scales are
    numbers, so that a matrix can be divided after every group.
    """
    kinds = []
    for path, source in declared.sources.items():
        parts = [entries[name] for name in source.names if name in entries]
        packing = _joined(_packing(entry) for entry in parts) if len(parts) == len(source.names) else None
        if packing is None or source.transpose or source.add or source.tiled or not path.endswith(".weight"):
            continue
        if (packing.bits > 4 or packing.codes or packing.group == int4.SMALLEST) and not eight:
            continue
        if packing.scales == int4.STEPPED and not steps:
            packing = packing.as_integers._replace(scales="float32")
        outputs, inputs = sum(source.rows), parts[0].shape[-1]
        if int4.reason_against(outputs, inputs, packing.group) is None:
            kinds.append((path.removesuffix(".weight"), packing.kind))
    return tuple(kinds)


def fills(packing: Packing | None, entry: TensorEntry, source: Source) -> bool:
    """True if a matrix of this packing can take the stored values of an entry as they are."""
    stored = _packing(entry)
    if packing is None or stored is None or source.transpose or source.add or source.tiled:
        return False
    return _joined([packing, stored]) == packing


def fitted(found: Integers, stored: Packing, packing: Packing) -> Integers:
    """Return the same numbers for a packing that holds more: smaller groups, minimums, wider scales, more bits."""
    if stored.codes and not packing.codes:
        values = np.array(int4.CODEBOOKS[stored.scales], np.int8)[found.integers]
        exponents = stored.scales == int4.EXPONENTS
        found = Integers(values, int4.exponent_numbers(found.scales) if exponents else found.scales)
        stored = stored.as_integers
    scales = _spread(found.scales, stored, packing)
    integers, offset = found.integers, 0 if stored.minimum or stored.bits > 4 else int4.OFFSET
    if packing.bits > stored.bits:
        integers, offset = integers.astype(np.int8) - np.int8(offset), 0
    if not packing.minimum:
        return Integers(integers, scales)
    if found.minimums is not None:
        minimums = _spread(found.minimums, stored, packing)
    else:
        minimums = scales * np.asarray(-offset, scales.dtype) if offset else np.zeros_like(scales)
    return Integers(integers, scales, minimums)


def _spread(numbers: NDArray[Any], stored: Packing, packing: Packing) -> NDArray[Any]:
    """Return scales or minimums for smaller groups."""
    ratio = stored.group // packing.group
    if packing.scales == int4.STEPPED:
        integers, steps = numbers[..., : -int4.STEP_BYTES], numbers[..., -int4.STEP_BYTES :]
        return np.concatenate([np.repeat(integers, ratio, axis=-1), steps], axis=-1)
    wide = int4.stepped_numbers(numbers) if stored.scales == int4.STEPPED else numbers
    return np.repeat(wide, ratio, axis=1).astype(packing.scales)


def _packing(entry: TensorEntry) -> Packing | None:
    return entry.rows.packing if are_grouped(entry.rows) else None


def _joined(packings: Iterable[Packing | None]) -> Packing | None:
    """Return the packing that holds all of these; None if one of them is None, or if there are none."""
    listed = list(packings)
    known = [packing for packing in listed if packing is not None]
    if not known or len(known) < len(listed):
        return None
    if len({(packing.codes, packing.scales) for packing in known}) > 1:
        known = [packing.as_integers for packing in known]
    group = min(packing.group for packing in known)
    minimum = any(packing.minimum for packing in known)
    bits = max(packing.bits for packing in known)
    # Eight times a scale, which takes the place of an offset, may not fit into 16 bits.
    mixed = minimum and bits == 4 and not all(packing.minimum for packing in known)
    dtypes = {packing.scales for packing in known}
    scales = "float32" if mixed or len(dtypes) > 1 else dtypes.pop()
    return Packing(group, minimum, scales, bits, known[0].codes)
