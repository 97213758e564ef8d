"""`session.map`: an answer for each row, errors by row, a file that survives a kill; over fakes."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rekindle
from helpers.sessions import CONFIG, cancel_once, expected, fake_session, opened, wait_until_idle
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.calls import requests
from rekindle._src.calls.rows import RowAnswer, RowAnswers, Rows, RowsSoFar
from rekindle._src.core.records import StepPlan
from rekindle.errors import InvalidRequest, MissingExtra, PromptTooLong, SessionClosed, StepFailed

pytestmark = pytest.mark.usefixtures("large_steps")
ROWS = [{"text": f"number {number}", "number": number} for number in range(40)]


def answer(prompt: str, count: int = 6) -> str:
    return bytes(expected(prompt, max_tokens=count)).decode()


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_a_table_shows_the_beginning_of_rows_of_any_kind() -> None:
    pandas = pytest.importorskip("pandas")
    many = [{"a": "x" * 500, "b": None, "c": b"y" * 9000, "d": Silent(), "e": 5}] * 120
    for rows in (many, pandas.DataFrame(many)):
        shown = RowAnswers((RowAnswer(place, "said") for place in range(120)), rows=rows)._repr_html_()
        assert shown.count("<tr>") == 51 and "and 70 more" in shown
        assert "x" * 79 + "…" in shown and "x" * 81 not in shown and "&lt;Silent&gt;" in shown
        assert ">d</th>" in shown and ">e</th>" not in shown, "four columns"
    once = RowAnswers([RowAnswer(0, "said")], rows=None)._repr_html_()
    assert ">row</th><th" in once and "said" in once, "rows of an iterator are not kept"


@pytest.mark.anyio
async def test_each_row_has_its_answer(session: Session) -> None:
    call = session.map(ROWS, "say {text}!", max_tokens=6)
    answers = await call
    assert answers.texts == [answer(f"say number {number}!") for number in range(40)]
    assert [one.row for one in answers] == list(range(40)) and answers.errors == {}
    assert isinstance(answers, list) and answers[3].text == str(answers[3]) and answers[3].completion_tokens == 6
    assert repr(answers) == "<RowAnswers: 40 rows, 240 tokens>"
    shown = answers._repr_html_()
    assert shown.count("<tr>") == 41 and ">text</th>" in shown and ">number</th>" in shown
    assert ">number 7</td>" in shown and ">answer</th>" in shown, "each answer stands next to its row"
    assert repr(call) == "<RowMap: 40 of 40 rows answered>"
    assert await call == answers
    assert pickle.loads(pickle.dumps(answers)) == answers


def test_an_answer_can_be_explained(session: Session) -> None:
    answers = session.map_sync([*ROWS[:2], {"other": "x"}], "{text}", max_tokens=6)
    assert session.explain(answers[1]).id == answers[1].id != answers[0].id
    assert not answers[2].id
    with pytest.raises(InvalidRequest, match="is not known"):
        session.explain(answers[2])


def test_templates_are_text_or_functions(session: Session) -> None:
    def ids(row: Any) -> list[int]:
        return list(row["text"].encode())

    for template in ("{text}", lambda row: row["text"], ids, "{text:s}"):
        assert session.map_sync(ROWS[:3], template, max_tokens=6).texts == [answer(row["text"]) for row in ROWS[:3]]
    assert session.map_sync([{"a": {"b": "c"}}], "{a[b]} {{a}}", max_tokens=6).texts == [answer("c {a}")]
    assert session.map_sync([], "{text}") == []


def test_a_cell_without_a_value_is_an_error_of_its_row(session: Session) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["one", None, "three", "four"], "note": pandas.array([1, 2, None, 4], "Int64")})
    answers = session.map_sync(frame, "{text} {note}", max_tokens=6)
    assert answers.texts == [answer("one 1"), "", "", answer("four 4")]
    assert "rows[1]=" in str(answers.errors[1]) and "has nothing in 'text'" in str(answers.errors[1])
    assert "has nothing in 'note'" in str(answers.errors[2])
    nan = session.map_sync([{"text": float("nan")}, {"text": [1.0, 2.0]}], "{text}", max_tokens=6)
    assert "has nothing in 'text'" in str(nan.errors[0]) and nan[1].text == answer("[1.0, 2.0]")
    assert session.map_sync(frame, lambda row: str(row["note"]), max_tokens=6).errors == {}  # a function decides itself


def test_errors_name_their_row_and_leave_the_others(session: Session) -> None:
    rows = [{"text": "one"}, {"txt": "two"}, "three", {"text": "x" * 600}, {"text": ""}, {"text": "six"}]
    answers = session.map_sync(rows, "{text}", max_tokens=6)
    assert [type(error) for error in answers.errors.values()] == [
        InvalidRequest, InvalidRequest, PromptTooLong, InvalidRequest,
    ]  # fmt: skip
    said = {row: str(error) for row, error in answers.errors.items()}
    assert said[1].startswith("rows[1]=") and "has no 'text', which the template names" in said[1]
    assert "Its fields are 'txt'" in said[1]
    assert said[2].startswith("rows[2]='three': is not a mapping")
    assert answers.texts == [answer("one"), "", "", "", "", answer("six")]
    assert "4 errors, the first error at row 1: InvalidRequest: rows[1]=" in repr(answers) and len(repr(answers)) < 400
    assert "the first error at row 1" in answers._repr_html_()
    assert repr(answers[2]).startswith("<RowAnswer 2: InvalidRequest: rows[2]='three': is not a mapping")
    assert str(answers[2]).startswith("InvalidRequest: rows[2]='three'") and str(answers[0]) == answer("one")
    broken = session.map_sync([{"a": 1}], lambda row: row["b"]).errors[0]
    assert "does not fit the template: KeyError('b')" in str(broken) and isinstance(broken.__cause__, KeyError)
    assert "no prompt" in str(session.map_sync([{"a": 1}], lambda row: None).errors[0])


@pytest.mark.parametrize(
    ("rows", "template", "options", "said"),
    [
        (3, "{a}", {}, "rows=3: are no rows"),
        ({"a": 1}, "{a}", {}, "are no rows"),
        ([], 3, {}, "template=3: is neither text nor a function"),
        ([], "{", {}, "is no format string"),
        ([], "say {}", {}, "has braces without a field's name"),
        ([], "{a}", {"n": 2}, "n=2: is more than one answer for a row"),
        ([], "{a}", {"system": "x"}, "system='x': is for chats"),
        ([], "{a}", {"chat": True}, "chat=True: needs a chat template"),
        ([], "{a}", {"max_token": 2}, "max_token=2: is not a sampling option"),
    ],
)
def test_wrong_arguments_are_named(session: Session, rows: Any, template: Any, options: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        session.map_sync(rows, template, **options)
    assert said in str(raised.value)


def test_an_error_of_all_rows_raises_before_any_is_computed(session: Session, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    before = session.stats().scheduler.submitted
    alike: list[Any] = [["hello", "world"], ("hello",), iter(["hello"]), {"hello"}, pandas.Series(["hello", "world"])]
    for rows in alike:
        with pytest.raises(InvalidRequest, match=r"rows\[0\]='hello': is not a mapping"):
            session.map_sync(rows, "{text}", max_tokens=2)
    with pytest.raises(InvalidRequest, match="Pass the DataFrame"):
        session.map_sync(alike[-1], "{text}", max_tokens=2)
    out = tmp_path / "out.jsonl"
    options: list[Any] = [{"schema": {"type": "str"}}, {"adapter": "nosuch"}, {"processors": ("nosuch",)}]
    for wrong in options:
        with pytest.raises(InvalidRequest, match=f"^{next(iter(wrong))}="):
            session.map_sync(ROWS, "{text}", out=out, max_tokens=2, **wrong)
    assert session.stats().scheduler.submitted == before and (not out.exists() or not out.read_bytes())
    cells = pandas.Series([{"text": "a"}, {"text": "b"}])
    assert not session.map_sync(cells, "{text}", max_tokens=2).errors


@pytest.mark.anyio
async def test_rows_are_read_as_they_are_needed(session: Session) -> None:
    """A generator of many rows is never far ahead of what runs, and the queue stays short."""
    read, most = 0, 0

    def rows() -> Iterator[dict[str, str]]:
        nonlocal read, most
        for number in range(600):
            read += 1
            most = max(most, session.stats().live)
            yield {"text": f"{number}"}

    call = session.map(rows(), "{text}", max_tokens=2)
    answers = await call
    assert len(answers) == read == 600
    assert most <= 2 * CONFIG.max_requests
    assert answers.texts[599] == answer("599", 2)


@pytest.mark.anyio
async def test_a_file_is_taken_up_where_it_ended(session: Session, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    first = await session.map(ROWS[:10], "{text}", out=out, max_tokens=6)
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    assert {json.loads(line)["row"] for line in lines} == set(range(10))
    out.write_bytes(b"".join(lines[:7]) + lines[7][:25])  # killed while it wrote
    before = session.stats().scheduler.submitted
    again = await session.map(ROWS[:10], "{text}", out=out, max_tokens=6)
    assert session.stats().scheduler.submitted - before == 3
    assert again.texts == first.texts and sum(one.resumed for one in again) == 7
    assert "7 of them were answered before" in repr(again)
    assert sorted(out.read_bytes().splitlines()) == sorted(line.rstrip() for line in lines)
    out.write_bytes(b"".join(lines).rstrip(b"\n"))  # killed before the end of the line: it is whole
    await session.map(ROWS[:10], "{text}", out=out, max_tokens=6)
    assert out.read_bytes() == b"".join(lines)
    # Other options, another prompt: computed anew.
    before = session.stats().scheduler.submitted
    await session.map(ROWS[:10], "{text}", out=out, max_tokens=7)
    await session.map([{"text": "new"}, *ROWS[1:10]], "{text}", out=out, max_tokens=7)
    assert session.stats().scheduler.submitted - before == 11


@pytest.mark.anyio
async def test_failed_rows_are_tried_again(tmp_path: Path) -> None:
    out, failing = tmp_path / "answers.jsonl", [ValueError("no")]
    with opened(fail=lambda plan: failing.pop() if failing else None) as session:
        answers = await session.map(ROWS, "{text}", out=out, max_tokens=6)
        assert answers.errors and {type(error) for error in answers.errors.values()} == {StepFailed}
        again = await session.map(ROWS, "{text}", out=out, max_tokens=6)
        assert not again.errors and sum(one.resumed for one in again) == len(ROWS) - len(answers.errors)
        assert again.texts == [answer(row["text"]) for row in ROWS]


@pytest.mark.parametrize(
    "content",
    [b"a,b\n1,2\n", b'{"text": "mine"}\n', b"\x00\x01", b'{"row": 1}\n', b'{"row": ' + b"[" * 9_000 + b"\n"],
    ids=["table", "other", "bytes", "no key", "too deep"],
)
def test_a_file_of_somebody_else_is_left_alone(session: Session, tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "mine"
    out.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"line 1 is not one that session\.map wrote"):
        session.map_sync(ROWS, "{text}", out=out)
    assert out.read_bytes() == content


@pytest.mark.anyio
async def test_an_interrupted_call_keeps_its_answers_and_goes_on(tmp_path: Path) -> None:
    go_on = threading.Event()

    def hold(plan: StepPlan) -> None:
        if plan.step > 12:  # the first rows have their answers, and the last ones do not
            assert go_on.wait(60)

    with opened(fail=hold) as session:
        call = session.map(ROWS, "{text}", out=tmp_path / "out", max_tokens=6)
        await cancel_once(lambda: call.answers, lambda: call)
        go_on.set()
        wait_until_idle(session)
        some = len(call.answers)
        assert 0 < some < len(ROWS)
        assert session.last == call.answers
        before = session.stats().scheduler.submitted
        assert (await call).texts == [answer(row["text"]) for row in ROWS]
        assert session.stats().scheduler.submitted - before == len(ROWS) - some
        go_on.clear()
        once = session.map(iter(ROWS), "{text}", max_tokens=6)
        await cancel_once(lambda: session.stats().live, lambda: once)
        go_on.set()
        with pytest.raises(InvalidRequest, match="was read before"):
            await once


def test_a_file_in_a_folder_that_does_not_exist_is_refused(session: Session, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"^out=.*can't be written: the folder .*nosuch does not exist\. Create"):
        session.map_sync(ROWS, "{text}", out=tmp_path / "nosuch" / "x.jsonl")
    assert not [*tmp_path.iterdir()] and not session.stats().scheduler.submitted


def test_a_closed_session_ends_the_call(tmp_path: Path) -> None:
    session = fake_session(step_seconds=0.01)

    def rows() -> Iterator[dict[str, str]]:
        yield from ROWS[:20]
        session.close()
        yield from ROWS

    with pytest.raises(SessionClosed):
        session.map_sync(rows(), "{text}", out=tmp_path / "out", max_tokens=4)
    assert (tmp_path / "out").read_bytes().endswith(b"}\n")


KILLED = """
import sys
from helpers.sessions import fake_session
session = fake_session(step_seconds=0.005)
session.map_sync(({"text": f"number {number}"} for number in range(10_000)), "{text}", out=sys.argv[1], max_tokens=6)
"""


def test_a_killed_process_loses_no_answer(session: Session, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = [str(Path(__file__).parents[1]), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}\n{KILLED}"
    process = subprocess.Popen([sys.executable, "-c", code, str(out)])
    try:
        deadline = time.monotonic() + 60
        while not out.exists() or out.stat().st_size < 4_000:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    whole = out.read_bytes().count(b"\n")
    rows = [{"text": f"number {number}"} for number in range(whole + 20)]
    answers = session.map_sync(rows, "{text}", out=out, max_tokens=6)
    assert sum(one.resumed for one in answers) >= whole
    assert answers.texts == [answer(row["text"]) for row in rows]
    for line in out.read_bytes().splitlines():
        json.loads(line)


def test_its_progress_tells_rows_tokens_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, compiling = [100.0], ["compiling program r16"]
    monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: now[0]))
    so_far = RowsSoFar()
    look = so_far.progress(Rows(ROWS).total, lambda: compiling[0])
    assert look().line == "0 of 40 rows, compiling program r16"
    now[0], so_far.tokens, compiling[0] = 130.0, 1, ""
    assert look().line == "0 of 40 rows"
    now[0] += 1.0
    for row in range(10):
        so_far.keep(RowAnswer(row, "x", completion_tokens=6))
    so_far.keep(RowAnswer(10, error=InvalidRequest("a", 1, "b", "c")))
    so_far.tokens = 61
    assert look().line == "11 of 40 rows, 60 tokens/s, 1 error"
    now[0] += 2.0
    for row in range(11, 31):
        so_far.keep(RowAnswer(row, "x", completion_tokens=6))
    so_far.tokens = 181
    state = look()
    assert state.fraction == 31 / 40
    assert state.line == "31 of 40 rows, 60 tokens/s, 1 s left, 1 error", "the wait for a program does not count"
    assert RowsSoFar().progress(Rows(iter(ROWS)).total, str)() == ("0 rows", None)


def test_rows_that_run_count_for_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of eight rows that end together says little of the others, unless their tokens are counted."""
    now = [100.0]
    monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: now[0]))
    so_far = RowsSoFar()
    live: Any = SimpleNamespace(handle=SimpleNamespace(token_ids=[1] * 6))
    so_far.tokens, look = 1, so_far.progress(Rows(ROWS).total, str)
    assert look().line == "0 of 40 rows"
    now[0] += 8.0
    so_far.keep(RowAnswer(0, "x", completion_tokens=6))
    so_far.tokens, so_far.live = 6, [live] * 7
    assert look().line == "1 of 40 rows, 6 tokens/s"
    now[0] += 4.0
    live.handle.token_ids = [1] * 3
    for row in range(1, 8):
        so_far.keep(RowAnswer(row, "x", completion_tokens=6))
    so_far.tokens, so_far.live = 48, [live] * 8
    assert look().line == "8 of 40 rows, 6 tokens/s, 28 s left", "12 of 40 are done, and 4 of them took 4 seconds"


