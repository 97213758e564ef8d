"""Programs on demand: the programs that a step needs, and a thread that makes the missing ones.

A session compiles many programs only when a request first needs them, as for log-probabilities, grammars, adapters or
captures. Compiling takes seconds, and a step that waited for it would hold up all of its rows. So the scheduler asks
`StepPrograms` which rows can run now, decides which of the others wait (`scheduling.ready_rows`), and `Demand` makes
the missing programs in the background.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from rekindle._src.core.priority import handing_over
from rekindle._src.core.records import IntArray, Request, Row, StepPlan
from rekindle._src.programs.buckets import ADMIT, LENS, Bucket, Key, ProgramVariant, StepSize, bucket_for
from rekindle._src.programs.programs import Programs
from rekindle.errors import ConfigError

_NO_PAGES: IntArray = np.empty(0, np.int32)


class Need:
    """The needs that a row has of the programs of its step. There is one object for each combination."""

    __slots__ = ("helpers", "late", "options", "repeats", "variants")

    def __init__(
        self, variants: ProgramVariant, helpers: tuple[Key, ...], *, late: bool, options: bool, repeats: bool
    ) -> None:
        self.variants = variants
        self.helpers = helpers  # programs that are no steps
        self.late = late  # the row has a guide
        self.options = options  # it is not greedy: programs of parts need their whole closing
        self.repeats = repeats  # it may be in steps that the device repeats


class ProgramRequest(NamedTuple):
    """A program to make; with `whole`, also the closing that a program of parts begins without."""

    key: Key
    whole: bool = False

    @property
    def name(self) -> str:
        return self.key.name


class Fit(NamedTuple):
    """The programs for a step: whether it can run now, and those to make so that it runs as fast as it can."""

    ready: bool
    wanted: tuple[ProgramRequest, ...] = ()


_FITS, _NONE = Fit(True), Fit(False)
# Decode steps after which a program that repeats them is worth its second of a processor, and after which it is worth
# loading: it saves a small part of a millisecond for each
PAYS, STORED_PAYS = 2048, 32


class Demand:
    """Makes the programs that steps want, one after the other, in a thread that ends when all of them are ready."""

    def __init__(
        self,
        programs: Programs,
        *,
        contexts: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._programs, self._contexts = programs, contexts
        self._lock = threading.Lock()
        self._wanted: tuple[ProgramRequest, ...] = ()
        self._errors: dict[ProgramRequest, Exception] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.flush = programs.flush

    def ready(self, wanted: ProgramRequest) -> bool:
        """True if a step can run the program now."""
        return self._programs.ready(wanted.key, whole=wanted.whole)

    def error(self, wanted: ProgramRequest) -> Exception | None:
        """Return why a program could not be made; None if nothing is known against it."""
        return self._errors.get(wanted)

    def forget(self, wanted: ProgramRequest) -> None:
        """Let a program that could not be made be tried again when it is wanted again."""
        with self._lock:
            self._errors.pop(wanted, None)

    def want(self, wanted: tuple[ProgramRequest, ...]) -> None:
        """Make these programs, in this order, instead of earlier requested ones that have not begun.

        Until they are ready, steps take larger programs that can do the same.
        """
        if wanted == self._wanted:
            return
        with self._lock:
            self._wanted = wanted
            self._programs.ledger.demanded = frozenset(each.key for each in wanted)
            if self._thread is None and self._next() is not None:
                # Not a daemon: a thread that is ended inside XLA aborts the process.
                self._thread = threading.Thread(target=self._work, name="rekindle demand", daemon=False)
                self._thread.start()

    def stop(self, timeout: float | None = 0.5) -> None:
        """Start no further program; wait up to `timeout` seconds. A compilation can't be interrupted and goes on."""
        with self._lock:
            self._stopped, thread = True, self._thread
        if thread is not None:
            thread.join(timeout)

    def _work(self) -> None:
        with self._contexts(), handing_over():
            while True:
                with contextlib.ExitStack() as marks:
                    with self._lock:
                        job = self._next()
                        if job is None:
                            self._thread = None
                            return
                        # Even if no step wants it any more: `want` takes the lock before it forgets the job.
                        marks.enter_context(self._programs.ledger.made_next(job.key))
                    try:
                        self._programs.get(job.key)
                        if job.whole:
                            self._programs.complete(job.key)
                    except Exception as error:
                        with self._lock:
                            self._errors[job] = error

    def _next(self) -> ProgramRequest | None:
        if self._stopped or not threading.main_thread().is_alive():
            return None
        return next((each for each in self._wanted if each not in self._errors and not self.ready(each)), None)


