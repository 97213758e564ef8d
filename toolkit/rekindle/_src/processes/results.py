"""The reports of followers on a step: a checksum of its chosen tokens, which have to be equal in all processes."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from rekindle._src.programs.flags import Flag
from rekindle._src.programs.packing import Layout, sections

DONE = struct.Struct("<QI")  # the number of the step, and the checksum
_SAMPLES = int(Flag.SAMPLES)


def sampling(layout: Layout, ints: np.ndarray) -> np.ndarray:
    """Return the rows of a step that choose a token of their own."""
    varying = sections(layout, ints).varying
    return np.flatnonzero((varying[:, 1] > 0) & (varying[:, 3] & _SAMPLES != 0))


def checksum(rows: np.ndarray, chosen: np.ndarray) -> int:
    """Return the checksum of the tokens in the chosen rows."""
    return zlib.crc32(np.ascontiguousarray(rows[chosen, 0], "<i4").tobytes())
