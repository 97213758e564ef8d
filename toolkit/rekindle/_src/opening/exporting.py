"""Checkpoints in another form: as a GGUF file, as a folder of safetensors, or in four bits for the texts that come.

`rekindle.models.export` writes the files; `rekindle.models.calibrate` rounds to four bits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rekindle import tiny
from rekindle._src.core.activity import Activity, State
from rekindle._src.core.dtypes import DTypeLike, checked_quantize, dtype_name
from rekindle._src.models import calibration
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.calibration import CalibrationProgress
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.loading.checkpoint import describe, load
from rekindle._src.models.loading.gguf.export import export as gguf_tensors
from rekindle._src.models.loading.gguf.export import write_gguf
from rekindle._src.models.loading.gguf.files import is_gguf
from rekindle._src.models.loading.load_progress import ByteMeter, Report
from rekindle._src.models.loading.manifest import Source
from rekindle._src.models.loading.named_tensors import named_tensors
from rekindle._src.models.loading.stored import StoredCheckpoint, look
from rekindle._src.models.loading.tensor_files import TensorEntry, pieces_of
from rekindle._src.models.registry import config_from_hf, manifest
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.generation_config import checkpoint_sampling
from rekindle._src.text.gguf.reading import read_sampling
from rekindle._src.text.gguf.writing import sampling_metadata, template_metadata, tokenizer_metadata
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import CheckpointError, ConfigError, UnsupportedModel
from rekindle_kernels import system

log = logging.getLogger("rekindle.engine")
_GGUF_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def export(model: str | Path, out: str | Path, *, type: str = "auto", progress: Report | None = None) -> Path:
    """Write a checkpoint as `out`: a GGUF file if its name ends in .gguf, otherwise a folder of safetensors.

    `model` is a folder, a GGUF file, a hub id or "tiny". `type` is the matrices' type: "f32", "f16", "bf16", and for
    GGUF "q8_0" and "q4_0"; by default each keeps its own, and for a folder quantised ones become floats of 16 bits. An
    existing file is not overwritten, and no unfinished file remains. Returns `out`. Raises `CheckpointError` if the
    tensors do not match the model in the checkpoint's config.
    """
    out = Path(out).expanduser()
    if out.exists():
        raise ConfigError("out", str(out), "exists already", "Remove it, or pass another name")
    type = _GGUF_NAMES.get(dtype_name(type), type)
    stored = look(tiny.located(model))
    describe(stored, unpack=False)  # as `open` would: else it would refuse the written checkpoint
    config = config_from_hf(stored.raw)
    meter = ByteMeter(sum(entry.nbytes for header in stored.headers for entry in header.entries), progress)
    with _written(out) as partial:
        if is_gguf(out):
            _write_gguf(stored, config, partial, type, meter)
        else:
            _write_folder(stored, config, partial, type, meter)
    meter.tell(final=True)
    return out


def _write_gguf(stored: StoredCheckpoint, config: ModelConfig, out: Path, kind: str, meter: ByteMeter) -> None:
    def done(count: int) -> None:
        meter.add(count)
        meter.tell()

    content = gguf_tensors(stored, config, kind.lower(), done)
    _check_room(out, sum(tensor.nbytes for tensor in content.tensors))
    metadata = content.metadata
    if not stored.is_gguf:  # a GGUF file has it already
        metadata |= {"general.name": stored.path.name}
        metadata |= tokenizer_metadata(Tokenizer.load(stored.path), config.vocab_size)
        metadata |= template_metadata(ChatTemplate.load(stored.path))
        metadata |= sampling_metadata(checkpoint_sampling(stored.path))
    write_gguf(out, metadata, content.tensors, content.pieces)


@contextlib.contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Yield a path next to `out` to write to. At the end it is renamed to `out`, or removed after an error."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        system.replace(partial, out)
    except OSError as error:
        raise CheckpointError(f"{out} can't be written ({error}). Pass another place.") from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _check_room(out: Path, size: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < size:
        raise CheckpointError(
            f"{out.parent} has {free / 2**30:.1f} GiB free, and the file needs {size / 2**30:.1f}. Free some, or "
            "export with another type."
        )


TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
_LONGEST = 100  # characters of a template's name
_NOT_COPIED = ("config.json", "model.safetensors.index.json", "quantize_config.json", "quant_config.json")


class _Tensor(NamedTuple):
    """A tensor of the folder, and its source."""

    entry: TensorEntry
    source: Source  # the conversion from its layout in the checkpoint to that in the folder
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape[::-1] if self.source.transpose else self.entry.shape

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def _write_folder(stored: StoredCheckpoint, config: ModelConfig, folder: Path, kind: str, meter: ByteMeter) -> None:
    """Write the folder. `kind` is one of TYPES, or "auto": each tensor's own, the config's where it is quantised."""
    if kind != "auto" and kind.lower() not in TYPES:
        known = ", ".join(("auto", *TYPES))
        raise ConfigError(
            "type", kind, "is not a type of a safetensors folder", f"Use one of {known}, or write a .gguf"
        )
    fused = manifest(config).fused
    if fused is not None and fused.transposed:
        raise UnsupportedModel(
            f"this {config.model_type} model can't be written as a folder: transformers has all experts of a layer "
            "in one tensor, and they are written one by one. Use the checkpoint itself."
        )
    tensors = _tensors(stored, config, kind.lower())
    folder.mkdir()

    def pieces() -> Iterator[NDArray[Any]]:
        for tensor in tensors.values():
            for _, _, values in pieces_of(tensor.entry, tensor.source):
                with np.errstate(over="ignore"):  # values too large for 16 bits become infinite
                    yield np.ascontiguousarray(values.astype(tensor.dtype))
            meter.add(tensor.entry.nbytes)
            meter.tell()

    tensor_files.write(folder / "model.safetensors", tensors, pieces(), metadata={"format": "pt"})
    kinds = {tensor.dtype.name for tensor in tensors.values() if len(tensor.shape) > 1}
    raw = {name: value for name, value in stored.raw.items() if name not in ("quantization_config", "torch_dtype")}
    dtype = next(iter(kinds)) if len(kinds) == 1 else config.dtype or "bfloat16"
    _put(folder / "config.json", raw | {"dtype": dtype})
    if stored.is_gguf:
        write_text(stored.path, stored.raw, folder)
    else:
        copy_text(stored.path, folder)


def _tensors(stored: StoredCheckpoint, config: ModelConfig, kind: str) -> dict[str, _Tensor]:
    """Return the folder's tensors by name. A GGUF file's transpositions and additions are undone."""
    _, entries = named_tensors(stored, config)
    tensors = {}
    for source in manifest(config).sources.values():
        for name in source.names:
            entry = entries[name]
            inverse = Source(
                names=(name,),
                rows=(entry.shape[0],),
                transpose=source.transpose and stored.is_gguf,
                add=-source.add if stored.is_gguf else 0.0,
            )
            tensors[name] = _Tensor(entry, inverse, _dtype(entry, config, kind))
    return tensors


def _dtype(entry: TensorEntry, config: ModelConfig, kind: str) -> np.dtype[Any]:
    if kind != "auto":
        return np.dtype(TYPES[kind])
    if entry.dtype in tensor_files.FLOATS and len(entry.shape) > 1:
        return np.dtype(tensor_files.DTYPES[entry.dtype])
    return np.dtype(ml_dtypes.bfloat16 if config.dtype in (None, "bfloat16") else config.dtype)


def copy_text(source: Path, folder: Path) -> None:
    """Copy the files of the tokenizer, the chat templates and the sampling of a folder."""
    real = source.resolve()
    homes = real, real.parent.parent / "blobs"  # a folder of the Hub's cache has links to its blobs
    for pattern in _PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.name not in _NOT_COPIED and path.is_file():
                if not any(path.resolve().is_relative_to(home) for home in homes):
                    log.warning("%s leads out of its folder and is not copied", path)
                    continue
                target = folder / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def write_text(source: Path, raw: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer, the chat templates and the sampling of a GGUF file."""
    tokenizer, template = Tokenizer.load(source), ChatTemplate.load(source)
    if tokenizer.has_text:
        (folder / "tokenizer.json").write_bytes(tokenizer.definition())
        _put(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special})
    if template is not None:
        additional = folder / "additional_chat_templates"
        for name, text in template.templates.items():
            if not all(one.isascii() and (one.isalnum() or one in "._-") for one in name) or len(name) > _LONGEST:
                problem = f"has a chat template named {name[:80]!r}, which can't be the name of a file"
                raise CheckpointError(f"{source} {problem}. Open it as it is, or convert it anew.")
            path = folder / "chat_template.jinja" if name == "default" else additional / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    ids = {name: raw[name] for name in ("bos_token_id", "eos_token_id") if raw.get(name) is not None}
    _put(folder / "generation_config.json", ids | read_sampling(source))


