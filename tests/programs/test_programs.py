"""Programs are built from shapes alone, once, from any thread; failures surface."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.driving import TINY, tiny_config
from helpers.fakes import DictStore
from helpers.kernel_state import begin_with
from helpers.programs import session_features
from helpers.thorough import by_default
from rekindle._src.models.base import ALONE, abstract_model
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs import warming
from rekindle._src.programs.buckets import ADMIT, COPY, MEMORY, Bucket, Helper, Key, ProgramVariant
from rekindle._src.programs.partitioning import WHOLE, Recipe
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.user_functions import LogitsProcessor
from rekindle._src.programs.warming import Warming, needed_after_restart, warm
from rekindle.errors import CompileError, ConfigError
from rekindle_kernels import traits
from rekindle_kernels.native import python_handlers

CONFIG = config_from_hf(TINY)
GRAPH, LEAVES = abstract_model(CONFIG)
SMALL = Bucket(2, 0)
FILLS = ["scatter", "scatter32"] if traits().single_rows else ["scatter"]


def programs_of(*, processors: Sequence[LogitsProcessor] = (), **changes: Any) -> Programs:
    features = session_features(CONFIG, GRAPH, tiny_config(max_requests=2), ALONE, processors=processors)
    return Programs(CONFIG, GRAPH, LEAVES, tiny_config(max_requests=2), features=features, **changes)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """All programs of `programs_of()`, by their names."""
    store = DictStore()
    warm(programs_of(store=store))
    return store.kept


@pytest.fixture
def store(compiled: dict[str, Any]) -> DictStore:
    """A store that has all programs."""
    store = DictStore()
    store.kept.update(compiled)
    return store


def test_a_program_compiles_without_weights_and_only_once() -> None:
    programs = programs_of()
    assert not programs.ready(SMALL)
    first = programs.get(SMALL)
    assert programs.ready(SMALL)
    assert programs.get(SMALL) is first
    assert (programs.counts.traces, programs.counts.compilations) == (1, 1)


@pytest.mark.thorough
def test_steps_without_taps_are_the_programs_of_a_session_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of()
    monkeypatch.setattr("rekindle._src.capabilities.captures.plan.tap_features", lambda *_, **__: ())
    untapped = programs_of()
    assert len(programs.ledger.entries) > len(untapped.ledger.entries), "the patch took them away"
    for size in (untapped.lattice.ahead[0], untapped.lattice.ahead[-1]):
        assert programs.compiler.build(size).as_text() == untapped.compiler.build(size).as_text()


def test_threads_that_want_one_program_share_one_compilation() -> None:
    programs = programs_of()
    gate = threading.Barrier(4)

    def get() -> Any:
        gate.wait()
        return programs.get(SMALL)

    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(get) for _ in range(4)]]
    assert len({id(each) for each in found}) == 1
    assert programs.counts.compilations == 1


def test_a_program_beyond_the_lattice_is_refused() -> None:
    with pytest.raises(KeyError, match="r3t0 is not in the lattice"):
        programs_of().get(Bucket(3, 0))


def test_an_error_while_compiling_surfaces_with_its_cause_and_can_be_tried_again() -> None:
    broken = [True]

    def function(logits: Any, context: Any) -> Any:
        if broken[0]:
            raise RuntimeError("no such op")
        return logits

    programs = programs_of(processors=[LogitsProcessor(function, "mine")])
    with pytest.raises(CompileError, match=r"r2t0\+processors .*no such op") as caught:
        programs.get(Bucket(2, 0, ProgramVariant.PROCESSORS))
    assert isinstance(caught.value.__cause__, RuntimeError)
    broken[0] = False
    assert programs.get(Bucket(2, 0, ProgramVariant.PROCESSORS)) is not None


def test_a_processor_that_changes_the_shape_is_named() -> None:
    programs = programs_of(processors=[LogitsProcessor(lambda logits, context: logits[:, :-1], "shorter")])
    with pytest.raises(CompileError, match="shorter"):
        programs.get(Bucket(2, 0, ProgramVariant.PROCESSORS))


@pytest.mark.parametrize("names", [("a", "a"), tuple("abcdefghijklmnopq")])
def test_processors_are_checked(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="processors"):
        programs_of(processors=[LogitsProcessor(lambda logits, context: logits, name) for name in names])


@pytest.mark.parametrize("changes", [{"function": 3}, {"name": ""}, {"version": 2}])
def test_a_processor_is_validated(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        LogitsProcessor(**{"function": jnp.negative, "name": "n", **changes})


def test_a_session_may_close_while_its_program_is_stored() -> None:
    class Closing(DictStore):
        def save(self, name: str, program: Any, seconds: float) -> None:
            programs.close()

    programs = programs_of(store=Closing())
    assert programs.get(MEMORY) is not None
    assert not programs.ready(MEMORY)


def test_what_the_store_has_is_neither_traced_nor_compiled() -> None:
    store = DictStore()
    first = programs_of(store=store)
    warm(first, [SMALL, ADMIT])
    assert sorted(store.kept) == ["admit", "r2t0"]
    seen: list[str] = []
    second = programs_of(store=store)
    warm(second, [ADMIT, SMALL], progress=lambda warmed: seen.append(warmed.program.name), workers=1)
    assert seen == ["admit", "r2t0"]
    assert (second.counts.traces, second.counts.compilations) == (0, 0)
    assert [(record.name, record.origin, record.why) for record in first.manifest()] == [
        ("r2t0", "compiled", "not stored yet"),
        ("admit", "compiled", "not stored yet"),
    ]
    assert {record.origin for record in second.manifest()} == {"loaded"}


def test_moves_are_compiled_only_where_pages_can_leave() -> None:
    names = {key.name for key in programs_of().keys if isinstance(key, Helper)}
    bare = Programs(CONFIG, GRAPH, LEAVES, tiny_config(host_memory=0, disk_memory=0))
    assert names - {key.name for key in bare.keys} == {"gather", *FILLS}


def test_copies_are_compiled_only_where_pages_are_shared_in_part() -> None:
    for options, there in (({"page_size": 16}, True), ({"page_size": 8}, False), ({"prefix_cache": False}, False)):
        programs = Programs(CONFIG, GRAPH, LEAVES, tiny_config(**{"page_size": 16, **options}))
        assert (COPY in programs.keys) == there, options


@pytest.mark.thorough
def test_warming_in_the_background_gets_everything_and_can_be_stopped(store: DictStore) -> None:
    programs = programs_of(store=store)
    background = Warming(programs, "background")
    background.opened()
    background.stop(timeout=60)
    ready = len(programs.manifest())
    warm(programs)
    assert ready <= len(programs.manifest()) == len(programs.keys)
    assert programs.counts.compilations == 0


def test_all_programs_are_ready_when_the_session_is_open(store: DictStore) -> None:
    del store.kept["r2t32"]  # is compiled
    programs = programs_of(store=store)
    warming = Warming(programs, "all")
    warming.opened()
    assert len(programs.manifest()) == len(programs.keys)
    assert programs.counts.compilations == 1


@pytest.mark.thorough
def test_a_program_that_has_to_be_ready_and_does_not_compile_fails_the_opening() -> None:
    programs = programs_of(processors=[LogitsProcessor(lambda logits, context: logits[:, :-1], "shorter")])
    with pytest.raises(CompileError, match="shorter"):
        Warming(programs, "all").opened()
    background = Warming(programs, "background")
    background.opened()
    background.stop(timeout=60)


@pytest.mark.parametrize("restoring", by_default([False, True]))
def test_a_lazy_session_loads_what_its_first_request_needs_and_compiles_nothing(
    restoring: bool, store: DictStore
) -> None:
    programs = programs_of(store=store)
    Warming(programs, "lazy", restoring=restoring).stop(timeout=60)  # before the weights were read
    decode = f"r{min(programs.lattice.ahead).rows}t0"
    del store.kept[decode]
    again = programs_of(store=store)
    lazy = Warming(again, "lazy", restoring=restoring)
    lazy._thread.join()
    lazy.opened()
    assert {record.name for record in again.manifest()} == {"r2t32", *(FILLS if restoring else [])}
    assert again.counts.compilations == programs.counts.compilations == 0


@pytest.mark.thorough
def test_a_lazy_session_of_many_layers_compiles_for_a_first_text_before_it_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warming, "is_deep", lambda programs: True)
    monkeypatch.setattr(warming, "build_kernels", lambda names: None)
    monkeypatch.setattr(Recipes, "kernels", lambda self: ["norm"])
    store = DictStore()
    programs = programs_of(store=store)
    lazy = Warming(programs, "lazy")
    lazy._thread.join()
    needed = warming.first_needed(programs, restoring=False)[:2]
    assert {record.name for record in programs.manifest()} == {key.name for key in needed}
    assert {record.origin for record in programs.manifest()} == {"compiled"}
    again = programs_of(store=store)
    lazy = Warming(again, "lazy")
    lazy._thread.join()
    lazy.opened()
    assert again.counts.compilations == 0


@pytest.mark.parametrize("mode", by_default(["lazy", "background"]))
def test_a_session_that_restores_opens_with_the_programs_of_its_first_request(mode: str, store: DictStore) -> None:
    """Even where loading them has hardly begun: two threads share it, from both ends."""
    programs = programs_of(store=store)
    names = [key.name for key in needed_after_restart(programs)]
    begun, go = threading.Event(), threading.Event()

    def slowly(name: str) -> Any:
        if name == names[0]:
            begun.set()
            assert go.wait(60)
        return DictStore.load(store, name)

    store.load = slowly  # type: ignore[method-assign]
    going = Warming(programs, mode, restoring=True)
    assert begun.wait(60)
    ready: list[Key] = []
    opening = threading.Thread(target=lambda: ready.extend(going.restorable()))
    opening.start()
    while len(programs.manifest()) < 2:
        assert opening.is_alive()
    go.set()
    opening.join(60)
    assert [key.name for key in ready] == names
    going.opened()
    going.stop(60)
    assert programs.counts.compilations == 0


def test_a_restart_needs_what_restores_pages_the_smallest_prefill_and_decoding() -> None:
    programs = programs_of(store=DictStore())
    decode = f"r{min(programs.lattice.ahead).rows}t0"
    assert [key.name for key in needed_after_restart(programs)] == [*FILLS, "r2t32", decode]
    assert needed_after_restart(programs_of()) == [], "nothing outlives the process"
    bare = Programs(CONFIG, GRAPH, LEAVES, tiny_config(host_memory=0, disk_memory=0), store=DictStore())
    assert needed_after_restart(bare) == [], "no page does"


def test_a_program_that_does_not_compile_ends_the_warming() -> None:
    programs = programs_of(processors=[LogitsProcessor(lambda logits, context: logits[:, :-1], "shorter")])
    with pytest.raises(CompileError, match="shorter"):
        warm(programs, [Bucket(2, 0, ProgramVariant.PROCESSORS)])


@pytest.mark.thorough
def test_an_interpreter_that_exits_while_programs_warm_ends_cleanly() -> None:
    """A daemon thread inside XLA would abort the process."""
    code = (
        "from test_programs import programs_of\n"
        "from rekindle._src.programs.warming import Warming\n"
        "Warming(programs_of(), 'background')"
    )
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert "FATAL" not in done.stderr


@pytest.mark.skipif(not python_handlers.has_zeros() or jax.default_backend() != "cpu", reason="has no kernel of zeros")
def test_memory_is_made_without_the_kernel_that_xla_would_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_with(monkeypatch)
    programs = programs_of()
    assert "rekindle_zeros" in programs.get(MEMORY).as_text()

    def refused() -> Any:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: this version is not supported any more")

    programs.ledger.ready[MEMORY] = refused
    made = jax.tree.leaves(programs.memory())
    assert made and not any(np.asarray(leaf.astype(jnp.float32)).any() for leaf in made)
    assert "rekindle_zeros" not in programs.get(MEMORY).as_text()
    programs.ledger.ready[MEMORY] = refused
    with pytest.raises(jax.errors.JaxRuntimeError):  # nothing is left that could be given up
        programs.memory()


def test_memory_that_there_is_not_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    state, programs = begin_with(monkeypatch), programs_of()
    programs.get(MEMORY)

    def exhausted() -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    programs.ledger.ready[MEMORY] = exhausted
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        programs.memory()
    assert not state.failed


def test_jax_deprecating_the_gpu_kernels_stops_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of()

    def saying(text: str) -> Any:
        def traced() -> Any:
            warnings.warn(text, DeprecationWarning, stacklevel=1)
            return jnp.zeros(1)

        return lambda self, key: Recipe(traced, (), (), (), WHOLE)

    monkeypatch.setattr(Recipes, "recipe", saying("The Pallas Triton backend is deprecated and will be removed"))
    programs.compiler.build(MEMORY)
    monkeypatch.setattr(Recipes, "recipe", saying("something else is deprecated"))
    with pytest.raises(DeprecationWarning, match="something else"):
        programs.compiler.build(MEMORY)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int8-int4"])
def test_pages_are_copied_in_place_in_every_layer(kv_dtype: str) -> None:
    programs = Programs(CONFIG, GRAPH, LEAVES, tiny_config(kv_dtype=kv_dtype, page_size=16))
    program, draw = programs.get(COPY), np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(programs.recipes.kv)
    before = [(draw.random(leaf.shape) * 99).astype(leaf.dtype) for leaf in leaves]
    sources, ids = np.array([5, 5, 2, 0], np.int32), np.array([7, 9, 30, 0], np.int32)
    memory = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in before])
    for leaf, array in zip(before, jax.tree.leaves(program(memory, sources, ids)), strict=True):
        leaf[ids] = leaf[sources]
        np.testing.assert_array_equal(array, leaf)
    assert program.memory_analysis().alias_size_in_bytes >= sum(leaf.nbytes for leaf in before)
