"""How a program is made: traced and lowered from its recipe, then compiled with the options of its platform."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from rekindle._src.core.memory import gc_paused
from rekindle._src.programs.buckets import Bucket, Helper, Key
from rekindle._src.programs.drafting import DraftCalls
from rekindle._src.programs.layered import compiled_with
from rekindle._src.programs.ledger import ProgramCounts
from rekindle._src.programs.partitioning import Recipe
from rekindle._src.programs.recipes import Recipes, compiler_options
from rekindle._src.programs.store import CompiledProgram
from rekindle.errors import CompileError
from rekindle_kernels import deprecated, fuse

BREATH = 0.5  # seconds between tracing and compiling the program that decodes, while steps run in parts


class TracedProgram(NamedTuple):
    """A program that is traced and lowered, and the seconds that this took."""

    lowered: jax.stages.Lowered
    seconds: float


class ProgramCompiler:
    """Makes the programs of a session, in any thread, and counts them."""

    def __init__(self, recipes: Recipes, drafting: DraftCalls, counts: ProgramCounts) -> None:
        self._recipes, self._drafting, self._counts = recipes, drafting, counts

    def build(self, key: Key) -> jax.stages.Lowered:
        """Trace and lower one program."""
        recipe = self.recipe(key)
        counted = self._counts.traced(recipe.function)
        # Only models call kernels that can be joined, and `fuse` may compile the kernel that joins them.
        implementation = self._recipes.graph.precision.implementation
        joined = fuse(counted, implementation=implementation) if self._runs_a_model(key) else counted
        with deprecated.known(), self._recipes.parts.tracing():
            whole = jax.jit(self._recipes.parts.wrap(recipe, joined), donate_argnums=recipe.donated)
            return whole.lower(*self._recipes.parts.arguments(recipe))

    def recipe(self, key: Key) -> Recipe:
        """Return the recipe of a program."""
        if isinstance(key, Helper) and key in self._drafting.keys:
            return self._drafting.recipe(key)
        return self._recipes.recipe(key)

    def _runs_a_model(self, key: Key) -> bool:
        """True if a program is a step, or one of a model that drafts."""
        return isinstance(key, Bucket) or key in self._drafting.keys

    def compile(self, key: Key, traced: TracedProgram | None = None) -> CompiledProgram:
        """Compile one program, which is built first if it is not traced already."""
        with self.errors(key), gc_paused():
            lowered = self.build(key) if traced is None else traced.lowered
            options = self._recipes.step_options if self._runs_a_model(key) else {}
            compiled = compiled_with(lowered, options or compiler_options() or {})
        self._counts.compiled()
        return compiled

    def trace(self, key: Key, stopped: Callable[[], bool]) -> TracedProgram:
        """Trace a program, which leaves steps in parts little time, and give them a moment then, or until stopped."""
        start = time.perf_counter()
        with self.errors(key), gc_paused():
            lowered = self.build(key)
        end = time.perf_counter()
        while not stopped() and time.perf_counter() < end + BREATH:
            time.sleep(0.02)
        return TracedProgram(lowered, end - start)

    @contextlib.contextmanager
    def errors(self, key: Key) -> Iterator[None]:
        """Raise CompileError in place of any other error inside the `with` block."""
        try:
            yield
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise CompileError(
                f"program {key.name} of {self._recipes.model.model_type} did not compile: {problem}"
            ) from error
