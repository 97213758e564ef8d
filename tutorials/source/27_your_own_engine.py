# %% [markdown]
# # 27 Your own engine: loop, cache, batch, pages
#
# *Can I write an inference engine myself, and does it say the same as rekindle?*
#
# **Before:** page 02; page 03 helps. **Afterwards you can** write an engine with a KV cache, batches and pages, and prove each part against another engine.
#
# **Also called:** rows = slots, sequences of a batch (`max_num_seqs` in vLLM); the page table = block table; filling = prefill.
#
# **Takes:** about 20 minutes, with the embedded model.
#
# ![Seven steps, each of which changes one decision of the step before](../source/pictures/27_engine.svg)
#
# The best way to understand an engine is to build one. It takes seven steps and 300 lines: four steps here, three on page 28. Each step changes one decision
# of the step before it, runs by itself, and is compared with rekindle on the same prompts, token for token. The cells of both pages are the file
# [engine.py](engine.py), which runs SmolLM2 in your terminal: `python engine.py MODEL.gguf "Once upon a time"`.

# %%
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rekindle
from rekindle import tiny
from rekindle.models import LoadedModel, ModelConfig, Tokenizer, load

# %% [markdown]
# We compare with a session of the embedded model in float32, where equal tokens are a fair demand. In 16 bits the order of a
# sum can decide between two tokens that are almost equally likely.

# %%
COUNT = 24
PROMPTS = ["Once upon a time", "Tom had a red ball.", "The little bird sat on the", "One day, Lily"]
model, tokenizer = load(tiny.folder(), dtype="float32"), Tokenizer.load(tiny.folder())
prompts = [tokenizer.encode(text) for text in PROMPTS]
session = await rekindle.open(model, dtype="float32", max_requests=4, max_model_len=256, precompile="lazy", quiet=True)


async def reference(prompts: list[list[int]], **options: object) -> list[list[int]]:
    """Rekindle's tokens for these prompts."""
    done = await session.generate(prompts, max_tokens=COUNT, ignore_eos=True, **options)
    return [list(one.token_ids) for one in done]


expected = await reference(prompts)
print(tokenizer.decode(prompts[0] + expected[0]))

# %% [markdown]
# ## 1 The loop
#
# A language model is a function from tokens to logits, and generating is a loop around it. The model is that of page 02, for `R` texts at once: `T` new tokens
# each, `S` positions to look at, `H` query heads, `K` heads of keys and values, `D` numbers in a head. It does not say where keys and
# values are kept: it hands the new ones to `remember`, and gets back all that attention looks at.


# %% tags=["engine"]
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


# %% [markdown]
# Padding comes after the text, and no token sees its future. So the padding changes nothing.
#
# **Predict.** The prompt has 4 tokens, and 24 are generated. Count the positions of text that the loop computes, padding left out: 4 for the first token, 5 for the
# second, and so on. How many in all?
#
# <details><summary>Answer</summary>
#
# **372** = 4 + 5 + … + 27.
#
# </details>

# %%
mine = plain_loop(model, prompts[0], COUNT)
computed = sum(range(len(prompts[0]), len(prompts[0]) + COUNT))
print(mine == expected[0], f"{computed} positions were computed for {COUNT} tokens")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert computed == 372, "a loop without a cache computes the text again for each token"
assert mine == expected[0], "step 1 says what rekindle says"

# %% [markdown]
# ## 2 The KV cache
#
# Keys and values of a token never change again: keep them. The cache has room for `R` texts of `context` tokens (here `R` is 1). `rows_step` writes the new
# keys and values to their positions and lets attention look at the whole row.
#
# We also split the work in two, and keep that split to the end. `fill` computes the prompt *without its last token*, in chunks of one size, and needs no logits. Then each
# step computes one token of each text, beginning with the prompt's last. So there are two programs, whatever the lengths are.


# %% tags=["engine"]
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


# %%
mine = cached_loop(model, prompts[0], COUNT)
print(mine == expected[0], f"{len(prompts[0]) - 1 + COUNT} positions were computed for {COUNT} tokens")
assert mine == expected[0], "step 2 says what rekindle says"

