"""Loading a Hugging Face folder: it is checked as a whole, then each tensor is read once into its final form."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from rekindle._src.core.dtypes import DTypeLike, checked_dtype, checked_quantize
from rekindle._src.core.html import count
from rekindle._src.core.memory import give_back
from rekindle._src.models.base import ALONE, Graph, LoadedModel, Placement, abstract_model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading import kept_weights, known_models, prepared, reading
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.models.loading.kept_weights import MappedWeights
from rekindle._src.models.loading.known_models import KnownModel
from rekindle._src.models.loading.leaf_arrays import Reads, Rounding
from rekindle._src.models.loading.load_progress import ByteMeter, Report
from rekindle._src.models.loading.stored import StoredCheckpoint, look, read_config
from rekindle._src.models.loading.tensor_files import FLOATS, WHOLE, Header, TensorEntry, listed
from rekindle._src.models.nn.packing import matrix_shape, packing, packings_in
from rekindle._src.models.precision import resolve_dtype
from rekindle._src.models.registry import config_from_hf
from rekindle._src.models.unpacking import unpacked_graph
from rekindle.errors import CheckpointError, StoreError
from rekindle_kernels import traits

__all__ = ["Checkpoint", "CheckpointPlan", "describe", "inspect", "load", "read", "read_config"]
# Buffers that older versions of transformers saved with the weights, which follow from the config.
HARMLESS = (r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", r"(.*\.)?attn\.(masked_)?bias")


class Checkpoint(NamedTuple):
    """A checkpoint with its config parsed and its headers read, but not its weights."""

    stored: StoredCheckpoint
    config: ModelConfig

    @property
    def folder(self) -> Path:
        """The folder, or the GGUF file: where tokenizer and chat template are, too."""
        return self.stored.path

    @property
    def headers(self) -> tuple[Header, ...]:
        return self.stored.headers

    @property
    def fingerprint(self) -> str:
        """The digest of config and weights as stored, whatever precision they are loaded in."""
        return self.stored.fingerprint

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for header in self.headers for entry in header.entries)


def inspect(model: str | Path) -> Checkpoint:
    """Read config, headers and fingerprint of a folder, GGUF file or hub id: milliseconds, whatever the size."""
    stored = look(model)
    return Checkpoint(stored, config_from_hf(stored.raw))


class CheckpointPlan(NamedTuple):
    """The model that a checkpoint becomes in one precision: everything that programs need, without the weights."""

    found: Checkpoint
    graph: Graph
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of the leaves
    dtype: str
    quantize: str | None
    quantize_embeddings: bool
    kept: Path | None  # the cache slot of its leaves, filled or not; None without a cache
    reads: Reads | None  # what to read for each leaf; None where the leaves are kept already
    described: Path | None = None  # the cache slot of this description; None if it is kept already, or not to be kept

    @property
    def fingerprint(self) -> str:
        """The digest of config and weights in this precision; everything persistent is keyed by it."""
        name = "as stored" if self.graph.precision.kinds else self.quantize  # matrices stay as they are stored
        if self.quantize is not None and self.graph.precision.unpacked:
            name = f"{self.quantize}, unpacked"
        return fingerprints.with_precision(self.found.fingerprint, self.dtype, name, self.quantize_embeddings)

    def keep(self) -> None:
        """Keep the description in the cache, if the next start can do without the checkpoint's headers then."""
        if self.described is not None and self.reads is not None:
            known = KnownModel(self.graph, self.shapes, self.dtype)
            known_models.keep_reads(self.described, self.found.stored, known, self.reads)


