"""`response_template`: what transformers reads of a reply, at every cut, with the end of the prompt before it."""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.replies import TOOLS, said
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.replies import Reply, ReplyFormat, ReplyPlan, fold
from rekindle._src.text.replies.response_template import PROMPT_STEPS, ResponseTemplate, TemplateError, _put
from rekindle.errors import ConfigError

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THINKING = {"open": "<think>", "close": "</think>"}
TEMPLATES: dict[str, dict[str, Any]] = {
    "json": {
        "version": 1,
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": _THINKING,
            "content": {"close": ["<|im_end|>", "<|endoftext|>"]},
            "tool_calls": {
                "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    },
    "tags": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": _THINKING,
            "content": {},
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>", "close_pattern": r"</tool_call>\s*",
                "repeats": True, "content": "xml-inline", "transform": _CALL,
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
            },
        },
    },
    "gemma": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
                "content": "json", "transform": _CALL,
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            },
        },
    },
    "channels": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
            "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
            "tool_calls": {
                "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                "close": "<|call|>", "repeats": True, "content": "json", "transform": _CALL,
            },
        },
    },
    "list": {
        "start_anchor_pattern": r"<\|bot\|>\s*",
        "fields": {
            "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "content": {"open": "<say>\n", "close_pattern": r"\n?</say>"},
            "tool_calls": {
                "open": "<do>", "close": "</do>", "content": "json", "transform_each": True,
                "transform": {"function": {"name": "{tool.name}", "arguments": "{tool.given}"}},
            },
        },
    },
    "lines": {
        "start_anchor": "<bot>",
        "fields": {
            "content": {"content_args": {"strip": False}},
            "tool_calls": {
                "open_pattern": r"\[(?P<name>\w+)\]", "close": "[/]", "repeats": True, "content": "kv-lines",
                "content_args": {"kv_sep": "=", "value_parser": {"name": "int"}}, "transform": _CALL,
            },
        },
    },
}  # fmt: skip
PARIS, ROME = ("weather", {"city": "Paris"}), ("weather", {"city": "Rome", "days": 3})
_P, _R = json.dumps(PARIS[1]), json.dumps(ROME[1])
# By template and prompt: a reply, its content, its reasoning and its calls.
REPLIES: list[tuple[str, str, str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("json", "", "<think>\nHm.\n</think>\n\nHi!<|im_end|>", "Hi!", "Hm.", []),
    ("json", "", f'<tool_call>{{"name": "weather", "arguments": {_R}}}</tool_call>', "", "", [ROME]),
    ("json", "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n<think>", "Hm.</think>Hi", "Hi", "Hm.", []),
    ("tags", "", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
     "</parameter>\n</function>\n</tool_call>\n", "", "", [ROME]),
    ("gemma", "", '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>',
     "", "Hm.", [ROME]),
    ("gemma", "<|turn>model\n<|tool_call>…<tool_response|>", "Sun.<turn|>", "Sun.", "", []),
    ("channels", "<|start|>assistant", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
     f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_P}<|call|>", "", "Hm.", [PARIS]),
    ("channels", "", "<|channel|>final<|message|>2", "2", "", []),
    ("list", "", "Hm.\n</think>\n\n<say>\nHi\n</say>\n", "Hi", "Hm.", []),
    ("list", "<|bot|> ", '<think> Hm.</think><do>[{"tool": {"name": "time", "given": {}}}]</do>', "", "<think> Hm.",
     [("time", {})]),
    ("lines", "", "[weather]\ndays = 3\n[/]", "", "", [("weather", {"days": 3})]),
]  # fmt: skip
MARKS = sorted({mark for source in TEMPLATES.values() for mark in ResponseTemplate.load(source).texts})


def read(name: str, pieces: Sequence[str], prompt: str = "", tools: Sequence[Any] = TOOLS) -> Reply:
    return read_by(TEMPLATES[name], pieces, prompt, tools)


def read_by(source: dict[str, Any], pieces: Sequence[str], prompt: str = "", tools: Sequence[Any] = TOOLS) -> Reply:
    format = ReplyFormat(template=ResponseTemplate.load(source))
    scanner = ReplyPlan(format, tuple(tools)).scanner(prompt, b"", 0)
    return fold([*(event for piece in pieces for event in scanner.feed(piece)), *scanner.finish()])


@pytest.mark.parametrize("case", REPLIES, ids=lambda case: f"{case[0]}: {case[2][:40]!r}")
def test_replies_are_read_as_transformers_reads_them(case: tuple[Any, ...]) -> None:
    name, prompt, text, content, reasoning, calls = case
    assert said(read(name, [text], prompt)) == (content, reasoning, calls)
    for at in range(len(text) + 1):
        assert said(read(name, [text[:at], text[at:]], prompt)) == (content, reasoning, calls), at
    assert said(read(name, list(text), prompt)) == (content, reasoning, calls)
    oracle = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers has no response_template")
    parsed = oracle.parse_response(text, TEMPLATES[name], prefix=prompt)
    functions = [call["function"] for call in parsed.get("tool_calls", ())]
    assert parsed.get("content", "") == content
    assert parsed.get("thinking", parsed.get("reasoning_content", "")) == reasoning
    assert [(one["name"], one["arguments"]) for one in functions] == calls


@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    parts=st.lists(
        st.one_of(
            st.sampled_from([text for _, _, text, *_ in REPLIES]),
            st.sampled_from(MARKS),
            st.text(max_size=5),
        ),
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)  # fmt: skip
def test_a_reply_is_the_same_in_whatever_pieces(name: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    whole = said(read(name, [text]))
    assert said(read(name, [text[start:end] for start, end in itertools.pairwise(places)])) == whole
    assert said(read(name, list(text))) == whole


def test_what_transformers_loses_is_kept() -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {_P}}}</tool_call>'
    both = said(read("json", [f"One.\n{call}\nTwo."]))[::2]
    assert both == ("One.\n\nTwo.", [PARIS]), "it keeps the last text alone"
    cut = '<tool_call>{"name": "weather", "arguments": {"ci'
    assert said(read("json", [cut])) == (cut, "", []), "it raises an error"
    assert said(read("channels", ["Hi"])) == ("Hi", "", []), "text is dropped where no field opens"
    assert said(read("json", [call], tools=[])) == (call, "", []), "without tools there are no calls"


