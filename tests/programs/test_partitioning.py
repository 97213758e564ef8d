"""The wrapping of programs for a mesh: nothing at all on one device, and what lies where on several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from helpers.driving import tiny_config, tiny_model
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.models.placement import MeshPlacement, placement_of
from rekindle._src.programs.buckets import ADMIT, COPY, GATHER, MEMORY, SCATTER
from rekindle._src.programs.partitioning import PAGES, WHOLE, Partitioning, Recipe
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.store import config_fields

MODEL = tiny_model()
ALONE = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config())
KINDS = (
    ALONE.lattice.ahead[0],
    ALONE.lattice.ahead[-1],
    MEMORY,
    ADMIT,
    COPY,
    GATHER,
    SCATTER,
)  # steps without a prompt, and with one


def mesh_of_one() -> MeshPlacement:
    placement = placement_of(checked_mesh(jax.make_mesh((1,), ("model",))), MODEL.graph)
    assert isinstance(placement, MeshPlacement)
    return placement


def test_on_one_device_nothing_is_wrapped() -> None:
    parts = Partitioning()

    def function() -> None: ...

    for key in KINDS:
        recipe = ALONE.recipes.recipe(key)
        assert parts.wrap(recipe, function) is function
        assert parts.arguments(recipe) is recipe.arguments
    assert parts.pages(ALONE.recipes.kv) is ALONE.recipes.kv
    payload = (np.zeros((1, 2, 2, 4, 8, 16)),)
    assert parts.to_device(payload)[0] is payload[0]
    assert parts.to_host(payload)[0] is payload[0]


def test_the_option_is_in_no_key_of_one_device() -> None:
    assert "mesh" not in config_fields(EngineConfig())


def test_every_kind_of_program_says_how_all_of_its_operands_lie() -> None:
    for key in KINDS:
        recipe = ALONE.recipes.recipe(key)
        assert len(recipe.operands) == len(recipe.arguments), key
        made = jax.eval_shape(recipe.function, *recipe.arguments)
        if isinstance(recipe.results, tuple):
            assert len(recipe.results) == len(made), key


def test_a_new_kind_of_program_is_wrapped_by_what_it_declares() -> None:
    """Pages are divided by kv heads; everything else is whole."""
    parts = Partitioning.of(mesh_of_one())

    def function(kv: object, mask: jax.Array) -> tuple[object, jax.Array]:
        return kv, mask + 1

    recipe = Recipe(
        function, (ALONE.recipes.kv, jax.ShapeDtypeStruct((4,), jnp.int32)), (0,), (PAGES, WHOLE), (PAGES, WHOLE)
    )
    kv, mask = parts.arguments(recipe)
    assert kv[0].pages.pages.sharding.spec == PartitionSpec(None, None, ("expert", "model"))
    assert mask.sharding.spec == PartitionSpec()
    with parts.tracing():
        lowered = jax.jit(parts.wrap(recipe, function)).lower(kv, mask)
    assert "manual" in lowered.as_text() or "shard_map" in lowered.as_text() or "sdy" in lowered.as_text()


def test_a_mesh_of_the_caller_is_not_in_the_way() -> None:
    programs = Programs(MODEL.config, MODEL.graph, MODEL.leaves, tiny_config(), placement=mesh_of_one())
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert programs.compiler.build(ADMIT).as_text()
