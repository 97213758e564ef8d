# %% [markdown]
# # 29 Long context
#
# *What does a long text cost, and what do models do to make it cheaper?*
#
# **Before:** pages 02 and 19. **Afterwards you can** compute a model's cache from its config, say from which length on it costs more than the weights, and name four ways to make it smaller.
#
# **Also called:** GQA = grouped queries, MQA with one group; window = sliding-window attention (SWA), local layers; latent attention = MLA; 8-bit pages = KV cache quantisation.
#
# **Takes:** about 15 minutes, with SmolLM2, which page 18 fetches.
#
# ![A page table maps a text's tokens to pages anywhere in one array](../source/pictures/09_pages.svg)
#
# A prompt of 100,000 tokens costs twice. Computing it takes time, once. Then each further token reads the keys and values of all that came before, at each step. The second cost
# is what decides how many long texts a machine can run, and models are built around it.

# %%
import os
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

import rekindle
from rekindle.models import config_from_hf, load, random_model

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)

# %% [markdown]
# ## The cache of one token
#
# Each layer keeps $K$ keys and $K$ values of $D$ numbers, of $b$ bytes each (page 02):
#
# $$\mathrm{cache}(n) = 2 \cdot b \cdot D \cdot K \cdot \sum_{\mathrm{layers}} \min(n, \mathrm{window})$$
#
# Four ideas make it smaller. **Grouped queries** let several query heads share a key and value head: $K$ falls. **Windows** let most layers look at the last tokens alone: those layers stop growing. **Latent
# attention** keeps one short vector for each token, from which a layer makes the keys and values of all heads. And **8-bit pages** halve $b$.
#
# **Predict.** Llama 2 7B has 32 layers with 32 key and value heads of 128 numbers. Llama 3 8B has 8 such heads, also in 32 layers. In 16 bits: how many KiB does a token take in each?
#
# <details><summary>Answer</summary>
#
# **512** KiB and **128** KiB: four query heads share a key and a value.
#
# </details>


# %%
class Kind(NamedTuple):
    """What a model keeps of a token, from its config."""

    layers: int
    numbers: int  # of a token in a layer
    window: int = 0  # of the layers that have one
    windowed: int = 0  # how many have one
    weights: float = 0.0  # parameters that a step reads

    def cache(self, tokens: int, size: float = 2) -> float:
        everything = (self.layers - self.windowed) * tokens
        return size * self.numbers * (everything + self.windowed * min(tokens, self.window))


MODELS = {
    "Llama 2 7B (every head)": Kind(32, 2 * 32 * 128, weights=6.7e9),
    "Llama 3 8B (groups)": Kind(32, 2 * 8 * 128, weights=8.0e9),
    "Gemma 3 27B (windows)": Kind(62, 2 * 16 * 128, 1024, 52, 27e9),
    "DeepSeek-V3 (latent)": Kind(61, 512 + 64, weights=37e9),
    "SmolLM2 135M (groups)": Kind(30, 2 * 3 * 64, weights=134.5e6),
}
print(f"{'':26}{'KiB a token':>12}{'8,192 tokens':>14}{'131,072 tokens':>16}{'in 8 bits':>12}")
for name, kind in MODELS.items():
    sizes = kind.cache(8192), kind.cache(131072), kind.cache(131072, 1)
    print(f"{name:26}{kind.cache(1) / 1024:12.1f}" + "".join(f"{size / 2**30:11.2f} GiB" for size in sizes))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert MODELS["Llama 2 7B (every head)"].cache(1) / 1024 == 512, "32 heads of keys and of values"
assert MODELS["Llama 3 8B (groups)"].cache(1) / 1024 == 128, "8 heads of each"

# %% [markdown]
# DeepSeek-V3 has about a hundred times the parameters of Llama 2 7B and keeps an eighth of its cache. A context as long as these models allow was made by such changes, not by larger memories.
#
# ## When does it cost more than the weights?
#
# A step of $B$ texts reads the weights once and each text's own cache. Both cost the same at
#
# $$n = \frac{\mathrm{weights}}{B \cdot \mathrm{cache}(1)}$$
#
# **Predict.** SmolLM2 reads 269 MB of weights in a step. A token's cache has 23,040 bytes. With 16 texts, at which length does a step read as much cache as weights?
#
# <details><summary>Answer</summary>
#
# **730** tokens. With one text it is 16 times as long.
#
# </details>

# %%
small = MODELS["SmolLM2 135M (groups)"]
for texts in (1, 16, 64):
    print(f"{texts:3} texts: {2 * small.weights / (texts * small.cache(1)):7,.0f} tokens each")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert small.cache(1) == 23040, "2 bytes for each of 30 · 384 numbers"
assert round(2 * small.weights / 1e6) == 269, "2 bytes for each weight, in MB"
assert round(2 * small.weights / (16 * small.cache(1)), -1) == 730, "16 texts read 16 caches"

# %% [markdown]
# This is the other side of batching: weights are shared, caches are not. With long texts more rows bring less and less. Here are the formulas with sliders, for a model of yours:

# %%
from IPython.display import HTML

FOLDERS = Path("../source/pictures"), Path("pictures")  # in a clone, and next to a copy of this page
HTML((next(one for one in FOLDERS if one.is_dir()) / "29_slider.html").read_text(encoding="utf-8"))

# %% [markdown]
# ## Measure it
#
# SmolLM2 in 16 bits, from its file or with random weights of its shape (page 19). One text, with 100 to 4,000 tokens before it. Lengths and kinds of pages take turns, and of each the quickest of several short runs counts: other programs only ever make one slower. We fit a line: what a step takes without a context, and what each thousand tokens add.

