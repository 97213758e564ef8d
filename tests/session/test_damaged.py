"""Bits flipped and files cut off all over the cache: said once for each entry, made again, and never another text."""

from __future__ import annotations

import logging
import random
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import rekindle
from helpers import adapters, checkpoints
from rekindle import Session
from rekindle._src.models.loading import prepared

pytestmark = pytest.mark.usefixtures("large_steps")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "page_size": 8, "device_pages": 64, "max_requests": 2, "max_tokens_per_step": 32,
    "max_model_len": 256, "precompile": "lazy", "quiet": True, "seed": 0,
}  # fmt: skip
LENGTH, NEW, PROMPTS, ROUNDS, PLACES = 90, 8, 2, 3, 9


class Kind(NamedTuple):
    """A cache of one kind: how its session is opened, and what its requests ask for."""

    model: str = "llama"
    options: Mapping[str, Any] = MappingProxyType({})
    asked: Mapping[str, Any] = MappingProxyType({})
    of_groups: bool = False  # a folder, whose matrices have rows of whole groups


KINDS = {
    "int8": Kind(options={"kv_dtype": "int8"}),
    "states": Kind("qwen3.5", {"page_size": 16}),
    "float32": Kind(),
    "bfloat16": Kind(options={"kv_dtype": "bfloat16"}),
    "float8": Kind(options={"kv_dtype": "float8_e4m3fn"}),
    "states-in-8-bits": Kind("lfm2", {"page_size": 16, "kv_dtype": "int8"}),
    "windows": Kind("gemma3"),
    "captures": Kind(asked={"capture": rekindle.Capture({"residual": [1]}, keep=True)}),
    "adapters": Kind(options={"max_adapters": 2, "max_adapter_rank": 8}, asked={"adapter": "mine"}),
    "weights-in-4-bits": Kind(options={"quantize": {"mlp": "int4-32"}}, of_groups=True),
}


def model_of(kind: Kind, folder: Path) -> Any:
    raw = {**checkpoints.CASES[kind.model], "max_position_embeddings": 256}
    if kind.of_groups:
        return str(checkpoints.write(folder / "model", {**raw, "hidden_size": 64, "intermediate_size": 96}))
    return checkpoints.model(raw, checkpoints.tensors(raw))


def answers(session: Session, kind: Kind) -> list[Any]:
    found: list[Any] = []
    for index in range(PROMPTS):
        ids = np.random.default_rng(index).integers(3, 160, LENGTH).tolist()
        done = session.generate_sync(ids, max_tokens=NEW, ignore_eos=True, **kind.asked)
        captured = None if done.captured is None else {key: array.tobytes() for key, array in done.captured.items()}
        found.append((done.token_ids, captured))
    return found


def damage(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data))
    if draw.random() < 0.5:
        data[at] ^= 1 << draw.randrange(8)
    else:
        del data[at:]
    file.write_bytes(data)


def entry_of(file: Path, cache: Path) -> str:
    """The name of the entry that a file belongs to."""
    return file.relative_to(cache).parts[1]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in KINDS])
def test_whatever_is_damaged_is_said_once_and_no_text_is_another(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "MIN_BYTES", 0)
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    kind, cache, whole = KINDS[name], tmp_path / "cache", tmp_path / "whole"
    model = model_of(kind, tmp_path)
    options = {**OPTIONS, "cache_dir": str(cache), **kind.options}
    if "adapter" in kind.asked:
        config = model.config
        options["adapters"] = {"mine": adapters.write(tmp_path / "adapter", config, seed=1, rank=4)}
    with rekindle.open_sync(model, **options) as session:
        expected = answers(session, kind)
        session.save("mine").result_sync()
    assert prepared.wait(60)
    shutil.copytree(cache, whole)
    draw = random.Random(name)
    places = lost = 0
    for _ in range(ROUNDS):
        shutil.rmtree(cache)
        shutil.copytree(whole, cache)
        kinds = [folder for folder in cache.iterdir() if folder.is_dir() and folder.name != "native"]
        files = {
            folder.name: [file for file in sorted(folder.rglob("*")) if file.is_file() and file.stat().st_size]
            for folder in kinds
        }
        harmed = set[Path]()
        for number in range(PLACES):
            where = "pages" if number % 2 else draw.choice(sorted(files))
            # What is compiled again takes a second.
            if where == "programs" and any("programs" in file.parts for file in harmed):
                where = "pages"
            file = draw.choice([file for file in files[where] if file.stat().st_size])
            damage(file, draw)
            harmed.add(file)
            places += 1
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rekindle"), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with rekindle.open_sync(model, **options, restore="auto") as session:
                for _turn in range(2):
                    assert answers(session, kind) == expected, f"another text: {sorted(harmed)}"
                stats = session.cache.stats().disk
                session.check_integrity()
        said = [record.getMessage() for record in caplog.records] + [str(one.message) for one in warned]
        entries = {entry_of(file, cache) for file in harmed}
        for text in said:
            assert any(entry in text for entry in entries), f"nothing of that was damaged: {text}"
        for entry in entries:
            assert sum(entry in text for text in said) <= 1, said
        assert stats is not None
        lost += stats.damaged
    print(f"\n{name}: {places} flips and cuts, {lost} pages or lists of pages were noticed")
    assert lost, "nothing that was damaged was ever asked for"
