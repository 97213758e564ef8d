# %% [markdown]
# # 24 Several devices
#
# *How do several devices share one model, and what crosses the link between them?*
#
# **Before:** page 02; a matrix product in blocks. **Afterwards you can** say what each device holds, count what crosses the link, and run a mesh on simulated devices.
#
# **Also called:** the axis `model` = tensor parallelism (TP); `data` = data parallelism (DP); `expert` = expert parallelism (EP); a sum over devices = all-reduce, `psum`.
#
# **Takes:** about 15 minutes, with the embedded model.
#
# ![Each device has half of the heads and half of the MLP; two sums a layer join them](../source/pictures/24_mesh.svg)
#
# A model that is too large or too slow for one device is divided: each device has a part of every matrix. JAX can pretend that a
# CPU is several devices, and the same program runs. Its speed says nothing, since they share the cores; everything else is real.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 2)  # before JAX is first used

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

import rekindle

print(jax.devices())

# %% [markdown]
# ## One MLP by hand
#
# The first matrix is divided by columns, so that each device computes half of the inner numbers from the whole input. The second is
# divided by rows, so that each device multiplies its half. What is left is one sum:
#
# $$\mathrm{MLP}(x) = f(x W_1) W_2 = \sum_d f(x W_1^{(d)}) W_2^{(d)}$$
#
# It works because $f$ looks at each number alone.
#
# **Predict.** $x$ has 4 rows of 256 numbers, the inner size is 1,024. How many numbers does each device send in the sum: 4 · 1,024, or 4 · 256?
#
# <details><summary>Answer</summary>
#
# **1,024** = 4 · 256: only the output crosses, not the four times larger middle.
#
# </details>

# %%
rng = np.random.default_rng(0)
x, up, down = (jnp.array(rng.standard_normal(shape), jnp.float32) for shape in ((4, 256), (256, 1024), (1024, 256)))
mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P(None, "model"), P("model", None)), out_specs=P())
def mlp(x, up, down):
    part = jax.nn.silu(x @ up) @ down  # half of the columns, half of the rows
    return jax.lax.psum(part, "model")


