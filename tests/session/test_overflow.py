"""Chats that outgrow the context go on without their oldest turns, and never in silence."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

import rekindle
from helpers import picture_models
from helpers.chatting import saying
from helpers.sessions import CONFIG, byte_tokenizer, parts, wait_until_idle
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session, tiny
from rekindle._src.capabilities.overflow.request import MOST_FUNCTIONS, OverflowFit, OverfullChat
from rekindle._src.capabilities.overflow.turns import size_of, without_turns
from rekindle._src.core.records import FinishReason
from rekindle._src.dispatch import intake
from rekindle._src.text.chat import ChatTemplate
from rekindle.errors import InvalidRequest, PromptTooLong, RequestFailed

anyio_test = pytest.mark.anyio
MOST = CONFIG.max_model_len or 0
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def session() -> Iterator[Session]:
    scheduler, runner = parts()
    chat = ChatTemplate.load(tiny.folder())
    made = Session(scheduler, runner, byte_tokenizer(), CONFIG, model="fake", chat=chat)
    try:
        yield made
        wait_until_idle(made)
    finally:
        made.close()


def long_chat(turns: int) -> list[dict[str, Any]]:
    said = [
        {"role": role, "content": f"{role} {number} says some words"}
        for number in range(turns)
        for role in ("user", "assistant")
    ]
    return [SYSTEM, *said, {"role": "user", "content": "And now?"}]


@anyio_test
async def test_the_prompt_is_the_chat_without_its_oldest_turns(session: Session) -> None:
    messages = long_chat(30)
    with pytest.raises(PromptTooLong):
        await session.chat(messages, max_tokens=8)
    handle = session.chat(messages, overflow="drop", max_tokens=8, ignore_eos=True)
    done = await handle
    left_out = done.left_out
    assert left_out is not None and left_out == handle.left_out
    assert left_out.messages == 2 * left_out.turns > 0 and left_out.first == 1 and left_out.context == MOST
    kept = without_turns(messages, left_out.turns)
    assert done.prompt == session.render(kept) and kept[0] == SYSTEM and kept[-1] == messages[-1]
    assert len(done.prompt_token_ids) <= MOST - 8
    alone = await session.chat(kept, max_tokens=8, ignore_eos=True)
    assert alone.token_ids == done.token_ids and alone.left_out is None
    assert f"without the oldest {left_out.turns} turns: the context is full" in repr(done)
    assert "turns" in str(left_out) and f"{left_out.messages} messages" in str(left_out)


@anyio_test
@pytest.mark.parametrize("by_function", [False, True])
async def test_a_message_that_comes_again_is_left_out_where_it_left(session: Session, by_function: bool) -> None:
    """One object is the answer of each turn, of the pinned one and of the last one, too."""
    again, count = {"role": "assistant", "content": "A reply that comes again"}, 40
    said = [({"role": "user", "content": f"question {number}"}, again) for number in range(count)]
    messages: list[dict[str, Any]] = [SYSTEM, *(one for turn in said for one in turn)]
    if not by_function:
        messages[1]["pinned"] = True
    overflow = (lambda chat: chat.without(37)) if by_function else "drop"
    left_out = (await session.chat(messages, overflow=overflow, max_tokens=8, ignore_eos=True)).left_out
    assert left_out is not None and left_out.messages == 2 * left_out.turns > 0
    assert left_out.first == (1 if by_function else 3) and left_out.turns == (37 if by_function else left_out.turns)


@anyio_test
async def test_a_chat_with_room_is_as_it_was(session: Session) -> None:
    messages = long_chat(2)
    plain = await session.chat(messages, max_tokens=8)
    done = await session.chat(messages, overflow="drop", max_tokens=8)
    assert done.prompt_token_ids == plain.prompt_token_ids and done.token_ids == plain.token_ids
    assert done.left_out is None and "full" not in repr(done)


@anyio_test
async def test_a_short_chat_is_not_measured(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, measure = list[int](), OverflowFit.measure

    def counting(fit: OverflowFit) -> Any:
        measured.append(1)
        return measure(fit)

    monkeypatch.setattr(OverflowFit, "measure", counting)
    assert (await session.chat(long_chat(2), overflow="drop", max_tokens=8)).left_out is None and not measured
    messages = [{"role": role, "content": "é" * 40} for role in 4 * ("user", "assistant")]
    messages.append({"role": "user", "content": "And now?"})
    assert sum(map(size_of, messages)) < MOST - 8, "fewer characters than tokens that it has room for"
    done = await session.chat(messages, overflow="drop", max_tokens=8)
    assert done.left_out is not None and len(measured) == 1


@anyio_test
@pytest.mark.thorough
async def test_two_hundred_turns_share_their_prompts(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most turns find the pages of the one before, and rendering is bounded whatever the length of the chat."""
    rendered, render = list[int](), intake.render_chat

    async def counting(submission: Any) -> Any:
        rendered.append(1)
        return await render(submission)

    monkeypatch.setattr(intake, "render_chat", counting)
    chat = session.conversation("Be brief.", max_tokens=12, ignore_eos=True)
    hits, renders, firsts = 0, list[int](), list[int]()
    for number in range(200):
        rendered.clear()
        done = await chat.say(f"question {number}")
        renders.append(len(rendered))
        assert done.usage.prompt_tokens + 12 <= MOST
        firsts.append(0 if done.left_out is None else done.left_out.turns)
        before = firsts[-2] if number else 0
        if firsts[-1] == before:  # a page at the end of the last prompt may be computed anew
            hits += 1
            assert number == 0 or done.usage.cached_tokens >= done.usage.prompt_tokens - 96
    assert firsts == sorted(firsts) and firsts[-1] > 180
    assert hits >= 140, "the oldest turns leave several at once"
    assert max(renders) <= 4
    assert len(chat.messages) == 401, "the conversation has them all"
    assert chat.messages[0] == SYSTEM


