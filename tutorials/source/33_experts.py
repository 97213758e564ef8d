# %% [markdown]
# # 33 Experts
#
# *How can a model have thirty billion parameters and the speed of three, and when does it not?*
#
# **Before:** pages 02 and 19. **Afterwards you can** write a router and a mixture of experts, compute how many experts a step reads, and say for which loads a mixture is cheaper than a dense model.
#
# **Also called:** mixture of experts = MoE, sparse model; total and active parameters, as in *30B-A3B*; router = gate; shared expert = an MLP that every token takes; expert parallelism = EP, experts divided over devices.
#
# **Takes:** about 15 minutes, with no model.
#
# ![A router sends each token to two of eight experts; tokens of one step meet in the same ones](../source/pictures/33_experts.svg)
#
# Most parameters of a layer are in its MLP (page 00), and a decode step is as slow as the reading of its weights (page 19). A *mixture of experts* has many MLPs in a layer, and each token takes a few of them. So it
# knows what many parameters know, and reads few. The price: all of them have to be in memory, and tokens that share a step choose different ones.

# %%
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import rekindle
from rekindle.models import config_from_hf, random_model

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)

# %% [markdown]
# ## A router, and what it saves
#
# A router is one small matrix: a row for each of $G$ experts. Its product with the token says how well each expert fits; the $k$ best are taken, and a softmax over those makes their weights:
#
# $$y = \sum_{g \in \mathrm{best}\ k} p_g \cdot \mathrm{MLP}_g(x)$$
#
# Below, every token is first multiplied with every expert, and the results of the others are multiplied by zero. Then the same sum is computed as an engine does it: expert by expert, with the tokens that chose it.
#
# **Predict.** 64 tokens, 8 experts, 2 for each token. Of the products of a token and an expert's MLP, 512 in the first form: how many does the second compute?
#
# <details><summary>Answer</summary>
#
# **128** = 64 · 2, a quarter, for the same result.
#
# </details>

# %%
T, E, G, K, INNER = 64, 32, 8, 2, 48
keys = jax.random.split(jax.random.key(0), 4)
x = jax.random.normal(keys[0], (T, E))
router = jax.random.normal(keys[1], (G, E)) / E**0.5
up = jax.random.normal(keys[2], (G, E, INNER)) / E**0.5
down = jax.random.normal(keys[3], (G, INNER, E)) / INNER**0.5


def route(x, router, k):
    """The k experts of each token [T, k], and their weights, which sum to 1."""
    best, chosen = jax.lax.top_k(x @ router.T, k)
    return chosen, jax.nn.softmax(best, axis=-1)


chosen, weights = route(x, router, K)
everything = jnp.einsum("tgi,gie->tge", jax.nn.silu(jnp.einsum("te,gei->tgi", x, up)), down)
gates = jnp.zeros((T, G)).at[jnp.arange(T)[:, None], chosen].set(weights)
dense = jnp.einsum("tg,tge->te", gates, everything)

sparse, products = np.zeros((T, E)), 0
for expert in range(G):
    tokens, place = np.nonzero(np.asarray(chosen) == expert)  # those that chose it
    made = jax.nn.silu(x[tokens] @ up[expert]) @ down[expert]
    sparse[tokens] += weights[tokens, place][:, None] * made
    products += len(tokens)
load = np.bincount(np.asarray(chosen).ravel(), minlength=G)
print(f"{products} products instead of {T * G}; largest difference {np.abs(sparse - np.asarray(dense)).max():.0e}")
print(f"tokens of each expert: {load.tolist()}; the busiest has {load.max() / load.mean():.1f} times the mean")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert products == 128, "each token meets two experts"
assert np.abs(sparse - np.asarray(dense)).max() < 1e-4, "skipping what is multiplied by zero changes nothing"

