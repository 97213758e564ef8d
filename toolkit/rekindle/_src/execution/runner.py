"""The runner, the device side of a session: packs steps, dispatches them, and reads their results.

`dispatch` and its callees run in one thread, `fetch` may run in another. The device works on step N while the host
packs step N + 1. On CPU a program may read a buffer in place, so a buffer is reused only when its step has ended.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from rekindle._src.core.activity import ProgramWait
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.contracts import InFlightLike
from rekindle._src.core.drawable import Record
from rekindle._src.core.records import LostPage, PageMove, Request, Row, RowResult, StepPlan, StepResult
from rekindle._src.core.report import NO_REPORTS, Reports
from rekindle._src.execution.device_calls import CallRecorder, ChoiceCall, DeviceCalls, InFlight, LateSteps
from rekindle._src.execution.drafting import NO_WORKER, DraftWorker
from rekindle._src.execution.page_transfers import AllSideTransfers, PageTransfers, PayloadStore, prefault
from rekindle._src.models.base import LoadedModel
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import ADMIT, SCATTER, Bucket, Key, bucket_for
from rekindle._src.programs.layered import LayeredProgram
from rekindle._src.programs.packing import AnyUpload, Constants, Layout, Outputs, StepPacking, Upload, sections
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.request_state import pack_admission
from rekindle._src.programs.row_option import GREEDY, FeatureRead, RowFlag, RowReports
from rekindle._src.programs.sampling import NOT_FINITE
from rekindle._src.programs.store import CompiledProgram
from rekindle._src.programs.warming import warm
from rekindle.errors import ConfigError, RekindleError, SessionClosed

log = logging.getLogger("rekindle.session")
_REHEARSED = 16  # tokens of a made-up prompt: with none of its own a step skips most of its work
_PADDING_FLAGS = int(GREEDY & ~RowFlag.KEPT)


_Admission = tuple[Row, tuple[np.ndarray, np.ndarray] | None]  # None: nothing of the request is read from its slot


class Runner:
    """The implementation of `RunnerLike`."""

    def __init__(
        self,
        model: LoadedModel,
        config: ResolvedConfig,
        *,
        host_tier: PayloadStore | None = None,
        side_tiers: Sequence[PayloadStore | None] = (),
        programs: Programs | None = None,
        prefer_ready: bool = False,
        recorder: CallRecorder | None = None,
        drafter: DraftWorker = NO_WORKER,
    ) -> None:
        """Make pages and state. `drafter` does the tasks of steps, and its owner closes it."""
        if programs is None:
            programs = Programs(model.config, model.graph, model.leaves, config)
        self.programs, self.config, self.host_tier = programs, config, host_tier
        self.program_wait = ProgramWait(quiet=config.quiet)
        self._calls = DeviceCalls(programs, model.leaves, recorder)
        self._transfers = PageTransfers(self._calls, host_tier)
        self._sides = AllSideTransfers(self._calls, side_tiers)
        self.prefer_ready = prefer_ready  # use a larger ready program before the best fit is compiled
        self._packing = programs.packing
        slots = self._packing.all_slots
        self._features = programs.features
        self._features.attach(self._calls)
        self._constants = Constants(slots, self._features)
        self._owners: list[Request | None] = [None] * (slots + 1)
        self._epochs = [-1] * (slots + 1)
        self._uploads: dict[Bucket, collections.deque[AnyUpload]] = collections.defaultdict(collections.deque)
        self._counts: collections.Counter[str] = collections.Counter()
        self._buckets: collections.Counter[str] = collections.Counter()
        self._sizes: collections.Counter[int] = collections.Counter()
        self._host_seconds = self._device_seconds = self._last_ready = 0.0
        self._latest: InFlight | None = None  # the step dispatched last, until its result is read
        self._seen_running = 0.0  # when it was last seen running
        self._late = LateSteps(programs, self._calls)
        self._drafter = drafter
        self._last_read = self._late_before = 0.0  # when a result was read, and the seconds of late steps until then
        self._closed = self._asleep = False

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Pack the plan and start its step.

        A row that can't be prepared, or a page that can't be restored, is left out; the result names it with its error.
        Other errors are raised before the step has started, or by `fetch`.
        """
        if self._closed:
            raise SessionClosed("the runner was closed; open a new session")
        if self._asleep:
            raise RekindleError("The session sleeps, so that no step can run. Await session.wake() first")
        start = time.perf_counter()
        self._poll(start)
        leaving = self._transfers.read_out(plan.offload)
        lost = self._transfers.restore(plan.restore)
        self._transfers.copy(plan.copies)
        leaving_sides = self._sides.read_out(plan.sides_out)
        lost_sides = self._sides.restore(plan.sides_in)
        idle_before = self._draft(plan, start)  # once pages that change hands have been read out
        if plan.loads:
            self._features.load(plan)
        ran_plan, admissions, refused = self._prepare(plan)
        if ran_plan.rows:
            bucket = self._bucket(ran_plan)
            programs = [*map(self._program, bucket.programs)]
            upload = self._take_upload(bucket)
            ran_plan = pack_rows(upload, ran_plan, self._constants, refused)
            self._complete(bucket, programs, upload.any_flags)
        step = InFlight(plan, ran_plan, refused, start, leaving, lost, leaving_sides, lost_sides)
        if not ran_plan.rows:
            step.dispatched, step.host_seconds = start, time.perf_counter() - start
            return step
        step.bucket, step.upload = bucket, upload
        self._admit(admissions, refused)
        dispatched = time.perf_counter()
        if bucket.variants:
            self._features.prepare(ran_plan, bucket.variants, bucket.rows)
        if bucket.late:
            self._late.start(step, programs, self._latest, self._read)
        else:
            step.output = self._calls.step(bucket, programs[0], upload)
        now = time.perf_counter()
        step.idle_seconds = idle = self._idle(now) if idle_before is None else idle_before
        began = now if idle else dispatched
        step.dispatched, step.host_seconds = began if idle_before is None else start, now - start
        self._latest, self._seen_running = step, now
        if isinstance(step.choice, ChoiceCall) and not self._late.needs_unread_token(ran_plan):
            self._late.choose(step)
        return step

    def _draft(self, plan: StepPlan, start: float) -> float | None:
        """Let the model or the head that drafts do its tasks of a step. If it drafts, wait for the tokens, and return
        how long the device was idle before: the step is taken to begin with the drafts, which it pays for."""
        if not plan.tasks:
            return None
        idle = self._idle(start)
        return idle if self._drafter.work(plan.tasks, self._calls) else None

    def fetch(self, in_flight: InFlightLike) -> StepResult:
        """Wait for the step and read its result; then the step after it, if it waits for these tokens, can choose."""
        assert isinstance(in_flight, InFlight), "a step of this runner"
        try:
            return self._fetch(in_flight)
        finally:
            if self._latest is not None:
                self._late.choose(self._latest)

    def _fetch(self, in_flight: InFlight) -> StepResult:
        self._late.choose(in_flight)  # it still waits if the step before it failed
        if in_flight.error is not None:
            raise in_flight.error
        bucket, rows = in_flight.bucket, self._read(in_flight)
        if bucket is not None and in_flight.upload is not None:
            self._uploads[bucket].append(in_flight.upload)
            self._late.ended(in_flight)
        now = time.perf_counter()
        step_seconds = now - max(self._last_read, in_flight.began) - (self._late.seconds - self._late_before)
        self._last_read, self._late_before = now, self._late.seconds
        ready = in_flight.ended or now
        # The device ran the step before this one first, so this one's time counts from its end.
        seconds = max(0.0, ready - max(in_flight.dispatched, self._last_ready))
        self._last_ready = ready
        if self._latest is in_flight:
            self._latest = None
        else:
            self._poll(ready)
        self._transfers.store(in_flight.leaving)
        self._sides.store(in_flight.leaving_sides)
        self._count(in_flight, seconds)
        return StepResult(
            in_flight.plan,
            with_refused(in_flight.plan, rows, in_flight.refused),
            bucket.name if bucket else "",
            in_flight.host_seconds,
            seconds,
            in_flight.idle_seconds,
            in_flight.lost,
            max(0.0, step_seconds),
            in_flight.lost_sides,
        )

    def _read(self, in_flight: InFlight) -> tuple[RowResult, ...]:
        """Return the results of a step's rows; a late step takes its tokens once."""
        plan, bucket, output, upload = in_flight.ran_plan, in_flight.bucket, in_flight.output, in_flight.upload
        if in_flight.results is None and bucket is not None and output is not None and upload is not None:
            packed = self._calls.rows(output)
            reading = self._features.read_in(upload.any_flags, bucket.variants)
            outputs = [(feature, self._features.on_host(feature, output.extra, plan)) for feature in reading]
            results = row_results(plan, upload.layout, packed, outputs, self._packing)
            in_flight.results = self._late.advance(in_flight, results)
        return in_flight.results or ()

    def warm(self) -> None:
        """Load or compile every program that a step may need."""
        warm(self.programs)

    def rehearse(self, keys: Sequence[Key]) -> bool:
        """Run ready programs that step or fill pages once, because a request that needs them is expected.

        A first run takes longer: JAX inspects all its arguments, XLA prepares each operation and allocates memory. They
        write only where padding goes. Only on CPU with one device: elsewhere the gain was not measured, and other
        processes would have to take part. False where it is not done.
        """
        programs, calls = self.programs, self._calls
        if jax.default_backend() != "cpu" or programs.recipes.parts.divided:
            return False
        for key in keys:
            if isinstance(key, Bucket):
                calls.rows(calls.step(key, programs.get(key), self._padding_upload(key)))
            elif key.kind == SCATTER.kind:
                leaves = programs.recipes.parts.payload_layout(programs.recipes.kv)
                page = tuple(np.zeros(shape, dtype) for shape, dtype in leaves)
                calls.scatter(np.zeros(key.pages, np.int32), [page])
        calls.wait(calls.memory)
        return True

    def _padding_upload(self, key: Bucket) -> Upload:
        """Pack a step in the slot and page of padding: a short prompt, or one token in a program without prompts."""
        layout = self.programs.recipes.layout(key)
        upload = Upload(layout, sent=self._calls.tables)
        upload.pack(StepPlan(0, (), ()), self._constants)
        upload.any_flags = _PADDING_FLAGS
        tokens = min(_REHEARSED, key.tokens, self.programs.recipes.page_size)
        parts = sections(layout, upload.ints)
        row = layout.rows if tokens else 0
        parts.varying[row] = self._constants.scratch, tokens or 1, 0, _PADDING_FLAGS
        if tokens:
            parts.offsets[1:] = tokens
        return upload

    def fill(self, moves: Sequence[PageMove]) -> tuple[LostPage, ...]:
        """Fill pages from the host tier between steps; returns the failed ones, with a missing or unfitting payload."""
        return self._transfers.restore(moves)

    def prefault(self, pages: int) -> None:
        """Start to prefault the memory of so many pages, because they are likely to be restored soon."""
        parts = [
            shard.data for leaf in jax.tree.leaves(paged.pages_of(self._calls.kv)) for shard in leaf.addressable_shards
        ]
        prefault(parts, min(pages, self._packing.pages - 1))

    def swap_weights(self, leaves: Sequence[Array]) -> None:
        """Use new weights from the next step on, without compiling; steps in flight end with the old ones."""
        for index, (path, old, new) in enumerate(
            zip(self.programs.recipes.graph.paths, self.programs.recipes.leaves, leaves, strict=True)
        ):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ConfigError(
                    "weights",
                    f"{path} ({index}): {new.dtype}{list(new.shape)}",
                    f"differs from the session's {old.dtype}{list(old.shape)}",
                    "Open a new session for another architecture, dtype or quantisation",
                )
        self._calls.replace_weights(leaves)

    def read_pages(self, pages: Sequence[int], digests: Sequence[bytes] = ()) -> list[paged.Payload]:
        """Return the content of pages; called between steps. Other processes learn their `digests`.

        While the session sleeps there are no pages, and no side caches: nothing is returned.
        """
        if self._asleep:
            return []
        names = digests or [b""] * len(pages)
        return self._transfers.read_whole([PageMove(*entry) for entry in zip(pages, names, strict=True)])

    def read_side(self, side: int, slots: Sequence[int]) -> list[paged.Payload]:
        """Return the entries in slots of a side cache, if there are any now; called between steps."""
        return [] if self._asleep else self._sides.read(side, slots)

    def reset(self) -> None:
        """Replace pages and state after a step failed on the device; the content of the pages is lost."""
        self._late.release_gate(self._latest)
        self._latest = None
        self._calls.renew()
        self._owners = [None] * len(self._owners)

    def sleep(self, leaving: Sequence[PageMove]) -> None:
        """Hand pages over to the host tier, then give back pages, state, the features' arrays and the hold on the
        weights. Programs stay."""
        self.set_aside(leaving)
        self._latest = None
        self._calls.sleep()
        self._features.free()
        self._owners = [None] * len(self._owners)
        self._asleep = True

    def set_aside(self, leaving: Sequence[PageMove]) -> None:
        """Hand pages, and the nodes' entries in side caches, over to the host tiers between steps."""
        self._transfers.store(self._transfers.read_out([move for move in leaving if move.side is None]))
        self._sides.store(self._sides.read_out([move for move in leaving if move.side is not None]))

    def wake(self, leaves: Sequence[Array]) -> None:
        """Use new pages and state, and these weights, which have the shapes of the old ones."""
        self._calls.wake(leaves)
        self._asleep = False

    @property
    def calls(self) -> DeviceCalls:
        """The calls of programs, with the weights, pages and tables that they take."""
        return self._calls

    @property
    def page_bytes(self) -> int:
        """The device memory of pages and state."""
        return sum(leaf.nbytes for leaf in self._calls.memory)

    def recover(self) -> bool:
        """Recover from a failed step. True if pages and state were lost with it; `reset` has then made new ones.

        An error on the host leaves them as they were. An error on the device loses them: they were donated to the step.
        """
        self._late.release_gate(self._latest)
        self._drafter.renew()
        memory = self._calls.memory
        try:
            if not any(leaf.is_deleted() for leaf in memory):
                self._calls.wait(memory)
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
            traces=self.programs.counts.traces,
            compilations=self.programs.counts.compilations,
            programs=dict(self._buckets),
            pages_out=self._counts["pages_out"],
            pages_in=self._counts["pages_in"],
            step_sizes=dict(self._sizes),
        )

    def close(self) -> None:
        """Free pages and state at once. The weights belong to the caller and stay."""
        if self._closed:
            return
        self._closed = True
        self._late.release_gate(self._latest)
        self._latest = None
        self._calls.free()
        self._uploads.clear()

    def _bucket(self, plan: StepPlan) -> Bucket:
        size = self._packing.size(plan)._asdict()
        max_requests = self.config.max_requests
        if plan.steps > 1:
            return bucket_for(self.programs.lattice.repeated, max_requests, **size)
        variants = self._features.variants(plan)
        lattice = self.programs.lattice_for(variants, late=self._features.late.in_plan(plan))
        best = bucket_for(lattice, max_requests, **size, variants=variants)
        if self.prefer_ready or any(map(self.programs.ledger.soon, best.programs)):
            in_parts, has_options = self.programs.ledger.provisional, self._features.has_options
            whole = in_parts and any(has_options(row.request) for row in plan.rows)
            if self._ready(best, whole=whole):
                return best
            ready = [bucket for bucket in lattice if self._ready(bucket, whole=whole)]
            try:
                return bucket_for(ready, max_requests, **size, variants=variants)
            except ConfigError:
                pass
        fills = self.programs.lattice.fills
        if plan.restore and self.programs.moved_by_host(fills) and not self.programs.made(best.programs):
            # A prompt whose pages come back needs a smaller program than it did when they were computed. That one is
            # stored, and read sooner than another one is compiled.
            made = [bucket for bucket in lattice if self.programs.made(bucket.programs)]
            with contextlib.suppress(ConfigError):
                return bucket_for(made, max_requests, **size, variants=variants)
        return best

    def _ready(self, bucket: Bucket, *, whole: bool) -> bool:
        return all(self.programs.ready(key, whole=whole) for key in bucket.programs)

    def program(self, plan: StepPlan) -> str:
        """Return the name of the program that a plan runs in."""
        return self._bucket(plan).name if plan.rows else ""

    def _poll(self, now: float) -> None:
        """Record whether the latest step still runs.

        JAX does not report when a step ends, so its end is estimated half way between two polls. While steps take
        longer than the host's work, the next one is always dispatched before that.
        """
        latest = self._latest
        if latest is None or latest.output is None or latest.ended is not None:
            return
        rows: Any = latest.output.rows  # jax.Array does not declare is_ready
        if rows.is_ready():
            latest.ended = (self._seen_running + now) / 2
        else:
            self._seen_running = now

    def _idle(self, now: float) -> float:
        """Return how long the device was idle before the step that was dispatched at `now`."""
        self._poll(now)
        ended = self._last_ready if self._latest is None else self._latest.ended
        return now - ended if ended else 0.0

    def _prepare(self, plan: StepPlan) -> tuple[StepPlan, list[_Admission], dict[str, Exception]]:
        """Pack the constants and history of each request that is new in its slot, without touching the device.

        Returns the plan without the rows that raised, the uploads for `_admit`, and the errors by request.
        """
        admissions: list[_Admission] = []
        refused: dict[str, Exception] = {}
        size = self.programs.recipes.width * self.programs.recipes.page_size
        for row in plan.rows:
            request = row.request
            if row.draft or (request is self._owners[row.slot] and row.epoch == self._epochs[row.slot]):
                continue
            try:
                self._constants.put(row)
                reads = self._features.reads_slot(request)
                admissions.append((row, pack_admission(row, size, self._features.slots) if reads else None))
            except Exception as error:
                self._owners[row.slot] = None
                refused[request.id] = error
        return drop_rows(plan, refused), admissions, refused

    def _admit(self, admissions: list[_Admission], refused: Mapping[str, Exception]) -> None:
        """Hand slots over to the requests that are new in them and were not refused."""
        for row, packed in admissions:
            if row.request.id in refused:
                self._owners[row.slot] = None
                continue
            if packed is not None:
                self._calls.admit(self._program(ADMIT), *self._packing.admission(*packed))
            self._owners[row.slot], self._epochs[row.slot] = row.request, row.epoch

    def _program(self, key: Key) -> CompiledProgram:
        """Return a program; a wait for one that isn't ready is counted and shown."""
        if self.programs.ready(key):
            return self._calls.program(key)
        with self.program_wait.waiting(key.name):
            return self._calls.program(key)

    def _complete(self, bucket: Bucket, programs: Sequence[CompiledProgram], flags: int) -> None:
        """Make the parts that programs made of parts lack for rows with these flags, which counts as a wait, too."""
        for key, program in zip(bucket.programs, programs, strict=True):
            if isinstance(program, LayeredProgram) and program.lacks(flags):
                with self.program_wait.waiting(key.name):
                    program.complete()

    def _take_upload(self, bucket: Bucket) -> AnyUpload:
        try:
            return self._uploads[bucket].popleft()
        except IndexError:
            return self._packing.upload(self.programs.recipes.layout(bucket), self._calls.tables)

    def _count(self, in_flight: InFlight, seconds: float) -> None:
        plan, bucket = in_flight.ran_plan, in_flight.bucket
        self._counts["steps"] += 1
        self._counts["pages_out"] += len(plan.offload)
        self._counts["pages_in"] += len(plan.restore) - len(in_flight.lost)
        if bucket is not None:
            self._counts["tokens"] += plan.tokens
            self._counts["padding"] += self._packing.tokens(bucket) * plan.steps - plan.tokens
            self._buckets[bucket.name] += 1
            self._sizes[1 << (plan.tokens - 1).bit_length()] += 1
        self._host_seconds += in_flight.host_seconds
        self._device_seconds += seconds