# %% [markdown]
# ## 3 The batch
#
# A step reads all weights, whether it computes one text or eight (page 19). So we compute a token of *each* running text in one step. A text that is done
# leaves, and the next one takes its row at once (page 03). The class below has one method for each decision: `enter` and `leave` for a text's room,
# `feed` for the tokens that a row computes, `choose` for a token out of logits, `accept` for what becomes of them. The other steps replace these methods one by one.


# %% tags=["engine"]
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


# %% [markdown]
# **Predict.** Four texts of 24 tokens, and two rows. How many steps does the batch take, prompts left out?
#
# <details><summary>Answer</summary>
#
# **48**: two texts side by side for 24 steps, then the other two.
#
# </details>

# %%
batch = Batch(model, rows=2)
mine = batch.generate(prompts, COUNT)
print(mine == expected, f"{batch.steps} steps for {len(prompts)} texts of {COUNT} tokens")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert batch.steps == 48, "two texts share a step"
assert mine == expected, "step 3 says what rekindle says"

# %% [markdown]
# ## 4 Pages
#
# The batch keeps `context` positions for each row, however short its text is. Pages end that waste (page 09): the cache is `P` pages of `PAGE` tokens, and a
# table says which of them a text has. Position $t$ of a text is
#
# $$\mathrm{page} = \mathrm{table}[\lfloor t / \mathrm{PAGE} \rfloor], \qquad \mathrm{offset} = t \ \mathrm{mod}\ \mathrm{PAGE}$$
#
# A text takes the pages of its whole length when it enters and gives them back when it leaves. If too few are free, it waits. (rekindle takes pages as a text
# grows, and moves one out if none is left.) Page 0 belongs to no text: padding is written there.


# %% tags=["engine"]
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


# %% [markdown]
# **Predict.** Each of the four texts has at most 8 tokens of prompt and 24 after it. With pages of 16 tokens, how many pages are enough to run all four at once? The
# batch of step 3 keeps 4 · 256 positions.
#
# <details><summary>Answer</summary>
#
# **8** pages, which are 128 positions.
#
# </details>

# %%
paged = Paged(model, pages=8)
mine = paged.generate(prompts, COUNT)
print(
    mine == expected, f"{paged.steps} steps over {paged.cache[0].shape[1] - 1} pages; {len(paged.free)} are free again"
)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert max(map(len, prompts)) <= 8, "a prompt and 24 tokens fit into two pages"
assert (paged.steps, len(paged.free)) == (COUNT, 8), "eight pages hold the four texts"
assert mine == expected, "step 4 says what rekindle says"

# %% [markdown]
# This step shows how little an engine needs: a pool, a table, and one line that turns a position into a page and an offset. `both` is the price: it gathers each
# text's pages into one array, in each layer. A kernel that reads pages where they are saves that copy (page 09).
#
# ## Exercise
#
# Write `ShortestFirst`, an engine whose waiting texts enter in the order of their prompts' lengths. One method is enough. Show with one row that the shortest prompt is done first, and that no token changes.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
class ShortestFirst(Paged):
    def step(self) -> None:
        self.waiting.sort(key=lambda request: len(request.prompt))
        super().step()
        self.order = [*getattr(self, "order", ()), self.rows[0]]


one_row = ShortestFirst(model, rows=1)
mine = one_row.generate(prompts, COUNT)
lengths = [len(request.prompt) for request in dict.fromkeys(one_row.order) if request]
print(mine == expected, f"prompts in the order in which they ran: {lengths}")
assert lengths == sorted(lengths), "the shortest prompt ran first"
assert mine == expected, "the order in which texts run changes none of them"

# %% [markdown]
# ## Takeaway
#
# An engine is a loop around one function. Cache, batch and pages decide where keys and values are kept and which texts share a step. None of these decisions
# may change a token, and that makes each of them testable.
#
# ## In production
#
# nano-vllm has the parts of both pages in about 1,200 lines for GPUs. Real engines compute prompts and decoding in one step without padding, read pages in place, take pages as texts grow, move texts out when pages run short, and plan the next step while this one runs (page 12).
#
# ## Further reading
#
# - Xingkai Yu, *nano-vllm*, 2025: an engine to read in an evening
# - Yu et al., *Orca*, OSDI 2022
# - Kwon et al., *PagedAttention*, 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)

# %%
await session.aclose()
