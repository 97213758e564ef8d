# %% [markdown]
# # 22 Speculation with prompt lookup
#
# *How can a step give more than one token, and the text stay the same?*
#
# **Before:** pages 02 and 04; page 19 says why steps are expensive. **Afterwards you can** compute what drafts save, say why they change no text, and tell which texts they help.
#
# **Also called:** prompt lookup = n-gram speculation; draft = proposed or speculative token; verification = scoring; acceptance rate = α.
#
# ![Drafts are copied from where the text said this before; one step verifies all of them](pictures/22_drafts.svg)
#
# A decode step reads all weights for one token. Reading them for eight tokens takes hardly longer. But the eighth depends on the
# seventh, so somebody has to guess. *Prompt lookup* guesses that the text repeats itself: it looks for the last few tokens earlier in the
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
# **Predict.** A text that repeats one word: 60 tokens with up to 7 drafts a step. Without drafts it takes 60 steps. With them: more or less than 20?
#
# <details><summary>Answer</summary>
#
# Less than **20**. Each step gives up to 8 tokens, so it can't be less than 60 / 8.
#
# </details>

# %%
table = {}
for name, prompt in TEXTS.items():
    (one, slow), (two, quick) = await steps(plain, prompt), await steps(drafting, prompt)
    table[name] = (slow, quick, one.text == two.text)
    print(f"{name:13} {slow} steps without drafts, {quick} with, the same text: {one.text == two.text}")
    print(f"{'':13} {drafting.explain(two).text}")
assert table["a loop"][1] < 20, "what repeats itself is guessed"

# %% [markdown]
# ## Why no text changes
#
# A draft is kept only if it is the token that the model gives at its position anyway, by the same random number when tokens are drawn
# (page 04). Then what it computed for the next position is right as well. The first wrong draft costs nothing but its part of the step.
#
# **Predict.** Of these three texts, how many are the same with drafts as without?
#
# <details><summary>Answer</summary>
#
# **3** of 3, and drawn ones are, too.
#
# </details>

# %%
drawn = [await steps(session, TEXTS["a story"], temperature=1.0, seed=4) for session in (plain, drafting)]
print(drawn[0][0].text == drawn[1][0].text, repr(drawn[1][0].text[:50]), f"{drawn[0][1]} and {drawn[1][1]} steps")
assert sum(same for *_, same in table.values()) == 3, "drafts change no text"
assert drawn[0][0].text == drawn[1][0].text, "nor one that is drawn"

# %% [markdown]
# ## What it is worth
#
# If each draft is right with probability $\alpha$, independently, a step with $k$ drafts gives on average
#
# $$E = 1 + \alpha + \alpha^2 + \ldots + \alpha^k = \frac{1 - \alpha^{k+1}}{1 - \alpha}$$
#
# tokens: the accepted ones and the model's own after them.
#
# **Predict.** Half of the drafts are right, and there are 7 in each step. How many tokens does a step give: about 2, 4 or 8?
#
# <details><summary>Answer</summary>
#
# About **2**: at the fourth draft the chance that all before it were right is 1 in 16. More drafts would only cost.
#
# </details>


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
# Whether fewer steps are less time depends on the step: 8 positions of one text cost little where reading weights is the limit, and as much as
# 8 texts where arithmetic is (page 19). So drafts help a person who is alone with a large model, and cost a full batch.
#
# The texts that prompt lookup helps are those that copy: code that is edited, answers that quote a document, tables, JSON with the same keys.
# Drafts of the three texts above, in all:

# %%
print(f"{drafting.stats().drafted_tokens} drafts, {drafting.stats().accepted_tokens} accepted")

# %% [markdown]
# ## Texts that copy
#
# The text above repeats one word, which no user asks for. So SmolLM2-135M-Instruct (page 18 fetches it) gets three real requests: to repeat a
# text, to quote a sentence, and to tell a story.
#
# **Predict.** Without drafts the repeated text takes 42 steps. With up to 7 drafts: more or less than 21?
#
# <details><summary>Answer</summary>
#
# Less than **21**: at best a step gives 8 tokens. The story, which copies nothing, takes as many steps as before.
#
# </details>

# %% tags=["real"]
import os
from pathlib import Path

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
    assert taken["repeat", "with"] < min(21, taken["repeat", "without"] / 2), "a copy takes less than half of the steps"
    assert taken["quote", "with"] < taken["quote", "without"], "a quotation takes fewer, too"
    assert taken["story", "with"] > 0.9 * taken["story", "without"], "a story does not"
    assert all(said[what, "with"] == said[what, "without"] for what in asked), "all texts are the same"

# %% [markdown]
# ## Exercise
#
# Write `lookup(tokens, count, size)`: find the last `size` tokens earlier in the text, latest first, and return up to `count` tokens that came after them. How many of 40 tokens of the loop's text does it guess, if it proposes one token at each position?


# %% jupyter={"source_hidden": true} tags=["solution"]
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
# ## In production
#
# Drafts come from a small model, from extra heads (Medusa), or from a layer that continues the large model's hidden states (EAGLE, multi-token prediction); several continuations are verified as a tree. Sampled text stays exact by a rule that accepts a draft with probability min(1, p/q). Engines switch drafts off when batches are full.
#
# ## Further reading
#
# - Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2022, [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)
# - Chen et al., *Accelerating Large Language Model Decoding with Speculative Sampling*, 2023, [arXiv:2302.01318](https://arxiv.org/abs/2302.01318)
# - Saxena, *Prompt Lookup Decoding*, 2023
# - Li et al., *EAGLE*, 2024, [arXiv:2401.15077](https://arxiv.org/abs/2401.15077)

# %%
await plain.aclose()
await drafting.aclose()
