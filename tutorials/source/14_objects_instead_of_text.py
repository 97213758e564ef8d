# %% [markdown]
# # 14 Objects instead of text
#
# *How do I get an object instead of text?*
#
# **Before:** page 01; dataclasses. **Afterwards you can** get a typed object from a model, know when there is none, and read which tokens a grammar allowed.
#
# **Also called:** structured output = guided decoding, constrained decoding, JSON mode; the mask = token bitmask (XGrammar); forced tokens = jump-forward decoding (SGLang).
#
# **Takes:** about 15 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# A language model writes tokens. If what you need is a record with three fields, you can ask for JSON in the prompt, parse what
# comes back, and try again when it doesn't parse. Or you pass the type, and the model can't write anything else. This needs one
# package more: `pip install "rekindle[structured]"`.
#
# ![A grammar says which tokens may come; the others get probability 0](../source/pictures/14_mask.svg)

# %%
import dataclasses
import os
from pathlib import Path

import rekindle

fetched = (Path.home() / ".cache" / "rekindle-course").glob("*/*.gguf")
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this page goes on with the embedded one")


@dataclasses.dataclass
class Person:
    name: str
    age: int


session = await rekindle.open(smollm2 or "tiny", max_requests=4, max_tokens_per_step=64, max_model_len=512, quiet=True)
ask = 'Text: Anna is ten.\nJSON: {"name":"Anna","age":10}\n\nText: Ben is four.\nJSON: {"name":"Ben","age":4}\n\nText: {}\nJSON: '
ask = ask.replace("{}", "Tom is six years old.")  # two examples say what we want
done = await session.generate(ask, schema=Person, max_tokens=60)
assert not smollm2 or done.parsed == Person("Tom", 6), "the model read the text, and the form is the type's"
done.parsed

# %% [markdown]
# `done.parsed` is a `Person`; `done.text` is the JSON that the model wrote. SmolLM2 reads that Tom is six. The embedded model, which knows little stories and no
# JSON, makes him any age: a form does not make a model clever. What is guaranteed is the *form*, with any model, at any temperature:
#
# **Predict.** Four objects at temperature 1, after a text that names nobody. How many of them are a `Person`?
#
# <details><summary>Answer</summary>
#
# **4**, unless `max_tokens` cuts one. None of them needs to be true.
#
# </details>

# %%
many = await session.generate(
    "Someone is a child. As JSON: ", schema=Person, n=4, temperature=1.0, seed=3, max_tokens=80
)
for one in many:
    print(one.finish_reason, one.parsed)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(isinstance(one.parsed, Person) or one.parse_error is not None for one in many) == 4, (
    "each is a Person, or says why not"
)

# %% [markdown]
# The first request took some seconds, while its programs were compiled; they are kept, as all programs are.
#
# `schema` takes dataclasses, TypedDicts, annotations such as `list[int]`, pydantic models if pydantic is installed, and JSON
# schemas as dicts. A type of yours is also the validator: `parsed` is made by it.
#
# ## When there is no object
#
# The text can still be cut. Then `parsed` is None, and `parse_error` says why.

# %%
cut = await session.generate("As JSON: ", schema=Person, max_tokens=4)
cut.text, cut.parsed, cut.parse_error

# %% [markdown]
# And not every schema can be followed token by token. What can't is refused before anything runs:

# %%
try:
    await session.generate("x", schema={"type": "string", "not": {"const": "x"}})
except rekindle.InvalidRequest as error:
    print(error)

# %% [markdown]
# ## Other forms
#
# One of a few answers, a regular expression, a grammar in the notation of Lark or of llama.cpp, or any JSON object.
#
# **Predict.** Twenty answers at temperature 1 to a question with three choices: how many different ones at most?
#
# <details><summary>Answer</summary>
#
# **3**. At temperature 1 even a model that knows nothing stays within them.
#
# </details>

# %%
moods = await session.generate("Was Tom happy? ", choice=["yes", "no", "maybe"], n=20, temperature=1.0, seed=0)
print(*(one.parsed for one in moods))
print((await session.generate("The time is ", regex="(1[0-2]|[1-9]):[0-5][0-9]")).parsed)
print((await session.generate("Tom and Anna. ", grammar='root ::= ("Tom" | "Anna") " " ("ran" | "sat") "."')).text)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len({one.parsed for one in moods}) <= 3, "choices are the only texts"

