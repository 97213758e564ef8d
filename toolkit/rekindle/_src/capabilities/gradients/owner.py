"""The gradient programs of a session, made when they are asked for and stored with the programs of its steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax

from rekindle._src.capabilities.adapters.request import AdapterLike
from rekindle._src.capabilities.gradients.adapted import AdapterArrays, arrays_of
from rekindle._src.capabilities.gradients.seen import SeenRows, seen_rows
from rekindle._src.capabilities.plans import Owner
from rekindle._src.core import words
from rekindle._src.core.prompt_rows import PromptRows
from rekindle._src.dispatch.apart import JobThreads
from rekindle._src.dispatch.backend import Services, SessionService
from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.models.base import Graph
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.store import ExecutableStore, NoStore, ProgramStore, digest
from rekindle.errors import InvalidRequest, StoreError

MOST_BYTES = 4 << 30  # of attention's weights and of logits at once
MOST_PROGRAMS = 32  # that are kept in memory
COMPILE_SECONDS = 1800.0
Operands = TypeVar("Operands")
Outputs_co = TypeVar("Outputs_co", covariant=True)


class ProgramKey(Protocol[Operands, Outputs_co]):
    """Everything that decides on a program, in addition to the model."""

    @property
    def name(self) -> str:
        """Its name in the store."""
        ...

    def build(self, graph: Graph) -> Callable[[Sequence[jax.Array], Operands], Outputs_co]:
        """Return the function of the model's leaves and the operands."""
        ...

    def shapes(self, model: ModelConfig) -> Operands:
        """Return the shapes of the operands."""
        ...


class GradientPrograms(Owner):
    """Makes and runs the gradient programs of a session. `program` may be called in any thread."""

    def __init__(self, plan: ProgramPlan) -> None:
        self._plan = plan
        self._compiled: dict[str, Callable[..., Any]] = {}
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
        _check(size, 4 * max(4 * model.num_heads * size * size, 2 * model.vocab_size * size if whole else 0))

    def check_edges(self, size: int, sources: int, targets: int) -> None:
        """Raise `InvalidRequest` if the edges of a prompt of this size would need too much memory."""
        _check(size, 4 * size * self._plan.model.hidden_size * (3 * sources + targets))

    def adapter_arrays(self, adapter: AdapterLike) -> AdapterArrays:
        """Return an adapter's products as operands of programs."""
        assert isinstance(adapter, Adapter), "a session's own"
        return arrays_of(adapter, self._plan.model)

    def seen_rows(self, use: PromptRows, length: int, size: int) -> SeenRows:
        """Return the rows of a prompt's pictures as operands of programs."""
        return seen_rows(use, length, size, self._plan.model)

    def program(self, key: ProgramKey[Operands, Outputs_co]) -> Callable[[Sequence[jax.Array], Operands], Outputs_co]:
        """Return a program: one that was made before, the stored one, or one that is compiled now and stored."""
        with self._lock:
            name = key.name
            compiled = self._compiled.pop(name, None) or self._made(name, key)
            self._compiled[name] = compiled
            if len(self._compiled) > MOST_PROGRAMS:
                self._compiled.pop(next(iter(self._compiled)))
        return compiled

    def _made(self, name: str, key: ProgramKey[Any, Any]) -> Callable[..., Any]:
        if self._store is None:
            self._store = self._opened_store()
        with contextlib.suppress(StoreError):
            return self._store.load(name)
        start = time.perf_counter()
        function, model = key.build(self._plan.graph), self._plan.model
        compiled = jax.jit(function).lower(self._plan.leaves, key.shapes(model)).compile()
        self.compilations += 1
        self._store.save(name, compiled, time.perf_counter() - start)
        return compiled

    def _opened_store(self) -> ProgramStore | NoStore:
        plan = self._plan
        kept = ExecutableStore(plan.config.cache_folder / "programs")
        key = digest({**plan.fields, "gradients": 2})
        return ProgramStore(kept, plan.name or plan.model.model_type, key)

    def sleep(self) -> int:
        with self._lock:
            self._compiled.clear()
        return 0


def _check(size: int, needed: int) -> None:
    if needed > MOST_BYTES:
        problem = f"needs {words.mebibytes(needed)} for a gradient, over {words.mebibytes(MOST_BYTES)}"
        raise InvalidRequest("prompt", f"{size} tokens", problem, "Pass a shorter prompt")


GRADIENTS: SessionService[GradientPrograms] = SessionService("gradients")
