"""Pictures with everything that requests may have: the same tokens as alone, and never another picture's.

All pictures have the same token ids, so that nothing may tell contexts apart by token ids alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import rekindle
from helpers import adapters
from helpers import picture_models as small
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Capture, Session, Steer
from rekindle._src.models.loading.stored import text_config
from rekindle._src.models.registry import config_from_hf
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle.errors import CheckpointError, InvalidRequest

pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.anyio, pytest.mark.thorough]
PAGE = 16
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 48, "max_model_len": 256, "page_size": PAGE,
    "device_pages": 80, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
ONE, TWO = small.picture(1, 96, 64), small.picture(2, 96, 64)
ORDERS = {"one, two": (ONE, TWO), "two, one": (TWO, ONE), "one, one": (ONE, ONE)}
QUESTION = "Here are two pictures for you. <image> What do you see in this picture? <image>"
MODELS = ("qwen3-vl", "qwen3.5", "gemma3")  # coordinates and deepstack, states, windows and both ways


class Answer:
    """Tokens, and their log-probabilities: equal ones differ by rounding alone, and other pictures change them."""

    def __init__(self, token_ids: tuple[int, ...], logprobs: list[float]) -> None:
        self.token_ids, self.logprobs = token_ids, np.array(logprobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer) or self.token_ids != other.token_ids:
            return False
        return bool(np.abs(self.logprobs - other.logprobs).max() < 1e-4)

    def __getitem__(self, part: slice) -> Answer:
        return Answer(self.token_ids[part], self.logprobs[part].tolist())

    def __repr__(self) -> str:
        return f"{self.token_ids} {self.logprobs.round(5).tolist()}"


def answer(done: Any) -> Answer:
    return Answer(done.token_ids, [one.logprob for one in done.logprobs])


def distinct(found: list[Any]) -> bool:
    return not any(one == other for index, one in enumerate(found) for other in found[:index])


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.written(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def plain(folder: Path) -> AsyncIterator[Session]:
    """A session in which no request sees what another one has computed."""
    async with rekindle.open(folder, **OPTIONS, prefix_cache=False) as opened:
        yield opened


async def answers(session: Session, **options: Any) -> dict[str, Answer]:
    """The answer to each order of the pictures, one at a time."""
    return {
        name: answer(await session.generate(QUESTION, images=[*images], **GREEDY | options))
        for name, images in ORDERS.items()
    }


async def together(session: Session, **options: Any) -> dict[str, Answer]:
    """The same in one batch, twice: the second time from the cache."""
    for _ in range(2):
        handles = {
            name: session.submit(QUESTION, images=[*images], **GREEDY | options) for name, images in ORDERS.items()
        }
        found = {name: answer(await handle) for name, handle in handles.items()}
    return found


async def test_several_sequences_and_forks(folder: Path, plain: Session) -> None:
    expected = await answers(plain)
    assert distinct([*expected.values()]), "the pictures change nothing"
    drawn = await plain.generate(QUESTION, images=[ONE, TWO], **GREEDY | {"temperature": 1.0, "seed": 3})
    async with rekindle.open(folder, **OPTIONS) as session:
        assert await together(session) == expected
        for name, images in ORDERS.items():
            several = await session.generate(QUESTION, images=[*images], n=3, **GREEDY)
            assert all(answer(done) == expected[name] for done in several)
            handle = session.submit(QUESTION, images=[*images], **GREEDY)
            await handle
            for source in (several[1], handle):
                rest = await session.fork(source, at=4, max_tokens=8)
                assert answer(rest) == expected[name][4:]
        sampled = await session.generate(QUESTION, images=[ONE, TWO], n=3, **GREEDY | {"temperature": 1.0, "seed": 3})
        assert answer(sampled[0]) == answer(drawn) and len({done.token_ids for done in sampled}) == 3
        again = await session.generate(QUESTION, images=sampled[0].images, **GREEDY)
        assert answer(again) == expected["one, two"], "the pictures of a completion are pictures"
        session.check_integrity()


@pytest.mark.parametrize("options", [{"prompt_lookup": 3}, {"drafts": "suffix"}], ids=["lookup", "suffix"])
async def test_drafts(folder: Path, plain: Session, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    repeating: dict[str, Any] = {"logit_bias": dict.fromkeys((65, 66), 80.0), "repetition_penalty": 1.1}
    expected, repeated = await answers(plain), await answers(plain, **repeating)
    async with rekindle.open(folder, **OPTIONS, **options) as session:
        for _ in range(2):
            assert await answers(session) == expected
            assert await answers(session, **repeating) == repeated
        assert await together(session) == expected
        session.check_integrity()
        assert session.stats().drafted_tokens > 0


async def test_restored_texts_have_no_pictures_to_propose(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    options: dict[str, Any] = {**OPTIONS, "cache_dir": str(tmp_path)}
    before = "a text of thirty-two letters now"
    assert len(before) == 2 * PAGE
    prompt = f"{before}<image>{before}"
    async with rekindle.open(folder, **options) as session:
        expected = answer(await session.generate(prompt, images=[ONE], **GREEDY))
        other = answer(await session.generate(prompt, images=[TWO], **GREEDY))
        text = answer(await session.generate(before, **GREEDY))
        await session.save("kept")
    async with rekindle.open(folder, **options, restore="kept", drafts="suffix") as session:
        assert "<image>" in str(session.cache.tree(restored=True))
        assert answer(await session.generate(before, **GREEDY)) == text
        done = await session.generate(prompt, images=[ONE], **GREEDY)
        assert answer(done) == expected and done.usage.cached_tokens >= 3 * PAGE
        assert answer(await session.generate(prompt, images=[TWO], **GREEDY)) == other
        session.check_integrity()


async def test_adapters(folder: Path, tmp_path: Path, plain: Session) -> None:
    """Of the text model; the encoder stays as it is."""
    config = config_from_hf(text_config(json.loads((folder / "config.json").read_text())))
    own = adapters.write(tmp_path / "adapter", config, seed=3)
    base = await answers(plain)
    async with rekindle.open(folder, **OPTIONS, prefix_cache=False, merge=own) as session:
        expected = await answers(session)
    assert expected != base
    async with rekindle.open(folder, **OPTIONS, adapters={"own": own}) as session:
        for _ in range(2):
            assert await answers(session, adapter="own") == expected
            assert await answers(session) == base
        assert await together(session, adapter="own") == expected
        tensors = load_file(own / "adapter_model.safetensors")
        down = {name: tensor for name, tensor in tensors.items() if "q_proj" in name}
        tower = {name.replace("model.layers", "model.visual.blocks"): tensor for name, tensor in down.items()}
        with pytest.raises(CheckpointError, match="visual"):  # it would change less than was trained
            await session.load_adapter("tower", tensors | tower)
        language = {name.replace("model.layers", "model.language_model.layers"): one for name, one in tensors.items()}
        await session.load_adapter("language", language, alpha=8)
        assert await answers(session, adapter="language") == expected
        session.check_integrity()


async def test_captures_and_steering(folder: Path, plain: Session) -> None:
    capture = Capture({"residual": [1, 2], "norm": True})
    vector = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    steers = {
        "everywhere": [Steer(1, vector, 2.0)],
        "in the pictures": [Steer(1, vector, 2.0, positions=slice(34, 40))],
    }
    expected = {
        name: await plain.generate(QUESTION, images=[*i], capture=capture, **GREEDY) for name, i in ORDERS.items()
    }
    steered = {name: await answers(plain, steer=steer) for name, steer in steers.items()}
    base = {name: answer(done) for name, done in expected.items()}
    assert distinct([base, *steered.values()]), "steering changes nothing"
    async with rekindle.open(folder, **OPTIONS) as session:
        for keep in (False, True, True):
            for name, images in ORDERS.items():
                own = dataclasses.replace(capture, keep=keep)
                done = await session.generate(QUESTION, images=[*images], capture=own, **GREEDY)
                assert answer(done) == base[name]
                for key, array in expected[name].captured.items():
                    np.testing.assert_allclose(done.captured[key], array, atol=2e-4, rtol=2e-4)
        for _ in range(2):
            for name, steer in steers.items():
                assert await answers(session, steer=steer) == steered[name]
            assert await answers(session) == base
        session.check_integrity()


async def test_the_cache_is_asked_with_the_pictures(folder: Path) -> None:
    async with rekindle.open(folder, **OPTIONS) as session:
        done = await session.generate(QUESTION, images=[ONE, TWO], **GREEDY)
        count = len(done.prompt_token_ids)
        whole = (await session.generate(QUESTION, images=[ONE, TWO], **GREEDY)).usage.cached_tokens
        assert whole >= count - 2 * PAGE
        cache, ids = session.cache, list(done.prompt_token_ids)
        for prompt, images in ((QUESTION, [ONE, TWO]), (ids, [ONE, TWO]), (ids, done.images)):
            known = cache.explain(prompt, images=images)
            assert (known.prompt_tokens, known.cached_tokens) == (count, whole)
        assert cache.explain(QUESTION, images=[TWO, TWO]).cached_tokens < whole
        pinned, both = session.pin(QUESTION, images=[TWO, TWO]), session.pin(QUESTION, images=[ONE, TWO])
        assert pinned < both == session.unpin(ids, images=done.images) + pinned
        for call in (cache.explain, session.pin, session.unpin):
            with pytest.raises(InvalidRequest, match="images"):
                call(ids)
        assert "<image>" in str(cache.tree())
