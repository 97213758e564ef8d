"""Quantised weights where no kernel multiplies them: unpacked once, to the numbers that they stand for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import checkpoints, gguf_files
from helpers.plain_loop import plain_loop
from helpers.thorough import by_default
from rekindle._src.core import memory
from rekindle._src.models import unpacking
from rekindle._src.models.base import LoadedModel, kinds_in
from rekindle._src.models.loading import prepared, reading
from rekindle._src.models.loading.checkpoint import load, read
from rekindle._src.models.unpacking import unpacked_model
from rekindle.errors import CheckpointError
from rekindle_kernels import int4

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "moe_intermediate_size": 64}
PLANS: list[tuple[str, Any]] = [
    ("llama", "int4"), ("qwen3", {"mlp": "int4-32", "attention": "int8-weight"}), ("qwen3-moe", "int4"),
    ("qwen3-moe", "int8-weight"),
]  # fmt: skip


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_NATIVE", "0")


def written(folder: Path, case: str) -> Path:
    return checkpoints.write(folder, checkpoints.CASES[case] | SIZES)


def expected(packed: LoadedModel) -> dict[str, np.ndarray]:
    """The leaves of a packed model that no product of XLA:CPU unpacks, and what the others stand for."""
    found, kinds = checkpoints.leaves(packed), dict(kinds_in(packed.graph))
    for path in [path for path in found if path.endswith(".weight")]:
        owner = path.removesuffix("weight")
        scale, minimum = (found.get(owner + name) for name in ("scale", "minimum"))
        if str(found[path].dtype) in int4.COLUMNS and scale is not None:
            least = None if minimum is None else jnp.asarray(minimum)
            values = int4.dequantized(jnp.asarray(found[path]), jnp.asarray(scale), least)
        elif scale is not None and kinds[path.removesuffix(".weight")] == "int8-weight":
            values = found[path] * scale[..., None]
        else:
            continue
        found[path] = np.asarray(jnp.asarray(values, packed.graph.precision.weights))
        for name in ("scale", "minimum"):
            found.pop(owner + name, None)
    return found


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for path, leaf in found.items():
        values = leaf.view(wanted[path].dtype) if leaf.dtype == np.uint16 else leaf  # stacks of experts are bits
        assert values.dtype == wanted[path].dtype, path
        ours, theirs = (np.asarray(each, np.float64) for each in (values, wanted[path]))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=0, err_msg=path)


@pytest.mark.parametrize(("case", "plan"), by_default(PLANS))
def test_weights_are_what_their_integers_stand_for(
    case: str, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_kernels: None
) -> None:
    """Those of a checkpoint and those of a model in memory, whatever pieces they are unpacked in."""
    folder = written(tmp_path, case)
    packed = read(checkpoints.described(folder, quantize=plan, unpack=False))
    assert not packed.graph.precision.unpacked
    wanted, biggest = expected(packed), 0
    dequantized: Callable[..., jax.Array] = unpacking.dequantized

    def watched(*arrays: Any) -> jax.Array:
        nonlocal biggest
        values = dequantized(*arrays)
        biggest = max(biggest, 4 * values.size)
        return values

    monkeypatch.setattr(unpacking, "dequantized", watched)
    monkeypatch.setattr(unpacking, "PIECE", 16 << 10)
    monkeypatch.setattr(reading, "CHUNK", 3 << 10)
    loaded, converted = load(folder, quantize=plan), unpacked_model(packed)
    assert biggest <= 16 << 10
    assert loaded.graph == converted.graph
    assert dict(loaded.graph.precision.unpacked)
    for model in (loaded, converted):
        assert_same(checkpoints.leaves(model), wanted)
    assert loaded.fingerprint != packed.fingerprint != converted.fingerprint
    assert unpacked_model(loaded) is loaded, "nothing is left to unpack"


def test_a_file_in_groups_is_read_as_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_kernels: None) -> None:
    """Where there is room for them, which the second start finds in the cache."""
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    monkeypatch.setattr(prepared, "DELAY", 0.0)
    raw = checkpoints.CASES["qwen3"] | SIZES | {
        "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4
    }  # fmt: skip
    types = {"attn_v": "Q6_K", "ffn_down": "Q8_0"}
    file = gguf_files.of_types(tmp_path / "model.gguf", raw, lambda name: types.get(name.split(".")[-2], "Q4_K"))
    cache = tmp_path / "cache"
    found, floats = load(file, cache_dir=cache), load(file, dtype="bfloat16")
    assert unpacking.words(found.graph) == "unpacked from 4, 6 and 8 bits: no native kernels here"
    assert found.held.startswith("bfloat16 ") and " bits " not in found.held
    assert_same(checkpoints.leaves(found), checkpoints.leaves(floats))
    converted = unpacked_model(read(checkpoints.described(file, unpack=False)))
    assert converted.graph == found.graph
    assert_same(
        checkpoints.leaves(converted), checkpoints.leaves(floats), 2**-7
    )  # compilers may add a minimum without a rounding before
    assert prepared.wait(60)
    kept = checkpoints.described(file, cache_dir=cache)
    assert kept.reads is None and kept.graph == found.graph
    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    packed = load(file, cache_dir=cache)
    assert " bits " in packed.held and not packed.graph.precision.unpacked
    assert unpacking.words(packed.graph).endswith("no native kernels here, and no room for floats")
    assert unpacked_model(packed) is packed


def test_with_kernels_nothing_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_NATIVE", "0")
    folder = written(tmp_path, "qwen3")
    unpacks = unpacking.traits
    monkeypatch.setattr(unpacking, "traits", lambda implementation: unpacks(implementation, platform="tpu"))
    packed = read(checkpoints.described(folder, quantize="int4", unpack=True))
    assert not packed.graph.precision.unpacked and packed.held.startswith("4 bits ")
    assert unpacking.words(packed.graph) == ""


OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 2, "max_tokens_per_step": 32, "max_model_len": 64, "page_size": 8,
    "device_pages": 24, "precompile": "lazy", "disk_memory": 0, "seed": 0,
}  # fmt: skip


@pytest.mark.thorough
def test_texts_are_those_of_a_plain_loop_over_the_unpacked_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a second session, of a model in memory, which stays its owner's, and after weights were replaced."""
    folder, options = written(tmp_path / "model", "llama"), OPTIONS | {"cache_dir": str(tmp_path / "cache")}
    unpacked = load(folder, dtype="float32", quantize="int4")
    packed = read(checkpoints.described(folder, dtype="float32", quantize="int4", unpack=False))
    ids = np.random.default_rng(3).integers(3, unpacked.config.vocab_size, 20).tolist()
    wanted = tuple(plain_loop(unpacked, ids, 8, context=64))
    caplog.set_level(logging.INFO, "rekindle.engine")
    with rekindle.open_sync(str(folder), quantize="int4", **options) as session:
        assert session.generate_sync(ids, max_tokens=8, ignore_eos=True).token_ids == wanted
        assert "float32" in session._repr_html_()
        assert "unpacked from 4 bits: no native kernels here" in session._repr_html_()
        session.swap_weights(packed).result_sync()
        assert session.generate_sync(ids, max_tokens=8, ignore_eos=True).token_ids == wanted
    said = [record.getMessage() for record in caplog.records if "are held as" in record.getMessage()]
    assert len(said) == 1 and "unpacked from 4 bits" in said[0]
    for model in (str(folder), packed):
        with rekindle.open_sync(model, quantize="int4", **options) as session:
            assert session.generate_sync(ids, max_tokens=8, ignore_eos=True).token_ids == wanted
    assert all(not leaf.is_deleted() for leaf in packed.leaves)
    monkeypatch.setattr(memory, "available", lambda: 1)
    with rekindle.open_sync(packed, **options) as session:
        assert "are unpacked in every product: no native kernels here, and no room" in session._repr_html_()
        with pytest.raises(CheckpointError):
            session.swap_weights(unpacked).result_sync()
