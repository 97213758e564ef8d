# %% [markdown]
# # 10 Bring your own checkpoint
#
# *How do I run a Hugging Face checkpoint, quantise it, and know what that cost?*
#
# **Before:** page 01. **Afterwards you can** open a folder or a hub's name, read what is wrong with a checkpoint, and measure what quantising costs on a text that the model hasn't seen.
#
# **Also called:** `int8` = W8A8, `int8-weight` = W8A16; a checkpoint's folder is transformers' format; perplexity = exp of the mean cross entropy.
#
# **Takes:** about 20 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# `rekindle.open` takes the folder of a checkpoint: `config.json`, one or more `.safetensors` files, and `tokenizer.json`. A name like
# `"org/model"` is looked up in the Hugging Face cache, and downloaded if it isn't there (that needs the extra `rekindle[hub]`). This
# page is offline, so we write a checkpoint ourselves. It is a good way to see what is in one.
#
# ![Files are checked, read, perhaps quantised, and become a session's weights](../source/pictures/10_checkpoint.svg)

# %%
import json
import shutil
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import save_file

import rekindle
from rekindle import tiny

plt.rcParams.update(
    {"figure.figsize": (7, 2.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## What a checkpoint consists of
#
# `config.json` describes the architecture. Ours is a small Qwen 3, with two layers.

# %%
config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
(folder / "config.json").write_text(json.dumps(config, indent=2))
print(f"{len(config)} settings")

# %% [markdown]
# The weights are named arrays. A safetensors file begins with a table of names, types, shapes and offsets, so that a loader can read
# any of them without the others.

# %%
rng = np.random.default_rng(0)
E, F, H, K, D = 128, 256, 4, 2, 32
shapes = {"model.embed_tokens.weight": (2048, E), "model.norm.weight": (E,)}
for layer in range(2):
    shapes |= {
        f"model.layers.{layer}.{name}.weight": shape
        for name, shape in {
            "input_layernorm": (E,),
            "self_attn.q_proj": (H * D, E),
            "self_attn.k_proj": (K * D, E),
            "self_attn.v_proj": (K * D, E),
            "self_attn.q_norm": (D,),
            "self_attn.k_norm": (D,),
            "self_attn.o_proj": (E, H * D),
            "post_attention_layernorm": (E,),
            "mlp.gate_proj": (F, E),
            "mlp.up_proj": (F, E),
            "mlp.down_proj": (E, F),
        }.items()
    }
weights = {
    name: np.ones(shape, np.float32)
    if len(shape) == 1
    else (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
    for name, shape in shapes.items()
}
save_file(weights, folder / "model.safetensors", {"format": "pt"})
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(tiny.folder() / name, folder)
print(*sorted(path.name for path in folder.iterdir()), sep="\n")

# %% [markdown]
# ## Open it
#
# That is all. The weights are random, and so is the text. On a CPU, weights are kept in bfloat16 unless `dtype` says otherwise:
# they are half as large, and reading them is what takes the time.

# %%
async with rekindle.open(folder, max_requests=4, max_tokens_per_step=64) as session:
    done = await session.generate("Once upon a time", max_tokens=12)
    print(repr(done.text))
    print(session.config.dtype, "weights")

# %% [markdown]
# ## When something is wrong with it
#
# Folders are checked as a whole before anything is read. All differences come in one message, with names and shapes.

# %%
broken = folder.with_name(folder.name + "-broken")
shutil.copytree(folder, broken)
missing = {name: array for name, array in weights.items() if "layers.1.mlp.up_proj" not in name}
missing["model.layers.0.mlp.down_proj.weight"] = np.zeros((E, F + 1), np.float32)
save_file(missing, broken / "model.safetensors", {"format": "pt"})
try:
    await rekindle.open(broken)
except rekindle.errors.CheckpointError as error:
    print(str(error).replace(str(broken), "the folder"))

# %% [markdown]
# ## Quantise
#
# `dtype` chooses the type of the weights; `quantize` stores matrices as 8-bit integers with one scale per row. `"int8"` also
# multiplies in integers, `"int8-weight"` only stores in them. A row $w$ becomes
#
# $$s = \frac{\max |w|}{127} \qquad q = \mathrm{round}(w / s) \qquad w \approx s \cdot q$$
#
# `rekindle.models.load` reads a checkpoint without opening a session, here to see how large its weights are. From here on we
# use the tiny model, since a random one has no predictions that quantising could spoil.
#
# **Predict.** The tiny model has 4,000,512 weights. How many MB are they in float32?
#
# <details><summary>Answer</summary>
#
# **16**, and **8** in bfloat16.
#
# </details>

# %%
from rekindle.models import load

settings = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int8-weight": {"quantize": "int8-weight"},
}
models = {name: load(tiny.folder(), **precision) for name, precision in settings.items()}
megabytes = {name: model.nbytes / 1e6 for name, model in models.items()}
plt.bar(megabytes.keys(), megabytes.values())
plt.ylabel("MB of weights")
plt.show()

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(megabytes["float32"]) == 16, "float32 takes four bytes a weight"
assert round(megabytes["bfloat16"]) == 8, "bfloat16 takes two"
assert megabytes["int8"] < megabytes["bfloat16"], "int8 takes about one"

# %% [markdown]
# ## What did it cost?
#
# The right measure is how much the model's predictions change on a text that it has *not* written: a model is sure of its own words
# in any precision. We take the perplexity of a story written for this page, and how often the most likely token stays the
# same. `prompt_logprobs` reports both for every token of a text.
#
# **Predict.** In which share of the positions does the most likely token stay the same with 8-bit weights: about 0.5, 0.75 or 1?
#
# <details><summary>Answer</summary>
#
# About **1**: nearly everywhere. Perplexity hardly changes.
#
# </details>

# %%
options = {"max_requests": 2, "max_tokens_per_step": 128, "precompile": "lazy"}
text = (
    "Once upon a time, there was a kind girl named Lily. She lived in the village with her family. Lily had a red ball. "
    "She took it everywhere.\n\nOne day, Lily found a map in the garden. It was for Tom, who lived in the forest. Lily was "
    'afraid, but she walked to the forest. Tom was happy. "Thank you," he said. "You are very kind." Then they played.'
)
results = {}
for name, precision in settings.items():
    async with rekindle.open("tiny", **options, **precision) as session:
        scored = await session.generate(text, max_tokens=1, prompt_logprobs=1)
        run = await session.generate("Once upon a time", max_tokens=64, ignore_eos=True)
        logprobs = np.array([entry.logprob for entry in scored.prompt_logprobs])
        favourites = np.array([entry.top_ids[0] for entry in scored.prompt_logprobs])
        results[name] = (np.exp(-logprobs.mean()), favourites, run.text)

exact = results["float32"][1]
print(f"{'':12} perplexity  same favourite      MB")
for name, (perplexity, favourites, _) in results.items():
    print(f"{name:12} {perplexity:10.3f}  {np.mean(favourites == exact):14.0%}  {megabytes[name]:6.1f}")
same = {name: float(np.mean(favourites == exact)) for name, (_, favourites, _) in results.items()}
change = max(abs(perplexity / results["float32"][0] - 1) for perplexity, *_ in results.values())

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert min((0.5, 0.75, 1), key=lambda one: abs(one - min(same.values()))) == 1, "most likely tokens stay the same"
assert change < 0.05, "perplexity on an unseen text hardly moves"

# %% [markdown]
# The table has no column for speed: the weights of this model, 16 MB, fit into the processor's caches, so fewer bytes don't make it faster.
# A larger model is timed below. Greedy texts may differ although perplexity is the same: it takes one token whose rival is nearly as likely. Do
# these differ?

# %%
for name, (*_, story) in results.items():
    print(f"{name:12} {story[:90]!r}")

# %% [markdown]
# ## Bytes are time
#
# SmolLM2-135M-Instruct (page 18 fetches it) has 135 million weights in its file, of 4 bits most of them. Opened in bfloat16 they are 269 MB,
# far more than the caches, and each token reads all of them.
#
# **Predict.** The same weights in 8 bits instead of 16: more tokens a second, or fewer? And by about how many percent does the perplexity of a text move: 0, 10 or 50?
#
# <details><summary>Answer</summary>
#
# More, since half of the bytes are read. Perplexity moves by about **0** percent. Weights as they are stored have
# fewer bytes still; the last line shows whether unpacking them costs what reading less saves.
#
# </details>

# %% tags=["real"]
import os
from pathlib import Path

from rekindle.models import load

fetched = Path.home().glob(".cache/rekindle-course/*/*.gguf")  # page 18's
smollm2 = os.environ.get("REKINDLE_SMOLLM2", next(map(str, fetched), ""))
print(Path(smollm2).name if smollm2 else "page 18 has not fetched the model: this section shows nothing")
if smollm2:
    rivers = (
        "Rivers carry water from mountains to the sea. On the way they cut valleys, move sand and stones, and feed the plains "
        "through which they run. People have lived beside them for thousands of years, because a river gives water to drink, "
        "fish to eat and a road for boats."
    )
    small = {"max_requests": 1, "max_model_len": 256, "precompile": "lazy", "quiet": True}
    kinds = {"bfloat16": {"dtype": "bfloat16"}, "int8": {"quantize": "int8"}, "as stored": {}}
    loaded = {name: load(smollm2, **precision) for name, precision in kinds.items()}
    read = {name: model.nbytes for name, model in loaded.items()}
    opened = {name: await rekindle.open(model, **small) for name, model in loaded.items()}
    perplexities, took = {}, {name: [] for name in kinds}
    for name, larger in opened.items():
        scored = await larger.generate(rivers, max_tokens=1, prompt_logprobs=1)
        perplexities[name] = float(np.exp(-np.mean([entry.logprob for entry in scored.prompt_logprobs])))
    for _ in range(12):  # in turn, so that what else the machine does meets all of them; the first round compiles
        for name, larger in opened.items():
            began = time.perf_counter()
            await larger.generate("Once upon a time", max_tokens=40, ignore_eos=True)
            took[name].append(time.perf_counter() - began)
    for name, larger in opened.items():
        quicker = np.median(np.divide(took["bfloat16"], took[name])[1:])
        print(f"{name:10} {read[name] / 1e6:3.0f} MB, speed × {quicker:.1f}, perplexity {perplexities[name]:.1f}")
        await larger.aclose()

# %% jupyter={"source_hidden": true} tags=["check", "real"]
# Holds the answer above.
if smollm2:
    assert read["int8"] < 0.6 * read["bfloat16"], "half of the bytes are read for a token"
    assert (
        min(
            (0, 10, 50),
            key=lambda at: abs(
                at - max(abs(100 * one / perplexities["bfloat16"] - 100) for one in perplexities.values())
            ),
        )
        == 0
    ), "and perplexity hardly moves"

# %% [markdown]
# ## Other weights, same session
#
# While you train, you want to look at the newest weights again and again. `swap_weights` puts them into an open session: nothing is
# compiled, and the prefix cache is invalidated, because its keys contain the weights' fingerprint.
#
# **Predict.** How many programs are compiled for the new weights?
#
# <details><summary>Answer</summary>
#
# **0**: weights are arguments of a program.
#
# </details>

# %%
session = await rekindle.open("tiny", dtype="float32", max_requests=2, max_tokens_per_step=64, precompile="all")
before = await session.generate("Once upon a time", max_tokens=12)
original = dict(zip(models["float32"].graph.paths, models["float32"].leaves, strict=True))
noisy = {
    name: array * (1 + 0.3 * rng.standard_normal(array.shape).astype(np.float32)) for name, array in original.items()
}
compiled = session.stats().compilations
await session.swap_weights(noisy)
after = await session.generate("Once upon a time", max_tokens=12)
print(repr(before.text), repr(after.text), f"{session.stats().compilations - compiled} programs compiled", sep="\n")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert session.stats().compilations - compiled == 0, "other weights need no other programs"

# %% [markdown]
# ## Exercise
#
# Quantise one matrix of our random checkpoint by the formula, a scale for each row, and find the largest error in units of the scale.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
matrix = weights["model.layers.0.mlp.up_proj.weight"]
scale = np.abs(matrix).max(axis=1, keepdims=True) / 127
stored = np.round(matrix / scale).astype(np.int8)
error = np.abs(stored * scale - matrix) / scale
print(f"{error.max():.2f} scales at most, {matrix.nbytes // stored.nbytes} times smaller")
assert error.max() < 0.501, "rounding is off by half a step at most"

# %% [markdown]
# ## Takeaway
#
# A checkpoint is its config, its weights and its tokenizer. Eight bits for a weight change hardly anything, four change a little, and you can measure
# which on your own text.
#
# ## In production
#
# They use 4 bits for weights, with a scale for each group of 32 to 128 numbers, chosen to keep outputs rather than weights (GPTQ, AWQ), and 8 bits for weights, activations and the cache on devices that multiply in them. Quality is measured on tasks as well as by perplexity.
#
# ## Further reading
#
# - Dettmers et al., *LLM.int8()*, 2022, [arXiv:2208.07339](https://arxiv.org/abs/2208.07339)
# - Frantar et al., *GPTQ*, 2022, [arXiv:2210.17323](https://arxiv.org/abs/2210.17323)
# - Lin et al., *AWQ*, 2023, [arXiv:2306.00978](https://arxiv.org/abs/2306.00978)

# %%
await session.aclose()
shutil.rmtree(folder)
shutil.rmtree(broken)
