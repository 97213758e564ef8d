"""Chat templates render what transformers renders, in a sandbox, and refuse with a typed error."""

# ruff: noqa: E501 (templates keep their lines)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import vocabularies
from rekindle._src.text import ChatTemplate
from rekindle._src.text.replies.families import HERMES
from rekindle._src.text.replies.format import with_calls_as_text
from rekindle.errors import CheckpointError, InvalidRequest

CHATML = (
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0].role == 'system' %}\n"
    "        {{- messages[0].content + '\\n\\n' }}\n    {%- endif %}\n    {%- for tool in tools %}\n"
    '        {{- "\\n" }}{{- tool | tojson }}\n    {%- endfor %}\n    {{- "<|im_end|>\\n" }}\n{%- endif %}\n'
    "{%- set ns = namespace(last=messages|length - 1, multi=true) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if ns.multi and message.role == 'user' and message.content is string %}\n"
    "        {%- set ns.multi = false %}\n        {%- set ns.last = index %}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}\n"
    "    {%- set reasoning = '' %}\n"
    "    {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}\n"
    "    {%- elif '</think>' in content %}\n"
    "        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
    "        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- if reasoning and loop.index0 > ns.last %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}\n"
    "    {{- content }}\n    {%- for call in message.tool_calls or [] %}\n"
    "        {%- if call.function %}{%- set call = call.function %}{%- endif %}\n"
    '        {{- \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}\n'
    "        {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}\n"
    "        {{- '}\\n</tool_call>' }}\n    {%- endfor %}\n    {{- '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}\n"
    "{%- endif %}"
)
TEMPLATES = {
    "chatml with tools and thinking": CHATML,
    "header ids": (
        "{{- bos_token }}\n{%- if not date_string is defined %}\n"
        '    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}\n{%- endif %}\n'
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n"
        '    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = "" %}\n{%- endif %}\n'
        '{{- "<h>system</h>\\n\\nToday: " + date_string + "\\n" }}{{- system_message }}\n'
        "{%- for t in tools or [] %}\n    {{- t | tojson(indent=4) }}\n    {{- '\\n\\n' }}\n{%- endfor %}\n"
        "{%- for message in messages %}\n    {{- '<h>' + message['role'] + '</h>\\n\\n' }}\n"
        "    {%- if message['content'] is string %}{{- message['content'] | trim }}\n"
        "    {%- else %}{%- for part in message['content'] %}\n"
        "        {%- if part['type'] == 'text' %}{{- part['text'] | trim }}{%- endif %}{%- endfor %}\n    {%- endif %}\n"
        "    {{- '<|eot|>' }}\n{%- endfor %}\n{%- if add_generation_prompt %}{{- '<h>assistant</h>\\n\\n' }}{%- endif %}\n"
    ),
    "inst blocks": (
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
        "{{ bos_token }}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{% if loop.first and system is defined %}"
        "{{ ' [INST] ' + system + '\n\n' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "turns with the model role": (
        "{{ bos_token }}{%- macro turn(role, text) -%}\n{{ '<turn>' ~ role ~ '\n' ~ text | trim }}<end>\n{% endmacro -%}"
        "{% for message in messages %}\n  {% if message['role'] == 'assistant' %}\n    {% set role = 'model' %}\n"
        "  {% else %}\n    {% set role = message['role'] %}\n  {% endif %}\n{{ turn(role, message['content']) }}"
        "{% endfor %}\n{% if add_generation_prompt %}\n{{ '<turn>model\n' }}{% endif %}"
    ),
    "generation blocks and loop controls": (
        "{% for message in messages %}{% if message.role == 'tool' %}{% continue %}{% endif %}"
        "{% if loop.index > 5 %}{% break %}{% endif %}"
        "{{ '<|' ~ message.role ~ '|>\n' }}{% generation %}{{ message.content }}{% set kept = 'x' %}{% endgeneration %}"
        "{{ kept is defined }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "documents and filters": (
        "{% for doc in documents or [] %}Document {{ loop.index0 }}: {{ doc.title | upper }} {{ doc | tojson }}\n{% endfor %}"
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content | replace('<', '&') }}\n{% endfor %}"
        "{{ messages | map(attribute='role') | join(',') }}{{ dict(a=1).items() | list }}{{ pad_token is defined }}"
    ),
}
USER = {"role": "user", "content": "  Hi <b>there</b> & \"you\" 'é' 你好  "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system first": [{"role": "system", "content": " Be kind.\n"}, USER],
    "turns": [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
        {"role": "user", "content": "More"},
    ],
    "none fields": [USER, {"role": "assistant", "content": "Sure", "tool_calls": None}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "Yes", "reasoning": "because"}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now> & later, für 'here'",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    folder = vocabularies.write(tmp_path_factory.mktemp("tokenizer"), vocabularies.byte_level(), **SPECIAL)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def as_older_ones_take_it(chat: list[Any]) -> list[Any]:
    """The chat for releases of transformers that know one name of a reasoning alone, and no numbers of numpy."""
    from transformers.utils import chat_template_utils

    if hasattr(chat_template_utils, "_alias_reasoning_fields"):
        return chat
    said = [
        {**message, "reasoning_content": message["reasoning"]} if "reasoning" in message else message
        for message in chat
    ]
    return json.loads(json.dumps(said, default=lambda value: value.item() if hasattr(value, "item") else str(value)))


@pytest.mark.parametrize("chat", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_as_transformers_does(theirs: Any, template: str, chat: str) -> None:
    mine = ChatTemplate(TEMPLATES[template], SPECIAL)
    documents = [{"title": "One", "text": "<first>"}]
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS, "enable_thinking": False},
        {"add_generation_prompt": True, "documents": documents, "date_string": "26 Jul 2024", "bos_token": "<B>"},
    ):
        expected = theirs.apply_chat_template(
            as_older_ones_take_it(CONVERSATIONS[chat]), chat_template=TEMPLATES[template], tokenize=False, **options
        )
        assert mine.render(CONVERSATIONS[chat], **options) == expected


