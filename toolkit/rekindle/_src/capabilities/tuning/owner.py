"""The training programs of a session, made when they are asked for and stored with the programs of its steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rekindle._src.capabilities.plans import Owner
from rekindle._src.dispatch.backend import Services, SessionService
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.store import ExecutableStore, NoStore, ProgramStore, digest
from rekindle.errors import StoreError

TrainingProgram = Callable[..., Any]
MOST_PROGRAMS = 256  # that are kept in memory


class TuningPrograms(Owner):
    """Makes the training programs of a session. `program` may be called in any thread."""

    def __init__(self, plan: ProgramPlan) -> None:
        self.plan = plan
        self._programs: dict[str, TrainingProgram] = {}
        self._lock = threading.Lock()
        self._store: ProgramStore | NoStore | None = None
        self.compilations = 0
        self.closed = threading.Event()

    @property
    def services(self) -> Services:
        return {TUNING: self}

    def program(
        self,
        name: str,
        function: Callable[..., Any],
        operands: Sequence[Any],
        donated: tuple[int, ...] = (),
        *,
        stored: bool = True,
    ) -> TrainingProgram:
        """Return a program: one that was made before, the stored one, or one that is compiled now and stored.

        `operands` are arrays or shapes. Names say everything that decides on a program, in addition to the model.
        """
        with self._lock:
            if not stored:  # its name does not say everything
                return self._made(name, function, operands, donated, stored=False)
            program = self._programs.pop(name, None) or self._made(name, function, operands, donated, stored=stored)
            self._programs[name] = program
            if len(self._programs) > MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
        return program

    def _made(
        self,
        name: str,
        function: Callable[..., Any],
        operands: Sequence[Any],
        donated: tuple[int, ...],
        *,
        stored: bool,
    ) -> TrainingProgram:
        if self._store is None:
            self._store = self._opened_store()
        if stored:
            with contextlib.suppress(StoreError):
                return self._store.load(name)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tuple(operands))
        start = time.perf_counter()
        compiled: Any = jax.jit(function, donate_argnums=donated).lower(*shapes).compile()
        self.compilations += 1
        if stored:
            self._store.save(name, compiled, time.perf_counter() - start)
        program: TrainingProgram = compiled
        return program

    def _opened_store(self) -> ProgramStore | NoStore:
        plan = self.plan
        kept = ExecutableStore(plan.config.cache_folder / "programs")
        return ProgramStore(kept, plan.name or plan.model.model_type, digest({**plan.fields, "tuning": 2}))

    def sleep(self) -> int:
        with self._lock:
            self._programs.clear()
        return 0

    def close(self) -> None:
        self.closed.set()


TUNING: SessionService[TuningPrograms] = SessionService("tuning")
