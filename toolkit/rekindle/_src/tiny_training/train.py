"""`python -m rekindle.tiny`: make the embedded model, its tokenizer and its card, without outside data."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer

from rekindle._src.models.base import Graph, random_model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.registry import config_from_hf
from rekindle._src.tiny_training import card, export, headstart, tokenizer
from rekindle._src.tiny_training.batches import batch
from rekindle._src.tiny_training.objective import mean_loss
from rekindle._src.tiny_training.recipe import Recipe

MATRIX = MuonDimensionNumbers(reduction_axis=1, output_axis=0)


class State(NamedTuple):
    """The state of training that a step reads and replaces."""

    leaves: tuple[jax.Array, ...]
    optimizer: Any


class TrainingProgress(NamedTuple):
    """The report of a finished step."""

    step: int
    loss: float
    tokens_per_second: float
    seconds_left: float


def schedule(recipe: Recipe, rate: float) -> optax.Schedule:
    """A learning rate that rises linearly, stays at `rate`, and falls linearly to zero."""
    warmup, decay = max(1, round(recipe.warmup * recipe.steps)), max(1, round(recipe.decay * recipe.steps))
    rise = optax.linear_schedule(rate / warmup, rate, warmup)
    fall = optax.linear_schedule(rate, 0.0, decay)
    return optax.join_schedules([rise, optax.constant_schedule(rate), fall], [warmup, recipe.steps - decay])


def make_optimizer(recipe: Recipe, graph: Graph) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks (it needs about half of Adam's steps here), Adam for the rest."""
    blocks = tuple(MATRIX if "norm" not in path and path.startswith("layers.") else None for path in graph.paths)
    return muon(
        schedule(recipe, recipe.matrix_rate),
        weight_decay=0.01,
        adam_learning_rate=schedule(recipe, recipe.other_rate),
        adam_b2=0.98,
        muon_weight_dimension_numbers=blocks,
    )


def initial(recipe: Recipe, config: ModelConfig) -> tuple[Graph, tuple[jax.Array, ...]]:
    """Initial weights: random, with blocks that are the identity and a uniform head; then the head start."""
    model = random_model(config, seed=recipe.seed)
    weights = {path: np.array(leaf) for path, leaf in zip(model.graph.paths, model.leaves, strict=True)}
    for path, weight in weights.items():
        if path.endswith(("attention.out.weight", "mlp.down.weight", "head.weight")):
            weight[:] = 0.0
    headstart.give(weights, config, recipe.seed)
    return model.graph, tuple(jnp.asarray(weight) for weight in weights.values())


@cache
def make_step(recipe: Recipe, graph: Graph) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """The jitted training step, cached so that a second run in the same process compiles nothing."""
    optimizer = make_optimizer(recipe, graph)

    @partial(jax.jit, donate_argnums=0)
    def step(state: State, windows: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(state.leaves, graph, windows)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.leaves)
        return State(optax.apply_updates(state.leaves, updates), optimizer_state), loss

    return step


class Checkpoints:
    """The latest states of a run on disk; each is written atomically."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=recipe.checkpoint_every)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: State) -> None:
        """Save the state after `step` steps, if a checkpoint is due."""
        if self._manager.should_save(step):
            self._manager.save(step, args=ocp.args.StandardSave(_plain(state)))

    def latest(self, like: State) -> tuple[int, State] | None:
        """The number of steps of the newest state, and the state; None if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        found = self._manager.restore(step, args=ocp.args.StandardRestore(_plain(like)))
        return step, jax.tree.unflatten(jax.tree.structure(like), found)

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _plain(state: State) -> list[Any]:
    return [np.asarray(leaf) if jnp.ndim(leaf) == 0 else leaf for leaf in jax.tree.leaves(state)]


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
    state, first = State(leaves, make_optimizer(recipe, graph).init(leaves)), 0
    checkpoints = Checkpoints(work / "checkpoints", recipe)
    if (found := checkpoints.latest(state)) is not None:
        first, state = found
    step = make_step(recipe, graph)
    last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    began, tokens = time.monotonic(), 0
    for number in range(first, last):
        windows = batch(words, recipe, number)
        tokens += windows.size
        state, loss = step(state, jnp.asarray(windows))
        value, spent = float(loss), time.monotonic() - began
        left = spent / (number + 1 - first) * (recipe.steps - number - 1)
        report(TrainingProgress(number + 1, value, tokens / spent, left))
        checkpoints.save(number + 1, state)
    checkpoints.close()
    return graph, state.leaves


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rekindle.tiny", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("build/tiny/model"), help="where the model's folder is written"
    )
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="checkpoints; a run resumes from here")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="fewer steps: a quick, worse model")
    options = parser.parse_args(argv)
    recipe = Recipe(steps=options.steps)
    words = tokenizer.train(recipe.vocab_size)
    began = time.monotonic()

    def report(progress: TrainingProgress) -> None:
        if progress.step % 10 == 0 or progress.step == recipe.steps:
            print(
                f"step {progress.step:5d}/{recipe.steps}  loss {progress.loss:.4f}  "
                f"{progress.tokens_per_second:6.0f} tokens/s  {progress.seconds_left / 60:5.1f} min left",
                flush=True,
            )

    graph, leaves = train(recipe, words, options.work, report=report)
    export.write(recipe, words, graph, leaves, options.out)
    card.write(recipe, load(options.out), words, options.out, minutes=(time.monotonic() - began) / 60)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
