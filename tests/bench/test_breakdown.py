"""What a step's time is made of: named parts that add up. No timing is asserted."""

from __future__ import annotations

import json
from typing import Any

import anyio
import jax
import pytest

from rekindle._src.bench.shapes import random_shape
from rekindle._src.bench.workloads import RandomPrompts
from rekindle_kernels.native import kernel_table
from workshop import breakdown
from workshop.breakdown import PARTS, Interval

PROGRAM = """HloModule jit_counted, is_scheduled=true

%fused_computation.1 (a: f32[2,4], b: f32[8,4]) -> f32[2,8] {
  %a = f32[2,4]{1,0} parameter(0)
  ROOT %dot.1 = f32[2,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, metadata={op_name="jit(counted)/mlp/dot_general"}
}

%loop (state: (s32[], f32[2])) -> (s32[], f32[2]) {
  ROOT %tuple.9 = (s32[], f32[2]{0}) tuple(%x, %y), metadata={op_name="jit(counted)/attention/attend/while/body/add"}
}

ENTRY %main.7 (args_0: f32[2,4]) -> (f32[2]) {
  %rows = f32[2,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused_computation.1
  %call.1 = f32[2]{0} custom-call(%a), custom_call_target="rekindle_matvec_int8", metadata={op_name="jit/mlp/ffi_call"}
  %call.2 = f32[2]{0} custom-call(%a), custom_call_target="rekindle_gemm", metadata={op_name="jit/logits/ffi_call"}
  %call.3 = f32[2]{0} custom-call(%a), custom_call_target="rekindle_decode_int8_64", metadata={op_name="jit/attend/x"}
  %call.4 = f32[2]{0} custom-call(%a), custom_call_target="rekindle_write_bfloat16", metadata={op_name="jit/attend/x"}
  %call.5 = f32[2]{0} custom-call(%a), custom_call_target="rekindle_norm", metadata={op_name="jit/attention/ffi_call"}
  %while.1 = (s32[], f32[2]{0}) while(%tuple), condition=%until, body=%loop
  %scatter.1 = f32[2]{0} fusion(%a), calls=%other, metadata={op_name="jit(counted)/attention/attend/write_kv/scatter"}
  %dot.2 = f32[2]{0} dot(%a, %b), metadata={op_name="jit(counted)/prompt_logprobs/cond/logits/dot_general"}
  %copy.1 = f32[2]{0} copy(%a)
  ROOT %tuple.1 = (f32[2]{0}) tuple(%dot.2), metadata={op_name="jit(counted)/sample/cond/select_n"}
}
"""


def test_an_instruction_is_what_it_calls_or_where_it_was_written() -> None:
    found = breakdown.parts_of(PROGRAM)
    expected = {
        "rows": "products", "dot.1": "products", "call.1": "products", "call.2": "logits", "call.3": "attention",
        "call.4": "pages", "call.5": "norms", "while.1": "attention", "scatter.1": "pages", "dot.2": "logits",
        "copy.1": "small", "tuple.1": "sampling",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert set(breakdown.KERNELS) >= set(kernel_table.KERNELS), "a step that calls it has no breakdown"
    assert set(breakdown.KERNELS.values()) | set(breakdown.SCOPES.values()) <= set(PARTS)


def test_a_moment_counts_once() -> None:
    parts = {"loop": "attention", "body": "sampling", "side": "products"}
    run = [Interval(10, 50, "loop"), Interval(15, 25, "body"), Interval(20, 60, "side"), Interval(70, 75, "unknown")]
    times = breakdown.own_times(run, parts)
    assert times == dict.fromkeys(PARTS, 0.0) | {
        "attention": 5, "sampling": 5, "products": 40, "between": 10, "small": 5,
    }  # fmt: skip
    assert sum(times.values()) == 75 - 10


def test_the_middle_half_is_taken_by_the_whole_step() -> None:
    steps = [{"a": 1.0, "b": float(b)} for b in (5, 1, 2, 100)]
    assert breakdown.middle(steps) == {"a": 1.0, "b": 3.5}
    assert breakdown.middle(steps[:1]) == steps[0]


async def _few(session: Any, prompts: RandomPrompts) -> None:
    """Steps of every kind: prompts that are longer than a step, one of which arrives while another is decoded."""
    await session.cache.clear(tier="memory")
    await session.generate([prompts(70), prompts(150)], max_tokens=4, ignore_eos=True)


def _measured(name: str, dtype: str, **options: Any) -> breakdown.Breakdown | None:
    sizes = {"max_requests": 2, "max_tokens_per_step": 32, "max_model_len": 256, **options}
    return anyio.run(breakdown.measure, random_shape("micro", dtype=dtype), name, 500, sizes, _few)


@pytest.mark.thorough
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads XLA:CPU's events")
@pytest.mark.parametrize(
    ("name", "dtype", "native"),
    [
        ("W1", "bfloat16", True),
        pytest.param("W2", "bfloat16", True, marks=pytest.mark.slow),
        pytest.param("W3", "float32", False, marks=pytest.mark.slow),
    ],
)
def test_the_parts_of_a_step_add_up(name: str, dtype: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setenv("REKINDLE_NATIVE", "0")
    found = _measured(name, dtype)
    assert found is not None and found.steps > 0
    assert (found.rows > 0, found.tokens > 0) == (name != "W2", name != "W1")
    assert list(found.parts_ms) == list(PARTS)
    assert all(ms >= 0 for ms in found.parts_ms.values())
    assert sum(found.parts_ms.values()) == pytest.approx(found.step_ms)
    assert found.untraced_ms > 0
    assert all(found.parts_ms[part] > 0 for part in ("products", "attention", "pages", "logits", "sampling", "small"))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads XLA:CPU's events")
def test_there_may_be_no_such_step() -> None:
    assert _measured("W3", "bfloat16", max_requests=1) is None


def test_the_report_prints_a_column_per_workload(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = breakdown.Breakdown(
        "r1t0", 1.0, 0.0, 9, 10.0, 9.5, dict.fromkeys(PARTS, 0.0) | {"products": 8.0, "idle": 2.0}
    )

    async def measured(model: Any, name: str, *given: object) -> breakdown.Breakdown | None:
        return one if name == "W1" else None

    monkeypatch.setattr(breakdown, "measure", measured)
    assert breakdown.main(["--model", "micro", "--workloads", "W1", "W3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["W3"] is None and list(report) == ["W1", "W3"]
    assert sum(report["W1"]["parts_ms"].values()) == report["W1"]["step_ms"]
    assert breakdown.main(["--model", "micro"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["products", "8.000", "ms", "80.0%"] for line in lines)
    assert any("W3" in line and "no such step" in line for line in lines)


def test_what_has_no_breakdown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        breakdown.main(["--workloads", "W4"])
    assert "'W4' is not known" in capsys.readouterr().err
