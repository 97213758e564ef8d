"""Pages between sessions: they arrive as they were, are used as one's own, and nothing else is believed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers import checkpoints, tiered
from helpers.sessions import eventually, host_of, writer_of
from helpers.tiered import LENGTH, NEW, ask, opened, plain, prompt
from rekindle import ConfigError, ProcessLost, ProcessRefused, Session, SharedPages, SnapshotRefused
from rekindle._src.channels import greeting
from rekindle._src.channels.bulk import BulkChannel, ReceiveMemory, SendMemory
from rekindle._src.channels.channel import MessageKind
from rekindle._src.core.prefix import Prefix
from rekindle._src.kvcache.caches import PrefixCaches
from rekindle._src.kvcache.persist import segment
from rekindle._src.kvcache.sharing import (
    CONNECTIONS,
    GREETINGS,
    SILENCE,
    PageAddress,
    PageSource,
    Puller,
    introduction,
    page_address,
    parts,
)

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
SECRET = "a secret of these tests"
PAGES = LENGTH // 8  # full ones of a prompt


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of programs, which all sessions share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def both(cache: Path) -> Iterator[tuple[Session, Session, SharedPages]]:
    """Two sessions, the first of which shares its pages."""
    with ExitStack() as stack:
        one = stack.enter_context(opened(cache, disk_memory=0))
        two = stack.enter_context(opened(cache, disk_memory=0))
        yield one, two, one.cache.share(secret=SECRET).result_sync()


def pull(session: Session, shared: SharedPages, *given: Any, **options: Any) -> int:
    return session.cache.pull(shared.address, *given, secret=SECRET, **options).result_sync()


def test_a_prompt_is_computed_in_one_session_and_answered_in_the_other(both: Any) -> None:
    one, two, shared = both
    ask(one, 0)
    assert pull(two, shared, list(prompt(0))) == PAGES * 8
    assert ask(two, 0) == PAGES * 8, "the tokens are those of a plain loop, and the prompt was not computed"
    assert shared.sent_pages == PAGES
    assert f"{PAGES} pages sent" in repr(shared)


def test_only_what_is_missing_is_taken(both: Any) -> None:
    one, two, shared = both
    ask(one, 0), ask(one, 1)
    assert pull(two, shared, list(prompt(0))) == PAGES * 8
    assert pull(two, shared, list(prompt(1))) == (PAGES - tiered.SHARED // 8) * 8
    assert pull(two, shared, list(prompt(1))) == 0
    assert pull(two, shared, list(prompt(2))) == 0, "the shared beginning is here already"
    assert ask(two, 1) == PAGES * 8


@pytest.mark.thorough
def test_pages_that_left_the_device_are_given_too(both: Any) -> None:
    one, two, shared = both
    for index in range(4):
        ask(one, index)
    one.cache.clear(tier="device").result_sync()
    eventually(lambda: one.cache.stats().host.pages >= 0)
    ask(one, 0)
    taken = pull(two, shared, list(prompt(0)))
    assert taken == PAGES * 8
    assert ask(two, 0) == PAGES * 8


def test_a_new_session_warms_up_from_a_neighbour(both: Any) -> None:
    one, two, shared = both
    for index in (0, 0, 1):
        ask(one, index)
    assert pull(two, shared) > 0
    assert ask(two, 0) == PAGES * 8
    assert pull(two, shared) == 0, "nothing is taken twice"
    assert ask(two, 1) == PAGES * 8
    two.check_integrity()


def test_salts_stay_apart(both: Any) -> None:
    one, two, shared = both
    given = {"max_tokens": NEW, "ignore_eos": True}
    one.generate_sync(list(prompt(0)), salt="a", **given)
    assert pull(two, shared, list(prompt(0))) == 0
    assert pull(two, shared, list(prompt(0)), salt="b") == 0
    assert pull(two, shared, list(prompt(0)), salt="a") == PAGES * 8
    assert two.generate_sync(list(prompt(0)), **given).usage.cached_tokens == 0
    done = two.generate_sync(list(prompt(0)), salt="a", **given)
    assert (done.usage.cached_tokens, done.token_ids) == (PAGES * 8, plain(0))


@pytest.mark.thorough
def test_warming_up_brings_salted_pages_to_their_salt_alone(both: Any) -> None:
    one, two, shared = both
    one.generate_sync(list(prompt(0)), salt="a", max_tokens=NEW)
    assert pull(two, shared) >= PAGES * 8
    assert two.generate_sync(list(prompt(0)), max_tokens=2).usage.cached_tokens == 0
    assert two.generate_sync(list(prompt(0)), salt="a", max_tokens=2).usage.cached_tokens == PAGES * 8


def test_the_secret_is_asked_for(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, two, shared = both
    with pytest.raises(ProcessRefused, match="another secret"):
        two.cache.pull(shared.address, list(prompt(0)), secret="another secret of these tests").result_sync()
    with pytest.raises(ConfigError, match="at least 16"):
        two.cache.share(secret="short").result_sync()
    monkeypatch.delenv("REKINDLE_PROCESS_SECRET", raising=False)
    with pytest.raises(ConfigError, match="REKINDLE_PROCESS_SECRET"):
        two.cache.pull(shared.address).result_sync()
    monkeypatch.setenv("REKINDLE_PROCESS_SECRET", SECRET)
    assert two.cache.pull(shared.address).result_sync() == 0
    with pytest.raises(ConfigError, match="address"):
        two.cache.pull("nowhere", list(prompt(0))).result_sync()


@pytest.mark.usefixtures("short_turns")
def test_silent_connections_keep_no_rightful_one_out(both: Any) -> None:
    """Thirty-two that know no secret had all the places, for as long as they sent a byte now and then."""
    one, two, shared = both
    ask(one, 0)
    port = int(shared.address.rpartition(":")[2])
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(max(CONNECTIONS, GREETINGS))
        ]
        eventually(lambda: len(shared._pending) == GREETINGS)
        assert pull(two, shared, list(prompt(0))) == PAGES * 8
        silent[0].settimeout(20)
        while silent[0].recv(1 << 10):  # what the listener says first, and then the end: the oldest left
            pass
        assert len(shared._pending) == GREETINGS - 1, "the rightful one is greeted, and needs its place no more"
    assert ask(two, 0) == PAGES * 8
    eventually(lambda: not shared._pending and not shared._live)


def test_who_knows_the_secret_and_finds_no_place_is_told(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, two, shared = both
    monkeypatch.setattr("rekindle._src.kvcache.sharing.CONNECTIONS", 0)
    with pytest.raises(SnapshotRefused, match="0 connections take pages already"):
        pull(two, shared, list(prompt(0)))


def test_pages_of_other_weights_are_refused(both: Any, cache: Path) -> None:
    _, _, shared = both
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": checkpoints.case("qwen3")}, "belongs to weights"), ({"kv_dtype": "bfloat16"}, "its pages hold"),
    ]  # fmt: skip
    for options, why in cases:
        with opened(cache, disk_memory=0, **options) as other, pytest.raises(SnapshotRefused, match=why):
            pull(other, shared, list(prompt(0)))


def test_the_end_of_the_session_ends_the_sharing(cache: Path) -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("rekindle")}
    with opened(cache, disk_memory=0) as two:
        with opened(cache, disk_memory=0) as one:
            shared = one.cache.share(secret=SECRET).result_sync()
            pull(two, shared)
        assert shared.closed and "closed" in repr(shared)
        with pytest.raises(ProcessLost):
            pull(two, shared, list(prompt(0)))
        assert ask(two, 0) == 0
    eventually(lambda: {t for t in threading.enumerate() if t.name.startswith("rekindle")} <= before)


def test_without_host_memory_there_is_nothing_to_share(cache: Path) -> None:
    with opened(cache, disk_memory=0, host_memory=0) as session, pytest.raises(ConfigError, match="host_memory"):
        session.cache.share(secret=SECRET).result_sync()


def test_between_hosts_what_follows_is_sealed(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, shared = both
    monkeypatch.setattr("rekindle._src.channels.bulk.on_loopback", lambda connection: False)
    ask(one, 0)
    assert pull(two, shared, list(prompt(0))) == PAGES * 8
    assert ask(two, 0) == PAGES * 8


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files without a name")
@pytest.mark.parametrize("readable", [True, False])
def test_on_one_machine_pages_pass_through_shared_memory(
    both: Any, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    one, two, shared = both
    passed: list[int] = []
    send = SendMemory.send

    def counted(parts: SendMemory, connection: Any, pieces: Any) -> None:
        passed.append(sum(len(piece) for piece in pieces))
        send(parts, connection, pieces)

    def refused(parts: ReceiveMemory, offer: Any) -> None:
        raise OSError("the other process is in another container")

    monkeypatch.setattr(SendMemory, "send", counted)
    if not readable:
        monkeypatch.setattr(ReceiveMemory, "__init__", refused)
    ask(one, 0), ask(one, 1)
    assert pull(two, shared, list(prompt(0))) == PAGES * 8
    assert pull(two, shared) > 0
    assert sum(passed) == (shared.sent_bytes if readable else 0)
    assert ask(two, 0) == PAGES * 8
    assert ask(two, 1) == PAGES * 8


class Liar:
    """Shares pages as a session would, but answers as a test says."""

    def __init__(self, session: Session, answers: Any) -> None:
        self.identity = writer_of(session).tiers.identity
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = PageAddress("127.0.0.1", self._server.getsockname()[1], SECRET.encode())
        self._answers = answers
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._server, self._server.accept()[0] as connection:
            channel = BulkChannel(connection, greeting.listen(connection, SECRET.encode()), silence=SILENCE)
            channel.receive()
            channel.send(MessageKind.IDENTITY, introduction(self.identity, sealed=False))
            channel.receive()
            self._answers(channel, self.identity)


def indexes(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


@pytest.mark.parametrize(
    ("first", "second"),
    [(indexes(99), b""), (indexes(-1), b""), (indexes(0, 0), b""), (b"abc", b""), (b"", indexes(9))],
)
def test_pages_that_were_not_asked_for_are_refused(both: Any, first: bytes, second: bytes) -> None:
    _, two, _ = both

    def answers(channel: BulkChannel, identity: Any) -> None:
        channel.send(MessageKind.PAGES, first)
        channel.send(MessageKind.PAGES, second)

    liar = Liar(two, answers)
    puller = Puller(host_of(two), writer_of(two))
    with pytest.raises(ProcessLost):
        puller.prefix(liar.address, Prefix(np.asarray(prompt(0), np.int32)))
    assert ask(two, 0) == 0
    two.check_integrity()


def test_messages_without_pages_do_not_keep_a_session_waiting(both: Any) -> None:
    """Each is as good as silence, and there may be any number of them."""
    _, two, _ = both

    def answers(channel: BulkChannel, identity: Any) -> None:
        with contextlib.suppress(ProcessLost):
            for _ in range(200):
                channel.send(MessageKind.PAGES, b"")
            channel.send(MessageKind.SENT)

    liar = Liar(two, answers)
    with pytest.raises(ProcessLost, match="without pages"):
        Puller(host_of(two), writer_of(two)).prefix(liar.address, Prefix(np.asarray(prompt(0), np.int32)))
    two.check_integrity()


@pytest.mark.parametrize("change", ["tokens", "digest", "vocabulary"])
def test_an_index_is_verified(both: Any, change: str) -> None:
    one, two, shared = both
    ask(one, 0)
    with PageSource(page_address(shared), writer_of(two).tiers.identity) as source:
        pages = source.list_pages(100)
    assert len(pages) >= PAGES

    def answers(channel: BulkChannel, identity: Any) -> None:
        records = segment.records_of(pages, identity.page_size)
        if change == "digest":
            records["digest"][3] ^= 1
        else:
            records["tokens"][3, 2] = 7 if change == "tokens" else 100_000
        channel.send(MessageKind.LISTED, segment.encode(identity.fields() | {"leaves": identity.leaves}, records))

    with pytest.raises(Exception, match=r"digest|token"):
        Puller(host_of(two), writer_of(two)).likeliest(Liar(two, answers).address)
    assert ask(two, 0) == 0


def test_what_came_before_the_connection_broke_is_of_use(both: Any) -> None:
    one, two, _ = both
    ask(one, 0)
    writer = writer_of(one)

    def answers(channel: BulkChannel, identity: Any) -> None:
        nodes = host_of(one).ask(lambda: writer.cache.find(Prefix(np.asarray(prompt(0), np.int32))))
        pairs = writer.payloads(host_of(one).ask(lambda: [writer.page_record(node) for node in nodes[:3]]))
        pieces = [memoryview(np.asarray(leaf).reshape(-1).view(np.uint8)) for _, pair in pairs for leaf in pair]
        channel.send_followed(MessageKind.PAGES, indexes(0, 1, 2), pieces)
        channel.close()

    pulled = Puller(host_of(two), writer_of(two)).prefix(
        Liar(two, answers).address, Prefix(np.asarray(prompt(0), np.int32))
    )
    assert (pulled.tokens, pulled.pages) == (24, 3)
    pulled.held.release()
    assert ask(two, 0) == 24


SHARER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from helpers import tiered
with tiered.opened(Path({folder!r}), disk_memory=0) as session:
    tiered.ask(session, 0)
    print(session.cache.share(secret={secret!r}).result_sync().address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.thorough
def test_between_two_processes(cache: Path) -> None:
    root = Path(__file__).parents[2]
    path = [str(root / name) for name in ("toolkit", "kernels", "tests")]
    code = SHARER.format(path=path, folder=str(cache), secret=SECRET)
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        address = other.stdout.readline().strip()
        with opened(cache, disk_memory=0) as session:
            assert session.cache.pull(address, list(prompt(0)), secret=SECRET).result_sync() == PAGES * 8
            assert ask(session, 0) == PAGES * 8
    finally:
        other.communicate("", timeout=60)
    assert other.returncode == 0


def test_data_shards_have_no_one_tree_to_share() -> None:
    tiers = SimpleNamespace(identity=object(), host=SimpleNamespace(budget=1))
    shard: Any = SimpleNamespace(page_size=16, clock=None, host_tier=None, data=())
    writer: Any = SimpleNamespace(cache=PrefixCaches([shard]), tiers=tiers)
    with pytest.raises(ConfigError, match="data shard"):
        parts(writer)
