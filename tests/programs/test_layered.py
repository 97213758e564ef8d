"""Steps made of parts give what whole steps give, and compile each kind of layer once."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.checkpoints import CASES, ONE_EACH, case, one_each
from helpers.driving import Driver, tiny_config, tiny_model
from helpers.fakes import DictStore
from helpers.programs import session_features
from helpers.sessions import engine_of, eventually
from helpers.small import opening, plain, prompt
from helpers.thorough import by_default, one_event_loop  # noqa: F401  the fixture
from rekindle._src.core.sampling import Sampling
from rekindle._src.execution.runner import Runner
from rekindle._src.models.base import ALONE, LoadedModel, abstract_model, merge
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs import compiling, layered, warming
from rekindle._src.programs.buckets import ADMIT, COPY, PLAIN_VARIANT, Bucket, ProgramVariant, StepSpan
from rekindle._src.programs.compiling import ProgramCompiler
from rekindle._src.programs.layered import Cut, LayeredForward, LayeredStep
from rekindle._src.programs.ledger import Form
from rekindle._src.programs.packing import Constants, Upload
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.recipes import LEAN, Recipes
from rekindle._src.programs.store import ExecutableStore, LateStore, ProgramStore
from rekindle._src.programs.user_functions import LogitsProcessor
from rekindle._src.programs.warming import Warming, first_needed, warm
from rekindle.errors import CompileError

MODEL = tiny_model()
DECODE, PREFILL = Bucket(2, 0), Bucket(2, 32)
# The one whose layers are least alike.
FEW = ("gpt2-odd-options",)
KINDS = {
    "llama": (0, 0),
    "gpt2": (0, 0),
    "gpt2-odd-options": (0, 1),  # each layer has a scale of its own
    "gemma2": (0, 1),
    "gemma3": (0, 0, 2),
    "mixtral": (0, 0),
    "qwen2-window": (0, 1),
    "qwen3-moe-dense-layer": (0, 1),
    "smollm3": (0, 0, 0, 3),
}


def programs_of(model: LoadedModel = MODEL, *, processors: Sequence[LogitsProcessor] = (), **changes: Any) -> Programs:
    features = session_features(model.config, model.graph, tiny_config(), ALONE, processors=processors)
    programs = Programs(model.config, model.graph, model.leaves, tiny_config(), features=features, **changes)
    programs.ledger.least = Form.PARTS  # not `settle_for`, after which programs are stored later
    return programs


def whole_programs_of(model: LoadedModel = MODEL) -> Programs:
    return Programs(model.config, model.graph, model.leaves, tiny_config())


def smallest_guided(programs: Programs) -> Bucket:
    """The smallest step with guided rows; native kernels give one row a program of its own."""
    return programs.lattice_for("", late=True)[0]


def many_layers(monkeypatch: pytest.MonkeyPatch, peace: float = 60.0) -> None:
    """Sessions of the small model begin in parts, which serve for so many seconds."""
    monkeypatch.setattr(warming, "seconds_of_parts", lambda programs, precompile: peace)
    monkeypatch.setattr(LateStore, "late", property(lambda self: False, lambda self, late: None), raising=False)
    monkeypatch.setattr(layered, "MANY_LAYERS", 2)
    monkeypatch.setattr(layered, "ALIKE", 1)
    monkeypatch.setattr(Recipes, "kernels", lambda self: ["some"])
    monkeypatch.setattr(warming, "build_kernels", lambda names: None)


def written(model: LoadedModel, programs: Programs, **options: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, of prompts that fill a part of a bucket, one that exceeds it, and a batch."""
    runner = Runner(model, programs.config, programs=programs)
    driver = Driver(runner)
    draw = np.random.default_rng(0)
    try:
        sampling = Sampling(max_tokens=9, seed=7, **options)
        lives = [driver.add(draw.integers(3, 150, length).tolist(), sampling) for length in (5, 41)]
        driver.finish(lives, chunk=13)
    finally:
        runner.close()
    assert [len(live.outputs) for live in lives] == [9, 9]
    probabilities = [found.logprob for live in lives for found in live.logprobs if found is not None]
    return [token for live in lives for token in live.outputs], probabilities


