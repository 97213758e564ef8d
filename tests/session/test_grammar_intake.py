"""Grammars on their way in: they compile while other requests run, within bounds, and never overtake a control."""

from __future__ import annotations

import threading
import time
import types
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest

from helpers.chatting import with_special_tokens
from helpers.sessions import expected, fake_session
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import FinishReason, Session
from rekindle._src.capabilities.guides import request as structures
from rekindle._src.core.extension import NONE
from rekindle._src.dispatch.backend import NO_SERVICES, Services
from rekindle._src.structured import compilers
from rekindle._src.structured.compilers import Compilers
from rekindle.errors import Busy, InvalidRequest, RekindleError, RequestAborted

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
anyio_test = pytest.mark.anyio
SLOW = {"type": "string", "allOf": [{"pattern": f"a{index}.*b"} for index in range(60)]}


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every grammar takes half a second more."""
    text_of = Compilers.text_after_trial

    def tried(self: Compilers[Any], *arguments: Any) -> str:
        time.sleep(0.5)
        return text_of(self, *arguments)

    monkeypatch.setattr(Compilers, "text_after_trial", tried)


@anyio_test
async def test_texts_follow_their_grammars_beside_others(session: Session) -> None:
    free = session.submit("hello", max_tokens=30)
    done = await session.generate("x", regex="[0-9]{4}-[a-z]{2}", max_tokens=30)
    assert done.text[4] == "-" and done.text[:4].isdigit() and done.finish_reason is FinishReason.GRAMMAR
    assert list((await free).token_ids) == expected("hello", max_tokens=30)
    many = await session.generate(["a", "b", "c"], choice=["yes", "no"], n=2, temperature=1.0)
    assert {one.parsed for each in many for one in each} <= {"yes", "no"}


@anyio_test
async def test_others_do_not_wait_while_a_grammar_compiles(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    text_of, compiled = Compilers.text_after_trial, threading.Event()

    def tried(self: Compilers[Any], *arguments: Any) -> str:
        assert compiled.wait(60), "the other request waits"
        return text_of(self, *arguments)

    monkeypatch.setattr(Compilers, "text_after_trial", tried)
    guided = session.submit("x", regex="[0-9]{4}")
    await session.generate("hello", max_tokens=5)
    assert not compiled.is_set()
    compiled.set()
    assert (await guided).text.isdigit()


@anyio_test
async def test_a_grammar_that_takes_too_long_is_refused_and_its_process_ended(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "COMPILE_SECONDS", 0.1)
    with pytest.raises(InvalidRequest, match=r"took over 0\.1 s to compile, and was ended") as caught:
        await session.generate("x", schema=SLOW)
    assert caught.value.field == "schema"
    assert (await session.generate("hello", max_tokens=3)).token_ids
    assert (await session.generate("x", regex="[0-9]{4}")).text.isdigit()


@anyio_test
async def test_a_request_whose_grammar_gets_no_place_is_told_to_come_again(
    session: Session, slowly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "PATIENCE", 0.1)
    handles = [session.submit("x", regex=f"[0-9]{{{count}}}") for count in range(1, 4)]
    for handle in handles[:2]:
        assert (await handle).text.isdigit()
    with pytest.raises(Busy, match="has waited for") as caught:
        await handles[2]
    assert caught.value.retry_after > 0
    assert (await session.generate("x", choice=["yes"])).text == "yes"


@anyio_test
async def test_a_request_can_be_cancelled_while_its_grammar_compiles(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_of, begun, compiled = Compilers.text_after_trial, threading.Event(), threading.Event()

    def tried(self: Compilers[Any], *arguments: Any) -> str:
        begun.set()
        assert compiled.wait(60)
        return text_of(self, *arguments)

    monkeypatch.setattr(Compilers, "text_after_trial", tried)
    handle = session.submit("x", regex="[0-9]{4}")
    assert await anyio.to_thread.run_sync(begun.wait, 60)
    handle.cancel()
    with pytest.raises(RequestAborted):
        await handle
    compiled.set()


@anyio_test
async def test_a_step_that_is_asked_for_waits_for_the_grammar(session: Session, slowly: None) -> None:
    async with session.paused():
        handle = session.submit("x", regex="[0-9]{2}")
        assert await session.step() is not None
    assert (await handle).text.isdigit()


@anyio_test
async def test_closing_while_a_grammar_compiles(slowly: None) -> None:
    session = fake_session()
    handle = session.submit("x", regex="[0-9]{4}")
    await session.aclose()
    with pytest.raises(RekindleError):
        await handle


class Parts:
    """What the intake reads of an engine to find a model's reasoning."""

    tokenizer = with_special_tokens("<think>", "</think>")
    services: ClassVar[Services] = {structures.THINK_IDS: tokenizer.pair("<think>", "</think>")}


@pytest.mark.parametrize(
    ("prompt", "chat", "inside"),
    [
        ("ab<think>", False, True),
        ("a<think>b</think>c", False, None),
        ("a<think>b</think>" + "c" * 20, True, False),
        ("a<think></think>c", True, None),  # a template that turns the reasoning off
        ("abc", True, False),
        ("abc", False, None),
    ],
)
def test_where_a_models_reasoning_is(prompt: str, chat: bool, inside: bool | None) -> None:
    parts: Any = Parts()
    ids: Any = np.asarray(parts.tokenizer.encode(prompt, add_special_tokens=False), np.int32)
    submission: Any = types.SimpleNamespace(extensions=NONE, render=str if chat else None)
    rules = structures.reasoning_rules(submission, ids, parts)
    assert (None if rules is None else rules.inside) == inside
    assert rules is None or (rules.opening, rules.closings) == ("<think>", ("</think>",))
    parts.services = NO_SERVICES
    assert structures.reasoning_rules(submission, ids, parts) is None
