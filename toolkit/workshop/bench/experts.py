"""The experts of one layer with each chosen matrix copied out of its stack first, and read in place.

    python experts.py [--kind int4] [--tokens 1 8 64] [--rounds 15] [--only qwen3-30b]

Shapes are those of gpt-oss-20b and Qwen3-30B-A3B, of the latter with 64 experts of 128. Both forms run in turn in one
process, on the same weights and tokens. Printed: the median of the milliseconds of each, and of their ratios.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rekindle_kernels
from rekindle._src.models.config import MoeSpec
from rekindle._src.models.nn import moe
from rekindle._src.models.nn.forward import ForwardPass, RopeTables
from rekindle._src.models.nn.linear import quantise
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import config_from_hf
from rekindle_kernels import linear
from rekindle_kernels.ops.linear import matrix_of_expert

PLAIN = {"model_type": "llama", "vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
OSS = MoeSpec(num_experts=32, top_k=4, intermediate_size=2880, normalize=True, bias=True)
QWEN = MoeSpec(num_experts=64, top_k=8, intermediate_size=768, normalize=True)
SHAPES = {  # hidden size, activation, experts
    "gpt-oss-20b": (2880, "clamped_silu", OSS),
    "qwen3-30b": (2048, "silu", QWEN),
}


def _attends(*_: Any) -> jax.Array:
    raise AssertionError("experts attend to nothing")


STEP = ForwardPass(RopeTables.of({}), _attends)


def layer(name: str, kind: str) -> moe.Experts:
    """Return the experts of a layer with random weights."""
    hidden, activation, spec = SHAPES[name]
    config = config_from_hf({**PLAIN, "hidden_size": hidden, "intermediate_size": hidden})
    config = dataclasses.replace(config, activation=activation)
    precision = Precision("bfloat16", None if kind == "bfloat16" else kind, loop_experts=True)
    module = moe.Experts(config, spec, precision)
    quantise(module, precision)
    graph, state = nnx.split(module)
    random = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.uint16:  # from 1 to 2
            return jnp.asarray(random.integers(0x3F80, 0x4000, leaf.shape, np.uint16))
        if leaf.dtype in (jnp.uint8, jnp.int8):
            return jnp.asarray(random.integers(0, 128, leaf.shape, np.uint8).astype(leaf.dtype))
        return jnp.asarray(random.standard_normal(leaf.shape, np.float32) * 0.02).astype(leaf.dtype)

    filled: moe.Experts = nnx.merge(graph, jax.tree.map(fill, state))
    return filled


def copied(x: jax.Array, weight: jax.Array, *, expert: Any = None, options: Any, **others: Any) -> jax.Array:
    """Compute as `linear` with the expert's matrix, if there is one, taken out of the stack."""
    if expert is None:
        return linear(x, weight, options=options, **others)
    if options.quantize != "int4":
        others["implementation"] = "xla"
    parts = matrix_of_expert(expert, weight, others.pop("scale"), others.pop("minimum"), options.values)
    options = dataclasses.replace(options, values=None)
    return linear(x, parts[0], scale=parts[1], minimum=parts[2], options=options, **others)


def compiled(module: moe.Experts, x: jax.Array, product: Callable[..., jax.Array]) -> Callable[[], Any]:
    """Return a call of the experts whose products are computed by `product`."""
    graph, state = nnx.split(module)
    used, moe.rekindle_kernels.linear = moe.rekindle_kernels.linear, product
    try:
        program = (
            jax.jit(rekindle_kernels.fuse(lambda state, x: nnx.merge(graph, state)(x, STEP))).lower(state, x).compile()
        )
    finally:
        moe.rekindle_kernels.linear = used
    return lambda: jax.block_until_ready(program(state, x))


def main() -> None:
    kinds, shapes = ["int4", "int8", "int8-weight", "bfloat16"], list(SHAPES)
    given = harness.options(__doc__, kind=("int4", kinds), tokens=[1, 8, 64], rounds=15, only=(shapes, shapes))
    harness.table("shape", "tokens", "copied first, ms", "in place, ms", "ratio")
    for name in given.only:
        module = layer(name, given.kind)
        for tokens in given.tokens:
            x = jnp.asarray(np.random.default_rng(tokens).standard_normal((tokens, SHAPES[name][0]), np.float32))
            forms = [compiled(module, x, product) for product in (copied, linear)]
            same = np.array_equal(*(np.asarray(form()) for form in forms))
            times: list[list[float]] = [[], []]
            for _, index in harness.turns((0, 1), given.rounds, 0):
                begin = time.perf_counter()
                forms[index]()
                times[index].append(1e3 * (time.perf_counter() - begin))
            before, after = map(statistics.median, times)
            ratio = statistics.median(harness.ratios(times[1], times[0]))
            print(
                f"| {name}, {given.kind} | {tokens} | {before:.2f} | {after:.2f} | {ratio:.2f} |"
                + ("" if same else " not the same bits"),
                flush=True,
            )


if __name__ == "__main__":
    main()