def marks_of(name: str) -> Any:
    """Some run by default, two that have differed once in CI, and the others weekly."""
    return () if name in FEW else pytest.mark.thorough if name in ("qwen3.5", "deepseek-v2") else pytest.mark.slow


def optimised(name: str) -> Any:
    """The case compiled as in a session of a user: the suite's level neither joins nor reorders anything."""
    mark = pytest.mark.thorough if name in ("qwen3.5", "lfm2") else pytest.mark.slow
    return pytest.param(name, "3", id=f"{name}-optimised", marks=mark)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *(pytest.param(name, None, id=name, marks=marks_of(name)) for name in CASES),
        *map(optimised, ONE_EACH.values()),
    ],
)
def test_every_family_writes_what_whole_programs_write(
    name: str, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level is not None:
        monkeypatch.setattr(Recipes, "step_options", {**LEAN, "xla_backend_optimization_level": level})
    model = case(name)
    programs = programs_of(model)
    assert isinstance(programs.get(DECODE), LayeredStep) and isinstance(programs.get(PREFILL), LayeredStep)
    parts = written(model, programs), written(model, programs, temperature=0.9, logprobs=2)
    programs = whole_programs_of(model)
    assert not isinstance(programs.get(DECODE), LayeredStep)
    whole = written(model, programs), written(model, programs, temperature=0.9, logprobs=2)
    assert parts == whole, "to the last bit"


def test_inputs_of_the_first_layer_are_bit_equal_in_a_separate_program() -> None:
    """XLA:CPU makes one operation of a product and a sum in one program, and rounds both where they are in two."""
    model = case("gemma3")
    graph = dataclasses.replace(model.graph, config=dataclasses.replace(model.config, embed_scale=640**0.5))
    tokens = np.arange(3, 99)
    added = np.random.default_rng(0).standard_normal((len(tokens), model.config.hidden_size), np.float32)

    def begin(leaves: Any) -> Any:
        return merge(graph, leaves).begin(tokens, tokens)[0]

    def run(function: Any, *arguments: Any) -> np.ndarray:
        optimised = {"xla_backend_optimization_level": "3"}  # the suite's level joins nothing
        return np.asarray(jax.jit(function).lower(*arguments).compile(compiler_options=optimised)(*arguments))

    joined = run(lambda leaves, other: begin(leaves) + other, model.leaves, added)
    np.testing.assert_array_equal(joined, run(begin, model.leaves) + added)


@pytest.mark.parametrize("name", by_default(one_each(*KINDS), lambda name: name in list(KINDS)))
def test_layers_of_one_kind_are_traced_alike(name: str) -> None:
    model = case(name)
    made = programs_of(model)._layered
    cut = made._cut
    assert cut.kinds == KINDS.get(name, cut.kinds)
    assert sorted([*cut.outer, *(index for own in cut.layers for index in own)]) == [*range(len(model.leaves))]

    def traced(layer: int) -> str:
        part = made._layer(DECODE, layer)
        closed = jax.make_jaxpr(part.function)(*part.arguments())
        return f"{closed} {[np.asarray(constant).tolist() for constant in closed.consts]}"

    texts = [traced(layer) for layer in range(len(cut.kinds))]
    assert all(texts[layer] == texts[kind] for layer, kind in enumerate(cut.kinds))
    assert len({*texts}) == len({*cut.kinds}), "and those of two kinds are not"


def test_layers_that_are_quantised_in_two_ways_are_not_alike() -> None:
    config = config_from_hf(CASES["llama"] | {"num_hidden_layers": 3})
    kinds = [(f"layers.{layer}.mlp.down", kind) for layer, kind in enumerate(("int8", "int8-weight", "int8"))]
    graph, leaves = abstract_model(config, kinds=tuple(kinds))
    assert Cut.of(graph, leaves).kinds == (0, 1, 0)


@pytest.mark.thorough
def test_pages_and_state_are_donated_and_all_options_apply() -> None:
    sevens = LogitsProcessor(lambda logits, context: logits.at[:, 7].add(1e6), "sevens")
    programs = programs_of(processors=[sevens])
    kv, state, _ = programs.memory()
    step, upload = programs.get(DECODE), [np.zeros(leaf.shape, leaf.dtype) for leaf in _upload(programs, DECODE)]
    new_kv, new_state, output = step(MODEL.leaves, kv, state, *upload, programs.features.operands(PLAIN_VARIANT))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((kv, state.last_token)))
    assert [leaf.shape for leaf in jax.tree.leaves((new_kv, new_state))] == [
        leaf.shape for leaf in jax.tree.leaves((programs.recipes.kv, programs.recipes.state))
    ]
    assert output.rows.shape[0] == 2
    tokens, _ = written(MODEL, programs, processors=("sevens",))
    assert {*tokens} == {7}


