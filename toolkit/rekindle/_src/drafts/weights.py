"""A drafter's weights, and calls of its programs.

All calls are made on the device thread. A step that has drafts waits for them on the host, since what follows reads the
tokens there: grammars make their masks of them, and the scheduler compares them with those that the model chooses.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array

from rekindle._src.core.records import DraftTask
from rekindle._src.drafts.calls import RowCalls
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.execution.drafting import DraftWorker
from rekindle._src.programs.buckets import Helper
from rekindle._src.programs.programs import Programs


class DraftWeights(DraftWorker, abc.ABC):
    """Owns the weights of a drafter."""

    def __init__(self, programs: Programs, load: Callable[[], Sequence[Array]]) -> None:
        """Read weights by `load`, which is called again when the session wakes."""
        self._programs, self._load = programs, load
        self._leaves: tuple[Array, ...] = tuple(load())

    @abc.abstractmethod
    def work(self, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool: ...

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
        return deleted(leaves)

    def _program(self, key: Helper) -> Any:
        return self._programs.get(key)

    def _drafting(self, tasks: Sequence[DraftTask]) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the smallest program that drafts for so many tasks, and the buffers of its call."""
        recipes = self._programs.drafting
        assert isinstance(recipes, RowCalls), "the session has a drafter on the device"
        rows = next(rows for rows in recipes.drafts if rows >= len(tasks))
        return self._program(recipes.drafts[rows]), *recipes.pack(rows, tasks)


def deleted(arrays: Sequence[Array]) -> int:
    """Delete arrays, and return the bytes that they had."""
    freed = sum(array.nbytes for array in arrays)
    for array in arrays:
        array.delete()
    return freed


def take(tasks: Sequence[DraftTask], drafts: Any) -> None:
    """Wait for drafts, and write them into the tasks' rows."""
    for task, tokens in zip(tasks, np.asarray(drafts), strict=False):
        for row, token in zip(task.drafts, tokens, strict=False):
            assert row.token_ids is not None, "a draft has a place for its token"
            row.token_ids[0] = token
