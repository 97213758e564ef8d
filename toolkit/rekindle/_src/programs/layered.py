"""Step programs made of a few parts, for the first minute on a machine: they compile in a fraction of the time.

XLA compiles each layer of a step anew. Here a step is an opening before the layers, the layers, and a closing after
them. Layers that are alike share a part, so that XLA compiles as many as there are kinds of layers (mostly one), and
the parts of a program compile in parallel. It runs slower: each part is a call, and nothing is fused across them.
Programs of one size share parts: only the closing differs between a step, its guided half and the variant that pools.

The closing has two sizes. Steps of greedy rows without other options need a small part of it, and it
compiles in a fraction of the time.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeGuard

import jax
from jax import Array

from rekindle._src.core.memory import gc_paused
from rekindle._src.models.base import Graph, Model, merge
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import Bucket, Key, StepSpan
from rekindle._src.programs.kv_layout import Paging
from rekindle._src.programs.packing import Layout, changed_tables, unpack
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import GREEDY
from rekindle._src.programs.step import ChoiceInputs, Leaves, ModelOutput, Operands, StepOutput, finish, finish_forward
from rekindle._src.programs.step_part import StepInputs
from rekindle._src.programs.store import CompiledProgram, LateStore, watching_hits
from rekindle.errors import CompileError, StoreError

Tables = tuple[tuple[Array, ...], ...]  # of each of the model's ropes, as `rope.tables` returns them


class OpeningOutput(NamedTuple):
    """The results of the opening."""

    x: Array  # [R + T, E]
    tables: Tables
    own: tuple[Array, ...]  # what each layer reads alone, or nothing
    inputs: StepInputs
    page_tables: Array | None  # the resident ones, with the step's changes; None where each step brings its own


Opening = Callable[..., OpeningOutput]  # of leaves, last tokens, both buffers, and resident page tables if there are
Layer = Callable[..., tuple[paged.Layer, Array]]  # of leaves, pages, x, tables, paging, and what it reads alone
Streams = tuple[Array, ...]  # [R + T, E]: the output of the last layer, and the inputs of layers that are read
Closing = Callable[[Leaves, RequestState, Streams, StepInputs], tuple[RequestState, StepOutput]]
ForwardClosing = Callable[[Leaves, Streams, StepInputs], tuple[ChoiceInputs, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The leaves of a model that each part reads, and the groups of layers that are alike."""

    graph: Graph
    leaves: Sequence[jax.ShapeDtypeStruct]  # all shapes
    outer: tuple[int, ...]  # the leaves of no layer
    layers: tuple[tuple[int, ...], ...]  # the leaves of each layer
    kinds: tuple[int, ...]  # for each layer, the first one that is like it
    sources: tuple[int, ...]  # for each layer, the layer with the pages it attends to

    @classmethod
    def of(cls, graph: Graph, leaves: Sequence[jax.ShapeDtypeStruct]) -> Cut:
        """Cut a graph into parts. Layers with the same leaves, the same attention, and the same experts are alike."""
        config, stored = graph.config, dict(graph.precision.kinds)
        owned: list[list[int]] = [[] for _ in range(config.num_layers)]
        outer: list[int] = []
        looks: list[list[Any]] = [[] for _ in owned]
        for index, (path, leaf) in enumerate(zip(graph.paths, leaves, strict=True)):
            first, _, rest = path.partition(".")
            if first != "layers":
                outer.append(index)
                continue
            number, _, name = rest.partition(".")
            owned[int(number)].append(index)
            looks[int(number)].append((name, leaf.shape, str(leaf.dtype), stored.get(path.rpartition(".")[0])))
        first_of_kind: dict[Any, int] = {}
        kinds = [
            first_of_kind.setdefault(
                (config.attention[layer], config.moe[layer] if config.moe else None, config.caches[layer], *look), layer
            )
            for layer, look in enumerate(looks)
        ]
        sources = map(config.source, range(config.num_layers))
        return cls(graph, leaves, tuple(outer), tuple(map(tuple, owned)), tuple(kinds), tuple(sources))

    def model(self, indices: Sequence[int], arrays: Leaves) -> Model:
        """Return the model with arrays where a part has them, and shapes elsewhere."""
        leaves: list[Any] = list(self.leaves)
        for index, leaf in zip(indices, arrays, strict=True):
            leaves[index] = leaf
        return merge(self.graph, leaves)


