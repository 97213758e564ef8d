"""Heads that draft blocks: their drafts are those of the formulas and of transformers, and no token depends on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import block_heads, checkpoints, eagle
from helpers.draft_heads import assert_likeliest, recorded
from helpers.plain_loop import plain_loop
from rekindle import Session
from rekindle._src.execution.draft_model import OwnHead
from rekindle._src.models.base import merge
from rekindle._src.scheduling.drafting import models
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle.errors import ConfigError, UnsupportedModel
from session.test_drafts_of_states import FEW, REQUESTS
from session.test_state_cache import OPTIONS, tokens

pytestmark = pytest.mark.usefixtures("shared_programs")
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0}
BLOCKS: dict[str, Any] = {**OPTIONS, "disk_memory": 0}
RAW = {**checkpoints.CASES["llama"], "max_position_embeddings": 512}
WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12,
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in every step, and computes every draft."""
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(models, "_PLAIN", 0)


@pytest.fixture(scope="module")
def model() -> Any:
    return checkpoints.model(RAW, checkpoints.tensors(RAW))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return eagle.write(tmp_path_factory.mktemp("head"), raw := block_heads.raw_of(RAW), block_heads.tensors(raw))


def texts(session: Session) -> dict[str, list[int]]:
    """The texts of requests, all at once, and forks of one of them."""
    prompts = {name: tokens(40 + 11 * place, seed=90) for place, name in enumerate(REQUESTS)}
    handles = {name: session.submit(prompts[name], **LONG | options) for name, options in REQUESTS.items()}
    found = {name: list(handle.result_sync().token_ids) for name, handle in handles.items()}
    for place, one in enumerate(session.generate_sync(prompts["drawn"], n=3, **LONG | REQUESTS["drawn"])):
        found[f"fork {place}"] = list(one.token_ids)
    session.check_integrity()
    return found


def test_tokens_are_those_without_drafts(model: Any, head: str) -> None:
    with rekindle.open_sync(model, **BLOCKS, drafts="none") as session:
        expected = texts(session)
    with rekindle.open_sync(model, **BLOCKS, drafts=head) as session:
        for turn in range(2):  # the second continues pages that the first left
            assert texts(session) == expected, f"turn {turn}"
        stats = session.stats()
        assert {*stats.drafters} == {"dflash"}
        assert stats.drafted_tokens > 40
        session.sleep().result_sync()
        session.wake().result_sync()
        assert texts(session) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("form", block_heads.FORMS)
