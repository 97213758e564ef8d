"""Counts what a busy machine does not distort: what is traced and compiled, and calls of a session's threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.monitoring

from rekindle import Session
from rekindle._src.programs.buckets import Bucket, ProgramVariant, with_variants
from rekindle._src.programs.programs import Programs

BUILT = "/jax/core/compile/backend_compile_duration"
COMPILING = ("/jax/core/compile/jaxpr_trace_duration", BUILT)


@contextmanager
def compiled_by_jax() -> Iterator[list[str]]:
    """What JAX itself traces or compiles in the process, in whatever thread and for whatever reason."""
    events: list[str] = []

    def listen(name: str, seconds: float, **_: Any) -> None:
        if name in COMPILING:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def counts(session: Session) -> tuple[int, int]:
    stats = session.stats()
    return stats.traces, stats.compilations


def make_scoring_programs(programs: Programs) -> tuple[Bucket, ...]:
    """Make the programs that score prompts, of every size, as a session does when it first needs one."""
    keys = with_variants(programs.lattice.ahead, ProgramVariant.PROMPT_LOGPROBS)
    for key in keys:
        programs.get(key)
    programs.flush()
    return keys


class Calls:
    """How many functions, Python's and built-in ones, the threads called that were started while it listened."""

    def __init__(self) -> None:
        self.count = 0
        self.counting = False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if self.counting and event in ("call", "c_call"):
            self.count += 1

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Gives a list that holds the count afterwards."""
        result: list[int] = []
        before, self.counting = self.count, True
        try:
            yield result
        finally:
            self.counting = False
            result.append(self.count - before)


@contextmanager
def listening() -> Iterator[Calls]:
    """Record the calls of threads that are started inside."""
    calls = Calls()
    threading.setprofile(calls)
    try:
        yield calls
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
