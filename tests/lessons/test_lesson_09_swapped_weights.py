"""After the weights are swapped, nothing of the old prefix cache is matched, on the device or in the tiers below.

Upstream: https://github.com/InternLM/lmdeploy/issues/4917
After an update of the weights, requests went on reading KV of the old ones.
Upstream: https://github.com/vllm-project/vllm/issues/9744
The same in vLLM, found while training with reinforcement learning.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from helpers.plain_loop import plain_loop
from helpers.tiered import MODEL, NEW, ask, opened, prompt
from rekindle._src.models.base import LoadedModel

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")


def other_weights() -> LoadedModel:
    leaves = tuple(leaf * 1.25 if leaf.ndim > 1 else leaf for leaf in jax.tree.leaves(MODEL.leaves))
    return dataclasses.replace(MODEL, leaves=leaves, fingerprint="other weights")


def test_lesson_09_swapped_weights_match_no_old_page(tmp_path: Path) -> None:
    other = other_weights()
    expected = tuple(plain_loop(other, prompt(0), NEW, context=128))
    with opened(tmp_path, restore="auto") as session:
        for index in (0, 1, 2):
            ask(session, index)
        session.save("old").result_sync()
        session.swap_weights(other).result_sync()
        done = session.generate_sync(list(prompt(0)), max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == expected
        assert done.usage.cached_tokens == 0
        session.save("new").result_sync()
        assert [info.refused is None for info in session.cache.snapshots()] == [True, False]
        session.swap_weights(MODEL).result_sync()
        ask(session, 0)
        session.check_integrity()
    with opened(tmp_path, restore="old") as session:
        assert ask(session, 0) == 64
