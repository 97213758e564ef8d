"""A leader's followers at the other end of real channels, without JAX: what they say, and how they are lost."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from helpers.bounds import Within
from helpers.driving import tiny_config
from rekindle._src.channels.channel import Channel, ChannelKeys, MessageKind, as_json
from rekindle._src.processes.codec import DONE, checksum
from rekindle._src.processes.facts import ProcessReport, encoded, facts
from rekindle._src.processes.team import Team
from rekindle.errors import CheckpointError, ProcessLost, ProcessRefused

OUT, BACK = b"o" * 32, b"b" * 32
FACTS = ProcessReport({"jax": "1", "the weights": "abc"}, 40)


class Others:
    """A team, and the other ends of its channels by process."""

    def __init__(self, count: int, silence: float = 5.0) -> None:
        self.channels: dict[int, Channel] = {}
        mine = {}
        for process in range(1, count + 1):
            near, far = socket.socketpair()
            mine[process] = Channel(near, ChannelKeys(OUT, BACK), silence=silence)
            self.channels[process] = Channel(far, ChannelKeys(BACK, OUT), silence=60.0)
        self.team = Team(mine)
        self.lost: list[BaseException] = []
        self.team.watch(self.lost.append)

    def say(self, kind: MessageKind, content: bytes = b"") -> None:
        for channel in self.channels.values():
            channel.send(kind, content)

    def until_lost(self) -> BaseException:
        for _ in range(1000):
            if self.lost:
                return self.lost[0]
            time.sleep(0.005)
        raise AssertionError("no process is lost")

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.team.close()


@pytest.fixture
def others() -> Iterator[Others]:
    made = Others(2)
    yield made
    made.close()


def test_all_agree_upon_the_fewest_pages(others: Others) -> None:
    for process, channel in others.channels.items():
        channel.send(MessageKind.FACTS, encoded(FACTS._replace(pages=50 - process)))
    assert others.team.agree(FACTS._replace(pages=49)) == 48
    for channel in others.channels.values():
        assert channel.receive() == (MessageKind.AGREED, as_json({"device_pages": 48}))


def test_what_differs_is_named_to_both_sides(others: Others) -> None:
    others.channels[1].send(MessageKind.FACTS, encoded(FACTS))
    others.channels[2].send(
        MessageKind.FACTS, encoded(FACTS._replace(same={"jax": "2", "the weights": "abc", "more": 1}))
    )
    with pytest.raises(ProcessRefused, match=r"process 2 .*: jax is '2' there and '1' here; more is 1 there and None"):
        others.team.agree(FACTS)
    kind, told = others.channels[2].receive()
    assert kind is MessageKind.FAILED and b"jax is '2' there" in told


def test_the_facts_of_two_processes_are_equal_and_name_no_device() -> None:
    told = facts(tiny_config(), model="m", fingerprint="f")
    assert told == facts(tiny_config(cache_dir="/elsewhere"), model="m", fingerprint="f")
    assert told.same["environment.platform"] == "cpu" and not any("device_id" in name for name in told.same)
    assert told.same != facts(tiny_config(max_requests=3), model="m", fingerprint="f").same


def test_a_follower_that_closes_is_lost_at_once(others: Others, within: Within) -> None:
    with within(2):
        others.channels[2].close()
        lost = others.until_lost()
    assert isinstance(lost, ProcessLost) and "process 2 is gone: the connection" in str(lost)
    with pytest.raises(ProcessLost, match="process 2 is gone"):
        others.team.renew()
    with pytest.raises(ProcessLost):
        others.channels[1].receive()  # the other one is let go as well
    told: list[BaseException] = []
    others.team.watch(told.append)
    assert told == [lost]


def test_a_follower_that_says_nothing_is_lost() -> None:
    others = Others(1, silence=0.2)
    try:
        assert "nothing came for 0.2 s" in str(others.until_lost())
    finally:
        others.close()


def test_a_slow_follower_is_waited_for() -> None:
    others = Others(1, silence=0.5)
    try:
        channel = others.channels[1]

        def later() -> None:
            for _ in range(8):
                time.sleep(0.1)
                channel.ping()
            channel.send(MessageKind.FACTS, encoded(FACTS))

        threading.Thread(target=later, daemon=True).start()
        assert others.team.agree(FACTS) == 40 and not others.lost
    finally:
        others.close()


def test_a_follower_says_why_it_ends(others: Others) -> None:
    others.channels[1].send(MessageKind.FAILED, as_json({"error": "OutOfMemory: no room"}))
    assert "process 1 is gone: OutOfMemory: no room" in str(others.until_lost())


def test_noise_of_a_follower_ends_the_session() -> None:
    near, far = socket.socketpair()
    team = Team({1: Channel(near, ChannelKeys(OUT, BACK), silence=60)})
    lost: list[BaseException] = []
    team.watch(lost.append)
    with far:
        far.sendall(bytes(range(200)))
        for _ in range(1000):
            if lost:
                break
            time.sleep(0.005)
    assert "did not sign" in str(lost[0])
    team.close()


def test_other_tokens_of_a_follower_end_the_session(others: Others) -> None:
    rows = np.array([[5, 0], [6, 0]], np.int32)
    chosen = np.array([0, 1])
    others.team._expected.extend([chosen, chosen])
    others.say(MessageKind.DONE, DONE.pack(0, checksum(rows, chosen)))
    others.team.result(rows)
    others.channels[1].send(MessageKind.DONE, DONE.pack(1, checksum(rows, chosen)))
    others.channels[2].send(MessageKind.DONE, DONE.pack(1, checksum(rows + 1, chosen)))
    with contextlib.suppress(ProcessLost):  # it may know already
        others.team.result(rows)
    assert "process 2 chose other tokens than the leader in step 1" in str(others.until_lost())


def test_a_failed_call_of_the_leader_is_the_end(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle._src.processes.team.FAILURE_SECONDS", 0.05)
    others.team.failed(MemoryError("full"))
    lost = others.until_lost()
    assert "a step failed in the leader" in str(lost) and isinstance(lost.__cause__, MemoryError)


@pytest.mark.parametrize(
    ("answer", "mine", "problem"),
    [
        ({"fingerprint": "new"}, lambda: "new", None),
        ({"fingerprint": "old"}, lambda: "new", "process 1 has other weights there; process 2 has"),
        ({"error": "no such folder"}, lambda: "new", "process 1 can't load them: no such folder"),
    ],
)
def test_weights_are_used_only_if_all_have_them(
    others: Others, answer: dict[str, Any], mine: Callable[[], str], problem: str | None
) -> None:
    others.say(MessageKind.WEIGHTS, as_json(answer))
    if problem is None:
        others.team.load_weights("there", mine)
        others.team.replace_weights()
    else:
        with pytest.raises(CheckpointError, match=problem):
            others.team.load_weights("there", mine)
    for channel in others.channels.values():
        assert channel.receive() == (MessageKind.LOAD_WEIGHTS, as_json({"weights": "there"}))
        assert channel.receive()[0] is (MessageKind.DROP_WEIGHTS if problem else MessageKind.TAKE_WEIGHTS)


def test_closing_tells_all_and_is_idempotent(others: Others) -> None:
    def leave(channel: Channel) -> None:
        while channel.receive()[0] is not MessageKind.CLOSE:
            pass
        channel.close()

    threads = [threading.Thread(target=leave, args=(channel,)) for channel in others.channels.values()]
    for thread in threads:
        thread.start()
    others.team.close()
    others.team.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not others.lost, "an end is no loss"
