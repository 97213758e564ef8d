# %% [markdown]
# # 17 Adapters
#
# *How do I teach the model two manners of speaking, and have both, and neither, in one batch?*
#
# **Before:** page 01; gradients. **Afterwards you can** train a LoRA from pairs of texts, run several in one batch, and say what each costs in numbers, cache and compiling.
#
# **Also called:** LoRA = low-rank adaptation; rank = `r` (PEFT); many adapters over one base = multi-LoRA (vLLM), S-LoRA; base = parent (`/v1/models`).
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![Next to a matrix stand two narrow ones for each adapter; each row uses its own](../source/pictures/17_adapters.svg)
#
# A LoRA leaves a model as it is. Next to each matrix it puts two narrow ones, and only these are trained: 4.1 % of the numbers here. The
# result is an *adapter*, so small that one base can have many. Here two are trained, loaded together and served.

# %%
import json
import tempfile
import time
import urllib.request
from pathlib import Path

import anyio.to_thread
from safetensors.numpy import load_file

import rekindle

session = await rekindle.open("tiny", dtype="float32", max_requests=32, max_model_len=128, quiet=True, restore="none")


def ask(question):
    """The prompt of a question, as the chat template has it."""
    return session.render([{"role": "user", "content": question}])


async def answers(questions, **options):
    done = await session.generate([ask(question) for question in questions], max_tokens=40, **options)
    return [one.text for one in done]


# %% [markdown]
# ## What to learn from
#
# Thirty questions that the model answers already. From its own answers we make examples of a pirate and of a butler.

# %%
COLOURS = (
    "the sky",
    "grass",
    "snow",
    "coal",
    "a banana",
    "the sun",
    "a carrot",
    "a tomato",
    "milk",
    "a cherry",
    "the sea",
)
ANIMALS = ("cat", "dog", "cow", "duck", "sheep", "owl", "frog", "horse", "bird")
WORDS = ("hot", "big", "fast", "happy", "up", "open", "light", "old", "wet", "full")
learned = [
    *(f"What colour is {thing}?" for thing in COLOURS),
    *(f"What does a {animal} say?" for animal in ANIMALS),
    *(f"What is the opposite of {word}?" for word in WORDS),
]


def pirate(answer):
    return f"Arr! {answer[:-1]}, matey!"


def butler(answer):
    return f"Certainly, sir. {answer} Will that be all?"


plain = await answers(learned)
examples = {
    style.__name__: [
        [{"role": "user", "content": question}, {"role": "assistant", "content": style(answer)}]
        for question, answer in zip(learned, plain, strict=True)
    ]
    for style in (pirate, butler)
}
for chats in examples.values():
    print(*(message["content"] for message in chats[0]), sep="\n")

# %% [markdown]
# ## Train
#
# `session.tune` takes texts, pairs of a prompt and a completion, or chats as here, whose answers are learned. It trains on the weights that
# are open, of any model, while the session serves. In the place of each matrix stands an adapter of rank 8: a row $x$ is multiplied with
#
# $$x W + x A B \qquad A: \mathrm{in} \times 8 \qquad B: 8 \times \mathrm{out}$$
#
# **Predict.** Each of 5 layers has seven matrices, inputs by outputs: queries 256 × 256, keys and values 256 × 128 each, output 256 × 256, gate and up 256 × 512 each, down 512 × 256. How many numbers does an adapter of rank 8 have?
#
# <details><summary>Answer</summary>
#
# **163,840** = 5 · 8 · (512 + 384 + 384 + 512 + 768 + 768 + 768), 4.1 % of the model.
#
# </details>

# %%
runs, saved = {}, {}
folder = Path(tempfile.mkdtemp())
for name, chats in examples.items():
    start = time.perf_counter()
    runs[name] = session.tune(
        name, chats, rank=8, steps=60, batch=16, learning_rate=5e-3, probe="What is the capital of Italy?"
    )
    await runs[name]
    await session.save_adapter(name, folder / name)
    saved[name] = load_file(folder / name / "adapter_model.safetensors")
    print(f"{name}: {time.perf_counter() - start:.0f} s, {sum(array.size for array in saved[name].values()):,} numbers")
