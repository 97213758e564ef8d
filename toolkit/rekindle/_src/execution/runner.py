"""The device side of a session: owns pages and request state, dispatches one program per step, reads results.

`dispatch` and what it calls run in one thread, `fetch` may run in another. The device works on step N while the host
packs step N + 1: an upload may be read in place on CPU, so a buffer goes back to its pool only when its step is over.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from rekindle._src.core import html
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import PageMove, Request, Row, RowResult, StepPlan, StepResult
from rekindle._src.execution.prefault import prefault
from rekindle._src.execution.results import needs_prompt, row_results
from rekindle._src.models.base import LoadedModel
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import Bucket, bucket_for
from rekindle._src.programs.packing import Constants, Upload
from rekindle._src.programs.processors import LogitsProcessor
from rekindle._src.programs.programs import ADMIT, GATHER, MOVED_PAGES, SCATTER, Programs
from rekindle._src.programs.request_state import pack_admission
from rekindle._src.programs.step import StepOutput
from rekindle._src.programs.warming import warm
from rekindle.errors import ConfigError, SessionClosed, StoreError

log = logging.getLogger("rekindle.session")
MEASURE_EVERY = 16  # steps that bring pages back, of which one is timed


class PayloadStore(Protocol):
    """Page payloads by digest, off the device; called from the dispatching and the fetching thread."""

    def put(self, digest: bytes, payload: paged.Payload) -> None:
        """Keeps a copy: what is given lies in memory of a whole transfer."""

    def get(self, digest: bytes) -> paged.Payload:
        """Raises KeyError when it is gone."""
        ...

    def copied(self, pages: int, seconds: float) -> None:
        """So long it took to bring that many to the device."""


@dataclasses.dataclass(slots=True)
class InFlight:
    """A dispatched step."""

    plan: StepPlan
    bucket: Bucket | None  # None: the step only moved pages
    output: StepOutput | None
    upload: Upload | None
    leaving: list[tuple[tuple[PageMove, ...], paged.Payload]]
    dispatched: float
    host_seconds: float
    idle_seconds: float = 0.0  # the device had nothing to do before it
    ended: float | None = None  # about when, if it was over before its result was asked for


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RunnerStatistics(html.Record):
    """Counts since the runner was made."""

    steps: int
    tokens: int
    padding: int  # tokens of programs that no step had
    host_seconds: float  # packing and dispatch
    device_seconds: float  # in which a step ran, as far as the host can tell
    traces: int
    compilations: int
    programs: dict[str, int]  # steps by program
    pages_out: int
    pages_in: int


class Runner:
    """Satisfies `RunnerLike`."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        host_tier: PayloadStore | None = None,
        programs: Programs | None = None,
        processors: Sequence[LogitsProcessor] = (),
        prefer_ready: bool = False,
    ) -> None:
        if programs is None:
            programs = Programs(model.config, model.graph, model.leaves, config, processors=processors)
        self.programs, self.config, self.host_tier = programs, config, host_tier
        self.prefer_ready = prefer_ready  # a larger program that is ready goes before compiling the one that fits
        self._leaves: tuple[Any, ...] = tuple(model.leaves)
        self._kv, self._state = self._fresh_memory()
        self._constants = Constants(config.max_requests, tuple(p.name for p in programs.processors))
        self._owners: list[Request | None] = [None] * (config.max_requests + 1)
        self._epochs = [-1] * (config.max_requests + 1)
        self._uploads: dict[Bucket, collections.deque[Upload]] = collections.defaultdict(collections.deque)
        self._counts: collections.Counter[str] = collections.Counter()
        self._buckets: collections.Counter[str] = collections.Counter()
        self._host_seconds = self._device_seconds = self._last_ready = 0.0
        self._latest: InFlight | None = None  # the step dispatched last, until its result is read
        self._seen_running = 0.0  # when it was last seen to run
        self._copies = jax.default_backend() != "cpu"  # where a result has to be copied to be read
        self._closed = False
        self._restores = 0

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Pack the plan and start its step. Raises without having started anything, or leaves it to `fetch`."""
        if self._closed:
            raise SessionClosed("the runner was closed; open a new session")
        start = time.perf_counter()
        self._look(start)
        leaving = self._offload(plan.offload)
        self._restore(plan.restore)
        if not plan.rows:
            return InFlight(plan, None, None, None, leaving, start, time.perf_counter() - start)
        bucket = self._bucket(plan)
        program = self.programs.get(bucket)
        for row in plan.rows:
            if row.request is not self._owners[row.slot] or row.epoch != self._epochs[row.slot]:
                self._admit(row)
        upload = self._take_upload(bucket)
        upload.pack(plan, self._constants)
        dispatched = time.perf_counter()
        # numpy goes in as it is: an explicit device_put of both costs 60 of the 190 µs that a dispatch takes.
        self._kv, self._state, output = program(self._leaves, self._kv, self._state, upload.ints, upload.floats)
        if self._copies:
            output.rows.copy_to_host_async()
        now = time.perf_counter()
        idle = self._idle(now)
        self._latest = InFlight(plan, bucket, output, upload, leaving, now if idle else dispatched, now - start, idle)
        self._seen_running = now
        return self._latest

    def fetch(self, in_flight: InFlight) -> StepResult:
        """Wait for the step and read its result."""
        plan, bucket, output = in_flight.plan, in_flight.bucket, in_flight.output
        rows: tuple[RowResult, ...] = ()
        if bucket is not None and output is not None and in_flight.upload is not None:
            packed = np.asarray(output.rows)  # the one place that waits for the device
            prompt = np.asarray(output.prompt) if needs_prompt(plan) else None
            self._uploads[bucket].append(in_flight.upload)
            rows = row_results(plan, packed, prompt, bucket.rows)
        ready = in_flight.ended or time.perf_counter()
        # The device ran the step before this one first, so this one's time counts from there.
        seconds = max(0.0, ready - max(in_flight.dispatched, self._last_ready))
        self._last_ready = ready
        if self._latest is in_flight:
            self._latest = None
        else:
            self._look(ready)
        self._hand_over(in_flight.leaving)
        self._count(in_flight, seconds)
        name = bucket.name if bucket else ""
        return StepResult(plan, rows, name, in_flight.host_seconds, seconds, in_flight.idle_seconds)

    def warm(self) -> None:
        """Load or compile everything that a step may ask for."""
        warm(self.programs)

    def prefault(self, pages: int) -> None:
        """So many pages are likely to be restored before long: have their memory ready, beside what else is done."""
        prefault(jax.tree.leaves(self._kv), min(pages, self.programs.kv[0].num_pages - 1))

    def swap_weights(self, leaves: Sequence[Any]) -> None:
        """Use other weights from the next step on; steps in flight end with the old ones. Nothing is compiled."""
        for index, (path, old, new) in enumerate(
            zip(self.programs.graph.paths, self.programs.leaves, leaves, strict=True)
        ):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ConfigError(
                    "weights",
                    f"{path} ({index}): {new.dtype}{list(new.shape)}",
                    f"differs from the session's {old.dtype}{list(old.shape)}",
                    "Open a new session for another architecture, dtype or quantisation",
                )
        self._leaves = tuple(leaves)

    def read_pages(self, pages: Sequence[int]) -> list[paged.Payload]:
        """Copies of what pages hold, between steps."""
        moves = tuple(PageMove(page, b"") for page in pages)
        payloads: list[paged.Payload] = []
        for part, payload in self._offload(moves):
            arrays = [np.asarray(leaf) for leaf in payload]
            payloads += [tuple(array[at : at + 1].copy() for array in arrays) for at in range(len(part))]
        return payloads

    def reset(self) -> None:
        """Fresh pages and state, after a step has failed on the device; whatever the pages held is lost."""
        self._latest = None
        self._delete(self._kv, self._state)
        self._kv, self._state = self._fresh_memory()
        self._owners = [None] * len(self._owners)

    def recover(self) -> bool:
        """After a failed step: true if pages and state were lost with it, which were then made anew by `reset`.

        An error on the host leaves them as they were. An error on the device loses them: they were donated to the step.
        """
        memory = jax.tree.leaves((self._kv, self._state))
        try:
            if not any(leaf.is_deleted() for leaf in memory):
                jax.block_until_ready(memory)
                return False
        except Exception as error:
            log.warning("the KV pages were lost with a failed step (%r); running requests are computed again", error)
        self.reset()
        return True

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics(
            steps=self._counts["steps"],
            tokens=self._counts["tokens"],
            padding=self._counts["padding"],
            host_seconds=self._host_seconds,
            device_seconds=self._device_seconds,
            traces=self.programs.traces,
            compilations=self.programs.compilations,
            programs=dict(self._buckets),
            pages_out=self._counts["pages_out"],
            pages_in=self._counts["pages_in"],
        )

    def close(self) -> None:
        """Free pages and state at once; the weights belong to whoever loaded them."""
        if self._closed:
            return
        self._closed = True
        self._latest = None
        jax.block_until_ready(jax.tree.leaves(self._state))  # a running step must not lose what it reads
        self._delete(self._kv, self._state)
        self._leaves = ()
        self._uploads.clear()

    def _bucket(self, plan: StepPlan) -> Bucket:
        processed = any(row.request.sampling.processors for row in plan.rows)
        size = {"rows": len(plan.decode), "tokens": plan.prefill_tokens, "prefills": len(plan.prefill)}
        most = self.config.max_requests
        best = bucket_for(self.programs.lattice, most, **size, processed=processed)
        if self.prefer_ready and not self.programs.ready(best):
            ready = [bucket for bucket in self.programs.lattice if self.programs.ready(bucket)]
            try:
                return bucket_for(ready, most, **size, processed=processed)
            except ConfigError:
                return best
        return best

    def program(self, plan: StepPlan) -> str:
        """The name of the program that a plan takes."""
        return self._bucket(plan).name if plan.rows else ""

    def _look(self, now: float) -> None:
        """Note whether the latest step still runs. Nobody is told when it ends, so the end is taken to be half way
        between two looks; while steps take longer than the host does, the next one is always there before it."""
        latest = self._latest
        if latest is None or latest.output is None or latest.ended is not None:
            return
        rows: Any = latest.output.rows  # jax.Array does not declare is_ready
        if rows.is_ready():
            latest.ended = (self._seen_running + now) / 2
        else:
            self._seen_running = now

    def _idle(self, now: float) -> float:
        """How long the device had nothing to do before the step that was dispatched just now."""
        self._look(now)
        ended = self._last_ready if self._latest is None else self._latest.ended
        return now - ended if ended else 0.0

    def _admit(self, row: Row) -> None:
        """Take a slot over for a request that runs in it for the first time in this epoch."""
        sampling = row.request.sampling
        if sampling.penalised or sampling.logit_bias or sampling.min_tokens or sampling.processors:
            program = self.programs.get(ADMIT)
            size = self.programs.width * self.programs.kv[0].page_size
            self._state = program(self._state, *pack_admission(row, size))
        self._constants.put(row)
        self._owners[row.slot], self._epochs[row.slot] = row.request, row.epoch

    def _take_upload(self, bucket: Bucket) -> Upload:
        try:
            return self._uploads[bucket].popleft()
        except IndexError:
            return Upload(self.programs.layout(bucket))

    def _offload(self, moves: tuple[PageMove, ...]) -> list[tuple[tuple[PageMove, ...], paged.Payload]]:
        leaving = []
        for at in range(0, len(moves), MOVED_PAGES):
            part = moves[at : at + MOVED_PAGES]
            leaving.append((part, self.programs.get(GATHER)(self._kv, _ids(part))))
        return leaving

    def _hand_over(self, leaving: list[tuple[tuple[PageMove, ...], paged.Payload]]) -> None:
        for part, payload in leaving:
            assert self.host_tier is not None, "a page was offloaded without a host tier"
            arrays = [np.asarray(leaf) for leaf in payload]
            for index, move in enumerate(part):
                self.host_tier.put(move.digest, tuple(array[index : index + 1] for array in arrays))

    def _restore(self, moves: tuple[PageMove, ...]) -> None:
        if not moves:
            return
        # Measuring waits for the device, so it is done now and then; the very first transfer compiles its program.
        measured = self._restores % MEASURE_EVERY == 1
        self._restores += 1
        if measured:
            jax.block_until_ready(self._kv)
        start = time.perf_counter()
        self._copy(moves)
        if measured:
            jax.block_until_ready(self._kv)
            assert self.host_tier is not None, "a page is restored without a host tier"
            self.host_tier.copied(len(moves), time.perf_counter() - start)

    def _copy(self, moves: tuple[PageMove, ...]) -> None:
        for at in range(0, len(moves), MOVED_PAGES):
            part = moves[at : at + MOVED_PAGES]
            pages = [self._payload(move) for move in part]
            pages += [pages[0]] * (MOVED_PAGES - len(part))  # padding goes to page 0
            self._kv = self.programs.get(SCATTER)(self._kv, _ids(part), tuple(pages))

    def _payload(self, move: PageMove) -> paged.Payload:
        assert self.host_tier is not None, "a page is restored without a host tier"
        try:
            return self.host_tier.get(move.digest)
        except KeyError:
            raise StoreError(
                f"page {move.digest.hex()} left the host tier before it was restored. Raise host_memory"
            ) from None

    def _count(self, in_flight: InFlight, seconds: float) -> None:
        plan, bucket = in_flight.plan, in_flight.bucket
        self._counts["steps"] += 1
        self._counts["pages_out"] += len(plan.offload)
        self._counts["pages_in"] += len(plan.restore)
        if bucket is not None:
            self._counts["tokens"] += plan.tokens
            self._counts["padding"] += bucket.cost - plan.tokens
            self._buckets[bucket.name] += 1
        self._host_seconds += in_flight.host_seconds
        self._device_seconds += seconds

    def _fresh_memory(self) -> tuple[paged.KV, Any]:
        memory: tuple[paged.KV, Any] = self.programs.memory()
        return memory

    @staticmethod
    def _delete(*trees: Any) -> None:
        for leaf in jax.tree.leaves(trees):
            leaf.delete()


def _ids(moves: tuple[PageMove, ...]) -> np.ndarray:
    ids = np.zeros(MOVED_PAGES, np.int32)
    ids[: len(moves)] = [move.page for move in moves]
    return ids
