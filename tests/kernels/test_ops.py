"""Which implementation serves a call, and what a caller is told."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

import rekindle_kernels
from helpers.kernel_cases import CASES, build
from rekindle_kernels import (
    OPERATIONS,
    AttentionCall,
    Implementation,
    Registry,
    init_pages,
    paged_attention,
    unavailable_reason,
)
from rekindle_kernels.ops.attention import ATTENTION


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
