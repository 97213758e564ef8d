"""The embedded models: the folders of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from rekindle._src.core.foreign_calls import of_tiny, unknown

__all__ = ["folder", "located"]

_FOLDERS = {"tiny": "model", "tiny-vision": "vision"}  # next to this file


def folder(model: Literal["tiny", "tiny-vision"] = "tiny") -> Path:
    """Return the Hugging Face folder of an embedded model: "tiny", or "tiny-vision", which also reads pictures."""
    return Path(__file__).parent / _FOLDERS[model]


def located(model: str | Path) -> str | Path:
    """Return the folder of an embedded model for its name, and any other model as it is."""
    match model:
        case "tiny" | "tiny-vision":
            return folder(model)
        case _:
            return model


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise unknown("rekindle.tiny", name, of_tiny(name))
