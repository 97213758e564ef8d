"""Encoders without transformers: buckets, padding and neighbours change nothing, and one program serves every shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.towers import MODELS, QWEN, SmallEncoder, config_of, random_picture, random_tensors
from rekindle._src.models.vision import attention
from rekindle._src.models.vision import steps as vision_steps
from rekindle._src.models.vision.config import VisionConfig
from rekindle._src.models.vision.inputs import (
    ImagePatches,
    PackedPictures,
    PatchBatch,
    PatchGrid,
    PositionRows,
    bilinear_rows,
    bucketed_rows,
    fixed_rows,
    patches_of,
    resized_weights,
)
from rekindle._src.models.vision.registry import vision_config
from rekindle._src.models.vision.steps import (
    StepSizes,
    TowerStep,
    chunks_of,
    encode_in_steps,
    one_chunk,
    step_sizes,
)
from rekindle._src.models.vision.tower import abstract_tower, pack_images
from rekindle_kernels import traits
from rekindle_kernels.ops import added_keys
from rekindle_kernels.xla import added_keys as plain_added_keys

SHALLOW = {"model_type": "qwen3_vl", "vision_config": {**QWEN, "depth": 1, "deepstack_visual_indexes": [0]}}

STEPS = ["attend", "begin", "buffers", "end", "level", "mix", "project", "sums"]


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
def test_attention_in_blocks_is_that_of_one_product(
    lengths: tuple[int, ...], platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures begin and end inside of blocks; padding is zero. On a GPU all heads are computed together."""
    for module in (added_keys, plain_added_keys):
        monkeypatch.setattr(module, "current_platform", lambda: platform)
    monkeypatch.setattr(attention, "BLOCK", 32)
    count, rng = sum(lengths) + 9, np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, count, 8)).astype(np.float32) for _ in range(3))
    ends = np.cumsum(lengths)
    starts, stops = (np.zeros(count, np.int32) for _ in range(2))
    starts[: ends[-1]], stops[: ends[-1]] = np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)
    ours = np.asarray(attention.picture_attention(*map(jnp.asarray, (q, k, v, starts, stops)), 0.4))
    np.testing.assert_allclose(ours.swapaxes(0, 1), plain_attention(q, k, v, starts, stops, 0.4), atol=2e-5)
    assert not ours[:, ends[-1] :].any()


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
    changed = ImagePatches(np.asarray(one.patches)[::-1].copy(), one.grid)
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


def test_pictures_that_are_no_whole_tokens_are_refused() -> None:
    config = shallow()
    picture = random_picture(config, 2, 4)
    with pytest.raises(ValueError, match="1 × 8 patches are not whole tokens of 2 × 2"):
        pack_images([ImagePatches(picture.patches, PatchGrid(1, 8))], config)
    with pytest.raises(ValueError, match=r"patches are \[8, 95\], expected \[8, 96\]"):
        pack_images([ImagePatches(np.asarray(picture.patches)[:, 1:], picture.grid)], config)


def test_positions_are_computed_for_a_batch_and_not_for_a_picture() -> None:
    """Interpolation weights took 16,384 numbers for each patch, which a small file could ask for."""
    config, asked = shallow(), list[int]()

    def positions(config: Any, grid: PatchGrid, rows: Any, columns: Any) -> PositionRows:
        asked.append(len(rows))
        return resized_weights(config, grid, rows, columns)

    grid = PatchGrid(24, 16)
    images = [ImagePatches(np.ones((grid.patches, config.patch_length), np.float32), grid)] * 2
    packed = PackedPictures(images, config, positions, blocks=False)
    whole, parts = packed.cut(0, 768), [packed.cut(first, 96) for first in range(0, 768, 96)]
    for name in PatchBatch._fields:
        np.testing.assert_array_equal(np.concatenate([getattr(one, name) for one in parts]), getattr(whole, name))
    assert asked[:2] == [0, 0] and max(asked[4:]) <= 96


