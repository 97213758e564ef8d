"""Taps and named changes as arguments of `open`. Needs no JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle._src.capabilities.additions import CheckedAdditions
from rekindle._src.core.taps import Steer
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.capabilities.captures.custom import Tap


def listed_taps(taps: Any) -> tuple[Tap, ...]:
    """Return the taps of a list. Their types are checked later."""
    if not isinstance(taps, Iterable):
        raise ConfigError("taps", taps, "is not a list", "Pass a list of rekindle.Tap(function, name='…')")
    return tuple(taps)


def named_changes(steering: object) -> dict[str, tuple[Steer, ...]]:
    """Return the changes of each name. Raise ConfigError for anything else."""
    fix = 'Pass {"name": rekindle.Steer(layer=…, vector=…)}'
    if not isinstance(steering, Mapping):
        raise ConfigError("steering", steering, "does not map names to changes", fix)
    named = {}
    for name, entry in steering.items():
        if isinstance(entry, str | Path):
            # It needs numpy, which `import rekindle` does without.
            from rekindle._src.capabilities.captures.files import read_changes

            changes = read_changes(entry)
        else:
            changes = tuple(entry) if isinstance(entry, Sequence) else (entry,)
        if not (isinstance(name, str) and name and changes and all(isinstance(change, Steer) for change in changes)):
            raise ConfigError("steering", {name: entry}, "is not a name with a Steer, a list of them, or a file", fix)
        named[name] = changes
    return named


def refuse_processes(additions: CheckedAdditions) -> None:
    """Raise ConfigError for taps and changes of a model that several processes share."""
    if taps := additions.get("taps"):
        problem = "are functions of this process, which others can't call"
        raise ConfigError("taps", [tap.name for tap in taps], problem, "Leave them out, or use a mesh")
    if steering := additions.get("steering"):
        raise ConfigError("steering", list(steering), "needs a model in one process", "Leave it out, or use a mesh")
