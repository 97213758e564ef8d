# %% [markdown]
# # 15 Inside the model
#
# *What does the model know at which layer, and what happens if I change it?*
#
# **Before:** page 02. **Afterwards you can** read, replace and push the residual stream, and say what each experiment shows.
#
# **Also called:** capture = hooks, activation caching (TransformerLens' `run_with_cache`); patching = causal tracing, interchange intervention; a steering vector = activation addition, control vector (llama.cpp).
#
# **Takes:** about 20 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# Between two layers of a transformer there is one array: the *residual stream*, a vector for each token. Every layer reads it and
# adds to it. Three well-known experiments look at it, replace it, and push it. Here they run on the engine as it is: batched, with
# its prefix cache, and without compiling anything anew from one layer or vector to the next.
#
# ![Layers add to the residual stream; captures read it, patches and vectors change it](../source/pictures/15_stream.svg)

# %%
import matplotlib.pyplot as plt
import numpy as np

import rekindle

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
session = await rekindle.open("tiny", max_requests=16, quiet=True, restore="none")

# %% [markdown]
# ## Reading
#
# `capture` names places and layers. What they held comes back with the completion: a line for each position that was computed, those
# of the prompt and of the output but for its last token, which the model never read.
#
# Each of $L$ blocks adds to the stream, and the head reads the sum:
#
# $$x_{l+1} = x_l + f_l(x_l) \qquad \mathrm{logits} = W \, \mathrm{norm}(x_L)$$
#
# **Predict.** A prompt of 6 tokens, 8 tokens more. How many lines does each array have?
#
# <details><summary>Answer</summary>
#
# **13**: the last token is written and never read.
#
# </details>

# %%
done = await session.generate("Once upon a time there was", max_tokens=8, capture={"residual": "all"})
layers = len(done.captured)
done.captured

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(done.captured["residual", 0]) == 13, "each position that was computed has a line"

# %%
norms = np.stack([np.linalg.norm(done.captured["residual", layer], axis=-1) for layer in range(layers)])
plt.plot(norms[:, 1:].mean(axis=1), marker=".")
plt.xlabel("layer")
plt.ylabel("length of the stream")
plt.show()

# %% [markdown]
# ## The logit lens
#
# The last layer's stream goes through a norm and the head, and that gives the next token. The same norm and head can be put after
# any layer: what would the model say if it had to stop there? (nostalgebraist, 2020)

# %%
await session.view.lens("Once upon a time there was a little girl named")

# %% [markdown]
# Read it from below. The first layers say little that follows; answers appear further up, and the last layer is the most certain. Here is
# the probability of the token that finally wins, layer by layer, for a few beginnings and on average.

# %%
beginnings = [
    "Once upon a time there was a little girl named",
    "Tom had a red ball. He liked to play with his",
    "The dog ran after the cat. The cat was",
    "Anna was sad because she lost her",
    "It was a sunny day and the children went to the",
]
shares = []
for text in beginnings:
    lens = await session.view.lens(text, positions=[-1])
    final = lens.token_ids[-1, 0, 0]
    captured = (await session.generate(text, max_tokens=1, capture=rekindle.Capture({"logits": "all"}, -1))).captured
    logits = np.stack([captured["logits", layer][0] for layer in range(layers)])
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares.append((odds / odds.sum(axis=-1, keepdims=True))[:, final])
plt.plot(np.transpose(shares), color="0.7")
plt.plot(np.mean(shares, axis=0), marker=".")
plt.xlabel("layer")
plt.ylabel("probability of the\nfinal answer")
plt.show()

# %% [markdown]
# ## Patching: where is the name?
#
# Two prompts differ in one word, the name. The model knows later who is meant, so the name has to be carried from where it was read to
# where it is needed. *Activation patching* finds out where: run the second prompt, put the first one's stream in at one layer and one
# position, and see whether the answer turns to the first name (Meng et al., 2022).

# %%
import asyncio

clean = "Tom and Mia went to the park. Tom had a ball. Mia asked,"
other = "Sam and Mia went to the park. Sam had a ball. Mia asked,"
ids = [session.tokenizer.encode(text) for text in (clean, other)]
tokens = [session.tokenizer.decode([token]) for token in ids[1]]
tom, sam = (session.tokenizer.encode(name, add_special_tokens=False)[0] for name in (" Tom", " Sam"))
print(len(ids[0]), len(ids[1]), "tokens, different at", np.flatnonzero(np.not_equal(*ids)))


async def preference(prompt, **options):
    """How much the model prefers Tom to Sam: the difference of their logits behind the last layer."""
    wanted = rekindle.Capture({"logits": layers - 1}, positions=-1)
    done = await session.generate(prompt, max_tokens=1, capture=wanted, **options)
    last = done.captured["logits", layers - 1][0]
    return float(last[tom] - last[sam])


