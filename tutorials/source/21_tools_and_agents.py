# %% [markdown]
# # 21 Tools and an agent loop
#
# *How does a model that can't calculate, search or look at a clock get to use what can?*
#
# **Before:** pages 01 and 05; page 14 helps. **Afterwards you can** write the loop that runs a model's calls, bound it, feed errors back, and say what each turn costs.
#
# **Also called:** tool call = function calling; an agent = this loop; the call's form = tool syntax (`<tool_call>…`), here a stop string; tool result = a message of the role `tool`.
#
# **Takes:** about 15 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![The model writes a call, your code runs it, its result becomes a message, and again](../source/pictures/21_agent.svg)
#
# A model writes text, and nothing else. It "calls a function" by writing something that your code recognises; your code stops it there,
# runs the function, writes the result after the call, and lets the model go on. An agent is that loop.

# %%
import dataclasses
import re
from typing import Literal

import numpy as np

import rekindle

session = await rekindle.open("tiny", max_requests=16, max_model_len=256, page_size=16, precompile="lazy", quiet=True)


def ask(left: int, right: int) -> str:
    return session.render([{"role": "user", "content": f"What is {left} + {right}?"}])


# %% [markdown]
# ## What the model can't do
#
# The embedded model writes `23 + 35 = 58`. It has learned sums of up to two digits, not how to add: a result of three digits it has hardly ever
# seen.
#
# **Predict.** Of 64 sums of two numbers from 50 to 78, about how many does it get right: 0, 32 or 60?
#
# <details><summary>Answer</summary>
#
# About **0**: it has hardly ever seen such numbers.
#
# </details>

