# %% [markdown]
# # 35 Which words made it say that?
#
# *The model said a word. Which words of the prompt, and which parts of the model, did it come from?*
#
# **Before:** page 15; derivatives. **Afterwards you can** attribute an answer to words, heads and edges, check an estimate by an exact patch, and say when not to believe it.
#
# **Also called:** gradient × input = saliency; attribution patching = AtP; edges = EAP, edge attribution patching; convergence delta = completeness.
#
# **Takes:** about 15 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![Layers add to the residual stream; captures read it, patches and vectors change it](../source/pictures/15_stream.svg)
#
# Page 15 replaces arrays inside the model one at a time and looks at what the answer does: an experiment for each array. A gradient says in one pass back how the answer would change with *every* number in the model, as long as
# the change is small. This page turns that into scores, and then asks how far they can be trusted.

# %%
import os
from pathlib import Path

import numpy as np

import rekindle

fetched = (Path.home() / ".cache" / "rekindle-course").glob("*/*.gguf")
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
session = await rekindle.open(
    "tiny", dtype="float32", max_requests=4, max_model_len=128, precompile="lazy", quiet=True, restore="none"
)
prompt = "Tom had a red ball. Tom"
done = await session.generate(prompt, max_tokens=1, temperature=0)
said = done.token_ids[0]
print(f"{prompt!r} → {done.text!r}")

# %% [markdown]
# ## A gradient for every number
#
# The number to explain is the log-probability of the word that it said. Its gradient at the embeddings has as many numbers as the embeddings themselves.
#
# **Predict.** The prompt has 8 tokens, and an embedding 256 numbers. How many numbers has the gradient there?
#
# <details><summary>Answer</summary>
#
# **2048**: one for each number of each token's embedding.
#
# </details>

# %%
g = await session.gradients(prompt, of=rekindle.logprob(said), at={"embedding": True, "residual": [2]})
print(f"log-probability {g.value:.3f}", g["embedding"].shape, g["residual", 2].shape)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert g["embedding"].size == 2048, "8 tokens of 256 numbers"

# %% [markdown]
# ## From gradients to scores
#
# A gradient times the array itself estimates what the array contributed: the change from zeros to what it is. Summed over the numbers of a token that is one score for each word. Blue raised the answer's probability and orange lowered it.

# %%
await session.view.attribution(prompt)

# %% [markdown]
# That is one straight line from here to zero, and the model is no straight line. *Integrated gradients* walk: they average the gradient along the path from a baseline $b$ (a prompt that says nothing) to the prompt $x$. If
# the walk has enough steps, the scores add up to the whole change of the number, so that nothing is lost and nothing is invented:
#
# $$\mathrm{score}_i = (x_i - b_i) \int_0^1 \partial_i f(b + a\,(x - b))\,da \qquad \sum_i \mathrm{score}_i = f(x) - f(b)$$
#
# **Predict.** For $f(x) = 3 x_1 - 2 x_2$, how many steps does the integral need? And what is the score of $x_1$ for $x = (1, 1)$ and $b = (0, 0)$?
#
# <details><summary>Answer</summary>
#
# **1** step: the gradient is the same everywhere. The score is **3**.
#
# </details>


# %%
def integrated(slope, x, b, steps):
    """Integrated gradients by Gauss and Legendre's rule, for a function with this gradient."""
    places, weights = np.polynomial.legendre.leggauss(steps)
    mean = sum(w / 2 * slope(b + (1 + p) / 2 * (x - b)) for p, w in zip(places, weights, strict=True))
    return (x - b) * mean


def saturated(x):
    """A sum that goes through a sigmoid: far from 0 its gradient is nearly 0, whatever it was made of."""
    return 1 / (1 + np.exp(-(3 * x[0] - 2 * x[1])))


def slope(x):
    return saturated(x) * (1 - saturated(x)) * np.array([3.0, -2.0])


x, b = np.array([4.0, 1.0]), np.zeros(2)
linear = integrated(lambda _: np.array([3.0, -2.0]), np.ones(2), b, 1)
print("the straight line:", linear)
print("saturated, gradient × input:", (x * slope(x)).round(4), "of a change of", round(saturated(x) - saturated(b), 3))
for steps in (1, 4, 16):
    scores = integrated(slope, x, b, steps)
    print(f"saturated, {steps:2} steps:", scores.round(3), "sum", scores.sum().round(3))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
needed = min(
    steps
    for steps in range(1, 9)
    if np.allclose(integrated(lambda _: np.array([3.0, -2.0]), np.ones(2), b, steps), (3, -2))
)
assert needed == 1, "the gradient of a straight line is the same everywhere"
assert round(linear[0]) == 3, "a score is the slope times the change"
assert np.abs(x * slope(x)).sum() < 0.01, "where a function is saturated, its gradient knows nothing"

# %% [markdown]
# The gradient at the end says that nothing mattered; the path knows better. In the model, `convergence` is what the sum misses.

# %%
for steps in (4, 16, 64):
    a = await session.attribute(prompt, of=rekindle.logprob(said), method="integrated", steps=steps, at={"mlp": [0]})
    print(f"{steps:3} steps: the scores miss {a.convergence:+.3f} of a change of {a.value - a.other_value:.3f}")
list(zip(a.texts, a.scores.round(2).tolist(), strict=True))