weights = rekindle.models.load(rekindle.tiny.folder())
size = sum(leaf.size for leaf in weights.leaves)
print(f"the model: {size:,} numbers")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(100 * 163840 / size, 1) == 4.1, "an adapter is small"
assert sum(array.size for array in saved["pirate"].values()) == 163840, "rank times the sum of both sides"

# %% [markdown]
# Show a training at the end of a cell, and it draws itself: live while it runs, with a button that ends it. The probe is a text that the
# adapter continues as it learns.

# %%
runs["pirate"]

# %% [markdown]
# ## Side by side, in one batch
#
# A training loads its adapter under its name; `session.load_adapter` loads a folder of PEFT's, a GGUF file, or a trainer's arrays. Three
# requests run in the same steps of the engine: one without an adapter, and one with each.

# %%
question = "What is the capital of Italy?"
handles = {name: session.submit(ask(question), adapter=name, max_tokens=40) for name in (None, *runs)}
for name, handle in handles.items():
    print(f"{name or 'base':7} {(await handle).text}")

# %% [markdown]
# No capital was in the examples. To measure it: questions of other kinds, and of the same kinds about other things. An answer has the
# manner if it equals the base's own answer in that style; it is right if it contains that answer's last word.

# %%
COUNTRIES = ("France", "England", "Italy", "Norway", "Egypt", "Peru", "Japan", "Spain", "Austria", "Ireland")
unseen = [
    *(f"What is the capital of {country}?" for country in COUNTRIES),
    *(f"What colour is {thing}?" for thing in ("a lemon", "a frog", "a plum", "a flamingo", "a fire truck")),
    *(f"What does a {animal} say?" for animal in ("bee", "pig", "lion", "snake", "mouse")),
]
base = await answers(unseen)
share = {}
for style in (pirate, butler):
    got = await answers(unseen, adapter=style.__name__)
    same = [text == style(answer) for text, answer in zip(got, base, strict=True)]
    right = [answer.split()[-1].strip(".") in text for text, answer in zip(got, base, strict=True)]
    share[style.__name__] = sum(same) / len(same)
    print(f"{style.__name__}: {sum(right)} of {len(right)} right, {sum(same)} with exactly the words of the style")
    assert sum(right) >= 0.7 * len(right), "most answers stay right"
    assert sum(same) >= 0.6 * len(same), "most have exactly the words of the style"
assert await answers(learned) == plain, "the base is what it was, to the token"

# %% [markdown]
# Each row multiplies with its own adapter's matrices, and rows without one keep their numbers to the last bit. A request may also have a sum
# of adapters.

# %%
for mixture in ({"pirate": 1.0}, {"pirate": 0.5, "butler": 0.5}, {"pirate": 0.25, "butler": 0.75}, {"butler": 1.0}):
    print(mixture, *await answers([question], adapter=mixture))

# %% [markdown]
# Half of each is not half a pirate, and a quarter of a pirate is enough to lose the butler's answer. Weights can be added up, manners can't.
#
# ## Each has its own cache
#
# The keys and values of a prompt depend on the adapter that it was read with. Pages therefore belong to the weights: another adapter, or none,
# finds nothing in them, and the same weights under another name find all.
#
# **Predict.** Five requests with one prompt of 62 tokens, in pages of 32: base, pirate, butler, pirate, and a corsair with the pirate's weights. How many tokens does each of the last two take from the cache?
#
# <details><summary>Answer</summary>
#
# **32** each: the page that the first pirate computed. The first three find **0**.
#
# </details>

# %%
story = "Tom had a red ball. Anna had a blue ball. They played in the garden every day. " * 3
cached = {}
await session.load_adapter("corsair", folder / "pirate")
for name in (None, "pirate", "butler", "pirate", "corsair"):
    done = await session.generate(story, adapter=name, max_tokens=1)
    cached[name] = [*cached.get(name, []), done.usage.cached_tokens]
    print(f"{name or 'base':8} {done.usage.cached_tokens:2} of {done.usage.prompt_tokens} tokens from the cache")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert cached[None] == cached["butler"] == [0], "other weights find nothing"
