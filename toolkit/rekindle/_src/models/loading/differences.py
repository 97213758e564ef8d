"""Short lists, for errors, of the differences between a checkpoint and its model, however many there are."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 12  # listed one by one; a broken or hostile checkpoint can have hundreds of thousands
_WIDTH = 200  # characters of one of them; the names in a file can have any length


def listed(found: Sequence[str], separator: str = "; ") -> str:
    """Return the first differences, each cut to a line's length, and the number of the others."""
    shown = [text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..." for text in found[:MOST]]
    more = len(found) - len(shown)
    return separator.join([*shown, f"and {more:,} more"] if more else shown)
