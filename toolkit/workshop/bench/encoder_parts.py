"""The parts of an encoder of pictures: products and attention, natively, by XLA and by PyTorch, in turns.

    python encoder_parts.py [--rows 512] [--rounds 15] [--dtype bfloat16] [--attention 16 64 512 1024]

Products have as many rows as `--rows` says, and attention as many queries and keys as each of `--attention`.

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


def product_runs(rows: int, outputs: int, inputs: int, dtype: str, torch: Any) -> Runs:
    x, weight = floats(rows, inputs), floats(outputs, inputs)
    forms = {name: jax.jit(partial(linear, implementation=name)) for name in ("native", "xla")}
    arrays = jnp.asarray(x), jnp.asarray(weight).astype(dtype)  # rows are float32, as an encoder's are
    runs: Runs = {name: partial(_ready, form, *arrays) for name, form in forms.items()}
    if torch is not None:
        tensors = (torch.from_numpy(array).to(getattr(torch, dtype)) for array in (x, weight))
        runs["torch"] = partial(torch.nn.functional.linear, *tensors)
    return runs


def attention_runs(rows: int, heads: int, size: int, dtype: str, torch: Any) -> Runs:
    q, k, v = (floats(heads, rows, size) for _ in range(3))
    seen = jnp.zeros(rows, jnp.int32), jnp.full(rows, rows, jnp.int32)
    arrays = [jnp.asarray(x).astype(dtype) for x in (q, k, v)]
    runs: Runs = {}
    for name in ("native", "xla"):
        add = jax.jit(partial(add_keys, scale=size**-0.5, implementation=name), donate_argnums=0)
        runs[name] = partial(_added, add, [AttentionSums.none(heads, rows, size)], (*arrays, *seen))
    if torch is not None:
        tensors = [torch.from_numpy(x)[None].to(getattr(torch, dtype)) for x in (q, k, v)]
        runs["torch"] = partial(torch.nn.functional.scaled_dot_product_attention, *tensors)
    return runs


def _added(add: Callable[..., AttentionSums], kept: list[AttentionSums], arguments: tuple[Any, ...]) -> None:
    """Add keys to the sums that are kept, in their memory."""
    kept[0] = jax.block_until_ready(add(kept[0], *arguments))


def _ready(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.block_until_ready(function(*arguments))


def main() -> None:
    arguments = harness.options(__doc__, rows=512, rounds=15, dtype="float32", attention=[512])
    try:
        import torch

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
    except ImportError:
        torch = None
    names = ("native", "xla", *(() if torch is None else ("torch",)))
    harness.table(f"{arguments.dtype}, {arguments.rows} rows, ms", *names, *(f"{name} / native" for name in names[1:]))
    for outputs, inputs in PRODUCTS if arguments.rows else ():
        runs = product_runs(arguments.rows, outputs, inputs, arguments.dtype, torch)
        compared(f"{outputs} x {inputs}", runs, arguments.rounds)
    for rows in arguments.attention:
        for heads, size in HEADS:
            title = f"attention of {rows}, {heads} heads of {size}"
            compared(title, attention_runs(rows, heads, size, arguments.dtype, torch), arguments.rounds)


if __name__ == "__main__":
    main()
