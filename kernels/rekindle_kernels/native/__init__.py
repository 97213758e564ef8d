"""CPU kernels compiled by numba and called by XLA, for what XLA:CPU has no fast form. Without numba there are none."""

from rekindle_kernels.native.build import reason_against
from rekindle_kernels.native.products import MOST_ROWS, matvec, multiplies

__all__ = ["MOST_ROWS", "matvec", "multiplies", "reason_against"]
