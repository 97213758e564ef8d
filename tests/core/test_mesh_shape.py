"""The option `mesh`: what is taken, in which form a config keeps it, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.mesh_shape import MeshShape, parsed_mesh
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
