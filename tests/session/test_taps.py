"""Captures and changes inside the model: exact in any batch, chunk and cache state, and nothing for those without."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from helpers.sessions import engine_of
from helpers.tapping import Plain, difference
from helpers.thorough import by_default, one_event_loop  # noqa: F401  the fixture
from rekindle import Capture, Completion, Session, Steer
from rekindle._src.capabilities.captures.tapped import MAX_RUNS, MAX_VECTORS
from rekindle._src.capabilities.guides.step import Guides
from rekindle._src.evaluation.lens import most_likely
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.features import Features
from rekindle._src.programs.programs import Programs
from rekindle.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("large_steps")
anyio_test = pytest.mark.anyio
MODEL = checkpoints.case("llama")
PLAIN = Plain(MODEL)
E, LAYERS = MODEL.config.hidden_size, MODEL.config.num_layers
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 96, "page_size": 8,
    "disk_memory": 0, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 160, count).tolist() for count in (5, 24, 41, 60)]
VECTORS = RNG.standard_normal((8, E)).astype(np.float32)
NEW = 12
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
EVERYTHING = {"residual": "all", "residual_before": 0, "norm": True}
CLOSE = 2e-5
STEERS_AND_CAPTURES = ProgramVariant.STEERING | ProgramVariant.CAPTURES


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync(MODEL, **OPTIONS) as opened:
        yield opened


def plain_tokens(prompt: list[int], count: int = NEW) -> list[int]:
    return plain_loop(MODEL, prompt, count, context=128)


def check(done: Completion, start: int = 0, plain: Plain = PLAIN) -> None:
    """Compare everything that a completion has captured, at the positions from `start` on."""
    tokens = [*done.prompt_token_ids, *done.token_ids]
    assert done.captured is not None
    assert done.captured.positions.tolist() == list(range(start, len(tokens) - 1))
    inside = plain.inside(tokens[:-1])
    for key, array in done.captured.items():
        assert difference(array, inside.of(key)[start:]) < CLOSE, key


@anyio_test
async def test_captures_are_those_of_a_plain_forward_in_any_batch(session: Session) -> None:
    wants: list[Any] = [EVERYTHING, {"residual": [0, -1]}, None, {"norm": True}]
    handles = [session.submit(prompt, **GREEDY, capture=want) for prompt, want in zip(PROMPTS, wants, strict=True)]
    for handle, prompt, want in zip(handles, PROMPTS, wants, strict=True):
        done = await handle
        assert list(done.token_ids) == plain_tokens(prompt), "captures change no token"
        if want is None:
            assert done.captured is None
        else:
            check(done)
    assert {*(await handles[0]).captured} == {("residual", 0), ("residual", 1), ("residual_before", 0), "norm"}


@pytest.mark.thorough
@anyio_test
async def test_inside_the_layers(session: Session) -> None:
    many = await session.generate(
        PROMPTS[1:3],
        **GREEDY,
        capture=dict.fromkeys(("q", "k", "v", "attention", "mlp", "residual_before", "residual"), "all"),
    )
    for done, prompt in zip(many, PROMPTS[1:3], strict=True):
        assert list(done.token_ids) == plain_tokens(prompt)
        captured = done.captured
        inside = PLAIN.inside([*done.prompt_token_ids, *done.token_ids][:-1])
        for layer in range(LAYERS):
            for site in "qkv":
                assert difference(captured[site, layer], inside.attended[site][layer]) < CLOSE
            added = captured["residual_before", layer] + captured["attention", layer] + captured["mlp", layer]
            assert difference(captured["residual", layer], added) < CLOSE
            assert captured["attention", layer].std() > 0.01 < captured["mlp", layer].std()


@anyio_test
async def test_a_hit_ends_before_the_first_wanted_position(session: Session) -> None:
    prompt = RNG.integers(3, 160, 60).tolist()
    await session.generate(prompt, **GREEDY)
    for positions, cached, start in (
        ("output", 56, 60), ([50, 52], 48, 50), (slice(-10, None), 48, 50), (-1, 56, 59), (None, 0, 0), ([], 56, 0)
    ):  # fmt: skip
        done = await session.generate(prompt, **GREEDY, capture=Capture({"residual": 1}, positions))  # type: ignore[arg-type]
        assert done.captured is not None and done.usage.cached_tokens == cached, positions
        found = done.captured.positions.tolist()
        inside = PLAIN.inside([*prompt, *done.token_ids][:-1])
        known = {"output": list(range(60, 71)), "None": list(range(71)), "-1": [59]}
        expected = [50, 52] if positions == [50, 52] else known.get(str(positions), list(range(start, 71)))
        assert found == (expected if positions != [] else []), positions
        if found:
            assert difference(done.captured["residual", 1], inside.of(("residual", 1))[found]) < CLOSE
    assert list(done.token_ids) == plain_tokens(prompt)


@anyio_test
async def test_streams_deliver_what_was_computed_with_their_tokens(session: Session) -> None:
    parts = []
    async for delta in session.stream(PROMPTS[1], **GREEDY, capture={"residual": 1}):
        assert delta.captured is not None
        parts.append(delta.captured)
    assert [part.positions.tolist() for part in parts][:3] == [list(range(24)), [24], [25]]
    done = await session.generate(PROMPTS[1], **GREEDY, capture={"residual": 1})
    joined = np.concatenate([part["residual", 1] for part in parts if len(part.positions)])
    np.testing.assert_array_equal(joined, done.captured["residual", 1])


@pytest.mark.thorough
@anyio_test
async def test_a_preempted_request_delivers_each_position_once() -> None:
    async with rekindle.open(MODEL, **{**OPTIONS, "device_pages": 18, "prefix_cache": False}) as small:
        many = await small.generate(
            [PROMPTS[2], PROMPTS[2][::-1], PROMPTS[1]], **{**GREEDY, "max_tokens": 40}, capture={"residual": [0, 1]}
        )
        assert small.stats().preemptions > 0, "there was room for all of them"
    for done in many:
        assert list(done.token_ids) == plain_tokens(list(done.prompt_token_ids), 40)
        check(done)


@pytest.mark.thorough
@anyio_test
async def test_with_prompt_lookup_and_a_stop_string_there_is_a_line_for_each_token() -> None:
    async with rekindle.open(MODEL, **{**OPTIONS, "prompt_lookup": 2}) as drafting:
        prompt = [5, 6, 7, 8] * 6
        with anyio.fail_after(300):
            while not drafting.stats().drafted_tokens:  # until the program of steps with drafts is ready
                done = await drafting.generate(prompt, **{**GREEDY, "max_tokens": 40}, capture={"residual": 1})
                assert list(done.token_ids) == plain_tokens(prompt, 40)
                check(done)


# -- changes


def changed(steer: Steer, x: Any, positions: int | list[int]) -> Any:
    """Apply a change to the stream [T, E], by the formulas written once more."""
    if steer.vector is None:
        return steer.scale * x
    v = jnp.asarray(steer.vector)
    if v.ndim == 2:
        v = jnp.ones((x.shape[0], E)).at[jnp.asarray(positions)].set(v)
    unit = v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    along = (x * unit).sum(axis=-1, keepdims=True) * unit
    if steer.mode == "add":
        return x + steer.scale * v
    if steer.mode == "replace":
        return jnp.broadcast_to(steer.scale * v, x.shape)
    return x - steer.scale * along if steer.mode == "project_out" else x + (steer.scale - 1) * along


def change_of(steers: list[Steer], length: int) -> Any:
    """Changes for a plain forward over a prompt of this length."""
    runs = {None: slice(None), "prompt": slice(length), "output": slice(length, None)}

    def change(place: int, x: Any, positions: Any) -> Any:
        for steer in steers:
            if place == steer.layer % LAYERS + (steer.site == "residual"):
                where = np.zeros(x.shape[0], bool)
                listed = isinstance(steer.positions, list)
                where[[at % length for at in steer.positions] if listed else runs[steer.positions]] = True  # type: ignore
                x = jnp.where(where[:, None], changed(steer, x, steer.positions), x)  # type: ignore[arg-type]
        return x

    return change


STEERS: dict[str, list[Steer]] = {
    "add": [Steer(0, VECTORS[0], 4.0)],
    "before": [Steer(0, VECTORS[1], 3.0, site="residual_before")],
    "replace": [Steer(1, VECTORS[2], 2.0, positions=[0, 3, -1], mode="replace")],
    "project_out": [Steer(-1, VECTORS[3], mode="project_out", positions="output")],
    "scale": [Steer(0, scale=0.25, mode="scale", positions="prompt")],
    "along": [Steer(0, VECTORS[4], 6.0, mode="scale")],
    "several": [Steer(1, VECTORS[5], 2.0), Steer(0, VECTORS[6]), Steer(1, VECTORS[7], mode="project_out")],
    "rows": [Steer(0, VECTORS[:3] * 3, positions=[4, 2, 9], mode="replace")],
}


@anyio_test
@pytest.mark.parametrize("kinds", by_default([["before", "replace", "project_out", "several"], [*STEERS]]), ids=len)
async def test_changes_are_those_of_a_plain_forward_whatever_runs_beside(session: Session, kinds: list[str]) -> None:
    prompt = PROMPTS[2]
    handles = {
        name: session.submit(prompt, **GREEDY, steer=steers, capture={"residual": "all"})
        for name, steers in STEERS.items()
        if name in kinds
    }
    beside = session.submit(prompt, **GREEDY)
    plain = plain_tokens(prompt)
    different = 0
    for name, handle in handles.items():
        done, other = await handle, Plain(MODEL, change_of(STEERS[name], len(prompt)))
        assert list(done.token_ids) == other.generate(prompt, NEW), name
        check(done, plain=other)
        different += list(done.token_ids) != plain
    assert different > len(kinds) / 2, "most of them change the text"
    assert list((await beside).token_ids) == plain


def without(path: str) -> Plain:
    """The model with a matrix of zeros."""
    leaves = [leaf * 0 if path == name else leaf for name, leaf in zip(MODEL.graph.paths, MODEL.leaves, strict=True)]
    return Plain(dataclasses.replace(MODEL, leaves=leaves))


@pytest.mark.thorough
@anyio_test
async def test_outputs_of_attention_and_mlp_are_changed_before_they_are_added(session: Session) -> None:
    prompt = PROMPTS[2]
    off = {
        site: session.submit(prompt, **GREEDY, steer=Steer(layer, scale=0.0, mode="scale", site=site),
                             capture={"residual": "all", site: layer})
        for site, layer in (("attention", 0), ("mlp", 1))
    }  # fmt: skip
    added = session.submit(prompt, **GREEDY, steer=Steer(0, VECTORS[0], 4.0, site="mlp"), capture={"residual": 0})
    both = session.submit(prompt, **GREEDY, steer=[Steer(0, VECTORS[0], 4.0), Steer(0, VECTORS[1], site="attention")])
    beside = session.submit(prompt, **GREEDY)
    for site, path in (("attention", "layers.0.attention.out.weight"), ("mlp", "layers.1.mlp.down.weight")):
        done, other = await off[site], without(path)
        assert list(done.token_ids) == other.generate(prompt, NEW), site
        inside = other.inside([*prompt, *done.token_ids][:-1])
        for (kind, layer), array in done.captured.items():
            if kind == "residual":
                assert difference(array, inside.of((kind, layer))) < CLOSE
            else:
                assert not array.any(), "captures see what was changed"
    behind = Plain(MODEL, change_of([Steer(0, VECTORS[0], 4.0)], len(prompt)))  # a sum has no order
    done = await added
    assert list(done.token_ids) == behind.generate(prompt, NEW)
    check(done, plain=behind)
    assert (await both).token_ids != done.token_ids
    assert list((await beside).token_ids) == plain_tokens(prompt)
    source = await session.generate(PROMPTS[1], **GREEDY, capture={"attention": "all", "mlp": 0})
    same = await session.generate(PROMPTS[1], **GREEDY, patch=source.captured)
    assert same.token_ids == source.token_ids, "what was there is put there"


@anyio_test
async def test_steered_and_plain_prompts_never_share_pages(session: Session) -> None:
    prompt = RNG.integers(3, 160, 60).tolist()
    steers = [None, [Steer(0, VECTORS[0], 5.0)], [Steer(0, VECTORS[0], 5.0, positions="output")], STEERS["several"]]
    texts = [Plain(MODEL, change_of(steer or [], len(prompt))).generate(prompt, NEW) for steer in steers]
    for salt in (None, "alice"):
        for steer, text in zip(steers, texts, strict=True):
            first = await session.generate(prompt, **GREEDY, steer=steer, salt=salt)
            assert list(first.token_ids) == text and first.usage.cached_tokens == 0
    for _ in range(2):  # all together, in another order each time
        order = RNG.permutation(len(steers) * 3) % len(steers)
        many = [session.submit(prompt, **GREEDY, steer=steers[index]) for index in order]
        for index, handle in zip(order, many, strict=True):
            done = await handle
            assert list(done.token_ids) == texts[index] and done.usage.cached_tokens == 56
    session.check_integrity()


@pytest.mark.thorough
@anyio_test
async def test_a_sweep_compiles_nothing(session: Session) -> None:
    capture = {"residual": [0]}
    first = await session.generate([PROMPTS[0]] * 4, **GREEDY, steer=Steer(0, VECTORS[0]), capture=capture)
    programs: Any = engine_of(session).runner.programs
    for size in programs.lattice_for(STEERS_AND_CAPTURES, late=False):  # all that a step of any size may need
        programs.get(size)
    before = session.stats().compilations
    sweep = [
        session.submit(
            PROMPTS[0],
            max_tokens=2,
            steer=Steer(index % LAYERS, RNG.standard_normal(E), index / 5, positions=slice(index % 4, None)),
            capture={"residual": index % LAYERS},
        )
        for index in range(60)
    ]
    for handle in sweep:
        await handle
    assert session.stats().compilations == before
    assert len({done.token_ids for done in first}) == 1


@anyio_test
async def test_what_one_request_captured_is_patched_into_another(session: Session) -> None:
    first, second = PROMPTS[1], PROMPTS[1][::-1]
    source = await session.generate(first, max_tokens=1, capture={"residual": "all"})
    whole = await session.generate(second, **GREEDY, patch=source.captured.select(layers=LAYERS - 1))
    other = await session.generate(first, **GREEDY)
    assert whole.token_ids[0] == other.token_ids[0], "with the last layer's residuals it predicts the same"
    part = source.captured.select(layers=0, positions=[3, 7])
    done = await session.generate(second, **GREEDY, patch=part, capture={"residual": 0})
    np.testing.assert_array_equal(done.captured["residual", 0][[3, 7]], part["residual", 0])
    written = [Steer(0, part["residual", 0], positions=[3, 7], mode="replace")]
    assert list(done.token_ids) == Plain(MODEL, change_of(written, len(second))).generate(second, NEW)


@pytest.mark.thorough
@anyio_test
async def test_a_fork_may_be_steered_otherwise(session: Session) -> None:
    done = await session.generate(PROMPTS[1], **GREEDY, steer=STEERS["add"])
    again = await session.fork(done, at=5)
    assert again.token_ids == done.token_ids[5:], "it keeps the changes of its source"
    plain = await session.fork(done, at=5, steer=[])
    prompt = [*done.prompt_token_ids, *done.token_ids[:5]]
    assert list(plain.token_ids) == plain_tokens(prompt, NEW - 5)
    other = [Steer(1, VECTORS[2], 6.0, mode="replace", positions=[2, -1])]
    turned = await session.fork(done, at=5, steer=other)
    assert list(turned.token_ids) == Plain(MODEL, change_of(other, len(prompt))).generate(prompt, NEW - 5)
    assert len({plain.token_ids, again.token_ids, turned.token_ids}) == 3


@pytest.mark.slow
def test_numbers_of_a_deterministic_session_are_the_same_to_the_last_bit_in_any_batch() -> None:
    raw = checkpoints.CASES["llama"] | {"hidden_size": 64, "head_dim": 16}  # its kernels take multiples of 32 and 16
    model = checkpoints.model(raw, checkpoints.tensors(raw))
    sites: dict[str, Any] = {"residual": "all", "attention": 0, "mlp": 1, "q": 1, "norm": True}
    first, second = np.random.default_rng(6).standard_normal((2, 64)).astype(np.float32)
    ask = {**GREEDY, "capture": sites, "steer": [Steer(0, first, 2.0), Steer(1, second, site="mlp")]}
    with rekindle.open_sync(model, **OPTIONS, deterministic=True) as fixed:
        alone = fixed.generate_sync(PROMPTS[2], **ask)
        handles = [fixed.submit(prompt, **GREEDY, salt="beside") for prompt in (PROMPTS[0], PROMPTS[3])]
        beside = fixed.submit(PROMPTS[2], **ask, salt="beside").result_sync()
        assert all(handle.result_sync().token_ids for handle in handles)
    assert beside.token_ids == alone.token_ids
    for key, array in alone.captured.items():
        np.testing.assert_array_equal(beside.captured[key], array, err_msg=str(key))


@pytest.mark.thorough
@anyio_test
async def test_structured_texts_and_several_sequences(session: Session) -> None:
    allowed = list(range(40, 60))
    several = await session.generate(
        PROMPTS[0], max_tokens=6, n=3, temperature=1.0, seed=1, allowed_token_ids=allowed,
        steer=Steer(0, VECTORS[0], 4.0), capture={"residual": 1},
    )  # fmt: skip
    other = Plain(MODEL, change_of([Steer(0, VECTORS[0], 4.0)], 5))
    assert len({done.token_ids for done in several}) > 1
    for done in several:
        assert {*done.token_ids} <= {*allowed}
        check(done, plain=other)


# -- what can't be had


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capture": {"residual": [9]}}, "capture=9: is not among the model's 2 layers"),
        ({"capture": {"heads": [0]}}, "capture='heads': is not a site"),
        ({"capture": {"experts": "all"}}, "capture='experts': is in no layer of this model"),
        ({"capture": {"residual": "some"}}, "names no layers"),
        ({"capture": "residual"}, "does not map sites to layers"),
        ({"capture": Capture({"residual": 0}, -99)}, "is before the prompt, which has 5 tokens"),
        ({"steer": Steer(0, np.ones(E + 1))}, f"has {E + 1} numbers, and the model's residual stream {E}"),
        ({"steer": Steer(0, np.ones((3, E)), positions=[1, 2])}, "of 3 rows are for 2 different positions"),
        ({"steer": Steer(0, np.ones((3, E)))}, "of 3 rows are for positions without an end"),
        ({"steer": [Steer(0, np.ones(E), positions=list(range(0, 4 * MAX_RUNS, 2)))]}, "runs of positions"),
        ({"steer": [Steer(0, np.ones(E))] * (MAX_VECTORS + 1)}, "65 runs"),
        ({"steer": ["polite"]}, "is not a steering vector of this session"),
        ({"patch": {"residual": 1}}, "is nothing that was captured"),
    ],
)
def test_what_a_model_does_not_have_is_refused_by_name(session: Session, options: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        session.generate_sync(PROMPTS[0], **options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Steer(0), "is no vector, which mode='add' needs"),
        (lambda: Steer(0, np.full(E, np.nan)), "is not a vector of finite numbers"),
        (lambda: Steer(0, np.zeros(E), mode="project_out"), "is zero"),
        (lambda: Steer(0, np.ones(E), mode="push"), "'push': is not a mode"),  # type: ignore[arg-type]
        (lambda: Steer(0, np.ones(E), float("inf")), "is not a finite number"),
        (lambda: Steer("0", np.ones(E)), "is not a layer's number"),  # type: ignore[arg-type]
        (lambda: Steer(0, np.ones(E), positions="all"), "are no positions"),  # type: ignore[arg-type]
        (lambda: Steer(0, np.ones(E), site="q"), "can't be changed"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_change_is_refused_where_it_is_written(make: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        make()
    assert words in str(error.value)


# -- the objects


def test_captured_arrays_are_selected_shown_and_turned_into_tables(session: Session) -> None:
    captured = session.generate_sync(PROMPTS[0], **GREEDY, capture={"residual": "all", "norm": True}).captured
    assert captured["residual", -1] is captured["residual", LAYERS - 1]
    part = captured.select(layers=-1, positions=[7, 2])
    assert list(part) == [("residual", LAYERS - 1)] and part.positions.tolist() == [2, 7]
    np.testing.assert_array_equal(part["residual", -1], captured["residual", -1][[2, 7]])
    assert repr(part) == f"<Captured: 2 positions, residual {LAYERS - 1} [2, {E}]>"
    assert "residual 0" in captured._repr_html_() and str(E) in captured._repr_html_()
    frame = captured.to_pandas("norm")
    assert frame.shape == (len(captured.positions), E) and frame.index.name == "position"
    with pytest.raises(InvalidRequest, match="99: was not captured"):
        captured.select(positions=99)
    with pytest.raises(InvalidRequest, match="can't be changed"):
        session.generate_sync(PROMPTS[0], patch=captured.select(positions=[1]))


@pytest.mark.thorough
def test_programs_with_taps_are_stored(tmp_path: Path) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 2, "capture": {"q": 0}, "steer": Steer(0, VECTORS[0])}
    texts = []
    for _ in range(2):
        with rekindle.open_sync(MODEL, **{**OPTIONS, "cache_dir": str(tmp_path), "disk_memory": 1 << 26}) as opened:
            texts.append(opened.generate_sync(PROMPTS[0], **options).token_ids)
            compiled = opened.stats().compilations
    assert texts[0] == texts[1] and not compiled


def test_changes_that_differ_in_their_numbers_alone_have_different_texts(session: Session) -> None:
    """`session.map` takes answers of an earlier call from its file by the text of the options."""
    assert str(Steer(0, VECTORS[0])) == str(Steer(0, VECTORS[0].copy())) != str(Steer(0, VECTORS[1]))
    assert Steer(0, VECTORS[0]) == Steer(0, VECTORS[0].tolist()) != Steer(0, VECTORS[1])
    first, second = (session.generate_sync(prompt, max_tokens=1, capture={"norm": 1}) for prompt in PROMPTS[:2])
    part = [done.captured.select(positions=0) for done in (first, second) if done.captured is not None]
    assert repr(part[0]) == repr(part[1]) and str(part[0]) != str(part[1])


@pytest.mark.thorough
def test_programs_without_taps_are_those_of_a_session_that_has_none(session: Session) -> None:
    """Their text, as XLA gets it, is the same without the features of taps."""
    programs: Any = engine_of(session).runner.programs
    taps = STEERS_AND_CAPTURES | ProgramVariant.INNER_STEERING | ProgramVariant.INNER_CAPTURES
    others = [entry for entry in programs.features.entries if not entry.part.variant & taps]
    assert len(others) == len(programs.features.entries) - 4
    none = Programs(MODEL.config, MODEL.graph, MODEL.leaves, programs.config, features=Features(others, Guides()))
    assert none.lattice.ahead == programs.lattice.ahead and not any(bucket.variants for bucket in none.lattice.ahead)
    for bucket in (none.lattice.ahead[0], none.lattice.ahead[-1]):
        texts = []
        for made in (programs, none):
            recipe = made.recipes.recipe(bucket)
            texts.append(jax.jit(recipe.function).lower(*recipe.arguments).as_text())
        assert texts[0] == texts[1]


@anyio_test
async def test_the_logit_lens_shows_what_each_layer_would_say(session: Session) -> None:
    prompt = PROMPTS[1]
    lens = await session.view.lens(prompt)
    inside = PLAIN.inside(prompt)
    assert lens.token_ids.shape[:2] == (LAYERS, len(prompt)) and repr(lens) == "<Lens: 2 layers, 24 positions>"
    np.testing.assert_array_equal(lens.token_ids[-1, :, 0], inside.logits.argmax(axis=-1))
    behind_first = inside.stream[1]
    patched = Plain(MODEL, lambda place, x, positions: x.at[:24].set(behind_first) if place == LAYERS else x)
    np.testing.assert_array_equal(lens.token_ids[0, :, 0], patched.inside(prompt).logits.argmax(axis=-1))
    shares = np.exp(inside.logits - inside.logits.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(
        lens.probabilities[-1, :, 0], (shares / shares.sum(-1, keepdims=True)).max(-1), rtol=1e-3
    )
    assert (await session.view.lens(prompt, positions=[-1])).tokens == lens.tokens[-1:]
    shares /= shares.sum(-1, keepdims=True)
    np.testing.assert_allclose(lens.entropies[-1], -(shares * np.log2(shares)).sum(-1), rtol=1e-3)
    assert lens.layers == ("layer 0", "layer 1: the answer")
    page = lens._repr_html_()
    assert page.count("<tr") == LAYERS + 1 and "title=" in page and "entropy, bits" in page
    leads = int((lens.token_ids[:, :, 0] == lens.token_ids[-1, :, 0]).sum())
    samples = page[page.index("probability of the answer") :].count("font-weight:600")
    assert page.count(';font-weight:600">') == leads + samples > leads, "the answer's path, and samples in the legend"


@pytest.mark.parametrize("size", [3, 64, 320, 321, 1000, 49152])
def test_the_likeliest_tokens_are_those_of_a_sort(size: int) -> None:
    logits = np.random.default_rng(size).standard_normal((7, size)).astype(np.float32)
    ids, shares, entropies = most_likely(logits)
    expected = np.argsort(-logits, axis=-1)[:, :5]
    np.testing.assert_array_equal(ids, expected)
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(shares, np.take_along_axis(exact, expected, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(entropies, -(exact * np.log2(exact)).sum(axis=-1), rtol=1e-4)


def test_a_certain_token_has_no_entropy_and_a_masked_one_adds_none() -> None:
    logits = np.full((2, 400), -np.inf, np.float32)
    logits[0, 7], logits[1, :4] = 3.0, 1.0
    np.testing.assert_allclose(most_likely(logits).entropies, [0.0, 2.0], atol=1e-6)


@anyio_test
async def test_attention_weights_are_those_that_made_the_output(session: Session) -> None:
    prompt = PROMPTS[1]
    shown = await session.view.attention(prompt, layer=-1)
    inside = PLAIN.inside(prompt)
    q, k = (inside.attended[site][LAYERS - 1] for site in "qk")
    weights = shown.weights
    assert weights.shape == (q.shape[1], len(prompt), len(prompt)) and shown.layer == LAYERS - 1
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-5)
    assert not np.triu(weights, 1).any()
    groups, scale = q.shape[1] // k.shape[1], MODEL.config.attention[-1].scale
    expected = [np.exp(scale * q[20, head] @ k[:21, head // groups].T) for head in range(q.shape[1])]
    np.testing.assert_allclose(weights[:, 20, :21], [row / row.sum() for row in expected], rtol=1e-3, atol=1e-6)
    part = await session.view.attention(prompt, layer=-1, positions=[3, 20, -1])
    assert part.positions.tolist() == [3, 20, 23]
    np.testing.assert_allclose(part.weights, weights[:, [3, 20, 23]], rtol=1e-5, atol=1e-7)
    every = await session.view.attention(prompt, positions=[3, 20, -1])
    assert list(every) == [0, 1] and repr(every) == f"<AttentionMaps: 2 layers, {q.shape[1]} heads, 3 positions>"
    np.testing.assert_array_equal(every[1].weights, part.weights)
    assert list(await session.view.attention(prompt, layer=[-1])) == [1]
    with pytest.raises(InvalidRequest, match="names no layer"):
        await session.view.attention(prompt, layer=[])
    with pytest.raises(InvalidRequest, match="layer='first': is not a layer's number"):
        await session.view.attention(prompt, layer="first")
    with pytest.raises(InvalidRequest, match="after the prompt, which has 24 tokens"):
        await session.view.attention(prompt, layer=-1, positions=[24])
    with pytest.raises(InvalidRequest, match="layer=5: is not among the model's 2 layers"):
        await session.view.attention(prompt, layer=5)
