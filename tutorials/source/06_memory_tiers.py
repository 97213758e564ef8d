# %% [markdown]
# # 06 Memory tiers
#
# *What happens to cached pages when the device is full?*
#
# **Before:** page 05. **Afterwards you can** say where a page is and when it moves, bound each tier, and choose a policy.
#
# **Also called:** tiers = KV cache offloading, hierarchical cache (SGLang's HiCache, LMCache); `lpm` and `dfs-weight` are SGLang's names; eviction = LRU.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![Pages move down when a tier is full, and up when a prompt hits them](../source/pictures/06_tiers.svg)
#
# A laptop's GPU has 8 GB, the laptop itself 32, its disk 1,000. A page that has to leave the device moves down instead of
# being lost, and it comes back when a prompt needs it, if copying is quicker than computing. To see it happen we
# give a session room for 50 pages on the device.
#
# On a CPU the device's memory and the host's are the same chips. Pages move as they would on a GPU, and the saving of a hit is real:
# tokens that are not computed. What this page can't show is a link: a GPU's is ten to fifty times slower than its memory.

# %%
import matplotlib.pyplot as plt
import numpy as np

import rekindle

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
PAGE = 16
OPTIONS = {
    "page_size": PAGE,
    "device_pages": 51,  # 48 pages for three documents, two for questions, and one that padding is written to
    "max_model_len": 512,
    "max_requests": 2,
    "max_tokens_per_step": 128,
    "disk_memory": 0,
    "precompile": "lazy",
}
session = await rekindle.open("tiny", **OPTIONS)
rng = np.random.default_rng(0)
documents = [rng.integers(300, 1500, 256).tolist() for _ in range(5)]  # random tokens: only their number matters here
print(f"{256 // PAGE} pages per document, 50 on the device, {len(documents)} documents")

# %% [markdown]
# ## Filling the device
#
# Three documents fit. With the fourth, the least recently used pages leave.
#
# **Predict.** Five documents have 80 pages, and the device keeps 50. How many pages have to be in host memory at least?
#
# <details><summary>Answer</summary>
#
# **30**. There are more: pages are copied down ahead of time, before room is needed.
#
# </details>


# %%
async def ask(number: int):
    """A question about a document; the question differs every time, so the last page does too."""
    return await session.generate([*documents[number], int(rng.integers(300, 1500))], max_tokens=2)


rows = []
for number in range(5):
    await ask(number)
    stats = session.cache.stats()
    rows.append((stats.device_bytes / 1e6, stats.host_bytes / 1e6))
device, host = np.array(rows).T
plt.bar(range(1, 6), device, label="device")
plt.bar(range(1, 6), host, bottom=device, label="host memory")
plt.xlabel("documents read")
plt.ylabel("MB of pages")
plt.legend()
plt.show()
pages_below = host[4] * 1e6 / (device.max() * 1e6 / 50)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert device[4] > 0.9 * device.max(), "the device stays full"
assert round(pages_below) >= 30, "what leaves the device is in host memory"

# %% [markdown]
# The tree shows where each run of pages is now, how often it was visited, and how long ago.

# %%
session.cache.tree()

# %% [markdown]
# ## Coming back
#
# The first document's pages are in host memory. `explain` tells what a prompt would find, without running it.

# %%
session.cache.explain([*documents[0], 5])

# %% [markdown]
# **Predict.** The document has 256 tokens, and the question one. How many are copied back, and how many does the step compute?
#
# <details><summary>Answer</summary>
#
# **256** are copied and **1** is computed.
#
# </details>

# %%
async with session.paused():
    handle = session.submit([*documents[0], 5], max_tokens=2)
    report = await session.step()
done = await handle
print(done.usage)
report

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert done.usage.cached_tokens == 256, "pages come back from host memory"
assert report.tokens == 1, "only the question is computed"

# %% [markdown]
# Only the question is left to compute, one token in a decode row. Pages travel in front of the step that needs them and pages
# that must make room leave before that; all of it in the same step, in this order on the device: read out, write in, compute.
# (The first time, both copies have programs to compile, which is the time on the host.)
#
# ## Copy or compute?
#
# Copying is not always worth it. A small model computes a page in less time than a slow link needs to move it. The session measures
# both and copies if
#
# $$\mathrm{pages} \cdot t_{\mathrm{copy}} < \mathrm{tokens} \cdot t_{\mathrm{compute}}$$
#
# What it has measured so far:

# %%
for number in (1, 2, 3, 4, 0, 1, 2, 3, 4):
    await ask(number)