@pytest.mark.parametrize("changes", [{}, WINDOWS, {**WINDOWS, "causal": False}, {"causal": True}], ids=str)
def test_drafts_are_those_of_the_formulas(
    model: Any, form: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prompts that are cut, after cached pages, and after drafts of which some are right."""
    raw = block_heads.raw_of(RAW, form, **changes)
    state = block_heads.tensors(raw)
    head = eagle.write(tmp_path, raw, state)
    first = tokens(150, seed=5)
    text = [*first, *plain_loop(model, first, 40)]
    again = [*text, *tokens(9, seed=6)]
    whole = [*again, *plain_loop(model, again, 40)]
    seen = recorded(monkeypatch, OwnHead, whole)
    with rekindle.open_sync(model, **BLOCKS, drafts=head) as session:
        one = session.generate_sync(first, **LONG)
        other = session.generate_sync(again, **LONG)
        assert session.stats().accepted_tokens > 20
    assert [list(one.token_ids), list(other.token_ids)] == [text[150:], whole[len(again) :]]
    assert other.usage.cached_tokens >= 128
    assert len(seen) > 12
    module: Any = merge(model.graph, model.leaves)
    keys, read = block_heads.flat(raw), eagle.streams(model, whole, (1, RAW["num_hidden_layers"]))
    right = {}
    for place, _ in seen:
        block = [whole[place], *[keys["mask_token_id"]] * (keys["block_size"] - 1)]
        embedded = np.asarray(module.embedded(jnp.array(block)))
        found = block_heads.hidden(raw, state, read[:place], embedded)[1:]
        right[place] = list(np.asarray(module.logits(jnp.asarray(found, jnp.float32))))
    for place, drafts in seen:  # of a block, no draft depends on those before it
        for draft, token in enumerate(drafts):
            assert_likeliest([(place, [token])], {place: [right[place][draft]]})


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_formulas_are_those_of_transformers(kind: str) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    from transformers import MuseGlimmerAssistantConfig

    raw = block_heads.raw_of(RAW, "flat", layer_types=[kind, "full_attention"], sliding_window=6, causal=False)
    state, E = block_heads.tensors(raw), raw["hidden_size"]
    config = MuseGlimmerAssistantConfig(
        hidden_size=E, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, sliding_window=6, layer_types=raw["layer_types"], block_size=5,
        mask_token_id=raw["mask_token_id"], target_layer_ids=raw["target_layer_ids"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, attn_implementation="eager",
    )  # fmt: skip
    theirs = module.MuseGlimmerAssistantModel(config).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): torch.from_numpy(value) for name, value in state.items()})
    rng = np.random.default_rng(0)
    read, embedded = (rng.standard_normal(shape).astype(np.float32) for shape in ((17, 2 * E), (5, E)))
    cache = pytest.importorskip("transformers.cache_utils").DFlashCache(config=config)
    cache.activate_past_recording()  # as transformers' generator of drafts does: without it, windows are elsewhere
    cache.set_previous_accepted_tokens(17)
    with torch.inference_mode():
        out = theirs(
            noise_embeds=torch.from_numpy(embedded)[None], context_hidden_states=torch.from_numpy(read)[None],
            position_ids=torch.arange(22)[None], attention_mask=torch.ones(1, 22, dtype=torch.long), cache=cache,
        )  # fmt: skip
    found = block_heads.hidden(raw, state, read, embedded)
    np.testing.assert_allclose(out.last_hidden_state[0].numpy(), found, rtol=1e-3, atol=1e-4)


def test_heads_that_cannot_draft(model: Any, tmp_path: Path) -> None:
    def opened(raw: dict[str, Any], target: Any = model) -> None:
        head = eagle.write(tmp_path / "head", raw, block_heads.tensors(raw))
        rekindle.open_sync(target, **BLOCKS, drafts=head)

    for match, changes in (
        ("target_layer_ids=.* are not numbers of layers", {"target_layer_ids": [-1, 0]}),
        ("block_size=1 in config.json is not from 2", {"block_size": 1}),
        ("markov_rank=4 is not implemented", {"markov_rank": 4}),
    ):
        with pytest.raises(UnsupportedModel, match=match):
            opened(block_heads.raw_of(RAW, "flat", **changes))
    for match, changes in (
        ("reads the layers 1, 10, and this model has", {"target_layer_ids": [0, 9]}),
        ("whose hidden states have 64 numbers, and this one's have", {"hidden_size": 64}),
        ("has the mask 5,000, which is no token of this model", {"mask_token_id": 5000}),
    ):
        with pytest.raises(ConfigError, match=match):
            opened(block_heads.raw_of(RAW, "flat", **changes))
    (tmp_path / "head" / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="mask_embedding.pt"):
        opened(block_heads.raw_of(RAW))
    (tmp_path / "head" / "mask_embedding.pt").unlink()
    with pytest.raises(UnsupportedModel, match="Open that model, with drafts="):
        rekindle.open_sync(str(tmp_path / "head"), **BLOCKS)


def test_near_the_end_of_the_context_nothing_is_drafted(model: Any, head: str) -> None:
    """A block has no room there."""
    options = {**BLOCKS, "max_model_len": 96}
    ask: dict[str, Any] = LONG | {"max_tokens": 36, "logit_bias": FEW}
    with rekindle.open_sync(model, **options, drafts="none") as session:
        expected = session.generate_sync(tokens(60, seed=3), **ask).token_ids
    with rekindle.open_sync(model, **options, drafts=head) as session:
        assert session.generate_sync(tokens(60, seed=3), **ask).token_ids == expected
