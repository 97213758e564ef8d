"""`python -m rekindle.tiny`: make the embedded model, its tokenizer and its card, without outside data."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rekindle._src.models.base import Graph, random_model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.registry import config_from_hf
from rekindle._src.tiny_training import card, export, headstart, native, optimizer, tokenizer
from rekindle._src.tiny_training.batches import batch
from rekindle._src.tiny_training.objective import mean_loss
from rekindle._src.tiny_training.recipe import SIZES, Recipe

Vector = NDArray[np.float32]


class State(NamedTuple):
    """All inputs and outputs of a step, each as one vector of all leaves."""

    values: Vector
    means: Vector
    squares: Vector


class TrainingProgress(NamedTuple):
    """The report of a finished step."""

    step: int
    loss: float
    tokens_per_second: float
    seconds_left: float


class Step(Protocol):
    """Step `number`, counted from 1, at the rates of Muon and Adam: the state after it, and the loss before it."""

    def __call__(
        self, state: State, windows: NDArray[np.int32], number: int, rates: tuple[float, float]
    ) -> tuple[State, float]: ...


def initial(recipe: Recipe, config: ModelConfig) -> tuple[Graph, tuple[jax.Array, ...]]:
    """Return initial weights: random, with blocks that are the identity and a uniform head; then the head start."""
    model = random_model(config, seed=recipe.seed)
    weights = {path: np.array(leaf) for path, leaf in zip(model.graph.paths, model.leaves, strict=True)}
    for path, weight in weights.items():
        if path.endswith(("attention.out.weight", "mlp.down.weight", "head.weight")):
            weight[:] = 0.0
    headstart.give(weights, config, recipe.seed)
    return model.graph, tuple(jnp.asarray(weight) for weight in weights.values())


def join(leaves: tuple[jax.Array, ...]) -> Vector:
    return np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in leaves])


def split(vector: Vector, shapes: tuple[tuple[int, ...], ...]) -> tuple[jax.Array, ...]:
    """Return the leaves of these shapes from which a vector was joined."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(vector, ends[:-1])
    return tuple(jnp.asarray(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True))


@cache
def compiled_step(graph: Graph, shapes: tuple[tuple[int, ...], ...]) -> Step:
    """Return a step through XLA; a second run in the same process compiles nothing."""

    @jax.jit
    def update(
        leaves: tuple[jax.Array, ...],
        state: optimizer.State,
        windows: jax.Array,
        number: jax.Array,
        rates: tuple[jax.Array, jax.Array],
    ) -> tuple[tuple[jax.Array, ...], optimizer.State, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(leaves, graph, windows)
        return *optimizer.step(graph.paths, leaves, gradients, state, number, *rates), loss

    def step(state: State, windows: NDArray[np.int32], number: int, rates: tuple[float, float]) -> tuple[State, float]:
        values, means, squares = (split(vector, shapes) for vector in state)
        wide = jnp.float32(rates[0]), jnp.float32(rates[1])
        values, (means, squares), loss = update(
            values, optimizer.State(means, squares), jnp.asarray(windows), jnp.float32(number), wide
        )
        return State(join(values), join(means), join(squares)), float(loss)

    return step


def native_step(steps: native.Steps) -> Step:
    """Return a step in native code."""

    def step(state: State, windows: NDArray[np.int32], number: int, rates: tuple[float, float]) -> tuple[State, float]:
        loss, gradients = steps.loss_and_gradients(state.values, windows)
        steps.optimize(state.values, gradients, state.means, state.squares, number, rates)
        return state, loss

    return step


class Checkpoints:
    """The latest states of a run on disk; each is written atomically."""

    def __init__(self, folder: Path, every: int, keep: int = 2) -> None:
        self._folder, self._every, self._keep = folder, every, keep
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: State) -> None:
        """Store the state after `step` steps, if one is due."""
        if step % self._every:
            return
        part = self._folder / f"{step}.part"
        with part.open("wb") as file:
            np.savez(file, **state._asdict())
        part.rename(self._folder / f"{step}.npz")
        for old in self._steps()[: -self._keep]:
            (self._folder / f"{old}.npz").unlink()

    def latest(self) -> tuple[int, State] | None:
        """Return the number of steps of the newest state, and the state; None if there is none."""
        if not (steps := self._steps()):
            return None
        with np.load(self._folder / f"{steps[-1]}.npz") as arrays:
            return steps[-1], State(*(arrays[name] for name in State._fields))

    def _steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.npz"))


def train(
    recipe: Recipe,
    words: Tokenizer,
    work: Path,
    *,
    stop_after: int | None = None,
    report: Callable[[TrainingProgress], None] = lambda progress: None,
) -> tuple[Graph, tuple[jax.Array, ...]]:
    """Run all steps, or those after the last checkpoint in `work`."""
    config = config_from_hf(recipe.config([0], 0))
    graph, leaves = initial(recipe, config)
    shapes = tuple(leaf.shape for leaf in leaves)
    values = join(leaves)
    state, first = State(values, np.zeros_like(values), np.zeros_like(values)), 0
    checkpoints = Checkpoints(work / "checkpoints", recipe.checkpoint_every)
    if (checkpoint := checkpoints.latest()) is not None:
        first, state = checkpoint
    fits = native.Steps.fit(graph, [(stage.rows, stage.length) for stage in recipe.stages])
    code = native.load_code(work) if fits else None
    step = compiled_step(graph, shapes) if code is None else native_step(native.Steps(code, graph, shapes))
    last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    began, tokens = time.monotonic(), 0
    for number in range(first, last):
        windows = batch(words, recipe, number)
        tokens += windows.size
        rate = recipe.rate(number)
        state, loss = step(state, windows, number + 1, (rate * recipe.matrix_rate, rate * recipe.other_rate))
        seconds = time.monotonic() - began
        seconds_left = seconds / (number + 1 - first) * (recipe.steps - number - 1)
        report(TrainingProgress(number + 1, loss, tokens / seconds, seconds_left))
        checkpoints.save(number + 1, state)
    return graph, split(state.values, shapes)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rekindle.tiny", description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="larger ones take that much longer")
    parser.add_argument("--out", type=Path, help="where the model's folder is written; default build/SIZE/model")
    parser.add_argument("--work", type=Path, help="checkpoints; a run resumes from here; default build/SIZE")
    parser.add_argument("--steps", type=int, help="fewer: quick and worse; more: slow and better")
    options = parser.parse_args(argv)
    recipe = Recipe.of_size(options.size)
    if options.steps not in (None, recipe.steps):
        recipe = recipe.scaled(options.steps)
    work = options.work or Path("build") / options.size
    out = options.out or work / "model"
    words = tokenizer.train(recipe.vocab_size)
    resumed = any((work / "checkpoints").glob("*.npz"))
    began = time.monotonic()

    def report(progress: TrainingProgress) -> None:
        if progress.step % 10 == 0 or progress.step == recipe.steps:
            print(
                f"step {progress.step:5d}/{recipe.steps}  loss {progress.loss:.4f}  "
                f"{progress.tokens_per_second:6.0f} tokens/s  {progress.seconds_left / 60:5.1f} min left",
                flush=True,
            )

    graph, leaves = train(recipe, words, work, report=report)
    export.write(recipe, words, graph, leaves, out)
    if options.size == "tiny":
        minutes = None if resumed else (time.monotonic() - began) / 60
        card.write(recipe, load(out), words, out, minutes=minutes)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
