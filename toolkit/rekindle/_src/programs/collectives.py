"""The time of a step's collectives alone on devices that share a model, measured on these devices.

The sums and the gathering of logits run here as in a step, over arrays of the same widths, with no other work
meanwhile. A step may overlap some of that with other work, or wait longer because one device is late: the profiler
shows that.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from rekindle._src.models.base import Placement
from rekindle._src.models.placement import MeshPlacement
from rekindle._src.models.roles import ALL
from rekindle._src.programs.buckets import prefill_rows

SHORT, LONG, TURNS = 4, 20, 3  # rounds of a run; the difference excludes the time of starting a program
MOST_TOKENS, MOST_ROWS = 256, 8  # larger steps are extrapolated
_SIZES = re.compile(r"r(\d+)t(\d+)")


class LinearCost(NamedTuple):
    """Seconds that grow with a size."""

    first: float  # with a size of 1
    slope: float  # for each further unit

    def seconds(self, size: int) -> float:
        return self.first + self.slope * (size - 1)


class CollectiveTimes(NamedTuple):
    """Seconds of one sum by tokens, of one gathering of logits by rows, and the number of sums in a step."""

    sum: LinearCost
    gather: LinearCost
    sums: int
    small_sums: int  # of one number for each token
    max_requests: int

    def step(self, program: str) -> float:
        """Return the seconds of the collectives of one step in the program of this name."""
        match = _SIZES.match(program)
        if match is None:
            return 0.0
        rows, tokens = map(int, match.groups())
        logits = rows + prefill_rows(tokens, self.max_requests)
        return (
            self.sums * self.sum.seconds(rows + tokens) + self.small_sums * self.sum.first + self.gather.seconds(logits)
        )

    def steps(self, programs: Mapping[str, int]) -> float:
        """Return the seconds of the collectives of these numbers of steps by program."""
        return sum(count * self.step(name) for name, count in programs.items())


def collective_times(placement: Placement, max_requests: int, max_tokens: int) -> CollectiveTimes | None:
    """Return the times on a placement's devices. None for one device, or where other processes have some of them.

    The first call for a mesh and a model's widths compiles four small programs.
    """
    if not isinstance(placement, MeshPlacement) or placement.size == 1 or placement.processes > 1:
        return None
    config = placement.config
    dtype = jnp.dtype(placement.graph.precision.stream).name
    tokens, rows = min(MOST_TOKENS, max_tokens), min(MOST_ROWS, max_requests)
    mesh, vocab = placement.mesh, placement.local.config.vocab_size
    return CollectiveTimes(
        _line(mesh, _summing, max(2, tokens), config.hidden_size, dtype),
        _line(mesh, _gathering, max(2, rows), vocab, "float32"),
        1 + placement.products,
        placement.means,
        max_requests,
    )


@functools.lru_cache(maxsize=32)
def _line(mesh: Any, round_: Callable[[jax.Array], jax.Array], most: int, width: int, dtype: str) -> LinearCost:
    first, last = (_seconds(mesh, round_, size, width, dtype) for size in (1, most))
    return LinearCost(first, max(0.0, last - first) / (most - 1))


def _seconds(mesh: Any, round_: Callable[[jax.Array], jax.Array], size: int, width: int, dtype: str) -> float:
    """Return the seconds of one round, the least of several runs."""

    def rounds(x: jax.Array, count: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, x: round_(x), x)

    whole = PartitionSpec()
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(rounds, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False)
        x = jax.device_put(jnp.ones((size, width), dtype), jax.sharding.NamedSharding(mesh, whole))
        counts = [jax.device_put(jnp.int32(n), jax.sharding.NamedSharding(mesh, whole)) for n in (SHORT, LONG)]
        run = jax.jit(mapped).lower(x, counts[0]).compile()
        jax.block_until_ready(run(x, counts[0]))
        fastest = []
        for count in counts:
            seconds = []
            for _ in range(TURNS):
                start = time.perf_counter()
                jax.block_until_ready(run(x, count))
                seconds.append(time.perf_counter() - start)
            fastest.append(min(seconds))
    return max(0.0, fastest[1] - fastest[0]) / (LONG - SHORT)


def _summing(x: jax.Array) -> jax.Array:
    """Compute a sum of operands that differ from device to device, so that it can't be computed from one of them."""
    devices = lax.psum(1, ALL)
    share = 1 + lax.axis_index(ALL).astype(x.dtype) / (64 * devices)
    return lax.psum(x, ALL) * (share / devices).astype(x.dtype)


def _gathering(x: jax.Array) -> jax.Array:
    """Compute a gathering after which every device continues with another's part."""
    gathered = lax.all_gather(x, ALL, axis=1, tiled=True)
    neighbour = (lax.axis_index(ALL) + 1) % lax.psum(1, ALL)
    return lax.dynamic_slice_in_dim(gathered, neighbour * x.shape[1], x.shape[1], axis=1)