# %%
sums = [(left, right) for left in range(50, 80, 4) for right in range(50, 80, 4)]
alone = await session.generate([ask(*pair) for pair in sums], max_tokens=16)
right = [done.text.strip().endswith(f"= {sum(pair)}") for done, pair in zip(alone, sums, strict=True)]
print(f"{sum(right)} of {len(sums)} right; for instance {alone[0].text!r}, {alone[-1].text!r}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert min((0, 32, 60), key=lambda one: abs(one - sum(right))) == 0, "it can't write what it has hardly ever seen"

# %% [markdown]
# ## One call
#
# Its answers do one thing well: they copy the numbers. So let `=` be the sign of a call. A `stop` string ends the text there; our
# function adds; and the model goes on after the result. Never give a model's text to `eval`: read exactly the form that
# you expect, and answer everything else with an error.


# %%
def calculator(expression: str) -> str:
    """The value of `a + b`; an error in words for anything else."""
    match = re.fullmatch(r"\s*(\d+) \+ (\d+)\s*", expression)
    return str(int(match[1]) + int(match[2])) if match else "error: write two numbers with + between them"


@dataclasses.dataclass
class Turn:
    wrote: str
    result: str | None
    cached: int
    prompt: int


async def agent(prompt: str, limit: int = 4) -> list[Turn]:
    """Run the model, and what it calls, until it ends or has had its turns."""
    turns: list[Turn] = []
    for _ in range(limit):
        done = await session.generate(prompt, max_tokens=24, stop="=")
        called = done.finish_reason == "stop"
        result = calculator(done.text) if called else None
        turns.append(Turn(done.text, result, done.usage.cached_tokens, done.usage.prompt_tokens))
        if not called:
            break
        prompt += f"{done.text}= {result}"
    return turns


turns = await agent(ask(62, 58))
for turn in turns:
    print(turn)

# %% [markdown]
# The second turn's prompt is the first one's with more after it. So most of it is in the cache: a loop of $k$ turns whose prompts grow to
# $n$ tokens computes about $n$ of them, where without a cache it would compute
#
# $$n_1 + n_2 + \ldots + n_k \approx \frac{k \cdot n}{2}$$
#
# **Predict.** All 64 sums again, with the tool. About how many are right now: 0, 32 or 60?
#
# <details><summary>Answer</summary>
#
# About **60**. In the others it copied a number wrongly: a tool answers the question that it gets.
#
# </details>

# %%
import asyncio

runs = await asyncio.gather(*(agent(ask(*pair)) for pair in sums))
right = [run[0].result == str(sum(pair)) for run, pair in zip(runs, sums, strict=True)]
print(f"{sum(right)} of {len(sums)} right, in {np.mean([len(run) for run in runs]):.1f} turns each")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert min((0, 32, 60), key=lambda one: abs(one - sum(right))) == 60, "a model that copies and a function that adds"

# %% [markdown]
# All 64 loops ran at once: while one loop's function runs, the engine works for the others. Functions that wait for a network should
# be `async`.
#
# ## Calls that always parse
#
# Models that were trained for it write calls as JSON, with the names and arguments of functions that the prompt lists. `chat` does all of
# this page by itself:
#
# ```python
# run = await session.chat(messages, tools=[weather], run_tools=True)
# ```
#
# shows the model each function's signature and docstring, runs what it calls, and returns the last answer with all messages in between.
# A grammar (page 14) guarantees the form, with any model. What it can't guarantee is sense:
#
# **Predict.** Four calls at temperature 1, by a model that has never seen JSON. How many of them can be run?
#
# <details><summary>Answer</summary>
#
# **4**: each has a name that exists, and arguments of the right types.
#
# </details>


# %%
@dataclasses.dataclass
class Call:
    function: Literal["weather", "clock"]
    days: int


def weather(days: int) -> str:
    return f"rain for {days} days"


def clock(days: int) -> str:
    return f"in {days} days it is noon again"


calls = await session.generate(
    "What will the weather be? As a call: ", schema=Call, n=4, temperature=1.0, seed=1, max_tokens=60
)
for done in calls:
    print(done.text, "→", {"weather": weather, "clock": clock}[done.parsed.function](done.parsed.days))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert sum(isinstance(done.parsed, Call) for done in calls) == 4, "each call can be run"

# %% [markdown]
# ## A model that calls by itself
#
# SmolLM2-135M-Instruct, whose file page 18 fetches, was not trained to call functions, and its template mentions none. Our template does: it lists the functions and shows the form of a call. Left alone the model still
# answers in words that it makes up. `tool_choice="required"` adds the grammar, so that its first turn is a call; then `chat` runs the function, and the model answers with the result.

# %% tags=["real"]
import os
from pathlib import Path

fetched = (Path.home() / ".cache" / "rekindle-course").glob("*/*.gguf")
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section shows nothing")
TEMPLATE = """{%- if tools %}<|im_start|>system
You can call functions. A call is written as
<tool_call>
{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>
These are the functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def city_weather(city: str) -> str:
    """The weather in a city today."""
    return f"It rains in {city}, 12 degrees."


if smollm2:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    form = {"tools": [city_weather], "template": TEMPLATE, "temperature": 0, "max_tokens": 80, "run_tools": True}
    async with rekindle.open(smollm2, max_requests=1, max_model_len=1024, precompile="lazy", quiet=True) as larger:
        made_up = await larger.chat(question, **form)
        run = await larger.chat(question, tool_choice="required", **form)
    print("alone:   ", made_up.text[:100])
    for message in run.messages[1:]:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        print(f"{message['role'] + ':':10}", calls[:1] or message["content"])
    called = [call["function"]["arguments"] for message in run.messages for call in message.get("tool_calls") or ()]
    assert {"city": "Paris"} in called, "the model filled in the argument"
    assert "12 degrees" in run.text, "and its answer has the function's result"

# %% [markdown]
# ## What goes wrong
#
# Loops that never end (bound the turns, and the tokens of each), functions that raise (their error is a result, too: the model can try
# again), results that are too long (cut them, or the prompt grows until nothing fits), and texts from outside that contain
# instructions. A model can't tell your words from those of a web page; what a call may do has to be limited by your code.
#
# ## Exercise
#
# Let the calculator subtract and multiply as well, and refuse results above 1,000 with an error in words. Show that no text can make it do anything else.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def larger_calculator(expression: str) -> str:
    match = re.fullmatch(r"\s*(\d{1,4}) ([-+*]) (\d{1,4})\s*", expression)
    if not match:
        return "error: write two numbers with +, - or * between them"
    left, right = int(match[1]), int(match[3])
    value = {"+": left + right, "-": left - right, "*": left * right}[match[2]]
    return str(value) if value <= 1000 else "error: the result is above 1000"


tried = ["7 * 6", "7 - 9", "999 * 999", "__import__('os').getcwd()", "2 ** 9", ""]
print([larger_calculator(text) for text in tried])
assert larger_calculator("7 * 6") == "42", "it multiplies"
assert all(larger_calculator(text).startswith("error") for text in tried[2:]), "everything else is an error in words"

# %% [markdown]
# ## Takeaway
#
# A tool call is text that your code recognises and answers. Parse strictly, bound the turns, return errors as results, and let code decide what a call
# may do.
#
# ## In production
#
# Agents keep conversations of tens of thousands of tokens, so that their cost is the cache: prompts are built to grow at the end only. Tools run in sandboxes, with time limits and budgets; calls are checked against their schema, and a person confirms what can't be undone.
#
# ## Further reading
#
# - Schick et al., *Toolformer*, 2023, [arXiv:2302.04761](https://arxiv.org/abs/2302.04761)
# - Yao et al., *ReAct*, 2022, [arXiv:2210.03629](https://arxiv.org/abs/2210.03629)
# - Greshake et al., *Not what you've signed up for* (prompt injection), 2023, [arXiv:2302.12173](https://arxiv.org/abs/2302.12173)

# %%
await session.aclose()
