"""Models and heads that draft tokens, on the device: weights, the pages of a small model, and calls of programs.

All calls are made on the device thread. A step that has drafts waits for them on the host, since what follows reads the
tokens there: grammars make their masks of them, and the scheduler compares them with those that the model chooses.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from rekindle._src.core.records import DraftTask
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.programs.buckets import Helper
from rekindle._src.programs.draft_model import FILLS, DraftRecipes, pack_fill
from rekindle._src.programs.programs import Programs


class DraftWeights(abc.ABC):
    """Owns the weights of a model that drafts."""

    def __init__(self, programs: Programs, load: Callable[[], Sequence[Array]]) -> None:
        """Read weights by `load`, which is called again when the session wakes."""
        self._programs, self._load = programs, load
        self._leaves: tuple[Array, ...] = tuple(load())

    @abc.abstractmethod
    def work(self, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool:
        """Run tasks. If any of them drafts, wait for the tokens, write them into the tasks' rows, and return True.

        `calls` reach the session's model with its pages and state.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def renew(self) -> None:  # noqa: B027  most have nothing to do
        """Replace what was lost with a failed step."""

    def sleep(self) -> int:
        """Give its memory back. Return the bytes."""
        return self._free()

    def wake(self) -> None:
        """Read the weights again."""
        self._leaves = tuple(self._load())

    def close(self) -> None:
        """Give its memory back; nothing reads it any more."""
        self._free()

    def _free(self) -> int:
        leaves, self._leaves = self._leaves, ()
        return _deleted(leaves)

    def _program(self, key: Helper) -> Any:
        return self._programs.get(key)

    def _drafting(self, tasks: Sequence[DraftTask]) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the smallest program that drafts for so many tasks, and the buffers of its call."""
        recipes = self._programs.drafting
        assert recipes is not None, "the session has a drafter on the device"
        rows = next(rows for rows in recipes.drafts if rows >= len(tasks))
        return self._program(recipes.drafts[rows]), *recipes.pack(rows, tasks)


def _deleted(arrays: Sequence[Array]) -> int:
    """Delete arrays, and return the bytes that they had."""
    freed = sum(array.nbytes for array in arrays)
    for array in arrays:
        array.delete()
    return freed


def _take(tasks: Sequence[DraftTask], drafts: Any) -> None:
    """Wait for drafts, and write them into the tasks' rows."""
    for task, tokens in zip(tasks, np.asarray(drafts), strict=False):
        for row, token in zip(task.drafts, tokens, strict=False):
            assert row.token_ids is not None, "a draft has a place for its token"
            row.token_ids[0] = token


class OwnHead(DraftWeights):
    """Calls the programs by which the model's own head drafts. Its weights and pages are the model's."""

    def __init__(self, programs: Programs) -> None:
        super().__init__(programs, tuple)

    def work(self, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool:
        _take(tasks, calls.draft(*self._drafting(tasks)))
        return True


class AssistantWeights(DraftWeights):
    """Owns an assistant's weights. An assistant has no pages, so it never has to catch up with a text."""

    def work(self, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool:
        program, ints, floats = self._drafting(tasks)
        _take(tasks, calls.assist(program, self._leaves, ints, floats))
        return True


class DraftModel(DraftWeights):
    """Owns a small model's weights and pages."""

    def __init__(
        self, programs: Programs, load: Callable[[], Sequence[Array]], lost: Callable[[], object] = lambda: None
    ) -> None:
        """Make pages, too. `lost` is called when they are made anew, in the device thread."""
        assert isinstance(programs.drafting, DraftRecipes), "the session has a small model"
        super().__init__(programs, load)
        self._recipes, self.lost = programs.drafting, lost
        self._kv: Any = self._program(self._recipes.memory)()

    def work(self, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool:
        drafting = []
        for task in tasks:
            rest = self._fill(task)
            if rest.drafts:
                drafting.append(rest)
        if drafting:
            self._draft(drafting)
        return bool(drafting)

    def renew(self) -> None:
        self.lost()
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._kv)):
            self._kv = self._program(self._recipes.memory)()

    def sleep(self) -> int:
        jax.block_until_ready(self._kv)
        freed = super().sleep()
        self.lost()
        return freed

    def wake(self) -> None:
        super().wake()
        self._kv = self._program(self._recipes.memory)()

    def _free(self) -> int:
        pages, self._kv = jax.tree.leaves(self._kv), ()
        return _deleted(pages) + super()._free()

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
        program, ints, floats = self._drafting(tasks)
        self._kv, drafts = program(self._leaves, self._kv, ints, floats)
        _take(tasks, drafts)
