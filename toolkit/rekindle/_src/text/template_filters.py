"""The filters and tests that a chat template may use, by name.

They are limited to the needs of templates in use, and behave like Jinja's own. Like the other operations of
`template_operations.py`, each counts what it costs before it runs, and what it makes.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import jinja2
import jinja2.tests
import markupsafe
from jinja2.runtime import LoopContext, Macro

from rekindle._src.text import format_strings
from rekindle._src.text.template_limits import Meter, TemplateLimit, TemplateRefusal, joined, text_of
from rekindle._src.text.template_operations import (
    COMPARISONS,
    SCALARS,
    TEXT_METHODS,
    Function,
    Operation,
    Rounds,
    binary,
    cut,
    entries_of,
    item,
    items_of_dict,
    key_of,
    put_together,
    replace,
    split_lines,
    text_argument,
)

_AFFIX = 64  # characters of an indentation
_NUMERAL = 1000  # characters of a text that is read as a number
_PLACES = 30  # that a number is rounded to


# Filters. The first arguments are the environment, the meter and the value.


def _getter(environment: jinja2.Environment, path: Any, default: Any = None) -> Callable[[Any], Any]:
    """Return a function that follows a path such as "function.name" or 0."""
    if path is None:
        return lambda value: value
    if isinstance(path, str) and len(path) > _NUMERAL:
        raise TemplateLimit(f"the name of an attribute has {len(path):,} characters")
    parts = path.split(".") if isinstance(path, str) else [path]
    keys = [int(part) if isinstance(part, str) and part.isascii() and part.isdigit() else part for part in parts]

    def get(value: Any) -> Any:
        for key in keys:
            value = item(environment, value, key)
            if default is not None and isinstance(value, jinja2.Undefined):
                value = default
        return value

    return get


def _map(environment: Any, meter: Meter, value: Any, /, *args: Any, **named: Any) -> list[Any]:
    entries = entries_of(meter, value or ())
    meter.entries(len(entries))
    if not args and "attribute" in named:
        get = _getter(environment, named.pop("attribute"), named.pop("default", None))
        if named:
            raise TypeError(f"map has no argument {next(iter(named))!r}")
    else:
        function = _named("filter", FILTERS, args[0] if args else None)

        def get(entry: Any) -> Any:
            return function(environment, meter, entry, *args[1:], **named)

    results = []
    for entry in entries:
        meter.step()
        results.append(get(entry))
    return results


def _named(kind: str, table: Mapping[str, Operation], name: Any) -> Operation:
    if not isinstance(name, str) or name not in table:
        raise TemplateRefusal(f"the {kind} {name!r}"[:_NUMERAL])
    return table[name]


def _chosen(*, by_attribute: bool, kept: bool) -> Operation:
    def chosen(environment: Any, meter: Meter, value: Any, *args: Any) -> list[Any]:
        get = _getter(environment, None)
        if by_attribute:
            path, *args = args  # type: ignore[assignment]
            get = _getter(environment, path)
        check, rest = (_named("test", TESTS, args[0]), args[1:]) if args else (bool, ())
        results = []
        for entry in entries_of(meter, value or ()):
            meter.step()
            if bool(check(get(entry), *rest)) is kept:
                results.append(entry)
        meter.entries(len(results), new=False)
        return results

    return chosen


def _sorted(meter: Meter, entries: Iterable[Any], key: Callable[[Any], Any], reverse: bool, folded: bool) -> list[Any]:
    """Return entries in the order of their keys, which are texts or numbers, or tuples of them."""
    keyed = []
    characters = 0
    for entry in entries:
        meter.step()
        keys = key(entry)
        keys = tuple(_lower(meter, each) if folded else each for each in (keys if type(keys) is tuple else (keys,)))
        for each in keys:
            if not isinstance(each, SCALARS):
                raise TypeError(f"{type(each).__name__!r} is not sorted")
            characters += len(each) if isinstance(each, str) else 1
        keyed.append((keys, entry))
    # Each of n entries is compared log n times, in part by Python's functions.
    meter.at_once((characters // 4 + 24 * len(keyed)) * max(1, len(keyed).bit_length()) // 2)
    meter.entries(2 * len(keyed))
    keyed.sort(key=operator.itemgetter(0), reverse=bool(reverse))
    return [entry for _, entry in keyed]


def _lower(meter: Meter, value: Any) -> Any:
    return TEXT_METHODS["lower"](meter, value) if isinstance(value, str) else value


def _sort(
    environment: Any, meter: Meter, value: Any, reverse: bool = False, case_sensitive: bool = False,
    attribute: Any = None,
) -> list[Any]:  # fmt: skip
    paths = attribute.split(",") if isinstance(attribute, str) else [attribute]
    getters = [_getter(environment, path) for path in paths]
    return _sorted(
        meter, entries_of(meter, value), lambda entry: tuple(get(entry) for get in getters), reverse, not case_sensitive
    )


def _dictsort(
    environment: Any, meter: Meter, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False
) -> list[Any]:
    if by not in ("key", "value"):
        raise ValueError('a dict is sorted by "key" or by "value"')
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    pairs = _items_of(environment, meter, value)
    return _sorted(meter, pairs, operator.itemgetter(("key", "value").index(by)), reverse, not case_sensitive)


def _items_of(environment: Any, meter: Meter, value: Any) -> list[Any]:
    if isinstance(value, jinja2.Undefined):
        return []
    if type(value) is not dict:
        raise TypeError("Can only get item pairs from a mapping.")
    return items_of_dict(meter, value)


def _unique(
    environment: Any, meter: Meter, value: Any, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    get, results = _getter(environment, attribute), []
    seen: dict[str, None] = {}
    for entry in entries_of(meter, value):
        meter.step()
        key = key_of(get(entry))
        kind = "" if isinstance(key, str) else "number "
        key = kind + text_of(meter, key if case_sensitive else _lower(meter, key))
        if key not in seen:
            seen[key] = None
            results.append(entry)
    meter.entries(2 * len(results))
    return results


def _extreme(name: str, *, last: bool) -> Operation:
    def extreme(environment: Any, meter: Meter, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        ordered = _sorted(meter, entries_of(meter, value), _getter(environment, attribute), last, not case_sensitive)
        return ordered[0] if ordered else environment.undefined(f"No {name}, the sequence was empty.")

    return extreme


def _sum(environment: Any, meter: Meter, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    get, total = _getter(environment, attribute), start
    for entry in entries_of(meter, value):
        number = get(entry)
        if not isinstance(number, int | float) or not isinstance(total, int | float):
            raise TypeError(f"sum is for numbers, not for {type(number).__name__!r}")
        total = binary("+", total, number)
    return total


def _join(environment: Any, meter: Meter, value: Any, d: Any = "", attribute: Any = None) -> str:
    get, texts = _getter(environment, attribute), []
    for entry in entries_of(meter, value):
        meter.step()
        texts.append(text_of(meter, get(entry)))
    return put_together(meter, text_of(meter, d), texts)


def _first(environment: Any, meter: Meter, value: Any) -> Any:
    for entry in Rounds(value):
        return entry
    return environment.undefined("No first item, sequence was empty.")


def _last(environment: Any, meter: Meter, value: Any) -> Any:
    for entry in reversed(Rounds(value).items):
        return entry
    return environment.undefined("No last item, sequence was empty.")


def _length(environment: Any, meter: Meter, value: Any) -> int:
    if not isinstance(value, str | list | tuple | dict | range | jinja2.Undefined):
        raise TypeError(f"object of type {type(value).__name__!r} has no len()")
    return len(value)


def _list(environment: Any, meter: Meter, value: Any) -> list[Any]:
    entries = entries_of(meter, value)
    if entries is value or not entries:
        meter.entries(len(entries), new=False)
        return list(entries)
    return entries  # type: ignore[return-value]


def _reverse(environment: Any, meter: Meter, value: Any) -> Any:
    if isinstance(value, str):
        return cut(str.__str__(value), None, None, -1)
    return cut(entries_of(meter, value), None, None, -1)


def _default(environment: Any, meter: Meter, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    return default_value if isinstance(value, jinja2.Undefined) or (boolean and not value) else value


def _of_text(method: Operation) -> Operation:
    def of_text(environment: Any, meter: Meter, value: Any, /, *args: Any, **named: Any) -> Any:
        return method(meter, text_of(meter, value), *args, **named)

    return of_text


def _trim(environment: Any, meter: Meter, value: Any, chars: str | None = None) -> str:
    return TEXT_METHODS["strip"](meter, text_of(meter, value), chars)  # type: ignore[no-any-return]


def _replace_in(environment: Any, meter: Meter, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    return replace(meter, text_of(meter, s), text_of(meter, old), text_of(meter, new), -1 if count is None else count)


def _title(environment: Any, meter: Meter, value: Any) -> str:
    """Capitalise each word and lower its other letters; spaces, hyphens and opening brackets begin words."""
    text = text_of(meter, value)
    meter.at_once(5 * len(text))
    lower, letters, begins = text.lower(), [], True
    if len(lower) != len(text):  # of a letter with a small form of two letters
        return meter.text(text.title())
    for character, small in zip(text, lower, strict=True):
        meter.step()
        letters.append(character.upper() if begins else small)
        begins = character.isspace() or character in "-({[<"
    return meter.text("".join(letters))


def _indent(
    environment: Any, meter: Meter, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = text_of(meter, s)
    margin = width if isinstance(width, str) else " " * _bounded(width, _AFFIX, "an indentation")
    _bounded(len(margin), _AFFIX, "an indentation")
    lines = split_lines(meter, text + "\n")
    indented = [margin + line if index and (line or blank) else line for index, line in enumerate(lines)]
    return put_together(meter, "\n", [margin + indented[0], *indented[1:]] if first else indented)


def _bounded(number: int, most: int, what: str) -> int:
    if not isinstance(number, int) or number > most:
        raise TemplateLimit(f"{what} is more than {most}: {number!r}"[:_NUMERAL])
    return number


def _to_int(environment: Any, meter: Meter, value: Any, default: Any = 0, base: int = 10) -> Any:
    try:
        if isinstance(value, str):
            return meter.number(int(_numeral(value), base))
        return meter.number(int(value))
    except (TypeError, ValueError):
        try:
            return int(float(value))
        except (TypeError, ValueError, OverflowError):
            return default


def _to_float(environment: Any, meter: Meter, value: Any, default: Any = 0.0) -> Any:
    try:
        return float(_numeral(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return default


def _numeral(text: str) -> str:
    if len(text) > _NUMERAL:
        raise TemplateLimit(f"a text of {len(text):,} characters was read as a number")
    return text


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError(f"a number is expected, not {type(value).__name__}")
    return value


def _round(environment: Any, meter: Meter, value: Any, precision: int = 0, method: str = "common") -> Any:
    if not isinstance(precision, int) or abs(precision) > _PLACES:
        raise TemplateLimit(f"round has at most {_PLACES} places")
    if method == "common":
        return round(_number(value), precision)
    if method not in ("ceil", "floor"):
        raise ValueError("method must be common, ceil or floor")
    return getattr(math, method)(_number(value) * 10**precision) / 10**precision


def _format(environment: Any, meter: Meter, value: Any, /, *args: Any, **named: Any) -> str:
    if args and named:
        raise TypeError("positional and keyword arguments can't be given at once")
    return format_strings.percent(meter, text_of(meter, value), named or args)


def _string(environment: Any, meter: Meter, value: Any) -> str:
    return value if isinstance(value, str) else text_of(meter, value)


def _tojson(
    environment: Any, meter: Meter, value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: Any = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return JSON as transformers writes it: Jinja's own filter escapes HTML."""
    for affix in (indent, *(separators or ())):
        if isinstance(affix, int) or affix is None:
            _bounded(affix or 0, 16, "the indentation of tojson")
        elif len(text_argument(affix)) > 16:
            raise TemplateLimit("an indentation or separator of tojson has more than 16 characters")
    characters, items = meter.measure(value)
    meter.at_once(characters * (3 if ensure_ascii else 2) + 24 * items)
    if sort_keys:
        meter.at_once((characters // 4 + 24 * items) * max(1, items.bit_length()) // 2)
    encoder = json.JSONEncoder(
        ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )
    # Indentation multiplies with depth, and is encoded piece by piece.
    return joined(encoder.iterencode(value)) if indent is not None else meter.text(encoder.encode(value))


def _safe(environment: Any, meter: Meter, value: Any) -> markupsafe.Markup:
    return markupsafe.Markup(text_of(meter, value))


FILTERS: Final[dict[str, Operation]] = {
    "default": _default, "d": _default, "string": _string, "safe": _safe, "tojson": _tojson,
    "trim": _trim, "upper": _of_text(TEXT_METHODS["upper"]), "lower": _of_text(TEXT_METHODS["lower"]),
    "capitalize": _of_text(TEXT_METHODS["capitalize"]), "title": _title, "replace": _replace_in, "indent": _indent,
    "format": _format, "int": _to_int, "float": _to_float, "round": _round,
    "abs": lambda environment, meter, value: abs(_number(value)),
    "length": _length, "count": _length, "list": _list, "items": _items_of, "dictsort": _dictsort,
    "first": _first, "last": _last, "reverse": _reverse, "join": _join, "map": _map,
    "select": _chosen(by_attribute=False, kept=True), "reject": _chosen(by_attribute=False, kept=False),
    "selectattr": _chosen(by_attribute=True, kept=True), "rejectattr": _chosen(by_attribute=True, kept=False),
    "sort": _sort, "unique": _unique, "sum": _sum,
    "min": _extreme("min item", last=False), "max": _extreme("max item", last=True),
}  # fmt: skip

_OF_JINJA: dict[str, Any] = jinja2.tests.TESTS
# Tests. Those of Jinja's that are taken as they are look at a value's type alone.
TESTS: Final[dict[str, Operation]] = {
    **{
        name: _OF_JINJA[name]
        for name in ("defined", "undefined", "none", "string", "mapping", "sequence", "boolean", "true", "false",
                     "number", "integer", "float", "sameas")
    },
    "iterable": lambda value: isinstance(
        value, str | list | tuple | dict | range | jinja2.Undefined | LoopContext
    ),
    "callable": lambda value: isinstance(value, Function | Macro | LoopContext),
    "odd": lambda value: _number(value) % 2 == 1,
    "even": lambda value: _number(value) % 2 == 0,
    "divisibleby": lambda value, divisor: _number(value) % _number(divisor) == 0,
    "in": COMPARISONS["in"],
    **dict.fromkeys(("eq", "equalto", "=="), COMPARISONS["eq"]),
    **dict.fromkeys(("ne", "!="), COMPARISONS["ne"]),
    **dict.fromkeys(("lt", "lessthan", "<"), COMPARISONS["lt"]),
    **dict.fromkeys(("gt", "greaterthan", ">"), COMPARISONS["gt"]),
    **dict.fromkeys(("le", "<="), COMPARISONS["lteq"]),
    **dict.fromkeys(("ge", ">="), COMPARISONS["gteq"]),
}  # fmt: skip
