"""The tables of all kernels: what each takes and gives, declared once. The kernel, its caller and the chain read them.

A call has the operands of the table in the table's order, then one more that holds the kernel's settings, if it has
any: numbers that are known when the program is traced, and a bit for each optional operand that is there. An optional
operand that is not there is replaced by one element that is never read. One that comes after the settings is left
out: programs without it are as if the table had none.

Axes are named. An axis has the same size wherever its name stands, T is the axis of a step's tokens, and a digit is a
size by itself.

These are T tokens of the step, R rows, E width, N outputs of a matrix, M results of a row, V vocabulary, F frequencies,
H query heads, K kv heads or the width of a matrix, D head size, P pages or states, S page size or sequences, W
page-table width or words of a mask, U units, L modules of an adapter's site. Of a layer with a state: C channels, K
taps, H heads of D keys and V values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rekindle_kernels.int4_format import CODES, SMALLEST
from rekindle_kernels.native.layout import RecordLayout, consecutive, words

TOKENS = "T"


@dataclass(frozen=True)
class Operand:
    """One array that a kernel reads. `dtype` None is the one in the kernel's name."""

    name: str
    axes: str  # names with spaces between them
    dtype: str | None = "float32"
    optional: bool = False
    fields: tuple[str, ...] = ()  # of an array that is a record of int32
    behind: bool = False  # an optional operand that is passed after the settings; a kernel's table lists these last

    @property
    def is_per_token(self) -> bool:
        """True if it has one row per token of the step."""
        return self.axes.split()[:1] == [TOKENS]

    @cached_property
    def record(self) -> RecordLayout | None:
        """The layout of an array that is a record."""
        return consecutive(self.name, dict.fromkeys(self.fields, "int32")) if self.fields else None


@dataclass(frozen=True)
class Result:
    """One array that a kernel writes, into its own memory or, if it is passed, into the memory of operand `into`."""

    name: str
    axes: str
    dtype: str | None = "float32"
    into: str | None = None

    @property
    def is_per_token(self) -> bool:
        """True if it has one row per token of the step."""
        return self.axes.split()[:1] == [TOKENS]


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """The table of one kernel."""

    kind: str
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    settings: Mapping[str, str] = field(default_factory=dict)  # "int32" or "float32" by name
    parameters: tuple[str, ...] = ()  # what its names tell in addition to the kind: "dtype", "head_dim"

    def __post_init__(self) -> None:
        assert "_" not in self.kind, f"{self.kind} has to be one word: names are cut at underscores"

    @cached_property
    def optional(self) -> tuple[str, ...]:
        """Operands that need not be there, in the order of their bits."""
        return tuple(operand.name for operand in self.operands if operand.optional)

    @cached_property
    def settings_layout(self) -> RecordLayout | None:
        """The operand of settings: `present`, the bits of the optional operands that are there, and the settings."""
        kinds = {"present": "int32", **self.settings} if self.optional or self.settings else {}
        return consecutive(f"{self.kind} settings", kinds) if kinds else None

    def has(self, operand: str) -> bool:
        """True if there is an operand of that name."""
        return any(each.name == operand for each in self.operands)

    def index(self, operand: str) -> int:
        """Return an operand's place in a call; "settings" has a place, too."""
        names = [each.name for each in self.operands if not each.behind]
        return [*names, "settings", *(each.name for each in self.operands if each.behind)].index(operand)

    def present_bit(self, operand: str) -> int:
        """Return the bit of an optional operand in `present`."""
        return 1 << self.optional.index(operand)

    def pack_settings(self, present: int, values: Mapping[str, float]) -> np.ndarray:
        """Return the operand of settings."""
        assert self.settings_layout is not None, f"{self.kind} has no settings"
        return self.settings_layout.pack({"present": present, **values})

    def setting_index(self, name: str) -> int:
        """Return where a setting stands in `pack_settings`."""
        assert self.settings_layout is not None, f"{self.kind} has no settings"
        return self.settings_layout.index(name)

    def variant(self, *parameters: Any) -> Variant:
        """One kernel of this kind, for a dtype's name and a head size, if it has them."""
        assert len(parameters) == len(self.parameters), f"{self.kind} takes {', '.join(self.parameters) or 'nothing'}"
        return Variant(self, **dict(zip(self.parameters, parameters, strict=True)))


