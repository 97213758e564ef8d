"""A stranger's picture writes no line to standard error, whatever Pillow logs of it."""

from __future__ import annotations

import logging
import warnings

import pytest

from images.files import tiff
from rekindle._src.images.picture import open_bytes
from rekindle.errors import InvalidRequest


def test_pillows_log_of_a_refused_file_stays_off_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without handlers, as in a script, `logging` writes errors to standard error by itself."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("PIL"), "handlers", [])
    size = (256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 1, 8), (262, 3, 1, 2), (273, 4, 1, 8), (279, 4, 1, 100)
    with pytest.raises(InvalidRequest):
        open_bytes(tiff(*size[:4], size[4], (277, 3, 1, 7), size[5], rest=bytes(200))).decode()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("place", [8 + 2 + 12 * 6 + 4 + 200 - 5, 1 << 31])
def test_a_tag_whose_numbers_lie_past_the_end_of_the_file_is_refused_before_pillow_warns_of_it(place: int) -> None:
    tags = (256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 3, place), (262, 3, 1, 2), (273, 4, 1, 8), (277, 3, 1, 3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(InvalidRequest, match="ends within its header"):
            open_bytes(tiff(*tags, rest=bytes(200))).decode()
    assert not warned
    open_bytes(tiff(*tags[:2], (258, 3, 3, 8 + 2 + 12 * 6 + 4 + 200 - 6), *tags[3:], rest=bytes(200)))
