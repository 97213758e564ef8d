"""The leader's view of its followers: sends each call to all of them, and collects their answers.

Each process keeps in host memory the part of a page that its devices have, under the page's digest. The leader alone
decides which are kept: each gather names the digests of its parts, and other messages name the digests to be dropped.
Messages of one connection keep their order, so every process has the same digests after the same messages. A page that
is dropped while it is still on its way from the devices is not kept by any of them.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from rekindle._src.channels.channel import Channel, MessageKind, as_json, from_json
from rekindle._src.core.records import Mask
from rekindle._src.kvcache.digest import DIGEST_SIZE
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import Page
from rekindle._src.kvcache.tiers.disk import DividedDiskTier
from rekindle._src.kvcache.tiers.host import DividedHostTier
from rekindle._src.processes.codec import DONE, CallCodec, checksum
from rekindle._src.processes.facts import ProcessReport, compare, decoded
from rekindle._src.processes.others import OtherProcesses, Say
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import Bucket, Key
from rekindle._src.programs.host_pages import Heads, layout_of
from rekindle._src.programs.programs import Programs
from rekindle.errors import CheckpointError, CompileError, InvalidRequest, ProcessLost, RekindleError
from rekindle_kernels import MaskGate

LOOK_SHARE = 0.03  # of a step's time, by which its end is noticed later because followers are checked meanwhile
SHORTEST_LOOK, LONGEST_LOOK = 5e-5, 2e-3  # seconds
PING_SECONDS = 1.0
CLOSE_SECONDS = 1.0  # for followers to receive the end of the session
FAILURE_SECONDS = 3.0  # after a failed call, until the loss of a follower is known
MOST_NAMES = MessageKind.DROP.limit // DIGEST_SIZE
MOST_STORED = 1024  # pages of a message that has them written


class FollowerConnections(Protocol):
    """The followers of a session, by process."""

    def send_to(self, process: int, kind: MessageKind, content: bytes) -> None: ...
    def ask_each(self, kind: MessageKind, content: bytes, answer: MessageKind) -> Mapping[int, bytes]:
        """Send all followers the same message. Return their answers. One caller at a time."""
        ...


class FollowerPages:
    """Implements `OtherHosts` of `kvcache.tiers.host` and `OtherDisks` of `kvcache.tiers.disk`."""

    def __init__(self, followers: FollowerConnections, codec: CallCodec, heads: Mapping[int, Heads]) -> None:
        """Set up; `heads` are the kv heads of a page that each follower's devices have."""
        self._followers, self._codec, self._heads = followers, codec, heads
        self._lock = threading.Lock()  # expected digests change together with the message that names them
        self._asking = threading.Lock()
        self._expected: set[bytes] = set()  # on their way from the devices
        self._on_disk: dict[int, set[bytes]] = {}  # digests that each follower has read from its disk, and not kept yet

    def gather(self, digests: Sequence[bytes], send: Callable[[], None]) -> None:
        """Send the message of a gather with `send`, and expect its pages from the devices."""
        with self._lock:
            self._expected.update(digests)
            send()

    def note_arrival(self, digest: bytes) -> bool:
        """Note that this process's part has left the devices. True if it is still to be kept."""
        with self._lock:
            expected = digest in self._expected
            self._expected.discard(digest)
            return expected

    def own_part(self, whole: paged.Payload) -> paged.Payload:
        """Return this process's part of a whole page."""
        return self._codec.parts.cut(whole)

    def keep(self, digest: bytes, whole: paged.Payload) -> None:
        """Give each follower its part of a page, unless it has read it. Raises ProcessLost if one is gone."""
        for process, heads in self._heads.items():
            stored = digest in self._on_disk.get(process, ())
            if stored:
                self._on_disk[process].discard(digest)
            content = self._codec.part(digest, None if stored else self._codec.parts.cut(whole, heads))
            self._followers.send_to(process, MessageKind.KEEP, content)

    def forget_read(self) -> None:
        """Forget read parts: followers are about to read other pages, and drop the parts they need not keep."""
        self._on_disk = {}

    def read(self, digests: Sequence[bytes]) -> None:
        """Have the followers read their parts from disk; one caller at a time. Raises ProcessLost if one is gone."""
        answers = self._followers.ask_each(MessageKind.READ, self._codec.encode_digests(digests), MessageKind.HAVE)
        self._on_disk = {process: set(self._codec.read_digests(content)) for process, content in answers.items()}

    def store(self, pages: Sequence[Page]) -> None:
        """Have all followers write the parts of pages that they still have."""
        with contextlib.suppress(RekindleError):
            for at in range(0, len(pages), MOST_STORED):
                content = self._codec.encode_records(pages[at : at + MOST_STORED])
                for process in self._heads:
                    self._followers.send_to(process, MessageKind.STORE, content)

    def forget(self) -> None:
        """Have all followers remove their parts on disk."""
        with contextlib.suppress(RekindleError):
            for process in self._heads:
                self._followers.send_to(process, MessageKind.FORGET, b"")

    def drop(self, digests: Sequence[bytes]) -> None:
        """Have all followers drop pages. A lost follower is ignored: the session ends because of it elsewhere."""
        with self._lock:
            self._expected.difference_update(digests)
            with contextlib.suppress(RekindleError):
                for at in range(0, len(digests), MOST_NAMES):
                    content = self._codec.encode_digests(digests[at : at + MOST_NAMES])
                    for process in self._heads:
                        self._followers.send_to(process, MessageKind.DROP, content)

    def whole(self, digest: bytes, own_part: paged.Payload) -> paged.Payload | None:
        """Join this process's part of a page with the parts of all followers; None if a part is missing."""
        parts = []
        try:
            with self._asking:
                answers = self._followers.ask_each(MessageKind.FETCH, digest, MessageKind.PART)
        except RekindleError:
            return None
        for process, content in answers.items():
            heads = self._heads[process]
            name, part = self._codec.read_part(content, layout_of(self._codec.parts.whole, heads))
            if name != digest:
                raise ProcessLost(f"process {process} sent page {name.hex()} where {digest.hex()} was asked for")
            if part is None:
                return None
            parts.append((heads, part))
        return self._codec.parts.join(own_part, parts)