class Variant(NamedTuple):
    """A kernel: its table and the parameters that it is compiled for."""

    spec: KernelSpec
    dtype: str = ""
    head_dim: int = 0

    @property
    def name(self) -> str:
        """Its name for XLA and for the folder of object code; `kernel_table.identify` reads it."""
        return "_".join([self.spec.kind, *(str(getattr(self, parameter)) for parameter in self.spec.parameters)])

    def dtype_of(self, array: Operand | Result) -> str:
        """Return the dtype of an operand or result."""
        return array.dtype or PACKED_KEYS.get(self.dtype, self.dtype)


# The tables.
DTYPE, HEAD_DIM, DTYPE_AND_HEAD_DIM = ("dtype",), ("head_dim",), ("dtype", "head_dim")
DTYPES = ("bfloat16", "float32", "float16", "int8")  # of matrices and pages, the likeliest first
ADAPTED = DTYPES[:3]  # of adapters
WRITTEN = DTYPES[:2]  # of pages; others are XLA's to write
PACKED_KEYS = {"int8int4": "int8", "int4": "uint8"}  # formats of packed pages, and the dtype of their arrays of keys
ADDED = DTYPES[:2]  # of heads whose keys come block after block


# Rows times a matrix. `rows` says which rows are computed: the first `before`, and those after the next `gap`. Results
# of the others are undefined; without `rows` all are computed. Gated products have half as many results as outputs:
# silu of the first half times the other. `norm` holds weights of an RMS norm of the rows before they are multiplied.
# `expert` is the number of the matrix, where those of a product are a stack: all rows of the first, then those of the
# next.
def _product(kind: str, *matrix: Operand, behind: tuple[Operand, ...] = (), **settings: str) -> KernelSpec:
    return KernelSpec(
        kind,
        operands=(
            *matrix,
            Operand("x", "T K"),
            Operand("residual", "T M", optional=True),
            Operand("rows", "2", "int32", optional=True, fields=("before", "gap")),
            Operand("norm", "K", optional=True),
            Operand("expert", "", "int32", optional=True, behind=True),
            *behind,
        ),
        results=(Result("out", "T M"),),
        settings={"eps": "float32", "gated": "int32", **settings},
        parameters=DTYPE,
    )


_MATRIX = Operand("weight", "N K", dtype=None), Operand("scale", "N", optional=True)  # a scale of int8 weights

# With `amx` 1 the processor has these instructions. Where adapters are added to the product, the chain passes that
# call's operands here, too: while few rows are multiplied, the product prefetches the rows of rank of the step's
# adapters, of `place`, in numbers of `number_bytes`.
GEMM = _product(
    "gemm",
    *_MATRIX,
    behind=(
        Operand("down", "A K", optional=True, behind=True),
        Operand("up", "B N", optional=True, behind=True),
        Operand("owners", "C U", "int32", optional=True, behind=True),
        Operand("slots", "S", "int32", optional=True, behind=True),
    ),
    **dict.fromkeys(("amx", "place", "number_bytes"), "int32"),
)
# With `invariant` 1, products are added in the same order whatever the number of rows.
MATVEC = _product("matvec", *_MATRIX, invariant="int32")


# Rows times a matrix of four, six or eight bits, or of a codebook, in groups, whose three arrays are described in
# `rekindle_kernels.int4_format`; W is its columns. With `amx`, the processor has these instructions: results are the
# same without, unless `widened` is 1: then many rows may be multiplied as bfloat16.
def _grouped(kind: str, weight: str) -> KernelSpec:
    stored = Operand("weight", "B W", weight), Operand("scale", "B S", dtype=None)
    return _product(kind, *stored, Operand("minimum", "B S", dtype=None, optional=True), amx="int32", widened="int32")


