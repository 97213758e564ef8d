"""Every Pallas kernel compiled for an H100 and a TPU v5e: nothing spilled, little shared memory, pages in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from helpers import compilers
from helpers.compilers import Kernel, Row
from rekindle_kernels import (
    AttentionInputs,
    AttentionOptions,
    LinearOptions,
    abstract_pages,
    deprecated,
    grouped_linear,
    int4,
    linear,
    paged_attention,
    write_kv,
)
from rekindle_kernels.pages import needs_scales
from rekindle_kernels.pallas.gpu import attention as gpu

pytestmark = pytest.mark.accelerator
ATTENTION = {
    "gpu": partial(gpu.attention, extra=32),
    "tpu": partial(paged_attention, implementation="pallas_tpu"),  # which widens the queries
}
SHARED = 113 << 10  # two programs fit a multiprocessor of an H100, which has 227 KiB for them


def need(platform: str) -> None:
    if compilers.folder(platform) is None:
        pytest.skip(f"there is no compiler for {platform}: {compilers.FETCH}")


def words(kernel: Kernel) -> str:
    return f"{kernel.registers} registers {kernel.spilled} spilled {kernel.shared >> 10} KiB"


@dataclass(frozen=True)
class Case:
    """Four decode rows of long contexts and two prefill chunks."""

    q: str
    kv: str
    head_dim: int
    page_size: int = 16
    group: int = 4
    kv_heads: int = 2
    features: dict[str, Any] = field(default_factory=dict)
    platforms: tuple[str, ...] = ("gpu", "tpu")

    @property
    def name(self) -> str:
        parts = f"d{self.head_dim}", f"s{self.page_size}", f"g{self.group}", f"k{self.kv_heads}"
        return "-".join((self.q, self.kv, *parts, *self.features))

    def inputs(self) -> AttentionInputs:
        of = jax.ShapeDtypeStruct
        pages = abstract_pages(4096, self.kv_heads, self.page_size, self.head_dim, self.kv)
        integers = [of(shape, jnp.int32) for shape in ((6, 4096 // self.page_size), (6,), (3,), ())]
        q = of((4 + 300, self.kv_heads * self.group, self.head_dim), jnp.dtype(self.q))
        sinks = of((q.shape[1],), jnp.float32) if self.features.get("sinks") else None
        return AttentionInputs(q, pages, *integers, sinks=sinks)

    def options(self) -> AttentionOptions:
        given = {name: value for name, value in self.features.items() if name != "sinks"}
        return AttentionOptions(decode_rows=4, scale=0.1, **given)


GPU = ("gpu",)
CASES = (
    Case("bfloat16", "bfloat16", 128),
    Case("bfloat16", "bfloat16", 64, group=3, features={"sliding_window": 100}),
    Case("bfloat16", "bfloat16", 96, page_size=32, group=7, features={"soft_cap": 30.0}),
    Case("bfloat16", "bfloat16", 256, page_size=64, group=16, kv_heads=1, features={"sinks": True}),
    Case("float32", "float32", 64, group=3),
    Case("float32", "bfloat16", 128, features={"sliding_window": 100}),
    Case("float16", "float16", 80, platforms=GPU),
    Case("bfloat16", "int8", 128, platforms=GPU),
    Case("bfloat16", "float8_e4m3fn", 128, platforms=GPU),
)
# Each head size with each pair of types; minutes.
TYPES = sorted({(case.q, case.kv, case.platforms) for case in CASES})
MORE = [Case(q, kv, size, platforms=names) for q, kv, names in TYPES for size in (64, 80, 96, 128, 192, 256)]
# What the compilers said where it is not zero: float32 at head sizes that no served model stores in float32.
SPILLS = 100


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=lambda case: case.name
)
def test_attention_compiles(case: Case, platform: str, row: Row) -> None:
    if platform not in case.platforms:
        pytest.skip(f"the kernels for {platform} refuse it: see test_pallas_support")
    run = jax.jit(partial(ATTENTION[platform], options=case.options()))
    with compilers.target(platform), deprecated.known():
        inputs = case.inputs()
        made, pages = compilers.compiled(run.lower(inputs), platform), inputs.kv.pages
    found = [made.kernels[name] for name in ("paged_decode", "paged_decode_merge", "paged_prefill") if made.kernels]
    row(platform, case.name, *map(words, found))
    assert not made.moves(pages.size), "pages are copied"
    for kernel in found:
        assert kernel.spilled <= (SPILLS if case.q == "float32" else 0)
        assert kernel.shared <= SHARED
        if kernel.name == "paged_prefill" and jnp.dtype(case.q).itemsize == 2:
            assert kernel.wgmma, "prefill does not use the matrix instructions"


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (1, 128), (3, 64)])
def test_writes_are_in_place(kv: str, kv_heads: int, head_dim: int, platform: str, row: Row) -> None:
    of = jax.ShapeDtypeStruct
    if platform == "tpu" and needs_scales(kv):
        pytest.skip("one-byte pages are for GPUs and CPUs")
    values, ids = of((64, kv_heads, head_dim), jnp.bfloat16), of((64,), jnp.int32)
    with compilers.target(platform), deprecated.known():
        inputs = Case("bfloat16", kv, head_dim, kv_heads=kv_heads).inputs()
        run = jax.jit(write_kv, donate_argnums=0)
        made = compilers.compiled(run.lower(inputs.kv, values, values, ids, ids), platform)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(inputs.kv))
    temp = made.memory.temp_size_in_bytes
    row(platform, f"write_kv-{kv}-k{kv_heads}-d{head_dim}", f"temp {temp >> 10} KiB")
    assert made.memory.alias_size_in_bytes >= nbytes
    assert not made.moves(nbytes // 2)
    assert temp < nbytes // 4


@pytest.mark.parametrize(("rows", "prefills", "width"), [(256, 0, 2048), (256, 64, 8192), (1000, 0, 100)])
def test_large_page_tables_fit_the_scalar_memory_of_a_tpu(rows: int, prefills: int, width: int) -> None:
    """The contexts are 32k and 128k tokens."""
    need("tpu")
    of = jax.ShapeDtypeStruct
    tokens = rows + 512 * bool(prefills)
    run = jax.jit(partial(ATTENTION["tpu"], options=AttentionOptions(decode_rows=rows, scale=0.1)))
    with compilers.target("tpu"):
        kv = abstract_pages(4096, 8, 16, 128, "bfloat16")
        shapes = (rows + prefills, width), (rows + prefills,), (prefills + 1,), ()
        q = of((tokens, 32, 128), jnp.bfloat16)
        made = compilers.compiled(run.lower(AttentionInputs(q, kv, *(of(s, jnp.int32) for s in shapes))), "tpu")
    assert not made.moves(kv.pages.size)


PRODUCTS = ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("int8", "int8"), ("float32", "float32")


@pytest.mark.parametrize(("x", "weight"), PRODUCTS)
@pytest.mark.parametrize("rows", [512, 16384])  # of 128 experts, 8 to a token
def test_products_of_experts_compile(x: str, weight: str, rows: int, row: Row) -> None:
    need("gpu")
    of, experts, inputs, outputs = jax.ShapeDtypeStruct, 128, 2048, 1536
    run = jax.jit(partial(grouped_linear, dtype=jnp.int32 if x == "int8" else jnp.float32))
    with compilers.target("gpu"), deprecated.known():
        shapes = ((rows, inputs), x), ((experts, outputs, inputs), weight), ((experts,), "int32")
        made = compilers.compiled(run.lower(*(of(shape, jnp.dtype(name)) for shape, name in shapes)), "gpu")
    kernel = made.kernels["grouped_linear"]
    temp = made.memory.temp_size_in_bytes
    said = words(kernel)
    row("gpu", f"grouped_linear-{x}-{weight}-{rows}", said, f"temp {temp >> 10} KiB")
    assert kernel.spilled == 0
    assert kernel.shared <= SHARED
    assert temp < 2**20, "the matrices are copied"
    assert not made.moves(experts * outputs * inputs // 2)
    if jnp.dtype(x).itemsize == 2 and rows > 512:
        assert kernel.wgmma, "prefill does not use the matrix instructions"


GROUPED_BITS = (  # bits, group, dtype of scales, minimums, rows' dtype
    (4, 32, "float16", False, "bfloat16"),
    (4, 128, "float32", True, "bfloat16"),
    (8, 32, "float16", False, "bfloat16"),
    (4, 64, "float16", True, "float16"),
    (4, 32, "float16", False, "float32"),
)


@pytest.mark.parametrize(("bits", "group", "kind", "minimums", "dtype"), GROUPED_BITS)
@pytest.mark.parametrize("rows", [1, 64, 512])
def test_products_in_groups_compile(
    rows: int, bits: int, group: int, kind: str, minimums: bool, dtype: str, row: Row
) -> None:
    """A matrix of 28,672 x 4,096, of which XLA makes a copy of 224 MiB in 16 bits."""
    need("gpu")
    of, shape = jax.ShapeDtypeStruct, (28672, 4096)
    weight = of(int4.weight_shape(shape, bits), jnp.dtype(int4.DTYPES[bits]))
    scale = of(int4.scale_shape(shape, group, kind), jnp.dtype(kind))
    x = of((rows, shape[1]), jnp.dtype(dtype))
    run = jax.jit(partial(linear, options=LinearOptions("int4")))
    with compilers.target("gpu"), deprecated.known():
        given = {"scale": scale, "minimum": scale} if minimums else {"scale": scale}
        made = compilers.compiled(run.lower(x, weight, **given), "gpu")
    temp = made.memory.temp_size_in_bytes
    assert "int4_linear" in {thunk.name for thunk in made.thunks}
    kernel = made.kernels.get("int4_linear", Kernel("int4_linear", 0, 0, 0, wgmma=True))  # jax 0.12 writes no PTX
    said = words(kernel) if made.kernels else "no PTX"
    row("gpu", f"int4_linear-{bits}-{group}-{kind}-{dtype}-{rows}", said, f"temp {temp >> 10} KiB")
    assert kernel.spilled == 0
    assert kernel.shared <= SHARED
    assert temp <= 2 * rows * shape[1] * x.dtype.itemsize, "the matrix is copied"
    assert not made.moves(weight.size * weight.dtype.itemsize // 2)
    if rows >= 64 and x.dtype.itemsize == 2:
        assert kernel.wgmma, "many rows do not use the matrix instructions"


@pytest.mark.parametrize("rows", [512, 16384])  # of 128 experts, 8 to a token
def test_products_of_experts_in_groups_compile(rows: int, row: Row) -> None:
    need("gpu")
    of, shape = jax.ShapeDtypeStruct, (128, 1536, 2048)
    weight, scale = of(int4.weight_shape(shape), jnp.uint8), of(int4.scale_shape(shape, 32), jnp.float16)
    with compilers.target("gpu"), deprecated.known():
        x, sizes = of((rows, shape[2]), jnp.bfloat16), of((128,), jnp.int32)
        made = compilers.compiled(jax.jit(grouped_linear).lower(x, weight, sizes, scale=scale), "gpu")
    temp = made.memory.temp_size_in_bytes
    assert "int4_grouped" in {thunk.name for thunk in made.thunks}
    kernel = made.kernels.get("int4_grouped", Kernel("int4_grouped", 0, 0, 0, wgmma=True))  # jax 0.12 writes no PTX
    said = words(kernel) if made.kernels else "no PTX"
    row("gpu", f"int4_grouped-{rows}", said, f"temp {temp >> 10} KiB")
    assert kernel.spilled == 0
    assert kernel.shared <= SHARED
    assert temp <= 2 * rows * shape[2] * 2 + 2**20, "the matrices are copied"
