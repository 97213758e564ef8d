# %% [markdown]
# # 01 First tokens
#
# *How do I get text out of a language model in a notebook?*
#
# **Before:** Python, and `await` in a notebook's cells. **Afterwards you can** generate, stream and chat, read what a completion says about itself, and end a stream early.
#
# **Also called:** `max_tokens` = `max_new_tokens` (transformers), `n_predict` (llama.cpp); a greedy text = temperature 0; a completion's `finish_reason` is OpenAI's.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![Text becomes tokens, tokens a distribution, and the drawn token is appended](../source/pictures/01_generation.svg)
#
# `rekindle.open` gives you a **session**: a model, its compiled programs and its cache, in a thread of its own. Notebooks
# allow `await` at the top level of a cell, so nothing more is needed. `"tiny"` is a small model that ships with the
# package: 4 million weights, no download, no GPU. It knows children's stories and a few facts.

# %%
import rekindle

session = await rekindle.open("tiny")

# %% [markdown]
# Give it the beginning of a story. By default the most likely token is taken at every position (*greedy*), so you will
# read the same text as this page.
#
# The very first call takes seconds, while XLA compiles a program for your CPU. Steps of other sizes have programs of
# their own, so the first longer prompt and the first batch further down wait once more. They are stored, and the next
# kernel loads them in milliseconds.
#
# What is computed is a product of conditional probabilities, one factor for each token:
#
# $$p(x_1, \ldots, x_n) = \prod_{i=1}^{n} p(x_i \mid x_1, \ldots, x_{i-1})$$

# %%
done = await session.generate("Once upon a time", max_tokens=60)
print("Once upon a time" + done.text)

# %% [markdown]
# The result is a `Completion`. `finish_reason` says why it ended: `length` after the 60 tokens of `max_tokens`, `eos` if the
# model came to an end, `stop` at a stop string.
#
# **Predict.** How many tokens is “Once upon a time”, which has 16 characters?
#
# <details><summary>Answer</summary>
#
# **4**: a frequent word is one token, with its leading space. The 60 of the output are less regular: a rare name is cut into pieces (` R`, `obert`).
#
# </details>

# %%
print("ended by    ", done.finish_reason)
print("tokens      ", done.usage.prompt_tokens, "in,", done.usage.completion_tokens, "out")
print("first ids   ", done.token_ids[:6])
print("their texts ", done.token_texts[:6])

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert done.usage.prompt_tokens == 4, "four frequent words are four tokens"

# %% [markdown]
# Ask for `logprobs`, and the notebook shades every token by how surprised the model was: the deeper the orange, the less
# likely the token. Hover over a token for the alternatives. `temperature` above 0 draws tokens at random instead of taking the
# most likely one.

# %%
await session.generate("Once upon a time", max_tokens=60, temperature=0.9, seed=3, logprobs=4)

# %% [markdown]
# ## Text as it is made
#
# `stream` yields pieces of text as soon as they are final. A piece never holds half of a character, even when a character
# is spread over several tokens.

# %%
async for delta in session.stream("Tom had a red ball.", max_tokens=40, temperature=0.7, seed=1):
    print(delta.text, end="")

# %% [markdown]
# For looking at text there is a *view*, with a button that stops it. The cell ends at once: generation happens in the
# session's own thread, so you can go on working while the text appears.

# %%
view = session.view.stream("One day, Tom found a", max_tokens=120, temperature=0.8, seed=4, logprobs=3)
view

# %% [markdown]
# A view's request can be awaited like any other.

# %%
done = await view.handle
view.join(5)  # until the last picture is drawn
print(done.usage.completion_tokens, "tokens, ended by", done.finish_reason)

# %% [markdown]
# ## Conversations
#
# `chat` puts messages into the form that the model was trained on, its *chat template*, and stops at the end of the
# answer.
#
# A model that was trained for it can also call functions of yours: `session.chat(messages, tools=[function], run_tools=True)`
# shows it their signatures and docstrings, runs what it calls, and gives it the results. For a model that thinks before it
# answers, `reply.reasoning` holds the thoughts and `reply.content` the answer. The small one here does neither.

# %%
reply = await session.chat([{"role": "user", "content": "Who are you?"}], max_tokens=40)
print(reply.text)

# %% [markdown]
# A conversation is a longer prompt: what was said before, and the next question. `session.conversation()` keeps what was said, and
# `say` goes on from there. The whole conversation is sent each time, but its beginning is found in the prefix cache, in pages of
# 32 tokens here (page 05).
#
# **Predict.** The third question's prompt has 94 tokens, and the last 9 of them are new. How many come from the cache?
#
# <details><summary>Answer</summary>
#
# **64**, two pages of 32: the page in which the newest question begins is computed again.
#
# </details>

