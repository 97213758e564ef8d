"""What this machine can do at best: how fast it reads memory and multiplies, measured the way XLA does it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates of the default device."""

    read_gb_per_s: float  # of a sum over an array far larger than the caches
    bf16_gflop_per_s: float  # of a square product
    f32_gflop_per_s: float


def measure(size: int = 2048, repeat: int = 5) -> Limits:
    words = jnp.ones((96 << 20,), jnp.uint32)  # 384 MB
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.uint32))
    read = words.nbytes / best(total, words, repeat=repeat) / 1e9
    del words
    rates = []
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.ones((size, size), dtype)
        product = jax.jit(
            lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        )
        rates.append(2 * size**3 / best(product, x, x, repeat=repeat) / 1e9)
    return Limits(read, *rates)


def best(function: Callable[..., Any], *arguments: Any, repeat: int) -> float:
    """Seconds of the fastest call: a limit is what the machine reaches undisturbed."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
