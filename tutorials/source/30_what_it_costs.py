# %% [markdown]
# # 30 What it costs
#
# *How many users does one machine serve, and what does a million tokens cost?*
#
# **Before:** pages 03, 19 and 29. **Afterwards you can** measure what a user waits for, find the load that a machine can take, and work out on paper which machine a model needs and what its tokens cost.
#
# **Also called:** TTFT = time to the first token; TPOT = time per output token, ITL; goodput = requests a second that keep their goals (SLO); open loop = arrivals that do not wait for answers.
#
# **Takes:** about 15 minutes, with SmolLM2, which page 18 fetches.
#
# ![Static batches wait for their longest text; continuous batching gives a free slot to the next](../source/pictures/03_batching.svg)
#
# Tokens a second of a full machine are its owner's number. Its users see two others: how long until something appears (TTFT), and how quickly it goes on (TPOT). With rising load all three rise, until
# the users' numbers become unbearable. So the number that matters is *goodput*: how many requests a second keep both goals.

# %%
import asyncio
import os
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

import rekindle
from rekindle.models import config_from_hf, random_model

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
model = smollm2 or random_model(config_from_hf(SHAPE), quantize="int4-32")  # four bits, either way
session = await rekindle.open(
    model, max_requests=8, max_tokens_per_step=128, max_model_len=256, prefix_cache=False, precompile="lazy", quiet=True
)
rng = np.random.default_rng(0)
PROMPT, ANSWER = 48, 24


async def request() -> tuple[float, float]:
    """One user's request: seconds to the first token, and seconds for each further one."""
    done = await session.generate(rng.integers(3, 49000, PROMPT).tolist(), max_tokens=ANSWER, ignore_eos=True)
    return done.timings.first_token, (done.timings.total - done.timings.first_token) / (ANSWER - 1)


# %% [markdown]
# ## Alone, and all at once
#
# First the two ends: one user alone, and a queue that never empties. The second is the machine's capacity.
#
# **Predict.** Eight rows are full all the time. A request takes a prompt and 24 tokens. By Little's law, if each request spends 2 seconds in a row, how many requests a second does the machine finish?
#
# <details><summary>Answer</summary>
#
# **4** = 8 / 2: rows divided by the time that a request has one.
#
# </details>

# %%
await asyncio.gather(*(request() for _ in range(16)))  # compiles
rounds = []
for _ in range(4):  # the quickest counts: other programs only ever make one slower
    began = time.perf_counter()
    await asyncio.gather(*(request() for _ in range(32)))
    rounds.append(time.perf_counter() - began)
capacity = 32 / min(rounds)
alone = [await request() for _ in range(4)]
first, further = (min(one[part] for one in alone) for part in (0, 1))
print(f"alone: {first * 1e3:.0f} ms to the first token, {further * 1e3:.1f} ms for each further one")
print(f"full: {capacity:.1f} requests a second, {capacity * ANSWER:.0f} tokens a second")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert 8 / 2 == 4, "Little's law: what is inside is the rate times the time inside"

# %% [markdown]
# ## Rising load
#
# Users do not wait for each other: requests arrive by chance, with exponential pauses. We let them arrive at a third of the capacity, two thirds, nine tenths, and at one and a half times of it. The goals for the first token and for further ones are multiples of what one user alone sees.
#
# $$\mathrm{goodput} = \frac{\mathrm{requests\ that\ keep\ both\ goals}}{\mathrm{seconds}}$$


# %%
async def load_of(rate: float, seconds: float) -> tuple[list[tuple[float, float]], float]:
    """What each of the requests saw that arrived in these seconds, and how long it took until all were done."""
    arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * seconds) + 1))
    began = time.perf_counter()

    async def user(at: float) -> tuple[float, float]:
        await asyncio.sleep(max(0, began + at - time.perf_counter()))
        return await request()

    seen = await asyncio.gather(*map(user, arrivals))
    return list(seen), time.perf_counter() - began


