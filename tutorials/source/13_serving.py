# %% [markdown]
# # 13 Serving what a notebook has open
#
# *How do my colleagues' tools use the model that I have open here, while I go on working with it?*
#
# **Before:** pages 01 and 05; HTTP. **Afterwards you can** serve an open session to OpenAI's clients, and watch cells and clients share one batch and one cache.
#
# **Also called:** the API = OpenAI's, as vLLM, SGLang, llama.cpp and Ollama speak it; events = server-sent events (SSE); `/metrics` = Prometheus' format.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# Editors, agents and evaluation suites speak OpenAI's API: they want a URL. A session has one, if you ask for it. The server
# runs in a thread alongside the cells and works on the same session, so that both share its programs, its prefix cache
# and its dashboard. It needs the extra `serve`: `pip install "rekindle[serve]"`.
#
# ![Cells and HTTP clients share one session](../source/pictures/13_serving.svg)

# %%
import json
import urllib.request

import anyio.to_thread

import rekindle

session = await rekindle.open("tiny", max_requests=8)
ready = await session.generate(["warm up"] * 8, max_tokens=8)  # compiles what this page needs
server = await session.serve()
server

# %% [markdown]
# These commands are for copying. Here we use nothing but Python's own HTTP client, in a thread, as another program would.


# %%
def post(path: str, body: dict) -> dict:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


question = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 40}
answer = await anyio.to_thread.run_sync(post, "/v1/chat/completions", question)
print(answer["choices"][0]["message"]["content"])

# %% [markdown]
# The same question in a cell gives the same answer: it is the same model in the same session.

# %%
own = await session.chat(question["messages"], temperature=0, max_tokens=40)
print(own.text == answer["choices"][0]["message"]["content"])
assert own.text == answer["choices"][0]["message"]["content"], "client and cell get the same answer"

# %% [markdown]
# ## One prefix cache
#
# A cell reads a long text once. A client that asks about the same text finds its pages computed.
#
# **Predict.** The client's prompt has 114 tokens, and pages have 32. How many come from the cache that a cell filled?
#
# <details><summary>Answer</summary>
#
# **96**: three pages.
#
# </details>

# %%
story = (
    "Tom had a red ball. Anna had a blue ball. They played in the garden every day, and the dog ran after them. " * 4
)
read = await session.generate(story, max_tokens=1)
body = {"prompt": story + "Then", "max_tokens": 24, "temperature": 0}
done = await anyio.to_thread.run_sync(post, "/v1/completions", body)
print(done["choices"][0]["text"])
usage = done["usage"]
print(f"{usage['prompt_tokens_details']['cached_tokens']} of {usage['prompt_tokens']} prompt tokens were cached")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert usage["prompt_tokens_details"]["cached_tokens"] >= 96, "clients hit what cells computed"

# %% [markdown]
# ## One batch, one dashboard
#
# Four clients and four cells at once: the engine batches them as if they came from one place. `session.watch()` shows all of
# them; so do the figures.

# %%
session.watch()

# %% [markdown]
# **Predict.** Four cells and four clients ask at once, and the session has room for 8. How many requests run in one step?
#
# <details><summary>Answer</summary>
#
# **8**: the batch does not know where they come from.
#
# </details>

# %%
handles = [session.submit(f"Story {n}:", max_tokens=240, ignore_eos=True, temperature=0.8) for n in range(4)]
async with anyio.create_task_group() as group:
    for n in range(4):
        told = {"prompt": f"Tale {n}:", "max_tokens": 240, "ignore_eos": True, "temperature": 0.8}
        group.start_soon(anyio.to_thread.run_sync, post, "/v1/completions", told)
    most = 0
    while most < 8 and not all(handle.done for handle in handles):
        most = max(most, session.stats().running)
        await anyio.sleep(0.005)
    print(most, "requests run")
    mine = [await handle for handle in handles]

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert most == 8, "cells and clients share one batch"

# %% [markdown]
# ## Streams
#
# With `"stream": true` an answer comes as events, one for each piece of text. Of the whole answer's time
#
# $$t = t_{\mathrm{queue}} + t_{\mathrm{prefill}} + n \cdot t_{\mathrm{token}}$$
#
# a reader then waits for the first two only. A client that goes away in the middle aborts its request, as `break` does in a cell.


# %%
def first_pieces(count: int) -> list[str]:
    asked = json.dumps({**body, "max_tokens": 500, "stream": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", asked, {"Content-Type": "application/json"})
    pieces = []
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: "):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
            if len(pieces) == count:
                return pieces  # and the connection is closed
    return pieces


print(await anyio.to_thread.run_sync(first_pieces, 8))
await anyio.sleep(0.3)
print(session.stats().running, "requests run")

# %% [markdown]
# ## Mistakes are told by name
#
# What the server can't do it refuses with OpenAI's error object, which names the client's field. What asks for nothing, such as
# `user`, is ignored.
#
# **Predict.** Which HTTP status does a client see that sends `top_p=7`?
#
# <details><summary>Answer</summary>
#
# **400**, with the field's name.
#
# </details>

# %%
import urllib.error

try:
    await anyio.to_thread.run_sync(post, "/v1/completions", {"prompt": "Hello", "top_p": 7})
except urllib.error.HTTPError as error:
    refused = error.code
    print(refused, json.load(error)["error"])

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert refused == 400, "a client's mistake is a client's error"

# %% [markdown]
# ## Figures for a dashboard
#
# `/metrics` is for Prometheus. `rekindle serve --grafana` prints a dashboard for it, and `metrics_names="vllm"` names the figures
# as published dashboards expect them.

# %%
with urllib.request.urlopen(server.url + "/metrics") as response:
    lines = response.read().decode().splitlines()
print("\n".join(line for line in lines if line.startswith(("rekindle_request_success", "rekindle_generation_tokens"))))

# %% [markdown]
# ## Exercise
#
# Write `streamed(messages)`: a client that streams a chat, joins the pieces, and returns the text with the `finish_reason`. Show that it is the answer of the cell above.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def streamed(messages: list[dict]) -> tuple[str, str]:
    asked = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 40, "stream": True}).encode()
    address = server.url + "/v1/chat/completions"
    request = urllib.request.Request(address, asked, {"Content-Type": "application/json"})
    text, reason = "", ""
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    return text, reason


text, reason = await anyio.to_thread.run_sync(streamed, question["messages"])
print(reason, text)
assert text == own.text, "a stream is the answer in pieces"
assert reason == "stop", "OpenAI's word for the model's own end"

# %% [markdown]
# ## Takeaway
#
# A server shares the session that the notebook has open: one model in memory, one cache, two kinds of callers. Bounds and a key protect it.
#
# ## In production
#
# In front of several replicas stands a router that knows prefixes and loads; keys have budgets; answers outlive a connection. The API is the same, so a client moves by changing one URL.
#
# ## Further reading
#
# - OpenAI, *API reference*
# - Kwon et al., *PagedAttention*, 2023 (the vLLM server), [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)
# - WHATWG, *HTML: Server-sent events*

# %% [markdown]
# ## Closing
#
# Closing the session closes its servers. `await server.aclose(drain=10)` lets answers finish first. Without a notebook,
# `rekindle serve FOLDER --api-key …` does the same; give it a key before you let other hosts reach it with `--host`.

# %%
await server.aclose()
await session.aclose()
print(server.closed)