class FollowerLink:
    def __init__(self, process: int, channel: Channel) -> None:
        self.process, self.channel = process, channel
        self.answers: dict[MessageKind, collections.deque[bytes]] = collections.defaultdict(collections.deque)


class Team(OtherProcesses):
    """Leads the followers of a session: they repeat the calls that it records.

    The first error is kept in `lost`. From then on every method raises it; the connections are closed, so that the
    followers end, and the watchers are called.
    """

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self.lost: RekindleError | None = None
        self.followers = [FollowerLink(process, channels[process]) for process in sorted(channels)]
        self._numbered = {follower.process: follower for follower in self.followers}
        self._codec: CallCodec | None = None
        self._pages: FollowerPages | None = None
        self._changed = threading.Condition()
        self._watchers: list[Callable[[BaseException], object]] = []
        self._closing = False
        self._chosen = np.zeros(0, np.int64)  # the rows of the latest step that choose a token
        self._expected = collections.deque[np.ndarray]()  # such rows of every step without a read result
        self._everywhere: set[Key] = set()  # programs that are ready in every process
        self._scores: Any = None  # of the guided step before its tokens are chosen
        self._steps = 0  # with rows that were read here
        # Of each step, the checksum here (process 0) and in every follower, until all are known.
        self._sums: dict[int, dict[int, int]] = collections.defaultdict(dict)
        self._listening = [
            threading.Thread(
                target=self._listen, args=(follower,), name=f"rekindle follower {follower.process}", daemon=True
            )
            for follower in self.followers
        ]
        for thread in self._listening:
            thread.start()
        threading.Thread(target=self._ping, name="rekindle ping", daemon=True).start()

    # -- opening

    def welcome(self, session: bytes) -> None:
        self.broadcast(MessageKind.WELCOME, session)

    @property
    def agreement(self) -> Callable[[ProcessReport], int]:
        return self.agree

    def agree(self, own_facts: ProcessReport) -> int:
        """Compare the facts of all followers with this process's. Return the pages that all have room for."""
        pages = own_facts.pages
        for follower, content in self._answers(MessageKind.FACTS):
            facts = decoded(content)
            try:
                compare(own_facts, facts, follower.process)
            except RekindleError as error:
                self._fail_session(error, farewell=as_json({"error": str(error)}))
                raise
            pages = min(pages, facts.pages)
        self.broadcast(MessageKind.AGREED, as_json({"device_pages": pages}))
        return pages

    def begin(self, programs: Programs, say: Say = lambda stage: None) -> None:
        """Wait until all followers have their weights; calls may be made from then on."""
        say("the other processes")
        for _ in self._answers(MessageKind.LOADED):
            pass
        self._codec = codec = CallCodec(programs)
        heads = {follower.process: codec.parts.heads(follower.process) for follower in self.followers}
        self._pages = FollowerPages(self, codec, heads)

    @property
    def pages(self) -> FollowerPages:
        """The parts of pages that all processes keep in host memory."""
        assert self._pages is not None, "followers are not ready"
        return self._pages

    def host(self, budget: int) -> DividedHostTier:
        return DividedHostTier(budget, self.pages)

    def disk(self, folder: Path, budget: int, identity: Identity) -> DividedDiskTier:
        return DividedDiskTier(folder, budget, identity, self.pages)

    def watch(self, watcher: Callable[[BaseException], object]) -> None:
        """Call `watcher`, from any thread, when `lost` is set; at once if it is set already."""
        with self._changed:
            self._watchers.append(watcher)
            lost = self.lost
        if lost is not None:
            watcher(lost)

    # -- calls

    def prepare(self, key: Key) -> None:
        if key not in self._everywhere:
            self.broadcast(MessageKind.PREPARE, key.name.encode())

    def prepared(self, key: Key) -> None:
        if key in self._everywhere:
            return
        for follower in self.followers:
            while True:
                fields = from_json(self._answer(follower, MessageKind.READY))
                if fields.get("program") == key.name:
                    break
            if fields.get("error"):
                raise CompileError(f"process {follower.process} could not compile {key.name}: {fields['error']}")
        self._everywhere.add(key)

    def step(self, key: Bucket, ints: np.ndarray, floats: np.ndarray, gate: MaskGate | None = None) -> None:
        assert gate is None, "followers have no gates"
        codec = self._encoder()
        content, self._chosen = codec.step(key, ints, floats), codec.sampling(key, ints)
        if not key.span:
            self._expected.append(self._chosen)
        self.broadcast(MessageKind.STEP, content)

    def forwarded(self, scores: Any) -> None:
        self._scores = scores

    def choose(self, key: Bucket, scores: Any, masks: Mask) -> None:
        assert scores is self._scores, "followers have the scores of the latest guided step only"
        self._scores = None
        content = self._encoder().choose(key, masks)
        self._expected.append(self._chosen)
        self.broadcast(MessageKind.CHOOSE, content)

    def admit(self, ints: np.ndarray, floats: np.ndarray) -> None:
        self.broadcast(MessageKind.ADMIT, self._encoder().admit(ints, floats))

    def collect(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        self.broadcast(MessageKind.COLLECT, self._encoder().encode_move(ids, digests))

    def gather(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        content = self._encoder().encode_move(ids, digests)
        self.pages.gather(digests, lambda: self.broadcast(MessageKind.GATHER, content))

    def scatter(self, ids: np.ndarray, digests: Sequence[bytes]) -> None:
        self.broadcast(MessageKind.SCATTER, self._encoder().encode_move(ids, digests))

    def copy(self, sources: np.ndarray, ids: np.ndarray) -> None:
        self.broadcast(MessageKind.COPY, self._encoder().encode_copy(sources, ids))

    def scatter_pinned(self) -> None:
        raise AssertionError("processes exchange pages one by one")

    def renew(self) -> None:
        self.broadcast(MessageKind.RENEW)

    def replace_weights(self) -> None:
        self.broadcast(MessageKind.TAKE_WEIGHTS)

    def load_weights(self, weights: Any, load: Callable[[], str]) -> None:
        """Have all followers read other weights while `load` does so here, which returns their fingerprint.

        They are used after `replace_weights`. Raises the error of `load`, or CheckpointError with a follower's error.
        """
        if not isinstance(weights, str | Path):
            raise InvalidRequest(
                "weights",
                type(weights).__name__,
                "is in this process only, and others share the model",
                "Pass a folder or hub id that all of them can read",
            )
        self.broadcast(MessageKind.LOAD_WEIGHTS, as_json({"weights": str(weights)}))
        try:
            fingerprint, problem = load(), None
        except Exception as error:
            fingerprint, problem = "", error
        problems = []
        for follower, content in self._answers(MessageKind.WEIGHTS):
            fields = from_json(content)
            if fields.get("error"):
                problems.append(f"process {follower.process} can't load them: {fields['error']}")
            elif fingerprint and fields.get("fingerprint") != fingerprint:
                problems.append(f"process {follower.process} has other weights there")
        if problem is None and problems:
            reasons = "; ".join(problems)
            problem = CheckpointError(f"{weights} can't be used: {reasons}. Give all processes the same files")
        if problem is not None:
            self.broadcast(MessageKind.DROP_WEIGHTS)
            raise problem

    def arrive(self, arrays: Any) -> None:
        """Poll until arrays are ready: reading them would wait for a lost process without an end."""
        start = time.perf_counter()
        for leaf in jax.tree.leaves(arrays):
            while not leaf.is_ready():
                self.check()
                waited = time.perf_counter() - start
                time.sleep(min(max(waited * LOOK_SHARE, SHORTEST_LOOK), LONGEST_LOOK))

    def result(self, rows: np.ndarray) -> None:
        self.check()
        self._compare(0, self._steps, checksum(rows, self._expected.popleft()))
        self._steps += 1
        self.check()

    def failed(self, error: BaseException) -> None:
        """End the session after a failed call: followers have made it or will, so their states differ."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, FAILURE_SECONDS)  # the end of a follower is the cause
        if self.lost is None:
            lost = ProcessLost(f"a step failed in the leader, and the session can't go on: {error}. Open another one")
            lost.__cause__ = error if isinstance(error, Exception) else None
            self._fail_session(lost)

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages, to all followers together."""
        return sum(follower.channel.bytes_sent for follower in self.followers)

    def close(self) -> None:
        """Tell the followers that the session ends, and close the connections."""
        if self._closing:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self.lost is None:
            self._farewell(MessageKind.CLOSE)
        for follower in self.followers:
            follower.channel.close()

    def send_to(self, process: int, kind: MessageKind, content: bytes) -> None:
        """Send one follower a message. Raises ProcessLost, also while the session is being closed."""
        if self._closing:
            raise ProcessLost("the session was closed")
        self._send(self._numbered[process], kind, content)

    def ask_each(self, kind: MessageKind, content: bytes, answer: MessageKind) -> dict[int, bytes]:
        """Send all followers a message. Return their answers. One caller at a time for each kind of answer."""
        for process in self._numbered:
            self.send_to(process, kind, content)
        return {follower.process: content for follower, content in self._answers(answer)}

    # -- its threads

    def _listen(self, follower: FollowerLink) -> None:
        try:
            while True:
                kind, content = follower.channel.receive()
                if kind is MessageKind.FAILED:
                    raise ProcessLost(str(from_json(content).get("error")))
                if kind is MessageKind.DONE:
                    self._compare(follower.process, *DONE.unpack(content))
                else:
                    with self._changed:
                        follower.answers[kind].append(content)
                        self._changed.notify_all()
        except Exception as error:
            if not self._closing:
                lost = ProcessLost(
                    f"process {follower.process} is gone: {error}. Start the followers again, and open the session "
                    "in a new process"
                )
                lost.__cause__ = error
                self._fail_session(lost)

    def _compare(self, process: int, step: int, value: int) -> None:
        """Record the checksum of a process for a step, and compare once all are known. No process waits for another."""
        with self._changed:
            sums = self._sums[step]
            sums[process] = value
            if len(sums) <= len(self.followers):
                return
            del self._sums[step]
        wrong = [name for name, total in sums.items() if total != sums[0]]
        if wrong:
            self._fail_session(
                ProcessLost(
                    f"process {wrong[0]} chose other tokens than the leader in step {step}, so their numbers differ. "
                    "Check that all processes have devices of one kind, and open another session"
                )
            )

    def _ping(self) -> None:
        while self.lost is None and not self._closing:
            for follower in self.followers:
                try:
                    follower.channel.ping()
                except RekindleError:
                    break  # its listening thread reports it
            time.sleep(PING_SECONDS)

    # -- helpers

    def _encoder(self) -> CallCodec:
        assert self._codec is not None, "followers are not ready"
        return self._codec

    def broadcast(self, kind: MessageKind, content: bytes = b"") -> None:
        for follower in self.followers:
            self._send(follower, kind, content)

    def _send(self, follower: FollowerLink, kind: MessageKind, content: bytes) -> None:
        self.check()
        try:
            follower.channel.send(kind, content)
        except ProcessLost as error:
            with self._changed:
                # A message from the follower may give the reason.
                self._changed.wait_for(lambda: self.lost is not None, 1.0)
            if self.lost is None:
                problem = f"process {follower.process} can't be reached: {error}"
                self._fail_session(ProcessLost(f"{problem}. Open another session"))
            assert self.lost is not None
            raise self.lost from error

    def _answers(self, kind: MessageKind) -> list[tuple[FollowerLink, bytes]]:
        return [(follower, self._answer(follower, kind)) for follower in self.followers]

    def _answer(self, follower: FollowerLink, kind: MessageKind) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or self._closing or follower.answers[kind])
            if not follower.answers[kind]:
                self.check()
                raise ProcessLost("the session was closed")
            return follower.answers[kind].popleft()

    def _fail_session(self, error: RekindleError, farewell: bytes = b"") -> None:
        """Keep the first error and disconnect all followers. `farewell` sends them the reason, so that they hang up."""
        with self._changed:
            if self.lost is not None:
                return
            self.lost = error
            watchers = tuple(self._watchers)
            self._changed.notify_all()
        if farewell:
            self._farewell(MessageKind.FAILED, farewell)
        for follower in self.followers:
            follower.channel.close()
        for watcher in watchers:
            watcher(error)

    def _farewell(self, kind: MessageKind, content: bytes = b"") -> None:
        for follower in self.followers:
            with contextlib.suppress(RekindleError):
                follower.channel.send(kind, content)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._listening:
            thread.join(max(0.0, deadline - time.monotonic()))
