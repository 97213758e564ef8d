"""Models with states: every text is the plain loop's, whatever is batched, cut, preempted, forked and cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from rekindle import Session
from rekindle.errors import ConfigError

# States beside pages in each layer come with every run; the others differ in the layers' arithmetic.
OTHERS = ("qwen3.5-tied-biases", "nemotron-h-experts-in-groups", "granite4", "lfm3", "qwen3.5-moe")
NAMES = (
    "qwen3.5", "lfm2", "falcon-h1", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)
)  # fmt: skip
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 256, "page_size": 16,
    "precompile": "lazy", "seed": 0, "quiet": True, "disk_memory": 0,
}  # fmt: skip
PROMPTS = [np.random.default_rng(count).integers(3, 160, count).tolist() for count in (5, 24, 70, 130, 200, 33)]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return checkpoints.case(request.param)


@pytest.fixture(scope="module")
def session(model: Any) -> Iterator[Session]:
    """One for all tests of a model, most of whose time is compiling; four of the longer texts are too much for it."""
    with rekindle.open_sync(model, **OPTIONS, device_pages=22) as session:
        yield session


def plain(model: Any, prompt: list[int], count: int = 24) -> list[int]:
    return plain_loop(model, prompt, count, context=256)


def test_a_batch_cut_into_steps_has_the_texts_of_the_plain_loop(session: Session, model: Any) -> None:
    many = session.generate_sync(PROMPTS, **GREEDY)
    assert [list(done.token_ids) for done in many] == [plain(model, prompt) for prompt in PROMPTS]
    again = session.generate_sync(PROMPTS[3], **GREEDY)  # its slot has had other requests
    assert list(again.token_ids) == plain(model, PROMPTS[3])
    done, source = session.generate_sync(PROMPTS[1], n=2, **GREEDY), plain(model, PROMPTS[1])
    assert [list(one.token_ids) for one in done] == [source, source]

    async def forks() -> None:
        forked = await session.fork(many[1], at=7)
        assert list(forked.token_ids) == source[7:]
        edited = await session.fork(many[1], at=7, edit=[9, 11])
        assert list(edited.token_ids) == plain(model, [*PROMPTS[1], *source[:7], 9, 11], 15)

    anyio.run(forks)


def test_preempted_requests_begin_again(session: Session, model: Any) -> None:
    before = session.stats().preemptions
    many = session.generate_sync(PROMPTS[:4], **{**GREEDY, "max_tokens": 80})
    assert [list(done.token_ids) for done in many] == [plain(model, prompt, 80) for prompt in PROMPTS[:4]]
    assert session.stats().preemptions > before, "there was room for all of them"


def test_a_cancelled_request_leaves_nothing_in_its_slot(session: Session, model: Any) -> None:
    async def leave_early() -> None:
        handle = session.submit(PROMPTS[2], **{**GREEDY, "max_tokens": 150})
        async for _ in handle:
            break
        handle.cancel()

    anyio.run(leave_early)
    many = session.generate_sync([PROMPTS[0]] * 4, **GREEDY)  # as many as there are slots
    assert [list(done.token_ids) for done in many] == [plain(model, PROMPTS[0])] * 4


@pytest.mark.anyio
async def test_what_is_not_there_yet_is_refused_by_name(model: Any) -> None:
    with pytest.raises(ConfigError, match="prompt_lookup=3: can't be had, since the states"):
        await rekindle.open(model, **OPTIONS, prompt_lookup=3)
