"""Each native kernel of two source trees, timed in turn: `python native_kernels.py OLD NEW [--rounds 5]`.

A process per tree makes the same calls through what `rekindle_kernels.native` exports. They take turns, and one waits
while the other works, so that what else the machine does hits both. A process can be lucky or not with the memory that
it gets, by a fifth and more, so there are several of each tree. Printed for each call: the median of its best times in
both trees, and the median of the ratios new / old of each turn, with the quarters of the ratios around it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness


def cases() -> dict[str, Callable[[], Any]]:
    """Calls by name. Only what both trees have is imported, and all of it here: the parent process has neither."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import rekindle_kernels
    from rekindle_kernels import AttentionInputs, AttentionOptions, Choice, Wanted, init_pages
    from rekindle_kernels.native import attention, products, sampling

    random = np.random.default_rng(0)
    found: dict[str, Callable[[], Any]] = {}

    def add(name: str, function: Callable[..., Any], *args: Any) -> None:
        compiled = jax.jit(function).lower(*args).compile()
        found[name] = lambda: jax.block_until_ready(compiled(*args))

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32))

    def integers(values: Any) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    width, height = 576, 3072
    for dtype in ("float32", "bfloat16", "float16", "int8"):
        plain = floats(height, width) * (40 if dtype == "int8" else 1)
        weight, scale = plain.astype(dtype), jnp.ones((height,), jnp.float32)
        for rows in (1, 2, 4, 16, 64, 300):
            if products.multiplies(rows, weight, quantize_rows=True):

                def product(x: jax.Array, weight: jax.Array, scale: jax.Array, norm: jax.Array) -> jax.Array:
                    return products.multiply(x, weight, scale, norm=norm, eps=1e-5, gated=True, quantize_rows=True)

                add(f"product {dtype} {rows}", product, floats(rows, width), weight, scale, floats(width))
    for dtype in ("float32", "bfloat16", "int8"):
        kv = init_pages(400, 3, 16, 64, dtype)
        kv = jax.tree.map(
            lambda leaf: (floats(*leaf.shape) * (40 if leaf.dtype == jnp.int8 else 1)).astype(leaf.dtype), kv
        )

        def attend(q: jax.Array, kv: Any, table: jax.Array, lens: jax.Array, ends: jax.Array, rows: int) -> jax.Array:
            prompts = jnp.int32(ends.shape[0] - 1)
            return attention.paged_attention(
                AttentionInputs(q, kv, table, lens, ends, prompts), AttentionOptions(decode_rows=rows, scale=0.125)
            )

        table = integers(random.integers(0, 400, (8, 64)))
        for rows in (1, 8):
            lens, ends = integers([1000] * rows), integers([0])
            decode = jax.tree_util.Partial(attend, rows=rows)
            add(f"decode {dtype} {rows} x 1000", decode, floats(rows, 9, 64), kv, table[:rows], lens, ends)
        lens, ends = integers([512, 700]), integers([0, 512, 600])
        prefill = jax.tree_util.Partial(attend, rows=0)
        add(f"prefill {dtype} 512 + 88", prefill, floats(600, 9, 64), kv, table[:2], lens, ends)
        if dtype != "int8":
            ids = integers(np.arange(512))
            add(f"write {dtype} 512", attention.write, kv, floats(512, 3, 64), floats(512, 3, 64), ids // 16, ids % 16)
    qkv, cos = floats(512, 15, 64), floats(512, 32)
    add("rope 512", jax.tree_util.Partial(attention.split, heads=9), qkv, qkv, cos, cos)
    add("norm 512 x 576", lambda x, weight: products.rms_norm(x, weight, 1e-5), floats(512, 576), floats(576))
    logits = floats(4, 49152)
    add("argmax 4 x 49152", sampling.largest_index, logits)

    def draw(logits: jax.Array) -> jax.Array:
        ones, seed = jnp.ones((4,), jnp.float32), jnp.ones((4, 2), jnp.uint32)
        choice = Choice(ones, integers([40] * 4), 0.9 * ones, 0 * ones, seed, integers([1, 2, 3, 4]))
        return rekindle_kernels.draw(logits, choice, Wanted(*[jnp.asarray(True)] * 4), implementation="native")

    add("sample 4 x 49152", draw, logits)
    return found


def serve(seconds: float, one_core: bool) -> None:
    """A tree's process: the names of its cases, then for each name that is asked for the seconds of one call."""
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    clock = time.process_time if one_core else time.perf_counter
    found = cases()
    print(*found, sep="\t", flush=True)
    for line in sys.stdin:
        call = found[line.strip()]
        call()
        times: list[float] = []
        began = clock()
        while clock() - began < seconds or len(times) < 3:
            start = clock()
            call()
            times.append(clock() - start)
        print(min(times), flush=True)


class Tree:
    """The process of one source tree."""

    def __init__(self, root: Path, seconds: float, one_core: bool) -> None:
        paths = [*(str(root / name) for name in ("toolkit", "kernels")), str(Path(__file__).parent)]
        code = f"import sys; sys.path[:0] = {paths!r}"
        code += f"; import native_kernels; native_kernels.serve({seconds}, {one_core})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.names = self._answer().split("\t")

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise SystemExit(f"the process of a tree ended with {self._process.wait()}")
        return answer

    def time(self, name: str) -> float:
        """The best time of a call in this turn, in seconds."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._answer())


def main() -> None:
    options = harness.options(
        __doc__, "old new", old=Path, new=Path, rounds=(5, "turns of each process"),
        processes=(4, "of each tree, one after another"), seconds=(0.05, "of each turn"), one_core=False,
        only=("", "cases that begin so"),
    )  # fmt: skip
    turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.processes):
        both = (Tree(root.resolve(), options.seconds, options.one_core) for root in (options.old, options.new))
        with next(both) as old, next(both) as new:
            for name in old.names:
                if name in new.names and name.startswith(options.only):
                    turns[name] += [(old.time(name), new.time(name)) for _ in range(options.rounds)]
    print(f"{'microseconds':28}{'old':>10}{'new':>10}{'new/old':>10}{'quarters':>16}")
    for name, times in turns.items():
        low, middle, high = statistics.quantiles([after / before for before, after in times], n=4)
        before, after = (1e6 * statistics.median(side) for side in zip(*times, strict=True))
        print(f"{name:28}{before:10.0f}{after:10.0f}{middle:10.3f}{low:9.3f}-{high:.3f}", flush=True)


if __name__ == "__main__":
    main()
