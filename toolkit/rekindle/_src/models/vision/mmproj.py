"""An encoder of pictures in a GGUF file of its own, which llama.cpp calls mmproj."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.architecture import GgufModel
from rekindle._src.models.loading.gguf.header import GgufHeader, read_header
from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.gguf.rows import entry_of
from rekindle._src.models.loading.tensor_files import TensorEntry, rows_of
from rekindle._src.models.vision.config import VisionConfig
from rekindle._src.models.vision.family import MmprojForm
from rekindle._src.models.vision.registry import MODULES, tower_family
from rekindle._src.models.vision.weights import TowerTensors
from rekindle.errors import CheckpointError, UnsupportedModel

ARCHITECTURE = "clip"
_KEYS = ("clip.vision.projector_type", "clip.projector_type")  # the first of a file for sounds, too
_OTHER_PARTS = ("a.", "mm.a.")  # of an encoder of sounds
_NUMBER = re.compile(r"\.(\d+)\.")
_PLAIN = TensorRewrite()
_MOST_TABLES = 8  # of a stack: there is one for columns and one for rows


@dataclasses.dataclass(frozen=True, slots=True)
class FrameRows:
    """Rows of a kernel of patches of several frames, which the file has as a tensor for each frame."""

    frames: tuple[TensorEntry, ...]
    channels: int

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        count = stop - start
        shaped = [_numbers(frame, start, stop).reshape(count, self.channels, 1, -1) for frame in self.frames]
        return np.concatenate(shaped, axis=2).reshape(count, -1)


@dataclasses.dataclass(frozen=True, slots=True)
class SwappedRows:
    """Rows of tables that follow each other in the file: each has its part of a row."""

    tables: tuple[TensorEntry, ...]

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        return np.stack([_numbers(table, start, stop) for table in self.tables], axis=1)


def _numbers(entry: TensorEntry, start: int, stop: int) -> NDArray[np.float32]:
    return np.asarray(rows_of(entry, start, stop), np.float32)


def is_mmproj(header: GgufHeader) -> bool:
    """True if a GGUF file holds an encoder."""
    return header.metadata.text("general.architecture") == ARCHITECTURE


def read_mmproj(path: Path) -> TowerTensors[TensorEntry]:
    """Return the encoder of a file: its config, and its tensors in the form that a checkpoint has.

    The config has the `model_type` of a model with such an encoder. Raise `UnsupportedModel` for a projector that is
    not implemented.
    """
    header = read_header(path)
    form = mmproj_form(header)
    model = GgufModel(header, "clip.vision", {tensor.name: tensor for tensor in header.tensors})
    try:
        config = form.read(model)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UnsupportedModel(
            f"{path}: its metadata has a value of the wrong kind ({type(error).__name__}: {str(error)[:200]}). "
            "Download it again."
        ) from error
    return _tensors(header, form, config)


def mmproj_form(header: GgufHeader) -> MmprojForm:
    """Return the form of a file's encoder. Raise `UnsupportedModel` if no tower has it."""
    projector = next((header.metadata.text(key) for key in _KEYS if key in header.metadata), "")
    forms = {form.projector: form for name in MODULES if (form := tower_family(name).mmproj) is not None}
    if not is_mmproj(header) or projector not in forms:
        raise UnsupportedModel(
            f"{header.path}: clip.projector_type={projector[:80]!r} is not implemented. Use one of: "
            f"{', '.join(sorted(forms))}."
        )
    return forms[projector]


def _tensors(header: GgufHeader, form: MmprojForm, config: VisionConfig) -> TowerTensors[TensorEntry]:
    stored = {
        tensor.name: TensorEntry(tensor.name, header.path, tensor.kind.name, tensor.shape, tensor.offset, tensor.nbytes)
        for tensor in header.tensors
        if not tensor.name.startswith(_OTHER_PARTS)
    }
    declared = tower_family(config.model_type).manifest(config)
    # llama.cpp's converter has already done the manifest's additions.
    sources = {path: dataclasses.replace(source, add=0.0) for path, source in declared.sources.items()}
    table, named, used = form.names(config), dict[str, TensorEntry](), set[str]()
    for name in dict.fromkeys(name for source in sources.values() for name in source.names):
        theirs = llama_cpp_name(name, table)
        pieces = form.frames.get(name, ())
        if pieces and all(piece in stored for piece in pieces):
            named[name] = _with_frames(name, [stored[piece] for piece in pieces])
            used.update(pieces)
        elif theirs in stored:
            entry = stored[theirs]
            if name in form.swapped and len(entry.shape) == 3:
                named[name] = _swapped(name, entry)
            else:
                named[name] = entry_of(name, _flat_kernel(entry), form.rewritten(config, name) or _PLAIN)
            used.add(theirs)
    named |= {name: entry for name, entry in stored.items() if name not in used}
    manifest = dataclasses.replace(declared, sources=sources)
    return TowerTensors(config, manifest, named, str(header.path), lambda name: llama_cpp_name(name, table))


def llama_cpp_name(name: str, table: Mapping[str, str]) -> str:
    """Return llama.cpp's name of a tensor of the manifest; the name itself if it has none."""
    match = _NUMBER.search(name)
    general = name if match is None else _NUMBER.sub(".{n}.", name, count=1)
    for known in (name, general):
        module, _, part = known.rpartition(".")
        theirs = table.get(known) or (f"{table[module]}.{part}" if module in table else None)
        if theirs is not None:
            return theirs.replace("{n}", match[1]) if match is not None else theirs
    return name


def _flat_kernel(entry: TensorEntry) -> TensorEntry:
    """Return a convolution's kernel as a matrix."""
    if len(entry.shape) != 4:
        return entry
    return entry._replace(shape=(entry.shape[0], int(np.prod(entry.shape[1:], dtype=np.int64))))


def _readable(entry: TensorEntry) -> TensorEntry:
    return entry_of(entry.name, entry, _PLAIN)


def _with_frames(name: str, frames: list[TensorEntry]) -> TensorEntry:
    """Return the kernel of patches of several frames, [E, channels · frames · height · width], of one for each."""
    first = frames[0]
    if any(frame.shape != first.shape or len(frame.shape) != 4 for frame in frames):
        return first  # a wrong shape is reported by its name
    outputs, channels, height, width = first.shape
    rows = FrameRows(tuple(_readable(_flat_kernel(frame)) for frame in frames), channels)
    length = len(frames) * channels * height * width
    nbytes = sum(frame.nbytes for frame in frames)
    return first._replace(name=name, shape=(outputs, length), nbytes=nbytes, rows=rows)


def _swapped(name: str, entry: TensorEntry) -> TensorEntry:
    """Return a stack of tables [count, rows, columns] as one table [rows, count, columns]."""
    count, length, columns = entry.shape
    if count > _MOST_TABLES:
        return entry._replace(name=name)  # a wrong shape is reported by its name
    size = entry.nbytes // count
    tables = (
        entry._replace(shape=(length, columns), offset=entry.offset + at * size, nbytes=size) for at in range(count)
    )
    return entry._replace(name=name, shape=(length, count, columns), rows=SwappedRows(tuple(map(_readable, tables))))
