# %% [markdown]
# # 05 The prefix cache
#
# *When is a prompt's beginning not computed again, and how can I see it?*
#
# **Before:** pages 01 and 02. **Afterwards you can** predict how many tokens of a prompt come from the cache, and write prompts that hit.
#
# **Also called:** prefix cache = automatic prefix caching (vLLM), RadixAttention (SGLang), prompt caching (hosted APIs); a *page* = a block (vLLM).
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![Pages of three prompts in a prefix tree](../source/pictures/05_tree.svg)
#
# The keys and values of a token depend on the tokens before it and on nothing else. Two prompts with the same beginning have
# the same keys and values there. The engine keeps them by page in a tree, and a new request starts where the tree ends.

# %%
import matplotlib.pyplot as plt
import numpy as np

import rekindle

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
PAGE = 16
session = await rekindle.open("tiny", page_size=PAGE, restore="none")  # without the pages of earlier kernels

# %% [markdown]
# A *shared prefix* is the normal case: a system prompt, few-shot examples, a document with several questions, a conversation
# that goes on.

# %%
story = (
    "Once upon a time there was a small green dragon called Zoe. Zoe lived in a cave near the river and liked "
    "to paint. One day she found a golden key under a stone. She asked the owl, the fox and the old bear what the key "
    "might open, but nobody knew. So she put it on a red string and wore it around her neck."
)
length = len(session.tokenizer.encode(story))
print(f"{length} tokens, {length // PAGE} full pages and {length % PAGE} tokens more")

# %% [markdown]
# **Predict.** Two prompts begin with these 83 tokens. How many of the second one's tokens come from the cache?
#
# <details><summary>Answer</summary>
#
# **80**: five whole pages. The other three are on a page that goes on differently. (Had four or more tokens of that page been the same, it would
# have been copied to the new prompt.)
#
# </details>

# %%
miss = await session.generate(story + " Then", max_tokens=8)
hit = await session.generate(story + " Suddenly", max_tokens=8)
for done in (miss, hit):
    print(done.usage)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert hit.usage.cached_tokens == 80, "a prompt reuses the whole pages that it shares"

# %% [markdown]
# The second request found the full pages that both prompts share. `explain` says it in words.

# %%
session.explain(hit)

# %% [markdown]
# ## What a step computes after a hit
#
# Step by step: the prefill begins at the first position that is not cached, and the pages in front of it are the same ones
# that the first request filled. Nothing was copied.

# %%
async with session.paused():
    third = session.submit(story + " Zoe", max_tokens=2)
    report = await session.step()
await third
report

# %% [markdown]
# ## Why the last token is computed again
#
# Send a prompt that is cached *completely*, and still not all of it is taken from the cache.
#
# **Predict.** How many of its 48 tokens?
#
# <details><summary>Answer</summary>
#
# **47**: see below.
#
# </details>

# %%
exact = session.tokenizer.encode(story)[: 3 * PAGE]
await session.generate(exact, max_tokens=1)
again = await session.generate(exact, max_tokens=1)
print(again.usage)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert again.usage.cached_tokens == 47, "the last position is computed for its logits"

# %% [markdown]
# The cache holds keys and values, and not what comes out at the end of the network. To choose the next token the engine
# needs the *logits* of the last position, so that position has to run through the model: 47 of the 48 tokens count as cached.
# Its keys and values are in the last page already, and a page that others read must not be written, so the step reads them
# there and stores nothing.
#
# ## The tree
#
# Below, prompts share a beginning and then part. Every branch is stored once. `session.stats()` counts the nodes of the
# tree, which are its pages.
#
# **Predict.** Four prompts of 2, 3, 3 and 4 whole pages share beginnings. How many pages are in the tree at the end, and how many would be without sharing?
#
# <details><summary>Answer</summary>
#
# **5** instead of 12.
#
# </details>

