# %% [markdown]
# # 19 The roofline
#
# *How many tokens a second should this machine make, and why doesn't it make more?*
#
# **Before:** pages 02 and 03. **Afterwards you can** compute a bound from bytes and operations, measure both limits of a machine, and say which of them a step meets.
#
# **Also called:** memory-bound = bandwidth-bound; arithmetic intensity = operations a byte; the bound = roofline; MBU and MFU = shares of the two limits that are used.
#
# **Takes:** about 15 minutes, with SmolLM2, which page 18 fetches.
#
# ![A step's time is the larger of reading and computing](../source/pictures/19_roofline.svg)
#
# A machine does two things in a step: it reads bytes, and it multiplies and adds. Each has a limit, and a step takes at least as long
# as the slower of the two. We measure both limits here, predict tokens per second from them, and then measure those.
#
# The embedded model fits into the processor's caches, so it would tell us nothing about memory. We take SmolLM2-135M in 16 bits: from its
# file, if page 18 has fetched it, and otherwise random weights of its shape. Their text is noise, and their speed is the same.

# %%
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import rekindle
from rekindle.models import config_from_hf, load, random_model

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
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
print("SmolLM2's weights" if smollm2 else "random weights of SmolLM2's shape")

# %% [markdown]
# ## What a step has to do
#
# To decode one token of one text, every weight is read once, and takes part in one multiplication and one addition. With $B$ texts in
# the step the weights are still read once:
#
# $$\mathrm{bytes} = \mathrm{weights} \cdot \mathrm{size} + B \cdot \mathrm{cache} \qquad \mathrm{operations} = 2 \cdot B \cdot \mathrm{weights}$$
#
# **Predict.** The model has 134.5 million weights in 16 bits. How many MB does a decode step read? And how many operations does it do for each byte, for one text?
#
# <details><summary>Answer</summary>
#
# **269** MB, and **1** operation a byte: two for each weight of two bytes.
#
# </details>

# %%
weights = model.num_parameters
print(f"{weights / 1e6:.1f} million weights, {model.nbytes / 1e6:.0f} MB, {2 * weights / 1e9:.2f} GFLOP a token")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(model.nbytes / 1e6) == 269, "two bytes for each weight"
assert round(2 * weights / model.nbytes, 2) == 1, "an operation for each byte that is read"

# %% [markdown]
# ## The two limits of this machine
#
# Bandwidth: multiply a matrix as large as the model with a vector, which is what a decode step does. Operations: multiply two matrices of
# 4 MB. The best of many short rounds counts, since other programs only ever make a round slower.


# %%
def best(function, *arguments, rounds: int = 40) -> float:
    jax.block_until_ready(function(*arguments))  # compiles
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return min(times)


large, square = jnp.ones((1024, 2**15), jnp.float32), jnp.ones((1024, 1024), jnp.float32)
bandwidth = large.nbytes / best(jax.jit(jnp.matmul), large, large[0])
flops = 2 * 1024**3 / best(jax.jit(jnp.matmul), square, square)
print(f"{bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s in float32")
assert round(square.nbytes / 1e6) == 4, "1,024 · 1,024 numbers of four bytes"
print(f"balanced at {flops / bandwidth:.0f} operations a byte")

# %% [markdown]
# A decode step of one text has one operation for each byte, far below that balance: the processor waits for memory. So the
# bound is
#
# $$\mathrm{tokens/s} \leq \min \left( \frac{B \cdot \mathrm{bandwidth}}{\mathrm{bytes}}, \frac{\mathrm{FLOP/s}}{2 \cdot \mathrm{weights}} \right)$$
#
# Move the sliders: which of the two limits does your machine meet with which model, and how many texts does it take to meet the other one? The bars are bounds, not measurements.

# %%
from IPython.display import HTML

FOLDERS = Path("../source/pictures"), Path("pictures")  # in a clone, and next to a copy of this page
HTML((next(one for one in FOLDERS if one.is_dir()) / "19_slider.html").read_text(encoding="utf-8"))

