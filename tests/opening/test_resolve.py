"""What the user left open becomes numbers, once; what cannot work is refused with its numbers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from helpers.checkpoints import CASES, OF_FAMILY
from helpers.driving import TINY
from rekindle._src.core.config import EngineConfig
from rekindle._src.data_shards.sizes import config_of_one
from rekindle._src.models.base import Placement
from rekindle._src.models.registry import config_from_hf
from rekindle._src.opening.resolve import resolve
from rekindle._src.programs.kv_layout import abstract, page_bytes
from rekindle.errors import ConfigError, OutOfMemory

MODEL = config_from_hf(TINY)


def test_defaults_become_numbers_and_resolving_again_changes_nothing() -> None:
    resolved = resolve(EngineConfig(), MODEL)
    assert resolved.dtype == resolved.kv_dtype == "bfloat16"
    assert resolved.max_model_len == MODEL.max_position_embeddings
    for name in ("max_model_len", "page_size", "device_pages", "device_memory"):
        assert getattr(resolved, name) is not None
    assert resolve(resolved, MODEL) == resolved


def test_a_long_model_is_cut_to_the_default_length() -> None:
    longer = dataclasses.replace(MODEL, max_position_embeddings=131072)
    assert resolve(EngineConfig(), longer).max_model_len == 4096
    assert resolve(EngineConfig(max_model_len=8192), longer).max_model_len == 8192


def test_a_text_whose_tokens_see_those_behind_them_fits_a_step() -> None:
    model = config_from_hf(OF_FAMILY["modernbert"][0])
    resolved = resolve(EngineConfig(max_requests=4, max_tokens_per_step=32), model)
    assert resolved.max_model_len == resolved.max_tokens_per_step == model.max_position_embeddings == 256
    assert not resolved.prefix_cache and resolve(resolved, model) == resolved
    assert resolved.device_pages == 1 + 2 * (256 // 32 + 4) + 256 // 32  # two steps in flight, and a text that waits
    assert resolve(EngineConfig(max_model_len=40), model).max_tokens_per_step == EngineConfig().max_tokens_per_step


class Devices(Placement):
    """Some devices that share one model."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size


def test_devices_that_share_a_head_of_keys_can_not_keep_an_attention_budget() -> None:
    config, model = EngineConfig(attention_budget=64), MODEL.with_budget(64)
    heads = MODEL.num_kv_heads
    assert resolve(config, model, placement=Devices(heads)).attention_budget == 64
    with pytest.raises(ConfigError, match=f"attention_budget.*64.*{2 * heads} devices.*Use at most {heads} device"):
        resolve(config, model, placement=Devices(2 * heads))


def test_prefixes_are_not_shared_where_keys_depend_on_the_length_of_the_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    longrope = config_from_hf(CASES["phi3-longrope-crossing"])  # its original context is 48 tokens
    assert resolve(EngineConfig(max_model_len=48), longrope).prefix_cache
    assert not caplog.records
    assert not resolve(EngineConfig(max_model_len=64), longrope).prefix_cache
    assert "no prefix cache" in caplog.text


def test_memory_becomes_whole_pages() -> None:
    size = page_bytes(MODEL, 16, "float32")
    resolved = resolve(EngineConfig(page_size=16, kv_dtype="float32", device_memory=10 * size + 7), MODEL)
    assert (resolved.device_pages, resolved.device_memory) == (10, 10 * size)
    kv = abstract(MODEL, 10, 16, "float32")
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv)) == 10 * size


def test_given_pages_are_kept() -> None:
    assert resolve(EngineConfig(device_pages=33), MODEL).device_pages == 33


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"max_model_len": 1000}, ConfigError, "256 positions"),
        ({"max_tokens_per_step": 8}, ConfigError, "max_requests=16"),
        ({"prompt_lookup": 16}, ConfigError, "Use at most 15"),
        ({"max_requests": 1, "prompt_lookup": 2}, ConfigError, "Use at most 1"),
        ({"device_memory": 100}, OutOfMemory, "Raise device_memory"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve(EngineConfig(**changes), MODEL)


def test_data_shards_have_equal_shares_of_a_step() -> None:
    """Sizes are rounded up, so that the session has what was asked for; pages are those of each device."""
    placement: Any = SimpleNamespace(data=3, divided=True, pages_apart=False, local_config=lambda model: model)
    asked = EngineConfig(max_requests=4, max_tokens_per_step=32, device_pages=9, mesh={"data": 3})
    resolved = resolve(asked, MODEL, placement=placement)
    assert (resolved.max_requests, resolved.max_tokens_per_step, resolved.device_pages) == (6, 33, 9)
    own = config_of_one(resolved, 3)
    assert (own.max_requests, own.max_tokens_per_step, own.device_pages) == (2, 11, 9)
    assert config_of_one(resolved, 1) is resolved
    with pytest.raises(ConfigError, match=r"makes 2 rows in each of 3 data shards"):
        resolve(dataclasses.replace(asked, prompt_lookup=2), MODEL, placement=placement)