Packed = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RunnerStatistics(Record):
    """Counts since the runner was made."""

    steps: int
    tokens: int
    padding: int  # tokens that programs computed in addition to their steps' own
    host_seconds: float  # packing and dispatch
    device_seconds: float  # during which a step ran, as far as the host can tell
    traces: int
    compilations: int
    programs: dict[str, int]  # steps by program
    pages_out: int
    pages_in: int
    step_sizes: dict[int, int]  # steps by how many tokens they computed, rounded up to a power of two


def row_results(
    plan: StepPlan, layout: Layout, rows: Packed, outputs: Outputs, packing: StepPacking
) -> tuple[RowResult, ...]:
    """Return the results in the order of `plan.rows`, with the reports of the features in `outputs`."""
    return packing.results(plan, rows, outputs, functools.partial(_row_results, layout))


def _row_results(layout: Layout, plan: StepPlan, rows: Packed, outputs: Outputs) -> tuple[RowResult, ...]:
    """Return the results of one program's rows; row R + s of the output belongs to the s-th prefill."""
    tokens, places = rows[:, 0].tolist(), layout.places(plan)
    chosen = [tokens[place] for place in places]
    if not outputs:
        return tuple([_result(row, token, layout, NO_REPORTS) for row, token in zip(plan.rows, chosen, strict=True)])
    reports: RowReports = [{} for _ in plan.rows]
    valid = [token if row.samples and token >= 0 else None for row, token in zip(plan.rows, chosen, strict=True)]
    for feature, output in outputs:
        columns = rows[:, 1:][:, layout.features.columns_of(feature, layout.variants)]
        feature.row.read(FeatureRead(plan, valid, places, columns, output), reports)
    entries = zip(plan.rows, chosen, reports, strict=True)
    return tuple([_result(row, token, layout, own) for row, token, own in entries])


