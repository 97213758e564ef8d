"""The tensors of a checkpoint under the names of its family's manifest, whatever format it is stored in.

Some checkpoints have the experts of a layer in one tensor; the matrices and biases of single ones are cut from it:
`….experts.gate_up_proj` holds gate and up, all rows of one and then of the other, or row by row in turn, and
`….experts.down_proj` the rest; `gate_up_proj_bias` and `down_proj_bias` are theirs. Matrices in MXFP4 are stored as
`…_blocks`, two 4-bit floats in each byte, and `…_scales`, an exponent for 32 inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.gguf import source as gguf
from rekindle._src.models.loading.manifest import FusedExperts, Manifest
from rekindle._src.models.loading.quantized import NOT_WEIGHTS, FourBitFloatRows, WholeTensors, scheme, with_matrices
from rekindle._src.models.loading.stored import OWN, StoredCheckpoint
from rekindle._src.models.loading.tensor_files import TensorEntry, rows_of
from rekindle._src.models.nn.packing import Packing
from rekindle._src.models.registry import manifest
from rekindle.errors import CheckpointError


def named_tensors(stored: StoredCheckpoint, config: ModelConfig) -> tuple[Manifest, dict[str, TensorEntry]]:
    """Return the family's manifest as it is for this checkpoint, and the tensors by the manifest's names.

    Tensors that the manifest does not name are included, under their own names.
    """
    declared = manifest(config)
    if stored.is_gguf:
        return gguf.tensors(stored.headers, config, declared)
    entries = {entry.name: entry for header in stored.headers for entry in header.entries}
    entries = _with_prefix(stored, entries, declared)
    names = dict.fromkeys(name for source in declared.sources.values() for name in source.names)
    if declared.fused is not None:
        entries = with_single_experts(entries, names, declared.fused)
    quantization = scheme(stored.raw)
    if quantization is None:
        return declared, entries
    declared = dataclasses.replace(declared, ignored=(*declared.ignored, *NOT_WEIGHTS))
    return declared, with_matrices(entries, names, quantization)


def shown_name(stored: StoredCheckpoint, config: ModelConfig, declared: Manifest, name: str) -> str:
    """Return the name of a tensor of the manifest in the checkpoint's own format."""
    if stored.is_gguf:
        return gguf.llama_cpp_name(name, config)
    begins = name.startswith(declared.prefix) and len(stored.beginnings) == 1
    return stored.beginnings[0] + name.removeprefix(declared.prefix) if begins else name


def _with_prefix(
    stored: StoredCheckpoint, entries: dict[str, TensorEntry], declared: Manifest
) -> dict[str, TensorEntry]:
    """Return the entries with the prefix of the family's names. Raise `CheckpointError` for several language models."""
    if len(stored.beginnings) > 1:
        shown = ", ".join(repr(beginning) for beginning in stored.beginnings[:4])
        raise CheckpointError(
            f"{stored.path} holds {len(stored.beginnings)} language models: tensors' names begin with {shown}. "
            "Keep the weights of one in it"
        )
    if declared.prefix != OWN:
        entries = {
            declared.prefix + name.removeprefix(OWN) if name.startswith(OWN) else name: entry
            for name, entry in entries.items()
        }
    for other, name in declared.others.items():
        if other in entries and name not in entries:
            entries[name] = entries.pop(other)
    return entries


_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_GROUP = 32  # inputs of MXFP4 that share a scale


def with_single_experts(
    entries: Mapping[str, TensorEntry], names: Iterable[str], fused: FusedExperts
) -> dict[str, TensorEntry]:
    """Return the entries with fused tensors replaced by their parts in `names`."""
    result, used, tensors = dict(entries), set[str](), dict[tuple[str, int], _ExpertPart | None]()
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or name in entries:
            continue
        experts, part, kind = match[1], match[3], match[4]
        tensor = f"{experts}.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"
        key = (tensor, int(match[2]))
        if key not in tensors:
            tensors[key] = _expert(tensor, int(match[2]), entries, used, transposed=fused.transposed)
        rows = tensors[key]
        if rows is not None:
            result[name] = _cut(name, rows, part, fused)
    return {name: entry for name, entry in result.items() if name not in used}


