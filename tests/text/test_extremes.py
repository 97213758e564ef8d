"""Extremes in every place of a folder's JSON files of text open, or are refused by a typed error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.sessions import byte_tokenizer
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import CheckpointError
from text import extremes


@pytest.mark.parametrize(
    "listed", ["x", 1.5, [1], {"a": {}}, {"1": 0.5}, {"1": {}}, {"256": {"content": "\ud800"}}, {"1": {"content": 2}}]
)
def test_tokens_of_an_older_folder_that_make_no_sense_are_refused(listed: object, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer().definition())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match=r"special tokens in .*tokenizer_config\.json make no sense"):
        Tokenizer.load(tmp_path)


def test_a_special_token_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer().definition())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    with pytest.raises(CheckpointError, match="make no sense"):
        Tokenizer.load(tmp_path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "stride", [pytest.param(29, marks=pytest.mark.thorough), pytest.param(1, marks=pytest.mark.slow)]
)
def test_an_extreme_opens_or_is_refused_by_a_typed_error(stride: int, tmp_path: Path) -> None:
    command = [sys.executable, extremes.__file__, str(stride), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-500:]} {done.stderr[-2000:]}"
    *wrong, last = done.stdout.splitlines()
    assert not wrong, "\n".join(wrong[:40])
    counts = json.loads(last)
    assert counts["opens"] > 20 and counts["refused"] > 20, counts
