"""`doctor --plan` predicts the form in which each tensor type of a GGUF file is kept, and the opened model agrees."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from helpers import checkpoints, gguf_files
from rekindle._src.cli.main import main
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.loading.gguf.header import read_header
from rekindle._src.models.loading.stored_types import StoredType, stored_types
from rekindle_kernels import unavailable_reason

SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
RAW = checkpoints.CASES["qwen3"] | SIZES | {"num_attention_heads": 4}
native = pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="matrices are floats then")


def mixed(name: str) -> str:
    """Types are mixed as quantisers mix them: more bits for some matrices, and 16 for the embedding."""
    if "token_embd" in name or "output" in name.partition(".")[0]:
        return "F16"
    return {"ffn_down": "Q6_K", "attn_v": "Q8_0", "attn_output": "IQ2_XS"}.get(name.split(".")[-2], "Q4_K")


def types_of(path: Path, quantize: str | None = None) -> list[StoredType]:
    plan = checkpoints.described(path, quantize=quantize)
    return stored_types(plan.found.stored, plan.found.config, plan.graph, plan.shapes)


@native
def test_every_tensor_and_byte_of_a_file_is_counted_once(tmp_path: Path) -> None:
    path = gguf_files.of_types(tmp_path / "model.gguf", RAW, mixed)
    found, stored = types_of(path), read_header(path).tensors
    tensors, nbytes = Counter[str](), Counter[str]()
    for kind in found:
        tensors[kind.name] += kind.tensors
        nbytes[kind.name] += kind.stored_bytes
    assert tensors == Counter(tensor.kind.name for tensor in stored)
    assert nbytes == {name: sum(one.nbytes for one in stored if one.kind.name == name) for name in tensors}
    assert sum(kind.bytes for kind in found) == pytest.approx(load(path).nbytes, abs=len(found))
    assert [kind.stored_bytes for kind in found] == sorted((kind.stored_bytes for kind in found), reverse=True)


@native
def test_forms_say_what_is_exact(tmp_path: Path) -> None:
    path = gguf_files.of_types(tmp_path / "model.gguf", RAW, mixed)
    forms = {(kind.name, kind.form) for kind in types_of(path) if kind.exact}
    assert {("Q4_K", "in groups of 32 by 4 bits"), ("Q6_K", "in groups of 16 by 6 bits")} <= forms
    assert ("Q4_K", "in groups of 32 by 8 bits") in forms, "q and k, which are kept with a v in Q8_0"
    assert ("IQ2_XS", "in groups of 16 by 4 bits, indices of a table") in forms
    assert {(kind.name, kind.form) for kind in types_of(path) if not kind.exact} == {("F16", "as bfloat16")}
    eight = {kind.name: (kind.form, kind.exact) for kind in types_of(path, quantize="int8") if kind.name != "F32"}
    assert {form for form, exact in eight.values() if not exact} == {"rounded to int8"}


def test_experts_of_a_stack_are_one_tensor(tmp_path: Path) -> None:
    raw = checkpoints.CASES["qwen3-moe"] | SIZES | {"num_attention_heads": 4}
    path = gguf_files.of_types(tmp_path / "model.gguf", raw, lambda name: "F32" if "gate_inp" in name else "Q4_K")
    found, stored = types_of(path), read_header(path).tensors
    assert sum(kind.tensors for kind in found if kind.name == "Q4_K") == sum(one.kind.name == "Q4_K" for one in stored)


@pytest.mark.parametrize("device", ["here", "H100"])
def test_the_doctor_tells_it_before_opening(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf_files.of_types(tmp_path / "model.gguf", RAW, lambda name: "Q4_K" if "ffn" in name else "Q6_K")
    options = ["--plan", str(path), "--device", device, "--cache-dir", str(tmp_path / "cache"), "--json"]
    assert main(["doctor", *options]) == 0
    told = {check["title"]: check["detail"] for check in json.loads(capsys.readouterr().out)}
    floats = device == "H100" or unavailable_reason("cpu") is not None
    assert "tensors" in told["Q6_K"] and ("unpacked to bfloat16" if floats else "6 bits, exactly") in told["Q6_K"]
    if device == "H100":
        assert "4 bits, exactly" in told["Q4_K"]
    assert all("MB of memory" in told[name] for name in ("Q4_K", "Q6_K", "F32"))
