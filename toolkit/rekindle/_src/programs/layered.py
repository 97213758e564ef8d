"""Step programs made of a few parts, for the first minute on a machine: they compile in a fraction of the time.

XLA compiles each layer of a step anew. Here a layer is a part of its own, called for all layers that are like it
(`step_parts.py`), and the parts of a program compile in parallel. Programs of one size share them: only the closing,
behind the layers, differs between a step, its guided half and the variant that pools.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeGuard

import jax

from rekindle._src.core.memory import gc_paused
from rekindle._src.programs.buckets import FORWARD, Bucket
from rekindle._src.programs.helpers import Key
from rekindle._src.programs.ledger import Compiled
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.step_parts import (
    Cut,
    LayeredForward,
    LayeredProgram,
    LayeredStep,
    Opened,
    make_closing,
    make_forward_closing,
    make_layer,
    make_opening,
)
from rekindle._src.programs.store import Executables, watching_hits
from rekindle.errors import CompileError, StoreError

# Options of XLA:CPU for step programs that compile beside steps: one thread does half of the work that two share by
# default (jax 0.10, 135M: 0.33 s instead of 0.76 for one token, 0.55 instead of 1.16 for 32), and steps take as long.
# The program that copies pages takes a hundred times longer with them.
LEAN: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": "1"}
# Parts compile in parallel and are replaced soon. Level 0 would compile them in half of this time, but steps take 1.3
# to 2.3 times as long. No option changes a result.
QUICK: dict[str, str | bool] = {**LEAN, "xla_backend_optimization_level": "1"}
# With 5 layers a first text waits 0.5 s for parts and 1.7 s for whole programs. A layer as a part takes about as long
# to compile as 1.4 layers of a whole program.
MANY_LAYERS, ALIKE = 5, 3
Counted = Callable[[Callable[..., Any]], Callable[..., Any]]


class Part(NamedTuple):
    """One part of a program: its name in the store, and the function to trace with its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    donated: tuple[int, ...] = ()
    opens: tuple[int, int] | None = None  # the size (rows, tokens) of an opening; None for other parts


