"""An app over a session of fakes, with a chat template that shows all it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.sessions import CONFIG, byte_tokenizer, eventually, parts, threads, wait_until_idle
from rekindle import Session
from rekindle._src.core.config import EngineConfig
from rekindle._src.text.chat import ChatTemplate

starlette = pytest.importorskip("starlette", reason="the server is the extra `serve`")

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
)


def chatting_session(config: EngineConfig = CONFIG, **runner: Any) -> Session:
    """A session over fakes that can chat."""
    scheduler, fake = parts(config, **runner)
    return Session(scheduler, fake, byte_tokenizer(), config, model="fake", chat=ChatTemplate(TEMPLATE))


def checked(session: Session) -> Iterator[Session]:
    """The session, which has to be whole again afterwards."""
    before = threads() - {thread for thread in threads() if thread.name == "rekindle session"}
    try:
        yield session
        if not session.closed:
            wait_until_idle(session)
    finally:
        session.close()
    eventually(lambda: {one for one in threads() if one.name != "rekindle session"} <= before)


@pytest.fixture
def session() -> Iterator[Session]:
    yield from checked(chatting_session())


@pytest.fixture
def slow() -> Iterator[Session]:
    """Ten milliseconds a step, so that things can happen in between."""
    yield from checked(chatting_session(step_seconds=0.01))


@pytest.fixture
def app(session: Session) -> Any:
    from rekindle.serve import app

    return app(session)
