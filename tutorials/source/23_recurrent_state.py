# %% [markdown]
# # 23 Recurrent state
#
# *How does the cache of Qwen3.5 or LFM2 differ from a transformer's, and what does that mean for prefix hits?*
#
# **Before:** pages 02 and 05. **Afterwards you can** write a linear-attention layer as a recurrence, compute what a hybrid's cache takes, and predict how much of a prompt it finds.
#
# **Also called:** linear attention = a recurrence with a matrix as its state; gated delta rule (Qwen3.5), SSM (Mamba), short convolution (LFM2); hybrid = layers of both kinds; a state at an edge = checkpoint, Mamba cache.
#
# **Takes:** about 15 minutes, with no model.
#
# ![Attention keeps keys and values of every token; a recurrent layer keeps one state](../source/pictures/23_states.svg)
#
# Attention remembers everything: its cache grows with each token, and so does what a step reads. A *recurrent* layer has a state of fixed
# size, and each token changes it. Models of 2025 mix them, three recurrent layers to one with attention for instance. That saves
# memory, and breaks an assumption of page 05: a page can be cut anywhere, a state can't.

# %%
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
# ## Attention without its softmax
#
# Leave the softmax out of attention, and the sum over all earlier tokens can be carried along:
#
# $$o_t = \sum_{s \leq t} (q_t \cdot k_s) v_s = S_t^T q_t \qquad S_t = S_{t-1} + k_t v_t^T$$
#
# $S$ is a matrix of $D \times D$ numbers, whatever the length. Real layers also forget: they multiply $S$ by a gate below 1, and the delta
# rule takes out what was stored under a key before it writes there.
#
# **Predict.** Keys and values of 64 numbers. After how many tokens does a head's cache of keys and values have more numbers than its state of 64 · 64?
#
# <details><summary>Answer</summary>
#
# After **32**: each token adds 128 numbers, and the state has 4,096.
#
# </details>

# %%
rng = np.random.default_rng(0)
T, D = 100, 64
q, k, v = (jnp.array(rng.standard_normal((T, D)), jnp.float32) / 8 for _ in range(3))
by_attention = jnp.tril(q @ k.T) @ v


def step(state, token):
    q, k, v = token
    state = state + jnp.outer(k, v)
    return state, state.T @ q