@dataclasses.dataclass(frozen=True, slots=True)
class _ExpertPart:
    """One expert's part of a fused tensor, [outputs, inputs] or [outputs]."""

    entry: TensorEntry
    columns: WholeTensors | None = None  # of a matrix that is stored [inputs, outputs], and read at once
    floats: FourBitFloatRows | None = None  # of one in MXFP4

    def rows(self, chosen: slice) -> NDArray[np.float32]:
        """Return the values of the rows `chosen`."""
        if self.columns is not None:
            (matrix,) = self.columns.take(len(range(chosen.start, chosen.stop, chosen.step)))
            return np.ascontiguousarray(matrix[:, chosen].T, np.float32)
        read = self.floats or functools.partial(rows_of, self.entry)
        return read(chosen.start, chosen.stop)[:: chosen.step].astype(np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """Every `step`-th row from `first` on: a reader of rows, and of their integers."""

    whole: _ExpertPart
    first: int
    step: int

    @property
    def packing(self) -> Packing | None:
        return None if self.whole.floats is None else self.whole.floats.packing

    def _chosen(self, start: int, stop: int) -> slice:
        return slice(self.first + start * self.step, self.first + (stop - 1) * self.step + 1, self.step)

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.whole.rows(self._chosen(start, stop))

    def integers(self, start: int, stop: int) -> Integers:
        assert self.whole.floats is not None, "other rows have no packing"
        chosen = self._chosen(start, stop)
        integers, scales, _ = self.whole.floats.integers(chosen.start, chosen.stop)
        return Integers(integers[:: chosen.step], scales[:: chosen.step])


def _cut(name: str, whole: _ExpertPart, part: str, fused: FusedExperts) -> TensorEntry:
    """Return the entry of gate, up or down."""
    entry = whole.entry._replace(name=name)
    outputs, *rest = entry.shape
    first, step = 0, 1
    if part != "down":
        outputs //= 2
        first, step = (1, 2) if fused.interleaved else (outputs, 1)
        first = first if part == "up" else 0
    size = entry.nbytes // max(1, entry.shape[0]) * outputs
    cut = entry._replace(shape=(outputs, *rest), nbytes=size)
    if step == 1 and whole.columns is None and whole.floats is None:
        return cut._replace(offset=entry.offset + size * (first > 0))
    return cut._replace(rows=_Cut(whole, first, step))


def _expert(
    tensor: str, number: int, entries: Mapping[str, TensorEntry], used: set[str], *, transposed: bool
) -> _ExpertPart | None:
    """Return one expert's part of a fused tensor; None if the checkpoint has no such tensor. Its names are `used`."""
    plain = entries.get(tensor)
    if plain is not None:
        used.add(tensor)
        if len(plain.shape) not in (2, 3):
            raise _wrong(plain, "two or three dimensions")
        part = _part(plain, number)
        if not transposed or len(part.shape) != 2:
            return _ExpertPart(part)
        inputs, outputs = part.shape
        return _ExpertPart(part._replace(shape=(outputs, inputs)), columns=WholeTensors(outputs, part))
    blocks, scales = entries.get(f"{tensor}_blocks"), entries.get(f"{tensor}_scales")
    if blocks is None or scales is None:
        return None
    used |= {blocks.name, scales.name}
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != _GROUP // 2:
        raise _wrong(blocks, f"U8 [experts, outputs, groups, {_GROUP // 2}]")
    if scales.dtype not in ("U8", "F8_E8M0") or scales.shape != blocks.shape[:3]:
        raise _wrong(scales, f"U8 {[*blocks.shape[:3]]}")
    outputs, groups = blocks.shape[1:3]
    weight = _part(blocks, number)._replace(shape=(outputs, groups * _GROUP // 2))
    scale = _part(scales, number)
    entry = weight._replace(dtype="MXFP4", shape=(outputs, groups * _GROUP), nbytes=weight.nbytes + scale.nbytes)
    return _ExpertPart(entry, floats=FourBitFloatRows(weight, scale))


def _part(entry: TensorEntry, number: int) -> TensorEntry:
    """Return one expert's part of a tensor."""
    if number >= entry.shape[0]:
        raise _wrong(entry, f"more than {number} experts")
    size = entry.nbytes // entry.shape[0]
    return entry._replace(shape=entry.shape[1:], offset=entry.offset + number * size, nbytes=size)


def _wrong(entry: TensorEntry, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.file}: {entry.name} is {entry.dtype} {[*entry.shape]}, expected {expected}. "
        "Check that config.json and the weights belong together."
    )