_KINDS = {"uint8": "int4", "uint32": "int6groups", "int32": "int8groups", CODES: "codebook"}
GROUPED = {dtype: _grouped(kind, dtype) for dtype, kind in _KINDS.items()}  # by the dtype of weights
INT4 = GROUPED["uint8"]
# Groups of 16 inputs of four bits are half of what the code for larger ones reads in a step: they have their own.
_SMALLEST_KINDS = {"uint8": "int4of16", CODES: "codebookof16"}
GROUPED_SMALLEST = {dtype: _grouped(kind, dtype) for dtype, kind in _SMALLEST_KINDS.items()}


def grouped(weight: str, group: int) -> KernelSpec:
    """Return the table for weights of a dtype and groups of so many inputs."""
    return GROUPED_SMALLEST.get(weight, GROUPED[weight]) if group == SMALLEST else GROUPED[weight]


# x / rms(x) · weight, perhaps added to a residual. With a factor, the sum is multiplied by it and rounded to 22 bits.
RMS_NORM = KernelSpec(
    "norm",
    operands=(
        Operand("x", "T E"),
        Operand("weight", "E"),
        Operand("residual", "T E", optional=True, behind=True),
        Operand("factor", "1", optional=True, behind=True),
    ),
    results=(Result("out", "T E"),),
    settings={"eps": "float32"},
)

# The activation of gates times ups. Without `ups`, a row of gates has both, the gates first.
GATED_ROWS = KernelSpec(
    "gatedrows",
    operands=(Operand("gates", "T N"), Operand("ups", "T M", optional=True)),
    results=(Result("out", "T M"),),
    settings={"activation": "int32"},  # its place in ACTIVATIONS
)
ACTIVATIONS = ("silu", "gelu_tanh")


# What adapters add to the rows of y, the product of x. In a row, the outputs of L modules follow one another, each up
# to its end in `spans`. `down` has the B rows of rank of the first module, then those of the next; `up` has these rows'
# weights of all outputs. U units share the B rows alike: row `place` of `owners` has the adapter of each unit.
# `order` holds the tokens sorted by their adapters, and `slots` the adapters in that order; 0 is none. Gated, the
# result is silu of the first half of each row times the other. `norm` holds weights of an RMS norm of x.
def _adapter(kind: str, result: Result) -> KernelSpec:
    return KernelSpec(
        kind,
        operands=(
            Operand("y", "T N"),
            Operand("x", "T K"),
            Operand("down", "A K", dtype=None),
            Operand("up", "B N", dtype=None),
            Operand("owners", "C U", "int32"),
            Operand("order", "J", "int32"),
            Operand("slots", "J", "int32"),
            Operand("spans", "L", "int32"),
            Operand("norm", "K", optional=True),
        ),
        results=(result,),
        settings={"place": "int32", "eps": "float32"},
        parameters=DTYPE,
    )


ADAPTER = _adapter("adapter", Result("out", "T N", into="y"))
ADAPTER_GATE = _adapter("adaptergate", Result("out", "T M"))
ADAPTERS = (ADAPTER, ADAPTER_GATE)

# Queries and keys, normed if there is a norm, rotated; values as they are. qk may be qkv itself; K may be 0.
ROPE = KernelSpec(
    "rope",
    operands=(
        Operand("qk", "T A D"),
        Operand("qkv", "T B D"),
        Operand("cos", "T F"),
        Operand("sin", "T F"),
        Operand("norm", "C D", optional=True),
    ),
    results=(Result("q", "T H D"), Result("k", "T K D"), Result("v", "T K D")),
    settings={"eps": "float32"},
)

# Keys and values into their pages, in place.
WRITE_KV = KernelSpec(
    "write",
    operands=(
        Operand("pages", "P 2 K S D", dtype=None),
        Operand("k", "T K D"),
        Operand("v", "T K D"),
        Operand("page_ids", "T", "int32"),
        Operand("offsets", "T", "int32"),
    ),
    results=(Result("out", "P 2 K S D", dtype=None, into="pages"),),
    parameters=DTYPE,
)

