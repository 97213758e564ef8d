"""The small model that drafts tokens, on the device: its weights, its pages, and the calls of its programs.

All calls are made on the device thread. A step that has drafts waits for them on the host, since what follows reads the
tokens there: grammars make their masks of them, and the scheduler compares them with those that the model chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from rekindle._src.core.records import DraftTask
from rekindle._src.programs.buckets import Helper
from rekindle._src.programs.draft_model import FILLS, DraftLayout, pack_fill
from rekindle._src.programs.programs import Programs


class DraftModel:
    """Owns the small model's weights and pages."""

    def __init__(
        self, programs: Programs, load: Callable[[], Sequence[Array]], lost: Callable[[], object] = lambda: None
    ) -> None:
        """Make pages, and read weights by `load`, which is called again when the session wakes. `lost` is called when
        the pages are made anew, in the device thread."""
        assert programs.drafting is not None, "the session has a small model"
        self._programs, self._recipes = programs, programs.drafting
        self._load, self.lost = load, lost
        self._leaves: tuple[Any, ...] = tuple(load())
        self._kv: Any = self._program(self._recipes.memory)()

    def work(self, tasks: Sequence[DraftTask]) -> bool:
        """Do tasks. If some draft, wait for their tokens, write them into the tasks' rows, and return True."""
        drafting = []
        for task in tasks:
            rest = self._fill(task)
            if rest.drafts:
                drafting.append(rest)
        if drafting:
            self._draft(drafting)
        return bool(drafting)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def renew(self) -> None:
        """Make pages anew after a failed step, if they were lost with it."""
        self.lost()
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._kv)):
            self._kv = self._program(self._recipes.memory)()

    def sleep(self) -> int:
        """Give weights and pages back. Return the bytes."""
        jax.block_until_ready(self._kv)
        freed = self._free()
        self.lost()
        return freed

    def wake(self) -> None:
        """Read the weights again, and make new pages."""
        self._leaves = tuple(self._load())
        self._kv = self._program(self._recipes.memory)()

    def close(self) -> None:
        """Give weights and pages back; nothing reads them any more."""
        self._free()

    def _fill(self, task: DraftTask) -> DraftTask:
        """Compute the tokens of a task, but for one or two that are drafted after. Return what is left of it."""
        left = 2 if task.drafts else 0
        while len(task.tokens) > left:
            missing = len(task.tokens) - min(left, 1)
            size = next((size for size in FILLS if size >= missing), FILLS[-1])
            count = min(size, missing)
            part = task._replace(tokens=task.tokens[:count], drafts=())
            ints = pack_fill(size, self._recipes.width, part)
            self._kv = self._program(self._recipes.fills[size])(self._leaves, self._kv, ints)
            task = task._replace(start=task.start + count, tokens=task.tokens[count:])
        return task

    def _draft(self, tasks: Sequence[DraftTask]) -> None:
        rows = next(rows for rows in self._recipes.drafts if rows >= len(tasks))
        ints, floats = DraftLayout(rows, self._recipes.width).pack(tasks)
        program = self._program(self._recipes.drafts[rows])
        self._kv, drafts = program(self._leaves, self._kv, ints, floats)
        for task, tokens in zip(tasks, np.asarray(drafts), strict=False):
            for row, token in zip(task.drafts, tokens, strict=False):
                assert row.token_ids is not None, "a draft has a place for its token"
                row.token_ids[0] = token

    def _program(self, key: Helper) -> Any:
        return self._programs.get(key)

    def _free(self) -> int:
        arrays = [*self._leaves, *jax.tree.leaves(self._kv)]
        freed = sum(array.nbytes for array in arrays)
        for array in arrays:
            array.delete()
        self._leaves, self._kv = (), ()
        return freed
