"""The names and the order of samplers, as llama.cpp has them, and the checks of their options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rekindle._src.core.names import nearest
from rekindle._src.core.options import Refusal, Whole, bounded, check_unicode

PENALTIES, TEMPERATURE = "penalties", "temperature"
ORDER = (PENALTIES, "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", TEMPERATURE)
ADAPTIVE = "adaptive_p"  # always the last one, since it decides the draw
KNOWN = (*ORDER, ADAPTIVE)
_ALIASES = {
    **{name.replace("_", mark): name for name in KNOWN for mark in ("-", "")},
    "typ_p": "typical_p", "typ-p": "typical_p", "typp": "typical_p", "typ": "typical_p", "typical": "typical_p",
    "temp": TEMPERATURE, "nucleus": "top_p",
}  # fmt: skip
MAX_DRY_WINDOW = 4_096  # tokens
MAX_BREAKERS = 16
MAX_BREAKER = 40  # characters
MAX_MATCH = 1_024  # tokens of a repetition that DRY counts
BREAKERS = ("\n", ":", '"', "*")


class Draw(NamedTuple):
    """The options of the draw itself, after all samplers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def read_samplers(name: str, value: Any, error: Refusal) -> tuple[str, ...]:
    """Return the canonical names of samplers in their order. Text has them with semicolons between, as GGUF has."""
    fix = f'Pass a list of some of {", ".join(KNOWN)}, such as ["top_k", "temperature"]'
    if isinstance(value, str):
        value = value[:1_024].split(";")
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise error(name, value, "is not a list of samplers", fix)
    names: list[str] = []
    for given in bounded(name, value, len(KNOWN)):
        known = None
        if isinstance(given, str) and len(given) <= MAX_BREAKER:
            lower = given.strip().lower()
            known = lower if lower in KNOWN else _ALIASES.get(lower)
        if known is None:
            close = nearest(given, KNOWN) if isinstance(given, str) else None
            raise error(name, given, "is not a sampler", f"Did you mean {close!r}?" if close else fix)
        if known in names:
            raise error(name, given, "is named twice", "Name each sampler once")
        names.append(known)
    if PENALTIES in names[1:]:
        raise error(name, names, "has penalties after another sampler", "Put penalties first, or leave them out")
    if ADAPTIVE in names[:-1]:
        raise error(name, names, "has a sampler after adaptive_p, which draws", "Put adaptive_p last, or leave it out")
    return tuple(names)


def read_mirostat(name: str, value: Any, error: Refusal) -> int:
    """Return the version of mirostat, 0 or 2."""
    version = Whole(0, 2, "Use 2, or 0 to leave it off")(name, value, error)
    if version == 1:
        raise error(name, value, "is not implemented", "Use 2, its newer version, with the same tau and eta")
    return version


def check_breakers(name: str, breakers: tuple[Any, ...], error: Refusal) -> None:
    """Raise the error unless all breakers are texts of a sensible length."""
    for text in breakers:
        if not isinstance(text, str) or not text:
            raise error(name, text, "is not text, or is empty", 'Pass strings such as ["\\n", ":"], or [] for none')
        if "\x00" in text:
            raise error(name, text, "has a NUL character", "Leave it out")
        check_unicode(name, text, error)
        if len(text) > MAX_BREAKER:
            raise error(name, text, f"has more than {MAX_BREAKER} characters", "Use a shorter one")
