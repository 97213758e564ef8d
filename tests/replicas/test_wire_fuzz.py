"""Any value in any field of a request: it travels as it is or ends its own request, and the fleet goes on."""

from __future__ import annotations

import dataclasses
import math
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.chatting import HERMES
from helpers.fakes import EOS, make_request
from helpers.fleets import local_fleet
from helpers.sessions import CONFIG, byte_tokenizer, parts
from rekindle import Fleet, InvalidRequest, RekindleError, Sampling, Session
from rekindle._src.replicas.wire import STAY, decode, encode
from rekindle._src.text.chat import ChatTemplate

FIELDS = sorted(field.name for field in dataclasses.fields(Sampling))
SETTINGS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"properties": value} if depth % 2 else [value]
    return value


def cycle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


# Made by name: some of them can't be shown.
HARD: dict[str, Any] = {
    "5,000 digits": lambda: 10**5000, "nan": lambda: math.nan, "inf": lambda: math.inf, "-inf": lambda: -math.inf,
    "nested 91 deep": lambda: nested(91), "nested 976 deep": lambda: nested(976), "a cycle": cycle,
    "mixed keys": lambda: {1: 2, "a": 3, None: 4, (5,): 6}, "an object": object, "a function": lambda: len,
    "a lambda": lambda: lambda: 1, "bytes": lambda: b"\xff", "a set": lambda: {1}, "a lock": threading.Lock,
}  # fmt: skip
ANY_TEXT = st.characters(codec=None, exclude_categories=())
TEXTS = st.text(ANY_TEXT, max_size=8) | st.sampled_from(["\ud800", "a\udfff", ""])
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**63, True, 0.5, -0.0, 1e308]) | st.integers(-3, 40)
ODD = st.sampled_from(sorted(HARD)).map(lambda name: HARD[name]())
FLAT = st.none() | TEXTS | NUMBERS | ODD
VALUES = st.recursive(FLAT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
OPTIONS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | FLAT
KEYS = st.sampled_from(["content", "tool_calls", "name", "reasoning_content"]) | TEXTS | st.integers() | st.none()
MESSAGES = st.lists(
    st.tuples(st.dictionaries(KEYS, VALUES, max_size=3), ROLES).map(lambda pair: {**pair[0], "role": pair[1]}),
    max_size=3,
)
TOOLS = st.lists(VALUES | st.fixed_dictionaries({"type": st.just("function"), "function": VALUES}), max_size=2)


def chatting_session() -> Session:
    scheduler, runner = parts(CONFIG)
    return Session(scheduler, runner, byte_tokenizer(), CONFIG, chat=ChatTemplate(HERMES), model="fake")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with local_fleet(chatting_session) as (made, _):
        yield made
        stats = made.stats()
        assert (stats.lost, stats.moved, stats.ready, stats.live, made.closed) == (0, 0, 2, 0, False)


def options_travel(options: dict[str, Any]) -> None:
    try:
        sampling = Sampling(**options)
    except InvalidRequest:
        return
    request = dataclasses.replace(make_request("abc", id="r"), sampling=dataclasses.replace(sampling, seed=3))
    numbers = [value for name in FIELDS if isinstance(value := getattr(sampling, name), int)]
    if any(abs(value) > 10**4000 for value in numbers):
        with pytest.raises(ValueError, match="digits"):  # such a number has no text
            encode(request)
        return
    sent = encode(request)
    received = decode(pickle.loads(pickle.dumps(sent)), EOS + 1)
    without = {field.name: field.default for field in dataclasses.fields(Sampling) if field.name in STAY}
    assert received.sampling == dataclasses.replace(request.sampling, **without)


def ends_alone(fleet: Fleet, messages: Any, tools: Any, prompt: Any, options: dict[str, Any]) -> None:
    """Both calls end with a result or a typed error, and the next request is answered."""
    given = {"max_tokens": 2, **{name: value for name, value in options.items() if name not in ("max_tokens", "n")}}
    for call in (
        lambda: fleet.chat(messages, tools=tools or None, **given).result_sync(),
        lambda: fleet.generate(prompt, **given).result_sync(),
    ):
        try:
            call()
        except RekindleError:
            pass
        except (TypeError, ValueError, RecursionError):
            assert not fleet.closed  # raised by the call itself, in the caller's thread
    assert len(fleet.generate("abc", max_tokens=2).result_sync().token_ids) == 2


@settings(max_examples=150, derandomize=True, **SETTINGS)
@given(options=OPTIONS)
def test_options_travel_as_they_are(options: dict[str, Any]) -> None:
    options_travel(options)


@settings(max_examples=40, derandomize=True, **SETTINGS)
@given(messages=MESSAGES, tools=TOOLS, prompt=VALUES, options=OPTIONS)
def test_whatever_a_request_holds_ends_at_most_that_request(
    fleet: Fleet, messages: Any, tools: Any, prompt: Any, options: dict[str, Any]
) -> None:
    ends_alone(fleet, messages, tools, prompt, options)


@settings(max_examples=100, derandomize=True, **SETTINGS)
@given(fields=TEXTS | st.dictionaries(TEXTS, st.none() | TEXTS, max_size=2).map(str), tokens=st.binary(max_size=9))
def test_what_no_fleet_sends_is_a_typed_error(fields: str, tokens: bytes) -> None:
    sent = encode(make_request("abc", id="r"))
    for wrong in (sent._replace(fields=fields), sent._replace(fields="{}"), sent._replace(tokens=tokens)):
        with pytest.raises(InvalidRequest):
            decode(wrong, EOS + 1)


@pytest.mark.soak
@settings(max_examples=20_000, **SETTINGS)
@given(options=OPTIONS)
def test_options_travel_as_they_are_for_long(options: dict[str, Any]) -> None:
    options_travel(options)


@pytest.mark.soak
@settings(max_examples=5_000, **SETTINGS)
@given(messages=MESSAGES, tools=TOOLS, prompt=VALUES, options=OPTIONS)
def test_whatever_a_request_holds_ends_at_most_that_request_for_long(
    fleet: Fleet, messages: Any, tools: Any, prompt: Any, options: dict[str, Any]
) -> None:
    ends_alone(fleet, messages, tools, prompt, options)
