"""A checkpoint of any format as a GGUF file: its tensors, their types, and their blocks piece by piece.

`write_gguf` writes any file of this format: metadata, the table of tensors, and the tensors.

`describe` makes the metadata of a config, and the tensors that say how a model rotates. It refuses a model that needs a
key that llama.cpp lacks, or that differs from what llama.cpp knows by the architecture alone: the file would open as
another model.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.family import GgufForm
from rekindle._src.models.loading.gguf.blocks import BY_NAME, F16, F32, NUMBERS, WRITTEN, BlockType, quantize
from rekindle._src.models.loading.gguf.files import MAGIC
from rekindle._src.models.loading.gguf.header import ALIGNMENT, read_header
from rekindle._src.models.loading.gguf.names import in_block, place, within_layer
from rekindle._src.models.loading.gguf.rows import GgufRows, paired_rows
from rekindle._src.models.loading.manifest import Manifest, Source
from rekindle._src.models.loading.named_tensors import named_tensors
from rekindle._src.models.loading.stored import StoredCheckpoint
from rekindle._src.models.loading.tensor_files import TensorEntry, pieces_of, rows_of
from rekindle._src.models.nn.rope import RopeSpec
from rekindle._src.models.registry import gguf_form
from rekindle.errors import ConfigError, UnsupportedModel

TYPES = ("auto", *(name.lower() for name in WRITTEN))
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}  # general.file_type
_PLAIN = ("ffn_gate_inp", "position_embd")  # matrices that llama.cpp wants in float32
_OUTER = ("token_embd.weight", "output.weight")  # in eight bits where the others have four
VERSION = 3
Done = Callable[[int], None]


class _Member(NamedTuple):
    """A tensor of the checkpoint that a tensor of the file consists of, alone or as one expert of a stack."""

    entry: TensorEntry
    source: Source
    head: int  # rows of a head stored with its pairs side by side; 0 for others


class OutgoingTensor(NamedTuple):
    """A tensor to write: its place in the table."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) // self.kind.values * self.kind.layout.itemsize


class GgufExport(NamedTuple):
    """The arguments of `write_gguf`."""

    metadata: dict[str, Any]
    tensors: tuple[OutgoingTensor, ...]
    pieces: Iterator[NDArray[Any]]


def export(stored: StoredCheckpoint, config: ModelConfig, kind: str, done: Done) -> GgufExport:
    """Return the file's weights and the metadata that describes them; `done` is called with the bytes that were read.

    `kind` is a type for the matrices, or "auto": each keeps its own. Blocks that already are of the type stay as they
    are. Rows that no blocks fill are stored in 16 bits, and four-bit files have an embedding and a head of eight
    bits.
    """
    if kind not in TYPES:
        raise ConfigError("type", kind, "is not a type of GGUF that is written", f"Use one of {', '.join(TYPES)}")
    declared, entries = named_tensors(stored, config)
    metadata, extra = (_kept_metadata(stored, config), {}) if stored.is_gguf else describe(config)
    metadata |= _numbers(config, declared, entries)
    plain = {name: (OutgoingTensor(name, F32, values.shape), values) for name, values in extra.items()}
    if stored.is_gguf:
        plain |= _rope_tensors(stored)
    members = _members(config, declared, entries)
    types = {name: _type_of(name, parts, kind, config) for name, parts in members.items()}
    tensors = [OutgoingTensor(name, types[name], _shape(parts)) for name, parts in members.items()]
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


def _kept_metadata(stored: StoredCheckpoint, config: ModelConfig) -> dict[str, Any]:
    """Return the metadata of a GGUF file, except for how it was stored, and without blocks that draft tokens."""
    metadata = read_header(stored.headers[0].file).metadata
    dropped = ("split.", "general.alignment", "quantize.")
    kept = {key: _plain(value) for key, value in metadata.items() if not key.startswith(dropped)}
    prefix = metadata.text("general.architecture")
    if kept.pop(f"{prefix}.nextn_predict_layers", 0):
        blocks, layers = kept[f"{prefix}.block_count"], config.num_layers
        for key, value in kept.items():
            if key.startswith(f"{prefix}.") and not isinstance(value, str) and np.shape(value) == (blocks,):
                kept[key] = value[:layers]
        kept[f"{prefix}.block_count"] = layers
    return kept


def _numbers(config: ModelConfig, declared: Manifest, entries: Mapping[str, TensorEntry]) -> dict[str, list[float]]:
    """Return the tensors of one number that the file has in its metadata, an array of all layers for each."""
    form, values = gguf_form(config.model_type), dict[str, list[float]]()
    for name in (name for source in declared.sources.values() for name in source.names):
        inner = within_layer(name)
        if inner is not None and inner[1] in form.numbers:  # sources are in the order of layers
            (number,) = rows_of(entries[name]._replace(shape=(1,)), 0, 1)
            values.setdefault(form.numbers[inner[1]], []).append(float(number))
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype == np.bool_ else value
    return value if isinstance(value, (str, bool, int, float)) else list(value)


