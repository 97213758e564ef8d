"""What is shown of pictures: explanations count their tokens, and reprs have thumbnails of them."""

from __future__ import annotations

import base64
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from helpers import picture_models as small
from helpers import seeing
from helpers.sessions import front_of
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle._src.calls import conversation
from rekindle._src.images import open_bytes, open_picture, processor_of_files
from rekindle._src.images import thumbnail as thumbnails

pillow = pytest.importorskip("PIL.Image")
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


@anyio_test
async def test_the_rows_of_a_picture_are_shared_within_a_salt_alone(tmp_path: Path) -> None:
    """Another salt's picture is computed again, as its pages are; the time to a first token told of it otherwise."""
    question, one = "<image>What do you see?", seeing.noise(1, 96, 64)
    ran, kept = "the encoder ran for 1 of them", "the encoder did not run, and the rows of 1 were"
    with seeing.opened(folder=tmp_path) as session:
        for salt in (None, "alice", "bob"):
            first = session.explain(await session.generate(question, images=one, max_tokens=2, salt=salt))
            assert first.notes[0][:3] == ("picture", 6, 0) and ran in str(first), salt
            again = session.explain(await session.generate(question, images=one, max_tokens=2, salt=salt))
            assert f"{kept} in memory" in str(again), salt
    with seeing.opened(folder=tmp_path) as session:
        for salt, words in (("alice", f"{kept} on disk"), ("carol", ran), ("bob", f"{kept} on disk")):
            later = session.explain(await session.generate(question, images=one, max_tokens=2, salt=salt))
            assert words in str(later), salt


def shown(markup: str) -> list[Any]:
    """The thumbnails in HTML, decoded."""
    files = re.findall(
        r'<img src="data:image/png;base64,([A-Za-z0-9+/=]+)" alt="[0-9 ×,]+" title="[^"<>]*" style=', markup
    )
    assert len(files) == markup.count("<img") and all(len(file) < 40_000 for file in files)
    return [pillow.open(io.BytesIO(base64.b64decode(file))) for file in files]


@anyio_test
async def test_completions_show_thumbnails_of_their_pictures_which_are_made_when_they_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        "rekindle._src.capabilities.pictures.owner.thumbnail", lambda one: made.append(one) or thumbnails.thumbnail(one)
    )
    large, small = seeing.noise(1, 640, 320), seeing.noise(2, 40, 64)
    with seeing.opened() as session:
        done = await session.generate("What?", images=[large, seeing.png(small)], max_tokens=2)
        several = await session.generate(["What?"] * 12, images=[large] * 12, max_tokens=2)
        text = await session.generate("What?", max_tokens=2)
    assert made == []
    first, second = shown(done._repr_html_())
    assert first.size == (160, 80) and second.size == (40, 64)
    assert (second.convert("RGB").tobytes()) == small.tobytes(), "the picture itself"
    assert done._repr_html_() == done._repr_html_() and len(made) == 2
    assert len(shown(several._repr_html_())) == 8 and several._repr_html_().count("1 picture<") == 4
    assert shown(text._repr_html_()) == []


