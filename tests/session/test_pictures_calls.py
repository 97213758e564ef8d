"""Pictures in the other calls of a session: rows of tables, scores, vectors, and conversations that are kept."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import picture_models as small
from helpers.sessions import opened
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Capture, Session
from rekindle.errors import InvalidRequest

pillow = pytest.importorskip("PIL.Image")
anyio_test = pytest.mark.anyio
thorough = pytest.mark.thorough
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 256, "page_size": 16,
    "device_pages": 80, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
ONE, TWO = small.picture(1, 96, 64), small.picture(2, 96, 64)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    pillow.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module", params=["qwen3-vl", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.written(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def session(folder: Path, tmp_path: Path) -> AsyncIterator[Session]:
    async with rekindle.open(folder, **OPTIONS, cache_dir=str(tmp_path / "cache")) as made:
        yield made


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    for path, pixels in zip(paths, (ONE, TWO), strict=True):
        path.write_bytes(png(pixels))
    return [str(path) for path in paths]


@thorough
@anyio_test
async def test_a_column_of_files_is_mapped(session: Session, files: list[str], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    expected = [(await session.generate("of <image>: a", images=one, **GREEDY)).text for one in (ONE, TWO)]
    plain = (await session.generate("of : a", **GREEDY)).text
    frame = pandas.DataFrame({"file": [*files, None, "/nowhere.png"], "word": ["a"] * 4})
    out = tmp_path / "answers.jsonl"
    template: Any = lambda row: "of : a" if pandas.isna(row["file"]) else "of <image>: a"  # noqa: E731
    answers = await session.map(frame, template, images="file", out=out, **GREEDY)
    assert answers.texts == [*expected, plain, ""]
    assert list(answers.errors) == [3] and "rows[3]['file'][0]" in str(answers.errors[3])
    for images in (files, [ONE, png(TWO)], np.stack([ONE, TWO]), [[ONE], [TWO]], frame["file"].iloc[:2]):
        assert (await session.map(frame.iloc[:2], "of <image>: {word}", images=images, **GREEDY)).texts == expected
    again = await session.map(frame, template, images="file", out=out, **GREEDY)
    assert [one.resumed for one in again] == [True, True, True, False] and again.texts == answers.texts
    pillow.fromarray(TWO).save(files[0])  # the same path, another picture
    again = await session.map(frame, template, images="file", out=out, **GREEDY)
    assert [one.resumed for one in again] == [False, True, True, False] and again.texts[0] == expected[1]


@thorough
@anyio_test
async def test_rows_of_chats_have_pictures(session: Session, files: list[str], tmp_path: Path) -> None:
    content = [{"type": "image", "image": ONE}, {"type": "text", "text": "a word"}]
    expected = (await session.chat([{"role": "user", "content": content}], **GREEDY)).content
    rows = [{"file": files[0]}, {"file": files[1]}]
    assert (await session.map(rows, "a word", images="file", chat=True, **GREEDY)).texts[0] == expected
    assert (await session.map(rows, "<image>a word", images="file", chat=True, **GREEDY)).texts[0] == expected

    def messages(row: Any) -> Any:  # arrays whose repr is the same
        pixels = np.zeros((64, 96, 3), np.uint8)
        pixels[30, 40] = row["value"]
        return [{"role": "user", "content": [{"type": "image", "image": pixels}]}]

    out = tmp_path / "answers.jsonl"
    values = [{"value": 0}, {"value": 255}]
    await session.map(values, messages, out=out, **GREEDY)
    assert [one.resumed for one in await session.map(values, messages, out=out, **GREEDY)] == [True, True]
    answers = await session.map(values[::-1], messages, out=out, **GREEDY)
    assert [one.resumed for one in answers] == [False, False], "other pixels are another picture"
    (failed,) = await session.map(values[:1], messages, images=[ONE], **GREEDY)
    assert "come with messages" in str(failed.error)


@thorough
@anyio_test
async def test_wrong_pictures_of_rows_are_refused_by_name(session: Session) -> None:
    rows = [{"file": None}, {"file": None}]
    for images, problem in (
        ("fil", "Did you mean 'file'"),
        ([ONE], "2 rows"),
        (ONE, "are not those of rows"),
        (b"bytes", "are not those of rows"),
    ):
        with pytest.raises(InvalidRequest, match=problem) as caught:
            session.map(rows, "a", images=images)
        assert caught.value.field == "images"
    answers = await session.map(iter(rows), "a", images=[None], **GREEDY)
    assert list(answers.errors) == [1] and "fewer" in str(answers.errors[1])
    answers = await session.map([{"file": [ONE, TWO]}], "<image>", images="file", **GREEDY)
    assert "have 1 places" in str(answers.errors[0])
    answers = await session.map(rows, "<image>", images="file", **GREEDY)
    assert "0 pictures" in str(answers.errors[0]), "a cell without a value is an error where there is a place for it"


@thorough
@anyio_test
async def test_scores_with_pictures(session: Session) -> None:
    prompt, choices = "of <image>, then <image>: ", ["yes", "no", "a <longer> one"]
    scores = await session.score(prompt, choices, images=[ONE, TWO])
    for choice, score in zip(choices, scores, strict=True):
        done = await session.generate(prompt + choice, images=[ONE, TWO], max_tokens=0, prompt_logprobs=1)
        entries = (done.prompt_logprobs or ())[-len(choice) :]
        np.testing.assert_allclose(score.logprobs, [one.logprob for one in entries], atol=1e-5)
        assert score.text == choice and score.token_ids == done.prompt_token_ids[-len(choice) :]
    other = await session.score(prompt, choices, images=[TWO, ONE])
    assert np.abs(np.array(other[0].logprobs) - scores[0].logprobs).max() > 1e-3
    table = await session.score([prompt, "none: "], choices, images=[[ONE, TWO], None])
    np.testing.assert_allclose(table[0][2].logprobs, scores[2].logprobs, atol=1e-5)
    assert "of &lt;image&gt;" in table._repr_html_()
    for wrong, problem in (([ONE], "have 2 places"), ([ONE, "/nowhere.png"], r"images\[1\]")):
        with pytest.raises(InvalidRequest, match=problem):
            session.score(prompt, choices, images=wrong)
    with pytest.raises(InvalidRequest, match="images"):
        await session.score(prompt, ["<|image_pad|><image_soft_token>"], images=[ONE, TWO])


@thorough
@anyio_test
async def test_vectors_with_pictures(session: Session) -> None:
    states = {}
    for name, images in (("one", ONE), ("two", TWO)):
        done = await session.generate("of <image>: a", images=images, max_tokens=0, capture=Capture({"norm": True}))
        states[name] = np.asarray(done.captured["norm"])
    assert np.abs(states["one"].mean(0) - states["two"].mean(0)).max() > 1e-3
    for pooling, expected in (("mean", states["one"].mean(0)), ("last", states["one"][-1]), ("cls", states["one"][0])):
        for keep in (False, True, True):
            vector = await session.embed("of <image>: a", images=ONE, pooling=pooling, normalize=False, keep=keep)
            np.testing.assert_allclose(vector, expected, atol=2e-4, rtol=2e-3)
    several = await session.embed(["of <image>: a", "a"], images=[TWO, None], pooling="mean", normalize=False)
    np.testing.assert_allclose(several[0], states["two"].mean(0), atol=2e-4, rtol=2e-3)
    found = await session.embed(["of <image>: a", "a"], images=["/nowhere.png", None], pooling="mean", errors="return")
    assert "images[0][0]" in str(found[0]) and isinstance(found[1], np.ndarray)


@anyio_test
async def test_models_of_text_refuse_pictures_in_every_call() -> None:
    with opened() as session:
        for call in (
            lambda: session.score("a", ["b"], images=ONE),
            lambda: session.embed("a", images=ONE),
            lambda: session.cache.explain("a", images=ONE),
            lambda: session.pin("a", images=ONE),
            lambda: session.generate(["a"], images=[ONE]),
        ):
            with pytest.raises(InvalidRequest, match="reads text alone") as caught:
                call()
            assert caught.value.field.startswith("images")
        (answer,) = await session.map([{"file": ONE}], "a", images="file")
        assert "reads text alone" in str(answer.error)
