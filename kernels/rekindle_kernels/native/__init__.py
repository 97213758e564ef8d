"""CPU kernels compiled by numba and called by XLA, for what XLA:CPU has no fast form. Without numba there are none."""

from rekindle_kernels.native.attention import rotate
from rekindle_kernels.native.build import reason_against
from rekindle_kernels.native.products import matvec, multiplies

__all__ = ["matvec", "multiplies", "reason_against", "rotate"]
