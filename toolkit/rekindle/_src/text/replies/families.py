"""The syntaxes of calls by family, and how a family is recognized by its chat template.

A syntax is data: the marks at which calls begin, each with a reader of what follows, and the text of calls as the
family writes them. A family adds the marks of its reasoning and of its answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rekindle._src.text.replies import readers as read
from rekindle._src.text.replies.blocks import CallBlock, CallText
from rekindle._src.text.replies.call import (
    KEYWORDS,
    OBJECT,
    TAGGED,
    CallForm,
    CallSyntax,
    NamedArguments,
    Opener,
    Token,
)
from rekindle._src.text.replies.call_grammar import literal, mark, object_call
from rekindle._src.text.replies.harmony import HARMONY, MUSE
from rekindle._src.text.replies.marks import NO_MARKS, ReplyMarks, Tags
from rekindle._src.text.replies.tag_reader import CallTags


def _in_object(key: str, call: NamedArguments) -> str:
    name, arguments = call
    return json.dumps({"name": name, key: dict(arguments)}, ensure_ascii=False)


def _in_python(call: NamedArguments) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in arguments.items())})"


def _object_list(calls: Sequence[NamedArguments]) -> str:
    return f"[{', '.join(_in_object('arguments', call) for call in calls)}]"


def _hermes_form(token: Token) -> CallForm:
    opens, closes, newline = mark("<tool_call>", token), mark("</tool_call>", token), literal("\n")
    return CallForm(lambda name: (opens, newline, *object_call("arguments", name), newline, closes), between=newline)


def _bare_form(token: Token) -> CallForm:
    return CallForm(partial(object_call, "parameters"), between=literal("; "))


def _mistral_form(token: Token) -> CallForm:
    opens = mark("[TOOL_CALLS]", token)
    if token("[ARGS]") is not None:
        return CallForm(lambda name: (opens, literal(name), mark("[ARGS]", token), OBJECT))
    return _list_form(f"{opens} {literal('[')}", literal("]"))


def _phi_form(token: Token) -> CallForm:
    if token("<|tool_call|>") is None:
        return _list_form(literal("functools["), literal("]"))
    opens, closes = mark("<|tool_call|>", token), mark("<|/tool_call|>", token)
    return _list_form(f"{opens} {literal('[')}", f"{literal(']')} {closes}")


def _list_form(begins: str, ends: str) -> CallForm:
    return CallForm(partial(object_call, "arguments"), begins, literal(", "), ends)


def _olmo_form(token: Token) -> CallForm:
    newline = literal("\n")
    begins = f"{mark('<function_calls>', token)} {newline}"
    ends = f"{newline} {mark('</function_calls>', token)}"
    return CallForm(lambda name: (literal(f"{name}("), KEYWORDS, literal(")")), begins, newline, ends)


# Templates show the signs of several: the most particular comes first.
MISTRAL = CallSyntax(
    "mistral", (Opener("[TOOL_CALLS]", read.mistral),), _mistral_form,
    lambda calls: f"[TOOL_CALLS]{_object_list(calls)}",
    signs=("[TOOL_CALLS]",), markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_length=9,
)  # fmt: skip
HERMES = CallSyntax(
    "hermes", (Opener("<tool_call>", read.hermes), Opener("<function=", read.untagged)), _hermes_form,
    lambda calls: "\n".join(f"<tool_call>\n{_in_object('arguments', call)}\n</tool_call>" for call in calls),
    signs=("<tool_call>", "<function="), markers=("<tool_call>", "</tool_call>"),
)  # fmt: skip
PHI4MINI = CallSyntax(
    "phi4mini", (Opener("<|tool_call|>", read.phi), Opener("functools", read.phi)), _phi_form,
    lambda calls: f"<|tool_call|>{_object_list(calls)}<|/tool_call|>",
    signs=("<|tool_call|>", "<|tool|>", "functools["), markers=("<|tool_call|>", "<|/tool_call|>"),
)  # fmt: skip
OLMO = CallSyntax(
    "olmo", (Opener("<function_calls>", read.function_calls),), _olmo_form,
    lambda calls: "\n".join(["<function_calls>", *map(_in_python, calls), "</function_calls>"]),
    signs=("<function_calls>",), markers=("<function_calls>", "</function_calls>"),
)  # fmt: skip
PYTHONIC = CallSyntax(
    "pythonic",
    (
        Opener("<|python_start|>", read.python_block),
        Opener("<|python_tag|>", read.python_block),
        Opener("[", read.bare_list, bare=True),
        Opener("{", read.bare_json, bare=True),
    ),
    _bare_form,
    lambda calls: f"[{', '.join(map(_in_python, calls))}]",
    signs=("<|python_start|>", "[func_name(", "[func_name1("),
    markers=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
)
LLAMA3_JSON = CallSyntax(
    "llama3_json", (Opener("<|python_tag|>", read.marked_json), Opener("{", read.bare_json, bare=True)), _bare_form,
    lambda calls: "; ".join(_in_object("parameters", call) for call in calls),
    signs=("<|python_tag|>", '"parameters": dictionary'), markers=("<|python_tag|>",), several=False,
)  # fmt: skip


def _syntax(
    name: str,
    text: CallText,
    *blocks: CallBlock,
    signs: tuple[str | tuple[str, ...], ...],
    markers: tuple[str, ...] = (),
    openers: tuple[Opener, ...] = (),
    several: bool = True,
) -> CallSyntax:
    """Return a syntax with the openers of its blocks, then `openers`."""
    of_blocks = [opener for block in blocks for opener in block.openers()]
    form = partial(text.form, markers)
    return CallSyntax(name, (*of_blocks, *openers), form, text.write, signs, markers, several=several)


def _in_list(begins: str, ends: str, name: str = "name", arguments: str = "arguments") -> CallText:
    return CallText(f'{{"{name}": "{{name}}", "{arguments}": ', "}", f"{begins}[", ", ", f"]{ends}")


def _in_tags(call: CallText, before: str, after: str, text: str | None = None) -> CallText:
    """Return the text of calls with each argument in tags, of a text perhaps in others.

    Line breaks between them belong to the tag before: a grammar can't tell which of two texts a line break begins.
    """
    return dataclasses.replace(
        call, arguments=TAGGED, value=(before, after), text_value=None if text is None else (text, after)
    )


_DSML = "｜DSML｜"
_NS = "]<]minimax[>["
_DSML_TAGS = CallTags('"', f'<{_DSML}parameter name="', '"', f"</{_DSML}parameter>", f"</{_DSML}invoke>", ">")
_GLM_TAGS = CallTags("", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", value="<arg_value>")
_INVOKE_TAGS = CallTags('"', '<parameter name="', '"', "</parameter>", "</invoke>", ">")
_KIMI_TAGS = CallTags('"', '<|open|>argument key="', '"', "<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|sep|>")
_HY = ":opensource"
_HY_TAGS = CallTags(
    f"<tool_sep{_HY}>", f"<arg_key{_HY}>", f"</arg_key{_HY}>", f"</arg_value{_HY}>", f"</tool_call{_HY}>",
    value=f"<arg_value{_HY}>",
)  # fmt: skip


def _dsml(name: str, block: str, *signs: str) -> CallSyntax:
    begins, ends = f"<{_DSML}{block}>", f"</{_DSML}{block}>"
    call = CallText(f'<{_DSML}invoke name="{{name}}">\n', f"</{_DSML}invoke>\n", f"{begins}\n", ends=ends)
    value = f'<{_DSML}parameter name="{{key}}" string="{{}}">'
    text = _in_tags(call, value.replace("{}", "false"), f"</{_DSML}parameter>\n", value.replace("{}", "true"))
    opener = CallBlock(read.tagged(_DSML_TAGS), begins, f'<{_DSML}invoke name="', "", ends, alone=True)
    return _syntax(name, text, opener, signs=((_DSML, *signs),), markers=(_DSML,))


KIMI_K3 = _syntax(
    "kimi_k3",
    _in_tags(
        CallText(
            '<|open|>call tool="{name}" index="{index}"<|sep|>', "<|close|>call<|sep|>", "<|open|>tools<|sep|>",
            ends="<|close|>tools<|sep|>",
        ),
        '<|open|>argument key="{key}" type="number"<|sep|>', "<|close|>argument<|sep|>",
        text='<|open|>argument key="{key}" type="string"<|sep|>',
    ),
    CallBlock(
        read.tagged(_KIMI_TAGS), "<|open|>tools<|sep|>", '<|open|>call tool="', "", "<|close|>tools<|sep|>"
    ),
    signs=("<|open|>",), markers=("<|open|>", "<|close|>", "<|sep|>"),
)  # fmt: skip
GEMMA4 = _syntax(
    "gemma4",
    CallText(
        "<|tool_call>call:{name}{", "}<tool_call|>", arguments=TAGGED, value=("{key}:", ""),
        text_value=('{key}:<|"|>', '<|"|>'), between_values=",",
    ),
    CallBlock(read.gemma, call="<|tool_call>", call_ends="<tool_call|>"),
    signs=("<|tool_call>",), markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
)  # fmt: skip
MINIMAX_M3 = _syntax(
    "minimax_m3",
    _in_tags(
        CallText(
            f'{_NS}<invoke name="{{name}}">', f"{_NS}</invoke>\n", f"{_NS}<tool_call>\n", ends=f"{_NS}</tool_call>"
        ),
        f"{_NS}<{{key}}>", f"{_NS}</{{key}}>",
    ),
    CallBlock(read.elements(_NS), f"{_NS}<tool_call>", f'{_NS}<invoke name="', "", f"{_NS}</tool_call>"),
    signs=(_NS,), markers=(_NS, "<tool_call>", "</tool_call>"),
)  # fmt: skip
MINIMAX_M2 = _syntax(
    "minimax_m2",
    _in_tags(
        CallText(
            '<invoke name="{name}">\n', "</invoke>\n", "<minimax:tool_call>\n", ends="</minimax:tool_call>"
        ),
        '<parameter name="{key}">', "</parameter>\n",
    ),
    CallBlock(
        read.tagged(_INVOKE_TAGS), "<minimax:tool_call>", '<invoke name="', "", "</minimax:tool_call>", alone=True
    ),
    signs=("<minimax:tool_call>",), markers=("<minimax:tool_call>", "</minimax:tool_call>"),
)  # fmt: skip
SEED_OSS = _syntax(
    "seed_oss",
    _in_tags(
        CallText("<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>", between="\n"),
        "<parameter={key}>", "</parameter>\n",
    ),
    CallBlock(
        read.tagged(read.QWEN_TAGS._replace(trims=False)), "<seed:tool_call>", "<function=", "", "</seed:tool_call>",
        alone=True,
    ),
    signs=("<seed:tool_call>",), markers=("<seed:tool_call>", "</seed:tool_call>"),
)  # fmt: skip
GLM = _syntax(
    "glm",
    _in_tags(
        CallText("<tool_call>{name}\n", "</tool_call>", between="\n"),
        "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n",
    ),
    CallBlock(read.tagged(_GLM_TAGS), call="<tool_call>"),
    signs=("<arg_key>",),
    markers=(
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ),
)  # fmt: skip
HUNYUAN3 = _syntax(
    "hunyuan3",
    _in_tags(
        CallText(
            f"<tool_call{_HY}>{{name}}<tool_sep{_HY}>\n", f"</tool_call{_HY}>\n", f"<tool_calls{_HY}>\n",
            ends=f"</tool_calls{_HY}>",
        ),
        f"<arg_key{_HY}>{{key}}</arg_key{_HY}>\n<arg_value{_HY}>", f"</arg_value{_HY}>\n",
    ),
    CallBlock(read.tagged(_HY_TAGS), f"<tool_calls{_HY}>", f"<tool_call{_HY}>", "", f"</tool_calls{_HY}>", alone=True),
    signs=("<tool_calls{}>", f"<tool_calls{_HY}>"),
    markers=tuple(
        f"<{tag}{_HY}>"
        for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
        for tag in (name, f"/{name}")
    ),
)  # fmt: skip
DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")
_DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)  # fmt: skip
_DEEPSEEK = CallBlock(
    read.deepseek, _DEEPSEEK_MARKS[0], _DEEPSEEK_MARKS[1], _DEEPSEEK_MARKS[3], _DEEPSEEK_MARKS[4], alone=True
)
DEEPSEEK_R1 = _syntax(
    "deepseek_r1",
    CallText(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>",
    ),
    _DEEPSEEK, signs=(("<｜tool▁sep｜>", "```json"),), markers=_DEEPSEEK_MARKS,
)  # fmt: skip
DEEPSEEK_V31 = _syntax(
    "deepseek_v31",
    CallText(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>",
        ends="<｜tool▁calls▁end｜>",
    ),
    _DEEPSEEK, signs=("<｜tool▁sep｜>",), markers=_DEEPSEEK_MARKS,
)  # fmt: skip
KIMI_K2 = _syntax(
    "kimi_k2",
    CallText(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", ends="<|tool_calls_section_end|>",
    ),
    CallBlock(
        read.kimi, "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_end|>", alone=True,
    ),
    signs=("<|tool_calls_section_begin|>",),
    markers=(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
)  # fmt: skip
COHERE = _syntax(
    "cohere",
    CallText(
        '{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": ', "}", "<|START_ACTION|>[", ", ",
        "]<|END_ACTION|>",
    ),
    CallBlock(read.objects, "<|START_ACTION|>", ends="<|END_ACTION|>"),
    signs=("<|START_ACTION|>",), markers=("<|START_ACTION|>", "<|END_ACTION|>"),
)  # fmt: skip
COMMAND_R = _syntax(
    "command_r", _in_list("Action:\n```json\n", "\n```", "tool_name", "parameters"),
    openers=(Opener("Action:", read.command),), signs=("Action:\n```json", "Write 'Action:'"),
)  # fmt: skip
NEMOTRON_V2 = _syntax(
    "nemotron_v2", _in_list("<TOOLCALL>", "</TOOLCALL>"),
    CallBlock(read.objects, "<TOOLCALL>", ends="</TOOLCALL>"),
    signs=("<TOOLCALL>",), markers=("<TOOLCALL>", "</TOOLCALL>"),
)  # fmt: skip
HUNYUAN = _syntax(
    "hunyuan", _in_list("<tool_calls>", "</tool_calls>"),
    CallBlock(read.objects, "<tool_calls>", ends="</tool_calls>"),
    signs=("<tool_calls>",), markers=("<tool_calls>", "</tool_calls>"),
)  # fmt: skip
APERTUS = _syntax(
    "apertus", CallText('{"{name}": ', "}", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    CallBlock(read.keyed_objects, "<|tools_prefix|>", ends="<|tools_suffix|>"),
    signs=("<|tools_prefix|>",), markers=("<|tools_prefix|>", "<|tools_suffix|>"),
)  # fmt: skip
LFM2 = _syntax(
    "lfm2",
    CallText("{name}(", ")", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", KEYWORDS),
    CallBlock(read.python_list, "<|tool_call_start|>", ends="<|tool_call_end|>"),
    openers=(Opener("[", read.bare_list, bare=True),),
    signs=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
)  # fmt: skip
SOLAR = _syntax(
    "solar",
    CallText(
        "<|tool_call:begin|>{index}<|tool_call:name|>{name}<|tool_call:args|>", "<|tool_call:end|>",
        "<|tool_calls|>", ends="<|calls|>",
    ),
    CallBlock(
        read.named("<|tool_call:name|>", "<|tool_call:args|>"), "<|tool_calls|>", "<|tool_call:begin|>",
        "<|tool_call:end|>", "<|calls|>", alone=True,
    ),
    signs=("<|tool_call:name|>",),
    markers=(
        "<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>",
        "<|tool_call:end|>",
    ),
)  # fmt: skip
MINICPM5 = _syntax(
    "minicpm5",
    _in_tags(
        CallText('<function name="{name}">', "</function>", between="\n"), '<param name="{key}">', "</param>"
    ),
    CallBlock(
        read.tagged(CallTags('"', '<param name="', '"', "</param>", "</function>", ">")), call='<function name="'
    ),
    signs=('<function name="',), markers=("<function", "</function>", "<param", "</param>"),
)  # fmt: skip
FUNCTIONARY31 = _syntax(
    "functionary31", CallText("<function={name}>", "</function>"),
    CallBlock(read.tagged(read.QWEN_TAGS), call="<function="),
    signs=("<{start_tag}={function_name}>",),
)  # fmt: skip
FUNCTIONARY32 = _syntax(
    "functionary32", CallText(">>>{name}\n", ""), openers=(Opener(">>>", read.recipient),), signs=(">>>all",)
)
GIGACHAT = _syntax(
    "gigachat", CallText('<|function_call|>{"name": "{name}", "arguments": ', "}"),
    CallBlock(read.objects, "<|function_call|>"),
    signs=("<|function_call|>",), markers=("<|function_call|>",), several=False,
)  # fmt: skip
GIGACHAT3 = _syntax(
    "gigachat3",
    CallText('<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "{name}", "arguments": ', "}"),
    openers=(Opener("<|message_sep|>", read.gigachat),),
    signs=(("function call", "<|role_sep|>"),), markers=("<|message_sep|>", "<|role_sep|>"), several=False,
)  # fmt: skip


class ReplyFamily(NamedTuple):
    """A family's calls, the tags of its reasoning (by default those in its template), and its other marks."""

    calls: CallSyntax
    reasoning: Tags | None = None
    marks: ReplyMarks = NO_MARKS
    wraps: tuple[Tags, ...] = ()  # plain tags around an answer, where its template has them

    def writes(self, has: Callable[[str], bool]) -> bool:
        """True if a template is of this family, by the texts that it has."""
        return any(has(sign) if isinstance(sign, str) else all(map(has, sign)) for sign in self.calls.signs)


