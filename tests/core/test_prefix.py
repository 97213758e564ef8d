"""Roots of namespaces are those of earlier versions, and a request's prefix has all that decides what pages hold."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle import Sampling
from rekindle._src.capabilities.adapters.request import AdapterUse
from rekindle._src.core.extension import Extensions
from rekindle._src.core.prefix import SHARED, PageNamespace, Prefix, is_namespace, key_of
from rekindle._src.core.prompt_rows import PromptRows, RowSpan
from rekindle._src.core.records import Request, ResumeState

TREE = b"r" * 16
STORED = {  # digests and keys of version 0.2, which cache folders and other processes have
    PageNamespace(): (TREE.hex(), 0),
    PageNamespace("alice"): ("8e1cfdc48c131f70a2714717a12d074d", 5550455235660968354),
    PageNamespace("\0odd"): ("8e1cfdc48c131f7044b04ee1c6661556", 6202977066142314564),
    PageNamespace("\ud800"): ("8e1cfdc48c131f70fa2be1a13e40a6b2", 12873047222633180154),
    PageNamespace(None, ("d1",)): ("8e1cfdc48c131f70765e73fb89393d8d", 10177353997719133814),
    PageNamespace("alice", ("d1", "steer-d2")): ("8e1cfdc48c131f70352b8a31d8655848", 5213028547899829045),
    PageNamespace("\0odd", ("d1",)): ("8e1cfdc48c131f703acb3d22bdec5b04", 314104896099830586),
}


@pytest.mark.parametrize("namespace", STORED)
def test_stored_pages_are_found_again(namespace: PageNamespace) -> None:
    digest, key = STORED[namespace]
    root = namespace.root(TREE)
    assert root.hex() == digest and namespace.key == key
    assert is_namespace(root, TREE) == (namespace != SHARED)
    assert namespace == SHARED or key_of(root) == key


def test_no_salt_has_the_root_of_a_change() -> None:
    salts = ["\0d1\0", "\0d1\0alice", "\0\0d1\0", "d1", "\0"]
    changes = [PageNamespace(salt, altered) for salt in (None, "alice", "\0") for altered in (("d1",), ("d1", "d2"))]
    roots = {namespace.root(TREE) for namespace in [*map(PageNamespace, salts), *changes]}
    assert len(roots) == len(salts) + len(changes)


class Weights:
    name, digest, rank = "mine", "d1", 4


def test_a_prefix_has_all_that_decides_what_pages_hold() -> None:
    tokens = np.arange(100, 112, dtype=np.int32)
    picture = PromptRows((RowSpan(4, 7, b"a picture"),), ())
    carried = Extensions(AdapterUse(Weights(), ("d1",)), picture)
    resumed = ResumeState(np.array([5, 6, 7, 8], np.int32))
    request = Request("one", tokens, Sampling(salt="alice"), extensions=carried, resumed=resumed)
    prefix = request.prefix(4)
    assert prefix.namespace == PageNamespace("alice", ("d1",))
    assert (prefix.tokens[4:8] < 0).all(), "the page of the picture is named by what the picture shows"
    np.testing.assert_array_equal(
        np.delete(prefix.tokens, range(4, 8)), [*range(100, 104), *range(108, 112), 5, 6, 7, 8]
    )
    first = prefix.first(8)
    assert len(first.tokens) == 8 and first.namespace == prefix.namespace
    plain = Request("two", tokens, Sampling()).prefix(4)
    assert plain == Prefix(tokens) and plain.namespace == SHARED