def make_opening(cut: Cut, layout: Layout, page_size: int) -> Opening:
    """Return the part from a step's buffers to the first layer. The leaves are the outer ones. The caller donates
    resident page tables."""

    def opening(
        outer: Leaves, last_token: Array, ints: Array, floats: Array, page_tables: Array | None = None
    ) -> OpeningOutput:
        page_tables = changed_tables(layout, ints, page_tables)
        inputs = unpack(layout, page_size, ints, floats, last_token, page_tables)
        model = cut.model(cut.outer, outer)
        x, tables = model.begin(inputs.tokens, inputs.positions, inputs.rope_lengths)
        of_ropes = tuple(tables.tables[rope] for rope in model.config.ropes)
        return OpeningOutput(x, of_ropes, tables.own, inputs, page_tables)

    return opening


def make_layer(cut: Cut, layer: int, layout: Layout, *, implementation: str | None = None) -> Layer:
    """Return the part of one layer, and of all that are like it. The caller donates its pages."""

    def run(
        leaves: Leaves, kv: paged.Layer, x: Array, tables: Tables, paging: Paging, *own: Array
    ) -> tuple[paged.Layer, Array]:
        from rekindle._src.models.nn.forward import ForwardPass, RopeTables  # they import flax: only tracing needs it

        model = cut.model(cut.layers[layer], leaves)
        pages = [kv] * (layer + 1)  # the layer reads the entry of its number
        fixed = cut.graph.precision.deterministic
        attend = paged.PagedAttention(model.config, pages, paging, layout.rows, implementation, deterministic=fixed)
        of_ropes = dict(zip(model.config.ropes, tables, strict=True))
        rope_tables = RopeTables.of(of_ropes, own * (layer + 1))  # the layer reads the entry of its number
        x = model.layers[layer](x, ForwardPass(rope_tables, attend).of(layer))
        return attend.kv[layer], x

    return run


def make_closing(cut: Cut, layout: Layout, *, greedy: bool = False) -> Closing:
    """Return the part from the last layer to a step's results; `greedy` is for steps without other options. The caller
    donates the state."""

    def closing(
        outer: Leaves, state: RequestState, streams: Streams, inputs: StepInputs
    ) -> tuple[RequestState, StepOutput]:
        reduced = inputs._replace(any_flags=GREEDY) if greedy else inputs
        return finish(cut.graph, layout, _computed(cut, layout, outer, streams), reduced, state)

    return closing


def make_forward_closing(cut: Cut, layout: Layout) -> ForwardClosing:
    """Return the part from the last layer to the results of a late step's first half."""

    def closing(outer: Leaves, streams: Streams, inputs: StepInputs) -> tuple[ChoiceInputs, tuple[Any, ...]]:
        return finish_forward(layout, _computed(cut, layout, outer, streams), inputs)

    return closing


def _computed(cut: Cut, layout: Layout, outer: Leaves, streams: Streams) -> ModelOutput:
    """Return the results of the last layer; features with hooks are not in programs made of parts."""
    model = cut.model(cut.outer, outer)
    return ModelOutput(model, model.end(streams[0]), (None,) * len(layout.compiled), streams[1:])


