"""What a session refuses, and how it names what was wrong."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers.sessions import engine_of
from rekindle import Session
from rekindle._src.opening import resolve
from rekindle.errors import CheckpointError, ConfigError, InvalidRequest, SessionClosed

anyio_test = pytest.mark.anyio


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (5, {}, "prompt"),
        (b"bytes", {}, "prompt"),
        ({"a": 1}, {}, "prompt"),
        ([[1], 5.0], {}, "prompt"),
        ([-1], {}, "prompt"),
        (None, {}, "prompt"),
        ({1, 2}, {}, "prompt"),
        (np.array(5), {}, "prompt"),
        (np.array([0.5]), {}, "prompt"),
        ([10**5000], {}, "prompt"),
        ("x", {"temprature": 1}, "temprature"),
        ("x", {"max_tokens": -1}, "max_tokens"),
        ("x", {"n": 10_000}, "n"),
    ],
)
def test_wrong_arguments_name_themselves(session: Session, prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        session.generate_sync(prompt, **options)
    assert caught.value.field == field


@anyio_test
async def test_a_processor_that_nobody_registered_is_refused_before_it_runs(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="known: none") as caught:
        await session.generate("hello", processors="no-e")
    assert caught.value.field == "processors"
    assert engine_of(session).runner.plans == []


@anyio_test
async def test_chat_needs_a_template(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        session.chat([{"role": "user", "content": "hi"}])


@anyio_test
async def test_closed_sessions_refuse(session: Session) -> None:
    from helpers.sessions import fake_session

    other = fake_session()
    await other.aclose()
    for use in (other.stats, lambda: other.generate("x"), lambda: other.submit("x"), other.paused().__enter__):
        with pytest.raises(SessionClosed, match="Open another one"):
            use()
    for view in (other.watch, other.view.chat, other.view.tree):
        with pytest.raises(SessionClosed, match="Open another one"):
            view()
    assert other.closed and "closed" in repr(other)


def test_a_session_that_was_not_awaited_says_so() -> None:
    opening = rekindle.open("tiny")
    with pytest.raises(AttributeError, match=r"session = await rekindle\.open"):
        opening.generate("x")
    assert not hasattr(opening, "generate") and not hasattr(opening, "nonsense")


def test_a_model_that_is_not_there_is_told_what_could_be_meant() -> None:
    with pytest.raises(CheckpointError, match="'tiny' for the embedded model"):
        rekindle.open_sync("tny")


@pytest.mark.parametrize("model", [None, 5, b"tiny"])
def test_a_value_that_is_not_a_model_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"model={model!r}: is not a model. Pass a folder")):
        rekindle.open_sync(model)


def test_an_empty_name_of_a_model_is_named() -> None:
    for model in ("", " "):
        with pytest.raises(ConfigError, match="is an empty name"):
            rekindle.open_sync(model)


def test_kernels_are_checked_before_the_session_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kernels='cuda'.*'xla'"):
        rekindle.open_sync("tiny", kernels="cuda")
    monkeypatch.setattr(resolve, "unavailable_reason", lambda platform: "REKINDLE_NATIVE=0 turns them off: unset it")
    with pytest.raises(
        ConfigError, match="kernels='native': can't serve here: REKINDLE_NATIVE=0 turns them off: unset it"
    ):
        rekindle.open_sync("tiny", kernels="native")


def test_a_bare_function_is_no_processor() -> None:
    with pytest.raises(ConfigError, match="LogitsProcessor\\(function"):
        rekindle.open_sync("tiny", processors=[lambda logits, context: logits])


@anyio_test
async def test_the_cache_checks_what_it_is_asked(session: Session) -> None:
    for wrong in ("2MB", -1, True, 1.5):
        with pytest.raises(InvalidRequest, match="not a number of bytes"):
            session.cache.prune(to=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="prompt=5"):
        session.cache.explain(5)  # type: ignore[arg-type]
