"""`response_template`: how a checkpoint says that its replies are read, in version 1 of transformers' form.

It is a key of `tokenizer_config.json`: fields, each with the text or the pattern at which it opens and closes, and how
its content is read. It is a stranger's: keys, counts and patterns are checked when it is loaded, and a template with
anything that is not read is refused as a whole, with the reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rekindle._src.core.names import printable
from rekindle._src.text.replies.arguments import json_value
from rekindle._src.text.replies.call import MalformedCall
from rekindle._src.text.replies.gemma_reader import read_loose_value
from rekindle._src.text.replies.patterns import MAX_PROGRAM, Pattern, PatternError
from rekindle._src.text.replies.python_reader import read_calls
from rekindle._src.text.replies.tag_reader import whole

MAX_FIELDS, MAX_LITERALS = 32, 64
MAX_LITERAL = 1_024  # characters of a text
MAX_DELIMITERS = 4  # pairs around texts, all of which are looked for at each value
_MAX_NODES = 256  # of a transform
_STEPS = 400  # of a pattern of tags, for each character of a region
TAG_STEPS = 1 << 20  # and for a whole one
PROMPT_CHARACTERS, PROMPT_STEPS = 32_768, 1 << 19  # of a prompt's end, which is read before its reply
_TOKEN = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")  # the usual look of a special token
_VARIABLE = re.compile(r"\{([A-Za-z_][\w.]*)\}")
_TOP = ("version", "defaults", "fields", "start_anchor", "start_anchor_pattern")
_FIELD = (
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
)  # fmt: skip
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "text": ("strip",),
    "int": (),
    "float": (),
    "bool": (),
    "json": ("unquoted_keys", "string_delims", "allow_non_json"),
    "xml-inline": ("tag_pattern", "value_parser", "merge_duplicates"),
    "kv-lines": ("line_sep", "kv_sep", "strip", "value_parser"),
    "python-call-list": (),
}
_VALUES = ("text", "int", "float", "bool", "json")  # kinds of a value between tags or in a line

Parse = Callable[[str], Any]


class TemplateError(ValueError):
    """A response template that is not read; the message says where and why."""


class Marks(NamedTuple):
    """Where something begins or ends: at one of some texts, or at a pattern."""

    texts: tuple[str, ...] = ()
    pattern: Pattern | None = None

    @property
    def are_none(self) -> bool:
        """True if there are none."""
        return not self.texts and self.pattern is None


@dataclasses.dataclass(frozen=True)
class ReplyField:
    """A field of a reply."""

    name: str
    opens: Marks
    closes: Marks
    kind: str
    parse: Parse
    strip: bool
    repeats: bool
    join: str | None
    transform: Any
    transform_each: bool

    @property
    def is_implicit(self) -> bool:
        """True for the field of all text outside of the others."""
        return self.opens.are_none

    def values(self, text: str, groups: Mapping[str, str]) -> list[Any]:
        """Return the values that a region's text has. Raise `MalformedCall` if it has none."""
        content = self.parse(text)
        if self.transform is None:
            return content if isinstance(content, list) else [content]
        if not self.transform_each:
            return [_transformed(self.transform, {**groups, "content": content})]
        if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
            raise MalformedCall
        return [_transformed(self.transform, {**groups, **one}) for one in content]


