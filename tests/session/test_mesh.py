"""Sessions whose model is divided over devices: the same tokens as on one, wherever pages and weights come from.

Devices are simulated, in a process of their own: their number is fixed when JAX starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import rekindle
from helpers.driving import tiny_model
from helpers.small import MODEL, OPTIONS, prompt

ROOT = Path(__file__).parents[2]


def checked(folder: Path, devices: int, *names: str, timeout: int = 580) -> None:
    """Run checks of `mesh_checks.py` in a process with so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "session" / "mesh_checks.py"), str(folder), *names],
        env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}: done" in done.stdout for name in names), done.stdout


@pytest.mark.slow
def test_a_mesh_gives_the_tokens_of_one_device(tmp_path: Path) -> None:
    names = "windows", "some_families", "taps", "with_adapters", "memory_is_given_back", "data_shards"
    checked(tmp_path, 4, *names)


@pytest.mark.thorough
def test_samplers_draw_the_tokens_of_one_device(tmp_path: Path) -> None:
    checked(tmp_path, 2, "samplers")


@pytest.mark.slow
def test_snapshots_and_collectives_of_eight_devices(tmp_path: Path) -> None:
    checked(tmp_path, 8, "snapshots", "sums_of_a_step", "collectives_are_measured")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "every_family", "repeated_kv_heads", "kernels_of_xla", "quantised", "four_bits", "int8_pages", "restarts",
        "tiers_and_preemption", "loaded_weights", "loaded_in_parts", "random_models", "beside_a_mesh_of_the_user",
        "data_shards_of_families", "data_shards_with_options", "data_shards_restore",
        "data_shards_given_as_a_mesh", "taps_of_families", "states", "pictures", "drafters", "draft_heads",
    ],
)  # fmt: skip
def test_on_eight_devices(tmp_path: Path, name: str) -> None:
    checked(tmp_path, 8, name)


@pytest.mark.thorough
def test_a_mesh_of_one_device_is_what_the_device_alone_is() -> None:
    """Programs are wrapped and weights are placed then, in this process too."""
    options = {**OPTIONS, "precompile": "lazy"}
    ask = {"max_tokens": 8, "logprobs": 2}
    with rekindle.open_sync(MODEL, **options) as session:
        expected = session.generate_sync(prompt(1, 20), **ask)
        assert session.stats().mesh is None and "mesh" not in session.stats().as_dict()
    other = tiny_model(seed=6)
    with rekindle.open_sync(MODEL, mesh=jax.make_mesh((1,), ("model",)), **options) as session:
        found = session.generate_sync(prompt(1, 20), **ask)
        told = session.stats().mesh
        assert told is not None and told.size == 1 and told.heads == 4 and told.kv_heads == 2
        assert str(told).startswith("1 device (model 1): each has 4 heads, 2 kv heads")
        assert "4 heads" in session.stats()._repr_html_() and "4 heads" in session._repr_html_()
        assert repr(session) == "<rekindle.Session llama on 1 device>"
        session.swap_weights(other).result_sync()
        swapped = session.generate_sync(prompt(1, 20), **ask)
        with pytest.raises(rekindle.CheckpointError, match="missing"):
            session.swap_weights({}).result_sync()
    assert found.token_ids == expected.token_ids
    with rekindle.open_sync(other, **options) as session:
        assert session.generate_sync(prompt(1, 20), **ask).token_ids == swapped.token_ids
    assert not any(leaf.is_deleted() for leaf in (*MODEL.leaves, *other.leaves)), "they are the caller's"


def test_a_mesh_adds_no_repeatable_texts() -> None:
    mesh = jax.make_mesh((1,), ("model",))
    with pytest.raises(rekindle.ConfigError, match=r"deterministic=True: can't be kept: devices that share a model"):
        rekindle.open_sync(MODEL, mesh=mesh, deterministic=True, **OPTIONS)


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(rekindle.ConfigError, match="asks for 64 devices"):
        rekindle.open_sync(MODEL, mesh=64, **OPTIONS)