@anyio_test
async def test_the_place_of_the_cut_depends_on_the_messages_alone(session: Session) -> None:
    messages = long_chat(40)
    first = await session.chat(messages, overflow="drop", max_tokens=8)
    for turns in (3, 17, 39):
        await session.chat(long_chat(turns), overflow="drop", max_tokens=8)
    again = await session.chat(messages, overflow="drop", max_tokens=8)
    assert again.prompt_token_ids == first.prompt_token_ids and again.usage.cached_tokens > 0


@anyio_test
async def test_the_last_turn_may_take_the_room_of_the_answer_and_no_more(session: Session) -> None:
    messages = [*long_chat(3), {"role": "assistant", "content": "."}]
    room = MOST - len(session.chat_tokens([SYSTEM, {"role": "user", "content": ""}]))
    done = await session.chat([*messages, {"role": "user", "content": "x" * (room - 1)}], overflow="drop")
    assert done.left_out is not None and done.left_out.turns == 4 and len(done.token_ids) == 1
    with pytest.raises(PromptTooLong, match="leaves no room"):
        await session.chat([*messages, {"role": "user", "content": "x" * room}], overflow="drop")
    with pytest.raises(PromptTooLong, match="leaves no room"):
        await session.chat("x" * MOST, overflow="drop")


@anyio_test
async def test_pinned_turns_stay(session: Session, tmp_path: Path) -> None:
    chat = session.conversation("Be brief.", max_tokens=8, ignore_eos=True)
    await chat.say("My name is Ada.")
    chat.pin_turn()
    for number in range(40):
        done = await chat.say(f"question {number}")
    assert done.left_out is not None and done.left_out.first == 3
    assert done.prompt is not None and "My name is Ada." in done.prompt and "question 0\n" not in done.prompt
    chat.save(tmp_path / "chat.json")
    restored = session.conversation(restore=tmp_path / "chat.json", max_tokens=8, ignore_eos=True)
    said = await restored.say("Who am I?")
    assert said.prompt is not None and "My name is Ada." in said.prompt
    restored.pin_turn(0, pinned=False)
    said = await restored.say("And now?")
    assert said.prompt is not None and "My name is Ada." not in said.prompt
    for turn in (99, -99, True, "x"):
        with pytest.raises(InvalidRequest, match="turn="):
            chat.pin_turn(turn)  # type: ignore[arg-type]


@anyio_test
async def test_an_answer_at_the_end_of_the_context_goes_on_without_the_oldest_turns(session: Session) -> None:
    chat = session.conversation(ignore_eos=True)
    await chat.say("one", max_tokens=100)
    done = await chat.say("two", max_tokens=MOST)
    assert done.finish_reason is FinishReason.CONTEXT and chat.cut
    assert "chat.continue_answer() goes on without the oldest turns" in repr(chat)
    rest = await chat.continue_answer(max_tokens=8)
    assert rest.left_out is not None and rest.left_out.turns == 1 and len(rest.token_ids) == 8
    assert chat.messages[-1]["content"] == done.text + rest.text and len(chat.messages) == 4