@dataclasses.dataclass(frozen=True)
class ResponseTemplate:
    """A response template that was read."""

    fields: tuple[ReplyField, ...]
    anchor: Marks

    @classmethod
    def load(cls, source: Any) -> ResponseTemplate:
        """Return the template of the key's value. Raise `TemplateError` for an unsupported one."""
        top = _mapping(source, "response_template", _TOP)
        if top.get("version", 1) != 1:
            raise TemplateError(f"version {_shown(top['version'])} is not read, only 1")
        listed = _mapping(top.get("fields"), "fields")
        if not 0 < len(listed) <= MAX_FIELDS:
            raise TemplateError(f"fields: there are {len(listed)}, and 1 to {MAX_FIELDS} are read")
        anchor = _marks(top, "start_anchor", "start_anchor_pattern", "response_template")
        if anchor.are_none:
            raise TemplateError("start_anchor is missing")
        fields = tuple([_field(str(name), value) for name, value in listed.items()])
        if sum(field.is_implicit for field in fields) > 1:
            raise TemplateError("fields: more than one has neither open nor open_pattern")
        template = cls(fields, anchor)
        if template.steps > MAX_PROGRAM:
            raise TemplateError(f"its patterns take {template.steps:,} steps together, and {MAX_PROGRAM} are read")
        return template

    @property
    def steps(self) -> int:
        """The steps of all patterns that a text goes through, together."""
        marks = [self.anchor, *(marks for field in self.fields for marks in (field.opens, field.closes))]
        return sum(len(one.pattern.program) for one in marks if one.pattern is not None)

    @property
    def texts(self) -> frozenset[str]:
        """All texts that may be special tokens, so that a reply has to show them."""
        marks = [marks for field in self.fields for marks in (field.opens, field.closes)]
        texts = [text for one in marks for text in one.texts]
        texts += [one.pattern.text.replace("\\", "") for one in marks if one.pattern is not None]
        return frozenset([*texts, *(token for text in texts for token in _TOKEN.findall(text))])

    def after_anchor(self, prompt: str) -> str:
        """Return a prompt's text after its last anchor; "" if its end has none, or takes too long to search.

        The end is as long as all patterns may read in `PROMPT_STEPS`.
        """
        start = max(len(prompt) - min(PROMPT_CHARACTERS, PROMPT_STEPS // max(self.steps, 1)), 0)
        ends = [place + len(text) for text in self.anchor.texts if (place := prompt.rfind(text, start)) >= 0]
        if self.anchor.pattern is not None:
            try:
                ends = [match.end for match in self.anchor.pattern.finditer(prompt, PROMPT_STEPS, start)][-1:]
            except PatternError:
                ends = []
        return prompt[max(ends, default=len(prompt)) :]


def _field(name: str, source: Any) -> ReplyField:
    scope = f"fields.{_shown(name)}"
    keys = _mapping(source, scope, _FIELD)
    opens = _marks(keys, "open", "open_pattern", scope)
    closes = _marks(keys, "close", "close_pattern", scope)
    kind = keys.get("content", "text")
    if not isinstance(kind, str) or kind not in _ARGUMENTS:
        raise TemplateError(f"{scope}.content: {_shown(kind)} is none of {', '.join(_ARGUMENTS)}")
    arguments = _mapping(keys.get("content_args", {}), f"{scope}.content_args", _ARGUMENTS[kind])
    join = keys.get("join")
    if join is not None and not (isinstance(join, str) and keys.get("repeats")):
        raise TemplateError(f"{scope}.join: it has to be a text, of a field that repeats")
    groups = [name for marks in (opens, closes) if marks.pattern is not None for name in marks.pattern.names]
    transform = keys.get("transform")
    if transform is None and groups:
        raise TemplateError(f"{scope}: its patterns have groups, and there is no transform for them")
    _check_transform(transform, scope, None if keys.get("transform_each") else {*groups, "content"})
    return ReplyField(
        name, opens, closes, kind, _parser(kind, arguments, scope), arguments.get("strip", True) is not False,
        bool(keys.get("repeats")), join, transform, bool(keys.get("transform_each")),
    )  # fmt: skip


def _marks(keys: Mapping[str, Any], text_key: str, pattern_key: str, scope: str) -> Marks:
    texts, pattern = keys.get(text_key), keys.get(pattern_key)
    if texts is not None and pattern is not None:
        raise TemplateError(f"{scope}: both {text_key} and {pattern_key}")
    if pattern is not None:
        return Marks((), _pattern(pattern, f"{scope}.{pattern_key}"))
    if texts is None:
        return Marks()
    listed = [texts] if isinstance(texts, str) else texts
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_LITERALS:
        raise TemplateError(f"{scope}.{text_key}: it has to be a text, or a list of at most {MAX_LITERALS}")
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_LITERAL for text in listed):
        raise TemplateError(f"{scope}.{text_key}: a text has 1 to {MAX_LITERAL:,} characters")
    return Marks(tuple(sorted(set(listed), key=lambda text: (-len(text), text))))


def _pattern(source: Any, scope: str) -> Pattern:
    if not isinstance(source, str):
        raise TemplateError(f"{scope}: it is no text")
    try:
        return Pattern.parse(source)
    except PatternError as error:
        raise TemplateError(f"{scope}: the pattern {_shown(source)} {error}") from None


def _mapping(source: Any, scope: str, keys: Sequence[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(source, Mapping):
        raise TemplateError(f"{scope}: it is no object")
    unknown = [key for key in source if keys is not None and key not in keys]
    if unknown:
        raise TemplateError(f"{scope}: the key {_shown(unknown[0])} is not read")
    return source


def _shown(value: object) -> str:
    return printable(repr(value)[:80], 80)


def _parser(kind: str, arguments: Mapping[str, Any], scope: str) -> Parse:
    """Return the function that reads a content of a kind."""
    if kind == "json":
        return _json_parser(arguments, scope)
    if kind in ("int", "float"):
        number = int if kind == "int" else float
        return lambda text: _number(number, text)
    if kind == "bool":
        return lambda text: text.strip().lower() in ("true", "1")
    if kind == "text":
        return (lambda text: text) if arguments.get("strip", True) is False else str.strip
    if kind == "python-call-list":
        return lambda text: whole(text, read_calls)
    as_it_is = {"name": "text", "args": {"strip": False}}
    inner = _mapping(arguments.get("value_parser", as_it_is), f"{scope}.value_parser", ("name", "args"))
    name = inner.get("name", "text")
    if name not in _VALUES:
        raise TemplateError(f"{scope}.value_parser: {_shown(name)} is not read")
    scope = f"{scope}.value_parser"
    value = _parser(name, _mapping(inner.get("args", {}), scope, _ARGUMENTS[name]), scope)
    if kind == "kv-lines":
        line, pair = str(arguments.get("line_sep", "\n")), str(arguments.get("kv_sep", ":"))
        if not line or not pair:
            raise TemplateError(f"{scope}: a separator is empty")
        return lambda text: _of_lines(text, line, pair, value, strip=arguments.get("strip", True) is not False)
    pattern = _pattern(arguments.get("tag_pattern"), f"{scope}.tag_pattern")
    if not {"key", "value"} <= {*pattern.names}:
        raise TemplateError(f"{scope}.tag_pattern: it has no groups named key and value")
    return lambda text: _of_tags(text, pattern, value, merge=bool(arguments.get("merge_duplicates")))


def _number(kind: type[int] | type[float], text: str) -> int | float:
    if len(text) > 400:
        raise MalformedCall
    try:
        return kind(text.strip())
    except (ValueError, OverflowError):
        raise MalformedCall from None


def _json_parser(arguments: Mapping[str, Any], scope: str) -> Parse:
    delimiters = arguments.get("string_delims") or []
    pairs = (
        [pair for pair in delimiters if isinstance(pair, list) and len(pair) == 2]
        if isinstance(delimiters, list)
        else []
    )
    if len(pairs) != len(delimiters) or not all(isinstance(text, str) and text for pair in pairs for text in pair):
        raise TemplateError(f"{scope}.string_delims: it has to be a list of pairs of texts")
    if len(pairs) > MAX_DELIMITERS or any(len(text) > MAX_LITERAL for pair in pairs for text in pair):
        raise TemplateError(
            f"{scope}.string_delims: at most {MAX_DELIMITERS} pairs are read, of texts of {MAX_LITERAL:,} characters"
        )
    quotes = tuple((pair[0], pair[1]) for pair in pairs)
    loose, any_text = bool(arguments.get("unquoted_keys") or quotes), bool(arguments.get("allow_non_json"))

    def parse(text: str) -> Any:
        try:
            return whole(text, lambda source: read_loose_value(source, quotes)) if loose else json_value(text)
        except MalformedCall:
            if any_text:
                return text
            raise

    return parse


def _of_tags(text: str, pattern: Pattern, value: Parse, *, merge: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    try:
        for match in pattern.finditer(text, min(_STEPS * (len(text) + 100), TAG_STEPS)):
            groups = {name: text[start:end] for name, start, end in match.groups}
            _put(values, groups.get("key", ""), value(groups.get("value", "")), merge=merge)
    except PatternError:
        raise MalformedCall from None
    return values


def _of_lines(text: str, line: str, pair: str, value: Parse, *, strip: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for entry in text.split(line):
        key, found, rest = entry.partition(pair)
        if found:
            _put(values, key.strip() if strip else key, value(rest.strip() if strip else rest), merge=False)
    return values


def _put(values: dict[str, Any], key: str, value: Any, *, merge: bool) -> None:
    before = values.get(key) if merge else None
    if isinstance(before, list):
        before.append(value)
    elif merge and key in values:
        values[key] = [before, value]
    else:
        values[key] = value


def _check_transform(transform: Any, scope: str, known: set[str] | None) -> None:
    """Raise `TemplateError` for an unknown variable, or one within other text. None allows all variables."""
    todo, count = [transform], 0
    while todo:
        node = todo.pop()
        count += 1
        if count > _MAX_NODES:
            raise TemplateError(f"{scope}.transform: it has more than {_MAX_NODES} values")
        if isinstance(node, Mapping):
            todo += node.values()
        elif isinstance(node, list):
            todo += node
        elif isinstance(node, str) and _VARIABLE.search(node):
            match = _VARIABLE.fullmatch(node)
            if match is None:
                raise TemplateError(f"{scope}.transform: {_shown(node)} has a variable within other text")
            if known is not None and match[1].partition(".")[0] not in known:
                raise TemplateError(f"{scope}.transform: {_shown(node)} is no group of the pattern")


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, Mapping):
        return {key: _transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_transformed(value, scope) for value in transform]
    match = _VARIABLE.fullmatch(transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    value: Any = scope
    for key in match[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise MalformedCall
        value = value[key]
    return value