def test_a_picture_of_the_tables_size_reads_its_rows() -> None:
    """So does one that every rule resamples."""
    config = shallow()
    grid, rows = PatchGrid(6, 6), np.repeat(np.arange(6, dtype=np.int32), 6)
    columns = np.tile(np.arange(6, dtype=np.int32), 6)
    every = np.arange(36)
    assert (fixed_rows(config, grid, rows, columns).table_rows[:, 0] == every).all()
    assert (bucketed_rows(config, grid, rows, columns).table_rows[:, 0] == every).all()
    bilinear = bilinear_rows(config, grid, rows, columns)
    assert (bilinear.table_rows[:, 0] == every).all()
    np.testing.assert_array_equal(bilinear.weights, np.eye(4, dtype=np.float32)[[0] * 36])
    np.testing.assert_allclose(resized_weights(config, grid, rows, columns).weights, np.eye(36), atol=1e-6)
    with pytest.raises(ValueError, match="takes pictures of 6 × 6 patches, not 2 × 8"):
        fixed_rows(config, PatchGrid(2, 8), rows[:16], columns[:16])


def test_one_patch_is_a_picture() -> None:
    for rule in (bilinear_rows, bucketed_rows, resized_weights):
        position = rule(shallow(), PatchGrid(1, 1), np.zeros(1, np.int32), np.zeros(1, np.int32))
        assert np.isclose(position.weights.sum(), 1) and (position.table_rows == 0).any() == bool(
            position.table_rows.size
        )


def test_patches_are_cut_channel_by_channel() -> None:
    pixels = np.arange(3 * 4 * 6).reshape(3, 4, 6)
    cut = patches_of(pixels, 2)
    assert cut.grid == (2, 3)
    np.testing.assert_array_equal(cut.patches[4].reshape(3, 2, 2), pixels[:, 2:4, 2:4])


def small_steps(config: VisionConfig, sizes: Sequence[tuple[int, int]], steps: StepSizes) -> dict[str, Any]:
    """Compare the results of small steps with that of one program; return the programs of the steps."""
    encoder, programs = SmallEncoder(config, random_tensors(config)), dict[str, Any]()
    pictures = [random_picture(config, *size, seed=at) for at, size in enumerate(sizes)]
    chunks = chunks_of(pack_images(pictures, config), steps.chunk)

    def run(step: TowerStep[Any]) -> Any:
        program = programs.setdefault(step.name, jax.jit(step.function, donate_argnums=step.donated))
        return program(*step.arguments)

    ours = encode_in_steps(encoder.tower, encoder.leaves, chunks, steps, run)
    tokens, levels = encoder(pictures)
    np.testing.assert_allclose(np.concatenate(ours.tokens)[: len(tokens)], tokens, atol=2e-5)
    for level, expected in zip(ours.levels, levels, strict=True):
        np.testing.assert_allclose(np.concatenate(level)[: len(expected)], expected, atol=2e-5)
    assert all(program._cache_size() == 1 for program in programs.values())
    return programs


def two_layers() -> VisionConfig:
    config = vision_config({**SHALLOW, "vision_config": {**QWEN, "depth": 2, "deepstack_visual_indexes": [0]}})
    assert config is not None
    return config


@pytest.mark.thorough
def test_small_steps_come_to_the_same_result_with_programs_that_all_layers_share() -> None:
    """Of two pictures in three chunks, of which the second has patches of both."""
    assert sorted(small_steps(two_layers(), ((4, 6), (4, 4)), StepSizes(8, 16))) == STEPS


