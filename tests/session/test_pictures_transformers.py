"""Models that read pictures, against transformers: the same tokens in float32, however requests are run."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import picture_models as small
from helpers.sessions import front_of
from rekindle import Session
from rekindle._src.capabilities.pictures.request import PICTURES

pytest.importorskip("torch")
pytest.importorskip("transformers")
pillow = pytest.importorskip("PIL.Image")

COUNT = 32
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 96, "max_model_len": 512, "page_size": 16,
    "device_pages": 120, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
SIZES = ((128, 96), (1, 1), (3, 90), (333, 41))  # width, height


def greedy(name: str) -> dict[str, Any]:
    case = small.CASES[name]
    never = {case.id_of(case.token): -math.inf}  # it would be the place of a picture that is none
    return {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logit_bias": never}


@pytest.fixture(scope="module", params=[*small.CASES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, small.made(request.param, folder)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    pillow.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_the_same_tokens(case: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, theirs = case
    async with rekindle.open(folder, **OPTIONS, cache_dir=str(tmp_path)) as session:
        for seed, (width, height) in enumerate(SIZES):
            pixels = small.picture(seed, width, height)
            done = await session.generate("What is <image>?", images=[pixels], **greedy(name))
            expected = small.greedy(name, theirs, list(done.prompt_token_ids), [pixels], COUNT)
            assert list(done.token_ids) == expected, (width, height)
        await together(name, session, theirs)
    async with rekindle.open(folder, **OPTIONS, cache_dir=str(tmp_path), restore="auto") as session:
        done = await session.generate("What is <image>?", images=[png(pixels)], **greedy(name))
        assert list(done.token_ids) == expected, "after a restart"
        pictures: Any = PICTURES.of(front_of(session))
        assert pictures.encoded_pictures == 0 and pictures.compilations == 0, "its rows were on disk"


async def together(name: str, session: Session, theirs: Any) -> None:
    """Several pictures, in chats, along with texts, in chunks, from the cache."""
    one, two, three = (small.picture(40 + seed, 160, 128) for seed in range(3))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "image": pillow.fromarray(one)}, {"type": "text", "text": "a"}]}
    ]
    first = session.chat(messages, **greedy(name))
    both = session.generate("<image> and <image>: which?", images=[two, three], **greedy(name))
    text = session.generate("No picture at all", **greedy(name))
    for handle in (first, both, text):
        handle.submit()
    for handle, pictures in ((first, [one]), (both, [two, three]), (text, [])):
        done = await handle
        assert list(done.token_ids) == small.greedy(name, theirs, list(done.prompt_token_ids), pictures, COUNT)
    messages += [first.completion().message, {"role": "user", "content": [{"type": "image", "image": png(two)}]}]
    done = await session.chat(messages, **greedy(name))
    assert list(done.token_ids) == small.greedy(name, theirs, list(done.prompt_token_ids), [one, two], COUNT)
    again = await session.generate("<image> and <image>: why?", images=[two, three], **greedy(name))
    assert list(again.token_ids) == small.greedy(name, theirs, list(again.prompt_token_ids), [two, three], COUNT)
    other = await session.generate("<image> and <image>: why?", images=[three, two], **greedy(name))
    assert list(other.token_ids) == small.greedy(name, theirs, list(other.prompt_token_ids), [three, two], COUNT)
