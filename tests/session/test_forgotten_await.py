"""A forgotten await, or `for` and `with` where their async forms are meant, says what to write."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle import Session
from rekindle.errors import InvalidRequest

anyio_test = pytest.mark.anyio
TESTS = Path(__file__).parents[1]
PATHS = f"{TESTS}:{TESTS.parent / 'toolkit'}:{TESTS.parent / 'kernels'}"
CHANGES: dict[str, Callable[[Session], object]] = {
    "save": lambda session: session.save("kept"),
    "swap_weights": lambda session: session.swap_weights("folder"),
    "step": lambda session: session.step(),
    "clear": lambda session: session.cache.clear(),
    "export_prefix": lambda session: session.cache.export_prefix("hello", "prefix"),
    "import_prefix": lambda session: session.cache.import_prefix("prefix"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_was_never_awaited_warns(session: Session, name: str) -> None:
    call = CHANGES[name](session)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del call
        gc.collect()
    (warning,) = told
    assert warning.category is RuntimeWarning
    assert str(warning.message).startswith(f"{name}(…) was never awaited, so it did nothing: write await")


def test_a_change_that_was_started_or_closed_is_silent(session: Session) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.cache.clear(tier="memory").result_sync()
        session.save("x").close()  # type: ignore[attr-defined]
        call = session.cache.clear(tier="memory")
        with contextlib.suppress(BaseException):
            call.throw(KeyboardInterrupt())
        del call
        gc.collect()


def test_the_warning_is_silent_at_the_end_of_a_process() -> None:
    code = (
        "from helpers.sessions import fake_session\nsession = fake_session()\ncall = session.save('x')\nsession.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": PATHS}
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["text", "token_ids", "logprobs", "deltas"])
def test_results_of_a_generation_that_was_never_submitted_ask_for_await(session: Session, name: str) -> None:
    calls: dict[str, Any] = {
        r"await session\.generate.*session\.submit": session.generate("hello"),
        r"async for delta in session\.stream.*await session\.stream": session.stream("hello"),
        r"await session\.chat.* done\.content": session.chat("hello", template="{{ messages[0].content }}"),
    }
    for words, handle in calls.items():
        with pytest.raises(InvalidRequest, match=f"neither awaited nor submitted.*{words}"):
            getattr(handle, name)
        assert "await it" in repr(handle)
        assert "await it" in handle._repr_html_()
        assert not handle.done


CALLS: dict[str, tuple[Callable[[Session], Any], str]] = {
    "generate": (lambda session: session.generate("hello"), r"await session\.generate\(…\)"),
    "list": (lambda session: session.generate(["hello", "you"]), r"await session\.generate\(\[…\]\)"),
    "embed": (lambda session: session.embed(["hello"]), r"await session\.embed\(…\)"),
    "map": (lambda session: session.map([{"text": "x"}], "{text}"), r"await session\.map\(…\)"),
    "turn": (
        lambda session: session.conversation(template="{{ messages[0].content }}").say("hello"),
        r"await chat\.say\(…\)",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_whatever_a_result_has_names_the_await_that_is_missing(session: Session, name: str) -> None:
    make, words = CALLS[name]
    call = make(session)
    for attribute in ("parsed", "finish_reason", "split", "to_pandas"):
        with pytest.raises(AttributeError, match=f"'{attribute}' is asked of a call.*write done = {words} and done"):
            getattr(call, attribute)
    uses: list[Callable[[], object]] = [
        lambda: call[0], lambda: len(call), lambda: "x" in call, lambda: call["text"], lambda: call[:3],
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(TypeError, match=f"call.*write done = {words}"):
            use()
    with pytest.raises(TypeError, match="await"):
        list(call)
    assert call, "that it is there can be asked"
    assert getattr(call, "parsed", 3) == 3
    assert not hasattr(call, "_ipython_display_")
    call.close()


@anyio_test
async def test_results_are_there_once_it_was_submitted_or_ended(session: Session) -> None:
    handle = session.submit("hello", max_tokens=3)
    assert isinstance(handle.text, str)
    await handle
    assert len(handle.token_ids) == 3
    cancelled = session.generate("hello")
    cancelled.cancel()
    assert cancelled.text == ""


@anyio_test
async def test_plain_loops_over_async_streams_name_the_async_form(session: Session) -> None:
    stream: Any = session.stream("hello")
    with pytest.raises(TypeError, match=r"async for delta in session\.stream.*session\.stream_sync"):
        for _ in stream:
            pass
    batch: Any = session.generate(["a", "b"])
    with pytest.raises(TypeError, match="a call has no items: write done = await"):
        list(batch)
    plain: Any = session.stream_sync("hello")
    with pytest.raises(TypeError, match=r"with `async for` use session\.stream"):
        async for _ in plain:
            pass
    assert session.stats().live == 0


def test_plain_with_over_open_names_the_async_form() -> None:
    opening: Any = rekindle.open("tiny")
    with pytest.raises(TypeError, match=r"async with rekindle\.open.*with rekindle\.open_sync"), opening:
        pass
    call: Any = opening
    with pytest.raises(TypeError, match="await"):
        list(call)