source = (await session.generate(clean, max_tokens=1, capture={"residual": "all"})).captured
toms, sams = await preference(clean), await preference(other)
print(f"Tom's prompt {toms:+.1f}, Sam's prompt {sams:+.1f}")

# %% [markdown]
# Now every layer and every position, one request each. `select` takes a part of what was captured, and `patch` puts it where it came
# from. The few programs that are compiled are for batches of other sizes: which layer, which position and which vector are data.
#
# **Predict.** 5 layers, 17 tokens, one experiment for each pair. How many requests?
#
# <details><summary>Answer</summary>
#
# **85**.
#
# </details>

# %%
await preference(other, patch=source.select(layers=0, positions=0))  # its program is compiled here
compiled = session.stats().compilations
places = [(layer, position) for layer in range(layers) for position in range(len(tokens))]
found = await asyncio.gather(
    *(preference(other, patch=source.select(layers=layer, positions=position)) for layer, position in places)
)
effect = (np.reshape(found, (layers, -1)) - sams) / (toms - sams)
print(f"{len(places)} experiments, {session.stats().compilations - compiled} programs compiled")
again = len(tokens) - tokens[::-1].index(" Sam") - 1  # where the name is read for the second time
print(f"the second name: {effect[0, again]:.2f} after layer 0, {effect[1, again]:.2f} after layer 1")
print(f"last position:   {effect[0, -1]:.2f} after layer 0, {effect[1, -1]:.2f} after layer 1")
print(f"first position:  {effect[0, 0]:.2f} after layer 0, {effect[1, 0]:.2f} after layer 1")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(places) == 85, "one experiment for each layer and position"
assert effect.max() > 0.5, "some place turns Sam into Tom"
assert effect[0, again] > 0.5 > 0.1 > abs(effect[1, again]), "layer 1 reads the name and leaves nothing there"
assert abs(effect[0, -1]) < 0.1 < 0.5 < effect[1, -1], "and brings it to the last position"
assert 0.2 < effect[1, 0] < 0.5, "a smaller part stays at the first position"

# %%
plt.imshow(effect, aspect="auto", origin="lower", cmap="RdBu", vmin=-1, vmax=1)
plt.xticks(range(len(tokens)), tokens, rotation=60, ha="right")
plt.yticks(range(layers))
plt.ylabel("layer")
plt.colorbar(label="1: it says Tom")
plt.show()

# %% [markdown]
# Blue is where Tom was. After layer 0 that is at his name, above all where it is read for the second time. After layer 1 nothing is left
# at that second place: the name has moved to the last position, where it will be needed. Attention carried it. A smaller part stays at
# the very first position until the last layer, from which later layers can read it again. `session.view.attention` shows how much
# each position reads of the others, here in layer 3.

# %%
await session.view.attention(other, layer=3)

# %% [markdown]
# ## Steering: he or she
#
# A direction can be found from examples, and added anywhere. Here: prompts that end after a sentence about a boy, and the same about a
# girl. The mean difference of their streams is the vector (Turner et al., 2023).

# %%
boys, girls = ("Tom", "Sam", "Ben"), ("Anna", "Lily", "Mia")
sentences = ("{} had a red ball.", "{} went to the park.", "{} found a key.")


async def mean_stream(names):
    prompts = [sentence.format(name) for sentence in sentences for name in names]
    many = await session.generate(prompts, max_tokens=1, capture=rekindle.Capture({"residual": "all"}, positions=-1))
    return [np.mean([done.captured["residual", layer][0] for done in many], axis=0) for layer in range(layers)]


direction = np.subtract(await mean_stream(boys), await mean_stream(girls))
he, she = (session.tokenizer.encode(word, add_special_tokens=False)[0] for word in (" He", " She"))

# %%
prompt = "The child sat under a tree."
scales = np.linspace(-3, 3, 13)


async def odds(layer, scale):
    """The logarithm of how much likelier He is than She behind the prompt."""
    steer = rekindle.Steer(layer, direction[layer], float(scale), positions=[-1])
    wanted = rekindle.Capture({"logits": layers - 1}, positions=-1)
    done = await session.generate(prompt, max_tokens=1, steer=steer, capture=wanted)
    last = done.captured["logits", layers - 1][0]
    return float(last[he] - last[she])


for layer in range(layers):
    plt.plot(scales, [await odds(layer, scale) for scale in scales], marker=".", label=f"layer {layer}")
plt.axhline(0, color="0.8", zorder=0)
plt.xlabel("times the vector")
plt.ylabel("He rather than She")
plt.legend(fontsize=8)
plt.show()

