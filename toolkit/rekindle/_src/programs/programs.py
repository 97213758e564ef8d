"""The compiled programs of a session: built ahead of time from shapes alone, counted, and looked up by bucket.

The ledger has each program's form: the one that is ready, and the one that is needed. `build` traces and lowers a
program, `compile` makes the executable, and `get` does so only when neither memory nor the store has it. All methods
are thread-safe: threads that want the same program share one compilation, and different programs compile in parallel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.drawable import Record
from rekindle._src.core.memory import gc_paused, give_back
from rekindle._src.core.priority import handing_over
from rekindle._src.kvcache.node import least_copied
from rekindle._src.models.base import ALONE, Graph, Placement, ShapeLike
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import buckets
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import (
    ADMIT,
    COPY,
    FEW,
    FILLED,
    LENS,
    MANY,
    MEMORY,
    SCATTER,
    TABLES,
    TRANSFER,
    Bucket,
    Helper,
    Key,
    ProgramVariant,
    StepSpan,
)
from rekindle._src.programs.drafting import NO_DRAFTS, DraftPrograms
from rekindle._src.programs.features import Features
from rekindle._src.programs.layered import LayeredProgram, LayeredPrograms, compiled_with
from rekindle._src.programs.packing import DataShards, Layout
from rekindle._src.programs.partitioning import Partitioning, Recipe
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import GREEDY
from rekindle._src.programs.side_caches import side_caches
from rekindle._src.programs.store import (
    KEPT_THERE,
    NOT_STORED,
    CompiledProgram,
    Executables,
    ExecutableStore,
    LateStore,
    NoStore,
    ProgramStore,
    watching_hits,
)
from rekindle.errors import CompileError, StoreError
from rekindle_kernels import (
    current_platform,
    deprecated,
    fuse,
    give_up_zeros,
    has_mask_gates,
    kernel_being_compiled,
    traits,
)


class Form(enum.IntEnum):
    """A form of a program. Higher ones run faster and take longer to make."""

    NONE = 0  # not ready
    PARTS = 1  # calls its parts one after the other: ready in a fraction of the time
    WHOLE = 2


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ProgramRecord(Record):
    """The origin of a ready program, and the seconds that it took."""

    name: str
    origin: Literal["loaded", "compiled"]
    seconds: float  # to load it, or to trace, lower and compile it
    why: str = ""  # the reason why it was compiled and not loaded


@dataclasses.dataclass(slots=True)
class ProgramEntry:
    """The state of one program."""

    key: Key
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    form: Form = Form.NONE
    record: ProgramRecord | None = None
    not_loaded: dict[Form, str] = dataclasses.field(default_factory=dict)  # why the store has none: it is asked once


class Ledger:
    """The programs of a session, by key."""

    def __init__(self, keys: Iterable[Key], has_parts: Callable[[Key], bool]) -> None:
        """Begin without programs. `has_parts` is True of a program that can be made of parts."""
        self.entries = {key: ProgramEntry(key) for key in keys}
        self._has_parts = has_parts
        self.ready: dict[Key, CompiledProgram] = {}
        self.least = Form.WHOLE  # the form that is enough for now
        self._provisional: set[Key] = set()  # needed in parts, and not replaced yet
        self._replaced: list[CompiledProgram | None] = []  # steps in flight may run in them
        self._soon: set[Key] = set()
        self.demanded: frozenset[Key] = frozenset()  # steps want them, and they are made in the background
        self._lock = threading.Lock()

    @property
    def provisional(self) -> bool:
        """True if programs are made or run that whole ones will replace."""
        return self.least is Form.PARTS or bool(self._provisional)

    def enough(self, entry: ProgramEntry) -> Form:
        """Return the form to make a program in now."""
        return Form.PARTS if self.least is Form.PARTS and self._has_parts(entry.key) else Form.WHOLE

    def need(self, key: Key) -> ProgramEntry:
        """Return the entry of a program that the caller loads or makes. Raise KeyError for an unknown one."""
        if key not in self.entries:
            raise KeyError(f"{key.name} is not in the lattice: {', '.join(known.name for known in self.entries)}")
        entry = self.entries[key]
        with self._lock:
            if entry.form is Form.NONE and self.enough(entry) is Form.PARTS:
                self._provisional.add(key)
        return entry

    def offer(self, entry: ProgramEntry, form: Form, program: CompiledProgram, record: ProgramRecord) -> None:
        """Put a program in the place of the one that is ready, if any."""
        with self._lock:
            if entry.form is Form.PARTS:
                self._replaced.append(self.ready.get(entry.key))
            entry.form, entry.record = form, record
            self.ready[entry.key] = program
            if form is Form.PARTS:
                self._provisional.add(entry.key)
            else:
                self._provisional.discard(entry.key)

    def settle(self, entry: ProgramEntry) -> None:
        """Let a program stay as it is: nothing replaces it."""
        with self._lock:
            self._provisional.discard(entry.key)

    def jobs(self) -> list[ProgramEntry]:
        """Return the programs that whole ones will replace, in order of their tokens: small ones make most tokens."""
        with self._lock:
            keys = [key for key in self.entries if key in self._provisional and isinstance(key, Bucket)]
        return [self.entries[key] for key in sorted(keys, key=lambda key: key.tokens)]

    def soon(self, key: Key) -> bool:
        """True if a program is made next. Until it is ready, a step rather takes another one that can do the same."""
        return key in self._soon or key in self.demanded

    @contextlib.contextmanager
    def made_next(self, key: Key) -> Iterator[None]:
        """Mark `key` as made next, or ready, inside the `with` block."""
        self._soon.add(key)
        try:
            yield
        finally:
            self._soon.discard(key)

    def records(self) -> tuple[ProgramRecord, ...]:
        """Return the records of all programs that are ready, in the order of the ledger."""
        return tuple(entry.record for entry in self.entries.values() if entry.record is not None)

    def close(self) -> None:
        """Let go of all programs, so that their memory is freed."""
        with self._lock:
            self.ready.clear()
            self._provisional.clear()
            self._replaced.clear()
            for entry in self.entries.values():
                entry.form = Form.NONE


log = logging.getLogger("rekindle.engine")
BREATH = 0.5  # seconds between tracing and compiling the program that decodes, while steps run in parts
# One graph per step on a GPU: its conditionals and loops run on the device, inside the CUDA graph of its kernels. By
# default XLA leaves loops, and conditionals around them, out of its graphs: the host then reads their conditions, and
# waits for the device within each step, twice to four times. A step of 32 layers has some 500 kernels; the host is
# ahead of the device only while it never waits. Compiling for an H100 shows that the options make one graph
# (tests/accelerator/test_steps.py). Where the driver is older than 12.3, XLA leaves conditions to the host.
# These are XLA's defaults, and WHILE; the option replaces them all.
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"


def compiler_options(platform: str | None = None) -> dict[str, str | bool] | None:
    """Return XLA's options for programs on this platform; None for its own defaults."""
    return {"xla_gpu_enable_command_buffer": CAPTURED} if (platform or current_platform()) == "gpu" else None