def describe(
    model: str | Path,
    *,
    dtype: DTypeLike = "auto",
    quantize: str | Mapping[str, str | None] | None = None,
    quantize_embeddings: bool = True,
    cache_dir: str | Path | None = None,
    divided: bool = False,
    seen: StoredCheckpoint | None = None,
    unpack: bool | None = None,
    device_memory: int | None = None,
    projector: str | None = None,
    drafts: bool = False,
) -> CheckpointPlan:
    """Check a folder or hub id, and describe the model that `load` would return for it. Nothing is written.

    With dtype "auto" and no `quantize`, matrices that are stored in groups of four bits stay as they are, and on a CPU
    those of six and eight too. A model that will be `divided` over devices can be divided after every group. Quantised
    matrices that this machine's products would unpack each time are described as floats (`unpacking`), by default if
    there is room for them in addition to pages of `device_memory`. `seen` is the result of `look`, if there is one
    already; `projector` and `drafts` are its arguments.
    """
    weights, quantize = checked_dtype("dtype", dtype), checked_quantize(quantize)
    seen = look(model, projector, drafts=drafts) if seen is None else seen
    keeps_in_groups = kept_weights.keeps_groups(seen, weights, quantize)
    if not (traits().unpacks and (keeps_in_groups or quantize is not None)):
        unpack = False
    elif unpack is None:
        unpack = kept_weights.has_room(seen, resolve_dtype(weights, None), device_memory)
    slot = known = reads = description = None
    if cache_dir is not None and sum(header.size for header in seen.headers) >= prepared.MIN_BYTES:
        resolved = resolve_dtype(weights, None)
        options = kept_weights.options(
            seen, weights, quantize, quantize_embeddings, divided, resolved=resolved, unpacked=unpack
        )
        slot = prepared.slot(cache_dir, seen.fingerprint, *options)
        with _damage_warns():
            known = prepared.known(slot)
    elif cache_dir is not None and quantize is None and not seen.may_be_quantized and not divided:
        description = prepared.slot(cache_dir, seen.fingerprint, weights, folder=known_models.FOLDER)
        known, reads = known_models.find_reads(description, seen) or (None, None)
        description = None if known is not None else description
    if known is None:
        config = config_from_hf(seen.raw)
        _check_counts(seen, config)
        name = resolve_dtype(weights, config)
        kinds: tuple[tuple[str, str], ...] = ()
        if keeps_in_groups:
            from rekindle._src.models.loading.four_bits import stored_kinds
            from rekindle._src.models.loading.named_tensors import named_tensors

            # Elsewhere products with 16 bits are faster than those with six or eight in groups.
            kinds = stored_kinds(*named_tensors(seen, config), eight=_on_cpu(), steps=not divided)
        graph, shapes = abstract_model(config, name, quantize, quantize_embeddings=quantize_embeddings, kinds=kinds)
        if unpack:
            graph, shapes = unpacked_graph(graph) or (graph, shapes)
        # Every difference is an error now, before programs and pages are made.
        reads = plan(Checkpoint(seen, config), graph, shapes)
        known = KnownModel(graph, shapes, name)
    checkpoint = Checkpoint(seen, known.graph.config)
    return CheckpointPlan(
        checkpoint, known.graph, known.shapes, known.dtype, quantize, quantize_embeddings, slot, reads, description
    )


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _check_counts(seen: StoredCheckpoint, config: ModelConfig) -> None:
    """Raise `CheckpointError`, before the model is built, for more layers or experts than there are tensors."""
    # In GGUF the experts of a layer are stacked to one tensor.
    tensors = sum(entry.shape[0] if len(entry.shape) == 3 else 1 for header in seen.headers for entry in header.entries)
    experts = sum(spec.num_experts for spec in config.moe if spec is not None)
    if config.num_layers + experts > tensors:
        sizes = f"{config.num_layers:,} layers" + (f" with {experts:,} experts in all" if experts else "")
        raise CheckpointError(
            f"{seen.path} does not hold the {config.model_type} model that {seen.described_by} describes: {sizes}, and "
            f"the weights are {tensors:,} tensors. Check that both belong together."
        )


@contextlib.contextmanager
def _damage_warns() -> Iterator[None]:
    """Turn damage of cached weights into a warning: the checkpoint is still there and is read again."""
    try:
        yield
    except StoreError as error:
        warnings.warn(f"{error}; loading the checkpoint again", stacklevel=4)


def load(
    model: str | Path,
    *,
    dtype: DTypeLike = "auto",
    quantize: str | Mapping[str, str | None] | None = None,
    quantize_embeddings: bool = True,
    progress: Report | None = None,
    cache_dir: str | Path | None = None,
    place: reading.Place = reading.place_on_default_device,
) -> LoadedModel:
    """Load a folder (or hub id) tensor by tensor into its final layout, in parallel.

    With `cache_dir`, weights that had to be converted or quantised are kept there in their final form, on CPU others
    up to 4 GiB too, and the next start uses those. `progress` is called from this thread. `place(path, array)` puts a
    leaf on its device or devices.
    """
    described = describe(
        model, dtype=dtype, quantize=quantize, quantize_embeddings=quantize_embeddings, cache_dir=cache_dir
    )
    return read(described, progress=progress, place=place)


