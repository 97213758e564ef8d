"""The files of sentence-transformers next to a checkpoint: pooling, projections, prompts.

`modules.json` lists the modules, each with a folder of its own: the transformer, a pooling, perhaps linear layers, and
a norm. Anything not implemented is refused by its name, since another vector would be wrong and look right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rekindle._src.core.embedder import ACTIVATIONS, Embedder, Projection
from rekindle._src.core.records import Pooling
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.models.loading.stored import MODULES
from rekindle.errors import CheckpointError, UnsupportedModel

_MAX_JSON = 1 << 20  # bytes
_MOST_LAYERS = 16  # linear layers; published models have two at most, and a list may name one folder again and again
_MODES: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_GGUF_MODES: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def embedder_of(folder: Path | None, config: ModelConfig) -> Embedder:
    """Return the embedder described by a folder's files. Raise `UnsupportedModel` if it is not implemented.

    Without files of sentence-transformers it is the mean of the hidden states, at length 1; of a GGUF file, the pooling
    of its metadata.
    """
    plain = Embedder(config.hidden_size, alone=config.only_embeds)
    if folder is not None and is_file(folder):
        pooling_ = _of_gguf(folder)
        return dataclasses.replace(plain, pooling=pooling_ or "mean", trained=pooling_ is not None)
    if folder is None or not (folder / MODULES).is_file():
        return plain
    modules = tensor_files.read_json(folder / MODULES, list, _MAX_JSON)
    pooling: Pooling | None = None
    projections: list[Projection] = []
    normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, Mapping) else repr(module)
        if kind == "Transformer":
            continue
        if kind not in ("Pooling", "Dense", "Normalize") or normalize or (pooling is None) != (kind == "Pooling"):
            raise UnsupportedModel(
                f"{folder / MODULES} has a module {kind!r} that is not implemented at its place. Implemented: "
                "Transformer, Pooling, any number of Dense, Normalize, in this order."
            )
        own = _own_folder(folder, module)
        if kind == "Pooling":
            pooling = _pooling(own / "config.json", config)
        elif kind == "Dense" and len(projections) == _MOST_LAYERS:
            raise UnsupportedModel(f"{folder / MODULES} has more than {_MOST_LAYERS} modules 'Dense'. Check the file.")
        elif kind == "Dense":
            projections.append(_projection(own, projections[-1].weight.shape[0] if projections else config.hidden_size))
        else:
            normalize = True
    if pooling is None:
        raise UnsupportedModel(f"{folder / MODULES} has no module for pooling. Remove the file to get the mean.")
    prompts, default = _prompts(folder / "config_sentence_transformers.json")
    return Embedder(
        config.hidden_size,
        pooling,
        tuple(projections),
        normalize,
        prompts,
        default,
        alone=config.only_embeds,
        trained=True,
    )


def _of_gguf(file: Path) -> Pooling | None:
    """Return the pooling of a GGUF file's metadata, which llama.cpp follows; None if it has none."""
    from rekindle._src.models.loading.gguf.header import read_header  # folders don't need it

    metadata = read_header(file).metadata
    kind = metadata.integer(f"{metadata.text('general.architecture')}.pooling_type", 0)
    return _GGUF_MODES.get(kind)


def _own_folder(folder: Path, module: Mapping[str, Any]) -> Path:
    name = module.get("path")
    if not isinstance(name, str) or "\0" in name or not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / MODULES} names the folder {str(name)[:80]!r}, which is not in it.")
    return folder / name


def _pooling(path: Path, config: ModelConfig) -> Pooling:
    fields = tensor_files.read_json(path, dict, _MAX_JSON)
    modes = fields.get("pooling_mode", [mode for key, mode in _OLD_MODES.items() if fields.get(key)])
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or str(modes[0]) not in _MODES:
        shown = ", ".join(map(str, modes)) if isinstance(modes, list) else repr(modes)
        raise UnsupportedModel(f"{path} pools by {shown or 'nothing'}. Implemented: one of {', '.join(_MODES)}.")
    if fields.get("include_prompt") is False:
        raise UnsupportedModel(f"{path} leaves prompts out of the pooling (include_prompt), which is not implemented.")
    size = fields.get("embedding_dimension", fields.get("word_embedding_dimension", config.hidden_size))
    if size != config.hidden_size:
        raise CheckpointError(f"{path} pools {size} numbers, and the model has {config.hidden_size}.")
    return _MODES[str(modes[0])]


def _projection(folder: Path, size: int) -> Projection:
    fields = tensor_files.read_json(folder / "config.json", dict, _MAX_JSON)
    activation = str(fields.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.") or name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{folder / 'config.json'} has the activation_function {activation[:80]}. Implemented: "
            f"{', '.join(ACTIVATIONS)} of torch.nn."
        )
    for key in ("module_input_name", "module_output_name"):
        if fields.get(key, "sentence_embedding") not in (None, "sentence_embedding"):
            raise UnsupportedModel(f"{folder / 'config.json'} has {key}={fields[key]!r}, which is not implemented.")
    if fields.get("use_residual"):
        raise UnsupportedModel(f"{folder / 'config.json'} has use_residual, which is not implemented.")
    (file,) = tensor_files.weight_files(folder)[:1]
    entries = {entry.name: entry for entry in tensor_files.read_header(file).entries}
    shape = (fields.get("out_features"), size)
    names = {"linear.weight", "linear.bias"} if fields.get("bias", True) else {"linear.weight"}
    if (
        set(entries) != names
        or entries["linear.weight"].shape != shape
        or any(entries[each].shape != shape[:1] for each in names - {"linear.weight"})
    ):
        raise CheckpointError(
            f"{file} does not hold the linear layer from {size} to {shape[0]} numbers that its config.json describes. "
            "Check that both belong together."
        )

    def tensor(name: str) -> Any:
        entry = entries[name]
        return np.ascontiguousarray(tensor_files.rows_of(entry, 0, entry.shape[0]), np.float32)

    return Projection(tensor("linear.weight"), tensor("linear.bias") if "linear.bias" in names else None, name)


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the one that texts have unless they name another."""
    if not path.is_file():
        return {}, None
    fields = tensor_files.read_json(path, dict, _MAX_JSON)
    prompts, default = fields.get("prompts") or {}, fields.get("default_prompt_name")
    if not isinstance(prompts, dict):
        raise CheckpointError(f"{path} has prompts that are no object. Download it again.")
    named = {name: text for name, text in prompts.items() if isinstance(text, str)}
    if default is not None and not (isinstance(default, str) and default in named):
        raise CheckpointError(f"{path} has the default_prompt_name {str(default)[:80]!r}, and no such prompt.")
    return named, default
