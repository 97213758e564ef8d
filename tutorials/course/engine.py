"""An inference engine in seven steps, each of which changes one decision of the step before.

    python engine.py MODEL "Once upon a time"

It is made of the cells of pages 27 and 28 of rekindle's course, which explain it.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle.models import LoadedModel, ModelConfig, Tokenizer, load

CHUNK, PAGE = 32, 16  # tokens of a prompt that are computed at once, and of a page
Remember = Callable[[int, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon) * weight


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Turn pairs of numbers of x [R, T, heads, D] by angles that grow with the position."""
    frequencies = theta ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = positions[:, :, None, None] * frequencies
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Let q [R, T, H, D] look at k and v [R, S, K, D], as far as they are not in its future."""
    rows, length, heads, size = q.shape
    grouped = q.reshape(rows, length, k.shape[2], -1, size)
    scores = jnp.einsum("rtkgd,rskd->rtkgs", grouped, k) / jnp.sqrt(size)
    future = jnp.arange(k.shape[1]) > positions[:, :, None]
    shares = jax.nn.softmax(jnp.where(future[:, :, None, None], -jnp.inf, scores), axis=-1)
    return jnp.einsum("rtkgs,rskd->rtkgd", shares, v).reshape(rows, length, heads * size)


def forward(config: ModelConfig, weights: dict[str, Any], tokens: jax.Array, positions: jax.Array, remember: Remember):
    """Compute the logits [R, T, vocabulary] of tokens [R, T] of a model of the Llama family."""
    heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
    x, theta, epsilon = weights["embed.weight"][tokens], config.ropes[0].theta, config.norm_eps
    for layer in range(config.num_layers):
        w = {name.split(".", 2)[2]: a for name, a in weights.items() if name.startswith(f"layers.{layer}.")}
        qkv = norm(x, w["attention_norm.weight"], epsilon) @ w["attention.qkv.weight"].T
        parts = jnp.split(qkv, [heads * size, (heads + groups) * size], axis=-1)
        q, k, v = (part.reshape(*tokens.shape, -1, size) for part in parts)
        k, v = remember(layer, rotate(k, positions, theta), v)
        x = x + attend(rotate(q, positions, theta), k, v, positions) @ w["attention.out.weight"].T
        gate, up = jnp.split(norm(x, w["mlp_norm.weight"], epsilon) @ w["mlp.gate_up.weight"].T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ w["mlp.down.weight"].T
    return norm(x, weights["norm.weight"], epsilon) @ weights.get("head.weight", weights["embed.weight"]).T


def arrays(model: LoadedModel) -> dict[str, Any]:
    """The weights by name."""
    return dict(zip(model.graph.paths, model.leaves, strict=True))


def plain_loop(model: LoadedModel, prompt: Sequence[int], count: int, context: int = 64) -> list[int]:
    """Step 1: compute the whole text for each token. It is padded, so that all lengths share a program."""

    @jax.jit
    def run(weights, tokens):
        return forward(model.config, weights, tokens, jnp.arange(context)[None], lambda layer, k, v: (k, v))

    tokens = np.zeros((1, context), np.int32)
    tokens[0, : len(prompt)] = prompt
    for length in range(len(prompt), len(prompt) + count):
        tokens[0, length] = int(run(arrays(model), tokens)[0, length - 1].argmax())
    return tokens[0, len(prompt) : len(prompt) + count].tolist()


def rows_step(config, weights, cache, tokens, starts, lengths):
    """Compute tokens [R, T] at positions starts, starts + 1, …, over a cache [2, R, context, K, D] for each layer."""
    rows, positions = jnp.arange(len(tokens))[:, None], starts[:, None] + jnp.arange(tokens.shape[1])
    new = list(cache)

    def remember(layer, k, v):
        new[layer] = new[layer].at[0, rows, positions].set(k).at[1, rows, positions].set(v)
        return new[layer][0], new[layer][1]

    return forward(config, weights, tokens, positions, remember), new


def empty(config, *shape):
    """Room for keys and values of shape […, K, D] in each layer."""
    return [jnp.zeros((2, *shape, config.num_kv_heads, config.head_dim)) for _ in range(config.num_layers)]


def cached_loop(model: LoadedModel, prompt: Sequence[int], count: int, context: int = 128) -> list[int]:
    """Step 2: compute each position once."""
    config, weights, run = model.config, arrays(model), jax.jit(partial(rows_step, model.config))
    cache, one = empty(config, 1, context), np.ones(1, int)
    for start in range(0, len(prompt) - 1, CHUNK):  # what a padded chunk writes too far is written again, or unseen
        chunk = np.zeros((1, CHUNK), np.int32)
        part = prompt[start : min(start + CHUNK, len(prompt) - 1)]
        chunk[0, : len(part)] = part
        _, cache = run(weights, cache, chunk, start * one, len(part) * one)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        logits, cache = run(weights, cache, np.array([tokens[-1:]]), (len(tokens) - 1) * one, one)
        tokens.append(int(logits[0, 0].argmax()))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Request:
    """A text: its prompt, how many tokens it may get, and how they are drawn."""

    prompt: list[int]
    count: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    tokens: list[int] = field(default_factory=list)  # the prompt, and all that came after it
    pages: list[int] = field(default_factory=list)
    found: int = 0  # tokens whose keys and values were there already

    @property
    def done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.count


class Batch:
    """Step 3: a row for each running text."""

    width = 1  # most tokens of a row in a step

    def __init__(self, model: LoadedModel, rows: int = 4, context: int = 256) -> None:
        self.config, self.weights, self.context = model.config, arrays(model), context
        self.rows: list[Request | None] = [None] * rows
        self.waiting: list[Request] = []
        self.steps = 0
        self.build(rows)

    def build(self, rows: int) -> None:
        self.cache = empty(self.config, rows, self.context)
        self.program = jax.jit(partial(rows_step, self.config), donate_argnums=1)

    def generate(self, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[list[int]]:
        """Run all prompts to their ends; returns the new tokens of each."""
        requests = [Request(list(prompt), count, tokens=list(prompt), **options) for prompt in prompts]
        self.waiting += requests
        while not all(request.done for request in requests):
            self.step()
        self.last = requests
        return [request.tokens[len(request.prompt) :] for request in requests]

    def step(self) -> None:
        """Let texts in, compute one step of all rows, and hand out its tokens."""
        for row, request in enumerate(self.rows):
            if request is None and self.waiting and self.enter(row, self.waiting[0]):
                self.rows[row] = self.waiting.pop(0)
        running = [(row, request, self.feed(request)) for row, request in enumerate(self.rows) if request is not None]
        logits = self.run([(row, feed, len(request.tokens) - 1) for row, request, feed in running])
        self.steps += 1
        for row, request, feed in running:
            self.accept(request, feed, logits[row])
            if request.done:
                self.leave(request)
                self.rows[row] = None

    def run(self, work: list[tuple[int, Sequence[int], int]], width: int | None = None) -> np.ndarray:
        """Compute tokens of rows from a position on; the other rows compute nothing that anybody sees."""
        tokens = np.zeros((len(self.rows), width or self.width), np.int32)
        starts, lengths = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.int32)
        for row, feed, start in work:
            tokens[row, : len(feed)], starts[row], lengths[row] = feed, start, len(feed)
        for row in set(range(len(tokens))) - {row for row, _, _ in work}:
            starts[row] = self.idle(row)
        logits, self.cache = self.program(self.weights, self.cache, *self.inputs(tokens, starts, lengths))
        return np.asarray(logits)

    def idle(self, row: int) -> int:
        return self.context  # beyond the row: JAX drops what is written there

    def inputs(self, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return inputs

    def fill(self, row: int, request: Request) -> None:
        """Compute a prompt but its last token."""
        for start in range(request.found, len(request.prompt) - 1, CHUNK):
            chunk = request.prompt[start : min(start + CHUNK, len(request.prompt) - 1)]
            self.run([(row, chunk, start)], CHUNK)

    def enter(self, row: int, request: Request) -> bool:
        """Give a text its room and compute its prompt; False if there is no room yet."""
        self.fill(row, request)
        return True

    def leave(self, request: Request) -> None: ...

    def feed(self, request: Request) -> list[int]:
        """The tokens that a text computes next."""
        return request.tokens[-1:]

    def accept(self, request: Request, feed: list[int], logits: np.ndarray) -> None:
        """Append what the logits [width, vocabulary] of its tokens say."""
        request.tokens.append(self.choose(request, logits[0]))

    def choose(self, request: Request, logits: np.ndarray) -> int:
        return int(logits.argmax())


def paged_step(config, weights, cache, tokens, starts, lengths, tables):
    """Compute tokens [R, T] over pages [2, P, PAGE, K, D] for each layer; tables [R, W] name the pages of each text."""
    new, offsets = list(cache), jnp.arange(tokens.shape[1])
    positions = starts[:, None] + offsets
    pages = jnp.take_along_axis(tables, jnp.minimum(positions // PAGE, tables.shape[1] - 1), axis=1)
    pages = jnp.where(offsets < lengths[:, None], pages, 0)

    def remember(layer, k, v):
        offset = positions % PAGE
        new[layer] = new[layer].at[0, pages, offset].set(k).at[1, pages, offset].set(v)
        both = new[layer][:, tables]  # [2, R, W, PAGE, K, D]
        return both.reshape(*both.shape[:2], -1, *both.shape[4:])

    return forward(config, weights, tokens, positions, remember), new


class Paged(Batch):
    """Step 4: texts take the pages that they need, out of one pool."""

    def __init__(self, model: LoadedModel, rows: int = 4, context: int = 256, pages: int = 64) -> None:
        self.free = list(range(pages, 0, -1))
        super().__init__(model, rows, context)

    def build(self, rows: int) -> None:
        self.cache = empty(self.config, len(self.free) + 1, PAGE)
        self.program = jax.jit(partial(paged_step, self.config), donate_argnums=1)
        self.tables = np.zeros((rows, -(-self.context // PAGE)), np.int32)

    def inputs(self, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return *inputs, self.tables.copy()

    def idle(self, row: int) -> int:
        return 0  # it has no tokens, so that it writes to page 0

    def enter(self, row: int, request: Request) -> bool:
        needed = -(-(len(request.prompt) + request.count) // PAGE) - len(request.pages)
        if needed > self.room():
            return False
        request.pages += [self.take() for _ in range(needed)]
        self.tables[row] = 0
        self.tables[row, : len(request.pages)] = request.pages
        self.fill(row, request)
        return True

    def leave(self, request: Request) -> None:
        self.free += request.pages

    def room(self) -> int:
        return len(self.free)

    def take(self) -> int:
        return self.free.pop()


class Shared(Paged):
    """Step 5: pages stay after their texts, and a text begins with those that it finds."""

    def build(self, rows: int) -> None:
        super().build(rows)
        self.tree: dict[tuple[int, tuple[int, ...]], int] = {}  # (page before, tokens) → page; last used last
        self.users: Counter[int] = Counter()

    def keys(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The tokens of each whole page, without the last token, which is always computed."""
        return [tuple(tokens[at : at + PAGE]) for at in range(0, len(tokens) - PAGE, PAGE)]

    def find(self, tokens: Sequence[int]) -> list[int]:
        pages, before = [], 0
        for key in self.keys(tokens):
            if (before, key) not in self.tree:
                break
            page = self.tree.pop((before, key))
            self.tree[before, key] = before = page  # now it was used last
            pages.append(page)
        return pages

    def keep(self, request: Request) -> None:
        """Put the whole pages of a text into the tree."""
        before = 0
        for key, page in zip(self.keys(request.tokens), request.pages, strict=False):
            before = self.tree.setdefault((before, key), page)  # another text may have been first

    def enter(self, row: int, request: Request) -> bool:
        request.pages = self.find(request.prompt)
        request.found = len(request.pages) * PAGE
        self.users.update(request.pages)  # so that they are not given up for its own new pages
        if not super().enter(row, request):
            self.users.subtract(request.pages)
            return False
        self.users.update(request.pages[request.found // PAGE :])
        self.keep(request)
        return True

    def leave(self, request: Request) -> None:
        self.keep(request)
        self.users.subtract(request.pages)
        kept = set(self.tree.values())
        self.free += [page for page in request.pages if page not in kept]

    def unused(self) -> list[tuple[int, tuple[int, ...]]]:
        """The keys of pages that no text uses: a page in use has only such pages before it."""
        return [key for key, page in self.tree.items() if not self.users[page]]

    def room(self) -> int:
        return len(self.free) + len(self.unused())

    def take(self) -> int:
        if not self.free:
            followed = {before for before, _ in self.tree}
            oldest = next(key for key in self.unused() if self.tree[key] not in followed)
            self.free.append(self.tree.pop(oldest))
        return self.free.pop()


def uniforms(seed: int, position: int, attempt: int) -> np.ndarray:
    """Two numbers from 0 to 1 that depend on nothing but these three."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), attempt)
    return (np.asarray(jax.random.key_data(key)) >> 8).astype(np.float32) / np.float32(2**24)


def first_above(weights: np.ndarray, uniform: float) -> int:
    """The index at which the cumulative share exceeds a number."""
    total = np.cumsum(weights, dtype=np.float32)
    return int(np.argmax((total > uniform * total[-1]) & (weights > 0)))


class Sampled(Shared):
    """Step 6: tokens are drawn."""

    def choose(self, request: Request, logits: np.ndarray) -> int:
        if not request.temperature:
            return super().choose(request, logits)
        size = 1 << max(5, round(math.log2(len(logits)) / 2))  # of a block
        scores = np.pad(logits - logits.max(), (0, -len(logits) % size), constant_values=-np.inf)
        scores = (scores / np.float32(request.temperature)).astype(np.float32)
        weights, floor = np.exp(scores), -np.inf
        for attempt in range(64):
            first, second = uniforms(request.seed, len(request.tokens), attempt)
            allowed = np.where(scores > floor, weights, 0).reshape(-1, size)
            block = first_above(allowed.sum(axis=1), first)
            token = block * size + first_above(allowed[block], second)
            if request.top_p >= 1 or weights[scores > scores[token]].sum() < request.top_p * weights.sum():
                break
            floor = scores[token]
        return token


class Engine(Sampled):
    """Step 7: rows also compute guesses, and keep those that are right."""

    width = 5  # the last token, and four guesses

    def feed(self, request: Request) -> list[int]:
        most = min(self.width - 1, len(request.prompt) + request.count - len(request.tokens) - 1)
        return request.tokens[-1:] + lookup(request.tokens, most)

    def accept(self, request: Request, feed: list[int], logits: np.ndarray) -> None:
        for at, row in zip(range(len(feed)), logits, strict=False):
            token = self.choose(request, row)
            request.tokens.append(token)
            if feed[at + 1 : at + 2] != [token]:
                break


def lookup(tokens: Sequence[int], most: int, match: int = 2) -> list[int]:
    """The tokens that followed the last two at their latest earlier place."""
    last = list(tokens[-match:])
    for at in range(len(tokens) - match - 1, -1, -1):
        if list(tokens[at : at + match]) == last:
            return list(tokens[at + match : at + match + most])
    return []


def main() -> None:
    """`python engine.py MODEL "Once upon a time"`."""
    path, text = sys.argv[1], " ".join(sys.argv[2:]) or "Once upon a time"
    tokenizer, engine = Tokenizer.load(path), Engine(load(path, dtype="float32"), rows=1)
    prompt = tokenizer.encode(text)
    engine.generate([prompt], 2)  # compiles
    began, before = time.perf_counter(), engine.steps
    (tokens,) = engine.generate([prompt], 64)
    seconds = time.perf_counter() - began
    print(tokenizer.decode(prompt + tokens))
    print(f"{len(tokens)} tokens in {engine.steps - before} steps, {len(tokens) / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
