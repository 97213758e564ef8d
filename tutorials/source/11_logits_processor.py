# %% [markdown]
# # 11 Write a logits processor
#
# *How do I change what the model may say, in my own code, at full speed?*
#
# **Before:** page 04; pure functions in JAX. **Afterwards you can** write a logits processor, ask for it by name, and know what it costs the other rows.
#
# **Also called:** logits processor = transformers' and vLLM's word; a mask of minus infinity = constrained decoding; a bonus = `logit_bias` that depends on the position.
#
# **Takes:** about 15 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# A logits processor is a pure JAX function. It gets the logits of all rows that want it and some context, and returns new
# logits. The engine compiles it into its step programs, so there is no trip to the host between two tokens, and rows that did
# not ask for it are left alone.
#
# ![A processor is compiled into the step, between the head and sampling](../source/pictures/11_processor.svg)

# %%
import jax.numpy as jnp
import numpy as np

import rekindle
from rekindle import LogitsProcessor, tiny
from rekindle.models import Tokenizer

tokenizer = Tokenizer.load(tiny.folder())

# %% [markdown]
# ## The smallest one
#
# This one never allows the same token twice in a row. `context.last_token` has one entry per row.
#
# **Predict.** The prompt is a loop of one word, and the model goes on with it. How many of the 14 tokens equal the one before, with the processor?
#
# <details><summary>Answer</summary>
#
# **0**. Without it, all of them.
#
# </details>


# %%
def no_echo(logits, context):
    rows = jnp.arange(logits.shape[0])
    return logits.at[rows, context.last_token].set(-jnp.inf)


options = {"max_requests": 4, "max_tokens_per_step": 64, "precompile": "lazy"}
async with rekindle.open("tiny", processors=[LogitsProcessor(no_echo, name="no-echo")], **options) as session:
    for names in ((), "no-echo"):
        done = await session.generate("The old clock\nwagon wagon wagon wagon", max_tokens=14, processors=names)
        print(f"{names!s:10}{done.text!r}")
        before = session.tokenizer.encode("The old clock\nwagon wagon wagon wagon")[-1:] + list(done.token_ids[:-1])
        repeated = sum(one == two for one, two in zip(before, done.token_ids, strict=True))
        print(f"{'':10}{repeated} of {len(before)} tokens equal the one before")
        assert names or repeated == 14, "without the processor, each token is the one before"

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert repeated == 0, "with it, no token comes twice in a row"

# %% [markdown]
# The *name* is what a request says to ask for it. The first text is a loop of one token; the second one got
# what we asked for, and loops over two.
#
# The function's code and the values that it uses are part of the key under which compiled programs are stored, so a function that
# you change is compiled anew. What Python can't look into, such as code that it imports, is not: give the processor another
# `version` when that changes.
#
# ## What is in the context
#
# Everything is an array over rows: `position` and `prompt_length`, `last_token`, `in_prompt` (which tokens the prompt holds) and
# `generated` (how often each token was generated). With the last one a penalty of your own is one line.


# %%
def fresh_words(logits, context):
    """Subtract more with every repetition: 0, 2, 8, 18, …"""
    return logits - 2.0 * context.generated.astype(jnp.float32) ** 2


# %% [markdown]
# ## A constraint from the vocabulary
#
# Arrays from outside can be closed over; they become constants of the program. Here is one that allows only tokens without the
# letter *e*, as in Georges Perec's novel.
#
# As a formula, with $A$ the set of allowed tokens: $z'_i = z_i$ for tokens of $A$, and
#
# $$z'_i = -\infty \quad \mathrm{for} \quad i \notin A$$
#
# so the softmax gives the others all of the probability.
#
# **Predict.** How many of the 2,048 tokens have an *e*?
#
# <details><summary>Answer</summary>
#
# More: **728** of 2,048.
#
# </details>

# %%
texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.vocab_size)]
has_e = np.array(["e" in text.lower() and not text.startswith("<|") for text in texts])
print(f"{has_e.sum()} of {len(has_e)} tokens have an e")


def lipogram(logits, context):
    return jnp.where(has_e, -jnp.inf, logits)


# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert has_e.sum() == 728, "a third of the tokens has an e"

# %% [markdown]
# ## One that looks at the position
#
# This one grows impatient: the longer the answer, the likelier its end. Eos tokens get a bonus that grows with the number of
# generated tokens.

# %%
ends = np.zeros(tokenizer.vocab_size, np.float32)
ends[list(tokenizer.eos_ids)] = 1.0


def impatient(logits, context):
    age = context.position - context.prompt_length
    return logits + 0.4 * age[:, None] * ends


# %% [markdown]
# ## Use them
#
# Processors are given to `open`, because they are compiled in. Each request names those that it wants; they run in the order
# in which they were given here, before temperature and all other options.

# %%
session = await rekindle.open(
    "tiny",
    **options,
    processors=[
        LogitsProcessor(fresh_words, name="fresh-words"),
        LogitsProcessor(lipogram, name="no-e"),
        LogitsProcessor(impatient, name="impatient"),
    ],
)

for names in ((), "no-e", ("no-e", "fresh-words")):
    done = await session.generate("Max had a", max_tokens=30, processors=names)
    print(f"{names!s:25}{done.text!r}\n")