@anyio_test
async def test_an_answer_cut_where_the_context_ends_goes_on_too(session: Session) -> None:
    """Its reason is `max_tokens`, but no room is left."""
    chat = session.conversation(ignore_eos=True)
    await chat.say("one", max_tokens=100)
    room = MOST - len(session.chat_tokens([*chat.messages, {"role": "user", "content": "two"}]))
    done = await chat.say("two", max_tokens=room)
    assert done.finish_reason is FinishReason.LENGTH
    rest = await chat.continue_answer(max_tokens=8)
    assert len(rest.token_ids) == 8 and rest.left_out is not None


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@anyio_test
async def test_calls_leave_with_their_results() -> None:
    prompts = list[str]()

    def model(prompt: str) -> str:
        prompts.append(prompt)
        return "It is so." if prompt.rpartition("<|user|>")[2].count("<|tool|>") else call("look", word="x" * 40)

    def look(word: str) -> str:
        """Look a word up."""
        return f"{word} means " + "y" * 200

    with saying(model) as session:
        chat = session.conversation("Use tools.", tools=[look], run_tools=True)
        for number in range(16):
            done = await chat.say(f"word {number}")
            assert done.content == "It is so."
        assert done.left_out is not None and done.left_out.messages == 4 * done.left_out.turns
        for prompt in prompts:
            kept = prompt.partition("Use tools.")[2]
            assert kept.startswith("<|user|>"), "no result without its call"
            assert abs(kept.count("<tool_call>") - kept.count("<|tool|>")) == 0
        run = await session.chat(
            [*chat.messages, {"role": "user", "content": "more"}], tools=[look], run_tools=True, overflow="drop"
        )
        assert run.left_out is not None and run.left_out.turns > 0


@anyio_test
async def test_a_function_chooses_the_messages(session: Session) -> None:
    seen = list[OverfullChat]()

    def summarised(chat: OverfullChat) -> Sequence[Mapping[str, Any]]:
        seen.append(chat)
        told = session.generate("Summarise", max_tokens=3).result_sync()  # it may ask the session itself
        return [SYSTEM, {"role": "assistant", "content": f"Before: {told.text!r}"}, *chat.without(len(chat.turns) - 2)]

    messages = long_chat(30)
    done = await session.chat(messages, overflow=summarised, max_tokens=8)
    (chat,) = seen
    assert list(chat.messages) == messages and len(chat.turns) == 31 and chat.room == MOST - 8
    assert done.prompt is not None and "Before: " in done.prompt
    assert done.left_out is not None and done.left_out.turns == 29
    await session.chat(long_chat(1), overflow=summarised, max_tokens=8)
    assert len(seen) == 1, "asked only where there is no room"


@anyio_test
async def test_a_session_pauses_while_a_function_asks_it(session: Session) -> None:
    asked, paused = threading.Event(), threading.Event()

    def asking(chat: OverfullChat) -> Sequence[Mapping[str, Any]]:
        asked.set()
        paused.wait()
        session.generate("Summarise", max_tokens=3).result_sync()
        return chat.without(len(chat.turns) - 2)

    handle = session.chat(long_chat(30), overflow=asking, max_tokens=8)
    handle.submit()
    await anyio.to_thread.run_sync(asked.wait)
    async with session.paused():
        paused.set()
    done = await handle
    assert done.left_out is not None and done.left_out.turns == 29


@anyio_test
async def test_functions_leave_threads_for_the_requests_that_they_make(session: Session) -> None:
    """More overflow functions run than the default thread limiter has places."""
    asked, go, messages = list[int](), threading.Event(), long_chat(30)

    def waiting(chat: OverfullChat) -> Sequence[Mapping[str, Any]]:
        asked.append(1)
        go.wait()
        return chat.without(len(chat.turns) - 2)

    handles = [session.chat(messages, overflow=waiting, max_tokens=2) for _ in range(41)]
    for handle in handles:
        handle.submit()
    done = await session.chat(messages, overflow="drop", max_tokens=2)  # measured and rendered in threads
    assert done.left_out is not None and len(asked) <= MOST_FUNCTIONS
    go.set()
    for handle in handles:
        assert (await handle).left_out is not None
    assert len(asked) == 41


@anyio_test
async def test_a_function_that_returns_something_else_is_refused(session: Session) -> None:
    async def later(chat: OverfullChat) -> Any:
        return chat.without(9)

    def failing(chat: OverfullChat) -> Any:
        raise KeyError("no")

    messages = long_chat(30)
    for function in (lambda chat: None, lambda chat: [], lambda chat: ["text"], lambda chat: "text"):
        with pytest.raises(InvalidRequest, match="is what the function returned, and no messages"):
            await session.chat(messages, overflow=function)
    with pytest.raises(InvalidRequest, match="a plain function does"):
        await session.chat(messages, overflow=later)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLong):
        await session.chat(messages, overflow=lambda chat: list(chat.messages))
    with pytest.raises(RequestFailed, match="KeyError"):
        await session.chat(messages, overflow=failing)
    assert (await session.chat(messages, overflow="drop", max_tokens=2)).left_out is not None


