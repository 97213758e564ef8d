# %% [markdown]
# # 07 Warm restarts
#
# *I restarted the kernel. What do I get back, and how fast?*
#
# **Before:** page 05; what a kernel's restart loses. **Afterwards you can** say what lies on disk after a kill, restore it by name or automatically, and read why a program was compiled again.
#
# **Also called:** compiled programs on disk = JAX's persistent compilation cache, here without tracing; a snapshot = a saved KV cache (llama.cpp's `--prompt-cache`).
#
# **Takes:** about 15 minutes, with the embedded model.
#
# Two things were expensive, and lie on disk after a restart: compiled programs, which take most of a first start, and pages of the
# prefix cache. This notebook starts *other kernels* and runs code in them, so that nothing is warm by accident.
#
# ![A kernel writes programs and pages to disk; the next one reads them](../source/pictures/07_restarts.svg)

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

results, reused = {}, {}


async def measure(name: str, kernel: Kernel) -> None:
    printed = await kernel.run(CELL)
    *seconds, cached = map(float, printed.split())
    results[name] = seconds
    reused[name] = int(cached)
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
#
# **Predict.** Kernel and session are new, the folder is the same. How many programs does XLA compile?
#
# <details><summary>Answer</summary>
#
# **0**: all of them are loaded from disk.
#
# </details>

# %%
kernel = await Kernel().start()
await measure("after a kill", kernel)
print(await kernel.run("print(session.programs())"))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert int(await kernel.run("print(session.stats().compilations)")) == 0, "a second start compiles nothing"

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
#
# **Predict.** The pages are on disk, and this session is opened with `restore="none"`. How many of the 682 tokens come from them?
#
# <details><summary>Answer</summary>
#
# **0**: it was asked to find none. Without `restore`, a notebook's session reads no page ahead, but finds those that a prompt needs.
#
# </details>

# %%
await kernel.kill()
kernel = await Kernel().start()
CELL, whole = CELL.replace('restore="auto"', 'restore="none"'), CELL
await measure("programs, no pages", kernel)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert int(await kernel.run("print(done.usage.cached_tokens)")) == 0, "no page was looked for"

# %%
figure, (start, first) = plt.subplots(1, 2, layout="constrained", sharey=True)
start.barh(list(results), [seconds[1] for seconds in results.values()])
start.set_xlabel("seconds to open: programs")
first.barh(list(results), [seconds[2] * 1e3 for seconds in results.values()], color="C1")
first.set_xlabel("ms to the first token: pages")
start.invert_yaxis()
plt.show()

# %% [markdown]
# Two scales, because programs save seconds here and pages save milliseconds: so quickly does this model compute 672 tokens. The
# pages' share grows with the weights,
#
# $$t_{\mathrm{prefill}} \approx \frac{2 \cdot \mathrm{weights} \cdot \mathrm{tokens}}{\mathrm{FLOP/s}}$$
#
# so a model with a billion weights instead of four million takes seconds for the same prompt.

# %% [markdown]
# ## Snapshots with a name
#
# `restore="auto"` is for yesterday's work. A *snapshot* is for work that you want to come back to: it lists the pages that the session
# knows now, under a name, and keeps them from being thrown away.
#
# **Predict.** The snapshot is restored in a kernel that knows nothing else. How many of the 682 tokens does it have?
#
# <details><summary>Answer</summary>
#
# **672**: 42 whole pages of 16. Ten tokens are computed.
#
# </details>

# %%
print(await kernel.run("print(await session.save('zoe'))"))
await kernel.kill()

kernel = await Kernel().start()
CELL = whole.replace('restore="auto"', 'restore="zoe"')
await measure("from the snapshot", kernel)
print(await kernel.run("print(*session.cache.snapshots(), sep='\\n')"))

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert 42 * 16 == 672, "42 whole pages of 16"
assert int(await kernel.run("print(done.usage.cached_tokens)")) == 672, "a snapshot brings whole pages"

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

# %% [markdown]
# ## Exercise
#
# Show that a cache folder is worth nothing to other weights: what does a session on a model with other weights find of this prompt? (`rekindle.models.random_model` makes one.)


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
kernel = await Kernel().start()
found = await kernel.run(f"""
    import rekindle
    tiny = rekindle.models.load(rekindle.tiny.folder())
    other = rekindle.models.random_model(tiny.config, dtype="bfloat16")
    session = await rekindle.open(other, cache_dir={cache!r}, restore="auto", page_size=16, max_requests=2)
    text = "Zoe the dragon lived in a cave by the river and liked to paint. " * 40 + "One day"
    ids = rekindle.models.Tokenizer.load(rekindle.tiny.folder()).encode(text)  # this page's prompt
    done = await session.generate(ids, max_tokens=2)
    again = await session.generate(ids, max_tokens=2)
    print(done.usage.cached_tokens, again.usage.cached_tokens)
    """)
await kernel.kill()
print(found)
assert found.split()[0] == "0", "pages of other weights are never used"
assert found.split()[1] != "0", "its own are"

# %% [markdown]
# ## Takeaway
#
# A restart brings back compiled programs, weights in their final form and pages. Pages are bound to the weights that made them, so that a changed model
# never reads others' pages.
#
# ## In production
#
# Engines store compiled programs per machine image (torch.compile's and XLA's caches) and start from snapshots of memory, because loading tens of gigabytes takes longer than compiling. Prefix caches survive in host memory of other machines or in object storage.
#
# ## Further reading
#
# - Fu et al., *ServerlessLLM: Low-Latency Serverless Inference for Large Language Models*, 2024, [arXiv:2401.14351](https://arxiv.org/abs/2401.14351)
# - Qin et al., *Mooncake*, 2024, [arXiv:2407.00079](https://arxiv.org/abs/2407.00079)
# - JAX documentation, *Persistent compilation cache*

# %%
shutil.rmtree(cache)
