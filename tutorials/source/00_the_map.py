# %% [markdown]
# # 00 The map
#
# *What happens between pressing a key and reading a token, and which page explains it?*
#
# **Before:** nothing but Python. **Afterwards you can** name the parts of an engine and of a transformer layer, say which shapes flow through it, and choose the pages that you need.
#
# **Also called:** a request = prompt, query; a step = forward pass, iteration; a layer = block; parameters = weights.
#
# **Takes:** about 10 minutes, with the embedded model.
#
# One request travels through the parts below: once from top to bottom, and through the loop in the middle once for each token. Run the cell: each part is a link to its page.

# %%
from pathlib import Path

from IPython.display import HTML

from rekindle import tiny
from rekindle.models import load

FOLDERS = (
    Path("../source/pictures"),
    Path("pictures"),
)  # in a clone, and next to a page that `rekindle learn` has copied
picture = next(folder for folder in FOLDERS if folder.is_dir()) / "00_map.svg"
SCRIPT = """<button onclick="const svg = this.previousElementSibling;
svg.animationsPaused() ? svg.unpauseAnimations() : svg.pauseAnimations()">Stop the dot, or let it go on</button>"""
HTML(f"<div>{picture.read_text(encoding='utf-8')}{SCRIPT}</div>")

# %% [markdown]
# - **Once for each request**: a chat becomes a text by its [template](18_a_real_model.ipynb), the text becomes [tokens](31_tokens.ipynb). The
#   [scheduler](03_continuous_batching.ipynb) lets it in, and the [prefix tree](05_prefix_cache.ipynb) says which part of it was computed before.
# - **Once for each token**: a [step](02_what_a_step_does.ipynb) sends the new tokens of all running texts through the model. [Attention](09_paged_attention_in_pallas.ipynb) looks at the
#   pages of each text, and every [weight is read once](19_the_roofline.ipynb). A [grammar](14_objects_instead_of_text.ipynb) may forbid tokens, and
#   [sampling](04_sampling.ipynb) chooses one.
# - **On the way out**: tokens become [text](12_dispatch_loop.ipynb), which [streams](08_streams_and_tasks.ipynb) to your cell.
#
# ## Three tracks
#
# | you want to | pages, in this order |
# |---|---|
# | **use a model** | [01](01_first_tokens.ipynb), [18](18_a_real_model.ipynb), [14](14_objects_instead_of_text.ipynb), [21](21_tools_and_agents.ipynb), [20](20_a_thousand_rows.ipynb), [26](26_pictures.ipynb), [08](08_streams_and_tasks.ipynb), [13](13_serving.ipynb), [17](17_adapters.ipynb), [32](32_why_no_call.ipynb), [31](31_tokens.ipynb) |
# | **know how it works** | [02](02_what_a_step_does.ipynb), [03](03_continuous_batching.ipynb), [19](19_the_roofline.ipynb), [05](05_prefix_cache.ipynb), [04](04_sampling.ipynb), [27](27_your_own_engine.ipynb), [28](28_your_own_engine_finished.ipynb), [29](29_long_context.ipynb), [30](30_what_it_costs.ipynb), [33](33_experts.ipynb), [34](34_four_bits.ipynb), [22](22_speculation.ipynb), [09](09_paged_attention_in_pallas.ipynb), [12](12_dispatch_loop.ipynb), [24](24_several_devices.ipynb), [25](25_replicas_and_routing.ipynb) |
# | **do research** | [15](15_inside_the_model.ipynb), [35](35_which_words.ipynb), [11](11_logits_processor.ipynb), [16](16_train_with_rewards.ipynb), [10](10_bring_your_own_checkpoint.ipynb), [23](23_recurrent_state.ipynb), [07](07_warm_restarts.ipynb), [06](06_memory_tiers.ipynb) |
#
# On each page, cells that show something follow a question. Write your guess down, run the cell, and unfold our answer: a folded cell asserts the figures that it has in bold.
#
# ## A layer, with its shapes
#
# ![A layer of a transformer: what flows through it, and the matrices that it reads](../source/pictures/00_layer.svg)
#
# Let us look at the embedded model's matrices.
#
# **Predict.** It has 4 query heads, 2 heads of keys and values, and 64 numbers in a head. One matrix makes queries, keys and values. How many rows does it have?
#
# <details><summary>Answer</summary>
#
# **512** = (4 + 2 · 2) · 64.
#
# </details>