loads, outcomes = (1 / 3, 2 / 3, 0.9, 1.5), {}
print(f"{'load':>5}{'requests/s':>12}{'TTFT p50':>11}{'p90':>8}{'TPOT p50':>11}{'kept':>7}{'goodput':>9}")
for load_ in loads:
    seen, took = await load_of(load_ * capacity, 10)
    firsts, furthers = np.array(seen).T * 1e3
    kept = (firsts < 6e3 * first) & (furthers < 4e3 * further)
    outcomes[load_] = np.percentile(firsts, 90), kept.mean(), kept.sum() / took
    print(
        f"{load_:5.2f}{load_ * capacity:12.1f}{np.median(firsts):8.0f} ms{np.percentile(firsts, 90):5.0f} ms"
        f"{np.median(furthers):8.1f} ms{kept.mean():7.0%}{outcomes[load_][2]:9.1f}"
    )
best = max(loads, key=lambda one: outcomes[one][2])
print(f"\nthe most requests kept their goals at {best:.2f} of the capacity: {outcomes[best][2]:.1f} a second")
growth = outcomes[1.5][0] / outcomes[1 / 3][0]
print(f"from a third of the capacity to half more than all of it, the slowest tenth waited {growth:.1f} times as long")

# %%
plt.plot(loads, [outcomes[one][0] for one in loads], "o-")
plt.axhline(6e3 * first, linestyle=":", color="0.5")
plt.xlabel("load, in parts of the capacity")
plt.ylabel("TTFT p90, ms")
plt.ylim(0)
plt.show()

# %% [markdown]
# Above the capacity no scheduler helps: the queue grows for as long as the load lasts, and the longer one measures, the worse it looks. Below it the choice is how to divide the pain between first and further tokens (page 03).
#
# ## A million tokens
#
# With a price for an hour of the machine, tokens have a price:
#
# $$\mathrm{price\ of\ 10^6\ tokens} = \frac{\mathrm{price\ of\ an\ hour}}{3600 \cdot \mathrm{tokens/s}} \cdot 10^6$$
#
# **Predict.** A machine costs 2 dollars an hour and makes 1,000 tokens a second. What do a million tokens cost, to the cent?
#
# <details><summary>Answer</summary>
#
# **0.56** dollars. The same machine with a single user makes few tokens in its hour, and each costs as much more.
#
# </details>


# %%
def million(price_of_hour: float, tokens_per_second: float) -> float:
    return price_of_hour / (3600 * tokens_per_second) * 1e6


print(f"{million(2, 1000):.2f} dollars")
WATTS, KWH = 40, 0.30  # a laptop at work, and what electricity costs
mine = capacity * ANSWER
print(
    f"here, by electricity alone: {million(WATTS / 1000 * KWH, mine):.3f} dollars full, {million(WATTS / 1000 * KWH, 1 / further):.3f} with one user"
)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(million(2, 1000), 2) == 0.56, "3.6 million tokens for two dollars"

# %% [markdown]
# ## On paper
#
# The bounds of pages 19 and 29 need a model's config and a machine's data sheet, and no machine. A step of $B$ texts of $n$ tokens reads weights and caches, divided over the devices. The table also says what fits: weights, and the caches that are left room for.
#
# **Predict.** Llama 3 70B has 70.6 billion parameters. In 16 bits, how many H100s with 80 GB hold its weights, at least? And in 8 bits?
#
# <details><summary>Answer</summary>
#
# **2** for 141 GB, and **1** in 8 bits, with hardly any room for a cache. In practice 4 or 8 are used in 16 bits.
#
# </details>


# %%
class Machine(NamedTuple):
    gigabytes: float
    bandwidth: float  # GB/s
    teraflops: float  # in 16 bits
    dollars: float  # an hour


class Model(NamedTuple):
    parameters: float
    cache: float  # bytes of a token


H100, LAPTOP = Machine(80, 3350, 990, 2.5), Machine(8, 50, 0.5, 0.012)  # the laptop pays its electricity
LLAMA_70B, LLAMA_8B, QWEN_06B = (
    Model(70.6e9, 2 * 2 * 80 * 8 * 128),
    Model(8.0e9, 2 * 2 * 32 * 8 * 128),
    Model(0.6e9, 2 * 2 * 28 * 8 * 128),
)


