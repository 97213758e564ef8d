"""Values that show themselves: as a line of text, and as HTML in a notebook.

Nothing is drawn on this floor. `_repr_html_` calls the function that importing rekindle set with `draw_with`; the first
output loads the drawings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rekindle._src.core import words

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_draw: Callable[[object], str] = repr


def draw_with(draw: Callable[[object], str]) -> None:
    """Set the function that draws values as HTML."""
    global _draw
    _draw = draw


def html_of(value: object) -> str:
    """Draw a value as HTML."""
    return _draw(value)


class Drawable:
    """Shows itself in a notebook as its type is drawn; a type without a drawing shows its repr as a line."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return html_of(self)


class Record(Drawable):
    """A dataclass with a one-line repr of its non-default fields, drawn as a table of all fields."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    __slots__ = ()
    _widest = 160  # characters of the line; the rest becomes "…"
    _seconds: tuple[str, ...] = ()  # fields that are seconds

    def __repr__(self) -> str:
        parts: list[str] = []
        length = len(type(self).__name__) + 2
        for name, value in non_defaults(self).items():
            long = isinstance(value, float) and len(repr(value)) > 8 and abs(value) < 1e4
            text = f"{value:.4g}" if long else repr(value)
            parts.append(f"{name}={text}".replace("\n", " "))
            length += len(parts[-1]) + 2
            if length > self._widest:
                parts[-1] = "…"
                break
        return f"{type(self).__name__}({', '.join(parts)})"

    def _measured(self, name: str, value: Any) -> Any:
        """Return a figure in words if it has a unit; a number that is a name has no separators."""
        if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        if name in ("seed", "token_id"):
            return str(value)  # it is copied into the next call
        if name in self._seconds:
            return words.seconds(value)
        return words.mebibytes(value) if name.endswith(("_memory", "bytes", "budget")) else value


def figures_of(record: DataclassInstance) -> dict[str, object]:
    """Return a dataclass's fields and properties by name."""
    names = [field.name for field in dataclasses.fields(record) if field.repr]
    # Derived figures, such as a hit rate, are properties.
    names += [name for name, entry in vars(type(record)).items() if isinstance(entry, property)]
    return {name: getattr(record, name) for name in names}


def measured(record: Record) -> dict[str, object]:
    """Return a record's figures by name, seconds and bytes with their units."""
    return {name: record._measured(name, value) for name, value in figures_of(record).items()}


def non_defaults(record: Any) -> dict[str, Any]:
    """Return the fields of a record that differ from their default; without a default, those not zero or empty."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        usual = value == default if default is not dataclasses.MISSING else value in (0, None, "", ())
        if field.repr and not usual:
            fields[field.name] = value
    return fields
