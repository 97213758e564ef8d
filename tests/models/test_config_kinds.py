"""A value of the wrong kind in a config.json is refused by its key, whatever the key and the family."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
import random
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.families import FAMILY_CASES
from rekindle._src.models import hf_config
from rekindle._src.models.base import abstract_model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.config_kinds import KINDS_OF_KEYS
from rekindle._src.models.registry import config_from_hf, manifest
from rekindle.errors import RekindleError, UnsupportedModel

Place = tuple[str | int, ...]
CASES: dict[str, dict[str, Any]] = {
    name: raw for it in FAMILY_CASES.values() for cases in (it.cases, it.embeds) for name, raw in cases.items()
}
VALUES: tuple[Any, ...] = (
    "x", "", "1", [], {}, None, True, False, -1, 0, 1, 3, 0.5, -2.5, 1e308, math.inf, math.nan, 2**70, [1], [[1]],
    ["x"], [None], {"a": 1},
)  # fmt: skip
ABSENT = (
    "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim", "layer_norm_eps", "layer_norm_epsilon",
    "layer_types", "max_position_embeddings", "mlp_bias", "norm_eps", "norm_topk_prob", "quantization_config",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor", "sliding_window",
    "tie_word_embeddings", "torch_dtype",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps='x' in config.json is not a number of at least 0"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ("llama", {"attention_bias": "no"}, "attention_bias='no' in config.json is not true or false"),
        ("llama", {"tie_word_embeddings": [1]}, r"tie_word_embeddings=\[1\] in config.json is not true or false"),
        ("llama", {"bos_token_id": [1]}, r"bos_token_id=\[1\] in config.json is not a whole number"),
        ("llama", {"eos_token_id": ["x"]}, r"eos_token_id=\['x'\] in config.json is not a token id, or a list"),
        ("llama", {"torch_dtype": {"a": 1}}, r"torch_dtype=\{'a': 1\} in config.json is not a text"),
        ("llama", {"rope_theta": "x"}, "rope_theta='x' in config.json is not a positive, finite number"),
        ("llama", {"rope_scaling": [1]}, r"rope_scaling=\[1\] in config.json is not an object"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r"rope_scaling\.factor='2' in"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": -1}}}, r"full_attention\.rope_theta=-1 in"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 in config.json is not a positive"),
        ("ling3", {"kda_lower_bound": 0.0}, "kda_lower_bound=0.0 in config.json is not a negative, finite number"),
        ("gemma2", {"attn_logit_softcapping": "x"}, "attn_logit_softcapping='x'"),
        ("granite", {"logits_scaling": "x"}, "logits_scaling='x'"),
        ("gpt2", {"scale_attn_weights": "x"}, "scale_attn_weights='x'"),
        ("llama-yarn", {"rope_theta": 1}, "rope_type='yarn' with rope_theta=1 .* makes frequencies that are not fin"),
    ],
)  # fmt: skip
def test_the_key_the_value_and_its_kind_are_named(case: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        config_from_hf(CASES[case] | change)


def test_every_key_that_a_family_reads_has_a_kind() -> None:
    folder = Path(hf_config.__file__).parent
    unknown: list[str] = []
    for path in (folder / "hf_config.py", *sorted((folder / "families").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            owner, _, method = ast.unparse(node.func).rpartition(".")
            reads = method in ("get", "nullable") and owner in ("keys", "self", "options")
            name = node.args[1] if method == "_factor" else node.args[0]
            key = name.value if isinstance(name, ast.Constant) else None
            if (reads or method == "_factor") and isinstance(key, str) and key not in KINDS_OF_KEYS:
                unknown.append(f"{path.name}:{node.lineno}: {key}")
    assert not unknown, "\n".join(unknown)


def _places(raw: dict[str, Any], outer: Place = ()) -> Iterator[Place]:
    for key, value in raw.items():
        if key != "model_type":
            yield (*outer, key)
        if isinstance(value, dict):
            yield from _places(value, (*outer, key))
        if isinstance(value, list) and value:
            yield (*outer, key, 0)


def _changed(raw: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    result = json.loads(json.dumps(raw))
    at: Any = result
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    return typing.cast(dict[str, Any], result)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _is(value: Any, hint: Any) -> bool:
    """True if a value is what an annotation says, all the way down."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is(value, one) for one in typing.get_args(hint))
    if origin is tuple:
        kinds = typing.get_args(hint)
        if kinds[-1] is not Ellipsis:
            return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is, value, kinds))
        return isinstance(value, tuple) and all(_is(one, kinds[0]) for one in {id(one): one for one in value}.values())
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return isinstance(value, hint) and all(_is(getattr(value, name), it) for name, it in _hints(hint).items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is bool:
        return isinstance(value, bool) or value in (0, 1)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("share", [0.02, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_config_with_any_value_anywhere_opens_or_is_refused_by_a_typed_error(share: float) -> None:
    """172 of 3,938 ended in a TypeError, some of them once the model was open."""
    rng, seen, bad, refused = random.Random(0), set[str](), list[str](), 0
    for name, raw in CASES.items():
        for place in (*_places(raw), *((key,) for key in ABSENT if key not in raw)):
            for value in VALUES:
                if rng.random() >= share:
                    continue
                try:
                    config = config_from_hf(_changed(raw, place, value))
                    digest = config.digest()
                    if digest in seen:
                        continue
                    seen.add(digest)
                    hash(config)
                    _open(config)
                except RekindleError:
                    refused += 1
                except Exception as error:
                    bad.append(f"{name} with {place}={value!r}: {error!r}")
    assert not bad, "\n".join(bad[:40])
    assert refused > len(seen) > 50


def _open(config: ModelConfig) -> None:
    assert _is(config, ModelConfig)
    manifest(config)
    for rope in config.ropes:
        assert all(map(math.isfinite, rope.frequencies()))
    sizes = config.vocab_size, config.hidden_size, config.intermediate_size, config.max_position_embeddings
    if max(sizes) < 1e5 and config.num_layers < 40:
        abstract_model(config)
