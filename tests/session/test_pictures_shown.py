"""What is shown of pictures: an explanation counts their tokens and says where their rows were."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import seeing

pytest.importorskip("PIL.Image")
anyio_test = pytest.mark.anyio


@anyio_test
async def test_an_explanation_counts_the_tokens_of_pictures_and_says_where_their_rows_were(tmp_path: Path) -> None:
    question, one, two = "<image>What do you see?", seeing.noise(1, 96, 64), seeing.noise(2, 64, 64)
    with seeing.opened(folder=tmp_path) as session:
        first = session.explain(await session.generate(question, images=one, max_tokens=2))
        assert first.notes[0][:3] == ("picture", 6, 0)
        assert "1 picture with 6 tokens, 0 of them cached; the encoder ran for 1 of them" in str(first)
        assert "6 of them pictures" in first._repr_html_() and "pictures computed 6" in first._repr_html_()
        again = session.explain(await session.generate(question, images=one, max_tokens=2))
        assert again.notes[0][:3] == ("picture", 6, 6)
        assert "6 of them cached; the encoder did not run, and the rows of 1 were in memory" in str(again)
        assert "pictures from the cache 6" in again._repr_html_()
        both = session.explain(await session.generate("a<image>b<image>", images=[one, two], max_tokens=2))
        assert both.notes[0][:3] == ("picture", 10, 0)
        assert "the encoder ran for 1 of them, and the rows of 1 were in memory" in str(both)
        text = session.explain(await session.generate("no picture", max_tokens=2))
        assert text.notes == () and "picture" not in text._repr_html_()
    with seeing.opened(folder=tmp_path) as session:
        later = session.explain(await session.generate(question, images=one, max_tokens=2))
        assert "0 of them cached; the encoder did not run, and the rows of 1 were on disk" in str(later)
