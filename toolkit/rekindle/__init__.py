"""Async LLM inference for JAX notebooks; a restarted kernel finds its programs and its cache again.

Names load their modules at first use, so that importing rekindle costs little beside jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rekindle.config import EngineConfig, Sampling

if TYPE_CHECKING:
    from rekindle.engine.processors import LogitsProcessor
    from rekindle.handle import Handle
    from rekindle.opening import open, open_sync
    from rekindle.records import Completion, FinishReason, TextDelta
    from rekindle.report import SessionStats, StepReport
    from rekindle.session import Session

_LAZY = {
    "Completion": "rekindle.records",
    "FinishReason": "rekindle.records",
    "Handle": "rekindle.handle",
    "LogitsProcessor": "rekindle.engine.processors",
    "Session": "rekindle.session",
    "SessionStats": "rekindle.report",
    "StepReport": "rekindle.report",
    "TextDelta": "rekindle.records",
    "open": "rekindle.opening",
    "open_sync": "rekindle.opening",
}

__version__ = "0.1.0"
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
