"""Pictures in prompts, as a session's callers give them: every form, in texts, chats and lists; errors name the fix."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rekindle
from helpers import picture_models as small
from helpers.sessions import engine_of, front_of
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Capture, Captured, Session
from rekindle._src.capabilities.pictures.request import PICTURES
from rekindle._src.core.records import FinishReason
from rekindle.errors import InvalidRequest, PromptTooLong

pytestmark = pytest.mark.usefixtures("large_steps")
pillow = pytest.importorskip("PIL.Image")
anyio_test = pytest.mark.anyio
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 48, "max_model_len": 256, "page_size": 16,
    "device_pages": 80, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.written("qwen3-vl", tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture
async def session(folder: Path, tmp_path: Path) -> AsyncIterator[Session]:
    async with rekindle.open(folder, **OPTIONS, cache_dir=str(tmp_path)) as opened:
        yield opened


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    pillow.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def encoded(session: Session) -> int:
    pictures: Any = PICTURES.of(front_of(session))
    count: int = pictures.encoded_pictures
    return count


@anyio_test
async def test_every_form_of_a_picture_is_the_same_picture(session: Session, tmp_path: Path) -> None:
    pixels = small.picture(1, 96, 64)
    path = tmp_path / "picture.png"
    path.write_bytes(png(pixels))
    uri = "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
    first = await session.generate("<image> What do you see in this picture?", images=pixels, **GREEDY)
    assert first.prompt_token_ids.count(small.CASES["qwen3-vl"].id_of("<|image_pad|>")) == 6
    for form in ([pixels], png(pixels), path, str(path), pillow.fromarray(pixels), uri):
        done = await session.generate("<image> What do you see in this picture?", images=form, **GREEDY)
        assert done.token_ids == first.token_ids and done.usage.cached_tokens > 0
    assert encoded(session) == 1
    other = await session.generate("<image> What do you see in this picture?", images=pixels[::-1], **GREEDY)
    assert encoded(session) == 2 and other.usage.cached_tokens == 0


@anyio_test
async def test_a_chat_takes_figures_as_they_are(session: Session) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure(figsize=(2, 1), dpi=48)
    axes = figure.subplots()
    axes.plot([1, 3, 2])
    axes.set_axis_off()  # no letters: fonts take a second
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    drawn = pillow.open(stream).convert("RGB")

    class Grid:
        """A grid as seaborn returns it: no artist, but it has a figure and `savefig`."""

        def __init__(self) -> None:
            self.figure, self.savefig = figure, figure.savefig

    first = await session.chat("What is in <image>?", images=[drawn], **GREEDY)
    assert [(one.width, one.height) for one in first.images] == [(96, 48)]
    for source in (figure, axes, np.array([axes]), Grid()):
        reply = await session.chat("What is in <image>?", images=[source], **GREEDY)
        assert reply.token_ids == first.token_ids and reply.prompt_token_ids == first.prompt_token_ids
        message = {"role": "user", "content": [{"type": "image", "image": source}, {"type": "text", "text": "?"}]}
        shown = (await session.chat([message], **GREEDY)).images
        assert [one.digest for one in shown] == [one.digest for one in first.images]
    assert encoded(session) == 1
    Grid.figure = None
    with pytest.raises(InvalidRequest, match=r"='Grid': is no image\. Pass .*figure"):
        await session.chat("What is in <image>?", images=[object.__new__(Grid)], **GREEDY)


@pytest.mark.thorough
@anyio_test
async def test_pictures_come_first_or_where_they_are_marked(session: Session) -> None:
    one, two = small.picture(1, 64, 64), small.picture(2, 64, 64)
    first = await session.generate("what?", images=[one], **GREEDY)
    assert first.question == "what?" and "what?" in first._repr_html_()
    silent = dataclasses.replace(first, text="", finish_reason=FinishReason.EOS)
    for words in (repr(silent), silent._repr_html_()):
        assert "it said nothing: a model that was trained on chats answers session.chat([…])" in words
    assert "said nothing" not in repr(first)
    assert first.token_ids == (await session.generate("<image>what?", images=[one], **GREEDY)).token_ids
    assert first.prompt_token_ids[0] == small.CASES["qwen3-vl"].id_of("<|vision_start|>")
    both = session.generate(["<image>a<image>b", "no picture", "c"], images=[[one, two], None, two], **GREEDY)
    texts = [done.token_ids for done in await both]
    assert texts[0] == (await session.generate("<image>a<image>b", images=[one, two], **GREEDY)).token_ids
    assert texts[1] == (await session.generate("no picture", **GREEDY)).token_ids
    assert texts[2] == (await session.generate("c", images=two, **GREEDY)).token_ids
    assert texts[0] != (await session.generate("<image>a<image>b", images=[two, one], **GREEDY)).token_ids


@pytest.mark.thorough
@anyio_test
async def test_chats_take_parts_and_a_second_question_computes_only_the_question(session: Session) -> None:
    part = {"type": "image", "image": small.picture(1, 96, 96)}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    first = await session.chat(messages, **GREEDY)
    assert "What is it?" in first._repr_html_(), "the question stands next to its picture"
    messages += [first.message, {"role": "user", "content": "And why?"}]
    second = await session.chat(messages, **GREEDY)
    assert second.question == "And why?"
    whole = len(first.prompt_token_ids) + len(first.token_ids)
    assert second.usage.cached_tokens >= whole // 16 * 16 - 16 and encoded(session) == 1


@pytest.mark.thorough
@anyio_test
async def test_rows_are_kept_on_disk(folder: Path, tmp_path: Path) -> None:
    pixels = small.picture(1, 96, 64)
    options = OPTIONS | {"cache_dir": str(tmp_path)}
    async with rekindle.open(folder, **options) as session:
        first = await session.generate("what?", images=pixels, **GREEDY)
    async with rekindle.open(folder, **options, prefix_cache=False) as session:
        again = await session.generate("what?", images=pixels, **GREEDY)
        assert again.token_ids == first.token_ids and encoded(session) == 0


@contextlib.contextmanager
def compilations_counted() -> Iterator[list[str]]:
    """The compilations of this process, by JAX's own count."""
    events = list[str]()

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@anyio_test
async def test_nothing_is_compiled_over_fifty_pictures_of_different_sizes(folder: Path, tmp_path: Path) -> None:
    """After opening, and after a restart, when opening compiles nothing either."""
    options = OPTIONS | {"cache_dir": str(tmp_path), "precompile": "all", "disk_memory": 0}
    sizes = [(1, 1), (9, 130), *(((37 * seed) % 290 + 1, (53 * seed) % 270 + 1) for seed in range(2, 50))]
    assert len({*sizes}) == 50
    for restarted in (False, True):
        with compilations_counted() as opening:
            session = await rekindle.open(folder, **options)
        async with session:
            start = session.stats()
            assert start.pictures is not None
            assert (start.compilations, start.pictures.encoder_compilations) == (0, 0) or not restarted
            assert bool(opening) != restarted
            with compilations_counted() as serving:
                for seed, (width, height) in enumerate(sizes):
                    pixels = small.picture(seed, width, height)
                    await session.generate("what?", images=pixels, max_tokens=2, temperature=0)
            end = session.stats()
            assert end.pictures is not None and end.pictures.pictures_encoded == 50
            assert end.compilations == start.compilations and not serving
            assert end.pictures.encoder_compilations == start.pictures.encoder_compilations == 8 * (not restarted)


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@anyio_test
async def test_the_encoder_gives_its_memory_back_while_the_session_sleeps(session: Session) -> None:
    def bytes_of_encoder() -> int:
        figures = session.stats().pictures
        assert figures is not None
        return figures.encoder_bytes

    assert bytes_of_encoder() == 0 and session.stats().as_dict()["encoder_bytes"] == 0
    first = await session.generate("what?", images=small.picture(1, 96, 64), **GREEDY)
    weights = bytes_of_encoder()
    model = sum(leaf.nbytes for leaf in engine_of(session).device.model.leaves)
    assert weights > 0 and (await session.sleep(weights="drop")).weights_bytes == model + weights
    assert bytes_of_encoder() == 0
    waiting = session.submit("what?", images=small.picture(2, 96, 64), **GREEDY)
    await session.wake()
    assert (await waiting).token_ids and bytes_of_encoder() == weights
    assert (await session.generate("what?", images=small.picture(1, 96, 64), **GREEDY)).token_ids == first.token_ids