# The same into packed pages, rotated and quantised.
WRITE_PACKED = KernelSpec(
    "writepacked",
    operands=(
        Operand("pages", "P 1 K S A", dtype=None),
        Operand("values", "P 1 K S B", "uint8"),
        Operand("scales", "P 2 K S"),
        Operand("k", "T K D"),
        Operand("v", "T K D"),
        Operand("page_ids", "T", "int32"),
        Operand("offsets", "T", "int32"),
    ),
    results=(
        Result("keys_now", "P 1 K S A", dtype=None, into="pages"),
        Result("values_now", "P 1 K S B", "uint8", into="values"),
        Result("scales_now", "P 2 K S", into="scales"),
    ),
    parameters=DTYPE_AND_HEAD_DIM,
)

# Attention. The first `decode_rows` rows and tokens decode, the others are prompts'. 0 is no window and no soft cap.
_ATTENTION = (
    Operand("q", "T H D"),
    Operand("pages", "P 2 K S D", dtype=None),
    Operand("scales", "P 2 K S", optional=True),  # of int8 pages
    Operand("page_table", "I W", "int32"),
    Operand("lens", "R", "int32"),
    Operand("sinks", "H", optional=True),
)
_ATTENTION_SETTINGS = {"decode_rows": "int32", "window": "int32", "scale": "float32", "soft_cap": "float32"}


def _over_packed_pages(spec: KernelSpec) -> KernelSpec:
    """Return the table of the same attention over packed pages: A bytes of a key, and B of a value."""
    pages = {
        "pages": (Operand("pages", "P 1 K S A", dtype=None), Operand("values", "P 1 K S B", "uint8")),
        "scales": (Operand("scales", "P 2 K S"),),
    }
    operands = [packed for plain in spec.operands for packed in pages.get(plain.name, (plain,))]
    return KernelSpec(f"{spec.kind}packed", tuple(operands), spec.results, spec.settings, spec.parameters)


DECODE = KernelSpec(
    "decode",
    _ATTENTION,
    (Result("out", "T H D"),),
    # `keys` of one piece of work. `apart` is 1 where each kv head of a row has a page table of its own, of the pages
    # that its queries chose.
    settings={**_ATTENTION_SETTINGS, "keys": "int32", "apart": "int32"},
    parameters=DTYPE_AND_HEAD_DIM,
)
DECODE_PACKED = _over_packed_pages(DECODE)
# `ends` [prompts + 1] says where each prompt's tokens end, counted from the first one's; `prompts` how many there are.
# `decoded` are the results of the rows that decode, into whose memory the prompts' go. `queries` are those of a tile;
# `together` is 1 where the kernel takes the rows that decode too, `amx` where the processor has these instructions.
# The first `unread` tokens of the first prompt have undefined results, since no later operation uses them.
# A query sees the `ahead` keys after its own, too, as far as there are any.
PREFILL = KernelSpec(
    "prefill",
    operands=(
        *_ATTENTION,
        Operand("ends", "L", "int32"),
        Operand("prompts", "", "int32"),
        Operand("decoded", "T H D", optional=True),
        Operand("unread", "", "int32", optional=True, behind=True),
    ),
    results=(Result("out", "T H D", into="decoded"),),
    settings={**_ATTENTION_SETTINGS, "queries": "int32", "together": "int32", "amx": "int32", "ahead": "int32"},
    parameters=DTYPE_AND_HEAD_DIM,
)
PREFILL_PACKED = _over_packed_pages(PREFILL)

