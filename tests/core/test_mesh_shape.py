"""The options mesh, processes and coordinator: their values, the form in which a config keeps them, and refusals."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.mesh_shape import MeshShape, address, parsed_mesh
from rekindle.errors import ConfigError


def test_a_number_is_devices_of_the_axis_model() -> None:
    assert EngineConfig(mesh=4).mesh == {"model": 4} == EngineConfig(mesh={"model": 4}).mesh
    assert EngineConfig(mesh=np.int64(2)).mesh == {"model": 2}  # type: ignore[arg-type]


def test_axes_are_kept_by_name() -> None:
    mesh = EngineConfig(mesh={"expert": 2, "model": 4}).mesh
    assert isinstance(mesh, MeshShape) and mesh.size == 8
    assert repr(mesh) == "{'model': 4, 'expert': 2}"


def test_data_shards_are_devices_too() -> None:
    mesh = EngineConfig(mesh={"data": 2, "model": 4}).mesh
    assert isinstance(mesh, MeshShape) and mesh.size == 8
    assert repr(mesh) == "{'model': 4, 'data': 2}"
    assert parsed_mesh("data=2,model=4") == mesh


def test_configs_with_a_mesh_can_be_compared_and_hashed() -> None:
    assert EngineConfig(mesh={"model": 2}) == EngineConfig(mesh=2)
    assert hash(EngineConfig(mesh={"model": 2})) == hash(EngineConfig(mesh=2))


def test_a_mesh_of_jax_is_kept_as_it_is() -> None:
    mesh = jax.make_mesh((1,), ("model",))
    assert EngineConfig(mesh=mesh).mesh is mesh


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        (0, "asks for 0 devices"),
        (-1, "asks for -1 devices"),
        (True, "is no number of devices"),
        ("2", "is no number of devices"),
        (1 << 40, "asks for"),
        ({}, "has no axes"),
        ({"tensor": 2}, "has the axis 'tensor'"),
        ({"data": 0}, "asks for 0 devices"),
        ({"batch": 2}, "has the axis 'batch'; known are 'model', 'expert' and 'data'"),
        ({"model": "2"}, "is no number of devices"),
        ({"model": 0}, "asks for 0 devices"),
    ],
)
def test_what_is_no_mesh_is_refused_with_what_works(mesh: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        EngineConfig(mesh=mesh)
    assert caught.value.field == "mesh" and '{"model": 4, "expert": 2}' in caught.value.fix


def test_a_mesh_of_jax_with_other_axes_is_refused() -> None:
    with pytest.raises(ConfigError, match="has the axis 'x'"):
        EngineConfig(mesh=jax.make_mesh((1,), ("x",)))


HERE = "127.0.0.1:9000"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"processes": 0}, "processes=0: must be at least 1"),
        ({"processes": 2, "mesh": 4}, "coordinator=None: is missing: 2 processes need a place to meet"),
        ({"processes": 2, "mesh": 4, "coordinator": 9000}, "coordinator=9000: is not text"),
        ({"processes": 2, "mesh": 4, "coordinator": "here"}, "coordinator='here': is no address"),
        ({"processes": 2, "coordinator": HERE}, "mesh=None: has to say how many devices"),
        ({"processes": 2, "mesh": 3, "coordinator": HERE}, "has 3 devices, which 2 processes can't share evenly"),
        (
            {"processes": 2, "mesh": {"data": 2, "model": 2}, "coordinator": HERE},
            "has data shards, which 2 processes can't have together yet",
        ),
        ({"processes": 1 << 20, "mesh": 4, "coordinator": HERE}, "are more than there can be"),
        ({"coordinator": HERE}, "coordinator='127.0.0.1:9000': is for several processes"),
    ],
)
def test_what_several_processes_cannot_be(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**options)
    assert problem in str(refused.value)


def test_processes_that_share_a_mesh() -> None:
    config = EngineConfig(processes=2, mesh={"model": 2, "expert": 2}, coordinator=HERE)
    assert (config.processes, config.coordinator) == (2, HERE)
    assert EngineConfig(processes=None).processes == 1


@pytest.mark.parametrize(
    ("text", "found"), [(HERE, ("127.0.0.1", 9000)), ("[::1]:80", ("::1", 80)), ("n0:1", ("n0", 1))]
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert address(text) == found


@pytest.mark.parametrize("text", ["", "host", "host:", ":9000", "host:0", "host:65536", "host:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        address(text)
