"""Numbers and texts in words, as errors, reprs and views say them."""

from __future__ import annotations


def count(amount: int, noun: str) -> str:
    """Return a count with its noun: `1 token`, `2 tokens`."""
    return f"{amount:,} {plural(amount, noun)}"


def plural(amount: int, noun: str) -> str:
    """Return a noun as it follows a count."""
    return noun if amount == 1 else f"{noun}s"


def seconds(value: float) -> str:
    """Return seconds as text: `3.7 ms`, `1.25 s`."""
    if abs(value) >= 1.0:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 or not value else f"{value * 1e6:.3g} µs"


def mebibytes(value: float) -> str:
    """Return bytes as text: `40.0 MiB`."""
    return f"{value / 2**20:,.1f} MiB"


def share(part: float) -> str:
    """Return a share of a whole in percent; a share that would be rounded to zero says so."""
    return f"{part:.1%}" if part >= 5e-4 or not part else "<0.1%"


def shorten(value: str, width: int = 40) -> str:
    """Return a text, cut to `width` characters if it is longer."""
    return value if len(value) <= width else value[: width - 1] + "…"
