"""Files of four bits stay in four bits: what the leaves stand for is what the file stands for, to the last bit."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import checkpoints, gguf_files, quantized_checkpoints
from helpers.thorough import by_default
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading import checkpoint, prepared, reading
from rekindle._src.models.loading.checkpoint import load, read
from rekindle._src.models.loading.gguf import rows
from rekindle._src.models.nn.packing import is_packed, matrix_shape, packing_of
from rekindle._src.opening.exporting import export
from rekindle_kernels import int4, unavailable_reason
from workshop import reference

RAW = checkpoints.CASES["qwen3"] | {
    "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4
}  # fmt: skip


def leaves_of(model: LoadedModel) -> dict[str, jax.Array]:
    return dict(zip(model.graph.paths, model.leaves, strict=True))


def kinds(model: LoadedModel) -> dict[str, str]:
    """The kind of each matrix in groups, by the path of its weight."""
    found = leaves_of(model)
    names = [path for path in found if is_packed(found[path])]
    beside = {
        path: [found.get(path.removesuffix("weight") + other) for other in ("scale", "minimum")] for path in names
    }
    packings = {path: packing_of(found[path], *beside[path]) for path in names}
    return {path: packing.kind for path, packing in packings.items() if packing is not None}


KINDS = {
    "Q4_0": "int4-32", "Q4_1": "int4-32-min", "Q4_K": "int4-32-min-k",
    "Q8_0": "int8-32", "Q5_0": "int6-32", "Q5_1": "int6-32-min", "Q5_K": "int6-32-min-k", "Q6_K": "int6-16-k",
    "IQ4_NL": "iq4-32", "IQ4_XS": "iq4-32-k", "MXFP4": "fp4-32", "NVFP4": "int6-16-f32",
    "Q1_0": "int4-128", "Q2_0": "int4-64", "TQ1_0": "int4-128", "TQ2_0": "int4-128",
    "Q2_K": "int4-16-min-k", "Q3_K": "int4-16-k",
    "IQ1_S": "iq4-32-f32", "IQ1_M": "iq4-16-f32", "IQ3_XXS": "int6-32-f32", "IQ3_S": "int4-32-min-f32",
    "IQ2_XXS": "iq4-32-f32", "IQ2_XS": "iq4-16-f32", "IQ2_S": "iq4-16-f32",
}  # fmt: skip
# Of each weight in memory, as the documentation says.
BITS = {
    "Q4_0": 4.5, "Q4_1": 5, "Q4_K": 4.625, "Q8_0": 8.5, "Q5_0": 6.5, "Q5_1": 7, "Q5_K": 6.625, "Q6_K": 6.5625,
    "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.25, "NVFP4": 8, "Q1_0": 4.125, "Q2_0": 4.25, "TQ1_0": 4.125,
    "TQ2_0": 4.125, "Q2_K": 5.125, "Q3_K": 4.5625, "IQ1_S": 5, "IQ1_M": 6, "IQ3_XXS": 7, "IQ3_S": 6, "IQ2_XXS": 5,
    "IQ2_XS": 6, "IQ2_S": 6,
}  # fmt: skip
dequantized = jax.jit(int4.dequantized)
native = unavailable_reason("cpu") is None  # groups of six and eight bits have native kernels only
needs_numba = pytest.mark.skipif(not native, reason="groups of more bits are kept where native kernels are")


@pytest.mark.parametrize(("kind", "expected"), by_default(KINDS.items(), lambda case: case[0] in ("Q4_0", "Q6_K")))
@pytest.mark.parametrize("case", by_default(["qwen3", "llama", "qwen3-moe"]))
def test_blocks_of_gguf_are_kept(
    case: str, kind: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case != "qwen3" and kind not in ("Q4_0", "Q4_1", "Q4_K", "Q8_0"):
        pytest.skip("one family will do")
    if not expected.startswith("int4") and not native:
        pytest.skip("groups of more bits are kept where native kernels are")
    monkeypatch.setattr(reading, "UNPACKED", 4 * 256 * 24)
    raw = checkpoints.CASES[case] | {
        "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64,
        "num_attention_heads": 4,
    }  # fmt: skip
    file = gguf_files.of_types(tmp_path / "model.gguf", raw, lambda name: "F32" if "gate_inp" in name else kind)
    kept, floats = load(file), load(file, dtype="float32")
    assert set(kinds(kept).values()) == {expected}
    assert "embed.weight" in kinds(kept) and "layers.1.mlp.down.weight" in kinds(kept)
    stored = leaves_of(kept)
    for path in kinds(kept):
        beside = [stored.get(path.removesuffix("weight") + other) for other in ("weight", "scale", "minimum")]
        bits = 8 * sum(leaf.nbytes for leaf in beside if leaf is not None)
        assert bits == BITS[kind] * np.prod(matrix_shape(stored[path])), path
    assert not kinds(floats)
    assert kept.fingerprint != floats.fingerprint
    assert_close(kept, floats)


def assert_close(kept: LoadedModel, floats: LoadedModel) -> None:
    """Equal but for the one rounding where a minimum is added, which compilers may leave out."""
    ours = leaves_of(kept)
    for path, expected in leaves_of(floats).items():
        found = ours[path]
        if not is_packed(found):
            continue
        base = path.removesuffix("weight")
        minimum = ours.get(f"{base}minimum")
        values = np.asarray(dequantized(found, ours[f"{base}scale"], minimum))
        wide = np.asarray(expected)
        tolerance = 0.0 if minimum is None else 2e-7 * float(np.abs(wide).max())
        np.testing.assert_allclose(values, wide, rtol=0, atol=tolerance, err_msg=path)


def numbers(scales: np.ndarray) -> np.ndarray:
    if scales.dtype.name == int4.EXPONENTS:
        exponents: np.ndarray = int4.exponent_numbers(scales)
        return exponents
    return int4.stepped_numbers(scales) if scales.dtype == np.int8 else scales.astype(np.float32)


def test_integers_and_scales_are_those_of_the_file_to_the_last_bit(tmp_path: Path) -> None:
    """For the K types too, where a float32 product is compared with the file's own."""
    from rekindle._src.models.loading.gguf.blocks import dequantize
    from rekindle._src.models.loading.gguf.header import read_header
    from rekindle._src.models.loading.gguf.rows import PACKINGS, GgufRows

    for kind, packing in PACKINGS.items():
        file = gguf_files.of_types(tmp_path / f"{kind}.gguf", RAW, lambda name, kind=kind: kind)
        tensor = next(one for one in read_header(file).tensors if one.name == "blk.0.ffn_up.weight")
        rows = GgufRows(file, tensor.name, tensor.kind, tensor.shape, tensor.offset)
        found = rows.integers(3, 40)
        scales = np.repeat(numbers(found.scales), packing.group, axis=1)
        if packing.codes:
            levels = np.array(int4.CODEBOOKS[packing.scales], np.float32)[found.integers]
        else:
            levels = found.integers - np.float32(8 if packing.bits == 4 and not packing.minimum else 0)
        values = scales * levels
        if found.minimums is not None:
            values = values + np.repeat(numbers(found.minimums), packing.group, axis=1)
        assert (found.minimums is not None) == packing.minimum
        expected = dequantize(tensor.kind, rows.blocks(3, 40).reshape(-1)).reshape(37, -1)
        np.testing.assert_array_equal(values, expected)


