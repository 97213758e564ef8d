"""How processes meet: early and late ones, those that leave again, and connections that want something else."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from rekindle._src.channels import greeting
from rekindle._src.channels.channel import Channel
from rekindle._src.channels.greeting import ProcessPlace
from rekindle._src.processes import joining
from rekindle._src.processes.team import Team
from rekindle.errors import ConfigError, ProcessLost


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> str:
    """A free address. JAX's own service is left out."""
    monkeypatch.setenv(greeting.SECRET, "a secret of these tests")
    monkeypatch.setattr(joining, "initialize", lambda service, place: None)
    monkeypatch.setattr(joining, "_check_unused", lambda processes: None)
    monkeypatch.setattr(joining, "PING_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class Leader:
    """`joining.lead` in a thread."""

    def __init__(self, coordinator: str, processes: int, **options: Any) -> None:
        self.there: list[int] = []
        self.found: Any = None
        self.thread = threading.Thread(target=self._run, args=(coordinator, processes, options), daemon=True)
        self.thread.start()

    def _run(self, coordinator: str, processes: int, options: dict[str, Any]) -> None:
        try:
            self.found = joining.lead(coordinator, processes, {"model": "m"}, waiting=self.there.append, **options)
        except Exception as error:
            self.found = error

    def result(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.found

    def until(self, there: int) -> None:
        for _ in range(2000):
            if self.there and self.there[-1] == there:
                return
            time.sleep(0.005)
        raise AssertionError(f"{self.there}, not {there}")


def test_processes_come_leave_and_come_again(coordinator: str) -> None:
    leader = Leader(coordinator, 3)
    leader.until(0)
    first = joining.connect(coordinator, ProcessPlace(1, 3), wait=10)
    leader.until(1)
    first.close()
    leader.until(0)
    with socket.create_connection(("127.0.0.1", int(coordinator.split(":")[1]))) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        channels = [joining.connect(coordinator, ProcessPlace(process, 3), wait=10) for process in (2, 1)]
        team = leader.result()
    assert isinstance(team, Team) and [one.process for one in team.followers] == [1, 2]
    for process, channel in zip((2, 1), channels, strict=True):
        session = joining.enter(channel, ProcessPlace(process, 3))
        assert session["model"] == "m" and session["service"].startswith("127.0.0.1:")
    for channel in channels:
        channel.close()
    team.close()


def test_a_follower_may_come_before_its_leader(coordinator: str) -> None:
    channels: list[Any] = []
    thread = threading.Thread(
        target=lambda: channels.append(joining.connect(coordinator, ProcessPlace(1, 2), wait=20)), daemon=True
    )
    thread.start()
    time.sleep(0.3)
    leader = Leader(coordinator, 2)
    team = leader.result()
    thread.join(60)
    assert isinstance(team, Team)
    channels[0].close()
    team.close()


@pytest.mark.thorough
def test_waiting_ends(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    leader = Leader(coordinator, 3, given_up=given_up.is_set)
    leader.until(0)
    channel = joining.connect(coordinator, ProcessPlace(2, 3), wait=10)
    leader.until(1)
    given_up.set()
    lost = leader.result()
    assert isinstance(lost, ProcessLost) and "have not come within 300 s: 1. Start `rekindle follow`" in str(lost)
    channel.close()
    monkeypatch.setattr(joining, "JOIN_SECONDS", 0.3)
    assert "of 2 processes these have not come within 0 s: 1" in str(Leader(coordinator, 2).result())
    with pytest.raises(ProcessLost, match=f"there is no leader at {coordinator} after 0 s"):
        joining.connect(coordinator, ProcessPlace(1, 2), wait=0.3)


def test_a_follower_whose_greeting_ends_after_the_leader_gave_up_is_not_kept(
    coordinator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, goes_on, greeted = threading.Event(), threading.Event(), list[Channel]()
    threads, original = list[threading.Thread](), greeting.lead

    def lead(*arguments: Any, **options: Any) -> tuple[int, Channel]:
        process, channel = original(*arguments, **options)
        threads.append(threading.current_thread())
        greeted.append(channel)
        assert goes_on.wait(60)
        return process, channel

    monkeypatch.setattr(greeting, "lead", lead)
    leader = Leader(coordinator, 2, given_up=given_up.is_set)
    leader.until(0)
    channel = joining.connect(coordinator, ProcessPlace(1, 2), wait=10)
    given_up.set()
    assert isinstance(leader.result(), ProcessLost)
    goes_on.set()
    threads[0].join(60)
    assert greeted[0].connection.fileno() == -1, "its connection is open"
    channel.close()


def test_silent_connections_keep_no_follower_out(coordinator: str) -> None:
    leader = Leader(coordinator, 2)
    leader.until(0)
    port = int(coordinator.split(":")[1])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(joining.GREETINGS)]
    try:
        channel = joining.connect(coordinator, ProcessPlace(1, 2), wait=0)
        team = leader.result()
        assert isinstance(team, Team) and [one.process for one in team.followers] == [1]
        channel.close()
        team.close()
    finally:
        for connection in silent:
            connection.close()


def test_an_address_that_is_taken_is_refused(coordinator: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        found = Leader(taken, 2).result()
    assert isinstance(found, ConfigError) and f"coordinator='{taken}': can't be listened at" in str(found)
