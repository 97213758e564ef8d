# %% [markdown]
# # 09 Paged attention in Pallas
#
# *How does one write a kernel that reads keys and values from scattered pages?*
#
# **Before:** page 02; array programming in JAX. **Afterwards you can** follow a page table, write an online softmax, and split one text's work.
#
# **Also called:** page = block; page table = block table (vLLM); split-KV = flash decoding; the scratch page = the null block.
#
# **Takes:** about 20 minutes, with no model.
#
# ![A page table maps a text's tokens to pages anywhere in one array](../source/pictures/09_pages.svg)
#
# In the engine, the cache of a text is a list of pages somewhere in one big array. Attention has to follow that list. We write
# the decode case (one query per text) as a [Pallas](https://docs.jax.dev/en/latest/pallas/index.html) kernel, in four steps, in interpret mode, so that it
# runs on any CPU. Every step is compared with the *oracle*, a plain implementation that is slow and obviously right.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.experimental import pallas as pl

from rekindle_kernels import AttentionInputs, AttentionOptions, init_pages, reference, write_kv

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)

# %% [markdown]
# ## The problem
#
# Three texts of different lengths, `N=3`. Each has `H=4` query heads that share `K=2` heads of keys and values (grouped
# queries), with `D=16` numbers per head. Pages hold `S=8` tokens, there are `P=16` of them, and a page table of width `W=4`
# says which pages belong to which text.