class StepPrograms:
    """Says which steps can run now, for the scheduler. Its methods are called on the loop, between plans."""

    def __init__(self, programs: Programs, demand: Demand, *, background: bool = False) -> None:
        """`background` says that all programs are being made while steps run in the finished ones."""
        self._programs, self._demand, self._features = programs, demand, programs.features
        self.ahead = background
        self._for_drafts = [
            bucket
            for bucket in (programs.lattice.ahead if background else ())
            if ProgramVariant.DRAFTS in bucket.variants and not bucket.tokens
        ]
        self._most = programs.config.max_requests
        self._needs: dict[tuple[ProgramVariant, tuple[Key, ...], bool, bool, bool], Need] = {}
        self._single = 0  # decode steps that could have been repeated
        self._fitting: set[tuple[frozenset[Need], StepSize]] = set()  # decode steps with their programs ready
        self._complete: set[frozenset[Need]] = set()  # needs for which the programs of all sizes are ready
        self.want, self.error, self.forget = demand.want, demand.error, demand.forget

    def need(self, request: Request, start: int, length: int, *, samples: bool, decodes: bool) -> Need:
        """Return the need of a row of positions [start, start + length)."""
        row = Row(request, 0, 0, start, length, _NO_PAGES, None, samples)
        plan = StepPlan(0, (row,), ()) if decodes else StepPlan(0, (), (row,))
        features = self._features
        helpers = (ADMIT,) * features.reads_slot(request)
        helpers += (LENS,) * request.extensions.reads_logits
        options = features.has_options(request)
        variants, late = features.variants(plan), features.late.in_plan(plan)
        repeats = not variants and not late and features.repeats(request)
        found = variants, helpers, late, options, repeats
        if found not in self._needs:
            self._needs[found] = Need(variants, helpers, late=late, options=options, repeats=repeats)
        return self._needs[found]

    def drafts(self) -> bool:
        """True if no step with drafts has to wait for its program while others of its size are ready."""
        self._for_drafts = [bucket for bucket in self._for_drafts if not self._programs.ready(bucket)]
        return not self._for_drafts

    def repeats(self, needs: frozenset[Need], size: StepSize) -> Fit:
        """Return the program that repeats decode steps of this size, for rows with these needs.

        It is wanted once so many steps have run without it that making it, or loading it, pays.
        """
        bucket = next((one for one in self._programs.lattice.repeated if one.rows >= size.rows), None)
        if bucket is None or not all(need.repeats for need in needs):
            return _NONE
        if self._programs.ready(bucket):
            return _FITS
        self._single += 1
        pays = self._single >= STORED_PAYS and (self._single >= PAYS or self._programs.made((bucket,)))
        return Fit(False, (ProgramRequest(bucket),)) if pays and not self.ahead else _NONE

    def fit(self, needs: frozenset[Need], size: StepSize) -> Fit:
        """Return the programs for a step of this size and rows with these needs."""
        if needs in self._complete or (needs, size) in self._fitting:
            return _FITS
        late, options = any(need.late for need in needs), any(need.options for need in needs)
        variants = self._features.joined(need.variants for need in needs)
        helpers = dict.fromkeys(ProgramRequest(key) for need in needs for key in need.helpers)
        missing = tuple(each for each in helpers if not self._demand.ready(each))
        lattice = [bucket for bucket in self._programs.lattice_for(variants, late=late) if bucket.variants == variants]
        ready = [bucket for bucket in lattice if not self._missing(bucket, options)]
        settled = not missing and not self._programs.ledger.provisional
        if settled and len(ready) == len(lattice):
            self._complete.add(needs)
            return _FITS
        best = self._bucket(lattice, size, variants)
        wanted = missing + (() if best is None else self._missing(best, options))
        if not wanted:
            if settled and not size.prefills:
                self._fitting.add((needs, size))
            return _FITS
        return Fit(not missing and self._bucket(ready, size, variants) is not None, wanted)

    def _missing(self, bucket: Bucket, options: bool) -> tuple[ProgramRequest, ...]:
        programs = (ProgramRequest(key, options) for key in bucket.programs)
        return tuple(each for each in programs if not self._demand.ready(each))

    def _bucket(self, buckets: Sequence[Bucket], size: StepSize, variants: ProgramVariant) -> Bucket | None:
        rows, prefills, tokens = size
        try:
            return bucket_for(buckets, self._most, rows=rows, tokens=tokens, prefills=prefills, variants=variants)
        except ConfigError:
            return None