def _upload(programs: Programs, key: Bucket) -> tuple[Any, Any]:
    return programs.recipes.upload(programs.recipes.layout(key))


@pytest.mark.thorough
def test_greedy_steps_need_a_small_part_of_what_comes_after_the_layers() -> None:
    store = DictStore()
    programs = programs_of(store=store)
    programs.get(DECODE)
    first = ["r2t0 parts greedy closing", "r2t0 parts layer 0", "r2t0 parts opening"]
    assert sorted(store.kept) == first and programs.counts.compilations == 3
    written(MODEL, programs)
    assert "r2t0 parts closing" not in store.kept
    written(MODEL, programs, temperature=0.5)
    rest = {"r2t0 parts closing", "r2t32 parts closing"}
    assert rest <= {*store.kept}
    before = programs.counts.compilations
    programs.complete(DECODE)
    assert programs.counts.compilations == before
    again = programs_of(store=store)
    assert written(MODEL, again, temperature=0.5) == written(MODEL, programs, temperature=0.5)
    assert (again.counts.compilations, again.counts.traces) == (0, 0)


def test_what_a_store_lacks_is_compiled_and_nothing_else() -> None:
    store = DictStore()
    programs_of(store=store).get(DECODE)
    del store.kept["r2t0 parts layer 0"]
    programs = programs_of(store=store)
    assert not programs.load(DECODE)
    programs.get(DECODE)
    assert programs.counts.compilations == 1 and "r2t0 parts layer 0" in store.kept


@pytest.mark.thorough
def test_processors_were_traced_if_a_part_with_them_is_stored() -> None:
    """An opening session does without tracing them then."""
    store, sevens = DictStore(), [LogitsProcessor(lambda logits, context: logits.at[:, 7].add(1e6), "sevens")]
    plain, processed = (programs_of(store=store, processors=sevens) for _ in range(2))
    plain.get(DECODE)
    assert not plain.traced_processors
    processed.get(dataclasses.replace(DECODE, variants=ProgramVariant.PROCESSORS))
    assert plain.traced_processors and "r2t0+processors parts closing" in store.kept
    assert not programs_of(store=store).traced_processors, "a session without any"


@pytest.mark.thorough
def test_parts_go_through_a_folder(tmp_path: Path) -> None:
    def stored() -> Programs:
        return programs_of(store=ProgramStore(ExecutableStore(tmp_path / "programs"), "llama", "identity"))

    first = stored()
    tokens = written(MODEL, first)
    forward, _ = smallest_guided(first).halves
    assert isinstance(first.get(forward), LayeredForward)
    second = stored()
    assert written(MODEL, second) == tokens
    assert second.load(forward) and second.counts.compilations == 0