# Bounds of the keys of pages that are full now, as bfloat16; and the pages that decode rows choose by them.
BOUND_PAGES = KernelSpec(
    "pagebounds",
    operands=(
        Operand("pages", "P 2 K S D", dtype=None),
        Operand("scales", "P 2 K S", optional=True),
        Operand("bounds", "P 2 K D", "bfloat16"),
        Operand("page_ids", "T", "int32"),
        Operand("offsets", "T", "int32"),
    ),
    results=(Result("out", "P 2 K D", "bfloat16", into="bounds"),),
    parameters=DTYPE_AND_HEAD_DIM,
)
BOUND_PACKED = _over_packed_pages(BOUND_PAGES)
# B pages of each row and kv head, for queries that are first rotated if `rotated` is 1.
CHOOSE_PAGES = KernelSpec(
    "choose",
    operands=(
        Operand("q", "T H D"),
        Operand("bounds", "P 2 K D", "bfloat16"),
        Operand("page_table", "I W", "int32"),
        Operand("lens", "R", "int32"),
    ),
    results=(Result("chosen", "J B", "int32"),),
    settings={"decode_rows": "int32", "page_size": "int32", "rotated": "int32", "scale": "float32"},
    parameters=HEAD_DIM,
)
PACKED = (WRITE_PACKED, DECODE_PACKED, PREFILL_PACKED, BOUND_PACKED)
BOUNDED = (BOUND_PAGES, BOUND_PACKED, CHOOSE_PAGES)  # of sessions whose rows choose pages

# Attention in both directions to a block of keys: their values, by their weights, are added to the sums of all blocks
# before. Query i sees the keys from starts[i] to stops[i], which may lie outside of the block.
# With `amx` 1 the processor has these instructions.
ADD_KEYS = KernelSpec(
    "addkeys",
    operands=(
        Operand("most", "H M 1"),
        Operand("total", "H M 1"),
        Operand("weighed", "H M D"),
        Operand("q", "H M D", dtype=None),
        Operand("k", "H N D", dtype=None),
        Operand("v", "H N D", dtype=None),
        Operand("starts", "M", "int32"),
        Operand("stops", "M", "int32"),
    ),
    results=(
        Result("most_now", "H M 1", into="most"),
        Result("total_now", "H M 1", into="total"),
        Result("weighed_now", "H M D", into="weighed"),
    ),
    settings={"scale": "float32", "amx": "int32"},
    parameters=DTYPE,
)

# Layers with states. A step's sequences are those of attention: `lens`, `ends` and `prompts` say whose its tokens are,
# `reads` and `writes` where each one's state lies.
_SEQUENCES = (
    Operand("reads", "S", "int32"),
    Operand("writes", "S", "int32"),
    Operand("lens", "S", "int32"),
    Operand("ends", "L", "int32"),
    Operand("prompts", "", "int32"),
)

# A convolution of each of the C channels that begin at column `first` of x, over the last K tokens. Inputs and results
# may have a factor, whose columns begin at `before` and at `behind`; -1 is none. `tails` are the last inputs.
CONVOLUTION = KernelSpec(
    "convolution",
    operands=(
        Operand("x", "T N"),
        Operand("weight", "C K"),
        Operand("bias", "C", optional=True),
        Operand("tails", "P J C"),
        *_SEQUENCES,
    ),
    results=(Result("out", "T C"), Result("after", "P J C", into="tails")),
    settings=dict.fromkeys(("decode_rows", "first", "before", "behind", "silu"), "int32"),
)

# The gated delta rule, from what the convolution returned to the gated norm of its results. Of a row of `projected`,
# the gates [H V], the weights of corrections [H] and the steps [H] begin at the columns of those names.
GATED_DELTA = KernelSpec(
    "delta",
    operands=(
        Operand("qkv", "T C"),
        Operand("projected", "T N"),
        Operand("step_bias", "H"),
        Operand("log_rate", "H"),
        Operand("norm", "V"),
        Operand("states", "P H D V"),
        *_SEQUENCES,
    ),
    results=(Result("out", "T M"), Result("after", "P H D V", into="states")),
    settings={**dict.fromkeys(("decode_rows", "key_heads", "gate", "beta", "step"), "int32"), "eps": "float32"},
)

