"""The first part of the training: the encoder alone learns to describe pictures in embeddings of words.

A picture becomes 16 tokens, and each has one fact to tell (`FACTS`), such as the colour of the highest bar. The target
of a token is the embedding of the word for it in the embedded model, which knows these words already.

B pictures, N patches of each, T tokens, M patches of a token, E hidden size, H heads, X the text's hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import get_context
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from workshop.tiny.train import DECAY, EPS, FIRST, MOMENTUM, SECOND, orthogonal
from workshop.tiny_vision.pictures import COLOURS, FEWEST_BARS, KINDS, MOST_BARS, SHAPES, Scene, drawn

SIDE, PATCH, MERGE = 96, 12, 2  # pixels of a picture and of a patch; patches of a token's side
GRID = SIDE // PATCH
TOKENS = (GRID // MERGE) ** 2
HIDDEN, LAYERS, HEADS, MLP = 128, 4, 4, 384
NORM_EPS = 1e-6
VISION: dict[str, Any] = {
    "model_type": "smolvlm_vision", "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "patch_size": PATCH, "image_size": SIDE, "hidden_act": "relu", "num_channels": 3,
    "layer_norm_eps": NORM_EPS, "attention_dropout": 0.0,
}  # fmt: skip
Weights = dict[str, Array]  # by their names in a checkpoint, without "model."
TOWER, CONNECTOR = "vision_model", "connector.modality_projection.proj.weight"

# The facts of a picture, one for each token in the order of the rows, and the words for their values. A word stands for
# its first token. A fact without a value, such as the digit of a picture of bars, is " no".
_COLOURS = tuple(f" {name}" for name in COLOURS)
_COUNTS = tuple(str(number) for number in range(FEWEST_BARS, MOST_BARS + 1))
FACTS: dict[str, tuple[str, ...]] = {
    "kind": (" shape", " number", " bars", " line"),
    "shape": tuple(f" {shape}" for shape in SHAPES),
    "colour": _COLOURS,
    "digit": tuple("0123456789"),
    "bars": _COUNTS,
    "highest": _COLOURS,
    "lowest": _COLOURS,
    "rises": _COLOURS,
    "falls": _COLOURS,
    "direction": (" rises", " falls"),
    **{f"bar {number + 1}": _COLOURS for number in range(MOST_BARS)},
    "lines": ("1", "2"),
}
assert len(FACTS) == TOKENS
NOTHING = " no"


def facts(scene: Scene) -> dict[str, str]:
    """Return the facts of a scene that have a value."""
    found = {"kind": FACTS["kind"][KINDS.index(scene.kind)]}
    first = f" {scene.colours[0]}"
    if scene.kind == "shape":
        found |= {"shape": f" {scene.shape}", "colour": first}
    elif scene.kind == "digit":
        found |= {"digit": str(scene.digit), "colour": first}
    elif scene.kind == "bars":
        found |= {"bars": str(len(scene.heights)), "highest": f" {scene.highest}", "lowest": f" {scene.lowest}"}
        found |= {f"bar {number + 1}": f" {name}" for number, name in enumerate(scene.colours)}
    else:
        found["lines"] = str(len(scene.rises))
        found |= {name: f" {scene.line(up)}" for name, up in (("rises", True), ("falls", False)) if up in scene.rises}
        if len(scene.rises) == 1:
            found |= {"direction": " rises" if scene.rises[0] else " falls", "colour": first}
    return found


def labels(scenes: list[Scene]) -> NDArray[np.int32]:
    """Return the number of each fact's value [B, T]; the number after the last means none."""
    result = np.empty((len(scenes), TOKENS), np.int32)
    for row, scene in enumerate(scenes):
        known = facts(scene)
        result[row] = [values.index(known[name]) if name in known else len(values) for name, values in FACTS.items()]
    return result


def heights(scenes: list[Scene]) -> NDArray[np.float32]:
    """Return the heights of bars [B, most bars]; 0 where there is none."""
    return np.array([[*scene.heights, *([0.0] * MOST_BARS)][:MOST_BARS] for scene in scenes], np.float32)


