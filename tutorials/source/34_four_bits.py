# %% [markdown]
# # 34 Four bits
#
# *What is in a four-bit file, and which of its formats loses least?*
#
# **Before:** pages 10 and 19; numpy. **Afterwards you can** read a block of a GGUF file by hand, compute the bits of a format, write one of your own, and say what a smaller group, a minimum, a table of levels or a better search buys.
#
# **Also called:** block = group; scale = delta, step; minimum = zero point, offset; Q4_K = a K-quant, super-blocks; IQ4_NL, NF4 = codebooks; MXFP4, NVFP4 = microscaling floats; a search for scales = imatrix, AWQ, GPTQ do it with data.
#
# **Takes:** about 20 minutes, with the embedded model and SmolLM2, which page 18 fetches.
#
# ![A block: 32 numbers share a scale, perhaps a minimum, and each has four bits](../source/pictures/34_block.svg)
#
# A decode step is as quick as its weights are small (page 19), so nearly everybody runs models in four bits. But four bits are sixteen values, and the numbers of a matrix crowd near 0 with a few far out. All formats cut rows into short *groups*, and store a
# scale for each. They differ in the size of their groups, in what else a group stores, and in their sixteen values.

# %%
import math
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

from rekindle import tiny
from rekindle.models import export

plt.rcParams.update(
    {"figure.figsize": (7, 2.8), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}
)
fetched = (Path.home() / ".cache" / "rekindle-course").glob("*/*.gguf")
path = Path(os.environ.get("REKINDLE_SMOLLM2") or next(fetched, ""))
if not path.is_file():  # page 18 has not fetched it: the embedded model, written in this form
    path = Path(tempfile.mkdtemp()) / "tiny.gguf"
    export(tiny.folder(), path, type="q8_0")

# %% [markdown]
# ## A file is a list of blocks
#
# A GGUF file has a header, which says where each tensor begins and of which type it is, and then the tensors. Both are read here by hand.
#
# **Predict.** A block of Q8_0 has 32 whole numbers of one byte each, and one scale in 16 bits. How many bytes is it, and how many bits for each number?
#
# <details><summary>Answer</summary>
#
# **34** bytes, so **8.5** bits for each of the 32.
#
# </details>


# %%
class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int  # from the beginning of the file
    nbytes: int


