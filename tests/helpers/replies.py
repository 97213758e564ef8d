"""Replies of every family as their models write them, with their content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rekindle._src.text.replies import Reply, ReplyFormat

THINK = ("<think>", "</think>")


def tool(name: str, **kinds: str | list[str]) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("weather", city="string", days="integer"), tool("time"), tool("write", path="string", text="string"),
    tool("plan", steps="array", place="object", note=["string", "null"]),
]  # fmt: skip


class Example(NamedTuple):
    family: str
    text: str
    content: str
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    reasoning: str = ""
    opened: bool = False  # the prompt ends inside of reasoning

    @property
    def format(self) -> ReplyFormat:
        return ReplyFormat.of_family(self.family)


PARIS, ROME = ("weather", {"city": "Paris"}), ("weather", {"city": "Rome", "days": 3})
CODE = ("write", {"path": "a.py", "text": 'if x:\n    print("}]</tool_call>")\n'})
_P, _R = '{"city": "Paris"}', '{"city": "Rome", "days": 3}'

PLAN = ("plan", {"steps": ["a", {"b": [1, None]}], "place": {"x": 1.5, "y": True}, "note": None})
_STEPS, _PLACE = json.dumps(PLAN[1]["steps"]), json.dumps(PLAN[1]["place"])
_D = "｜DSML｜"
_DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_M = "]<]minimax[>["
_K = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
      "<|tool_calls_section_end|>")  # fmt: skip


def tagged(template: str, name: str, head: str, item: str, **arguments: str) -> str:
    """A call in tags: `template` holds a head with the name, and an item for each argument."""
    items = "".join(item.replace("KEY", key).replace("VALUE", value) for key, value in arguments.items())
    return template.replace("HEAD", head.replace("NAME", name)).replace("ITEMS", items)


def of_tags(family: str, template: str, head: str, item: str) -> list[Example]:
    """Examples of a family with calls in tags: types by the schema, several calls, text before them."""
    paris, rome = (tagged(template, "weather", head, item, city="Paris"),
                   tagged(template, "weather", head, item, city="Rome", days="3"))  # fmt: skip
    plan = tagged(template, "plan", head, item, steps=_STEPS, place=_PLACE, note="null")
    code = tagged(template, "write", head, item, path="a.py", text=CODE[1]["text"])
    return [
        Example(family, f"Let me look.\n{paris}\n{rome}", "Let me look.", [PARIS, ROME]),
        Example(family, plan, "", [PLAN]),
        Example(family, code, "", [CODE]),
        Example(family, tagged(template, "time", head, ""), "", [("time", {})]),
    ]


FAMILIES = [
    *of_tags("glm", "<tool_call>HEADITEMS</tool_call>", "NAME\n",
             "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
    *of_tags("glm", "<tool_call>HEADITEMS</tool_call>", "NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"),
    Example("glm", "Hm.<tool_call>time</tool_call>\nIt is noon.", "It is noon.", [("time", {})], "Hm.", opened=True),
    Example("glm", "<think></think>\n</think>Hi", "Hi"),
    *of_tags("seed_oss", "<seed:tool_call>\nHEADITEMS</function>\n</seed:tool_call>", "<function=NAME>\n",
             "<parameter=KEY>VALUE</parameter>\n"),
    Example("seed_oss", "<seed:think>Hm.</seed:think>Hi", "Hi", (), "Hm."),
    Example("seed_oss", "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>", "", [PARIS]),
    *of_tags("minimax_m2", "<minimax:tool_call>\nHEADITEMS</invoke>\n</minimax:tool_call>", '<invoke name="NAME">\n',
             '<parameter name="KEY">VALUE</parameter>\n'),
    *of_tags("minicpm5", "HEADITEMS</function>", '<function name="NAME">', '<param name="KEY">VALUE</param>'),
    Example("minicpm5", '<function name="write"><param name="text"><![CDATA[</param>]]></param></function>', "",
            [("write", {"text": "</param>"})]),
    *of_tags("hunyuan3", "<tool_calls:opensource>\nHEADITEMS</tool_call:opensource>\n</tool_calls:opensource>",
             "<tool_call:opensource>NAME<tool_sep:opensource>\n",
             "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n"),
    Example(
        "deepseek_v32", f'Hm.</think>\n\n<{_D}function_calls>\n<{_D}invoke name="weather">\n'
        f'<{_D}parameter name="city" string="true">Rome</{_D}parameter>\n'
        f'<{_D}parameter name="days" string="false">3</{_D}parameter>\n</{_D}invoke>\n'
        f'<{_D}invoke name="time">\n</{_D}invoke>\n</{_D}function_calls>', "", [ROME, ("time", {})], "Hm.", opened=True
    ),
    Example(
        "deepseek_v4", f'Hm.\n\n<{_D}tool_calls>\n<{_D}invoke name="write">\n'
        f'<{_D}parameter name="text" string="true">3</{_D}parameter>\n</{_D}invoke>\n</{_D}tool_calls>', "",
        [("write", {"text": "3"})], "Hm.", opened=True
    ),
    Example("deepseek_v31", f"Look.{_DS[0]}{_DS[1]}weather{_DS[2]}{_P}{_DS[3]}{_DS[1]}time{_DS[2]}{{}}{_DS[3]}{_DS[4]}",
            "Look.", [PARIS, ("time", {})]),
    Example("deepseek_r1", f"{_DS[0]}{_DS[1]}function{_DS[2]}weather\n```json\n{_P}\n```{_DS[3]}\n"
            f"{_DS[1]}function{_DS[2]}time\n```json\n{{}}```{_DS[3]}{_DS[4]}", "", [PARIS, ("time", {})]),
    Example("kimi_k2", f"Look. {_K[0]}{_K[1]}functions.weather:0{_K[2]}{_P}{_K[3]}{_K[1]}functions.time:1{_K[2]}{{}}"
            f"{_K[3]}{_K[4]}", "Look.", [PARIS, ("time", {})]),
    Example("kimi_k2", f"<think>Hm.{_K[1]}weather:0 {_K[2]}{_R}", "", [ROME], "Hm."),
    Example(
        "kimi_k3", "Hm.<|close|>think<|sep|><|open|>response<|sep|>On it.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>", "On it.", [ROME], "Hm.", opened=True
    ),
    Example("kimi_k3", "<|open|>response<|sep|>Yes.<|close|>response<|sep|>", "Yes.", opened=True),
    Example("gemma4", '<|channel>thought\nHm.\n<channel|>Look.<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}'
            "<tool_call|><|tool_call>call:time{}<tool_call|>", "Look.", [ROME, ("time", {})], "Hm."),
    Example("gemma4", '<|tool_call>call:plan{note:null,place:{x:1.5,y:true},steps:[<|"|>a<|"|>,{b:[1,None]}]}'
            "<tool_call|>", "", [PLAN]),
    Example("gemma4", '<|tool_call>:write{text:<|"|>say "}" <tool_call|> \\n<|"|>}<tool_call|>', "",
            [("write", {"text": 'say "}" <tool_call|> \\n'})]),
    Example("gemma4", "<|channel><|channel>thought<channel|>Yes.<|channel>thought\nMore.<channel|><channel|>", "Yes.",
            (), "More."),
    Example("gemma4", "<|channel>thoughtful<channel|>Yes.", "Yes.", (), "thoughtful"),
    Example("cohere", '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
            f'"tool_name": "weather", "parameters": {_P}}}\n]<|END_ACTION|>', "", [PARIS], "Hm."),
    Example("cohere", "Hm.<|START_RESPONSE|>Yes.\n<|END_RESPONSE|>", "Yes.", (), "Hm.", opened=True),
    Example("cohere", "<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Yes.", opened=True),
    Example("command_r", f'Action:\n```json\n[{{"tool_name": "weather", "parameters": {_P}}}]\n```', "", [PARIS]),
    Example("command_r", "<|CHATBOT_TOKEN|>Action: none<|END_OF_TURN_TOKEN|>", "Action: none"),
    Example("nemotron_v2", f'Hm.\n</think>\n<TOOLCALL>[{{"name": "weather", "arguments": {_P}}}]</TOOLCALL>\n', "",
            [PARIS], "Hm.", opened=True),
    Example("hunyuan", f'<tool_calls>\n{{"name": "weather", "arguments": {_P}}}\n'
            '{"name": "time", "arguments": {}}\n</tool_calls>', "", [PARIS, ("time", {})]),
    Example("hunyuan", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Yes.", (), "Hm."),
    Example("hunyuan", "Write <answer>x</answer> here", "Write <answer>x</answer> here"),
    Example("hermes", "Hm.</think>\n\n<response>\nYes.\n</response>\n", "Yes.", (), "Hm.", opened=True),
    Example("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Look."
            f'<|tools_prefix|>[{{"weather": {_P}}}, {{"time": {{}}}}]<|tools_suffix|>', "Look.",
            [PARIS, ("time", {})], "Hm."),
    Example("lfm2", '<|tool_call_start|>[weather(city="Rome", days=03), time()]<|tool_call_end|>\nDone.', "Done.",
            [ROME, ("time", {})]),
    Example("lfm2", "[link](url) and [1]", "[link](url) and [1]"),
    Example("lfm2", "<|tool_call_start|> [write(from='a', text='1\n2')]<|tool_call_end|>", "",
            [("write", {"from": "a", "text": "1\n2"})]),
    Example("solar", "<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1"
            f"<|tool_call:name|>weather<|tool_call:args|>{_P}<|tool_call:end|><|calls|>", "", [PARIS], "Hm."),
    Example("functionary31", f"<function=weather>{_P}</function><function=time>{{}}</function>", "",
            [PARIS, ("time", {})]),
    Example("functionary32", f"Look.\n>>>weather\n{_P}>>>time\n{{}}", "Look.", [PARIS, ("time", {})]),
    Example("functionary32", ">>>all\nHello", "Hello"),
    Example("gigachat", f'Look.<|function_call|>{{"name": "weather", "arguments": {_P}}}', "Look.", [PARIS]),
    Example("gigachat3", f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {_P}}}', "",
            [PARIS]),
    Example("minimax_m3", f'<mm:think>Hm.</mm:think>{_M}<tool_call>\n{_M}<invoke name="plan">{_M}<steps>{_M}<item>a{_M}'
            f"</item>{_M}<item>{_M}<b>{_M}<item>1{_M}</item>{_M}</b>{_M}</item>{_M}</steps>{_M}</invoke>\n"
            f"{_M}</tool_call>", "", [("plan", {"steps": ["a", {"b": [1]}]})], "Hm."),
    Example("minimax_m3", f'{_M}<tool_call>{_M}<invoke name="weather">{_M}<city>Rome{_M}</city>{_M}<days>3{_M}</days>'
            f'{_M}</invoke>{_M}<invoke name="time">{_M}</invoke>{_M}</tool_call>', "", [ROME, ("time", {})]),
]  # fmt: skip

EXAMPLES = [
    Example("hermes", "Hello", "Hello"),
    Example("hermes", "  Hello \n", "  Hello \n"),
    Example("hermes", "", ""),
    Example("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {_P}}}\n</tool_call>', "", [PARIS]),
    Example(
        "hermes", f'Let me look.\n\n<tool_call>\n{{"name": "weather", "arguments": {_P}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "weather", "arguments": {_R}}}\n</tool_call>\n', "Let me look.", [PARIS, ROME]
    ),
    Example("hermes", f'<tool_call>{{"arguments": {_P}, "name": "weather"}}</tool_call> Done.', "Done.", [PARIS]),
    Example(
        "hermes",
        f'<tool_call>[{{"name": "weather", "arguments": {_P}}}, {{"name": "time", "arguments": {{}}}}]</tool_call>', "",
        [PARIS, ("time", {})]
    ),
    Example("hermes", f'<tool_call>{{"name": "write", "arguments": {json.dumps(CODE[1])}}}</tool_call>', "", [CODE]),
    Example(
        "hermes",
        f'<think>\nI should look.\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {_P}}}\n</tool_call>', "",
        [PARIS], "I should look."
    ),
    Example("hermes", "<think>\n\n</think>\n\nHi", "Hi"),
    Example("hermes", "Hm. Or </th not?\n</think>\n\nYes.", "Yes.", (), "Hm. Or </th not?", opened=True),
    Example("hermes", "still thinking", "", (), "still thinking", opened=True),
    Example("hermes", "<think>twice</think>once", "once", (), "twice", opened=True),
    Example(
        "hermes",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>", "", [ROME]
    ),
    Example("llama3_json", f'{{"name": "weather", "parameters": {_P}}}', "", [PARIS]),
    Example("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {_P}}}', "", [PARIS]),
    Example(
        "llama3_json",
        f'{{"type": "function", "name": "weather", "parameters": {_P}}}; {{"name": "time", "parameters": {{}}}}', "",
        [PARIS, ("time", {})]
    ),
    Example(
        "llama3_json", f'{{"name": "weather", "parameters": {_P}}}\n\nWould you like more?', "Would you like more?",
        [PARIS]
    ),
    Example("llama3_json", 'A user:\n{"name": "Alice", "age": 3}', 'A user:\n{"name": "Alice", "age": 3}'),
    Example("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_P}}}]', "", [PARIS]),
    Example(
        "mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {_P}}}, {{"name": "weather", "arguments": {_R}}}]',
        "", [PARIS, ROME]
    ),
    Example("mistral", f"Sure.[TOOL_CALLS]weather[ARGS]{_P}[TOOL_CALLS]time[ARGS]{{}}", "Sure.", [PARIS, ("time", {})]),
    Example("mistral", f"[TOOL_CALLS]weather{_R}", "", [ROME]),
    Example("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{_R}", "", [ROME]),
    Example("phi4mini", f'functools[{{"name": "weather", "arguments": {_P}}}]', "", [PARIS]),
    Example("phi4mini", f'<|tool_call|>[{{"name": "weather", "parameters": {_P}}}]<|/tool_call|>', "", [PARIS]),
    Example("phi4mini", "functools.partial binds arguments", "functools.partial binds arguments"),
    Example("pythonic", "[weather(city='Paris')]", "", [PARIS]),
    Example("pythonic", '[weather(city="Rome", days=3), time()]', "", [ROME, ("time", {})]),
    Example("pythonic", 'Sure:\n[weather("Rome", 3)]\nDone.', "Sure:\n\nDone.", [ROME]),
    Example("pythonic", '<|python_start|>[weather(city="Paris")]<|python_end|>', "", [PARIS]),
    Example("pythonic", f'<|python_start|>{{"name": "weather", "parameters": {_P}}}<|python_end|>', "", [PARIS]),
    Example("pythonic", "[1] is a reference", "[1] is a reference"),
    Example("pythonic", '[write(path="a.py", text=\'if x:\\n    print("}]</tool_call>")\\n\')]', "", [CODE]),
    Example("olmo", "<function_calls>\nweather(city=\"Paris\")\n</function_calls>", "", [PARIS]),
    Example(
        "olmo",
        '<function_calls>weather(city="Rome", days=3)\nwrite(path=null, text=["a", {"b": true}])</function_calls>', "",
        [ROME, ("write", {"path": None, "text": ["a", {"b": True}]})]
    ),
    Example("harmony", "<|channel|>final<|message|>Yes.\n", "Yes.\n"),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>Is it?\n<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Yes.", (), "Is it?\n"
    ),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_P}<|call|>",
        "One moment.", [PARIS], "Look."
    ),
    Example("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{_R}<|call|>", "", [ROME]),
    Example(
        "harmony", f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{json.dumps(CODE[1])}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>", "",
        [CODE, ("time", {})]
    ),
    Example(
        "harmony", "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
        "One.\n\nTwo."
    ),
    Example("harmony", "No channels at all.", "No channels at all."),
    Example("harmony", "<|channel|>final", ""),
    Example("harmony", "<|channel|>analysis<|message|>still thinking", "", (), "still thinking"),
    Example(
        "harmony", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Par',
        '{"city": "Par'
    ),
    Example("harmony", "<|channel|>commentary to=functions.time code<|message|>print(1)<|call|>", "print(1)"),
    Example("harmony", "<|channel|>commentary to=python code<|message|>print(1)<|call|>", ""),
    Example(
        "harmony", "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes.", "Yes.", (), "Hm."
    ),
    Example("harmony", f"<|channel|>analysis to=functions.weather<|message|>{_P}", "", [PARIS]),
    Example("muse", " to=user<|message|>Yes.<|eot|>", "Yes."),
    Example(
        "muse", ' to=self<|message|>Hm. <atem:function_calls><|eom|><|start|>assistant to=user<|message|>Look.<|eom|>'
        '<|start|>assistant to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
        '<atem:parameter name="city">Rome</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>", "Look.", [ROME], "Hm. <atem:function_calls>"
    ),
    Example("muse", " to=weather<|message|><atem:function_calls>x<|eot|>", "<atem:function_calls>x"),
    *FAMILIES,
]  # fmt: skip

# What looks like a call and is none, or was cut: everything is content.
CONTENT = [
    (family, text)
    for family, texts in {
        "hermes": [
            "<tool_call>", "<tool_call", "<tool_call>weather</tool_call>",
            '<tool_call>{"name": "weather", "arguments": {"city": "Par',
            '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}</tool_call>',
            '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "<tool_call>{'name': 'weather'}</tool_call>",
            "<tool_call>[]</tool_call>", "<function=unknown></function>",
            '{"name": "weather", "arguments": {"city": "Paris"}}',
        ],
        "llama3_json": [
            '{"name": "unknown", "parameters": {}}', '{"name": "weather"}',
            'Use {"name": "weather", "parameters": {}} for that', "{", '{"a": [1, 2, {"b": null}], "c": -1.5e3}',
        ],
        "mistral": [
            "[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]weather[ARGS]",
        ],
        "phi4mini": [
            "functools", "functools[1, 2]",
        ],
        "pythonic": [
            "[weather(city=", "[weather(city=town)]", "[unknown()]", "[weather(city='Paris'",
        ],
        "olmo": [
            "<function_calls></function_calls>", "<function_calls>weather(city=f'x')</function_calls>",
        ],
        "glm": [
            "<tool_call>", "<tool_call>weather", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pa",
            "<tool_call>weather<arg_value>x</arg_value></tool_call>", "<tool_call>{}</tool_call>",
        ],
        "seed_oss": ["<function=unknown></function>", "<seed:tool_call></seed:tool_call>"],
        "gemma4": [
            "<|tool_call>", "<|tool_call>call:weather(x)", '<|tool_call>call:weather{city:<|"|>Par',
            "<|tool_call>call:weather{city}<tool_call|>",
        ],
        "kimi_k2": [f"{_K[0]}{_K[4]}", f"{_K[1]}functions.unknown:0{_K[2]}{{}}", f"{_K[0]}{_K[1]}functions.time:0"],
        "deepseek_r1": [f"{_DS[0]}{_DS[4]}", f"{_DS[0]}{_DS[1]}function{_DS[2]}time\n```json\n[]```"],
        "minimax_m3": [f'{_M}<tool_call>{_M}<invoke name="time">{_M}<a>{_M}</invoke>{_M}</tool_call>', f"{_M}<x>"],
        "cohere": ["<|START_ACTION|>[]<|END_ACTION|>"],
        "apertus": ['<|tools_prefix|>[{"weather": 3}]<|tools_suffix|>'],
    }.items()
    for text in texts
]  # fmt: skip


def said(reply: Reply) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    return reply.content, reply.reasoning, [(call.name, dict(call.arguments)) for call in reply.tool_calls]
