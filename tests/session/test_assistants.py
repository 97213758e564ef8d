"""Drafts of an assistant: they are those that it makes of the whole text, and no token depends on them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

import rekindle
from helpers import assistants, checkpoints
from helpers.draft_heads import assert_likeliest, recorded
from helpers.plain_loop import plain_loop
from rekindle._src.core.config import EngineConfig
from rekindle._src.drafts import resting
from rekindle._src.drafts.assistant import AssistantWeights
from rekindle._src.drafts.checkpoint import Target
from rekindle._src.drafts.plan import draft_plan
from rekindle._src.models.loading import checkpoint
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle.errors import ConfigError, UnsupportedModel
from session.test_drafts_of_states import LONG, REQUESTS, prompt, texts
from session.test_window_pages import WINDOW, tokens

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
NAME = "gemma4-shared-pages-and-embeddings-of-layers"
RAW = {**checkpoints.CASES[NAME], "max_position_embeddings": 512, "sliding_window": WINDOW}
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 6, "max_tokens_per_step": 32, "max_model_len": 512, "page_size": 8,
    "device_pages": 240, "precompile": "lazy", "seed": 0, "quiet": True, "disk_memory": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in every step, as much as there is room for."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(resting, "PLAIN_STEPS", 0)


@pytest.fixture(scope="module")
def model() -> Any:
    return checkpoints.model(RAW, checkpoints.tensors(RAW))


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> str:
    return assistants.write(tmp_path_factory.mktemp("assistant"), assistants.raw_of(RAW))


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[int]]:
    with rekindle.open_sync(model, **OPTIONS, drafts="none") as session:
        return texts(session, list(REQUESTS))


@pytest.mark.thorough
def test_tokens_are_those_without_drafts(model: Any, assistant: str, expected: dict[str, list[int]]) -> None:
    assert expected["greedy"] == plain_loop(model, prompt("greedy"), 90)
    with rekindle.open_sync(model, **{**OPTIONS, "precompile": "all"}, drafts=assistant) as session:
        before = session.stats()
        for turn in range(2):  # the second continues pages that the first left
            assert texts(session, list(REQUESTS)) == expected, f"turn {turn}"
        stats = session.stats()
        assert (stats.traces, stats.compilations) == (before.traces, before.compilations)
        assert {*stats.drafters} == {"assistant"}
        assert 15 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("clusters", [False, True])
def test_drafts_are_those_of_the_assistant(
    model: Any, clusters: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also after prompts computed in parts, after cached pages, and after drafts of which only some are right."""
    folder = assistants.write(tmp_path, assistants.raw_of(RAW, **(assistants.CLUSTERS if clusters else {})))
    first, options = tokens(60, seed=5), LONG | {"max_tokens": 40}
    text = [*first, *plain_loop(model, first, 40)]
    again = [*text, *tokens(9, seed=6)]  # a next turn, whose pages are there
    whole = [*again, *plain_loop(model, again, 40)]
    seen = recorded(monkeypatch, AssistantWeights, whole)
    with rekindle.open_sync(model, **OPTIONS, drafts=folder) as session:
        handles = [session.submit(first, **options)]
        handles[0].result_sync()
        handles.append(session.submit(again, **options))
        done = [handle.result_sync() for handle in handles]
        assert "drafts of the assistant were accepted" in str(session.explain(handles[1]))
        stats = session.stats()
    assert [list(one.token_ids) for one in done] == [text[60:], whole[len(again) :]]
    assert done[1].usage.cached_tokens >= 90
    assert stats.accepted_tokens > 20
    loaded = checkpoint.load(folder, dtype="float32")
    right = assistants.drafts(model, loaded, whole, [place for place, _ in seen])
    assert len(seen) > 12
    assert_likeliest(seen, right)


@pytest.mark.thorough
def test_preempted_and_cancelled_requests(model: Any, assistant: str, expected: dict[str, list[int]]) -> None:
    few = {**OPTIONS, "device_pages": 60, "host_memory": 64 << 20}
    with rekindle.open_sync(model, **few, drafts=assistant) as session:
        handles = {name: session.submit(prompt(name), **LONG | REQUESTS[name]) for name in REQUESTS}
        handles["repeating"].cancel()
        for name, handle in handles.items():
            assert name == "repeating" or list(handle.result_sync().token_ids) == expected[name], name
        assert session.stats().preemptions > 0, "there was room for all of them"
        assert texts(session, list(REQUESTS)) == expected
        assert session.stats().accepted_tokens > 5


