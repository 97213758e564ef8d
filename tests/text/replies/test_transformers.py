"""Replies as in transformers' own tests of `response_template`, and by the templates that its `serve` falls back to.

Each case has the shape of one of transformers' tests. Its result is stated here, and compared with transformers' own
where that is installed. `DIFFERENCES` has those that are read in another way, with the reason.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.replies import said
from rekindle._src.text.replies import ReplyFormat, ReplyPlan, fold
from rekindle._src.text.replies.response_template import ResponseTemplate, TemplateError
from text.replies.test_response_template import TEMPLATES

Said = tuple[str, str, list[tuple[str, dict[str, Any]]]]
TURN = "<|im_start|>assistant\n"
EARLIER = f"<|im_start|>user\nA<|im_end|>\n{TURN}<think>Old.</think>B<|im_end|>\n<|im_start|>user\nC<|im_end|>\n{TURN}"


def template(**fields: Any) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>", "fields": fields}


def _block(kind: str, **more: Any) -> dict[str, Any]:
    pattern = rf"(?:<\|message_model\|>)?[^<]*<\|content_{kind}\|>"
    return {"open_pattern": pattern, "close": "<|end_message|>", "repeats": True, **more}


_TEXT = {"join": "", "content_args": {"strip": False}}
_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}}
BLOCKS = {
    **template(
        thinking=_block("thinking", **_TEXT),
        content=_block("text", **_TEXT),
        tool_calls=_block("invoke_tool_json", content="json", transform=_CALL),
    ),
    "start_anchor": "<|message_model|>",
}
ACTIONS = template(
    thinking={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
    content={"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
    tool_calls={
        "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
    },
)  # fmt: skip
JOINED = template(
    thinking={"open": "<think>", "close": "</think>", "repeats": True, "join": " "},
    content={"repeats": True, "join": " "},
)
EITHER = template(content={"open": ["<a>", "<bb>"], "close": ["</a>", "</bb>"]})
TAGS = copy.deepcopy(TEMPLATES["tags"])  # without a parser of values: a value is a text unless a schema says more
TAGS["fields"]["tool_calls"]["content_args"].pop("value_parser")
MERGED = copy.deepcopy(TAGS)
MERGED["fields"]["tool_calls"]["content_args"]["merge_duplicates"] = True
LINES = copy.deepcopy(TAGS)
LINES["fields"]["tool_calls"] |= {"content": "kv-lines", "content_args": {}}
PYTHON = template(
    content={},
    tool_calls={
        "open": "<|tool_call_start|>", "close_pattern": r"<\|tool_call_end\|>(?P<status>\w*)",
        "content": "python-call-list", "transform_each": True,
        "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}, "status": "{status}"},
    },
)  # fmt: skip


def alarm(**values: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=set_alarm>\n{tags}</function>\n</tool_call>"


def tools(**properties: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "set_alarm", "parameters": parameters}}]


ALARM = tools(hour={"type": "integer"}, enabled={"type": "boolean"}, label={"type": "string"})
TWICE = alarm(hour="7").replace("</function>", "<parameter=hour>\n9\n</parameter>\n</function>")


class Case(NamedTuple):
    """A template, a reply with the prompt before it and the tools, and its parts."""

    template: dict[str, Any]
    text: str
    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    prompt: str = ""
    tools: list[dict[str, Any]] = []  # noqa: RUF012 (nobody changes it)

    @property
    def said(self) -> Said:
        return self.content, self.reasoning, list(self.calls)


def typed_cases() -> Iterator[Case]:
    """Values of tags by the types that a schema names; the text itself where none fits."""
    whole, numbers = {"type": "integer"}, {"type": "number"}
    either = {"anyOf": [{"type": "string"}, {"type": "object"}]}
    for text, schema, value in (
        ("5", {}, "5"), ("5", whole, 5), ("3.0", whole, 3), ("soon", whole, "soon"), ("1.50", numbers, 1.5),
        ("NaN", numbers, "NaN"), ("1e999", numbers, "1e999"), ("true", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False), ("1", {"type": "boolean"}, True), ("0", {"type": "boolean"}, False),
        ("maybe", {"type": "boolean"}, "maybe"), ('["a"]', {"type": "array"}, ["a"]),
        ("[1]", {"type": "object"}, "[1]"), ('{"a": 1}', {"type": "array"}, '{"a": 1}'),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("null", {"type": ["integer", "null"]}, None), ("null", {**whole, "nullable": True}, None),
        ("5", {"anyOf": [whole, {"type": "null"}]}, 5), ("5", {"type": ["integer", "string"]}, 5),
        ("1.50", either, "1.50"), ('{"a": 1}', either, {"a": 1}), ("5", {"type": "string"}, "5"),
    ):  # fmt: skip
        yield Case(TAGS, alarm(hour=text), calls=[("set_alarm", {"hour": value})], tools=tools(hour=schema))


CASES = [
    Case(ACTIONS, '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": '
         '"set_alarm", "parameters": {"hour": 7, "enabled": true}}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>', "", "Hm.",
         [("set_alarm", {"hour": 7, "enabled": True})], "", ALARM),
    Case(TEMPLATES["list"], '<think> Hm.\n</think>\n\n<do>[{"tool": {"name": "f", "given": {}}}]</do>\n</s>', "",
         "<think> Hm.", [("f", {})]),
    Case(TEMPLATES["list"], "Hm.\n\nSo.\n</think>\n\n<say>\nHi there!\n</say>\n</s>", "Hi there!", "Hm.\n\nSo."),
    Case(TEMPLATES["channels"], "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.f <|constrain|>json<|message|>{\n  "a": "b"\n}', "", "Hm.", [("f", {"a": "b"})]),
    Case(TEMPLATES["channels"], "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
         "2", "2", "Hm."),
    Case(TEMPLATES["json"], '<think>\nHm.\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": "It\'s"}}'
         "</tool_call>", "", "Hm.", [("f", {"a": "It's"})]),
    Case(TEMPLATES["json"], "<think>\nHm.</think>\nGravity!", "Gravity!", "Hm."),
    Case(TEMPLATES["tags"], '<tool_call>\n<function=f>\n<parameter=a>\n[{"b": "c"}]\n</parameter>\n<parameter=d>\ne\n'
         "</parameter>\n</function>\n</tool_call>", "", "", [("f", {"a": [{"b": "c"}], "d": "e"})]),
    Case(TEMPLATES["gemma"], "<|channel>thought\nHm.<channel|><|tool_call>call:f{yes:true,list:[<|\"|>a<|\"|>],no:null,"
         'one:1,text:<|"|>a, b<|"|>,inner:{c:<|"|>d<|"|>}}<tool_call|><|tool_response>', "", "Hm.",
         [("f", {"yes": True, "list": ["a"], "no": None, "one": 1, "text": "a, b", "inner": {"c": "d"}})]),
    Case(BLOCKS, "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_thinking|> So.<|end_message|>"
         "<|message_model|><|content_text|>Now.<|end_message|><|message_model|>f<|content_invoke_tool_json|>"
         '{"name":"f","args":{"a":{"b":7}}}<|end_message|><|content_model_end_sampling|>', "Now.", "Hm. So.",
         [("f", {"a": {"b": 7}})], "<|message_system|><|content_text|>x<|end_message|><|message_model|>"),
    Case(JOINED, "<think>first</think>middle<think>second</think>done", "middle done", "first second"),
    Case(JOINED, "<think>only</think>", "", "only"),
    Case(EITHER, "<a>hi</a>", "hi"), Case(EITHER, "<bb>hi</bb>", "hi"), Case(EITHER, "<a>hi</bb>", "hi"),
    Case(template(content={"open": "<x>", "close": ["END", "ENDX"]}), "<x>hiEND more", "hi"),
    Case(template(content={"open": "<x>"}), "<x>to the end", "to the end"),
    Case(template(content={"close_pattern": r"\Z"}), "Hello!", "Hello!", prompt="A<|assistant|>"),
    Case(template(content={"close_pattern": "$"}), "Hello!", "Hello!", prompt="A<|assistant|>"),
    Case(TEMPLATES["tags"], "Hm...</think>", "", "Hm...", prompt=f"{EARLIER}<think>\n"),
    Case(TEMPLATES["tags"], "ink>Hm.</think>", "", "Hm.", prompt=f"{EARLIER}<th"),
    Case(TEMPLATES["json"], "", ""),
    Case(TAGS, alarm(hour="7", enabled="true", label="wake up"), "", "",
         [("set_alarm", {"hour": 7, "enabled": True, "label": "wake up"})], "", ALARM),
    Case(TEMPLATES["tags"], alarm(hour="007", label="1.50"), "", "", [("set_alarm", {"hour": 7, "label": 1.5})], "",
         ALARM),
    Case(TAGS, alarm(label="1.50"), "", "", [("set_alarm", {"label": "1.50"})], "", ALARM),
    Case(LINES, "<tool_call>\n<function=set_alarm>\n hour: 7\nenabled:true\nnothing\n</tool_call>", "", "",
         [("set_alarm", {"hour": 7, "enabled": True})], "", ALARM),
    Case(TAGS, TWICE, "", "", [("set_alarm", {"hour": 9})], "", ALARM),
    Case(MERGED, TWICE, "", "", [("set_alarm", {"hour": [7, 9]})], "", ALARM),
    Case(MERGED, TWICE.replace("\n9\n", "\nx\n"), "", "", [("set_alarm", {"hour": [7, "x"]})], "", ALARM),
    Case(PYTHON, "Look.<|tool_call_start|>[f.g(a='b\\n', c = [1, {\"d\": None}]), h()]<|tool_call_end|>ok", "Look.", "",
         [("f.g", {"a": "b\n", "c": [1, {"d": None}]}), ("h", {})]),
    *typed_cases(),
]  # fmt: skip

NOT_PROMPT = "a prompt's own text is no part of the reply, and a server would send it again"
NO_ANCHOR = "text of a prompt without an anchor may be a user's"
KEPT = "text that can't be read as it should is kept, where transformers raises an error"
DIFFERENCES = [
    (NOT_PROMPT, Case(TEMPLATES["json"], "the answer<|im_end|>", "the answer", prompt=f"{EARLIER}Here is ")),
    (NOT_PROMPT, Case(TEMPLATES["json"], "Yes.", "Yes.", prompt=f"{EARLIER}<think>Hm.</think>")),
    (NO_ANCHOR, Case(TEMPLATES["tags"], "Hm.</think>", "Hm.</think>", prompt="<think>\n")),
    (KEPT, Case(template(content={"open": "<say>", "close": "</say>", "optional": False}), "no answer", "no answer")),
    (KEPT, Case(template(tool_calls={"open": "<x>", "close": "</x>", "content": "json", "transform": _CALL}),
                '<x>{"name": "n"}</x>', '<x>{"name": "n"}</x>')),
    (KEPT, Case(JOINED | {"fields": {"content": {"open": "<x>", "close": "</x>", "repeats": True, "join": "",
                                                 "content": "json"}}}, "<x>{}</x>", "{}")),
    (KEPT, Case(PYTHON, "<|tool_call_start|>[f(1)]<|tool_call_end|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>")),
]  # fmt: skip


def read(case: Case, pieces: Sequence[str]) -> Said:
    some = case.tools or [{"type": "function", "function": {"name": "f"}}]
    scanner = ReplyPlan(ReplyFormat(template=ResponseTemplate.load(case.template)), tuple(some)).scanner(
        case.prompt, b"", 0
    )
    return said(fold([*(event for piece in pieces for event in scanner.feed(piece)), *scanner.finish()]))


def read_by_transformers(case: Case) -> Said:
    module = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers has no response_template")
    parsed = module.parse_response(case.text, case.template, prefix=case.prompt, tools=case.tools or None)
    calls = [call["function"] for call in parsed.get("tool_calls", ())]
    reasoning = parsed.get("thinking", parsed.get("reasoning_content", ""))
    return parsed.get("content", ""), reasoning, [(call["name"], call["arguments"]) for call in calls]


def exact(said: Said) -> str:
    """As JSON text: `True` is no 1 there."""
    return json.dumps(said, sort_keys=True)


@pytest.mark.parametrize("case", [*CASES, *(case for _, case in DIFFERENCES)], ids=lambda case: repr(case.text)[:40])
def test_a_reply_has_its_parts_at_every_cut(case: Case) -> None:
    for size in (max(len(case.text), 1), 1, 2, 3, 5, 7, 13, 31):
        pieces = [case.text[at : at + size] for at in range(0, len(case.text), size)]
        assert exact(read(case, pieces)) == exact(case.said), size


def test_transformers_reads_the_same() -> None:
    for case in CASES:
        if case.template is not PYTHON or reads_python():
            assert exact(read_by_transformers(case)) == exact(case.said), case


def reads_python() -> bool:
    """True if transformers is new enough for calls in Python's notation."""
    module = pytest.importorskip("transformers.utils.chat_parsing.content_parsers", reason="transformers is too old")
    return "python-call-list" in module.CONTENT_PARSERS


