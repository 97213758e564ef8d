"""What one request brings, or meets, ends that request at most: its neighbours finish, and no replica dies of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from helpers.chatting import HERMES
from helpers.fakes import EOS
from helpers.fleets import local_fleet
from helpers.sessions import CONFIG, byte_tokenizer, eventually, parts
from rekindle import Fleet, InvalidRequest, RekindleError, RequestFailed, RequestQuarantined, Session
from rekindle._src.capabilities.guides.remote import RemoteGuide, SentGuide
from rekindle._src.capabilities.guides.request import StructureIntake
from rekindle._src.capabilities.pooling.request import PromptPooling
from rekindle._src.dispatch import intake
from rekindle._src.dispatch.capabilities import Capabilities
from rekindle._src.dispatch.detokenize import OutputState
from rekindle._src.replicas import replica, routes
from rekindle._src.replicas.routes import MOVES, Routes
from rekindle._src.replicas.wire import decode, encode
from rekindle._src.scheduling.scheduler import Scheduler
from rekindle._src.structured.reasoning import ReasoningRules
from rekindle._src.structured.spec import Spec
from rekindle._src.text.chat import ChatTemplate

pytestmark = pytest.mark.anyio
PROMPT = "Once upon a time"
TOKENS = 60  # of a neighbour's text


class PanicException(BaseException):
    """As pyo3 raises it."""


def chatting_session() -> Session:
    scheduler, runner = parts(CONFIG, step_seconds=0.001)
    return Session(scheduler, runner, byte_tokenizer(), CONFIG, chat=ChatTemplate(HERMES), model="fake")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    made = chatting_session()
    yield made
    made.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with local_fleet(chatting_session) as (made, _):
        yield made


@contextlib.asynccontextmanager
async def neighbours(target: Any, count: int = 3) -> Any:
    """Run streams alongside the block, one after another; each has to give the text that it gives without the block."""
    begun, over = [anyio.Event() for _ in range(count)], anyio.Event()

    async def read(number: int) -> None:
        while not over.is_set():
            text = ""
            async for delta in target.stream(f"{PROMPT} {number}", max_tokens=TOKENS):
                text += delta.text
                begun[number].set()
            assert text == undisturbed(number)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(read, number)
            for event in begun:
                await event.wait()
            try:
                yield
            finally:
                over.set()


@functools.cache
def undisturbed(number: int | None) -> str:
    session = chatting_session()
    prompt = PROMPT if number is None else f"{PROMPT} {number}"
    try:
        return session.generate_sync(prompt, max_tokens=TOKENS).text
    finally:
        session.close()


# Odd values: what one session answers, a fleet answers, too.


@dataclasses.dataclass
class Locked:
    """Its method holds a lock, so that the class can't be pickled by value."""

    x: bool

    def held(self, lock: Any = threading.Lock()) -> Any:  # noqa: B008
        return lock


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def message(**more: Any) -> list[Any]:
    return [{"role": "user", "content": "Hello", **more}]


ODD: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "half a surrogate pair as a salt": ("generate", PROMPT, {"salt": "\ud800"}),
    "half a surrogate pair in a prompt": ("generate", "a\ud800", {}),
    "half a surrogate pair to stop at": ("generate", PROMPT, {"stop": ["\udfff"]}),
    "a number of 5,000 digits": ("generate", PROMPT, {"max_tokens": 10**5000}),
    "keys of several types": ("chat", [{"role": "user", "content": "a", 1: 2, None: 3, "b": 4, (5,): 6}], {}),
    "bytes and sets in a message": ("chat", message(extra=b"\xff", other={1, "a"}), {}),
    "a message's lock": ("chat", message(extra=threading.Lock()), {}),
    "a message's lambda as its role": ("chat", [{"role": lambda: 1, "content": "a"}], {}),
    "a message nested 400 deep": ("chat", message(extra=nested(400)), {}),
    "a message nested 976 deep": ("chat", message(extra=nested(976), padding="x" * 300_000), {}),
    "content of odd parts": ("chat", [{"role": "user", "content": [1, None, {"text": 3}, {"type": "x"}]}], {}),
    "a type with a lock": ("generate", PROMPT, {"schema": Locked}),
    "a schema nested 976 deep": ("generate", PROMPT, {"schema": {"enum": nested(976)}}),
    "a schema and words that may not come": ("generate", PROMPT, {"schema": Locked, "bad_words": ["zz"]}),
    "words that may not come": ("generate", PROMPT, {"bad_words": ["e", "th"]}),
    "infinite biases": ("generate", PROMPT, {"logit_bias": {101: float("inf"), 102: -float("inf")}}),
}  # fmt: skip