# %% [markdown]
# After the last layer one vector turns the pronoun both ways, from 15 in favour of *He* to 10 in favour of *She*. Below it the same
# experiment does next to nothing, and that is a finding, too: the last position has not read yet who is meant, and it reads that from words
# which the vector did not touch. A vector added in a lower layer changes other things; with a large one, the kind of text:

# %%
for scale in (-3.0, 0.0, 3.0):
    steer = rekindle.Steer(3, direction[3], scale, positions=[-1])
    done = await session.generate(prompt, max_tokens=16, steer=steer)
    print(f"{scale:+.0f} {done.text!r}")

# %% [markdown]
# ## What the engine does
#
# Steps in which some row captures run a program that returns every layer's stream, each as an array, and the host takes the rows that
# are wanted. Steps in which some row is changed run a program with a table: which tokens, after which layer, by which vectors. All of it is
# data, so that a sweep compiles nothing, and other steps run what they always ran.
#
# And the cache stays right. A page of keys and values depends on what was changed below it, so the change is part of its name: a prompt
# with a change shares pages with others that have the same one, and with no plain prompt.
#
# **Predict.** A prompt of 78 tokens runs twice plainly and twice with a change, in pages of 32. How many tokens does the last run take from the cache?
#
# <details><summary>Answer</summary>
#
# **64**, from the run with the same change; the plain pages are of no use to it.
#
# </details>

# %%
story = "Once upon a time there was a small green dragon who lived in a cave near the river and liked to paint. " * 3
push = rekindle.Steer(1, direction[1], 2.0)
for name, options in (("plain", {}), ("plain", {}), ("steered", {"steer": push}), ("steered", {"steer": push})):
    done = await session.generate(story, max_tokens=1, **options)
    print(f"{name}: {done.usage.cached_tokens} of {done.usage.prompt_tokens} tokens from the cache")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert done.usage.cached_tokens == 64, "a change shares pages with the same change"

# %% [markdown]
# ## The same in a larger model
#
# The embedded model has five layers. Here are the three experiments on SmolLM2-135M-Instruct, with thirty: page 18 fetches its file.

# %% tags=["real"]
import asyncio
import os
from pathlib import Path

fetched = Path.home().glob(".cache/rekindle-course/*/*.gguf")  # page 18's
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section shows nothing")
if smollm2:
    larger = await rekindle.open(smollm2, max_requests=16, max_model_len=1024, quiet=True)
    lens = await larger.view.lens("The capital of France is Paris, and the capital of Italy is")
    rome = lens.token_ids[-1, -1, 0]
    first = np.flatnonzero(lens.token_ids[:, -1, 0] != rome).max() + 1
    print(f"{lens.texts[-1][-1][0]!r} leads from layer {first} of {len(lens.texts)} on; before: ", end="")
    print([layer[-1][0] for layer in lens.texts[first - 8 : first]])
    assert lens.texts[-1][-1][0] == " Rome", "SmolLM2 knows the capital of Italy"
    assert first >= 28, "and only its last layers say so"

# %% [markdown]
# Who is given the ball? Both names are read at the beginning, and one of them again; the answer is the other one (Wang et al., 2022). The
# answer's position in the picture is the last one, and there it appears within a few layers: attention carries it from where the name was read.

# %% tags=["real"]
if smollm2:
    clean, other = (f"When {name} and Mia went to the park, Mia gave the ball to" for name in ("Tom", "Sam"))
    tokens = [larger.tokenizer.decode([token]) for token in larger.tokenizer.encode(other)]
    tom, sam = (larger.tokenizer.encode(name, add_special_tokens=False)[0] for name in (" Tom", " Sam"))
    source = (await larger.generate(clean, max_tokens=1, capture={"residual": "all"})).captured
    last = rekindle.Capture({"logits": -1}, positions=-1)
    shown = range(1, len(source), 2)  # every second layer
    patches = [source.select(layers=layer, positions=position) for layer in shown for position in range(len(tokens))]
    calls = [larger.generate(prompt, max_tokens=1, capture=last) for prompt in (clean, other)]
    calls += [larger.generate(other, max_tokens=1, capture=last, patch=patch) for patch in patches]
    rows = [done.captured["logits", -1][0] for done in await asyncio.gather(*calls)]
    toms, sams, *patched = [float(row[tom] - row[sam]) for row in rows]
    effect = (np.reshape(patched, (len(shown), -1)) - sams) / (toms - sams)
    print(f"Tom rather than Sam: {toms:+.1f} and {sams:+.1f}; {len(patches)} experiments")
    plt.imshow(effect, aspect="auto", origin="lower", cmap="RdBu", vmin=-1, vmax=1)
    plt.xticks(range(len(tokens)), tokens, rotation=60, ha="right")
    plt.yticks(range(0, len(shown), 3), shown[::3])
    plt.ylabel("layer")
    plt.colorbar(label="1: it says Tom")
    plt.show()
    assert effect[0, -1] < 0.1, "in the first layers the last position does not know the name"
    assert effect[-1, -1] > 0.9, "in the last ones it is all that counts"

