"""A GGUF file in the place of a Hugging Face folder: its config, and its tensors under Hugging Face's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models import drafters
from rekindle._src.models.loading.gguf.architecture import GgufModel
from rekindle._src.models.loading.gguf.blocks import BY_NAME
from rekindle._src.models.loading.gguf.files import parts
from rekindle._src.models.loading.gguf.header import GgufHeader, GgufTensor, read_headers, stop_tokens
from rekindle._src.models.loading.gguf.names import GgufPlace, in_block, place, within_layer
from rekindle._src.models.loading.manifest import Manifest
from rekindle._src.models.loading.tensor_files import Header, TensorEntry
from rekindle._src.models.registry import family, family_of_gguf, gguf_form, gguf_forms
from rekindle.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.config import ModelConfig
    from rekindle._src.models.family import GgufForm

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Tensors that say how the model rotates, which its config has taken from them, or that llama.cpp writes and derives.
# Products with NVFP4 in 4 bits would need the scales of their inputs.
_NOT_WEIGHTS = (
    r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight", r"blk\.\d+\.attn_rot_embd", r".+\.input_scale",
)  # fmt: skip


def look(path: Path, *, outline: bool = False) -> tuple[dict[str, Any], tuple[Header, ...]]:
    """Return the equivalent of config.json, and the headers of the files, with llama.cpp's names of tensors.

    An `outline` is read without vocabularies, so that its config has no tokens that end a text.
    """
    headers = read_headers(parts(path), outline=outline)
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    # The metadata is in the first part, and the ropes' tensors may be in any.
    first = _together(headers)
    raw = _without_tokens(first, tensors) if outline else config(first, tensors)
    read = tuple(gguf_header(header) for header in headers)
    return raw, (_with_numbers(read[0], first, tensors, gguf_form(raw["model_type"])), *read[1:])


def config(header: GgufHeader, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """Return the equivalent of config.json. Raise `UnsupportedModel` for an architecture that no family implements."""
    return _without_tokens(header, tensors) | stop_tokens(header.metadata)


def _without_tokens(header: GgufHeader, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """Return the same without the tokens that begin and end a sequence."""
    name = header.metadata.text("general.architecture")
    model_type = family_of_gguf(name)
    if model_type is None:
        raise UnsupportedModel(
            f"{header.path}: general.architecture={name[:80]!r} is not implemented. "
            f"Use one of: {', '.join(sorted({form.architecture for form in gguf_forms().values()}))}."
        )
    if header.metadata.text("general.type", "model") != "model":
        kind = header.metadata.text("general.type")
        raise UnsupportedModel(f"{header.path}: general.type={kind[:80]!r} is not a model. Pass the model's own file.")
    model = GgufModel(header, name, tensors, assists=model_type in drafters.MODULES)
    try:
        model_type = gguf_form(model_type).variant(model) or model_type
        keys = gguf_form(model_type).read(model)
    except CheckpointError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:  # families calculate with them
        raise UnsupportedModel(
            f"{header.path}: its metadata has a value of the wrong kind ({type(error).__name__}: {str(error)[:200]}). "
            "Download it again."
        ) from error
    embedding = tensors.get("token_embd.weight")
    return {
        "model_type": model_type,
        "architectures": [family(model_type).architecture],
        **keys,
        "vocab_size": _vocab_size(model) if embedding is None else embedding.shape[0],
        "dtype": _dtype(embedding, tensors),
    }


def _vocab_size(model: GgufModel) -> int:
    """Return the size of the vocabulary of a file without an embedding, such as a head's."""
    size = model.integer("vocab_size", None)
    return len(model.metadata.texts("tokenizer.ggml.tokens")) if size is None else int(size)


def _dtype(embedding: GgufTensor | None, tensors: dict[str, GgufTensor]) -> str:
    """Return the dtype of matrices that are plain numbers; quantised ones stand for numbers that 16 bits can't hold."""
    kinds = {tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1}
    (only,) = kinds if len(kinds) == 1 else ("",)
    return _FLOATS.get(only, "bfloat16")