class LayeredProgram:
    """A program that runs its parts one after the other.

    To its callers it is like a compiled one: it has the same arguments and results, and donates the same arguments.
    """

    def __init__(
        self,
        cut: Cut,
        opening: CompiledProgram,
        layers: Sequence[CompiledProgram],
        greedy: CompiledProgram | None,
        rest: Callable[[], CompiledProgram],
        has_rest: Callable[[], bool],
        reads: Sequence[int] = (),
    ) -> None:
        """Put parts together. `greedy` is the closing of greedy steps without other options; `rest` returns the closing
        of all other steps, and `has_rest` is True if it is ready. `reads` are the layers of `Features.streams`.
        """
        self._cut, self._opening, self._layers, self._greedy, self._rest = cut, opening, layers, greedy, rest
        self._has_rest, self._reads = has_rest, reads

    def lacks(self, flags: int) -> bool:
        """True if a step with these flags would have to make the closing first."""
        return (self._greedy is None or bool(flags & ~int(GREEDY))) and not self._has_rest()

    def complete(self) -> None:
        """Make the closing that serves all steps, unless it is ready."""
        self._rest()

    def as_text(self) -> str:
        """Return the text of the opening and the layers, as XLA compiled them."""
        return "\n".join(part.as_text() or "" for part in (self._opening, *dict.fromkeys(self._layers)))

    def _run(
        self, leaves: Leaves, kv: paged.KV, last_token: Array, ints: Array, floats: Array, page_tables: Array | None
    ) -> tuple[tuple[Any, ...], paged.KV, Streams, OpeningOutput]:
        """Run the opening and the layers. Return the outer leaves, the pages, the closing's streams, and the opening's
        results."""
        cut = self._cut
        outer = tuple(leaves[index] for index in cut.outer)
        resident = () if page_tables is None else (page_tables,)
        opened: OpeningOutput = self._opening(outer, last_token, ints, floats, *resident)
        x, tables, paging, new_kv = opened.x, opened.tables, opened.inputs.paging, list(kv)
        wanted = self._reads
        streams = {0: x} if 0 in wanted else {}
        for number, (layer, indices, source) in enumerate(zip(self._layers, cut.layers, cut.sources, strict=True)):
            own, mine = opened.own[number : number + 1], tuple(leaves[index] for index in indices)
            new_kv[source], x = layer(mine, new_kv[source], x, tables, paging, *own)
            if number + 1 in wanted:
                streams[number + 1] = x
        return outer, tuple(new_kv), (x, *(streams[layer] for layer in wanted)), opened


class LayeredStep(LayeredProgram):
    """A step made of parts."""

    def __call__(
        self, leaves: Leaves, kv: paged.KV, state: RequestState, ints: Array, floats: Array, operands: Operands
    ) -> tuple[paged.KV, RequestState, StepOutput]:
        greedy = self._greedy if int(ints[0]) & ~int(GREEDY) == 0 else None
        closing = greedy or self._rest()  # before pages are donated, since it may have to compile
        outer, new_kv, streams, opened = self._run(leaves, kv, state.last_token, ints, floats, state.tables)
        state = state._replace(tables=opened.page_tables)
        new_state, output = closing(outer, state, streams, opened.inputs)
        return new_kv, new_state, output


class LayeredForward(LayeredProgram):
    """The first half of a late step, made of parts."""

    def __call__(
        self,
        leaves: Leaves,
        kv: paged.KV,
        last_token: Array,
        ints: Array,
        floats: Array,
        operands: Operands,
        page_tables: Array | None = None,
    ) -> tuple[Any, ...]:
        closing = self._rest()
        outer, new_kv, streams, opened = self._run(leaves, kv, last_token, ints, floats, page_tables)
        resident = () if opened.page_tables is None else (opened.page_tables,)
        return new_kv, *closing(outer, streams, opened.inputs), *resident


# With 5 layers a first text waits 0.5 s for parts and 1.7 s for whole programs. A layer as a part takes about as long
# to compile as 1.4 layers of a whole program.
MANY_LAYERS, ALIKE = 5, 3
Counted = Callable[[Callable[..., Any]], Callable[..., Any]]


