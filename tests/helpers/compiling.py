"""What is traced and compiled: by a session's own counters, and by JAX itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.monitoring

from rekindle import Session

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