def _together(read: Sequence[GgufHeader]) -> GgufHeader:
    """Return the header of the first part. Raise `CheckpointError` for parts of different models.

    Parts after the first have few keys: their own place, the number of parts, and the number of all tensors.
    """
    first, tensors = read[0].metadata, sum(len(header.tensors) for header in read)
    architecture = first.text("general.architecture", None)
    for number, header in enumerate(read):
        own = header.metadata
        count = own.integer("split.count", len(read))
        if count not in (0, len(read)):
            raise CheckpointError(
                f"{header.path}: split.count={count}, and {len(read)} of the files are here. Keep the names of the "
                "parts."
            )
        expected = {
            "split.no": (own.integer("split.no", number), number),
            "split.tensors.count": (own.integer("split.tensors.count", tensors), tensors),
            "general.architecture": (own.text("general.architecture", architecture), architecture),
        }
        for key, (value, wanted) in expected.items():
            if value != wanted and (len(read) > 1 or key == "split.no"):
                shown = value[:80] if isinstance(value, str) else value
                raise CheckpointError(
                    f"{header.path}: {key}={shown!r}, and as part {number + 1} of {len(read)} of "
                    f"{read[0].path.name} it has to be {wanted!r}. Download all parts again."
                )
    return read[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    """A tensor of one number, which the metadata has."""

    value: np.float32

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        return np.full(stop - start, self.value)


def _with_numbers(header: Header, read: GgufHeader, tensors: dict[str, GgufTensor], form: GgufForm) -> Header:
    """Return the header with the numbers of layers that the metadata has as tensors, such as "blk.0.xielu.beta"."""
    if not form.numbers:
        return header
    model, entries = GgufModel(read, read.metadata.text("general.architecture"), tensors), list[TensorEntry]()
    for key in form.numbers.values():
        for layer, value in enumerate(model.each_number(key)):
            entries.append(TensorEntry(f"blk.{layer}.{key}", header.file, "F32", (1,), 0, 4, _Number(value)))
    return header._replace(entries=(*header.entries, *entries))


def gguf_header(header: GgufHeader) -> Header:
    entries = tuple(
        TensorEntry(tensor.name, header.path, tensor.kind.name, tensor.shape, tensor.offset, tensor.nbytes)
        for tensor in header.tensors
    )
    return Header(header.path, entries, {}, header.digest, header.size)


def tensors(
    headers: Sequence[Header], config: ModelConfig, declared: Manifest
) -> tuple[Manifest, dict[str, TensorEntry]]:
    """Return the manifest as it is for this file, and its tensors under the manifest's names.

    Tensors that are no part of the model keep llama.cpp's names. Missing tensors are absent.
    """
    from rekindle._src.models.loading.gguf import rows  # it imports JAX, which `look` doesn't need

    form = gguf_form(config.model_type)
    entries = {entry.name: entry for header in headers for entry in header.entries}
    layers = range(config.num_layers)
    weights = {f"blk.{layer}.{name}" for name in form.tensors.values() if name.endswith(".scale") for layer in layers}
    stored = rows.with_factors(entries, weights)
    # llama.cpp's converter has already transposed and added, as the manifest tells the loader to.
    sources = {path: dataclasses.replace(source, transpose=False, add=0.0) for path, source in declared.sources.items()}
    named, used = dict[str, TensorEntry](), set[str]()
    several = form.joined(config)
    rows_of_name = {source.names[0]: source.rows[0] for source in sources.values()}
    for name in dict.fromkeys(name for source in sources.values() for name in source.names):
        theirs = in_block(name, config.num_layers)
        where = place(theirs, form)
        if where.name not in stored and where.name.endswith(".nextn.shared_head_norm.weight"):
            where = place("model.norm.weight", form)  # the head has none of its own
        if (inner := within_layer(theirs)) is not None:
            layer, own = inner
            pieces = [f"blk.{layer}.{piece}" for piece in several.get(own, ())]
            how = form.rewritten(config, layer, own) if layer < config.num_layers else None
            if pieces and all(piece in stored for piece in pieces):
                whole = rows.joined(name, [stored[piece] for piece in pieces])
                if whole is not None:
                    named[name] = whole
                    used.update(pieces)
                continue
            if how is not None and where.name in stored:
                named[name] = rows.entry_of(name, stored[where.name], how)
                used.add(where.name)
                continue
        entry = _entry(name, where, stored, config.head_dim)
        if entry is None and f".{rows.WHOLE}." in where.name:
            both = rows.latent_entry(name, where.name, stored)
            if both is not None:
                named[name] = both[0]
                used.update(both[1])
        elif entry is not None:
            # llama.cpp drops the axis of a matrix of one row.
            lone = len(entry.shape) == 1 and rows_of_name.get(name) == 1 and entry.shape[0] > 1
            named[name] = entry._replace(shape=(1, *entry.shape)) if lone else entry
            used.add(where.name if where.name in stored else str(where.alone))
    named |= {name: entry for name, entry in stored.items() if name not in used}
    ignored = (*declared.ignored, *_NOT_WEIGHTS)
    if config.tie_embeddings:
        ignored = (*ignored, r"output\.weight")
    return dataclasses.replace(declared, sources=sources, ignored=ignored, prefix=""), named


def llama_cpp_name(name: str, config: ModelConfig) -> str:
    """Return llama.cpp's name of a tensor of the manifest, with the number of the expert where it is one of a stack."""
    where = place(in_block(name, config.num_layers), gguf_form(config.model_type))
    return where.name if where.expert is None else f"{where.name}[{where.expert}]"


def _entry(name: str, where: GgufPlace, stored: Mapping[str, TensorEntry], head_dim: int) -> TensorEntry | None:
    """Return the tensor, or the expert's part of a stack, as an entry of its own."""
    whole = stored.get(where.name)
    if whole is None:
        alone = None if where.alone is None else stored.get(where.alone)
        return None if alone is None else _readable(alone._replace(name=name), where.alone or "", 0)
    if where.expert is None:
        return _readable(whole._replace(name=name), where.name, head_dim if where.paired else 0)
    if len(whole.shape) not in (2, 3) or where.expert >= whole.shape[0]:
        return None
    size = whole.nbytes // whole.shape[0]
    part = whole._replace(name=name, shape=whole.shape[1:], offset=whole.offset + where.expert * size, nbytes=size)
    if where.half is not None:
        rows, inputs = part.shape
        offset = part.offset + where.half * (size // 2)
        part = part._replace(shape=(rows // 2, inputs), offset=offset, nbytes=size // 2)
    return _readable(part, f"{where.name}[{where.expert}]", 0, where.expert)


def _readable(entry: TensorEntry, name: str, paired: int, expert: int = 0) -> TensorEntry:
    """Return the entry with a function that reads it, unless it is stored as plain floats in Hugging Face's order.

    Of the factors of a stack, it has the one of `expert`.
    """
    if isinstance(entry.rows, _Number) or (entry.rows is None and entry.has_numbers and not paired):
        return entry
    kind = BY_NAME[entry.dtype]
    if paired and (entry.shape[0] % paired or paired % 2):  # a wrong shape is reported later, by its name
        paired = 0
    if kind.plain and not entry.has_numbers:
        return entry  # integers: no weights of any family
    from rekindle._src.models.loading.gguf import rows as gguf_rows  # it imports JAX, which `look` does not need

    factors = gguf_rows.factors_of(entry)
    own = factors[expert : expert + 1] if len(factors) > 1 else factors
    return entry._replace(rows=gguf_rows.rows_of(entry, name, paired, own))
