# %% [markdown]
# # 20 A thousand rows
#
# *I have a table. How do I let a model label every row, and how far can I trust the labels?*
#
# **Before:** page 01; pandas. **Afterwards you can** score choices for every row of a DataFrame, read log-probabilities as confidence, and measure on held-out rows what quantising costs your task.
#
# **Also called:** scoring choices = log-likelihood ranking, multiple choice (lm-eval's `acc`); margin = confidence; held-out = test split.
#
# **Takes:** about 15 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![The common beginning is computed once; each choice adds a few tokens](../source/pictures/20_rows.svg)
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
table["sum"] = table["left"].astype(str) + " + " + table["right"].astype(str)
table["question"] = "What is " + table["sum"] + "?"
table["answer"] = table["sum"] + " = " + (table["left"] + table["right"]).astype(str)
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
# **Predict.** Four choices were drawn blindly. Which share of 1,000 rows would be right by chance? And by the model?
#
# <details><summary>Answer</summary>
#
# **0.25** by chance. More than **0.5** by the model.
#
# </details>


# %%
async def label(session, rows: pd.DataFrame) -> rekindle.ScoreTable:
    """Log-probabilities of the right answer, of one more, one less and ten more, for each row."""
    prompts = [session.render([{"role": "user", "content": question}]) for question in rows["question"]]
    sums = zip(rows["left"], rows["right"], strict=True)
    choices = [[f"{a} + {b} = {a + b + off}" for off in (0, 1, -1, 10)] for a, b in sums]
    return await session.score(prompts, choices)


async with rekindle.open("tiny", dtype="float32", **OPTIONS) as session:
    await session.score("What is", [" 1", " 2"])  # compiles
    began = time.perf_counter()
    scores = await label(session, table)
    seconds = time.perf_counter() - began
print(f"1,000 rows, 4,000 choices in {seconds:.1f} s; {scores.accuracy(table['answer']):.1%} right")
exact = scores.to_pandas()
exact[["choice", "score", "margin"]].head()

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert 1 / len(scores[0]) == 0.25, "four choices"
assert scores.accuracy(table["answer"]) > 0.5, "the model is better than chance"

# %% [markdown]
# ## How sure is it?
#
# The *margin* is the difference of the best two log-probabilities. If it means something, rows with a large margin are right more often.
#
# **Predict.** Sort the rows by margin. By about how much are the surer 500 right more often than the others: 0, 0.1 or 0.3?
#
# <details><summary>Answer</summary>
#
# By about **0.3**.
#
# </details>

# %%
table["margin"] = exact["margin"]
table["correct"] = exact["choice"] == table["answer"]
by_margin = table.sort_values("margin", ascending=False)["correct"].to_numpy()
plt.plot(np.arange(1, 1001), np.cumsum(by_margin) / np.arange(1, 1001))
plt.xlabel("rows kept, the surest first")
plt.ylabel("share that is right")
plt.ylim(0, 1.02)
plt.show()
print(f"{by_margin[:500].mean():.1%} of the surer half, {by_margin[500:].mean():.1%} of the other")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert min((0, 0.1, 0.3), key=lambda one: abs(one - by_margin[:500].mean() + by_margin[500:].mean())) == 0.3, (
    "a margin tells right from wrong"
)
assert by_margin[:50].mean() < by_margin[50:500].mean(), (
    "but the surest rows are not the ones that are right most often"
)

# %% [markdown]
# That curve is what you decide by: keep the labels above a margin, and send the others to a larger model or to a person. Look at its
# beginning, too: a smaller share of the fifty rows with the largest margins is right than of the 450 after them, so a large margin does
# not guarantee a right label.
#
# ## What does quantising cost, on my task?
#
# Perplexity (page 10) is an average over words. What counts is the labels. So keep rows aside that nothing is chosen on, here the last
# 500, and label them with 8 and with 4 bits:
#
# **Predict.** In about how many of 100 rows does the label change with 8-bit weights: 0, 5 or 20?
#
# <details><summary>Answer</summary>
#
# In **0**. With 4 bits some do, and those are rows with small margins.
#
# </details>

# %%
held_out = table.tail(500)
before = exact["choice"].tail(500).to_numpy()
print(f"{'float32':12} {held_out['correct'].mean():.1%} right")
flipped = {}
for name in ("int8-weight", "int4"):
    async with rekindle.open("tiny", quantize=name, **OPTIONS) as session:
        now = await label(session, held_out)
    flipped[name] = now.to_pandas()["choice"].to_numpy() != before
    print(f"{name:12} {now.accuracy(held_out['answer']):.1%} right, {flipped[name].mean():.1%} of the labels changed")
lost, kept = (held_out["margin"][rows].mean() for rows in (flipped["int4"], ~flipped["int4"]))
print(f"mean margin of the rows that 4 bits change {lost:.2f}, of the others {kept:.2f}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert min((0, 5, 20), key=lambda one: abs(one - 100 * flipped["int8-weight"].mean())) == 0, (
    "8 bits keep nearly all labels"
)
assert 0 < flipped["int4"].mean() < 0.03, "4 bits change one or two labels in a hundred"
assert lost < kept / 2, "the labels that 4 bits change had small margins"