def test_tool_calls_and_parts_render_as_in_transformers(theirs: Any) -> None:
    call = {"function": {"name": "weather", "arguments": {"place": "Zürich", "days": np.int64(2)}}}
    chats = {
        "chatml with tools and thinking": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "header ids": [
            {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image", "image": b"x"}]}
        ],
    }
    for name, chat in chats.items():
        expected = theirs.apply_chat_template(
            as_older_ones_take_it(chat),
            chat_template=TEMPLATES[name],
            tools=TOOLS,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert ChatTemplate(TEMPLATES[name], SPECIAL).render(chat, tools=TOOLS) == expected


@pytest.mark.parametrize("content", ["Once upon", "Once upon \n"])
@pytest.mark.parametrize("template", ["chatml with tools and thinking", "header ids", "turns with the model role"])
def test_the_final_message_can_be_continued(theirs: Any, template: str, content: str) -> None:
    chat = [USER, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(
        chat, chat_template=TEMPLATES[template], continue_final_message=True, tokenize=False
    )
    rendered = ChatTemplate(TEMPLATES[template], SPECIAL).render(chat, continue_final_message=True)
    assert rendered == expected
    assert rendered.endswith("Once upon" if template != "chatml with tools and thinking" else content)


def test_templates_are_found_where_folders_keep_them(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "string {{ bos_token }}", "bos_token": {"content": "<s>"}}))
    assert ChatTemplate.load(tmp_path).render(chat) == "string <s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    loaded = ChatTemplate.load(tmp_path)
    assert [loaded.render(chat), loaded.render(chat, tools=TOOLS)] == ["plain", "tools"]
    assert loaded.render(chat, template="tool_use") == "tools"
    assert loaded.render(chat, template="{{ messages[0].content }}!") == "x!"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path).render(chat, tools=TOOLS) == "file", "a file of its own wins"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert ChatTemplate.load(tmp_path).render(chat, tools=TOOLS) == "more"


