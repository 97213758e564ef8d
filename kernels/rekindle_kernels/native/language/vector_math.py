"""exp, softplus, tanh and silu of float32, sixteen at a time: the functions of the C library take one."""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.language.jit import inline
from rekindle_kernels.native.language.vector import (
    add,
    divide,
    larger,
    largest,
    magnitude,
    multiply,
    multiply_add,
    nearest,
    power_of_two,
    splat,
    subtract,
    where_negative,
    with_sign_of,
)

LOWEST = np.float32(-87.0)  # below it e^x is a denormal number; here it stays at 1.6e-38
ONE, TWO, MINUS_ONE, LOG2_E = np.float32(1), np.float32(2), np.float32(-1), np.float32(1.4426950408889634)
NOTHING = np.float32(0)
LN_2_HIGH, LN_2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
# Minimax polynomial of (e^x - 1 - x) / x² on ±ln(2)/2, highest power first (Cephes' expf).
C5, C4, C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C2, C1, C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)

# Twice √(2/π), and that times 0.044715.
GELU_LINEAR, GELU_CUBIC = np.float32(1.5957691216057308), np.float32(0.07135481282723)

SERIES = tuple(np.float32(2 / (2 * power + 1)) for power in range(8))  # of twice the area tangent


@inline
def exp(x: Any) -> Any:
    """e to the power of a vector ≤ 0, to two units in the last place; NaN stays NaN."""
    bounded = larger(splat(LOWEST), x)
    steps = nearest(multiply(bounded, splat(LOG2_E)))
    rest = multiply_add(steps, splat(LN_2_LOW), multiply_add(steps, splat(LN_2_HIGH), bounded))
    curve = multiply_add(splat(C5), rest, splat(C4))
    curve = multiply_add(curve, rest, splat(C3))
    curve = multiply_add(curve, rest, splat(C2))
    curve = multiply_add(curve, rest, splat(C1))
    curve = multiply_add(curve, rest, splat(C0))
    curve = multiply_add(curve, multiply(rest, rest), add(rest, splat(ONE)))
    return multiply(curve, power_of_two(steps))


@inline
def exp_of_one(x: float) -> float:
    """e to the power of a single number ≤ 0."""
    return largest(exp(splat(x)))


@inline
def exp_of_any(x: float) -> float:
    """e to the power of a single number."""
    small = exp_of_one(-abs(x))
    return ONE / small if x > NOTHING else small


@inline
def softplus(x: Any) -> Any:
    """log(1 + e^x) of a vector. The logarithm of 1 + y is twice the area tangent of y / (2 + y), at most a third: a
    series in its square."""
    small = exp(multiply(magnitude(x), splat(MINUS_ONE)))
    ratio = divide(small, add(small, splat(TWO)))
    square = multiply(ratio, ratio)
    curve = splat(SERIES[7])
    for power in (6, 5, 4, 3, 2, 1, 0):
        curve = multiply_add(curve, square, splat(SERIES[power]))
    return multiply_add(curve, ratio, larger(splat(NOTHING), x))


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x) of a vector."""
    small = exp(multiply(magnitude(x), splat(MINUS_ONE)))
    return divide(where_negative(x, small, splat(ONE)), add(splat(ONE), small))


@inline
def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of each lane."""
    small = exp(multiply(magnitude(x), splat(-TWO)))
    return with_sign_of(divide(subtract(splat(ONE), small), add(splat(ONE), small)), x)


@inline
def gelu_tanh(x: Any) -> Any:
    """x · (1 + tanh(y)) / 2 of a vector, for y = √(2/π) · (x + 0.044715 x³). That is x times the sigmoid of 2y."""
    cubic = multiply_add(multiply(x, x), splat(GELU_CUBIC), splat(GELU_LINEAR))
    return multiply(x, sigmoid(multiply(x, cubic)))


@inline
def silu(x: Any) -> Any:
    """x / (1 + e^-x) of a vector; the exponential's argument is never above 0."""
    small = exp(multiply(magnitude(x), splat(MINUS_ONE)))  # never 0, and x may be as large as numbers are
    return divide(multiply(larger(splat(LOWEST), x), where_negative(x, small, splat(ONE))), add(splat(ONE), small))