class TracedProgram(NamedTuple):
    """A program that is traced and lowered, and the seconds that this took."""

    lowered: jax.stages.Lowered
    seconds: float


class Programs:
    """The programs of one model with one resolved config. They need the shapes of the weights only."""

    def __init__(
        self,
        model: ModelConfig,
        graph: Graph,
        leaves: Sequence[ShapeLike],
        config: EngineConfig,
        *,
        features: Features | None = None,
        store: Executables | None = None,
        placement: Placement = ALONE,
        drafter: DraftPrograms = NO_DRAFTS,
    ) -> None:
        """Make no program yet. `leaves` are the whole model's, as they lie on `placement`; `config` is one shard's.

        `features` default to those of sessions without capabilities.
        """
        assert config.device_pages is not None, "the config is not resolved"
        self.model, self.graph, self.config = model, graph, config
        single = traits(graph.precision.implementation).single_rows
        self.sides = side_caches(model, config, placement)
        self.features = features or ProgramPlan(model, graph, (), config, placement, drafter=drafter).features
        self._lattice = buckets.lattice(config, self.features.warmed, single=single)
        keeps = drafter.reads is not None
        self._recipes = Recipes.of(model, graph, leaves, config, self.features, placement, keeps_hidden=keeps)
        self.drafting = drafter.calls(config, self._recipes)
        self.leaves, self.kv, self.state = self._recipes.leaves, self._recipes.kv, self._recipes.state
        self.width, self.page_size, self.parts = self._recipes.width, self._recipes.page_size, self._recipes.parts
        self.resident, self.pinned = self._recipes.resident, self._recipes.pinned
        self.shards = DataShards(self.parts.shards, config.max_requests, config.device_pages)
        self.moved_pages = moved_pages(self.parts, self.kv)  # pages of a transfer, the largest number first
        self.fills = fills(self.moved_pages, at_once=single and not placement.divided)
        self.traces = 0
        self.compilations = 0
        self.keeps = store is not None  # programs outlive the process
        self._store = LateStore(store or NoStore())
        self._lock = threading.Lock()
        self._layered = LayeredPrograms(
            self._recipes, counted=self._counted, compiled=self._count_compiled, store=self._store
        )
        # Variants that few sessions ever need are compiled when a step first does, whatever `precompile` says.
        choices = self.features.choices
        as_needed = [buckets.with_variants(self._lattice, more) for more in buckets.combinations(choices)[1:]]
        guided = buckets.guided_programs((self._lattice,), choices)
        self.ledger = Ledger((*self._unguided_keys, LENS, *itertools.chain(*as_needed), *guided), self._layered.takes)
        self._compiling: dict[Key, None] = {}  # in the order of their beginning

    @classmethod
    def open(cls, plan: ProgramPlan) -> Programs:
        """Return the programs of a plan, including programs stored by earlier sessions. None is made yet."""
        kept = ExecutableStore(plan.config.cache_folder / "programs")
        name, devices = plan.name or plan.model.model_type, tuple(plan.placement.devices)
        return cls(
            plan.model, plan.graph, plan.leaves, plan.config, features=plan.features,
            store=ProgramStore(kept, name, plan.key, devices), placement=plan.placement,
            drafter=plan.drafter,
        )  # fmt: skip

    @property
    def lattice(self) -> tuple[Bucket, ...]:
        """The step programs that are compiled ahead, in every size."""
        return self._lattice

    @property
    def keys(self) -> tuple[Key, ...]:
        """The programs that `precompile` makes; they move pages only if there is a tier below the device."""
        return (*self._unguided_keys, *(self.guided_keys if self.config.structured else ()))

    @property
    def _unguided_keys(self) -> tuple[Key, ...]:
        sizes = self.moved_pages[::-1] if self.config.host_memory or self.config.disk_memory else ()
        kinds = ("gather", "collect") if self.parts.multi_process else ("gather",)
        moves = [Helper(kind, pages) for kind in kinds for pages in sizes]
        tables = (TABLES,) if self.resident else ()
        shared = not self.sides and least_copied(self.page_size)
        copies = (COPY,) if self.config.prefix_cache and shared else ()
        tree = self.sides if sizes and self.config.prefix_cache else ()
        entries = [key for plan in tree for key in (plan.read_out, plan.fill)]
        fills = self.fills if sizes else ()
        return (*self._lattice, MEMORY, ADMIT, *tables, *copies, *moves, *fills, *entries, *self.drafting.keys)

    @property
    def guided_keys(self) -> tuple[Key, ...]:
        """The programs of steps with guided rows: made ahead if config.structured, or as needed."""
        return buckets.programs_of(buckets.guided_lattice(self._lattice, _guided(gated=self.gated)))

    @functools.cached_property
    def gated(self) -> bool:
        """True if a step with guided rows is one program, which waits for its masks."""
        return not self.parts.divided and has_mask_gates(self.graph.precision.implementation)

    @property
    def known(self) -> Collection[Key]:
        """All programs that a session can have."""
        return self.ledger.entries

    @property
    def traced_processors(self) -> bool:
        """True if the store holds a program with the session's processors, which were then traced without an error."""
        return any(self._layered.holds(key) for key in self._lattice if ProgramVariant.PROCESSORS in key.variants)

    def lattice_for(self, variants: ProgramVariant, *, late: bool) -> tuple[Bucket, ...]:
        """Return the buckets that a step can choose from."""
        lattice = self._lattice
        if late:
            waits = self.gated and not self.ledger.provisional
            lattice = buckets.guided_lattice(lattice, _guided(gated=waits))
        more = variants and variants & self.features.as_needed
        return buckets.with_variants(lattice, more) if more else lattice

    def kernels(self) -> list[str]:
        """Return the native kernels that steps call, as far as shapes tell; empty for other implementations."""
        return self._recipes.kernels()

    def layout(self, bucket: Bucket) -> Layout:
        return self._recipes.layout(bucket)

    def ready(self, key: Key, *, whole: bool = False) -> bool:
        """True if `get` returns at once; with `whole`, not for parts that steps with options have to complete."""
        program = self.ledger.ready.get(key)
        lacks = whole and isinstance(program, LayeredProgram) and program.lacks(~int(GREEDY))
        return program is not None and not lacks

    def manifest(self) -> tuple[ProgramRecord, ...]:
        """Return the records of all programs that are ready, in the order of `known`."""
        return self.ledger.records()

    def soon(self, key: Key) -> bool:
        """True if a program is made next. Until it is ready, a step rather takes another one that can do the same."""
        return self.ledger.soon(key)

    def get(self, key: Key) -> CompiledProgram:
        """Return the executable, compiled now if needed. Raise `CompileError`, and KeyError if it is not in `known`."""
        program = self.ledger.ready.get(key)
        if program is not None:
            return program
        entry = self.ledger.need(key)
        with entry.lock:
            if entry.form or self._load(entry):
                return self.ledger.ready[key]
            compiled, keep = self._make(entry)  # not from the ledger: the session may have been closed meanwhile
        keep()  # without the lock: threads that wait for the program don't wait for the store
        return compiled

    def load(self, key: Key) -> bool:
        """Load a program from the store, without compiling. Return True if it is ready now."""
        entry = self.ledger.need(key)
        with entry.lock:
            return bool(entry.form) or self._load(entry)

    def stored(self, key: Key) -> bool:
        """True if the store has the program."""
        return self._store.holds(key.name)

    def use_no_store(self) -> None:
        """Neither load stored programs from now on nor store any: the next process would compile different ones."""
        self._store.detach()

    def quicker_in_parts(self, keys: Sequence[Key]) -> bool:
        """True if a first text would wait for these programs, and their parts are ready much sooner."""
        return bool(self.kernels()) and self._layered.quicker(keys)

    def settle_for(self, form: Form) -> None:
        """Let steps run programs in `form` or better from now on, which decides how further ones are made.

        Once parts are enough, programs are stored later: the steps that run meanwhile are more urgent.
        """
        self.ledger.least = form
        self._store.late |= self.keeps and form is Form.PARTS

    def replace_parts(
        self, stopped: Callable[[], bool] | None = None, *, before_each: Callable[[], None] = lambda: None
    ) -> None:
        """Replace programs of parts by whole ones. Each goes on serving until its successor is ready.

        A step looks its program up when it is dispatched, and all programs keep pages and state in one layout, so
        consecutive steps may run in different programs. With `stopped` it works in the background, and gives steps in
        parts a moment between tracing and compiling the program that decodes. `before_each` is called before each one.
        """
        self.settle_for(Form.WHOLE)
        with handing_over():
            self._replace_each(stopped, before_each)
        self._store.flush()

    def _replace_each(self, stopped: Callable[[], bool] | None, before_each: Callable[[], None]) -> None:
        for number, entry in enumerate(self.ledger.jobs()):
            before_each()
            if stopped is not None and stopped():
                return
            if number == 0 and COPY in self.keys:
                # A second request that shares a prefix with the first copies pages. Without this program it would
                # compile it in the thread that runs the steps, and all requests would wait.
                with contextlib.suppress(CompileError):
                    self.get(COPY)
            with entry.lock:  # waits for a program that is being made of parts
                in_parts = entry.form is Form.PARTS
            key = entry.key
            try:
                if in_parts and isinstance(key, Bucket) and key.span and self.gated:
                    self.get(buckets.gated(key, self._lattice))  # steps with guided rows run it in place of both halves
                elif in_parts:
                    with entry.lock:
                        if not self._load(entry):
                            decodes = isinstance(key, Bucket) and not key.tokens
                            traced = self._traced(key, stopped) if stopped is not None and decodes else None
                            self._make(entry, traced)[1]()
                self.ledger.settle(entry)
            except CompileError as error:
                log.warning("%s goes on in parts: %s", key.name, error)

    def memory(self) -> tuple[paged.KV, RequestState]:
        """Return new pages and state. If XLA rejects the kernel that makes zeros without writing them, go without."""
        try:
            return jax.block_until_ready(self.get(MEMORY)())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error) or not give_up_zeros(error):
                raise
        entry = self.ledger.need(MEMORY)
        with entry.lock:
            self._make(entry)[1]()
        return jax.block_until_ready(self.get(MEMORY)())

    def build(self, key: Key) -> jax.stages.Lowered:
        """Trace and lower one program."""
        recipe = self._recipe(key)
        counted = self._counted(recipe.function)
        # Only models call kernels that can be joined, and `fuse` may compile the kernel that joins them.
        implementation = self.graph.precision.implementation
        joined = fuse(counted, implementation=implementation) if self._runs_a_model(key) else counted
        with deprecated.known(), self.parts.tracing():
            whole = jax.jit(self.parts.wrap(recipe, joined), donate_argnums=recipe.donated)
            return whole.lower(*self.parts.arguments(recipe))

    def _recipe(self, key: Key) -> Recipe:
        if isinstance(key, Helper) and key in self.drafting.keys:
            return self.drafting.recipe(key)
        return self._recipes.recipe(key)

    def _runs_a_model(self, key: Key) -> bool:
        """True if a program is a step, or one of a model that drafts."""
        return isinstance(key, Bucket) or key in self.drafting.keys

    def compile(self, key: Key, traced: TracedProgram | None = None) -> CompiledProgram:
        """Compile one program, which is built first if it is not traced already."""
        with self._errors(key), gc_paused():
            lowered = self.build(key) if traced is None else traced.lowered
            options = self._recipes.step_options if self._runs_a_model(key) else {}
            compiled = compiled_with(lowered, options or compiler_options() or {})
        self._count_compiled()
        return compiled

    def complete(self, key: Key) -> None:
        """Make the part of a provisional program that the first steps do without; do nothing for other programs."""
        program = self.ledger.ready.get(key)
        if isinstance(program, LayeredProgram):
            program.complete()

    def flush(self) -> None:
        """Wait until all compiled programs are in the store, as far as it takes them."""
        self._store.flush()

    def close(self) -> None:
        """Release the executables now.

        The garbage collector would do so at any time and in any thread, also while another session loads its
        executables, which crashed XLA at times.
        """
        self.flush()
        self.ledger.close()
        self._layered.clear()

    @contextlib.contextmanager
    def _errors(self, key: Key) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CompileError(
                f"program {key.name} of {self.model.model_type} did not compile: {type(error).__name__}: {error}"
            ) from error

    def _load(self, entry: ProgramEntry) -> bool:
        """Load a whole program from the store, or its parts if they are enough. The store is asked once for each."""
        enough = self.ledger.enough(entry)
        return any(self._load_as(entry, form) for form in (Form.WHOLE, Form.PARTS) if form >= enough)

    def _load_as(self, entry: ProgramEntry, form: Form) -> bool:
        key = entry.key
        if form in entry.not_loaded:
            return False
        start = time.perf_counter()
        try:
            program: CompiledProgram
            if form is Form.PARTS:
                assert isinstance(key, Bucket), "steps have parts"
                program = self._layered.load(key)
            else:
                program = self._store.load(key.name)
        except StoreError as error:
            entry.not_loaded[form] = str(error)
            return False
        self.ledger.offer(entry, form, program, ProgramRecord(key.name, "loaded", time.perf_counter() - start))
        return True

    def _traced(self, key: Key, stopped: Callable[[], bool]) -> TracedProgram:
        """Trace a program, which leaves steps in parts little time, and give them a moment then, or until stopped."""
        start = time.perf_counter()
        with self._errors(key), gc_paused():
            lowered = self.build(key)
        end = time.perf_counter()
        while not stopped() and time.perf_counter() < end + BREATH:
            time.sleep(0.02)
        return TracedProgram(lowered, end - start)

    def _make(
        self, entry: ProgramEntry, traced: TracedProgram | None = None
    ) -> tuple[CompiledProgram, Callable[[], None]]:
        """Compile a program. Return it, and a function that stores it."""
        start, key, form = time.perf_counter(), entry.key, self.ledger.enough(entry)
        compiled: CompiledProgram
        with self._lock:
            self._compiling[key] = None
        try:
            if form is Form.PARTS:
                assert isinstance(key, Bucket), "steps have parts"
                with self._errors(key):
                    compiled, cached = self._layered.make(key), False
            elif self._made_elsewhere(entry):
                return self.ledger.ready[key], lambda: None
            else:
                with watching_hits() as hits:
                    compiled = self.compile(key, traced)
                    cached = hits()
        except BaseException:
            self._store.give_up(key.name)
            raise
        finally:
            with self._lock:
                del self._compiling[key]
        seconds = time.perf_counter() - start + (0.0 if traced is None else traced.seconds)
        reason = entry.not_loaded.get(Form.WHOLE, "")
        if cached and reason == NOT_STORED:
            reason = KEPT_THERE
        self.ledger.offer(entry, form, compiled, ProgramRecord(key.name, "compiled", seconds, reason))

        def keep() -> None:
            if form is Form.PARTS:
                self._layered.save()
            elif cached:
                self._store.give_up(key.name)
            else:
                self._store.save(key.name, compiled, seconds)
            give_back()  # memory of the compiler

        return compiled, keep

    def _made_elsewhere(self, entry: ProgramEntry) -> bool:
        """True if another process has made the program while this one waited for it, and it is ready now.

        Otherwise this process makes it, and the others that want it wait.
        """
        if self._store.claim(entry.key.name):
            return False
        entry.not_loaded.pop(Form.WHOLE, None)
        return self._load_as(entry, Form.WHOLE)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with self._lock:
                self.traces += 1
            return function(*args)

        return counted

    def _count_compiled(self) -> None:
        with self._lock:
            self.compilations += 1

    def describe_compiling(self) -> str:
        """Return the names of the programs and the kernel being compiled, in words; empty if there are none."""
        with self._lock:
            names = [key.name for key in self._compiling]
        kernel = kernel_being_compiled()
        programs = f"compiling program{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        return programs + (f", kernel {kernel}" if kernel else "") if names else ""


def _guided(*, gated: bool) -> StepSpan:
    return StepSpan.GATED if gated else StepSpan.HALVES


def moved_pages(parts: Partitioning, kv: paged.KV) -> tuple[int, ...]:
    """Return the numbers of pages that a transfer may have, the largest first.

    On CPU that is a copy within memory. A GPU or TPU starts a transfer of 64 pages as quickly as one of a single page.
    Followers of a session repeat transfers of FEW pages.
    """
    if current_platform() == "cpu" or parts.multi_process:
        return (FEW,)
    layers = paged.pages_of(kv)
    page = sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))
    return (*[pages for pages in MANY if pages * page <= TRANSFER][:1], FEW)


def fills(moved: tuple[int, ...], *, at_once: bool) -> tuple[Helper, ...]:
    """Return the programs that fill pages, the fewest first, where transfers have the numbers of pages in `moved`.

    Where one native call fills all pages `at_once`, its program compiles as quickly for many of them.
    """
    sizes = (FILLED, FEW) if at_once and moved == (FEW,) else moved
    return tuple(Helper(SCATTER.kind, pages) for pages in sizes[::-1])