# %%
conversation = session.conversation(max_tokens=40)
for question in ("My name is Anna and I live in Rome.", "Tell me a story about a cat.", "What is my name?"):
    reply = await conversation.say(question)
    print(f"you:   {question}")
    print(f"model: {reply.text}")
    print(f"       ({reply.usage.prompt_tokens} prompt tokens, {reply.usage.cached_tokens} of them from the cache)\n")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert session.config.page_size == 32, "pages have 32 tokens by default"
assert reply.usage.cached_tokens >= 64, "the third question reuses the whole pages of the conversation"

# %% [markdown]
# `session.view.chat()` is a conversation to talk to: point at a message to edit it or to have it answered again, and click a token
# of an answer to go on from there with other words. This one was given its question by code, so that the page shows something.

# %%
chat = session.view.chat(max_tokens=40)
chat.send("Tell me a story about a cat.")
chat

# %% [markdown]
# Its answer is made in the session's thread, like any other. Stop the view, and its last picture stays in the notebook. The
# conversation itself is kept in the cache folder: after a restart `session.view.chat(restore=name)` takes it up, with the name
# that the picture shows.

# %%
await chat.handle
chat.stop()
chat.join(5)

# %% [markdown]
# ## Several prompts at once
#
# A list goes in, a list comes out. The prompts run together, in one batch: eight of them make several times as many
# tokens per second as one (page 03 measures it). `watch()` is a live dashboard of what the session does meanwhile.

# %%
dashboard = session.watch()
dashboard

# %%
many = await session.generate(["Once upon a time", "In the morning,", "The opposite of hot is"], max_tokens=12)
for one in many:
    print(f"{one.prompt!r} → {one.text!r}")

# %% [markdown]
# `n` asks for several continuations of one prompt. They share the prompt's computation.
#
# **Predict.** Three continuations at temperature 0: how many different texts are there? And at temperature 1?
#
# <details><summary>Answer</summary>
#
# **1** at temperature 0, where every position has one most likely token; **3** at temperature 1.
#
# </details>

# %%
greedy = await session.generate("One day, Tom found a", n=3, max_tokens=14)
drawn = await session.generate("One day, Tom found a", n=3, max_tokens=14, temperature=1.0, seed=1)
for one in drawn:
    print(f"seed {one.seed}: {one.text!r}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len({one.text for one in greedy}) == 1, "greedy continuations are equal"
assert len({one.text for one in drawn}) == 3, "drawn ones differ"

# %% [markdown]
# ## What the session has done
#
# Close the dashboard, and its last picture stays in the notebook.

# %%
dashboard.stop()
dashboard.join(5)

# %% [markdown]
# Every public object has a readable form. `stats()` is a snapshot of the numbers; hover over a name to see what it counts.

# %%
session.stats()

# %% [markdown]
# ## Exercise
#
# Write `one_by_one(prompt, count)`, which generates a text with `count` requests of one token each, and show that it writes what one request writes. `session.render(messages)` is a chat's prompt.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
async def one_by_one(prompt: str, count: int) -> str:
    ids = list(session.tokenizer.encode(prompt))
    start = len(ids)
    for _ in range(count):
        ids += (await session.generate(ids, max_tokens=1)).token_ids
    return session.tokenizer.decode(ids[start:])


asked = [{"role": "user", "content": "What is the capital of Italy?"}]
whole = await session.chat(asked, max_tokens=40)
pieces = await one_by_one(session.render(asked), len(whole.token_ids))
print(pieces)
assert pieces == whole.text, "a text is a loop over single tokens"

# %% [markdown]
# ## Takeaway
#
# A session is opened once and gives text for prompts or chats. What a prompt shares with earlier ones is not computed again, and a text is a loop that
# draws one token after another.
#
# ## In production
#
# Servers keep the model in a process of its own and speak HTTP (page 13); a tokenizer there runs in other processes, since thousands of requests a second would keep one interpreter busy. Chat templates and stop strings are the same.
#
# ## Further reading
#
# - Vaswani et al., *Attention Is All You Need*, 2017, [arXiv:1706.03762](https://arxiv.org/abs/1706.03762)
# - Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019 (byte-level BPE)
# - Pope et al., *Efficiently Scaling Transformer Inference*, 2022, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102)

# %% [markdown]
# Close the session to give its memory back. In scripts, `async with rekindle.open("tiny") as session:` does that for you,
# and `rekindle.open_sync` needs no event loop at all.
#
# Next: what happens in one step of the engine (02), or every sampling option seen on distributions (04).

# %%
await session.aclose()