@anyio_test
async def test_a_word_that_is_not_known_is_refused(session: Session) -> None:
    for value in ("truncate", True, None, 1):
        with pytest.raises(InvalidRequest, match='Use "drop", "refuse"'):
            session.chat("Hello", overflow=value)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="overflow"):
        session.conversation(overflow="no")


@anyio_test
async def test_wrong_messages_are_refused_as_without_it(session: Session) -> None:
    for messages in (["text"], [{"content": "x" * MOST}], [{"role": "user", "content": 7}], [], None):
        errors = []
        for overflow in ("refuse", "drop"):
            with pytest.raises(Exception) as caught:
                await session.chat(messages, overflow=overflow)  # type: ignore[arg-type]
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1], messages


@anyio_test
async def test_cancelling_and_neighbours_while_turns_leave(session: Session) -> None:
    messages = long_chat(200)
    alone = await session.chat(messages, overflow="drop", max_tokens=6, n=2, seed=3, temperature=0.9)
    outcomes: dict[int, Any] = {}

    async def ask(number: int) -> None:
        if number % 3 == 0:
            handle = session.chat(messages, overflow="drop")
            handle.submit()
            handle.cancel()
        else:
            options: Any = {"max_tokens": 6, "n": 2, "seed": 3, "temperature": 0.9}
            outcomes[number] = await session.chat(messages, overflow="drop", **options)

    async with anyio.create_task_group() as group:
        for number in range(12):
            group.start_soon(ask, number)
    assert len(outcomes) == 8
    for done in outcomes.values():
        assert [one.token_ids for one in done] == [one.token_ids for one in alone]
        assert all(one.left_out == alone[0].left_out for one in done)


OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 2, "max_tokens_per_step": 48, "max_model_len": 256, "page_size": 16,
    "device_pages": 80, "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_models.written("qwen3-vl", tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture
async def pictures(folder: Path, tmp_path: Path) -> AsyncIterator[Session]:
    async with rekindle.open(folder, **OPTIONS, cache_dir=str(tmp_path)) as opened:
        yield opened


@anyio_test
@pytest.mark.thorough
async def test_pictures_leave_with_their_turns(pictures: Session) -> None:
    """The request, its completion and its forks have the pictures of the turns that stay."""
    first, second = picture_models.picture(1, 96, 64), picture_models.picture(2, 64, 96)
    chat = pictures.conversation(**GREEDY)
    await chat.say("What is this?", images=first)
    for _ in range(9):
        await chat.say("Tell me much more about that, in many words.")
    turn = chat.say("And this?", images=second)
    done = await turn
    assert done.left_out is not None and len(done.images) == 1
    kept = without_turns([*chat.messages[:-2], chat.messages[-2]], done.left_out.turns)
    alone = await pictures.chat(kept, **GREEDY)
    assert alone.token_ids == done.token_ids and alone.prompt_token_ids == done.prompt_token_ids
    handle = pictures.chat(chat.messages[:-1], overflow="drop", **GREEDY)
    assert len(handle.images) == 2, "before it is taken in"
    again = await handle
    assert again.token_ids == done.token_ids and len(handle.images) == 1
    forked = await pictures.fork(handle, at=2, **GREEDY)
    assert again.token_ids[:2] + forked.token_ids[:4] == again.token_ids


@anyio_test
async def test_long_chats_are_measured_in_a_thread(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million parts held the loop of the session, and all of its streams, for 0.2 s."""
    threads = dict[str, set[str]]()

    def noted(message: Mapping[str, Any]) -> int:
        threads.setdefault(str(message["content"])[:1], set()).add(threading.current_thread().name)
        return size_of(message)

    monkeypatch.setattr("rekindle._src.capabilities.overflow.request.size_of", noted)
    for letter, times in (("s", 1), ("l", 40_000)):
        with pytest.raises(PromptTooLong) if letter == "l" else contextlib.nullcontext():
            await session.chat([{"role": "user", "content": letter * times}], overflow="drop", max_tokens=2)
    assert threads["s"].isdisjoint(threads["l"]) and all("AnyIO worker" in name for name in threads["l"])