# %% [markdown]
# ## Predict, then measure
#
# **Predict.** The bound of one text is printed above the measurement. With 8 texts at once, how many tokens does a step make, and how many
# times as many tokens a second?
#
# <details><summary>Answer</summary>
#
# **8**, for one reading of the weights. Less than eight times as many a second, because of the second limit, and because a step has
# other work.
#
# </details>

# %%
session = await rekindle.open(
    model,
    max_requests=16,
    max_tokens_per_step=128,
    max_model_len=256,
    prefix_cache=False,
    precompile="lazy",
    quiet=True,
)
rng = np.random.default_rng(0)
counts, speed, made = (1, 2, 4, 8, 16), {}, {}
print(f"bound of one text: {bandwidth / model.nbytes:.0f} tokens/s")
for _ in range(6):  # the first round compiles; of the others the quickest counts
    for count in counts:
        prompts = rng.integers(3, 4000, (count, 4)).tolist()
        before, began = session.stats().steps, time.perf_counter()
        await session.generate(prompts, max_tokens=20, ignore_eos=True)
        made[count] = max(made.get(count, 0), 20 * count / (session.stats().steps - before))
        speed[count] = max(speed.get(count, 0), 20 * count / (time.perf_counter() - began))
reading, arithmetic = bandwidth / model.nbytes, flops / (2 * weights)
print(f"the two limits meet at {arithmetic / reading:.1f} texts")
for count in counts:
    limit = min(count * reading, arithmetic)
    name = "reading" if count * reading < arithmetic else "arithmetic"
    print(
        f"{count:2} texts: {made[count]:4.1f} tokens a step, {speed[count]:5.0f} tokens/s, "
        f"{speed[count] / limit:4.0%} of {limit:5.0f} by {name}"
    )
share = {count: speed[count] / min(count * reading, arithmetic) for count in counts}
near = "reading explains most" if share[1] > 0.5 else "reading explains less than half"
print(f"\none text: {share[1]:.0%} of its bound, so that {near} of its time")
print(
    f"eight texts: {speed[8] / speed[1]:.1f} times the tokens of one, for {made[8] / made[1]:.1f} times the tokens a step"
)
limit = "arithmetic" if 16 * reading > arithmetic else "reading"
print(f"sixteen texts: the nearer limit is {limit}, and {1 - share[16]:.0%} of the time is neither")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(made[8] / made[1]) == 8, "eight texts share one reading of the weights"

# %%
rows = np.arange(1, 17)
plt.plot(rows, rows * bandwidth / model.nbytes, ":", color="C0", label="reading")
plt.axhline(flops / (2 * weights), linestyle=":", color="C1", label="arithmetic in float32")
plt.plot(counts, [speed[count] for count in counts], "o-", color="0.3", label="measured")
plt.xlabel("texts at once")
plt.ylabel("tokens/s")
plt.ylim(0, 1.3 * max(flops / (2 * weights), max(speed.values())))
plt.legend(fontsize=8)
plt.show()

# %% [markdown]
# The last lines say what these figures mean on the machine that ran them. A share well below 100 % says that neither limit explains the step: it has work that the
# bounds do not count, namely attention, norms, sampling and the host, and a product of a few rows need not run at the speed of two square
# matrices. A share above 100 % says that a limit was measured at a worse moment than the step.
#
# ## Fewer bits
#
# If reading is the limit, half of the bits should give twice the tokens. The same model again in 8 and in 4 bits, one text:

# %%
opened, megabytes = {"16 bits": session}, {"16 bits": model.nbytes / 1e6}
for name, kind in (("8 bits", "int8-weight"), ("4 bits", "int4-32")):
    small = load(smollm2, quantize=kind) if smollm2 else random_model(config_from_hf(SHAPE), quantize=kind)
    megabytes[name] = small.nbytes / 1e6
    opened[name] = await rekindle.open(
        small,
        max_requests=16,
        max_tokens_per_step=128,
        max_model_len=256,
        precompile="lazy",
        prefix_cache=False,
        quiet=True,
    )
