# %% [markdown]
# # 20 A thousand rows
#
# *I have a table. How do I let a model label every row, and how far can I trust the labels?*
#
# **Before:** page 01; pandas. **Afterwards you can** score choices for every row of a DataFrame, read log-probabilities as confidence, and measure on held-out rows what quantising costs your task.
#
# **Also called:** scoring choices = log-likelihood ranking, multiple choice (lm-eval's `acc`); margin = confidence; held-out = test split.
#
# ![The common beginning is computed once; each choice adds a few tokens](pictures/20_rows.svg)
#
# Text has to be parsed; a choice is a column. `score` gives the log-probability of each possible answer, so that every row gets a
# label and a number that says how sure the model was. The table here has 1,000 sums with four answers each, because the embedded model
# can add small numbers, we know what is right, and results of three digits are beyond it. Your table has reviews, tickets or questions; the cells are the same.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import rekindle

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
OPTIONS = {"max_requests": 32, "max_model_len": 128, "precompile": "lazy", "quiet": True}
rng = np.random.default_rng(0)
table = pd.DataFrame(rng.integers(1, 80, (1000, 2)), columns=["left", "right"])
table["question"] = "What is " + table["left"].astype(str) + " + " + table["right"].astype(str) + "?"
table["answer"] = table["left"] + table["right"]
table.head()

# %% [markdown]
# ## Choices instead of text
#
# The log-probability of a choice $c$ of tokens $c_1 \ldots c_n$ after the prompt $x$ is a sum,
#
# $$\log p(c \mid x) = \sum_i \log p(c_i \mid x, c_1 \ldots c_{i-1})$$
#
# and the label is the largest one. Wrong answers here are one more, one less and ten more. All four choices of a row share its
# prompt, which is computed once.
#
# **Predict.** Four choices were drawn blindly. Which share of 1,000 rows would be right by chance? And by the model: more or less than 0.5?
#
# <details><summary>Answer</summary>
#
# **0.25** by chance. More than **0.5** by the model.
#
# </details>


# %%
async def label(session) -> pd.DataFrame:
    """Log-probabilities of the right answer, of one more, one less and ten more, for each row."""
    prompts = [session.render([{"role": "user", "content": question}]) for question in table["question"]]
    rows = zip(table["left"], table["right"], table["answer"], strict=True)
    choices = [[f"{a} + {b} = {c + off}" for off in (0, 1, -1, 10)] for a, b, c in rows]
    scores = await session.score(prompts, choices)
    return pd.DataFrame([[one.logprob for one in row] for row in scores], columns=["right", "+1", "-1", "+10"])


results = {}
async with rekindle.open("tiny", dtype="float32", **OPTIONS) as session:
    await session.score("What is", [" 1", " 2"])  # compiles
    began = time.perf_counter()
    results["float32"] = await label(session)
    seconds = time.perf_counter() - began
right = results["float32"].to_numpy().argmax(axis=1) == 0
print(f"1,000 rows, 4,000 choices in {seconds:.1f} s; {right.mean():.1%} right")
assert 1 / len(results["float32"].columns) == 0.25, "four choices"
assert right.mean() > 0.5, "the model is better than chance"

# %% [markdown]
# ## How sure is it?
#
# The *margin* is the difference of the best two log-probabilities. If it means something, rows with a large margin are right more often.
#
# **Predict.** Sort the rows by margin. Are the surer 500 right more often than the others by more or by less than 0.1?
#
# <details><summary>Answer</summary>
#
# By more than **0.1**.
#
# </details>

# %%
ordered = np.sort(results["float32"].to_numpy(), axis=1)
table["margin"] = ordered[:, -1] - ordered[:, -2]
table["correct"] = right
by_margin = table.sort_values("margin", ascending=False)["correct"].to_numpy()
plt.plot(np.arange(1, 1001), np.cumsum(by_margin) / np.arange(1, 1001))
plt.xlabel("rows kept, the surest first")
plt.ylabel("share that is right")
plt.ylim(0, 1.02)
plt.show()
print(f"{by_margin[:500].mean():.1%} of the surer half, {by_margin[500:].mean():.1%} of the other")
assert by_margin[:500].mean() - by_margin[500:].mean() > 0.1, "a margin tells right from wrong"

