# %% [markdown]
# # 07 Warm restarts
#
# *I restarted the kernel. What do I get back, and how fast?*
#
# Kernels are restarted all the time. What was expensive lies on disk: compiled programs, and pages of the prefix cache. To show it
# honestly, this notebook starts *other kernels* and runs code in them, so that nothing is warm by accident.

# %%
import shutil
import subprocess
import tempfile
import textwrap

import matplotlib.pyplot as plt
from jupyter_client.manager import start_new_async_kernel

plt.rcParams.update(
    {"figure.figsize": (7, 2.2), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
cache = tempfile.mkdtemp()


class Kernel:
    """A Jupyter kernel of our own."""

    async def start(self):
        self.manager, self.client = await start_new_async_kernel(stderr=subprocess.DEVNULL)
        return self

    async def run(self, code: str) -> str:
        """Run a cell; what it printed."""
        printed = []

        def hook(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                raise RuntimeError(f"{content['ename']}: {content['evalue']}")

        await self.client.execute_interactive(textwrap.dedent(code), output_hook=hook, timeout=300)
        return "".join(printed).strip()

    async def kill(self):
        """End it without warning, as a crash does."""
        self.client.stop_channels()
        await self.manager.shutdown_kernel(now=True)


# %% [markdown]
# ## The first start
#
# The cell that we run opens a session with an empty cache folder, and measures three things: importing, opening, and the first
# token of a long prompt. The prompt is one that a notebook would really repeat, a long introduction before each question.

# %%
CELL = f"""
import time
began = time.perf_counter()
import rekindle
imported = time.perf_counter()
session = await rekindle.open("tiny", cache_dir={cache!r}, restore="auto", page_size=16, max_requests=2,
                              max_tokens_per_step=128, precompile="all")
opened = time.perf_counter()
prompt = "Zoe the dragon lived in a cave by the river and liked to paint. " * 40
done = await session.generate(prompt + "One day", max_tokens=8)
print(imported - began, opened - imported, done.timings.first_token, done.usage.cached_tokens)
"""

results = {}


async def measure(name: str, kernel: Kernel) -> None:
    printed = await kernel.run(CELL)
    *seconds, cached = map(float, printed.split())
    results[name] = seconds
    print(
        f"{name:20} import {seconds[0]:.2f} s, open {seconds[1]:5.2f} s, first token {seconds[2] * 1e3:3.0f} ms, "
        f"{cached:.0f} tokens from the cache"
    )


kernel = await Kernel().start()
await measure("first start", kernel)

# %% [markdown]
# Nearly all of it is XLA compiling the session's programs, which `precompile="all"` does before the session opens. (In notebooks they
# are normally compiled in the background, while you type. Importing costs nothing because JAX is imported when a session opens.)
#
# While the session works, it writes down what it has: programs at once, pages within a few seconds. Give it a moment, and
# kill the kernel without warning.

# %%
import anyio

await anyio.sleep(4)
await kernel.kill()

# %% [markdown]
# ## The second start

# %%
kernel = await Kernel().start()
await measure("after a kill", kernel)
print(await kernel.run("print(session.programs())"))

# %% [markdown]
# Programs came from disk, without tracing or compiling, and so did the pages of the prompt. `restore="auto"` makes everything known
# that was kept for this model: its index at once, the most visited pages in the background, any other when a prompt first hits
# it, so opening doesn't take longer when more is kept.

# %%
print(await kernel.run("print(session.cache.explain(prompt)); print(session.cache.stats())"))

# %% [markdown]
# ## What each part is worth
#
# Start once more, without the pages: programs from disk, and the prompt computed again.

# %%
await kernel.kill()
kernel = await Kernel().start()
CELL, whole = CELL.replace('restore="auto", ', ""), CELL
await measure("programs, no pages", kernel)

# %%
figure, axis = plt.subplots(layout="constrained")
left = [0.0] * len(results)
for index, part in enumerate(("import", "open", "first token")):
    width = [seconds[index] for seconds in results.values()]
    axis.barh(list(results), width, left=left, label=part)
    left = [a + b for a, b in zip(left, width, strict=True)]
axis.invert_yaxis()
axis.set_xlabel("seconds")
axis.legend()
plt.show()

# %% [markdown]
# Here the programs are worth seconds and the pages are worth milliseconds, hardly to be seen in the picture: the model is so small
# that 640 tokens are computed in no time. What pages save grows with the model and the prompt.

# %% [markdown]
# ## Snapshots with a name
#
# `restore="auto"` is for yesterday's work. A *snapshot* is for work that you want to come back to: it lists the pages that the session
# knows now, under a name, and keeps them from being thrown away.

# %%
print(await kernel.run("print(await session.save('zoe'))"))
await kernel.kill()

kernel = await Kernel().start()
CELL = whole.replace('restore="auto"', 'restore="zoe"')
await measure("from the snapshot", kernel)
print(await kernel.run("print(*session.cache.snapshots(), sep='\\n')"))

# %% [markdown]
# ## When it does not fit
#
# Pages mean nothing without the exact weights, types and page size that made them. A snapshot of something else is refused with the
# difference. It can't give wrong text.

# %%
printed = await kernel.run(f"""
    await session.aclose()
    try:
        await rekindle.open("tiny", cache_dir={cache!r}, restore="zoe", page_size=32)
    except rekindle.errors.SnapshotRefused as error:
        print(error)
    """)
print(printed.replace(cache, "the cache folder"))
await kernel.kill()

# %% [markdown]
# The same holds for programs. Their key is made of everything that determines them: the package's sources, versions of JAX, the
# processor's features, the model's shape and the session's options. If one of them changes, the program is compiled again, and
# `session.programs()` says why.
#
# All of it lies in one folder, `cache_dir`, which is bounded in size. `rekindle cache` on the command line shows and cleans it.

# %%
shutil.rmtree(cache)