@needs_numba
@pytest.mark.parametrize("kind", by_default(["MXFP4", "IQ4_NL", "IQ4_XS"]))
def test_codebooks_hold_what_the_gguf_package_reads_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    raw = checkpoints.CASES["qwen3-moe"] | {
        "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64,
        "num_attention_heads": 4,
    }  # fmt: skip
    file = gguf_files.of_types(tmp_path / "model.gguf", raw, lambda name: "F32" if "gate_inp" in name else kind)
    stored = leaves_of(load(file))
    read = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(file).tensors}
    for path, name in (("embed", "token_embd"), ("layers.1.mlp.down", "blk.1.ffn_down_exps")):
        weight, scale = (stored[f"{path}.{part}"] for part in ("weight", "scale"))
        assert weight.dtype == int4.CODES
        np.testing.assert_array_equal(dequantized(weight, scale, None), read[f"{name}.weight"])


@needs_numba
def test_a_mixture_of_types_is_kept(tmp_path: Path) -> None:
    """A file like Q4_K_M: v and down in Q6_K in some layers; q, k and v together then have six bits."""

    def types(name: str) -> str:
        return "Q6_K" if name in ("blk.0.attn_v.weight", "blk.0.ffn_down.weight", "token_embd.weight") else "Q4_K"

    file = gguf_files.of_types(tmp_path / "model.gguf", RAW, types)
    kept, floats = load(file), load(file, dtype="float32")
    found = kinds(kept)
    expected = {"0.attention.qkv": "int6-16-min-k", "1.attention.qkv": "int4-32-min-k"}
    expected |= {"0.mlp.down": "int6-16-k", "0.mlp.gate_up": "int4-32-min-k"}
    assert {path: found[f"layers.{path}.weight"] for path in expected} == expected
    assert found["embed.weight"] == "int6-16-k"
    assert_close(kept, floats)