def test_programs_of_one_size_share_their_layers() -> None:
    programs = programs_of()
    size = smallest_guided(programs)
    decode = dataclasses.replace(size, span=StepSpan.ALL)
    gate = threading.Barrier(3)

    def get(key: Bucket) -> Any:
        gate.wait()
        return programs.get(key)

    with ThreadPoolExecutor(3) as pool:
        step, forward, _ = pool.map(get, (decode, *size.halves))
    assert step._layers == forward._layers and step._opening is forward._opening
    assert programs.counts.compilations == 5, "an opening, a layer, two closings, and the choice, which has no layers"


@pytest.mark.thorough
def test_halves_and_pooling_programs_are_made_of_parts_too() -> None:
    """For a step with a row that decodes and one that prefills, they give what whole programs give.

    Of empty rows no logits are computed, and their tokens go to the scratch slot.
    """
    pooling, forward = Bucket(2, 32, ProgramVariant.POOLING), Bucket(4, 32, span=StepSpan.FORWARD)
    programs = programs_of()
    runner = Runner(MODEL, programs.config, programs=programs)
    driver = Driver(runner)
    lives = [driver.add([5, 9, 7, 11, 3][:length], Sampling(max_tokens=4)) for length in (3, 5)]
    driver.step([(lives[0], None)])
    plan = driver.plan([(live, None) for live in lives])
    runner.close()
    constants = Constants(programs.config.max_requests, programs.features)
    for row in plan.rows:
        constants.put(row)

    def results(programs: Programs) -> list[Any]:
        found = []
        for key in (forward, pooling):
            upload = Upload(programs.recipes.layout(key))
            upload.pack(plan, constants)
            kv, state, _ = programs.memory()
            given = state.last_token if key.span else state
            operands = programs.features.operands(key.variants)
            kv, *rest = programs.get(key)(MODEL.leaves, kv, given, upload.ints, upload.floats, operands)
            rows = np.array([0, upload.layout.rows])  # one that decodes, one that prefills
            if key.span:
                scores, (prompt, *_) = rest
                found += [kv, scores.logits[rows], scores.last[rows], prompt]
            else:
                state, output = rest
                slots = [leaf[: upload.layout.slots] for leaf in jax.tree.leaves(state)]
                prompt, pooled, *_ = output.extra
                found += [kv, slots, output.rows[rows], prompt, pooled[:, :1]]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]

    parts = results(programs)
    whole = Programs(MODEL.config, MODEL.graph, MODEL.leaves, programs.config, features=programs.features)
    for left, right in zip(parts, results(whole), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def test_a_part_that_fails_is_named_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layered.make_layer

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such op")

    programs = programs_of()
    monkeypatch.setattr(layered, "make_layer", lambda *args, **options: broken)
    with pytest.raises(CompileError, match=r"r2t0 of llama .*no such op"):
        programs.get(DECODE)
    monkeypatch.setattr(layered, "make_layer", made)
    program = programs.get(DECODE)
    monkeypatch.setattr(layered, "make_closing", lambda *args, **options: broken)
    with pytest.raises(CompileError, match=r"r2t0 parts closing .*no such op"):
        program.complete()


@pytest.mark.parametrize("mode", by_default(["lazy", "background"]))
def test_what_the_first_text_needs_is_made_at_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "lazy" nothing is made that greedy steps do without."""
    many_layers(monkeypatch)
    store = DictStore()
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(), store=store)
    going = Warming(programs, mode)
    going.opened()
    decode = first_needed(programs, restoring=False)[1]
    rest = {f"{decode.name} parts closing", "r2t32 parts closing"}
    wanted = rest if mode == "background" else {name.replace("parts", "parts greedy") for name in rest}
    pause = threading.Event()
    for _ in range(600):
        if wanted <= {*store.kept}:
            break
        pause.wait(0.1)
    assert going.in_peace and isinstance(programs.get(decode), LayeredStep)
    assert {record.name for record in programs.manifest()} == {decode.name, "r2t32"}
    going.stop(60)
    assert wanted <= {*store.kept} and (mode == "background") == (rest <= {*store.kept})
    # A second process finds all of it.
    again = programs_of(store=store)
    warm(again, [PREFILL, decode])
    assert again.counts.compilations == 0


def drawn_text(programs: Programs, length: int) -> Runner:
    """A runner that has drawn a text after a prompt of so many tokens."""
    runner = Runner(MODEL, programs.config, programs=programs)
    driver = Driver(runner)
    try:
        live = driver.add([*range(3, 3 + length)], Sampling(max_tokens=4, seed=7, temperature=0.8, top_k=40))
        driver.finish([live], chunk=64)
    finally:
        runner.close()
    return runner


@pytest.mark.thorough
def test_a_first_message_waits_for_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat's prompt is longer than a first text, and its tokens are drawn: 12.9 s of 14 were spent on its program."""
    many_layers(monkeypatch)
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(max_tokens_per_step=128))
    going = Warming(programs, "lazy")
    try:
        going.opened()
        going.expect(lambda: 40, drawn=True)
        going.expect(lambda: 1 / 0, drawn=True)  # type: ignore[arg-type, return-value]
        assert going._expecting is not None
        going._expecting.join(60)
        compiled = programs.counts.compilations
        runner = drawn_text(programs, 40)
        steps = {span.program for span in runner.program_wait.since(0.0)} - {"admit"}
        assert not steps, "a step waited for its program"
        assert programs.counts.compilations - compiled <= 1
    finally:
        going.stop(60)


