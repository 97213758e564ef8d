"""What newcomers try first either works or is answered with the call that they mean."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers.kernel_state import begin_with
from helpers.sessions import CONFIG, byte_tokenizer, parts
from rekindle import Session, tiny
from rekindle._src.calls import embedding
from rekindle._src.core.captured import Captured
from rekindle._src.core.embedder import Embedder
from rekindle._src.core.options import NoArgument
from rekindle._src.text.chat import ChatTemplate
from rekindle.errors import ConfigError, InvalidRequest

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    scheduler, runner = parts()
    with Session(scheduler, runner, byte_tokenizer(), CONFIG, chat=ChatTemplate.load(tiny.folder())) as made:
        yield made


TRIED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a conversation": (lambda s: s.generate(MESSAGES), "Use session.chat(messages)"),
    "a message": (lambda s: s.generate(MESSAGES[0]), "Use session.chat(messages)"),
    "conversations": (lambda s: s.generate([MESSAGES, MESSAGES]), "Use session.chat(messages)"),
    "a number": (lambda s: s.generate(1.5), "Pass a text such as"),
    "a named prompt": (lambda s: s.generate("x", prompt="y"), "Pass the prompt first and without a name"),
    "a prompt by its name": (lambda s: s.generate(prompt="x", model="y"), "Pass the prompt first and without a name"),
    "rows by name": (lambda s: s.map(rows=[{"a": 1}], template="{a}"), "Pass the rows first and without a name"),
    "a template by name": (lambda s: s.map([{"a": 1}], template="{a}"), "Pass the template second and without a name"),
    "messages by name": (lambda s: s.chat(messages=MESSAGES), "Use session.chat(messages): pass them first"),
    "a message by name": (lambda s: s.conversation().say(text="x"), "Pass a non-empty str, without a name"),
    "a Sampling by name": (lambda s: s.stream("x", sampling=rekindle.Sampling()), "Pass the Sampling second"),
    "no prompt": (lambda s: s.generate(), "prompt=nothing: is neither text nor token ids. Pass a text such as"),
    "no messages": (lambda s: s.chat(), "messages=nothing: is not a list of messages"),
    "no template": (lambda s: s.map([{"a": 1}]), "template=nothing: is neither text nor a function"),
    "another model": (lambda s: s.generate("x", model="y"), "a session has one model, which open() takes first"),
    "nonsense": (lambda s: s.generate("x", nonsense=1), "help(rekindle.Sampling) lists the"),
    "a slip": (lambda s: s.embed("x", poling="mean"), "is not an option of embed. Did you mean 'pooling'?"),
    "a slip, synchronously": (lambda s: s.embed_sync("x", normalise=True), "Did you mean 'normalize'?"),
    "a slip in score": (lambda s: s.score("x", ["y"], prioriti=1), "Did you mean 'priority'?"),
    "no slip": (lambda s: s.embed("x", foo=1), "Known are: images, adapter, pooling, normalize"),
    "min_new_tokens": (lambda s: s.generate("x", min_new_tokens=3), "ignore_eos=True goes on after one was"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIED)
def test_an_error_names_the_call_that_was_meant_and_is_short(session: Session, name: str) -> None:
    attempt, words = TRIED[name]
    with pytest.raises(InvalidRequest) as caught:
        attempt(session)
    assert words in str(caught.value) and len(str(caught.value)) < 200


FITTING = {"prompt": "hi", "rows": [{"a": 1}], "questions": {"urgent": bool}, "query": "q", "states": ["x", "y"]}
OTHER_NAMES = {"texts": "prompt", "prompts": "prompt"}  # of arguments that are checked as prompts
KEYWORDS = {"fork": {"at": 1}}  # which Python itself asks for


def _methods_that_check_their_arguments(owner: Any) -> list[tuple[Any, list[str]]]:
    """Return the bound methods that positional arguments may be missing from, and the names of these."""
    methods = []
    for name in dir(type(owner)):
        function = inspect.getattr_static(type(owner), name)
        if inspect.isfunction(function) and any(isinstance(one, NoArgument) for one in function.__defaults__ or ()):
            names = list(inspect.signature(function).parameters)[1:]
            absent = sum(isinstance(one, NoArgument) for one in function.__defaults__ or ())
            methods.append((getattr(owner, name), names[:absent]))
    return methods


def _call(method: Any, names: list[str]) -> None:
    """Call a method with these arguments alone, up to its first pause."""
    result = method(*(FITTING.get(name, name) for name in names), **KEYWORDS.get(method.__name__, {}))
    if inspect.iscoroutine(result):
        result.send(None)


def test_every_argument_that_is_missing_is_refused_at_once(session: Session) -> None:
    seen = set()
    for owner in (session, session.cache, session.conversation()):
        for method, names in _methods_that_check_their_arguments(owner):
            for count, name in enumerate(names):
                with pytest.raises(InvalidRequest) as caught:
                    _call(method, names[:count])
                if caught.value.field in (name, OTHER_NAMES.get(name)):
                    assert str(caught.value).startswith(f"{caught.value.field}=nothing: ")
                else:  # a later one is refused before it
                    assert caught.value.field in names[count:], method
                seen.add((method.__name__, name))
    assert seen > {("export_prefix", "path"), ("pull", "address"), ("fork", "source"), ("answer", "results")}


def test_a_missing_argument_comes_with_the_call(session: Session) -> None:
    for attempt, words in (
        (lambda s: s.cache.export_prefix("hi"), "path=nothing: is missing. Write export_prefix(prompt, path)"),
        (lambda s: s.cache.pull(), "address=nothing: is missing. Write pull(address)"),
        (lambda s: s.fork(at=1), "source=nothing: is missing. Write fork(source, at=…)"),
        (lambda s: s.conversation().answer(), "results=nothing: is missing. Write answer(results)"),
    ):
        with pytest.raises(InvalidRequest, match=rf"^{re.escape(words)}$"):
            attempt(session)


def test_errors_of_python_name_the_call_as_it_was_written(session: Session) -> None:
    anything: Any = session
    with pytest.raises(TypeError, match=r"^fork\(\) missing"):
        anything.fork()
    for name in ("score", "embed"):  # which say how they are called
        with pytest.raises(InvalidRequest, match="prompt=nothing"):
            getattr(anything, name)()


def test_a_table_in_place_of_a_prompt_is_one_line_and_hints_at_a_column(session: Session) -> None:
    pandas = pytest.importorskip("pandas")
    frame: Any = pandas.DataFrame({"review": ["good", "bad"], "stars": [5, 1]})
    for attempt in (lambda: session.score(frame, ["a"]), lambda: session.generate(frame)):
        with pytest.raises(InvalidRequest) as caught:
            attempt()
        assert str(caught.value) == (
            "prompt='a table of 2 rows and 2 columns': is neither text nor token ids. Pass a column: frame['review']"
        )
    with pytest.raises(InvalidRequest) as caught:
        session.score("x", frame)
    assert "\n" not in str(caught.value)


def test_the_class_names_the_function_that_opens_a_model() -> None:
    made: Any = Session
    for wrong in (lambda: made("tiny"), lambda: made(model="tiny"), lambda: made()):
        with pytest.raises(ConfigError, match=r"rekindle\.open\('tiny'\)"):
            wrong()


@pytest.mark.parametrize(
    ("name", "words"),
    [("cache", "session.view.tree()"), ("dashboard", "session.watch()"), ("strem", "Did you mean stream?"),
     ("nonsense", "There are: stream, chat")],
)  # fmt: skip
def test_a_view_that_there_is_not(session: Session, name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=f"session.view has no view '{name}'") as caught:
        getattr(session.view, name)
    assert words in str(caught.value)
    assert not hasattr(session.view, "_ipython_canary_method_should_not_exist_")


@pytest.mark.parametrize(
    ("name", "words"),
    [("generate", "session = await rekindle.open(…), then session.generate"), ("opeen", "Did you mean open?"),
     ("nonsense_of_mine", "no attribute 'nonsense_of_mine'"), ("_private", "no attribute '_private'")],
)  # fmt: skip
def test_a_name_that_the_package_has_not(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match="module 'rekindle' has no attribute") as caught:
        getattr(rekindle, name)
    assert str(caught.value).endswith(words)


def test_an_array_that_was_not_captured() -> None:
    array = np.zeros((2, 3), np.float32)
    captured = Captured(np.arange(2, dtype=np.int32), {("residual", 4): array, ("residual", 8): array}, 12)
    assert captured["residual", -4] is array and ("residual", 5) not in captured
    with pytest.raises(KeyError, match=r"'residual', 5.* was not captured; there are .*'residual', 4.*'residual', 8"):
        captured["residual", 5]


def test_a_text_is_a_chat_of_one_message(session: Session) -> None:
    assert session.render("Hello") == session.render(MESSAGES)
    said = session.chat("Hello", max_tokens=6).result_sync()
    assert said.text == session.chat(MESSAGES, max_tokens=6).result_sync().text
    for wrong in ({"role": "user"}, b"Hello", [], ["Hello"]):
        with pytest.raises(InvalidRequest):
            session.chat(wrong).result_sync()  # type: ignore[call-overload]


def test_the_mean_of_a_chat_model_is_called_that_once(
    session: Session, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding.say_untrained.cache_clear()
    session.embed("x", pooling="mean")
    assert not caplog.records, "that was meant"
    session.embed("x")
    session.embed(["x", "y"])
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1 and "it was not trained to bring texts" in told[0].getMessage()
    embedding.say_untrained.cache_clear()
    monkeypatch.setattr(session, "_front", session._front._replace(embedder=Embedder(8, trained=True)))
    session.embed("x")
    assert len(caplog.records) == 1, "it was trained for that"


def test_a_kernel_that_is_not_there_is_named_with_what_helps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rekindle_kernels.native import build

    begin_with(monkeypatch)
    for name, words in (("gemm_float16", 'dtype="bfloat16"'), ("gemm_int8", "`rekindle doctor`")):
        build._say(name, RuntimeError("the installation did not bring it"))
        told = caplog.records[-1].getMessage()
        assert words in told and "silences" not in told


def test_the_options_say_how_ignore_eos_differs_from_min_tokens() -> None:
    assert "With `min_tokens` no end is chosen before that" in (rekindle.Sampling.__doc__ or "")
