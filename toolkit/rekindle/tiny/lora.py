"""LoRAs of the embedded model: texts as tokens, and the training of two narrow matrices for each linear layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from rekindle._src.core.activity import Progress
from rekindle._src.models.adapters.sites import Site, sites_of
from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.models.hooks import Norm
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.plain import token_logprobs
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest
from rekindle_kernels import gated

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
    quiet: bool,
) -> dict[str, NDArray[np.float32]]:
    """Train a LoRA adapter of the embedded model on texts; see `rekindle.tiny.train_lora`."""
    for field, value in (("rank", rank), ("steps", steps), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequest(field, value, "must be a positive integer", f"Pass {field}=8")
    if not isinstance(seed, int) or seed < 0:
        raise InvalidRequest("seed", seed, "must be an integer of 0 or more", "Pass seed=0")
    if not isinstance(learning_rate, int | float) or not 0 < learning_rate < math.inf:
        raise InvalidRequest("learning_rate", learning_rate, "must be a positive number", "Pass learning_rate=5e-3")
    if isinstance(texts, str) or not texts:
        raise InvalidRequest("texts", texts, "must be a list of texts", "Pass some tens of examples")
    tokenizer, model = Tokenizer.load(folder), load(folder, dtype="float32")
    lines = [_line(tokenizer, index, text) for index, text in enumerate(texts)]
    longest = max(len(ids) for ids, _ in lines)
    if longest > (most := model.config.max_position_embeddings):
        raise InvalidRequest("texts", longest, f"tokens in one text, and the model reads {most}", "Cut it in parts")
    bar = Progress("training", quiet=quiet)

    def step_ended(step: int, loss: float) -> None:
        bar(TrainedSteps(step + 1, steps, loss))
        if report is not None:
            report(step, loss)

    return train(
        model, lines, rank=rank, steps=steps, batch=batch, learning_rate=learning_rate, seed=seed, report=step_ended
    )


class TrainedSteps(NamedTuple):
    """How far a training is."""

    done: int
    total: int
    loss: float  # of the latest step

    def __str__(self) -> str:
        return f"step {self.done} of {self.total}, loss {self.loss:.3f}"


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


Line = tuple[Sequence[int], int]  # token ids, and how many of them are a prompt that is not learned
Pair = tuple[Array, Array]  # lora_a [in, rank], lora_b [rank, out]
_LENGTHS = 16  # lines are padded to a multiple of it
_WARMUP = 0.1  # of the steps


def train(
    model: LoadedModel,
    lines: Sequence[Line],
    *,
    rank: int,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    report: Callable[[int, float], None] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Return an adapter's arrays by path, as `read_state` takes them; `report` is called with each step's loss.

    The loss is the mean of the tokens' negative log-probabilities. Lines are drawn in an order of their own each time
    that all of them have been seen; the same seed gives the same arrays.
    """
    sites = tuple(site for site in sites_of(model.config).sites if not site.path.endswith(("router", "shared_gate")))
    random = np.random.default_rng(seed)
    params = {site.path: _initial(site, rank, random) for site in sites}
    rates = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, int(steps * _WARMUP)), steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates, b2=0.99))
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: dict[str, Pair], state: Any, leaves: Any, tokens: Array, mask: Array) -> tuple[Any, ...]:
        loss, gradients = jax.value_and_grad(_loss)(params, model.graph, leaves, tokens, mask)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    tokens, mask = _padded(lines)
    for step, chosen in zip(range(steps), _batches(len(lines), batch, random), strict=False):
        params, state, loss = update(params, state, model.leaves, tokens[chosen], mask[chosen])
        if report is not None:
            report(step, float(loss))
    ends = ("lora_a", "lora_b")
    return {
        f"{path}.{end}": np.asarray(array)
        for path, pair in params.items()
        for end, array in zip(ends, pair, strict=True)
    }


def _initial(site: Site, rank: int, random: np.random.Generator) -> Pair:
    """Return a random matrix to the rank and a matrix of zeros from it: an adapter that changes nothing yet."""
    down = random.standard_normal((site.inputs, rank), np.float32) * np.float32(site.inputs**-0.5)
    return jnp.asarray(down), jnp.zeros((rank, site.outputs), jnp.float32)


def _padded(lines: Sequence[Line]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return tokens [lines, T], and a mask of the tokens to learn."""
    length = -(-max(len(ids) for ids, _ in lines) // _LENGTHS) * _LENGTHS
    tokens, mask = np.zeros((len(lines), length), np.int32), np.zeros((len(lines), length), np.float32)
    for index, (ids, prompt) in enumerate(lines):
        tokens[index, : len(ids)] = ids
        mask[index, max(1, prompt) : len(ids)] = 1.0
    return tokens, mask


def _batches(count: int, size: int, random: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield the lines of each step, without end."""
    waiting = np.zeros(0, np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, random.permutation(count)])
        yield waiting[:size]
        waiting = waiting[size:]


def _loss(params: dict[str, Pair], graph: Graph, leaves: Any, tokens: Array, mask: Array) -> Array:
    module: Any = merge(graph, leaves, {path: _TrainedDelta(pair) for path, pair in params.items()})
    return -(token_logprobs(module, tokens) * mask).sum() / mask.sum()


class _TrainedDelta:
    """The product of the matrices that are trained."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def add(self, y: Array, x: Array, gate: str | None = None, norm: Norm | None = None) -> Array:
        down, up = self._pair
        x = x if norm is None else norm(x)
        y = y + jnp.matmul(jnp.matmul(x.astype(jnp.float32), down), up).astype(y.dtype)
        return y if gate is None else gated(y, gate)
