"""Four-bit weights are as near as their levels allow, the same from every source; plans say which parts have them."""

from __future__ import annotations

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.base import LoadedModel, abstract_model, kinds_in
from rekindle._src.models.loading import checkpoint, known_models, prepared, quantize, reading
from rekindle._src.models.placement import random_model
from rekindle._src.models.registry import config_from_hf
from rekindle._src.opening.weights import replace_weights
from rekindle.errors import CheckpointError, ConfigError
from rekindle_kernels import int4
from workshop import reference

# All sizes are whole groups of 32.
LLAMA = checkpoints.CASES["llama"] | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MIXTRAL = checkpoints.CASES["mixtral"] | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


APERTUS = checkpoints.CASES["apertus"] | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LING = checkpoints.CASES["ling3"] | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 16, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, **checkpoints.EVERY_EXPERT,
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    rows=hnp.arrays(np.float32, (5, 96), elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=False)),
    dtype=st.sampled_from((np.float32, np.float16, ml_dtypes.bfloat16)),
    minimums=st.booleans(),
    scales=st.sampled_from(int4.SCALES),
)
def test_every_weight_is_within_a_step(rows: np.ndarray, dtype: type, minimums: bool, scales: str) -> None:
    rows = rows.astype(dtype)
    integers, scale = np.empty(rows.shape, np.uint8), np.empty((5, 3), scales)
    minimum = np.empty_like(scale) if minimums else None
    quantize.quantize_int4_into(rows, integers, scale, minimum)
    assert integers.max() <= 15
    wide = np.repeat(scale.astype(np.float64), 32, -1)
    low = -8 * wide if minimum is None else np.repeat(minimum.astype(np.float64), 32, -1)
    error = np.abs(wide * integers + low - rows.astype(np.float64))
    largest = np.abs(rows.astype(np.float64)).max()
    # Half a step; a whole one at the far end without minimums. A rounded scale moves the ends by 8 times its error.
    allowed = np.abs(wide) * (0.51 if minimums else 1.02) + largest * (2e-3 if scales == "float16" else 1e-5) + 1e-6
    assert np.all(error <= allowed)


def test_zeros_stay_zeros_and_huge_weights_stay_finite() -> None:
    for rows in (np.zeros((16, 64), np.float32), np.full((16, 64), 3e38, np.float32)):
        weight, scale, _ = quantize.quantize_int4(rows, 32)
        values = np.asarray(int4.dequantized(weight, scale, None))
        assert np.isfinite(values).all()
        assert rows.any() or not values.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_stay_so_in_their_group_or_row(value: float) -> None:
    rows = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    rows[3, 40] = value
    for minimums in (False, True):
        packed = quantize.quantize_int4(rows, 32, minimums=minimums)
        broken = ~np.isfinite(np.asarray(int4.dequantized(*packed)))
        assert broken[3, 32:].all() and broken.sum() == 32
    _, scale = quantize.quantize(rows)
    assert np.flatnonzero(~np.isfinite(scale)).tolist() == [3]


def written(folder: Path, raw: dict) -> Path:
    return checkpoints.write(folder, raw, checkpoints.tensors(raw))


@pytest.mark.parametrize(
    ("raw", "count"),
    [(LLAMA, 8), (MIXTRAL, 8), (APERTUS, 8), (LING, 2 * 2 + 3 + 2 + 2 * 4)],  # attention has three, experts four
    ids=["llama", "mixtral", "apertus", "ling3"],
)
def test_loading_quantises_the_assembled_matrices(
    raw: dict, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1000)
    folder = written(tmp_path, raw)
    loaded = checkpoints.leaves(checkpoint.load(folder, quantize="int4"))
    whole = checkpoints.leaves(checkpoint.load(folder, dtype="float32"))
    packed = {path for path, leaf in loaded.items() if leaf.dtype == np.uint8}
    assert len(packed) == count
    for path in packed:
        scale = loaded[path.removesuffix("weight") + "scale"]
        group = 64 if whole[path].shape[-1] % 64 == 0 else 32
        assert int4.group_of(loaded[path], scale) == group
        want = quantize.quantize_int4(whole[path], group)
        np.testing.assert_array_equal(loaded[path], want[0], err_msg=path)
        np.testing.assert_array_equal(scale, want[1], err_msg=path)
    np.testing.assert_array_equal(loaded["embed.weight"], quantize.quantize(whole["embed.weight"])[0])
    router = [path for path in loaded if "router" in path]
    assert all(loaded[path].dtype == np.float32 for path in router)


def test_a_plan_says_it_by_part(tmp_path: Path) -> None:
    folder = written(tmp_path, LLAMA)
    plan = {"mlp": "int4-32", "attention": "int8-weight", "embedding": None}
    model = checkpoint.load(folder, quantize=plan)
    assert model.graph.precision.quantize == "attention=int8-weight,mlp=int4-32"
    kinds = dict(kinds_in(model.graph))
    assert kinds == {
        f"layers.{layer}.{name}": kind
        for layer in range(2)
        for name, kind in (
            ("attention.qkv", "int8-weight"), ("attention.out", "int8-weight"), ("mlp.gate_up", "int4-32"),
            ("mlp.down", "int4-32"),
        )
    }  # fmt: skip
    same = checkpoint.load(folder, quantize="mlp=int4-32,attention=int8-weight")
    assert same.fingerprint == model.fingerprint
    assert same.fingerprint != checkpoint.load(folder, quantize="int4").fingerprint
    assert known_models.decode(known_models.encode(model.graph, [], "auto", "")).graph == model.graph
    head = checkpoint.load(folder, quantize={"embedding": "int4", "head": "int8"})
    assert {path for path, leaf in checkpoints.leaves(head).items() if leaf.dtype == np.uint8} == {"embed.weight"}


