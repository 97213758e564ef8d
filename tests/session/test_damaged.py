"""Bytes flipped and files cut off in a hundred places of the store: reported once, computed again, never wrong."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path

import pytest

from helpers.tiered import ask, opened

pytestmark = pytest.mark.usefixtures("shared_programs")
PROMPTS = (0, 1, 2)
ROUNDS, PLACES = 10, 10


def damage(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data))
    if draw.random() < 0.5:
        data[at] ^= 1 << draw.randrange(8)
    else:
        del data[at:]
    file.write_bytes(data)


@pytest.mark.slow
def test_a_hundred_damaged_places_are_reported_once_and_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, whole = tmp_path / "cache", tmp_path / "whole"
    with opened(cache) as session:
        for index in PROMPTS:
            ask(session, index)
            session.save("mine").result_sync()  # a segment each
    stored = ("pages", "snapshots")
    for name in stored:
        shutil.copytree(cache / name, whole / name)
    draw = random.Random(0)
    lost = 0
    for turn in range(ROUNDS):
        for name in stored:
            shutil.rmtree(cache / name)
            shutil.copytree(whole / name, cache / name)
        files = [file for name in stored for file in sorted((cache / name).rglob("*")) if file.is_file()]
        harmed = set()
        for _ in range(PLACES):
            file = draw.choice([file for file in files if file.stat().st_size])
            damage(file, draw)
            harmed.add(file)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rekindle.cache"), opened(cache, restore="auto") as session:
            found = [ask(session, index) for index in PROMPTS]
            said = [record.getMessage() for record in caplog.records]
            assert [ask(session, index) for index in PROMPTS] == [64] * len(PROMPTS), "computed again, and kept"
            stats = session.cache.stats().disk
            session.check_integrity()
        assert len(caplog.records) == len(said), f"round {turn}: said again"
        segments = {
            file.relative_to(cache / "pages").parts[0] for file in harmed if file.is_relative_to(cache / "pages")
        }
        assert all(sum(segment in text for text in said) <= 1 for segment in segments), said
        assert all(any(segment in text for segment in segments) for text in said), said
        assert stats is not None and (stats.damaged > 0) == bool(said)
        lost += sum(64 - tokens for tokens in found)
    assert lost, "nothing that was damaged was ever asked for"
