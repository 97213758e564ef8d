"""Calls that draft on the device, for all rows of a step: their buffers, and how they choose tokens.

A call drafts up to `DRAFTS` tokens for each row. Tokens are drawn with the noise of the request at their positions, so
that the model is likely to draw the same ones. `TargetCalls` are those of drafters that read the pages and the state of
the session's model.

Axes: N rows, V vocabulary of the model, D tokens that can be drafted.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.records import DraftTask, IntArray
from rekindle._src.core.sampling import Sampling
from rekindle._src.programs.buckets import Helper
from rekindle._src.programs.packing import DRAWING, choice_of, drawing_floats, drawing_ints
from rekindle._src.programs.partitioning import Recipe
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import RowFlag, drawing_flags
from rekindle._src.programs.sampling import LogitShaping, Shaping, ShapingOption, choose, shape
from rekindle._src.programs.step_part import branch
from rekindle_kernels import Choice, greedy

DRAFTS = 7  # tokens of a row, at most
_ROWS_STEP = 4  # sizes of calls: 1, 4, 16, …
_HEAD, _COLUMNS = 3, 7
_SHAPING = ShapingOption()
_MORE = 3  # columns of rows whose logits are shaped: prompt length, flags, and tokens that `min_tokens` lacks

Ints = TypeVar("Ints", IntArray, Array)


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
        """Return the shaping of rows that have their slots in the first column."""
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
    """Return the prompt lengths [N] of rows with columns for shaping."""
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


def _spread(logits: Array, ids: Array, vocab_size: int) -> Array:
    """Spread the logits of the tokens `ids` over the model's vocabulary. No other token is drafted."""
    return jnp.full((len(logits), vocab_size), -jnp.inf, logits.dtype).at[:, ids].set(logits)


def _fitted(logits: Array, vocab_size: int) -> Array:
    """Return logits over the model's vocabulary. Padding of either vocabulary is never drafted."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)


@dataclasses.dataclass(frozen=True)
class RowCalls(abc.ABC):
    """The programs that draft, one for each number of rows."""

    name: ClassVar[str]  # what the programs' names begin with
    config: ResolvedConfig

    @functools.cached_property
    def drafts(self) -> dict[int, Helper]:
        """The programs that draft, by their rows, the fewest first."""
        return {rows: Helper(f"{self.name}{rows}") for rows in row_sizes(self.config.max_requests)}

    @property
    def keys(self) -> tuple[Helper, ...]:
        """All programs."""
        return tuple(self.drafts.values())

    @abc.abstractmethod
    def pack(self, rows: int, tasks: Sequence[DraftTask]) -> tuple[np.ndarray, np.ndarray]:
        """Return the buffers of the program for so many rows, for tasks that have drafts."""

    @abc.abstractmethod
    def recipe(self, key: Helper) -> Recipe:
        """Return the recipe of one of `keys`."""


@dataclasses.dataclass(frozen=True)
class TargetCalls(RowCalls):
    """The programs of a drafter that reads the pages and the state of the session's model."""

    target: Recipes

    def layout(self, rows: int) -> DraftLayout:
        """Return the buffers of the program for so many rows."""
        return DraftLayout(rows, self.target.width, shaped=True)

    def pack(self, rows: int, tasks: Sequence[DraftTask]) -> tuple[np.ndarray, np.ndarray]:
        return self.layout(rows).pack(tasks, [task.row.slot for task in tasks], others=self.config.max_requests)

    def recipe(self, key: Helper) -> Recipe:
        layout = self.layout(next(rows for rows, name in self.drafts.items() if name == key))
        ints = jax.ShapeDtypeStruct((layout.ints,), jnp.int32)
        floats = jax.ShapeDtypeStruct((layout.floats,), jnp.float32)
        return self._recipe(layout, (self.target.leaves, self.target.kv, self.target.state, ints, floats))

    @abc.abstractmethod
    def _recipe(self, layout: DraftLayout, arguments: tuple[Any, ...]) -> Recipe:
        """Return the recipe of the program with these buffers, to which `arguments` are passed."""
