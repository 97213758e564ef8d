"""The embedded model: its weights, and LoRAs of it that train in minutes on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rekindle._src.text.tokenizer import Tokenizer

__all__ = ["folder", "train_lora"]
_TEXT_END, _TURN_END = "<|endoftext|>", "<|im_end|>"


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
    # The first imports optax, which an installation without training need not load.
    from rekindle._src.models.adapters.training import train
    from rekindle._src.models.loading.checkpoint import load
    from rekindle._src.text.tokenizer import Tokenizer

    for field, value in (("rank", rank), ("steps", steps), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequest(field, value, "must be a positive integer", f"Pass {field}=8")
    if isinstance(texts, str) or not texts:
        raise InvalidRequest("texts", texts, "must be a list of texts", "Pass some tens of examples")
    tokenizer, model = Tokenizer.load(folder()), load(folder(), dtype="float32")
    lines = [_line(tokenizer, index, text) for index, text in enumerate(texts)]
    longest = max(len(ids) for ids, _ in lines)
    if longest > (most := model.config.max_position_embeddings):
        raise InvalidRequest("texts", longest, f"tokens in one text, and the model reads {most}", "Cut it in parts")
    return train(
        model, lines, rank=rank, steps=steps, batch=batch, learning_rate=learning_rate, seed=seed, report=report
    )


def _line(tokenizer: Tokenizer, index: int, text: object) -> tuple[Sequence[int], int]:
    """Return the tokens of a text, and the number of those that are not learned."""
    match text:
        case str() if text:
            return tokenizer.encode(text + _TEXT_END), 0
        case (str() as prompt, str() as completion) if completion:
            begin = tokenizer.encode(prompt)
            return [*begin, *tokenizer.encode(completion + _TURN_END)], len(begin)
        case _:
            raise InvalidRequest(
                f"texts[{index}]", text, "must be a text or a pair of texts, not empty", "Pass (prompt, completion)"
            )