# %% [markdown]
# The longer texts read like gibberish, and they should: a sentence without *e* is a place where the model has hardly ever been, and
# each next word is drawn from what is left there. A mask guarantees the form and costs sense; a larger model has more to
# choose from.
#
# **Predict.** Four texts of 40 tokens, drawn at temperature 1. How many times does the letter *e* occur in them?
#
# <details><summary>Answer</summary>
#
# **0**: a masked token has no probability at any temperature.
#
# </details>

# %%
many = await session.generate("Max had a", n=4, temperature=1.0, seed=0, max_tokens=40, processors="no-e")
print([done.text.lower().count("e") for done in many])

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(done.text.lower().count("e") for done in many) == 0, "a masked token is never drawn"

# %% [markdown]
# SmolLM2-135M-Instruct (page 18 fetches it) has an *e* in half of its 49,152 tokens, and still tells a story with the rest:

# %% tags=["real"]
import os
from pathlib import Path

fetched = Path.home().glob(".cache/rekindle-course/*/*.gguf")  # page 18's
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section shows nothing")
if smollm2:
    larger_tokenizer = rekindle.models.Tokenizer.load(smollm2)
    larger_texts = [larger_tokenizer.decode([token]) for token in range(larger_tokenizer.vocab_size)]
    larger_e = np.array(["e" in text.lower() for text in larger_texts])
    larger_lipogram = rekindle.LogitsProcessor(
        lambda logits, context: jnp.where(larger_e, -jnp.inf, logits), name="no-e"
    )
    only_one = {"max_requests": 1, "max_model_len": 256, "precompile": "lazy", "quiet": True}
    async with rekindle.open(smollm2, processors=[larger_lipogram], **only_one) as larger:
        asked = [{"role": "user", "content": "Tell me a short story about a dog."}]
        told = await larger.chat(asked, temperature=0, max_tokens=50, repetition_penalty=1.1, processors="no-e")
    print(f"{larger_e.sum():,} of {len(larger_e):,} tokens have an e. {told.text}")
    assert 0.4 < larger_e.mean() < 0.6, "half of the tokens have an e"
    assert "e" not in told.text.lower(), "the mask holds in any vocabulary"

# %% [markdown]
# Here is the impatient one, on a question whose answer runs on:

# %%
question = [{"role": "user", "content": "Tell me a story about a cat."}]
for names in ((), "impatient"):
    reply = await session.chat(question, max_tokens=200, processors=names)
    print(f"{names!s:12} {len(reply.token_ids):3} tokens, {reply.finish_reason}: …{reply.text[-40:]!r}")
assert reply.finish_reason == "eos", "a growing bonus ends the answer"
assert len(reply.token_ids) < 200, "long before max_tokens"

# %% [markdown]
# ## Mixed batches
#
# Rows with and without processors share a step. The neighbour's text is the one that it has alone.

# %%
alone = await session.generate("Once upon a time", max_tokens=20)
pair = [session.submit("Once upon a time", max_tokens=20, processors=names) for names in ((), "no-e")]
plain, constrained = [await handle for handle in pair]
print(plain.text == alone.text, constrained.text == alone.text)

# %% [markdown]
# ## What it costs
#
# A step with such a row runs in a variant of its program, `…+processors`, which holds all processors. They were compiled once. Steps
# without such rows run in the plain program and pay nothing.

# %%
session.programs()

# %% [markdown]
# A name that was not registered is refused before the request runs.

# %%
try:
    await session.generate("x", processors="no-f")
except rekindle.errors.RekindleError as error:
    print(error)

# %% [markdown]
# ## Exercise
#
# Write a processor that never lets the model use digits, and ask it for a sum. Its answers make no sense, and can't: all that it has
# learned about sums are digits. A mask guarantees the form alone.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
digits = np.array([any(char.isdigit() for char in text) for text in texts])


def no_digits(logits, context):
    return jnp.where(digits, -jnp.inf, logits)


question = "What is 2 + 3?"
async with rekindle.open("tiny", processors=[LogitsProcessor(no_digits, name="no-digits")], **options) as other:
    sums = await other.generate(question, n=4, temperature=1.0, seed=0, max_tokens=16, processors="no-digits")
print([done.text for done in sums])
assert not any(char.isdigit() for done in sums for char in done.text), "a mask from the vocabulary holds"

# %% [markdown]
# ## Takeaway
#
# A logits processor is a function that runs within the compiled step. It changes the distribution before a token is chosen, at no cost for the other
# rows.
#
# ## In production
#
# Servers run a fixed set of processors fused into sampling, and apply grammars as bit masks that are computed on the host while the device works (page 14). Arbitrary Python in the loop, as in transformers, costs a trip to the host for each token.
#
# ## Further reading
#
# - Kirchenbauer et al., *A Watermark for Large Language Models*, 2023 (a logits processor), [arXiv:2301.10226](https://arxiv.org/abs/2301.10226)
# - Keskar et al., *CTRL*, 2019, [arXiv:1909.05858](https://arxiv.org/abs/1909.05858)
# - Willard and Louf, *Efficient Guided Generation for Large Language Models*, 2023, [arXiv:2307.09702](https://arxiv.org/abs/2307.09702)

# %%
await session.aclose()
