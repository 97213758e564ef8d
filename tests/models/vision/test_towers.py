"""Encoders without transformers: buckets, padding and neighbours change nothing, and one program serves every shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.towers import MODELS, QWEN, SmallEncoder, config_of, random_picture, random_tensors
from rekindle._src.models.vision import attention
from rekindle._src.models.vision.config import VisionConfig
from rekindle._src.models.vision.inputs import (
    ImagePatches,
    PatchBatch,
    PatchGrid,
    bilinear_taps,
    bucketed_taps,
    fixed_taps,
    patches_of,
    resized_weights,
)
from rekindle._src.models.vision.registry import vision_config
from rekindle._src.models.vision.steps import TowerStep, rows_for, run_steps, tower_steps
from rekindle._src.models.vision.tower import abstract_tower, pack_images

SHALLOW = {"model_type": "qwen3_vl", "vision_config": {**QWEN, "depth": 1, "deepstack_visual_indexes": [0]}}

STEPS = ["begin", "blank", "buffers", "end", "join", "level", "mix", "project"]


def shallow() -> VisionConfig:
    config = vision_config(SHALLOW)
    assert config is not None
    return config


def plain_attention(q: NDArray, k: NDArray, v: NDArray, starts: NDArray, stops: NDArray, scale: float) -> NDArray:
    """One product of all queries and keys."""
    place = np.arange(k.shape[1])[None]
    seen = (place >= starts[:, None]) & (place < stops[:, None])
    scores = np.where(seen, np.einsum("hqd,hkd->hqk", q, k) * scale, -np.inf)
    with np.errstate(invalid="ignore"):
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares = np.nan_to_num(shares / shares.sum(-1, keepdims=True))
    return np.einsum("hqk,hkd->qhd", shares, v)


@pytest.mark.parametrize(("lengths", "platform"), [((70,), "cpu"), ((5, 1, 64), "gpu"), ((33, 30, 3), "cpu")])
def test_attention_in_tiles_is_that_of_one_product(
    lengths: tuple[int, ...], platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures begin and end inside of tiles and blocks; padding is zero. On a GPU all heads are computed together."""
    monkeypatch.setattr(attention, "current_platform", lambda: platform)
    monkeypatch.setattr(attention, "TILE", 16)
    monkeypatch.setattr(attention, "BLOCK", 32)
    count, rng = sum(lengths) + 9, np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, count, 8)).astype(np.float32) for _ in range(3))
    ends = np.cumsum(lengths)
    starts, stops = (np.zeros(count, np.int32) for _ in range(2))
    starts[: ends[-1]], stops[: ends[-1]] = np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)
    ours = np.asarray(attention.picture_attention(*map(jnp.asarray, (q, k, v, starts, stops)), 0.4))
    np.testing.assert_allclose(ours, plain_attention(q, k, v, starts, stops, 0.4), atol=2e-5)
    assert not ours[ends[-1] :].any()


def test_memory_of_attention_does_not_grow_with_the_square_of_a_picture() -> None:
    """A picture of 4096 × 4096 has 65,536 patches of 16 pixels: one head's scores of all of them are 16 GiB."""
    heads = jax.ShapeDtypeStruct((2, 1 << 16, 8), jnp.float32)
    places = jax.ShapeDtypeStruct((1 << 16,), jnp.int32)
    run = jax.jit(lambda *arrays: attention.picture_attention(*arrays, 1.0))
    analysis = run.lower(heads, heads, heads, places, places).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 64 << 20


