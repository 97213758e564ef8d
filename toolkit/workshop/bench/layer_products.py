"""The products of a model's layers, as prompts have them: `python layer_products.py [OLD] [--rows 128 512]`.

Every layer has weights of its own, so that they come from memory as in a model. Printed are milliseconds of processor
time of one core and GFLOP/s, the least of many runs. With OLD, another source tree, processes of it and of this one
take turns, and the ratio is old / new. `REKINDLE_NATIVE_LEVEL` chooses a lesser processor's kernels.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness


class Shape(NamedTuple):
    """A decoder layer's four products."""

    hidden: int
    attention: int  # outputs of queries, keys and values
    height: int  # of the MLP
    layers: int  # fewer than the model has, where that is enough

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each product."""
        E, M = self.hidden, self.height
        return (self.attention, E), (E, E), (2 * M, E), (E, M)


SHAPES = {"135m": Shape(576, 960, 1536, 15), "1b": Shape(2048, 3072, 8192, 3)}
FORMS = ["bfloat16", "int8", "int4-64", "int4-32"]


def matrix(form: str, outputs: int, inputs: int) -> tuple[Any, Any]:
    """Return a random weight and its scales; None where it has none."""
    import jax.numpy as jnp
    import numpy as np

    from rekindle_kernels import int4

    random = np.random.default_rng(outputs)
    kind, _, group = form.partition("-")
    if kind == "int4":
        weight = random.integers(0, 256, int4.weight_shape((outputs, inputs)), np.uint8)
        return jnp.asarray(weight), jnp.full(int4.scale_shape((outputs, inputs), int(group)), 0.01, jnp.float16)
    if kind == "int8":
        integers = random.integers(-127, 128, (outputs, inputs), np.int8)
        return jnp.asarray(integers), jnp.full((outputs,), 1e-3, jnp.float32)
    return jnp.asarray(random.standard_normal((outputs, inputs), np.float32)).astype(kind), None


def measure(shape: str, rows: list[int], forms: list[str], seconds: float) -> dict[str, float]:
    """Return the seconds of all layers by form and rows."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA starts its threads
    import jax
    import jax.numpy as jnp

    from rekindle_kernels import LinearOptions, linear

    model, found = Shape(*SHAPES[shape]), {}
    for form in forms:
        quantize = None if form == "bfloat16" else form.partition("-")[0]
        product = partial(linear, dtype=jnp.float32)
        plain, gated = (LinearOptions(quantize=quantize, gate=gate, eps=1e-5) for gate in (None, "silu"))
        layers = [[matrix(form, *size) for size in model.matrices] for _ in range(model.layers)]

        def forward(
            x: Any, layers: Any, norm: Any, product: Any = product, plain: Any = plain, gated: Any = gated
        ) -> Any:
            for qkv, out, up, down in layers:
                y = product(x, qkv[0], scale=qkv[1], norm=norm, options=plain)[:, : x.shape[1]]
                x = product(y, out[0], scale=out[1], residual=x, options=plain)
                y = product(x, up[0], scale=up[1], norm=norm, options=gated)
                x = product(y, down[0], scale=down[1], residual=x, options=plain)
            return x

        norm = jnp.ones((model.hidden,), jnp.float32)
        for count in rows:
            x = jnp.asarray(jax.random.normal(jax.random.key(count), (count, model.hidden)))
            compiled = jax.jit(forward).lower(x, layers, norm).compile()
            jax.block_until_ready(compiled(x, layers, norm))
            times: list[float] = []
            while sum(times) < seconds:
                start = time.process_time()
                jax.block_until_ready(compiled(x, layers, norm))
                times.append(time.process_time() - start)
            found[f"{form} {count}"] = min(times)
    return found


def main() -> None:
    options = harness.options(
        __doc__, "old", old=("", "another source tree"), shapes=(list(SHAPES), "of models"),
        forms=(FORMS, "of weights"), rows=([1, 4, 16, 128, 512], "of a step"), rounds=(5, "processes of each tree"),
        seconds=(0.5, "of each case"),
    )  # fmt: skip
    roots = [*([Path(options.old).resolve()] if options.old else []), harness.ROOT]
    harness.table("shape", "weights, rows", *(["old ms", "ratio"] if options.old else []), "ms", "GFLOP/s")
    for shape in options.shapes:
        model = SHAPES[shape]
        work = 2 * model.layers * sum(outputs * inputs for outputs, inputs in model.matrices)
        times: dict[Path, list[dict[str, float]]] = {root: [] for root in roots}
        for _, root in harness.turns(roots, options.rounds, warm_up=0):
            times[root].append(harness.child(measure, shape, options.rows, options.forms, options.seconds, root=root))
        for form, count in itertools.product(options.forms, options.rows):
            name = f"{form} {count}"
            each = [[figures[name] for figures in times[root]] for root in roots]
            least = [min(figures) for figures in each]
            before = []
            if options.old:
                before = [f"{1e3 * least[0]:.2f}", f"{statistics.median(harness.ratios(*each)):.3f}"]
            cells = [shape, name.replace(" ", ", "), *before, f"{1e3 * least[-1]:.2f}"]
            print(f"| {' | '.join(cells)} | {work * count / least[-1] / 1e9:.0f} |", flush=True)


if __name__ == "__main__":
    main()
