"""Pictures in the other calls of a session: rows of tables, scores, vectors, and conversations that are kept."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import picture_models as small
from helpers.sessions import opened
from helpers.thorough import by_default, one_event_loop  # noqa: F401  the fixture
from rekindle import Capture, Session
from rekindle.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("large_steps")
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


@pytest.fixture(scope="module", params=by_default(["gemma3", "qwen3-vl"]))
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


@anyio_test
async def test_a_chat_takes_pictures_as_generate_does(session: Session) -> None:
    part, words = {"type": "image", "image": ONE}, {"type": "text", "text": "a word"}
    expected = (await session.chat([{"role": "user", "content": [part, words]}], **GREEDY)).content
    for messages in ("a word", "<image>a word", [{"role": "user", "content": "a word"}]):
        for images in (ONE, [ONE]):
            assert (await session.chat(messages, images=images, **GREEDY)).content == expected
    before = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    several = [*before, {"role": "user", "content": [words, part, {"type": "text", "text": " and"}, part]}]
    asked = [*before, {"role": "user", "content": "a word<image> and<image>"}]
    reply = await session.chat(asked, images=[ONE, ONE], **GREEDY)
    assert reply.content == (await session.chat(several, **GREEDY)).content and len(reply.images) == 2
    assert asked[-1]["content"] == "a word<image> and<image>", "the caller's messages stay as they are"
    for wrong in (before, [*before, several[-1]], [{"role": "system", "content": "x"}]):
        with pytest.raises(InvalidRequest, match=r"images=.*last message.*\{'type': 'image', 'image': picture\}"):
            session.chat(wrong, images=ONE)
    with pytest.raises(InvalidRequest, match="need as many places, and the prompt has 2"):
        session.chat("<image> or <image>", images=[ONE])


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
        (ONE, "do not match the rows"),
        (b"bytes", "do not match the rows"),
    ):
        with pytest.raises(InvalidRequest, match=problem) as caught:
            session.map(rows, "a", images=images)
        assert caught.value.field == "images"
    answers = await session.map(iter(rows), "a", images=[None], **GREEDY)
    assert list(answers.errors) == [1] and "fewer" in str(answers.errors[1])
    answers = await session.map([{"file": [ONE, TWO]}], "<image>", images="file", **GREEDY)
    assert "the prompt has 1" in str(answers.errors[0])
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
    for wrong, problem in (([ONE], "need as many places, and the prompt has 2"), ([ONE, "/no.png"], r"images\[1\]")):
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


@thorough
@anyio_test
async def test_a_conversation_with_pictures_is_kept(session: Session, files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    chat = session.conversation(system="Be brief.", **GREEDY)
    await chat.say("What is <image>?", images=files[0])
    await chat.say("And these?", images=[TWO, pillow.fromarray(ONE)])
    assert [part["type"] for part in chat.messages[1]["content"]] == ["text", "image", "text"]
    assert [part["type"] for part in chat.messages[3]["content"]] == ["image", "image", "text"]
    assert "What is <image>?" in repr(chat._repr_html_()).replace("&lt;", "<").replace("&gt;", ">")
    for path_ in (path, tmp_path / "again.json"):
        chat.save(path_)
    record = json.loads(path.read_text())
    assert record["version"] == 2 and (tmp_path / "again.json").read_bytes() == path.read_bytes()
    uri = record["messages"][1]["content"][1]["image"]
    assert uri == "data:image/png;base64," + base64.b64encode(png(ONE)).decode(), "the file that was passed"
    restored = session.conversation(restore=path, **GREEDY)
    restored.save(tmp_path / "third.json")
    assert (tmp_path / "third.json").read_bytes() == path.read_bytes()
    forked = chat.fork()
    done = [await one.say("Which one is red?") for one in (chat, restored, forked)]
    assert done[0].token_ids == done[1].token_ids == done[2].token_ids
    assert done[1].usage.cached_tokens > len(done[1].prompt_token_ids) // 2, "its pictures have the same pages"
    plain = session.conversation(**GREEDY)
    await plain.say("a")
    plain.save(path)
    assert json.loads(path.read_text())["version"] == 1


def text_alone(messages: Any) -> bytes:
    return json.dumps({"format": "rekindle conversation", "version": 2, "messages": messages}).encode()


HOSTILE: dict[str, tuple[Any, str]] = {
    "path": ({"type": "image", "image": "/etc/hostname"}, "no picture in base64"),
    "url": ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "no picture in base64"),
    "no text": ({"type": "image", "image": {"a": 1}}, "no picture in base64"),
    "nothing": ({"type": "image"}, "no picture in base64"),
    "no base64": ({"type": "image", "image": "data:image/png;base64,####"}, "not valid base64"),
    "no image": ({"type": "image", "image": "data:image/png;base64,QUJD"}, "restore"),
    "bomb": ({"type": "image", "image": "BOMB"}, "pixels"),
    "many": ([{"type": "image", "image": "ONE"}] * 65, "one too many"),
    "unhashable": ({"type": ["image"], "image": "a"}, ""),
}  # fmt: skip


@thorough
@anyio_test
async def test_a_strangers_conversation_is_bounded(session: Session, tmp_path: Path) -> None:
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 60_000, 60_000) + b"\x08\x02\0\0\0"
    bomb = head + struct.pack(">I", zlib.crc32(head[12:])) + b"\0" * 64
    uris = {
        name: f"data:image/png;base64,{base64.b64encode(data).decode()}"
        for name, data in {"BOMB": bomb, "ONE": png(ONE)}.items()
    }
    path = tmp_path / "chat.json"
    for name, (part, problem) in HOSTILE.items():
        parts = part if isinstance(part, list) else [part]
        parts = [
            {**one, **({"image": uris[one["image"]]} if one.get("image") in ("BOMB", "ONE") else {})} for one in parts
        ]
        path.write_bytes(text_alone([{"role": "user", "content": parts}]))
        if not problem:
            session.conversation(restore=path)
            continue
        with pytest.raises(InvalidRequest, match=problem) as caught:
            session.conversation(restore=path)
        assert caught.value.field == "restore", name


def test_what_is_read_of_a_conversation_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle._src.calls import conversation

    path = tmp_path / "chat.json"
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(InvalidRequest, match="is no JSON"):
        conversation.read(path)
    path.write_bytes(b'{"messages":[' + b"[]," * (1 << 18) + b"[]]}")
    with pytest.raises(InvalidRequest, match="has more than 524,288 values"):
        conversation.read(path)
    with monkeypatch.context() as short:
        short.setattr(conversation, "MOST_TEXT", 1000)
        with pytest.raises(InvalidRequest, match="bytes of text; at most 1,000"):
            conversation.read(path)
    monkeypatch.setattr(conversation, "MOST_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="at most 1,000"):
        conversation.read(path)
