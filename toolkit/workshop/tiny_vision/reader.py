"""The second part of the training: the embedded model learns to answer from what the encoder says of a picture.

It sees words in the places of a picture's tokens: the targets of the encoder (`encoder.FACTS`), mixed with others and
with noise as an encoder that is not sure would have them. So this part does not wait for the encoder. Conversations of
the embedded model's own corpus stand between them, or it would forget how to tell stories.

B windows, S tokens of each, X hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rekindle._src.models.base import Graph, merge
from workshop.tiny.corpus import PAD, TURN, TURN_END, documents, token_id
from workshop.tiny.train import causal, is_matrix
from workshop.tiny_vision.encoder import FACTS, NOTHING, TOKENS, OptimizerState, facts, updated
from workshop.tiny_vision.pictures import Scene, scene
from workshop.tiny_vision.questions import conversation

IMAGE, AROUND, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
ADDED = (AROUND, GLOBAL, IMAGE)  # after the tokens of the embedded model
LENGTH = 96  # tokens of a window
TEXTS = 0.12  # share of windows that are texts of the corpus
MIXED, NOISE = 0.4, 0.2  # the most of another word, and of noise, in a token of a picture


class Windows(NamedTuple):
    """The examples of a step."""

    tokens: NDArray[np.int32]  # [B, S + 1]
    learned: NDArray[np.bool_]  # [B, S + 1]: tokens whose loss counts
    rows: NDArray[np.int32]  # [B, S + 1]: of `pictures`, for the tokens of pictures; 0 elsewhere
    pictures: NDArray[np.float32]  # [1 + B · T, X]


class Reader:
    """Writes windows of a seed: the tokenizer, and the embedded model's embeddings of words."""

    def __init__(self, words: Tokenizer, embed: NDArray[np.float32]) -> None:
        self.words, self.embed = words, embed
        self.image = token_id(words, IMAGE)
        values = [[words.encode(word).ids[0] for word in (*values, NOTHING)] for values in FACTS.values()]
        self.values = [np.array(ids) for ids in values]

    def prompt(self, question: str, *, after: bool = False) -> str:
        """Return the first message of a conversation about a picture, with its tokens."""
        picture = f"{AROUND}{GLOBAL}{IMAGE * TOKENS}{AROUND}"
        return f"{question}{picture}" if after else f"{picture}{question}"

    def rows_of(self, scene: Scene, random: np.random.Generator) -> NDArray[np.float32]:
        """Return the tokens [T, X] that an encoder would make of a scene, with its doubts."""
        known, rows = facts(scene), np.empty((TOKENS, self.embed.shape[1]), np.float32)
        scale = np.float32(self.embed.std())
        for number, (name, values) in enumerate(FACTS.items()):
            ids = self.values[number]
            right = ids[values.index(known[name])] if name in known else ids[-1]
            share = random.uniform(0, MIXED)
            rows[number] = (1 - share) * self.embed[right] + share * self.embed[random.choice(ids)]
        return rows + scale * random.uniform(0, NOISE) * random.standard_normal(rows.shape).astype(np.float32)

    def windows(self, seed: str, count: int) -> Windows:
        """Return the windows of a seed."""
        rng = Random(seed)
        random = np.random.default_rng(rng.getrandbits(32))
        texts = documents(seed)
        result = Windows(
            np.full((count, LENGTH + 1), PAD, np.int32),
            np.zeros((count, LENGTH + 1), bool),
            np.zeros((count, LENGTH + 1), np.int32),
            np.zeros((1 + count * TOKENS, self.embed.shape[1]), np.float32),
        )
        for row in range(count):
            if rng.random() < TEXTS:
                ids = self.words.encode(next(texts)).ids[: LENGTH + 1]
                result.tokens[row, : len(ids)], result.learned[row, : len(ids)] = ids, True
                continue
            seen = scene(rng)
            ids, learned = self._conversation(seen, rng)
            ids, learned = ids[: LENGTH + 1], learned[: LENGTH + 1]
            result.tokens[row, : len(ids)], result.learned[row, : len(ids)] = ids, learned
            places = [place for place, token in enumerate(ids) if token == self.image]
            first = 1 + row * TOKENS
            result.rows[row, places] = np.arange(first, first + len(places))
            result.pictures[first : first + TOKENS] = self.rows_of(seen, random)
        return result

    def _conversation(self, seen: Scene, rng: Random) -> tuple[list[int], list[bool]]:
        ids, learned = list[int](), list[bool]()
        after = rng.random() < 0.15
        for number, (question, answer) in enumerate(conversation(seen, rng)):
            message = question if number else self.prompt(question, after=after)
            before = "\n" if number else ""
            asked = self.words.encode(f"{before}{TURN}user\n{message}{TURN_END}\n{TURN}assistant\n").ids
            said = self.words.encode(f"{answer}{TURN_END}").ids
            ids += asked + said
            learned += [False] * len(asked) + [True] * len(said)
        return ids, learned


def placed(rows: Array, pictures: Array) -> Callable[[str, int], Callable[[Array], Array] | None]:
    """Return the listener that puts rows of pictures in the places of embeddings, where `rows` is not 0."""

    def listener(site: str, layer: int) -> Callable[[Array], Array] | None:
        return (lambda x: jnp.where((rows > 0)[:, None], pictures[rows], x)) if site == "embedding" else None

    return listener


def logits(graph: Graph, leaves: Sequence[Any], tokens: Array, rows: Array, pictures: Array) -> Array:
    """Return the logits [B, S, V] of tokens [B, S]."""
    model: Any = merge(graph, leaves)
    B, S = tokens.shape
    positions = jnp.tile(jnp.arange(S), B)
    attend = causal(B, S, model.config.attention[0].scale)
    hidden = model(tokens.reshape(-1), positions, attend, None, (placed(rows.reshape(-1), pictures),))
    result: Array = model.logits(hidden).reshape(B, S, -1)
    return result


def loss(weights: dict[str, Array], graph: Graph, windows: Windows) -> tuple[Array, tuple[Array, Array]]:
    """Return the mean loss of the tokens that count, and how many of them were the first guess, and all."""
    inputs, targets = jnp.maximum(windows.tokens[:, :-1], 0), windows.tokens[:, 1:]
    leaves = [weights[path] for path in graph.paths]
    scores = logits(graph, leaves, inputs, jnp.asarray(windows.rows[:, :-1]), jnp.asarray(windows.pictures))
    counts = windows.learned[:, 1:] & (targets != PAD)
    chosen = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    each = jnp.where(counts, jax.nn.logsumexp(scores, axis=-1) - chosen, 0.0)
    right = (scores.argmax(-1) == targets) & counts
    return each.sum() / jnp.maximum(counts.sum(), 1), (right.sum(), counts.sum())


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def step(
    graph: Graph, state: OptimizerState, windows: Windows, number: Array, rates: tuple[Array, Array]
) -> tuple[OptimizerState, Array, Array]:
    """Return the state after a step, the loss before it, and the share of tokens that were the first guess."""
    (total, (right, counted)), gradients = jax.value_and_grad(loss, has_aux=True)(state.weights, graph, windows)
    return updated(state, gradients, number, rates, is_matrix), total, right / counted