@pytest.mark.thorough
def test_a_part_that_the_first_drawn_step_compiles_counts_as_a_wait() -> None:
    programs = programs_of()
    first = first_needed(programs, restoring=False)[:2]
    for key in first:
        programs.get(key)
    waits = drawn_text(programs, 5).program_wait.since(0.0)
    assert {key.name for key in first} <= {wait.program for wait in waits}
    assert drawn_text(programs, 5).program_wait.since(0.0) == ()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "value"), [("xla_never_heard_of_it", True), ("xla_backend_optimization_level", "much")]
)
def test_options_that_xla_does_not_take_are_left_out(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of XLA differ in what they know: the parts compile with what is left."""
    monkeypatch.setattr(Recipes, "step_options", {**LEAN, name: value})
    monkeypatch.setattr(layered, "_unknown", set())
    assert isinstance(programs_of().get(DECODE), LayeredStep)
    assert name in layered._unknown


@pytest.mark.thorough
def test_the_first_text_waits_for_the_program_of_its_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the program that decodes is there, tokens come from that one."""
    made, release = threading.Event(), threading.Event()
    make = layered.LayeredPrograms.make

    def slowly(self: layered.LayeredPrograms, key: Bucket) -> Any:
        if key.tokens == 0:
            made.set()
            assert release.wait(60)
        return make(self, key)

    monkeypatch.setattr(layered.LayeredPrograms, "make", slowly)
    many_layers(monkeypatch)
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
    decode = first_needed(programs, restoring=False)[1]
    going = Warming(programs, "lazy")
    runner = Runner(MODEL, programs.config, programs=programs)
    driver = Driver(runner)
    try:
        assert made.wait(60) and programs.ready(PREFILL) and programs.ledger.soon(decode)
        live = driver.add([5, 9, 7], Sampling(max_tokens=4))
        for _ in range(2):
            driver.step([(live, None)])
        assert runner.statistics().programs == {"r2t32": 2}
        release.set()
        programs.get(decode)
        driver.step([(live, None)])
        assert runner.statistics().programs == {"r2t32": 2, decode.name: 1}
    finally:
        release.set()
        going.stop(60)
        runner.close()
    assert not programs.ledger.soon(decode)
    fitting = programs_of()
    runner = Runner(MODEL, fitting.config, programs=fitting)
    assert live.outputs == Driver(runner).solo([5, 9, 7], Sampling(max_tokens=3)).outputs
    runner.close()


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["lazy", pytest.param("background", marks=pytest.mark.slow)])
def test_a_first_text_is_made_of_parts_where_kernels_are_there_too(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole programs replace them after a moment, and are found by the next process."""
    many_layers(monkeypatch, 0.5)

    def begun(store: DictStore) -> tuple[Programs, Warming]:
        programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(), store=store)
        warmed = Warming(programs, mode)
        warmed.opened()
        return programs, warmed

    store = DictStore()
    programs, going = begun(store)
    first = first_needed(programs, restoring=False)[:2]
    assert all(isinstance(programs.get(key), LayeredStep) for key in first)
    before = written(MODEL, programs)
    pause = threading.Event()
    for _ in range(600):
        if not programs.ledger.provisional:  # a whole program serves a moment before that, while it is being stored
            break
        pause.wait(0.1)
    assert not any(isinstance(programs.get(key), LayeredStep) for key in first) and not programs.ledger.provisional
    assert written(MODEL, programs) == before
    going.stop(60)
    assert {key.name for key in first} <= {*store.kept} and f"{first[0].name} parts layer 0" in store.kept
    # Another process has whole programs at once.
    programs, going = begun(store)
    assert not any(isinstance(programs.get(key), LayeredStep) for key in first) and programs.counts.traces == 0
    going.stop(60)
    # One whose predecessor ended too soon finds its parts, or parts of one program and the whole of another.
    monkeypatch.setattr(Programs, "replace_parts", lambda self, stopped, **options: None)
    parts = {name: program for name, program in store.kept.items() if " parts " in name}
    for whole in ({}, {first[1].name: store.kept[first[1].name]}):
        store.kept = parts | whole
        programs, going = begun(store)
        in_parts = [isinstance(programs.get(key), LayeredStep) for key in first]
        assert in_parts == [True, not whole] and programs.counts.compilations == 0
        going.stop(60)


@pytest.mark.thorough
def test_a_short_process_that_finds_parts_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole programs are for those that go on: one short process after the other uses the parts of the first."""
    many_layers(monkeypatch)
    store, seen = DictStore(), []
    for _ in range(3):
        programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(), store=store)
        going = Warming(programs, "lazy")
        going.opened()
        first = first_needed(programs, restoring=False)[:2]
        assert all(isinstance(programs.get(key), LayeredStep) for key in first)
        written(MODEL, programs)
        assert going.in_peace
        going.stop(60)
        assert not going._thread.is_alive() and not {key.name for key in first} & {*store.kept}
        seen.append((programs.counts.traces, programs.counts.compilations, len(store.kept)))
    assert seen[0][1] > 0 and seen[1:] == [(0, 0, seen[0][2])] * 2