# %% [markdown]
# Nothing makes a router choose evenly. Where experts are on different devices the busiest one decides how long a layer takes, so training adds a loss or a bias for each expert that evens them out.
#
# ## How many experts does a step read?
#
# One text reads $k$ experts of each layer. Two texts may choose the same ones, or others. If $B$ tokens choose independently and evenly, an expert is left out by all of them with probability $(1 - k/G)^B$, so a step reads
#
# $$\mathrm{experts}(B) = G \cdot \left(1 - \left(1 - \frac{k}{G}\right)^B\right)$$
#
# **Predict.** Qwen3-30B-A3B has 128 experts in a layer and takes 8. How many does a step of 16 texts read, to the nearest whole number? It computes 8 for each token.
#
# <details><summary>Answer</summary>
#
# **82**: nearly two thirds of the layer, for an eighth of the products that a dense layer of this size would compute.
#
# </details>


# %%
def distinct(experts: int, taken: int, tokens):
    """Experts that a step reads, if its tokens choose evenly."""
    return experts * (1 - (1 - taken / experts) ** np.asarray(tokens))


rng = np.random.default_rng(0)
drawn = np.mean([len({one for _ in range(16) for one in rng.choice(128, 8, replace=False)}) for _ in range(200)])
print(f"by the formula {distinct(128, 8, 16):.1f}, drawn 200 times {drawn:.1f}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(float(distinct(128, 8, 16))) == 82, "sixteen texts read two thirds of the experts"
assert abs(drawn - distinct(128, 8, 16)) < 2, "the formula is what drawing gives"

# %%
MODELS = {  # experts, taken, layers, parameters in billions: of one expert, of everything else
    "Mixtral 8x7B": (8, 2, 32, 3 * 4096 * 14336 / 1e9, 1.6),
    "gpt-oss-20b": (32, 4, 24, 3 * 2880 * 2880 / 1e9, 1.8),
    "Qwen3-30B-A3B": (128, 8, 48, 3 * 2048 * 768 / 1e9, 1.5),
    "DeepSeek-V3": (256, 8, 58, 3 * 7168 * 2048 / 1e9, 17.0),
}
texts = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
print(f"{'billions of parameters':24}{'in memory':>10}" + "".join(f"{f'{n} texts':>11}" for n in (1, 16, 128)))
for name, (experts, taken, layers, one, rest) in MODELS.items():
    total = layers * experts * one + rest
    read = layers * distinct(experts, taken, texts) * one + rest
    print(f"{name:24}{total:10.1f}" + "".join(f"{read[texts == n][0]:11.1f}" for n in (1, 16, 128)))
    plt.plot(texts, read / total, "o-", markersize=3, label=name)
plt.xscale("log", base=2)
plt.xlabel("texts in a step")
plt.ylabel("share of the parameters read")
plt.legend(fontsize=8)
plt.show()

# %% [markdown]
# So a mixture has three regimes. **Few texts**: it reads like a small model. **Some texts**: nearly all experts are read, each for one or two tokens; this is the worst place to be. **Many texts**: everything is read, as by a dense model, but each token is multiplied with
# few experts: now arithmetic is what it saves.

# %%
from IPython.display import HTML

FOLDERS = Path("../source/pictures"), Path("pictures")  # in a clone, and next to a copy of this page
HTML((next(one for one in FOLDERS if one.is_dir()) / "33_slider.html").read_text(encoding="utf-8"))

# %% [markdown]
# ## In the engine
#
# Three models with random weights in 16 bits: one with 32 experts, of which each token takes 4; a dense one as large as what a token takes; and a dense one as large as all of it. They take turns, and of each the quickest of twelve short rounds counts: other programs only ever make one slower.

# %%
COMMON = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE = COMMON | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
SPARSE = COMMON | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
configs = {
    "32 experts, 4 taken": SPARSE,
    "dense, as large as 4": DENSE | {"intermediate_size": 4 * 768},
    "dense, as large as 32": DENSE | {"intermediate_size": 32 * 768},
}
sessions, megabytes = {}, {}
for name, config in configs.items():
    model = random_model(config_from_hf(config), dtype="bfloat16")
    megabytes[name] = model.nbytes / 1e6
    sessions[name] = await rekindle.open(
        model,
        max_requests=16,
        max_tokens_per_step=128,
        max_model_len=128,
        prefix_cache=False,
        precompile="lazy",
        quiet=True,
    )
mixture, small, large = sessions
print({name: f"{size:.0f} MB" for name, size in megabytes.items()})

# %% [markdown]
# **Predict.** With 32 experts and 4 taken, how many experts of a layer does a step read for one text? And for 16, to the nearest whole number?
#
# <details><summary>Answer</summary>
#
# **4** and **28**. So with one text the mixture should be nearly as quick as the small dense model, and with 16 it reads nearly as much as the large one.
#
# </details>

# %%
counts, TOKENS = (1, 4, 16), 4
times = {(name, count): [] for name in sessions for count in counts}
for lap in range(13):
    for count in counts:
        prompts = rng.integers(3, 4000, (count, 4)).tolist()
        for name, session in sessions.items():
            began = time.perf_counter()
            await session.generate(prompts, max_tokens=TOKENS, ignore_eos=True)
            if lap:  # the first compiles
                times[name, count].append((time.perf_counter() - began) / TOKENS)
best = {key: 1e3 * min(seen) for key, seen in times.items()}
print(f"{'ms a step':26}" + "".join(f"{f'{count} texts':>10}" for count in counts))
for name in sessions:
    print(f"{name:26}" + "".join(f"{best[name, count]:10.1f}" for count in counts))
gain = {count: best[large, count] / best[mixture, count] for count in counts}
print("\ntimes as quick as the large dense model:", {count: f"{one:.1f}" for count, one in gain.items()})
over = best[mixture, 1] - best[small, 1]
print(
    f"one text: the mixture takes {over:.1f} ms longer than the small dense model, {over / best[mixture, 1]:.0%} of its step"
)
fastest, slowest = max(counts, key=gain.get), min(counts, key=gain.get)
print(f"the mixture gains most with {fastest} and least with {slowest} texts in a step")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(float(distinct(32, 4, 1))) == 4, "one text reads what it takes"
assert round(float(distinct(32, 4, 16))) == 28, "sixteen read nearly everything"

# %%
for name in sessions:
    plt.plot(counts, [count * 1e3 / best[name, count] for count in counts], "o-", label=name)
plt.xlabel("texts at once")
plt.ylabel("tokens/s")
plt.ylim(0)
plt.legend(fontsize=8)
plt.show()

# %% [markdown]
# For one text the mixture and the small model read as much. What the mixture takes longer is the price of its bookkeeping: it routes, sorts tokens by expert, and starts a product for each expert instead of one large one. In a model
# this small that is much of a step; the matrices of large mixtures are many times as large, and the bookkeeping is the same.
#
# ## Exercise
#
# Write `half(experts, taken)`: the smallest number of texts in a step for which at least half of the experts of a layer are read. Compare 8 of 128 experts with 8 of 256.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def half(experts: int, taken: int) -> int:
    return next(tokens for tokens in range(1, 1000) if distinct(experts, taken, tokens) >= experts / 2)


print(half(128, 8), half(256, 8))
assert half(128, 8) == 11, "eleven texts read half of 128 experts"
assert half(256, 8) == 22, "with twice as many experts it takes twice as many texts"

# %% [markdown]
# ## Takeaway
#
# A mixture is paid in memory by its total parameters, in arithmetic by its active ones, and in reading by something between: the experts that the tokens of a step choose together. It is at its best for one text on a machine with much memory, and for very many texts on many devices.
#
# ## In production
#
# Large mixtures are divided by expert: each device holds some, tokens travel to them and back (all-to-all), and copies of busy experts even out the load. Batches of thousands of tokens over dozens of devices make each expert's product large enough. On a laptop the same models run since 3 billion active parameters are read quickly, if 30 fit.
#
# ## Further reading
#
# - Shazeer et al., *Outrageously Large Neural Networks*, 2017, [arXiv:1701.06538](https://arxiv.org/abs/1701.06538)
# - Jiang et al., *Mixtral of Experts*, 2024, [arXiv:2401.04088](https://arxiv.org/abs/2401.04088)
# - Dai et al., *DeepSeekMoE*, 2024, [arXiv:2401.06066](https://arxiv.org/abs/2401.06066)
# - Gale et al., *MegaBlocks*, 2022, [arXiv:2211.15841](https://arxiv.org/abs/2211.15841)

# %%
for session in sessions.values():
    await session.aclose()