# %% [markdown]
# A vector from contrasting prompts: what is loved, and what is hated. Its effect is measured by what is said of a hotel, first in logits, then in
# words.

# %% tags=["real"]
if smollm2:
    great, terrible = (larger.tokenizer.encode(word, add_special_tokens=False)[0] for word in (" great", " terrible"))
    things = ("film", "food", "book", "town", "song", "game", "house", "car")
    everything = rekindle.Capture({"residual": "all"}, positions=-1)
    means = []
    for feeling in ("love", "hate"):
        prompts = [f"I {feeling} this {thing}, because it is" for thing in things]
        many = await larger.generate(prompts, max_tokens=1, capture=everything)
        means.append([np.mean([done.captured["residual", layer][0] for done in many], axis=0) for layer in range(30)])
    direction = np.subtract(*means)
    prompt = "We stayed in the hotel for a week, and it was"
    scales, moved = (-3.0, -1.5, 0.0, 1.5, 3.0), {}
    for layer in range(2, 30, 3):
        steers = [rekindle.Steer(layer, direction[layer], scale) for scale in scales]
        calls = [larger.generate(prompt, max_tokens=1, capture=last, steer=steer) for steer in steers]
        rows = [done.captured["logits", -1][0] for done in await asyncio.gather(*calls)]
        odds = [float(row[great] - row[terrible]) for row in rows]
        moved[layer] = odds[-1] - odds[0]
        plt.plot(scales, odds, marker=".", color=plt.cm.viridis(layer / 30), label=f"layer {layer}")
    print({layer: round(by, 1) for layer, by in moved.items()})
    plt.axhline(0, color="0.8", zorder=0)
    plt.xlabel("times the vector")
    plt.ylabel("great rather than terrible")
    plt.legend(fontsize=6, ncols=2)
    plt.show()
    assert moved[20] > 5 * abs(moved[8]), "from the middle of the model on a vector decides"

# %% tags=["real"]
if smollm2:
    for scale in (-2.0, 0.0, 2.0):
        steer = rekindle.Steer(20, direction[20], scale)
        done = await larger.generate(prompt, max_tokens=16, temperature=0.0, steer=steer)
        print(f"{scale:+.0f}{done.text}")
    await larger.aclose()

# %% [markdown]
# Up to layer 14 the vector changes little, and from layer 17 on it decides what kind of stay it was.

# %% [markdown]
# ## Exercise
#
# The formula says that a layer adds two things, its attention's output and its MLP's. Capture all four arrays (`residual_before`, `attention`, `mlp`, `residual`) and check the sum in each layer. Which layer adds the most?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
parts = ("residual_before", "attention", "mlp", "residual")
done = await session.generate("Once upon a time there was", max_tokens=4, capture=dict.fromkeys(parts, "all"))
added = []
for layer in range(layers):
    stream_before, attended, computed, after = (done.captured[part, layer] for part in parts)
    added.append(np.linalg.norm(attended + computed, axis=-1)[1:].mean())
    assert np.abs(stream_before + attended + computed - after).max() < 1e-5 * np.abs(after).max(), (
        "a layer adds two things"
    )
print([round(float(length), 1) for length in added])
assert np.argmax(added) == layers - 1, "the last layer adds the most"

# %% [markdown]
# ## Takeaway
#
# A layer's state can be read and changed while the model runs. What the model will say shows in the last layers, and a direction added to the right
# ones changes what it says.
#
# ## In production
#
# Production engines return hidden states rarely, and steer through adapters or prompts. Research runs on hooks in PyTorch; NNsight and vLLM's extensions bring them to engines that batch.
#
# ## Further reading
#
# - Wang et al., *Interpretability in the Wild*, 2022, [arXiv:2211.00593](https://arxiv.org/abs/2211.00593)
# - Meng et al., *Locating and Editing Factual Associations in GPT*, 2022, [arXiv:2202.05262](https://arxiv.org/abs/2202.05262)
# - Turner et al., *Activation Addition: Steering Language Models Without Optimization*, 2023, [arXiv:2308.10248](https://arxiv.org/abs/2308.10248)
# - nostalgebraist, *interpreting GPT: the logit lens*, 2020

# %%
await session.aclose()
