"""A small checkpoint is described once; the next start reads the description and imports no flax."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.models.loading import checkpoint, known_models
from rekindle._src.models.loading.checkpoint import CheckpointPlan, ReadingNote, load, read
from rekindle._src.models.roles import REPLICATED


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def kept(cache: Path) -> list[Path]:
    folder = cache / known_models.FOLDER
    return sorted(folder.iterdir()) if folder.is_dir() else []


def describe(folder: Path, cache_dir: Path, **options: Any) -> CheckpointPlan:
    """Describe a checkpoint, and keep the description as a session does when it reads the weights."""
    described = checkpoints.described(folder, cache_dir=cache_dir, **options)
    described.keep()
    return described


def without_roles(described: CheckpointPlan) -> Any:
    assert described.reads is not None
    leaves, entries = described.reads
    plain = [leaf._replace(source=dataclasses.replace(leaf.source, role=REPLICATED)) for leaf in leaves]
    return described._replace(origin=ReadingNote(known_models.Reads(plain, entries)))


def again(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> CheckpointPlan:
    """Described by what is kept alone."""

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("the model was described anew")

    with monkeypatch.context() as patch:
        for name in ("config_from_hf", "abstract_model", "planned_reads"):
            patch.setattr(checkpoint, name, refused)
        return describe(folder, cache_dir=cache, **options)


@pytest.mark.parametrize("name", by_default(checkpoints.CASES, lambda name: name in checkpoints.UNLIKE))
def test_what_is_kept_says_the_same(name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES[name])
    first = describe(folder, cache_dir=cache)
    if any(first.graph.config.moe):
        assert kept(cache) == [], "experts are packed"
        return
    assert again(folder, cache, monkeypatch) == without_roles(first)


def test_weights_are_read_by_it(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["gemma3"])
    first = load(folder, cache_dir=cache)
    second = read(again(folder, cache, monkeypatch))
    assert second.fingerprint == first.fingerprint
    checkpoints.assert_same(first, second)


def test_each_dtype_and_each_config_has_its_own(tmp_path: Path, cache: Path) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])
    for dtype in ("auto", "float32", "float32"):
        describe(folder, cache_dir=cache, dtype=dtype)
    assert len(kept(cache)) == 2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert describe(folder, cache_dir=cache).graph.config.norm_eps == 1e-3
    assert len(kept(cache)) == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_what_is_damaged_is_made_again(
    damage: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])
    first = describe(folder, cache_dir=cache)
    (file,) = kept(cache)
    content = file.read_bytes()
    found = {
        "cut": content[:-9],
        "flipped": content.replace(b"16", b"17"),
        "empty": b"",
        "other": known_models._sum(b"[]") + b"[]",
    }
    file.write_bytes(found[damage])
    assert describe(folder, cache_dir=cache) == first
    assert file.read_bytes() == content
    assert again(folder, cache, monkeypatch) == without_roles(first)


def test_describing_writes_nothing(tmp_path: Path, cache: Path) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])
    described = checkpoints.described(folder, cache_dir=cache)
    assert kept(cache) == [] and not cache.exists()
    described.keep()
    assert len(kept(cache)) == 1


def test_what_json_can_not_say_is_not_kept(tmp_path: Path, cache: Path) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])
    describe(folder, cache_dir=cache, quantize="int8")
    describe(folder, cache_dir=cache, divided=True)
    assert kept(cache) == []


def test_a_folder_of_others_is_not_used(tmp_path: Path, cache: Path) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.CASES["llama"])
    (cache / known_models.FOLDER).mkdir(parents=True)
    (cache / known_models.FOLDER).chmod(0o777)
    describe(folder, cache_dir=cache)
    assert kept(cache) == []
