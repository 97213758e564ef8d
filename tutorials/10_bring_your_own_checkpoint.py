# %% [markdown]
# # 10 Bring your own checkpoint
#
# *How do I run a Hugging Face checkpoint, quantise it, and know what that cost?*
#
# `rekindle.open` takes the folder of a checkpoint: `config.json`, one or more `.safetensors` files, and `tokenizer.json`. A name like
# `"org/model"` is looked up in the Hugging Face cache, and downloaded if it isn't there (that needs the extra `rekindle[hub]`). This
# page is offline, so we write a checkpoint ourselves. It is a good way to see what is in one.

# %%
import json
import shutil
import tempfile
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
# multiplies in integers, `"int8-weight"` only stores in them.
#
# `rekindle.models.load` reads a checkpoint without opening a session, here to see how large its weights are. From here on we
# use the tiny model, since a random one has no predictions that quantising could spoil.

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

# %% [markdown]
# ## What did it cost?
#
# The right measure is how much the model's predictions change: on a text that it wrote itself, the *perplexity*, and how
# often the most likely token stays the same. `prompt_logprobs` reports both for every token of a text.

# %%
options = {"max_requests": 2, "max_tokens_per_step": 128, "precompile": "lazy"}
async with rekindle.open("tiny", dtype="float32", **options) as session:
    told = await session.generate("Once upon a time", max_tokens=200, temperature=1.0, seed=7)
text = [*told.prompt_token_ids, *told.token_ids]
results = {}
for name, precision in settings.items():
    async with rekindle.open("tiny", **options, **precision) as session:
        scored = await session.generate(text, max_tokens=1, prompt_logprobs=1)
        runs = [await session.generate("Once upon a time", max_tokens=64, ignore_eos=True) for _ in range(3)]
        speed = max(run.timings.decode_rate(64) for run in runs)  # tokens per second after the first of 64
        logprobs = np.array([entry.logprob for entry in scored.prompt_logprobs])
        favourites = np.array([entry.top_ids[0] for entry in scored.prompt_logprobs])
        results[name] = (np.exp(-logprobs.mean()), favourites, speed, runs[0].text)

exact = results["float32"][1]
print(f"{'':12} perplexity  same favourite  tokens/s")
for name, (perplexity, favourites, speed, _) in results.items():
    print(f"{name:12} {perplexity:10.3f}  {np.mean(favourites == exact):14.0%}  {speed:8.0f}")

# %% [markdown]
# Perplexity hardly moves. The last column says little here: all of this model fits into the processor's caches, so what counts
# is the work around the weights. On a checkpoint of a hundred million weights or more, decoding is bound by reading them from
# memory, and half the bytes mean nearly twice the speed; `rekindle bench --model 135m` measures that on your machine.
#
# Greedy texts may part ways although perplexity is the same, since one close call is enough. Do these?

# %%
for name, (*_, story) in results.items():
    print(f"{name:12} {story[:90]!r}")

# %% [markdown]
# ## Other weights, same session
#
# While you train, you want to look at the newest weights again and again. `swap_weights` puts them into an open session: nothing is
# compiled, and the prefix cache is invalidated, because its keys contain the weights' fingerprint.

# %%
session = await rekindle.open("tiny", dtype="float32", max_requests=2, max_tokens_per_step=64, precompile="lazy")
before = await session.generate("Once upon a time", max_tokens=12)
original = dict(zip(models["float32"].graph.paths, models["float32"].leaves, strict=True))
noisy = {
    name: array * (1 + 0.3 * rng.standard_normal(array.shape).astype(np.float32)) for name, array in original.items()
}
compiled = session.stats().compilations
await session.swap_weights(noisy)
after = await session.generate("Once upon a time", max_tokens=12)
print(repr(before.text), repr(after.text), f"{session.stats().compilations - compiled} programs compiled", sep="\n")

# %%
await session.aclose()
shutil.rmtree(folder)
shutil.rmtree(broken)
