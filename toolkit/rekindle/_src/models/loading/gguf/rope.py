"""The rope of a GGUF file: its metadata, and the tensors that stretch its frequencies, as config.json has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle._src.models.loading.gguf.header import GgufHeader, GgufTensor
from rekindle.errors import CheckpointError, UnsupportedModel

_LLAMA3_LENGTH = 8192  # the pre-training length of all published models with Llama 3's rope
_MOST = 1 << 14  # frequencies


def rope_fields(
    header: GgufHeader, prefix: str, tensors: dict[str, GgufTensor], head_dim: int, *, theta: float = 10_000.0
) -> dict[str, Any]:
    """Return `rope_theta`, `partial_rotary_factor` and `rope_scaling`, as far as the file has them."""
    m = header.metadata
    base = m.number(f"{prefix}.rope.freq_base", theta)
    fields: dict[str, Any] = {"rope_theta": base}
    rotated = m.integer(f"{prefix}.rope.dimension_count", head_dim)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise UnsupportedModel(
            f"{header.path}: {prefix}.rope.dimension_count={rotated} does not fit into heads of {head_dim}. "
            "Check the file."
        )
    if rotated != head_dim:
        fields["partial_rotary_factor"] = (rotated + 0.5) / head_dim  # it is multiplied and rounded down again
    stretched = _stretched(header, tensors, rotated, base)
    scaling = _scaling(header, prefix) if stretched is None else stretched
    original = m.integer(f"{prefix}.rope.scaling.original_context_length", None)
    if "rope_factors_short.weight" in tensors or "rope_factors_long.weight" in tensors:
        scaling = {
            "rope_type": "longrope",
            "short_factor": _factors(header, tensors, "rope_factors_short.weight", rotated),
            "long_factor": _factors(header, tensors, "rope_factors_long.weight", rotated),
            "attention_factor": m.number(f"{prefix}.rope.scaling.attn_factor", 1.0),
        }
        fields["original_max_position_embeddings"] = original or m.integer(f"{prefix}.context_length")
    elif scaling is not None and scaling["rope_type"] == "yarn":
        scaling["original_max_position_embeddings"] = original or m.integer(f"{prefix}.context_length")
    return fields if scaling is None else fields | {"rope_scaling": scaling}


def _scaling(header: GgufHeader, prefix: str) -> dict[str, Any] | None:
    """Return the scaling that the metadata asks for."""
    m = header.metadata
    kind = m.text(f"{prefix}.rope.scaling.type", None)
    old = m.number(f"{prefix}.rope.scale_linear", 0.0)  # of old files
    factor = m.number(f"{prefix}.rope.scaling.factor", old) or 1.0
    if kind is None:
        kind = "linear" if old else "none"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModel(
            f"{header.path}: {prefix}.rope.scaling.type={kind[:80]!r} is not implemented. "
            "Implemented: none, linear, yarn, longrope."
        )
    if kind in ("none", "longrope") or factor == 1.0:  # longrope has its factors in tensors
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    key = f"{prefix}.rope.scaling"
    attention_factor = m.number(f"{key}.yarn_attn_factor", None) or m.number(f"{key}.attn_factor", 1.0)
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": m.number(f"{key}.yarn_beta_fast", 32.0),
        "beta_slow": m.number(f"{key}.yarn_beta_slow", 1.0),
    }
    if attention_factor != 1.0:
        scaling["attention_factor"] = attention_factor * (0.1 * float(np.log(factor)) + 1.0)
    return scaling


def _stretched(header: GgufHeader, tensors: dict[str, GgufTensor], rotated: int, theta: float) -> dict[str, Any] | None:
    """Return the scaling of a file that stretches each frequency by its own factor, as those of Llama 3 do.

    Llama 3's four numbers are not in the file. Where its usual ones give these factors, they are taken.
    """
    if "rope_freqs.weight" not in tensors:
        return None
    from rekindle._src.models.nn.rope import RopeSpec  # it imports JAX, which most files don't need

    factors = _factors(header, tensors, "rope_freqs.weight", rotated)
    usual: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": max(factors)}
    plain = RopeSpec(theta=theta, dim=rotated)
    scaled = RopeSpec(theta=theta, dim=rotated, kind="llama3", original_length=_LLAMA3_LENGTH, **usual)
    if np.allclose(plain.frequencies() / scaled.frequencies(), factors, rtol=1e-5):
        return {"rope_type": "llama3", "original_max_position_embeddings": _LLAMA3_LENGTH, **usual}
    return {"rope_type": "factors", "factors": factors}


def _factors(header: GgufHeader, tensors: dict[str, GgufTensor], name: str, rotated: int) -> list[float]:
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != (rotated // 2,) or tensor.kind.name != "F32" or rotated > _MOST:
        problem = "is missing" if tensor is None else f"is {tensor.kind.name} {[*tensor.shape]}"
        raise CheckpointError(
            f"{header.path}: {name} {problem}, where F32 [{rotated // 2}] is expected. Download it again."
        )
    from rekindle._src.models.loading.gguf.rows import GgufRows  # as above

    values = GgufRows(header.path, name, tensor.kind, tensor.shape, tensor.offset)(0, rotated // 2)
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(f"{header.path}: {name} holds numbers that are not positive. Download it again.")
    return [float(str(value)) for value in values]
