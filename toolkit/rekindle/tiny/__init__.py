"""The embedded models: their weights, and LoRAs of the first that train in minutes on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["folder", "located", "train_lora"]

_FOLDERS = {"tiny": "model", "tiny-vision": "vision"}  # next to this file


def folder(model: Literal["tiny", "tiny-vision"] = "tiny") -> Path:
    """Return the Hugging Face folder of an embedded model: "tiny", or "tiny-vision", which also reads pictures."""
    return Path(__file__).parent / _FOLDERS[model]


def located(model: str | Path) -> str | Path:
    """Return the folder of an embedded model for its name, and any other model as it is."""
    match model:
        case "tiny" | "tiny-vision":
            return folder(model)
        case _:
            return model


def train_lora(
    texts: Sequence[str | tuple[str, str]],
    *,
    rank: int = 8,
    steps: int = 200,
    batch: int = 16,
    learning_rate: float = 5e-3,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
    quiet: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Train a LoRA of the embedded model, and return its arrays, which `session.load_adapter(name, arrays)` takes.

    A text is learned as a whole; of a pair of a prompt, such as `session.render` returns, and a completion only the
    completion is. `steps` updates see `batch` texts each; `report` is called with the number and the loss of each,
    and a bar shows them, unless `quiet`. The same seed gives the same arrays on the same machine.
    """
    from rekindle.tiny import lora  # it imports optax, which an installation without training need not load

    return lora.train_lora(folder(), texts, rank, steps, batch, learning_rate, seed, report, quiet)
