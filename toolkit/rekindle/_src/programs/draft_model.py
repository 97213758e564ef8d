"""The programs of a small model that drafts tokens: one that computes tokens of a text, and one that drafts.

The small model has pages of its own, as many as the model, and finds those of a request by the same page table. So a
request needs no further page, and pages that requests share are shared here, too. On a mesh each device has all of the
small model and of its pages, and computes the same.

A call drafts for all rows, up to `DRAFTS` tokens each. A row brings the last one or two tokens of its text: after a
step in which all drafts were accepted, the small model has seen neither the last of them nor the token after it. They
are rows of their own; then each drafted token is the input of the next row. Tokens are drawn with the noise of the
request at their positions, so that the model is likely to draw the same ones.

Axes: N rows, T tokens, W pages of the longest sequence, V vocabulary of the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import DraftTask, IntArray
from rekindle._src.core.sampling import Sampling
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.models.base import Graph, merge
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import SMALLEST_ROWS, Helper
from rekindle._src.programs.feature import RowFlag, branch, drawing_flags
from rekindle._src.programs.packing import DRAWING, choice_of, drawing_floats, drawing_ints
from rekindle._src.programs.partitioning import ROWS, WHOLE, Recipe
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.sampling import LogitShaping, Shaping, choose, shape
from rekindle_kernels import Choice, greedy, zeros

DRAFTS = 7  # tokens of a row, at most
FILLS = 16, 256  # tokens of a call that drafts none
_ROWS_STEP = 4  # sizes of calls: 1, 4, 16, …
_HEAD, _COLUMNS = 3, 7
_SHAPING = LogitShaping()
_MORE = 3  # columns of rows whose logits are shaped: prompt length, flags, and tokens that `min_tokens` lacks

Ints = TypeVar("Ints", IntArray, Array)


class DraftShapes(NamedTuple):
    """The model that drafts for a session with weights of its own, as its programs see it."""

    graph: Graph
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def assists(self) -> bool:
        """True if it reads the pages and the hidden states of the session's model, and has no pages."""
        return self.graph.config.assists is not None

    def facts(self) -> list[object]:
        """Return all that its programs depend on."""
        leaves = zip(self.graph.paths, self.leaves, strict=True)
        return [self.graph.config.digest(), [(path, leaf.shape, str(leaf.dtype)) for path, leaf in leaves]]


def page_bytes(graph: Graph, config: EngineConfig) -> int:
    """Return the bytes of one of its pages, over all of its layers; 0 without any. The config is resolved."""
    assert config.page_size is not None, "resolved"
    if graph.config.assists is not None:
        return 0
    return paged.page_bytes(graph.config, config.page_size, config.kv_dtype)