@anyio_test
async def test_what_is_wrong_is_refused_by_name(session: Session) -> None:
    pixels = small.picture(1, 64, 64)
    wrong: list[tuple[str, Any, str]] = [
        ("<image><image>", [pixels], "1 picture.*: need as many places, and the prompt has 2"),
        ("a", b"", "is empty. Pass a file that has a picture"),
        ("a", "/nowhere/picture.png", "is no file"),
        ("a", b"no picture", "images"),
        ("a", [object()], "is no image"),
        ("a", small.picture(1, 5000, 2), "200 times"),
        ("a", "https://example.org/a.png", "nothing is fetched"),
    ]
    for prompt, images, problem in wrong:
        with pytest.raises(InvalidRequest, match=problem):
            await session.generate(prompt, images=images, **GREEDY)
    whole = small.picture(1, 256, 256)  # 64 tokens
    with pytest.raises(PromptTooLong, match="max_model_len, which is 256"):
        await session.generate("a", images=[whole] * 4, **GREEDY)
    assert encoded(session) == 0
    with pytest.raises(InvalidRequest, match="2 prompts"):
        session.generate(["a", "b"], images=[pixels], **GREEDY)
    with pytest.raises(InvalidRequest, match="has no pictures, and the prompt has 1 place for them"):
        await session.generate("<|image_pad|>", **GREEDY)
    for keyword in ("image", "imgs", "pictures"):
        with pytest.raises(InvalidRequest, match="Pass pictures as images="):
            await session.generate("a", **{keyword: pixels}, **GREEDY)
    with pytest.raises(InvalidRequest, match="places"):
        await session.generate("<|image_pad|>", images=[pixels], **GREEDY)
    with pytest.raises(InvalidRequest, match="token ids"):
        session.generate([1, 2, 3], images=[pixels], **GREEDY)
    assert (await session.generate("a", **GREEDY)).token_ids