def test_what_the_template_refuses_is_an_invalid_request() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        ChatTemplate(TEMPLATES["inst blocks"], SPECIAL).render(chat)
    with pytest.raises(InvalidRequest, match="no default template"):
        ChatTemplate({"rag": "x", "other": "y"}).render(chat)


def test_a_template_that_does_not_compile_names_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a\n{% for %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja.*line 2"):
        ChatTemplate.load(tmp_path).render([USER])


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, [{"content": "x"}], ["hi"]])
def test_messages_are_checked(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages="):
        ChatTemplate("x").render(messages)


@pytest.mark.parametrize(
    ("role", "fix"),
    [("usr", "'user'"), ("System", "'system'"), ("human", "'user'"), ("pirate", "Use one of"), (3, "Use")],
)
def test_a_role_that_no_model_knows_is_refused(role: Any, fix: str) -> None:
    with pytest.raises(InvalidRequest, match=fix) as caught:
        ChatTemplate("{{ messages[0].content }}").render([{"role": role, "content": "x"}])
    assert caught.value.field == "role" and caught.value.value == role


def test_a_role_of_the_template_itself_is_taken() -> None:
    template = "{% if messages[0].role == 'critic' %}x{% endif %}"
    assert ChatTemplate(template).render([{"role": "critic", "content": "y"}]) == "x"


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": None}, {"role": "tool", "name": "f"}]
)
def test_a_message_without_content_is_named_before_the_template_is_asked(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]=.*: has no content\. Add it: \{'role': '") as caught:
        ChatTemplate("{{ messages[1].content }}").render([USER, message])
    assert (caught.value.field, caught.value.index) == ("messages", 1)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert ChatTemplate("x").render([USER, {"role": "assistant", "tool_calls": [call]}]) == "x"


def test_tools_are_dicts() -> None:
    with pytest.raises(InvalidRequest, match="JSON schemas"):
        ChatTemplate("x").render([USER], tools=[print])


def test_the_words_of_a_template_can_be_printed() -> None:
    template = ChatTemplate("{{ raise_exception('no \x1b]52;c;QQ==\x07 \u202e way\nat all') }}")
    with pytest.raises(
        InvalidRequest, match=r"refused by the chat template: no \ufffd]52;c;QQ==\ufffd \ufffd way\nat all"
    ):
        template.render([{"role": "user", "content": "Hi"}])


def test_arguments_as_text_are_counted_before_they_are_read() -> None:
    """A body of 30 MB could have one string with ten million lists in it: a second for which nothing else ran."""
    template = ChatTemplate("{{ messages | length }}")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": [' + "[]," * 300_000 + "[]]}"}}
    longer = {"type": "function", "function": {"name": "f", "arguments": '{"a": [' + "[]," * 400_000 + "[]]}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert template.render([message]) == "1"
    for convert in (template.render, lambda given: with_calls_as_text(given, HERMES)):
        with pytest.raises(InvalidRequest, match=r"have calls with 4,.* characters of arguments, and 4,194,304 are"):
            convert([message] * 5)
        for several in ([longer], [call["function"], longer["function"]]):
            with pytest.raises(InvalidRequest, match=r"have a call with 1,.* characters of arguments, and 1,048,576"):
                convert([{**message, "tool_calls": several}])


def test_a_folder_has_a_bounded_number_of_templates(tmp_path: Path) -> None:
    """A link to one of 4 MB can stand there a thousand times."""
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (tmp_path / "one").write_text("x")
    for number in range(64):
        (folder / f"t{number}.jinja").symlink_to(tmp_path / "one")
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None and len(loaded.templates) == 64
    (folder / "more.jinja").symlink_to(tmp_path / "one")
    with pytest.raises(CheckpointError, match="has more than 64 chat templates"):
        ChatTemplate.load(tmp_path)