@pytest.mark.thorough
@pytest.mark.parametrize("fast", [False, True])
def test_small_steps_with_sixteen_bit_matrices_come_close(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products of 16 bits are fast, attention's are such, too."""
    monkeypatch.setattr(vision_steps, "traits", lambda: dataclasses.replace(traits(), fast_bfloat16=fast))
    config = two_layers()
    state, pictures = random_tensors(config), [random_picture(config, 4, 6), random_picture(config, 4, 4, seed=1)]
    exact, _ = SmallEncoder(config, state)(pictures)
    encoder, dtypes = SmallEncoder(config, state, "bfloat16"), set[str]()

    def run(step: TowerStep[Any]) -> Any:
        dtypes.update(str(one.dtype) for one in step.arguments[1:3] if step.name == "attend" and hasattr(one, "dtype"))
        return jax.jit(step.function)(*step.arguments)

    chunks = chunks_of(pack_images(pictures, config), 16)
    tokens = encode_in_steps(encoder.tower, encoder.leaves, chunks, StepSizes(8, 16), run).tokens
    rounded = np.concatenate(tokens)[: len(exact)]
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()
    assert dtypes == {"bfloat16" if fast else "float32"}


def test_shapes_of_a_chunk_meet_every_program() -> None:
    config = two_layers()
    tower, met = abstract_tower(config), dict[str, set[str]]()
    chunk = one_chunk(pack_images([random_picture(config, 2, 2)], config), 16)

    def run(step: TowerStep[Any]) -> Any:
        met.setdefault(step.name, set()).add(str(jax.tree.map(jnp.shape, step.arguments)))
        return jax.eval_shape(step.function, *step.arguments)

    result = encode_in_steps(tower, tower.shapes, iter([chunk]), StepSizes(8, 16), run)
    assert sorted(met) == STEPS and all(len(shapes) == 1 for shapes in met.values())
    assert (result.tokens[0].shape, result.levels[0][0].shape) == ((2, 24), (2, 24))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [(1, 2), (64, 64)])
def test_small_steps_of_every_encoder(name: str, tokens: tuple[int, int]) -> None:
    config = config_of(name)
    side = config.side if config.model_type == "gemma3" else 2 * config.merge
    sizes = StepSizes(*(count * config.patches_of_token for count in tokens))
    small_steps(config, ((side, side), (side, side)), sizes)


class OnlyRows:
    """Patches that are computed when they are taken."""

    def __init__(self, patches: NDArray[np.float32]) -> None:
        self.patches, self.shape, self.taken = patches, patches.shape, list[int]()

    def __getitem__(self, patches: NDArray[np.int32]) -> NDArray[np.float32]:
        self.taken.append(len(patches))
        return self.patches[patches]


def test_patches_are_computed_chunk_by_chunk() -> None:
    config = two_layers()
    picture = random_picture(config, 4, 6)
    rows: Any = OnlyRows(np.asarray(picture.patches))
    chunks = chunks_of(pack_images([ImagePatches(rows, picture.grid)], config), 16)
    assert rows.taken == []
    first = next(chunks)
    assert rows.taken == [16] and (first.span.patches, first.span.sees) == (16, (0, 24))
    last = next(chunks)
    assert rows.taken == [16, 8] and (last.span.first, last.span.patches) == (16, 8)
    assert not last.batch.patches[8:].any() and not last.batch.stops[8:].any()


QWEN_2B = {
    "model_type": "qwen3_vl",
    "vision_config": {
        "depth": 1, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
        "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip


@pytest.mark.parametrize(("operations", "most"), [(8e9, 512), (16e9, 512), (1e11, 2048), (1e12, 1 << 16)])
def test_the_work_of_a_step_is_bounded_whatever_the_size_of_a_picture(operations: float, most: int) -> None:
    """Of an encoder as large as that of Qwen3-VL 2B: a step's shapes are the same for all pictures."""
    config = vision_config(QWEN_2B)
    assert config is not None
    tower = abstract_tower(config, "bfloat16")
    rows, chunk = step_sizes(tower.graph, operations, most)
    attention, layer = 4 * chunk**2 * 1024, 2 * rows * 1024 * (1024 + 2 * 4096)
    merger = 2 * rows // 4 * 4096 * (4096 + 2048)
    assert max(attention, layer, merger) <= operations
    assert max(4 * attention, 4 * layer) > operations or chunk == most
    small, large = (
        one_chunk(pack_images([random_picture(config, *grid)], config), chunk).batch for grid in ((2, 2), (2, 64))
    )
    assert small == large


def test_sizes_of_steps() -> None:
    graph = abstract_tower(shallow()).graph
    assert step_sizes(graph, 1.0, 512) == (16, 16)
    assert step_sizes(graph, 1e9, 512) == (512, 512)
    thirds = abstract_tower(config_of("gemma4")).graph  # tokens of nine patches
    assert step_sizes(thirds, 1e9, 512) == (288, 288)
