# %% [markdown]
# # 08 Streams, cancelling, timeouts and many tasks
#
# *How do I run many requests at once, stop some of them, and keep everything tidy?*
#
# **Before:** page 01; `async` and `await`. **Afterwards you can** run many requests at once, bound them, stop some of them, and work off a table that survives a kill.
#
# **Also called:** task group = nursery (trio); a handle = a future; backpressure = admission control; `session.map` = batch inference.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# A session is safe to use from any number of tasks, threads and event loops. This page uses [anyio](https://anyio.readthedocs.io),
# which works on asyncio (what Jupyter runs) and on trio.
#
# ![A request waits, runs and finishes; cancelling, timeouts and break abort it](../source/pictures/08_tasks.svg)

# %%
import time

import anyio

import rekindle
from rekindle.errors import QueueFull, RequestAborted

session = await rekindle.open("tiny", max_requests=8)
handles = [session.submit("warm up", max_tokens=4 + n) for n in range(16)]  # compiles what this page needs
ready = [await handle for handle in handles]

# %% [markdown]
# ## A handle is a request that you can talk to
#
# `submit` returns at once. The handle tells where the request is and what it has produced so far. Await it for the result.


# %%
async def until(handle, count: int) -> int:
    """Wait for so many tokens of a handle; how many it has by then."""
    for _ in range(2000):
        if len(handle.token_ids) >= count:
            break
        await anyio.sleep(0.005)
    return len(handle.token_ids)


handle = session.submit("Once upon a time", max_tokens=400, ignore_eos=True)
so_far = await until(handle, 20)
print(handle.status, so_far, "tokens so far")
done = await handle
assert 20 <= so_far <= 400, "a handle shows tokens while the request runs"
print(handle.status, len(done.token_ids), "tokens")

# %% [markdown]
# In fact every call returns a handle. So does `generate`: without `await` nothing runs, and `not submitted` means that you forgot
# it.

# %%
session.generate("nobody waits for this")

# %% [markdown]
# ## Leaving a stream ends the request
#
# `break` is enough. There is nothing to close: the request is aborted, its slot and pages are free within one step.

# %%
stream = session.stream("Once upon a time", max_tokens=400, ignore_eos=True)
async for delta in stream:
    print(delta.text, end="")
    if "." in delta.text:
        break
await anyio.sleep(0.2)
print(f"\n\n{stream.status}; {session.stats().running} requests run")

# %% [markdown]
# ## Timeouts
#
# Cancelling an await aborts exactly that request, whatever cancels it: `anyio.fail_after`, `asyncio.wait_for`, or the stop
# button of the notebook. What it had produced stays on the handle.

# %%
slow = session.submit("Once upon a time", max_tokens=900, ignore_eos=True)
await until(slow, 1)
with anyio.move_on_after(0.1):
    await slow
await anyio.sleep(0.1)
print(f"{slow.status} after {len(slow.token_ids)} tokens: {slow.text[:60]!r}…")
assert 0 < len(slow.token_ids) < 900, "a handle keeps what came before the timeout"

# %% [markdown]
# `cancel()` does the same from anywhere, another thread included. Awaiting the handle then raises `RequestAborted`.

# %%
handle = session.submit("Once upon a time", max_tokens=900, ignore_eos=True)
await until(handle, 10)
handle.cancel()
try:
    await handle
except RequestAborted as error:
    print(error)
assert handle.token_ids, "its tokens are still on the handle"

# %% [markdown]
# ## Fan out
#
# A task group runs many things side by side and waits for all of them. Each task here asks for a name, then for a story about
# it: two requests that depend on each other, times twelve. The engine mixes all requests that are there into one batch at
# every step.
#
# By Little's law, requests in flight are arrivals times their time in the system:
#
# $$L = \lambda \cdot W$$
#
# With 8 slots and 0.05 s for a request, 160 requests a second are the most; a ninth task only makes the others wait longer.

# %%
stories: dict[int, str] = {}


async def tell(number: int) -> None:
    hero = "Once upon a time, there was a boy named"
    name = await session.generate(hero, max_tokens=4, stop=(".", ",", " who"), temperature=1.2, seed=number)
    story = await session.generate(f"One day, {name.text.strip()} found a", max_tokens=24)
    stories[number] = f"One day, {name.text.strip()} found a{story.text}"


async def fan_out() -> float:
    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(12):
            group.start_soon(tell, number)
    return time.perf_counter() - began


await fan_out()  # compiles for the sizes that come up
assert 8 / 0.05 == 160, "requests a second, by Little's law"
dashboard = session.watch()
print(f"24 requests in {await fan_out():.2f} s")
for number in range(3):
    print("-", stories[number].replace("\n", " "))

# %% [markdown]
# A dashboard keeps the steps that it has seen. Scrub through them: above the slots are the tokens per second, and a block is as wide as
# its step took. Twelve tasks share eight slots: find the names, the first eight stories, and where the last four stories begin.

# %%
run = dashboard.recorded()
dashboard.stop()
run

# %% [markdown]
# ## First come, first served
#
# To handle results in the order in which they end, send them through a memory object stream.

# %%
send, receive = anyio.create_memory_object_stream(8)


async def produce(length: int, sender) -> None:
    async with sender:
        await session.generate("Once", max_tokens=length, ignore_eos=True)
        await sender.send(length)


async with anyio.create_task_group() as group, receive:
    for length in (90, 10, 50):
        group.start_soon(produce, length, send.clone())
    send.close()
    async for length in receive:
        print("finished: the one with", length, "tokens")

