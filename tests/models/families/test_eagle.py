"""Heads of EAGLE-3: each form of their checkpoints is the same head, and those of other models are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints, eagle
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import graph_of
from rekindle._src.models.loading import checkpoint, known_models
from rekindle._src.opening.source import CheckpointSource, HeadSource, drafter_for, with_head
from rekindle.errors import CheckpointError, ConfigError, UnsupportedModel

RAW = checkpoints.CASES["llama"]


def head(folder: Path, form: str = eagle.FORMS[0], state: Any = None, **changes: Any) -> str:
    raw = eagle.raw_of(RAW, form, **changes)
    return eagle.write(folder, raw, eagle.tensors(raw) if state is None else state)


@pytest.mark.parametrize("form", eagle.FORMS[1:])
def test_all_forms_are_the_same_head(form: str, tmp_path: Path) -> None:
    expected = checkpoint.load(head(tmp_path / "one"), dtype="float32")
    raw = eagle.raw_of(RAW, form)
    state = {f"model.{name}" if name.startswith("mid") else name: value for name, value in eagle.tensors(raw).items()}
    found = checkpoint.load(head(tmp_path / "other", form, state), dtype="float32")
    assert found.config == expected.config
    checkpoints.assert_same(found, expected)
    kept = json.dumps(known_models.encode_graph(found.graph), default=dataclasses.asdict)
    assert known_models.decode_graph(json.loads(kept)) == found.graph


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 160, "norm_before_fc": True}])
def test_a_head_is_read_from_gguf(changes: dict[str, Any], tmp_path: Path) -> None:
    raw = eagle.raw_of(RAW, **changes)
    state = eagle.tensors(raw, embedding=bool(changes))
    expected = checkpoint.load(eagle.write(tmp_path / "folder", raw, state), dtype="float32")
    found = checkpoint.load(eagle.write_file(tmp_path / "head.gguf", raw, state), dtype="float32")
    wanted, own = expected.config.eagle, found.config.eagle
    assert wanted is not None
    assert own == dataclasses.replace(wanted, absolute=True)
    assert (found.config.reads, found.config.attention) == (expected.config.reads, expected.config.attention)
    ours, theirs = checkpoints.leaves(found), checkpoints.leaves(expected)
    if wanted.maps:
        theirs["tokens"] = theirs["tokens"] + np.arange(wanted.vocab_size)
    assert [*ours] == [*theirs]
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[path], err_msg=path)


def test_optional_parts(tmp_path: Path) -> None:
    raw = eagle.raw_of(RAW, draft_vocab_size=160, norm_before_fc=True, eagle_aux_hidden_state_layer_ids=None)
    folder = eagle.write(tmp_path, raw, eagle.tensors(raw, embedding=True))
    own = checkpoint.describe(folder, dtype="float32")
    spec = own.graph.config.eagle
    assert spec is not None
    assert (spec.own_embedding, spec.own_head, spec.maps, spec.norm_before_join) == (True, True, False, True)
    assert {"embed.weight", "inputs_norm.weight"} < {*own.graph.paths}
    assert "tokens" not in own.graph.paths


def test_a_model_with_a_head_is_that_model_and_the_head(tmp_path: Path) -> None:
    own = checkpoint.describe(head(tmp_path / "head"), dtype="bfloat16").graph
    model = checkpoint.describe(checkpoints.write(tmp_path / "model", RAW), dtype="bfloat16", quantize="int8").graph
    both = with_head(model, dataclasses.replace(own.config, reads=(0, 1, 2)), own)
    assert {*both.paths} == {*model.paths, *(f"drafter.{path}" for path in own.paths)}
    shapes = dict(zip(both.paths, graph_of(both.config, both.precision)[1], strict=True))
    for graph, prefix in ((model, ""), (own, "drafter.")):
        for path, leaf in zip(graph.paths, graph_of(graph.config, graph.precision)[1], strict=True):
            assert shapes[prefix + path] == leaf, path
    assert both.config.streams_read == (0, 1, 2)
    assert both.config.read_size == 3 * model.config.hidden_size


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"target_hidden_size": 64}, "hidden states have 64 numbers, and this one's have 48"),
    "another vocabulary": ({"vocab_size": 200}, "has a vocabulary of 200 tokens, and this model one of 160"),
    "too many layers": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "reads the layers 0, 1, 3, .* has 2"),
    "layers of a deep model": ({"eagle_aux_hidden_state_layer_ids": None}, "reads the layers 2, 1, -1"),
    "no embedding of its width": ({"hidden_size": 32, "target_hidden_size": 48}, "no embedding, .* of 32 numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_heads_of_other_models_are_refused(case: str, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    folder = head(tmp_path / "head", **changes)
    model = str(checkpoints.write(tmp_path / "model", RAW))
    with pytest.raises(ConfigError, match=words):
        rekindle.open_sync(model, drafts=folder, quiet=True)


def test_damaged_heads_are_refused(tmp_path: Path) -> None:
    raw = eagle.raw_of(RAW)
    state = eagle.tensors(raw)
    lacking = {name: value for name, value in state.items() if name != "fc.weight"}
    with pytest.raises(CheckpointError, match=r"missing: fc\.weight \[48, 144\]"):
        checkpoint.load(eagle.write(tmp_path / "lacking", raw, lacking))
    for key, value in {"num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [0, -1, 1]}.items():
        with pytest.raises(UnsupportedModel, match=key):
            checkpoint.describe(eagle.write(tmp_path / key, raw | {key: value}, state))
    without = {name: value for name, value in state.items() if name != "d2t"}
    with pytest.raises(UnsupportedModel, match=r"draft_vocab_size=60 is not .* lacks the tensor d2t"):
        checkpoint.describe(eagle.write(tmp_path / "map", raw, without))
    with pytest.raises(UnsupportedModel, match="model_type='qwen3' of an EAGLE-3 head"):
        checkpoint.describe(eagle.write(tmp_path / "kind", raw | {"model_type": "qwen3"}, state))
    model = str(checkpoints.write(tmp_path / "model", RAW))
    for name, ids in {"far": np.full(60, 150), "twice": -np.arange(60)}.items():
        folder = eagle.write(tmp_path / name, raw, state | {"d2t": ids.astype(np.int64)})
        config = EngineConfig(drafts=folder)
        source = CheckpointSource(model, checkpoint.describe(model, dtype="float32"))
        own = drafter_for(source, config)
        assert own is not None
        with pytest.raises(CheckpointError, match=r"the tensor d2t of .* names"):
            HeadSource(source, own).load(source.placed(config)[1])


def test_a_head_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="which drafts for another model and makes no texts of its own"):
        rekindle.open_sync(head(tmp_path), quiet=True)
