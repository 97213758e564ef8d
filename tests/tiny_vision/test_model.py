"""The shipped folder is valid and small, opens by its name, and reads pictures that the training has not seen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import rekindle
from rekindle import Session
from rekindle.tiny import folder
from workshop.tiny_vision import encoder, evaluate
from workshop.tiny_vision.pictures import KINDS, Scene, draw, scene
from workshop.tiny_vision.questions import answer, question, topics

FOLDER = folder("tiny-vision")
anyio_test = pytest.mark.anyio
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_the_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sizes.keys() == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
        "processor_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(sizes.values()) < 10_500_000
    with safe_open(FOLDER / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    own = [shape for name, shape in shapes.items() if "text_model" not in name and name != "lm_head.weight"]
    assert 2 * sum(int(np.prod(shape)) for shape in own) < 3_000_000, "bytes of the encoder"
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "smolvlm" and config["vision_config"] == encoder.VISION


@pytest.mark.parametrize("name", ["tiny", "tiny-vision"])
def test_embedded_models_go_by_their_names(name: Any) -> None:
    assert rekindle.tiny.located(name) == folder(name)
    assert rekindle.tiny.located("other/model") == "other/model"
    assert rekindle.tiny.located(Path("tiny")) == Path("tiny"), "a path is one"


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    options: Any = {"max_requests": 4, "max_model_len": 256, "max_tokens_per_step": 64, "quiet": True}
    async with rekindle.open("tiny-vision", **options) as session:
        yield session


async def ask(session: Session, picture: Any, text: str) -> str:
    content = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
    reply = await session.chat([{"role": "user", "content": content}], temperature=0.0, max_tokens=32)
    return reply.text


FIXED = (
    Scene("shape", ("red",), shape="circle"),
    Scene("digit", ("black",), digit=7),
    Scene("bars", ("green", "red", "blue"), heights=(0.4, 0.95, 0.2)),
    Scene("lines", ("orange", "blue"), rises=(True, False)),
)


@pytest.mark.thorough
@anyio_test
async def test_the_vision_model_answers_about_figures_drawings_and_sums(session: Session) -> None:
    rng, wrong = Random(1), list[str]()
    entries = [(seen, evaluate.figure(seen, rng)) for seen in FIXED]
    for kind in KINDS:
        seen = scene(rng, kind)
        entries.append((seen, draw(seen, rng)))
    count = 0
    for seen, picture in entries:
        for topic in topics(seen):
            text, expected = question(seen, topic, rng), answer(seen, topic)
            said = await ask(session, picture, text)
            count += 1
            wrong += [] if said == expected else [f"{text}: {said!r}, not {expected!r}"]
    assert len(wrong) <= count // 8, wrong
    fixed = [await ask(session, picture, "What is in the picture?") for _, picture in entries[: len(FIXED)]]
    assert fixed == [answer(seen, "picture") for seen in FIXED]
    documented = [await session.chat("What is in <image>?", images=[picture]) for _, picture in entries[: len(FIXED)]]
    assert [reply.text for reply in documented] == fixed, "as the page about pictures asks it"
    assert (await session.chat("What is 7 + 8?", temperature=0.0, max_tokens=16)).text == "7 + 8 = 15"


@pytest.mark.thorough
@anyio_test
async def test_a_plain_prompt_is_answered_or_its_silence_explained(session: Session) -> None:
    """A chat ends its turn after a question; where a completion has no text, it says how to ask."""
    for prompt in ("What is in <image>?", "<image>"):
        for seen in FIXED:
            done = await session.generate(prompt, images=[draw(seen, Random(1))], temperature=0.0, max_tokens=32)
            assert done.text.strip() or "answers session.chat([…])" in repr(done)