def test_rows_of_a_data_frame(session: Session) -> None:
    pandas = pytest.importorskip("pandas", reason="rows of a DataFrame need pandas")
    frame = pandas.DataFrame({"text": ["one", "two"], "number": [1, 2]}, index=["a", "b"])
    answers = session.map_sync(frame, "{text} {number}", max_tokens=6)
    assert answers.texts == [answer("one 1"), answer("two 2")]
    table = answers.to_pandas()
    assert list(table.index) == ["a", "b"] and list(table["completion_tokens"]) == [6, 6]
    assert list(table["text"]) == ["one", "two"] and list(table["number"]) == [1, 2], "the rows' own columns stay"
    assert list(table["answer_text"]) == answers.texts and list(frame.columns) == ["text", "number"]
    wrong = session.map_sync([{"text": "x"}, {}], "{text}", max_tokens=2).to_pandas()
    assert wrong["answer_text"].isna().tolist() == [False, True] and "rows[1]" in wrong["error"][1]
    once = session.map_sync(iter([{"text": "x"}]), "{text}", max_tokens=2).to_pandas()
    assert next(iter(once.columns)) == "text" and len(once) == 1, "rows of an iterator are not kept"


def test_a_misspelt_column_is_refused_before_anything_runs(session: Session) -> None:
    pandas = pytest.importorskip("pandas", reason="rows of a DataFrame need pandas")
    before = session.stats().scheduler.submitted
    for rows in (ROWS, pandas.DataFrame(ROWS)):
        with pytest.raises(InvalidRequest, match=r"names a column that no row has\. Did you mean 'number'"):
            session.map(rows, "{text} {numbers_}")
    assert session.stats().scheduler.submitted == before