# %% [markdown]
# ## How it works
#
# Before each token is chosen, a bit mask says which tokens may come; all others get a probability of zero. With $A_t$ the tokens that
# the grammar allows at position $t$, the model's probabilities are renormalised over them:
#
# $$p'(x) = \frac{p(x)}{\sum_{y \in A_t} p(y)} \quad \mathrm{for} \quad x \in A_t$$
#
# `session.allowed` shows the mask at any position. Each `Person` begins with `{"name":`, and the first token is as much of it as one
# token can be.
#
# **Predict.** How many tokens are allowed as the first one of a `Person`?
#
# <details><summary>Answer</summary>
#
# **1**.
#
# </details>

# %%
session.allowed(done, at=0)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(session.allowed(done, at=0).token_ids) == 1, "an object begins in one way"

# %% [markdown]
# Inside of the name almost everything is allowed, and the token that came is framed if it is among those shown:

# %%
session.allowed(done, at=4)

# %% [markdown]
# Tokens without an alternative are underlined:

# %%
done

# %% [markdown]
# So the grammar knows some of the text in advance. Where several such tokens follow each other, they are proposed as drafts and checked in one step,
# together with the next token; the model's own spelling still wins. A single forced token saves nothing. `Person` has short names, so we take a type with longer ones:


# %%
@dataclasses.dataclass
class Pet:
    animal: str
    years_of_age: int
    favourite_food: str


asked = {
    Person: ask,
    Pet: 'Text: The dog Rex is four years old and likes bones.\nJSON: {"animal":"dog","years_of_age":4,"favourite_food":"bones"}\n\n'
    "Text: The cat Mia is six and eats fish.\nJSON: ",
}
saved = {}
for kind, text in asked.items():
    before = session.stats().steps
    again = await session.generate(text, schema=kind, max_tokens=100)
    steps = session.stats().steps - before
    saved[kind] = len(again.token_ids) - steps
    print(
        f"{again.parsed}\n  {steps} steps for {len(again.token_ids)} tokens; it {session.explain(again).text.rpartition('; it ')[2]}"
    )
assert saved[Pet] > max(0, saved[Person]), "a run of forced tokens saves steps"

# %% [markdown]
# The mask is found on the host, with [llguidance](https://github.com/guidance-ai/llguidance), while the device computes the
# model's next step: so a grammar costs no time of its own there. Requests without a grammar, in the same batch, don't notice.
#
# ## A fork stays in its form
#
# Go back to a token, write something else, and the grammar goes on from there. The object is that of the whole text.

# %%
start = done.text.index(":") + 1  # the name comes after it; a token may go beyond
heads = [session.tokenizer.decode(done.token_ids[:at]) for at in range(len(done.token_ids))]
place = max(at for at, head in enumerate(heads) if done.text[:start].startswith(head))
fork = await session.fork(done, at=place, edit=done.text[len(heads[place]) : start] + '"Anna"')
assert fork.parsed.name == "Anna", "the grammar read what we wrote, and went on after it"
fork.parsed

# %% [markdown]
# ## Exercise
#
# Write a regular expression for dates, so that at any temperature every text is a day that exists in every year.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
import datetime

DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
days = await session.generate("It was on ", regex=DATE, n=8, temperature=1.5, seed=0)
print(*(one.parsed for one in days))
assert all(datetime.date.fromisoformat(one.parsed) for one in days), "every text is a date that exists"

# %% [markdown]
# ## Takeaway
#
# A schema guarantees the form of an answer with any model, never its truth. Check for `parsed` being None, and read `allowed` to see what the model
# could have said.
#
# ## In production
#
# vLLM and SGLang take the same forms (JSON schema, regex, grammar) from XGrammar or llguidance, compile grammars in the background and keep them. Hosted APIs accept a subset of JSON schema.
#
# ## Further reading
#
# - Willard and Louf, *Efficient Guided Generation for Large Language Models*, 2023 (Outlines), [arXiv:2307.09702](https://arxiv.org/abs/2307.09702)
# - Dong et al., *XGrammar*, 2024, [arXiv:2411.15100](https://arxiv.org/abs/2411.15100)
# - Zheng et al., *SGLang*, 2023 (jump-forward), [arXiv:2312.07104](https://arxiv.org/abs/2312.07104)

# %%
await session.aclose()
