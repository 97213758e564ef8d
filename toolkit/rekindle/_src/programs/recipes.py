"""The recipe of each program of a session: its function for one device, its arguments, and their layout on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.guides import mask_words
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.models.base import Graph
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.placement import Placement
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs import page_tables, pinned_pages, request_state
from rekindle._src.programs.buckets import FORWARD, GATED, Bucket
from rekindle._src.programs.helpers import ADMIT, COLLECT, GATHER, MEMORY, TABLES
from rekindle._src.programs.keys import Key
from rekindle._src.programs.packing import Layout
from rekindle._src.programs.partitioning import (
    PAGES,
    PAYLOAD,
    POOLED,
    ROWS,
    WEIGHTS,
    DeviceLayout,
    Partitioning,
    Recipe,
)
from rekindle._src.programs.processors import LogitsProcessor
from rekindle._src.programs.step import Scores, StepOutput, make_choice, make_forward, make_gated, make_step
from rekindle_kernels import kernels_for, zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipes:
    """The recipes of one model with one resolved config, from the shapes of programs' operands."""

    model: ModelConfig  # the whole one
    graph: Graph  # of one device's part
    leaves: Sequence[jax.ShapeDtypeStruct]  # of the whole model
    local_kv: paged.KV  # the pages of one device
    kv: paged.KV  # those of all devices together
    state: request_state.RequestState
    config: EngineConfig  # of one data shard
    processors: Sequence[LogitsProcessor]
    parts: Partitioning
    width: int  # pages of the longest sequence
    resident: bool  # page tables stay on the device
    pinned: bool  # pages are transferred through pinned memory of the host

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        graph: Graph,
        leaves: Sequence[Any],
        config: EngineConfig,
        processors: Sequence[LogitsProcessor],
        placement: Placement | None,
    ) -> Recipes:
        """Make the recipes. `leaves` are the whole model's, placed by `placement`; `config` is one data shard's."""
        assert config.max_model_len is not None, "the config is not resolved"
        assert config.page_size is not None, "the config is not resolved"
        assert config.device_pages is not None, "the config is not resolved"
        parts = Partitioning(placement)
        local = graph if placement is None else placement.local
        local_kv = paged.abstract(local.config, config.device_pages, config.page_size, config.kv_dtype)
        width, resident = pages_for(config.max_model_len, config.page_size), page_tables.stay(parts)
        return cls(
            model=model,
            graph=local,
            leaves=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
            local_kv=local_kv,
            kv=parts.pages(local_kv),
            state=request_state.abstract_state(config.max_requests, model.vocab_size, width if resident else None),
            config=config,
            processors=processors,
            parts=parts,
            width=width,
            resident=resident,
            pinned=pinned_pages.used(parts),
        )

    def kernels(self) -> list[str]:
        """Return the native kernels that steps call, by the shapes; none for other implementations and platforms."""
        implementations = {self.config.kernels, self.graph.precision.implementation}
        if not implementations <= {None, "native"} or jax.default_backend() != "cpu":
            return []
        leaves = dict(zip(self.graph.paths, self.leaves, strict=True))
        matrices = {path: leaf for path, leaf in leaves.items() if path.endswith("weight") and len(leaf.shape) > 1}
        pairs = ((leaf, leaves.get(f"{path.removesuffix('weight')}scale")) for path, leaf in matrices.items())
        scaled = [(leaf.dtype.name, scale.dtype.name) for leaf, scale in pairs if scale is not None]
        dtypes = [leaf.dtype.name for leaf in matrices.values()]
        return kernels_for(dtypes, self.kv[0].dtype.name, self.kv[0].head_dim, scaled)

    def layout(self, bucket: Bucket) -> Layout:
        most = self.config.max_requests
        return Layout.of(bucket, max_requests=most, width=self.width, resident=self.resident)

    @property
    def page_size(self) -> int:
        return self.kv[0].page_size

    def processors_of(self, bucket: Bucket) -> Sequence[LogitsProcessor]:
        """Return the logits processors that a program contains."""
        return self.processors if bucket.processed else ()

    def upload(self, layout: Layout) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Return the shapes of the buffers that a step gets from the host."""
        return _ints(layout.ints), _floats(layout.floats)

    def recipe(self, key: Key) -> Recipe:
        """Return the recipe of a program."""
        if isinstance(key, Bucket):
            return self._half(key) if key.part not in ("", GATED) else self._step(key)
        if key == MEMORY:
            return Recipe(lambda: zeros((self.local_kv, self.state)), (), (), (), (PAGES, ROWS))
        if key == ADMIT:
            ints, floats = request_state.admission_sizes(self.width * self.page_size)
            slot = (self.state, _ints(ints), _floats(floats))
            return Recipe(request_state.admit, slot, (0,), (ROWS, ROWS, ROWS), ROWS)
        if key == TABLES:
            rows = _ints(page_tables.PUT * (1 + self.width))
            return Recipe(page_tables.put, (self.state.tables, rows), (0,), (ROWS, ROWS), ROWS)
        ids = _ints(key.pages)
        if key.kind in (GATHER.kind, COLLECT.kind):
            gather = Recipe(paged.gather, (self.kv, ids), (), (PAGES, ROWS), PAYLOAD)
            return gather if key.kind == GATHER.kind else self.parts.whole_everywhere(gather)
        if self.pinned:
            payload = jax.eval_shape(paged.gather, self.kv, ids)
            return Recipe(pinned_pages.scatter, (self.kv, ids, payload), (0,), (PAGES, ROWS, PAYLOAD), PAGES)
        page = jax.eval_shape(paged.gather, self.kv, _ints(1))
        return Recipe(paged.scatter, (self.kv, ids, (page,) * key.pages), (0,), (PAGES, ROWS, PAYLOAD), PAGES)

    def _step(self, key: Bucket) -> Recipe:
        layout = self.layout(key)
        make = make_gated if key.part == GATED else make_step
        step: Any = make(
            self.graph,
            layout,
            self.page_size,
            implementation=self.config.kernels,
            processors=self.processors_of(key),
            pools=key.pools,
        )
        arguments: tuple[Any, ...] = (self.leaves, self.kv, self.state, *self.upload(layout))
        operands: tuple[DeviceLayout, ...] = (WEIGHTS, PAGES, ROWS, ROWS, ROWS)
        if key.part == GATED:
            assert self.parts.placement is None, "no program on a mesh waits for its masks"
            arguments, operands = (*arguments, _ints(2)), (*operands, ROWS)
        results = (PAGES, ROWS, StepOutput._make((ROWS, ROWS, POOLED)))
        return Recipe(step, arguments, (1, 2), operands, results)

    def _half(self, key: Bucket) -> Recipe:
        """Return the recipe of one of the two programs of a guided step."""
        layout = self.layout(key)
        upload = self.upload(layout)
        if key.part == FORWARD:
            kernels = self.config.kernels
            forward = make_forward(self.graph, layout, self.page_size, implementation=kernels, pools=key.pools)
            arguments = (self.leaves, self.kv, self.state.last_token, *upload)
            operands, results = (WEIGHTS, PAGES, ROWS, ROWS, ROWS), (PAGES, ROWS, ROWS, POOLED)
            if not self.resident:
                return Recipe(forward, arguments, (1,), operands, results)
            return Recipe(forward, (*arguments, self.state.tables), (1, 5), (*operands, ROWS), (*results, ROWS))
        vocab_size, precision = self.model.vocab_size, self.graph.precision
        sizes = ((vocab_size, "float32"), (self.model.hidden_size, precision.stream))
        scores = Scores._make(jax.ShapeDtypeStruct((layout.sequences, size), dtype) for size, dtype in sizes)
        masks = jax.ShapeDtypeStruct((layout.sequences, mask_words(vocab_size)), jnp.int32)
        choice = make_choice(
            layout, self.page_size, implementation=precision.implementation, processors=self.processors_of(key)
        )
        return Recipe(choice, (self.state, scores, *upload, masks), (0,), (ROWS,) * 5, (ROWS, ROWS))


def _ints(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)


def _floats(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.float32)