# The delta rule with a decay for each channel: B = H · D steps, also from a column on. Their logarithms are at least
# `bound` where `bounded` is 1.
CHANNEL_DELTA = KernelSpec(
    "channeldelta",
    operands=(
        Operand("qkv", "T C"),
        Operand("projected", "T N"),
        Operand("step_bias", "B"),
        Operand("log_rate", "H"),
        Operand("norm", "V"),
        Operand("states", "P H D V"),
        *_SEQUENCES,
    ),
    results=(Result("out", "T M"), Result("after", "P H D V", into="states")),
    settings={
        **dict.fromkeys(("decode_rows", "gate", "beta", "step", "bounded"), "int32"),
        **dict.fromkeys(("eps", "bound"), "float32"),
    },
)

# Mamba-2's scan. `channels` are x of all H heads, then b and c of all groups; of a row of `projected`, the steps [H]
# begin at a column.
SELECTIVE_SCAN = KernelSpec(
    "scan",
    operands=(
        Operand("channels", "T C"),
        Operand("projected", "T N"),
        Operand("step_bias", "H"),
        Operand("log_rate", "H"),
        Operand("skip", "H"),
        Operand("states", "P H D V"),
        *_SEQUENCES,
    ),
    results=(Result("out", "T M"), Result("after", "P H D V", into="states")),
    settings=dict.fromkeys(("decode_rows", "groups", "step"), "int32"),
)

RECURRENT = (CONVOLUTION, GATED_DELTA, CHANNEL_DELTA, SELECTIVE_SCAN)

# The first index of each row's largest; the last one in a row of NaN.
ARGMAX = KernelSpec("argmax", (Operand("x", "R V"),), (Result("out", "R", "int32"),))

# A token for each row; `block` is how many tokens the first of a draw's two uniforms tells apart from others. A token
# may come where its bit in `masks` is 1, the lowest bit of a word first.
SAMPLE = KernelSpec(
    "sample",
    operands=(
        Operand("logits", "R V"),
        Operand("temperature", "R"),
        Operand("top_k", "R", "int32"),
        Operand("top_p", "R"),
        Operand("min_p", "R"),
        Operand("seed", "R 2", "uint32"),
        Operand("position", "R", "int32"),
        Operand("masks", "R W", "int32", optional=True),
    ),
    results=(Result("out", "R", "int32"),),
    settings={"block": "int32"},
)

# Masks that the host writes meanwhile, and the gate before them: whether it is open, the thread that opens it, and
# whether a program went on although it was closed. The masks follow at the next cache line.
MASK_GATE = words("Gate", {"open": 0, "opener": 1, "missed": 2}, size=8)
# The masks, once the gate is open. Its address is two halves, the lower one first.
GATE = KernelSpec(
    "gate",
    operands=(
        Operand("gate", "2", "int32"),
        Operand("logits", "R V"),  # not read: with them there, the model has run before anybody waits
    ),
    results=(Result("masks", "R W", "int32"),),
)

KERNELS = {
    spec.kind: spec
    for spec in (
        *(
            MATVEC,
            GEMM,
            *GROUPED.values(),
            *GROUPED_SMALLEST.values(),
            RMS_NORM,
            GATED_ROWS,
            ROPE,
            WRITE_KV,
            DECODE,
            PREFILL,
            BOUND_PAGES,
            CHOOSE_PAGES,
            *PACKED,
        ),
        *(ARGMAX, SAMPLE, GATE, ADD_KEYS, *ADAPTERS, *RECURRENT),
    )
}  # by kind; those of chains and of zeros have no table, since they take any number of operands


def identify(name: str) -> Variant | None:
    """Return the kernel of that name; None if it has no table."""
    kind, _, rest = name.partition("_")
    spec = KERNELS.get(kind)
    if spec is None:
        return None
    parameters = rest.rsplit("_", len(spec.parameters) - 1) if rest else []  # names of dtypes may have "_"
    variant = spec.variant(*parameters)
    return variant._replace(head_dim=int(variant.head_dim))
