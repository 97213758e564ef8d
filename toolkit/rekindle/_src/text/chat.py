"""Chat messages to a prompt, by the checkpoint's own Jinja template, rendered as transformers does.

Templates are code from a download: they run in Jinja's sandbox on plain data, with the operations that templates in
use need and no others, each counted before it runs (`template_operations.py`). Any exception of a template becomes a
`CheckpointError` or an `InvalidRequest`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle._src.core import words
from rekindle._src.core.names import nearest, printable
from rekindle._src.core.options import check_unicode
from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.models.loading.stores.model_store import children
from rekindle._src.text.tokenizer import read_json, special_tokens
from rekindle.errors import CheckpointError, ConfigError, InvalidRequest, abbreviated

if TYPE_CHECKING:
    from rekindle._src.text.replies.format import ReplyFormat
    from rekindle._src.text.template_code import TemplateCode

log = logging.getLogger("rekindle.chats")

Messages = Sequence[Mapping[str, Any]]
_ROLES = ("user", "assistant", "system", "tool", "developer", "function")
_FOREIGN_ROLES = {"human": "user", "ai": "assistant", "bot": "assistant", "model": "assistant", "gpt": "assistant"}
REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE = "\x00continue\x00"
_FILE = 1 << 22  # bytes of a file with a template
_FILES = 64  # templates of a checkpoint
_SHOWN = 300  # characters of a template's own message that an error repeats
_UNTRIMMED = " "  # follows the mark; a template that trims the message removes it


class ChatTemplate:
    """The chat template of a checkpoint, or several by name."""

    def __init__(
        self, templates: str | Mapping[str, str], special: Mapping[str, str] | None = None, *, source: str = "template"
    ) -> None:
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.special = dict(special or {})
        self.source = source
        self._format_name = "auto"  # of replies
        self._response_template: Any = None  # of the checkpoint: JSON, then the template that was read
        self._told: set[str] = set()  # problems that were logged

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate | None:
        """Return the template of a folder or GGUF file; None if it has none. Files win over tokenizer_config.json."""
        folder = Path(folder)
        if is_file(folder):
            from rekindle._src.text.gguf import reading as gguf  # other formats don't need it

            templates, special = gguf.read_templates(folder)
            return cls(templates, special, source=str(folder)) if templates else None
        files = {"default": folder / "chat_template.jinja"}
        files |= {path.stem: path for path in _additional(folder)}
        texts: Any = {name: _read_template(path) for name, path in files.items() if path.exists()}
        source = folder / "chat_template.jinja"
        for name in ("tokenizer_config.json", "chat_template.json"):
            if not texts:
                source = folder / name
                texts = read_json(source).get("chat_template")
        if isinstance(texts, list):
            entries = [entry if isinstance(entry, dict) else {} for entry in texts]
            texts = {str(entry.get("name")): entry.get("template") for entry in entries}
        listed = texts.values() if isinstance(texts, dict) else [texts or ""]
        if not all(isinstance(text, str) for text in listed):
            raise CheckpointError(f"{source} has a chat_template that is no text. Download it again")
        if not texts:
            return None
        chat = cls(texts, special_tokens(folder), source=str(source))
        chat._response_template = read_json(folder / "tokenizer_config.json").get("response_template")
        return chat

    def text(self, template: str | None = None, *, tools: bool = False) -> str:
        """Return the text of the template that `render` would use. `tools` is True if the chat has tools."""
        return self._pick(template, tools)[1]

    def code(self, template: str | None = None, *, tools: bool = False) -> TemplateCode:
        """Return the template that `render` would use, parsed. Raises `CheckpointError` if it can't be."""
        return self._parse(*self._pick(template, tools))

    def replies_are(self, name: str) -> None:
        """Set the format of all replies; "auto" leaves it to the files. Raise `ConfigError` for an unknown name."""
        if name != "auto":
            from rekindle._src.text.replies.format import ReplyFormat  # a start without chats needs no syntaxes

            if name not in (names := ReplyFormat.names()):
                fix = f"Use 'auto', or one of: {', '.join(names)}"
                raise ConfigError("reply_format", name, "is no known format of replies", fix)
        self._format_name = name

    def reply_format(self, template: str | None = None, *, tools: bool = False) -> ReplyFormat:
        """Return the format of replies: the one named at opening, else the checkpoint's own, else its template's.

        What is not understood is logged once. A template's own text as `template` speaks for itself.
        """
        from rekindle._src.text.replies.format import ReplyFormat  # a start without chats needs no syntaxes
        from rekindle._src.text.replies.response_template import ResponseTemplate, TemplateError

        if self._format_name != "auto":
            return ReplyFormat.of_family(self._format_name)
        code = self.code(template, tools=tools)
        format = ReplyFormat.of_template(code)
        own = template is None or template in self.templates
        if own and self._response_template is not None:
            if not isinstance(self._response_template, ResponseTemplate):
                try:
                    self._response_template = ResponseTemplate.load(self._response_template)
                except (TemplateError, RecursionError) as error:
                    problem = printable(str(error), _SHOWN)
                    self._tell("response_template", f"{problem}. Replies are read as the chat template shows them")
                    self._response_template = None
            if self._response_template is not None:
                return dataclasses.replace(format, template=self._response_template)
        if format.is_guess and tools and not code.refuses_tools:
            self._tell(
                "chat template",
                "it takes tools and shows no syntax of calls that is known. Calls are read as Hermes', "
                "<tool_call>{…}</tool_call>; others stay in the text. Open the model with reply_format=…: "
                f"{', '.join(ReplyFormat.names())}",
            )
        return format

    def _tell(self, what: str, problem: str) -> None:
        """Log a problem with a part of the files once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s: the %s is not understood: %s", self.source, what, problem)

    def render(
        self,
        messages: Messages,
        /,  # a variable may have any name
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **variables: object,
    ) -> str:
        """Return the prompt as text. Encode it with `add_special_tokens=False`: the template writes them itself.

        It runs in this thread and may take up to `template_limits.SECONDS`. `template` is the name of one of several
        templates, or a template's own text. `continue_final_message` leaves the last message open, so that the model
        goes on with it. Other keywords are variables of the template.
        """
        return self.prepare(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            **variables,
        )()

    def prepare(
        self,
        messages: Messages,
        /,  # a variable may have any name
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **variables: object,
    ) -> Callable[[], str]:
        """Check and copy the arguments of `render`, and return a function that runs the template in any thread."""
        if continue_final_message and add_generation_prompt:
            add_generation_prompt = False
        name, text = self._pick(template, tools is not None)
        code = self._parse(name, text)
        try:
            chat = _messages(messages, code)
            if not code.writes("developer"):  # OpenAI's newer name of the system message
                chat = [
                    {**message, "role": "system"} if message["role"] == "developer" else message for message in chat
                ]
            extra = {key: _plain(value) for key, value in variables.items()}
            schemas, sources = _schemas("tools", tools), _schemas("documents", documents)
        except RecursionError:
            raise InvalidRequest("messages", len(messages), "are nested too deeply", "Flatten them") from None
        if continue_final_message:
            chat[-1]["content"] = _mark_end(chat[-1].get("content"))
        scope = {
            **self.special,
            **extra,
            "messages": chat,
            "tools": schemas,
            "documents": sources,
            "add_generation_prompt": add_generation_prompt,
        }

        def rendered() -> str:
            filled = self._run(name, code, scope)
            check_unicode("messages", filled, InvalidRequest)  # arguments of calls are JSON, which has escapes for it
            return _cut(filled) if continue_final_message else filled

        return rendered

    def _parse(self, name: str, text: str) -> TemplateCode:
        # Jinja takes a fiftieth of a second to import, and only chats need it.
        from rekindle._src.text import template_code

        try:
            return template_code.parsed(text)
        except Exception as error:  # RecursionError, and a ValueError for a number of 5,000 digits
            raise self._uncompiled(name, error) from error

    def _uncompiled(self, name: str, error: Exception) -> CheckpointError:
        number = getattr(error, "lineno", None)
        line = f", line {number}" if number is not None else ""
        problem = f"it uses {_words(error)}, which chat templates may not use" if _is_refusal(error) else _words(error)
        return CheckpointError(
            f"{self.source}: chat template {name!r} can't be compiled{line}: {problem}. "
            "Pass another one as template=..."
        )

    def _run(self, name: str, code: TemplateCode, scope: dict[str, Any]) -> str:
        """Return the template's output. Raises `CheckpointError` if it can't be compiled, else `InvalidRequest`."""
        from rekindle._src.text.template_limits import TemplateLimit

        try:
            code.program()
        except Exception as error:
            raise self._uncompiled(name, error) from error
        try:
            return code.render(scope)
        except TemplateLimit as error:
            raise InvalidRequest(
                "messages",
                f"{len(scope['messages'])} messages",
                f"the chat template {name!r} was stopped: {error}",
                "Pass fewer or shorter messages, or another template as template=...",
            ) from error
        except Exception as error:  # a template can raise any of them, RecursionError and MemoryError too
            if _is_refusal(error):
                raise CheckpointError(
                    f"{self.source}: chat template {name!r} uses {_words(error)}, which chat templates may not use. "
                    "Pass another one as template=..."
                ) from error
            other = next(filter(misnamed, scope["messages"]), None)
            raise InvalidRequest(
                "messages",
                scope["messages"],
                f"refused by the chat template: {_words(error)}",
                "Change roles or content" + (", or leave the tools out" if scope.get("tools") else "")
                if other is None
                else _as_message(other),
            ) from error

    def _pick(self, template: str | None, with_tools: bool) -> tuple[str, str]:
        if template is not None:
            if not isinstance(template, str):
                raise InvalidRequest("template", template, "is no text", "Pass a template's name, or its own text")
            return (template, self.templates[template]) if template in self.templates else ("given", template)
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self.templates:
                return name, self.templates[name]
        raise InvalidRequest(
            "template",
            None,
            f"{self.source} has no default template, only {sorted(self.templates)}",
            "Name one of them",
        )


def _is_refusal(error: BaseException) -> bool:
    from rekindle._src.text.template_limits import TemplateRefusal

    return isinstance(error, TemplateRefusal)


def _words(error: BaseException) -> str:
    """Return the message of an exception, cut to `_SHOWN` characters, without control characters of a template."""
    return printable(words.shorten(str(error) or type(error).__name__, _SHOWN), _SHOWN, kept="\n")


def _additional(folder: Path) -> list[Path]:
    """Return the files of a folder's other templates. Raise `CheckpointError` for too many."""
    paths = [path for path in children(folder / "additional_chat_templates") if path.suffix == ".jinja"]
    if len(paths) > _FILES:
        raise CheckpointError(f"{folder} has more than {_FILES} chat templates. Remove unused ones")
    return paths


