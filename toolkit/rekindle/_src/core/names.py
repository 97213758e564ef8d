"""Rules for names of models and adapters, and for paths, from any outside source."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from rekindle.errors import ConfigError

MAX_NAME = 256  # characters
MAX_PATH, _MAX_PART = 4096, 255  # bytes, as on Linux
_NAME_FIX = "Use letters, digits and marks such as '-', '_', '.' and '/'"
_CONTROL = ("Cc", "Zl", "Zp")  # categories of characters that no path is shown with
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # they turn text round


def name_problem(name: object, *, colons: bool = False) -> str | None:
    """Return why something is not a valid name; None if it is valid.

    Spaces and invisible characters would make two names look the same. A colon separates a model's name from the name
    of its adapter, so only names of models may have `colons`, as in "qwen3:0.6b".
    """
    if not isinstance(name, str) or not name:
        return "is not a name"
    if len(name) > MAX_NAME:
        return f"has {len(name):,} characters, and a name has at most {MAX_NAME}"
    if not name.isprintable() or any(map(str.isspace, name)):  # neither control, formatting nor private characters
        return "has spaces or characters that can't be seen"
    if ":" in name and not colons:
        return "has a colon, which stands between the names of a model and of its adapter"
    return None


def short_model(model: str) -> str:
    """Return a model's name for people: of a path its file or folder, and of a Hub's snapshot the repository."""
    parts = [part for part in model.replace("\\", "/").split("/") if part]
    if len(parts) < 3 and not model.startswith(("/", "~", ".")):
        return model  # a name, or owner/name
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return parts[-1] if parts else model


def checked_name(field: str, name: object, *, colons: bool = False) -> str:
    """Return a name. Raise ConfigError if it is not valid."""
    problem = name_problem(name, colons=colons)
    if problem is not None:
        raise ConfigError(field, name, problem, _NAME_FIX)
    assert isinstance(name, str), "it has no problem"
    return name


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known name that a misspelled one is most like; None if none has this `likeness`: 1 is equality."""
    close = difflib.get_close_matches(name[:MAX_NAME], list(known), n=1, cutoff=likeness)
    return close[0] if close else None


def printable(text: str, width: int = MAX_NAME, *, kept: str = "") -> str:
    """Sanitise untrusted text for display, at most `width` characters; unprintable ones are replaced, except `kept`."""
    return "".join(one if one.isprintable() or one in kept else "\N{REPLACEMENT CHARACTER}" for one in text[:width])


def name_of_model(text: str) -> str:
    """Return a name made from the folder in a path or hub id, with dashes in place of invalid characters."""
    kept = "".join(letter if name_problem(letter, colons=True) is None else "-" for letter in text[:MAX_NAME])
    return kept or "model"


def path_problem(path: str) -> str | None:
    """Return why text can't be a path; None if it can."""
    if any(unicodedata.category(letter) in _CONTROL or letter in _BIDI for letter in path):
        return "has control characters, or such that change the direction of a line"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "can't be the name of a file"
    if len(encoded) > MAX_PATH or any(len(part) > _MAX_PART for part in encoded.split(os.fsencode(os.sep))):
        return f"is longer than the {MAX_PATH:,} bytes of a path, or the {_MAX_PART} of one of its parts"
    try:
        Path(path).expanduser()
    except RuntimeError:
        return "begins with a user without a known home"
    return None


def checked_path(field: str, path: str | Path) -> Path:
    """Return a path, with the home of a user for its "~". Raise ConfigError if it can't be one."""
    problem = path_problem(os.fspath(path)[: 2 * MAX_PATH])
    if problem is not None:
        raise ConfigError(field, str(path), problem, "Pass the path of a file or folder on this machine")
    return Path(path).expanduser()
