# %% [markdown]
# # 14 Objects instead of text
#
# *How do I get an object instead of text?*
#
# A language model writes tokens. If what you need is a record with three fields, you can ask for JSON in the prompt, parse what
# comes back, and try again when it doesn't parse. Or you pass the type, and the model can't write anything else. This needs one
# package more: `pip install "rekindle[structured]"`.

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

# %%
many = await session.generate(
    "Someone is a child. As JSON: ", schema=Person, n=4, temperature=1.0, seed=3, max_tokens=80
)
for one in many:
    print(one.finish_reason, one.parsed)

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
# One of a few answers, a regular expression, a grammar in the notation of Lark or of llama.cpp, or any JSON object:

# %%
print((await session.generate("Was Tom happy? ", choice=["yes", "no", "maybe"])).parsed)
print((await session.generate("The time is ", regex="(1[0-2]|[1-9]):[0-5][0-9]")).parsed)
print((await session.generate("Tom and Anna. ", grammar='root ::= ("Tom" | "Anna") " " ("ran" | "sat") "."')).text)

# %% [markdown]
# ## How it works
#
# Before each token is chosen, a bit mask says which tokens may come; all others get a probability of zero. `session.allowed` shows
# the mask at any position. At the beginning of a `Person` there is no choice at all:

# %%
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
print(session.explain(again))

# %% [markdown]
# The mask is found on the host, with [llguidance](https://github.com/guidance-ai/llguidance), while the device computes the
# model's next step: what a grammar costs disappears behind it. Requests without a grammar, in the same batch, don't notice.
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

# %%
await session.aclose()