@anyio_test
async def test_a_model_of_text_refuses_pictures() -> None:
    async with rekindle.open("tiny", max_model_len=64, quiet=True, precompile="lazy") as session:
        with pytest.raises(InvalidRequest, match="reads text alone"):
            session.generate("a", images=[small.picture(1, 8, 8)])
        with pytest.raises(InvalidRequest, match="reads text alone"):
            session.chat([{"role": "user", "content": [{"type": "image", "image": small.picture(1, 8, 8)}]}])


@pytest.mark.thorough
@anyio_test
async def test_forks_go_on_after_the_same_pictures(session: Session) -> None:
    done = await session.generate("What is <image> this?", images=[small.picture(1, 96, 64)], **GREEDY)
    handle = session.submit("What is <image> this?", images=[small.picture(1, 96, 64)], **GREEDY)
    await handle
    for source in (done, handle):
        assert (await session.fork(source, at=2)).token_ids == done.token_ids[2:]
    assert [picture.decode(b"").width for picture in done.images] == [96]


@pytest.mark.thorough
@anyio_test
async def test_captures_the_lens_and_attention_name_the_patches_of_pictures(session: Session, tmp_path: Path) -> None:
    pixels = small.picture(1, 96, 64)
    done = await session.generate(
        "What <image> is it?", images=pixels, capture=Capture({"residual": 0}, "prompt"), **GREEDY
    )
    assert done.captured is not None
    assert done.captured.select(positions=list(done.patches))["residual", 0].shape == (6, 64)
    assert done.captured.patches == done.patches
    into = Capture({"residual": 0}, "prompt", into=tmp_path / "captures")
    written = await session.generate("What <image> is it?", images=pixels, capture=into, **GREEDY)
    assert written.captured is not None and written.captured.folder is not None
    for captured in (written.captured, Captured.load(written.captured.folder)):
        assert captured.patches == done.patches
    rest = await session.fork(written, at=2, capture=Capture({"residual": 0}), max_tokens=4)
    assert rest.captured is not None and rest.captured.patches == done.patches
    lens = await session.view.lens("What <image> is it?", images=pixels)
    assert [text for text in lens.tokens if "▦" in text] == ["▦0,0", "▦0,1", "▦0,2", "▦1,0", "▦1,1", "▦1,2"]
    assert "▦1,2" in lens._repr_html_()
    shown = await session.view.attention("What <image> is it?", images=pixels, layer=1)
    assert shown.tokens == done.prompt_texts and "▦1,2" in shown._repr_html_()
    assert np.triu(shown.weights, 1).max() == 0


@pytest.mark.thorough
@anyio_test
async def test_the_attention_of_a_picture_whose_tokens_see_each_other_is_shown(tmp_path: Path) -> None:
    folder = small.written("gemma3", tmp_path / "gemma3")
    async with rekindle.open(folder, **OPTIONS, cache_dir=str(tmp_path / "cache")) as session:
        pixels, prompt = small.picture(1, 56, 56), "a <image> b"
        done = await session.generate(prompt, images=pixels, **GREEDY)
        shown = await session.view.attention(prompt, images=pixels, layer=0)
    ((start, stop),) = done.image_runs
    inside = np.zeros(shown.weights.shape[1:], bool)
    inside[start:stop, start:stop] = True
    later = np.triu(np.ones_like(inside), 1)
    assert (shown.weights[:, inside & later] > 0).all() and (shown.weights[:, ~inside & later] == 0).all()
    assert np.allclose(shown.weights.sum(axis=-1), 1, atol=1e-6)
