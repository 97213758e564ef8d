"""The memory and the work of a training, before its first step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from rekindle._src.capabilities.tuning.batches import BatchPlan
from rekindle._src.capabilities.tuning.sites import TrainedMatrix, trained_matrices
from rekindle._src.capabilities.tuning.step import TrainingShape
from rekindle._src.core import memory, words
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.differentiable import AT_ONCE
from rekindle._src.models.nn.packing import matrix_shape
from rekindle._src.programs.plan import ProgramPlan
from rekindle.errors import OutOfMemory

_ARRAYS = 6  # of the adapter's size: its numbers twice, gradients, two moments, and a copy in host memory
_MEASURED = 5  # products, the quickest of which counts
_INSIDE = 3  # arrays of a layer's widths that are alive at once in its backward pass
KEPT = 512 << 20  # bytes that all layers keep at most for their derivatives, if there is room


class TrainingNeed(NamedTuple):
    """The bytes that a training takes in addition to the open model, and the work of its largest micro-batch."""

    adapter: int
    inputs: int  # of all layers, which are kept for the backward pass
    layer: int  # inside of one layer
    head: int
    kept: int  # of layers' results, for which there is room: they are not computed again in the backward pass
    operations: float  # in the products of a micro-batch, forward, again where results are not kept, and back

    @property
    def total(self) -> int:
        """All that it can't do without."""
        return self.adapter + self.inputs + max(self.layer, self.head)

    def __str__(self) -> str:
        return (
            f"{words.mebibytes(self.total)}: {words.mebibytes(self.adapter)} for the adapter and its optimiser, "
            f"{words.mebibytes(self.inputs)} for the inputs of layers, {words.mebibytes(max(self.layer, self.head))} "
            f"for one layer or the head, and as there is room, {words.mebibytes(self.kept)} for layers' results"
        )


def need_of(
    config: ModelConfig, matrices: Sequence[TrainedMatrix], rank: int, shape: TrainingShape, parameters: int
) -> TrainingNeed:
    """Return the needs of a training in micro-batches of this shape. `parameters` are the model's."""
    tokens = shape.rows * shape.tokens
    widths, results = [0] * config.num_layers, rank * sum(len(matrix.modules) for matrix in matrices)
    for site in sites_of(config).sites:
        layer = int(site.path.split(".")[1])
        experts = config.moe[layer] if site.experts else None
        rows = 1 if experts is None else experts.top_k  # of a token
        widths[layer] += rows * (site.inputs + site.outputs)
        results += rows * site.outputs
    attending = [layer for layer in range(config.num_layers) if config.caches[layer].pages is not None]
    results += config.num_heads * sum(config.pages_of(layer).value_size + 1 for layer in attending)
    attention = 4 * shape.rows * config.num_heads * shape.tokens**2 * _INSIDE
    need = TrainingNeed(
        4 * _ARRAYS * sum(matrix.parameters(rank) for matrix in matrices),
        4 * tokens * config.hidden_size * (config.num_layers + 2),
        4 * tokens * max(widths) * _INSIDE + attention + 2 * AT_ONCE,
        4 * shape.chosen * config.vocab_size * _INSIDE + 2 * AT_ONCE,
        0,
        6.0 * parameters * tokens,
    )
    kept = min(4 * tokens * results, room_of(need))
    return need._replace(kept=kept, operations=need.operations * (1 - kept / (4 * tokens * results) / 3))


def room_of(need: TrainingNeed) -> int:
    """Return the bytes that layers may keep for their derivatives: half of what a training leaves, up to a limit."""
    free = memory.device_available()
    return KEPT if free is None else max(0, min(KEPT, (free - need.total) // 2))


def planned(plan: ProgramPlan, *, rank: int, tokens: int) -> tuple[TrainingNeed, float]:
    """Return the needs of a training on lines of `tokens`, and a step's seconds by a product that is measured here."""
    import jax
    import jax.numpy as jnp

    sizes: dict[str, int] = {}
    for path, leaf in zip(plan.graph.paths, plan.leaves, strict=True):
        layer = ".".join(path.split(".")[:2]) if path.startswith("layers.") else ""
        sizes[layer] = sizes.get(layer, 0) + prod(matrix_shape(leaf))
    largest = max(size for layer, size in sizes.items() if layer)
    shape = BatchPlan.of(largest, plan.model.vocab_size, 1).shape(tokens)
    matrices = trained_matrices(plan.model, "all")
    need = need_of(plan.model, matrices, rank, shape, sum(sizes.values()))
    width = plan.model.hidden_size
    x, matrix = jnp.ones((shape.tokens, width)), jnp.ones((4 * width, width))
    product = jax.jit(lambda x, matrix: jnp.einsum("ni,oi->no", x, matrix, precision="highest"))
    product(x, matrix).block_until_ready()
    times = []
    for _ in range(_MEASURED):
        start = time.perf_counter()
        product(x, matrix).block_until_ready()
        times.append(time.perf_counter() - start)
    return need, need.operations * min(times) / (8.0 * shape.tokens * width * width)


def check_room(need: TrainingNeed, shape: TrainingShape) -> None:
    """Raise OutOfMemory if a training does not fit into the memory that is free."""
    free = memory.device_available()
    if free is not None and need.total > memory.SHARE * free:
        raise OutOfMemory(
            f"Training needs {need}, with {words.count(shape.rows, 'row')} of {shape.tokens} tokens at a time, and "
            f"{words.mebibytes(free)} are free. Pass shorter examples, a smaller rank, or targets=['q_proj', 'v_proj']."
        )