@pytest.mark.parametrize(("why", "case"), DIFFERENCES)
def test_differences_are_differences(why: str, case: Case) -> None:
    if case.template is PYTHON and not reads_python():
        pytest.skip("transformers is too old")
    try:
        theirs: Said | None = read_by_transformers(case)
    except ValueError:
        theirs = None
    assert (theirs is None) == (why is KEPT) and theirs != case.said


def test_a_pattern_that_refers_back_is_refused_by_name() -> None:
    """Matching one takes time that grows exponentially."""
    fields = {"tool_calls": {**TAGS["fields"]["tool_calls"], "content_args": {
        "tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\1>",
    }}}  # fmt: skip
    with pytest.raises(TemplateError, match=r"tag_pattern: the pattern .* has '\\1', which is not read"):
        ResponseTemplate.load(template(**fields))


# --- the templates that `transformers serve` falls back to ------------------------------------------------------------


def fallbacks() -> dict[str, dict[str, Any]]:
    """The templates in transformers' source, by the first type of model of each. Its server is not imported."""
    spec = importlib.util.find_spec("transformers")
    path = Path(spec.origin or "").parent / "cli/serving/utils.py" if spec is not None else Path()
    source = path.read_text() if path.is_file() else ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_RESPONSE_TEMPLATE_FALLBACKS":
            return {types[0]: fields for types, fields in ast.literal_eval(node.value).items()}
    pytest.skip("transformers' server has no templates of replies")


