"""Reading a `quantization_config`: its fields, and errors that name the field whose value is not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.errors import UnsupportedModel


class Options:
    """A `quantization_config`, or an object within it; `where` names it in errors."""

    def __init__(self, raw: Any, where: str = "quantization_config") -> None:
        if not isinstance(raw, Mapping):
            raise UnsupportedModel(f"{where} holds {_shown(raw)} where an object is expected. Download it again.")
        self.raw, self.where = dict(raw), where

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or `default` where it is absent or null."""
        value = self.raw.get(name)
        return default if value is None else value

    def choice(self, name: str, accepted: tuple[Any, ...], default: Any = None) -> Any:
        """Return a field that has one of the accepted values. Otherwise `UnsupportedModel` names the field."""
        value = self.get(name, default)
        if isinstance(value, (dict, list)) or value not in accepted:
            raise UnsupportedModel(
                f"{self.where}.{name}={_shown(value)} is not implemented. Implemented: "
                f"{', '.join(repr(one) for one in accepted)}."
            )
        return value

    def group(self, name: str = "group_size", default: int | None = None) -> int:
        """Return the number of inputs that share a scale; -1 for all of them."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 1 <= value <= 1 << 20):
            raise UnsupportedModel(f"{self.where}.{name}={_shown(value)} is not a number of inputs. Check config.json.")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the sizes of blocks that share a scale, [outputs, inputs]; None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            raise UnsupportedModel(f"{self.where}.{name}={_shown(value)} is not a pair of sizes. Check config.json.")
        return value[0], value[1]

    def inner(self, name: str) -> Options:
        """Return an object within this one."""
        return Options(self.raw.get(name), f"{self.where}.{name}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
