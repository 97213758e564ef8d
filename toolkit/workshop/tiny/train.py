"""`python -m workshop.tiny.train`: make the embedded model and its tokenizer, without outside data.

A run with the default arguments makes the shipped model up to the rounding of the machine. Figures for its card come
from `python -m workshop.tiny.evaluate`.

E hidden size, H query heads, K kv heads, G = H/K, D head dim, B windows, S tokens of a window, T = B·S, V vocabulary.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from rekindle._src.models.base import Graph, merge
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.nn.forward import Attend
from rekindle._src.models.placement import random_model
from rekindle._src.models.registry import config_from_hf, manifest
from workshop.tiny.corpus import END, PAD, TRAIN, TURN_END, encoded, pack, token_id, train_tokenizer, write_tokenizer
from workshop.tiny.growth import WRITERS, grow

CONTEXT = 1024  # tokens
CHECKPOINT = "checkpoint.npz"


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training with batches of one shape."""

    rows: int  # windows in a batch
    length: int  # tokens in a window
    steps: int
    copying: float = 0.02  # share of documents that are copying exercises
    sums: float = 0.0  # share of documents that are sheets of sums, in addition to those of the corpus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Shape and training constants; the defaults make the shipped weights."""

    # Nine documents of ten are shorter than 320 tokens; the long windows at the end teach far positions.
    stages: tuple[Stage, ...] = (
        Stage(32, 128, 640, copying=0.3),
        Stage(12, 320, 5140),
        Stage(12, 320, 4050, sums=0.12),
        Stage(8, 512, 450, sums=0.12),
        Stage(4, CONTEXT, 320, sums=0.06),
    )
    matrix_rate: float = 0.02  # Muon, for the matrices of the blocks
    other_rate: float = 0.006  # Adam, for embedding, head and norms
    warmup: int = 250  # the first steps, over which the rates rise
    decay: int = 3500  # the last steps, over which the rates fall to zero
    seed: int = 0
    checkpoint_every: int = 100
    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """Return the stage of a step, counted from 0."""
        end = 0
        for stage in self.stages:
            end += stage.steps
            if step < end:
                return stage
        return self.stages[-1]

    def rate(self, step: int) -> float:
        """Return the share of the full rates at a step, counted from 0: it rises, stays and falls to zero."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / self.decay)

    def scaled(self, steps: int) -> Recipe:
        """Return the recipe with every part scaled to about `steps` steps in all."""
        share = steps / self.steps
        stages = tuple(dataclasses.replace(stage, steps=max(1, round(stage.steps * share))) for stage in self.stages)
        warmup, decay = (max(1, round(steps * share)) for steps in (self.warmup, self.decay))
        return dataclasses.replace(self, stages=stages, warmup=warmup, decay=decay)

    def config(self, eos_token_ids: list[int], pad_token_id: int) -> dict[str, Any]:
        """Return the model's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim, "hidden_act": "silu",
            "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": eos_token_ids,
            "pad_token_id": pad_token_id, "torch_dtype": "bfloat16",
        }  # fmt: skip


# The differences of larger models from the shipped one, "tiny". Their weights are not shipped.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "30m": {"hidden_size": 512, "num_layers": 9, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 1536},
}

# A model that is grown from a smaller one: what is learned by then is not lost to high rates.
GROWN: dict[str, Any] = {
    "stages": (Stage(12, 320, 500, sums=0.12), Stage(8, 512, 40, sums=0.12), Stage(4, CONTEXT, 30, sums=0.06)),
    "matrix_rate": 0.01, "other_rate": 0.002, "warmup": 40, "decay": 400,
}  # fmt: skip


def batch(tokenizer: Tokenizer, recipe: Recipe, step: int) -> NDArray[np.int32]:
    """Return the windows [rows, length + 1] of a training step: inputs and, shifted by one, targets."""
    stage = recipe.stage(step)
    return pack(encoded(tokenizer, f"{TRAIN} {step}", stage.copying, stage.sums), stage.rows, stage.length + 1)


