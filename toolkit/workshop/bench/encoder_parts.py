"""The parts of an encoder of pictures in float32: products and attention, natively, by XLA and by PyTorch, in turns.

    python encoder_parts.py [--rows 512] [--rounds 15]

Milliseconds of processor time in one process (run it on one core: `taskset -c 0`), medians and ranges; ratios above 1
say that the native kernel takes less. PyTorch takes part where it is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels import AttentionSums, add_keys, linear

PRODUCTS = ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))  # outputs and inputs
HEADS = ((16, 64), (16, 72))  # their number and size
Runs = dict[str, Callable[[], Any]]


def compared(title: str, runs: Runs, rounds: int) -> None:
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in harness.turns(tuple(runs), rounds):
        start = time.process_time()
        runs[name]()
        if number >= 0:
            spent[name].append(1000 * (time.process_time() - start))
    cells = [harness.spread(values, ".1f") for values in spent.values()]
    ratios = [harness.spread(harness.ratios(spent[name], spent["native"]), ".2f") for name in runs if name != "native"]
    print(f"| {title} | {' | '.join([*cells, *ratios])} |", flush=True)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def product_runs(rows: int, outputs: int, inputs: int, torch: Any) -> Runs:
    x, weight = floats(rows, inputs), floats(outputs, inputs)
    forms = {name: jax.jit(partial(linear, implementation=name)) for name in ("native", "xla")}
    arrays = jnp.asarray(x), jnp.asarray(weight)
    runs: Runs = {name: partial(_ready, form, *arrays) for name, form in forms.items()}
    if torch is not None:
        runs["torch"] = partial(torch.nn.functional.linear, *map(torch.from_numpy, (x, weight)))
    return runs


def attention_runs(rows: int, heads: int, size: int, torch: Any) -> Runs:
    q, k, v = (floats(heads, rows, size) for _ in range(3))
    seen = jnp.zeros(rows, jnp.int32), jnp.full(rows, rows, jnp.int32)
    none, scale = AttentionSums.none(heads, rows, size), size**-0.5
    forms = {name: jax.jit(partial(add_keys, scale=scale, implementation=name)) for name in ("native", "xla")}
    arrays = map(jnp.asarray, (q, k, v))
    arguments = (none, *arrays, *seen)
    runs: Runs = {name: partial(_ready, form, *arguments) for name, form in forms.items()}
    if torch is not None:
        tensors = [torch.from_numpy(x)[None] for x in (q, k, v)]
        runs["torch"] = partial(torch.nn.functional.scaled_dot_product_attention, *tensors)
    return runs


def _ready(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.block_until_ready(function(*arguments))


def main() -> None:
    arguments = harness.options(__doc__, rows=512, rounds=15)
    try:
        import torch

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
    except ImportError:
        torch = None
    names = ("native", "xla", *(() if torch is None else ("torch",)))
    harness.table(f"{arguments.rows} rows, ms", *names, *(f"{name} / native" for name in names[1:]))
    for outputs, inputs in PRODUCTS:
        runs = product_runs(arguments.rows, outputs, inputs, torch)
        compared(f"{outputs} x {inputs}", runs, arguments.rounds)
    for heads, size in HEADS:
        compared(
            f"attention, {heads} heads of {size}", attention_runs(arguments.rows, heads, size, torch), arguments.rounds
        )


if __name__ == "__main__":
    main()
