"""Masks and gates that steps with guided rows have used, for the next ones of the same size."""

from __future__ import annotations

import collections

from rekindle._src.core.guides import Mask, mask_words
from rekindle._src.execution.guiding import new_masks
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.programs import Programs
from rekindle_kernels import MaskGate


class MaskPool:
    """They are taken for a step, and given back when it has ended."""

    def __init__(self, programs: Programs) -> None:
        self._programs, self._words = programs, mask_words(programs.model.vocab_size)
        self._masks: dict[Bucket, list[Mask]] = collections.defaultdict(list)
        self._gates: dict[Bucket, list[MaskGate]] = collections.defaultdict(list)

    def masks(self, bucket: Bucket) -> Mask:
        """Those of a step that is two programs."""
        free = self._masks[bucket]
        return free.pop() if free else new_masks(self._programs.layout(bucket), self._words, self._programs.shards)

    def gate(self, bucket: Bucket) -> MaskGate:
        """The gate of a step that is one program, closed."""
        free = self._gates[bucket]
        gate = free.pop() if free else MaskGate(self._programs.layout(bucket).sequences, self._words)
        gate.close()
        return gate

    def give_back(self, bucket: Bucket, used: Mask | MaskGate) -> None:
        """Its step has ended."""
        if isinstance(used, MaskGate):
            used.release()
            self._gates[bucket].append(used)
        else:
            self._masks[bucket].append(used)
