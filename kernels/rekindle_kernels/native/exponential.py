"""exp in float32, in operations that the compiler turns into vector instructions; the C library's does one at a time."""

from __future__ import annotations

import numpy as np

from rekindle_kernels.native.memory import nearest, power_of_two
from rekindle_kernels.native.target import inline

SMALLEST = np.float32(-87.0)  # below it the result is 0, not a denormal number
ZERO, ONE, LOG2_E = np.float32(0), np.float32(1), np.float32(1.4426950408889634)
LN_2_HIGH, LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# Minimax polynomial of (e^x - 1 - x) / x² on ±ln(2)/2, highest power first (Cephes' expf).
C5, C4, C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C2, C1, C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@inline  # type: ignore[untyped-decorator]
def exp(x: float) -> float:
    """e to the power of x ≤ 0, to two units in the last place."""
    bounded = x if x > SMALLEST else SMALLEST
    steps = nearest(bounded * LOG2_E)
    rest = bounded - steps * LN_2_HIGH - steps * LN_2_LOW
    curve = ((((C5 * rest + C4) * rest + C3) * rest + C2) * rest + C1) * rest + C0
    value = (curve * rest * rest + rest + ONE) * power_of_two(steps)
    return value if x > SMALLEST else ZERO
