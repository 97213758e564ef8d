"""Reads the numbers of a checkpoint's image processor, from its files or from an mmproj file, within bounds."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.errors import UnsupportedModel

MOST_SIDE = 4096  # pixels of a side that a file may ask to resize to
MOST_PIXELS = 1 << 26
_FILTERS = range(6)  # Pillow's: nearest, Lanczos, bilinear, bicubic, box, Hamming


class ProcessorSettings:
    """The keys of a stranger's file, each checked before it is used.

    `where` names the file in the errors, which are all `UnsupportedModel`. An absent or null key has its default.
    """

    def __init__(self, keys: object, where: str = "preprocessor_config.json") -> None:
        if not isinstance(keys, Mapping):
            raise UnsupportedModel(f"{where} is no object with keys. Download the checkpoint again.")
        self._keys: Mapping[str, Any] = keys
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._keys.get(name) is not None

    def part(self, name: str) -> ProcessorSettings:
        """Return the keys of an object in this one; without it, there are no keys."""
        value = self._keys.get(name)
        return ProcessorSettings({} if value is None else value, f"{name} in {self.where}")

    def whole(self, name: str, default: int, least: int = 1, most: int = MOST_SIDE) -> int:
        """Return a whole number within bounds."""
        value = self._keys.get(name)
        if value is None:
            return default
        if isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most:
            return int(value)
        raise self.wrong(name, f"is no whole number from {least:,} to {most:,}")

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number within bounds."""
        value = self._keys.get(name)
        return default if value is None else self._within(name, value, least, most)

    def flag(self, name: str, default: bool) -> bool:
        """Return True or False."""
        value = self._keys.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "is neither true nor false")
        return value

    def text(self, name: str) -> str:
        """Return a short text; an empty one where there is none."""
        value = self._keys.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > 200:
            raise self.wrong(name, "is no short text")
        return value

    def channels(self, name: str, default: tuple[float, float, float], least: float) -> tuple[float, float, float]:
        """Return one number for each of red, green and blue; a file may have a single one for all of them."""
        value = self._keys.get(name)
        if value is None:
            return default
        if isinstance(value, numbers.Real):
            value = [value] * 3
        if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 3:
            raise self.wrong(name, "is not three numbers")
        red, green, blue = (self._within(name, channel, least, 1000.0) for channel in value)
        return red, green, blue

    def sides(self, name: str, *edges: str, most: int = MOST_SIDE) -> tuple[int, ...]:
        """Return these entries of an object of sizes, such as height and width. Raises unless it has just these."""
        value = self._keys[name]
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            value = dict.fromkeys(edges, value)
        size = ProcessorSettings(value, f"{name} in {self.where}")
        present = {edge for edge in value if value[edge] is not None}
        if present != set(edges):
            raise self.wrong(name, f"is no object of {' and '.join(edges)}")
        return tuple(size.whole(edge, 0, 1, most) for edge in edges)

    def filter(self, default: int) -> int:
        """Return Pillow's number of the filter that resizes."""
        return self.whole("resample", default, _FILTERS.start, _FILTERS.stop - 1)

    def only(self, name: str, *accepted: object) -> None:
        """Raise unless an option is absent or has one of these values."""
        value = self._keys.get(name)
        if value is not None and not any(value is one or value == one for one in accepted):
            raise self.wrong(name, f"is not implemented. Implemented: {', '.join(map(repr, accepted))}")

    def wrong(self, name: str, problem: str) -> UnsupportedModel:
        """Return the error about a key."""
        value = self._keys.get(name)
        shown = repr(value)[:80] if isinstance(value, str | float | int | bool) else type(value).__name__
        return UnsupportedModel(f"{name}={shown} in {self.where} {problem}. Check the file.")

    def _within(self, name: str, value: object, least: float, most: float) -> float:
        number = math.nan
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # a whole number of 400 digits
                number = math.inf
        if not least <= number <= most:
            raise self.wrong(name, f"is no number from {least:g} to {most:g}")
        return number


def whole_numbers(values: Sequence[int]) -> str:
    """Return numbers as a list in words."""
    return ", ".join(map(str, values))
