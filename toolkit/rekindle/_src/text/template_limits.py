"""Bounds for the cost of a chat template, and the meter that counts it: templates come from a download.

A template runs in a thread, and a thread can't be stopped while it is within one operation of Python's. So each
operation is counted before it runs, by a `Meter`: what it would cost at once, what it would add to the values made so
far, and now and then the time. `template_operations.py` has the operations, `template_code.py` the templates.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import markupsafe

SECONDS = 5.0  # templates in use take milliseconds; a loaded machine may take a hundred times as long
CHARACTERS = 16 << 20  # of one value, and of the whole prompt: some four million tokens
ITEMS = 1 << 18  # of one value: list entries, dict values, and those within them
WORK = 256 << 20  # characters of all values of a rendering, discarded ones included, in bytes where they are not ASCII
# Units of one operation, during which no other thread runs. A unit is the time that copying or finding takes for a
# character at most, 4 ns on an EPYC (Zen 3): an operation of this size takes 130 ms there.
AT_ONCE = 32 << 20
BITS = 1 << 12  # of one number
_STEP = 256  # units of a step: about the cost of calling anything
_LOOK = 1 << 16  # units between two looks at the clock
_ITEM = 64  # characters that weigh as much as an entry with the object in it
_SLOT = 8  # the same of an entry alone
_DEPTH = 256  # levels of a value that is written or compared: Python's own functions recurse into them
_local = threading.local()


class TemplateLimit(Exception):
    """A template used more time or memory than it may."""


class TemplateRefusal(Exception):
    """A template uses something of Jinja or Python that templates may not use. The message begins with its name."""


class Meter:
    """The usage of one rendering so far."""

    __slots__ = ("deadline", "made", "until_look")

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.until_look = _LOOK
        self.made = 0

    def step(self, units: int = 0) -> None:
        """Count a step of so many units in addition to its own. Raises `TemplateLimit` if the time is over."""
        self.until_look -= _STEP + units
        if self.until_look < 0:
            self.until_look = _LOOK
            if time.monotonic() > self.deadline:
                raise TemplateLimit(f"it ran for more than {SECONDS:.0f} s")

    def at_once(self, units: int) -> None:
        """Count an operation of so many units, before it runs. Raises `TemplateLimit` for too long a one."""
        if units > AT_ONCE:
            raise TemplateLimit(
                f"an operation on a text or list was too long: {units:,} steps, where {AT_ONCE:,} are allowed"
            )
        self.step(units)

    def expect(self, size: int) -> None:
        """Raise `TemplateLimit` if a value of `size` characters would be too large."""
        if size > CHARACTERS:
            raise TemplateLimit(f"it made a value of {size:,} characters; at most {CHARACTERS:,} are allowed")

    def make(self, size: int) -> None:
        """Count `size` characters that a value takes. Raises `TemplateLimit` if all values take too many."""
        self.made += size
        if self.made > WORK:
            raise TemplateLimit(f"the values that it made are {WORK:,} characters and more in all")
        self.step(size)

    def text(self, text: str) -> str:
        """Count a text that was made, and return it."""
        size = len(text)
        if size > CHARACTERS:
            self.expect(size)
        self.make(size if text.isascii() else 2 * size)
        return text

    def entries(self, count: int, *, new: bool = True) -> None:
        """Count a list of so many entries, before it is made. Entries that are not `new` were there before."""
        if count > ITEMS:
            raise TemplateLimit(f"it made a value of more than {ITEMS:,} items")
        self.make(count * (_ITEM if new else _SLOT))

    def measure(self, value: Any) -> tuple[int, int]:
        """Return the characters and items of a value with all its contents, as often as they are in it."""
        characters = items = depth = 0
        level = [value]
        while level:
            below: list[Any] = []
            for item in level:
                kind = type(item)
                if kind is str or kind is markupsafe.Markup:
                    characters += len(item)
                elif kind is int:
                    characters += 1 + item.bit_length() // 3
                elif kind is dict:
                    below += item
                    below += item.values()
                elif kind is list or kind is tuple:
                    below += item
                else:
                    characters += _SLOT
                if items + len(below) > ITEMS:
                    raise TemplateLimit(f"it made a value of more than {ITEMS:,} items")
            items += len(level)
            depth += 1
            if depth > _DEPTH:
                raise TemplateLimit(f"it made a value of more than {_DEPTH} levels")
            level = below
        self.expect(characters)
        self.step(_SLOT * items)
        return characters, items

    def number(self, value: Any) -> Any:
        """Return a number. Raises `TemplateLimit` for too large a one."""
        if type(value) is int and value.bit_length() > BITS:
            raise too_many_bits(value.bit_length())
        return value


@contextlib.contextmanager
def metered(seconds: float | None = None) -> Iterator[None]:
    """Count the usage of this thread's template within the block; raises `TemplateLimit` when it is too much."""
    before = getattr(_local, "meter", None)
    _local.meter = Meter(SECONDS if seconds is None else seconds)
    try:
        yield
    finally:
        _local.meter = before


def current() -> Meter:
    """Return the meter of this thread's template."""
    meter: Meter | None = getattr(_local, "meter", None)
    return Meter(SECONDS) if meter is None else meter


def joined(pieces: Iterable[str]) -> str:
    """Return the pieces as one string, bounded as every value is."""
    meter, parts, size = current(), [], 0
    for piece in pieces:
        size += len(piece)
        meter.expect(size)
        meter.step()
        parts.append(piece)
    return meter.text("".join(parts))


def too_many_bits(bits: int) -> TemplateLimit:
    """Return the error of a number with so many bits."""
    return TemplateLimit(f"it made a number of {bits:,} bits, where {BITS:,} are allowed")


def text_of(meter: Meter, value: Any) -> str:
    """Return a value as a template writes it."""
    kind = type(value)
    if kind is str:
        return value  # type: ignore[no-any-return]
    if kind is markupsafe.Markup:
        return str.__str__(value)
    if kind is list or kind is tuple or kind is dict:
        characters, items = meter.measure(value)
        meter.at_once(10 * characters + 24 * items)
        return meter.text(repr(value))
    if value is None or kind in (bool, int, float, range) or isinstance(value, jinja2.Undefined):
        return str(value)
    raise TemplateRefusal(f"the text of a {kind.__name__.lstrip('_')}")
