"""The state of a training on disk, so that a kernel that was killed goes on where it was: an Orbax checkpoint each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.capabilities.tuning.trainer import TrainerState
from rekindle._src.core.atomic_checkpoint import ITEM, remove, write_checkpoint
from rekindle._src.core.plain_files import open_plain, read_plain
from rekindle._src.core.store import Store
from rekindle._src.programs.store import digest
from rekindle_kernels import private_files

_NUMBERS, _HISTORY = "state.npz", "history.json"
MOST_TRAININGS = 8  # that are kept for a resumption
_LARGEST_HISTORY = 256 << 20


class KeptTraining(NamedTuple):
    """A training that was kept: its state after some steps, and the records of them."""

    state: TrainerState
    records: list[Any]


class TrainingCheckpoints:
    """The checkpoints of one training: of a name, data, options and weights. Only the latest is kept.

    In a folder that other users can write to, none is read or written.
    """

    def __init__(self, folder: Path, name: str, causes: dict[str, object]) -> None:
        self._store = Store(folder / "tuning")
        self._digest = digest({"name": name, "format": 1, **causes})

    def load(self) -> KeptTraining | None:
        """Return the latest state; None without a readable one."""
        for path in reversed(self._mine()):
            with contextlib.suppress(Exception):  # damaged, or from elsewhere: an earlier one, or a new beginning
                return self._read(path)
        return None

    def save(self, state: TrainerState, records: Sequence[Sequence[object]]) -> None:
        """Keep a state after so many steps as there are records, in place of earlier ones. Raises OSError."""
        if self._store.distrusted is not None:
            return

        def write(folder: Path) -> None:
            moments = {f"moment{index}": leaf for index, leaf in enumerate(state.moments)}
            np.savez(folder / _NUMBERS, numbers=state.numbers, count=np.int64(len(moments)), **moments)  # type: ignore[arg-type]
            (folder / _HISTORY).write_text(json.dumps(list(records)))

        path = self._store.path(f"{self._digest}-{len(records):08d}")
        earlier = self._mine()
        if path not in earlier:
            write_checkpoint(path, write)
        for other in earlier:
            if other != path:
                remove(other)
        others = [one.path for one in self._store.entries() if not one.path.name.startswith(self._digest)]
        for one in others[MOST_TRAININGS - 1 :]:  # the most recently used come first
            remove(one)

    def remove(self) -> None:
        """Forget it."""
        for path in self._mine():
            remove(path)

    def _mine(self) -> list[Path]:
        """Return its checkpoints, the earliest first; none of a folder that isn't trusted."""
        trusted = self._store.distrusted is None
        return sorted(self._store.folder.glob(f"{self._digest}-*")) if trusted else []

    def _read(self, path: Path) -> KeptTraining:
        numbers, history = path / ITEM / _NUMBERS, path / ITEM / _HISTORY
        for part in (numbers, history):
            private_files.check(part, inside=self._store.folder)
        records = json.loads(read_plain(history, _LARGEST_HISTORY))
        with open_plain(numbers) as file, np.load(file, allow_pickle=False) as arrays:
            count = int(arrays["count"])
            if not 0 <= count < len(arrays.files):
                raise ValueError("it has fewer arrays than it says")
            state = TrainerState(arrays["numbers"], tuple(arrays[f"moment{index}"] for index in range(count)))
        if not isinstance(records, list) or not all(map(_is_record, records)):
            raise TypeError("its history is no list of numbers of steps")
        return KeptTraining(state, records)


def _is_record(record: Any) -> bool:
    return isinstance(record, list) and all(value is None or type(value) in (int, float) for value in record)
