"""Format strings of chat templates, read by hand in one pass: `%`, `str.format` and formats of dates.

Python's own functions pad to any width that a format names, and `str.format` reaches attributes of its arguments.
Widths and the length of each field are bounded here, and fields are names or positions alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.text.template_limits import Meter, TemplateLimit, TemplateRefusal, text_of

_FIELD = 64  # characters of a field, with its name
_DIGITS = 3  # of a width or a precision
_FLAGS = "-+ #0"
_NUMBERS = frozenset("dioxXeEfFgGu")
_DATE = 200  # characters of a format of a date
_OF_DATES = frozenset("aAbBcdDeFgGhHIjmMnprRStTuUVwWxXyYzZ%")


def percent(meter: Meter, form: str, values: Any) -> str:
    """Return `form % values`."""
    given: Sequence[Any] = values if type(values) is tuple else (values,)
    parts: list[str] = []
    at = used = size = 0
    named = False
    while (sign := form.find("%", at)) >= 0:
        meter.step()
        parts.append(form[at:sign])
        key, directive, at = _directive(form, sign + 1)
        kind = directive[-1]
        if kind == "%":
            parts.append("%")
            continue
        if key is not None:
            if type(values) is not dict:
                raise TypeError("format requires a mapping")
            value, named = values[key], True
        else:
            if used == len(given):
                raise TypeError("not enough arguments for format string")
            value = given[used]
            used += 1
        if kind == "s":
            value = text_of(meter, value)
        elif kind not in _NUMBERS and kind != "c":
            raise TemplateRefusal(f"the format %{kind}")
        elif not isinstance(value, int | float) and not (kind == "c" and type(value) is str):
            raise TypeError(f"%{kind} format: a number is required, not {type(value).__name__}")
        text = f"%{directive}" % (value,)
        size += len(text)
        meter.expect(size)
        parts.append(text)
    if used < len(given) and not named and type(values) is not dict:
        raise TypeError("not all arguments converted during string formatting")
    meter.expect(size + len(form))
    return meter.text("".join([*parts, form[at:]]))


def _directive(form: str, start: int) -> tuple[str | None, str, int]:
    """Return the key of a directive that begins after `%`, the directive without it, and where it ends."""
    at, key = start, None
    if form.startswith("(", at):
        end = form.find(")", at, at + _FIELD)
        if end < 0:
            raise ValueError("incomplete format key, or a long one")
        key, at = form[at + 1 : end], end + 1
    begin = at
    while form[at : at + 1] and form[at] in _FLAGS and at - begin < len(_FLAGS):
        at += 1
    at = _number(form, at)
    if form.startswith(".", at):
        at = _number(form, at + 1)
    if form[at : at + 1] and form[at] in "hlL":
        at += 1
    if at == len(form):
        raise ValueError("incomplete format")
    return key, form[begin : at + 1], at + 1


def _number(form: str, at: int) -> int:
    """Return where the digits from `at` on end. Raises `TemplateLimit` for a number of too many."""
    end = at
    while end < len(form) and "0" <= form[end] <= "9":
        end += 1
        if end - at > _DIGITS:
            raise TemplateLimit(f"a format has a width or precision of more than {_DIGITS} digits")
    return end


def braces(meter: Meter, form: str, values: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Return `form.format(*values, **named)`."""
    parts: list[str] = []
    at = next_place = size = 0
    opening, closing = form.find("{"), form.find("}")
    while opening >= 0 or closing >= 0:
        meter.step()
        brace = min(place for place in (opening, closing) if place >= 0)
        parts.append(form[at:brace])
        if form.startswith(form[brace], brace + 1):  # doubled
            parts.append(form[brace])
            at = brace + 2
        elif brace == closing:
            raise ValueError("single '}' encountered in format string")
        elif closing < 0:
            raise ValueError("expected '}' before end of string")
        elif closing - opening > _FIELD:
            raise TemplateLimit(f"a field of a format has more than {_FIELD} characters")
        else:
            name, spec = _field(form[opening + 1 : closing])
            if not name:
                name, next_place = str(next_place), next_place + 1
            value = values[int(name)] if name.isascii() and name.isdigit() else named[name]
            parts.append(_formatted(meter, value, spec))
            size += len(parts[-1])
            meter.expect(size)
            at = closing + 1
        # Each brace is looked for once: if no further one is found, the search is not repeated.
        if 0 <= opening < at:
            opening = form.find("{", at)
        if 0 <= closing < at:
            closing = form.find("}", at)
    parts.append(form[at:])
    meter.expect(size + len(form))
    return meter.text("".join(parts))


def _field(field: str) -> tuple[str, str]:
    name, _, spec = field.partition(":")
    name, mark, conversion = name.partition("!")
    if "{" in field:
        raise TemplateRefusal("a field within a field of a format")
    if "." in name or "[" in name:
        raise TemplateRefusal(f"the field {{{name}}} of a format")
    if mark and conversion != "s":
        raise TemplateRefusal(f"the conversion !{conversion} of a format")
    return name, spec


def _formatted(meter: Meter, value: Any, spec: str) -> str:
    digits = 0
    for character in spec:
        digits = digits + 1 if character.isdecimal() else 0  # digits of any script count as a width
        if digits > _DIGITS:
            raise TemplateLimit(f"a format has a width or precision of more than {_DIGITS} digits")
    if not spec:
        return text_of(meter, value)
    if type(value) in (bool, int, float):
        return format(value, spec)
    meter.step(len(text := text_of(meter, value)))
    return format(text, spec)


def date(form: str) -> str:
    """Return today's date and the time in a format of `strftime`. A width, which it would pad to, is refused."""
    at, known = 0, isinstance(form, str) and len(form) <= _DATE
    while known and (sign := form.find("%", at)) >= 0:
        at = sign + 2 + (form[sign + 1 : sign + 2] in ("-", "_", "0", "^", "#"))
        known = form[at - 1 : at] in _OF_DATES
    if not known:
        raise ValueError(
            f"strftime_now({form[:40]!r}) is not a format of a date" if isinstance(form, str) else "no format"
        )
    return datetime.datetime.now().strftime(form)
