"""Rehearsal: runs programs once before the first request, which is expected as soon as the session is open.

A first run takes longer: JAX inspects all its arguments, XLA prepares each operation and allocates memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from rekindle._src.core.records import StepPlan
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.flags import GREEDY, Flag
from rekindle._src.programs.helpers import SCATTER, Key
from rekindle._src.programs.packing import Constants, Upload, sections

TOKENS = 16  # of the made-up prompt: with none of its own a step skips most of its work
_NOTHING = StepPlan(0, (), ())
_FLAGS = int(GREEDY & ~Flag.KEPT)


def rehearse(calls: DeviceCalls, constants: Constants, keys: Iterable[Key]) -> bool:
    """Run the programs of `keys` that step or fill pages. They write only where padding goes.

    Only on CPU with one device: elsewhere the gain was not measured, and other processes would have to take part.
    False where it is not done.
    """
    programs = calls.programs
    if jax.default_backend() != "cpu" or programs.parts.divided:
        return False
    for key in keys:
        if isinstance(key, Bucket):
            calls.rows(calls.step(key, programs.get(key), _dummy_upload(calls, constants, key)))
        elif key.kind == SCATTER.kind:
            page = tuple(np.zeros(shape, dtype) for shape, dtype in programs.parts.payload_layout(programs.kv))
            calls.scatter(np.zeros(key.pages, np.int32), [page])
    calls.wait(calls.memory)
    return True


def _dummy_upload(calls: DeviceCalls, constants: Constants, key: Bucket) -> Upload:
    """Pack a step in the slot and page of padding: a short prompt, or one token in a program without prompts."""
    layout = calls.programs.layout(key)
    upload = Upload(layout, sent=calls.tables)
    upload.pack(_NOTHING, constants)
    upload.any_flags = _FLAGS
    tokens = min(TOKENS, key.tokens, calls.programs.page_size)
    parts = sections(layout, upload.ints)
    row = layout.rows if tokens else 0
    parts.varying[row] = constants.scratch, tokens or 1, 0, _FLAGS
    if tokens:
        parts.offsets[1:] = tokens
    return upload