def _rope_tensors(stored: StoredCheckpoint) -> dict[str, tuple[OutgoingTensor, NDArray[np.float32]]]:
    tensors = {}
    for entry in (entry for header in stored.headers for entry in header.entries):
        if entry.name.startswith(("rope_freqs.", "rope_factors_")) and entry.dtype == "F32":
            rows = GgufRows(entry.file, entry.name, F32, entry.shape, entry.offset)
            tensors[entry.name] = (OutgoingTensor(entry.name, F32, entry.shape), rows(0, entry.shape[0]))
    return tensors


def _members(config: ModelConfig, declared: Manifest, entries: Mapping[str, TensorEntry]) -> dict[str, list[_Member]]:
    """Return the members of each tensor of the file, in the order of the experts."""
    members: dict[str, list[_Member]] = {}
    form = gguf_form(config.model_type)
    for source in declared.sources.values():
        for name in source.names:
            if (inner := within_layer(name)) is not None and inner[1] in form.numbers:
                continue
            where = place(in_block(name, config.num_layers), form)
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


def write_gguf(
    path: Path, metadata: Mapping[str, object], tensors: Sequence[OutgoingTensor], pieces: Iterable[NDArray[Any]]
) -> None:
    """Write a file. `pieces` are the tensors' blocks in the order of `tensors`, in any number of pieces for each.

    Values of the metadata are bool, int (32 bits, unsigned unless negative), float (32 bits), str, lists of one of
    these (integers signed), or numpy arrays of numbers.
    """
    header = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _text(key) + _value(value)
    offset = 0
    for tensor in tensors:
        header += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1])
        header += struct.pack("<IQ", NUMBERS[tensor.kind.name], offset)
        offset += _padded(tensor.nbytes)
    header += bytes(-len(header) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(header)
        _write_tensors(file, tensors, iter(pieces))


def _write_tensors(file: BinaryIO, tensors: Sequence[OutgoingTensor], pieces: Any) -> None:
    for tensor in tensors:
        remaining = tensor.nbytes
        while remaining > 0:
            piece = next(pieces)
            file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            remaining -= piece.nbytes
        assert remaining == 0, f"{tensor.name}: pieces are {-remaining} bytes too long"
        file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        number = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11, "f8": 12}[
            f"{value.dtype.kind}{value.dtype.itemsize}"
        ]
        return struct.pack("<IIQ", 9, number, value.size) + value.astype(value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return _value(np.asarray(value, np.int32))  # llama.cpp takes the kinds of tokens in no other type
    if isinstance(value, (list, tuple)):
        kind, _ = _single(value[0] if value else "")
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_single(item)[1] for item in value)
    kind, data = _single(value)
    return struct.pack("<I", kind) + data


