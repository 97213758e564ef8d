"""The programs that draft over the pages and the state of the session's model, for heads and assistants."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import DraftTask
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import Helper
from rekindle._src.programs.draft_model import DraftLayout, row_sizes
from rekindle._src.programs.partitioning import PAGES, ROWS, WEIGHTS, Recipe
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.request_state import RequestState


@dataclasses.dataclass(frozen=True)
class TargetDrafts(abc.ABC):
    """The recipes of such programs, one for each number of rows."""

    name: ClassVar[str]  # what the programs' names begin with
    config: EngineConfig  # resolved
    target: Recipes

    @functools.cached_property
    def drafts(self) -> dict[int, Helper]:
        """The programs that draft, by their rows, the fewest first."""
        return {rows: Helper(f"{self.name}{rows}") for rows in row_sizes(self.config.max_requests)}

    @property
    def keys(self) -> tuple[Helper, ...]:
        return tuple(self.drafts.values())

    def layout(self, rows: int) -> DraftLayout:
        """Return the buffers of the program for so many rows."""
        return DraftLayout(rows, self.target.width, shaped=True)

    def pack(self, rows: int, tasks: Sequence[DraftTask]) -> tuple[np.ndarray, np.ndarray]:
        """Return the buffers of the program for so many rows, for tasks that have drafts."""
        return self.layout(rows).pack(tasks, [task.row.slot for task in tasks], others=self.config.max_requests)

    def recipe(self, key: Helper) -> Recipe:
        """Return the recipe of one of `keys`."""
        layout = self.layout(next(rows for rows, name in self.drafts.items() if name == key))
        ints = jax.ShapeDtypeStruct((layout.ints,), jnp.int32)
        floats = jax.ShapeDtypeStruct((layout.floats,), jnp.float32)
        return self._recipe(layout, (self.target.leaves, self.target.kv, self.target.state, ints, floats))

    @abc.abstractmethod
    def _recipe(self, layout: DraftLayout, arguments: tuple[Any, ...]) -> Recipe:
        """Return the recipe of the program with these buffers, to which `arguments` are passed."""


@dataclasses.dataclass(frozen=True)
class HeadProgramRecipes(TargetDrafts):
    """The recipes of a head, which writes entries of its drafts into the pages."""

    def _recipe(self, layout: DraftLayout, arguments: tuple[Any, ...]) -> Recipe:
        operands = (WEIGHTS, PAGES, ROWS, ROWS, ROWS)
        return Recipe(functools.partial(self._draft, layout), arguments, (1,), operands, (PAGES, ROWS))

    @abc.abstractmethod
    def _draft(
        self,
        layout: DraftLayout,
        leaves: Sequence[Array],
        kv: paged.KV,
        state: RequestState,
        ints: Array,
        floats: Array,
    ) -> tuple[paged.KV, Array]:
        """Draft tokens [N, DRAFTS] for all rows. Those beyond a row's number are undefined."""
