"""The texts that a prefix tree has cached pages for, such as the texts of a restored snapshot."""

from __future__ import annotations

import numpy as np

from rekindle._src.core.records import IntArray
from rekindle._src.kvcache.caches import AnyCache
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.tree import PrefixCache


def known_texts(cache: AnyCache, most_tokens: int) -> list[IntArray]:
    """Return the texts that all requests share, up to `most_tokens` in all; the one that was used last is last.

    What a text shares with a later one is left out, but for its last page. Pages with a picture have numbers below 0.
    """
    leaves = [(node, tree) for tree in cache.trees for node in tree if not node.children]
    texts: list[IntArray] = []
    covered: set[Node] = set()
    for node, tree in sorted(leaves, key=lambda leaf: leaf[0].last_use, reverse=True):
        path = _path(tree, node, covered)
        most_tokens -= len(path) * tree.page_size
        if most_tokens < 0:
            break
        if path:
            covered.update(path)
            texts.append(np.concatenate([tree.tokens_of(each) for each in reversed(path)]))
    texts.reverse()
    return texts


def _path(tree: PrefixCache, leaf: Node, covered: set[Node]) -> list[Node]:
    """Return the nodes from a leaf up to the root, or to the first one in `covered`; empty in a namespace of
    its own.
    """
    path: list[Node] = []
    node = leaf
    while node.parent is not None:
        path.append(node)
        if node in covered:
            return path
        node = node.parent
    return path if node is tree.root else []
