"""The measured limits of this machine: how fast XLA reads memory and multiplies on it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle._src.models.base import Graph, ShapeLike
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.models.nn.packing import matrix_shape
from rekindle_kernels import LinearOptions, int4, linear

READ_BYTES = 384 << 20  # far more than the CPU's caches hold


@dataclasses.dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured rates of the default device."""

    read_gb_per_s: float
    bf16_gflop_per_s: float  # of a square matrix product, like the next two
    f32_gflop_per_s: float
    int8_gflop_per_s: float  # int8 · int8 → int32

    def product(self, dtype: str, quantize: str | None) -> float:
        """Return the rate in GFLOP/s to compare a model's prefill with."""
        if quantize == "int8":
            # Large chunks may run in either dtype; the faster one is the limit.
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
    """Return GB/s of reading an array once: the fastest of several reductions, since none is fastest everywhere.

    On CPU, folding a middle axis is a vector operation per element and cache line: 35 GB/s on two cores where a plain
    sum read 19.
    """
    filled = aligned((nbytes // 4,), np.uint32)  # memory as weights have it
    filled[:] = 1
    words = jax.device_put(filled)
    total = jax.jit(lambda words: jnp.sum(words, dtype=jnp.uint32))
    fold = jax.jit(lambda words: jax.lax.reduce(words, np.uint32(0), jax.lax.bitwise_xor, (1,)))
    seconds = [best(total, words, repeat=repeat)]
    for inner in (64, 128, 256, 1024):
        folded = words.reshape(-1, 131072 // inner, inner)
        seconds.append(best(fold, folded, repeat=repeat))
    return words.nbytes / min(seconds) / 1e9


def decode_rates(nbytes: int, repeat: int) -> dict[int, float]:
    """Return GB/s at which one-row products read a matrix of 16, 8 and 4 bits with scales: the limit of decoding."""
    width = 2048
    row = jnp.ones((1, width), jnp.float32)
    rates: dict[int, float] = {}
    for bits, dtype in ((16, jnp.bfloat16), (8, np.int8), (4, np.uint8)):
        outputs = nbytes * 8 // bits // width // 64 * 64
        shape: tuple[int, ...] = (outputs, width)
        scales: tuple[int, ...] = (outputs,)
        quantize = None if bits == 16 else "int8"
        if bits == 4:
            shape, scales, quantize = int4.weight_shape(shape), int4.scale_shape(shape, 32), "int4"
        weight, scale = aligned(shape, dtype), aligned(scales, np.float16 if bits == 4 else np.float32)
        weight[:], scale[:] = 1, 1
        operands = [jax.device_put(array) for array in (weight, scale)]  # a CPU adopts them in place

        def product(x: jax.Array, weight: jax.Array, scale: jax.Array, quantize: str | None = quantize) -> jax.Array:
            options = LinearOptions(quantize=quantize)
            return linear(x, weight, scale=None if quantize is None else scale, options=options)

        seconds = best(jax.jit(product), row, *operands, repeat=repeat)
        rates[bits] = sum(operand.nbytes for operand in operands[: 1 if bits == 16 else 2]) / seconds / 1e9
    return rates


def best(function: Callable[..., Any], *arguments: Any, repeat: int) -> float:
    """Return the seconds of the fastest call, which is the least disturbed one."""
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
    def of(cls, graph: Graph, leaves: Sequence[ShapeLike]) -> Work:
        """Return the cost of weights or their shapes. Tables that are not also the head are read by rows only.

        A token reads the matrices of its own experts.
        """
        tables = ["position_embed.", "layer_embed."]
        if any(path.startswith("head.") for path in graph.paths):
            tables.append("embed.")
        nbytes = products = Fraction()
        for path, leaf in zip(graph.paths, leaves, strict=True):
            share = _share_of_experts(graph.config, path, leaf)
            if not path.startswith(tuple(tables)):
                nbytes += (share or 1) * leaf.size * leaf.dtype.itemsize
            if path.startswith("layers.") and path.endswith("weight") and (len(leaf.shape) == 2 or share is not None):
                products += (share or 1) * prod(matrix_shape(leaf))
        return cls(int(nbytes), int(2 * products))


def _share_of_experts(config: ModelConfig, path: str, leaf: Any) -> Fraction | None:
    """Return the share of a stack of experts that one token chooses; None for other leaves."""
    layer = re.match(r"layers\.(\d+)\.", path)
    spec = config.moe[int(layer[1])] if layer and config.moe else None
    if spec is None or len(leaf.shape) != 3 or leaf.shape[0] != spec.num_experts:
        return None
    return Fraction(spec.top_k, spec.num_experts)
