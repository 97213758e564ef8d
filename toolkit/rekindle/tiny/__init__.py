"""The embedded model: its weights, and LoRAs of it that train in minutes on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["folder", "train_lora"]


def folder() -> Path:
    """Return the Hugging Face folder of the shipped model."""
    return Path(__file__).parent / "model"


def train_lora(
    texts: Sequence[str | tuple[str, str]],
    *,
    rank: int = 8,
    steps: int = 200,
    batch: int = 16,
    learning_rate: float = 5e-3,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Train a LoRA of the embedded model, and return its arrays, which `session.load_adapter(name, arrays)` takes.

    A text is learned as a whole; of a pair of a prompt, such as `session.render` returns, and a completion only the
    completion is. `steps` updates see `batch` texts each; `report` is called with the number and the loss of each. The
    same seed gives the same arrays on the same machine.
    """
    from rekindle.tiny import lora  # it imports optax, which an installation without training need not load

    return lora.train_lora(folder(), texts, rank, steps, batch, learning_rate, seed, report)
