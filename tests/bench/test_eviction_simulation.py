"""The policy study: the replay counts right, nothing beats hindsight by much, and the default is the one that wins."""

from __future__ import annotations

import random

import pytest

from workshop import eviction
from workshop.eviction import DEFAULT, POLICIES, TRACES, Hindsight, Lru, Trace, replay


def trace_of(*requests: str) -> Trace:
    """Each letter is a page of tokens; equal beginnings are equal pages."""
    trace = Trace()
    trace.requests = [trace.extend([], *request) for request in requests]
    return trace


def test_a_replay_counts_the_pages_that_were_not_there() -> None:
    trace = trace_of("ab", "ac", "ab", "d", "ab")
    assert replay(trace, Lru(trace), 10) == pytest.approx(4 / 9)  # a, b, c, d
    # Room for two: c drives b out, b drives c out, d drives b out; a is used all the time.
    assert replay(trace, Lru(trace), 2) == pytest.approx(6 / 9)


def test_hindsight_keeps_what_comes_back() -> None:
    trace = trace_of("a", "b", "c", "a", "b", "c", "a", "b", "c")
    assert replay(trace, Lru(trace), 2) == 1.0
    assert replay(trace, Hindsight(trace), 2) < 0.7


@pytest.mark.parametrize("load", TRACES)
def test_pages_of_a_load_form_a_tree_and_hindsight_bounds_every_policy(load: str) -> None:
    trace = TRACES[load](random.Random(1), 300)
    for request in trace.requests:
        assert trace.parents[request[0]] == -1
        assert [trace.parents[page] for page in request[1:]] == request[:-1]
    room = len(trace.parents) // 10 + 2 * max(map(len, trace.requests))
    shares = {name: replay(trace, policy(trace), room) for name, policy in POLICIES.items()}
    assert all(0.0 < share <= 1.0 for share in shares.values())
    assert shares["hindsight"] <= min(shares.values()) + 1e-9


def test_the_default_is_the_policy_that_wins() -> None:
    table = eviction.study(600, seed=3).splitlines()
    names, excess = table[0].split()[2:], [float(value.rstrip("%")) for value in table[-1].split()[2:]]
    ranked = sorted(zip(excess, names, strict=True))
    assert ranked[0][1] == "hindsight"
    assert ranked[1][1] == DEFAULT
