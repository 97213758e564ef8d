"""Sessions over a small random model in float32 through `rekindle.open`, and the plain loop's answer to a prompt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import rekindle
from helpers.driving import tiny_model
from helpers.plain_loop import plain_loop
from rekindle import LogitsProcessor
from rekindle._src.session.opening import Opening

MODEL = tiny_model(seed=5)
VOCAB = MODEL.config.vocab_size
PAGE, CONTEXT = 8, 64
# Every test that keeps these shapes finds its programs compiled by the first one.
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": CONTEXT, "page_size": PAGE,
    "device_pages": 40, "precompile": "all", "disk_memory": 0, "seed": 0,
}  # fmt: skip

# The embedded model in one shape, too: its programs are compiled once for all files that open it with these.
TINY: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 256, "precompile": "lazy",
    "disk_memory": 0, "seed": 0, "quiet": True,
}  # fmt: skip


LEAST = LogitsProcessor(lambda logits, context: -logits, "least")


def opening(**changes: Any) -> Opening:
    """What `rekindle.open` gives for the small model: await it, or use it with `async with`."""
    return rekindle.open(MODEL, **OPTIONS | changes)


def prompt(seed: int, length: int, *, shared: int = 0) -> list[int]:
    """Return random token ids; the first `shared` are the same for every seed."""
    stem = np.random.default_rng(99).integers(3, VOCAB, shared)
    own = np.random.default_rng(seed).integers(3, VOCAB, length - shared)
    return [*stem.tolist(), *own.tolist()]


def plain(ids: Sequence[int], count: int | None = None) -> tuple[int, ...]:
    """The plain loop's greedy continuation of `ids`: `count` tokens, or all up to the end of the context."""
    return _continuation(tuple(ids))[:count]


@functools.cache
def _continuation(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(plain_loop(MODEL, ids, CONTEXT - len(ids), context=CONTEXT))
