# %% [markdown]
# # 22 Drafts
#
# *How can a step give more than one token, and the text stay the same?*
#
# **Before:** pages 02 and 04; page 19 says why steps are expensive. **Afterwards you can** compute what drafts gain, say why they change no text, and tell which drafter helps which texts.
#
# **Also called:** drafting = speculative decoding; prompt lookup = n-gram speculation; draft = proposed or speculative token; verification = scoring; acceptance rate = α.
#
# **Takes:** about 20 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![Drafts are copied from where the text said this before; one step verifies all of them](../source/pictures/22_drafts.svg)
#
# A decode step reads all weights for one token. Reading them for eight tokens takes hardly longer. But the eighth depends on the
# seventh, so somebody has to guess: a *drafter*. The cheapest one, *prompt lookup*, guesses that the text repeats itself: it looks for the last few tokens earlier in the
# text, and proposes what came after them then. One step computes all proposals; those that the model would have chosen stay, the first that
# it would not ends the run.

# %%
import matplotlib.pyplot as plt
import numpy as np

import rekindle

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
OPTIONS = {"dtype": "float32", "max_requests": 8, "max_model_len": 512, "precompile": "lazy", "quiet": True}
plain = await rekindle.open("tiny", **OPTIONS)
drafting = await rekindle.open("tiny", prompt_lookup=7, **OPTIONS)

# %% [markdown]
# ## The same text in fewer steps


# %%
async def steps(session, prompt: str, **options):
    """A completion of 60 tokens, and the number of steps that it took."""
    before = session.stats()
    done = await session.generate(prompt, max_tokens=60, ignore_eos=True, **options)
    return done, session.stats().steps - before.steps


TEXTS = {
    "a loop": "The old clock\nwagon wagon wagon wagon",
    "a story": "Once upon a time",
    "a repetition": "Tom had a red ball. He liked his red ball. Tom had a red ball. He liked his red ball. Tom had",
}

# %% [markdown]
# **Predict.** A text that repeats one word: 60 tokens with up to 7 drafts a step. Without drafts it takes 60 steps. About how many with them: 8, 15 or 30?
#
# <details><summary>Answer</summary>
#
# About **15**. Each step gives up to 8 tokens, so it can't be less than 60 / 8; and some drafts are refused.
#
# </details>

