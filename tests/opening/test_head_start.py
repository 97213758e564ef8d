"""The head start of a process's first model: its kept weights are there when JAX is, and nothing is left of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints
from helpers.sessions import eventually
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading import checkpoint, hugepages, kept_weights, prepared
from rekindle._src.models.loading.checkpoint import WeightForm
from rekindle._src.models.loading.kept_weights import MappedFile, MappedWeights
from rekindle._src.opening import head_start
from rekindle._src.opening.entry import begin
from rekindle._src.opening.head_start import HeadStart
from rekindle._src.opening.open_request import OpenRequest


@pytest.fixture(autouse=True)
def _keep_tiny_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(dtype="float32", cache_dir=str(tmp_path / "cache"))


def loaded(folder: Path, config: EngineConfig, ahead: HeadStart | None = None) -> LoadedModel:
    """The model as a session loads it."""
    form = WeightForm.of(config.dtype)
    described = checkpoint.describe((ahead and ahead.seen) or folder, form, cache_dir=config.cache_dir)
    found = checkpoint.read(described) if ahead is None else checkpoint.read(described, brought=ahead.weights)
    assert prepared.wait(60)
    return found


def same(one: LoadedModel, other: LoadedModel) -> bool:
    return all((a == b).all() for a, b in zip(one.leaves, other.leaves, strict=True))


def lease_of(mapped: MappedFile) -> object:
    return mapped._lease


def test_its_weights_are_those_that_were_kept(
    folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded(folder, config)
    ahead = HeadStart(folder, config)
    monkeypatch.setattr(kept_weights, "map_it", lambda header: pytest.fail("it was mapped again"))
    assert same(loaded(folder, config, ahead), first)
    ahead.close()


def test_damaged_kept_weights_are_set_aside_for_the_checkpoint(folder: Path, config: EngineConfig) -> None:
    first = loaded(folder, config)
    (file,) = Path(str(config.cache_dir)).rglob("weights.safetensors")
    content = bytearray(file.read_bytes())
    content[-200] ^= 1
    file.write_bytes(content)
    ahead = HeadStart(folder, config)
    with pytest.warns(UserWarning, match=r"checksum of .* does not match"):
        again = loaded(folder, config, ahead)
    assert same(again, first)
    ahead.close()


def test_a_file_whose_checksums_can_not_be_read_is_released(
    folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded(folder, config)
    (sums,) = Path(str(config.cache_dir)).rglob("checksums.json")
    sums.write_text("{")
    mapped, bring = list[MappedFile](), kept_weights.bring
    monkeypatch.setattr(kept_weights, "bring", lambda found: (mapped.append(found), bring(found))[1])
    with pytest.warns(UserWarning, match="weights"):
        assert same(loaded(folder, config, HeadStart(folder, config)), first)
    assert [lease_of(one) for one in mapped] == [None]


def test_many_bytes_are_left_to_several_threads_that_tell_of_it(
    folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded(folder, config)
    monkeypatch.setattr(head_start, "MOST", 1000)
    monkeypatch.setattr(kept_weights, "bring", lambda found: pytest.fail("one thread reads them all"))
    assert same(loaded(folder, config, HeadStart(folder, config)), first)


def test_nothing_is_read_for_another_platform(
    folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(folder, config)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setattr(kept_weights, "find", lambda kept, most: pytest.fail("it was looked for"))
    assert HeadStart(folder, config).seen is None


@pytest.mark.parametrize("read", [True, False], ids=["read", "being read"])
def test_what_is_not_taken_is_released(
    read: bool, folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(folder, config)
    go_on, bring, mapped = threading.Event(), kept_weights.bring, list[MappedFile]()

    def slowly(found: MappedFile) -> MappedWeights:
        mapped.append(found)
        assert go_on.wait(60)
        return bring(found)

    monkeypatch.setattr(kept_weights, "bring", slowly)
    ahead = HeadStart(folder, config)
    eventually(lambda: bool(mapped))
    if read:
        go_on.set()
        assert ahead.weights(Path("another")) is None
    ahead.close()
    if not read:
        go_on.set()
    eventually(lambda: lease_of(mapped[0]) is None)


@pytest.mark.parametrize("model", ["nowhere", "tiny", "owner/name"])
def test_a_head_start_leaves_missing_files_to_the_opening(model: str, config: EngineConfig) -> None:
    ahead = HeadStart(model, config)
    assert ahead.weights(Path("kept")) is None
    ahead.close()


def test_models_in_memory_and_on_a_mesh_have_none(folder: Path, config: EngineConfig) -> None:
    loaded_model: Any = object()
    assert begin(OpenRequest(loaded_model, config)) is None
    assert begin(OpenRequest(str(folder), EngineConfig(mesh=2))) is None


def test_memory_is_touched_for_weights_that_are_not_kept(
    folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "LEAST", 0)
    ahead = HeadStart(folder, config)
    assert ahead.memory is not None and hugepages._ahead is ahead.memory
    first = loaded(folder, config, ahead)
    ahead.close()
    assert ahead.memory.used and hugepages._ahead is None
    again = HeadStart(folder, config)
    assert again.memory is None and again.weights(again._kept) is not None  # type: ignore[arg-type]
    assert same(loaded(folder, config), first)
    again.close()