async def outcome(target: Any, call: str, given: Any, options: dict[str, Any]) -> Any:
    """A text and its object, or the error's type."""
    try:
        done = await getattr(target, call)(given, **{"max_tokens": 20, **options})
    except RekindleError as error:
        return type(error)
    return done.text, done.parsed


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_a_fleet_answers_odd_requests_as_a_session_does(fleet: Fleet, session: Session) -> None:
    async with neighbours(fleet):
        for name, (call, given, options) in ODD.items():
            in_session, in_fleet = (
                await outcome(session, call, given, options),
                await outcome(fleet, call, given, options),
            )
            if name == "a number of 5,000 digits":  # it can't travel
                assert in_fleet is RequestFailed, name
            else:
                assert in_fleet == in_session, name
    assert (fleet.stats().lost, fleet.stats().moved, fleet.closed) == (0, 0, False)


async def test_a_type_stays_here_and_its_object_is_made_here(fleet: Fleet) -> None:
    @dataclasses.dataclass
    class Local:
        yes: bool

        def __post_init__(self) -> None:
            made.append(threading.current_thread())

    made: list[threading.Thread] = []
    done = await fleet.generate(PROMPT, schema=Local, max_tokens=40)
    assert isinstance(done.parsed, Local) and made == [threading.current_thread()]


def test_what_travels_is_json() -> None:
    from helpers.fakes import make_request

    request = make_request("abc", id="r", temperature=0.5, seed=7, stop=["x"], schema=Locked, logit_bias={7: 1.5})
    sent = encode(dataclasses.replace(request, caller="a key"))
    assert "Locked" not in sent.fields and json.loads(sent.fields)["sampling"]["stop"] == ["x"]
    received = decode(sent, EOS + 1)
    assert (received.token_ids.tolist(), received.caller) == (list(b"abc"), "a key")
    assert received.sampling == dataclasses.replace(request.sampling, schema=None)


def test_a_prompt_is_pooled_as_is_known_here() -> None:
    from helpers.fakes import extended, make_request

    sent = encode(extended(make_request("abc", id="r"), PromptPooling("last")))
    pooling = decode(sent, EOS + 1).extensions.get(PromptPooling)
    assert pooling is not None and pooling.kind == "last"
    for other in ("max", ["last"], 1):
        fields = json.dumps({**json.loads(sent.fields), "extensions": {"pooling": other}})
        with pytest.raises(InvalidRequest, match="it pools by"):
            decode(sent._replace(fields=fields), EOS + 1)


@pytest.mark.parametrize("budget", [None, 40])
def test_all_that_a_guide_is_made_from_travels(budget: int | None) -> None:
    from helpers.fakes import make_request

    rules = ReasoningRules("<think>", ("</think>", "<call>"), inside=True, budget=budget, used=3, message="So")
    guide = RemoteGuide(Spec("schema", '{"type":"object"}', lenient=True), (3, 2), rules, budget)
    guide.consume(7)

    def received_of(guide: RemoteGuide) -> RemoteGuide:
        return decode(encode(make_request("abc", id="r", guide=guide)), EOS + 1).extensions[SentGuide].remote

    received = received_of(guide)
    assert received.budget == budget
    assert (received.spec, received.rules, received.covered) == (guide.spec, rules, [7])
    assert set(received.eos_ids) == {2, 3}
    free = received_of(RemoteGuide(None, (), rules, None))
    assert free.spec is None and free.rules == rules
    fields = json.loads(encode(make_request("abc", id="r", guide=guide)).fields)
    for change in ({"rules": ["<think>"]}, {"rules": [1, ["a"]]}, {"rules": None, "spec": None}):
        broken = encode(make_request("abc", id="r", guide=guide))
        broken = broken._replace(
            fields=json.dumps({**fields, "extensions": {"guide": {**fields["extensions"]["guide"], **change}}})
        )
        with pytest.raises(InvalidRequest, match="can't be read"):
            decode(broken, EOS + 1)


# Exceptions in the middle of the way.


def concerns(victim: str, values: tuple[Any, ...]) -> bool:
    """Whether one of the values belongs to the request whose id, or whose salt, is `victim`."""
    for value in values:
        own = getattr(value, "request", value)
        names = [getattr(own, name, None) for name in ("id", "request_id")] + [value]
        if any(isinstance(name, str) and (name == victim or f"/{victim}/" in name) for name in names):
            return True
    return False


PLACES: list[tuple[Any, str]] = [
    (routes, "keys_of_messages"),
    (routes, "keys_of_tokens"),
    (routes, "encode"),
    (Routes, "_take"),
    (replica, "decode"),
    (replica, "sendable"),
]
OWN: list[tuple[Any, str]] = [
    (intake, "tokenize"),
    (StructureIntake, "resource"),
    (intake, "prepare"),
    (Capabilities, "parts"),
    (Scheduler, "submit"),
    (Scheduler, "_take_over"),
    (OutputState, "take"),
    (OutputState, "completion"),
]
ERRORS = [ValueError("a defect"), RecursionError("too deep"), MemoryError(), AssertionError(), PanicException("rust")]


