"""CPU kernels compiled by numba and called by XLA, for what XLA:CPU has no fast form. Without numba there are none."""

from rekindle_kernels.native.attention import rotate
from rekindle_kernels.native.build import called_by, ensure, reason_against
from rekindle_kernels.native.products import largest_index, multiplies, multiply, rms_norm

__all__ = ["called_by", "ensure", "largest_index", "multiplies", "multiply", "reason_against", "rms_norm", "rotate"]
