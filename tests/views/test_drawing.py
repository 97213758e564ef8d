"""Types of rooms that draw nothing are drawn by a table, which is loaded at the first output."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

import rekindle
from rekindle._src.calls.tool_loop import message_table
from rekindle._src.core.activity import State
from rekindle._src.core.drawable import Drawable, Record, html_of
from rekindle._src.core.reply import Reply, ToolCall
from rekindle._src.scheduling.drafting.drafter import DraftCounts
from rekindle._src.views import drawing
from rekindle._src.views.replies import ReasoningFigures, summary


@pytest.mark.parametrize("name", drawing.DRAWINGS)
def test_every_row_names_a_type_and_the_function_that_draws_it(name: str) -> None:
    module, _, kind = name.rpartition(".")
    drawable = getattr(importlib.import_module(f"rekindle._src.{module}"), kind)
    place, _, function = drawing.DRAWINGS[name].partition(".")
    drawings = importlib.import_module(f"rekindle._src.views.{place}")
    draws = getattr(drawings, function)
    (argument,) = inspect.signature(draws).parameters.values()
    assert argument.annotation == kind, "it takes another type"
    assert drawable.__module__ == f"rekindle._src.{module}", "the type is defined elsewhere"
    assert hasattr(drawable, "_repr_html_") or drawable is State


class Plain(Drawable):
    def __repr__(self) -> str:
        return "<Plain & simple>"


class Heir(DraftCounts):
    """A class of somebody else's."""


class Other(NamedTuple):
    drafted: int


def test_a_type_without_a_drawing_is_its_repr_as_a_line() -> None:
    assert "&lt;Plain &amp; simple&gt;</div>" in Plain()._repr_html_()
    assert "Other(drafted=1)" in html_of(Other(1))


def test_a_type_is_drawn_as_the_nearest_of_its_bases() -> None:
    assert html_of(Heir(4, 2)) == html_of(DraftCounts(4, 2))
    assert ">2 of 4 accepted</td>" in html_of(DraftCounts(4, 2))
    assert "temperature" in rekindle.Sampling(temperature=0.5)._repr_html_()


def test_outputs_are_plain_strings() -> None:
    """Encoders such as msgspec, which marimo uses, take no subclass of `str`."""
    for value in (Plain(), rekindle.Sampling(), State("loading", 0.5), DraftCounts(1, 1)):
        assert type(html_of(value)) is str


def test_nothing_that_draws_is_loaded_before_the_first_output() -> None:
    code = """
import sys, rekindle
drawn = lambda: [name for name in sys.modules if name.startswith("rekindle._src.views")]
sampling = rekindle.Sampling(temperature=0.5)
assert not drawn(), drawn()
assert "temperature" in sampling._repr_html_()
assert drawn() and "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_reply_is_drawn_by_its_parts() -> None:
    calls = (ToolCall("1", "write", {"text": "<a>\nb", "n": 3, "all": None}), ToolCall("2", "time", {}))
    made = html_of(Reply("Well: <tool_call>{\n\nNo.", "Hm <hm>", calls, ("<tool_call>{",)))
    places = [made.index(text) for text in ("Hm &lt;hm&gt;", "Well: ", "&lt;tool_call&gt;{", "No.", "write", "time")]
    assert places == sorted(places)
    assert "<code" in made and "&lt;a&gt;\nb</code>" in made and ">3</code>" in made and ">null</code>" in made
    assert made.count('role="group"') == 2 and made.count('role="note"') == 1
    assert "reasoning, 2 words" in made
    assert summary("x", ReasoningFigures(1, 0.0)) == "reasoning, 1 token"
    assert summary("x", ReasoningFigures(1_200, 2.5)) == "reasoning, 2.5 s, 1,200 tokens"


def test_messages_are_drawn_with_calls_as_cards() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
    other = {"function": {"name": "day", "arguments": '{"cut": '}}  # as another library had it
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "1", "content": "x" * 500},
        {"role": "tool", "tool_call_id": "9", "content": "of no call"},
    ]
    made = message_table(messages)
    assert made.count("x" * 500) == 1 and "result, 500 characters" in made, "a long result is folded"
    assert made.index("I ask.") < made.index("Call of time") < made.index("UTC") < made.index("Call of day")
    assert "of no call" in made


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Kept(Record):
    host_memory: int
    seed: int
    queued: float
    pages: int

    _seconds = ("queued",)


def test_figures_of_a_record_have_units_and_a_seed_can_be_copied() -> None:
    made = Kept(1 << 30, 1601714712, 0.00072735399, 2048)
    for shown in ("1,024.0 MiB", "1601714712", "727 µs", "2,048"):
        assert f">{shown}</td>" in made._repr_html_()
    assert repr(made) == "Kept(host_memory=1073741824, seed=1601714712, queued=0.0007274, pages=2048)"
