"""Writes a checkpoint of any readable format as a GGUF file, or as a Hugging Face folder of safetensors."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rekindle import tiny
from rekindle._src.core.dtypes import dtype_name
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.gguf.export import export as gguf_tensors
from rekindle._src.models.loading.gguf.files import is_gguf
from rekindle._src.models.loading.gguf.write import write_gguf
from rekindle._src.models.loading.load_progress import Meter, Report
from rekindle._src.models.loading.stored import Stored, look
from rekindle._src.models.registry import config_from_hf
from rekindle._src.session import folder_export
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.generation_config import checkpoint_sampling
from rekindle._src.text.gguf.writing import sampling_metadata, template_metadata, tokenizer_metadata
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import CheckpointError, ConfigError

_GGUF_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def export(model: str | Path, out: str | Path, *, type: str = "auto", progress: Report | None = None) -> Path:
    """Write a checkpoint as `out`: a GGUF file if its name ends in .gguf, otherwise a folder of safetensors.

    `model` is a folder, a GGUF file, a hub id or "tiny". `type` is that of the matrices: "f32", "f16", "bf16", and for
    GGUF "q8_0" and "q4_0"; by default each keeps its own, and for a folder quantised ones become floats of 16 bits.
    An existing file is not overwritten, and an unfinished file is not left behind. Returns `out`.
    """
    out = Path(out).expanduser()
    if out.exists():
        raise ConfigError("out", str(out), "exists already", "Remove it, or pass another name")
    type = _GGUF_NAMES.get(dtype_name(type), type)
    stored = look(tiny.folder() if model == "tiny" else model)
    config = config_from_hf(stored.raw)
    meter = Meter(sum(entry.nbytes for header in stored.headers for entry in header.entries), progress)
    with _written(out) as partial:
        if is_gguf(out):
            _write_gguf(stored, config, partial, type, meter)
        else:
            folder_export.write(stored, config, partial, type, meter)
    meter.tell(final=True)
    return out


def _write_gguf(stored: Stored, config: ModelConfig, out: Path, kind: str, meter: Meter) -> None:
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
    """Yield a path beside `out` to write to. At the end it is renamed to `out`, or removed after an error."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.rename(out)
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