async def meets(target: Any, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, error: BaseException) -> None:
    """One request meets an exception there, and the next one does not."""
    # The wire has ids of its own, and keys are made from the salt.
    victim = target.generate(PROMPT, salt="victim", max_tokens=10)
    if name == "keys_of_messages":
        victim = target.chat(message(), salt="victim", max_tokens=10)
    real = getattr(place, name)

    def broken(*values: Any, **options: Any) -> Any:
        if concerns("victim" if name.startswith("keys") else victim.id, values):
            raise error
        return real(*values, **options)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, broken)
        with pytest.raises(RequestFailed):
            await victim
    done = await target.generate(PROMPT, max_tokens=5)
    assert len(done.token_ids) == 5


async def test_an_exception_on_the_way_through_a_fleet_is_that_request_s(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(fleet):
        for number, (place, name) in enumerate(PLACES + OWN):
            if (place, name) != (Scheduler, "submit"):  # routes take its place
                await meets(fleet, monkeypatch, place, name, ERRORS[number % len(ERRORS)])
                assert (fleet.stats().lost, fleet.closed) == (0, False), name


async def test_an_exception_on_the_way_through_a_session_is_that_request_s(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(session):
        for number, (place, name) in enumerate(OWN):
            for error in (ERRORS[0], ERRORS[number % len(ERRORS)]):
                await meets(session, monkeypatch, place, name, error)
    await anyio.to_thread.run_sync(lambda: eventually(lambda: session.stats().live == 0))
    session.check_integrity()


# Requests that replicas die of.


def poisoned(replicas: Any, marker: int = 1) -> None:
    for one in replicas:
        one.deadly = lambda sent: bytes([marker, 0, 0, 0]) in sent.tokens


async def test_two_replicas_die_of_a_request_and_its_neighbours_go_on() -> None:
    with local_fleet(chatting_session, replicas=3) as (fleet, replicas):
        async with neighbours(fleet, 8):
            poisoned(replicas)
            with pytest.raises(RequestQuarantined, match="no other request can be the reason"):
                await fleet.generate("\x01", max_tokens=5)
        assert fleet.stats().lost == 2


async def test_the_next_such_request_takes_no_more_replicas() -> None:
    with local_fleet(chatting_session, replicas=3) as (fleet, replicas):
        poisoned(replicas)
        for number in (1, 2):
            with pytest.raises(RequestQuarantined):
                await fleet.generate("\x01", max_tokens=5)
            assert fleet.stats().lost == 2 * number


async def test_two_such_requests_at_once_are_both_found() -> None:
    with local_fleet(chatting_session, replicas=3) as (fleet, replicas):
        poisoned(replicas)
        async with neighbours(fleet), anyio.create_task_group() as group:
            found: list[Any] = []

            async def ask() -> None:
                found.append(await outcome(fleet, "generate", "\x01", {"max_tokens": 5}))

            for _ in range(2):
                group.start_soon(ask)
        assert found == [RequestQuarantined] * 2
        assert fleet.stats().lost <= 8


def slow_session() -> Session:
    scheduler, runner = parts(CONFIG, step_seconds=0.3)
    return Session(scheduler, runner, byte_tokenizer(), CONFIG, model="fake")


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_request_is_not_quarantined_for_replicas_that_die_anyway() -> None:
    """Four die without it. Then those that it is sent to die, before its first token."""
    with local_fleet(slow_session, replicas=3) as (fleet, replicas):

        def die(which: int, lost: int) -> None:
            replicas[which].die()
            eventually(lambda: fleet.stats().lost == lost and fleet.stats().ready == 3)

        for number in range(4):
            await anyio.to_thread.run_sync(die, number % 3, number + 1)
        request = fleet.submit(PROMPT, max_tokens=3)

        def meets_four() -> None:
            for number in range(4):
                eventually(lambda: any(one.inside for one in fleet.stats().replicas))
                die([one.inside for one in fleet.stats().replicas].index(1), 5 + number)

        await anyio.to_thread.run_sync(meets_four)
        assert (await request).text == undisturbed(None)[:3]
        assert fleet.stats().moved == 4


async def test_of_a_crowd_the_one_that_replicas_die_of_is_found() -> None:
    found: dict[int, Any] = {}
    with local_fleet(chatting_session, replicas=3) as (fleet, replicas):
        poisoned(replicas)

        async def ask(number: int) -> None:
            prompt = "\x01" if number == 5 else f"{PROMPT} {number}"
            found[number] = await outcome(fleet, "generate", prompt, {"max_tokens": 10})

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(12):
                    group.start_soon(ask, number)
        assert fleet.stats().lost <= MOVES + 1  # how many it takes depends on who was with it
    assert issubclass(found.pop(5), RequestFailed)
    assert [number for number, (text, _) in found.items() if not undisturbed(number).startswith(text)] == []
