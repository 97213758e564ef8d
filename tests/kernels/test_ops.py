"""Which implementation serves a call of each operation, and what a caller is told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle_kernels
from helpers.kernel_cases import CASES, build
from helpers.thorough import by_default
from rekindle_kernels import (
    OPERATIONS,
    AttentionCall,
    Implementation,
    LinearCall,
    LinearOptions,
    NormCall,
    Registry,
    RopeCall,
    SamplingCall,
    Traits,
    WriteCall,
    configure,
    environment,
    fuse,
    gated,
    init_pages,
    linear,
    paged_attention,
    rms_norm,
    traits,
    unavailable_reason,
)
from rekindle_kernels.native import build as machine_code
from rekindle_kernels.native import cpu, kernel_files
from rekindle_kernels.ops.attention import ATTENTION, ROPE, WRITE_KV
from rekindle_kernels.ops.linear import LINEAR, RMS_NORM
from rekindle_kernels.ops.memory import ZEROS, MemoryCall
from rekindle_kernels.ops.registry import Facts
from rekindle_kernels.ops.sampling import DRAW, GREEDY
from rekindle_kernels.xla import linear as xla_linear


def call(**changes: object) -> AttentionCall:
    facts = {
        "platform": "cpu", "tokens": 4, "decode_rows": 4, "sequences": 4, "heads": 4, "kv_heads": 2, "head_dim": 64,
        "page_size": 16, "table_width": 8, "q_dtype": jnp.dtype("float32"), "kv_dtype": jnp.dtype("bfloat16"),
        "storage": jnp.dtype("uint16"),
    }  # fmt: skip
    return AttentionCall(**{**facts, **changes})  # type: ignore[arg-type]


def test_cpu_is_served_by_native_kernels_where_numba_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if unavailable_reason() is None:
        assert ATTENTION.choose(call()).name == "native"
    assert ATTENTION.choose(call(head_dim=40)).name == "xla"
    monkeypatch.setenv("REKINDLE_NATIVE", "0")
    assert ATTENTION.choose(call()).name == "xla"
    with pytest.raises(ValueError, match="'native' of attention can't serve this call: REKINDLE_NATIVE=0 turns"):
        ATTENTION.choose(call(), "native")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_platform_has_a_fallback(platform: str) -> None:
    odd = call(platform=platform, heads=6, head_dim=13, page_size=3, q_dtype=jnp.dtype("float16"))
    assert ATTENTION.choose(odd).supports(odd) is None
    assert ATTENTION.choose(odd, "xla").name == "xla"


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'magic' of attention; there are .*xla, reference"):
        ATTENTION.choose(call(), "magic")


def test_a_named_implementation_that_cannot_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = Implementation("xla", lambda: None, lambda call: f"head size {call.head_dim} is no power of two")
    monkeypatch.setattr(Registry, "load", lambda self, name: picky)
    with pytest.raises(ValueError, match=r"'xla' of attention can't serve this call: head size 13 is no power of two"):
        ATTENTION.choose(call(head_dim=13), "xla")


def test_one_that_cannot_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Implementation("xla", lambda: None, lambda call: "never")
    able = ("native", "xla")
    load = Registry.load
    monkeypatch.setattr(Registry, "load", lambda self, name: never if name in able else load(self, name))
    assert ATTENTION.choose(call()).name == "reference"


def test_every_registered_name_loads() -> None:
    for operation in OPERATIONS:
        for name in operation.names():
            assert operation.load(name).name == name


def test_init_pages_stores_what_the_platform_updates_in_place() -> None:
    cpu, gpu = (init_pages(3, 2, 16, 64, "bfloat16", platform=platform) for platform in ("cpu", "gpu"))
    assert (cpu.pages.dtype, cpu.dtype) == (jnp.uint16, jnp.bfloat16)
    assert gpu.pages.dtype == gpu.dtype == jnp.bfloat16
    assert cpu.pages.shape == (3, 2, 2, 16, 64) and cpu.scales is None
    narrow = init_pages(3, 2, 16, 64, "int8")
    assert narrow.scales is not None and narrow.scales.shape == (3, 2, 2, 16)


def test_tables_that_disagree_with_the_rows_are_refused() -> None:
    problem = build(CASES[0])
    with pytest.raises(AssertionError, match="disagree"):
        paged_attention(problem.inputs, replace(problem.options, decode_rows=3))


def test_exports_are_there() -> None:
    for name in rekindle_kernels.__all__:
        assert hasattr(rekindle_kernels, name)


NUMBA = pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
SHAPE = jax.ShapeDtypeStruct


def product(rows: int, weight: str, outputs: int = 256, inputs: int = 128, **changes: object) -> LinearCall:
    x, stored = SHAPE((rows, inputs), jnp.float32), SHAPE((outputs, inputs), jnp.dtype(weight))
    return LinearCall(platform="cpu", x=x, weight=stored, **changes)  # type: ignore[arg-type]


def chosen(operation: Registry, facts: Facts) -> str:
    return operation.choose(facts).name


@NUMBA
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("weight", "quantize"),
    [("float32", None), ("bfloat16", None), ("float16", None), ("int8", "int8"), ("int8", "int8-weight")],
)
def test_few_rows_times_any_matrix_are_native(rows: int, weight: str, quantize: str | None) -> None:
    assert chosen(LINEAR, product(rows, weight, quantize=quantize)) == "native"


@NUMBA
@pytest.mark.parametrize(
    ("weight", "quantize", "multiplied"),
    [("bfloat16", None, "bfloat16"), ("int8", "int8", "int8"), ("int8", "int8-weight", ""),
     ("float16", None, "float16")],
)  # fmt: skip
def test_many_rows_are_native_where_the_processor_has_the_instruction(
    weight: str, quantize: str | None, multiplied: str
) -> None:
    native = cpu.multiplies_many(multiplied)
    assert not native or multiplied in ("bfloat16", "int8")
    assert chosen(LINEAR, product(64, weight, quantize=quantize)) == ("native" if native else "xla")
    assert chosen(LINEAR, product(64, weight, inputs=96, quantize=quantize)) == "xla", "no multiple of a vector"


@NUMBA
def test_rows_times_a_float32_matrix_are_native_in_strips_and_hundreds_of_them_where_the_processor_has_amx() -> None:
    widened = cpu.multiplies_widened("float32")
    native, few = "native" if widened or cpu.has_amx() else "xla", "native" if widened else "xla"
    large = replace(product(512, "float32"), weight=SHAPE((1024, 528), jnp.float32), x=SHAPE((512, 528), jnp.float32))
    assert chosen(LINEAR, large) == native
    some = {rows: chosen(LINEAR, replace(large, x=SHAPE((rows, 528), jnp.float32))) for rows in (5, 64)}
    assert some == {5: "native", 64: few}, "by AMX too few to split a matrix for; five are read row by row elsewhere"
    assert chosen(LINEAR, replace(large, weight=SHAPE((1000, 528), jnp.float32))) == "xla", "no multiple of a vector"


@NUMBA
def test_what_a_native_product_takes_along() -> None:
    native = LINEAR.load("native")
    whole = product(2, "bfloat16", norm=True, gate="silu")
    assert native.supports(whole) is None
    assert "gelu" in str(native.supports(replace(whole, gate="gelu")))
    assert "240 outputs" in str(native.supports(replace(whole, weight=SHAPE((240, 128), jnp.bfloat16))))
    assert "normed before" in str(native.supports(replace(whole, x=SHAPE((1, 2, 128), jnp.float32))))
    assert LINEAR.load("xla").supports(replace(whole, norm=False)) is not None
    assert native.supports(replace(whole, expert=True)) is None
    assert "one matrix" in str(LINEAR.load("xla").supports(replace(whole, norm=False, gate=None, expert=True)))


@NUMBA
def test_what_else_is_native_on_a_cpu() -> None:
    heads = SHAPE((2, 6, 64), jnp.float32)
    assert chosen(RMS_NORM, NormCall("cpu", SHAPE((2, 128), jnp.float32))) == "native"
    assert chosen(RMS_NORM, NormCall("cpu", SHAPE((2, 6, 128), jnp.float32))) == "xla"
    assert chosen(RMS_NORM, NormCall("cpu", SHAPE((2, 128), jnp.bfloat16))) == "xla"
    assert chosen(ROPE, RopeCall("cpu", heads, SHAPE((2, 32), jnp.float32), norm=True)) == "native"
    assert chosen(ROPE, RopeCall("cpu", heads, None, norm=False)) == "xla"
    assert chosen(ROPE, RopeCall("cpu", SHAPE((2, 6, 40), jnp.float32), SHAPE((2, 20), jnp.float32), False)) == "xla"
    for operation in (GREEDY, DRAW):
        assert chosen(operation, SamplingCall("cpu", SHAPE((2, 300), jnp.float32))) == "native"
        assert chosen(operation, SamplingCall("cpu", SHAPE((2, 300), jnp.bfloat16))) == "xla"
    write = WriteCall("cpu", 4, 2, 64, 16, jnp.dtype("bfloat16"), scaled=False)
    assert chosen(WRITE_KV, write) == "native"
    assert chosen(WRITE_KV, replace(write, kv_dtype=jnp.dtype("int8"), scaled=True)) == "xla"
    assert chosen(WRITE_KV, replace(write, head_dim=40)) == "xla"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_without_native_kernels_every_operation_is_plain(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform == "cpu":
        monkeypatch.setenv("REKINDLE_NATIVE", "0")
    logits = SamplingCall(platform, SHAPE((2, 300), jnp.float32))
    heads = RopeCall(platform, SHAPE((2, 6, 64), jnp.float32), SHAPE((2, 32), jnp.float32), norm=False)
    assert chosen(LINEAR, replace(product(2, "bfloat16"), platform=platform)) == "xla"
    assert chosen(RMS_NORM, NormCall(platform, SHAPE((2, 128), jnp.float32))) == "xla"
    assert chosen(ROPE, heads) == chosen(GREEDY, logits) == chosen(DRAW, logits) == "xla"
    assert chosen(ZEROS, MemoryCall(platform)) == "xla"
    reasons = LINEAR.reasons(replace(product(2, "bfloat16"), platform=platform))
    assert reasons.pop("xla") is None
    for name in ("pallas_gpu", "xla_tiles"):  # they are for matrices in groups
        reasons.pop(name, None)
    assert all("REKINDLE_NATIVE=0" in str(reason) for reason in reasons.values())


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("outputs", by_default([128, 80]))
@pytest.mark.parametrize("gate", by_default(["silu", None, "gelu"], 2))
@pytest.mark.parametrize("rows", by_default([2, 40]))
def test_a_product_with_norm_gate_and_residual_is_the_operations_one_by_one(
    rows: int, gate: str | None, outputs: int, implementation: str | None
) -> None:
    random = np.random.default_rng(0)
    shapes = ((rows, 64), (outputs, 64), (64,), (rows, outputs if gate is None else outputs // 2))
    x, weight, norm, residual = (jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes)

    @jax.jit
    def expected(x: jax.Array, weight: jax.Array, norm: jax.Array, residual: jax.Array) -> jax.Array:
        wide = rms_norm(x, norm, 1e-5, implementation="xla") @ weight.T
        return (wide if gate is None else gated(wide, gate)) + residual

    with jax.default_matmul_precision("highest"):
        options = LinearOptions(gate=gate, eps=1e-5)
        product = jax.jit(partial(linear, options=options, implementation=implementation))
        got = product(x, weight, norm=norm, residual=residual)
        want = expected(x, weight, norm, residual)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_inputs_are_traced_and_options_are_static() -> None:
    problem = build(CASES[0])
    assert len(jax.tree.leaves(problem.inputs)) == 6
    assert len(jax.tree.leaves(replace(problem.inputs, sinks=jnp.zeros(4)))) == 7
    run = jax.jit(paged_attention, static_argnames=("options", "implementation"))
    got = run(problem.inputs, problem.options, implementation="xla")
    np.testing.assert_allclose(got, run(problem.inputs, problem.options), rtol=0, atol=2e-5)


def test_a_step_is_fused_only_where_there_is_something_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: jax.Array) -> jax.Array:
        return x

    available = unavailable_reason() is None
    assert (fuse(step) is not step) == available
    without = frozenset({"int4", "int8-weight"})  # XLA multiplies int8 by int8 as it is
    unpacks = frozenset() if available else without
    assert traits() == Traits(
        single_rows=available, skips_padding=available, unpacks=unpacks, fast_bfloat16=cpu.has_amx()
    )
    for same in (fuse(step, platform="gpu"), fuse(step, implementation="xla")):
        assert same is step
    assert traits("xla") == Traits(single_rows=False, skips_padding=False, unpacks=without, fast_bfloat16=cpu.has_amx())
    assert traits(platform="tpu") == Traits(single_rows=False, skips_padding=False)
    monkeypatch.setenv("REKINDLE_CHAIN", "0")
    assert fuse(step) is step
    assert traits() == Traits(single_rows=available, skips_padding=False, unpacks=unpacks, fast_bfloat16=cpu.has_amx())
    assert environment() == {"native": available, "chains": False, **machine_code.identity()}


def test_the_cache_folder_is_handed_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_files, "cache_folder", None)
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "toolkit"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert kernel_files.folder() == tmp_path / "user" / "rekindle_kernels" / "native"
    configure(cache_folder=tmp_path / "mine")
    assert kernel_files.folder() == tmp_path / "mine" / "native"


def test_float32_products_are_exact_where_the_device_would_round_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, narrow = jnp.ones((4, 32)), jnp.ones((8, 32), jnp.bfloat16)

    def lowered(weight: jax.Array) -> str:
        return str(jax.jit(lambda x: linear(x, weight, implementation="xla")).lower(x).as_text())

    assert "HIGHEST" not in lowered(jnp.ones((8, 32))), "programs for CPUs change"
    monkeypatch.setattr(xla_linear, "current_platform", lambda: "gpu")
    assert "HIGHEST" in lowered(jnp.ones((8, 32)))
    assert "HIGHEST" not in lowered(narrow)
