"""`rekindle serve`: it listens while it loads, a signal lets answers finish, a second one cuts them."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from helpers.sessions import eventually, fake_session
from rekindle._src.cli import serve
from rekindle._src.cli.commands import serve as options
from rekindle._src.cli.main import main, parser
from rekindle._src.core.activity import Activity, State
from rekindle._src.shelf import checkpoint_model
from rekindle.errors import CheckpointError, ConfigError

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")


class Opening:
    """A model that takes a moment to open, or fails to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ready, self.gate = threading.Event(), threading.Event()
        self.gate.set()  # steps wait where it is not
        self.error, self.session = error, fake_session(step_seconds=0.01, gate=self.gate)

    def __await__(self) -> Any:
        return self._open().__await__()

    async def _open(self) -> Any:
        while not self.ready.is_set():  # noqa: ASYNC110 (another thread sets it)
            await anyio.sleep(0.005)
        if self.error is not None:
            raise self.error
        return self.session


class Client(threading.Thread):
    """What happens meanwhile in another thread; signals go to the main one."""

    def __init__(self, act: Callable[[Client], None], capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__()
        self.act, self.capsys, self.error = act, capsys, None
        self.text = ""

    def run(self) -> None:
        try:
            found: list[str] = []
            while not found:
                found = re.findall(r"http://127\.0\.0\.1:(\d+)/v1", self.capsys.readouterr().err)
                time.sleep(0.01)
            self.port = int(found[0])
            self.act(self)
        except BaseException as error:
            self.error: BaseException | None = error
            os.kill(os.getpid(), signal.SIGTERM)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            with connection.getresponse() as response:
                return response.status, response.read()

    def is_refused(self) -> bool:
        try:
            self.ask("GET", "/health")
        except OSError:
            return True
        return False

    def stream(self, tokens: int) -> threading.Thread:
        def read() -> None:
            body = {"prompt": "Hello", "max_tokens": tokens, "stream": True}
            self.text = self.ask("POST", "/v1/completions", body)[1].decode()

        thread = threading.Thread(target=read)
        thread.start()
        return thread


def run(
    opening: Opening,
    act: Callable[[Client], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
) -> int:
    monkeypatch.setattr(serve, "open", lambda model, **given: opening, raising=False)
    client = Client(act, capsys)
    client.start()
    status = main(["serve", "tiny", "--port", "0", *options])
    client.join()
    opening.session.close()
    if client.error is not None:
        raise client.error
    return status


def test_it_listens_while_it_loads_and_a_signal_lets_answers_finish(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Opening()

    def act(client: Client) -> None:
        assert client.ask("GET", "/health")[0] == 503
        opening.ready.set()
        eventually(lambda: client.ask("GET", "/health")[0] == 200)
        opening.gate.clear()
        reader = client.stream(100)
        eventually(lambda: opening.session.stats().running == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(client.is_refused)
        opening.gate.set()
        reader.join()
        assert client.text.endswith("data: [DONE]\n\n") and client.text.count("data: ") == 101

    assert run(opening, act, capsys, monkeypatch) == 0
    assert opening.session.closed
    lines = [entry.getMessage() for entry in caplog.records if entry.name == "rekindle.server"]
    assert lines[0] == "shutting down: waiting for 1 answer, at most 30 s"
    assert re.fullmatch(r"shut down after \d+\.\d s", lines[1]) and len(lines) == 2


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="no alarms here")
def test_an_alarm_that_another_handler_set_at_the_signal_does_not_end_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's handler sets one of three seconds: fleets that let answers finish for longer were aborted."""
    opening = Opening()
    left: list[int] = []

    def act(client: Client) -> None:
        opening.ready.set()
        eventually(lambda: client.ask("GET", "/health")[0] == 200)
        opening.gate.clear()
        reader = client.stream(100)
        eventually(lambda: opening.session.stats().running == 1)
        opening.gate.set()
        signal.alarm(60)
        os.kill(os.getpid(), signal.SIGTERM)
        reader.join()
        left.append(signal.alarm(0))

    assert run(opening, act, capsys, monkeypatch) == 0
    assert left == [0]


def test_a_second_signal_cuts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Opening()
    opening.ready.set()

    def act(client: Client) -> None:
        eventually(lambda: client.ask("GET", "/health")[0] == 200)
        reader = client.stream(490)
        eventually(lambda: opening.session.stats().running == 1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        assert reader.is_alive()
        os.kill(os.getpid(), signal.SIGTERM)
        reader.join(60)
        assert not reader.is_alive()
        assert client.text.endswith("data: [DONE]\n\n") and '"unavailable"' in client.text

    assert run(opening, act, capsys, monkeypatch, "--drain", "60") == 0
    assert "waiting for 1 answer, at most 60 s" in caplog.text and "answers that had not ended were cut" in caplog.text


def test_a_fleet_loads_the_adapters_before_it_is_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, loaded = Opening(), list[tuple[str, str]]()
    opening.ready.set()

    async def load(name: str, folder: str) -> None:
        loaded.append((name, folder))

    def act(client: Client) -> None:
        eventually(lambda: client.ask("GET", "/health")[0] == 200)
        assert loaded == [("a", "one"), ("b", "two")]
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(opening.session, "load_adapter", load)
    monkeypatch.setattr(serve, "fleet", lambda model, **given: opening)
    options = ("--replicas", "2", "--adapter", "a=one", "--adapter", "b=two")
    assert run(opening, act, capsys, monkeypatch, *options) == 0


def test_a_model_that_can_not_be_opened_ends_it_and_says_so_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Opening(CheckpointError("the folder is empty. Download it again"))
    assert run(opening, lambda client: opening.ready.set(), capsys, monkeypatch) == 1
    assert (capsys.readouterr().err + caplog.text).count("the folder is empty") == 1


def test_without_a_terminal_the_log_says_what_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Opening()
    opening.ready.set()

    def act(client: Client) -> None:
        eventually(lambda: client.ask("GET", "/health")[0] == 200)
        with Activity(lambda: State("compiling program r16"), stream=io.StringIO(), at_once=True):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(opening, act, capsys, monkeypatch) == 0
    assert [entry.getMessage() for entry in caplog.records if entry.name == "rekindle.progress"] == [
        "compiling program r16 (0 s)"
    ]


def test_a_line_of_the_log_is_written_once_whatever_is_imported_later(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax, which is imported once pages are saved, adds a handler to the root of all loggers."""
    root, progress = logging.getLogger(), logging.getLogger("rekindle.progress")
    for logger in (root, logging.getLogger("rekindle"), progress):  # earlier tests may have left some
        monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(progress, "propagate", True)
    with serve.log_lines():
        progress.info("before")
        root.addHandler(logging.StreamHandler())
        progress.info("after")
    progress.warning("not the server's")
    lines = capsys.readouterr().err
    assert [lines.count(text) for text in ("before", "after", "not the server's")] == [1, 1, 1]
    assert not progress.handlers and progress.propagate


@pytest.mark.parametrize(
    "given",
    [
        "--drain=inf",
        "--drain=nan",
        "--drain=-1",
        "--drain=1e9",
        "--cors-origin=foo",
        "--cors-origin=https://a.example/",
        "--max-connections=0",
        "--allowed-host=a.example:80",
    ],
)
def test_impossible_options_are_refused_before_a_model_is_loaded(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "open", lambda model, **options: Opening())
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", given])
    said = capsys.readouterr().err
    option, _, value = given.partition("=")
    assert ended.value.code == 2 and f"{option} {value[:1]}" in said


def test_names_of_models(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert options.models_by_name(["tiny", str(tmp_path / "my-model"), "org/name"], []) == {
        "tiny": "tiny", "my-model": str(tmp_path / "my-model"), "org/name": "org/name",
    }  # fmt: skip
    assert options.models_by_name(["tiny", "tiny"], ["a", "b"]) == {"a": "tiny", "b": "tiny"}
    with pytest.raises(ConfigError, match="two models"):
        options.models_by_name(["tiny", "tiny"], [])
    with pytest.raises(ConfigError, match="more names"):
        options.models_by_name(["tiny"], ["a", "b"])


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# for tests\nfirst\n\n second \n")
    monkeypatch.setenv("REKINDLE_API_KEY", "fourth")
    given = parser().parse_args(["serve", "--api-key", "zero", "--api-key-file", str(file)])
    assert options.api_keys(given) == ["zero", "first", "second", "fourth"]
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        options.api_keys(given)


def test_the_dashboard_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "rekindle"


def test_models_are_loaded_at_their_first_request_and_closed_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Any] = []
    given: list[dict[str, Any]] = []

    async def open_fake(model: str, **options: Any) -> Any:
        given.append(options)
        opened.append(fake_session())
        return opened[-1]

    monkeypatch.setattr(checkpoint_model, "open", open_fake)
    monkeypatch.setattr(checkpoint_model.CheckpointModel, "plan", lambda self, memory: 1 << 20)

    def act(client: Client) -> None:
        def states() -> list[str]:
            return [entry["status"]["value"] for entry in json.loads(client.ask("GET", "/models")[1])["data"]]

        assert states() == ["unloaded"] * 3 and not opened
        assert client.ask("GET", "/health")[0] == 200
        for name in ("first", "second"):
            body = {"model": name, "prompt": "Hello", "max_tokens": 4}
            assert client.ask("POST", "/v1/completions", body)[0] == 200
        assert states() == ["unloaded", "loaded", "unloaded"], "these fakes can't sleep, so the first was closed"
        os.kill(os.getpid(), signal.SIGTERM)

    client = Client(act, capsys)
    client.start()
    command = ["serve", "tiny", "tiny", "tiny", "--name", "first", "--name", "second", "--name", "third", "--port", "0"]
    loading = ["--max-loaded", "1", "--models-memory", "64", "--idle-unload", "600"]
    assert main([*command, *loading, "--max-requests", "3"]) == 0
    client.join()
    if client.error is not None:
        raise client.error
    assert len(opened) == 2 and all(session.closed for session in opened)
    assert given[1]["max_requests"] == 3 and given[1]["host_memory"] == (1 << 30) // 3
    assert "'first' can't sleep, so it is unloaded" in caplog.text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--max-loaded", "0"), ("--models-memory", "0"), ("--idle-unload", "0"), ("--idle-unload", "nan"),
     ("--max-loaded", "1 --replicas 2"), ("--idle-unload", "60 --prefill 1 --decode 1")],
)  # fmt: skip
def test_options_of_loading_are_checked(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["serve", "tiny", option, *value.split()])
    assert ended.value.code == 2 and f"{option} {value.split()[0]}" in capsys.readouterr().err
