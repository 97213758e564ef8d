"""Pictures in a step: an encoder's rows in the place of the embeddings of some prompt tokens.

The rows of a step's prompts travel with the step, in operands of one size, so that other pictures compile nothing. A
request brings its rows from its admission on (`core.prompt_rows.PromptRows`). Positions with pages from the cache
need none of them.

Axes: R decode rows, T prefill tokens, M the most prefill tokens of a step, E hidden size, L levels: the beginning of
the stream, and the first layers after which rows of a picture add more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.prompt_rows import PromptRows
from rekindle._src.core.records import Request, Row, StepPlan
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.partitioning import ROWS
from rekindle._src.programs.row_option import Columns, RowOption
from rekindle._src.programs.step_part import Hooks, StepInputs, StepPart


class PictureRows(NamedTuple):
    """The operands of steps with pictures."""

    places: Any  # int32 [M]: the row of each prefill token; -1 where there is none
    rows: Any  # [M, L, E]
    coordinates: Any  # int32 [M, 3]: of each prefill token's position; -1 where they all are the position
    sees: Any  # int32 [M]: the end of each prefill token's picture, where its tokens see each other; else 0


class PictureOption(RowOption["Array | None"]):
    """Pictures of a row. Where ropes have coordinates, they give tokens after pictures another position."""

    option = PromptRows

    def __init__(self, model: ModelConfig) -> None:
        self._turns = turns(model)
        self.ints = int(self._turns)

    def constants(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        use = request.extensions.get(PromptRows)
        assert use is not None, "its option"
        return ((use.offset,) if self._turns else ()), ()

    def in_plan(self, plan: StepPlan) -> bool:
        rows = plan.rows if self._turns else plan.prefill  # rows that decode have positions of their own there
        return any(PromptRows in row.request.extensions for row in rows)

    def unpack(self, columns: Columns) -> Array | None:
        return columns.ints[:, 0] if self._turns else None


def turns(model: ModelConfig) -> bool:
    """True if ropes of the model have several coordinates for each position."""
    return any(rope.sections for rope in model.ropes)


class Pictures(StepPart["Array | None", PictureRows]):
    """The rows of pictures."""

    variant, inside, operand_layout = ProgramVariant.PICTURES, True, ROWS

    def __init__(self, model: ModelConfig, config: ResolvedConfig, dtype: DTypeLike, *, ahead: bool = False) -> None:
        self.warmed = ahead
        self._most, self._dtype = config.max_tokens_per_step, np.dtype(dtype)
        spec = model.pictures  # None: rows come from callers alone
        self._levels, self._size = 1 if spec is None else 1 + spec.levels, model.hidden_size
        self._token = None if spec is None else spec.token
        self._both_ways = spec is not None and spec.both_ways != "no"
        self._turns = turns(model)
        self._operands: PictureRows | None = None

    @property
    def operands(self) -> PictureRows:  # type: ignore[override]
        """The rows of the last prepared step; empty before the first one."""
        if self._operands is None:
            self._operands = self._none()
        return self._operands

    @property
    def operand_shapes(self) -> object:
        return jax.eval_shape(self._none)

    def _none(self) -> PictureRows:
        count = self._most
        rows = aligned((count, self._levels, self._size), self._dtype)
        places, coordinates = np.full(count, -1, np.int32), np.full((count, 3), -1, np.int32)
        return PictureRows(places, rows, coordinates, np.zeros(count, np.int32))

    def free(self) -> None:
        self._operands = None

    def prepare(self, plan: StepPlan, rows: int) -> None:
        operands = self._none()  # steps in flight read the others
        token = count = 0
        for row in plan.prefill:
            use = row.request.extensions.get(PromptRows)
            if use is not None:
                count = self._write(operands, use, row, token, count)
            token += row.length
        self._operands = operands

    def _write(self, operands: PictureRows, use: PromptRows, row: Row, token: int, count: int) -> int:
        """Write the rows of a prompt's tokens, from the `count`-th row on. Return the count after them."""
        start, stop = row.start, row.start + row.length
        for span, rows in zip(use.spans, use.rows, strict=True):
            begin, end = max(start, span.start), min(stop, span.stop)
            if begin < end:
                length = end - begin
                operands.places[token + begin - start : token + end - start] = np.arange(count, count + length)
                operands.sees[token + begin - start : token + end - start] = span.stop if use.whole else 0
                part = rows[:, begin - span.start : end - span.start]
                operands.rows[count : count + length, : len(part)] = np.moveaxis(part, 0, 1)
                operands.rows[count : count + length, len(part) :] = 0
                count += length
        if self._turns and use.coordinates is not None:
            known = use.coordinates[start:stop]
            operands.coordinates[token : token + len(known)] = known
            after = np.arange(start + len(known), stop, dtype=np.int32) + use.offset  # generated before a preemption
            operands.coordinates[token + len(known) : token + row.length] = after[:, None]
        return count

    def hooks(self, inputs: StepInputs, own: Array | None, operands: PictureRows) -> Hooks:
        rows = inputs.decode_rows
        tokens = inputs.tokens.shape[0] - rows
        places = jnp.concatenate([jnp.full(rows, -1, jnp.int32), operands.places[:tokens]])
        index, there = jnp.maximum(places, 0), (places >= 0)[:, None]

        def replaced(x: Array) -> Array:
            with jax.named_scope("pictures"):
                return jnp.where(there, operands.rows[index, 0].astype(x.dtype), x)

        def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
            if site == "embedding":
                return replaced
            if site == "residual" and layer < self._levels - 1:

                def added(x: Array) -> Array:
                    with jax.named_scope("pictures"):
                        return x + jnp.where(there, operands.rows[index, layer + 1].astype(x.dtype), 0)

                return added
            return None

        coordinates = self._coordinates(inputs, own, operands, tokens) if self._turns else None
        embedded = None if self._token is None else jnp.where(places >= 0, self._token, inputs.tokens)
        sees = None
        if self._both_ways and tokens:
            sees = jnp.concatenate([jnp.zeros(rows, jnp.int32), operands.sees[:tokens]])
        return Hooks(listener if tokens else None, coordinates=coordinates, sees=sees, tokens=embedded)

    def _coordinates(self, inputs: StepInputs, own: Array | None, operands: PictureRows, tokens: int) -> Array:
        assert own is not None, "rows of a model with rotating coordinates have an offset"
        rows = inputs.decode_rows
        decoded = inputs.positions[:rows] + own[:rows]
        prefilled = lax.slice_in_dim(operands.coordinates, 0, tokens)
        prefilled = jnp.where(prefilled >= 0, prefilled, inputs.positions[rows:, None])
        return jnp.concatenate([jnp.broadcast_to(decoded[:, None], (rows, 3)), prefilled])