# %% [markdown]
# ## Patching all nodes at once
#
# A better question than "what if this word were nothing?" is "what if it were another one?" Two prompts of as many tokens differ in a name. *Attribution patching* multiplies each array's change between the two with the gradient: one
# pass forward for each prompt and one back, for all nodes.
#
# **Predict.** The model has 5 layers of 4 heads and an MLP. How many runs would it take to patch each head and each MLP at each of the 8 tokens, one at a time?
#
# <details><summary>Answer</summary>
#
# **200** = 8 · 5 · (4 + 1).
#
# </details>

# %%
clean, corrupt = "Tom had a red ball. Tom", "Sam had a red ball. Sam"
of = rekindle.logprob(said)
a = await session.attribute(corrupt, of=of, method="patching", source=clean, exact=200)
print(f"{a.value:.3f} after {corrupt!r}, {a.other_value:.3f} after {clean!r}")
for node in a.strongest(6):
    print(
        f"{node.name:32} estimate {node.score:+.3f}"
        + ("" if node.exact is None else f", really patched {node.exact:+.3f}")
    )

estimates, exact = (np.array([getattr(node, name) for node in a.patched]) for name in ("score", "exact"))
print(f"correlation of estimates and exact patches: {np.corrcoef(estimates, exact)[0, 1]:.2f}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
runs = sum(array.size for key, array in a.items() if key != "embedding")
assert runs == 200, "a run for each head and each MLP at each token"

# %% [markdown]
# An estimate is a suggestion of where to look, and the exact patch is the measurement. `method="atp_star"` mends two well-known failures: attention that is saturated, and effects that cancel.
#
# ## Edges
#
# Which node talked to which? Each head reads the *sum* of what everything before it wrote, so an edge's score is the change that one node wrote, times the gradient at what another one reads there.

# %%
a = await session.attribute(corrupt, of=of, method="patching", source=clean, at={"mlp": "all"}, edges=True, exact=5)
print(f"{len(a.edges.sources)} sources, {len(a.edges.targets)} targets")
for edge in a.edges.strongest(5):
    print(f"{edge.source:18} → {edge.target:14} estimate {edge.score:+.3f}, really patched {edge.exact:+.3f}")
total = dict(zip(a.edges.sources, a.edges.scores.sum(axis=1), strict=True))
assert abs(total["layer 0, mlp"] - a["mlp", 0].sum()) < 1e-2, "a node's edges add up to its score"

# %% [markdown]
# ## A real model
#
# With SmolLM2, where page 18 has fetched it: which words does *Paris* come from?

# %% tags=["real"]
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section shows nothing")
if smollm2:
    real = await rekindle.open(
        smollm2, max_requests=2, max_model_len=128, precompile="lazy", quiet=True, restore="none"
    )
    question = "The capital of France is"
    paris = await real.attribute(
        question, of=rekindle.logprob(" Paris"), method="integrated", steps=16, at={"mlp": [0]}
    )
    print([(text, round(float(score), 2)) for text, score in zip(paris.texts, paris.scores, strict=True)])
    italy = await real.attribute(
        "The capital of Italy is", of=rekindle.logprob(" Paris"), method="patching", source=question
    )
    print(f"{italy.value:.2f} after Italy, {italy.other_value:.2f} after France")
    for node in italy.strongest(4):
        print(f"{node.name:40} {node.score:+.3f}")
    assert italy.other_value > italy.value, "Paris follows France, and not Italy"
    await real.aclose()

# %% [markdown]
# ## Exercise
#
# Test the words' scores: replace the word with the largest score by another one, and then a word with a small one. Which replacement changes the log-probability more? (`session.gradients` has `value`, and takes a list of prompts.)


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
a = await session.attribute(prompt, of=of, method="integrated", at={"mlp": [0]})
order = np.argsort(-np.abs(a.scores))
ids = list(a.token_ids)
other = session.tokenizer.encode(" the", add_special_tokens=False)[0]
changed = [[*ids[:place], other, *ids[place + 1 :]] for place in (int(order[0]), int(order[-1]))]
values = [one.value for one in await session.gradients([ids, *changed], of=of, at={"norm": True})]
for place, value in zip((order[0], order[-1]), values[1:], strict=True):
    print(f"without {a.texts[place]!r} (score {a.scores[place]:+.2f}): {value - values[0]:+.2f}")
assert abs(values[1] - values[0]) > abs(values[2] - values[0]), "the word with the largest score matters more"

# %% [markdown]
# ## Takeaway
#
# A gradient, times a change, is an estimate of what the change does, for all parts of a model at once. Where the model is far from a straight line it misleads: walk the path, look at what the sum misses, and patch the strongest nodes
# for real.
#
# ## In production
#
# Engines that serve have no gradients; researchers load the weights a second time in a training framework. Attributions find the words that a classifier should not have looked at, and narrow down where a behaviour lives before
# anyone edits weights. None of these scores is an explanation by itself.
#
# ## Further reading
#
# - Sundararajan et al., *Axiomatic Attribution for Deep Networks*, 2017, [arXiv:1703.01365](https://arxiv.org/abs/1703.01365)
# - Syed et al., *Attribution Patching Outperforms Automated Circuit Discovery*, 2023, [arXiv:2310.10348](https://arxiv.org/abs/2310.10348)
# - Kramár et al., *AtP\*: An efficient and scalable method for localizing LLM behaviour to components*, 2024, [arXiv:2403.00745](https://arxiv.org/abs/2403.00745)

# %%
await session.aclose()
