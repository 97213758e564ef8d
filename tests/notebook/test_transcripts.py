"""Conversations that are kept for a restarted kernel: what is written, what is refused, what a view does."""

from __future__ import annotations

import html
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.sessions import CONFIG, eventually, opened
from rekindle import Session
from rekindle._src.notebook import live, transcripts
from rekindle._src.notebook.transcripts import Transcripts, new_name
from rekindle.errors import InvalidRequest, StoreError

SAID = [{"role": "user", "content": "héllo\n<b>"}, {"role": "assistant", "content": "you"}]


@pytest.fixture
def kept(tmp_path: Path) -> Transcripts:
    return Transcripts(tmp_path / "cache")


def test_what_was_said_comes_back(kept: Transcripts) -> None:
    name = new_name()
    assert kept.save(name, "tiny", SAID)
    assert kept.load(name) == (name, SAID)
    assert kept.save(name, "tiny", SAID[:1])
    assert kept.load("auto") == (name, SAID[:1])


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no modes")
def test_only_its_user_can_read_it(kept: Transcripts) -> None:
    kept.save("one", "tiny", SAID)
    assert stat.S_IMODE((kept.folder / "one.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700


def test_the_oldest_go(kept: Transcripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "MOST", 3)
    for index in range(5):
        kept.save(f"c{index}", "tiny", SAID)
        os.utime(kept.folder / f"c{index}.json", (index, index))
    kept.save("last", "tiny", SAID)
    assert kept.names() == ["last", "c4", "c3"]
    assert {path.name for path in kept.folder.iterdir()} == {"last.json", "c4.json", "c3.json"}


def test_the_user_is_told_what_there_is(kept: Transcripts) -> None:
    with pytest.raises(StoreError, match=r"there is no conversation 'auto'.*There is none"):
        kept.load("auto")
    kept.save("one", "tiny", SAID)
    with pytest.raises(StoreError, match=r"there is no conversation 'two'.*There are: 'one'"):
        kept.load("two")


@pytest.mark.parametrize("name", ["", "../one", "a/b", ".hidden", "x" * 101, 3, None, "a\n"])
def test_a_name_is_no_path(kept: Transcripts, name: Any) -> None:
    with pytest.raises(InvalidRequest, match="restore="):
        kept.load(name)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1}', b'{"version": 1, "messages": [3]}', b"\xff",
        b'{"version": 1, "messages": [{"role": "user", "content": 3}]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_damage_is_said(kept: Transcripts, content: bytes) -> None:
    kept.save("one", "tiny", SAID)
    (kept.folder / "one.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"'one' can't be used: .*is damaged"):
        kept.load("one")
    assert (kept.folder / "one.json").exists(), "nothing is deleted"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no links that matter")
def test_links_and_folders_of_others_are_refused(kept: Transcripts, tmp_path: Path) -> None:
    kept.save("one", "tiny", SAID)
    (kept.folder / "two.json").symlink_to(kept.folder / "one.json")
    with pytest.raises(StoreError, match="symbolic link"):
        kept.load("two")
    kept.folder.chmod(0o777)
    with pytest.raises(StoreError, match="written by others"):
        kept.load("one")
    assert not kept.save("three", "tiny", SAID)
    assert not (kept.folder / "three.json").exists()


def test_a_full_disk_is_said_once_and_loses_nothing(
    kept: Transcripts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept.save("one", "tiny", SAID)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rekindle_kernels.private_files.write", full)
    assert not kept.save("one", "tiny", SAID[:1])
    assert "no longer kept" in caplog.text
    assert kept.load("one")[1] == SAID


class TestViews:
    @pytest.fixture
    def session(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
        monkeypatch.setattr(live, "KEEP_SECONDS", 0.05)
        with opened(replace(CONFIG, cache_dir=str(tmp_path))) as session:
            session.chat = lambda messages, overflow=None, **options: session.generate(
                messages[-1]["content"], **options
            )  # type: ignore[method-assign]
            yield session

    def test_a_conversation_is_kept_while_it_goes_on(self, session: Session, tmp_path: Path) -> None:
        view = session.view.chat(system="Be kind", max_tokens=5)
        assert not (tmp_path / "chats").exists(), "nothing was said"
        view.send("hello")
        said = view.handle.result_sync().text
        path = tmp_path / "chats" / f"{view.name}.json"
        whole = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "hello"}]
        whole.append({"role": "assistant", "content": said})
        eventually(lambda: path.exists() and json.loads(path.read_text())["messages"] == whole)
        assert f'restore="{view.name}"' in html.unescape(view.epitaph())
        view.stop()
        view.join(60)

    def test_it_goes_on_under_its_name(self, session: Session, tmp_path: Path) -> None:
        Transcripts(tmp_path).save("one", "tiny", SAID)
        view = session.view.chat(restore="one", max_tokens=5)
        assert view.messages == SAID
        assert "&lt;b&gt;" in view.picture
        view.send("more")
        answer = view.handle.result_sync().text
        view.stop()
        view.join(60)
        more = [{"role": "user", "content": "more"}, {"role": "assistant", "content": answer}]
        assert Transcripts(tmp_path).load("one")[1] == [*SAID, *more]

    def test_the_last_answer_of_before_can_be_had_again(self, session: Session, tmp_path: Path) -> None:
        Transcripts(tmp_path).save("one", "tiny", SAID)
        view = session.view.chat(restore="one", system="New", max_tokens=5)
        view.again()
        view.handle.result_sync()
        assert view.messages == [{"role": "system", "content": "New"}, SAID[0]]
        view.edit()
        assert view.widget.value("say") == SAID[0]["content"]
        view.stop()
        view.join(60)

    def test_a_session_that_keeps_nothing_on_disk_keeps_no_conversation(self, tmp_path: Path) -> None:
        with opened(replace(CONFIG, cache_dir=str(tmp_path), disk_memory=0)) as session:
            session.chat = lambda messages, overflow=None, **options: session.generate(
                messages[-1]["content"], **options
            )  # type: ignore[method-assign]
            view = session.view.chat(max_tokens=5)
            view.send("hello")
            view.handle.result_sync()
            view.stop()
            view.join(60)
            assert view.epitaph() == ""
        assert not (tmp_path / "chats").exists()


def test_the_one_that_was_taken_up_last_is_the_last_one(kept: Transcripts) -> None:
    for index in range(3):
        kept.save(f"c{index}", "tiny", SAID)
        os.utime(kept.folder / f"c{index}.json", (index, index))
    kept.load("c1")
    assert kept.names() == ["c1", "c2", "c0"]