def in_pieces(source: dict[str, Any], text: str) -> list[tuple[str, str, Any]]:
    """What is read of a text as a whole, and of its characters one by one."""
    return [said(read_by(source, pieces)) for pieces in ([text], list(text))]


def test_a_longer_mark_that_begins_earlier_counts_in_pieces_too() -> None:
    thinking = {"open": "<think>", "close": ["</think>", "\n\n</think>\n\n"], "content_args": {"strip": False}}
    source = broken("fields", "thinking", value=thinking)
    assert in_pieces(source, "<think>abc\n\n</think>\n\nhello") == [("hello", "abc", [])] * 2
    assert in_pieces(source, "<think>abc\n\n</think>\nhello") == [("hello", "abc\n\n", [])] * 2


def test_whitespace_stays_with_its_own_field() -> None:
    assert in_pieces(TEMPLATES["json"], "a \n<think>x</think>b") == [("a \nb", "x", [])] * 2
    assert in_pieces(TEMPLATES["json"], "<think>x \n</think>b") == [("b", "x", [])] * 2


def test_text_after_a_call_that_is_none_keeps_its_space() -> None:
    text = "<tool_call>bad</tool_call> more text"
    assert in_pieces(TEMPLATES["json"], text) == [(text, "", [])] * 2
    assert in_pieces(TEMPLATES["json"], f"a \n{text}") == [(f"a \n{text}", "", [])] * 2