def _read_template(path: Path) -> str:
    try:
        return read_plain(path, _FILE).decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as a chat template ({error}). Download it again") from error


_CONTENT_ELSEWHERE = ("text", "message", "value", "parts", "body")  # names of a message's content in other libraries
_NO_CONTENT = frozenset({"role", "name", "id", "tool_call_id"})  # fields of messages that say nothing by themselves


def misnamed(message: Any) -> str:
    """Return the name under which a message has its content in place of "content"; empty if it has none."""
    if not isinstance(message, Mapping) or message.get("content") is not None or message.get("tool_calls"):
        return ""
    return next((name for name in _CONTENT_ELSEWHERE if message.get(name) is not None), "")


def _as_message(value: Any) -> str:
    """Return how a message of another library, or one without content, is written here."""
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return f"Pass {{'role': {value[0]!r}, 'content': ...}}"
    if not isinstance(value, Mapping):
        return "Pass {'role': ..., 'content': ...}"
    role = value.get("role", value.get("from", "user"))
    role = _FOREIGN_ROLES.get(role.lower(), role) if isinstance(role, str) else role
    written = f"{{'role': {abbreviated(role)}, 'content': ...}}"
    if name := misnamed(value):
        return f"Write {written}: its {name!r} is 'content' here"
    return f"Add it: {written}" if "role" in value else f"Pass {written}"


