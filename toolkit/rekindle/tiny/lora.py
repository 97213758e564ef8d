"""Texts for a LoRA of the embedded model, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.adapters.training import Line, train
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

_TEXT_END, _TURN_END = "<|endoftext|>", "<|im_end|>"


def train_lora(
    folder: Path,
    texts: Sequence[str | tuple[str, str]],
    rank: int,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    report: Callable[[int, float], None] | None,
) -> dict[str, NDArray[np.float32]]:
    """Implement `rekindle.tiny.train_lora`."""
    for field, value in (("rank", rank), ("steps", steps), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequest(field, value, "must be a positive integer", f"Pass {field}=8")
    if isinstance(texts, str) or not texts:
        raise InvalidRequest("texts", texts, "must be a list of texts", "Pass some tens of examples")
    tokenizer, model = Tokenizer.load(folder), load(folder, dtype="float32")
    lines = [_line(tokenizer, index, text) for index, text in enumerate(texts)]
    longest = max(len(ids) for ids, _ in lines)
    if longest > (most := model.config.max_position_embeddings):
        raise InvalidRequest("texts", longest, f"tokens in one text, and the model reads {most}", "Cut it in parts")
    return train(
        model, lines, rank=rank, steps=steps, batch=batch, learning_rate=learning_rate, seed=seed, report=report
    )


def _line(tokenizer: Tokenizer, index: int, text: object) -> Line:
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