# %%
model = load(tiny.folder())
config = model.config
shapes = {path: leaf.shape for path, leaf in zip(model.graph.paths, model.leaves, strict=True)}
for path, shape in shapes.items():
    if path.startswith("layers.0.") or not path.startswith("layers."):
        print(f"{path:32} {shape}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert shapes["layers.0.attention.qkv.weight"][0] == 512, "a row for each number of queries, keys and values"

# %% [markdown]
# With a hidden size $E$, $H$ query heads, $K$ heads of keys and values, $D$ numbers in a head and $F$ in the MLP, a layer has
#
# $$E \cdot (H + 2K) \cdot D + H \cdot D \cdot E + 3 \cdot E \cdot F$$
#
# parameters, plus two norms of $E$ each.
#
# **Predict.** The vocabulary has 2,048 tokens. The prompt has 4 tokens. How many logits does a step compute that needs the next token only?
#
# <details><summary>Answer</summary>
#
# **2,048**: a row of the vocabulary's size for the last position. The other rows would tell what comes after tokens that are known.
#
# </details>

# %%
V, E = shapes["embed.weight"]
print(f"{V:,} tokens in the vocabulary, {E} numbers for each")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert V == 2048, "a logit for each token of the vocabulary"

# %% [markdown]
# **Predict.** Attention is what people talk about. Which share of a layer's parameters is in the MLP, to the nearest tenth?
#
# <details><summary>Answer</summary>
#
# **0.7**: here F is twice E, and there are three such matrices. In most models F is larger, and so is the share.
#
# </details>

# %%
layer = {path.removeprefix("layers.0."): shape for path, shape in shapes.items() if path.startswith("layers.0.")}
counts = {path: shape[0] * (shape[1] if len(shape) > 1 else 1) for path, shape in layer.items()}
share = sum(count for path, count in counts.items() if path.startswith("mlp.")) / sum(counts.values())
for path, count in counts.items():
    print(f"{path:24} {count:8,}  {'█' * (count // 10000)}")
print(f"{share:.0%} in the MLP")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(share, 1) == 0.7, "most parameters of a layer are in its MLP"

# %% [markdown]
# ## Exercise
#
# Write `parameters(layers, E, H, K, D, F, V)` for a model whose head is its embedding. Check it on ours, which also has a separate head. Then: how many million has SmolLM2-135M, with 30 layers, E 576, H 9, K 3, D 64, F 1,536 and V 49,152?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def parameters(layers: int, E: int, H: int, K: int, D: int, F: int, V: int) -> int:
    layer = E * (H + 2 * K) * D + H * D * E + 3 * E * F + 2 * E
    return layers * layer + V * E + E


ours = parameters(
    config.num_layers, E, config.num_heads, config.num_kv_heads, config.head_dim, layer["mlp.down.weight"][1], V
)
smollm2 = parameters(30, 576, 9, 3, 64, 1536, 49152)
print(f"{ours:,} and {smollm2 / 1e6:.1f} million")
assert ours + V * E == model.num_parameters, "the formula counts every parameter"
assert round(smollm2 / 1e6, 1) == 134.5, "SmolLM2-135M has its name from there"

# %% [markdown]
# ## Takeaway
#
# A request is prepared once and then takes a loop for each token. The loop is one function, the model, with decisions around it: which texts share a step, where their keys and values are, and which token is chosen.
#
# ## In production
#
# The same parts, in several processes: tokenizing and text in some, the scheduler in one, a worker for each device. The names in vLLM and SGLang are in the line *Also called* of each page.
#
# ## Further reading
#
# - Vaswani et al., *Attention Is All You Need*, 2017, [arXiv:1706.03762](https://arxiv.org/abs/1706.03762)
# - Brendan Bycroft, *LLM Visualization*, [bbycroft.net/llm](https://bbycroft.net/llm): a layer in three dimensions
# - Austin et al., *How to Scale Your Model*, 2025, [jax-ml.github.io/scaling-book](https://jax-ml.github.io/scaling-book/)
