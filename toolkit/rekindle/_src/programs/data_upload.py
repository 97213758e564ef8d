"""The host buffers of a step in several data shards, one shard's after the other's."""

from __future__ import annotations

import numpy as np

from rekindle._src.core.records import StepPlan
from rekindle._src.programs.data_shards import DataShards
from rekindle._src.programs.packing import Constants, Layout, Upload


class DataUpload:
    """`packing.Upload` for several shards. A shard without rows computes an empty step."""

    def __init__(self, layout: Layout, shards: DataShards) -> None:
        self.layout, self._shards = layout, shards  # the layout of each shard
        self.ints = np.zeros(shards.count * layout.ints, np.int32)
        self.floats = np.zeros(shards.count * layout.floats, np.float32)
        self._parts = [
            Upload(
                layout,
                (shards.part(shard, self.ints), shards.part(shard, self.floats)),
                first_slot=shard * shards.slots,
                first_page=shard * shards.pages,
            )
            for shard in range(shards.count)
        ]

    def pack(self, plan: StepPlan, constants: Constants) -> None:
        """Write a plan into the buffers."""
        features = 0
        for part, rows in zip(self._parts, self._shards.split(plan), strict=True):
            part.pack(rows, constants)
            features |= part.features
        for part in self._parts:
            part.features = features  # the same in all shards, so that all take the same branches


AnyUpload = Upload | DataUpload