_CALLS_END_REASONING = ReplyMarks(ended_by_calls=True)
_COHERE_MARKS = ReplyMarks(
    noise=("<|END_RESPONSE|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"),
    text_begins=("<|START_RESPONSE|>", "<|START_TEXT|>"),
)
_RESPONSE = (("<response>", "</response>"),)  # ERNIE 4.5, Granite 3.3
FAMILIES = (
    ReplyFamily(HARMONY),
    ReplyFamily(MUSE),
    ReplyFamily(KIMI_K3, ("<|open|>think<|sep|>", "<|close|>think<|sep|>"), ReplyMarks(
        noise=("<|close|>response<|sep|>", "<|close|>message<|sep|>"), text_begins=("<|open|>response<|sep|>",),
        ended_by_calls=True, tokens=KIMI_K3.markers,
    )),
    ReplyFamily(GEMMA4, ("<|channel>", "<channel|>"), ReplyMarks(
        noise=("<turn|>", "<|tool_response>"), header="thought", anywhere=True,
    )),
    ReplyFamily(MINIMAX_M3, ("<mm:think>", "</mm:think>")),
    ReplyFamily(MINIMAX_M2),
    ReplyFamily(SEED_OSS, ("<seed:think>", "</seed:think>"), ReplyMarks(tokens=("<seed:cot_budget_reflect>",))),
    ReplyFamily(GLM, None, _CALLS_END_REASONING),
    ReplyFamily(HUNYUAN3, (f"<think{_HY}>", f"</think{_HY}>")),
    ReplyFamily(DEEPSEEK_V32, None, _CALLS_END_REASONING),
    ReplyFamily(DEEPSEEK_V4, None, _CALLS_END_REASONING),
    ReplyFamily(DEEPSEEK_R1),
    ReplyFamily(DEEPSEEK_V31),
    ReplyFamily(KIMI_K2, None, _CALLS_END_REASONING),
    ReplyFamily(COHERE, ("<|START_THINKING|>", "<|END_THINKING|>"), _COHERE_MARKS),
    ReplyFamily(COMMAND_R, None, ReplyMarks(noise=("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"))),
    ReplyFamily(NEMOTRON_V2),
    ReplyFamily(APERTUS, ("<|inner_prefix|>", "<|inner_suffix|>")),
    ReplyFamily(LFM2),
    ReplyFamily(SOLAR, ("<|think|>", "<|end|>"), ReplyMarks(
        noise=("<|begin|>assistant", "<|end|>"), text_begins=("<|content|>",), tokens=("<|begin|>",),
        bridge="<|begin|>assistant",
    )),
    ReplyFamily(MINICPM5),
    ReplyFamily(FUNCTIONARY31),
    ReplyFamily(FUNCTIONARY32, None, ReplyMarks(noise=(">>>all\n",), prefixes=(">>>",))),
    ReplyFamily(GIGACHAT),
    ReplyFamily(GIGACHAT3),
    ReplyFamily(MISTRAL),
    ReplyFamily(HUNYUAN, wraps=(("<answer>", "</answer>"),)),
    ReplyFamily(HERMES, wraps=_RESPONSE),
    ReplyFamily(PHI4MINI, wraps=_RESPONSE),
    ReplyFamily(OLMO),
    ReplyFamily(PYTHONIC),
    ReplyFamily(LLAMA3_JSON),
)  # fmt: skip
SYNTAXES = {family.calls.name: family.calls for family in FAMILIES}
