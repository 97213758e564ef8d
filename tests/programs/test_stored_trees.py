"""Trees survive as JSON, and nothing but rekindle's own records is looked up by name."""

from __future__ import annotations

import collections
import json
from typing import Any

import jax
import pytest

from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.store import decode_tree, encode_tree
from rekindle_kernels import LayerKV

TREES: list[Any] = [
    1,
    ((), {}),
    [None, (1, 2), {"a": [1], "b": {}}],
    ((LayerKV(1, None), LayerKV(1, 2)), RequestState(*range(5))),
]


@pytest.mark.parametrize("tree", [jax.tree.structure(tree) for tree in TREES], ids=range(len(TREES)))
def test_a_tree_survives(tree: Any) -> None:
    assert decode_tree(json.loads(json.dumps(encode_tree(tree)))) == tree


Foreign = collections.namedtuple("Foreign", "x")


@pytest.mark.parametrize("tree", [Foreign(1), {1: 2}, collections.OrderedDict(a=1)])
def test_other_nodes_are_not_stored(tree: Any) -> None:
    with pytest.raises(TypeError):
        encode_tree(jax.tree.structure(tree))


@pytest.mark.parametrize(
    "found", [["os:system", "*"], ["subprocess:Popen", "*"], ["rekindle.errors:StoreError", "*"], {}, [], "x", [1]]
)
def test_nothing_else_is_looked_up(found: Any) -> None:
    with pytest.raises(ValueError, match=r"describes no tree|not a record"):
        decode_tree(found)