# %% [markdown]
# In a model of 4 million weights 4 bits change one or two labels in a hundred; larger models lose less. Whether that matters is a
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
# ## Reviews
#
# Sums have an answer that we know; a table of yours has opinions. SmolLM2-135M-Instruct (page 18 fetches it) judges 24 reviews after four
# examples. A small model has a favourite answer whatever it reads (Zhao et al., 2021). So the limit for *positive* need not be 0: label a
# dozen rows yourself, and put it halfway between the mean margins of both labels.
#
# **Predict.** Half of the 24 reviews are positive. With the limit at 0, about how many does the model call positive: 8, 12 or 16?
#
# <details><summary>Answer</summary>
#
# About **16**: this model leans to *positive*. With the limit from the first dozen more of the other dozen are right.
#
# </details>

# %% tags=["real"]
import os
from pathlib import Path

fetched = Path.home().glob(".cache/rekindle-course/*/*.gguf")  # page 18's
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section shows nothing")
if smollm2:
    REVIEWS = pd.DataFrame(
        [
            ("The soup was cold and the waiter ignored us.", "negative"),
            ("Best pizza in town, we will come back!", "positive"),
            ("Overpriced, and the fish smelled old.", "negative"),
            ("Lovely terrace, kind staff, great wine.", "positive"),
            ("We waited an hour for a burnt steak.", "negative"),
            ("The dessert alone is worth the trip.", "positive"),
            ("Dirty tables and rude service.", "negative"),
            ("Fresh pasta and a warm welcome.", "positive"),
            ("My salad had a hair in it.", "negative"),
            ("A perfect evening from start to finish.", "positive"),
            ("The rice was hard and tasted of nothing.", "negative"),
            ("The chef came out to greet us, delicious food.", "positive"),
            ("Never again.", "negative"),
            ("Everything was excellent.", "positive"),
            ("The music was so loud that we left.", "negative"),
            ("Generous portions at a fair price.", "positive"),
            ("They lost our reservation.", "negative"),
            ("The bread is baked here and it shows: wonderful.", "positive"),
            ("I was ill the next day.", "negative"),
            ("Friendly, fast and tasty.", "positive"),
            ("Bland food and warm beer.", "negative"),
            ("I loved the lamb.", "positive"),
            ("The worst coffee that I ever had.", "negative"),
            ("A hidden gem, highly recommended.", "positive"),
        ],
        columns=["review", "label"],
    )
    EXAMPLES = (
        "Review: The food was awful.\nSentiment: negative\n\nReview: We had a wonderful time.\nSentiment: positive\n\n"
        "Review: The staff was rude.\nSentiment: negative\n\nReview: Delicious!\nSentiment: positive\n\n"
    )
    async with rekindle.open(smollm2, max_requests=16, max_model_len=256, precompile="lazy", quiet=True) as larger:
        prompts = [f"{EXAMPLES}Review: {review}\nSentiment:" for review in REVIEWS["review"]]
        scores = await larger.score(prompts, [" positive", " negative"])
    margins = np.array([positive.logprob - negative.logprob for positive, negative in scores])
    positive = (REVIEWS["label"] == "positive").to_numpy()
    mine, others = slice(0, 12), slice(12, 24)
    limit = np.mean([margins[mine][positive[mine] == one].mean() for one in (True, False)])
    print(f"{(margins > 0).sum()} of 24 are called positive")
    right_of = {at: int(((margins > at) == positive)[others].sum()) for at in (0.0, limit)}
    print(", ".join(f"{count} of the other 12 are right with the limit at {at:.1f}" for at, count in right_of.items()))

# %% jupyter={"source_hidden": true} tags=["check", "real"]
# Holds the answer above.
if smollm2:
    assert min((8, 12, 16), key=lambda one: abs(one - (margins > 0).sum())) == 16, "the model leans to positive"
    assert right_of[limit] > right_of[0.0], "a limit from twelve labelled rows is better on twelve others"

# %% [markdown]
# ## Exercise
#
# Choose the smallest margin on the first 500 rows above which 90 % of the labels are right, among a hundred rows at least; if there is none, the median. Which share of the other 500 rows is above it, and how many of those are right?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
seen = table.head(500)
candidates = np.sort(seen["margin"])[:-100]  # at least a hundred rows lie above each
limits = [limit for limit in candidates if seen["correct"][seen["margin"] >= limit].mean() >= 0.9]
limit = limits[0] if limits else seen["margin"].median()
kept = held_out[held_out["margin"] >= limit]
print(
    f"margin {limit:.2f}: {len(kept) / 500:.0%} of the held-out rows are kept, {kept['correct'].mean():.1%} of them right"
)
assert kept["correct"].mean() > held_out["correct"].mean(), "a limit chosen on other rows holds on these"

# %% [markdown]
# ## Takeaway
#
# Scoring choices is quicker and surer than generating labels. The margin says which labels to look at, and a few labelled rows say where to put the
# limit.
#
# ## In production
#
# Batches of millions of rows go to engines as files (OpenAI's batch format, `rekindle run-batch`), sorted so that common beginnings meet in the cache. Labels are checked against a few hundred that people made, in each batch anew, and choices are compared by length-normalised scores where they differ in length.
#
# ## Further reading
#
# - Brown et al., *Language Models are Few-Shot Learners*, 2020, [arXiv:2005.14165](https://arxiv.org/abs/2005.14165)
# - Kadavath et al., *Language Models (Mostly) Know What They Know*, 2022, [arXiv:2207.05221](https://arxiv.org/abs/2207.05221)
# - Zhao et al., *Calibrate Before Use*, 2021, [arXiv:2102.09690](https://arxiv.org/abs/2102.09690)
# - Holtzman et al., *Surface Form Competition*, 2021, [arXiv:2104.08315](https://arxiv.org/abs/2104.08315)