def test_a_mixture_of_types_keeps_what_can_be_kept(tmp_path: Path) -> None:
    """v and down in floats in some layers, so that q, k and v are floats there."""

    def types(name: str) -> str:
        return "F16" if name in ("blk.0.attn_v.weight", "blk.0.ffn_down.weight", "token_embd.weight") else "Q4_K"

    file = gguf_files.of_types(tmp_path / "model.gguf", RAW, types)
    kept, floats = load(file), load(file, dtype="float32")
    found = kinds(kept)
    assert "layers.0.attention.qkv.weight" not in found and "layers.1.attention.qkv.weight" in found
    assert "layers.0.mlp.down.weight" not in found and "layers.0.mlp.gate_up.weight" in found
    assert "embed.weight" not in found
    assert_close(kept, floats)
    plain = leaves_of(kept)["layers.0.attention.qkv.weight"]
    np.testing.assert_array_equal(plain, leaves_of(floats)["layers.0.attention.qkv.weight"].astype(plain.dtype))


@needs_numba
def test_a_model_for_several_devices_can_be_divided_after_every_group(tmp_path: Path) -> None:
    types = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "ffn_up": "IQ4_XS"}
    file = gguf_files.of_types(
        tmp_path / "model.gguf", RAW, lambda name: types.get(name.split(".")[-2], "Q4_K" if "blk" in name else "Q6_K")
    )
    whole, divided = (read(checkpoints.described(file, divided=divided)) for divided in (False, True))
    assert {kind.removesuffix("-k") for kind in kinds(whole).values()} == {
        kind.removesuffix("-f32") for kind in kinds(divided).values()
    }
    assert all(kind.endswith("-k") for kind in kinds(whole).values())
    assert all(kind.endswith("-f32") for kind in kinds(divided).values())
    assert whole.fingerprint == divided.fingerprint and whole.nbytes < divided.nbytes
    ours, theirs = leaves_of(whole), leaves_of(divided)
    for path in kinds(whole):
        base = path.removesuffix("weight")
        values = [
            np.asarray(dequantized(one[path], one[f"{base}scale"], one.get(f"{base}minimum"))) for one in (ours, theirs)
        ]
        np.testing.assert_array_equal(*values, err_msg=path)


@pytest.mark.thorough
@needs_numba
@pytest.mark.parametrize(
    ("q", "others", "expected"),
    [
        ("Q4_0", "Q8_0", "int8-32"), ("Q6_K", "Q8_0", "int8-16-f32"), ("Q4_0", "Q5_0", "int6-32"),
        ("Q4_0", "Q5_1", "int6-32-min"), ("Q5_0", "Q4_1", "int6-32-min"), ("Q6_K", "IQ4_XS", "int8-16-k"),
        ("IQ4_NL", "IQ4_XS", "int8-32-f32"), ("MXFP4", "Q4_0", "int6-32-f32"), ("IQ4_NL", "Q4_0", "int8-32"),
    ],
)  # fmt: skip
def test_what_is_joined_may_have_different_bits(q: str, others: str, expected: str, tmp_path: Path) -> None:
    file = gguf_files.of_types(tmp_path / "model.gguf", RAW, lambda name: q if "attn_q." in name else others)
    kept, floats = load(file), load(file, dtype="float32")
    assert kinds(kept)["layers.0.attention.qkv.weight"] == expected
    assert_close(kept, floats)


def test_a_gpu_keeps_four_bits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf_files.of_types(tmp_path / "model.gguf", RAW, lambda name: "Q4_0" if "down" in name else "Q8_0")
    monkeypatch.setattr(checkpoint, "on_cpu", lambda: False)
    assert set(kinds(load(file)).values()) == {"int4-32"}


@needs_numba
def test_a_model_says_what_its_weights_are_held_as(tmp_path: Path) -> None:
    """Scales count as what they scale."""
    file = gguf_files.of_types(tmp_path / "model.gguf", RAW, lambda name: "Q4_0" if "down" in name else "Q8_0")
    found = load(file)
    assert found.held.startswith("8 bits ")
    assert "4 bits 1 MB" in found.held and "float16" not in found.held


def test_what_is_joined_is_held_by_one_kind(tmp_path: Path) -> None:
    """q without minimums, k and v with them: the common kind has minimums of 32 bits, which hold both exactly."""
    file = gguf_files.of_types(tmp_path / "model.gguf", RAW, lambda name: "Q4_0" if "attn_q." in name else "Q4_1")
    kept, floats = load(file), load(file, dtype="float32")
    assert kinds(kept)["layers.0.attention.qkv.weight"] == "int4-32-min-f32"
    assert_close(kept, floats)


