"""How a session reads pictures, as a value: the processor and the encoder that its checkpoint describes."""

from __future__ import annotations

import logging
import math
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.core.config import EngineConfig
from rekindle._src.images.picture import DEFAULT_LIMITS
from rekindle._src.images.processor import PictureProcessor
from rekindle._src.images.registry import processor_of_files, processor_of_mmproj
from rekindle._src.models.loading.checkpoint import CheckpointPlan
from rekindle._src.models.loading.fingerprint import folder_fingerprint
from rekindle._src.models.loading.stored import MAX_CONFIG
from rekindle._src.models.loading.tensor_files import TensorEntry, read_json
from rekindle._src.models.vision.config import VisionConfig
from rekindle._src.models.vision.inputs import ImagePatches, PatchGrid
from rekindle._src.models.vision.registry import vision_config
from rekindle._src.models.vision.tower import AbstractTower, abstract_tower, pack_images
from rekindle._src.models.vision.weights import TowerTensors, tower_tensors
from rekindle.errors import UnsupportedModel

_SIZES = ((512, 512), (2048, 1024))  # of a picture that is one view, and of one that may be several
log = logging.getLogger("rekindle.engine")


class EncoderPlan(NamedTuple):
    """All that is known of pictures before the first one comes."""

    processor: PictureProcessor
    tower: AbstractTower
    tensors: TowerTensors[TensorEntry]  # where its weights are
    identity: bytes  # a digest of all that rows of a picture depend on but its pixels

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that encoding takes: the weights, and the largest picture's patches."""
        config, dtype = self.tower.graph.config, np.dtype(self.tower.graph.precision.stream)
        weights = sum(leaf.size * leaf.dtype.itemsize for leaf in self.tower.shapes)
        side = math.isqrt(DEFAULT_LIMITS.pixels)
        numbers = config.hidden_size + 3 * config.num_heads * config.head_dim  # a layer's input, and heads
        return weights + self.processor.plan(side, side).patches * numbers * dtype.itemsize


def encoder_plan(source: CheckpointPlan, config: EngineConfig) -> EncoderPlan | None:
    """Return how a checkpoint's pictures are read; None if it reads text alone. Raise typed errors for damage."""
    others, folder = source.found.stored.others, source.found.folder
    if others is None or source.graph.config.pictures is None or config.processes > 1:
        return None
    if others.projector is not None:
        from rekindle._src.models.loading.gguf.header import read_header  # other formats don't need it
        from rekindle._src.models.loading.gguf.source import gguf_header
        from rekindle._src.models.vision.mmproj import read_mmproj

        header = read_header(others.projector)
        tensors, file = read_mmproj(others.projector), gguf_header(header)
        reader = processor_of_mmproj(header.metadata)
        return _plan(source, reader, tensors, folder_fingerprint({}, (file,)))
    preprocessor, processor = (_json(folder / f"{name}_config.json") for name in ("preprocessor", "processor"))
    if preprocessor is None and processor is None:
        log.warning("%s reads text alone: it has no preprocessor_config.json, which says how pictures are cut", folder)
        return None
    vision = vision_config(others.config)
    assert vision is not None, "its config says so"
    entries = {entry.name: entry for header in others.headers for entry in header.entries}
    tensors = tower_tensors(vision, entries, str(folder))
    return _plan(source, processor_of_files(preprocessor, processor, others.config), tensors, "")


def _plan(
    source: CheckpointPlan, reader: PictureProcessor, tensors: TowerTensors[TensorEntry], encoder: str
) -> EncoderPlan:
    """Return the plan of a reader and an encoder; `encoder` names the file that has it, if it is another one."""
    problem = misfit(reader, tensors.config)
    if problem is not None:
        raise UnsupportedModel(
            f"{source.found.folder}: pictures are cut in another way than their encoder reads them: {problem}. "
            "Download it again."
        )
    tower = abstract_tower(tensors.config, source.graph.precision.weights)
    parts = (source.fingerprint, encoder, repr(reader), repr(tower.graph))
    identity = sha256(b"".join(framed(part.encode()) for part in parts)).digest()
    return EncoderPlan(reader, tower, tensors, identity)


def misfit(reader: PictureProcessor, config: VisionConfig) -> str | None:
    """Return why an encoder can't encode a processor's output; None if it can.

    Their numbers are in two files, and both are untrusted.
    """
    for size in _SIZES:
        for view in set(reader.plan(*size).views):
            grid = PatchGrid(view.rows, view.columns)
            numbers = np.broadcast_to(np.float32(0), (grid.patches, reader.patch_length))
            try:
                packed = pack_images([ImagePatches(numbers, grid)], config)
            except ValueError as error:
                return str(error)
            rows = packed.patches // config.patches_of_token
            if rows != view.tokens:
                return f"{grid.rows} × {grid.columns} patches stand for {view.tokens:,} tokens, and become {rows:,}"
    return None


def framed(part: bytes) -> bytes:
    """Return a part with its length before it."""
    return len(part).to_bytes(8, "little") + part


def _json(path: Path) -> Any:
    """Return the content of a JSON file of the checkpoint; None if there is none."""
    return read_json(path, dict, MAX_CONFIG) if path.is_file() else None