stats = session.cache.stats()
print(stats)
print(stats.rates)
print(stats.refused_copies, "times computing was expected to be quicker")

# %% [markdown]
# ## A budget for host memory
#
# `host_memory` bounds the second tier, and the least recently used page leaves it, too. `prune` shrinks it now, for
# instance before you load a data set.

# %%
print(f"{session.cache.stats().host_bytes / 1e6:.1f} MB before")
print(session.cache.prune(to=2_000_000), "pages went")
print(f"{session.cache.stats().host_bytes / 1e6:.1f} MB after")
assert session.cache.stats().host_bytes <= 2_000_000, "prune shrinks the tier at once"

# %% [markdown]
# ## Who goes first?
#
# Which page leaves is decided by recency. Which *request* comes next is decided by the policy, and that matters as much: forty
# questions about five documents arrive in random order, but only three documents fit on the device. `fcfs` takes them as they come,
# `lpm` prefers the longest cached prefix. (`dfs-weight` works through one branch of the tree after the other; these documents share
# no beginnings, so it does the same as `lpm` here.) Without host memory, so that a miss is a miss.
#
# **Predict.** Forty prompts, five documents. Which share of the tokens can any order take from the cache at most?
#
# <details><summary>Answer</summary>
#
# **0.875**: each document has to be read once, so at most 35 of 40.
#
# </details>

# %%
await session.aclose()
order = rng.permutation(np.repeat(np.arange(5), 8))
questions = [[*documents[number], 300 + index] for index, number in enumerate(order)]
rates = {}
for policy in ("fcfs", "lpm"):
    async with rekindle.open("tiny", **OPTIONS, host_memory=0, policy=policy, seed=0) as session:
        await session.generate(questions, max_tokens=2)
        rates[policy] = session.stats().hit_rate
plt.bar(rates.keys(), rates.values())
plt.ylabel("share of tokens from the cache")
plt.ylim(0, 1)
plt.show()

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert max(rates.values()) <= 0.875, "every document is computed once"
assert rates["lpm"] > rates["fcfs"] + 0.1, "an order that looks at the cache finds more"

# %% [markdown]
# In order of arrival three of five documents are there when a question comes, at best; `lpm` asks all eight questions about a document
# before it is dropped, and reads each document once. No request starves: one that was overtaken too often goes first.
#
# Now first come, first served with host memory: what left the device is found there. The rest is each document's first
# reading, and now and then a copy that was expected to take longer than computing.

# %%
async with rekindle.open("tiny", **OPTIONS, policy="fcfs") as session:
    await session.generate(questions, max_tokens=2)
    print(f"from the cache: {session.stats().hit_rate:.0%}")
    print(session.cache.stats())
    with_host = session.stats().hit_rate
assert with_host > rates["fcfs"], "host memory finds what the device has lost"

# %% [markdown]
# The third tier is the disk, which outlives the process. It is the subject of page 07.

# %% [markdown]
# ## Exercise
#
# How many device pages does `fcfs` need without host memory, so that no document is ever read twice? Compute it, then try.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
documents_pages = sum(len(document) // PAGE for document in documents)
questions_pages = OPTIONS["max_requests"] * 2  # the questions' own, and one for the tokens that come
room = {**OPTIONS, "device_pages": documents_pages + questions_pages + 1}  # and the scratch page
async with rekindle.open("tiny", **room, host_memory=0, policy="fcfs") as session:
    await session.generate(questions, max_tokens=2)
    best = session.stats().hit_rate
print(f"{room['device_pages']} pages: {best:.1%} from the cache")
assert best > 0.87, "with room for all documents, each is read once"

# %% [markdown]
# ## Takeaway
#
# Pages that leave the device go to host memory and to disk, and come back quicker than they could be computed. What helps most is an order of requests
# that uses a page while it is there.
#
# ## In production
#
# LMCache, HiCache and Mooncake keep pages in host memory, on local SSDs and on other machines, and prefetch them layer by layer while the first layers compute. Which page leaves is decided with more than recency: size, cost, and whether a conversation is likely to go on.
#
# ## Further reading
#
# - Sheng et al., *FlexGen*, 2023, [arXiv:2303.06865](https://arxiv.org/abs/2303.06865)
# - Gao et al., *Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention*, 2024, [arXiv:2403.19708](https://arxiv.org/abs/2403.19708)
# - Qin et al., *Mooncake*, 2024, [arXiv:2407.00079](https://arxiv.org/abs/2407.00079)