# %%
await session.cache.clear()
words = session.tokenizer.encode(story)  # prompts may be token ids
base, one, two, three = words[: 2 * PAGE], *(words[at * PAGE : (at + 1) * PAGE] for at in (2, 3, 4))
left, right = [*base, *one], [*base, *two]
for ids in (base, left, right, [*left, *three]):
    done = await session.generate([*ids, 1], max_tokens=1)
    print(
        f"{len(ids) + 1:3} tokens, {done.usage.cached_tokens:3} cached, {session.stats().cache.nodes} pages in the tree"
    )

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert 2 + 3 + 3 + 4 == 12, "pages without sharing"
assert session.stats().cache.nodes == 5, "every branch is stored once"

# %% [markdown]
# `session.view.tree()` draws the tree: a bar for each run of pages without a branch, as wide as its tokens and as tall as all that share it, in
# the colour of the tier that holds it. While the kernel lives you can press a bar for its text, and type a prompt to see what it would hit.
# `explain` says that in words.

# %%
session.view.tree()

# %%
session.cache.explain([*left, *three, 1])

# %% [markdown]
# Here is a tree that you can grow: its pages have four words each. Type a prompt that begins like one of these three and see what it would
# hit; Enter sends it. Then make the pages smaller: more is shared, and more pages have to be kept in order.

# %%
session.view.prefixes(
    [
        "You are a friendly helper . Answer in one sentence . What is the capital of Italy ?",
        "You are a friendly helper . Answer in one sentence . Why is the sky blue ?",
        "You are a friendly helper . Tell me a long story about a dragon .",
    ]
)

# %% [markdown]
# ## A conversation
#
# Each turn sends the whole conversation again: the fifth prompt below has 156 tokens, and 128 of them come from the cache. What is
# computed is the last answer's end and the new question. The answer's own tokens are in the cache as well, since generating them
# filled pages, too.

# %%
messages, prompt_tokens, cached = [], [], []
for question in ("Who are you?", "Name three animals.", "What is 2 + 3?", "Tell me a story about a cat.", "Thank you!"):
    messages.append({"role": "user", "content": question})
    reply = await session.chat(messages, max_tokens=40)
    messages.append({"role": "assistant", "content": reply.text})
    prompt_tokens.append(reply.usage.prompt_tokens)
    cached.append(reply.usage.cached_tokens)

assert prompt_tokens[-1] == 156, "the fifth turn's prompt is the whole conversation"
assert cached[-1] == 128, "the fifth turn finds eight pages of 16"
turns = np.arange(1, len(cached) + 1)
plt.bar(turns, cached, label="from the cache")
plt.bar(turns, np.array(prompt_tokens) - cached, bottom=cached, label="computed")
plt.xlabel("turn")
plt.ylabel("prompt tokens")
plt.legend()
plt.show()

# %% [markdown]
# ## What it saves
#
# The time to the first token, with and without a hit, over the length of the shared beginning.
#
# A hit of $h$ of $n$ tokens saves about $h$ tokens' work; what is left is
#
# $$\mathrm{time} \approx \frac{2 \cdot \mathrm{weights} \cdot (n - h)}{\mathrm{FLOP/s}}$$

# %%
rng = np.random.default_rng(0)
lengths = [64, 128, 256, 512, 896]
cold, warm = [], []
for length in lengths:
    times = {"cold": [], "warm": []}
    for _ in range(3):
        ids = rng.integers(300, 1500, length).tolist()
        for name in ("cold", "warm"):
            done = await session.generate([*ids, 5], max_tokens=1)
            times[name].append(done.timings.first_token * 1e3)
    cold.append(min(times["cold"]))
    warm.append(min(times["warm"]))
print(f"a prompt of {lengths[-1]} tokens: {cold[-1]:.0f} ms after a miss, {warm[-1]:.1f} ms after a hit")
assert done.usage.cached_tokens == 896, "one token of 897 is computed after a hit"
plt.plot(lengths, cold, "o-", label="miss")
plt.plot(lengths, warm, "o-", label="hit")
plt.ylim(0)
plt.xlabel("prompt tokens")
plt.ylabel("ms to the first token")
plt.legend()
plt.show()

# %% [markdown]
# ## Two requests at the same time
#
# What if two requests with the same new beginning arrive together? The second one waits for the first to compute it, and then
# hits, rather than computing it twice.

