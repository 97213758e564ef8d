"""Heads of EAGLE-3: each form of their checkpoints is the same head, and those of other models are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rekindle
from helpers import checkpoints, eagle
from rekindle._src.core.config import EngineConfig
from rekindle._src.drafts.entries import KeptEntries, OtherHeadKind
from rekindle._src.models.loading import checkpoint, known_models
from rekindle._src.opening.blueprint import Blueprint, blueprint
from rekindle._src.opening.open_request import OpenRequest
from rekindle._src.opening.source import source_of
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
    own = checkpoints.described(folder, dtype="float32")
    spec = own.graph.config.eagle
    assert spec is not None
    assert (spec.own_embedding, spec.own_head, spec.maps, spec.norm_before_join) == (True, True, False, True)
    assert {"embed.weight", "inputs_norm.weight"} < {*own.graph.paths}
    assert "tokens" not in own.graph.paths


def planned(model: str, folder: str, **options: Any) -> Blueprint:
    request = OpenRequest(model, EngineConfig(drafts=folder, **options))
    return blueprint(request, source_of(request))


def test_a_head_has_leaves_and_a_graph_of_its_own(tmp_path: Path) -> None:
    """The model's are those without it, but for what the session keeps of each token: its pages, and what it reads."""
    model, folder = str(checkpoints.write(tmp_path / "model", RAW)), head(tmp_path / "head")
    own = checkpoints.described(folder, dtype="bfloat16")
    alone = checkpoints.described(model, dtype="bfloat16", quantize="int8").graph
    plan = planned(model, folder, quantize="int8", dtype="bfloat16")
    assert (plan.graph.paths, plan.graph.precision) == (alone.paths, alone.precision)
    assert plan.model == dataclasses.replace(alone.config, added_pages=(own.graph.config.pages_of(0),))
    assert plan.drafts.fingerprint != own.fingerprint  # it is quantised, too
    (part,) = (each for each in plan.programs.features.parts if isinstance(each, KeptEntries))
    assert plan.programs.features.streams == part.streams == (0, 1, 2)
    assert len(jax.tree.leaves(part.operand_shapes)) >= len(own.graph.paths)
    assert plan.page_identity("model").fingerprint == f"model-with-head-{plan.drafts.fingerprint}"


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
            checkpoints.described(eagle.write(tmp_path / key, raw | {key: value}, state))
    without = {name: value for name, value in state.items() if name != "d2t"}
    with pytest.raises(UnsupportedModel, match=r"draft_vocab_size=60 is not .* lacks the tensor d2t"):
        checkpoints.described(eagle.write(tmp_path / "map", raw, without))
    with pytest.raises(UnsupportedModel, match="model_type='qwen3' of an EAGLE-3 head"):
        checkpoints.described(eagle.write(tmp_path / "kind", raw | {"model_type": "qwen3"}, state))
    model = str(checkpoints.write(tmp_path / "model", RAW))
    for name, ids in {"far": np.full(60, 150), "twice": -np.arange(60)}.items():
        folder = eagle.write(tmp_path / name, raw, state | {"d2t": ids.astype(np.int64)})
        (_, own) = planned(model, folder).drafts.kinds
        assert isinstance(own, OtherHeadKind)
        with pytest.raises(CheckpointError, match=r"the tensor d2t of .* names"):
            own.load()


def test_a_head_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="which drafts for another model and makes no texts of its own"):
        rekindle.open_sync(head(tmp_path), quiet=True)
