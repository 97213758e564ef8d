"""The gradient programs of a session, made when they are asked for and stored with the programs of its steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.gradients.request import Point
from rekindle._src.capabilities.plans import Owner
from rekindle._src.core import words
from rekindle._src.dispatch.apart import JobThreads
from rekindle._src.dispatch.backend import Services, SessionService
from rekindle._src.models.base import LoadedModel
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.store import ExecutableStore, NoStore, ProgramStore, digest
from rekindle.errors import InvalidRequest, StoreError

if TYPE_CHECKING:
    from rekindle._src.capabilities.gradients.step import GradientArguments, GradientKey

GradientProgram = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
MOST_BYTES = 4 << 30  # of attention's weights and of logits at once
MOST_PROGRAMS = 32  # that are kept in memory
COMPILE_SECONDS = 1800.0


class GradientResult(NamedTuple):
    """A number, and its gradient at each point [T, …], in float32."""

    value: float
    arrays: dict[Point, NDArray[np.float32]]


class GradientPrograms(Owner):
    """Makes and runs the gradient programs of a session. `program` may be called in any thread."""

    def __init__(self, plan: ProgramPlan) -> None:
        self._plan = plan
        self._compiled: dict[str, GradientProgram] = {}
        self._lock = threading.Lock()
        self._store: ProgramStore | NoStore | None = None
        self.threads = JobThreads(1, COMPILE_SECONDS, "rekindle gradients")
        self.compilations = 0

    @property
    def services(self) -> Services:
        return {GRADIENTS: self}

    def check(self, size: int, *, whole: bool) -> None:
        """Raise `InvalidRequest` if a prompt of this size would need too much memory; `whole`: it has all logits."""
        model = self._plan.model
        needed = 4 * max(4 * model.num_heads * size * size, 2 * model.vocab_size * size if whole else 0)
        if needed > MOST_BYTES:
            problem = f"needs {words.mebibytes(needed)} for a gradient, over {words.mebibytes(MOST_BYTES)}"
            raise InvalidRequest("prompt", f"{size} tokens", problem, "Pass a shorter prompt")

    def program(self, key: GradientKey) -> GradientProgram:
        """Return a program: one that was made before, the stored one, or one that is compiled now and stored."""
        with self._lock:
            name = key.name
            compiled = self._compiled.pop(name, None) or self._made(name, key)
            self._compiled[name] = compiled
            if len(self._compiled) > MOST_PROGRAMS:
                self._compiled.pop(next(iter(self._compiled)))
        return compiled

    def run(self, program: GradientProgram, model: LoadedModel, key: GradientKey, operands: Any) -> GradientResult:
        """Compute a gradient with the weights of now; called while no step is in flight."""
        value, gradients = jax.block_until_ready(program(model.leaves, operands))
        length = int(operands.length)
        arrays = {point: np.array(gradients[str(index)][:length]) for index, point in enumerate(key.points)}
        return GradientResult(float(value), arrays)

    def _made(self, name: str, key: GradientKey) -> GradientProgram:
        if self._store is None:
            self._store = self._opened_store()
        with contextlib.suppress(StoreError):
            return self._store.load(name)
        from rekindle._src.capabilities.gradients.step import program_of  # with flax, which an opening does without

        start = time.perf_counter()
        function = program_of(self._plan.graph, key)
        compiled = jax.jit(function).lower(self._plan.leaves, self._shapes(key)).compile()
        self.compilations += 1
        self._store.save(name, compiled, time.perf_counter() - start)
        return compiled

    def _shapes(self, key: GradientKey) -> GradientArguments:
        from rekindle._src.capabilities.gradients.step import EditArrays, GradientArguments

        def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        size, E = key.size, self._plan.model.hidden_size
        edit = EditArrays(shape(np.float32, 3), shape(np.float32, size, E), shape(np.bool_, size))
        scalar = shape(np.int32)
        return GradientArguments(shape(np.int32, size), scalar, scalar, shape(np.int32, 2), (edit,) * len(key.places))

    def _opened_store(self) -> ProgramStore | NoStore:
        plan = self._plan
        kept = ExecutableStore(plan.config.cache_folder / "programs")
        key = digest({**plan.fields, "gradients": 1})
        return ProgramStore(kept, plan.name or plan.model.model_type, key)

    def sleep(self) -> int:
        with self._lock:
            self._compiled.clear()
        return 0


GRADIENTS: SessionService[GradientPrograms] = SessionService("gradients")
