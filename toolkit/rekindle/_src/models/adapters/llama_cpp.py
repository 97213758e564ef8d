"""Adapters as GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.adapters.adapter import Adapter, Matrix, Product, adapter_of
from rekindle._src.models.adapters.sites import Sites
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.gguf.header import GgufTensor, read_header
from rekindle._src.models.loading.gguf.names import place
from rekindle._src.models.loading.gguf.rows import GgufRows
from rekindle._src.models.loading.tensor_files import listed
from rekindle._src.models.registry import gguf_form
from rekindle.errors import CheckpointError

_DOWN, _UP = ".lora_a", ".lora_b"


def read_file(path: Path, name: str, config: ModelConfig, sites: Sites) -> Adapter:
    """Return the adapter of a file. Raise CheckpointError for one that does not fit the model."""
    header = read_header(path)
    metadata, form = header.metadata, gguf_form(config.model_type)
    kind = metadata.text("general.type", "model"), metadata.text("adapter.type", "")
    if kind != ("adapter", "lora"):
        raise CheckpointError(f"{path}: general.type={kind[0][:80]!r} is not a LoRA. Pass an adapter's own file.")
    architecture = metadata.text("general.architecture")
    if architecture != form.architecture:
        raise CheckpointError(
            f"{path}: general.architecture={architecture[:80]!r}, and the model's is {form.architecture!r}. Pass an "
            "adapter that was trained on this model."
        )
    alpha = metadata.number("adapter.lora.alpha", 0.0)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    problems: list[str] = []
    products: dict[str, list[Product | None]] = {}
    for module, (site, index) in sites.by_module().items():
        if site.experts:  # their tensors have three axes, and are named below
            continue
        where = place(f"{module}.weight", form)
        pair = [tensors.pop(f"{where.name}{end}", None) for end in (_DOWN, _UP)]
        if pair == [None, None]:
            continue
        matrices = [None if tensor is None else _matrix(path, tensor) for tensor in pair]
        down, up = matrices
        if (
            down is None
            or up is None
            or (down.shape[1:], up.shape)
            != (
                (site.inputs,),
                (site.rows[index], len(down)),
            )
        ):
            shapes = [None if matrix is None else matrix.shape for matrix in matrices]
            problems.append(f"{where.name}: lora_a and lora_b have shapes {shapes}")
            continue
        if where.paired:
            up = _halves(up, config.head_dim)
        scale = np.float32(alpha / len(down) if alpha else 1.0)
        products.setdefault(site.path, [None] * len(site.modules))[index] = Product(down, up * scale)
    problems += [f"{name}: is not a matrix of a block of this model" for name in tensors]
    if problems:
        raise CheckpointError(
            f"The adapter {path} does not fit the model ({len(problems)} problems): {listed(problems)}. Pass one that "
            "was trained on this model."
        )
    return adapter_of(name, products)


def _matrix(path: Path, tensor: GgufTensor) -> Matrix:
    rows = GgufRows(path, tensor.name, tensor.kind, tensor.shape, tensor.offset)
    return rows(0, tensor.shape[0])


def _halves(up: NDArray[Any], size: int) -> Matrix:
    """Return rows of heads whose rotated pairs lie side by side in Hugging Face's order, half a head apart."""
    heads = up.reshape(-1, size // 2, 2, up.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(up.shape))