def read(
    described: CheckpointPlan,
    *,
    progress: Report | None = None,
    place: reading.Place = reading.place_on_default_device,
    placement: Placement = ALONE,
    brought: Callable[[Path], MappedWeights | None] = lambda kept: None,
) -> LoadedModel:
    """Load the weights of a described checkpoint, from the cache if they are there; onto a mesh with `placement`.

    `brought` returns kept weights that were brought into memory before.

    A host has at most `reading.WINDOW` bytes of leaves at a time that are not on their devices yet. On a mesh it reads
    and holds only the rows that its own devices need. Matrices with divided columns are read as a whole, piece by
    piece.
    """
    checkpoint, graph, shapes, slot, reads = (
        described.found, described.graph, described.shapes, described.kept, described.reads,
    )  # fmt: skip
    fingerprint = described.fingerprint
    described.keep()
    if slot is not None:
        with _damage_warns():
            arrays = prepared.load(
                slot, graph, shapes, place=place, placement=placement, report=progress, brought=brought
            )
            if arrays is not None:
                return LoadedModel(checkpoint.config, graph, arrays, fingerprint, checkpoint.folder, placement)
    leaves, entries = reads or plan(checkpoint, graph, shapes)
    meter = ByteMeter(reading.bytes_to_read(leaves, entries, placement), progress)
    by_path = reading.read_leaves(leaves, entries, place=place, meter=meter, placement=placement)
    meter.tell(final=True)
    arrays = tuple(by_path[path] for path in graph.paths)
    maps = not placement.divided and prepared.maps(place)
    # With several processes, others have other parts.
    if slot is not None and placement.processes == 1 and _worth_keeping(leaves, entries, maps=maps):
        prepared.save(
            slot, graph, described.dtype, placement.hold_all(arrays, shapes), name=readable_name(checkpoint.folder)
        )
    give_back()
    return LoadedModel(checkpoint.config, graph, arrays, fingerprint, checkpoint.folder, placement)


def plan(found: Checkpoint, graph: Graph, shapes: Iterable[jax.ShapeDtypeStruct]) -> Reads:
    """Plan the reads for each leaf. One `CheckpointError` lists all missing, unexpected and misshapen tensors."""
    # A start that finds everything kept does not read: it needs none of the formats.
    from rekindle._src.models.drafters.unread import draft_heads
    from rekindle._src.models.loading.named_tensors import named_tensors, shown_name

    manifest, entries = named_tensors(found.stored, found.config)
    shown = functools.partial(shown_name, found.stored, found.config, manifest)
    shapes_by_path = dict(zip(graph.paths, shapes, strict=True))
    leaves, read_names, problems = [], set[str](), list[str]()
    packings = packings_in(shapes_by_path)
    rounded = {} if graph.precision.quantize is None else dict(graph.precision.unpacked)
    for path, source in manifest.sources.items():
        leaf = shapes_by_path[path]
        shape, dtype = matrix_shape(leaf), graph.precision.value_dtype(leaf.dtype)
        stored = None if dtype == leaf.dtype else np.dtype(leaf.dtype)
        extras = {name: path.removesuffix("weight") + name for name in ("scale", "minimum")}
        scale, minimum = (extra if extra in shapes_by_path and extra != path else None for extra in extras.values())
        kind = rounded.get(path.removesuffix(".weight"))
        rounding = None if kind is None else Rounding(packing(kind, path, shape))
        packed = packings.get(path)
        leaves.append(reading.LeafPlan(path, source, shape, dtype, scale, stored, packed, minimum, rounding))
        for part in source.parts(shape):
            read_names.add(part.name)
            entry = entries.get(part.name)
            if entry is None:
                problems.append(f"missing: {shown(part.name)} {list(part.shape)}")
            elif entry.shape != part.shape:
                problems.append(f"{shown(part.name)}: shape {list(entry.shape)}, expected {list(part.shape)}")
            elif not (entry.has_numbers or (source.whole and entry.dtype in WHOLE)):
                expected = ", ".join(sorted(WHOLE if source.whole else FLOATS))
                problems.append(f"{part.name}: stored as {entry.dtype}, expected one of {expected}")
    every = {*entries, *(entry.name for header in found.headers for entry in header.entries)}
    ignored = (*manifest.ignored, *HARMLESS, *draft_heads(every, found.config.num_layers))
    pattern = re.compile("|".join(f"(?:{expression})" for expression in ignored))
    problems += [
        f"unexpected: {name}" for name in sorted(entries) if name not in read_names and not pattern.fullmatch(name)
    ]
    if problems:
        raise CheckpointError(
            f"{found.folder} does not hold the {found.config.model_type} model that {found.stored.described_by} "
            f"describes ({count(len(problems), 'difference')}): {listed(list(dict.fromkeys(problems)))}. "
            "Check that both belong together."
        )
    return Reads(leaves, {name: entries[name] for name in read_names})


def _worth_keeping(leaves: Iterable[reading.LeafPlan], entries: Mapping[str, TensorEntry], *, maps: bool) -> bool:
    """True if weights are worth caching: they were converted, or can be memory-mapped and are not too large."""
    converted = sum(
        entries[name].nbytes
        for leaf in leaves
        for name in leaf.source.names
        if leaf.source.transpose or entries[name].numpy_dtype != leaf.dtype
    )
    total = sum(entry.nbytes for entry in entries.values())
    return converted * 4 > total or (maps and total <= prepared.MAX_COPY)
