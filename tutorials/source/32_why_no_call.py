# %% [markdown]
# # 32 Why did my model not call the tool?
#
# *I passed a tool, and the model answered in words. At which step did the call get lost?*
#
# **Before:** page 21; page 14 helps. **Afterwards you can** tell six reasons for a missing call apart, each by one look at the prompt or the reply, and know which of them code can mend.
#
# **Also called:** tool call = function calling; the call's form = tool syntax, tool parser, here `reply_format`; forced call = `tool_choice="required"`.
#
# **Takes:** about 15 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![The model writes a call, your code runs it, its result becomes a message, and again](../source/pictures/21_agent.svg)
#
# A call passes four doors: the chat template shows the tool, the model writes something, the text is read as a call, and the call names a
# function with arguments that fit. If the doors let a share $p_i$ through each, then
#
# $$p = p_1 \cdot p_2 \cdot p_3 \cdot p_4$$
#
# of the calls arrive. The first and the third door are software: they are open or shut for every call of a model. The second is the model itself.
#
# The page runs with SmolLM2-135M-Instruct where page 18 has fetched it, and with the embedded model anywhere. Both are far too small to be agents.
# That is what makes them useful here: everything goes wrong.

# %% tags=["real"]
import logging
import os
from pathlib import Path

import rekindle
from rekindle.errors import InvalidRequest

fetched = (Path.home() / ".cache" / "rekindle-course").glob("*/*.gguf")
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
options = {"max_requests": 8, "max_model_len": 1024, "precompile": "lazy", "quiet": True}


def weather(city: str, days: int = 1) -> str:
    """The weather in a city.

    Args:
        city: the city's name
        days: for how many days
    """
    return f"rain in {city} for {days} days"


QUESTION = "What is the weather in Paris?"

# %%
session = await rekindle.open("tiny", **options)

# %% [markdown]
# ## Door 1: does the prompt show the tool?
#
# A tool reaches the model as text, and the chat template writes that text. Look at it before you look at anything else: `session.render` returns
# the prompt that `chat` would send.
#
# **Predict.** The embedded model was never trained to call. How many of these two calls are refused before a token is computed: `render` and `chat`?
#
# <details><summary>Answer</summary>
#
# **2**: a template that knows no tools, or refuses them, is an error that says so. Other libraries send the prompt without the tool, and the model
# answers in words.
#
# </details>

# %%
refused = []
try:
    session.render(QUESTION, tools=[weather])
except InvalidRequest as error:
    refused.append(error)
try:
    await session.chat(QUESTION, tools=[weather])
except InvalidRequest as error:
    refused.append(error)
print(*refused, sep="\n")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(refused) == 2, "a tool that the template does not show is refused"

# %% [markdown]
# Another template opens this door. This one is in the manner of the larger SmolLM2 models: it lists the tools as JSON, and asks for calls in
# `<tool_call>` tags.

