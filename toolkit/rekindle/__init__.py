"""Async LLM inference for JAX notebooks; a restarted kernel finds its programs and its cache again.

Names load their modules at first use, so that importing rekindle costs little beside jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rekindle._src.core.config import EngineConfig, Sampling
from rekindle._src.core.version import VERSION

if TYPE_CHECKING:
    from rekindle._src.core.records import Completion, FinishReason, TextDelta
    from rekindle._src.programs.processors import LogitsProcessor
    from rekindle._src.session.handle import Handle
    from rekindle._src.session.opening import open, open_sync
    from rekindle._src.session.session import Session
    from rekindle._src.session.stats import SessionStats, StepReport

_LAZY = {
    "Completion": "rekindle._src.core.records",
    "FinishReason": "rekindle._src.core.records",
    "Handle": "rekindle._src.session.handle",
    "LogitsProcessor": "rekindle._src.programs.processors",
    "Session": "rekindle._src.session.session",
    "SessionStats": "rekindle._src.session.stats",
    "StepReport": "rekindle._src.session.stats",
    "TextDelta": "rekindle._src.core.records",
    "open": "rekindle._src.session.opening",
    "open_sync": "rekindle._src.session.opening",
}

__version__ = VERSION
__all__ = [
    "Completion",
    "EngineConfig",
    "FinishReason",
    "Handle",
    "LogitsProcessor",
    "Sampling",
    "Session",
    "SessionStats",
    "StepReport",
    "TextDelta",
    "__version__",
    "open",
    "open_sync",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rekindle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
