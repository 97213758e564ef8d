"""The next token of each row of logits, `greedy(logits, masks)` and `draw(logits, choice, wanted, masks)`, and
`top_k(values, k)`.

Axes: N rows, V vocabulary.

A row's draw depends on its seed, its position and its own logits alone: its uniforms are those of
`fold_in(fold_in(key(seed), position), round)`. top-p is applied by rejection: draw, accept if the token is in the
nucleus, else draw again among the tokens that are likelier still. A rejected token is outside the nucleus and all of
the nucleus is above it, so the accepted token has exactly the nucleus' distribution; the first draw is accepted with
probability top_p. top-k needs its threshold, because top-p counts the mass within it; tokens with exactly the
threshold's logit are kept, as vLLM and transformers do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array

from rekindle_kernels.ops.registry import Registry, current_platform

GREEDY = Registry("greedy")  # run(logits, masks or None) -> int32 [N]
DRAW = Registry("draw")  # run(logits, choice, wanted, masks or None) -> int32 [N]
TOP_K = Registry("top_k")  # run(values, k) -> values [N, k], indices int32 [N, k]
SMALL_TOP_K = 64  # lax.top_k of 64 costs 1.3 ms for [16, 49152] on CPU; a larger k is found by bisection


class Choice(NamedTuple):
    """The sampling options of each row; every field has N entries."""

    temperature: Array  # float32; 0 is greedy
    top_k: Array  # int32; 0 is off
    top_p: Array  # float32; 1 is off
    min_p: Array  # float32; 0 is off
    seed: Array  # uint32 [N, 2]: high and low word
    position: Array  # int32: index in the sequence of the token to choose


class Wanted(NamedTuple):
    """The options that at least one row uses, as bool scalars; the others need not be computed."""

    draws: Array  # a temperature above 0
    top_k: Array
    large_k: Array  # a top_k beyond SMALL_TOP_K
    top_p: Array  # a top_p below 1


@dataclass(frozen=True, slots=True)
class SamplingCall:
    """The static facts that select an implementation."""

    platform: str
    logits: jax.ShapeDtypeStruct


def block_size(vocab: int) -> int:
    """Return the tokens per block of a draw, about the root of the vocabulary. Draws of a seed depend on it."""
    return 1 << max(5, round(math.log2(vocab) / 2))


def mask_words(vocab: int) -> int:
    """Return the length of a row's mask in 32-bit integers: a bit for each token, the lowest first. 1 allows it."""
    return -(-vocab // 32)


def greedy(
    logits: Array, masks: Array | None = None, *, implementation: str | None = None, platform: str | None = None
) -> Array:
    """Return the first index of the largest logit of each row: int32 [N] for logits [N, V].

    `masks` int32 [N, mask_words(V)] make the logits of some tokens minus infinity.
    """
    _check(logits, masks)
    tokens: Array = GREEDY.choose(_call(logits, platform), implementation).run(logits, masks)
    return tokens


def draw(
    logits: Array,
    choice: Choice,
    wanted: Wanted,
    masks: Array | None = None,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Draw tokens int32 [N] from logits [N, V]. Rows with temperature 0 are greedy. `masks` are as in `greedy`."""
    _check(logits, masks)
    tokens: Array = DRAW.choose(_call(logits, platform), implementation).run(logits, choice, wanted, masks)
    return tokens


def draws_in_one_call(logits: Array, *, implementation: str | None = None, platform: str | None = None) -> bool:
    """True if a draw from these logits is a single operation, so that a program may have it in two branches."""
    return DRAW.choose(_call(logits, platform), implementation).one_call


def top_k(
    values: Array, k: int, *, implementation: str | None = None, platform: str | None = None
) -> tuple[Array, Array]:
    """Return the k largest values of each row [N, V], falling, and their indices; equal values keep their order."""
    largest, indices = TOP_K.choose(_call(values, platform), implementation).run(values, k)
    return largest, indices


def _check(logits: Array, masks: Array | None) -> None:
    shape = (logits.shape[0], mask_words(logits.shape[-1]))
    if masks is not None and (masks.shape != shape or masks.dtype.name != "int32"):
        actual, needed = f"{masks.dtype.name}{list(masks.shape)}", f"int32{list(shape)}"
        raise ValueError(f"masks are {actual}, and logits {list(logits.shape)} need {needed}")


def _call(logits: Array, platform: str | None) -> SamplingCall:
    return SamplingCall(platform or current_platform(), jax.ShapeDtypeStruct(logits.shape, logits.dtype))
