# %% [markdown]
# # 14 Objects instead of text
#
# *How do I get an object instead of text?*
#
# **Before:** page 01; dataclasses. **Afterwards you can** get a typed object from a model, know when there is none, and read which tokens a grammar allowed.
#
# **Also called:** structured output = guided decoding, constrained decoding, JSON mode; the mask = token bitmask (XGrammar); forced tokens = jump-forward decoding (SGLang).
#
# **Takes:** about 10 minutes, with the embedded model.
#
# A language model writes tokens. If what you need is a record with three fields, you can ask for JSON in the prompt, parse what
# comes back, and try again when it doesn't parse. Or you pass the type, and the model can't write anything else. This needs one
# package more: `pip install "rekindle[structured]"`.
#
# ![A grammar says which tokens may come; the others get probability 0](../source/pictures/14_mask.svg)

# %%
import dataclasses
import json

import rekindle


@dataclasses.dataclass
class Person:
    name: str
    age: int


session = await rekindle.open("tiny", max_requests=4, max_tokens_per_step=64, quiet=True)
done = await session.generate("Tom is a boy. He is six years old. As JSON: ", schema=Person, max_tokens=60)
done.parsed

# %% [markdown]
# `done.parsed` is a `Person`; `done.text` is what the model wrote. The embedded model knows little stories and no JSON at all, so
# don't expect it to be *right* about Tom. It is the *form* that is guaranteed, with any model, at any temperature:
#
# **Predict.** Four objects at temperature 1, from a model that has never seen JSON. How many of them are a `Person`?
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
assert sum(isinstance(one.parsed, Person) or one.parse_error is not None for one in many) == 4, (
    "each is a Person, or says why not"
)

# %% [markdown]
# The first request took some seconds, in which its programs were compiled; they are kept, as all programs are.
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
assert len({one.parsed for one in moods}) <= 3, "choices are the only texts"
print((await session.generate("The time is ", regex="(1[0-2]|[1-9]):[0-5][0-9]")).parsed)
print((await session.generate("Tom and Anna. ", grammar='root ::= ("Tom" | "Anna") " " ("ran" | "sat") "."')).text)

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
assert len(session.allowed(done, at=0).token_ids) == 1, "an object begins in one way"
session.allowed(done, at=0)

# %% [markdown]
# Inside of the name almost everything is allowed, and the token that came is framed if it is among those shown:

# %%
session.allowed(done, at=4)

# %% [markdown]
# Tokens without an alternative are underlined:

# %%
done

# %% [markdown]
# So the grammar knows some of the text in advance. Those tokens are proposed as drafts: several of them are checked in one step,
# together with the next token, and the model's own spelling still wins. Steps and tokens, for this object:

# %%
before = session.stats()
again = await session.generate("Tom is a boy. He is six years old. As JSON: ", schema=Person, max_tokens=60)
after = session.stats()
print(after.steps - before.steps, "steps for", len(again.token_ids), "tokens")
print(session.explain(again).text)
assert after.steps - before.steps < len(again.token_ids), "forced tokens save steps"

# %% [markdown]
# The mask is found on the host, with [llguidance](https://github.com/guidance-ai/llguidance), while the device computes the
# model's next step: what a grammar costs is hidden by it. Requests without a grammar, in the same batch, don't notice.
#
# ## A fork stays in its form
#
# Go back to a token, write something else, and the grammar goes on from there. The object is that of the whole text.

# %%
start = done.text.index(":") + 1
head = json.dumps("Anna")
place = next(
    at for at in range(len(done.token_ids)) if session.tokenizer.decode(done.token_ids[:at]) == done.text[:start]
)
fork = await session.fork(done, at=place, edit=head)
fork.parsed

# %% [markdown]
# ## Exercise
#
# Write a regular expression for dates, so that at any temperature every text is a day that exists in every year.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
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
