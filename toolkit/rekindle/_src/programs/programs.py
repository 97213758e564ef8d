"""The compiled programs of a session: built ahead of time from shapes alone, counted, and looked up by bucket.

`build` traces and lowers a program, `compile` makes the executable, and `get` does so only when neither memory nor the
store has it. All methods are thread-safe: threads that want the same program share one compilation, and different
programs compile in parallel.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from rekindle._src.core import freed_memory
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.gc_pause import gc_paused
from rekindle._src.models.base import Graph
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.placement import Placement
from rekindle._src.programs import buckets
from rekindle._src.programs.buckets import Bucket
from rekindle._src.programs.data_shards import DataShards
from rekindle._src.programs.device_graphs import compiler_options
from rekindle._src.programs.helpers import ADMIT, MEMORY, TABLES, Helper, fills, moved_pages
from rekindle._src.programs.jax_cache import KEPT_THERE, watching_hits
from rekindle._src.programs.keys import Key
from rekindle._src.programs.late_store import NOT_STORED, LateStore, Store
from rekindle._src.programs.layered import Layered
from rekindle._src.programs.layered_step import LayeredProgram
from rekindle._src.programs.packing import Layout
from rekindle._src.programs.processors import LogitsProcessor, check_processors
from rekindle._src.programs.program_record import ProgramRecord
from rekindle._src.programs.recipes import Recipes
from rekindle.errors import CompileError, StoreError
from rekindle_kernels import (
    deprecated,
    fuse,
    give_up_zeros,
    has_mask_gates,
    kernel_being_compiled,
    traits,
)

log = logging.getLogger("rekindle.engine")
Compiled = Any  # a jax.stages.Compiled, or what a store returns in its place


class Programs:
    """The programs of one model with one resolved config. They need the shapes of the weights only."""

    def __init__(
        self,
        model: ModelConfig,
        graph: Graph,
        leaves: Sequence[Any],
        config: EngineConfig,
        *,
        processors: Sequence[LogitsProcessor] = (),
        store: Store | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Make no program yet. `leaves` are the whole model's, as they lie on `placement`; `config` is one shard's."""
        assert config.device_pages is not None, "the config is not resolved"
        self.model, self.graph, self.config = model, graph, config
        self.processors = check_processors(processors)
        single = traits(graph.precision.implementation).single_rows
        self._lattice = buckets.lattice(config, processed=bool(self.processors), single=single)
        # Compiled when texts are first embedded, whatever `precompile` says: few sessions ever do that.
        self.pooling = buckets.pooling_lattice(self._lattice)
        self._recipes = Recipes.of(model, graph, leaves, config, self.processors, placement)
        self.leaves, self.kv, self.state = self._recipes.leaves, self._recipes.kv, self._recipes.state
        self.width, self.parts = self._recipes.width, self._recipes.parts
        self.resident, self.pinned = self._recipes.resident, self._recipes.pinned
        self.shards = DataShards(self.parts.shards, config.max_requests, config.device_pages)
        self.moved_pages = moved_pages(self.parts, self.kv)  # pages of a transfer, the largest number first
        self.fills = fills(self.moved_pages, at_once=single and placement is None)
        self.traces = 0
        self.compilations = 0
        self._in_parts = False  # programs are made of parts, in a fraction of the time
        self._provisional: dict[Key, Compiled] = {}  # programs of parts; they stay until the end, see `close`
        self._soon: set[Key] = set()  # programs that are made next
        self._store = store
        self._lock = threading.Lock()
        self._layered = Layered(self._recipes, counted=self._counted, compiled=self._count_compiled, store=store)
        self._building: dict[Key, threading.Lock] = {}
        self._ready: dict[Key, Compiled] = {}
        self._records: dict[Key, ProgramRecord] = {}
        self._compiling: dict[Key, None] = {}  # in the order in which they began
        self._why: dict[str, str] = {}  # why the store could not load a program, by its name there
        self._replaced: list[Compiled] = []  # no step calls them any more

    @property
    def lattice(self) -> tuple[Bucket, ...]:
        """The step programs."""
        return self._lattice

    @property
    def _for_now(self) -> bool:
        """True if programs are made or run that whole ones will replace."""
        return self._in_parts or bool(self._provisional)

    @property
    def keeps(self) -> bool:
        """True if programs outlive the process."""
        return self._store is not None

    @property
    def keys(self) -> tuple[Key, ...]:
        """The programs that `precompile` makes; those that move pages only where there is a tier below the device."""
        return (*self._unguided_keys, *(self.guided_keys if self.config.structured else ()))

    @property
    def _unguided_keys(self) -> tuple[Key, ...]:
        sizes = self.moved_pages[::-1] if self.config.host_memory or self.config.disk_memory else ()
        kinds = ("gather", "collect") if self.parts.multi_process else ("gather",)
        moves = [Helper(kind, pages) for kind in kinds for pages in sizes]
        tables = (TABLES,) if self.resident else ()
        return (*self._lattice, MEMORY, ADMIT, *tables, *moves, *(self.fills if sizes else ()))

    @property
    def guided_keys(self) -> tuple[Key, ...]:
        """The programs of steps with guided rows: made ahead if config.structured, or as needed."""
        return buckets.programs_of(buckets.guided_lattice(self._lattice, buckets.GATED if self.gated else buckets.BOTH))

    @functools.cached_property
    def gated(self) -> bool:
        """True if a step with guided rows is one program, which waits for its masks."""
        return self.parts.placement is None and has_mask_gates(self.graph.precision.implementation)

    @property
    def known(self) -> dict[Key, None]:
        guided = buckets.guided_programs((self._lattice,))
        return dict.fromkeys((*self._unguided_keys, *self.pooling, *guided))

    @property
    def traced_processors(self) -> bool:
        """True if the store holds a program with the session's processors, which were then traced without an error."""
        return any(self._layered.holds(key) for key in self._lattice if key.processed)

    def lattice_for(self, *, guided: bool, pools: bool) -> tuple[Bucket, ...]:
        """Return the buckets from which a step takes its own."""
        if guided:
            waits = self.gated and not self._for_now
            lattice = buckets.guided_lattice(self.lattice, buckets.GATED if waits else buckets.BOTH)
            return buckets.pooling_lattice(lattice) if pools else lattice
        return self.pooling if pools else self.lattice

    def kernels(self) -> list[str]:
        """Return the native kernels that steps call, as far as shapes tell; none for other implementations."""
        return self._recipes.kernels()

    def layout(self, bucket: Bucket) -> Layout:
        return self._recipes.layout(bucket)

    def ready(self, key: Key) -> bool:
        """True if `get` returns at once."""
        return key in self._ready

    def manifest(self) -> tuple[ProgramRecord, ...]:
        """Return the records of all programs that are ready, in the order of `known`."""
        return tuple(self._records[key] for key in self.known if key in self._records)

    def record(self, key: Key) -> ProgramRecord:
        """Return the record of a program that is ready."""
        return self._records[key]

    def soon(self, key: Key) -> bool:
        """True if a program is made next. Until it is ready, a step rather takes another one that can do the same."""
        return key in self._soon

    @contextlib.contextmanager
    def made_next(self, key: Key) -> Iterator[None]:
        """Mark `key` as made next, or ready, inside the `with` block."""
        self._soon.add(key)
        try:
            yield
        finally:
            self._soon.discard(key)

    def get(self, key: Key) -> Compiled:
        """Return the executable, compiled now if needed. Raise `CompileError`, and KeyError if it is not in `known`."""
        program = self._ready.get(key)
        if program is not None:
            return program
        with self._alone(key):
            if key in self._ready or self._load(key):
                return self._ready[key]
            compiled, keep = self._make(key)  # not from `_ready`: the session may have been closed meanwhile
        keep()  # without the lock: threads that wait for the program don't wait for the store
        return compiled

    def begin_parts(self) -> None:
        """Make step programs of parts from now on. Whole programs take longer and replace them later."""
        self._in_parts = True
        self._save_late(True)

    def starts_anew(self, keys: Sequence[Key]) -> bool:
        """True if a first text would wait for whole programs, and parts are ready much sooner."""
        return bool(self.kernels()) and self._layered.starts_anew(keys)

    def end_parts(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Replace programs of parts by whole ones. Each goes on serving until its successor is ready.

        A step looks its program up when it is dispatched, and all programs keep pages and state in one layout, so
        consecutive steps may run in different programs.
        """
        self._in_parts = False
        self._save_late(False)
        for key in sorted((key for key in self.known if isinstance(key, Bucket)), key=lambda key: key.tokens):
            if stopped():  # programs that decode come first: they make most tokens
                return
            with self._alone(key):  # waits for a program that is being made of parts
                if key not in self._provisional:
                    continue
            try:
                gated = bool(key.part) and self.gated
                if gated:  # steps with guided rows run it in place of two programs
                    self.get(buckets.gated(key, self._lattice))
                with self._alone(key):
                    if not gated and not self._load(key):
                        self._make(key)[1]()
                    self._replaced.append(self._provisional.pop(key, None))  # None: closed meanwhile
            except CompileError as error:
                log.warning("%s goes on in parts: %s", key.name, error)

    def load(self, key: Key) -> bool:
        """Load a program from the store, without compiling. Return True if it is ready now."""
        with self._alone(key):
            return key in self._ready or self._load(key)

    def memory(self) -> Any:
        """Return new pages and state. If XLA rejects the kernel that makes zeros without writing them, go without."""
        try:
            return jax.block_until_ready(self.get(MEMORY)())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error) or not give_up_zeros(error):
                raise
        with self._alone(MEMORY):
            self._make(MEMORY)[1]()
        return jax.block_until_ready(self.get(MEMORY)())

    def build(self, key: Key) -> jax.stages.Lowered:
        """Trace and lower one program."""
        recipe = self._recipes.recipe(key)
        counted = self._counted(recipe.function)
        # Only steps call kernels that can be joined, and `fuse` may compile the kernel that joins them.
        implementation = self.graph.precision.implementation
        joined = fuse(counted, implementation=implementation) if isinstance(key, Bucket) else counted
        with deprecated.known(), self.parts.tracing():
            whole = jax.jit(self.parts.wrap(recipe, joined), donate_argnums=recipe.donated)
            return whole.lower(*self.parts.arguments(recipe))

    def compile(self, key: Key) -> Compiled:
        """Build and compile one program."""
        with self._errors(key), gc_paused():
            compiled = self.build(key).compile(compiler_options=compiler_options())
        self._count_compiled()
        return compiled

    def complete(self, key: Key) -> None:
        """Make the part of a provisional program that the first steps do without; do nothing for other programs."""
        program = self._ready.get(key)
        if isinstance(program, LayeredProgram):
            program.complete()

    def flush(self) -> None:
        """Wait until all compiled programs are in the store, as far as it takes them."""
        if isinstance(self._store, LateStore):
            self._store.flush()

    def _save_late(self, late: bool) -> None:
        if isinstance(self._store, LateStore):
            self._store.late = late

    def close(self) -> None:
        """Release the executables now.

        The garbage collector would do so at any time and in any thread, also while another session loads its
        executables, which crashed XLA at times.
        """
        self.flush()
        self._ready.clear()
        self._provisional.clear()
        self._replaced.clear()
        self._layered.clear()

    def _alone(self, key: Key) -> threading.Lock:
        if key not in self.known:
            raise KeyError(f"{key.name} is not in the lattice: {', '.join(known.name for known in self.known)}")
        with self._lock:
            return self._building.setdefault(key, threading.Lock())

    def _of_parts(self, key: Key) -> bool:
        return self._in_parts and self._layered.takes(key)

    @contextlib.contextmanager
    def _errors(self, key: Key) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CompileError(
                f"program {key.name} of {self.model.model_type} did not compile: {type(error).__name__}: {error}"
            ) from error

    def _load(self, key: Key) -> bool:
        """Load a whole program from the store, or else its parts. The store is asked once for each."""
        return self._load_as(key, parts=False) or (self._of_parts(key) and self._load_as(key, parts=True))

    def _load_as(self, key: Key, *, parts: bool) -> bool:
        name = f"{key.name} in parts" if parts else key.name
        if self._store is None or name in self._why:
            return False
        start = time.perf_counter()
        try:
            program = self._layered.load(key) if parts and self._layered.takes(key) else self._store.load(name)
        except StoreError as error:
            self._why[name] = str(error)
            return False
        self._put(key, program, ProgramRecord(key.name, "loaded", time.perf_counter() - start), parts=parts)
        return True

    def _make(self, key: Key) -> tuple[Compiled, Callable[[], None]]:
        """Compile a program. Return it, and a function that stores it."""
        start = time.perf_counter()
        with self._lock:
            self._compiling[key] = None
        parts = self._of_parts(key)
        try:
            if parts and self._layered.takes(key):
                with self._errors(key):
                    compiled, cached = self._layered.make(key), False
            else:
                with watching_hits() as hits:
                    compiled = self.compile(key)
                    cached = hits()
        finally:
            with self._lock:
                del self._compiling[key]
        seconds = time.perf_counter() - start
        reason = self._why.get(key.name, "no store")
        if cached and reason == NOT_STORED:
            reason = KEPT_THERE
        self._put(key, compiled, ProgramRecord(key.name, "compiled", seconds, reason), parts=parts)

        def keep() -> None:
            if isinstance(compiled, LayeredProgram):
                self._layered.save()
            elif self._store is not None and not cached:
                self._store.save(key.name, compiled, seconds)
            freed_memory.give_back()  # memory of the compiler

        return compiled, keep

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with self._lock:
                self.traces += 1
            return function(*args)

        return counted

    def _count_compiled(self) -> None:
        with self._lock:
            self.compilations += 1

    def _put(self, key: Key, program: Compiled, record: ProgramRecord, *, parts: bool) -> None:
        if parts:
            self._provisional[key] = program
        self._records[key] = record
        self._ready[key] = program

    def describe_compiling(self) -> str:
        """Return the names of the programs and the kernel being compiled, in words; empty if there are none."""
        with self._lock:
            names = [key.name for key in self._compiling]
        kernel = kernel_being_compiled()
        programs = f"compiling program{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        return programs + (f", kernel {kernel}" if kernel else "") if names else ""
