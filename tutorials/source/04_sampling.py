# %% [markdown]
# # 04 Sampling
#
# *What does each sampling option do to the distribution that the next token is drawn from?*
#
# **Before:** page 01. **Afterwards you can** write the formula of each sampling option, choose among `top_k`, `top_p` and `min_p`, and read a perplexity.
#
# **Also called:** `top_p` = nucleus sampling; `logit_bias` and the penalties are OpenAI's; `repetition_penalty` is CTRL's; a *seed* here belongs to a request.
#
# **Takes:** about 20 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# A language model gives a number for every token of its vocabulary, the *logits*. Sampling options change these numbers,
# one after the other, before a token is drawn. Here we see each of them on real logits.
#
# ![Options change the logits one after the other, then one token is drawn](../source/pictures/04_sampling.svg)

# %%
import matplotlib.pyplot as plt
import numpy as np

import rekindle

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
session = await rekindle.open("tiny", seed=0)
PROMPT = "The dog ran to the"

# %% [markdown]
# `logprobs=20` reports the twenty most likely tokens at each position, before any option was applied. That is the model's
# own opinion.

# %%
done = await session.generate(PROMPT, max_tokens=1, logprobs=20)
top = done.logprobs[0]
words = [done.text_of(token) for token in top.top_ids]
model = np.exp(top.top_logprobs)
plt.bar(words, model)
plt.xticks(rotation=70)
plt.ylabel("probability")
plt.title(f"after {PROMPT!r}")
plt.show()

# %% [markdown]
# ## The formula, and what is drawn
#
# Logits $z_i$ become probabilities by a softmax at temperature $T$:
#
# $$p_i = \frac{\exp(z_i / T)}{\sum_j \exp(z_j / T)}$$
#
# We compute that from the logits, which `capture` returns (`-1` are the last layer and the last position), and draw 1,200 tokens to
# compare: then a share of 0.16 has a standard error of 0.011. One prompt with `n=…` is prefilled once, and its sequences run as one batch.

# %%
from collections import Counter

captured = await session.generate(PROMPT, max_tokens=1, capture=rekindle.Capture({"logits": -1}, positions=-1))
logits = captured.captured["logits", -1][0].astype(np.float64)


def softmax(temperature: float = 1.0) -> np.ndarray:
    """The probabilities of all tokens."""
    shares = np.exp((logits - logits.max()) / temperature)
    return shares / shares.sum()


async def drawn(count: int = 1200, **options) -> np.ndarray:
    """The share of each of the twenty words among `count` draws."""
    seen = Counter()
    for start in range(0, count, 60):
        for one in await session.generate(PROMPT, n=60, max_tokens=1, seed=start, **options):
            seen[one.token_ids[0]] += 1
    return np.array([seen[token] for token in top.top_ids]) / count


def compare(title: str, **series) -> None:
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        plt.bar(np.arange(len(words)) + index * width, values, width, label=name)
    plt.xticks(np.arange(len(words)) + 0.4 - width / 2, words, rotation=70)
    plt.title(title)
    plt.legend()


exact, shares = softmax()[list(top.top_ids)], await drawn(temperature=1.0)
compare("temperature 1 draws what the model says", formula=exact, drawn=shares)
distance = np.abs(exact - shares).sum() / 2
print(f"{exact[0]:.3f} by the formula, {shares[0]:.3f} drawn; distance of the distributions {distance:.3f}")
assert distance < 0.1, "1,200 draws at temperature 1 follow the softmax"

# %% [markdown]
# ## Temperature
#
# Logits are divided by the temperature. Below 1 the likely gets likelier, above 1 everything becomes more equal, and 0 means
# *greedy*: always the top token.
#
# **Predict.** The likeliest token has a share of 0.16 at temperature 1. What share does it have at temperature 0.4, to the nearest tenth?
#
# <details><summary>Answer</summary>
#
# **0.6**: each share is raised to the power 1 / 0.4 = 2.5 and divided by the sum, which favours the largest.
#
# </details>

# %%
compare(
    "temperature",
    **{"0.4": await drawn(temperature=0.4), "1.0": shares, "2.0": await drawn(temperature=2.0)},
)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(softmax(0.4).max(), 1) == 0.6, "a temperature of 0.4 nearly quadruples the largest share"