# %%
table = {}
for name, prompt in TEXTS.items():
    (one, slow), (two, quick) = await steps(plain, prompt), await steps(drafting, prompt)
    table[name] = (slow, quick, one.text == two.text)
    print(f"{name:13} {slow} steps without drafts, {quick} with, the same text: {one.text == two.text}")
    print(f"{'':13} {drafting.explain(two).text}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert min((8, 15, 30), key=lambda one: abs(one - table["a loop"][1])) == 15, "what repeats itself is guessed"

# %% [markdown]
# ## Why no text changes
#
# A draft is kept only if it is the token that the model gives at its position anyway, by the same random number when tokens are drawn
# (page 04). Then what it computed for the next position is right as well. The first wrong draft costs nothing but its part of the step.
#
# So all three texts above are the same with drafts as without, and one that is drawn is, too:

# %%
drawn = [await steps(session, TEXTS["a story"], temperature=1.0, seed=4) for session in (plain, drafting)]
print(drawn[0][0].text == drawn[1][0].text, repr(drawn[1][0].text[:50]), f"{drawn[0][1]} and {drawn[1][1]} steps")
assert sum(same for *_, same in table.values()) == 3, "drafts change no text"
assert drawn[0][0].text == drawn[1][0].text, "nor one that is drawn"

# %% [markdown]
# ## The texts of before
#
# Most texts do not repeat themselves, but many repeat each other: rows of one table, versions of one file, the same question asked again. With
# `drafts="suffix"` the drafter looks in all texts of the session, and not in the request's alone.
#
# **Predict.** Three wishes of different seeds, drawn one after the other; then the same three again. How many of the second round's tokens were drafts: few, half, or most?
#
# <details><summary>Answer</summary>
#
# Most, more than **90** of 180. The first round has taught it these texts, and their seeds make them the same again. New texts would share less.
#
# </details>

# %%
async with rekindle.open("tiny", drafts="suffix", **OPTIONS) as remembering:
    rounds = []
    for _ in range(2):
        before = remembering.stats().accepted_tokens
        for seed in range(3):
            await steps(remembering, "Lily made a wish.", temperature=1.0, seed=seed)
        rounds.append(remembering.stats().accepted_tokens - before)
print(f"drafts that were right: {rounds[0]} of 180 tokens in the first round, {rounds[1]} in the second")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert rounds[1] > 90 > rounds[0], "what was said once is guessed the second time"

# %% [markdown]
# ## What it is worth
#
# If each draft is right with probability $\alpha$, independently, a step with $k$ drafts gives on average
#
# $$E = 1 + \alpha + \alpha^2 + \ldots + \alpha^k = \frac{1 - \alpha^{k+1}}{1 - \alpha}$$
#
# tokens: the accepted ones and the model's own after them. If half of the drafts are right, seven drafts bring hardly more than three: the chance that
# the fourth counts, since all before it were right, is 1 in 16.


# %%
def expected(share, drafts: int):
    return sum(share**count for count in range(drafts + 1))


shares = np.linspace(0, 1, 50)
for drafts in (1, 3, 7):
    plt.plot(shares, expected(shares, drafts), label=f"{drafts} drafts")
plt.xlabel("share of drafts that are right")
plt.ylabel("tokens in a step")
plt.legend()
plt.show()
assert 0.5**4 == 1 / 16, "four right guesses in a row are rare"
assert round(expected(0.5, 7)) == 2, "luck does not last"

# %% [markdown]
# ## What it costs
#
# Fewer steps are less time only if they cost little more. Call the time of a plain step 1. A draft costs $c$ to make, and $v$ to verify: one row more in the
# step. With $k$ drafts the gain is
#
# $$G = \frac{E}{1 + k\,(c + v)}$$
#
# Looking up costs nothing, and $v$ is small where reading weights is the limit: 8 positions of one text take hardly longer than one. Where arithmetic is the
# limit they cost as much as 8 texts (page 19), so that $v$ is 1 and every wrong draft is lost. So drafts help a person who is alone with a large model,
# and not a full batch.
#
# **Predict.** A small model of a tenth of the time ($c$ = 0.1) drafts, four of five drafts are right, and verifying is free. Which $k$ gains most: 1, 6 or 16?
#
# <details><summary>Answer</summary>
#
# **6**: it makes the text 2.5 times as fast. Further drafts cost as much as the first, and are right less often.
#
# </details>


# %%
def gain(share: float, drafts: int, draft: float, verify: float = 0.0) -> float:
    return expected(share, drafts) / (1 + drafts * (draft + verify))


counts = range(17)
for share in (0.4, 0.6, 0.8):
    plt.plot(counts, [gain(share, drafts, 0.1) for drafts in counts], label=f"{share:.0%} right")
plt.axhline(1, color="grey", linewidth=0.8)
plt.xlabel("drafts in a step, each of a tenth of its time")
plt.ylabel("gain")
plt.legend()
plt.show()
best = max(counts, key=lambda drafts: gain(0.8, drafts, 0.1))
print(f"{best} drafts gain {gain(0.8, best, 0.1):.2f}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert best == 6, "there is a best number of drafts"
assert round(gain(0.8, best, 0.1), 1) == 2.5, "it is less than the number of tokens"
assert gain(0.4, 16, 0.1) < 1, "too many drafts cost more than they bring"

# %% [markdown]
# Both formulas, with sliders. At what price of a draft does the best number become 0?

# %%
from pathlib import Path

from IPython.display import HTML

FOLDERS = Path("../source/pictures"), Path("pictures")  # in a clone, and next to a copy of this page
HTML((next(one for one in FOLDERS if one.is_dir()) / "22_slider.html").read_text(encoding="utf-8"))

# %% [markdown]
# ## A model that drafts
#
# `drafts=` takes a model, too: a folder, a GGUF file or a name. It has to have the same tokenizer, be right often and be small. Which share is right is
# measured without any drafts: let the small model say the next token after each prefix of the text. Here a copy of the model in four bits is the drafter.
#
# **Predict.** Of 40 tokens, about how many does the four-bit copy say as well: 10, 20 or 40?
#
# <details><summary>Answer</summary>
#
# About **40**. It is the same model but for rounding. That makes a good drafter, and no cheap one: a real one has a tenth of the weights, and says less.
#
# </details>

# %%
import tempfile

folder = tempfile.TemporaryDirectory()
copy = rekindle.models.export("tiny", Path(folder.name) / "copy.gguf", type="q4_0")
story, _ = await steps(plain, TEXTS["a story"])
tokens = [*plain.tokenizer.encode(TEXTS["a story"]), *story.token_ids]
async with rekindle.open(copy, **OPTIONS) as small:
    prefixes = [tokens[:at] for at in range(len(tokens) - 40, len(tokens))]
    said = await small.generate(prefixes, max_tokens=1, temperature=0, ignore_eos=True)
right = sum(one.token_ids[0] == tokens[len(prefix)] for one, prefix in zip(said, prefixes, strict=True))
print(f"{right} of 40 tokens are those of the model: with 4 drafts, {expected(right / 40, 4):.1f} tokens in a step")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert min((10, 20, 40), key=lambda one: abs(one - right)) == 40, "four bits say nearly the same"

# %% [markdown]
# So much for the formula. Does a session with this drafter do what it says?

# %%
async with rekindle.open("tiny", drafts=copy, **OPTIONS) as drafted:
    again, taken = await steps(drafted, TEXTS["a story"])
    print(drafted.explain(again).text)
assert again.text == story.text, "any drafter gives the model's text"

# %% [markdown]
# The session measures what its steps take and how often drafts are right, and gives a step the drafts that gain by the formula. This drafter is as large as
# the model, so $c$ is near 1, and by the formula nothing is gained, however often it is right: when the session has measured that, the drafter rests. On a
# machine that does other work as well, that takes longer.
#
# The texts that prompt lookup helps are those that copy: code that is edited, answers that quote a document, tables, JSON with the same keys.
# Prompt lookup's drafts of the page's texts so far, the drawn one included:

# %%
print(f"{drafting.stats().drafted_tokens} drafts, {drafting.stats().accepted_tokens} accepted")

# %% [markdown]
# ## Texts that copy
#
# The loop above repeats one word, which no user asks for. So SmolLM2-135M-Instruct (page 18 fetches it) gets three real requests: to repeat a
# text, to quote a sentence, and to tell a story.
#
# **Predict.** Without drafts the repeated text takes 42 steps. About how many with up to 7 drafts: 8, 20 or 40?
#
# <details><summary>Answer</summary>
#
# About **8**: at best a step gives 8 tokens. The story, which copies nothing, takes as many steps as before.
#
# </details>

# %% tags=["real"]
import os

fetched = Path.home().glob(".cache/rekindle-course/*/*.gguf")  # page 18's
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section shows nothing")
if smollm2:
    real_options = {"max_requests": 8, "max_model_len": 512, "precompile": "lazy", "quiet": True}
    river = (
        "The river Po is 652 kilometres long. It begins in the Alps near Monte Viso and flows east through Turin, Piacenza "
        "and Cremona into the Adriatic Sea."
    )
    asked = {
        "repeat": f"Repeat this text word by word:\n\n{river}",
        "quote": f"{river}\n\nQuote the sentence that says where the river begins.",
        "story": "Tell me a story about a cat.",
    }
    taken, said = {}, {}
    for name, drafts in (("without", 0), ("with", 7)):
        async with rekindle.open(smollm2, prompt_lookup=drafts, **real_options) as larger:
            for what, content in asked.items():
                before = larger.stats().steps
                answer = await larger.chat([{"role": "user", "content": content}], temperature=0, max_tokens=64)
                taken[what, name], said[what, name] = larger.stats().steps - before, answer.text
    for what in asked:
        print(
            f"{what:7} {taken[what, 'without']} steps without drafts, {taken[what, 'with']} with: …{said[what, 'with'][-60:]!r}"
        )

# %% jupyter={"source_hidden": true} tags=["check", "real"]
# Holds the answer above.
if smollm2:
    assert min((8, 20, 40), key=lambda one: abs(one - taken["repeat", "with"])) == 8, "a copy takes few steps"
    assert taken["quote", "with"] < taken["quote", "without"], "a quotation takes fewer, too"
    assert taken["story", "with"] > 0.9 * taken["story", "without"], "a story does not"
    assert all(said[what, "with"] == said[what, "without"] for what in asked), "all texts are the same"

# %% [markdown]
# ## Exercise
#
# Write `lookup(tokens, count, size)`: find the last `size` tokens earlier in the text, latest first, and return up to `count` tokens that came after them. How many of 40 tokens of the loop's text does it guess, if it proposes one token at each position?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def lookup(tokens: list[int], count: int, size: int = 2) -> list[int]:
    end = tokens[-size:]
    for start in range(len(tokens) - size - 1, -1, -1):
        if tokens[start : start + size] == end:
            return tokens[start + size : start + size + count]
    return []


done, _ = await steps(plain, TEXTS["a loop"])
tokens = [*plain.tokenizer.encode(TEXTS["a loop"]), *done.token_ids]
guessed = sum(lookup(tokens[:at], 1) == [tokens[at]] for at in range(len(tokens) - 40, len(tokens)))
print(f"{guessed} of 40 tokens guessed")
assert guessed > 30, "a loop is easy to guess"
assert lookup([1, 2, 3, 1, 2], 2) == [3, 1], "what came after the same two tokens"

# %% [markdown]
# ## Takeaway
#
# Drafts are guesses that one step checks. They never change a greedy text or the distribution of a drawn one; what they save depends on how much of a
# text can be guessed.
#
# ## In production
#
# Drafts come from small models of the same family, or from a layer that continues the large model's hidden states (EAGLE, multi-token prediction: `drafts="mtp"` where a
# model has such a head; an assistant of Gemma 4 also reads the large model's keys, and needs none of its own). Several continuations are verified as a tree. Sampled text stays exact by a rule that accepts a draft with probability min(1, p/q). Engines switch drafts off when batches are full.
#
# ## Further reading
#
# - Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2022, [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)
# - Chen et al., *Accelerating Large Language Model Decoding with Speculative Sampling*, 2023, [arXiv:2302.01318](https://arxiv.org/abs/2302.01318)
# - Saxena, *Prompt Lookup Decoding*, 2023
# - Li et al., *EAGLE*, 2024, [arXiv:2401.15077](https://arxiv.org/abs/2401.15077)

# %%
folder.cleanup()
await plain.aclose()
await drafting.aclose()