def test_a_matrix_that_does_not_fit_is_named(tmp_path: Path) -> None:
    raw = LLAMA | {"intermediate_size": 72}
    with pytest.raises(ConfigError, match=r"layers.0.mlp.gate_up .*144 outputs|layers.0.mlp.down .*72 inputs.*group"):
        checkpoint.load(written(tmp_path, raw), quantize="int4")
    with pytest.raises(ConfigError, match="96 inputs are not a multiple of the group of 128"):
        checkpoint.load(written(tmp_path / "other", LLAMA), quantize="int4-128")


def logits(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    return np.asarray(reference.prefill(model, tokens, reference.empty_cache(model, len(tokens)))[0])


@pytest.mark.parametrize(
    ("plan", "raw"),
    by_default(
        [
            pytest.param(plan, raw, id=f"{plan if type(plan) is str else 'plan'}-{name}")
            for name, raw in (("llama", LLAMA), ("mixtral", MIXTRAL), ("apertus", APERTUS), ("ling3", LING))
            for plan in ({"mlp": "int4", "attention": "int4", "embedding": "int4"}, "int4", "int4-32")
            if (name, type(plan)) != ("ling3", dict)  # three layers of random weights lose more by its embedding
        ],
        lambda case: case.id in ("plan-llama", "int4-mixtral"),
    ),
)
def test_the_quantised_model_is_near_float32(raw: dict, plan: object, tmp_path: Path) -> None:
    folder = written(tmp_path, raw)
    tokens = np.random.default_rng(0).integers(0, 160, 64).tolist()
    want = logits(checkpoint.load(folder, dtype="float32"), tokens)
    got = logits(checkpoint.load(folder, quantize=plan), tokens)
    log_p, log_q = jax.nn.log_softmax(want), jax.nn.log_softmax(got)
    assert (
        float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()) < 0.7  # random weights are the hardest case
    )  # random weights of 64 inputs; int8 is below 0.01
    assert np.abs(want - got).max() > 1e-3, "it really ran quantised"


def test_the_model_is_the_same_as_one_of_its_values(tmp_path: Path) -> None:
    """What the leaves mean, as float32 weights, gives the same logits but for rounded activations."""
    folder = written(tmp_path, LLAMA)
    model = checkpoint.load(folder, dtype="float32", quantize={"mlp": "int4", "attention": "int4"})
    plain = checkpoint.load(folder, dtype="float32")
    stored = checkpoints.leaves(model)
    meant = {
        path: np.asarray(int4.dequantized(leaf, stored[path.removesuffix("weight") + "scale"], None))
        if leaf.dtype == np.uint8
        else leaf
        for path, leaf in stored.items()
        if not path.endswith("scale")
    }
    tokens = np.random.default_rng(0).integers(0, 160, 64).tolist()
    want, got = logits(replace_weights(plain, meant), tokens), logits(model, tokens)
    assert np.abs(want - got).mean() < 0.03 * want.std(), "only activations are rounded"


def test_weights_are_kept_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    monkeypatch.setattr(prepared, "DELAY", 0.0)
    folder, cache = written(tmp_path / "a", LLAMA), tmp_path / "cache"
    first = checkpoint.load(folder, quantize="int4", cache_dir=cache)
    assert prepared.wait(60)
    found = checkpoints.described(folder, quantize="int4", cache_dir=cache)
    assert found.reads is None, "it is not read again"
    second = checkpoint.read(found)
    for path, leaf in checkpoints.leaves(first).items():
        np.testing.assert_array_equal(leaf, checkpoints.leaves(second)[path], err_msg=path)
    assert checkpoints.described(folder, quantize="int4-32", cache_dir=cache).reads is not None
    assert replace_weights(first, second).fingerprint == second.fingerprint
    with pytest.raises(CheckpointError, match=r"scale: float16\[\d+, \d+\], expected float16"):
        replace_weights(first, checkpoint.load(folder, quantize="int4-32"))


def test_shapes_tell_the_memory() -> None:
    config = config_from_hf(LLAMA)
    sizes = {}
    for plan in ("int8", "int4-32", "int4"):
        _, shapes = abstract_model(config, "bfloat16", {"mlp": plan, "attention": plan})
        packed = [leaf for leaf in shapes if leaf.dtype in (np.uint8, np.int8)]
        sizes[plan] = sum(leaf.size for leaf in packed)
    assert sizes["int4"] == sizes["int4-32"] == sizes["int8"] / 2
    assert random_model(config, quantize="int4").num_parameters > random_model(config).num_parameters