def patches(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Cut pictures [B, side, side, 3] into patches [B, N, 3 · P · P], row by row; each is channel by channel."""
    cut = pixels.reshape(-1, GRID, PATCH, GRID, PATCH, 3).transpose(0, 1, 3, 5, 2, 4)
    return np.ascontiguousarray(cut).reshape(len(pixels), GRID * GRID, 3 * PATCH * PATCH)


class Batch(NamedTuple):
    """Pictures and their content."""

    patches: NDArray[np.uint8]  # [B, N, 3 · P · P]
    labels: NDArray[np.int32]  # [B, T]
    heights: NDArray[np.float32]  # [B, bars]


EVEN = 250  # steps; the later ones have more of what is learned last
LATER = (2.4, 1.6, 1.2, 0.6)  # shares of the kinds


def batch(step: int, size: int) -> Batch:
    """Return the pictures of a training step, with their labels."""
    scenes, pixels = drawn(f"train {step}", size, SIDE, LATER if step >= EVEN else (1, 1, 1, 1))
    return Batch(patches(pixels), labels(scenes), heights(scenes))


def batches(size: int, first: int, ahead: int = 6) -> Iterator[Batch]:
    """Yield the batches of the steps from `first` on, without end; another process draws them."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        steps = count(first)
        waiting = [pool.submit(batch, next(steps), size) for _ in range(ahead)]
        while True:
            waiting.append(pool.submit(batch, next(steps), size))
            yield waiting.pop(0).result()


# The first weights are a head start: patches are seen through the lowest frequencies of a cosine transform, and the
# table of positions is made of sines of rows and columns, so that a layer can attend to neighbours at once.
def initial(seed: int, text_size: int) -> Weights:
    """Return the weights before the first step, and of heads that only the training has, in `heights.`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32) * np.float32(scale / math.sqrt(shape[-1]))

    weights: dict[str, NDArray[Any]] = {
        f"{TOWER}.embeddings.patch_embedding.weight": _cosines(),
        f"{TOWER}.embeddings.patch_embedding.bias": np.zeros(HIDDEN),
        f"{TOWER}.embeddings.position_embedding.weight": _sines(),
        f"{TOWER}.post_layernorm.weight": np.ones(HIDDEN),
        f"{TOWER}.post_layernorm.bias": np.zeros(HIDDEN),
        CONNECTOR: normal(text_size, HIDDEN * MERGE * MERGE),
        "heights.weight": normal(MOST_BARS, HIDDEN),
        "heights.bias": np.zeros(MOST_BARS),
    }
    for layer in range(LAYERS):
        name = f"{TOWER}.encoder.layers.{layer}"
        for norm in ("layer_norm1", "layer_norm2"):
            weights |= {f"{name}.{norm}.weight": np.ones(HIDDEN), f"{name}.{norm}.bias": np.zeros(HIDDEN)}
        shapes = {
            **{f"self_attn.{part}_proj": (HIDDEN, HIDDEN, 1.0) for part in ("q", "k", "v")},
            "self_attn.out_proj": (HIDDEN, HIDDEN, 0.3),
            "mlp.fc1": (MLP, HIDDEN, 1.4),
            "mlp.fc2": (HIDDEN, MLP, 0.3),
        }
        for part, (rows, columns, scale) in shapes.items():
            weights[f"{name}.{part}.weight"] = normal(rows, columns, scale=scale)
            weights[f"{name}.{part}.bias"] = np.zeros(rows)
    return {name: jnp.asarray(array, jnp.float32) for name, array in weights.items()}


def _cosines() -> NDArray[np.float32]:
    """Return filters [E, 3 · P · P]: cosines of the lowest frequencies, of grey first and then of colours."""
    at = (np.arange(PATCH) + 0.5) * np.pi / PATCH
    waves = [
        (down * down + across * across, np.outer(np.cos(down * at), np.cos(across * at)))
        for down in range(PATCH)
        for across in range(PATCH)
    ]
    waves.sort(key=lambda wave: wave[0])
    mixes = ((1.0, 1.0, 1.0, 64), (1.0, -1.0, 0.0, 32), (-0.5, -0.5, 1.0, 32))  # and the number of waves of each
    rows = [np.stack([part * wave for part in mix[:3]]) for mix in mixes for _, wave in waves[: int(mix[3])]]
    filters = np.stack(rows).reshape(HIDDEN, -1)
    return (filters / np.linalg.norm(filters, axis=1, keepdims=True) * 0.3).astype(np.float32)


def _sines() -> NDArray[np.float32]:
    row, column = np.divmod(np.arange(GRID * GRID), GRID)
    frequencies = np.pi / GRID * 2.0 ** np.linspace(-1, 2, HIDDEN // 4)
    parts = [wave(axis[:, None] * frequencies) for axis in (row, column) for wave in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def _linear(weights: Weights, name: str, x: Array) -> Array:
    return jnp.matmul(x, weights[f"{name}.weight"].T) + weights[f"{name}.bias"]


def _norm(weights: Weights, name: str, x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + NORM_EPS)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def encode(weights: Weights, codes: Array) -> tuple[Array, Array]:
    """Return the tokens [B, T, X] of pictures' patches [B, N, 3 · P · P], and the last layer's output [B, N, E]."""
    x = _linear(weights, f"{TOWER}.embeddings.patch_embedding", codes.astype(jnp.float32) / 127.5 - 1.0)
    x = x + weights[f"{TOWER}.embeddings.position_embedding.weight"]
    x, _ = jax.lax.scan(lambda x, layer: (_block(layer, x), None), x, _stacked(weights))
    x = _norm(weights, f"{TOWER}.post_layernorm", x)
    return jnp.matmul(joined(x), weights[CONNECTOR].T), x


def _stacked(weights: Weights) -> Weights:
    """Return the weights of all layers, by their names within a layer."""
    prefix = f"{TOWER}.encoder.layers."
    names = [name.removeprefix(f"{prefix}0.") for name in weights if name.startswith(f"{prefix}0.")]
    return {name: jnp.stack([weights[f"{prefix}{layer}.{name}"] for layer in range(LAYERS)]) for name in names}


def _block(layer: Weights, x: Array) -> Array:
    B, N = x.shape[:2]
    y = _norm(layer, "layer_norm1", x)
    q, k, v = (
        _linear(layer, f"self_attn.{part}_proj", y).reshape(B, N, HEADS, -1).swapaxes(1, 2) for part in ("q", "k", "v")
    )
    scores = jnp.einsum("bhqd,bhkd->bhqk", q * (HIDDEN // HEADS) ** -0.5, k)
    y = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v).swapaxes(1, 2).reshape(B, N, HIDDEN)
    x = x + _linear(layer, "self_attn.out_proj", y)
    y = _norm(layer, "layer_norm2", x)
    return x + _linear(layer, "mlp.fc2", jax.nn.relu(_linear(layer, "mlp.fc1", y)))


def joined(x: Array) -> Array:
    """Return the patches of each token as one row: [B, N, E] to [B, T, M · E]."""
    B, side = len(x), GRID // MERGE
    return x.reshape(B, side, MERGE, side, MERGE, HIDDEN).swapaxes(2, 3).reshape(B, TOKENS, -1)


class Words(NamedTuple):
    """The embeddings of the words for facts."""

    embeddings: Array  # [T, C, X]: of each fact's values, then of none; the rest of C is padding
    valid: Array  # [T, C]

    @classmethod
    def of(cls, embed: NDArray[np.float32], first_token: Callable[[str], int]) -> Words:
        most = max(len(values) for values in FACTS.values()) + 1
        rows, valid = np.zeros((TOKENS, most, embed.shape[1]), np.float32), np.zeros((TOKENS, most), bool)
        for number, values in enumerate(FACTS.values()):
            ids = [first_token(word) for word in (*values, NOTHING)]
            rows[number, : len(ids)], valid[number, : len(ids)] = embed[ids], True
        return cls(jnp.asarray(rows), jnp.asarray(valid))


SHARPNESS = 12.0  # of the choice among words
CLOSENESS = 0.5  # weight of the distance to the word's embedding
ABSENT = 0.15  # weight of facts without a value
HEIGHTS = 2.0  # weight of the heights' error


def choices(tokens: Array, words: Words) -> Array:
    """Return the scores [B, T, C] of each fact's values."""
    sizes = (words.embeddings**2).sum(-1)
    scores = jnp.einsum("btx,tcx->btc", tokens, words.embeddings) / jnp.maximum(sizes, 1.0)
    return jnp.where(words.valid, scores * SHARPNESS, -1e9)


def loss(weights: Weights, words: Words, pictures: Batch) -> tuple[Array, Array]:
    """Return the mean loss, and for each picture and fact whether it is right [B, T]."""
    tokens, last = encode(weights, jnp.asarray(pictures.patches))
    target = pictures.labels[..., None]
    scores = choices(tokens, words)
    chosen = jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, target, -1)[..., 0]
    goal = jnp.take_along_axis(words.embeddings[None], target[..., None], 2)[:, :, 0]
    away = ((tokens - goal) ** 2).sum(-1) / (goal**2).sum(-1)
    none = words.valid.sum(-1) - 1
    share = jnp.where(pictures.labels == none, ABSENT, 1.0)
    error = (_linear(weights, "heights", last.mean(1)) - pictures.heights) ** 2
    bars = (pictures.heights.max(-1) > 0)[:, None]
    total = (share * (chosen + CLOSENESS * away)).sum(-1).mean() + HEIGHTS * (error * bars).sum(-1).mean()
    return total, scores.argmax(-1) == pictures.labels