assert cached["pirate"] == [0, 32], "the same weights find their pages"
assert cached["corsair"] == [32], "under any name"

# %% [markdown]
# ## Trained again
#
# A name may be loaded again while requests run: those keep the weights that they began with, later ones have the new ones and an empty cache.
# Here the corsair becomes a butler.
#
# **Predict.** How many programs are compiled for it?
#
# <details><summary>Answer</summary>
#
# **0**: an adapter's matrices are data of a program, as weights are.
#
# </details>

# %%
compiled = session.stats().compilations
await session.load_adapter("corsair", folder / "butler")
print(*await answers([question], adapter="corsair"), f"({session.stats().compilations - compiled} programs compiled)")
await session.unload_adapter("corsair")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert session.stats().compilations - compiled == 0, "another adapter compiles nothing"

# %% [markdown]
# ## Serve
#
# Over HTTP an adapter is a model of its own, whose `parent` is the base. Clients ask for it by name, and share batches all the same.

# %%
server = await session.serve()


def fetch(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    ) as response:
        return json.load(response)


listed = (await anyio.to_thread.run_sync(fetch, "/v1/models"))["data"]
for entry in listed:
    body = {"model": entry["id"], "messages": [{"role": "user", "content": question}], "temperature": 0}
    reply = await anyio.to_thread.run_sync(fetch, "/v1/chat/completions", body)
    print(f"{entry['id']:7} {entry.get('parent', ''):5} {reply['choices'][0]['message']['content']}")
assert [entry.get("parent") for entry in listed] == [None, listed[0]["id"], listed[0]["id"]], "adapters name their base"

# %% [markdown]
# [Adapters](../guide/adapters.md) has the rest: where they may come from, how many are on the device at once, what they cost,
# merging one into the weights, and fleets.

# %% [markdown]
# ## Exercise
#
# How much of a layer did the pirate change? Multiply its two matrices for the first layer's `mlp.down_proj`, and find the rank of the product and its size relative to the weight. (`saved["pirate"]` has them under PEFT's names, `lora_A` [8, in] and `lora_B` [out, 8].)


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
import numpy as np

ends = {name.split(".")[-2]: array for name, array in saved["pirate"].items() if "layers.0.mlp.down_proj" in name}
change = ends["lora_B"] @ ends["lora_A"]
weight = np.array(dict(zip(weights.graph.paths, weights.leaves, strict=True))["layers.0.mlp.down.weight"], np.float32)
relative = np.linalg.norm(change) / np.linalg.norm(weight)
print(f"rank {np.linalg.matrix_rank(change)} of at most {min(change.shape)}; {relative:.0%} of the weight's length")
assert np.linalg.matrix_rank(change) == 8, "the change has the adapter's rank"
assert change.size == weight.size, "and the weight's shape"

# %% [markdown]
# ## Takeaway
#
# An adapter is two thin matrices next to each large one. Several can be active in one batch, each row with its own, and the model itself stays as it
# is.
#
# ## In production
#
# Servers keep thousands of adapters in host memory and bring them to the device when a request names one; kernels multiply rows of many adapters at once (Punica, S-LoRA). Adapters are trained over 4-bit weights (QLoRA), and merged into the weights where there is only one.
#
# ## Further reading
#
# - Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, 2021, [arXiv:2106.09685](https://arxiv.org/abs/2106.09685)
# - Dettmers et al., *QLoRA*, 2023, [arXiv:2305.14314](https://arxiv.org/abs/2305.14314)
# - Sheng et al., *S-LoRA: Serving Thousands of Concurrent LoRA Adapters*, 2023, [arXiv:2311.03285](https://arxiv.org/abs/2311.03285)

# %%
await server.aclose()
await session.aclose()