# %%
N, H, K, D, S, P, W = 3, 4, 2, 16, 8, 16, 4
G = H // K
rng = np.random.default_rng(0)
lengths = jnp.array([19, 5, 32], jnp.int32)
table = np.zeros((N, W), np.int32)  # 0 is the scratch page, which belongs to no text
free = list(rng.permutation(np.arange(1, P)))
for n, length in enumerate(lengths):
    for w in range(-(-int(length) // S)):
        table[n, w] = free.pop()
table = jnp.array(table)
print(table)

# %% [markdown]
# Fill the pages through `write_kv`, token by token: token *t* of a text goes to offset *t mod S* of its page number *t div S*.

# %%
pages = init_pages(P, K, S, D, jnp.float32)
for n, length in enumerate(lengths):
    t = jnp.arange(int(length))
    k, v = rng.standard_normal((2, int(length), K, D)).astype(np.float32)
    pages = write_kv(pages, jnp.array(k), jnp.array(v), table[n, t // S], t % S)
kv = pages.pages  # [P, 2, K, S, D]: keys and values of one page lie together
q = jnp.array(rng.standard_normal((N, H, D)), jnp.float32)
scale = D**-0.5
print(kv.shape)

# %% [markdown]
# The oracle takes what the engine passes to every kernel: one record of arrays and one of options. Decode is the simple half: all
# three rows are decode rows, and there are no prefill tokens.

# %%
batch = AttentionInputs(q, pages, table, lengths, cu_q_lens=jnp.zeros(1, jnp.int32), num_prefills=jnp.int32(0))
expected = reference.attention(batch, AttentionOptions(decode_rows=N, scale=scale))


def compare(name: str, found) -> None:
    print(f"{name}: largest difference {float(jnp.abs(found - expected).max()):.1e}")


# %% [markdown]
# ## Step 1: one program per text, all pages at once
#
# A Pallas kernel is a function over references to memory. The *grid* says how often it runs, and the block specs which part of each
# array every run sees. Here run *n* sees the queries of text *n*, and all pages. Indexing reads from a reference.


# %%
def attend_all(table_ref, length_ref, q_ref, kv_ref, out_ref):
    n = pl.program_id(0)
    chosen = kv_ref[table_ref[n]]  # [W, 2, K, S, D]
    keys, values = (chosen[:, i].transpose(1, 0, 2, 3).reshape(K, W * S, D) for i in (0, 1))
    queries = q_ref[0].reshape(K, G, D)
    scores = jnp.einsum("kgd,ksd->kgs", queries, keys) * scale
    seen = jnp.arange(W * S) < length_ref[n]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    out_ref[0] = jnp.einsum("kgs,ksd->kgd", shares, values).reshape(H, D)


whole = lambda array: pl.BlockSpec(array.shape, lambda n: (0,) * array.ndim)  # noqa: E731
one_text = pl.BlockSpec((1, H, D), lambda n: (n, 0, 0))
found = pl.pallas_call(
    attend_all,
    grid=(N,),
    in_specs=[whole(table), whole(lengths), one_text, whole(kv)],
    out_specs=one_text,
    out_shape=jax.ShapeDtypeStruct((N, H, D), jnp.float32),
    interpret=True,
)(table, lengths, q, kv)
compare("all at once", found)

# %% [markdown]
# Right, and useless on a device: it holds all keys of a text in fast memory at once, and it always reads `W` pages, even for
# the text that has one.
#
# ## Step 2: the softmax that can wait
#
# To go page by page, the softmax must be computed without having seen all scores. Keep three things: the largest score so far,
# the sum of exponentials relative to it, and the weighted sum of values. When a larger score turns up, scale the old sums down:
#
# $$m' = \max(m, s) \qquad \ell' = \ell e^{m - m'} + e^{s - m'} \qquad o' = o e^{m - m'} + v e^{s - m'}$$
#
# In numpy, on one row:

# %%
scores, values = rng.standard_normal(32), rng.standard_normal((32, D))
largest, total, weighted = -np.inf, 0.0, np.zeros(D)
trace = []
for start in range(0, 32, S):
    block, their_values = scores[start : start + S], values[start : start + S]
    new = max(largest, block.max())
    weights = np.exp(block - new)
    correction = np.exp(largest - new)
    total = total * correction + weights.sum()
    weighted = weighted * correction + weights @ their_values
    largest = new
    trace.append(weighted / total)
exact = np.exp(scores) @ values / np.exp(scores).sum()
plt.plot(range(1, 5), [np.abs(part - exact).max() for part in trace], "o-")
plt.xticks(range(1, 5))
plt.xlabel("pages seen")
plt.ylabel("distance from the answer")
plt.show()

# %% [markdown]
# After the last page the distance is zero: this is not an approximation.
#
# ## Step 3: page by page
#
# The kernel now loops over the pages that a text really has; the trip count is `ceil(length / S)`, read from memory. Inside the loop
# it touches one page.
#
# **Predict.** Step 1 read `N * W` pages. How many does a loop over each text's own pages read, for 19, 5 and 32 tokens?
#
# <details><summary>Answer</summary>
#
# **8** = 3 + 1 + 4, instead of 12.
#
# </details>


# %%
def attend_paged(table_ref, length_ref, q_ref, kv_ref, out_ref):
    n = pl.program_id(0)
    length = length_ref[n]
    queries = q_ref[0].reshape(K, G, D) * scale

    def page(w, carry):
        largest, total, weighted = carry
        keys, values = kv_ref[table_ref[n, w], 0], kv_ref[table_ref[n, w], 1]  # [K, S, D]
        scores = jnp.einsum("kgd,ksd->kgs", queries, keys)
        seen = w * S + jax.lax.broadcasted_iota(jnp.int32, (1, 1, S), 2) < length
        scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights, correction = jnp.exp(scores - new), jnp.exp(largest - new)
        total = total * correction + weights.sum(axis=-1, keepdims=True)
        weighted = weighted * correction + jnp.einsum("kgs,ksd->kgd", weights, values)
        return new, total, weighted

    start = (jnp.full((K, G, 1), -1e30), jnp.zeros((K, G, 1)), jnp.zeros((K, G, D)))  # not -inf: inf - inf is nan
    _, total, weighted = jax.lax.fori_loop(0, pl.cdiv(length, S), page, start)
    out_ref[0] = (weighted / total).reshape(H, D)


def decode(kernel, q, kv, table, lengths):
    return pl.pallas_call(
        kernel,
        grid=(N,),
        in_specs=[whole(table), whole(lengths), one_text, whole(kv)],
        out_specs=one_text,
        out_shape=jax.ShapeDtypeStruct((N, H, D), jnp.float32),
        interpret=True,
    )(table, lengths, q, kv)


compare("page by page", decode(attend_paged, q, kv, table, lengths))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert N * W == 12, "step 1 reads the same number of pages for every text"
assert sum(-(-int(length) // S) for length in lengths) == 8, "a loop reads the pages that a text has"
assert float(jnp.abs(decode(attend_paged, q, kv, table, lengths) - expected).max()) < 1e-5, "page by page is exact"

# %% [markdown]
# ## Step 4: more parallel work
#
# Three texts are three programs, but a GPU has more than a hundred processors. A long text alone would keep one of them busy while
# the rest are idle. So split each text into chunks of pages that run in parallel. Each gives its partial sums, and a second,
# tiny pass joins them with the same correction as before. This is known as *split-KV* or *flash decoding*.
#
# **Predict.** The slowest program decides the time. In step 3 it read 4 pages, those of the text of 32 tokens. How many with two splits?
#
# <details><summary>Answer</summary>
#
# **2**: six programs read at most two pages each.
#
# </details>

# %%
SPLITS = 2


def attend_split(table_ref, length_ref, q_ref, kv_ref, largest_ref, total_ref, weighted_ref):
    n, split = pl.program_id(0), pl.program_id(1)
    length = length_ref[n]
    queries = q_ref[0].reshape(K, G, D) * scale
    count = pl.cdiv(pl.cdiv(length, S), SPLITS)  # pages per split

    def page(w, carry):
        largest, total, weighted = carry
        keys, values = kv_ref[table_ref[n, w], 0], kv_ref[table_ref[n, w], 1]
        scores = jnp.einsum("kgd,ksd->kgs", queries, keys)
        seen = w * S + jax.lax.broadcasted_iota(jnp.int32, (1, 1, S), 2) < length
        scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights, correction = jnp.exp(scores - new), jnp.exp(largest - new)
        total = total * correction + weights.sum(axis=-1, keepdims=True)
        return new, total, weighted * correction + jnp.einsum("kgs,ksd->kgd", weights, values)

    first = split * count
    last = jnp.minimum(first + count, pl.cdiv(length, S))
    start = (jnp.full((K, G, 1), -1e30), jnp.zeros((K, G, 1)), jnp.zeros((K, G, D)))
    largest, total, weighted = jax.lax.fori_loop(first, last, page, start)
    largest_ref[0, 0], total_ref[0, 0], weighted_ref[0, 0] = largest, total, weighted


def decode_split(q, kv, table, lengths):
    def everything(array):
        return pl.BlockSpec(array.shape, lambda n, split: (0,) * array.ndim)

    def partial(*shape):
        spec = pl.BlockSpec((1, 1, *shape), lambda n, split: (n, split, *[0] * len(shape)))
        return spec, jax.ShapeDtypeStruct((N, SPLITS, *shape), jnp.float32)

    specs, outputs = zip(partial(K, G, 1), partial(K, G, 1), partial(K, G, D), strict=True)
    largest, total, weighted = pl.pallas_call(
        attend_split,
        grid=(N, SPLITS),
        in_specs=[
            everything(table),
            everything(lengths),
            pl.BlockSpec((1, H, D), lambda n, s: (n, 0, 0)),
            everything(kv),
        ],
        out_specs=list(specs),
        out_shape=list(outputs),
        interpret=True,
    )(table, lengths, q, kv)
    correction = jnp.exp(largest - largest.max(axis=1, keepdims=True))
    return ((weighted * correction).sum(1) / (total * correction).sum(1)).reshape(N, H, D)


compare("split", decode_split(q, kv, table, lengths))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert float(jnp.abs(decode_split(q, kv, table, lengths) - expected).max()) < 1e-5, "so is splitting"
assert max(pl.cdiv(pl.cdiv(int(length), S), SPLITS) for length in lengths) == 2, "two splits halve the longest program"

# %% [markdown]
# ## Can the test fail?
#
# A comparison is worth something if it notices mistakes. Here are three classic ones: an off-by-one in the mask, a page table read
# from the wrong row, and scores that are not divided by √D.
#
# **Predict.** Right kernels differ from the oracle by less than 0.000001. By how much do the classic mistakes differ: about 0.000001, 0.001 or 1?
#
# <details><summary>Answer</summary>
#
# By about **1** each: a comparison can't miss them.
#
# </details>

# %%
mistakes = {
    "mask off by one": decode(attend_paged, q, kv, table, lengths - 1),
    "neighbour's pages": decode(attend_paged, q, kv, jnp.roll(table, 1, axis=0), lengths),
    "scores not scaled": decode(attend_paged, q / scale, kv, table, lengths),
}
for name, found in mistakes.items():
    compare(name, found)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert all(10 ** round(float(jnp.log10(jnp.abs(found - expected).max()))) == 1 for found in mistakes.values()), (
    "classic mistakes show"
)

# %% [markdown]
# ## How large should a page be?
#
# A page belongs to one text, so that half of its last page is unused on average. Small pages waste less, but the table grows, and a kernel copies many small pieces. Room for the longest text, the way before pages, wastes most:

# %%
from pathlib import Path

from IPython.display import HTML

FOLDERS = Path("../source/pictures"), Path("pictures")  # in a clone, and next to a copy of this page
HTML((next(one for one in FOLDERS if one.is_dir()) / "09_slider.html").read_text(encoding="utf-8"))

# %% [markdown]
# ## From here to a real kernel
#
# The kernels in `rekindle_kernels` have the same skeleton. What they add:
#
# - the `BlockSpec` of the pages stays in slow memory, and pages are copied by hand, two ahead of the one being computed,
# - several pages are joined into one block that suits the matrix units, with sizes from a table per device,
# - prefill: many queries per text, where the mask depends on the query's position,
# - sliding windows, soft caps, sinks, and keys and values in 8 bits.
#
# Each of them is compared with this oracle over one shared set of cases, on a CPU in interpret mode; on a machine with the device,
# `pytest -m gpu` and `pytest -m tpu` do the same there.

# %% [markdown]
# ## Exercise
#
# Models such as Gemma let most layers look at the last few tokens only. Change `attend_paged` to a window of 8 tokens, and skip pages that lie before it. The oracle has `sliding_window=8`.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
WINDOW = 8


def attend_window(table_ref, length_ref, q_ref, kv_ref, out_ref):
    n = pl.program_id(0)
    length = length_ref[n]
    queries = q_ref[0].reshape(K, G, D) * scale
    first_seen = jnp.maximum(length - WINDOW, 0)

    def page(w, carry):
        largest, total, weighted = carry
        keys, values = kv_ref[table_ref[n, w], 0], kv_ref[table_ref[n, w], 1]
        position = w * S + jax.lax.broadcasted_iota(jnp.int32, (1, 1, S), 2)
        seen = (position >= first_seen) & (position < length)
        scores = jnp.where(seen, jnp.einsum("kgd,ksd->kgs", queries, keys), -jnp.inf)
        new = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights, correction = jnp.exp(scores - new), jnp.exp(largest - new)
        total = total * correction + weights.sum(axis=-1, keepdims=True)
        return new, total, weighted * correction + jnp.einsum("kgs,ksd->kgd", weights, values)

    start = (jnp.full((K, G, 1), -1e30), jnp.zeros((K, G, 1)), jnp.zeros((K, G, D)))
    _, total, weighted = jax.lax.fori_loop(first_seen // S, pl.cdiv(length, S), page, start)
    out_ref[0] = (weighted / total).reshape(H, D)


windowed = reference.attention(batch, AttentionOptions(decode_rows=N, scale=scale, sliding_window=WINDOW))
off = float(jnp.abs(decode(attend_window, q, kv, table, lengths) - windowed).max())
print(f"largest difference {off:.1e}")
assert off < 1e-5, "a window is one more condition, and fewer pages"

# %% [markdown]
# ## Takeaway
#
# Paged attention is a loop over a table with a running maximum and a running sum. Right kernels differ from the oracle by rounding alone, and any real
# mistake shows.
#
# ## In production
#
# FlashInfer, FlashAttention and vLLM's kernels choose the number of splits per batch from lengths, read pages with asynchronous copies, and pack the queries of a group into one matrix product so that decode uses the matrix units.
#
# ## Further reading
#
# - Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018, [arXiv:1805.02867](https://arxiv.org/abs/1805.02867)
# - Dao et al., *FlashAttention*, 2022, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135)
# - Dao, *FlashAttention-2*, 2023, [arXiv:2307.08691](https://arxiv.org/abs/2307.08691)
# - Kwon et al., *PagedAttention*, 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)
