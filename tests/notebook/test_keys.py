"""The protocol of a panel's messages: no press overtakes the keys before it, whatever the connection's delays."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rekindle._src.notebook import live
from rekindle._src.notebook.fields import merged
from rekindle._src.notebook.live import Panel, button, field, slider

STATIC = Path(live.__file__).parent / "static"
WORDS = ("yes", "Hello", "the last one", "x", "no no no")


def panel(heard: list[Any]) -> Panel:
    controls = [button("send", "Send"), field("say", "Say"), slider("heat", "heat", low=0, high=2, step=0.1)]
    made = Panel(controls, lambda event, name, value: heard.append((event, name, dict(made.values))))
    return made


def test_a_press_brings_the_keys_before_it() -> None:
    """The view sees the contents of all fields when it hears the press."""
    heard: list[Any] = []
    made = panel(heard)
    fields = {"say": ["Hello", ""], "heat": ["0.3", "1"]}
    made.hear({"event": "press", "name": "say:enter", "page": "p", "number": 1, "fields": fields})
    assert heard == [("press", "say:enter", {"say": "Hello", "heat": "0.3"})]
    assert made.heard == ["p", 1, {"say": "Hello", "heat": "0.3"}]


@pytest.mark.parametrize("event", ["press", "act", "token", "file", "typed", "ping"])
def test_every_message_may_bring_contents(event: str) -> None:
    made = panel([])
    made.hear({"event": event, "name": "", "value": 0, "page": "p", "number": 7, "fields": {"say": ["a", ""]}})
    assert made.value("say") == "a" and made.heard[:2] == ["p", 7]


def test_keys_after_a_press_are_of_the_next_message() -> None:
    """They were typed before the page knew that its field was emptied, so they are based on the sent text."""
    made = panel([])
    made.hear({"event": "press", "name": "say:enter", "page": "p", "number": 1, "fields": {"say": ["Hello", ""]}})
    made.fill("say", "")
    made.hear({"event": "press", "name": "say:enter", "page": "p", "number": 2, "fields": {}})
    assert made.value("say") == "", "Enter again brings nothing again"
    made.hear({"event": "typed", "page": "p", "number": 3, "fields": {"say": ["HelloAnd", "Hello"]}})
    assert made.value("say") == "And" and made.heard == ["p", 3, {"say": "And"}]


def test_numbers_are_not_put_together() -> None:
    made = panel([])
    made.fill("heat", "1.0")
    made.hear({"event": "typed", "page": "p", "number": 1, "fields": {"heat": ["0.5", "0"]}})
    assert made.value("heat") == "0.5"


@pytest.mark.parametrize(
    ("text", "base", "now", "expected"),
    [
        ("Hello", "Hel", "Hel", "Hello"),
        ("HelloAnd", "Hello", "", "And"),
        ("ab", "a", "x", "xb"),
        ("b", "a", "x", "b"),
        ("", "a", "", ""),
        ("ab", None, "x", "ab"),
    ],
)
def test_texts_are_merged(text: str, base: str | None, now: str, expected: str) -> None:
    assert merged(text, base, now) == expected


OTHER_FORMS = (
    None, [], "say", {1: 2}, {"say": "a"}, {"say": ["a"]}, {"say": [1, ""]}, {"send": ["a", ""]}, {"other": ["a", ""]},
)  # fmt: skip


@pytest.mark.parametrize("fields", OTHER_FORMS)
def test_contents_of_another_form_are_dropped(fields: Any) -> None:
    heard: list[Any] = []
    made = panel(heard)
    made.hear({"event": "press", "name": "send", "number": "x", "fields": fields})
    assert made.values == {} and [event for event, *_ in heard] == ["press"]


def played(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node runs the page's side")
    command = [node, str(Path(__file__).with_name("keys.js")), (STATIC / "fields.js").read_text()]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


def typing(texts: list[str], pause: Any, *, start: int = 0) -> list[list[Any]]:
    """Keys of several messages, each ended by Enter, with their times."""
    keys: list[list[Any]] = []
    for text in texts:
        for key in (*text, "Enter"):
            start += pause()
            keys.append([start, key])
    return keys


def test_each_message_is_sent_whole() -> None:
    """Even where the next one is typed before the page has heard that the last one was sent."""
    paces = [(key, delay) for key in (1, 15, 40, 120) for delay in (0, 10, 80, 300)]  # milliseconds
    cases = [
        {"keys": typing(list(WORDS), lambda key=key: key), "there": [delay], "back": [delay], "refuses": []}
        for key, delay in paces
    ]
    for pace, result in zip(paces, played(cases), strict=True):
        assert result["sent"] == list(WORDS) and result["shown"] == result["kernel"] == "", pace
        assert result["most"] <= 1, "between presses one message is underway"


def test_whatever_the_delays_each_message_is_sent_whole() -> None:
    chance = random.Random(7)
    cases = []
    for _ in range(400):
        delays = [[chance.choice((0, 1, 5, 80, 400)) for _ in range(chance.randint(1, 9))] for _ in range(2)]
        pause = chance.choice((lambda: chance.randint(0, 3), lambda: chance.randint(0, 200)))
        keys = typing(list(WORDS), pause)
        keys.append([keys[-1][0] + 1, "a"])
        cases.append({"keys": keys, "there": delays[0], "back": delays[1], "refuses": []})
    for case, result in zip(cases, played(cases), strict=True):
        assert result["sent"] == list(WORDS), case
        assert result["shown"] == result["kernel"] == "a", case


def test_enter_twice_sends_once() -> None:
    """A reader who sees nothing happen presses again, while the kernel is busy."""
    keys = [*typing(["Hello"], lambda: 10), [70, "Enter"], [80, "Enter"]]
    (result,) = played([{"keys": keys, "there": [500], "back": [500], "refuses": []}])
    assert result["sent"] == ["Hello"] and result["shown"] == ""


def test_keys_that_were_taken_back_are_not_sent() -> None:
    keys = [[0, "a"], [1, "b"], [2, "Backspace"], [3, "Enter"], [4, "c"], [5, "Backspace"]]
    (result,) = played([{"keys": keys, "there": [50], "back": [50], "refuses": []}])
    assert result["sent"] == ["a"] and result["shown"] == result["kernel"] == ""


def test_a_message_that_is_refused_stays_in_its_field() -> None:
    keys = [*typing(["Hello"], lambda: 10), [70, "!"], [400, "Enter"]]
    (result,) = played([{"keys": keys, "there": [50], "back": [50], "refuses": [0]}])
    assert result["sent"] == ["Hello!"] and result["shown"] == ""
