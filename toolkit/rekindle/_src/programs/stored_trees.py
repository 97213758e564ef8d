"""The structure of a program's arguments and results as JSON, so that calling it reads no pickle.

"*"                       an array
null                      None
["tuple", …]              as "list"
["dict", {key: …}]        keys are strings
["module:Class", …]       a NamedTuple of rekindle's own
"""

from __future__ import annotations

import importlib
from typing import Any

import jax

PACKAGES = ("rekindle", "rekindle_kernels")


def encode(tree: Any) -> Any:
    """Return JSON for a PyTreeDef. Raise TypeError for nodes of other types."""
    description = _describe(jax.tree.unflatten(tree, [_LEAF] * tree.num_leaves))
    if decode(description) != tree:
        raise TypeError(f"{tree} is not made of tuples, lists, dicts and rekindle's own records")
    return description


def decode(description: Any) -> Any:
    """Return the PyTreeDef. Raise ValueError for anything that `encode` did not make."""
    return jax.tree.structure(_build(description))


class _Leaf:
    """A placeholder for an array."""


_LEAF = _Leaf()


def _describe(value: Any) -> Any:
    if value is _LEAF:
        return "*"
    if value is None:
        return None
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", {key: _describe(item) for key, item in value.items()}]
    kind = type(value)
    if kind in (tuple, list):
        return [kind.__name__, *map(_describe, value)]
    if _is_record(kind):
        return [f"{kind.__module__}:{kind.__qualname__}", *map(_describe, value)]
    raise TypeError(f"a {kind.__name__} among the arguments or results of a program")


def _build(description: Any) -> Any:
    if description == "*":
        return _LEAF
    if description is None:
        return None
    if not isinstance(description, list) or not description or not isinstance(description[0], str):
        raise ValueError(f"{description!r} describes no tree")
    name, *parts = description
    if name == "dict":
        return {key: _build(item) for key, item in parts[0].items()}
    children = [_build(item) for item in parts]
    if name in ("tuple", "list"):
        return tuple(children) if name == "tuple" else children
    module, _, attribute = name.partition(":")
    kind: Any = getattr(importlib.import_module(module), attribute) if module.split(".")[0] in PACKAGES else None
    if not _is_record(kind):
        raise ValueError(f"{name} is not a record of rekindle's own")
    return kind(*children)


def _is_record(kind: Any) -> bool:
    is_namedtuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_namedtuple and kind.__module__.split(".")[0] in PACKAGES
