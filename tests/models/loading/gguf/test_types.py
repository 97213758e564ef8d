"""A small model in each type: its weights and its tokens are those of the same numbers in float32."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import checkpoints, gguf_files
from helpers.plain_loop import plain_loop
from helpers.thorough import by_default
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.loading.gguf.blocks import BY_NAME
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf
from rekindle._src.models.loading.gguf.header import read_header
from rekindle.errors import CheckpointError
from rekindle_kernels import int4, unavailable_reason
from workshop import reference

pytest.importorskip("gguf", reason="the oracle: pip install gguf")
TYPES = [name for name, kind in BY_NAME.items() if not kind.plain]
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64,
    "num_attention_heads": 4,
}  # fmt: skip
RAW = checkpoints.CASES["qwen3"] | SIZES
PROMPT = [3, 9, 27, 81]
native = unavailable_reason("cpu") is None


def both(tmp_path: Path, raw: dict[str, Any], kind: str) -> tuple[Path, Path]:
    """A file in a type, and one with the same numbers in F32."""

    def types(name: str) -> str:
        return "F32" if "gate_inp" in name else kind

    files = [
        gguf_files.of_types(tmp_path / f"{name}.gguf", raw, types, unpacked=unpacked)
        for name, unpacked in (("packed", False), ("floats", True))
    ]
    return files[0], files[1]


@pytest.mark.parametrize("kind", by_default(TYPES, lambda kind: kind in ("IQ3_S", "NVFP4", "IQ1_M")))
def test_tokens_are_those_of_the_same_numbers_in_float32(kind: str, tmp_path: Path) -> None:
    packed, floats = both(tmp_path, RAW, kind)
    exact, expected = load(packed, dtype="float32"), load(floats, dtype="float32")
    checkpoints.assert_same(exact, expected)
    assert plain_loop(exact, PROMPT, 12, context=32) == plain_loop(expected, PROMPT, 12, context=32)


@pytest.mark.parametrize("kind", by_default(TYPES, lambda kind: kind in ("Q3_K", "IQ3_S", "NVFP4")))
def test_kept_types_choose_the_same_tokens_as_the_file(kind: str, tmp_path: Path) -> None:
    """Activations have eight bits in its products, so that tokens of a random model that are nearly equal may change
    places: in 24 positions of each of 25 types, 12 did, and none that leads by more than 0.09 deviations."""
    packed, floats = both(tmp_path, RAW, kind)
    kept, expected = load(packed), load(floats, dtype="float32")
    assert kept.nbytes < expected.nbytes * (0.32 if native else 0.6)
    ids = PROMPT + plain_loop(expected, PROMPT, 20, context=32)
    ours, theirs = (
        np.asarray(reference.prefill(model, ids, reference.empty_cache(model, 32))[0], np.float32)
        for model in (kept, expected)
    )
    best = np.sort(theirs, axis=-1)
    leads = best[:, -1] - best[:, -2] > 0.25 * theirs.std()
    assert leads.sum() >= 4
    np.testing.assert_array_equal(ours.argmax(-1)[leads], theirs.argmax(-1)[leads])


@pytest.mark.parametrize(
    ("case", "tensor"),
    by_default([("qwen3", "blk.0.ffn_up"), ("qwen3-moe", "blk.1.ffn_up_exps"), ("llama", "blk.1.attn_q")]),
)
def test_factors_of_nvfp4_multiply_its_numbers(case: str, tensor: str, tmp_path: Path) -> None:
    """Of a matrix, of each expert of a stack, and of rows that come in another order."""
    raw = checkpoints.CASES[case] | SIZES
    packed, floats = both(tmp_path, raw, "NVFP4")
    assert any(one.name == f"{tensor}.scale" for one in read_header(packed).tensors)
    kept, exact, expected = load(packed), load(packed, dtype="float32"), load(floats, dtype="float32")
    checkpoints.assert_same(exact, expected)
    if native:
        leaves = (dict(zip(model.graph.paths, model.leaves, strict=True)) for model in (kept, expected))
        ours, theirs = leaves
        for path in ("layers.1.attention.qkv.weight", "layers.1.mlp.down.weight"):
            scale = ours[path.replace("weight", "scale")]
            np.testing.assert_array_equal(int4.dequantized(ours[path], scale, None), theirs[path])


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed = gguf_files.of_types(tmp_path / "model.gguf", RAW, lambda name: "NVFP4")
    broken = packed.read_bytes()
    name = b"blk.0.ffn_down.scale" + struct.pack("<IQ", 1, 1)
    assert broken.count(name) == 1
    packed.write_bytes(broken.replace(name, name[:-8] + struct.pack("<Q", 2)))
    with pytest.raises(CheckpointError, match=r"ffn_down\.scale is F32 \[2\], not the F32 \[1\] that blk\.0\.ffn_down"):
        load(packed)


def test_a_file_in_parts_is_read_whatever_its_types(tmp_path: Path) -> None:
    packed, floats = both(tmp_path, RAW, "IQ3_S")
    header = read_header(packed)
    part = len(header.tensors) // 2
    folder = tmp_path / "parts"
    folder.mkdir()
    content = packed.read_bytes()
    for number, tensors in enumerate((header.tensors[:part], header.tensors[part:])):
        made = [OutgoingTensor(one.name, one.kind, one.shape) for one in tensors]
        pieces = [np.frombuffer(content, np.uint8, one.nbytes, one.offset) for one in tensors]
        metadata = dict(header.metadata) if number == 0 else {}
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(header.tensors)}
        write_gguf(folder / f"model-{number + 1:05d}-of-00002.gguf", metadata | split, made, pieces)
    found = load(folder / "model-00001-of-00002.gguf", dtype="float32")
    checkpoints.assert_same(found, load(floats, dtype="float32"))
