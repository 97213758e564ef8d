"""Matrices of small numbers with scales beside them: fp8 and int8, and the 4-bit floats of MXFP4 and NVFP4.

Each class is called with a range [start, stop) of outputs and returns their values [outputs, inputs].
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.rows_of import rows_of
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.nn.packing import Packing
from rekindle_kernels import int4

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_TWICE = (2 * _E2M1).astype(np.int8)


class ScaledRows:
    """value = weight * scale, one scale for the tensor, for each output, or for each block of outputs and inputs."""

    def __init__(self, weight: TensorEntry, scale: TensorEntry, block: tuple[int, int] | None = None) -> None:
        self._weight, self._scale, self._block = weight, scale, block

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        weight = rows_of(self._weight, start, stop).astype(np.float32)
        if self._block is None:
            if int(np.prod(self._scale.shape)) == 1:
                return weight * rows_of(self._scale._replace(shape=(1,)), 0, 1).astype(np.float32)
            return weight * rows_of(self._scale, start, stop).astype(np.float32).reshape(stop - start, 1)
        height, width = self._block
        first = start // height
        scale = rows_of(self._scale, first, -(-stop // height)).astype(np.float32)
        spread = scale[np.arange(start, stop) // height - first]
        return weight * np.repeat(spread, width, axis=1)[:, : weight.shape[1]]


class FourBitFloatRows:
    """Floats of 4 bits (E2M1), two in each byte, with a scale for every 32 (MXFP4) or 16 (NVFP4) inputs.

    Scales of MXFP4 are exponents of 8 bits. Those of NVFP4 are fp8, and one number for the whole tensor divides them,
    or multiplies them.
    """

    def __init__(
        self, weight: TensorEntry, scale: TensorEntry, whole: TensorEntry | None = None, *, divides: bool = True
    ) -> None:
        self._weight, self._scale, self._whole, self._divides = weight, scale, whole, divides

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        values, scale = _E2M1[self._levels(start, stop)], self._scales(start, stop)
        return values * np.repeat(scale, values.shape[1] // scale.shape[1], axis=1)

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in eight bits: twice the values are small integers."""
        inputs, groups = 2 * self._weight.shape[1], self._scale.shape[1]
        group = inputs // groups if groups and inputs % groups == 0 else 0
        return Packing(group, scales="float32", bits=8) if group in int4.GROUPS_OF[8] else None

    def integers(self, start: int, stop: int) -> Integers:
        """Return the stored integers of the outputs [start, stop), with half of the scales."""
        return Integers(_TWICE[self._levels(start, stop)], self._scales(start, stop) * np.float32(0.5))

    def _levels(self, start: int, stop: int) -> NDArray[np.uint8]:
        packed = rows_of(self._weight, start, stop)
        levels: NDArray[np.uint8] = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        return levels

    def _scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the scales [outputs, groups]."""
        stored = rows_of(self._scale, start, stop)
        if self._whole is None:
            return stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        whole = rows_of(self._whole._replace(shape=(1,)), 0, 1).astype(np.float32)
        return stored.astype(np.float32) / whole if self._divides else stored.astype(np.float32) * whole
