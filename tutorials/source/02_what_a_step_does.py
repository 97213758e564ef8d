# %% [markdown]
# # 02 What a step does
#
# *What does the machine compute between two tokens?*
#
# **Before:** page 01; a matrix product and a softmax. **Afterwards you can** name what prefill and decode compute, say how large a KV cache is, and say why decode is bound by reading weights.
#
# **Also called:** KV cache = past key values (transformers); prefill = prompt processing, decode = token generation (llama.cpp's `pp` and `tg`); grouped queries = GQA.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![Prefill computes all prompt positions; decode computes one and reads the rest](../source/pictures/02_step.svg)
#
# We write a language model's forward pass in a few lines of `jax.numpy`, generate with it the slow way, make it fast with a
# KV cache, and then watch the engine do the same thing one step at a time. Names from `rekindle._src` are private; they are
# shown here for teaching and may change.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import rekindle
from rekindle import tiny
from rekindle.models import Tokenizer, load

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
model = load(tiny.folder(), dtype="float32")
config = model.config
weights = dict(zip(model.graph.paths, model.leaves, strict=True))  # each array under its name
print(f"{config.num_layers} layers, {model.num_parameters:,} parameters")
for name, array in list(weights.items())[:8]:
    print(f"{name:32}{array.shape}")

# %% [markdown]
# ## A transformer in forty lines
#
# Each of $H$ heads computes
#
# $$\mathrm{attention}(q, K, V) = \mathrm{softmax}\left(\frac{q K^T}{\sqrt{D}}\right) V$$
#
# Three ingredients: a norm, a rotation that tells positions apart, and attention. Shapes: `T` tokens of `E` numbers each, `H`
# query heads, `K` key and value heads, `D` numbers per head, `S` positions that attention looks at. Query heads share key and
# value heads in groups of `H / K`, which `g` counts.

# %%
E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim


def norm(x, weight):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * weight


