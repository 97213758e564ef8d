"""A checkpoint of any format as a GGUF file: its tensors, their types, and their blocks piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.gguf.block_types import BY_NAME, F16, F32, BlockType
from rekindle._src.models.loading.gguf.describe import describe
from rekindle._src.models.loading.gguf.header import read_header
from rekindle._src.models.loading.gguf.names import place
from rekindle._src.models.loading.gguf.quantize import WRITTEN, quantize
from rekindle._src.models.loading.gguf.rows import GgufRows, paired_rows
from rekindle._src.models.loading.gguf.write import Outgoing
from rekindle._src.models.loading.manifest import Manifest, Source
from rekindle._src.models.loading.named_tensors import named_tensors
from rekindle._src.models.loading.rows_of import pieces_of
from rekindle._src.models.loading.stored import Stored
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle.errors import ConfigError

TYPES = ("auto", *(name.lower() for name in WRITTEN))
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}  # general.file_type
_PLAIN = ("ffn_gate_inp", "position_embd")  # matrices that llama.cpp wants in float32
_OUTER = ("token_embd.weight", "output.weight")  # in eight bits where the others have four
Done = Callable[[int], None]


class _Member(NamedTuple):
    """A tensor of the checkpoint that a tensor of the file consists of, alone or as one expert of a stack."""

    entry: TensorEntry
    source: Source
    head: int  # rows of a head whose pairs the file has side by side; 0 for others


class GgufExport(NamedTuple):
    """The arguments of `write_gguf`."""

    metadata: dict[str, Any]
    tensors: tuple[Outgoing, ...]
    pieces: Iterator[NDArray[Any]]


def export(stored: Stored, config: ModelConfig, kind: str, done: Done) -> GgufExport:
    """Return the file's weights and the metadata that describes them; `done` is called with the bytes that were read.

    `kind` is a type for the matrices, or "auto": each keeps its own. Blocks that already are of the type stay as they
    are. Rows that no blocks fill are stored in 16 bits, and four-bit files have an embedding and a head of eight
    bits.
    """
    if kind not in TYPES:
        raise ConfigError("type", kind, "is not a type of GGUF that is written", f"Use one of {', '.join(TYPES)}")
    declared, entries = named_tensors(stored, config)
    metadata, extra = (_kept_metadata(stored), {}) if stored.is_gguf else describe(config)
    plain = {name: (Outgoing(name, F32, values.shape), values) for name, values in extra.items()}
    if stored.is_gguf:
        plain |= _rope_tensors(stored)
    members = _members(config, declared, entries)
    types = {name: _type_of(name, parts, kind, config) for name, parts in members.items()}
    tensors = [Outgoing(name, types[name], _shape(parts)) for name, parts in members.items()]
    if kind != "auto" or not stored.is_gguf:
        wide = {types[name].name for name, parts in members.items() if len(_shape(parts)) > 1}
        name = kind.upper() if kind != "auto" else next(iter(sorted(wide & _FILE_TYPES.keys())), "F16")
        metadata |= {"general.file_type": _FILE_TYPES[name], "general.quantization_version": 2}

    def pieces() -> Iterator[NDArray[Any]]:
        for _, values in plain.values():
            yield values
        for tensor in tensors:
            for member in members[tensor.name]:
                yield from _blocks(member, tensor.kind)
                done(member.entry.nbytes)

    return GgufExport(metadata, (*(tensor for tensor, _ in plain.values()), *tensors), pieces())


def _kept_metadata(stored: Stored) -> dict[str, Any]:
    """Return the metadata of a GGUF file, except for how it was stored."""
    metadata = read_header(stored.headers[0].file).metadata
    dropped = ("split.", "general.alignment", "quantize.")
    return {key: _plain(value) for key, value in metadata.items() if not key.startswith(dropped)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype == np.bool_ else value
    return value if isinstance(value, (str, bool, int, float)) else list(value)


def _rope_tensors(stored: Stored) -> dict[str, tuple[Outgoing, NDArray[np.float32]]]:
    tensors = {}
    for entry in (entry for header in stored.headers for entry in header.entries):
        if entry.name.startswith(("rope_freqs.", "rope_factors_")) and entry.dtype == "F32":
            rows = GgufRows(entry.file, entry.name, F32, entry.shape, entry.offset)
            tensors[entry.name] = (Outgoing(entry.name, F32, entry.shape), rows(0, entry.shape[0]))
    return tensors


def _members(config: ModelConfig, declared: Manifest, entries: Mapping[str, TensorEntry]) -> dict[str, list[_Member]]:
    """Return the members of each tensor of the file, in the order of the experts."""
    members: dict[str, list[_Member]] = {}
    for source in declared.sources.values():
        for name in source.names:
            where = place(name, config.model_type)
            head = config.head_dim if where.paired else 0
            members.setdefault(where.name, []).append(_Member(entries[name], source, head))
    return members


def _shape(parts: list[_Member]) -> tuple[int, ...]:
    first = parts[0]
    shape = first.entry.shape[::-1] if first.source.transpose else first.entry.shape
    return (len(parts), *shape) if first.source.stack else shape


def _type_of(name: str, parts: list[_Member], kind: str, config: ModelConfig) -> BlockType:
    entry = parts[0].entry
    shape = _shape(parts)
    if len(shape) < 2 or name.split(".")[-2] in _PLAIN:
        return F32
    if kind == "auto":
        if isinstance(entry.rows, GgufRows):
            return entry.rows.kind
        if entry.rows is None:
            return BY_NAME[entry.dtype] if entry.dtype in WRITTEN else F32
        return BY_NAME[{"float16": "F16", "float32": "F32"}.get(config.dtype or "", "BF16")]
    if name in _OUTER and kind == "q4_0":
        kind = "q8_0"
    block_type = BY_NAME[kind.upper()]
    return F16 if shape[-1] % block_type.values else block_type


def _blocks(member: _Member, kind: BlockType) -> Iterator[NDArray[Any]]:
    """Yield the blocks of a tensor in the order of the file."""
    entry, source, head = member
    if isinstance(entry.rows, GgufRows) and entry.rows.kind.name == kind.name and not kind.plain:
        step = max(1, (1 << 22) // max(1, entry.rows.row_bytes * max(1, head))) * max(1, head)
        for start in range(0, entry.shape[0], step):
            stop = min(entry.shape[0], start + step)
            yield _ordered(entry.rows.blocks(start, stop), head)
        return
    for _, _, values in pieces_of(entry, source, max(1, head)):
        yield quantize(kind, _ordered(values, head))


def _ordered(rows: NDArray[Any], head: int) -> NDArray[Any]:
    return rows[paired_rows(np.arange(len(rows)), head)] if head else rows