state, by_recurrence = jax.lax.scan(step, jnp.zeros((D, D)), (q, k, v))
print(f"largest difference {float(jnp.abs(by_attention - by_recurrence).max()):.0e}; state {state.shape}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert float(jnp.abs(by_attention - by_recurrence).max()) < 1e-4, "a sum over the past is a state"
assert D * D == 4096, "the state has 64 · 64 numbers"
assert D * D // (2 * D) == 32, "a state is as large as keys and values of D / 2 tokens"

# %% [markdown]
# ## A hybrid in the engine
#
# Here is a small random model of Qwen3.5's kind: three layers with the gated delta rule, one with attention. Its text is noise; its cache
# is that of the large ones.

# %%
layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
config = config_from_hf(
    {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 1024,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)
session = await rekindle.open(
    random_model(config, dtype="float32"),
    dtype="float32",
    page_size=16,
    restore="none",
    max_requests=4,
    max_model_len=512,
    max_tokens_per_step=128,
    precompile="lazy",
    quiet=True,
)
prompt = rng.integers(3, 500, 150).tolist()

# %% [markdown]
# ## What a prompt hits
#
# A prefix hit needs keys and values of the layers with attention, which are in pages, *and* the states of the others at exactly that
# position. A state is overwritten at every token, so the engine keeps copies, and only at *edges*, the multiples of 64 tokens: one for each prompt, at the
# last edge that it passes.
#
# **Predict.** A prompt of 150 tokens runs twice, in pages of 16. A transformer would find 144 of them the second time. This model?
#
# <details><summary>Answer</summary>
#
# **128**: the last multiple of 64. Sixteen cached tokens after it are of no use without a state.
#
# </details>

# %%
first = await session.generate(prompt, max_tokens=1)
second = await session.generate(prompt, max_tokens=1)
print(second.usage)
session.explain(second)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert second.usage.cached_tokens == 128, "a hit ends where a state is"

# %% [markdown]
# **Predict.** Another prompt shares the first 100 tokens, and goes on differently. Its last edge within them is at 64, and no state was kept there. How many tokens does it find, and how many does the next prompt find that shares the same 100?
#
# <details><summary>Answer</summary>
#
# **0**, although its pages are there; the next one finds **64**, since the engine has now kept a state where prompts part.
#
# </details>

# %%
found = []
for end in (7, 8):
    done = await session.generate([*prompt[:100], end, end, end], max_tokens=1)
    found.append(done.usage.cached_tokens)
print(found)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert found == [0, 64], "states are kept where prompts were seen to part"

# %% [markdown]
# ## What it saves
#
# Memory of one text, for a model in the shape of Qwen3.5: 24 layers, of which 6 have attention with 2 KV heads of 256 numbers, and 18
# a state of 16 heads with 128 × 128 numbers, in 16 and 32 bits.

# %%
lengths = np.array([0, 2000, 8000, 16000, 32000])
attention_layer, recurrent_layer = 2 * 2 * 256 * 2, 16 * 128 * 128 * 4
transformer = 24 * attention_layer * lengths / 2**20
hybrid = (6 * attention_layer * lengths + 18 * recurrent_layer) / 2**20
plt.plot(lengths, transformer, "o-", label="24 layers of attention")
plt.plot(lengths, hybrid, "o-", label="6 of attention, 18 recurrent")
plt.xlabel("tokens")
plt.ylabel("MiB of one text")
plt.legend()
plt.show()
print(
    f"a copy of the states is {18 * recurrent_layer / 2**20:.0f} MiB, as much as {18 * recurrent_layer // (6 * attention_layer):,} tokens of pages"
)

# %% [markdown]
# So the engine keeps a copy where a prompt ends or where prompts were seen to part, at multiples of 64 tokens, and not one for each page.
#
# ## Exercise
#
# Add a gate: $S_t = g S_{t-1} + k_t v_t^T$ with $g = 0.9$. Write it as attention with weights that decay, and compare. After how many tokens is less than 1 % of a token left in the state?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
GATE = 0.9
apart = np.arange(T)[:, None] - np.arange(T)
decay = jnp.where(apart >= 0, GATE ** np.maximum(apart, 0), 0.0)


def gated(state, token):
    q, k, v = token
    state = GATE * state + jnp.outer(k, v)
    return state, state.T @ q


_, recurrent = jax.lax.scan(gated, jnp.zeros((D, D)), (q, k, v))
off = float(jnp.abs(((q @ k.T) * decay) @ v - recurrent).max())
forgotten = next(tokens for tokens in range(1000) if GATE**tokens < 0.01)
print(f"largest difference {off:.0e}; after {forgotten} tokens less than 1 % is left")
assert off < 1e-4, "a gate is attention whose weights decay"
assert forgotten == 44, "0.9 to the 44th is below a hundredth"

# %% [markdown]
# ## Takeaway
#
# A recurrent state has one size however long the text is, and no history. So a prefix hit needs a saved state, and engines keep states at chosen
# positions.
#
# ## In production
#
# vLLM and SGLang keep states of hybrids at block boundaries or at the ends of requests, and trade their number against hits; training and prefill compute the recurrence in chunks, as matrix products. Speculation has to keep the state after each draft, since a refused one can't be taken back: rekindle writes them to slots of their own, SGLang keeps their inputs and computes the accepted ones again.
#
# ## Further reading
#
# - Katharopoulos et al., *Transformers are RNNs*, 2020, [arXiv:2006.16236](https://arxiv.org/abs/2006.16236)
# - Gu and Dao, *Mamba*, 2023, [arXiv:2312.00752](https://arxiv.org/abs/2312.00752)
# - Yang et al., *Gated Delta Networks*, 2024, [arXiv:2412.06464](https://arxiv.org/abs/2412.06464)
# - Pan et al., *Marconi: Prefix Caching for the Era of Hybrid LLMs*, 2024, [arXiv:2411.19379](https://arxiv.org/abs/2411.19379)

# %%
await session.aclose()
