"""Checkpoints that are quantised already, in every way that is read, and what each stands for by its plain formula."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from helpers import checkpoints

RAW = checkpoints.CASES["llama"] | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
GROUP = 32
Made = tuple[dict[str, NDArray[Any]], NDArray[np.float32]]  # tensors by the end of their names, and what they stand for
Random = np.random.Generator


def pack(integers: NDArray[Any], bits: int, order: list[int] | None = None) -> NDArray[np.int32]:
    """Integers [..., n] as words of 32 bits, one after the other from the lowest bits on."""
    each = 32 // bits
    words = np.zeros((*integers.shape[:-1], integers.shape[-1] // each), np.uint32)
    for place in range(each):
        which = place if order is None else order[place]
        words |= integers[..., which::each].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def spread(values: NDArray[Any], group: int) -> NDArray[Any]:
    """A number of each group for each of its inputs (the last axis)."""
    return np.repeat(values, group, axis=-1)


def scales_of(rng: Random, *shape: int) -> NDArray[np.float16]:
    return (rng.random(shape) * 0.05 + 0.01).astype(np.float16)


def awq(rng: Random, outputs: int, inputs: int, *, zeros: bool = True) -> Made:
    q, scale = rng.integers(0, 16, (outputs, inputs)), scales_of(rng, outputs, inputs // GROUP)
    zero = rng.integers(0, 16, scale.shape) if zeros else np.full(scale.shape, 8)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs lies at each place of a word
    parts = {"qweight": pack(q.T, 4, order), "scales": scale.T.copy()}
    if zeros:
        parts["qzeros"] = pack(zero.T, 4, order)
    return parts, ((q - spread(zero, GROUP)) * spread(scale.astype(np.float64), GROUP)).astype(np.float32)


def gptq(rng: Random, outputs: int, inputs: int, *, bits: int = 4, offset: int = 1, act_order: bool = False) -> Made:
    q, scale = rng.integers(0, 1 << bits, (outputs, inputs)), scales_of(rng, outputs, inputs // GROUP)
    zero = rng.integers(1, 1 << bits, scale.shape)
    groups = np.arange(inputs) // GROUP
    if act_order:
        rng.shuffle(groups)
    parts = {
        "qweight": pack(q, bits).T.copy(), "qzeros": pack((zero - offset).T, bits), "scales": scale.T.copy(),
        "g_idx": groups.astype(np.int32),
    }  # fmt: skip
    return parts, ((q - zero[:, groups]) * scale.astype(np.float64)[:, groups]).astype(np.float32)


def packed(rng: Random, outputs: int, inputs: int, *, bits: int = 4, zeros: bool = False, group: int = GROUP) -> Made:
    q, scale = rng.integers(0, 1 << bits, (outputs, inputs)), scales_of(rng, outputs, inputs // group)
    zero = rng.integers(0, 1 << bits, scale.shape) if zeros else np.full(scale.shape, 1 << (bits - 1))
    parts = {
        "weight_packed": pack(q, bits), "weight_scale": scale.astype(ml_dtypes.bfloat16),
        "weight_shape": np.array([outputs, inputs]),
    }  # fmt: skip
    if zeros:
        parts["weight_zero_point"] = pack(zero.T, bits).T.copy()
    wide = parts["weight_scale"].astype(np.float64)
    return parts, ((q - spread(zero, group)) * spread(wide, group)).astype(np.float32)


def small(rng: Random, outputs: int, inputs: int, *, dtype: Any, scale_shape: tuple[int, ...], name: str) -> Made:
    weight = (rng.standard_normal((outputs, inputs)) * 20).astype(dtype)
    scale = (rng.random(scale_shape) * 0.01 + 0.001).astype(np.float32)
    return {"weight": weight, name: scale}, weight.astype(np.float32) * scale


def fp8_blocks(rng: Random, outputs: int, inputs: int) -> Made:
    weight = (rng.standard_normal((outputs, inputs)) * 20).astype(ml_dtypes.float8_e4m3fn)
    scale = (rng.random((-(-outputs // 48), -(-inputs // 40))) * 0.01).astype(np.float32)
    wide = np.repeat(np.repeat(scale, 48, axis=0)[:outputs], 40, axis=1)[:, :inputs]
    return {"weight": weight, "weight_scale_inv": scale}, weight.astype(np.float32) * wide


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def four_bit_floats(rng: Random, outputs: int, inputs: int, *, nvidia: bool) -> Made:
    q = rng.integers(0, 16, (outputs, inputs))
    values = np.array(E2M1)[q]
    parts: dict[str, NDArray[Any]] = {"weight_packed": (q[:, 0::2] | (q[:, 1::2] << 4)).astype(np.uint8)}
    if nvidia:
        scale = (rng.random((outputs, inputs // 16)) * 300).astype(ml_dtypes.float8_e4m3fn)
        whole = np.array([700.0], np.float32)
        parts |= {"weight_scale": scale, "weight_global_scale": whole}
        wide = spread((scale.astype(np.float32) / whole).astype(np.float32), 16)
    else:
        exponents = rng.integers(110, 130, (outputs, inputs // 32)).astype(np.uint8)
        parts["weight_scale"] = exponents
        wide = spread(2.0 ** (exponents.astype(np.float64) - 127), 32)
    return parts, (values.astype(np.float32) * wide.astype(np.float32)).astype(np.float32)


def modelopt_floats(rng: Random, outputs: int, inputs: int) -> Made:
    q = rng.integers(0, 16, (outputs, inputs))
    scale = (rng.random((outputs, inputs // 16)) * 300).astype(ml_dtypes.float8_e4m3fn)
    whole = np.float32(0.0003)
    wide = spread((scale.astype(np.float32) * whole).astype(np.float32), 16)
    parts = {
        "weight": (q[:, 0::2] | (q[:, 1::2] << 4)).astype(np.uint8), "weight_scale": scale, "weight_scale_2": whole,
    }  # fmt: skip
    return {name: np.asarray(part) for name, part in parts.items()}, np.array(E2M1, np.float32)[q] * wide


def group_config(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


FP8, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
KINDS: dict[str, tuple[dict[str, Any], Callable[[Random, int, int], Made]]] = {
    "AWQ": (AWQ, awq),
    "AWQ without zeros": (AWQ | {"zero_point": False}, lambda r, o, i: awq(r, o, i, zeros=False)),
    "GPTQ": (GPTQ, gptq),
    "GPTQ in 8 bits": (GPTQ | {"bits": 8}, lambda r, o, i: gptq(r, o, i, bits=8)),
    "GPTQ in 2 bits": (GPTQ | {"bits": 2}, lambda r, o, i: gptq(r, o, i, bits=2)),
    "GPTQ, second form": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda r, o, i: gptq(r, o, i, offset=0)),
    "GPTQ, ordered by activations": (GPTQ | {"desc_act": True}, lambda r, o, i: gptq(r, o, i, act_order=True)),
    "packed": (group_config("pack-quantized", **INT4), packed),
    "packed with zeros": (
        group_config("pack-quantized", **INT4 | {"symmetric": False}), lambda r, o, i: packed(r, o, i, zeros=True)
    ),
    "packed in 8 bits": (
        group_config("pack-quantized", **INT4 | {"num_bits": 8}), lambda r, o, i: packed(r, o, i, bits=8)
    ),
    "packed by channel": (
        group_config("pack-quantized", num_bits=4, type="int", strategy="channel"),
        lambda r, o, i: packed(r, o, i, group=i),
    ),
    "int8 by channel": (
        group_config("int-quantized", num_bits=8, type="int", strategy="channel"),
        lambda r, o, i: small(r, o, i, dtype=np.int8, scale_shape=(o, 1), name="weight_scale"),
    ),
    "fp8 by channel": (
        group_config("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda r, o, i: small(r, o, i, dtype=FP8, scale_shape=(o, 1), name="weight_scale"),
    ),
    "fp8 of the tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda r, o, i: small(r, o, i, dtype=FP8, scale_shape=(), name="weight_scale"),
    ),
    "fp8 (e5m2) of the tensor": (
        {"quant_method": "fp8", "fmt": "e5m2"},
        lambda r, o, i: small(r, o, i, dtype=E5M2, scale_shape=(1,), name="weight_scale"),
    ),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8_blocks),
    "fp8 of FBGEMM": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        lambda r, o, i: small(r, o, i, dtype=FP8, scale_shape=(o, 1), name="weight_scale"),
    ),
    "fp8 of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        lambda r, o, i: small(r, o, i, dtype=FP8, scale_shape=(), name="weight_scale"),
    ),
    "NVFP4 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, modelopt_floats),
    "MXFP4": (group_config("mxfp4-pack-quantized", num_bits=4), lambda r, o, i: four_bit_floats(r, o, i, nvidia=False)),
    "NVFP4": (group_config("nvfp4-pack-quantized", num_bits=4), lambda r, o, i: four_bit_floats(r, o, i, nvidia=True)),
}  # fmt: skip


def write(folder: Path, kind: str, raw: dict[str, Any] = RAW) -> dict[str, NDArray[np.float32]]:
    """Write a checkpoint of a kind with quantised layers; embedding, norms and head are not. Returns its values."""
    config, make = KINDS[kind]
    rng = np.random.default_rng(list(KINDS).index(kind))
    state = checkpoints.tensors(raw)
    stored: dict[str, NDArray[Any]] = {}
    for name, values in list(state.items()):
        if not name.endswith("_proj.weight") or "layers.0.mlp.up" in name:  # one layer is left out, too
            stored[name] = values
            continue
        parts, state[name] = make(rng, *values.shape)
        base = name.removesuffix(".weight")
        stored |= {f"{base}.{end}": np.ascontiguousarray(part) for end, part in parts.items()}
        stored[f"{base}.input_scale"] = np.ones(1, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config, "torch_dtype": "bfloat16"}))
    return state


# Experts of gpt-oss, whose matrices are in MXFP4.

MXFP4_RAW = checkpoints.CASES["gpt-oss"] | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "num_local_experts": 3,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}  # fmt: skip


def four_bits(rng: np.random.Generator, *shape: int) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """Blocks and scales of matrices [experts, outputs, inputs], and the numbers that they stand for."""
    experts, outputs, inputs = shape
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    scales = rng.integers(118, 125, blocks.shape[:3], np.uint8)
    levels = np.array(E2M1, np.float32)[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*blocks.shape[:3], 32)
    values = levels * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return {"_blocks": blocks, "_scales": scales}, values.reshape(shape)


def write_mxfp4(
    folder: Path, change: Mapping[str, Any] | None = None, raw: Mapping[str, Any] = MXFP4_RAW
) -> dict[str, NDArray[Any]]:
    """A folder in MXFP4; returns the state that it stands for, with single experts."""
    state: dict[str, NDArray[Any]] = dict(checkpoints.tensors(raw))
    stored = {name: value for name, value in checkpoints.fused(raw, state).items() if "proj" not in name.split(".")[-1]
              or name.endswith("_bias")}  # fmt: skip
    rng = np.random.default_rng(1)
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            parts, values = four_bits(rng, 3, outputs, inputs)
            stored |= {f"{prefix}.{name}{end}": part for end, part in parts.items()}
            for number, matrix in enumerate(values):
                if name == "down_proj":
                    state[f"{prefix}.{number}.down_proj.weight"] = matrix
                else:
                    state[f"{prefix}.{number}.gate_proj.weight"] = matrix[0::2]
                    state[f"{prefix}.{number}.up_proj.weight"] = matrix[1::2]
    save_file({name: np.ascontiguousarray(value) for name, value in (stored | dict(change or {})).items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return state
