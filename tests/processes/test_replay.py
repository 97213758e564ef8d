"""A follower at the other end of a real channel, in a thread: after any calls its pages and state are its leader's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from helpers.driving import Driver, plain_tokens, tiny_config, tiny_model
from helpers.fakes import DictTier, extended
from helpers.guides import RuleGuide
from rekindle._src.capabilities.guides.guidance import Guidance
from rekindle._src.capabilities.guides.step import Guides
from rekindle._src.channels.channel import Channel, ChannelKeys, MessageKind
from rekindle._src.core.records import PageCopy, PageMove, StepPlan
from rekindle._src.core.sampling import Sampling
from rekindle._src.execution.runner import Runner
from rekindle._src.models.placement import placement_of
from rekindle._src.processes.replay import LoadedWeights, Replay
from rekindle._src.processes.team import Team
from rekindle._src.programs.features import features_of
from rekindle._src.programs.programs import Programs
from rekindle.errors import ProcessLost

pytestmark = pytest.mark.usefixtures("large_steps")
MODEL, OTHER = tiny_model(), tiny_model(seed=9)
PLACEMENT = placement_of(jax.make_mesh((1,), ("model",)), MODEL.graph)
OUT, BACK = b"o" * 32, b"b" * 32


@pytest.fixture(scope="module")
def programs() -> Programs:
    shapes = PLACEMENT.shapes(MODEL.leaves)
    return Programs(
        MODEL.config,
        MODEL.graph,
        shapes,
        tiny_config(host_memory=1 << 20, page_size=16),
        placement=PLACEMENT,
        features=features_of(late=Guides()),
    )


class Both(NamedTuple):
    """A leader with its follower."""

    driver: Driver
    team: Team
    replay: Replay
    thread: threading.Thread
    raised: list[BaseException]

    def settle(self) -> None:
        """Wait until the follower has made every call."""
        for _ in range(2000):
            if self.team.lost or (not self.team._sums and not self.team._expected):
                break
            time.sleep(0.005)
        assert self.team.lost is None, self.team.lost

    def compare(self) -> None:
        """Pages and state are the same; what was computed of padding aside."""
        self.settle()
        assert self.replay.calls is not None
        mine, theirs = self.driver.runner.calls, self.replay.calls
        for one, other in zip(jax.tree.leaves(mine.kv), jax.tree.leaves(theirs.kv), strict=True):
            np.testing.assert_array_equal(np.asarray(one)[1:], np.asarray(other)[1:])  # page 0 is padding's
        slots = [jax.tree.leaves((calls.state, calls.own)) for calls in (mine, theirs)]
        for one, other in zip(*slots, strict=True):
            np.testing.assert_array_equal(np.asarray(one)[:-1], np.asarray(other)[:-1])


@pytest.fixture
def both(programs: Programs) -> Iterator[Both]:
    near, far = socket.socketpair()
    team = Team({1: Channel(near, ChannelKeys(OUT, BACK), silence=300)})

    def weights(model: Any) -> LoadedWeights:
        return LoadedWeights(PLACEMENT.model(model).leaves, model.fingerprint, lambda: None)

    channel = Channel(far, ChannelKeys(BACK, OUT), silence=300)
    replay = Replay(channel, programs, weights(MODEL), lambda name: weights({"other": OTHER}[name]))
    raised: list[BaseException] = []

    def run() -> None:
        try:
            replay.run()
        except BaseException as error:
            raised.append(error)
            channel.close()

    thread = threading.Thread(target=run, daemon=True)
    channel.send(MessageKind.LOADED)
    team.begin(programs)
    team.pages._heads[1] = [np.arange(MODEL.config.num_kv_heads)]  # all of them, as the only process of JAX
    thread.start()
    runner = Runner(PLACEMENT.model(MODEL), programs.config, programs=programs, host_tier=DictTier(), recorder=team)
    yield Both(Driver(runner), team, replay, thread, raised)
    if not team.lost:
        runner.close()
    team.close()
    thread.join(60)
    channel.close()
    assert not thread.is_alive()


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def test_a_follower_makes_every_kind_of_call(both: Both) -> None:
    driver = both.driver
    prompt = prompt_of(1, 21)
    assert driver.solo(prompt, Sampling(max_tokens=9), chunk=8).outputs == plain_tokens(MODEL, prompt, 9)[0]
    options = [
        Sampling(max_tokens=9, temperature=1.0, seed=4, logprobs=3),
        Sampling(max_tokens=7, repetition_penalty=1.3, logit_bias={5: 2.0}, min_tokens=3),
        Sampling(max_tokens=6, prompt_logprobs=2),
        Sampling(max_tokens=8),
    ]
    lives = [driver.add(prompt_of(seed, 9 + seed), one, ends=[2]) for seed, one in enumerate(options)]
    lives[3].request = extended(lives[3].request, Guidance(RuleGuide(lambda position, last: (7, 9, 11))))
    driver.finish(lives)
    assert set(lives[3].outputs) <= {7, 9, 11}
    both.compare()
    pages = lives[0].pages[:2].tolist()
    moves = tuple(PageMove(page, bytes([page]) * 16) for page in pages)
    driver.runner.fetch(driver.runner.dispatch(StepPlan(0, (), (), offload=moves)))
    back = tuple(PageMove(page, move.digest) for page, move in zip((37, 38), moves, strict=True))
    driver.runner.fetch(driver.runner.dispatch(StepPlan(0, (), (), restore=back)))
    copies = tuple(PageCopy(page, 36 - place) for place, page in enumerate((*pages, *pages, *pages)))  # two calls
    driver.runner.fetch(driver.runner.dispatch(StepPlan(0, (), (), copies=copies)))
    for live in lives:
        driver.remove(live)
    driver.solo(prompt_of(7, 5), Sampling(max_tokens=2))
    compare_kept(both, [move.digest for move in moves])
    both.compare()
    kv = both.replay.calls.kv if both.replay.calls else ()
    for leaf in jax.tree.leaves(kv):
        for places in ([37, 38], [36, 35], [34, 33], [32, 31]):
            np.testing.assert_array_equal(np.asarray(leaf)[pages], np.asarray(leaf)[places])
    driver.runner.close()
    both.team.close()
    both.thread.join(60)
    assert not both.raised, both.raised


def compare_kept(both: Both, digests: list[bytes]) -> None:
    """The follower keeps the parts that its leader keeps, sends them, takes others, and drops what it is told to."""
    kept, shared, host = both.replay._pages, both.team.pages, both.driver.runner.host_tier
    assert host is not None
    for digest in digests:
        whole = shared.whole(digest, host.get(digest))  # waits until the follower has come that far
        assert whole is not None
        for one, other, mine in zip(whole, kept.get(digest), host.get(digest), strict=True):
            np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(one, mine)
    first, other = digests[0], b"x" * 16
    shared.keep(other, host.get(first))
    shared.drop([first])
    assert shared.whole(first, host.get(first)) is None and shared.whole(other, host.get(first)) is not None
    assert len(kept) == len(digests) and kept.nbytes == len(digests) * sum(leaf.nbytes for leaf in host.get(first))


def test_a_page_that_is_not_kept_ends_the_follower(both: Both) -> None:
    both.settle()
    both.team.scatter(np.array([1, 0, 0, 0], np.int32), [b"n" * 16])
    both.thread.join(60)
    assert isinstance(both.raised[0], ProcessLost) and "which is not kept here" in str(both.raised[0])


def test_new_memory_and_other_weights(both: Both, programs: Programs) -> None:
    driver, prompt = both.driver, prompt_of(3, 12)
    driver.solo(prompt, Sampling(max_tokens=4))
    driver.runner.reset()
    both.team.load_weights("other", lambda: OTHER.fingerprint)
    driver.runner.swap_weights(PLACEMENT.model(OTHER).leaves)
    assert driver.solo(prompt, Sampling(max_tokens=5)).outputs == plain_tokens(OTHER, prompt, 5)[0]
    both.compare()


def test_calls_in_a_wrong_order_end_the_follower(both: Both) -> None:
    both.settle()
    both.team.broadcast(MessageKind.TAKE_WEIGHTS)
    both.thread.join(60)
    assert isinstance(both.raised[0], ProcessLost) and "weights are to be used that were not loaded" in str(
        both.raised[0]
    )


def test_a_message_that_followers_do_not_take_ends_them(both: Both) -> None:
    both.settle()
    both.team.broadcast(MessageKind.READY, b"{}")
    both.thread.join(60)
    assert "READY message, which followers don't take" in str(both.raised[0])