class ProgramPart(NamedTuple):
    """One part of a program: its name in the store, and the function to trace with its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    donated: tuple[int, ...] = ()
    opens: tuple[int, int] | None = None  # the size (rows, tokens) of an opening; None for other parts


class LayeredPrograms:
    """A maker of programs in parts, which keeps the parts. All methods are thread-safe."""

    def __init__(self, recipes: Recipes, *, counted: Counted, compiled: Callable[[], None], store: LateStore) -> None:
        """Begin without parts. `counted` wraps traced functions, and `compiled` is called after each compilation."""
        self._recipes, self._counted, self._compiled, self._store = recipes, counted, compiled, store
        self._lock = threading.Lock()
        self._parts: dict[str, Future[CompiledProgram]] = {}  # ready, or being made
        self._opened: dict[tuple[int, int], OpeningOutput] = {}  # the shapes of openings' results, by size
        self._unsaved: list[tuple[str, CompiledProgram, float]] = []

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

    def stored(self, key: Key) -> bool:
        """True if all parts that a program begins with are stored."""
        return self.takes(key) and all(self._store.holds(part.name) for part in self._first(key))

    def takes(self, key: Key) -> TypeGuard[Bucket]:
        """True if the program can be made of parts: a step or its first half, on one device."""
        if not isinstance(key, Bucket) or key.span not in (StepSpan.ALL, StepSpan.FORWARD):
            return False
        inside = any(feature.part.inside for feature in self._recipes.layout(key).compiled)
        return not inside and not self._recipes.parts.divided

    def load(self, key: Bucket) -> LayeredStep | LayeredForward:
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

    def make(self, key: Bucket) -> LayeredStep | LayeredForward:
        """Return a program and load or compile its parts now. Raise any error of tracing or compiling."""
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

    def _assembled(self, key: Bucket, found: Mapping[str, CompiledProgram]) -> LayeredStep | LayeredForward:
        kind = LayeredForward if key.span is StepSpan.FORWARD else LayeredStep
        layers = [found[self._layer_name(key, layer)] for layer in self._cut.kinds]
        greedy = found.get(self._closing_name(key, greedy=True))
        rest, has_rest = functools.partial(self._closed, key), functools.partial(self._has_closed, key)
        reads = self._recipes.features.streams
        return kind(self._cut, found[self._opening_name(key)], layers, greedy, rest, has_rest, reads)

    def _has_closed(self, key: Bucket) -> bool:
        """True if the closing that serves all steps is ready."""
        future = self._parts.get(self._closing_name(key, greedy=False))
        return future is not None and future.done()

    def _closed(self, key: Bucket) -> CompiledProgram:
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

    def _made(self, parts: Iterable[ProgramPart]) -> dict[str, CompiledProgram]:
        """Trace one part after the other, as the GIL allows no more, and compile each in its own thread meanwhile."""
        futures: dict[str, Future[CompiledProgram]] = {}
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

    def _begin(self, part: ProgramPart, future: Future[CompiledProgram]) -> list[threading.Thread]:
        """Load a part, or start a thread that compiles it. Return the threads started, one or none."""
        start = time.perf_counter()
        try:
            try:
                future.set_result(self._store.load(part.name))
                return []
            except StoreError:
                lowered, options = self._traced(part).lower(), self._recipes.part_options
        except BaseException as error:
            self._give_up(part.name, future, error)
            raise

        def compile_it() -> None:
            try:
                with watching_hits() as hits:
                    compiled = compiled_with(lowered, options)
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

    def _claim(self, name: str) -> tuple[Future[CompiledProgram], bool]:
        """Return the future of a part, and True if the caller has to make the part."""
        with self._lock:
            is_new = name not in self._parts
            return self._parts.setdefault(name, Future()), is_new

    def _give_up(self, name: str, future: Future[CompiledProgram], error: BaseException) -> None:
        """Pass the error to the threads that wait for the part, and forget the part, so that it can be tried again."""
        with self._lock:
            self._parts.pop(name, None)
        future.set_exception(error)

    def _traced(self, part: ProgramPart) -> Any:
        traced = jax.jit(self._counted(part.function), donate_argnums=part.donated).trace(*part.arguments())
        if part.opens is not None:
            self._opened[part.opens] = _shapes_of(traced.out_info)
        return traced

    def _first(self, key: Bucket) -> Iterator[ProgramPart]:
        """Yield the parts that a program needs to begin, its layers early, since they take longest to compile."""
        yield self._opening(key)
        for layer in dict.fromkeys(self._cut.kinds):
            yield self._layer(key, layer)
        compiled = [feature for feature in self._recipes.layout(key).compiled if feature.part.variant]
        changes = any(feature.part.changing or feature.row.bits for feature in compiled)
        yield self._closing(key, greedy=not changes and not key.span)

    def _opening(self, key: Bucket) -> ProgramPart:
        recipes, layout = self._recipes, self._recipes.layout(key)
        function = make_opening(self._cut, layout, recipes.page_size)

        def arguments() -> tuple[Any, ...]:
            resident = (recipes.state.tables,) if recipes.resident else ()
            return self._outer, recipes.state.last_token, *recipes.upload(layout), *resident

        donated = (4,) if recipes.resident else ()
        return ProgramPart(self._opening_name(key), function, arguments, donated, opens=(key.rows, key.tokens))

    def _layer(self, key: Bucket, layer: int) -> ProgramPart:
        recipes, cut = self._recipes, self._cut
        function = make_layer(cut, layer, recipes.layout(key), implementation=recipes.config.kernels)

        def arguments() -> tuple[Any, ...]:
            shapes = self._shapes(key)
            leaves = tuple(cut.leaves[index] for index in cut.layers[layer])
            own = shapes.own[layer : layer + 1]
            return leaves, recipes.kv[cut.sources[layer]], shapes.x, shapes.tables, shapes.inputs.paging, *own

        return ProgramPart(self._layer_name(key, layer), function, arguments, (1,))

    def _closing(self, key: Bucket, *, greedy: bool) -> ProgramPart:
        recipes, cut, layout = self._recipes, self._cut, self._recipes.layout(key)
        name = self._closing_name(key, greedy=greedy)
        if key.span is StepSpan.FORWARD:

            def forwarded() -> tuple[Any, ...]:
                shapes = self._shapes(key)
                return self._outer, self._streams(shapes), shapes.inputs

            return ProgramPart(name, make_forward_closing(cut, layout), forwarded)
        function = make_closing(cut, layout, greedy=greedy)

        def arguments() -> tuple[Any, ...]:
            shapes = self._shapes(key)
            return self._outer, recipes.state_in(key), self._streams(shapes), shapes.inputs

        return ProgramPart(name, function, arguments, (1,))

    def _size(self, key: Bucket) -> str:
        """Return the first words of the names of parts that all programs of one size share."""
        return f"r{key.rows}t{key.tokens} parts"

    def _opening_name(self, key: Bucket) -> str:
        return f"{self._size(key)} opening"

    def _closing_name(self, key: Bucket, *, greedy: bool) -> str:
        return f"{key.name} parts {'greedy ' if greedy else ''}closing"

    def _layer_name(self, key: Bucket, layer: int) -> str:
        return f"{self._size(key)} layer {layer}"

    def _streams(self, shapes: OpeningOutput) -> tuple[Any, ...]:
        """Return the shapes of the streams that a closing gets."""
        return (shapes.x,) * (1 + len(self._recipes.features.streams))

    @property
    def _outer(self) -> tuple[Any, ...]:
        return tuple(self._cut.leaves[index] for index in self._cut.outer)

    def _shapes(self, key: Bucket) -> OpeningOutput:
        """Return the shapes of the opening's results; trace the opening for them if it was loaded."""
        size = (key.rows, key.tokens)
        if size not in self._opened:
            self._traced(self._opening(key))
        return self._opened[size]


_unknown: set[str] = set()  # options that this version of XLA does not take


def compiled_with(lowered: Any, wanted: Mapping[str, str | bool]) -> CompiledProgram:
    """Compile with the options that this version of XLA supports."""
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


def _shapes_of(found: OpeningOutput) -> OpeningOutput:
    shapes: OpeningOutput = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found)
    return shapes
