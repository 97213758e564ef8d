"""The tables of the native kernels: names, settings, and which kernels a stored program calls."""

from __future__ import annotations

import pytest

from helpers.kernel_state import begin_with
from rekindle_kernels.int4_format import STORED
from rekindle_kernels.native import build, chain_plan, kernel_table, python_handlers
from rekindle_kernels.native.kernel_table import GROUPED, KERNELS, MATVEC, PREFILL, identify
from rekindle_kernels.native.products import DTYPES

VARIANTS = [
    spec.variant(*({"dtype": dtype, "head_dim": size}[parameter] for parameter in spec.parameters))
    for spec in KERNELS.values() for dtype in DTYPES for size in (16, 64, 80, 128, 256)
]  # fmt: skip
VARIANTS += [GROUPED[weight].variant(scale) for weight, scales in STORED.items() for scale in scales]


def test_a_name_tells_the_kernel() -> None:
    for variant in VARIANTS:
        assert identify(variant.name) == variant
    assert identify("matvec_bfloat16") == MATVEC.variant("bfloat16")
    assert identify(chain_plan.CHAIN) is None and identify(python_handlers.ZEROS) is None


def test_no_two_kernels_have_one_entry() -> None:
    names = {variant.name for variant in VARIANTS} | {chain_plan.CHAIN, python_handlers.ZEROS}
    assert len({chain_plan.slot(name) for name in names}) == len(names)


def test_settings_are_read_as_they_were_packed() -> None:
    values = {
        "decode_rows": 3,
        "window": 7,
        "scale": 0.5,
        "soft_cap": 0,
        "queries": 16,
        "together": 1,
        "amx": 1,
        "ahead": 9,
    }
    packed = PREFILL.pack_settings(PREFILL.present_bit("sinks") | PREFILL.present_bit("decoded"), values)
    assert packed[PREFILL.setting_index("decode_rows")] == 3 and packed[PREFILL.setting_index("queries")] == 16
    assert packed.view("float32")[PREFILL.setting_index("scale")] == 0.5
    assert packed[PREFILL.setting_index("present")] == 0b110, "of scales, sinks and decoded"
    with pytest.raises(AssertionError, match="has present, decode_rows"):
        PREFILL.pack_settings(0, {"window": 7})


def test_an_operand_behind_the_settings_changes_no_call_without_it() -> None:
    assert MATVEC.index("settings") == 6 and MATVEC.index("expert") == 7
    assert MATVEC.present_bit("expert") == max(map(MATVEC.present_bit, MATVEC.optional)), "other bits stay as they are"
    for spec in KERNELS.values():
        behind = [operand.behind for operand in spec.operands]
        assert behind == sorted(behind) and all(each.optional for each in spec.operands if each.behind), spec.kind


def test_a_program_calls_the_kernels_that_it_names_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = {"decode_bfloat16_6", "decode_bfloat16_64", "decode_bfloat16_640", "norm", "chain"}
    begin_with(monkeypatch, ready=ready)
    program = b'\x1arekindle_decode_bfloat16_64\x00..kernels = "rekindle_norm rekindle_decode_bfloat16_6"'
    assert build.called_by(program) == ["decode_bfloat16_6", "decode_bfloat16_64", "norm"]
    assert build.called_by(b"rekindle_chainx") == ["chain"], "a name may run into what follows it"
    assert build.called_by(b"rekindle_matvec_int8") == []


def test_the_arrays_of_a_kernel_have_different_names() -> None:
    for spec in KERNELS.values():
        names = [array.name for array in (*spec.operands, *spec.results)]
        assert len(set(names)) == len(names), spec.kind
        assert all(result.into is None or spec.has(result.into) for result in spec.results)
    common = kernel_table.KERNELS["gemm"].operands[: len(MATVEC.operands)]
    assert common == MATVEC.operands, "chains and callers treat both alike"
