"""Sites of adapters are the linear layers of the blocks, in every family."""

from __future__ import annotations

import pytest

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.base import abstract_model, merge
from rekindle._src.models.nn.linear import Linear
from rekindle._src.models.nn.moe import Stack
from rekindle._src.models.registry import config_from_hf
from rekindle._src.models.roles import local_shape


@pytest.mark.parametrize("name", by_default(checkpoints.CASES, lambda name: name in checkpoints.ONE_EACH.values()))
def test_sites_are_linear_layers_and_stacks_of_experts(name: str) -> None:
    config = config_from_hf(checkpoints.CASES[name])
    graph, leaves = abstract_model(config)
    model = merge(graph, leaves)
    sites = sites_of(config).sites
    assert sites
    for site in sites:
        layer: object = model
        for part in site.path.split("."):
            layer = layer[int(part)] if part.isdecimal() else getattr(layer, part)  # type: ignore[index]
        assert isinstance(layer, Stack if site.experts else Linear), site.path
        assert layer.shape[-2:] == (site.outputs, site.inputs)
        assert len(site.modules) == max(1, site.experts) * len(site.rows)
        if site.experts:
            assert layer.shape[0] == site.experts
        for sizes in ({"expert": 1, "model": 1}, {"expert": 1, "model": 2}):
            local = local_shape(site.role, layer.shape, sizes)
            assert sum(site.local_rows(sizes)) == local[-2], site.path
            assert local_shape(site.up_role, (1, 16, site.outputs), sizes)[-1] == local[-2]
            assert local_shape(site.down_role, (1, 1, 16, site.inputs), sizes)[-1] == local[-1]
