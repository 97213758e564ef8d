"""Options are checked once, at the edge, with the field, the value and the fix."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.sampling import Sampling
from rekindle.errors import ConfigError, InvalidRequest, MissingExtra, RekindleError


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": range(17)}, "stop_token_ids"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": {1: "much"}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_a_bad_sampling_option_names_itself(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Sampling(**options)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert caught.value.fix


def test_an_unknown_option_raises_and_suggests() -> None:
    with pytest.raises(InvalidRequest, match="'temperature'"):
        Sampling.of(None, {"temprature": 1.0})
    with pytest.raises(ConfigError, match="'max_requests'"):
        EngineConfig.of({"max_request": 1})


def test_options_override_a_base() -> None:
    base = Sampling(temperature=0.7, stop="x")
    assert Sampling.of(base, {"top_k": 3}) == Sampling(temperature=0.7, stop=("x",), top_k=3)


def test_logprobs_true_means_one() -> None:
    assert Sampling(logprobs=True).logprobs == 1
    assert Sampling(logprobs=False).logprobs is None
    assert Sampling(logprobs=0).logprobs == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"quantize": "int3"}, "quantize"),
        ({"policy": "fair"}, "policy"),
        ({"precompile": "maybe"}, "precompile"),
        ({"max_requests": 0}, "max_requests"),
        ({"max_requests": 1.5}, "max_requests"),
        ({"page_size": 24}, "page_size"),
        ({"device_pages": 1}, "device_pages"),
        ({"host_memory": -1}, "host_memory"),
        ({"prompt_lookup": -1}, "prompt_lookup"),
        ({"prompt_lookup": True}, "prompt_lookup"),
    ],
)
def test_a_bad_engine_option_names_itself(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "error", [InvalidRequest("top_p", 2, "is too large", "Use 1"), MissingExtra("numba", "cpu"), RekindleError("x")]
)
def test_errors_survive_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_long_value_is_cut() -> None:
    assert len(str(InvalidRequest("prompt", "x" * 10_000, "is long", "Cut it"))) < 300


def test_yes_and_no_are_no_words() -> None:
    for name in ("prefix_cache", "quiet"):
        with pytest.raises(ConfigError, match="must be True or False"):
            EngineConfig.of({name: "no"})
    with pytest.raises(InvalidRequest, match="ignore_eos='no'"):
        Sampling.of(None, {"ignore_eos": "no"})


def test_who_is_out_of_bounds_learns_the_default() -> None:
    with pytest.raises(InvalidRequest, match=r"max_tokens=-1: must be at least 0\. Use a number such as 256"):
        Sampling.of(None, {"max_tokens": -1})


@pytest.mark.parametrize("name", ["device_memory", "host_memory", "disk_memory", "capture_memory"])
def test_bytes_may_be_text_with_a_unit(name: str) -> None:
    """`open(device_memory="2GB")` had to be a whole number, while `cache prune --to 2GB` was one."""
    for text, size in (("2GB", 2_000_000_000), ("512 MiB", 512 << 20), ("1.5GiB", 3 << 29), ("100", 100), ("0", 0)):
        assert getattr(EngineConfig.of({name: text}), name) == size
    for value in ("2 geese", "", "1e999", "nan", "GB", 1.5, True, b"2GB"):
        with pytest.raises(ConfigError, match="is not a size") as caught:
            EngineConfig.of({name: value})
        assert caught.value.field == name and "2GB" in caught.value.fix
    with pytest.raises(ConfigError, match="at least 0"):
        EngineConfig.of({name: "-1GB"})