class Layered:
    """A maker of programs in parts, which keeps the parts. All methods are thread-safe."""

    def __init__(self, recipes: Recipes, *, counted: Counted, compiled: Callable[[], None], store: Executables) -> None:
        """Begin without parts. `counted` wraps traced functions, and `compiled` is called after each compilation."""
        self._recipes, self._counted, self._compiled, self._store = recipes, counted, compiled, store
        self._lock = threading.Lock()
        self._parts: dict[str, Future[Compiled]] = {}  # ready, or being made
        self._opened: dict[tuple[int, int], Opened] = {}  # the shapes of openings' results, by size
        self._unsaved: list[tuple[str, Compiled, float]] = []

    def quicker(self, keys: Iterable[Key]) -> bool:
        """True if not all of these programs are stored, and their parts are ready much sooner than whole programs."""
        kinds, keys = self._cut.kinds, [*keys]
        return (
            len(kinds) >= max(MANY_LAYERS, ALIKE * len({*kinds}))
            and all(self.takes(key) for key in keys)
            and not all(self._store.holds(key.name) for key in keys)
        )

    def holds(self, key: Bucket) -> bool:
        """True if the program, or the part of it that chooses tokens, is stored."""
        return self._store.holds(key.name) or self._store.holds(self._closing_name(key, greedy=False))

    def takes(self, key: Key) -> TypeGuard[Bucket]:
        """True if the program can be made of parts: a step or its first half, on one device."""
        if not isinstance(key, Bucket) or key.part not in ("", FORWARD):
            return False
        inside = any(feature.inside for feature in self._recipes.layout(key).compiled)
        return not inside and not self._recipes.parts.divided

    def load(self, key: Bucket) -> LayeredProgram:
        """Return a program of stored parts, without compiling. Raise `StoreError` if one is not stored."""
        parts = {}
        for part in self._first(key):
            future, is_new = self._claim(part.name)
            if is_new:
                try:
                    future.set_result(self._store.load(part.name))
                except BaseException as error:
                    self._give_up(part.name, future, error)
            parts[part.name] = future.result()
        return self._assembled(key, parts)

    def make(self, key: Bucket) -> LayeredProgram:
        """Return a program whose parts are loaded or compiled now. Raise any error of tracing or compiling."""
        return self._assembled(key, self._made(self._first(key)))

    def save(self) -> None:
        """Store the parts that were compiled and are not stored yet."""
        with self._lock:
            new, self._unsaved = self._unsaved, []
        for name, compiled, seconds in new:
            self._store.save(name, compiled, seconds)

    def clear(self) -> None:
        """Release the parts that are ready."""
        with self._lock:
            self._parts.clear()
            self._unsaved.clear()

    @functools.cached_property
    def _cut(self) -> Cut:
        return Cut.of(self._recipes.graph, self._recipes.leaves)

    def _assembled(self, key: Bucket, found: Mapping[str, Compiled]) -> LayeredProgram:
        kind = LayeredForward if key.part == FORWARD else LayeredStep
        layers = [found[self._layer_name(key, layer)] for layer in self._cut.kinds]
        greedy = found.get(self._closing_name(key, greedy=True))
        return kind(self._cut, found[self._opening_name(key)], layers, greedy, functools.partial(self._closed, key))

    def _closed(self, key: Bucket) -> Compiled:
        """Return the closing that serves all steps; load or compile it if needed."""
        name = self._closing_name(key, greedy=False)
        future = self._parts.get(name)
        if future is not None and future.done():
            return future.result()
        try:
            parts = self._made([self._closing(key, greedy=False)])
        except Exception as error:
            raise CompileError(f"{name} did not compile: {type(error).__name__}: {error}") from error
        self.save()
        return parts[name]

    def _made(self, parts: Iterable[Part]) -> dict[str, Compiled]:
        """Trace one part after the other, as the GIL allows no more, and compile each in its own thread meanwhile."""
        futures: dict[str, Future[Compiled]] = {}
        threads: list[threading.Thread] = []
        try:
            with gc_paused():
                for part in parts:
                    futures[part.name], is_new = self._claim(part.name)
                    if is_new:
                        threads += self._begin(part, futures[part.name])
                return {name: future.result() for name, future in futures.items()}
        finally:
            for thread in threads:
                thread.join()

    def _begin(self, part: Part, future: Future[Compiled]) -> list[threading.Thread]:
        """Load a part, or start a thread that compiles it. Return the threads started, one or none."""
        start = time.perf_counter()
        try:
            try:
                future.set_result(self._store.load(part.name))
                return []
            except StoreError:
                lowered = self._traced(part).lower()
        except BaseException as error:
            self._give_up(part.name, future, error)
            raise

        def compile_it() -> None:
            try:
                with watching_hits() as hits:
                    compiled = compiled_with(lowered, QUICK)
                    cached = hits()
            except BaseException as error:
                self._give_up(part.name, future, error)
                return
            self._compiled()
            if not cached:
                with self._lock:
                    self._unsaved.append((part.name, compiled, time.perf_counter() - start))
            future.set_result(compiled)

        # Not a daemon: a thread that is ended inside XLA aborts the process.
        thread = threading.Thread(target=compile_it, name="rekindle compile part", daemon=False)
        thread.start()
        return [thread]

    def _claim(self, name: str) -> tuple[Future[Compiled], bool]:
        """Return the future of a part, and True if the caller has to make the part."""
        with self._lock:
            is_new = name not in self._parts
            return self._parts.setdefault(name, Future()), is_new

    def _give_up(self, name: str, future: Future[Compiled], error: BaseException) -> None:
        """Pass the error to the threads that wait for the part, and forget the part, so that it can be tried again."""
        with self._lock:
            self._parts.pop(name, None)
        future.set_exception(error)

    def _traced(self, part: Part) -> Any:
        traced = jax.jit(self._counted(part.function), donate_argnums=part.donated).trace(*part.arguments())
        if part.opens is not None:
            self._opened[part.opens] = _shapes_of(traced.out_info)
        return traced

    def _first(self, key: Bucket) -> Iterator[Part]:
        """Yield the parts that a program needs to begin, its layers early, since they take longest to compile."""
        yield self._opening(key)
        for layer in dict.fromkeys(self._cut.kinds):
            yield self._layer(key, layer)
        changes = any(feature.variant and feature.changing for feature in self._recipes.layout(key).compiled)
        yield self._closing(key, greedy=not changes and not key.part)

    def _opening(self, key: Bucket) -> Part:
        recipes, layout = self._recipes, self._recipes.layout(key)
        function = make_opening(self._cut, layout, recipes.page_size)

        def arguments() -> tuple[Any, ...]:
            return self._outer, recipes.state.last_token, *recipes.upload(layout)

        return Part(self._opening_name(key), function, arguments, opens=(key.rows, key.tokens))

    def _layer(self, key: Bucket, layer: int) -> Part:
        recipes, cut = self._recipes, self._cut
        function = make_layer(cut, layer, recipes.layout(key), implementation=recipes.config.kernels)

        def arguments() -> tuple[Any, ...]:
            shapes = self._shapes(key)
            leaves = tuple(cut.leaves[index] for index in cut.layers[layer])
            own = shapes.own[layer : layer + 1]
            return leaves, recipes.kv[cut.sources[layer]], shapes.x, shapes.tables, shapes.inputs.paging, *own

        return Part(self._layer_name(key, layer), function, arguments, (1,))

    def _closing(self, key: Bucket, *, greedy: bool) -> Part:
        recipes, cut, layout = self._recipes, self._cut, self._recipes.layout(key)
        name = self._closing_name(key, greedy=greedy)
        if key.part == FORWARD:

            def forwarded() -> tuple[Any, ...]:
                shapes = self._shapes(key)
                return self._outer, shapes.x, shapes.inputs

            return Part(name, make_forward_closing(cut, layout), forwarded)
        function = make_closing(cut, layout, greedy=greedy)

        def arguments() -> tuple[Any, ...]:
            shapes = self._shapes(key)
            return self._outer, recipes.state, shapes.x, shapes.inputs

        return Part(name, function, arguments, (1,))

    def _size(self, key: Bucket) -> str:
        """Return the first words of the names of parts that all programs of one size share."""
        return f"r{key.rows}t{key.tokens} parts"

    def _opening_name(self, key: Bucket) -> str:
        return f"{self._size(key)} opening"

    def _closing_name(self, key: Bucket, *, greedy: bool) -> str:
        return f"{key.name} parts {'greedy ' if greedy else ''}closing"

    def _layer_name(self, key: Bucket, layer: int) -> str:
        return f"{self._size(key)} layer {layer}"

    @property
    def _outer(self) -> tuple[Any, ...]:
        return tuple(self._cut.leaves[index] for index in self._cut.outer)

    def _shapes(self, key: Bucket) -> Opened:
        """Return the shapes of the opening's results; trace the opening for them if it was loaded."""
        size = (key.rows, key.tokens)
        if size not in self._opened:
            self._traced(self._opening(key))
        return self._opened[size]


_unknown: set[str] = set()  # options that this version of XLA does not take


def compiled_with(lowered: Any, wanted: Mapping[str, str | bool]) -> Compiled:
    """Compile with those of the options that this version of XLA takes."""
    while True:
        options = {name: value for name, value in wanted.items() if name not in _unknown}
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            # "No such compile option: 'name'", or "While setting option name, …": versions of XLA differ in both.
            unsupported = {name for name in options if "option" in str(error) and name in str(error)}
            if not unsupported:
                raise
            _unknown.update(unsupported)


def _shapes_of(found: Opened) -> Opened:
    shapes: Opened = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found)
    return shapes
