"""Drafts of a small model: no token depends on them, and what it keeps of a text is what it would compute of it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import rekindle
from helpers import adapters, checkpoints
from helpers.plain_loop import plain_loop
from helpers.sessions import engine_of
from helpers.small import LEAST
from rekindle import Session, tiny
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import DraftTask
from rekindle._src.drafts import resting
from rekindle._src.drafts.checkpoint import Target
from rekindle._src.drafts.model import DraftModel
from rekindle._src.drafts.plan import draft_plan
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.models.registry import config_from_hf
from rekindle._src.opening.blueprint import blueprint
from rekindle._src.opening.open_request import OpenRequest
from rekindle._src.opening.source import source_of
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle.errors import ConfigError, StepFailed
from session.test_drafts_of_states import LONG, REQUESTS, prompt, texts
from session.test_state_cache import OPTIONS, of_context, tokens

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
DRAFTS: dict[str, Any] = {**OPTIONS, "max_requests": 6, "disk_memory": 0}
RAW = {**checkpoints.CASES["llama"], "max_position_embeddings": 512}
PLAIN = ("greedy", "free")  # of REQUESTS: those whose options a small model sees, too


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in every step, as much as there is room for."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(resting, "PLAIN_STEPS", 0)


@pytest.fixture(scope="module")
def model() -> Any:
    return checkpoints.model(RAW, checkpoints.tensors(RAW))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model itself as its small model, all of whose drafts are right."""
    return str(checkpoints.write(tmp_path_factory.mktemp("twin"), RAW, checkpoints.tensors(RAW)))


