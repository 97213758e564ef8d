"""A request whose numbers are NaN or infinite fails by name; its neighbours' tokens are what they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.base import LoadedModel
from rekindle._src.programs.sampling import NOT_FINITE, marked
from rekindle.errors import RequestFailed

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
OPTIONS: Mapping[str, Any] = {  # the shapes of helpers.tiered, whose programs they share
    "quiet": True, "max_model_len": 128, "max_requests": 2, "max_tokens_per_step": 32, "device_pages": 17,
    "page_size": 8, "cache_dir": None, "dtype": "float32", "precompile": "lazy",
}  # fmt: skip
BROKEN = 77  # the token whose embedding is spoiled
GOOD, BAD = [5, 6, 7, 8], [5, 6, BROKEN, 8]


def spoiled(path: str, index: Any, value: float) -> LoadedModel:
    model = checkpoints.case("llama")
    leaves = tuple(
        leaf.at[index].set(value) if here == path else leaf
        for here, leaf in zip(model.graph.paths, model.leaves, strict=True)
    )
    return dataclasses.replace(model, leaves=leaves, fingerprint=f"spoiled-{path}-{value}")


@pytest.mark.parametrize("value", by_default([np.nan, np.inf]))
@pytest.mark.parametrize("sampling", by_default([{}, {"temperature": 1.0, "seed": 3}]), ids=["greedy", "drawn"])
def test_the_request_fails_and_its_neighbours_do_not(value: float, sampling: dict[str, Any], tmp_path: Any) -> None:
    options = {**OPTIONS, "cache_dir": tmp_path}
    wanted = {"max_tokens": 12, "ignore_eos": True, "logit_bias": {BROKEN: -100.0}, **sampling}
    with rekindle.open_sync(checkpoints.case("llama"), **options) as session:
        expected = session.generate_sync(GOOD, **wanted).token_ids
    with rekindle.open_sync(spoiled("embed.weight", BROKEN, value), **options) as session:
        handles = [session.submit(prompt, **wanted) for prompt in (GOOD, BAD, GOOD)]
        assert handles[0].result_sync().token_ids == handles[2].result_sync().token_ids == expected
        with pytest.raises(RequestFailed, match=r"token 1 of request .* not finite.*rekindle doctor --model"):
            handles[1].result_sync()
        assert session.generate_sync(GOOD, **wanted).token_ids == expected
        session.check_integrity()


def test_a_model_that_is_broken_everywhere_fails_every_request(tmp_path: Any) -> None:
    model = spoiled("layers.1.mlp.down.weight", (0, 0), np.nan)
    with rekindle.open_sync(model, **{**OPTIONS, "cache_dir": tmp_path}) as session:
        for prompt in (GOOD, BAD, list(range(40))):
            with pytest.raises(RequestFailed, match="not finite"):
                session.generate_sync(prompt, max_tokens=4)
        session.check_integrity()


@pytest.mark.thorough
@pytest.mark.parametrize("quantize", ["int8", "int4-32"])
def test_rounding_rows_to_integers_hides_nothing(quantize: str, tmp_path: Path) -> None:
    """A norm's weights stay what they are, and the products after the norm round rows."""
    raw = checkpoints.CASES["llama"] | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    state = dict(checkpoints.tensors(raw))
    whole = checkpoints.write(tmp_path / "whole", raw, state)
    name = "model.layers.1.post_attention_layernorm.weight"
    state[name] = np.where(np.arange(64) == 40, np.float32(np.nan), state[name])
    broken = checkpoints.write(tmp_path / "broken", raw, state)
    options = {**OPTIONS, "cache_dir": tmp_path / "cache", "quantize": quantize}
    with rekindle.open_sync(whole, **options) as session:
        assert session.generate_sync(GOOD, max_tokens=2, ignore_eos=True).finish_reason == "length"
    with rekindle.open_sync(broken, **options) as session:
        for prompt in (GOOD, list(range(40))):
            with pytest.raises(RequestFailed, match="not finite"):
                session.generate_sync(prompt, max_tokens=4)
        session.check_integrity()


@pytest.mark.thorough
@pytest.mark.parametrize("pages", [None, "int8"])
def test_a_nan_in_keys_or_a_gate_alone_is_found(pages: str | None, tmp_path: Path) -> None:
    """An exponential that bounds its argument must not lose it."""
    raw = checkpoints.CASES["llama"] | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
    state = dict(checkpoints.tensors(raw))
    options = {**OPTIONS, "cache_dir": tmp_path / "cache", **({} if pages is None else {"kv_dtype": pages})}
    for part in ("0.self_attn.k_proj", "1.mlp.gate_proj"):
        name = f"model.layers.{part}.weight"
        weights = np.array(state[name], np.float32)
        weights[3, 5] = np.nan
        broken = checkpoints.write(tmp_path / part, raw, state | {name: weights})
        with rekindle.open_sync(broken, **options) as session:
            for prompt in (GOOD, list(range(90))):
                with pytest.raises(RequestFailed, match="not finite"):
                    session.generate_sync(prompt, max_tokens=4)
            session.check_integrity()


def test_rows_are_marked_by_their_hidden_state_their_logit_or_a_nan_beside_it() -> None:
    hidden, logits = np.ones((6, 8), np.float32), np.zeros((6, 5), np.float32)
    hidden[1, 3], hidden[2, 0], logits[3, 2], logits[4, 1] = np.nan, -np.inf, np.inf, np.nan
    tokens = jnp.array([4, 1, 1, 2, 4, 3], jnp.int32)
    assert marked(tokens, jnp.asarray(hidden), jnp.asarray(logits)).tolist() == [4, *[NOT_FINITE] * 4, 3]


def test_a_nan_beside_the_last_token_marks_the_row() -> None:
    logits = jnp.zeros((1, 5)).at[0, 1].set(jnp.nan)
    assert marked(jnp.array([4], jnp.int32), jnp.ones((1, 8)), logits).tolist() == [NOT_FINITE]
    assert marked(jnp.array([4], jnp.int32), jnp.ones((1, 8)), jnp.zeros((1, 5))).tolist() == [4]
