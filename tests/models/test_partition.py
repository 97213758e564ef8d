"""How models are divided: every leaf of every family has a role that fits, and what can't be divided is refused."""

from __future__ import annotations

import pytest

from helpers import checkpoints, mesh_models
from helpers.thorough import by_default
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.models.base import ALONE, abstract_model, leaf_shapes
from rekindle._src.models.partition import Partition, roles_of
from rekindle._src.models.placement import placement_of
from rekindle._src.models.registry import FAMILIES, config_from_hf
from rekindle._src.models.roles import REPLICATED, local_shape
from rekindle.errors import ConfigError

MESHES = [Partition(2), Partition(4), Partition(8), Partition(1, 2), Partition(2, 2), Partition(4, 2)]


@pytest.mark.parametrize("name", by_default(sorted(checkpoints.CASES), lambda name: name in checkpoints.UNLIKE))
def test_the_parts_of_leaves_have_the_shapes_that_one_device_computes_with(name: str) -> None:
    """Quantised in 8 bits, so that matrices have scales; the matrices have the shapes that they have without."""
    config = config_from_hf(mesh_models.raw(name))
    graph, leaves = abstract_model(config, "bfloat16", "int8")
    roles = roles_of(graph)
    assert set(roles) == set(graph.paths)
    for partition in MESHES:
        if partition.expert > 1 and not any(config.moe):
            continue
        partition.check(config)
        local = leaf_shapes(partition.graph(graph))
        found = [
            local_shape(roles[path], leaf.shape, partition.sizes)
            for path, leaf in zip(graph.paths, leaves, strict=True)
        ]
        assert found == [leaf.shape for leaf in local], (name, partition)


def test_every_family_divides_all_of_its_matrices() -> None:
    """A matrix without a role would be whole on every device, and nothing else would say so."""
    whole = ("position_embed.weight", "router.weight", "shared_gate.weight", "correction", "down_bias")
    # These are small compared with what they need.
    whole += ("layer_projection.weight", "embedding_gate.weight", "embedding_out.weight")
    whole += ("narrow.weight", "widen.weight")  # between all experts and the stream
    for model_type in FAMILIES:
        for raw in checkpoints.OF_FAMILY[model_type]:
            config = config_from_hf(raw)
            graph, leaves = abstract_model(config)
            roles = roles_of(graph)
            for path, leaf in zip(graph.paths, leaves, strict=True):
                matrix = len(leaf.shape) > 1 and "norm" not in path and not path.endswith(whole)
                assert not (matrix and roles[path] == REPLICATED), (model_type, path)


def test_the_parts_together_are_hardly_larger_than_the_model() -> None:
    config = config_from_hf(mesh_models.raw("llama", kv_heads=8))
    graph, leaves = abstract_model(config)
    roles = roles_of(graph)
    size = sum(
        local_shape(roles[path], leaf.shape, {"expert": 1, "model": 4})[0] * (leaf.size // leaf.shape[0])
        for path, leaf in zip(graph.paths, leaves, strict=True)
        if path.endswith("qkv.weight")
    )
    assert size * 4 == sum(leaf.size for path, leaf in zip(graph.paths, leaves, strict=True) if "qkv" in path)


def test_odd_head_counts_are_refused_with_the_numbers_that_work() -> None:
    config = config_from_hf(checkpoints.CASES["smollm2"])  # 9 heads over 3
    with pytest.raises(ConfigError, match="2 devices can't share 9 attention heads over 3 kv heads") as caught:
        Partition(2).check(config)
    assert caught.value.fix == "Use 1, 3 or 9 devices"
    Partition(3).check(config)
    Partition(9).check(config)


def test_heads_of_states_are_divided_evenly_too() -> None:
    config = config_from_hf(checkpoints.CASES["falcon-h1"] | {"num_attention_heads": 12})  # 6 heads of states
    with pytest.raises(ConfigError, match=r"4 devices .* states of 6 heads over 2 of keys") as caught:
        Partition(4).check(config)
    assert caught.value.fix == "Use 1, 2 or 6 devices"


def test_kv_heads_that_are_neither_divided_nor_repeated_are_refused() -> None:
    config = config_from_hf(checkpoints.CASES["llama"])  # 6 heads over 2
    with pytest.raises(ConfigError, match="Use 1, 2 or 6 devices"):
        Partition(3).check(config)


def test_expert_groups_need_experts_that_they_can_share() -> None:
    with pytest.raises(ConfigError, match=r"has no experts\. Use mesh=2 instead"):
        Partition(1, 2).check(config_from_hf(checkpoints.CASES["llama"]))
    six = config_from_hf(checkpoints.CASES["qwen3-moe"] | {"num_attention_heads": 8})
    with pytest.raises(ConfigError, match='Use one of 1, 2, 3, 6 for "expert"'):
        Partition(1, 4).check(six)


def test_more_devices_than_there_are_is_refused_with_what_there_is() -> None:
    graph, _ = abstract_model(config_from_hf(mesh_models.raw("llama")))
    with pytest.raises(ConfigError, match="asks for 64 devices, and there") as caught:
        placement_of(checked_mesh(64), graph)
    assert "xla_force_host_platform_device_count=64" in caught.value.fix


def test_one_device_is_no_mesh() -> None:
    graph, _ = abstract_model(config_from_hf(mesh_models.raw("llama")))
    assert placement_of(checked_mesh(1), graph) is ALONE
    assert placement_of(None, graph) is ALONE


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "moe_intermediate_size": 256}


@pytest.mark.parametrize("plan", ["int4-32", "mlp=int4,attention=int8", "mlp=int4,attention=int4,embedding=int8"])
@pytest.mark.parametrize("name", by_default(["llama", "qwen3-moe", "qwen3", "mixtral"], 2))
def test_parts_of_matrices_of_four_bits(name: str, plan: str) -> None:
    config = config_from_hf(mesh_models.raw(name) | WIDE)
    graph, leaves = abstract_model(config, "bfloat16", plan)
    roles = roles_of(graph)
    for partition in (Partition(2), Partition(4), Partition(1, 2), Partition(2, 2)):
        if partition.expert > 1 and not any(config.moe):
            continue
        partition.check_packed(graph)
        local = partition.graph(graph)
        shapes = {path: leaf.shape for path, leaf in zip(local.paths, leaf_shapes(local), strict=True)}
        for path, leaf in zip(graph.paths, leaves, strict=True):
            assert local_shape(roles[path], leaf.shape, partition.sizes) == shapes[path], (path, partition)


def test_four_bits_that_cannot_be_divided_are_refused() -> None:
    config = config_from_hf(mesh_models.raw("llama") | {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16})
    graph, _ = abstract_model(config, "bfloat16", "mlp=int4-64")
    Partition(3).check_packed(graph)
    with pytest.raises(ConfigError, match=r"mlp\.(down|gate_up)\.weight is kept in 4 bits .*not multiples of"):
        Partition(2).check_packed(graph)