def _messages(messages: Messages, template: TemplateCode) -> list[dict[str, Any]]:
    """Return plain copies of the messages, without fields that are None, and with reasoning under each name in use."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable) or not messages:
        raise InvalidRequest(
            "messages", messages, "is not a list of messages", "Pass a text, or [{'role': ..., 'content': ...}]"
        )
    from rekindle._src.text.replies.call import check_arguments  # a start without chats needs no syntaxes

    check_arguments(messages)
    chat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequest("messages", message, "is not a message", _as_message(message))
        _check_role(message["role"], template)
        said = {name for name, value in message.items() if value is not None and name not in _NO_CONTENT}
        if not said or (misnamed(message) and not any(map(template.reads_field, said))):
            raise InvalidRequest("messages", dict(message), "has no content", _as_message(message), index)
        plain = {str(key): _plain(value) for key, value in message.items() if value is not None}
        reasoning = next((plain[key] for key in REASONING if key in plain), None)
        if reasoning is not None:
            if template.thinks_in_blocks and isinstance(reasoning, str):
                plain["content"] = _with_thoughts(reasoning, plain.get("content"))
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_read_arguments(call) for call in plain["tool_calls"]]
        chat.append(plain)
    return chat


def _with_thoughts(reasoning: str, content: Any) -> Any:
    """Return a message's content with reasoning as its first block; as it is if it consists of blocks already."""
    if not (content is None or isinstance(content, str)):
        return content
    return [{"type": "thinking", "thinking": reasoning}, *([{"type": "text", "text": content}] if content else [])]


