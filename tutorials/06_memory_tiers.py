# %% [markdown]
# # 06 Memory tiers
#
# *What happens to cached pages when the device is full?*
#
# Device memory is small, host memory is larger, disks are larger still. A page that has to leave the device moves down instead of
# being lost, and it comes back when a prompt needs it, if copying is quicker than computing. To see it happen we
# give a session very little device memory.

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
# Three documents fit. With the fourth, the pages that were not used for the longest time leave.


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

# %%
async with session.paused():
    handle = session.submit([*documents[0], 5], max_tokens=2)
    report = await session.step()
done = await handle
print(done.usage)
report

# %% [markdown]
# Only the question is left to compute, one token in a decode row. Pages travel in front of the step that needs them and pages
# that must make room leave before that; all of it in the same step, in this order on the device: read out, write in, compute.
# (The first time, both copies have programs to compile, which is the time on the host.)
#
# ## Copy or compute?
#
# Copying is not always worth it. A small model computes a page in less time than a slow link needs to move it. The session measures
# both and decides; what it has measured so far:

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

# %% [markdown]
# ## Who goes first?
#
# Which page leaves is decided by recency. Which *request* comes next is decided by the policy, and that matters as much: forty
# questions about five documents arrive in random order, but only three documents fit on the device. `fcfs` takes them as they come,
# `lpm` prefers the longest cached prefix, `dfs-weight` works through one branch of the tree after the other. Here without
# host memory, so that a miss is a miss.

# %%
await session.aclose()
order = rng.permutation(np.repeat(np.arange(5), 8))
questions = [[*documents[number], 300 + index] for index, number in enumerate(order)]
rates = {}
for policy in ("fcfs", "lpm", "dfs-weight"):
    async with rekindle.open("tiny", **OPTIONS, host_memory=0, policy=policy, seed=0) as session:
        await session.generate(questions, max_tokens=2)
        rates[policy] = session.stats().hit_rate
plt.bar(rates.keys(), rates.values())
plt.ylabel("share of tokens from the cache")
plt.ylim(0, 1)
plt.show()

# %% [markdown]
# A policy that looks at the cache reorders the queue so that a document is finished before it is dropped. No request starves:
# one that was overtaken too often goes first.
#
# Now the same order with host memory. First come, first served finds nearly everything, too. What is missing are the
# documents' first readings, and now and then a copy that was expected to take longer than computing.

# %%
async with rekindle.open("tiny", **OPTIONS, policy="fcfs") as session:
    await session.generate(questions, max_tokens=2)
    print(f"from the cache: {session.stats().hit_rate:.0%}")
    print(session.cache.stats())

# %% [markdown]
# The third tier is the disk, which outlives the process. It is the subject of tutorial 07.