# %% [markdown]
# ## Cutting the tail
#
# Of 2,048 tokens, the 2,028 that are not in these pictures have a sixth of the probability: in a text of twelve tokens two are from
# there, and one that doesn't fit is enough to derail it. Three options cut this tail off: `top_k` keeps the k most likely, `top_p` the
# smallest set whose probabilities add up to p, `min_p` those that are at least p times as likely as the first. They apply in this
# order, after the temperature. The sets that they keep are
#
# $$\mathrm{top\_p}: \min \{k : \sum_{i \leq k} p_i \geq p\} \qquad \mathrm{min\_p}: \{i : p_i \geq p \cdot \max_j p_j\}$$
#
# **Predict.** With `top_k=4`, which share of the draws is outside of the four most likely tokens?
#
# <details><summary>Answer</summary>
#
# **0**: what is cut can't be drawn, whatever the temperature.
#
# </details>

# %%
cuts = {
    "top_k=4": await drawn(temperature=1.5, top_k=4),
    "top_p=0.6": await drawn(temperature=1.5, top_p=0.6),
    "min_p=0.2": await drawn(temperature=1.5, min_p=0.2),
}
compare("three ways to cut", **cuts)
print(f"{1 - exact.sum():.2f} of the probability is behind the first twenty tokens")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert cuts["top_k=4"][4:].sum() == 0, "top_k=4 leaves four tokens"
assert 0.1 < 1 - exact.sum() < 0.25, "about a sixth of the probability is in the tail"

# %% [markdown]
# `min_p` adapts: where the model is sure it keeps one token, where it is not it keeps many. That is easy to see without drawing,
# from the probabilities at two places.
#
# **Predict.** After “The cat was” the model gives one token 98 %. How many does `min_p=0.2` keep there, and how many after our prompt, whose likeliest token has a share of 0.16?
#
# <details><summary>Answer</summary>
#
# **1** there, and more than **5** here.
#
# </details>

# %%
remaining = {}
for prompt in ("The cat was", PROMPT):
    done = await session.generate(prompt, max_tokens=1, logprobs=20)
    ordered = np.exp(done.logprobs[0].top_logprobs)
    kept = {p: int(np.sum(ordered >= p * ordered[0])) for p in (0.1, 0.2, 0.6)}
    remaining[prompt] = kept[0.2]
    assert prompt == PROMPT or round(ordered[0], 2) == 0.98, "after “The cat was” one token is nearly certain"
    print(f"{prompt!r}, kept by min_p: " + ", ".join(f"{count} tokens at {p}" for p, count in kept.items()))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert remaining["The cat was"] == 1, "min_p keeps one token where the model is sure"
assert remaining[PROMPT] > 5, "min_p keeps many where it is not"

# %% [markdown]
# Turn all three on the distribution after our prompt. At which temperature does `top_p=0.9` keep more than a hundred tokens, and how many
# does `min_p=0.1` keep there?

# %%
session.view.distribution(logits)

# %% [markdown]
# ## A vocabulary of 49,152
#
# The larger the vocabulary, the longer the tail. Here is the same for SmolLM2-135M-Instruct, whose file page 18 fetches, after a sentence
# that has one good end.
#
# **Predict.** At temperature 1.5, `top_p=0.9` keeps more than 1,000 tokens after “The capital of Italy is”. How many does `min_p=0.1` keep: about 10, 100 or 1,000?
#
# <details><summary>Answer</summary>
#
# About **10**: the likeliest has some 12 %, and few have a tenth of that.
#
# </details>

# %% tags=["real"]
import os
from pathlib import Path

fetched = Path.home().glob(".cache/rekindle-course/*/*.gguf")  # page 18's
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section shows nothing")
figure = None
if smollm2:
    async with rekindle.open(smollm2, max_requests=1, max_model_len=256, precompile="lazy", quiet=True) as larger:
        wanted = rekindle.Capture({"logits": -1}, positions=-1)
        done = await larger.generate("The capital of Italy is", max_tokens=1, capture=wanted)
        real_logits = done.captured["logits", -1][0].astype(np.float64)
        figure = larger.view.distribution(real_logits)
    for temperature in (1.0, 1.5):
        p = np.sort(np.exp((real_logits - real_logits.max()) / temperature))[::-1]
        p /= p.sum()
        nucleus_size, min_p_size = int(np.sum(np.cumsum(p) - p < 0.9)), int(np.sum(p >= 0.1 * p[0]))
        print(f"temperature {temperature}: top_p=0.9 keeps {nucleus_size:,} tokens, min_p=0.1 keeps {min_p_size}")