def test_neighbours_in_a_bucket_change_nothing_and_compile_nothing() -> None:
    """A picture has the same tokens and levels to the last bit alone, first or last, whatever the others are."""
    config = shallow()
    encoder = SmallEncoder(config, random_tensors(config))
    one, other = random_picture(config, 2, 6, seed=1), random_picture(config, 8, 2, seed=2)
    alone = encoder([one], 48)
    for pictures, at in (([one, other], 0), ([one, random_picture(config, 4, 4)], 0), ([other, other, one], 8)):
        tokens, levels = encoder(pictures, 48)
        np.testing.assert_array_equal(tokens[at : at + 3], alone[0])
        np.testing.assert_array_equal(levels[:, at : at + 3], alone[1])
    assert encoder.encode._cache_size() == 1
    changed = ImagePatches(one.patches[::-1].copy(), one.grid)
    assert not np.allclose(encoder([changed], 48)[0], alone[0])
    tall = ImagePatches(one.patches, PatchGrid(6, 2))
    assert not np.allclose(encoder([tall], 48)[0], alone[0], atol=1e-3), "positions are not used"


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_every_encoder_in_a_larger_bucket(name: str) -> None:
    config = config_of(name)
    encoder = SmallEncoder(config, random_tensors(config))
    side = config.side if config.model_type == "gemma3" else 2 * config.merge
    picture = random_picture(config, side, side)
    for one, other in zip(encoder([picture]), encoder([picture, picture], 3 * side**2), strict=True):
        np.testing.assert_allclose(np.concatenate([one, one], axis=-2), other, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bit_matrices_come_close(name: str) -> None:
    config = config_of(name)
    state = random_tensors(config)
    side = config.side if config.model_type == "gemma3" else 2 * config.merge
    picture = random_picture(config, side, side)
    exact, _ = SmallEncoder(config, state)([picture])
    rounded, _ = SmallEncoder(config, state, "bfloat16")([picture])
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


def test_matrices_have_the_dtype_and_norms_are_float32() -> None:
    graph, shapes = abstract_tower(shallow(), "bfloat16")
    for path, leaf in zip(graph.paths, shapes, strict=True):
        matrix = len(leaf.shape) == 2
        assert leaf.dtype == (jnp.bfloat16 if matrix else jnp.float32), path


def test_pictures_that_do_not_fit_are_refused() -> None:
    config = shallow()
    picture = random_picture(config, 2, 4)
    with pytest.raises(ValueError, match="8 patches do not fit into a bucket of 4"):
        pack_images([picture], config, 4)
    with pytest.raises(ValueError, match="do not fit into a bucket of 10"):
        pack_images([picture], config, 10)
    with pytest.raises(ValueError, match="1 × 8 patches are not whole tokens of 2 × 2"):
        pack_images([ImagePatches(picture.patches, PatchGrid(1, 8))], config, 8)
    with pytest.raises(ValueError, match=r"patches are \[8, 95\], expected \[8, 96\]"):
        pack_images([ImagePatches(picture.patches[:, 1:], picture.grid)], config, 8)


def test_a_picture_of_the_tables_size_reads_its_rows() -> None:
    """So does one that every rule resamples."""
    config = shallow()
    grid, rows = PatchGrid(6, 6), np.repeat(np.arange(6, dtype=np.int32), 6)
    columns = np.tile(np.arange(6, dtype=np.int32), 6)
    every = np.arange(36)
    assert (fixed_taps(config, grid, rows, columns).taps[:, 0] == every).all()
    assert (bucketed_taps(config, grid, rows, columns).taps[:, 0] == every).all()
    bilinear = bilinear_taps(config, grid, rows, columns)
    assert (bilinear.taps[:, 0] == every).all()
    np.testing.assert_array_equal(bilinear.weights, np.eye(4, dtype=np.float32)[[0] * 36])
    np.testing.assert_allclose(resized_weights(config, grid, rows, columns).weights, np.eye(36), atol=1e-6)
    with pytest.raises(ValueError, match="takes pictures of 6 × 6 patches, not 2 × 8"):
        fixed_taps(config, PatchGrid(2, 8), rows[:16], columns[:16])


def test_one_patch_is_a_picture() -> None:
    for rule in (bilinear_taps, bucketed_taps, resized_weights):
        position = rule(shallow(), PatchGrid(1, 1), np.zeros(1, np.int32), np.zeros(1, np.int32))
        assert np.isclose(position.weights.sum(), 1) and (position.taps == 0).any() == bool(position.taps.size)


def test_patches_are_cut_channel_by_channel() -> None:
    pixels = np.arange(3 * 4 * 6).reshape(3, 4, 6)
    cut = patches_of(pixels, 2)
    assert cut.grid == (2, 3)
    np.testing.assert_array_equal(cut.patches[4].reshape(3, 2, 2), pixels[:, 2:4, 2:4])


def small_steps(config: VisionConfig, sizes: Sequence[tuple[int, int]], rows: int) -> dict[str, Any]:
    """Compare the results of small steps with that of one program; return the programs of the steps."""
    encoder, programs = SmallEncoder(config, random_tensors(config)), dict[str, Any]()
    pictures = [random_picture(config, *size, seed=at) for at, size in enumerate(sizes)]
    bucket = sum(picture.grid.patches for picture in pictures) + 2 * config.patches_of_token
    batch = encoder.batch(pictures, bucket)

    def run(step: TowerStep) -> Any:
        program = programs.setdefault(step.name, jax.jit(step.function, donate_argnums=step.donated))
        return program(*step.arguments)

    ours = run_steps(tower_steps(encoder.tower, encoder.leaves, batch, rows), run)
    whole = encoder.encode(encoder.leaves, batch)
    np.testing.assert_allclose(ours.tokens, whole.tokens, atol=2e-5)
    np.testing.assert_allclose(ours.levels, whole.levels, atol=2e-5)
    assert all(program._cache_size() == 1 for program in programs.values())
    return programs


def two_layers() -> VisionConfig:
    config = vision_config({**SHALLOW, "vision_config": {**QWEN, "depth": 2, "deepstack_visual_indexes": [0]}})
    assert config is not None
    return config


@pytest.mark.thorough
def test_small_steps_come_to_the_same_result_with_programs_that_all_layers_share() -> None:
    assert sorted(small_steps(two_layers(), ((4, 6), (2, 2)), 16)) == STEPS


def test_shapes_meet_every_program_of_a_bucket() -> None:
    """As many steps as there are rows for, each of a program that was met before or is new to all of its kind."""
    config = two_layers()
    tower, counts, shapes = abstract_tower(config), dict[str, int](), set[str]()
    batch = pack_images([random_picture(config, 4, 6), random_picture(config, 2, 2)], config, 36)
    shaped = PatchBatch(*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in batch))

    def run(step: TowerStep) -> Any:
        counts[step.name] = counts.get(step.name, 0) + 1
        shapes.add(f"{step.name} {jax.tree.map(jnp.shape, step.arguments)}")
        return jax.eval_shape(step.function, *step.arguments)

    result = run_steps(tower_steps(tower, tower.shapes, shaped, 16), run)
    assert sorted(counts) == STEPS
    assert len(shapes) == len(STEPS), "a program has arguments of several shapes"
    # Three parts of 36 patches for the beginning and two programs of two layers, and of 9 tokens for level and end.
    assert [counts[name] for name in STEPS] == [3, 2, 1, 3, 1, 3, 6, 6]
    assert (result.tokens.shape, result.levels.shape) == ((9, 24), (1, 9, 24))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [16, 1000])
def test_small_steps_of_every_encoder(name: str, rows: int) -> None:
    config = config_of(name)
    side = config.side if config.model_type == "gemma3" else 2 * config.merge
    small_steps(config, ((side, side), (side, side)), rows)


def test_rows_of_a_step_follow_the_bucket() -> None:
    graph = abstract_tower(shallow()).graph
    few, many = rows_for(graph, 1 << 16, 1e8), rows_for(graph, 1 << 12, 1e8)
    assert 16 <= few < many <= 1 << 12
    assert rows_for(graph, 64, 1e12) == 64