# %% [markdown]
# ## The fastest of several
#
# Cancelling the task group's scope aborts the losers.
#
# **Predict.** Three requests race, and the first to finish cancels the scope. How many are aborted?
#
# <details><summary>Answer</summary>
#
# **2**: the losers, within one step.
#
# </details>

# %%
before = session.stats().aborted
async with anyio.create_task_group() as group:

    async def race(prompt: str) -> None:
        done = await session.generate(prompt, max_tokens=120, temperature=1.0, seed=2)
        print(f"{prompt!r} was first with {len(done.token_ids)} tokens")
        group.cancel_scope.cancel()

    for prompt in ("A short one:", "Once upon a time", "The end."):
        group.start_soon(race, prompt)
for _ in range(1000):  # aborts are carried out within a step
    if not session.stats().running:
        break
    await anyio.sleep(0.01)
print(session.stats().aborted - before, "requests were aborted")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert session.stats().aborted - before == 2, "leaving a scope aborts what it holds"

# %% [markdown]
# ## Backpressure
#
# A session bounds what it takes in: `max_queue` requests may wait in addition to those that run. Awaiting calls wait for a place. `submit`
# can't wait, so it raises.
#
# **Predict.** How many submissions does a session with `max_requests=2, max_queue=2` take before it refuses one?
#
# <details><summary>Answer</summary>
#
# **4**: two run and two wait.
#
# </details>

# %%
small = await rekindle.open("tiny", max_requests=2, max_queue=2)
handles = []
while len(handles) < 10:
    try:
        handles.append(small.submit(f"Story {len(handles)}:", max_tokens=400, ignore_eos=True))
    except QueueFull as error:
        print(error)
        break
for handle in handles:
    handle.cancel()
many = await small.generate([f"Story {number}:" for number in range(10)], max_tokens=4)  # waits in turn
print(len(many), "completions")
await small.aclose()

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(handles) == 4, "places are those that run and those that wait"
assert len(many) == 10, "awaiting calls wait for a place"

# %% [markdown]
# ## A table of rows
#
# `session.map` asks once for each row: of a list of dicts as here, of a DataFrame, of anything that yields mappings. The
# template is a format string, or a function of a row. A bar shows rows, tokens per second and the time left. A row that fails
# does not stop the others.
#
# **Predict.** Ten rows, and the last one has no animal. How many fail?
#
# <details><summary>Answer</summary>
#
# **1**, the row that can't be filled in.
#
# </details>

# %%
rows = [{"name": name, "animal": animal} for name in ("Anna", "Tom", "Lily") for animal in ("dog", "cat", "duck")]
rows.append({"name": "Max"})  # it has no animal
answers = await session.map(rows, "{name} had a {animal}. The {animal}", max_tokens=12)
answers

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(answers.errors) == 1, "a row that fails does not stop the others"

# %% [markdown]
# With `out` each answer is written to a file as soon as it is there. Interrupt the cell, or kill the kernel, and run it again:
# only what is missing is computed. Here a task that is cancelled stands for the kill.

# %%
import tempfile
from pathlib import Path

kept = Path(tempfile.mkdtemp()) / "answers.jsonl"
names = [{"number": number} for number in range(60)]
with anyio.move_on_after(0.4):
    await session.map(names, "Story {number}:", out=kept, max_tokens=24)
print(len(kept.read_text().splitlines()), "answers were written")
answers = await session.map(names, "Story {number}:", out=kept, max_tokens=24)
print(answers)
assert len(answers) == 60, "the second call completes what the first one left"

# %% [markdown]
# `answers.to_pandas()` makes a DataFrame of the rows and their answers. For searching and sorting
# texts by their meaning, `session.embed` gives vectors: the model's hidden states, averaged over a text's tokens.

# %%
vectors = await session.embed(["The dog ran home.", "A dog is at home.", "She ate a red apple."], pooling="mean")
(vectors @ vectors.T).round(2)

# %% [markdown]
# ## Without an event loop
#
# `generate_sync` and `stream_sync` block their thread and need no loop, so plain functions and thread pools can use the same
# session, also while other cells are awaiting it.

# %%
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(4) as pool:
    lengths = pool.map(
        lambda n: len(session.generate_sync("Count:", max_tokens=n, ignore_eos=True).token_ids), (3, 5, 7)
    )
    print(list(lengths))

# %% [markdown]
# ## Exercise
#
# Be polite: generate twelve texts with never more than three requests at once, and prove it by counting.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
limiter = anyio.CapacityLimiter(3)
at_once: list[int] = []


async def polite(number: int) -> None:
    async with limiter:
        at_once.append(int(limiter.borrowed_tokens))
        await session.generate(f"Tale {number}:", max_tokens=8)


async with anyio.create_task_group() as group:
    for number in range(12):
        group.start_soon(polite, number)
print(at_once)
assert len(at_once) == 12, "all twelve ran"
assert max(at_once) == 3, "three at once is as much as it gets"

# %% [markdown]
# ## Takeaway
#
# A request is a handle in a scope: leaving the scope stops it, a timeout keeps what came before, and a bound on waiting requests makes callers wait
# instead of filling memory.
#
# ## In production
#
# They have the same four ideas at the edge of a server: a bounded queue, timeouts, cancelling when the client goes away, and fairness among tenants. What a notebook adds is that a forgotten cell must not keep the device busy.
#
# ## Further reading
#
# - Nathaniel J. Smith, *Notes on structured concurrency, or: Go statement considered harmful*, 2018
# - anyio documentation, *Cancellation and timeouts*
# - Little, *A Proof for the Queuing Formula L = λW*, Operations Research, 1961

# %% [markdown]
# Nothing was left behind. `check_integrity` counts every page and every place.

# %%
session.check_integrity()
await session.aclose()