figure

# %% jupyter={"source_hidden": true} tags=["check", "real"]
# Holds the answer above.
if smollm2:
    assert done.text == " Rome", "SmolLM2 knows the capital of Italy"
    assert nucleus_size > 1000, "at temperature 1.5 the tail has more than a tenth of the probability"
    assert abs(p[0] - 0.12) < 0.02, "the likeliest token is not likely at this temperature"
    assert min((10, 100, 1000), key=lambda one: abs(one - min_p_size)) == 10, (
        "min_p measures against the likeliest token, whatever the tail has"
    )

# %% [markdown]
# ## Biases and masks
#
# `logit_bias` adds to chosen logits: `-inf` forbids a token, a few units make it common.

# %%
first, third = top.top_ids[0], top.top_ids[2]
compare(
    f"never {words[0]!r}, often {words[2]!r}",
    plain=shares,
    biased=await drawn(temperature=1.0, logit_bias={first: float("-inf"), third: 2.0}),
)

# %% [markdown]
# ## Penalties
#
# They look at what was generated so far. `presence_penalty` is subtracted once from every token that has appeared,
# `frequency_penalty` once for each time it appeared, and `repetition_penalty` divides positive logits and multiplies negative
# ones, for tokens of the prompt too. A greedy model likes to repeat itself. Here are two texts, with the share of their
# tokens that had appeared before.

# %%
settings = {
    "none": {},
    "presence 1.0": {"presence_penalty": 1.0},
    "frequency 1.0": {"frequency_penalty": 1.0},
    "repetition 1.3": {"repetition_penalty": 1.3},
}
shares_of: dict[str, list[float]] = {name: [] for name in settings}
for prompt in ("Lily likes apples. Tom likes apples. Lily likes", "The old clock\nwagon wagon wagon wagon"):
    print(prompt)
    for name, options in settings.items():
        done = await session.generate(prompt, max_tokens=32, ignore_eos=True, **options)
        repeated = 1 - len(set(done.token_ids)) / len(done.token_ids)
        shares_of[name].append(repeated)
        print(f"  {name:15} {repeated:4.0%} repeated  {done.text[:80]!r}")
apples, wagons = ({name: shares[at] for name, shares in shares_of.items()} for at in (0, 1))
assert max(apples["presence 1.0"], apples["frequency 1.0"], apples["repetition 1.3"]) < apples["none"], "each helps"
assert min(wagons, key=wagons.get) == "frequency 1.0", "what grows with each repetition breaks a loop"

# %% [markdown]
# In the first text every penalty halves the repetitions. (It has become a conversation: the model has read many, and `ignore_eos`
# lets it run on into one.) In the second the model is so sure of its loop that a penalty of 1.0 is not enough; `frequency_penalty`
# grows by 1.0 with every repetition, until after five of them the loop breaks.

# %% [markdown]
# ## Where a text ends
#
# `max_tokens` always ends it. `stop` ends it at a string, which is not part of the text even if it is spread over several
# tokens; `stop_token_ids` at a token. `min_tokens` forbids ending earlier, and `ignore_eos` ignores the model's own wish to
# end. The second column below is the completion's `finish_reason`.

# %%
for options in ({"max_tokens": 8}, {"stop": "."}, {"stop": ("named", "called")}, {"min_tokens": 30, "stop": "."}):
    done = await session.generate("Once upon a time", **{"max_tokens": 60, **options})
    print(f"{options!s:38} {done.finish_reason!s:7} {done.text!r}")

# %% [markdown]
# ## Seeds
#
# The random number of a position depends on the request's seed and on the position, and on nothing else: not on the batch it
# runs in, not on the slot, not on a restart in between. Every completion reports its seed.
#
# The logits are another matter. By default the fastest kernel for each number of rows computes them, and kernels add in
# different orders, so the last bits of a logit depend on what runs with it. Where two tokens are almost equally likely, that can
# decide between them, and from there on the text is another one: of 200 seeds, 4 gave another text in a batch than alone. With `open(..., deterministic=True)` every number is
# computed in the same order whatever the batch, the chunks of the prompt and the cache are, and the same prompt and seed give the
# same tokens. It is slower, and needs the native CPU kernels.