def test_without_pandas_it_says_what_to_install(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    answers = session.map_sync(ROWS[:1], "{text}", max_tokens=2)
    with pytest.raises(MissingExtra, match=r"rekindle\[notebook\]"):
        answers.to_pandas()


@pytest.mark.slow
def test_answers_of_a_structure_are_parsed(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    rows = [{"text": "Tom had a red ball."}, {"text": "Anna was sad."}]
    with rekindle.open_sync("tiny", max_model_len=256, max_requests=2, cache_dir=str(tmp_path / "cache")) as real:
        options: Any = {"out": tmp_path / "out", "choice": ["happy", "sad"]}
        for resumed in (False, True):
            answers = real.map_sync(rows, "{text} It is", **options)
            assert all(one.parsed in ("happy", "sad") and one.parsed == one.text for one in answers)
            assert [one.resumed for one in answers] == [resumed, resumed]
        asked = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        cut = real.map_sync(rows[:1], "{text}", out=tmp_path / "out", schema=asked, max_tokens=2)
        assert not cut[0].resumed and cut[0].parsed is None
        for resumed in (False, True):  # a number that may go on is no number, from the file neither
            cut = real.map_sync(rows[:1], "{text}", out=tmp_path / "cut", regex="[0-9]+", max_tokens=2)
            assert cut[0].resumed is resumed and cut[0].text.isdigit() and cut[0].parsed is None
            assert cut[0].parse_error is not None and cut[0].parse_error.reason == "max_tokens"