KINDS = {0: ("F32", 1, 4), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}  # by its number: numbers and bytes of a block
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_header(path: Path) -> list[Tensor]:
    """Read where each tensor of a GGUF file lies."""
    file = path.open("rb")

    def number(form: str) -> int:
        return int(struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0])

    def text() -> str:
        return file.read(number("Q")).decode()

    def pass_over(kind: int) -> int:
        """Read a value of the metadata. Return it if it is one number."""
        if kind == 8:
            return len(text())
        if kind == 9:  # an array
            kind, length = number("I"), number("Q")
            return sum(pass_over(kind) for _ in range(length))
        return number(NUMBERS[kind])

    with file:
        assert (file.read(4), number("I")) == (b"GGUF", 3), "this is a GGUF file of version 3"
        tensors, keys = number("Q"), number("Q")
        metadata = {text(): pass_over(number("I")) for _ in range(keys)}
        places = []
        for _ in range(tensors):
            name = text()
            shape = tuple(number("Q") for _ in range(number("I")))[::-1]  # in the file, the fastest axis is first
            places.append((name, shape, *KINDS[number("I")], number("Q")))
        step = metadata.get("general.alignment", 32)
        begin = -(-file.tell() // step) * step
    return [
        Tensor(name, shape, kind, begin + offset, int(np.prod(shape)) // count * size)
        for name, shape, kind, count, size, offset in places
    ]


tensors = read_header(path)
parameters = sum(int(np.prod(tensor.shape)) for tensor in tensors)
for kind, count in Counter(tensor.kind for tensor in tensors).items():
    some = [tensor for tensor in tensors if tensor.kind == kind]
    numbers = sum(int(np.prod(tensor.shape)) for tensor in some)
    print(f"{kind:6}{count:4} tensors{numbers:13,} numbers{sum(t.nbytes for t in some) * 8 / numbers:7.2f} bits each")
print(f"{path.name}: {8 * path.stat().st_size / parameters:.2f} bits for each number, header and all")

tensor = next(tensor for tensor in tensors if tensor.kind == "Q8_0")
BLOCK = np.dtype([("scale", "<f2"), ("numbers", "i1", 32)])
raw = np.fromfile(path, BLOCK, count=tensor.nbytes // BLOCK.itemsize, offset=tensor.offset)
weights = (raw["scale"].astype(np.float32)[:, None] * raw["numbers"]).reshape(tensor.shape)
print(f"\n{tensor.name} {tensor.shape}, its first block:\n{raw['scale'][0]} times\n{raw['numbers'][0]}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert BLOCK.itemsize == 34, "32 numbers and a scale"
assert BLOCK.itemsize * 8 / 32 == 8.5, "the scale costs half a bit for each number"

# %% [markdown]
# This tensor, the largest in its file, is our subject: in 8.5 bits it is nearly as it was trained. We take 4,096 of its rows, write them in four bits in each way below, and compare.
#
# ## A format in a line
#
# With levels $\ell_0 \dots \ell_{15}$ and a group's scale $s$, each number becomes the nearest $s \cdot \ell_i$. With a minimum $m$ it is $m + s \cdot i$. The size follows:
#
# $$\mathrm{bits} = 4 + \frac{\mathrm{bits\ of\ scale\ and\ minimum}}{\mathrm{numbers\ in\ a\ group}}$$
#
# **Predict.** Q4_0 has groups of 32 and a scale in 16 bits; Q4_1 has a minimum in 16 bits, too; MXFP4 has groups of 32 and a scale of one byte. How many bits does each take?
#
# <details><summary>Answer</summary>
#
# **4.5**, **5** and **4.25**.
#
# </details>


# %%
def half(scale):
    """A scale in 16 bits."""
    return scale.astype(np.float16).astype(np.float32)


def six_bits(scale):
    """The scales of eight groups as whole numbers up to 63, times one of their own: Q4_K."""
    eight = scale.reshape(-1, 8)
    shared = np.maximum(eight.max(1, keepdims=True) / 63, 1e-12)
    return (np.round(eight / shared) * shared).reshape(scale.shape)


def power_of_two(scale):
    """An exponent alone; numbers above 6 scales become 6: MXFP4."""
    return np.exp2(np.floor(np.log2(np.maximum(6 * scale, 1e-30))) - 2)


def float8(scale):
    """A float of eight bits, times one number of the whole tensor: NVFP4."""
    shared = scale.max() / 448
    return (scale / shared).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * shared


class Format(NamedTuple):
    group: int
    extra: int  # bits of a group besides its numbers
    levels: np.ndarray = np.arange(-8, 8)
    scale: Callable[[np.ndarray], np.ndarray] = half  # how a scale is rounded
    minimum: bool = False  # a group has a least number, and levels count up from there

    @property
    def bits(self) -> float:
        return math.ceil(math.log2(len(self.levels))) + self.extra / self.group


FLOATS = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])  # the sixteenth is another zero
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
FORMATS = {
    "Q4_0": Format(32, 16),
    "Q4_1": Format(32, 32, minimum=True),
    "Q4_K": Format(32, 16, scale=six_bits, minimum=True),  # 6 + 6 bits, and 32 for eight groups
    "IQ4_NL": Format(32, 16, TABLE),
    "MXFP4": Format(32, 8, FLOATS, power_of_two),
    "NVFP4": Format(16, 8, FLOATS, float8),
}


def rounded(x: np.ndarray, how: Format, factor: float = 1.0) -> np.ndarray:
    """What a format keeps of x, with scales that are `factor` times as large as the largest number needs."""
    x, levels = x.reshape(-1, how.group), how.levels.astype(np.float32)
    if how.minimum:
        least = np.minimum(x.min(1, keepdims=True), 0)
        step = how.scale(factor * (x.max(1, keepdims=True) - least) / (len(levels) - 1))
        least, step = -how.scale(-least), np.where(step == 0, 1, step)
        return least + step * np.clip(np.round((x - least) / step), 0, len(levels) - 1)
    largest = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)  # it gets the level that is farthest out
    step = np.sign(largest / levels[0]) * how.scale(factor * np.abs(largest / levels[0]))
    step = np.where(step == 0, 1, step)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x / step)] * step