def paper(
    model: Model, bits: float, machine: Machine, devices: int, texts: int, tokens: int
) -> tuple[float, float, float]:
    """GB that are left for caches, texts that fit, and the most tokens a second of all texts that run."""
    weights = model.parameters * bits / 8
    left = 0.9 * devices * machine.gigabytes * 1e9 - weights
    fit = max(0, int(left // (model.cache * tokens)))
    running = min(texts, fit)
    reading = (weights + running * model.cache * tokens) / (devices * machine.bandwidth * 1e9)
    arithmetic = 2 * model.parameters * running / (devices * machine.teraflops * 1e12)
    return left / 1e9, fit, running / max(reading, arithmetic)


CASES = (
    ("70B, 16 bits, 4 × H100", LLAMA_70B, 16, H100, 4, 8192),
    ("70B, 8 bits, 2 × H100", LLAMA_70B, 8, H100, 2, 8192),
    ("8B, 16 bits, H100", LLAMA_8B, 16, H100, 1, 8192),
    ("8B, 4.5 bits, laptop 8 GB", LLAMA_8B, 4.5, LAPTOP, 1, 4096),
    ("0.6B, 16 bits, H100", QWEN_06B, 16, H100, 1, 256),
)
print(f"{'at most':28}{'GB left':>9}{'texts fit':>11}{'one text':>10}{'64 texts':>10}{'$ / million':>13}")
for name, model_, bits, machine, devices, tokens in CASES:
    left, fit, one = paper(model_, bits, machine, devices, 1, tokens)
    many = paper(model_, bits, machine, devices, 64, tokens)[2]
    cost = million(devices * machine.dollars, many) if many else float("nan")
    print(f"{name:28}{left:9.1f}{fit:11,}{one:8.0f}/s{many:8,.0f}/s{cost:13.2f}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert -(-LLAMA_70B.parameters * 2 // 80e9) == 2, "141 GB in 16 bits"
assert -(-LLAMA_70B.parameters // 80e9) == 1, "71 GB in 8 bits"

# %% [markdown]
# These are bounds, and no engine reaches them. An H100 has run rekindle once, with the last line's model: one text made the tokens a second that the cell compares ([figures](../../.github/docs/pages/accelerators.md)).

# %%
MEASURED = 439, 497  # one text of the 0.6B shape in 16 bits, on an H100
bound = paper(QWEN_06B, 16, H100, 1, 1, 256)[2]
print(f"bound {bound:,.0f} tokens/s; measured {MEASURED[0] / bound:.0%} to {MEASURED[1] / bound:.0%} of it")
print(f"a step by the bound: {1e3 / bound:.2f} ms; measured: {1e3 / MEASURED[1]:.1f} to {1e3 / MEASURED[0]:.1f} ms")

# %% [markdown]
# A step of a model that small is over in a third of a millisecond by its bytes. What the host does for a step, and the start of each kernel, is then most of it: the quicker the machine, the more the rest counts.
#
# ## Exercise
#
# Write `devices(model, bits, machine, texts, tokens)`: the smallest number of devices, of 1, 2, 4 and 8, that hold `texts` texts. How many H100s for Llama 3 70B in 16 bits with 64 texts of 8,192 tokens?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def devices(model: Model, bits: float, machine: Machine, texts: int, tokens: int) -> int | None:
    return next((n for n in (1, 2, 4, 8) if paper(model, bits, machine, n, texts, tokens)[1] >= texts), None)


needed = devices(LLAMA_70B, 16, H100, 64, 8192)
print(f"{needed} H100s; each text has {LLAMA_70B.cache * 8192 / 1e9:.1f} GB of cache")
assert needed == 8, "the caches need more than the weights"

# %% [markdown]
# ## Takeaway
#
# Users wait for a first token and for each further one; owners pay for hours. Goodput joins both: requests that keep their goals. A full machine makes cheap tokens and slow answers, and the bound on paper says before you rent it whether a machine can be worth it.
#
# ## In production
#
# Loads are measured with recorded traffic, at percentiles, for hours. Machines are kept at half to two thirds of their capacity, requests beyond it are refused early, and prefill runs on other machines than decoding where both goals are tight (DistServe).
#
# ## Further reading
#
# - Zhong et al., *DistServe: goodput-optimized serving*, 2024, [arXiv:2401.09670](https://arxiv.org/abs/2401.09670)
# - Agrawal et al., *Sarathi-Serve*, 2024, [arXiv:2403.02310](https://arxiv.org/abs/2403.02310)
# - Harchol-Balter, *Performance Modeling and Design of Computer Systems*, 2013

# %%
await session.aclose()