def row_sizes(most: int) -> tuple[int, ...]:
    """Return for how many rows there is a program, the fewest first."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size *= _ROWS_STEP
    return (*sizes, most)


@functools.cache
def _neutral(shaped: bool) -> np.ndarray:
    """Return the floats of a row without a task."""
    return np.array([*drawing_floats(Sampling()), *(_SHAPING.neutral if shaped else ())], np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class DraftLayout:
    """The buffers of a call that drafts for `rows`, on the host and on the device."""

    rows: int
    width: int  # pages of the longest sequence
    tables: int = 1  # page tables of a row
    shaped: bool = False  # logits get bias and penalties, which the model's request state has

    @property
    def columns(self) -> int:
        """Integers of a row."""
        return _COLUMNS + _MORE * self.shaped

    @property
    def ints(self) -> int:
        return _HEAD + self.rows * (self.columns + self.tables * self.width)

    @property
    def floats(self) -> int:
        return self.rows * len(_neutral(self.shaped))

    def sections(self, ints: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the parts of an integer buffer: steps, used rows and flags; columns of the rows; page tables."""
        end = _HEAD + self.rows * self.columns
        tables = ints[end:].reshape(self.tables, self.rows, self.width)
        return ints[:_HEAD], ints[_HEAD:end].reshape(self.rows, self.columns), tables

    def pack(self, tasks: Sequence[DraftTask], own: Sequence[int], others: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the buffers of a call for tasks with drafts; all page tables but the first are empty.

        `own` are the first columns of the tasks' rows, and `others` is that of the rows without a task.
        """
        ints, floats = np.zeros(self.ints, np.int32), np.tile(_neutral(self.shaped), (self.rows, 1))
        head, columns, tables = self.sections(ints)
        columns[:, 0], flags = others, 0
        for place, (task, first) in enumerate(zip(tasks, own, strict=True)):
            flags |= drawing_flags(task.request.sampling)
            columns[place, :_COLUMNS] = first, *draft_columns(task)
            floats[place, :DRAWING] = drawing_floats(task.request.sampling)
            if self.shaped:
                columns[place, _COLUMNS] = task.request.prompt_length
            if self.shaped and task.request.sampling.shaped:
                shaped, missing = _SHAPING.flags(task.request), task.request.sampling.min_tokens - task.row.generated
                columns[place, _COLUMNS + 1 :] = shaped, max(0, missing)
                floats[place, DRAWING:] = _SHAPING.constants(task.request)[1]
                flags |= shaped | (int(RowFlag.BARRED) if missing > 0 else 0)
            tables[0, place, : len(task.pages)] = task.pages[: self.width]
        head[:] = max(len(task.drafts) for task in tasks), len(tasks), flags
        return ints, floats.reshape(-1)


def draft_columns(task: DraftTask) -> tuple[int, ...]:
    """Return the integers of a row that drafts: its last token, the length of its text with it, how many it drafts,
    top_k, and the halves of its seed."""
    end = task.start + len(task.tokens)
    return int(task.tokens[-1]), end, len(task.drafts), *drawing_ints(task.request.sampling)


class DraftShaping(NamedTuple):
    """The bias, the penalties and the masks of ends of rows that draft, as the step that checks the drafts has them."""

    own: Shaping  # without `barred`
    missing: Array  # [N]: tokens before which ends are masked
    slots: Array  # [N]
    state: RequestState

    @classmethod
    def of(cls, layout: DraftLayout, columns: Array, floats: Array, state: RequestState) -> DraftShaping:
        """Return it for rows whose first columns are their slots."""
        flags, missing = columns[:, _COLUMNS + 1], columns[:, _COLUMNS + 2]
        own = floats.reshape(layout.rows, -1)[:, DRAWING:]
        biased = (flags & RowFlag.BIASED) != 0
        return cls(Shaping(own[:, 0], own[:, 1], own[:, 2], biased, biased), missing, columns[:, 0], state)

    def at(self, place: Array, drafts: Array) -> Callable[[Array], Array]:
        """Return a function of the logits of the drafts at a `place`, after those before it among `drafts` [N, D]."""

        def shaped(logits: Array) -> Array:
            rows, places = jnp.arange(drafts.shape[0])[:, None], lax.iota(jnp.int32, drafts.shape[1])
            history = self.state.history[self.slots].at[rows, drafts].add(jnp.where(places < place, 2, 0))
            own = self.own._replace(barred=place < self.missing)
            return shape(logits, own, self.state, self.slots, history)

        return shaped


def prompt_lengths(columns: Array) -> Array:
    """Return the prompt lengths [N] of rows whose logits may be shaped."""
    return columns[:, _COLUMNS]


class DraftChoice(NamedTuple):
    """How a call chooses the tokens that it drafts, of logits [N, V]."""

    choice: Choice  # of the rows, at the lengths of their texts
    flags: Array  # of all rows together
    vocab_size: int  # the model's
    implementation: str | None

    @classmethod
    def of(
        cls, columns: Array, floats: Array, flags: Array, vocab_size: int, implementation: str | None
    ) -> DraftChoice:
        """Return it for rows with `draft_columns` and the floats of their sampling."""
        choice = choice_of(floats.reshape(len(columns), -1), columns[:, 3], columns[:, 4:6], columns[:, 1])
        return cls(choice, flags, vocab_size, implementation)

    def tokens(
        self,
        logits: Array,
        lengths: Array,
        shaped: Callable[[Array], Array] | None = None,
        ids: Array | None = None,
    ) -> Array:
        """Return tokens [N], drawn with the noise of the positions `lengths` [N] from `shaped` logits, if any are.

        The logits [N, D] are those of the tokens `ids` [D], or of the first D.
        """
        if ids is not None:
            ids, few = jnp.clip(ids, 0, self.vocab_size - 1), logits
            others = int(RowFlag.DRAWS) | (0 if shaped is None else int(LogitShaping.changing))
            return branch(
                self.flags & others == 0,
                lambda: ids[greedy(few, implementation=self.implementation)],
                lambda: self.tokens(_spread(few, ids, self.vocab_size), lengths, shaped),
            )
        fitted, at = _fitted(logits, self.vocab_size), self.choice._replace(position=lengths)

        def chosen(logits: Array) -> Array:
            return branch(
                self.flags & RowFlag.DRAWS == 0,
                lambda: greedy(logits, implementation=self.implementation),
                lambda: choose(logits, at, self.flags, implementation=self.implementation),
            )

        if shaped is None:
            return chosen(fitted)
        return branch(self.flags & LogitShaping.changing != 0, lambda: chosen(shaped(fitted)), lambda: chosen(fitted))


def pack_fill(tokens: int, width: int, task: DraftTask) -> np.ndarray:
    """Return the buffer of a call that computes up to so many tokens of a text."""
    ints = np.zeros(2 + tokens + width, np.int32)
    count = len(task.tokens)
    ints[:2] = count, task.start + count
    ints[2 : 2 + count] = task.tokens
    ints[2 + tokens :][: len(task.pages)] = task.pages[:width]
    return ints


@dataclasses.dataclass(frozen=True)
class DraftRecipes:
    """The recipes of the small model's programs."""

    shapes: DraftShapes
    config: EngineConfig  # resolved
    vocab_size: int  # the model's

    @functools.cached_property
    def kv(self) -> paged.KV:
        """The shapes of its pages."""
        assert self.config.device_pages is not None, "resolved"
        assert self.config.page_size is not None, "resolved"
        return paged.abstract(
            self.shapes.graph.config, self.config.device_pages, self.config.page_size, self.config.kv_dtype
        )

    @property
    def width(self) -> int:
        assert self.config.max_model_len is not None, "resolved"
        assert self.config.page_size is not None, "resolved"
        return pages_for(self.config.max_model_len, self.config.page_size)

    @functools.cached_property
    def memory(self) -> Helper:
        """The program that makes its pages."""
        return Helper("draft-memory")

    @functools.cached_property
    def fills(self) -> dict[int, Helper]:
        """The programs that compute tokens, by how many, the fewest first."""
        return {tokens: Helper(f"draft-prompt{tokens}") for tokens in FILLS}

    @functools.cached_property
    def drafts(self) -> dict[int, Helper]:
        """The programs that draft, by their rows, the fewest first."""
        return {rows: Helper(f"draft{rows}") for rows in row_sizes(self.config.max_requests)}

    @property
    def keys(self) -> tuple[Helper, ...]:
        return (self.memory, *self.fills.values(), *self.drafts.values())

    def pack(self, rows: int, tasks: Sequence[DraftTask]) -> tuple[np.ndarray, np.ndarray]:
        """Return the buffers of the program for so many rows; tasks bring one or two tokens and have drafts."""
        before = [int(task.tokens[-2]) if len(task.tokens) > 1 else -1 for task in tasks]
        return DraftLayout(rows, self.width).pack(tasks, before)

    def recipe(self, key: Helper) -> Recipe:
        """Return the recipe of one of `keys`."""
        if key == self.memory:
            return Recipe(lambda: zeros(self.kv), (), (), (), ROWS)
        for tokens, name in self.fills.items():
            if key == name:
                ints = jax.ShapeDtypeStruct((2 + tokens + self.width,), jnp.int32)
                fill = functools.partial(self._fill, tokens)
                return Recipe(fill, (self.shapes.leaves, self.kv, ints), (1,), (WHOLE, ROWS, ROWS), ROWS)
        layout = DraftLayout(next(rows for rows, name in self.drafts.items() if name == key), self.width)
        ints = jax.ShapeDtypeStruct((layout.ints,), jnp.int32)
        floats = jax.ShapeDtypeStruct((layout.floats,), jnp.float32)
        draft = functools.partial(self._draft, layout)
        arguments = (self.shapes.leaves, self.kv, ints, floats)
        return Recipe(draft, arguments, (1,), (WHOLE, ROWS, ROWS, ROWS), (ROWS, ROWS))

    def _fill(self, most: int, leaves: Sequence[Array], kv: paged.KV, ints: Array) -> paged.KV:
        """Compute the entries of a text's tokens. Nothing else is read of it, so that nothing else is computed."""
        count, end, tokens, pages = ints[0], ints[1], ints[2 : 2 + most], ints[2 + most :]
        # As in steps, rows of one token come first: these are empty.
        rows = SMALLEST_ROWS
        places = lax.iota(jnp.int32, most)
        positions = jnp.where(places < count, end - count + places, 0)
        empty = jnp.zeros(rows, jnp.int32)
        table = jnp.zeros((rows + 1, len(pages)), jnp.int32).at[rows].set(pages)
        cu_lengths = jnp.stack([jnp.zeros((), jnp.int32), count])
        pass_ = _Pass(
            tokens=jnp.concatenate([empty, tokens]),
            positions=jnp.concatenate([empty, positions]),
            valid=jnp.concatenate([empty > 0, places < count]),
            owners=jnp.concatenate([lax.iota(jnp.int32, rows), jnp.full(most, rows, jnp.int32)]),
            table=table,
            lengths=jnp.concatenate([empty, end[None]]),
            cu_lengths=cu_lengths,
            num_prefills=jnp.ones((), jnp.int32),
            rows=rows,
        )
        kv, _ = self._forward(merge(self.shapes.graph, leaves), kv, pass_)
        return kv

    def _draft(
        self, layout: DraftLayout, leaves: Sequence[Array], kv: paged.KV, ints: Array, floats: Array
    ) -> tuple[paged.KV, Array]:
        """Draft tokens [N, DRAFTS] for all rows. Those beyond a row's number are undefined."""
        head, columns, tables = layout.sections(ints)
        table = tables[0]
        steps, used, flags = head
        before, latest, lengths, counts = (columns[:, column] for column in range(4))
        kernels = self.shapes.graph.precision.implementation
        choice = DraftChoice.of(columns[:, 1:], floats, flags, self.vocab_size, kernels)
        model = merge(self.shapes.graph, leaves)

        def chosen(hidden: Array, lengths: Array) -> Array:
            return choice.tokens(model.logits(hidden, used), lengths)

        both = jnp.stack([before, latest], axis=1).reshape(-1)
        ends = jnp.stack([jnp.where(before >= 0, lengths - 1, 0), lengths], axis=1).reshape(-1)
        kv, hidden = self._forward(model, kv, _Pass.of_rows(both, ends, jnp.repeat(table, 2, axis=0)))
        tokens = chosen(hidden[1::2], lengths)
        drafts = jnp.zeros((layout.rows, DRAFTS), jnp.int32).at[:, 0].set(tokens)

        def another(place: Array, carry: tuple[paged.KV, Array, Array]) -> tuple[paged.KV, Array, Array]:
            kv, tokens, drafts = carry
            ends = jnp.where(place < counts, lengths + place, 0)  # other rows have no pages there
            kv, hidden = self._forward(model, kv, _Pass.of_rows(tokens, ends, table))
            tokens = chosen(hidden, lengths + place)
            return kv, tokens, drafts.at[:, place].set(tokens)

        kv, _, drafts = lax.fori_loop(1, steps, another, (kv, tokens, drafts))
        return kv, drafts

    def _forward(self, model: Any, kv: paged.KV, step: _Pass) -> tuple[paged.KV, Array]:
        """Run the small model over tokens; return its pages with their entries, and the hidden states."""
        size, config = self.config.page_size, self.shapes.graph.config
        assert size is not None, "resolved"
        pages = step.table[step.owners, step.positions // size]
        paging = paged.Paging(
            jnp.where(step.valid, pages, 0), jnp.where(step.valid, step.positions % size, 0), step.table, step.lengths,
            step.cu_lengths, step.num_prefills, {},
        )  # fmt: skip
        attend = paged.PagedAttention(config, kv, paging, step.rows, self.config.kernels)
        tokens = jnp.clip(step.tokens, 0, config.vocab_size - 1)
        hidden = model(tokens, step.positions, attend, lengths=step.positions + 1)
        return tuple(attend.kv), hidden


class _Pass(NamedTuple):
    """One pass over tokens, as `StepInputs` has them."""

    tokens: Array
    positions: Array
    valid: Array
    owners: Array
    table: Array
    lengths: Array
    cu_lengths: Array
    num_prefills: Array
    rows: int

    @classmethod
    def of_rows(cls, tokens: Array, lengths: Array, table: Array) -> _Pass:
        """Return the pass over one token of each row, the last of `lengths`; 0 is an empty row."""
        rows = lax.iota(jnp.int32, len(tokens))
        none = jnp.zeros((), jnp.int32)
        return cls(
            tokens, jnp.maximum(lengths - 1, 0), lengths > 0, rows, table, lengths, none[None], none, len(tokens)
        )


def _spread(logits: Array, ids: Array, vocab_size: int) -> Array:
    """Return logits over the model's vocabulary, of those of the tokens `ids`: no others are drafted."""
    return jnp.full((len(logits), vocab_size), -jnp.inf, logits.dtype).at[:, ids].set(logits)


def _fitted(logits: Array, vocab_size: int) -> Array:
    """Return logits over the model's vocabulary: what is padding in one of both is never drafted."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