@pytest.mark.thorough
def test_whole_programs_wait_for_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is still reading its weights has better uses for the cores."""
    many_layers(monkeypatch, 0.0)
    replaced = threading.Event()
    monkeypatch.setattr(Programs, "replace_parts", lambda self, stopped, **options: replaced.set())
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
    going = Warming(programs, "lazy")
    try:
        assert all(isinstance(programs.get(key), LayeredStep) for key in first_needed(programs, restoring=False)[:2])
        assert not replaced.wait(0.3)
        going.opened()
        assert replaced.wait(60)
    finally:
        going.stop(60)


@pytest.mark.thorough
def test_the_program_that_decodes_waits_for_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and the vocabulary, which a first text needs, have the cores. What takes long does not stop it."""
    many_layers(monkeypatch)
    monkeypatch.setattr(warming, "FOR_OPENING", 60.0)
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
    prefill, decode = first_needed(programs, restoring=False)[:2]
    going = Warming(programs, "lazy")
    try:
        programs.get(prefill)
        assert not threading.Event().wait(0.3) and not programs.ready(decode)
        going.opened()
        eventually(lambda: programs.ready(decode))
    finally:
        going.stop(60)
    monkeypatch.setattr(warming, "FOR_OPENING", 0.01)
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
    going = Warming(programs, "lazy")
    eventually(lambda: programs.ready(decode))
    going.stop(60)