@pytest.mark.parametrize(
    ("kind", "expected"),
    by_default([
        ("AWQ", "int4-32-min-f32"), ("GPTQ", "int4-32-min-f32"), ("packed", "int4-32-f32"),
        ("AWQ without zeros", "int4-32"), ("packed with zeros", "int4-32-min-f32"),
        ("packed by channel", "int4-64-f32"),
        ("GPTQ, ordered by activations", None), ("GPTQ in 8 bits", None), ("fp8 in blocks", None),
        pytest.param("MXFP4", "fp4-32", marks=needs_numba),
        pytest.param("NVFP4", "int6-16-f32", marks=needs_numba),
    ], 3),
)  # fmt: skip
def test_other_formats_are_kept_where_they_can_be(kind: str, expected: str | None, tmp_path: Path) -> None:
    quantized_checkpoints.write(tmp_path, kind)
    kept, floats = load(tmp_path), load(tmp_path, dtype="float32")
    found = kinds(kept)
    assert found.get("layers.1.attention.qkv.weight") == expected
    assert "layers.0.mlp.gate_up.weight" not in found, "a half of it is left out by the config"
    assert_close(kept, floats)


@pytest.mark.parametrize("eight", by_default([pytest.param(True, marks=needs_numba), False]))
def test_logits_are_close_to_those_of_the_floats(eight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations have eight bits in products with four, on a CPU, so they are not the same; and in that with the head
    where it stays in eight bits. Of five seeds the largest difference of 1,280 logits was 0.07 to 0.10 deviations, and
    the mean square's root 0.018 to 0.024; bfloat16 differs by 0.03 to 0.07."""
    monkeypatch.setattr(checkpoint, "on_cpu", lambda: eight)
    raw = checkpoints.CASES["qwen3"] | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    file = export(checkpoints.write(tmp_path / "folder", raw), tmp_path / "model.gguf", type="q4_0")
    kept, floats = load(file), load(file, dtype="float32")
    assert ("embed.weight" in kinds(kept)) == eight and kinds(kept)
    prompt = [3, 9, 27, 81, 11, 33, 99, 5]
    room = [reference.empty_cache(model, 16) for model in (kept, floats)]
    ours, theirs = (
        np.asarray(reference.prefill(model, prompt, cache)[0], np.float32)
        for model, cache in zip((kept, floats), room, strict=True)
    )
    assert np.abs(ours - theirs).max() < (0.11 if eight else 0.1) * theirs.std()
    assert np.sqrt(np.square(ours - theirs).mean()) < 0.027 * theirs.std()


@needs_numba
@pytest.mark.slow
def test_logits_of_six_bits_are_those_of_eight_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So every token is the one that it was when these types were kept in eight bits."""
    types = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q5_K"}
    file = gguf_files.of_types(
        tmp_path / "model.gguf", RAW, lambda name: types.get(name.split(".")[-2], "Q4_K" if "blk" in name else "Q6_K")
    )
    six = load(file)
    monkeypatch.setattr(
        rows,
        "PACKINGS",
        {kind: one._replace(bits=8 if one.bits == 6 else one.bits) for kind, one in rows.PACKINGS.items()},
    )
    eight = load(file)
    ours, theirs = (set(kinds(model).values()) for model in (six, eight))
    assert theirs == {kind.replace("int6", "int8") for kind in ours} != ours
    room = [reference.empty_cache(model, 16) for model in (six, eight)]
    logits = (
        reference.prefill(model, [3, 9, 27, 81, 11], cache)[0] for model, cache in zip((six, eight), room, strict=True)
    )
    np.testing.assert_array_equal(*map(np.asarray, logits))


def test_the_next_start_takes_them_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    monkeypatch.setattr(prepared, "DELAY", 0.0)
    file = gguf_files.of_types(tmp_path / "model.gguf", RAW, lambda name: "Q4_0" if "down" in name else "Q5_1")
    made = load(file, cache_dir=tmp_path / "cache")
    assert prepared.wait(60)
    described = checkpoints.described(file, cache_dir=tmp_path / "cache")
    assert described.reads is None, "it is not planned what to read from the checkpoint"
    monkeypatch.setattr(reading, "read_leaves", None)
    again = load(file, cache_dir=tmp_path / "cache")
    assert again.fingerprint == made.fingerprint and kinds(again) == kinds(made) != {}
    checkpoints.assert_same(again, made)
    floats = checkpoints.described(file, dtype="bfloat16", cache_dir=tmp_path / "cache")
    assert floats.slot != described.slot and floats.reads is not None
