"""The tensors of a checkpoint under the names of its family's manifest, whatever format it is stored in."""

from __future__ import annotations

import dataclasses

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.fused_experts import with_single_experts
from rekindle._src.models.loading.gguf import source as gguf
from rekindle._src.models.loading.manifest import Manifest
from rekindle._src.models.loading.quantized.schemes import NOT_WEIGHTS, scheme, with_matrices
from rekindle._src.models.loading.stored import Stored
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.registry import manifest


def named_tensors(stored: Stored, config: ModelConfig) -> tuple[Manifest, dict[str, TensorEntry]]:
    """Return the family's manifest as it is for this checkpoint, and the tensors by the manifest's names.

    Tensors that the manifest does not name are included, under their own names.
    """
    declared = manifest(config)
    if stored.is_gguf:
        return gguf.tensors(stored.headers, config, declared)
    entries = {entry.name: entry for header in stored.headers for entry in header.entries}
    entries = _with_prefix(entries, declared)
    names = dict.fromkeys(name for source in declared.sources.values() for name in source.names)
    if declared.fused is not None:
        entries = with_single_experts(entries, names, declared.fused)
    quantization = scheme(stored.raw)
    if quantization is None:
        return declared, entries
    declared = dataclasses.replace(declared, ignored=(*declared.ignored, *NOT_WEIGHTS))
    return declared, with_matrices(entries, names, quantization)


def shown_name(stored: Stored, config: ModelConfig, name: str) -> str:
    """Return the name of a tensor of the manifest in the checkpoint's own format."""
    return gguf.llama_cpp_name(name, config) if stored.is_gguf else name


def _with_prefix(entries: dict[str, TensorEntry], declared: Manifest) -> dict[str, TensorEntry]:
    """Return the entries with the prefix that checkpoints of the bare model, without its head, lack in all names.

    Where a checkpoint has the other prefix in its place, that one is replaced.
    """
    if not declared.prefix or any(name.startswith(declared.prefix) for name in entries):
        return entries
    other = declared.other_prefix
    if other and any(name.startswith(other) for name in entries):
        return {
            declared.prefix + name.removeprefix(other) if name.startswith(other) else name: entry
            for name, entry in entries.items()
        }
    prefixed = {name for source in declared.sources.values() for name in source.names}
    return {
        declared.prefix + name if declared.prefix + name in prefixed or name not in prefixed else name: entry
        for name, entry in entries.items()
    }