def test_a_gpus_first_programs_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep both cores busy for seconds, so that the one that decodes does not wait for the opening; and whole ones
    wait longer where a process may want one text alone."""
    many_layers(monkeypatch)
    monkeypatch.setattr(warming, "FOR_OPENING", 60.0)
    monkeypatch.setattr(warming, "current_platform", lambda: "gpu")
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
    decode = first_needed(programs, restoring=False)[1]
    going = Warming(programs, "lazy")
    try:
        eventually(lambda: programs.ready(decode))
    finally:
        going.stop(60)
    monkeypatch.undo()
    monkeypatch.setattr(warming, "is_deep", lambda programs: True)
    soon = warming.seconds_of_parts(programs, "lazy")
    monkeypatch.setattr(warming, "current_platform", lambda: "gpu")
    assert warming.seconds_of_parts(programs, "background") == soon < warming.seconds_of_parts(programs, "lazy")


@pytest.mark.thorough
def test_few_layers_are_compiled_whole_where_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recipes, "kernels", lambda self: ["some"])
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
    first = first_needed(programs, restoring=False)[:2]
    assert not programs.quicker_in_parts(first)
    monkeypatch.setattr(layered, "MANY_LAYERS", 2)
    assert not programs.quicker_in_parts(first), "three of a kind are worth it"
    monkeypatch.setattr(layered, "ALIKE", 2)
    assert programs.quicker_in_parts(first)
    monkeypatch.setattr(Recipes, "kernels", lambda self: [])
    assert not programs.quicker_in_parts(first)


@pytest.mark.thorough
def test_one_that_is_being_made_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    make_one = layered.LayeredPrograms.make

    def slowly(self: layered.LayeredPrograms, key: Bucket) -> Any:
        begun.set()
        assert go.wait(60)
        return make_one(self, key)

    monkeypatch.setattr(layered.LayeredPrograms, "make", slowly)
    programs = programs_of()
    making = threading.Thread(target=programs.get, args=[DECODE])
    making.start()
    assert begun.wait(60)
    replacing = threading.Thread(target=programs.replace_parts)
    replacing.start()
    go.set()
    making.join()
    replacing.join()
    assert not isinstance(programs.get(DECODE), LayeredStep)


def test_two_threads_that_replace_a_program_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks at its form, and then takes the lock to make it."""
    programs, made = programs_of(), []
    programs.get(DECODE)
    entry, compile_one = programs.ledger.entries[DECODE], ProgramCompiler.compile

    def compiled(self: ProgramCompiler, key: Any, traced: Any) -> Any:
        made.append(key)
        return compile_one(self, key, traced)

    class Handed:
        """A lock that another thread gets, and has the program replaced, as soon as the first look is over."""

        looks = 0

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            self.looks += 1
            if self.looks == 1:
                programs.replace_parts()

    monkeypatch.setattr(ProgramCompiler, "compile", compiled)
    entry.lock = Handed()  # type: ignore[assignment]
    programs.replace_parts()
    assert made.count(DECODE) == 1 and not isinstance(programs.get(DECODE), LayeredStep)


