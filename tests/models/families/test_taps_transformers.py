"""Captured residuals of every family against transformers' hidden states, through a session that cuts and shares."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from golden.make import PROMPT
from helpers import checkpoints
from helpers.sessions import front_of
from helpers.tapping import difference
from rekindle import Capture
from rekindle._src.capabilities.captures.request import TAPS
from rekindle._src.core.captured import Captured
from rekindle._src.core.taps import SITES
from rekindle._src.models.base import LoadedModel

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 16, "max_model_len": 64, "page_size": 8,
    "cache_dir": None, "precompile": "lazy", "quiet": True,
}  # fmt: skip


@functools.cache
def case(name: str) -> tuple[LoadedModel, list[Any]]:
    """A random checkpoint, and transformers' hidden states of it at the prompt."""
    raw = checkpoints.CASES[name]
    state = checkpoints.tensors(raw, seed=7)
    with tempfile.TemporaryDirectory() as folder:
        expected = hidden_states(checkpoints.write(Path(folder), raw, state), PROMPT)
    return checkpoints.model(raw, state), expected


def hidden_states(folder: Path, prompt: list[int]) -> list[Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    return [state[0].float().numpy() for state in states]


@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
@pytest.mark.parametrize("name", checkpoints.ONE_EACH.values())
def test_residuals_are_transformers_hidden_states(name: str) -> None:
    model, expected = case(name)
    with rekindle.open_sync(model, **OPTIONS) as session:
        facts = TAPS.of(front_of(session))
        assert facts is not None
        everything: dict[str, Any] = {site: "all" for site in SITES if facts.sites.get(site) or site == "norm"}
        wanted: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "capture": everything}
        many = [session.submit(PROMPT[: 24 - index], **wanted) for index in range(4)]
        for index, handle in enumerate(many):
            done = handle.result_sync()
            count, captured = 24 - index, done.captured
            found = [
                captured["residual_before", 0],
                *(captured["residual", layer] for layer in range(facts.layers - 1)),
            ]
            for array, state_ in zip([*found, captured["norm"]], expected, strict=True):
                assert difference(array[:count], state_[:count]) < TOLERANCE
            for layer in range(1, facts.layers):
                np.testing.assert_array_equal(captured["residual_before", layer], captured["residual", layer - 1])
            chosen = captured["logits", facts.layers - 1][count - 1 :].argmax(axis=-1)
            assert chosen.tolist() == list(done.token_ids)[: len(chosen)]
            for key, array in captured.items():
                assert len(array) == count + 2 and np.isfinite(array).all(), key


def check(captured: Captured, expected: list[Any], count: int) -> None:
    """Compare what was captured at the positions of the prompt."""
    places = captured.positions[captured.positions < count]
    for key, array in captured.items():
        last = key == "norm"  # of the last layer's residual, transformers shows the norm alone
        if last or key[1] < len(expected) - 2:
            state = expected[-1 if last else key[1] + 1]
            assert difference(array[: len(places)], state[places]) < TOLERANCE, key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", checkpoints.ONE_EACH.values())
def test_residuals_in_a_batch_of_sixteen_with_preemptions_drafts_and_hits(name: str) -> None:
    model, expected = case(name)
    wants: list[Any] = [{"residual": "all"}, {"residual": 0}, {"norm": True}, None, Capture({"residual": [0, -1]}, -1)]
    crowded = {"max_requests": 16, "max_tokens_per_step": 48, "device_pages": 60}
    drafts = {} if model.config.is_recurrent else {"prompt_lookup": 2}
    greedy: dict[str, Any] = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
    with rekindle.open_sync(model, **OPTIONS | crowded | drafts) as session:
        counts = [24 - index % 9 for index in range(16)]
        handles = [
            session.submit(PROMPT[:count], **greedy, salt=str(index), capture=wants[index % len(wants)])
            for index, count in enumerate(counts)
        ]
        for count, handle in zip(counts, handles, strict=True):
            done = handle.result_sync()
            if done.captured is not None:
                check(done.captured, expected, count)
        assert session.stats().preemptions > 0, "there was room for all of them"
        for cached in (0, 16):
            wanted = Capture({"residual": "all", "norm": True}, [19, -1])
            done = session.generate_sync(PROMPT, max_tokens=1, capture=wanted)
            hit = done.usage.cached_tokens
            assert hit < 19 if model.config.is_recurrent else hit == cached  # states are kept at a few positions
            assert done.captured.positions.tolist() == [19, 23]
            check(done.captured, expected, 24)
        kept = Capture({"residual": "all", "norm": True}, keep=True)
        for cached in (0, 23):
            done = session.generate_sync(PROMPT, max_tokens=1, capture=kept)
            hit = done.usage.cached_tokens
            assert hit <= cached if model.config.is_recurrent else hit == cached
            assert done.captured.positions.tolist() == list(range(24))
            check(done.captured, expected, 24)
