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

from rekindle._src.core.dtypes import DTypeLike
from rekindle._src.core.memory import give_back
from rekindle._src.core.words import count
from rekindle._src.models.base import ALONE, Graph, LoadedModel, Placement, abstract_model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading import kept_weights, known_models, prepared, reading
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.models.loading.kept_weights import AS_STORED, MappedWeights, WeightForm
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

__all__ = ["Checkpoint", "CheckpointPlan", "WeightForm", "describe", "inspect", "load", "read", "read_config"]
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


class KeptLeaves(NamedTuple):
    """Weights that an earlier start has kept in their final form."""

    slot: Path


class ReadingNote(NamedTuple):
    """A small checkpoint with a kept note on how to read it, so that its headers need no check."""

    reads: Reads


class CheckedHeaders(NamedTuple):
    """A checkpoint with headers that were checked in this start."""

    reads: Reads
    slot: Path | None = None  # for its weights once they are read; None without a cache
    note: Path | None = None  # for a note on how to read it; None where there shall be none


class CheckpointPlan(NamedTuple):
    """The model that a checkpoint becomes in one form: everything that programs need, without the weights."""

    found: Checkpoint
    known: KnownModel
    form: WeightForm
    origin: KeptLeaves | ReadingNote | CheckedHeaders

    @property
    def graph(self) -> Graph:
        return self.known.graph

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of the leaves."""
        return self.known.shapes

    @property
    def dtype(self) -> str:
        return self.known.dtype

    @property
    def reads(self) -> Reads | None:
        """The tensors to read for each leaf; None where the weights are kept."""
        return None if isinstance(self.origin, KeptLeaves) else self.origin.reads

    @property
    def slot(self) -> Path | None:
        """The place of the weights in the cache, filled or not; None if they have none."""
        return None if isinstance(self.origin, ReadingNote) else self.origin.slot

    @property
    def fingerprint(self) -> str:
        """The digest of config and weights in this form; everything persistent is keyed by it."""
        precision, quantize = self.graph.precision, self.form.quantize
        name = "as stored" if precision.kinds else quantize  # matrices stay as they are stored
        if quantize is not None and precision.unpacked:
            name = f"{quantize}, unpacked"
        return fingerprints.with_precision(self.found.fingerprint, self.dtype, name, self.form.quantize_embeddings)

    def keep(self) -> None:
        """Keep a note in the cache, if the next start can do without the checkpoint's headers then."""
        if isinstance(self.origin, CheckedHeaders) and self.origin.note is not None:
            known_models.keep_reads(self.origin.note, self.found.stored, self.known, self.origin.reads)


def describe(
    model: str | Path | StoredCheckpoint,
    form: WeightForm = AS_STORED,
    *,
    cache_dir: str | Path | None = None,
    unpack: bool | None = None,
    device_memory: int | None = None,
) -> CheckpointPlan:
    """Check a checkpoint, and describe the model that `load` would return for it. Nothing is written.

    With dtype "auto" and no `quantize`, matrices that are stored in groups of four bits stay as they are, and on a CPU
    those of six and eight too. Quantised matrices that this machine's products would unpack each time are described as
    floats (`unpacking`), by default if there is room for them in addition to pages of `device_memory`.
    """
    stored = model if isinstance(model, StoredCheckpoint) else look(model)
    unpack = _unpacks(stored, form, unpack, device_memory)
    slot = note = None
    if cache_dir is not None and sum(header.size for header in stored.headers) >= prepared.MIN_BYTES:
        options = form.slot_options(stored, resolved=resolve_dtype(form.dtype, None), unpacked=unpack)
        slot = prepared.slot(cache_dir, stored.fingerprint, *options)
        with _damage_warns():
            if (known := prepared.known(slot)) is not None:
                return CheckpointPlan(Checkpoint(stored, known.graph.config), known, form, KeptLeaves(slot))
    elif cache_dir is not None and form.quantize is None and not stored.may_be_quantized and not form.divided:
        note = prepared.slot(cache_dir, stored.fingerprint, form.dtype, folder=known_models.FOLDER)
        if (kept := known_models.find_reads(note, stored)) is not None:
            known, reads = kept
            return CheckpointPlan(Checkpoint(stored, known.graph.config), known, form, ReadingNote(reads))
    known = _abstract(stored, form, unpack=unpack)
    checkpoint = Checkpoint(stored, known.graph.config)
    # Every difference is an error now, before programs and pages are made.
    reads = planned_reads(checkpoint, known.graph, known.shapes)
    return CheckpointPlan(checkpoint, known, form, CheckedHeaders(reads, slot, note))


def _unpacks(stored: StoredCheckpoint, form: WeightForm, option: bool | None, device_memory: int | None) -> bool:
    """True if quantised matrices are held as floats."""
    if not (traits().unpacks and (form.keeps_groups(stored) or form.quantize is not None)):
        return False
    if option is not None:
        return option
    return kept_weights.has_room(stored, resolve_dtype(form.dtype, None), device_memory)