def _put(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


LENGTH = 512  # tokens of a sequence: longer texts are cut
FEWEST = 8  # the fewest tokens of a useful sequence


def calibrate(
    model: str | Path | LoadedModel,
    texts: Sequence[str] | Sequence[Sequence[int]],
    *,
    quantize: str | Mapping[str, str | None] = "int4",
    dtype: DTypeLike = "auto",
    max_tokens: int = 8192,
    quiet: bool = False,
    progress: calibration.Report | None = None,
) -> LoadedModel:
    """Return a model in four bits, rounded so that the matrices' products with these texts change least (GPTQ).

    `model` is a folder, a hub id or a model of floats from `rekindle.models.load`; `rekindle.open` takes the result.
    A few pages of text of the kind that the model will see are enough; texts, or lists of token ids, are cut into
    sequences of 512 tokens, at most `max_tokens` of them in all. It takes minutes for a billion parameters and needs
    room for the floats. Experts, the embedding and the head are rounded to the nearest. A bar shows the progress
    unless `quiet`; `progress` is called after each matrix.
    """
    plan = checked_quantize(quantize)
    if plan is None or "int4" not in plan:
        raise ConfigError("quantize", quantize, "has no part in four bits", "Use 'int4', or a dict that names it")
    loaded = model if isinstance(model, LoadedModel) else load(tiny.located(model), dtype=dtype)
    if loaded.graph.precision.quantizes:
        raise ConfigError("model", loaded, "is quantised already", "Load it without quantize")
    sequences = [*_cut(loaded, texts, max_tokens)]
    if not sequences:
        raise ConfigError("texts", f"{len(texts)} texts", "hold too few tokens", "Pass some pages of text")
    status = CalibrationProgress(0, 0, "")

    def report(reached: CalibrationProgress) -> None:
        nonlocal status
        status = reached
        if progress is not None:
            progress(reached)

    def look() -> State:
        return State(
            f"calibrating: {status or 'the first layer'}", status.done / status.total if status.total else None
        )

    with Activity(look, quiet=quiet):
        return calibration.calibrate(loaded, sequences, plan, report=report)


def _cut(model: LoadedModel, texts: Sequence[str] | Sequence[Sequence[int]], most: int) -> Iterator[list[int]]:
    """Yield the texts as sequences of at most LENGTH tokens, until there are `most`."""
    tokenizer, remaining = None, most
    length = min(LENGTH, model.config.max_position_embeddings)
    for text in texts:
        if isinstance(text, str):
            if model.folder is None:
                problem = "needs a tokenizer, and the model has no folder"
                raise ConfigError("texts", text[:40], problem, "Pass lists of token ids")
            tokenizer = tokenizer or Tokenizer.load(model.folder)
            tokens = tokenizer.encode(text)
        else:
            tokens = [int(token) for token in text]
        for start in range(0, len(tokens), length):
            part = tokens[start : start + min(length, remaining)]
            if len(part) >= FEWEST:
                remaining -= len(part)
                yield part
            if remaining < FEWEST:
                return
