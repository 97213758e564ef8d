"""A graph is the same after it was JSON, for every family."""

from __future__ import annotations

import json

import pytest

from helpers import checkpoints
from rekindle._src.models.base import abstract_model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading import graph_json


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_a_graph_survives(name: str) -> None:
    graph, _ = abstract_model(ModelConfig.from_hf(checkpoints.CASES[name]), "bfloat16", "int8")
    again = graph_json.decode(json.loads(json.dumps(graph_json.encode(graph))))
    assert again == graph and hash(again) == hash(graph)
