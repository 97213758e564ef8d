"""`rope_scaling`: a model beyond its own context computes as transformers does, and is another one for caches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints, gguf_files
from helpers.plain_loop import plain_loop
from helpers.thorough import by_default
from rekindle import EngineConfig
from rekindle._src.core.rope_scaling import RopeScaling
from rekindle._src.models.loading.checkpoint import inspect
from rekindle._src.models.loading.rope_override import with_scaling
from rekindle._src.models.loading.stored import look
from rekindle._src.models.registry import config_from_hf
from rekindle.errors import ConfigError

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 2, "max_tokens_per_step": 32, "page_size": 16, "device_pages": 40,
    "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
OWN = 64  # positions of the model
PROMPT = np.random.default_rng(1).integers(3, 160, 150).tolist()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": OWN}
RAMP = {**YARN, "beta_fast": 8.0, "attention_factor": 1.1}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "yarn": ("yarn:4", YARN),
    "yarn-ramp": (RAMP, RAMP),
    "linear": ("linear:4", {"rope_type": "linear", "factor": 4.0}),
}  # fmt: skip


def config_of(name: str = "llama", **options: Any) -> dict[str, Any]:
    return {**checkpoints.CASES[name], "max_position_embeddings": OWN, "rope_theta": 10000.0, **options}


def written(folder: Path, raw: dict[str, Any]) -> Path:
    checkpoints.write(folder, raw, checkpoints.tensors(raw))
    return folder


@pytest.mark.parametrize("name", by_default(CASES))
def test_an_override_computes_as_a_config_with_it(name: str, tmp_path: Path) -> None:
    option, fields = CASES[name]
    plain = written(tmp_path / "plain", config_of())
    raw = config_of(rope_scaling=fields, max_position_embeddings=4 * OWN)
    expected = plain_loop(checkpoints.model(raw, checkpoints.tensors(raw)), PROMPT, 12, context=4 * OWN)
    cache = str(tmp_path / "cache")
    with pytest.raises(ConfigError, match=f"is beyond the {OWN} positions"):
        rekindle.open_sync(plain, **OPTIONS, max_model_len=4 * OWN, cache_dir=cache)
    with rekindle.open_sync(plain, **OPTIONS, max_model_len=4 * OWN, rope_scaling=option, cache_dir=cache) as session:
        done = session.generate(PROMPT, **GREEDY).result_sync()
        assert list(done.token_ids) == list(expected)
    with rekindle.open_sync(plain, **OPTIONS, max_model_len=OWN, cache_dir=cache) as session:
        other = session.generate(PROMPT[:48], **GREEDY).result_sync()
        assert other.usage.cached_tokens == 0, "pages of the stretched model are not this one's"
    with rekindle.open_sync(
        plain, **OPTIONS, max_model_len=4 * OWN, rope_scaling=option, cache_dir=cache, restore="auto"
    ) as session:
        again = session.generate(PROMPT, **GREEDY).result_sync()
        assert again.token_ids == done.token_ids and again.usage.cached_tokens > 0


@pytest.mark.parametrize(
    "value",
    [
        "yarn:4", "linear:2.5", {"rope_type": "linear", "factor": 8 / 3},
        {"rope_type": "yarn", "factor": 4, "attention_factor": 0.1 * math.log(4) + 1},
        {"type": "yarn", "factor": 8 / 3, "beta_slow": 1e-5, "beta_fast": 1e300, "attention_factor": 5e-324},
        {**YARN, "factor": 63.99999999999999, "original_max_position_embeddings": 1 << 24, "beta_slow": 1.1e-100},
    ],
)  # fmt: skip
def test_the_text_that_a_config_keeps_is_the_same_scaling(value: Any) -> None:
    scaling = RopeScaling.of("rope_scaling", value, ConfigError)
    assert RopeScaling.of("rope_scaling", str(scaling), ConfigError) == scaling
    assert EngineConfig(rope_scaling=value).rope_scaling == str(scaling)


@pytest.mark.parametrize("name", ["yarn", "linear"])
def test_it_computes_as_transformers(name: str, tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    option, fields = CASES[name]
    plain = written(tmp_path / "plain", config_of())
    scaled = written(tmp_path / "scaled", config_of(rope_scaling=fields, max_position_embeddings=4 * OWN))
    model = transformers.AutoModelForCausalLM.from_pretrained(scaled, dtype=torch.float32).eval()
    with torch.no_grad():
        greedy: Any = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        ids = model.generate(torch.tensor([PROMPT]), **greedy)
    with rekindle.open_sync(plain, **OPTIONS, max_model_len=4 * OWN, rope_scaling=option, cache_dir=None) as session:
        done = session.generate(PROMPT, **GREEDY).result_sync()
    assert list(done.token_ids) == ids[0, len(PROMPT) :].tolist()


def test_fingerprints_and_ropes_say_it(tmp_path: Path) -> None:
    stored = look(written(tmp_path, config_of()))
    scaled = [with_scaling(stored, text) for text in ("yarn:4.0", "yarn:2.0", "linear:4.0", "yarn:4.0,original=32")]
    assert len({one.fingerprint for one in (stored, *scaled)}) == 5
    assert with_scaling(stored, None) is stored
    assert scaled[3].raw["max_position_embeddings"] == 128
    gemma = checkpoints.CASES["gemma3"]
    layers = look(written(tmp_path / "gemma", {**gemma, "max_position_embeddings": OWN}))
    ropes = inspect(layers.path).config.ropes
    stretched = config_from_hf(with_scaling(layers, "linear:4.0").raw).ropes
    kinds = {rope.theta: rope.kind for rope in stretched}
    assert {rope.kind for rope in ropes} == {"default"} and sorted(kinds.values()) == ["default", "linear"]
    assert kinds[max(kinds)] == "linear", "layers with a window see no distant token"


def test_a_gguf_file_can_be_stretched_too(tmp_path: Path) -> None:
    file = gguf_files.convert(written(tmp_path / "plain", config_of()), tmp_path / "model.gguf")
    stored = with_scaling(look(file), "yarn:4.0")
    (rope,) = config_from_hf(stored.raw).ropes
    (expected,) = config_from_hf(config_of(rope_scaling=YARN, max_position_embeddings=4 * OWN)).ropes
    assert (rope.kind, rope.factor, rope.original_length) == ("yarn", 4.0, OWN)
    np.testing.assert_array_equal(rope.frequencies(), expected.frequencies())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("ntk:2", "has the type 'ntk'"), ("yarn", "is no scaling"), ("yarn:1", "needs a factor above 1"),
        ("yarn:1e9", "needs a factor above 1, at most 64"), ("yarn:" + "4" * 500, "is no scaling"),
        (7, "is no scaling"), ("yarn:4,original=1e3", "no whole number of positions"),
        ("yarn:99", "needs a factor above 1, at most 64"), ("yarn:4,original=0", "no whole number of positions"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 3}, "has 'beta_fast', which a linear"),
        ({"factor": 2}, "has the type None"), ({"rope_type": "yarn", "factor": True}, "needs a factor"),
        ({"rope_type": "yarn", "factor": float("nan")}, "needs a factor"),
        ({"rope_type": "yarn", "factor": 2, "beta_slow": float("inf")}, "beta_slow=inf, which is no number"),
    ],
)  # fmt: skip
def test_wrong_scalings_are_refused_at_once(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="rope_scaling") as caught:
        EngineConfig(rope_scaling=value)
    assert words in str(caught.value) and '"yarn:4"' in caught.value.fix


def test_a_config_keeps_text_that_reads_back() -> None:
    for value in ("yarn:4", {**YARN, "beta_fast": 8.5, "attention_factor": 1.0625}, "linear:1.5,original=100"):
        text = EngineConfig(rope_scaling=value).rope_scaling
        assert text is not None and EngineConfig(rope_scaling=text).rope_scaling == text
        assert RopeScaling.of("rope_scaling", text, ConfigError) == RopeScaling.of("rope_scaling", value, ConfigError)


def test_models_that_can_not_be_stretched_say_so(tmp_path: Path) -> None:
    positions = written(tmp_path / "gpt2", {**checkpoints.CASES["gpt2"]})
    with pytest.raises(ConfigError, match="rotary positions"):
        rekindle.open_sync(positions, **OPTIONS, rope_scaling="yarn:2")
    own = written(tmp_path / "llama3", {**checkpoints.CASES["llama3-rope"]})
    with pytest.raises(ConfigError, match="the checkpoint's own scaling, which is 'llama3'"):
        rekindle.open_sync(own, **OPTIONS, rope_scaling="yarn:2")
    with pytest.raises(ConfigError, match="is for checkpoints, not for a model in memory"):
        rekindle.open_sync(checkpoints.case("llama"), **OPTIONS, rope_scaling="yarn:2")
    other = written(tmp_path / "another", config_of(rope_theta=20000.0))
    with rekindle.open_sync(other, **OPTIONS, rope_scaling="linear:2", cache_dir=None) as session:
        newer = written(tmp_path / "newer", config_of(rope_theta=20000.0))
        session.swap_weights(newer).result_sync()  # it is stretched as well, so that the configs agree