def rotate(x, positions):
    """Turn pairs of numbers by an angle that grows with the position; the score of two tokens then sees their distance."""
    frequencies = config.ropes[0].theta ** -(jnp.arange(0, D, 2) / D)
    angles = positions[:, None, None] * frequencies
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def attention(q, k, v, positions):
    """q [T, H, D] looks at k and v [S, K, D], of which it may see those that are not in its future."""
    grouped = q.reshape(len(q), K, H // K, D)
    scores = jnp.einsum("tkgd,skd->tkgs", grouped, k) / jnp.sqrt(D)
    future = jnp.arange(len(k)) > positions[:, None]
    shares = jax.nn.softmax(jnp.where(future[:, None, None], -jnp.inf, scores), axis=-1)
    return jnp.einsum("tkgs,skd->tkgd", shares, v).reshape(len(q), H * D)


# %% [markdown]
# The forward pass takes tokens and gives logits, one row for each token: the opinion on what comes after it. What keys and values
# attention looks at is left to `remember`, a function that we will exchange in a moment. The last matrix is the head; a model without one uses
# its embedding again.


# %%
def forward(weights, tokens, positions, remember):
    x = weights["embed.weight"][tokens]
    for layer in range(config.num_layers):
        w = {name.split(".", 2)[2]: a for name, a in weights.items() if name.startswith(f"layers.{layer}.")}
        qkv = norm(x, w["attention_norm.weight"]) @ w["attention.qkv.weight"].T
        q, k, v = (part.reshape(len(tokens), -1, D) for part in jnp.split(qkv, [H * D, (H + K) * D], axis=-1))
        k, v = remember(layer, rotate(k, positions), v)
        x = x + attention(rotate(q, positions), k, v, positions) @ w["attention.out.weight"].T
        gate, up = jnp.split(norm(x, w["mlp_norm.weight"]) @ w["mlp.gate_up.weight"].T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ w["mlp.down.weight"].T
    return norm(x, weights["norm.weight"]) @ weights.get("head.weight", weights["embed.weight"]).T


# %% [markdown]
# ## Without a cache
#
# To get the next token, compute all tokens so far, look at the last row of logits, take the largest. Then do it all again
# with one more token.

# %%
tokenizer = Tokenizer.load(tiny.folder())
prompt = tokenizer.encode("Once upon a time")


@jax.jit
def whole(weights, tokens):
    return forward(weights, tokens, jnp.arange(len(tokens)), lambda layer, k, v: (k, v))


tokens = list(prompt)
for _ in range(12):
    logits = whole(weights, jnp.array(tokens))
    tokens.append(int(logits[-1].argmax()))
print(tokenizer.decode(tokens))

# %% [markdown]
# This works, and is wasteful twice. The work grows with every token, because all earlier ones are computed again. And each length
# is a new shape, for which JAX compiles a new program.
#
# ## With a KV cache
#
# A token can't see its future, so its keys and values never change again. Keep them, and a new token costs one row of work.
# Room for all positions is allocated once, so that shapes stay the same:
#
# - **prefill** computes the whole prompt at once and fills the cache,
# - **decode** computes one token, writes its row, and reads all rows before it.
#
# **Predict.** The cache keeps a key and a value for each layer and KV head, in 4 bytes a number. How many bytes is that for one token?
#
# <details><summary>Answer</summary>
#
# **5,120** = 2 · 5 layers · 2 heads · 64 numbers · 4 bytes. A model of 8 billion weights needs 128 KiB in 16 bits.
#
# </details>

# %%
CONTEXT = 256
empty = jnp.zeros((2, config.num_layers, CONTEXT, K, D))


@jax.jit
def step(weights, cache, tokens, start):
    """Compute `tokens` at positions start, start + 1, …; gives logits and the new cache."""
    new = [cache]

    def remember(layer, k, v):
        kv = jnp.stack([k, v])[:, None]
        new[0] = jax.lax.dynamic_update_slice(new[0], kv, (0, layer, start, 0, 0))
        return new[0][0, layer], new[0][1, layer]

    logits = forward(weights, tokens, start + jnp.arange(len(tokens)), remember)
    return logits, new[0]


logits, cache = step(weights, empty, jnp.array(prompt), 0)  # prefill
cached = [*prompt, int(logits[-1].argmax())]
while len(cached) < len(tokens):
    logits, cache = step(weights, cache, jnp.array(cached[-1:]), len(cached) - 1)  # decode
    cached.append(int(logits[-1].argmax()))
print(cached == tokens, tokenizer.decode(cached))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert empty.nbytes // CONTEXT == 5120, "a token's keys and values are 2 L K D numbers"
assert cached == tokens, "a KV cache gives the same tokens as computing everything again"

# %% [markdown]
# The same tokens. Now measure: time per token over the length of the text, after compiling.
#
# A decode step can't be quicker than reading what it reads, all weights and all keys and values of its $B$ texts:
#
# $$\mathrm{tokens/s} \leq B \cdot \frac{\mathrm{bandwidth}}{\mathrm{weights} + B \cdot \mathrm{cache}}$$

# %%
lengths = [16, 32, 64, 128, 240]


def best(function, *arguments):
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return min(times[1:]) * 1e3


without = [best(whole, weights, jnp.zeros(length, int)) for length in lengths]
with_cache = [best(step, weights, empty, jnp.zeros(1, int), length) for length in lengths]
print(f"the 241st token: {without[-1]:.1f} ms without a cache, {with_cache[-1]:.1f} ms with one")
assert without[-1] > with_cache[-1], "computing 240 tokens again takes longer than reading their cache"
plt.plot(lengths, without, "o-", label="everything again")
plt.plot(lengths, with_cache, "o-", label="KV cache")
plt.ylim(0)
plt.xlabel("tokens so far")
plt.ylabel("ms per token")
plt.legend()
plt.show()

# %% [markdown]
# The decode step reads *all weights* to compute *one token*. Computing the next tokens of eight different texts in one step
# would read them once for eight tokens. That is why engines batch, and it is the subject of page 03.
#
# ## The same in the engine
#
# The engine's cache is not one array per text. Memory is cut into **pages** of a few tokens each, and a text has a list of
# pages. So texts of any length share one pool, and two texts with the same beginning share its pages. `paused()` stops the
# session, `step()` runs exactly one step and reports what it did.

# %%
session = await rekindle.open("tiny", page_size=8, dtype="float32")

async with session.paused():
    handle = session.submit("Once upon a time", max_tokens=12)
    reports = []
    while not handle.done:
        reports.append(await session.step())
reports[0]

# %% [markdown]
# If this step spent seconds on the host, that was XLA, which compiles the program at its first use. The next kernel finds it
# on disk.
#
# The first step is the prefill: all positions of the prompt at once, written to the first page, and one token sampled from the
# last row of logits. The rest are decode steps, one position each. When a page is full the next one is taken from the pool.
#
# **Predict.** The prompt has 4 tokens, pages have 8, and 12 tokens were asked for. How many steps, how many pages?
#
# <details><summary>Answer</summary>
#
# **12** steps: the prefill gives the first token already. **2** pages: 4 + 11 positions, since the last token is never read.
#
# </details>

# %%
for report in reports:
    print(report.rows[0])

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(reports) == 12, "the prefill step gives the first token"
assert -(-(len(prompt) + len(reports) - 1) // 8) == 2, "fifteen positions need two pages of eight"

# %%
done = await handle
print(list(done.token_ids) == tokens[len(prompt) :], repr(done.text))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert list(done.token_ids) == tokens[len(prompt) :], "the engine gives the tokens of the plain loop"

# %% [markdown]
# The engine gives the tokens of our forty lines. Here is its run once more, to go through: the first step computes four positions, each
# other step one, and the text grows by a token a step.

# %%
session.view.steps(reports)

# %% [markdown]
# ## Two texts in one step
#
# Let a second request arrive while the first is decoding. The next step carries both: one decode row and one whole prompt.
#
# **Predict.** The newcomer's prompt has 6 tokens. How many tokens does the step with both compute?
#
# <details><summary>Answer</summary>
#
# **7**: one for the text that is being decoded, and six for the prompt.
#
# </details>

# %%
async with session.paused():
    one = session.submit("Tom had a red ball.", max_tokens=6)
    await session.step()
    await session.step()
    two = session.submit("The little bird sat on the", max_tokens=6)
    mixed = await session.step()
mixed

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert mixed.tokens == 7, "a step carries a decode row and a prompt together"

# %% [markdown]
# All rows go through the same matrices together; only attention looks at different pages for each. The *program* is the
# compiled step: `r2t32` has room for two decode rows and 32 prefill tokens, and unused room is padding. A short list of such
# programs serves every mixture of requests. In a notebook they are compiled in the background, the likeliest first; the table
# shows those that are ready by now.

# %%
print((await one).text, "|", (await two).text)
session.programs()

# %% [markdown]
# ## Exercise
#
# Write `cache_bytes(layers, kv_heads, head_dim, bytes_each)`, the cache of one token. Check it on our model. Then: how many tokens fit into 8 GiB for Llama 3 8B, which has 32 layers, 8 KV heads of 128 numbers, in 16 bits?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def cache_bytes(layers: int, kv_heads: int, head_dim: int, bytes_each: int) -> int:
    return 2 * layers * kv_heads * head_dim * bytes_each


llama = cache_bytes(32, 8, 128, 2)
print(f"{llama // 1024} KiB a token, {2**33 // llama:,} tokens in 8 GiB")
assert cache_bytes(config.num_layers, K, D, 4) * CONTEXT == empty.nbytes, "the formula is our cache's size"
assert 2**33 // llama == 65536, "8 GiB hold 65,536 tokens of Llama 3 8B"

# %% [markdown]
# ## Takeaway
#
# A step computes logits for new positions and reads keys and values of the old ones. Prefill computes many positions at once, decoding one, and
# decoding is slow because each step reads all weights.
#
# ## In production
#
# They fuse norms, rotations and projections into fewer kernels, keep weights and cache in 16 or 8 bits, and split matrices over devices. The two phases stay: some systems even run prefill and decode on different machines (DistServe).
#
# ## Further reading
#
# - Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019, [arXiv:1911.02150](https://arxiv.org/abs/1911.02150)
# - Ainslie et al., *GQA*, 2023, [arXiv:2305.13245](https://arxiv.org/abs/2305.13245)
# - Su et al., *RoFormer*, 2021, [arXiv:2104.09864](https://arxiv.org/abs/2104.09864)
# - Zhong et al., *DistServe*, 2024, [arXiv:2401.09670](https://arxiv.org/abs/2401.09670)

# %%
await session.aclose()