# %%
repeatable = await rekindle.open("tiny", seed=0, deterministic=True)
options = {"max_tokens": 24, "temperature": 1.0}
alone = await repeatable.generate("In the garden", seed=11, **options)
crowd = repeatable.generate(["A", "crowd", "of", "others"], max_tokens=40)
together, _ = await repeatable.generate(["In the garden", "Another"], seed=11, **options), await crowd
print(alone.text == together[0].text, repr(alone.text))

drawn_by_chance = await repeatable.generate("In the garden", **options)
again = await repeatable.generate("In the garden", seed=drawn_by_chance.seed, **options)
print(again.text == drawn_by_chance.text, f"seed {drawn_by_chance.seed}")
await repeatable.aclose()
assert alone.text == together[0].text, "a deterministic session draws the same text in any batch"
assert again.text == drawn_by_chance.text, "a completion's seed draws it again"

# %% [markdown]
# ## How sure was it, and how surprised by the prompt?
#
# `logprobs` reports on the generated tokens, `prompt_logprobs` on the prompt's own: what the model thought of each token that
# you wrote. Their mean gives the *perplexity*, the number of tokens that the model hesitates between on average. A uniform
# guess over this vocabulary of 2,048 tokens has a perplexity of 2,048; above that, the model was surer of other tokens.

# %%
for text in (
    "Once upon a time, a boy called Tom lived in the forest.",
    "Forest the in lived Tom called boy a, time a upon once.",
    "What is the capital of Japan?",
):
    done = await session.generate(text, max_tokens=1, prompt_logprobs=1)
    surprise = -np.mean([entry.logprob for entry in done.prompt_logprobs])
    print(f"perplexity {np.exp(surprise):9,.1f}  {text}")

# %%
await session.generate("Tom had a red ball and a blue boat.", max_tokens=20, prompt_logprobs=3, logprobs=3)

# %% [markdown]
# ## Unknown options are refused
#
# An option that is misspelt or out of range raises at once. Nothing is accepted and then ignored.

# %%
for wrong in ({"temprature": 0.7}, {"top_p": 1.5}):
    try:
        session.generate("x", **wrong)
    except rekindle.errors.InvalidRequest as error:
        print(error)

# %% [markdown]
# ## Exercise
#
# Write `nucleus(probabilities, p)`, the set of tokens that `top_p` keeps, and check with draws that the engine never leaves it.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def nucleus(probabilities: np.ndarray, p: float) -> set[int]:
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]  # the sum of those that are likelier
    return set(order[before < p + 0.02].tolist())  # 16-bit logits differ a little from step to step


kept = nucleus(softmax(), 0.6)
many = await session.generate(PROMPT, n=60, max_tokens=1, temperature=1.0, top_p=0.6, seed=5)
print(len(kept), "tokens:", [session.tokenizer.decode([token]) for token in kept])
assert {one.token_ids[0] for one in many} <= kept, "top_p draws from its nucleus alone"

# %% [markdown]
# ## Takeaway
#
# Temperature changes the shape of the distribution, top_k, top_p and min_p cut its tail, penalties look at the text so far. With a seed a draw depends
# on its position alone, so that it can be repeated.
#
# ## In production
#
# Servers sample on the device, for all rows at once, and sort only where an option needs it; speculative decoding accepts drafts with a rule that keeps the distribution as it is. Few of them promise the same text for the same seed in another batch.
#
# ## Further reading
#
# - Holtzman et al., *The Curious Case of Neural Text Degeneration*, 2019 (top-p), [arXiv:1904.09751](https://arxiv.org/abs/1904.09751)
# - Nguyen et al., *Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs*, 2024, [arXiv:2407.01082](https://arxiv.org/abs/2407.01082)
# - Keskar et al., *CTRL*, 2019 (repetition penalty), [arXiv:1909.05858](https://arxiv.org/abs/1909.05858)
# - Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2022, [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)

# %%
await session.aclose()