# A head start: initial weights that contain induction heads, so that training need not discover them.
#
# To answer from its context a model has to find the earlier occurrence of the current token and the token after it.
# From random weights this took most of a run: after 100 steps of 2,048 tokens 14 % of repeated nonsense was predicted,
# with the head start 90 %. So the first block starts with heads that attend to the tokens one, two and three positions
# back, and the second with a head that compares them with the current token. All of these weights are trained further.
SAME = 16  # leading dimensions that are 1 in every embedding, so that heads can attend by position alone
NEAR, FAR = 10, 16  # rotary pairs: fast ones that tell neighbours apart, slow ones that hardly see the distance
SHARPNESS = 8.0  # scale of attention by position
MATCH = 2.0  # scale of attention by content


def orthonormal(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    """Return random orthonormal rows that are 0 in the first SAME dimensions."""
    square, _ = np.linalg.qr(rng.standard_normal((columns - SAME, columns - SAME)))
    return np.concatenate([np.zeros((rows, SAME)), square[:rows]], axis=1).astype(np.float32)


def add_head_start(weights: dict[str, NDArray[np.float32]], config: ModelConfig, seed: int) -> None:
    """Write the head start into the embedding and the first two blocks, in place."""
    rng = np.random.default_rng(seed)
    E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    rope = config.attention[0].rope
    assert rope is not None
    assert config.num_layers >= 2
    weights["embed.weight"][:, :SAME] = 1.0
    half = D // 2
    near = np.arange(half) < min(NEAR, half // 2)
    far = np.flatnonzero(np.arange(D) % half >= half - min(FAR, half // 2))

    qkv, out = (weights[f"layers.0.attention.{name}.weight"] for name in ("qkv", "out"))
    queries, keys, values = np.split(qkv.reshape(H + 2 * K, D, E), [H, H + K])
    reads, writes = orthonormal(rng, D, E), orthonormal(rng, min(3 * D, E - SAME), E)
    keys[:] = 0.0
    keys[:, :half, :SAME] = (near * SHARPNESS / SAME)[:, None]
    values[:] = reads
    for head in range(min(3, H)):
        # A query that is rotated back by a distance is aligned with the key at that distance before it.
        angles = rope.frequencies() * -(head + 1)
        turned = np.concatenate([np.cos(angles) * near, np.sin(angles) * near])
        queries[head] = 0.0
        queries[head, :, :SAME] = (turned * SHARPNESS / SAME)[:, None]
        block = writes[head * D : (head + 1) * D]
        out[:, head * D : head * D + len(block)] = block.T

    qkv = weights["layers.1.attention.qkv.weight"]
    queries, keys, _ = np.split(qkv.reshape(H + 2 * K, D, E), [H, H + K])
    queries[0], keys[0] = 0.0, 0.0
    queries[0, far] = MATCH * reads[far]
    keys[0, far] = MATCH * writes[:D][far]


CHUNKS = 4  # of a window's queries


def causal(rows: int, length: int, scale: float) -> Attend:
    """Return causal attention within each window.

    Queries are computed in four chunks, each with the keys up to its end: 0.62 of the scores of the full square.
    """
    step = -(-length // CHUNKS)

    def attend(
        layer: int, q: jax.Array, k: jax.Array | None, v: jax.Array | None, sinks: jax.Array | None = None, /
    ) -> jax.Array:
        assert sinks is None, "the embedded model has none"
        assert k is not None, "every layer has keys of its own"
        assert v is not None, "and values"
        T, H, D = q.shape
        K = k.shape[1]
        q = (q * scale).reshape(rows, length, K, H // K, D).transpose(0, 2, 3, 1, 4)
        k, v = (x.reshape(rows, length, K, D).transpose(0, 2, 1, 3) for x in (k, v))
        parts = []
        for start in range(0, length, step):
            stop = min(start + step, length)
            scores = jnp.einsum("bkgqd,bksd->bkgqs", q[..., start:stop, :], k[:, :, :stop])
            visible = jnp.arange(stop) <= jnp.arange(start, stop)[:, None]
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
            parts.append(jnp.einsum("bkgqs,bksd->bkgqd", weights, v[:, :, :stop]))
        return jnp.concatenate(parts, axis=3).transpose(0, 3, 1, 2, 4).reshape(T, H, D)

    return attend


def logits(graph: Graph, leaves: Sequence[Any], tokens: jax.Array) -> jax.Array:
    """Return the logits [B, S, V] of tokens [B, S]."""
    model = merge(graph, leaves)
    B, S = tokens.shape
    positions = jnp.tile(jnp.arange(S), B)
    hidden = model(tokens.reshape(-1), positions, causal(B, S, model.config.attention[0].scale))
    return model.logits(hidden).reshape(B, S, -1)


def losses(graph: Graph, leaves: Sequence[Any], windows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each token's loss, whether it counts and whether it was most likely, all [B, S], for windows [B, S+1]."""
    inputs, targets = jnp.maximum(windows[:, :-1], 0), windows[:, 1:]
    scores = logits(graph, leaves, inputs)
    target_scores = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    counts = targets != PAD
    return (
        jnp.where(counts, jax.nn.logsumexp(scores, axis=-1) - target_scores, 0.0),
        counts,
        scores.argmax(-1) == targets,
    )


def mean_loss(leaves: Sequence[Any], graph: Graph, windows: jax.Array) -> jax.Array:
    """Return the mean loss of the tokens that count."""
    loss, counts, _ = losses(graph, leaves, windows)
    return loss.sum() / jnp.maximum(counts.sum(), 1)


# Muon for the matrices of the blocks, Adam for embedding, head and norms. Muon needs about half of Adam's steps here.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
ITERATIONS = 5
MOMENTUM, DECAY = 0.95, 0.01
FIRST, SECOND, EPS = 0.9, 0.98, 1e-8


class State(NamedTuple):
    """Weights, running means of their gradients, and of the squares of those where Adam needs them."""

    leaves: tuple[jax.Array, ...]
    means: tuple[jax.Array, ...]
    squares: tuple[jax.Array, ...]


def is_matrix(path: str) -> bool:
    return path.startswith("layers.") and "norm" not in path


def _product(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return jax.lax.dot_general(x, y, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def orthogonal(x: jax.Array) -> jax.Array:
    """Return the nearest matrix with all singular values about 1."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + EPS)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = _product(x, x, (1, 1))
        x = a * x + _product(b * square + c * _product(square, square, (1, 1)), x, (1, 0))
    return x.T if tall else x


@partial(jax.jit, static_argnums=0)
def step(
    graph: Graph, state: State, windows: jax.Array, number: jax.Array, rates: tuple[jax.Array, jax.Array]
) -> tuple[State, jax.Array]:
    """Return the state after step `number`, counted from 1, at the rates of Muon and Adam, and the loss before it."""
    loss, gradients = jax.value_and_grad(mean_loss)(state.leaves, graph, windows)
    results = []
    for path, leaf, mean, square, gradient in zip(graph.paths, *state, gradients, strict=True):
        if is_matrix(path):
            mean = MOMENTUM * mean + (1 - MOMENTUM) * gradient
            ahead = MOMENTUM * mean + (1 - MOMENTUM) * gradient
            scale = max(1.0, leaf.shape[0] / leaf.shape[1]) ** 0.5
            leaf = leaf - rates[0] * (scale * orthogonal(ahead) + DECAY * leaf)
        else:
            mean = FIRST * mean + (1 - FIRST) * gradient
            square = SECOND * square + (1 - SECOND) * gradient**2
            unbiased = square / (1 - SECOND**number)
            leaf = leaf - rates[1] * mean / (1 - FIRST**number) / (jnp.sqrt(unbiased) + EPS)
        results.append((leaf, mean, square))
    return State(*zip(*results, strict=True)), loss


def tensors(config: ModelConfig, graph: Graph, leaves: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return the checkpoint's tensors in bfloat16, by name: the inverse of the manifest's rules for loading."""
    sources = manifest(config).sources
    arrays: dict[str, NDArray[Any]] = {}
    for path, leaf in zip(graph.paths, leaves, strict=True):
        array = np.asarray(leaf)
        for part in sources[path].parts(array.shape):
            arrays[part.name] = np.ascontiguousarray(array[part.place].astype(ml_dtypes.bfloat16))
    return arrays


def export(recipe: Recipe, words: Tokenizer, graph: Graph, leaves: Sequence[Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    end, turn_end = token_id(words, END), token_id(words, TURN_END)
    config = recipe.config([turn_end, end], end)
    weights = folder / "model.safetensors"
    save_file(tensors(config_from_hf(config), graph, leaves), weights, {"format": "pt"})
    weights.chmod(0o644)  # save_file leaves it readable by its owner only
    generation = {"eos_token_id": [turn_end, end], "pad_token_id": end, "do_sample": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(words, folder, context=CONTEXT)


def initial(recipe: Recipe, config: ModelConfig, small: Path | None = None) -> tuple[Graph, tuple[jax.Array, ...]]:
    """Return initial weights: grown from a smaller model's, or else random with a head start.

    Random blocks are the identity, and their head is uniform.
    """
    model = random_model(config, seed=recipe.seed)
    weights = {path: np.array(leaf) for path, leaf in zip(model.graph.paths, model.leaves, strict=True)}
    if small is not None:
        grow(weights, config, load(small, dtype="float32"), recipe.seed)
        return model.graph, tuple(jnp.asarray(weight) for weight in weights.values())
    for path, weight in weights.items():
        if path.endswith((*WRITERS, "head.weight")):
            weight[:] = 0.0
    add_head_start(weights, config, recipe.seed)
    return model.graph, tuple(jnp.asarray(weight) for weight in weights.values())


AnyState = TypeVar("AnyState")  # a tree of arrays


def save(file: Path, number: int, state: Any) -> None:
    """Store the state after `number` steps atomically."""
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez(stream, np.int64(number), *map(np.asarray, jax.tree.leaves(state)))
    part.replace(file)


def restore(file: Path, state: AnyState) -> tuple[int, AnyState]:
    """Return the number of finished steps and the state of the structure of `state`; `state` itself without a file."""
    if not file.exists():
        return 0, state
    with np.load(file) as arrays:
        number, *leaves = (arrays[name] for name in arrays.files)
    return int(number), jax.tree.unflatten(jax.tree.structure(state), map(jnp.asarray, leaves))


def train(
    recipe: Recipe,
    words: Tokenizer,
    work: Path,
    *,
    small: Path | None = None,
    stop_after: int | None = None,
    report: Callable[[int, float], None] = lambda number, loss: None,
) -> tuple[Graph, tuple[jax.Array, ...]]:
    """Run all steps, or those after the checkpoint in `work`, and report the number and loss of each."""
    graph, leaves = initial(recipe, config_from_hf(recipe.config([0], 0)), small)
    work.mkdir(parents=True, exist_ok=True)
    zeros = tuple(jnp.zeros_like(leaf) for leaf in leaves)
    first, state = restore(work / CHECKPOINT, State(leaves, zeros, zeros))
    for number in range(first, recipe.steps if stop_after is None else min(stop_after, recipe.steps)):
        rate = recipe.rate(number)
        rates = jnp.float32(rate * recipe.matrix_rate), jnp.float32(rate * recipe.other_rate)
        windows = jnp.asarray(batch(words, recipe, number))
        state, loss = step(graph, state, windows, jnp.float32(number + 1), rates)
        report(number + 1, float(loss))
        if (number + 1) % recipe.checkpoint_every == 0:
            save(work / CHECKPOINT, number + 1, state)
    return graph, state.leaves


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m workshop.tiny.train", description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="larger ones take that much longer")
    parser.add_argument("--out", type=Path, help="where the model's folder is written; default build/SIZE/model")
    parser.add_argument("--work", type=Path, help="the checkpoint; a run resumes from there; default build/SIZE")
    parser.add_argument("--steps", type=int, help="fewer: quick and worse; more: slow and better")
    parser.add_argument("--small", type=Path, metavar="FOLDER", help="grow from the weights of a smaller model")
    options = parser.parse_args(argv)
    recipe = Recipe(**SIZES[options.size])
    if options.small is not None:
        recipe = dataclasses.replace(recipe, **GROWN)
    if options.steps not in (None, recipe.steps):
        recipe = recipe.scaled(options.steps)
    work = options.work or Path("build") / options.size
    words = train_tokenizer(recipe.vocab_size)
    times: list[float] = []

    def report(number: int, loss: float) -> None:
        times.append(time.monotonic())
        if number % 10 == 0 or number == recipe.steps:
            seconds = (times[-1] - times[0]) / max(1, len(times) - 1)
            left = seconds * (recipe.steps - number) / 60
            print(f"step {number:5d}/{recipe.steps}  loss {loss:.4f}  {left:5.1f} min left", flush=True)

    graph, leaves = train(recipe, words, work, small=options.small, report=report)
    out = options.out or work / "model"
    export(recipe, words, graph, leaves, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
