"""Adapters from wherever they are: a PEFT folder, a GGUF file, or a trainer's arrays or nnx state.

Names of arrays are those of PEFT (`….lora_A.weight` [rank, in], `….lora_B.weight` [out, rank]), or paths of rekindle's
own model: of a layer with nnx's orientation (`layers.0.attention.qkv.lora_a` [in, rank], `….lora_b` [rank, out]), or of
a parameter of `trainable()` with that of the parameter (`layers.0.attention.qkv.weight.lora_a` [out, rank], `….lora_b`
[rank, in]).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.names import checked_path
from rekindle._src.models.adapters import peft
from rekindle._src.models.adapters.adapter import Adapter, Matrix, Product, adapter_of, does_not_fit
from rekindle._src.models.adapters.budget import Budget
from rekindle._src.models.adapters.peft import Tensor, adapter_of_tensors, any_rank
from rekindle._src.models.adapters.sites import Site, Sites, sites_of
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.gguf.files import is_gguf
from rekindle.errors import CheckpointError, ConfigError


def read_adapter(
    source: object,
    name: str,
    config: ModelConfig,
    *,
    alpha: float | None = None,
    fits: Callable[[int], None] = any_rank,
    budget: Budget | None = None,
) -> Adapter:
    """Return an adapter for a model with this config. Raise CheckpointError for one that does not fit it.

    The shapes in a file are compared, and `fits` raises for a rank that is too large, before its numbers are read.
    Raise RequestAborted if nobody waits for it any longer, as the budget says.
    """
    sites, budget = sites_of(config), budget or Budget()
    if not isinstance(source, str | Path | Adapter):
        return read_state(source, name, sites, alpha=alpha, budget=budget)
    if alpha is not None:
        raise ConfigError("alpha", alpha, "is for a trainer's arrays: a folder or a file has its own", "Leave it out")
    if isinstance(source, Adapter):
        return Adapter(name, source.digest, source.products, source.trained_on)
    path = checked_path("source", source)
    if is_gguf(path) and os.path.isfile(path):
        return read_file(path, name, config, sites, fits, budget)
    if not os.path.isdir(path):  # whatever the reason, such as a folder above it that may not be read
        raise CheckpointError(
            f"The adapter {name!r} is at {str(source)!r}, which is neither a folder nor a GGUF file. Pass a local "
            "folder: huggingface_hub.snapshot_download(…) returns that of an adapter on the hub."
        )
    return peft.read_folder(path, name, sites, fits, budget)


_ENDS = (".lora_a", ".lora_b")
_OF_PARAMETER = ".weight"  # ends the path of a parameter of `trainable()`


def arrays_of(state: object) -> dict[str, NDArray[Any]]:
    """Return the arrays of a mapping, nested or not, of an nnx module or its state, by path."""
    nested = isinstance(state, Mapping) and any(isinstance(value, Mapping | list) for value in state.values())
    if isinstance(state, Mapping) and not nested and not hasattr(state, "raw_mapping"):
        return {str(path): _array(path, value) for path, value in state.items()}
    from flax import nnx

    if isinstance(state, nnx.Module):
        state = nnx.state(state, nnx.LoRAParam)
    keyed, _ = jax.tree_util.tree_flatten_with_path(state)
    paths = (
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path if str(key) != ".value")
        for path, _ in keyed
    )
    return {path: _array(path, leaf) for path, (_, leaf) in zip(paths, keyed, strict=True)}


def _array(path: object, value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):  # a tensor of torch, whose bfloat16 numpy does not know
        value = value.detach().cpu().float()
    try:
        array = np.asarray(value)
        return array if array.dtype == np.float32 else array.astype(np.float32, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The array {path} of an adapter is not one of floats ({error}). Pass floats.") from error


def read_state(
    state: Any, name: str, sites: Sites, *, alpha: float | None = None, budget: Budget | None = None
) -> Adapter:
    """Return the adapter of a trainer's arrays. `alpha` divided by the rank is its scale; None is a scale of 1."""
    if alpha is not None and not isinstance(alpha, int | float):
        raise ConfigError("alpha", alpha, "is not a number", "Pass lora_alpha of the training")
    arrays = arrays_of(state)
    if any(".lora_A" in path for path in arrays):
        ranks = {array.shape[:1] for path, array in arrays.items() if ".lora_A" in path}
        if len(ranks) > 1:
            raise CheckpointError(
                f"The adapter {name!r} has several ranks ({sorted(ranks)}). Pass a PEFT folder, whose config names "
                "them."
            )
        rank = next(iter(*ranks), 0)
        config = {"r": rank, "lora_alpha": rank if alpha is None else alpha}
        tensors = {path: Tensor(array.shape, partial(np.asarray, array)) for path, array in arrays.items()}
        return adapter_of_tensors(name, tensors, config, sites, place=repr(name), budget=budget)
    return adapter_of(name, _products(arrays, name, sites, alpha))