@anyio_test
async def test_conversations_show_thumbnails_and_open_no_file_for_them(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    path.write_bytes(seeing.png(seeing.noise(3, 64, 64)))
    uri = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    values: list[Any] = [uri, path, str(path), "https://example.org/a.png", b"no picture", "data:image/png;base64,"]
    parts = [{"type": "image", "image": value} for value in values]
    content = [*parts, {"type": "image"}, {"type": "text", "text": "<b>What?</b>"}]
    with seeing.opened() as session:
        chat = conversation.Conversation(session, front_of(session), [{"role": "user", "content": content}], {})
        markup = chat._repr_html_()
        assert [one.size for one in shown(markup)] == [(64, 64)] and markup.count("a picture<") == 6
        asked = session.conversation()
        await asked.say("What?", images=[seeing.noise(4, 48, 32), path], max_tokens=2)
        assert [one.size for one in shown(asked._repr_html_())] == [(48, 32), (64, 64)]
    assert "&lt;b&gt;What?" in markup and "plot.png" not in markup and len(markup) < 100_000


def test_a_large_file_is_not_decoded_for_its_thumbnail_and_a_broken_one_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = open_bytes(seeing.png(seeing.noise(1, 65, 64)))
    assert thumbnails.thumbnail(file).startswith("data:image/png;base64,")
    monkeypatch.setattr(thumbnails, "MOST_DECODED", 64 * 64)
    assert thumbnails.thumbnail(file) == "" and thumbnails.thumbnail(file.decode()) != ""
    cut = seeing.png(seeing.noise(1, 60, 60))
    assert thumbnails.Thumbnail.of(cut[: len(cut) // 2])[:2] == (60, 60)
    assert thumbnails.Thumbnail.of(cut[: len(cut) // 2]).thumbnail == "" and thumbnails.Thumbnail.of(b"") == (0, 0, "")


@anyio_test
async def test_tokens_of_pictures_say_which_patch_they_are() -> None:
    wide, square = seeing.noise(1, 96, 64), seeing.noise(2, 32, 32)
    with seeing.opened() as session:
        prompt = "<image>a<image>b"
        done = await session.generate(prompt, images=[wide, square], max_tokens=2, prompt_logprobs=1)
        text = await session.generate("ab", max_tokens=2)
    assert {position: patch[:3] for position, patch in done.patches.items()} == {
        1: (0, 0, 0), 2: (0, 0, 1), 3: (0, 0, 2), 4: (0, 1, 0), 5: (0, 1, 1), 6: (0, 1, 2), 10: (1, 0, 0),
    }  # fmt: skip
    assert str(done.patches[6]) == "picture 0, row 1, column 2 of 2 × 3"
    places = ["[", "▦0,0", "▦0,1", "▦0,2", "▦1,0", "▦1,1", "▦1,2", "]", "a", "[", "▦0,0", "]", "b"]
    assert list(done.prompt_texts) == places and "".join(text.prompt_texts) == "ab"
    markup = done._repr_html_()
    assert markup.count("▦</span>") == 7 and markup.count('title="picture 0, row 1, column 2 of 2 × 3 ') == 1
    assert pickle.loads(pickle.dumps(done)).patches == done.patches
    assert text.patches == {} and "▦" not in text._repr_html_()


@pytest.mark.parametrize("name", sorted(small.CASES))
@pytest.mark.parametrize("size", [(64, 64), (300, 60), (97, 411), (1, 1)])
def test_tokens_of_each_view_make_a_grid(name: str, size: tuple[int, int]) -> None:
    case = small.CASES[name]
    processor = processor_of_files(case.preprocessor, case.processor or None, case.config)
    plan = processor.plan(*size)
    runs = [one.times for one in processor.expansion(plan) if getattr(one, "token", "") == processor.image_token]
    assert [grid.rows * grid.columns for grid in plan.grids] == runs
    tiles = [grid.tile for grid in plan.grids if grid.tile is not None]
    assert tiles == [(row, column) for row in range(plan.tile_rows) for column in range(plan.tile_columns)]
    for view, grid in zip(plan.views, plan.grids, strict=True):
        assert (view.rows % grid.rows, view.columns % grid.columns) == (0, 0)
        assert view.rows // grid.rows == view.columns // grid.columns, "of square patches"


def test_the_grid_is_in_the_order_of_qwens_merged_patches() -> None:
    processor = seeing.processor()
    picture = open_picture(seeing.noise(1, 96, 64)).decode()
    patches, (grid,) = processor.patches(picture), processor.plan(96, 64).grids
    first = patches.positions.reshape(-1, 4, 2).min(axis=1) // 2
    assert first.tolist() == [[row, column] for row in range(grid.rows) for column in range(grid.columns)]
