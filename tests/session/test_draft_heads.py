"""Drafts of heads, the model's own, EAGLE-3's and DFlash's: they are those of the head over the whole text, and no
token depends on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import rekindle
from helpers import adapters, block_heads, checkpoints, eagle
from helpers.draft_heads import assert_likeliest, chains, recorded, with_head
from helpers.plain_loop import plain_loop
from helpers.sessions import engine_of, eventually
from helpers.thorough import by_default
from programs.test_layered import many_layers
from rekindle import Session
from rekindle._src.drafts import resting
from rekindle._src.drafts.calls import DRAFTS
from rekindle._src.drafts.entries import EntryDrafter, HeadWeights
from rekindle._src.models.base import LoadedModel, merge
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle._src.session.session import client_of
from rekindle.errors import ConfigError
from session.test_drafts_of_states import FEW, REQUESTS
from session.test_state_cache import OPTIONS, tokens

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
LONG: dict[str, Any] = {"max_tokens": 70, "ignore_eos": True, "temperature": 0.0}
HEAD: dict[str, Any] = {**OPTIONS, "disk_memory": 0, "drafts": "mtp"}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in every step, and computes every draft."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(resting, "PLAIN_STEPS", 0)


class Pair(NamedTuple):
    """A model, and a head that drafts for it."""

    model: LoadedModel
    options: dict[str, Any]  # of a session in which the head drafts
    drafter: str  # its name
    # The logits of so many drafts after the tokens at some places of a text, without pages
    chains: Callable[[list[int], list[int], int], Mapping[int, Sequence[NDArray[Any]]]]


PAIRS = [
    *by_default(["qwen3.5", "eagle3", "dflash"], 1),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5-moe", "glm4-moe-lite", "ling3")),
]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if request.param == "eagle3":
        return with_eagle(tmp_path_factory.mktemp("head"))
    if request.param == "dflash":
        return with_blocks(tmp_path_factory.mktemp("head"))
    return with_head_of_its_own(request.param)


def with_head_of_its_own(name: str, attention: float = 1.0) -> Pair:
    """A model and its own head, whose attention has values and outputs that many times as large."""
    raw = with_head(name) | {"max_position_embeddings": 512}
    state = checkpoints.tensors(raw)
    strengthen(state, "mtp.", attention)
    model = checkpoints.model(raw, state)
    return Pair(model, HEAD, "mtp", lambda text, places, count: chains(model, text, places, count))


def strengthen(state: dict[str, NDArray[Any]], prefix: str, factor: float) -> None:
    for name in state:
        if name.startswith(prefix) and name.endswith(("v_proj.weight", "o_proj.weight")):
            state[name] = (factor * state[name]).astype(np.float32)


def with_eagle(folder: Path, attention: float = 1.0, **changes: Any) -> Pair:
    """A Llama and an EAGLE-3 head, whose drafts are computed by the formulas."""
    raw = {**checkpoints.CASES["llama"], "max_position_embeddings": 512}
    state, own = checkpoints.tensors(raw), eagle.raw_of(raw, **changes)
    model, head = checkpoints.model(raw, state), eagle.tensors(own)
    strengthen(head, "midlayer.", attention)

    def drafts(text: list[int], places: list[int], count: int) -> Mapping[int, Sequence[NDArray[Any]]]:
        read = eagle.streams(model, text, own["eagle_aux_hidden_state_layer_ids"])
        return eagle.drafts(own, head, state["model.embed_tokens.weight"], read, text, places, count)

    return Pair(model, {**HEAD, "drafts": eagle.write(folder, own, head)}, "eagle3", drafts)


def with_blocks(folder: Path, attention: float = 1.0, form: str = block_heads.FORMS[0], **changes: Any) -> Pair:
    """A Llama and a DFlash head, whose drafts are computed by the formulas."""
    raw = {**checkpoints.CASES["llama"], "max_position_embeddings": 512}
    own = block_heads.raw_of(raw, form, **changes)
    model, head = checkpoints.model(raw, checkpoints.tensors(raw)), block_heads.tensors(own)
    strengthen(head, "layers.", attention)
    keys, module = block_heads.flat(own), cast(Any, merge(model.graph, model.leaves))

    def drafts(text: list[int], places: list[int], count: int) -> Mapping[int, Sequence[NDArray[Any]]]:
        read = eagle.streams(model, text, tuple(layer + 1 for layer in keys["target_layer_ids"]))
        found = {}
        for place in places:
            block = jnp.array([text[place], *[keys["mask_token_id"]] * (keys["block_size"] - 1)])
            hidden = block_heads.hidden(own, head, read[:place], np.asarray(module.embedded(block)))[1:]
            found[place] = list(np.asarray(module.logits(jnp.asarray(hidden, jnp.float32))))
        return found

    return Pair(model, {**HEAD, "drafts": eagle.write(folder, own, head)}, "dflash", drafts)


@pytest.fixture(scope="module")
def model(pair: Pair) -> LoadedModel:
    return pair.model


def prompt(name: str) -> list[int]:
    place = list(REQUESTS).index(name)
    return tokens(40 + 11 * place, seed=90)


def texts(session: Session) -> dict[str, list[int]]:
    """The texts of requests, all at once, and forks of one of them."""
    handles = {name: session.submit(prompt(name), **LONG | options) for name, options in REQUESTS.items()}
    found = {name: list(handle.result_sync().token_ids) for name, handle in handles.items()}
    for place, one in enumerate(session.generate_sync(prompt("drawn"), n=3, **LONG | REQUESTS["drawn"])):
        found[f"fork {place}"] = list(one.token_ids)
    session.check_integrity()
    return found


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[int]]:
    with rekindle.open_sync(model, **{**HEAD, "drafts": "none"}) as session:
        return texts(session)


def test_tokens_are_those_without_drafts(pair: Pair, expected: dict[str, list[int]]) -> None:
    assert expected["greedy"] == plain_loop(pair.model, prompt("greedy"), 70)
    with rekindle.open_sync(pair.model, **pair.options) as session:
        for turn in range(2):  # the second continues pages and states that the first left
            assert texts(session) == expected, f"turn {turn}"
        heads = [one for one in engine_of(session).scheduler._drafts._drafters if isinstance(one, EntryDrafter)]
        assert heads and not any(one._entered for one in heads), "a request that has ended is kept"
        stats = session.stats()
        assert 20 < stats.accepted_tokens < stats.drafted_tokens
        assert {*stats.drafters} == {pair.drafter}
        handle = session.submit(prompt("repeating"), **LONG | REQUESTS["repeating"])
        handle.result_sync()
        names = {"mtp": "the model's own head", "eagle3": "the EAGLE-3 head", "dflash": "the DFlash head"}
        assert f"drafts of {names[pair.drafter]} were accepted" in str(session.explain(handle))


@pytest.mark.thorough
def test_drafts_are_those_of_the_head(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    check_drafts(pair, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [{"norm_before_residual": True, "norm_before_fc": True}, {"form": "Eagle3Speculator", "draft_vocab_size": 160}],
)
def test_drafts_of_each_form_of_eagle(changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_drafts(with_eagle(tmp_path, **changes), monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("form", block_heads.FORMS)
@pytest.mark.parametrize("causal", [None, False, True])
def test_drafts_of_each_form_of_dflash(
    form: str, causal: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the layers has a window."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "causal": causal}
    check_drafts(with_blocks(tmp_path, form=form, **layers), monkeypatch)


def check_drafts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several is right: in prompts that are cut, after cached pages, and after drafts of which some are."""
    model = pair.model
    first = tokens(150, seed=5)
    text = [*first, *plain_loop(model, first, 40)]
    again = [*text, *tokens(9, seed=6)]  # a next turn, of which pages and a state are there
    whole = [*again, *plain_loop(model, again, 40)]
    seen = recorded(monkeypatch, HeadWeights, whole)
    with rekindle.open_sync(model, **pair.options) as session:
        handles = [session.submit(first, **LONG | {"max_tokens": 40})]
        handles[0].result_sync()
        handles.append(session.submit(again, **LONG | {"max_tokens": 40}))
        done = [handle.result_sync() for handle in handles]
        stats = session.stats()
    assert [list(one.token_ids) for one in done] == [text[150:], whole[len(again) :]]
    assert done[1].usage.cached_tokens >= 128
    assert stats.accepted_tokens > 40
    assert len(seen) > 12
    assert_likeliest(seen, pair.chains(whole, [place for place, _ in seen], DRAFTS))


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["own", "eagle3", "eagle3 in parts", "dflash"])
def test_a_head_that_rested_drafts_as_if_it_had_not(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of a head that rests are those without one, and what it missed is made up for before it drafts again, or
    when there is little room for more of it. The head's attention is made so strong that each entry counts.
    Steps of parts keep for an EAGLE-3 head what whole ones do."""
    if case == "own":
        pair = with_head_of_its_own("qwen3.5", attention=20.0)
    else:
        pair = (with_blocks if case == "dflash" else with_eagle)(tmp_path, attention=20.0)
    if case == "eagle3 in parts":
        many_layers(monkeypatch, peace=2.0)
    model, options = pair.model, pair.options | {"precompile": "background" if "parts" in case else "lazy"}
    first = tokens(40, seed=8)
    whole = [*first, *plain_loop(model, first, 200)]
    seen = recorded(monkeypatch, HeadWeights, whole)
    steps: list[int] = []
    planned = EntryDrafter.planned
    monkeypatch.setattr(EntryDrafter, "planned", lambda self, step: (steps.append(step), planned(self, step))[1])
    monkeypatch.setattr(EntryDrafter, "awake", property(lambda self: steps[-1:] > [80] and steps[-1] % 45 > 40))
    with rekindle.open_sync(model, **options) as session:
        if "parts" in case:  # drafts wait for the whole programs, and read what the parts kept
            assert [*first, *session.generate_sync(first, **LONG | {"max_tokens": 60}).token_ids] == whole[:100]
            assert not seen
            scheduler: Any = client_of(session).engine.scheduler
            eventually(scheduler._ready_rows.drafts, 120.0)
        assert [*first, *session.generate_sync(first, **LONG | {"max_tokens": 200}).token_ids] == whole
        ran = session.stats().programs
    assert 2 < len(seen) < 20
    assert_likeliest(seen, pair.chains(whole, [place for place, _ in seen], DRAFTS))
    plain, others = (sum(count for name, count in ran.items() if name.endswith(end)) for end in ("t0", "+drafts"))
    assert plain > 90 > others > 0


@pytest.mark.parametrize("drafts_pay", by_default([False, True]))
def test_a_head_rests_where_drafts_do_not_pay_or_have_no_room(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, drafts_pay: bool
) -> None:
    """Of as many requests as there are rows, no step has room for a draft, but before the last one came or once one
    has ended: how many steps that is depends on when they come, of some 180 that all would draft."""
    if not drafts_pay:
        monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: 0)
    with rekindle.open_sync(pair.model, **pair.options) as session:
        session.generate_sync(
            [tokens(20, seed=place) for place in range(4 if drafts_pay else 3)], **LONG | {"max_tokens": 180}
        )
        stats = session.stats()
    assert stats.drafted_tokens <= (130 if drafts_pay else 0)
    drafting = sum(count for name, count in stats.programs.items() if name.endswith("t0+drafts"))
    assert drafting > 2, "or they never try again"
    assert drafting < (130 if drafts_pay else 20)
    assert max(stats.programs, key=stats.programs.__getitem__).endswith("t0")


def test_models_without_a_head_are_refused(tmp_path: Path) -> None:
    for name in ("qwen3.5", "llama"):
        folder = checkpoints.write(tmp_path / name, checkpoints.CASES[name])
        with pytest.raises(ConfigError, match="needs a head that drafts tokens, and this"):
            rekindle.open_sync(str(folder), **{**HEAD, "max_model_len": 256})


@pytest.mark.thorough
def test_a_folder_is_opened_with_its_head(tmp_path: Path) -> None:
    raw = with_head("qwen3.5")
    state = checkpoints.tensors(raw)
    folder = checkpoints.write(tmp_path, checkpoints.CASES["qwen3.5"], state)
    with rekindle.open_sync(str(folder), **{**HEAD, "max_model_len": 256}) as session:
        ids = tokens(20, seed=3)
        found = session.generate_sync(ids, max_tokens=12, temperature=0.0, ignore_eos=True, logit_bias=FEW)
        assert session.stats().drafted_tokens > 3
    assert np.isin(found.token_ids, [*FEW]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["own", "eagle3"])
@pytest.mark.parametrize("adapted", [False, True])
def test_dropped_and_swapped_weights(case: str, adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of another checkpoint stays with other weights of its model; one of the model comes with them."""
    monkeypatch.setattr(EntryDrafter, "awake", True)
    raw = with_head("qwen3.5") if case == "own" else {**checkpoints.CASES["llama"], "max_position_embeddings": 512}
    config = checkpoints.CASES["qwen3.5"] if case == "own" else raw
    folders = [str(checkpoints.write(tmp_path / f"{seed}", config, checkpoints.tensors(raw, seed))) for seed in (0, 1)]
    drafts = "mtp" if case == "own" else eagle.write(tmp_path / "head", eagle.raw_of(raw))
    options = {**HEAD, "max_model_len": 256, "drafts": drafts}
    if adapted:
        options["merge"] = adapters.write(tmp_path / "adapter", checkpoints.model(raw, checkpoints.tensors(raw)).config)
    ids, ask = tokens(20, seed=3), {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logit_bias": FEW}

    def text(session: Session) -> list[int]:
        before = session.stats().drafted_tokens
        found = list(session.generate_sync(ids, **ask).token_ids)
        assert session.stats().drafted_tokens > before
        return found

    expected = []
    for folder in folders:
        with rekindle.open_sync(folder, **options) as session:
            expected.append(text(session))
    with rekindle.open_sync(folders[0], **options) as session:
        assert text(session) == expected[0]
        session.sleep(weights="drop").result_sync()
        session.wake().result_sync()
        assert text(session) == expected[0]
        session.swap_weights(folders[1]).result_sync()
        assert text(session) == expected[1]
        session.sleep(weights="drop").result_sync()
        session.wake(weights=folders[0]).result_sync()
        assert text(session) == expected[0]


@pytest.mark.thorough
def test_preempted_and_cancelled_requests(pair: Pair, expected: dict[str, list[int]]) -> None:
    few, more = {**pair.options, "device_pages": 34, "host_memory": 64 << 20}, LONG | {"max_tokens": 200}
    with rekindle.open_sync(pair.model, **few) as session:
        handles = {name: session.submit(prompt(name), **more | options) for name, options in REQUESTS.items()}
        handles["free"].cancel()
        for name, handle in handles.items():
            assert name == "free" or list(handle.result_sync().token_ids)[:70] == expected[name]
        assert texts(session) == expected
        stats = session.stats()
        assert stats.preemptions > 0, "there was room for all of them"
        assert stats.drafted_tokens > 10
        # A block needs pages for all of its tokens, which few rows have here.
        assert stats.accepted_tokens > 10 or pair.drafter == "dflash"


@pytest.mark.thorough
def test_after_a_restart_and_sleep(pair: Pair, expected: dict[str, list[int]], tmp_path: Path) -> None:
    model, options = pair.model, {**OPTIONS, "cache_dir": str(tmp_path), "drafts": pair.options["drafts"]}
    with rekindle.open_sync(model, **options) as session:
        assert texts(session) == expected
        session.sleep().result_sync()
        session.wake().result_sync()
        assert texts(session) == expected
        session.save("texts").result_sync()
    with rekindle.open_sync(model, **options, restore="texts") as session:
        before = session.stats()
        assert texts(session) == expected
        assert session.stats().accepted_tokens > before.accepted_tokens


@pytest.mark.thorough
def test_programs_made_ahead_are_enough(pair: Pair, expected: dict[str, list[int]], tmp_path: Path) -> None:
    options = {**OPTIONS, "cache_dir": str(tmp_path), "drafts": pair.options["drafts"], "precompile": "all"}
    with rekindle.open_sync(pair.model, **options) as session:
        before = session.stats()
        assert texts(session) == expected
        stats = session.stats()
        assert (stats.traces, stats.compilations) == (before.traces, before.compilations)
        assert stats.accepted_tokens > 10