@pytest.fixture(scope="module")
def cousin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says the same for some tokens, and whose vocabulary is padded."""
    raw = {**RAW, "vocab_size": RAW["vocab_size"] + 32}
    rng = np.random.default_rng(1)
    state = {name: value + 0.03 * value.std() * rng.standard_normal(value.shape) for name, value in own().items()}
    padded = {name: rows(value) if value.shape[0] == RAW["vocab_size"] else value for name, value in state.items()}
    return str(checkpoints.write(tmp_path_factory.mktemp("cousin"), raw, padded))


def own() -> checkpoints.Tensors:
    return checkpoints.tensors(RAW)


def rows(value: Any) -> Any:
    return np.concatenate([value, np.ones((32, value.shape[1]))])


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[int]]:
    with rekindle.open_sync(model, **DRAFTS, drafts="none") as session:
        return texts(session, list(REQUESTS))


def all_right(session: Session, drafted: int) -> None:
    """Check that at least so many tokens were drafted, and that all were right: nothing is missing in its pages."""
    counts = session.stats().drafters["model"]
    assert counts.drafted >= drafted
    assert counts.accepted == counts.drafted


def test_tokens_of_two_requests_are_those_without_drafts(model: Any, cousin: str) -> None:
    """The next test on a smaller batch, for which fewer programs are compiled."""
    names = ("greedy", "drawn")
    found: dict[str, list[list[int]]] = {}
    for drafts in (cousin, "none"):
        with rekindle.open_sync(model, **{**DRAFTS, "max_requests": 3}, drafts=drafts) as session:
            handles = [session.submit(prompt(name), **LONG | REQUESTS[name]) for name in names]
            found[drafts] = [list(handle.result_sync().token_ids) for handle in handles]
            stats = session.stats()
            if drafts == "none":
                assert stats.drafted_tokens == 0
            else:
                assert 5 < stats.accepted_tokens < stats.drafted_tokens
    assert found[cousin] == found["none"]
    assert found["none"][0] == plain_loop(model, prompt(names[0]), 90)


@pytest.mark.thorough
def test_a_failed_step_is_its_requests_end_and_drafts_go_on(model: Any, twin: str) -> None:
    with rekindle.open_sync(model, **{**DRAFTS, "max_requests": 3}, drafts=twin) as session:
        before = session.generate_sync(prompt("greedy"), **LONG).token_ids
        runner = engine_of(session).runner
        dispatch = runner.dispatch

        def broken(plan: Any) -> Any:
            runner.dispatch = dispatch  # type: ignore[method-assign]
            raise ValueError("broke")

        runner.dispatch = broken  # type: ignore[method-assign]
        with pytest.raises(StepFailed, match="broke"):
            session.generate_sync(prompt("drawn"), **LONG)
        drafted = session.stats().drafted_tokens
        assert session.generate_sync(prompt("greedy"), **LONG).token_ids == before
        assert session.stats().drafted_tokens > drafted


@pytest.mark.thorough
@pytest.mark.parametrize("precompile", ["lazy", "all"])
def test_tokens_are_those_without_drafts(
    model: Any, cousin: str, expected: dict[str, list[int]], precompile: str
) -> None:
    assert expected["greedy"] == plain_loop(model, prompt("greedy"), 90)
    with rekindle.open_sync(model, **{**DRAFTS, "precompile": precompile}, drafts=cousin) as session:
        before = session.stats()
        for turn in range(2):
            assert texts(session, list(REQUESTS)) == expected, f"turn {turn}"
        stats = session.stats()
        if precompile == "all":
            assert (stats.traces, stats.compilations) == (before.traces, before.compilations)
        assert {*stats.drafters} == {"model"}
        assert 15 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.thorough
def test_the_models_own_drafts_are_all_right(model: Any, twin: str) -> None:
    """Of prompts that are cut, after cached pages, in forks, after drafts, and after tokens that it did not see."""
    requests = {name: LONG | {"max_tokens": 61} | REQUESTS[name] for name in PLAIN}
    with rekindle.open_sync(model, **DRAFTS, drafts=twin) as session:
        for name, options in requests.items():
            done = session.generate_sync(prompt(name), **options)
            all_right(session, 20)
            again = session.generate_sync([*prompt(name), *done.token_ids, 5, 6, 7], **options)
            assert again.usage.cached_tokens >= 96
            all_right(session, 40)
        handle = session.submit(tokens(30, seed=4), **LONG)
        handle.result_sync()
        assert "drafts of the small model were accepted" in str(session.explain(handle))
        forks = session.generate_sync(prompt("greedy")[:-5], n=3, temperature=1.5, seed=3, max_tokens=50)
        assert len({one.token_ids for one in forks}) == 3
        handles = [session.submit(prompt(name), **options) for name, options in requests.items()]
        for handle in handles:
            handle.result_sync()
        all_right(session, 60)


@pytest.mark.thorough
def test_a_small_model_that_lost_its_pages_computes_them_again(model: Any, twin: str, tmp_path: Path) -> None:
    options = {**DRAFTS, "disk_memory": 1 << 28, "cache_dir": str(tmp_path), "drafts": twin}
    greedy: dict[str, Any] = LONG | {"max_tokens": 33}
    with rekindle.open_sync(model, **options) as session:
        first = session.generate_sync(prompt("greedy"), **greedy).token_ids
        session.sleep().result_sync()
        session.wake().result_sync()
        assert session.generate_sync(prompt("greedy"), **greedy).token_ids == first
        all_right(session, 40)
        session.save("texts").result_sync()
    with rekindle.open_sync(model, **options, restore="texts") as session:
        done = session.generate_sync(prompt("greedy"), **greedy)
        assert done.token_ids == first
        assert done.usage.cached_tokens >= 80
        all_right(session, 20)


@pytest.mark.thorough
def test_preempted_and_cancelled_requests(model: Any, twin: str, expected: dict[str, list[int]]) -> None:
    few = {**DRAFTS, "device_pages": 24, "host_memory": 64 << 20}
    with rekindle.open_sync(model, **few, drafts=twin) as session:
        handles = {name: session.submit(prompt(name), **LONG | REQUESTS[name]) for name in REQUESTS}
        handles["repeating"].cancel()
        for name, handle in handles.items():
            assert name == "repeating" or list(handle.result_sync().token_ids) == expected[name], name
        assert session.stats().preemptions > 0, "there was room for all of them"
        greedy = session.generate_sync(prompt("greedy"), **LONG)
        assert list(greedy.token_ids) == expected["greedy"]
    with rekindle.open_sync(model, **few, drafts=twin) as session:
        plain = [session.submit(tokens(60, seed), **LONG) for seed in range(4)]
        for handle in plain:
            handle.result_sync()
        assert session.stats().preemptions > 0, "there was room for all of them"
        all_right(session, 30)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5",
        "lfm2",
        "falcon-h1",
        "nemotron-h",
        "gemma3",
        "gemma4-shared-pages-and-embeddings-of-layers",
        "qwen3-moe",
        "deepseek-v2",
    ],
)
def test_models_of_other_kinds(name: str, twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States, windows, latent pages and experts. The drafts are the text of before, of which some tokens are others."""
    model = of_context(name, 512)
    found: list[dict[str, list[int]]] = []
    rng, original = np.random.default_rng(0), DraftModel.work

    def work(self: DraftModel, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool:
        drafts = original(self, tasks, calls)
        for task in tasks:
            key = task.request.token_ids.tolist()
            text = next(text for one, text in by_prompt if one == key)
            place = task.start + len(task.tokens) - len(key)
            for row, token in zip(task.drafts, text[place:], strict=False):
                assert row.token_ids is not None
                row.token_ids[0] = token if rng.random() < 0.8 else 7
        return drafts

    by_prompt: list[tuple[list[int], list[int]]] = []
    for options in ({"drafts": "none"}, {"drafts": twin}):
        with rekindle.open_sync(model, **DRAFTS, **options) as session:
            found.append(texts(session, list(REQUESTS)))
            by_prompt = [(prompt(one), text) for one, text in found[0].items() if one in REQUESTS]
            if len(found) == 1:
                monkeypatch.setattr(DraftModel, "work", work)
            else:
                counts = session.stats().drafters["model"]
                assert 15 < counts.accepted < counts.drafted
    assert found[0] == found[1]


@pytest.mark.thorough
def test_one_that_is_never_right_rests(model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once steps were measured, few of its drafts are computed, and it stays behind."""
    monkeypatch.undo()
    stranger = checkpoints.write(tmp_path, RAW, checkpoints.tensors(RAW, seed=9))
    with rekindle.open_sync(model, **DRAFTS, drafts=str(stranger)) as session:
        for seed in range(6):
            session.generate_sync(tokens(20, seed), **LONG | {"max_tokens": 200})
        stats = session.stats()
        assert stats.drafted_tokens < 120
        assert stats.accepted_tokens < 12


def test_small_models_that_cannot_draft(model: Any, twin: str, tmp_path: Path) -> None:
    def refused(match: str, drafts: str, target: Any = model, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match) as caught:
            rekindle.open_sync(target, **{**DRAFTS, **options}, drafts=drafts)
        assert caught.value.field == "drafts"

    refused("neither a known source nor a model on this machine.*Did you mean 'suffix'", "suffics")
    refused("has a tokenizer, and the model has none", "tiny")
    recurrent = {**checkpoints.CASES["qwen3.5"], "max_position_embeddings": 512}
    refused("whose states can't be taken back", str(checkpoints.write(tmp_path / "states", recurrent)))
    config, placement = EngineConfig(drafts=twin), SimpleNamespace(data=2, processes=1, one_pool=False)
    divided = Target(model.graph, (), cast(Any, placement), config)
    with pytest.raises(ConfigError, match="which can't draft in several data shards"):
        draft_plan(config, lambda: divided, str)
    other = shutil.copytree(tiny.folder(), tmp_path / "other")
    raw = json.loads((other / "tokenizer.json").read_text())
    ids = raw["model"]["vocab"]
    ids["Ġthe"], ids["Ġand"] = ids["Ġand"], ids["Ġthe"]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    refused("has another tokenizer: token [0-9]+ is 'Ġ(the|and)' there, and 'Ġ(and|the)' here", str(other), "tiny")


def test_its_weights_and_pages_are_counted(model: Any, twin: str) -> None:
    def plan(**options: Any) -> Any:
        request = OpenRequest(model, dataclasses.replace(EngineConfig(**DRAFTS), **options))
        return blueprint(request, source_of(request))

    plain, with_drafts = plan(), plan(drafts=twin)
    drafts = with_drafts.caches[-1]
    assert drafts.kind == "drafts"
    assert drafts.slots == with_drafts.config.device_pages
    assert drafts.slot_bytes == plain.caches[0].slot_bytes
    pages = with_drafts.caches[0].slot_bytes + drafts.slot_bytes
    assert with_drafts.config.device_memory == with_drafts.config.device_pages * pages
    assert with_drafts != plain
    assert with_drafts.programs.key != plain.programs.key
    memory = plain.config.device_memory
    assert plan(drafts=twin, device_memory=memory).config.device_pages == plain.config.device_pages // 2


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(rekindle.models.export("tiny", tmp_path_factory.mktemp("small") / "tiny.gguf", type="q8_0"))


@pytest.mark.thorough
def test_tiny_drafts_for_itself_from_a_file(tiny_file: str, tmp_path: Path) -> None:
    """Tokenizers of a folder and of a GGUF file are compared by what they have. Grammars, processors, stops, an
    adapter."""
    options: dict[str, Any] = {"max_requests": 16, "max_model_len": 256, "max_tokens_per_step": 64, "quiet": True}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("Tom and his dog", {"temperature": 0.0}),
        ("Once upon a time", {"temperature": 0.8, "seed": 5, "logprobs": 2}),
        ("The name is", {"regex": "[A-Z][a-z]{2,8} and [A-Z][a-z]{2,8}[.] (The [a-z]{1,9}[.] )*", "seed": 3}),
        ("Lily saw", {"stop": [" the"], "seed": 4, "top_k": 20}),
        ("Ben ran", {"processors": [LEAST.name], "temperature": 1.0, "seed": 6}),
        ("Anna and Ben", {"adapter": "own", "temperature": 0.0}),
    ]
    config = config_from_hf(json.loads((tiny.folder() / "config.json").read_text()))
    folder = adapters.write(tmp_path, config, seed=1)
    found, counts = [], None
    for drafts in ("none", tiny_file):
        with rekindle.open_sync("tiny", dtype="float32", processors=[LEAST], drafts=drafts, **options) as session:
            session.load_adapter("own", folder).result_sync()
            for _ in range(2):
                handles = [session.submit(text, max_tokens=60, **more) for text, more in requests]
                found.append([handle.result_sync().token_ids for handle in handles])
            counts = session.stats().drafters.get("model")
    assert found[0] == found[1] == found[2] == found[3]
    assert counts is not None
    assert counts.accepted > 40
