"""Digests are names for ever; keys are quick, and only as good as the comparison of tokens that follows."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.kvcache.digest import LOOKUP_SECRET, page_digest, page_keys, root_digest

TOKENS = np.arange(1000, 1016, dtype=np.int32)


def test_digests_are_the_same_in_every_process() -> None:
    # Written down: a change here makes every stored page of every user unreadable.
    root = root_digest("model", "float32")
    assert root.hex() == "03ad65754a330c3d5a879d421129a3ee"
    assert page_digest(root, TOKENS).hex() == "9e925093506a7fd5ce4a08b678257203"


def test_digests_agree_between_processes_and_keys_do_not() -> None:
    """Who knows another process's keys could keep a prefix out of its cache, by a page with the same key."""
    code = (
        "import numpy as np; from rekindle._src.kvcache.digest import *; t = np.arange(64, dtype=np.int32);"
        "print(page_digest(root_digest('a'), t).hex(), page_keys(t, 16))"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        ).stdout.split(maxsplit=1)
        for _ in range(2)
    ]
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]


def test_keys_of_another_process_need_its_secret() -> None:
    tokens = np.arange(64, dtype=np.int32)
    own = page_keys(tokens, 16)
    assert own == page_keys(tokens, 16, secret=LOOKUP_SECRET) != page_keys(tokens, 16, secret=b"x" * 16)


def test_parts_of_a_root_do_not_run_together() -> None:
    assert root_digest("ab", "c") != root_digest("a", "bc")


def test_a_digest_depends_on_everything_before_its_page() -> None:
    assert page_digest(root_digest("a"), TOKENS) != page_digest(root_digest("b"), TOKENS)
    assert page_digest(b"x" * 16, TOKENS) != page_digest(b"x" * 16, TOKENS + 1)


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=80), page_size=st.sampled_from([1, 4, 8]), data=st.data())
def test_keys_can_be_computed_in_pieces(tokens: list[int], page_size: int, data: st.DataObject) -> None:
    array = np.array(tokens, np.int32)
    whole = page_keys(array, page_size)
    assert len(whole) == len(tokens) // page_size
    cut = data.draw(st.integers(0, len(whole)))
    head = page_keys(array[: cut * page_size], page_size)
    tail = page_keys(array[cut * page_size :], page_size, first=cut, previous=head[-1] if head else 0)
    assert head + tail == whole


@pytest.mark.parametrize("changed", [0, 15, 16, 40])
def test_a_key_stands_for_its_whole_prefix(changed: int) -> None:
    tokens = np.arange(64, dtype=np.int32)
    other = tokens.copy()
    other[changed] += 1
    same = [a == b for a, b in zip(page_keys(tokens, 16), page_keys(other, 16), strict=True)]
    assert same == [index < changed // 16 for index in range(4)]


def test_keys_tell_orders_of_pages_and_tokens_apart() -> None:
    tokens = np.arange(64, dtype=np.int32)
    pages = tokens.reshape(4, 16)
    keys = {page_keys(order, 16)[-1] for order in (tokens, pages[::-1].reshape(-1), pages[:, ::-1].reshape(-1))}
    assert len(keys) == 3
