"""Loading a Hugging Face folder: it is checked as a whole, then each tensor is read once into its final form."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.base import Graph, LoadedModel, abstract_model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading import prepared, reading, tensor_files
from rekindle._src.models.loading.differences import listed
from rekindle._src.models.loading.hub import locate
from rekindle._src.models.loading.load_progress import Meter, Report
from rekindle._src.models.loading.manifest import Manifest
from rekindle._src.models.loading.tensor_files import FLOATS, Header, TensorEntry
from rekindle._src.models.placement import Placement
from rekindle._src.models.precision import QUANTIZE
from rekindle._src.models.registry import config_from_hf, manifest
from rekindle.errors import CheckpointError, ConfigError, StoreError

MAX_CONFIG = 16 << 20  # bytes; the longest published config.json has some 100 KB
# Buffers that older versions of transformers saved with the weights; they follow from the config.
HARMLESS = (r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", r"(.*\.)?attn\.(masked_)?bias")


class Checkpoint(NamedTuple):
    """A checkpoint folder whose config and headers were read, and whose weights were not."""

    folder: Path
    config: ModelConfig
    headers: tuple[Header, ...]
    fingerprint: str  # of config and weights as stored, whatever precision they are loaded in

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for header in self.headers for entry in header.entries)


class _Folder(NamedTuple):
    """A checkpoint folder before its config was understood."""

    path: Path
    raw: dict[str, Any]  # config.json
    headers: tuple[Header, ...]
    fingerprint: str

    def of(self, config: ModelConfig) -> Checkpoint:
        return Checkpoint(self.path, config, self.headers, self.fingerprint)


def _look(model: str | Path) -> _Folder:
    folder = locate(model)
    files = tensor_files.weight_files(folder)
    raw = read_config(folder)
    headers = tuple(tensor_files.read_header(file) for file in files)
    return _Folder(folder, raw, headers, fingerprints.folder_fingerprint(raw, headers))


def inspect(model: str | Path) -> Checkpoint:
    """Reads config, headers and fingerprint of a folder or hub id. It takes milliseconds, whatever the size."""
    seen = _look(model)
    return seen.of(config_from_hf(seen.raw))


class Reads(NamedTuple):
    """What to read from a checkpoint, checked against its headers."""

    leaves: list[reading.LeafPlan]
    entries: dict[str, TensorEntry]  # by the tensor's name


class Described(NamedTuple):
    """The model that a checkpoint becomes in one precision: everything that programs need, without the weights."""

    found: Checkpoint
    graph: Graph
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of the leaves
    dtype: str
    quantize: str | None
    quantize_embeddings: bool
    kept: Path | None  # the cache slot of its leaves, filled or not; None without a cache
    reads: Reads | None  # what to read for each leaf; None where the leaves are kept already

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves together."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.shapes)


def describe(
    model: str | Path,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    quantize_embeddings: bool = True,
    cache_dir: str | Path | None = None,
) -> Described:
    """Checks a folder or hub id and describes the model that `load` would return for it."""
    if quantize not in QUANTIZE:
        raise ConfigError("quantize", quantize, "is not known", f"Use one of {', '.join(map(repr, QUANTIZE))}")
    seen = _look(model)
    kept = known = reads = None
    if cache_dir is not None and sum(header.size for header in seen.headers) >= prepared.MIN_BYTES:
        asked = resolve_dtype(dtype, None)
        kept = prepared.slot(cache_dir, seen.fingerprint, asked, quantize, quantize_embeddings)
        with _damage_warns():
            known = prepared.known(kept)
    if known is None:
        config = config_from_hf(seen.raw)
        _check_counts(seen, config)
        name = resolve_dtype(dtype, config)
        graph, shapes = abstract_model(config, name, quantize, quantize_embeddings=quantize_embeddings)
        reads = plan(
            seen.of(config), graph, shapes
        )  # every difference is an error now, before programs and pages are made
        known = prepared.Known(graph, shapes, name)
    found = seen.of(known.graph.config)
    return Described(found, known.graph, known.shapes, known.dtype, quantize, quantize_embeddings, kept, reads)


def _check_counts(seen: _Folder, config: ModelConfig) -> None:
    """Raise if config.json describes more layers or experts than there are tensors, before the model is built."""
    tensors = sum(len(header.entries) for header in seen.headers)
    experts = sum(spec.num_experts for spec in config.moe if spec is not None)
    if config.num_layers + experts > tensors:
        told = f"{config.num_layers:,} layers" + (f" with {experts:,} experts in all" if experts else "")
        raise CheckpointError(
            f"{seen.path} does not hold the {config.model_type} model that its config.json describes: {told}, and the "
            f"weights are {tensors:,} tensors. Check that config.json and the weights belong together."
        )


@contextlib.contextmanager
def _damage_warns() -> Iterator[None]:
    """Turns damage of cached weights into a warning: the checkpoint is still there and is read again."""
    try:
        yield
    except StoreError as error:
        warnings.warn(f"{error}; loading the checkpoint again", stacklevel=4)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder. Raises `CheckpointError` if it is missing, unreadable or not an object."""
    path = folder / "config.json"
    try:
        raw = json.loads(read_plain(path, MAX_CONFIG))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no config.json. Pass the folder of a Hugging Face checkpoint.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read ({error}). Download it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, not an object. Download it again.")
    return raw


