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
from rekindle._src.programs.store import digest

_NUMBERS, _HISTORY = "state.npz", "history.json"
MOST_TRAININGS = 8  # that are kept for a resumption
_LARGEST_HISTORY = 256 << 20


class KeptTraining(NamedTuple):
    """A training that was kept: its state after some steps, and the records of them."""

    state: TrainerState
    records: list[Any]


class TrainingCheckpoints:
    """The checkpoints of one training: of a name, data, options and weights. Only the latest is kept."""

    def __init__(self, folder: Path, name: str, causes: dict[str, object]) -> None:
        self._folder = folder / "tuning"
        self._digest = digest({"name": name, "format": 1, **causes})

    def load(self) -> KeptTraining | None:
        """Return the latest state; None without a readable one."""
        for path in reversed(self._mine()):
            with contextlib.suppress(Exception):  # damaged, or from elsewhere: an earlier one, or a new beginning
                return _read(path / ITEM)
        return None

    def save(self, state: TrainerState, records: Sequence[Sequence[object]]) -> None:
        """Keep a state after so many steps as there are records, in place of earlier ones. Raises OSError."""

        def write(folder: Path) -> None:
            moments = {f"moment{index}": leaf for index, leaf in enumerate(state.moments)}
            np.savez(folder / _NUMBERS, numbers=state.numbers, count=np.int64(len(moments)), **moments)  # type: ignore[arg-type]
            (folder / _HISTORY).write_text(json.dumps(list(records)))

        path = self._folder / f"{self._digest}-{len(records):08d}"
        earlier = self._mine()
        if path not in earlier:
            write_checkpoint(path, write)
        for other in earlier:
            if other != path:
                remove(other)
        others = [one for one in self._folder.iterdir() if one.is_dir() and not one.name.startswith(self._digest)]
        others.sort(key=lambda one: one.stat().st_mtime)
        for one in others[: max(0, len(others) + 1 - MOST_TRAININGS)]:
            remove(one)

    def remove(self) -> None:
        """Forget it."""
        for path in self._mine():
            remove(path)

    def _mine(self) -> list[Path]:
        """Return its checkpoints, the earliest first."""
        return sorted(self._folder.glob(f"{self._digest}-*"))


def _read(folder: Path) -> KeptTraining:
    if (folder / _HISTORY).stat().st_size > _LARGEST_HISTORY:
        raise ValueError("its history is too large")
    with np.load(folder / _NUMBERS, allow_pickle=False) as arrays:
        count = int(arrays["count"])
        if not 0 <= count < len(arrays.files):
            raise ValueError("it has fewer arrays than it says")
        state = TrainerState(arrays["numbers"], tuple(arrays[f"moment{index}"] for index in range(count)))
    records = json.loads((folder / _HISTORY).read_text())
    if not isinstance(records, list):
        raise TypeError("its history is no list")
    return KeptTraining(state, records)