WORDS = st.text(st.sampled_from("ab <>/\n\"'{}:,é"), min_size=1, max_size=12).filter(lambda text: text == text.strip())
VALUES = st.one_of(WORDS, st.integers(-99, 99), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "x_1"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["weather", "time"]), ARGUMENTS), max_size=3)


def in_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(one)}" for key, one in value.items()) + "}"
    return "[" + ",".join(map(in_gemma, value)) + "]" if isinstance(value, list) else json.dumps(value)


def written(kind: str, reasoning: str, content: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A reply as a model of this type writes it."""
    if kind == "gemma4":
        thoughts = f"<|channel>thought\n{reasoning}<channel|>" if reasoning else ""
        said = "".join(f"<|tool_call>call:{name}{in_gemma(values)}<tool_call|>" for name, values in calls)
        return thoughts + content + said + ("<|tool_response>" if calls else "<turn|>")
    texts = [f"<think>\n{reasoning}\n</think>\n"] if reasoning else []
    texts += [content] if content else []
    for name, values in calls:
        if kind == "qwen3_5":
            tags = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in values.items())
            texts.append(f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>")
        else:
            call = json.dumps({"name": name, "arguments": values}, ensure_ascii=False)
            texts.append(f"<tool_call>\n{call}\n</tool_call>")
    return "\n".join(texts) + "<|im_end|>"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5", "gemma4"])
def test_the_fallbacks_of_its_server_read_the_same(kind: str) -> None:
    source = fallbacks()[kind]
    pytest.importorskip("transformers.utils.chat_parsing", reason="transformers has no response_template")

    @settings(max_examples=150)
    @given(reasoning=st.one_of(st.just(""), WORDS), content=st.one_of(st.just(""), WORDS), calls=CALLS)
    def run(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
        text = written(kind, reasoning, content, calls)
        case = Case(source, text, prompt="<|turn>model\n" if kind == "gemma4" else TURN)
        theirs = read_by_transformers(case)
        assert exact(read(case, [text])) == exact(theirs), text
        assert exact(read(case, list(text))) == exact(theirs), text
        assert theirs[:2] == (content, reasoning) and len(theirs[2]) == len(calls)

    run()