def resolve_dtype(dtype: str, config: ModelConfig | None, platform: str | None = None) -> str:
    """The dtype that "auto" stands for: bfloat16 on CPU, where it reads twice as fast, else the checkpoint's.

    Without a config the result can be "auto" again.
    """
    if dtype != "auto":
        return jnp.dtype(dtype).name
    if (platform or jax.default_backend()) == "cpu":
        return "bfloat16"
    if config is None:
        return "auto"
    return config.dtype if config.dtype in ("float16", "bfloat16", "float32") else "bfloat16"


def load(
    model: str | Path,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    quantize_embeddings: bool = True,
    progress: Report | None = None,
    cache_dir: str | Path | None = None,
    place: reading.Place = reading.place_on_default_device,
) -> LoadedModel:
    """Loads a folder (or hub id) tensor by tensor into its final layout, in parallel.

    With `cache_dir`, weights that had to be converted or quantised are kept there in their final form, on CPU others
    too up to 4 GiB, and the next start uses those. `progress` is called from this thread. `place(path, array)` puts a
    leaf on its device or devices.
    """
    described = describe(
        model, dtype=dtype, quantize=quantize, quantize_embeddings=quantize_embeddings, cache_dir=cache_dir
    )
    return read(described, progress=progress, place=place)


def read(
    described: Described,
    *,
    progress: Report | None = None,
    place: reading.Place = reading.place_on_default_device,
    placement: Placement | None = None,
) -> LoadedModel:
    """Loads the weights of a described checkpoint, from the cache if they are there; onto a mesh with `placement`.

    A host has at most `reading.WINDOW` bytes of leaves at a time that are not on their devices yet.
    """
    place = place if placement is None else placement.place
    found, graph, shapes, dtype, quantize, quantize_embeddings, kept, reads = described
    fingerprint = fingerprints.with_precision(found.fingerprint, dtype, quantize, quantize_embeddings)
    if kept is not None:
        with _damage_warns():
            arrays = prepared.load(kept, graph, shapes, place=place, report=progress)
            if arrays is not None:
                return LoadedModel(found.config, graph, arrays, fingerprint, found.folder)
    leaves, entries = reads or plan(found, graph, shapes)
    meter = Meter(sum(entry.nbytes for entry in entries.values()), progress)
    done = reading.read_leaves(leaves, entries, place=place, meter=meter)
    meter.tell(final=True)
    arrays = tuple(done[path] for path in graph.paths)
    alone = placement is None or placement.processes == 1  # else other processes have other parts
    if kept is not None and alone and _worth_keeping(leaves, entries, maps=prepared.maps(place)):
        whole = arrays if placement is None else placement.held(arrays, shapes)
        prepared.save(kept, graph, dtype, whole)
    return LoadedModel(found.config, graph, arrays, fingerprint, found.folder)


def plan(found: Checkpoint, graph: Graph, shapes: Iterable[jax.ShapeDtypeStruct]) -> Reads:
    """What to read for each leaf. One error lists what is missing, unexpected or wrongly shaped."""
    declared = manifest(found.config)
    entries = _with_prefix({e.name: e for header in found.headers for e in header.entries}, declared)
    wanted = dict(zip(graph.paths, shapes, strict=True))
    leaves, used, problems = [], set[str](), list[str]()
    for path, source in declared.sources.items():
        leaf = wanted[path]
        scale = path.removesuffix("weight") + "scale" if leaf.dtype == jnp.int8 else None
        dtype = graph.precision.value_dtype(leaf.dtype)
        stored = None if dtype == leaf.dtype else np.dtype(leaf.dtype)
        leaves.append(reading.LeafPlan(path, source, tuple(leaf.shape), dtype, scale, stored))
        for part in source.parts(tuple(leaf.shape)):
            used.add(part.name)
            entry = entries.get(part.name)
            if entry is None:
                problems.append(f"missing: {part.name} {list(part.shape)}")
            elif entry.shape != part.shape:
                problems.append(f"{part.name}: shape {list(entry.shape)}, expected {list(part.shape)}")
            elif entry.dtype not in FLOATS:
                problems.append(f"{part.name}: stored as {entry.dtype}, expected one of {', '.join(sorted(FLOATS))}")
    pattern = re.compile("|".join(f"(?:{expression})" for expression in (*declared.ignored, *HARMLESS)))
    problems += [f"unexpected: {name}" for name in sorted(entries) if name not in used and not pattern.fullmatch(name)]
    if problems:
        raise CheckpointError(
            f"{found.folder} does not hold the {found.config.model_type} model that its config.json describes "
            f"({len(problems):,} differences): {listed(list(dict.fromkeys(problems)))}. "
            "Check that config.json and the weights belong together."
        )
    return Reads(leaves, {name: entries[name] for name in used})


def _with_prefix(entries: dict[str, TensorEntry], declared: Manifest) -> dict[str, TensorEntry]:
    """The entries with the prefix that checkpoints of the bare model, without its head, lack in all names."""
    if not declared.prefix or any(name.startswith(declared.prefix) for name in entries):
        return entries
    prefixed = {name for source in declared.sources.values() for name in source.names}
    return {
        declared.prefix + name if declared.prefix + name in prefixed or name not in prefixed else name: entry
        for name, entry in entries.items()
    }


def _worth_keeping(leaves: Iterable[reading.LeafPlan], entries: Mapping[str, TensorEntry], *, maps: bool) -> bool:
    """Whether weights are cached: if they were converted, or if they can be memory-mapped and are not too large."""
    converted = sum(
        entries[name].nbytes
        for leaf in leaves
        for name in leaf.source.names
        if leaf.source.transpose or entries[name].numpy_dtype != leaf.dtype
    )
    total = sum(entry.nbytes for entry in entries.values())
    return converted * 4 > total or (maps and total <= prepared.MAX_COPY)