# %%
ids = rng.integers(300, 1500, 320).tolist()
first, second = await session.generate([[*ids, 1], [*ids, 2]], max_tokens=2)
print(first.usage.cached_tokens, "and", second.usage.cached_tokens, "tokens from the cache")
assert second.usage.cached_tokens == 320, "of two that arrive together, one computes and the other waits"

# %% [markdown]
# ## Keeping and forgetting
#
# When pages run short, the least recently used ones leave. `pin` keeps a prompt's pages for as long as you
# like; `session.cache.clear()` forgets all of them (requests that run keep theirs). To see a page leave, take a session that has
# room for 63 pages and nowhere to put what leaves: one story is pinned, another one is not, and then come 90 pages of other
# prompts.

# %%
await session.aclose()
other = story.replace("dragon", "robot").replace("Zoe", "Leo")
small = await rekindle.open(
    "tiny",
    page_size=PAGE,
    device_pages=64,
    max_requests=2,
    precompile="lazy",
    disk_memory=0,
    host_memory=0,
    restore="none",
)
for text in (story, other):
    await small.generate(text, max_tokens=1)
print(small.pin(story), "tokens are pinned")
for _ in range(5):
    await small.generate(rng.integers(300, 1500, 18 * PAGE).tolist(), max_tokens=1)
for name, text in (("pinned", story), ("not pinned", other)):
    done = await small.generate(text + " Then", max_tokens=1)
    print(f"{name:10} {done.usage.cached_tokens} of {done.usage.prompt_tokens} tokens are still there")
print(small.unpin(story), "tokens may leave again")
assert not done.usage.cached_tokens, "what left is nowhere else"

# %%
small.cache.stats()

# %% [markdown]
# Page 06 follows the pages that leave the device, and page 07 takes the cache through a restart of the kernel.

# %% [markdown]
# ## Exercise
#
# Write `predicted(prompts, page)`: how many tokens of each prompt come from the cache, which is empty at first, if they are sent one after the other? Whole pages are shared, and a page is copied if at least four of its tokens are the same. Check it against the engine.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def predicted(prompts: list[list[int]], page: int) -> list[int]:
    cached, hits = [np.zeros(0, int)], []  # the whole pages of each prompt are kept
    for ids in prompts:
        needed = ids[:-1]  # the last position is computed for its logits
        lengths = [min(len(one), len(needed)) for one in cached]
        equal = [np.equal(one[:end], needed[:end]) for one, end in zip(cached, lengths, strict=True)]
        common = max(int(np.cumprod(same).sum()) for same in equal)  # tokens before the first difference
        part = common % page
        hits.append(common if part >= 4 else common - part)
        cached.append(np.array(ids[: len(ids) // page * page]))
    return hits


await small.cache.clear()
first, second, third = (rng.integers(300, 1500, 2 * PAGE).tolist() for _ in range(3))
prompts = [[*first, *second, 7], [*first, *third, 7], [*second, *first, 7], [*first, *second]]
prompts += [[*first, *third[:shared], 7] for shared in (3, 4, 5)]
measured = [(await small.generate(ids, max_tokens=1)).usage.cached_tokens for ids in prompts]
print(predicted(prompts, PAGE), measured)
assert predicted(prompts, PAGE) == measured, (
    "whole pages of a common beginning are found, and parts of a page from four tokens on"
)

# %% [markdown]
# ## Takeaway
#
# Keys and values depend on the beginning of a text alone. A tree of pages keeps them, so that equal beginnings are computed once. Put what stays the
# same first in a prompt.
#
# ## In production
#
# Routers send a request to the replica that has its prefix. Names of pages are hashes of everything before them, so that replicas and disks can share them. Hosted APIs charge cached tokens less, and ask you to put what is constant first.
#
# ## Further reading
#
# - Zheng et al., *SGLang: Efficient Execution of Structured Language Model Programs*, 2023 (RadixAttention), [arXiv:2312.07104](https://arxiv.org/abs/2312.07104)
# - Kwon et al., *PagedAttention*, 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)
# - Qin et al., *Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving*, 2024, [arXiv:2407.00079](https://arxiv.org/abs/2407.00079)

# %%
await small.aclose()