@pytest.mark.parametrize("closing", ["$", r"\Z", "x*", "^", r"\A", "(?:)"])
@pytest.mark.parametrize("opening", [None, "^", "$", "x*"])
def test_an_empty_match_ends_nothing_and_is_found_once(opening: str | None, closing: str) -> None:
    """A search for the one at the end of the text never ended; two at its beginning took turns for ever."""
    implicit = {} if opening else {"close_pattern": closing}
    fields = {"thinking": {"open_pattern": opening, "close_pattern": closing}} if opening else {}
    source = {"start_anchor": "@", "fields": {**fields, "content": implicit}}
    for text in ("", "hello", "a\n", "xxhi"):
        either = in_pieces(source, text)
        assert either[0] == either[1]
        content, reasoning, _ = either[0]
        assert (content + reasoning).replace("x", "") == text.strip().replace("x", "")
        assert not (content and reasoning)


def test_types_follow_the_tools_schema() -> None:
    text = "<tool_call><function=weather><parameter=city>Rome</parameter><parameter=days>three</parameter></tool_call>"
    assert said(read("tags", [text]))[2] == [("weather", {"city": "Rome", "days": "three"})]
    loose = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": "3"}}</tool_call>'
    assert said(read("json", [loose]))[2] == [ROME]


@pytest.mark.parametrize("anchor", ["start_anchor", "start_anchor_pattern"])
def test_a_prompt_is_read_from_its_last_anchor_near_the_end(anchor: str) -> None:
    template = ResponseTemplate.load({anchor: "<bot>", "fields": {"content": {}}})
    for prompt, after in (
        ("", ""), ("<think>", ""), ("<bot>1<bot>2", "2"), ("<bot>" + "x" * 30_000, "x" * 30_000),
        ("<bot>" + "x" * 40_000, ""),
    ):  # fmt: skip
        assert template.after_anchor(prompt) == after, prompt[:20]
    assert said(read("json", ["Hm.</think>Hi"], "user: <think>")) == ("Hm.</think>Hi", "", []), "another one's text"


def test_the_end_of_a_prompt_is_as_long_as_its_patterns_read_in_their_steps() -> None:
    fields = {"content": {}, "tool_calls": {"open_pattern": "(?:a?){100}b", "close": "c"}}
    template = ResponseTemplate.load({"start_anchor": "<bot>", "fields": fields})
    assert template.steps == 202 and 202 * 2_590 < PROMPT_STEPS < 202 * 2_600
    assert template.after_anchor("<bot>" + "x" * 2_580) == "x" * 2_580
    assert template.after_anchor("<bot>" + "x" * 2_600) == ""
    slow = ResponseTemplate.load({"start_anchor_pattern": "a.*b|a", "fields": {"content": {}}})
    assert slow.after_anchor("a" * 100) == ""
    assert slow.after_anchor("a" * 100 + "!") == "!"
    assert slow.after_anchor("a" * 2_000 + "!") == "", "each search reads the whole text"


def broken(*path: str, value: Any, name: str = "json") -> dict[str, Any]:
    source = copy.deepcopy(TEMPLATES[name])
    inner = source
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return source


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ([], "it is no object"),
        (broken("version", value=2), "version 2 is not read"),
        (broken("extra", value=1), "the key 'extra' is not read"),
        (broken("fields", value={}), "fields: there are 0"),
        (broken("start_anchor", value=""), "start_anchor: a text has 1 to"),
        (broken("start_anchor", value=None), "start_anchor is missing"),
        (broken("fields", "thinking", "open_pattern", value="x"), "both open and open_pattern"),
        (broken("fields", "content", "open_pattern", value="(?=a)"), "pattern '(?=a)' has '(?=a', an assertion"),
        (broken("fields", "tool_calls", "close_pattern", value="(?:a?b){200}", name="tags"), "takes more than 256"),
        (
            {
                "start_anchor_pattern": "a{150}",
                "fields": {
                    "content": {"open_pattern": "b{250}", "close": "x"},
                    "thinking": {"open": "x", "close_pattern": "c{150}"},
                },
            },
            "its patterns take 553 steps together",
        ),
        (broken("fields", "content", "open_pattern", value="(?P<x>a)"), "groups, and there is no transform"),
        (broken("fields", "content", "content", value="yaml"), "content: 'yaml' is none of text"),
        (broken("fields", "content", "content_args", value={"trim": 1}), "content_args: the key 'trim' is not read"),
        (broken("fields", "content", "join", value="x"), "join: it has to be a text"),
        (broken("fields", "thinking", value={}), "more than one has neither open nor open_pattern"),
        (
            broken("fields", "tool_calls", "content_args", value={"string_delims": [["<", ">"]] * 5}),
            "at most 4 pairs",
        ),
        (broken("fields", "tool_calls", "transform", value="{nobody}"), "'{nobody}' is no group"),
        (broken("fields", "tool_calls", "transform", value="a {content}"), "has a variable within other text"),
        (broken("fields", "tool_calls", "transform", value=[[]] * 300), "more than 256 values"),
        (broken("fields", "tool_calls", "content_args", "tag_pattern", value="a", name="tags"), "no groups named key"),
    ],
)
def test_a_template_that_is_not_understood_is_refused_by_name(source: Any, problem: str) -> None:
    with pytest.raises(TemplateError) as refused:
        ResponseTemplate.load(source)
    assert problem in str(refused.value)