def _result(row: Row, token: int, layout: Layout, reports: Reports) -> RowResult:
    request = row.request
    if not row.samples:
        return RowResult(request.id, row.epoch, None, reports)
    if token >= 0:
        return RowResult(request.id, row.epoch, token, reports)
    if token == NOT_FINITE:
        return RowResult(request.id, row.epoch, None, reports, finite=False)
    return RowResult(request.id, row.epoch, None, reports, error=layout.features.late.no_token(row))


def drop_rows(plan: StepPlan, refused: Mapping[str, Exception]) -> StepPlan:
    """Return the plan without the rows of the requests in `refused`."""
    if not refused:
        return plan
    return dataclasses.replace(
        plan,
        decode=tuple(row for row in plan.decode if row.request.id not in refused),
        prefill=tuple(row for row in plan.prefill if row.request.id not in refused),
    )


def pack_rows(upload: AnyUpload, plan: StepPlan, constants: Constants, refused: dict[str, Exception]) -> StepPlan:
    """Pack the rows and add the errors of failing ones to `refused`. Returns the packed plan."""
    try:
        upload.pack(plan, constants)
    except Exception:
        before = len(refused)
        for decode, prefill in [((row,), ()) for row in plan.decode] + [((), (row,)) for row in plan.prefill]:
            try:
                upload.pack(dataclasses.replace(plan, decode=decode, prefill=prefill), constants)
            except Exception as error:
                refused[(*decode, *prefill)[0].request.id] = error
        if len(refused) == before:
            raise
        plan = drop_rows(plan, refused)
        if plan.rows:
            upload.pack(plan, constants)
    return plan


def with_refused(
    plan: StepPlan, rows: tuple[RowResult, ...], refused: Mapping[str, Exception]
) -> tuple[RowResult, ...]:
    """Return the results of `drop_rows(plan, refused)` in the order of `plan.rows`; refused rows get their errors."""
    if not refused:
        return rows
    computed = iter(rows)
    return tuple(
        RowResult(row.request.id, row.epoch, None, error=refused[row.request.id])
        if row.request.id in refused
        else next(computed)
        for row in plan.rows
    )