def error(x: np.ndarray, y: np.ndarray) -> float:
    """The size of the difference, in parts of the size of x (roots of mean squares)."""
    return float(np.linalg.norm(x.ravel() - y.ravel()) / np.linalg.norm(x))


some = weights[:4096]
some = some[:, : some.shape[1] // 64 * 64]
errors = {name: error(some, rounded(some, how)) for name, how in FORMATS.items()}
for name, how in FORMATS.items():
    print(f"{name:8}{how.bits:6.2f} bits, groups of {how.group:3}: error {errors[name]:.1%}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert FORMATS["Q4_0"].bits == 4.5, "16 bits for 32 numbers"
assert FORMATS["Q4_1"].bits == 5, "32 bits for 32 numbers"
assert FORMATS["MXFP4"].bits == 4.25, "8 bits for 32 numbers"

# %% [markdown]
# ## Error against size
#
# The dotted line is Q4_0 with other sizes of groups: each size of a file could be reached by that alone. A format below the line is one whose idea is worth its bits.

# %%
sizes = [16, 32, 64, 192, 576] if some.shape[1] % 576 == 0 else [16, 32, 64]
line = {size: Format(size, 16) for size in sizes}
curve = {size: error(some, rounded(some, how)) for size, how in line.items()}
plt.plot([how.bits for how in line.values()], [100 * curve[size] for size in sizes], ":o", color="0.6", markersize=3)
for name, how in FORMATS.items():
    plt.plot(how.bits, 100 * errors[name], "o", color="C1")
    plt.annotate(name, (how.bits, 100 * errors[name]), textcoords="offset points", xytext=(5, 3), fontsize=8)
plt.xlabel("bits for each number")
plt.ylabel("error, %")
plt.ylim(0)
plt.show()
bits = sorted(how.bits for how in line.values())
by_bits = dict(sorted((how.bits, curve[size]) for size, how in line.items()))
for name, how in FORMATS.items():
    plain = np.interp(how.bits, list(by_bits), list(by_bits.values()))
    more = errors[name] / plain - 1
    says = "as much" if abs(more) < 0.005 else "less" if more < 0 else "more"
    print(f"{name:8}{more:+7.1%}: {says} error than Q4_0's idea would have with as many bits")
best = min((name for name in FORMATS if FORMATS[name].bits <= 4.5), key=errors.get)
print(f"\nof those with at most 4.5 bits, {best} loses least on this tensor")
assert curve[16] < curve[32] < curve[64], "smaller groups lose less"
assert errors["IQ4_NL"] < errors["Q4_0"], "levels that are denser near zero fit weights better"

# %% [markdown]
# Why do small groups help? One large number sets the scale of all its neighbours.
#
# **Predict.** A group has 31 numbers between −5 and 5, and one of 100. In Q4_0 the steps are 12.5 apart. On how many different values do the 31 land?
#
# <details><summary>Answer</summary>
#
# On **1**: all of them become 0.
#
# </details>

# %%
group = np.append(np.random.default_rng(0).uniform(-5, 5, 31), 100).astype(np.float32)
kept = rounded(group, FORMATS["Q4_0"])[0]
print(np.unique(np.abs(kept[:31])), kept[31])
spread = np.abs(some.reshape(-1, 32)).max(1) / np.sqrt((some.reshape(-1, 32) ** 2).mean(1))
print(
    f"in our tensor, the largest of a group is {np.median(spread):.1f} times its root mean square, at most {spread.max():.1f}"
)

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert len(np.unique(np.abs(kept[:31]))) == 1, "one large number hides its neighbours"

# %% [markdown]
# ## What the error does
#
# **Predict.** With two bits more there are four times as many levels. How many times smaller is the error, to the nearest whole number?
#
# <details><summary>Answer</summary>
#
# **4** times: each bit halves the distance between levels.
#
# </details>

# %%
six = error(some, rounded(some, Format(32, 16, np.arange(-32, 32))))
print(f"4 bits {errors['Q4_0']:.1%}, 6 bits {six:.2%}: {errors['Q4_0'] / six:.1f} times smaller")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(errors["Q4_0"] / six) == 4, "a bit halves the error"

# %% [markdown]
# **Predict.** The weights of a row are off by some percent, each by another amount and in another direction. A product with a vector sums hundreds of them. Divide the product's error (in percent of the product) by the weights' error: what do you get, to the nearest whole number?
#
# <details><summary>Answer</summary>
#
# **1**. Errors do cancel, but the terms of the product cancel as well, so nothing is gained. What saves models is that later layers were trained with noise, and that the next token is often clear.
#
# </details>

# %%
x = np.random.default_rng(1).standard_normal((some.shape[1], 64)).astype(np.float32)
product = {name: error(some @ x, rounded(some, how).reshape(some.shape) @ x) for name, how in FORMATS.items()}
for name in FORMATS:
    print(f"{name:8} weights {errors[name]:.1%}, product {product[name]:.1%}")

# %% jupyter={"source_hidden": true} tags=["check"]
# Holds the answer above.
assert round(np.median([product[name] / errors[name] for name in FORMATS])) == 1, "a product is as wrong as its weights"

# %% [markdown]
# ## Exercise
#
# A scale need not fit the largest number. Write `searched(x, how)`: try factors from 0.7 to 1.1 for the scale of each group, and keep for each group the numbers with the smallest squared error. By how much does Q4_0's error fall?


# %% tags=["yours"]
# Your answer.


# %% jupyter={"source_hidden": true} tags=["solution"]
# Our solution.
def searched(x: np.ndarray, how: Format) -> np.ndarray:
    groups, best = x.reshape(-1, how.group), rounded(x, how)
    least = ((best - groups) ** 2).sum(1, keepdims=True)
    for factor in np.linspace(0.7, 1.1, 21):
        tried = rounded(x, how, factor)
        off = ((tried - groups) ** 2).sum(1, keepdims=True)
        best, least = np.where(off < least, tried, best), np.minimum(off, least)
    return best


found = error(some, searched(some, FORMATS["Q4_0"]))
print(f"{errors['Q4_0']:.2%} becomes {found:.2%}, {1 - found / errors['Q4_0']:.0%} less, in a file of the same size")
assert found < 0.97 * errors["Q4_0"], "cutting off the largest number helps the other 31"

# %% [markdown]
# ## Takeaway
#
# A format is a group, a scale, perhaps a minimum, and sixteen levels. Smaller groups and minimums buy accuracy with bits; a table of levels and a search for scales buy it for nothing but work. Compare formats at the same size, on real tensors, and at last on texts (page 10).
#
# ## In production
#
# Files mix formats: embeddings and some matrices of attention get more bits, as in this one. Scales are searched with data, so that numbers that meet large activations count more (AWQ, GPTQ, llama.cpp's imatrix). GPUs since 2025 multiply MXFP4 and NVFP4 directly; elsewhere blocks are unpacked in the kernel, where simple formats are quicker than clever ones.
#
# ## Further reading
#
# - Frantar et al., *GPTQ*, 2022, [arXiv:2210.17323](https://arxiv.org/abs/2210.17323)
# - Dettmers et al., *QLoRA* (NF4), 2023, [arXiv:2305.14314](https://arxiv.org/abs/2305.14314)
# - Rouhani et al., *Microscaling Data Formats for Deep Learning*, 2023, [arXiv:2310.10537](https://arxiv.org/abs/2310.10537)
# - Lin et al., *AWQ*, 2023, [arXiv:2306.00978](https://arxiv.org/abs/2306.00978)
