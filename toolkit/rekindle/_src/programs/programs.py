"""The compiled programs of a session: built ahead of time from shapes alone, and looked up by bucket.

The lattice has the programs that there can be. The ledger has the form of each: the one that is ready, and the one that
is needed. The compiler traces, lowers and compiles a program, and `get` has it do so only when neither memory nor the
store has it. All methods are thread-safe: threads that want the same program share one compilation, and different
programs compile in parallel.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import jax

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.memory import give_back
from rekindle._src.core.priority import handing_over
from rekindle._src.models.base import ALONE, Graph, Placement, ShapeLike
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import COPY, MEMORY, Bucket, Key, ProgramVariant, gated
from rekindle._src.programs.compiling import ProgramCompiler, TracedProgram
from rekindle._src.programs.drafting import NO_DRAFTS, DraftPrograms
from rekindle._src.programs.features import Features
from rekindle._src.programs.lattice import Lattice
from rekindle._src.programs.layered import LayeredProgram, LayeredPrograms
from rekindle._src.programs.ledger import Form, Ledger, ProgramCounts, ProgramEntry, ProgramRecord
from rekindle._src.programs.packing import StepPacking
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import GREEDY
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
    give_up_zeros,
)

log = logging.getLogger("rekindle.engine")


class Programs:
    """The programs of one model with one resolved config. They need the shapes of the weights only."""

    def __init__(
        self,
        model: ModelConfig,
        graph: Graph,
        leaves: Sequence[ShapeLike],
        config: ResolvedConfig,
        *,
        features: Features | None = None,
        store: Executables | None = None,
        placement: Placement = ALONE,
        drafter: DraftPrograms = NO_DRAFTS,
        packing: StepPacking | None = None,
    ) -> None:
        """Make no program yet. `leaves` are the whole model's, as they lie on `placement`.

        `features` default to those of sessions without capabilities.
        """
        self.config = config
        self.features = features or ProgramPlan(model, graph, (), config, placement, drafter=drafter).features
        keeps = drafter.reads is not None
        self.recipes = Recipes.of(model, graph, leaves, config, self.features, placement, keeps_hidden=keeps)
        self.drafting = drafter.calls(config, self.recipes)
        self.packing = packing or StepPacking.of(config)
        self.lattice = Lattice(self.recipes, self.drafting.keys)
        self.counts = ProgramCounts()
        self.compiler = ProgramCompiler(self.recipes, self.drafting, self.counts)
        self.keeps = store is not None  # programs outlive the process
        self._found: dict[tuple[Key, Form], bool] = {}  # whether the store has a program in this form or better
        self._store = LateStore(store or NoStore())
        self._layered = LayeredPrograms(
            self.recipes, counted=self.counts.traced, compiled=self.counts.compiled, store=self._store
        )
        self.ledger = Ledger(self.lattice.known(), self._layered.takes)

    @classmethod
    def open(cls, plan: ProgramPlan) -> Programs:
        """Return the programs of a plan, including programs stored by earlier sessions. None is made yet."""
        kept = ExecutableStore(plan.config.cache_folder / "programs")
        name, devices = plan.name or plan.model.model_type, tuple(plan.placement.devices)
        return cls(
            plan.model, plan.graph, plan.leaves, plan.config, features=plan.features,
            store=ProgramStore(kept, name, plan.key, devices), placement=plan.placement,
            drafter=plan.drafter, packing=plan.packing,
        )  # fmt: skip

    @property
    def keys(self) -> tuple[Key, ...]:
        """The programs that `precompile` makes."""
        return self.lattice.keys

    @property
    def traced_processors(self) -> bool:
        """True if the store holds a program with the session's processors, which were then traced without an error."""
        return any(self._layered.holds(key) for key in self.lattice.ahead if ProgramVariant.PROCESSORS in key.variants)

    def lattice_for(self, variants: ProgramVariant, *, late: bool) -> tuple[Bucket, ...]:
        """Return the buckets that a step can choose from."""
        return self.lattice.sizes(variants, late=late, waits=late and not self.ledger.provisional)

    def ready(self, key: Key, *, whole: bool = False) -> bool:
        """True if `get` returns at once; with `whole`, not for parts that steps with options have to complete."""
        program = self.ledger.ready.get(key)
        lacks = whole and isinstance(program, LayeredProgram) and program.lacks(~int(GREEDY))
        return program is not None and not lacks

    def manifest(self) -> tuple[ProgramRecord, ...]:
        """Return the records of all programs that are ready, in the order of the ledger."""
        return self.ledger.records()

    def get(self, key: Key) -> CompiledProgram:
        """Return the executable, compiled now if needed. Raise `CompileError`, and KeyError for unknown programs."""
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

    def made(self, keys: Sequence[Key]) -> bool:
        """True if none of these programs has to be compiled: each is ready, or a sufficient one is stored.

        The store is asked once for each, since a shared cache may be far away.
        """
        missing = [(key, self.ledger.least) for key in keys if not self.ready(key)]
        for key, least in missing:
            if (key, least) not in self._found:
                in_parts = least is Form.PARTS and self._layered.stored(key)
                self._found[key, least] = in_parts or self.stored(key)
        return all(self._found[each] for each in missing)

    def moved_by_host(self, keys: Sequence[Key]) -> bool:
        """True if the host does the work of these programs, which move pages: they would have to be compiled.

        Only on one CPU device, whose memory is the host's.
        """
        parts = self.recipes.parts
        if jax.default_backend() != "cpu" or parts.divided or parts.multi_process:
            return False
        return not self.made(keys)

    def use_no_store(self) -> None:
        """Neither load stored programs from now on nor store any: the next process would compile different ones."""
        self._store.detach()

    def quicker_in_parts(self, keys: Sequence[Key]) -> bool:
        """True if a first text would wait for these programs, and their parts are ready much sooner."""
        return self.recipes.compiles_slowly and self._layered.quicker(keys)

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
                if in_parts and isinstance(key, Bucket) and key.late and self.lattice.gated:
                    self.get(gated(key, self.lattice.ahead))  # steps with guided rows run it in place of both halves
                elif in_parts:
                    with entry.lock:
                        # Another thread may have replaced it meanwhile, and a GPU's whole program takes many seconds.
                        if entry.form is Form.PARTS and not self._load(entry):
                            decodes = isinstance(key, Bucket) and not key.tokens
                            traced = self.compiler.trace(key, stopped) if stopped is not None and decodes else None
                            self._make(entry, traced)[1]()
                self.ledger.settle(entry)
            except CompileError as error:
                log.warning("%s goes on in parts: %s", key.name, error)

    def memory(self) -> tuple[paged.KV, RequestState, tuple[object, ...]]:
        """Return new pages, state and the features' own parts of it.

        If XLA rejects the kernel that makes zeros without writing them, go without.
        """
        try:
            return jax.block_until_ready(self.get(MEMORY)())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error) or not give_up_zeros(error):
                raise
        entry = self.ledger.need(MEMORY)
        with entry.lock:
            self._make(entry)[1]()
        return jax.block_until_ready(self.get(MEMORY)())

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

    def _make(
        self, entry: ProgramEntry, traced: TracedProgram | None = None
    ) -> tuple[CompiledProgram, Callable[[], None]]:
        """Compile a program. Return it, and a function that stores it."""
        start, key, form = time.perf_counter(), entry.key, self.ledger.enough(entry)
        compiled: CompiledProgram
        try:
            with self.counts.making(key):
                if form is Form.PARTS:
                    assert isinstance(key, Bucket), "steps have parts"
                    with self.compiler.errors(key):
                        compiled, cached = self._layered.make(key), False
                elif self._made_elsewhere(entry):
                    return self.ledger.ready[key], lambda: None
                else:
                    with watching_hits() as hits:
                        compiled = self.compiler.compile(key, traced)
                        cached = hits()
        except BaseException:
            self._store.give_up(key.name)
            raise
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
