"""A conversation adds each turn once, whatever becomes of it, and can be forked, taken back, saved and restored."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from helpers.chatting import HERMES, OPENED, saying
from helpers.sessions import CONFIG, byte_tokenizer, cancel_once, hold_steps, parts, wait_until_idle
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Conversation, Session, tiny
from rekindle._src.core.records import FinishReason
from rekindle._src.text.chat import ChatTemplate
from rekindle.errors import InvalidRequest, PromptTooLong, SessionClosed, StoreError
from rekindle_kernels import private_files

anyio_test = pytest.mark.anyio
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def session() -> Iterator[Session]:
    scheduler, runner = parts(step_seconds=0.002)
    chat = ChatTemplate.load(tiny.folder())
    made = Session(scheduler, runner, byte_tokenizer(), CONFIG, model="fake", chat=chat)
    try:
        yield made
        if not made.closed:
            wait_until_idle(made)
    finally:
        made.close()


def roles(chat: Conversation) -> list[str]:
    return [message["role"] for message in chat.messages]


@anyio_test
async def test_turns_are_added_once(session: Session) -> None:
    chat = session.conversation("Be brief.", max_tokens=5)
    turn = chat.say("one")
    assert chat.messages == [SYSTEM]
    first = await turn
    assert await turn is first or (await turn).text == first.text
    assert chat.messages == [SYSTEM, {"role": "user", "content": "one"}, {"role": "assistant", "content": first.text}]
    second = await chat.say("two", max_tokens=7)
    assert len(second.token_ids) == 7
    plain = await session.chat([*chat.messages[:3], {"role": "user", "content": "two"}], max_tokens=7)
    assert plain.token_ids == second.token_ids
    assert roles(chat) == ["system", "user", "assistant", "user", "assistant"]


@anyio_test
async def test_a_message_that_does_not_fit_says_how_to_make_room(session: Session) -> None:
    """The error names `forget` however the turn is read, unless there is no turn to drop."""
    chat = session.conversation("Be brief.", max_tokens=4, overflow="refuse")
    much = "x" * session.config.max_model_len
    with pytest.raises(PromptTooLong) as alone:
        await chat.say(much)
    assert "Shorten it" in alone.value.fix and "forget" not in alone.value.fix
    await chat.say("one")
    before = chat.messages
    with pytest.raises(PromptTooLong) as awaited:
        await chat.say(much)
    with pytest.raises(PromptTooLong) as streamed:
        async for _ in chat.stream(much):
            pass
    for caught in (awaited, streamed):
        assert "Drop the oldest turn by chat.forget(), and say it again" in str(caught.value)
        assert caught.value.problem in str(alone.value)
    with pytest.raises(PromptTooLong, match=r"chat\.forget\(\)"):
        await anyio.to_thread.run_sync(lambda: list(chat.stream(much).stream_sync()))
    assert chat.messages == before


@anyio_test
async def test_a_stream_is_a_turn_and_what_was_said_until_it_was_left_is_kept(session: Session) -> None:
    chat = session.conversation(max_tokens=60, ignore_eos=True)
    said = "".join([delta.text async for delta in chat.stream("one", max_tokens=8)])
    assert chat.messages[-1] == {"role": "assistant", "content": said}
    heard = ""
    async for delta in chat.stream("two"):
        heard += delta.text
        if len(heard) > 3:
            break
    gc.collect()
    kept = chat.messages[-1]["content"]
    assert kept.startswith(heard)
    assert len(chat.messages) == 4
    await chat.say("three")
    assert chat.messages[3]["content"] == kept
    assert len(chat.messages) == 6


@anyio_test
async def test_a_turn_that_fails_or_is_cancelled_leaves_nothing(session: Session) -> None:
    chat = session.conversation(max_tokens=300, ignore_eos=True)
    with pytest.raises(PromptTooLong):
        await chat.say("x" * 2000)
    go_on = hold_steps(session)
    await cancel_once(lambda: session.stats().live, lambda: chat.say("too slow"))
    go_on.set()
    assert chat.messages == []
    await chat.say("now", max_tokens=2)
    assert roles(chat) == ["user", "assistant"]


@anyio_test
async def test_one_turn_is_answered_at_a_time(session: Session) -> None:
    chat = session.conversation(max_tokens=200, ignore_eos=True)
    running = aiter(turn := chat.stream("one"))
    await anext(running)
    with pytest.raises(InvalidRequest, match="is being answered"):
        await chat.say("two")
    with pytest.raises(InvalidRequest, match="is being answered"):
        chat.undo()
    other = chat.fork()
    assert other.messages == []
    await other.say("beside it", max_tokens=2)
    turn.cancel()
    del running
    gc.collect()
    await chat.say("two", max_tokens=2)
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == ["one", "two"]


def test_undo_fork_and_forget(session: Session) -> None:
    chat = session.conversation(system="Be brief.", max_tokens=3)
    for text in ("one", "two", "three"):
        chat.say(text).result_sync()
    other = chat.fork()
    chat.undo()
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["one", "two"]
    assert len(other.messages) == 7
    assert other.forget() == 1
    assert other.messages[0] == SYSTEM
    assert [m["content"] for m in other.messages if m["role"] == "user"] == ["two", "three"]
    assert other.forget(9) == 2
    assert other.messages == [SYSTEM]
    assert other.forget() == 0
    with pytest.raises(InvalidRequest, match="no turn to take back"):
        other.undo()
    chat.messages.clear()
    chat.messages[0]["content"] = "changed"
    assert chat.messages[0] == SYSTEM
    assert roles(chat)[1:] == ["user", "assistant"] * 2


@anyio_test
async def test_a_full_context_says_how_to_make_room_and_then_goes_on(session: Session) -> None:
    most = session.config.max_model_len
    chat = session.conversation(ignore_eos=True, overflow="refuse")
    await chat.say("one", max_tokens=20)
    done = await chat.say("two", max_tokens=most)
    assert done.finish_reason is FinishReason.CONTEXT
    assert "the end of the context: chat.forget() drops the oldest turn" in repr(chat)
    with pytest.raises(PromptTooLong):
        await chat.continue_answer()
    assert chat.forget() == 1
    assert "chat.forget()" not in repr(chat), "no older turn is left to forget"
    assert (await chat.continue_answer(max_tokens=4)).text


@anyio_test
async def test_an_answer_that_was_cut_says_so_and_goes_on_as_if_it_had_not_been(session: Session) -> None:
    options: Any = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    whole = session.conversation(**options)
    await whole.say("one", max_tokens=50)
    chat = session.conversation(**options, max_tokens=20)
    done = await chat.say("one")
    assert done.finish_reason.cut
    assert "20 tokens, cut at max_tokens" in repr(done)
    assert chat.cut
    assert "cut at 20 tokens" in repr(chat)
    assert "continue_answer()" in chat._repr_html_()
    rest = "".join([delta.text async for delta in chat.continue_answer()])
    assert chat.messages[-1]["content"] == done.text + rest
    assert "cut at 40 tokens" in repr(chat)
    await chat.continue_answer(max_tokens=10)
    assert chat.messages == whole.messages
    assert len(chat.messages) == 2
    chat.undo()
    assert not chat.cut
    with pytest.raises(InvalidRequest, match="no answer that could go on"):
        await chat.continue_answer()


@anyio_test
async def test_an_answer_goes_on_where_only_its_text_is_known(session: Session, tmp_path: Path) -> None:
    chat = session.conversation(max_tokens=9, ignore_eos=True)
    for text in ("one", "two"):
        await chat.say(text)
    chat.save(tmp_path / "chat.json")
    other = chat.fork()
    restored = session.conversation(restore=tmp_path / "chat.json", ignore_eos=True)
    for one in (chat, restored, other):
        rest = await one.continue_answer(max_tokens=6)
        assert len(rest.token_ids) == 6
    assert chat.messages == restored.messages == other.messages, "this tokenizer reads a text as it was written"
    assert chat.forget() == 1
    before = chat.messages[-1]["content"]
    rest = await chat.continue_answer()
    assert chat.messages[-1]["content"] == before + rest.text
    assert rest.prompt is not None, "it is rendered without the turn that was dropped"
    assert rest.prompt.count("one") == 0


@anyio_test
async def test_a_stopped_answer_goes_on_and_a_complete_one_does_not(session: Session) -> None:
    chat = session.conversation(ignore_eos=True, max_tokens=200)
    async for _ in chat.stream("one"):
        break
    gc.collect()
    begun = chat.messages[-1]["content"]
    assert not chat.cut
    rest = await chat.continue_answer(max_tokens=20)
    whole = session.conversation(ignore_eos=True)
    await whole.say("one", max_tokens=200)
    assert chat.messages[-1]["content"] == begun + rest.text
    assert whole.messages[-1]["content"].startswith(begun + rest.text)
    await chat.say("two", stop=begun[:1], max_tokens=200)
    with pytest.raises(InvalidRequest, match="complete answer, ended by stop"):
        await chat.continue_answer()


@anyio_test
async def test_an_answer_is_not_cut_by_default() -> None:
    with saying("word " * 100) as session:
        done = await session.chat([{"role": "user", "content": "x"}])
        assert (done.text, done.finish_reason) == ("word " * 100, "eos")
        chat = session.conversation()
        assert (await chat.say("x")).finish_reason == "eos"
        assert (await session.generate("x")).finish_reason == "length"


@anyio_test
@pytest.mark.parametrize("template", [HERMES, OPENED])
async def test_reasoning_that_was_cut_goes_on_as_reasoning(template: str) -> None:
    text = "so it is</think>It is" if template is OPENED else "<think>so it is</think>It is"

    def script(prompt: str) -> str:
        begun = max(at for at in range(len(text)) if prompt.endswith(text[:at]))
        return text[begun:]

    with saying(script, template) as session:
        chat = session.conversation()
        first = await chat.say("x", max_tokens=text.index("it"))
        assert (first.content, chat.messages[-1]["content"]) == ("", "")
        rest = await chat.continue_answer()
        assert (rest.reasoning, rest.content) == ("it is", "It is")
        assert chat.messages[-1] == {"role": "assistant", "content": "It is", "reasoning_content": "so it is"}


def test_a_loop_without_an_event_loop(session: Session) -> None:
    chat = session.conversation(max_tokens=6)
    said = "".join(delta.text for delta in chat.stream("one").stream_sync())
    assert chat.messages[-1]["content"] == said


def test_it_is_saved_and_taken_up_again(session: Session, tmp_path: Path) -> None:
    chat = session.conversation(system="Be brief.", max_tokens=4)
    chat.say("Grüße, 😀").result_sync()
    chat.save(tmp_path / "chat.json")
    again = session.conversation(restore=tmp_path / "chat.json", max_tokens=4)
    assert again.messages == chat.messages
    assert again.say("two").result_sync().text == chat.say("two").result_sync().text
    assert json.loads((tmp_path / "chat.json").read_text("utf-8"))["model"] == "fake"
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_a_place_that_can_t_be_written_is_named_and_the_old_file_stays(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = session.conversation(max_tokens=4)
    chat.say("one").result_sync()
    nowhere = tmp_path / "nosuch" / "x.json"
    with pytest.raises(StoreError) as caught:
        chat.save(nowhere)
    assert f"can't be written to {nowhere}: the folder {nowhere.parent} does not exist. Create" in str(caught.value)
    chat.save(tmp_path / "x.json")
    before = (tmp_path / "x.json").read_bytes()
    chat.say("two").result_sync()

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(private_files, "sync", full)
    with pytest.raises(StoreError, match=re.escape(f"{tmp_path / 'x.json'}: No space left on device")):
        chat.save(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_bytes() == before and len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}', '{"format": "rekindle conversation", "version": 1}'])
def test_a_file_of_another_kind_is_refused(session: Session, tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InvalidRequest, match=r"chat\.save"):
        session.conversation(restore=tmp_path / "file")
    with pytest.raises(InvalidRequest, match="can't be read"):
        session.conversation(restore=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "field"),
    [({"temprature": 1}, "temprature"), ({"system": 3}, "system"), ({"system": "x", "restore": "y"}, "system")],
)
def test_mistakes_are_told_at_once(session: Session, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        session.conversation(**options)
    assert caught.value.field == field


def test_what_is_no_message(session: Session) -> None:
    chat = session.conversation()
    for wrong in (None, 3, "", ["x"]):
        with pytest.raises(InvalidRequest, match="is not a message"):
            chat.say(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        chat.forget(0)


def test_a_closed_session_is_named(session: Session) -> None:
    chat = session.conversation()
    session.close()
    with pytest.raises(SessionClosed):
        chat.say("x").result_sync()
    assert chat.messages == []


@anyio_test
async def test_an_answer_goes_on_from_any_of_its_tokens_with_other_words(session: Session) -> None:
    """In all parts that it was made of, and in what was written into it."""
    chat = session.conversation(max_tokens=8, ignore_eos=True)
    first = await chat.say("one")
    rest = await chat.continue_answer()
    whole = first.text + rest.text
    assert chat.answer_ids == (*first.token_ids, *rest.token_ids)
    for at, edit in ((12, ""), (11, "XY"), (12, "Z"), (3, "abc")):
        kept = chat.messages[-1]["content"][:at]  # a token is a byte
        chat.edit_answer(at, edit)
        assert chat.messages[-1]["content"] == kept + edit
        assert len(chat.answer_ids) == at + len(edit)
    assert chat.messages[-1]["content"] == whole[:3] + "abc"
    more = await chat.continue_answer(max_tokens=4)
    assert chat.messages[-1]["content"] == whole[:3] + "abc" + more.text
    assert chat.answer_ids[-4:] == more.token_ids
    chat.edit_answer(5)
    assert chat.messages[-1]["content"] == whole[:3] + "ab"
    with pytest.raises(InvalidRequest, match=r"at=6: is outside of the answer's 5 tokens\. Use 0 to 5"):
        chat.edit_answer(6)


@anyio_test
async def test_an_edited_answer_is_drawn_anew(session: Session) -> None:
    chat = session.conversation(max_tokens=30, temperature=5.0, seed=1, ignore_eos=True)
    first = await chat.say("one")
    chat.edit_answer(2)
    again = await chat.continue_answer(max_tokens=28)
    assert again.seed != 1 and again.token_ids != first.token_ids[2:]


def test_a_system_prompt_is_changed(session: Session) -> None:
    chat = session.conversation(max_tokens=4)
    chat.say("one").result_sync()
    for prompt in ("Be brief.", "Be long.", ""):
        chat.system = prompt
        assert chat.system == prompt and roles(chat) == ["system"] * bool(prompt) + ["user", "assistant"]
    assert chat.answer_ids == ()
    with pytest.raises(InvalidRequest, match="with known tokens"):
        chat.edit_answer(0)
    with pytest.raises(InvalidRequest, match="is not text"):
        chat.system = None  # type: ignore[assignment]
