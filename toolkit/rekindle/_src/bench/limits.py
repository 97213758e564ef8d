"""The limits of this machine: how fast XLA reads memory and multiplies on it, measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle._src.models.nn.packing import matrix_shape

READ_BYTES = 384 << 20  # far more than the CPU's caches hold


@dataclasses.dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured rates of the default device."""

    read_gb_per_s: float
    bf16_gflop_per_s: float  # of a square matrix product, as the next two
    f32_gflop_per_s: float
    int8_gflop_per_s: float  # int8 · int8 → int32

    def product(self, dtype: str, quantize: str | None) -> float:
        """The rate in GFLOP/s that a model's prefill is compared with."""
        if quantize == "int8":
            # Large chunks may run in either; the faster one is the limit.
            return max(self.int8_gflop_per_s, self.bf16_gflop_per_s)
        return self.f32_gflop_per_s if dtype == "float32" else self.bf16_gflop_per_s


def measure(size: int = 2048, repeat: int = 7, read_bytes: int = READ_BYTES) -> MachineLimits:
    rates = []
    for dtype, wide in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.int8, jnp.int32)):
        x = jnp.ones((size, size), dtype)
        product = jax.jit(_product, static_argnums=2)
        rates.append(2 * size**3 / best(product, x, x, wide, repeat=repeat) / 1e9)
    return MachineLimits(read_rate(read_bytes, repeat), *rates)


def _product(a: jax.Array, b: jax.Array, wide: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=wide)


def read_rate(nbytes: int, repeat: int) -> float:
    """GB/s of reading an array once: the fastest of several reductions, since none is the fastest everywhere.

    On CPU, folding a middle axis is a vector operation per element and cache line: 35 GB/s on two cores where a plain
    sum read 19.
    """
    words = jnp.ones((nbytes // 4,), jnp.uint32)
    seconds = [best(jax.jit(_total), words, repeat=repeat)]
    for inner in (64, 128, 256, 1024):
        folded = words.reshape(-1, 131072 // inner, inner)
        seconds.append(best(jax.jit(_fold), folded, repeat=repeat))
    return words.nbytes / min(seconds) / 1e9


def _total(words: jax.Array) -> jax.Array:
    return jnp.sum(words, dtype=jnp.uint32)


def _fold(words: jax.Array) -> jax.Array:
    return jax.lax.reduce(words, np.uint32(0), jax.lax.bitwise_xor, (1,))


def best(function: Callable[..., Any], *arguments: Any, repeat: int) -> float:
    """Seconds of the fastest call, which is the least disturbed one."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The cost of a model's weights per token."""

    decode_bytes: int  # read by every decoding step, independent of its rows
    prefill_flop: int  # per prompt token, in the layers' products; without attention and the head

    @classmethod
    def of(cls, paths: Sequence[str], leaves: Sequence[Any]) -> Work:
        """The cost of weights or their shapes. An embedding that is not also the head is looked up, not read whole."""
        named = dict(zip(paths, leaves, strict=True))
        tied = not any(path.startswith("head.") for path in named)
        read = [leaf for path, leaf in named.items() if tied or not path.startswith(("embed.", "position_embed."))]
        products = [
            prod(matrix_shape(leaf))
            for path, leaf in named.items()
            if path.startswith("layers.") and path.endswith("weight") and len(leaf.shape) == 2
        ]
        return cls(sum(leaf.size * leaf.dtype.itemsize for leaf in read), 2 * sum(products))

    def decode_share(self, limits: MachineLimits, tokens_per_s: float) -> float:
        """The share of the memory bandwidth that one stream uses to read the weights."""
        return self.decode_bytes * tokens_per_s / (limits.read_gb_per_s * 1e9)

    def prefill_share(self, rate_gflop_per_s: float, tokens_per_s: float) -> float:
        """The share of the product rate that prefill at `tokens_per_s` uses."""
        return self.prefill_flop * tokens_per_s / (rate_gflop_per_s * 1e9)
