"""The CPU path, and the fallback everywhere: what XLA runs fast without a kernel of its own."""

from __future__ import annotations

from rekindle_kernels import reference
from rekindle_kernels.calls import Implementation

IMPLEMENTATIONS = {"xla": Implementation("xla", reference.attention, reference.supports)}
