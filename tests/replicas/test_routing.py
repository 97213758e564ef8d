"""Routers as functions: equal everywhere, bounded, and little moves when a replica goes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import ConfigError
from rekindle._src.replicas.routing import (
    AffinityKeys,
    Load,
    affinity,
    keys_of_messages,
    keys_of_tokens,
    most,
    rendezvous,
    round_robin,
    router,
    shortest,
)

NAMES = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=12, unique=True)
KEYS = st.builds(AffinityKeys, st.binary(max_size=8), st.binary(max_size=8))
INSIDE = st.integers(0, 30)
LOADS = NAMES.flatmap(
    lambda names: st.tuples(*(st.builds(Load, st.just(name), INSIDE, st.integers(1, 40)) for name in names))
)


@given(st.binary(max_size=16), NAMES)
def test_without_a_name_the_others_keep_their_order(key: bytes, names: list[str]) -> None:
    order = rendezvous(key, names)
    assert sorted(order) == sorted(names)
    for gone in names:
        assert rendezvous(key, set(names) - {gone}) == [name for name in order if name != gone]


@given(KEYS, LOADS)
def test_affinity_is_a_function_of_what_it_is_given(keys: AffinityKeys, loads: tuple[Load, ...]) -> None:
    assert affinity(keys, loads) == affinity(keys, loads[::-1])


@given(KEYS, LOADS)
def test_affinity_keeps_to_the_bound_and_to_the_places(keys: AffinityKeys, loads: tuple[Load, ...]) -> None:
    route = affinity(keys, loads)
    if all(load.full for load in loads):
        assert route is None
        return
    assert route is not None
    chosen = next(load for load in loads if load.name == route.name)
    assert not chosen.full
    within = [load for load in loads if load.running < most(loads) and not load.full]
    assert chosen in within or not within


@given(st.lists(KEYS, min_size=1, max_size=200), st.integers(1, 8))
def test_no_replica_gets_more_than_the_bound(keys: list[AffinityKeys], replicas: int) -> None:
    inside: Counter[str] = Counter()
    for one in keys:
        loads = [Load(f"r{index}", inside[f"r{index}"], 10_000) for index in range(replicas)]
        limit = most(loads)
        route = affinity(one, loads)
        assert route is not None
        inside[route.name] += 1
        assert inside[route.name] <= limit


@given(KEYS, st.integers(2, 12))
def test_only_the_conversations_of_a_replica_that_goes_move(keys: AffinityKeys, replicas: int) -> None:
    """Within the replicas of one system prompt, as far as these stay the same number."""
    idle = [Load(f"r{index}", 0, 100) for index in range(replicas)]
    before = affinity(keys, idle, spread=2)
    assert before is not None
    for gone in idle:
        after = affinity(keys, [load for load in idle if load is not gone], spread=2)
        assert after is not None
        near = rendezvous(keys.opening, [load.name for load in idle])[:2]
        if gone.name not in near:
            assert after.name == before.name


def test_how_many_conversations_move() -> None:
    idle = [Load(f"r{index}", 0, 100) for index in range(8)]
    keys = [AffinityKeys(bytes([number % 16]), number.to_bytes(2, "big")) for number in range(2000)]
    before = [affinity(one, idle) for one in keys]
    after = [affinity(one, idle[1:]) for one in keys]
    moved = sum(a is not None and b is not None and a.name != b.name for a, b in zip(before, after, strict=True))
    assert sum(one is not None and one.name == "r0" for one in before) <= moved < 0.35 * len(keys)


@given(LOADS)
def test_the_shortest_queue(loads: tuple[Load, ...]) -> None:
    route = shortest(loads)
    free = [load for load in loads if not load.full]
    if not free:
        assert route is None
        return
    assert route is not None
    assert min(load.running for load in free) == next(load.running for load in free if load.name == route.name)


def test_turns() -> None:
    loads = [Load(name, 0, 1) for name in "cab"]
    last, seen = "", ""
    for _ in range(7):
        route = round_robin(last, loads)
        assert route is not None
        last = route.name
        seen += last
    assert seen == "abcabca"
    full = [Load("a", 1, 1), Load("b", 0, 1)]
    assert [router("round-robin").choose(AffinityKeys(b"", b""), full) for _ in range(2)] == [
        round_robin("a", full)
    ] * 2
    assert round_robin("", [Load("a", 1, 1)]) is None


def test_the_same_in_another_process() -> None:
    code = (
        "from rekindle._src.replicas.routing import *\n"
        "loads = [Load(f'r{n}', 0, 9) for n in range(9)]\n"
        "print([affinity(AffinityKeys(bytes([n]), bytes([n, n])), loads).name for n in range(50)])"
    )
    loads = [Load(f"r{number}", 0, 9) for number in range(9)]
    found = [affinity(AffinityKeys(bytes([n]), bytes([n, n])), loads) for n in range(50)]
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str([route.name for route in found if route is not None])


def test_a_name_that_is_no_router() -> None:
    with pytest.raises(ConfigError, match="'affinity', 'round-robin', 'shortest'"):
        router("random")


def test_keys_of_chats() -> None:
    system = {"role": "system", "content": "Be short."}
    first, other = {"role": "user", "content": "Hello"}, {"role": "user", "content": "Bye"}
    turn = [system, first, {"role": "assistant", "content": "Hi"}, other]
    assert keys_of_messages(turn) == keys_of_messages([system, first])
    assert keys_of_messages(turn).opening == keys_of_messages([system, other]).opening
    assert keys_of_messages(turn).conversation != keys_of_messages([system, other]).conversation
    assert keys_of_messages(turn, "mine").opening != keys_of_messages(turn).opening
    alone = keys_of_messages([first])
    assert alone.opening == alone.conversation != keys_of_messages([other]).opening
    assert keys_of_messages([]) == keys_of_messages([])


def test_keys_of_tokens() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    longer = np.concatenate([tokens[:300], tokens])
    assert keys_of_tokens(tokens[:400]) == keys_of_tokens(longer)
    assert keys_of_tokens(tokens[:100]).opening == keys_of_tokens(tokens).opening
    assert keys_of_tokens(tokens[:100]).conversation != keys_of_tokens(tokens).conversation
    assert keys_of_tokens(tokens[:60]).opening != keys_of_tokens(tokens).opening
