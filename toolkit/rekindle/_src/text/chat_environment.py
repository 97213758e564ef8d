"""The environment that compiles chat templates: Jinja's sandbox, with transformers' additions."""

from __future__ import annotations

import datetime
import functools
import json
import re
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes

from rekindle._src.text.template_limits import BoundedEnvironment, TemplateLimit, joined

_WIDTH = re.compile(r"%[^A-Za-z]*[0-9]{2}")  # a field width: the C library pads to it


@functools.lru_cache(maxsize=64)
def compiled(text: str, limit: int) -> jinja2.Template:
    """Return the compiled template of a text of at most `limit` characters; may raise any exception."""
    if len(text) > limit:
        raise TemplateLimit(f"it has {len(text):,} characters, and at most {limit:,} are allowed")
    return _environment().from_string(text)


class _Generation(jinja2.ext.Extension):
    """The tags `{% generation %} … {% endgeneration %}` around the assistant's words, rendered as their content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers, so that variables set inside have the same scope.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore: they could lead to the interpreter."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may store a value called `self`
        instance, *rest = args
        values_by_name = dict(*rest, **values)
        for name in values_by_name:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(instance, values_by_name)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)  # attributes of the object itself are the template's values
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 200 or _WIDTH.search(form):
        raise jinja2.TemplateError(f"strftime_now({form[:40]!r}) is not a format of a date")
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int) and indent > 16:
        raise jinja2.TemplateError(f"tojson(indent={indent}) indents by more than 16")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return joined(encoder.iterencode(value))


@functools.cache
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own one escapes HTML
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
    return environment
