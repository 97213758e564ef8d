"""The arguments of `open` that belong to capabilities. Calls pass them on as one value, and entries read their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from rekindle._src.capabilities.captures.custom import Tap
    from rekindle._src.core.taps import Steer


class Additions(TypedDict, total=False):
    """Additions to a model, by the names of their arguments. None leaves one out."""

    taps: Sequence[Tap] | None
    steering: Mapping[str, Steer | Sequence[Steer] | str | Path] | None  # changes that have a name
    adapters: Mapping[str, object] | None  # sources by name
    merge: object  # an adapter that is added to the weights


class SharedAdditions(TypedDict, total=False):
    """The additions that other processes can take."""

    steering: Mapping[str, Steer | Sequence[Steer] | str | Path] | None


class CheckedAdditions(TypedDict, total=False):
    """Additions as their entries have checked them."""

    taps: Sequence[Tap]
    steering: Mapping[str, tuple[Steer, ...]]
    adapters: Mapping[str, object]
    merge: object


NO_ADDITIONS: CheckedAdditions = {}


def split(options: Mapping[str, object], kind: type = Additions) -> tuple[Additions, dict[str, object]]:
    """Return the additions among the arguments of a call, and all others. None leaves an addition out."""
    additions: Any = {name: options[name] for name in kind.__annotations__ if options.get(name) is not None}
    return additions, {name: value for name, value in options.items() if name not in kind.__annotations__}