def _abstract(stored: StoredCheckpoint, form: WeightForm, *, unpack: bool) -> KnownModel:
    """Return the model that the checkpoint's config describes."""
    config = config_from_hf(stored.raw)
    _check_counts(stored, config)
    name = resolve_dtype(form.dtype, config)
    kinds: tuple[tuple[str, str], ...] = ()
    if form.keeps_groups(stored):
        from rekindle._src.models.loading.four_bits import stored_kinds
        from rekindle._src.models.loading.named_tensors import named_tensors

        # Elsewhere products with 16 bits are faster than those with six or eight in groups.
        kinds = stored_kinds(*named_tensors(stored, config), eight=on_cpu(), steps=not form.divided)
    graph, shapes = abstract_model(
        config, name, form.quantize, quantize_embeddings=form.quantize_embeddings, kinds=kinds
    )
    if unpack:
        graph, shapes = unpacked_graph(graph) or (graph, shapes)
    return KnownModel(graph, shapes, name)


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _check_counts(stored: StoredCheckpoint, config: ModelConfig) -> None:
    """Raise `CheckpointError`, before the model is built, for more layers or experts than there are tensors."""
    # In GGUF the experts of a layer are stacked to one tensor.
    tensors = sum(
        entry.shape[0] if len(entry.shape) == 3 else 1 for header in stored.headers for entry in header.entries
    )
    experts = sum(spec.num_experts for spec in config.moe if spec is not None)
    if config.num_layers + experts > tensors:
        sizes = f"{config.num_layers:,} layers" + (f" with {experts:,} experts in all" if experts else "")
        raise CheckpointError(
            f"{stored.path} does not hold the {config.model_type} model that {stored.described_by} describes: {sizes}, "
            f"and the weights are {tensors:,} tensors. Check that both belong together."
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
    """Load a folder or hub id tensor by tensor into its final layout, in parallel.

    With `cache_dir`, weights that had to be converted or quantised are kept there in their final form, on CPU others
    up to 4 GiB too, and the next start uses those. `progress` is called from this thread. `place(path, array)` puts a
    leaf on its device or devices.
    """
    form = WeightForm.of(dtype, quantize)._replace(quantize_embeddings=quantize_embeddings)
    return read(describe(model, form, cache_dir=cache_dir), progress=progress, place=place)


def read(
    plan: CheckpointPlan,
    *,
    progress: Report | None = None,
    place: reading.Place = reading.place_on_default_device,
    placement: Placement = ALONE,
    brought: Callable[[Path], MappedWeights | None] = lambda kept: None,
) -> LoadedModel:
    """Load the weights of a planned checkpoint, from the cache if they are there; onto a mesh with `placement`.

    `brought` returns kept weights that were brought into memory before.

    A host has at most `reading.WINDOW` bytes of leaves at a time that are not on their devices yet. On a mesh it reads
    and holds only the rows that its own devices need. Matrices with divided columns are read as a whole, piece by
    piece.
    """
    checkpoint, graph, shapes, slot = plan.found, plan.graph, plan.shapes, plan.slot
    plan.keep()
    if slot is not None:
        with _damage_warns():
            arrays = prepared.load(
                slot, graph, shapes, place=place, placement=placement, report=progress, brought=brought
            )
            if arrays is not None:
                return LoadedModel(checkpoint.config, graph, arrays, plan.fingerprint, checkpoint.folder, placement)
    leaves, entries = plan.reads or planned_reads(checkpoint, graph, shapes)
    meter = ByteMeter(reading.bytes_to_read(leaves, entries, placement), progress)
    by_path = reading.read_leaves(leaves, entries, place=place, meter=meter, placement=placement)
    meter.tell(final=True)
    arrays = tuple(by_path[path] for path in graph.paths)
    maps = not placement.divided and prepared.maps(place)
    # With several processes, others have other parts.
    if slot is not None and placement.processes == 1 and _worth_keeping(leaves, entries, maps=maps):
        prepared.save(
            slot, graph, plan.dtype, placement.hold_all(arrays, shapes), name=readable_name(checkpoint.folder)
        )
    give_back()
    return LoadedModel(checkpoint.config, graph, arrays, plan.fingerprint, checkpoint.folder, placement)


def planned_reads(checkpoint: Checkpoint, graph: Graph, shapes: Iterable[jax.ShapeDtypeStruct]) -> Reads:
    """Plan the reads for each leaf. One `CheckpointError` lists all missing, unexpected and misshapen tensors."""
    # A start that finds everything kept does not read: it needs none of the formats.
    from rekindle._src.models.drafters.unread import draft_heads
    from rekindle._src.models.loading.named_tensors import named_tensors, shown_name

    manifest, entries = named_tensors(checkpoint.stored, checkpoint.config)
    shown = functools.partial(shown_name, checkpoint.stored, checkpoint.config, manifest)
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
    every = {*entries, *(entry.name for header in checkpoint.headers for entry in header.entries)}
    ignored = (*manifest.ignored, *HARMLESS, *draft_heads(every, checkpoint.config.num_layers))
    pattern = re.compile("|".join(f"(?:{expression})" for expression in ignored))
    problems += [
        f"unexpected: {name}" for name in sorted(entries) if name not in read_names and not pattern.fullmatch(name)
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} does not hold the {checkpoint.config.model_type} model that "
            f"{checkpoint.stored.described_by} describes ({count(len(problems), 'difference')}): "
            f"{listed(list(dict.fromkeys(problems)))}. "
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