class OptimizerState(NamedTuple):
    """Weights, running means of their gradients, and of the gradients' squares where Adam needs them."""

    weights: Weights
    means: Weights
    squares: Weights

    @classmethod
    def of(cls, weights: Weights) -> OptimizerState:
        means, squares = ({name: jnp.zeros_like(array) for name, array in weights.items()} for _ in range(2))
        return cls(weights, means, squares)


def updated(
    state: OptimizerState,
    gradients: Mapping[str, Array],
    number: Array,
    rates: tuple[Array, Array],
    muon: Callable[[str], bool],
) -> OptimizerState:
    """Return the state after step `number`, counted from 1: Muon where `muon` says so, else Adam."""
    means = {
        name: (FIRST if not muon(name) else MOMENTUM) * state.means[name]
        + (1 - (FIRST if not muon(name) else MOMENTUM)) * gradient
        for name, gradient in gradients.items()
    }
    ahead = {
        name: MOMENTUM * means[name] + (1 - MOMENTUM) * gradient for name, gradient in gradients.items() if muon(name)
    }
    weights, squares = dict(state.weights), dict(state.squares)
    for name, direction in orthogonals(ahead).items():
        old = weights[name]
        scale = max(1.0, old.shape[0] / old.shape[1]) ** 0.5
        weights[name] = old - rates[0] * (scale * direction + DECAY * old)
    for name in gradients.keys() - ahead.keys():
        squares[name] = SECOND * squares[name] + (1 - SECOND) * gradients[name] ** 2
        unbiased = squares[name] / (1 - SECOND**number)
        weights[name] -= rates[1] * means[name] / (1 - FIRST**number) / (jnp.sqrt(unbiased) + EPS)
    return OptimizerState(weights, means, squares)