# %% [markdown]
# That curve is what you decide by: keep the labels above a margin, and send the others to a larger model or to a person.
#
# ## What does quantising cost, on my task?
#
# Perplexity (page 10) is an average over words. What counts is the labels. The same rows with 8 and with 4 bits:
#
# **Predict.** In which share of the rows does the label change with 8-bit weights: more or less than 0.1?
#
# <details><summary>Answer</summary>
#
# Less than **0.1**. With 4 bits a few more do, and those are rows with small margins.
#
# </details>

# %%
for name in ("int8-weight", "int4"):
    async with rekindle.open("tiny", quantize=name, **OPTIONS) as session:
        results[name] = await label(session)
before, changed = results["float32"].to_numpy().argmax(axis=1), {}
for name, frame in results.items():
    now = frame.to_numpy().argmax(axis=1)
    changed[name] = float((now != before).mean())
    print(f"{name:12} {np.mean(now == 0):.1%} right, {changed[name]:.1%} of the labels changed")
flipped = results["int4"].to_numpy().argmax(axis=1) != before
kept, lost = table["margin"][~flipped].mean(), table["margin"][flipped].mean()
print(f"mean margin of the rows that 4 bits change {lost:.2f}, of the others {kept:.2f}")
assert changed["int8-weight"] < 0.1, "8 bits keep nearly all labels"

# %% [markdown]
# Small models suffer more from 4 bits than large ones: there is less in each weight to spare. Whether a loss of this size matters is a
# question about your table, and this is the cell that answers it.
#
# ## Free text for each row
#
# Where there are no choices, `map` fills a template with each row and keeps what it has in a file (page 08), and `schema=` makes
# an object of each answer (page 14).

# %%
async with rekindle.open("tiny", **OPTIONS) as session:
    answers = await session.map(table.head(100), "{question}", chat=True, max_tokens=16)
    said = pd.Series([one.text for one in answers])
print(said.head(3).to_list())

# %% [markdown]
# ## Exercise
#
# Choose the smallest margin on the first 500 rows above which 90 % of the labels are right, among a hundred rows at least; if there is none, the median. Which share of the other 500 rows is above it, and how many of those are right?

# %% jupyter={"source_hidden": true} tags=["solution"]
seen, held_out = table.head(500), table.tail(500)
candidates = np.sort(seen["margin"])[:-100]  # at least a hundred rows lie above each
limits = [limit for limit in candidates if seen["correct"][seen["margin"] >= limit].mean() >= 0.9]
limit = limits[0] if limits else seen["margin"].median()
kept = held_out[held_out["margin"] >= limit]
print(
    f"margin {limit:.2f}: {len(kept) / 500:.0%} of the held-out rows are kept, {kept['correct'].mean():.1%} of them right"
)
assert kept["correct"].mean() > held_out["correct"].mean(), "a limit chosen on other rows holds on these"

# %% [markdown]
# ## In production
#
# Batches of millions of rows go to engines as files (OpenAI's batch format, `rekindle run-batch`), sorted so that common beginnings meet in the cache. Labels are checked against a few hundred that people made, in each batch anew, and choices are compared by length-normalised scores where they differ in length.
#
# ## Further reading
#
# - Brown et al., *Language Models are Few-Shot Learners*, 2020, [arXiv:2005.14165](https://arxiv.org/abs/2005.14165)
# - Kadavath et al., *Language Models (Mostly) Know What They Know*, 2022, [arXiv:2207.05221](https://arxiv.org/abs/2207.05221)
# - Holtzman et al., *Surface Form Competition*, 2021, [arXiv:2104.08315](https://arxiv.org/abs/2104.08315)