def _single(value: Any) -> tuple[int, bytes]:
    """Return the number of a value's type, and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        if not -(1 << 31) <= value < 1 << 32:
            return (11, struct.pack("<q", value)) if value < 0 else (10, struct.pack("<Q", value))
        return (5, struct.pack("<i", value)) if value < 0 else (4, struct.pack("<I", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _text(value)


Tensors = dict[str, NDArray[np.float32]]


def describe(config: ModelConfig) -> tuple[dict[str, Any], Tensors]:
    """Return the metadata of the architecture, and extra tensors.

    Raise `UnsupportedModel` for a model that llama.cpp can't express.
    """
    form = gguf_form(config.model_type)
    if form.reads_only:
        raise _refuse(config, form.reads_only)
    if config.only_embeds:
        raise _refuse(config, "it is for embeddings alone, which the file's architecture does not say")
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{form.norm}": config.norm_eps,
        **_experts(config, form),
        **_windows(config, form),
        **form.fields(config),
    }
    rope, tensors = _rope(config, form)
    fields |= rope
    for name, cap in (("final_logit_softcapping", config.final_soft_cap), *_attention_cap(config)):
        if cap is not None:
            fields[name] = float(cap)
    _check(config, form)
    arch = form.architecture
    general = {"general.architecture": arch, "general.type": "model"}
    return general | {f"{arch}.{name}": value for name, value in fields.items()}, tensors


def _refuse(config: ModelConfig, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"this {config.model_type} model can't be a GGUF file: {what}. Export it as a folder of safetensors."
    )


def _experts(config: ModelConfig, form: GgufForm) -> dict[str, Any]:
    specs = {spec for spec in config.moe if spec is not None}
    if not specs:
        return {}
    if len(specs) > 1 or None in config.moe:
        raise _refuse(config, "it has layers without experts, or with different ones")
    (spec,) = specs
    if not spec.normalize:
        raise _refuse(config, "llama.cpp normalizes the weights of the chosen experts, and norm_topk_prob is false")
    fields = {"expert_count": spec.num_experts, "expert_used_count": spec.top_k}
    return fields | ({"expert_feed_forward_length": spec.intermediate_size} if form.expert_length else {})


def _attention_cap(config: ModelConfig) -> list[tuple[str, float | None]]:
    caps = {spec.soft_cap for spec in config.attention}
    if len(caps) > 1:
        raise _refuse(config, "its layers cap scores differently")
    return [("attn_logit_softcapping", cap) for cap in caps]


def _windows(config: ModelConfig, form: GgufForm) -> dict[str, Any]:
    sizes = [spec.sliding_window for spec in config.attention]
    windows = {size for size in sizes if size is not None}
    if not windows:
        return {}
    if len(windows) > 1:
        raise _refuse(config, "its layers have sliding windows of different sizes")
    (size,) = windows
    try:
        return {"attention.sliding_window": size, **form.windows([window is not None for window in sizes])}
    except ValueError as error:
        raise _refuse(config, str(error)) from None


def _rope(config: ModelConfig, form: GgufForm) -> tuple[dict[str, Any], Tensors]:
    if not any(form.rotates(layer) for layer in range(config.num_layers)):
        return {}, {}
    spec = _main_rope(config)
    fields: dict[str, Any] = {"rope.freq_base": spec.theta, "rope.dimension_count": spec.dim}
    local = {layer.rope for layer in config.attention if layer.sliding_window} - {spec, None}
    if local and form.local_rope:
        (local_rope,) = local
        assert local_rope is not None, "None was taken away"
        if local_rope.kind != "default":
            raise _refuse(config, "the rope of its local layers is scaled")
        fields["rope.freq_base_swa"] = local_rope.theta
    tensors: Tensors = {}
    if spec.kind in ("llama3", "factors"):
        plain = RopeSpec(theta=spec.theta, dim=spec.dim)
        exact = spec.kind == "factors"
        stretch = np.asarray(spec.short_factor) if exact else plain.frequencies() / spec.frequencies()
        tensors["rope_freqs.weight"] = stretch.astype(np.float32)
    elif spec.kind == "longrope":
        tensors["rope_factors_long.weight"] = np.asarray(spec.long_factor, np.float32)
        tensors["rope_factors_short.weight"] = np.asarray(spec.short_factor, np.float32)
        fields["rope.scaling.attn_factor"] = spec.attention_factor
        fields["rope.scaling.original_context_length"] = spec.original_length
    elif spec.kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": spec.kind, "rope.scaling.factor": spec.factor}
        if spec.kind == "yarn":
            fields |= _yarn(config, spec)
    elif spec.kind != "default":
        raise _refuse(config, f"llama.cpp has no {spec.kind!r} rope")
    return fields, tensors


def _yarn(config: ModelConfig, spec: RopeSpec) -> dict[str, Any]:
    if not spec.truncate:
        raise _refuse(config, "llama.cpp rounds the ramp of YaRN, and truncate is false")
    usual = 0.1 * float(np.log(spec.factor)) + 1.0
    return {
        "rope.scaling.original_context_length": spec.original_length,
        "rope.scaling.attn_factor": spec.attention_factor / usual,
        "rope.scaling.yarn_beta_fast": spec.beta_fast,
        "rope.scaling.yarn_beta_slow": spec.beta_slow,
    }


def _main_rope(config: ModelConfig) -> RopeSpec:
    """Return the rope of the layers that see everything, or of all layers."""
    wide = [layer for layer in config.attention if layer.sliding_window is None and layer.rope is not None]
    ropes = {layer.rope for layer in wide or config.attention} - {None}
    if len(ropes) != 1:
        raise _refuse(config, "its layers have different ropes")
    (spec,) = ropes
    assert spec is not None, "None was taken away"
    return spec


def _check(config: ModelConfig, form: GgufForm) -> None:
    """Raise `UnsupportedModel` if the model differs from what llama.cpp knows by the architecture alone."""
    scales = {spec.scale for spec in config.attention}
    usual = float(form.scale_dim(config) ** -0.5)
    if not form.scales and (len(scales) > 1 or not np.isclose(max(scales), usual, rtol=1e-6)):
        raise _refuse(config, f"llama.cpp multiplies its scores by {usual:.6g}, and here it is {max(scales):.6g}")
    wrong = [n for n, spec in enumerate(config.attention) if (spec.rope is not None) != form.rotates(n)]
    if wrong:
        does = "does not rotate" if form.rotates(wrong[0]) else "rotates"
        raise _refuse(config, f"layer {wrong[0]} {does}, and in llama.cpp it is the other way round")
    if config.activation != form.activation:
        raise _refuse(
            config, f"llama.cpp computes it with {form.activation}, and its activation is {config.activation}"
        )