# %% tags=["real"]
TEMPLATE = """{%- if tools %}<|im_start|>system
You may call these functions. To call one, reply with nothing but a call, such as
<tool_call>{"name": "function", "arguments": {"argument": "value"}}</tool_call>
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
asked = {"tools": [weather], "template": TEMPLATE, "temperature": 0, "max_tokens": 80}

# %%
prompt = session.render(QUESTION, tools=[weather], template=TEMPLATE)
print(prompt)
assert '"name": "weather"' in prompt, "the prompt shows the tool"

# %% [markdown]
# ## Door 2: does the model write a call?
#
# `reply.text` is all that the model wrote, tags included; `reply.content` is without what was read as reasoning or calls. If they are the same,
# there was nothing to read.
#
# **Predict.** Of four questions about the weather, how many make the embedded model write `<tool_call>`?
#
# <details><summary>Answer</summary>
#
# **0**. It has never seen the tag. No template, prompt or parser mends that: this model can't call by itself.
#
# </details>

# %%
QUESTIONS = [QUESTION, "Is it raining in Rome?", "The weather in Oslo for 3 days?", "Call weather for Bern."]
replies = [await session.chat(question, **asked) for question in QUESTIONS]
for question, reply in zip(QUESTIONS, replies, strict=True):
    print(f"{question:34}{reply.text!r}")
wrote = [reply for reply in replies if "<tool_call>" in reply.text]

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(wrote) == 0, "it answers in words"
assert all(reply.text == reply.content for reply in replies), "there was nothing to read"

# %% [markdown]
# SmolLM2-135M-Instruct is far larger and has read about functions, but was not trained to call them either. Its own template shows no tools.

# %% tags=["real"]
if smollm2:
    print(Path(smollm2).name)
    async with rekindle.open(smollm2, **options) as larger:
        try:
            larger.render(QUESTION, tools=[weather])
        except InvalidRequest as error:
            print(error)
        for question in (QUESTION, "Is it raining in Rome?", "Call weather for Bern."):
            reply = await larger.chat(question, **asked)
            print(f"{question:34}{len(reply.tool_calls)} calls: {reply.text[:90]!r}")
else:
    print("page 18 has not fetched the model: this cell shows nothing")

# %% [markdown]
# ## Door 2, forced
#
# A grammar (page 14) can hold the door open: with `tool_choice="required"`, or a tool in its place, every token that would lead away from a call is
# masked. So the embedded model calls, in a syntax it has never seen, with arguments of the right types. Whether they make sense is its own affair.

# %%
forced = await session.chat(QUESTION, **{**asked, "max_tokens": 120}, tool_choice="required", parallel_tool_calls=False)
print(forced.tool_calls[0])
assert forced.tool_calls[0].name == "weather", "a forced call names a tool"
assert isinstance(forced.tool_calls[0].arguments["city"], str), "and has arguments of its types"

# %% tags=["real"]
if smollm2:
    async with rekindle.open(smollm2, **options) as larger:
        reply = await larger.chat(QUESTION, **asked, tool_choice="required", parallel_tool_calls=False)
        print(Path(smollm2).name, reply.tool_calls)
        assert reply.tool_calls[0].arguments["city"] == "Paris", "SmolLM2 finds the city, once it has to call"

# %% [markdown]
# ## Door 3: is the text read as a call?
#
# What a model writes is a call only to somebody who reads its family's syntax. rekindle takes the syntax from the checkpoint's
# `response_template`, or recognises it in the chat template; `rekindle.open(…, reply_format="…")` names it. To see this door shut, a
# grammar makes the model write four given texts: each is what some model writes for the same call.
#
# **Predict.** The template's syntax is that of `<tool_call>` and JSON. How many of the four are read as a call?
#
# <details><summary>Answer</summary>
#
# **1**. Mistral's syntax is plain text here. What has the tag and is cut, or is malformed, stays in the answer's text, and `reply.reply.unread` lists it;
# in a notebook it has an orange line at its side.
#
# </details>

# %%
TEXTS = {
    "whole": '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
    "another syntax": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}',
    "cut": '<tool_call>{"name": "weather", "arguments": {"city": "Paris and its surr',
    "malformed": "<tool_call>weather(city='Paris')</tool_call>",
}
read = {name: await session.chat(QUESTION, **asked, choice=[text]) for name, text in TEXTS.items()}
for name, reply in read.items():
    print(f"{name:16}{len(reply.tool_calls)} calls, unread: {reply.reply.unread}")
read["malformed"]

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(len(reply.tool_calls) for reply in read.values()) == 1, "one of the four is a call in this syntax"
assert [bool(reply.reply.unread) for reply in read.values()] == [False, False, True, True], "and two look like one"

# %% [markdown]
# So three looks tell the causes apart. `reply.finish_reason` is "length": give it more `max_tokens`. `unread` has something: the
# model writes this syntax badly; a forced call, a larger model or fewer bits less quantised help. `unread` is empty, and `reply.text` has tags that you can see:
# it is another family's syntax, so pass `reply_format=`. If a template's syntax is unknown, the log names it when the model is opened.
#
# ## Door 4: does the call fit the function?
#
# With `run_tools=True` a call that names no tool, or whose arguments don't fit, is answered with an error in words, and the model may try again. The loop
# itself raises nothing: look at the messages.

# %%
logging.getLogger("rekindle.tools").setLevel("ERROR")  # it warns of each call that fails

for text in (
    '{"name": "wind", "arguments": {"city": "Paris"}}',
    '{"name": "weather", "arguments": {"town": "Paris"}}',
):
    (call,) = (await session.chat(QUESTION, **asked, choice=[f"<tool_call>{text}</tool_call>"])).tool_calls
    run = await session.chat(QUESTION, **asked, choice=[f"<tool_call>{text}</tool_call>"], run_tools=True, max_rounds=1)
    print(call, "→", run.messages[2]["content"])
    assert run.messages[2]["content"].startswith("Error"), "a call that does not fit is answered with an error"

# %% [markdown]
# ## All doors at once
#
# **Predict.** The same question eight times at temperature 1, forced to call. How many calls pass all four doors and run?
#
# <details><summary>Answer</summary>
#
# **8**: a grammar of the family's syntax and of the function's types leaves nothing to luck but the values.
#
# </details>

# %%
sampled = {**asked, "temperature": 1.0, "max_tokens": 160, "tool_choice": "required", "parallel_tool_calls": False}
runs = [await session.chat(QUESTION, **sampled, seed=seed, run_tools=True, max_rounds=1) for seed in range(8)]
results = [run.messages[2]["content"] for run in runs]
print(*(f"{run.rounds[0].tool_calls[0]} → {result}" for run, result in zip(runs, results, strict=True)), sep="\n")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(result.startswith("rain in") for result in results) == 8, "each of them runs"

# %% [markdown]
# ## Exercise
#
# Write `why(session, question, **options)`, which says in one line at which door a call was lost: refused by the template, cut, unread, nothing that
# looks like a call, or none lost.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
async def why(session: rekindle.Session, question: str, **options) -> str:
    try:
        reply = await session.chat(question, **options)
    except InvalidRequest as error:
        return f"door 1: {error.problem}"
    if reply.tool_calls:
        return f"called {reply.tool_calls[0].name}"
    if reply.finish_reason == "length":
        return f"cut after {len(reply.token_ids)} tokens"
    return f"door 3: could not read {reply.reply.unread[0]!r}" if reply.reply.unread else "door 2: no call was written"


said = [await why(session, QUESTION, tools=[weather]), await why(session, QUESTION, **asked)]
said += [await why(session, QUESTION, **{**asked, "max_tokens": 8}, choice=[text]) for text in (TEXTS["whole"],)]
said += [await why(session, QUESTION, **asked, choice=[text]) for text in (TEXTS["malformed"], TEXTS["whole"])]
print(*said, sep="\n")
assert [line.partition(":")[0] for line in said[:2]] == ["door 1", "door 2"], "the first two doors"
assert said[2] == "cut after 8 tokens", "a call that was cut"
assert said[3].startswith("door 3"), "one that is malformed"
assert said[4] == "called weather", "and one that arrived"

# %% [markdown]
# ## Takeaway
#
# A call passes four doors: the prompt shows the tool, the model writes a call, its text is read as one, and its arguments fit. Look at the rendered
# prompt first, then at the text that the model wrote. Only the second door is the model itself, and a grammar can hold it open.
#
# ## In production
#
# Servers choose a parser by an option (`--tool-call-parser` in vLLM and SGLang), and a wrong one loses calls without a word; checkpoints begin to carry their syntax as a `response_template`. Evaluations of agents log raw texts, so that
# lost calls are told from calls that were never made. Forced calls are for steps that must call; a model that is always forced can't say that no tool fits.
#
# ## Further reading
#
# - Qin et al., *ToolLLM*, 2023, [arXiv:2307.16789](https://arxiv.org/abs/2307.16789)
# - Patil et al., *Gorilla*, 2023, [arXiv:2305.15334](https://arxiv.org/abs/2305.15334)
# - Willard and Louf, *Efficient guided generation*, 2023, [arXiv:2307.09702](https://arxiv.org/abs/2307.09702)

# %%
await session.aclose()