@pytest.mark.thorough
def test_successors_take_half_of_the_work_to_compile_and_copying_pages_comes_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted: list[Any] = []
    of_parts: list[Any] = []
    compiled_with = layered.compiled_with
    for module, seen in ((compiling, wanted), (layered, of_parts)):

        def recorded(lowered: Any, options: Any, seen: list[Any] = seen) -> Any:
            seen.append(options)
            return compiled_with(lowered, options)

        monkeypatch.setattr(module, "compiled_with", recorded)
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(page_size=16))
    programs.ledger.least = Form.PARTS
    programs.get(PREFILL)
    programs.get(DECODE)
    made: list[str] = []
    compile_one = ProgramCompiler.compile

    def compiled(self: ProgramCompiler, key: Any, traced: Any) -> Any:
        made.append(key.name)
        return compile_one(self, key, traced)

    monkeypatch.setattr(ProgramCompiler, "compile", compiled)
    programs.replace_parts()
    assert made == [COPY.name, DECODE.name, PREFILL.name], "a second request would wait for the first of them"
    assert len(of_parts) == 6 and all(options is LEAN for options in of_parts), "others would give other last bits"
    assert wanted == [{}, LEAN, LEAN], "steps alone: copying pages would take a hundred times longer"
    programs.get(ADMIT)
    assert wanted[3:] == [{}]


def test_steps_have_a_moment_between_tracing_and_compiling_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BREATH", 600.0)
    programs = programs_of()
    programs.ledger.least = Form.PARTS
    programs.get(DECODE)
    traced, stopped, build = threading.Event(), threading.Event(), ProgramCompiler.build

    def built(self: ProgramCompiler, key: Any) -> Any:
        lowered = build(self, key)
        traced.set()
        return lowered

    monkeypatch.setattr(ProgramCompiler, "build", built)
    began = time.perf_counter()
    replacing = threading.Thread(target=programs.replace_parts, args=[stopped.is_set])
    replacing.start()
    assert traced.wait(60)
    time.sleep(0.5)  # of the moment
    assert isinstance(programs.get(DECODE), LayeredStep)
    stopped.set()
    replacing.join(60)
    assert not replacing.is_alive()
    assert not isinstance(programs.get(DECODE), LayeredStep), "what was traced is compiled"
    record = next(record for record in programs.manifest() if record.name == DECODE.name)
    assert record.seconds <= time.perf_counter() - began - 0.5, "the moment is no time of the program's"


@pytest.mark.thorough
def test_a_replacement_that_somebody_waits_for_has_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    def paused(self: ProgramCompiler, key: Any, stopped: Any) -> Any:
        raise AssertionError("a pause")

    monkeypatch.setattr(ProgramCompiler, "trace", paused)
    programs = programs_of()
    programs.ledger.least = Form.PARTS
    programs.get(DECODE)
    programs.replace_parts()
    assert not isinstance(programs.get(DECODE), LayeredStep)


def test_one_whose_successor_does_not_compile_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    programs = programs_of()
    provisional = programs.get(DECODE)

    def fail(self: ProgramCompiler, key: Any, traced: Any) -> Any:
        raise CompileError("no")

    monkeypatch.setattr(ProgramCompiler, "compile", fail)
    with caplog.at_level(logging.WARNING, "rekindle.engine"):
        programs.replace_parts()
    assert "r2t0 goes on in parts: no" in caplog.text
    assert programs.get(DECODE) is provisional


@pytest.mark.anyio
async def test_a_text_goes_on_where_it_was_when_its_program_is_replaced() -> None:
    """Float32 tokens are the plain loop's, before and after, alone and in a batch."""
    async with opening(precompile="lazy", cache_dir=None, disk_memory=0) as session:
        programs: Any = engine_of(session).runner.programs  # type: ignore[attr-defined]
        programs.settle_for(Form.PARTS)
        handles = [session.submit(prompt(seed, 9), max_tokens=40, ignore_eos=True) for seed in range(3)]
        replacing = None
        async for _ in handles[0]:
            if replacing is None:
                replacing = threading.Thread(target=programs.replace_parts)
                replacing.start()
        assert replacing is not None
        replacing.join()
        for seed, handle in enumerate(handles):
            assert (await handle).token_ids == plain(prompt(seed, 9), 40)
        assert (await session.generate(prompt(5, 9), max_tokens=40)).token_ids == plain(prompt(5, 9), 40)
        assert not programs.ledger.provisional
        session.check_integrity()