whole = jax.nn.silu(x @ up) @ down
off = float(jnp.abs(mlp(x, up, down) - whole).max() / jnp.abs(whole).max())
print(f"{mlp(x, up, down).size} numbers are added; relative difference {off:.0e}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert up.shape[1] == 4 * up.shape[0], "the middle is four times larger"
assert mlp(x, up, down).size == 1024, "a row of the output for each token crosses the link"
assert off < 1e-5, "two halves and a sum are the whole"

# %% [markdown]
# Attention is divided by heads, which don't look at each other either; its output projection is divided by rows, like `down`, and
# ends in the second sum of a layer.
#
# ## A session on two devices
#
# `mesh=2` is all. The tiny model has 5 layers with 4 query heads and 2 KV heads.
#
# **Predict.** How many KV heads does each device have, and how many sums does a step make?
#
# <details><summary>Answer</summary>
#
# **1** KV head each. **11** sums: two for each of 5 layers, and one for the embedding, whose vocabulary is divided as well.
#
# </details>

# %%
options = {"dtype": "float32", "max_requests": 4, "max_model_len": 512, "precompile": "lazy", "quiet": True}
one = await rekindle.open("tiny", **options)
two = await rekindle.open("tiny", mesh=2, **options)
report = two.stats().mesh
print(report)
report

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert report.kv_heads == 1, "KV heads are divided"
assert report.sums == 11, "two sums a layer, one for the embedding"

# %% [markdown]
# The same text, from the same cache of pages; each device has its KV head of every page.
#
# **Predict.** In float32 the model has 16 MB of weights. How many MB does each device hold?
#
# <details><summary>Answer</summary>
#
# About **8**: all large matrices are divided; norms are on both.
#
# </details>

# %%
texts = [(await session.generate("Once upon a time", max_tokens=40)).text for session in (one, two)]
print(texts[0] == texts[1], repr(texts[1][:60]))
print(f"{report.weight_bytes / 1e6:.1f} MB of weights on each device, {report.bytes_per_token:,} bytes of sums a token")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert texts[0] == texts[1], "a mesh gives the tokens of one device"
assert round(4 * 4_000_512 / 1e6) == 16, "four bytes for each weight"
assert round(report.weight_bytes / 1e6) == 8, "each device has half of the weights"

# %% [markdown]
# ## When does it pay?
#
# First a measurement: the same text from one device and from two that are simulated on the same cores.

# %%
rates = {"one device": 0.0, "two devices": 0.0}
for _ in range(6):  # in turns, so that a busy machine is busy for both
    for name, session in (("one device", one), ("two devices", two)):
        done = await session.generate("Once upon a time", max_tokens=64, ignore_eos=True)
        rates[name] = max(rates[name], done.timings.decode_rate(64))
print(", ".join(f"{name}: {rate:.0f} tokens/s" for name, rate in rates.items()))
ratio = rates["two devices"] / rates["one device"]
print(
    f"two simulated devices make {ratio:.2f} times the tokens: "
    + ("they are slower" if ratio < 1 else "they are no slower")
)

# %% [markdown]
# Simulated devices share cores and memory: nothing is read more quickly, and every sum is paid for. So the ratio says how this machine runs their threads, and nothing about real devices. Those save reading. With $N$ devices a decode step reads $1/N$ of the weights on each, and waits for its sums. Say a link moves $L$ bytes a second and
# takes $s$ seconds to begin:
#
# $$t(N) = \frac{\mathrm{weights}}{N \cdot \mathrm{bandwidth}} + \mathrm{sums} \cdot \left(s + \frac{\mathrm{bytes}}{L}\right)$$
#
# A sum for one row of Llama 3 8B has 8 KiB: at 400 GB/s they take 0.02 µs, and its beginning 10. Here is that formula for Llama 3 8B in 16 bits on devices with 3.35 TB/s,
# joined by a quick link (10 µs) and by a slow one (50 µs).

# %%
devices = np.array([1, 2, 4, 8])
for name, start in (("10 µs a sum", 10e-6), ("50 µs a sum", 50e-6)):
    seconds = 16e9 / (devices * 3.35e12) + np.where(devices > 1, 65 * start, 0)
    plt.plot(devices, 1 / seconds, "o-", label=name)
assert round(8 * 1024 / 400e9 * 1e6, 2) == 0.02, "at 400 GB/s, 8 KiB take less than a microsecond"
print("two devices pay for models of more than")
for start in (10e-6, 50e-6):
    smallest = 65 * start * 3.35e12 * 2  # the sums' time is half of the reading's
    print(f"  {smallest / 1e9:.1f} GB of weights, with {start * 1e6:.0f} µs a sum")
plt.xticks(devices)
plt.ylim(0)
plt.xlabel("devices")
plt.ylabel("tokens/s of one text")
plt.legend()
plt.show()

# %% [markdown]
# ## Exercise
#
# Divide attention by hand: four query heads, each with its own keys and values, over two devices, with the output projection divided by rows. Compare with the whole.


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
heads, size, length = 4, 16, 10
q, k, v = (jnp.array(rng.standard_normal((length, heads, size)), jnp.float32) for _ in range(3))
out = jnp.array(rng.standard_normal((heads * size, 32)), jnp.float32)


def attend(q, k, v, out):
    scores = jnp.einsum("thd,shd->hts", q, k) / jnp.sqrt(size)
    mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1), v)
    return mixed.reshape(length, -1) @ out


divided = jax.jit(
    jax.shard_map(
        lambda *parts: jax.lax.psum(attend(*parts), "model"),
        mesh=mesh,
        in_specs=(P(None, "model"), P(None, "model"), P(None, "model"), P("model", None)),
        out_specs=P(),
    )
)(q, k, v, out)
off = float(jnp.abs(divided - attend(q, k, v, out)).max())
print(f"largest difference {off:.0e}")
assert off < 1e-4, "heads are divided, and one sum joins them"

# %% [markdown]
# ## Takeaway
#
# Divide heads and the inner size of the MLP, and two sums a layer join the parts. It pays if the time saved by reading fewer weights is longer than the
# sums take.
#
# ## In production
#
# Devices of one machine share a model over links of hundreds of GB/s; beyond the machine, layers are divided instead (pipelines), or whole models (replicas, page 25). Experts get groups of devices of their own. Sums are overlapped with the next product, and sometimes sent in 8 bits.
#
# ## Further reading
#
# - Shoeybi et al., *Megatron-LM*, 2019, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053)
# - Pope et al., *Efficiently Scaling Transformer Inference*, 2022, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102)
# - Austin et al., *How to Scale Your Model*, 2025, [jax-ml.github.io/scaling-book](https://jax-ml.github.io/scaling-book/)

# %%
await one.aclose()
await two.aclose()
