"""A fingerprint changes with the model, whatever tool changed it, and with nothing else; it costs next to nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from helpers import checkpoints
from rekindle._src.models.loading import checkpoint, fingerprint

RAW = checkpoints.CASES["llama"]


def of(folder: Path) -> str:
    return checkpoint.inspect(folder).fingerprint


@pytest.fixture(params=["small", "large"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways of naming content, on the same tiny folder."""
    if request.param == "large":
        monkeypatch.setattr(fingerprint, "SMALL", 0)
    return bool(request.param == "large")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "model", RAW, shards=2)


@pytest.mark.usefixtures("large")
def test_the_same_folder_has_the_same_fingerprint(folder: Path) -> None:
    first = of(folder)
    assert of(folder) == first
    assert of(Path(os.path.relpath(folder))) == first
    config = json.loads((folder / "config.json").read_text())
    config |= {"_name_or_path": "elsewhere", "transformers_version": "9.9"}
    (folder / "config.json").write_text(json.dumps(config, indent=3))
    assert of(folder) == first, "these two say nothing about the model"


@pytest.mark.usefixtures("large")
def test_it_changes_with_the_model(folder: Path) -> None:
    seen = {of(folder)}

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    seen.add(of(folder))
    checkpoints.write(folder, RAW, seed=1, shards=2)
    seen.add(of(folder))
    checkpoints.write(folder, RAW, seed=1, shards=2, dtype="float16")
    seen.add(of(folder))
    assert len(seen) == 4


def test_one_changed_weight_is_noticed(folder: Path, large: bool) -> None:
    first = of(folder)
    file = folder / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert of(folder) != first


def test_new_weights_with_the_old_times_are_noticed(folder: Path, large: bool) -> None:
    first = of(folder)
    times = {file: file.stat() for file in folder.iterdir()}
    checkpoints.write(folder, RAW, seed=1, shards=2)
    for file, stat in times.items():
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert of(folder) != first


def test_what_a_copy_keeps(folder: Path, tmp_path: Path, large: bool) -> None:
    first = of(folder)
    shutil.copytree(folder, tmp_path / "with times")
    assert of(tmp_path / "with times") == first
    shutil.copytree(folder, tmp_path / "without", copy_function=shutil.copyfile)
    for file in (tmp_path / "without").iterdir():
        os.utime(file)
    assert (of(tmp_path / "without") == first) is not large


def test_the_blobs_of_a_hub_cache_are_named_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "SMALL", 0)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    made = checkpoints.write(tmp_path / "made", RAW)
    names = []
    for number, digest in enumerate(("a" * 64, "a" * 64, "b" * 64)):
        blobs, snapshot = tmp_path / f"{number}" / "blobs", tmp_path / f"{number}" / "snapshots" / "x"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        shutil.copyfile(made / "model.safetensors", blobs / digest)
        os.utime(blobs / digest, (number, number))
        shutil.copy(made / "config.json", snapshot)
        (snapshot / "model.safetensors").symlink_to(blobs / digest)
        names.append(of(snapshot))
    assert names[0] == names[1] != names[2]


def test_a_checkpoint_can_not_take_the_name_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to blobs/<digest> outside the hub's cache was believed: the real model answered with these weights."""
    monkeypatch.setattr(fingerprint, "SMALL", 0)
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    names, digest = {}, ""
    for where, seed in (("hub/models--real", 0), ("elsewhere/real", 0), ("elsewhere/evil", 1)):
        made = checkpoints.write(tmp_path / "made" / where, RAW, seed=seed)
        content = (made / "model.safetensors").read_bytes()
        digest = digest or hashlib.sha256(content).hexdigest()  # of the real one
        blobs, snapshot = tmp_path / where / "blobs", tmp_path / where / "snapshots" / "x"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / digest).write_bytes(content)
        shutil.copy(made / "config.json", snapshot)
        (snapshot / "model.safetensors").symlink_to(blobs / digest)
        names[where] = of(snapshot)
    assert names["elsewhere/real"] == names["hub/models--real"] != names["elsewhere/evil"]


def test_a_content_is_hashed_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    hashed, real = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: (hashed.append(args), real(*args))[1])
    first = fingerprint.content_sha256(file)
    assert fingerprint.content_sha256(file) == first == hashlib.sha256(b"one").hexdigest()
    assert len(hashed) == 1
    times = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint.content_sha256(file) == hashlib.sha256(b"two").hexdigest()


def test_each_precision_has_its_own(folder: Path) -> None:
    options = [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantize": "int8"},
        {"dtype": "bfloat16", "quantize": "int8-weight"},
        {"dtype": "bfloat16", "quantize": "int8", "quantize_embeddings": False},
    ]
    found = [checkpoint.load(folder, **option).fingerprint for option in options]
    assert len(set(found)) == len(options)
    assert checkpoint.load(folder, **options[2]).fingerprint == found[2]


@pytest.mark.clock
def test_a_folder_of_any_size_takes_no_time(tmp_path: Path) -> None:
    """150 files of 64 GB each, which exist as holes only, and 30,000 tensors."""
    folder = tmp_path / "huge"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RAW))
    shape = [8192, 1 << 14]
    size = int(np.prod(shape)) * 2
    for shard in range(150):
        header = {
            f"model.layers.{shard}.mlp.experts.{i}.w1.weight": {
                "dtype": "BF16", "shape": shape, "data_offsets": [i * size, (i + 1) * size]
            }
            for i in range(200)
        }  # fmt: skip
        raw = json.dumps(header).encode()
        with (folder / f"model-{shard:05d}-of-00150.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + 200 * size)
    headers = checkpoint.inspect(folder).headers
    seconds = []
    for _ in range(5):
        start = time.process_time()
        fingerprint.folder_fingerprint(RAW, headers)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1, seconds