# %%
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
fetched = (Path.home() / ".cache" / "rekindle-course").glob("*/*.gguf")
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
model = load(smollm2, dtype="bfloat16") if smollm2 else random_model(config_from_hf(SHAPE), dtype="bfloat16")
options = {"max_requests": 4, "max_model_len": 4352, "max_tokens_per_step": 512, "device_memory": "256MB"}
sessions = {
    name: await rekindle.open(model, kv_dtype=kind, precompile="lazy", quiet=True, disk_memory=0, **options)
    for name, kind in (("16-bit pages", "bfloat16"), ("8-bit pages", "int8"))
}
rng, lengths = np.random.default_rng(0), (100, 1000, 2000, 4000)
prompts = {length: rng.integers(3, 49000, length).tolist() for length in lengths}
milliseconds: dict[str, dict[int, float]] = {name: {} for name in sessions}
prefill: dict[int, float] = {}
for lap in range(12):  # the first computes the prompts, and the others find them
    for name, session in sessions.items():
        for length in lengths:
            done = await session.generate(prompts[length], max_tokens=10, ignore_eos=True)
            if lap == 0 and name == "16-bit pages":
                prefill[length] = done.timings.first_token - done.timings.compiling
            step = 1e3 / done.timings.decode_rate(10)
            milliseconds[name][length] = min(step, milliseconds[name].get(length, step))
slopes = {name: np.polyfit(lengths, list(times.values()), 1) * (1000, 1) for name, times in milliseconds.items()}
for name, (slope, base) in slopes.items():
    print(f"{name}: {base:.1f} ms a token, and {slope:.2f} ms more for each 1,000 tokens of context")

# %%
for name, times in milliseconds.items():
    plt.plot(lengths, list(times.values()), "o-", label=name)
plt.ylim(0)
plt.xlabel("tokens before this one")
plt.ylabel("ms per token")
plt.legend()
plt.show()
slope, base = slopes["16-bit pages"]
doubled = f"{1000 * base / slope:,.0f} tokens" if slope > 0 else "no length that was measured"
print(f"a step takes twice as long at {doubled}; by bytes alone it would be {2 * small.weights / small.cache(1):,.0f}")
print(f"a prompt of 4,000 tokens took {prefill[4000]:.1f} s, the time of {prefill[4000] * 1e3 / base:,.0f} steps")

# %% [markdown]
# The line below the plot compares the measured length with the one that follows from bytes. If the measured one is shorter, attention costs more than its reading: it also multiplies, with fewer numbers in a row than a
# large matrix has.
# On a busy machine the line may even fall: then measure again when it is quiet.
#
# ## 8-bit pages
#
# Keys and values in 8 bits need one more number for each head and token, the scale.
#
# **Predict.** A head has 64 numbers. In 16 bits it needs 128 bytes. In 8 bits with a scale of 4 bytes: how many?
#
# <details><summary>Answer</summary>
#
# **68** bytes, so that nearly twice as many tokens fit.
#
# </details>

# %%
places = {name: session.stats().pages_total * session.config.page_size for name, session in sessions.items()}
print(places, f"{places['8-bit pages'] / places['16-bit pages']:.2f} times as many tokens in 256 MB")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert 64 + 4 == 68, "a number of 4 bytes next to 64 of one byte"
assert 1.7 < places["8-bit pages"] / places["16-bit pages"] < 2, "nearly twice as many tokens fit"

# %% [markdown]
# ## Exercise
#
# Write `longest(kind, gib, texts)`: the longest length at which the caches of `texts` texts fit into `gib` GiB, in 16 bits. Compare Llama 3 8B and Gemma 3 27B by `longest(kind, 40, 8)`.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def longest(kind: Kind, gib: float, texts: int) -> int:
    low, high = 0, 2**30
    while low < high:  # the cache grows with the length, so that halving finds the limit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if texts * kind.cache(middle) <= gib * 2**30 else (low, middle - 1)
    return low


llama, gemma = (longest(MODELS[name], 40, 8) for name in ("Llama 3 8B (groups)", "Gemma 3 27B (windows)"))
print(f"{llama:,} tokens of Llama 3 8B, {gemma:,} of Gemma 3 27B")
assert llama == 40960, "5 GiB for each, 128 KiB for each token"
assert gemma > llama, "ten layers that see everything are fewer than 32"

# %% [markdown]
# ## Takeaway
#
# Weights are read once for a batch, caches once for each text. So long texts are paid in memory and reading, and four changes pay less: fewer heads of keys and values, windows, one latent vector, and fewer bits.
#
# ## In production
#
# Long prompts are computed in chunks alongside other texts' steps, their caches move to host memory between turns (page 06), or one text is divided over devices by its positions. Models mix a few layers that see everything with many that see a window or keep a recurrent state (page 23).
#
# ## Further reading
#
# - Ainslie et al., *GQA*, 2023, [arXiv:2305.13245](https://arxiv.org/abs/2305.13245)
# - DeepSeek-AI, *DeepSeek-V2* (latent attention), 2024, [arXiv:2405.04434](https://arxiv.org/abs/2405.04434)
# - Gemma Team, *Gemma 3*, 2025, [arXiv:2503.19786](https://arxiv.org/abs/2503.19786)
# - Liu et al., *KIVI*, 2024, [arXiv:2402.02750](https://arxiv.org/abs/2402.02750)

# %%
for session in sessions.values():
    await session.aclose()