@pytest.mark.thorough
def test_after_a_restart_and_sleep(model: Any, assistant: str, expected: dict[str, list[int]], tmp_path: Path) -> None:
    options = {**OPTIONS, "disk_memory": 1 << 28, "cache_dir": str(tmp_path), "drafts": assistant}
    with rekindle.open_sync(model, **options) as session:
        assert texts(session, list(REQUESTS)) == expected
        session.sleep().result_sync()
        session.wake().result_sync()
        assert texts(session, list(REQUESTS)) == expected
        session.save("texts").result_sync()
    with rekindle.open_sync(model, **options, restore="texts") as session:
        assert texts(session, list(REQUESTS)) == expected
        assert session.stats().accepted_tokens > 5


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma4-values-of-keys", "gemma4-moe", "gemma4-unified"])
def test_models_of_other_sizes(name: str, tmp_path: Path) -> None:
    """Layers with other heads, with experts, and without pages of their own for windows; a folder, and a GGUF file."""
    raw = {**checkpoints.CASES[name], "max_position_embeddings": 512}
    own, state, found, counts = assistants.raw_of(raw), checkpoints.tensors(raw), [], []
    folder = assistants.write(tmp_path, own)
    file = assistants.write_file(tmp_path / "assistant.gguf", own, assistants.tensors(own))
    free: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    for drafts in ("none", folder, file):
        with rekindle.open_sync(checkpoints.model(raw, state), **OPTIONS, drafts=drafts) as session:
            handles = [session.submit(tokens(40, seed), seed=seed, **free) for seed in range(3)]
            found.append([handle.result_sync().token_ids for handle in handles])
            counts.append(session.stats())
    assert found[0] == found[1] == found[2]
    assert all(3 < one.accepted_tokens < one.drafted_tokens for one in counts[1:])


def test_assistants_that_cannot_draft(model: Any, assistant: str, tmp_path: Path) -> None:
    def refused(match: str, **changes: Any) -> None:
        raw = assistants.raw_of(RAW)
        text = {key: value for key, value in changes.items() if key in raw["text_config"]}
        own = {key: value for key, value in changes.items() if key not in text}
        raw = {**raw, **own, "text_config": raw["text_config"] | text}
        folder = assistants.write(tmp_path / str(len([*tmp_path.iterdir()])), raw)
        with pytest.raises(ConfigError, match=match) as caught:
            rekindle.open_sync(model, **OPTIONS, drafts=folder)
        assert caught.value.field == "drafts"

    refused("whose hidden states have 64 numbers, and this one's have 48", backbone_hidden_size=64)
    refused("has a vocabulary of 200 tokens, and this model one of 160", vocab_size=200)
    refused("attends to a layer with a window and 1 heads of 8, and this model's has 1 heads of 16", head_dim=8)
    for changes in (
        {"num_centroids": 7},
        {},
        {"num_centroids": 4, "centroid_intermediate_top_k": 5},
    ):  # 2,048 by default
        raw = {**assistants.raw_of(RAW), "use_ordered_embeddings": True, **changes}
        folder = assistants.write(tmp_path / str(len([*tmp_path.iterdir()])), assistants.raw_of(RAW))
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        with pytest.raises(UnsupportedModel, match=r"num_centroids=.*in config.json don't fit: clusters divide"):
            rekindle.open_sync(model, **OPTIONS, drafts=folder)
    llama = checkpoints.model(checkpoints.CASES["llama"], checkpoints.tensors(checkpoints.CASES["llama"]))
    with pytest.raises(ConfigError, match="attends to a layer with a window, and this llama model has none"):
        rekindle.open_sync(llama, **{**OPTIONS, "max_model_len": 64}, drafts=assistant)
    config, placement = EngineConfig(drafts=assistant), SimpleNamespace(data=2, processes=1, one_pool=False)
    divided = Target(model.graph, (), cast(Any, placement), config)
    with pytest.raises(ConfigError, match="which can't draft in several data shards"):
        draft_plan(config, lambda: divided, str)
    with pytest.raises(ConfigError, match="attends to this model's pages: several devices have a part of them each"):
        rekindle.open_sync(model, **OPTIONS, drafts=assistant, mesh=jax.make_mesh((1,), ("model",)))
    with pytest.raises(UnsupportedModel, match=r"which drafts for another model.*Open that model, with drafts="):
        rekindle.open_sync(assistant, **OPTIONS)
