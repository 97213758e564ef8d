"""The recipe of each program of a session: its function for one device, its arguments, and their layout on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.models.base import Graph, Placement, ShapeLike, merge
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn.packing import is_packed
from rekindle._src.programs import host_pages, packing, request_state
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import (
    ADMIT,
    COLLECT,
    COPY,
    GATHER,
    LENS,
    MEMORY,
    TABLES,
    Bucket,
    Helper,
    Key,
    StepSpan,
)
from rekindle._src.programs.features import Features
from rekindle._src.programs.packing import Layout
from rekindle._src.programs.partitioning import PAGES, PAYLOAD, ROWS, WEIGHTS, WHOLE, DeviceLayout, Partitioning, Recipe
from rekindle._src.programs.repeated import repeated, repeats
from rekindle._src.programs.side_caches import DevicePlan, side_caches, slots_of
from rekindle._src.programs.step import ChoiceInputs, StepOutput, make_choice, make_forward, make_step
from rekindle_kernels import LayerKV, current_platform, int4, kernels_for, zeros

# Options of XLA:CPU for steps with native attention and products: one thread does half of the work that two share
# by default (jax 0.10, Zen 3, six layers: 0.4 s instead of 0.9 for one token, 1.4 instead of 1.9 for 128), and steps
# take as long. Parts of level 1 would save a fifth of a second in the closing of drawn tokens and nothing elsewhere,
# and sum in another order. The program that copies pages takes a hundred times longer with these options.
LEAN: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": "1"}
# One graph per step on a GPU: its conditionals and loops run on the device, inside the CUDA graph of its kernels. By
# default XLA leaves loops, and conditionals around them, out of its graphs: the host then reads their conditions, and
# waits for the device within each step, twice to four times. A step of 32 layers has some 500 kernels; the host is
# ahead of the device only while it never waits. Compiling for an H100 shows that the options make one graph
# (tests/accelerator/test_steps.py). Where the driver is older than 12.3, XLA leaves conditions to the host.
# These are XLA's defaults, and WHILE; the option replaces them all.
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
# Parts serve a GPU's first seconds: their matrix products are those of its library, which compiles no Triton kernel for
# each shape and times no candidates on the device. Whole programs replace them, with the tiles that were the fastest.
PARTS_ON_GPU: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": CAPTURED, "xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "0",
}  # fmt: skip


def compiler_options(platform: str | None = None) -> dict[str, str | bool] | None:
    """Return XLA's options for programs on this platform; None for its own defaults."""
    return {"xla_gpu_enable_command_buffer": CAPTURED} if (platform or current_platform()) == "gpu" else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipes:
    """The recipes of one model with one resolved config, from the shapes of programs' operands."""

    model: ModelConfig  # the whole one
    graph: Graph  # of one device's part
    leaves: Sequence[jax.ShapeDtypeStruct]  # of the whole model
    sides: tuple[DevicePlan, ...]
    local_kv: paged.KV  # the pages of one device
    kv: paged.KV  # of all devices together
    state: request_state.RequestState  # without the features' own parts
    own: tuple[object, ...]  # of each feature that has slots of its own
    config: ResolvedConfig  # of one data shard
    features: Features
    parts: Partitioning
    width: int  # pages of the longest sequence
    resident: bool  # page tables stay on the device
    pinned: bool  # pages are transferred through pinned memory of the host

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        graph: Graph,
        leaves: Sequence[ShapeLike],
        config: ResolvedConfig,
        features: Features,
        placement: Placement,
        *,
        keeps_hidden: bool,
    ) -> Recipes:
        """Make the recipes. `leaves` are the whole model's, placed by `placement`; `config` is one data shard's. The
        state has hidden states, or the inputs of layers that a feature reads, if it `keeps_hidden`."""
        parts, local = Partitioning.of(placement), placement.local_graph(graph)
        sides = side_caches(model, config, placement)
        local_kv = paged.abstract(
            local.config,
            config.device_pages,
            config.page_size,
            config.kv_dtype,
            slots_of(sides),
        )
        width, resident = pages_for(config.max_model_len, config.page_size), packing.tables_stay(parts)
        return cls(
            model=model,
            graph=local,
            leaves=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
            sides=sides,
            local_kv=local_kv,
            kv=parts.pages(local_kv),
            state=request_state.abstract_state(
                config.max_requests,
                model.vocab_size,
                width if resident else None,
                (model.hidden_size * max(1, len(features.streams)), graph.precision.stream) if keeps_hidden else None,
            ),
            own=request_state.own_parts(config.max_requests, features.slots),
            config=config,
            features=features,
            parts=parts,
            width=width,
            resident=resident,
            pinned=host_pages.uses_pinned(parts),
        )

    def kernels(self) -> list[str]:
        """Return the native kernels that steps call, by the shapes; empty for other implementations and platforms."""
        implementations = {self.config.kernels, self.graph.precision.implementation}
        if not implementations <= {None, "native"} or current_platform() != "cpu":
            return []
        leaves = dict(zip(self.graph.paths, self.leaves, strict=True))
        matrices = {path: leaf for path, leaf in leaves.items() if path.endswith("weight") and len(leaf.shape) > 1}
        pairs = ((leaf, leaves.get(f"{path.removesuffix('weight')}scale")) for path, leaf in matrices.items())
        scaled = [
            (leaf.dtype.name, scale.dtype.name, int4.group_of(leaf, scale) if is_packed(leaf) else 0)
            for leaf, scale in pairs
            if scale is not None
        ]
        dtypes = [self.graph.precision.value_dtype(leaf.dtype).name for leaf in matrices.values()]
        recurrent = any(layer.states for layer in self.local_kv)
        pages = self._pages.dtype.name
        bounded = self._pages.bounds is not None
        sizes = self._head_sizes
        return kernels_for(dtypes, pages, sizes, scaled, self.features.matrices, recurrent, bounded)

    @functools.cached_property
    def step_options(self) -> Mapping[str, str | bool]:
        """XLA's options for all steps of a session and for their parts.

        Options decide in which order XLA adds and where it rounds: with others for some programs, a text would depend
        on when they were compiled. XLA attends to latent pages, and prompts take 1.4 times as long with `LEAN`.
        """
        latent = any(pages.latent for pages in self.graph.config.kinds_of_pages)
        return LEAN if self.kernels() and not latent else {}

    @functools.cached_property
    def part_options(self) -> Mapping[str, str | bool]:
        """XLA's options for parts of steps. On GPUs the library computes their products: timing decides there how
        whole programs add."""
        return PARTS_ON_GPU if current_platform() == "gpu" else self.step_options

    @property
    def compiles_slowly(self) -> bool:
        """True if a first text would wait for whole programs much longer than for their parts: on GPUs, and on CPUs
        where native kernels serve."""
        return current_platform() == "gpu" or bool(self.kernels())

    @functools.cached_property
    def repeats(self) -> bool:
        """True if the session has programs that repeat decode steps."""
        plain = not self.sides and not self.parts.divided and not self.parts.multi_process
        return plain and not self.config.deterministic and repeats(self.leaves)

    def layout(self, bucket: Bucket) -> Layout:
        most, features = self.config.max_requests, self.features
        return Layout.of(bucket, max_requests=most, width=self.width, resident=self.resident, features=features)

    @functools.cached_property
    def page_size(self) -> int:
        return self._pages.page_size

    @property
    def _pages(self) -> LayerKV:
        """The pages of the first layer that has some."""
        return paged.pages_of(self.kv)[0]

    @property
    def _head_sizes(self) -> list[int]:
        """The sizes of heads of the layers' pages."""
        return list(dict.fromkeys(layer.head_dim for layer in paged.pages_of(self.kv)))

    def _layouts(self, key: Bucket) -> tuple[Any, ...]:
        """Return the layouts of features' operands."""
        return self.features.operand_layouts(key.variants)

    def _operands(self, key: Bucket) -> tuple[Any, ...]:
        """Return the shapes of features' operands."""
        return self.features.operand_shapes(key.variants)

    def state_in(self, key: Bucket) -> request_state.RequestState:
        """Return the shapes of the state that a step takes and returns."""
        return self._whole_state if self.features.keeps_own(key.variants) else self.state

    @property
    def _whole_state(self) -> request_state.RequestState:
        return self.state._replace(own=self.own)

    def upload(self, layout: Layout) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Return the shapes of the buffers that a step gets from the host."""
        return _ints(layout.ints), _floats(layout.floats)

    def recipe(self, key: Key) -> Recipe:
        """Return the recipe of a program."""
        if isinstance(key, Bucket):
            return self._half(key) if key.span in (StepSpan.FORWARD, StepSpan.CHOICE) else self._step(key)
        if key == MEMORY:
            return Recipe(lambda: zeros((self.local_kv, self.state, self.own)), (), (), (), (PAGES, ROWS, ROWS))
        if key == ADMIT:
            own = self.features.slots
            ints, floats = request_state.admission_sizes(self.width * self.page_size, own)
            slot = self._whole_state, _ints(ints), _floats(floats)
            return Recipe(functools.partial(request_state.admit, own=own), slot, (0,), (ROWS, ROWS, ROWS), ROWS)
        if key == TABLES:
            rows = _ints(packing.PUT * (1 + self.width))
            return Recipe(packing.put_tables, (self.state.tables, rows), (0,), (ROWS, ROWS), ROWS)
        if key == LENS:
            rows = jax.ShapeDtypeStruct((key.pages, self.model.hidden_size), self.graph.precision.stream)
            return Recipe(self._lens, (self.leaves, rows), (), (WEIGHTS, WHOLE), WHOLE)
        ids = _ints(key.pages)
        if key == COPY:
            return Recipe(paged.copy, (self.kv, ids, ids), (0,), (PAGES, ROWS, ROWS), PAGES)
        for side in self.sides:
            if key == side.read_out:
                return Recipe(side.gather, (self.kv, ids), (), (PAGES, ROWS), side.divided)
            if key == side.fill:
                return self._fill(key, side.gather, side.scatter, side.divided, pinned=self.pinned and side.pinned)
        if key.kind in (GATHER.kind, COLLECT.kind):
            gather = Recipe(paged.gather, (self.kv, ids), (), (PAGES, ROWS), PAYLOAD)
            return self.parts.whole_everywhere(gather) if key.kind == COLLECT.kind else gather
        return self._fill(key, paged.gather, paged.scatter, PAYLOAD, pinned=self.pinned)

    def _fill(
        self,
        key: Helper,
        gather: Callable[..., paged.Payload],
        scatter: Callable[..., paged.KV],
        divided: DeviceLayout,
        *,
        pinned: bool,
    ) -> Recipe:
        """Return the recipe that fills what `gather` reads out, as `scatter` does."""
        ids = _ints(key.pages)
        if pinned:
            payload = jax.eval_shape(gather, self.kv, ids)
            join = functools.partial(host_pages.scatter_whole, scatter=scatter)
            return Recipe(join, (self.kv, ids, payload), (0,), (PAGES, ROWS, divided), PAGES)
        page = jax.eval_shape(gather, self.kv, _ints(1))
        return Recipe(scatter, (self.kv, ids, (page,) * key.pages), (0,), (PAGES, ROWS, divided), PAGES)

    def _lens(self, leaves: Sequence[Any], rows: jax.Array) -> jax.Array:
        """Return the logits that the head makes of rows of the residual stream."""
        model = merge(self.graph, leaves)
        return model.logits(model.end(rows))

    def _step(self, key: Bucket) -> Recipe:
        layout = self.layout(key)
        step = make_step(self.graph, layout, self.page_size, implementation=self.config.kernels)
        if key.span is StepSpan.REPEATED:
            step = repeated(step, layout)
        arguments: tuple[Any, ...] = (
            self.leaves, self.kv, self.state_in(key), *self.upload(layout), self._operands(key)
        )  # fmt: skip
        operands: tuple[Any, ...] = (WEIGHTS, PAGES, ROWS, ROWS, ROWS, self._layouts(key))
        if key.span is StepSpan.GATED:
            assert not self.parts.divided, "no program on a mesh waits for an operand"
            arguments, operands = (*arguments, _ints(2)), (*operands, ROWS)
        results = (PAGES, ROWS, StepOutput._make((ROWS, self.features.output_layouts(key.variants))))
        return Recipe(step, arguments, (1, 2), operands, results)

    def _half(self, key: Bucket) -> Recipe:
        """Return the recipe of one of the two programs of a late step."""
        layout = self.layout(key)
        upload = self.upload(layout)
        if key.span is StepSpan.FORWARD:
            forward = make_forward(self.graph, layout, self.page_size, implementation=self.config.kernels)
            arguments = (self.leaves, self.kv, self.state.last_token, *upload, self._operands(key))
            operands: tuple[Any, ...] = (WEIGHTS, PAGES, ROWS, ROWS, ROWS, self._layouts(key))
            results: tuple[Any, ...] = (PAGES, ROWS, self.features.output_layouts(key.variants))
            if not self.resident:
                return Recipe(forward, arguments, (1,), operands, results)
            return Recipe(forward, (*arguments, self.state.tables), (1, 6), (*operands, ROWS), (*results, ROWS))
        vocab_size, precision = self.model.vocab_size, self.graph.precision
        sizes = ((vocab_size, "float32"), (self.model.hidden_size, precision.stream))
        arrays: list[Any] = [jax.ShapeDtypeStruct((layout.sequences, size), dtype) for size, dtype in sizes]
        logits, last = arrays
        scores = ChoiceInputs(logits, last, (last,) * len(self.features.streams))
        operand = jax.ShapeDtypeStruct((layout.sequences, self.features.late.operand_width(vocab_size)), jnp.int32)
        choice = make_choice(layout, self.page_size, implementation=precision.implementation)
        return Recipe(choice, (self.state_in(key), scores, *upload, operand), (0,), (ROWS,) * 5, (ROWS, ROWS))


def _ints(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)


def _floats(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.float32)
