"""Weights on their way to several devices: each part is what one device has there, and no whole matrix is in memory."""

from __future__ import annotations

import dataclasses
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import checkpoints, gguf_files, mesh_models
from helpers.thorough import by_default
from rekindle._src.models.loading import checkpoint, kept_weights, leaf_arrays, prepared, reading
from rekindle._src.models.loading.load_progress import ByteMeter
from rekindle._src.models.partition import Partition
from rekindle._src.models.placement import MeshPlacement
from rekindle._src.models.roles import cut
from rekindle.errors import CheckpointError

PACKED = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16, "moe_intermediate_size": 64}
WIDE = {"hidden_size": 256, "intermediate_size": 2048, "vocab_size": 16384, "num_hidden_layers": 1}


@dataclasses.dataclass(frozen=True)
class Somewhere(MeshPlacement):
    """A mesh whose devices are numbers, of which this process has some."""

    mine: tuple[int, ...] = ()

    def _places(self) -> list[tuple[Any, dict[str, int]]]:
        model = self.partition.model
        return [(at, {"expert": at // model, "model": at % model}) for at in self.mine]

    def joined(self, path: str, parts: Sequence[tuple[NDArray[Any], Sequence[Any]]]) -> Any:
        return {device: part for part, devices in parts for device in devices}


class Reading:
    """What a process with some of the devices reads of a checkpoint."""

    def __init__(self, folder: Path, partition: Partition, mine: Sequence[int] | None = None, **options: Any) -> None:
        self.described = checkpoints.described(folder, **options)
        partition.check(self.described.graph.config)
        mine = range(partition.size) if mine is None else mine
        self.placement = Somewhere(None, partition, self.described.graph, mine=tuple(mine))  # type: ignore[arg-type]
        assert self.described.reads is not None
        self.plan = self.described.reads

    def parts(self) -> dict[str, dict[int, NDArray[Any]]]:
        found: Any = reading.read_leaves(
            *self.plan, place=reading.place_on_default_device, meter=ByteMeter(0, None), placement=self.placement
        )
        return dict(found)

    @property
    def bytes(self) -> int:
        return reading.bytes_to_read(*self.plan, self.placement)


def compare(found: Reading, folder: Path, **options: Any) -> None:
    """Every part is what is cut out of the same leaf of the model on one device."""
    whole, parts, placement = checkpoint.load(folder, **options), found.parts(), found.placement
    assert set(parts) == set(whole.graph.paths)
    for path, leaf in zip(whole.graph.paths, whole.leaves, strict=True):
        assert set(parts[path]) == set(placement.mine)
        for device, place in placement._places():
            expected = cut(placement.roles[path], np.asarray(leaf), placement.sizes, place)
            assert parts[path][device].dtype == expected.dtype
            np.testing.assert_array_equal(parts[path][device], expected, err_msg=f"{path} on {device}")


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("llama", Partition(8)), ("gpt2", Partition(4)), ("qwen3-moe", Partition(2, 2)), ("mixtral", Partition(1, 4)),
        ("olmo2", Partition(2)), ("gemma2", Partition(4)), ("phi3", Partition(2)), ("llama-biases", Partition(4)),
    ],
)  # fmt: skip
def test_parts_are_those_of_the_whole_model(
    tmp_path: Path, name: str, partition: Partition, quantize: str | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", chunk)  # small tensors are read in several pieces, too
    folder = checkpoints.write(tmp_path, mesh_models.raw(name), dtype="bfloat16", shards=2)
    options = {"dtype": "bfloat16" if chunk == 1000 else "float32", "quantize": quantize}
    compare(Reading(folder, partition, **options), folder, **options)


@pytest.mark.parametrize(("name", "partition"), [("llama", Partition(2)), ("qwen3-moe", Partition(1, 4))])
@pytest.mark.parametrize("quantize", by_default(["mlp=int4-32,attention=int4-32", "mlp=int8"]))
def test_groups_of_four_bits_are_divided_before_they_are_packed(
    tmp_path: Path, name: str, partition: Partition, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 3000)
    folder = checkpoints.write(tmp_path, mesh_models.raw(name) | PACKED)
    options = {"dtype": "float32", "quantize": quantize}
    compare(Reading(folder, partition, **options), folder, **options)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_stored_groups_are_kept_in_parts(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "UNPACKED", 5000)
    folder = checkpoints.write(tmp_path / "folder", mesh_models.raw("llama") | PACKED)
    file = gguf_files.convert(folder, tmp_path / "model.gguf", kind)
    compare(Reading(file, Partition(2)), file)


def test_a_process_reads_and_holds_its_own_devices_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.write(tmp_path, mesh_models.raw("llama") | WIDE, dtype="float32")
    count, lock = [0], threading.Lock()

    def counted(entry: Any, start: int, out: NDArray[Any]) -> None:
        with lock:
            count[0] += out.nbytes
        read_into(entry, start, out)

    read_into = reading.read_into
    monkeypatch.setattr(reading, "read_into", counted)
    found = Reading(folder, Partition(8), mine=(2,), dtype="float32")
    parts = found.parts()
    assert count[0] == found.bytes
    sizes = {entry.name: entry.nbytes for entry in found.plan.entries.values()}
    columns = sum(size for name, size in sizes.items() if "o_proj" in name or "down_proj" in name)
    assert count[0] < columns + 0.14 * (sum(sizes.values()) - columns), "an eighth of all rows, and kv heads twice"
    assert parts["layers.0.mlp.down.weight"][2].shape == (256, 2048 // 8)
    everyone = Reading(folder, Partition(8), dtype="float32")
    kv = sum(size for name, size in sizes.items() if "k_proj" in name or "v_proj" in name)
    assert everyone.bytes <= sum(sizes.values()) + kv, "nothing else is read twice"
    experts = checkpoints.write(tmp_path / "experts", mesh_models.raw("qwen3-moe"))
    one, both = (Reading(experts, Partition(1, 2), mine=mine, dtype="float32") for mine in ((1,), (0, 1)))
    assert one.bytes < 0.6 * both.bytes


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    by_default([("bfloat16", "int8"), ("float32", None), ("bfloat16", None), ("float32", "int8")], 2),
)
def test_no_whole_matrix_is_in_memory(
    tmp_path: Path, dtype: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.write(tmp_path, mesh_models.raw("llama") | WIDE, dtype="float32")
    monkeypatch.setattr(reading, "CHUNK", 1 << 17)
    monkeypatch.setattr(reading, "workers", lambda: 1)
    monkeypatch.setattr(leaf_arrays, "aligned", lambda shape, dtype: np.zeros(shape, dtype))  # which is traced
    found = Reading(folder, Partition(8), dtype=dtype, quantize=quantize)
    tracemalloc.start()
    try:
        parts = found.parts()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = {id(part): part.nbytes for leaf in parts.values() for part in leaf.values()}
    largest = 16384 * 256 * np.dtype("int8" if quantize else dtype if dtype == "float32" else "uint16").itemsize
    assert peak - sum(held.values()) < largest / 2, "next to the parts there is room for pieces alone"


def test_kept_weights_are_read_in_parts_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    monkeypatch.setattr(prepared, "DELAY", 0.0)
    monkeypatch.setattr(kept_weights, "SUMMED", 1 << 18)
    folder = checkpoints.write(tmp_path / "folder", mesh_models.raw("llama") | WIDE)
    options = {"dtype": "float32", "quantize": "int8-weight", "cache_dir": tmp_path / "cache"}
    whole = checkpoint.load(folder, **options)
    assert prepared.wait(60)
    described = checkpoints.described(folder, **options)
    assert described.slot is not None and described.reads is None
    placement: Any = Somewhere(None, Partition(4), described.graph, mine=(0, 3))  # type: ignore[arg-type]
    file = next(described.slot.rglob("weights.safetensors"))

    def load() -> Any:
        return prepared.load(described.slot, described.graph, described.shapes, placement=placement)  # type: ignore[arg-type]

    found = dict(zip(described.graph.paths, load(), strict=True))
    for path, leaf in zip(whole.graph.paths, whole.leaves, strict=True):
        for device, place in placement._places():
            expected = cut(placement.roles[path], np.asarray(leaf), placement.sizes, place)
            np.testing.assert_array_equal(found[path][device], expected, err_msg=path)
    content = bytearray(file.read_bytes())
    content[-100_000] ^= 1  # of a part that other devices have, perhaps
    file.chmod(0o600)
    file.write_bytes(content)
    with pytest.raises(Exception, match=r"checksum of .* does not match") as raised:
        load()
    assert isinstance(raised.value.__cause__, CheckpointError)


def test_the_checksum_of_pieces_is_that_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for size in (0, 5, 8, (1 << 18) + 3, (1 << 20) + 9):
        array = rng.integers(0, 256, size, np.uint8)
        pieces = [array[start : start + (1 << 18)] for start in range(0, size, 1 << 18)]
        assert kept_weights.checksum_of_pieces(size, pieces) == kept_weights.checksum_of(array)
