"""A stranger's picture writes no line to standard error, whatever Pillow logs of it."""

from __future__ import annotations

import logging

import pytest

from images.files import tiff
from rekindle._src.images.picture import open_bytes
from rekindle.errors import InvalidRequest


def test_what_pillow_logs_of_a_refused_file_stays_off_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without handlers, as in a script, `logging` writes errors to standard error by itself."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("PIL"), "handlers", [])
    size = (256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 1, 8), (262, 3, 1, 2), (273, 4, 1, 8), (279, 4, 1, 100)
    with pytest.raises(InvalidRequest):
        open_bytes(tiff(*size[:4], size[4], (277, 3, 1, 7), size[5], rest=bytes(200))).decode()
    assert capsys.readouterr().err == ""