def orthogonals(matrices: Weights) -> Weights:
    """Return `orthogonal` of each matrix. Matrices of one shape share a loop, which is compiled once."""
    result, by_shape = Weights(), dict[tuple[int, ...], list[str]]()
    for name, matrix in matrices.items():
        by_shape.setdefault(matrix.shape, []).append(name)
    for names in by_shape.values():
        stack = jax.lax.map(orthogonal, jnp.stack([matrices[name] for name in names]))
        result |= {name: stack[index] for index, name in enumerate(names)}
    return result


def is_matrix(name: str) -> bool:
    """True for the matrices of layers and of the connector, which Muon trains."""
    return name == CONNECTOR or (".layers." in name and name.endswith("weight") and "norm" not in name)


@partial(jax.jit, donate_argnums=0)
def step(
    state: OptimizerState, words: Words, pictures: Batch, number: Array, rates: tuple[Array, Array]
) -> tuple[OptimizerState, Array, Array, Array]:
    """Return the state after a step, the loss before it, and the share of facts with a value that were right."""
    (total, right), gradients = jax.value_and_grad(loss, has_aux=True)(state.weights, words, pictures)
    there = pictures.labels != words.valid.sum(-1) - 1
    return updated(state, gradients, number, rates, is_matrix), total, (right & there).sum(0), there.sum(0)