rates = dict.fromkeys(opened, 0.0)
for _ in range(24):  # in turns, and in short runs, so that each of them meets a quiet moment
    for name, one in opened.items():
        began = time.perf_counter()
        await one.generate([[5, 6, 7, 8]], max_tokens=8, ignore_eos=True)
        rates[name] = max(rates[name], 8 / (time.perf_counter() - began))
for name, rate in rates.items():
    more, less = rate / rates["16 bits"], megabytes["16 bits"] / megabytes[name]
    print(
        f"{name:8} {megabytes[name]:4.0f} MB {rate:5.0f} tokens/s: {more:.1f} times, and {less:.1f} times fewer bytes"
    )
assert megabytes["4 bits"] < megabytes["8 bits"] < megabytes["16 bits"], "fewer bits are fewer bytes"
for name in ("8 bits", "4 bits"):
    await opened[name].aclose()

# %% [markdown]
# Where the first factor of a line is the smaller one, the difference is unpacking, and the work that does not shrink with the weights. A first factor above the second says that the 16-bit run met a busier machine.
#
# ## The prompt
#
# All tokens of a prompt go through the matrices together, so prefill is on the other side of the roof.
#
# **Predict.** A prompt of 128 tokens in one step: how many operations for each byte of weights?
#
# <details><summary>Answer</summary>
#
# **128**: as many as there are tokens in the step.
#
# </details>

# %%
seconds = []
for _ in range(4):
    done = await session.generate(rng.integers(3, 4000, 128).tolist(), max_tokens=1)
    seconds.append(done.timings.first_token)
print(f"{128 / min(seconds):,.0f} prompt tokens/s, {2 * weights * 128 / min(seconds) / 1e9:.0f} GFLOP/s")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(2 * weights * 128 / model.nbytes) == 128, "each weight that is read serves every token of the step"

# %% [markdown]
# ## Exercise
#
# Write `bound(weights, bits, bandwidth)`, the most tokens a second of one text. What may a laptop with 50 GB/s make with 8 billion weights in 4.5 bits, and an H100 with 3,350 GB/s in 16 bits?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def bound(weights: float, bits: float, bandwidth: float) -> float:
    return bandwidth / (weights * bits / 8)


laptop, h100 = bound(8e9, 4.5, 50e9), bound(8e9, 16, 3350e9)
print(f"{laptop:.0f} tokens/s on the laptop, {h100:.0f} on the H100")
assert round(laptop) == 11, "4.5 GB are read for each token"
assert round(h100) == 209, "16 GB at 67 times the bandwidth"

# %% [markdown]
# ## Takeaway
#
# A step reads all weights, and computes two operations for each weight and token. Few tokens in a step: bytes decide, so take fewer bits or more texts. Many tokens: operations decide. Compute the
# bound first, then ask where the rest of the time goes.
#
# ## In production
#
# An H100 is balanced at about 300 operations a byte in 16 bits, so that batches of hundreds of texts are needed before arithmetic is the limit; long contexts move it back, since each text reads its own cache. Serving systems choose batch, bits and number of devices on this picture, and report the share of each limit that they use.
#
# ## Further reading
#
# - Williams, Waterman and Patterson, *Roofline: An Insightful Visual Performance Model*, CACM, 2009
# - Austin et al., *How to Scale Your Model*, 2025: *All About Rooflines*, *All About Transformer Inference*, [jax-ml.github.io/scaling-book](https://jax-ml.github.io/scaling-book/)
# - Kipply, *Transformer Inference Arithmetic*, 2022
# - Pope et al., *Efficiently Scaling Transformer Inference*, 2022, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102)

# %%
await session.aclose()
