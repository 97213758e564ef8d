"""A graph is the same after it was JSON, for every family."""

from __future__ import annotations

import pytest

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.base import abstract_model
from rekindle._src.models.loading import known_models
from rekindle._src.models.registry import config_from_hf


@pytest.mark.parametrize("name", by_default(checkpoints.CASES, lambda name: name in checkpoints.UNLIKE))
def test_a_graph_survives(name: str) -> None:
    graph, _ = abstract_model(config_from_hf(checkpoints.CASES[name]), "bfloat16", "int8")
    again = known_models.decode(known_models.encode(graph, [], "bfloat16", name)).graph
    assert again == graph and hash(again) == hash(graph)