def test_values_of_one_key_are_gathered_in_linear_time() -> None:
    """A list that was copied for each value of its key took 9 s for 80,000 of them."""
    call = {
        "open": "<", "close": ">", "content": "xml-inline",
        "content_args": {"tag_pattern": "(?P<key>a)(?P<value>)", "merge_duplicates": True},
        "transform": {"function": {"name": "f", "arguments": "{content}"}},
    }  # fmt: skip
    (field,) = ResponseTemplate.load({"start_anchor": "@", "fields": {"tool_calls": call}}).fields
    (value,) = field.values("aaa", {})
    assert value["function"]["arguments"] == {"a": ["", "", ""]}
    values: dict[str, Any] = {"a": ["", ""]}
    before = values["a"]
    _put(values, "a", "b", merge=True)
    assert values["a"] is before and before == ["", "", "b"], "it grows in its place"
    _put(values, "a", "c", merge=False)
    assert values == {"a": "c"}


JINJA = "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


def checkpoint(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": JINJA, **config}))
    return folder


def test_a_checkpoint_s_own_template_comes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = ChatTemplate.load(checkpoint(tmp_path, response_template=TEMPLATES["gemma"]))
    assert chat is not None
    format = chat.reply_format(tools=True)
    assert format.template is not None and {"<|tool_call>", "<channel|>", "<turn|>"} <= format.markers(tools=True)
    assert chat.reply_format("{{ messages }}<tool_call>", tools=True).template is None, "another template's own replies"
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        ({"response_template": {"version": 9}}, ["response_template", "chat template"]),
        ({}, ["chat template"]),
        ({"chat_template": JINJA + "<tool_call>"}, []),
        ({"chat_template": "{% if tools %}{{ raise_exception('not trained') }}{% endif %}{{ messages }}"}, []),
    ],
)
def test_what_is_not_understood_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], problems: list[str]
) -> None:
    chat = ChatTemplate.load(checkpoint(tmp_path, **config))
    assert chat is not None
    with caplog.at_level(logging.WARNING, "rekindle.chats"):
        formats = [chat.reply_format(tools=True) for _ in range(3)]
    assert all(format.template is None and format.calls is not None for format in formats)
    assert [record.message.split(": the ")[1].split(" is not")[0] for record in caplog.records] == problems
    assert all("reply_format=" in record.message for record in caplog.records if "chat template is" in record.message)


def test_a_format_by_name(tmp_path: Path) -> None:
    chat = ChatTemplate.load(checkpoint(tmp_path, response_template=TEMPLATES["gemma"]))
    assert chat is not None
    chat.replies_are("kimi_k2")
    assert chat.reply_format(tools=True) == ReplyFormat.of_family("kimi_k2")
    with pytest.raises(ConfigError) as refused:
        chat.replies_are("kimi")
    assert refused.value.field == "reply_format" and "'auto', or one of: apertus, cohere" in str(refused.value)
