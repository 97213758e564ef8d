"""The embedded model: its corpus, its training script and its weights."""

from __future__ import annotations

from pathlib import Path

__all__ = ["folder"]


def folder() -> Path:
    """Return the Hugging Face folder of the shipped model."""
    return Path(__file__).parent / "model"