def _check_role(role: Any, template: TemplateCode) -> None:
    """Raise `InvalidRequest` for a role that is neither usual nor named in the template.

    Most templates write any role, and the model then answers to a role that it was never trained on.
    """
    if role in _ROLES or (isinstance(role, str) and template.compares(role)):
        return
    close = nearest(role.lower(), _ROLES, 0.5) if isinstance(role, str) else None
    suggestion = close or _FOREIGN_ROLES.get(str(role).lower())
    fix = f"Did you mean {suggestion!r}?" if suggestion else f"Use one of {', '.join(map(repr, _ROLES))}"
    raise InvalidRequest("role", role, "is no role of a message", fix)


def _read_arguments(call: Any) -> Any:
    """Return the call with its arguments as an object: OpenAI's clients send text, and templates write JSON of it.

    Text that is not a JSON object stays as it is.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    plain = {**function, "arguments": arguments}
    return {**call, "function": plain} if "function" in call else plain


def _plain(value: Any) -> Any:
    """Return the value rebuilt from JSON types. Others have methods that the sandbox would let a template call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(str.__str__(value) if kind is str else value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _schemas(field: str, entries: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if entries is None:
        return None
    for entry in entries:
        if not isinstance(entry, Mapping):
            fix = "Pass JSON schemas as dicts" if field == "tools" else "Pass dicts with title and text"
            raise InvalidRequest(field, entry, "is not a dict", fix)
    return [_plain(entry) for entry in entries]


def _mark_end(content: Any) -> Any:
    if isinstance(content, str):
        return content + _CONTINUE + _UNTRIMMED
    if isinstance(content, list) and any("text" in part for part in content):
        last = max(i for i, part in enumerate(content) if "text" in part)
        return [
            {**part, "text": part["text"] + _CONTINUE + _UNTRIMMED} if i == last else part
            for i, part in enumerate(content)
        ]
    raise InvalidRequest("continue_final_message", True, "the last message has no text to continue", "Add its content")


def _cut(rendered: str) -> str:
    at = rendered.rfind(_CONTINUE)
    if at < 0:
        raise InvalidRequest(
            "continue_final_message",
            True,
            "the chat template drops the last message's text",
            "Use add_generation_prompt",
        )
    untrimmed = rendered.startswith(_CONTINUE + _UNTRIMMED, at)
    return rendered[:at] if untrimmed else rendered[:at].rstrip()