def _products(
    arrays: Mapping[str, NDArray[Any]], name: str, sites: Sites, alpha: float | None
) -> dict[str, list[Product | None]]:
    by_path = {site.path: site for site in sites.sites if not site.experts}
    pairs: dict[str, dict[str, NDArray[Any]]] = {}
    problems: list[str] = []
    for path, array in arrays.items():
        end = path[-7:]
        if end in _ENDS and path[:-7].removesuffix(_OF_PARAMETER) in by_path:
            pairs.setdefault(path[:-7], {})[end] = array
        else:
            problems.append(f"{path}: is no lora_a or lora_b of a linear layer of this model")
    products: dict[str, list[Product | None]] = {}
    for name_of_pair, pair in pairs.items():
        path = name_of_pair.removesuffix(_OF_PARAMETER)
        site, shapes = by_path[path], {end: array.shape for end, array in pair.items()}
        sides = (site.inputs, site.outputs) if path == name_of_pair else (site.outputs, site.inputs)
        rank = next(iter(shapes.get(_ENDS[0], ())[1:]), 0)
        if not rank or shapes != {_ENDS[0]: (sides[0], rank), _ENDS[1]: (rank, sides[1])}:
            problems.append(f"{name_of_pair}: has shapes {shapes}, expected [{sides[0]}, r] and [r, {sides[1]}]")
            continue
        if path in products:
            problems.append(f"{name_of_pair}: is the second pair of its layer")
            continue
        first, second = (pair[end] for end in _ENDS)
        down, up = (first.T, second.T) if path == name_of_pair else (second, first)
        scale = np.float32(1.0 if alpha is None else alpha / rank)
        products[path] = [Product(down, up[span] * scale) for span in site.spans]
    if problems:
        raise does_not_fit(repr(name), problems)
    return products


_DOWN, _UP = ".lora_a", ".lora_b"
_MOST_HEADER = 16 << 20  # bytes of a file's header: that of an adapter has no vocabulary


def read_file(
    path: Path, name: str, config: ModelConfig, sites: Sites, fits: Callable[[int], None], budget: Budget
) -> Adapter:
    """Return the adapter of a file. Raise CheckpointError for one that does not fit the model."""
    # Sessions import this module, and few of them read such a file.
    from rekindle._src.models.loading.gguf.header import GgufTensor, read_header
    from rekindle._src.models.loading.gguf.names import place, within_layer
    from rekindle._src.models.loading.gguf.rows import GgufRows, stored_places
    from rekindle._src.models.registry import gguf_form, manifest

    header = read_header(path, _MOST_HEADER)
    metadata, form = header.metadata, gguf_form(config.model_type)
    kind = metadata.text("general.type", "model"), metadata.text("adapter.type", "")
    if kind != ("adapter", "lora"):
        raise CheckpointError(f"{path}: general.type={kind[0][:80]!r} is not a LoRA. Pass an adapter's own file.")
    architecture = metadata.text("general.architecture")
    if architecture not in (form.architecture, *form.others):
        raise CheckpointError(
            f"{path}: general.architecture={architecture[:80]!r}, and the model's is {form.architecture!r}. Pass an "
            "adapter that was trained on this model."
        )
    if "adapter.alora.invocation_tokens" in metadata:
        raise CheckpointError(f"{path}: invocation tokens are not supported. Train without them.")
    if any(source.transpose for source in manifest(config).sources.values()):
        raise CheckpointError(
            f"{path}: llama.cpp's converter writes adapters of {config.model_type} transposed. Pass the PEFT folder."
        )
    alpha = metadata.number("adapter.lora.alpha", 0.0)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    problems: list[str] = []
    planned: list[tuple[str, Site, int, GgufTensor, GgufTensor]] = []
    for module, (site, index) in sites.by_stored_name().items():
        if site.experts:  # their tensors have three axes, and are named below
            continue
        where = place(f"{module}.weight", form)
        first, second = (tensors.pop(f"{where.name}{end}", None) for end in (_DOWN, _UP))
        if first is None and second is None:
            continue
        shapes = [None if tensor is None else tensor.shape for tensor in (first, second)]
        rank = 0 if first is None else first.shape[0]
        if first is None or second is None or shapes != [(rank, site.inputs), (site.rows[index], rank)]:
            problems.append(f"{where.name}: lora_a and lora_b have shapes {shapes}")
        elif rank > site.highest_rank:
            problems.append(f"{where.name}: has rank {rank:,}, and at most {site.highest_rank:,} are read")
        else:
            planned.append((module, site, index, first, second))
    problems += [f"{name}: is not a matrix of a block of this model" for name in tensors]
    if problems:
        raise does_not_fit(path, problems)
    fits(max((first.shape[0] for _, _, _, first, _ in planned), default=0))
    products: dict[str, list[Product | None]] = {}
    for module, site, index, *stored in planned:
        budget.check()
        down, up = (
            GgufRows(path, tensor.name, tensor.kind, tensor.shape, tensor.offset)(0, tensor.shape[0])
            for tensor in stored
        )
        if place(f"{module}.weight", form).paired:
            up = _halves(up, config.head_dim)
        layer, own = within_layer(f"{module}.weight") or (0, "")
        how = form.rewritten(config, layer, own) if own else None
        if how is not None and how.rows is not None:
            up = up[stored_places(np.arange(len(up)), how.rows)]
        if how is not None and how.columns is not None:
            down = down[:, stored_places(np.arange(site.inputs), how.columns)]
        scale = np.float32(alpha / len(down) if alpha else 1.0)
        products.setdefault(site.path, [None] * len(site.modules))[index] = Product(down, up * scale)
    return adapter_of(name, products)


def _halves(up: NDArray[Any], size: int) -> Matrix:
    """Reorder rows of heads from adjacent rotated pairs to Hugging Face's order, half a head apart."""
    heads = up.reshape(-1, size // 2, 2, up.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(up.shape))
