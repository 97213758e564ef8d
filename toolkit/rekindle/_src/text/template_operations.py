"""The operations that a chat template may use, by name: methods, filters, tests, functions and operators.

They are those that templates in use need. Each takes time in proportion to its operands and counts it before it runs
(`Meter.at_once`), and each counts what it makes. Anything else is refused by its name (`TemplateRefusal`).

The values of a template are texts, numbers, None, lists, tuples and dicts, ranges, Jinja's `Undefined` and macros,
its own `Function`s, and namespaces. The text of a namespace is a constant, and so no value leads to itself.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.tests
import markupsafe
from jinja2.runtime import LoopContext, Macro

from rekindle._src.text import format_strings
from rekindle._src.text.template_limits import (
    BITS,
    ITEMS,
    Meter,
    TemplateLimit,
    TemplateRefusal,
    current,
    joined,
    text_of,
    too_many_bits,
)

_RANGE = 100_000  # rounds of a range, as in Jinja's sandbox
_AFFIX = 64  # characters of a set of characters, a separator of JSON, an indentation
_NUMERAL = 1000  # characters of a text that is read as a number
_PLACES = 30  # that a number is rounded to
_SCALARS = (str, int, float, bool, type(None))
Operation = Callable[..., Any]


class Function:
    """A function that a template may call: a method with its owner, or a global one."""

    __slots__ = ("operation", "owner")

    def __init__(self, operation: Operation, owner: Any = None) -> None:
        self.operation = operation
        self.owner = owner

    def __repr__(self) -> str:
        return "<function>"


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore, and with a constant text."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may store a value called `self`
        instance, *rest = args
        values_by_name = dict(*rest, **values)
        for name in values_by_name:
            Namespace._check(name)
        jinja2.utils.Namespace.__init__(instance, values_by_name)

    def __setitem__(self, name: str, value: Any) -> None:
        Namespace._check(name)  # attributes of the object itself are the template's values
        jinja2.utils.Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"

    @staticmethod
    def _check(name: object) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise TemplateRefusal(f"the name {name!r} in a namespace")


# Methods. The first arguments are the meter and the text, dict or list.


def _text_argument(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is expected, not {type(value).__name__}")
    return value


def _strip(method: Callable[..., str]) -> Operation:
    def strip(meter: Meter, text: str, chars: str | None = None) -> str:
        if chars is not None and len(_text_argument(chars)) > _AFFIX:
            raise TemplateLimit(f"it strips one of {len(chars):,} characters, where {_AFFIX} are allowed")
        meter.at_once(len(text) * (2 + (0 if chars is None else len(chars) // 2)))
        return meter.text(method(text, chars))

    return strip


def _changed(method: Callable[[str], str]) -> Operation:
    def changed(meter: Meter, text: str) -> str:
        meter.at_once(8 * len(text))
        return meter.text(method(text))

    return changed


def _checked(method: Callable[[str], bool]) -> Operation:
    def checked(meter: Meter, text: str) -> bool:
        meter.at_once(5 * len(text))
        return method(text)

    return checked


def _pieces(meter: Meter, text: str, separator: str | None, limit: int) -> int:
    """Count a text that is cut into pieces. Return at how many places it may be cut at most."""
    limit = ITEMS if limit < 0 else min(limit, ITEMS)
    if separator is None:
        meter.at_once(9 * len(text))
    else:
        meter.step(len(text))
        meter.at_once(len(text) + 8 * min(limit, text.count(_text_argument(separator))))
    return limit


def _all_pieces(meter: Meter, pieces: list[str]) -> list[str]:
    meter.entries(len(pieces))
    for piece in pieces:
        meter.text(piece)
    return pieces


def _split(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    return _all_pieces(meter, text.split(sep, _pieces(meter, text, sep, maxsplit)))


def _rsplit(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    limit = _pieces(meter, text, sep, maxsplit)
    if sep is not None:
        _from_the_end(meter, text, sep)
    return _all_pieces(meter, text.rsplit(sep, limit))


def _from_the_end(meter: Meter, text: str, part: str) -> None:
    """Count a search from the end, for which Python compares the part at every place."""
    meter.at_once(len(text) * max(1, len(_text_argument(part))))


def _splitlines(meter: Meter, text: str, keepends: bool = False) -> list[str]:
    meter.at_once(9 * len(text))
    return _all_pieces(meter, text.splitlines(bool(keepends)))


def _partition(meter: Meter, text: str, sep: str) -> tuple[str, str, str]:
    meter.at_once(len(text))
    meter.text(text)  # the parts are as long
    return text.partition(_text_argument(sep))


def _rpartition(meter: Meter, text: str, sep: str) -> tuple[str, str, str]:
    _from_the_end(meter, text, sep)
    meter.text(text)
    return text.rpartition(sep)


def _affixed(method: Callable[..., bool]) -> Operation:
    def affixed(meter: Meter, text: str, affix: str | tuple[str, ...], *places: int) -> bool:
        affixes = affix if type(affix) is tuple else (affix,)
        meter.at_once(sum(len(_text_argument(each)) + 1 for each in affixes))
        return method(text, affix, *places)

    return affixed


def _searched(method: Callable[..., int]) -> Operation:
    def searched(meter: Meter, text: str, part: str, *places: int) -> int:
        meter.at_once(len(text) + len(_text_argument(part)))
        return method(text, part, *places)

    return searched


def _rfind(meter: Meter, text: str, part: str, *places: int) -> int:
    _from_the_end(meter, text, part)
    return text.rfind(part, *places)


def _replace(meter: Meter, text: str, old: str, new: str, count: int = -1) -> str:
    meter.step(len(text))
    found = text.count(_text_argument(old))
    found = found if count is None or count < 0 else min(found, count)
    meter.expect(len(text) + found * max(0, len(_text_argument(new)) - len(old)))
    meter.at_once(2 * len(text) + 4 * found)
    return meter.text(text.replace(old, new, found))


def _without(method: Callable[[str, str], str]) -> Operation:
    def without(meter: Meter, text: str, affix: str) -> str:
        return meter.text(method(text, _text_argument(affix)))

    return without


def _join_texts(meter: Meter, text: str, items: Any) -> str:
    texts = [_text_argument(item) for item in _entries(meter, items)]
    return _put_together(meter, text, texts)


def _put_together(meter: Meter, separator: str, texts: Sequence[str]) -> str:
    meter.at_once(4 * len(texts))
    meter.expect(sum(map(len, texts)) + len(separator) * max(0, len(texts) - 1))
    return meter.text(separator.join(texts))


def _format_text(meter: Meter, text: str, /, *args: Any, **named: Any) -> str:
    return format_strings.braces(meter, text, args, named)


def _get(meter: Meter, values: dict[Any, Any], key: Any, default: Any = None) -> Any:
    return default if isinstance(key, jinja2.Undefined) else values.get(_key(key), default)


def _key(key: Any) -> Any:
    """Return the key of a dict. Python computes the hash of a tuple in a tuple without a bound."""
    if not isinstance(key, _SCALARS):
        raise TypeError(f"unhashable type: {type(key).__name__!r}")
    return key


def _items(meter: Meter, values: dict[Any, Any]) -> list[tuple[Any, Any]]:
    meter.entries(len(values))
    return list(values.items())


def _keys(meter: Meter, values: dict[Any, Any]) -> list[Any]:
    meter.entries(len(values), new=False)
    return list(values)


def _values(meter: Meter, values: dict[Any, Any]) -> list[Any]:
    meter.entries(len(values), new=False)
    return list(values.values())


def _index_in(meter: Meter, items: Sequence[Any], item: Any) -> int:
    for index, other in enumerate(items):
        if equal(other, item):
            return index
    raise ValueError("the item is not in the list")


def _count_in(meter: Meter, items: Sequence[Any], item: Any) -> int:
    return sum(equal(other, item) for other in items)


_TEXT_METHODS: dict[str, Operation] = {
    "strip": _strip(str.strip), "lstrip": _strip(str.lstrip), "rstrip": _strip(str.rstrip),
    "split": _split, "rsplit": _rsplit, "splitlines": _splitlines, "partition": _partition, "rpartition": _rpartition,
    "startswith": _affixed(str.startswith), "endswith": _affixed(str.endswith),
    "find": _searched(str.find), "index": _searched(str.index), "count": _searched(str.count), "rfind": _rfind,
    "replace": _replace, "removeprefix": _without(str.removeprefix), "removesuffix": _without(str.removesuffix),
    "upper": _changed(str.upper), "lower": _changed(str.lower), "title": _changed(str.title),
    "capitalize": _changed(str.capitalize), "join": _join_texts, "format": _format_text,
    "isalnum": _checked(str.isalnum), "isalpha": _checked(str.isalpha), "isdigit": _checked(str.isdigit),
    "isspace": _checked(str.isspace), "isupper": _checked(str.isupper), "islower": _checked(str.islower),
}  # fmt: skip
_LIST_METHODS: dict[str, Operation] = {"index": _index_in, "count": _count_in}
METHODS: Final[Mapping[type, dict[str, Operation]]] = {
    str: _TEXT_METHODS, markupsafe.Markup: _TEXT_METHODS, list: _LIST_METHODS, tuple: _LIST_METHODS,
    dict: {"get": _get, "items": _items, "keys": _keys, "values": _values},
}  # fmt: skip
# Names that Python gives to values of these types: what is not a method above is refused, and nothing is looked up.
NAMES: Final[Mapping[type, frozenset[str]]] = {
    kind: frozenset(dir(kind)) for kind in (*METHODS, int, float, bool, type(None), range)
}
OF_LOOPS = frozenset(
    ("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0", "previtem", "nextitem")
)


def attribute(environment: jinja2.Environment, value: Any, name: str) -> Any:
    """Return `value.name`."""
    kind = type(value)
    names = NAMES.get(kind)
    if names is not None:
        if name in names:
            operation = METHODS.get(kind, {}).get(name)
            if operation is not None:
                return Function(operation, str.__str__(value) if kind is markupsafe.Markup else value)
            if kind is dict and name in value:
                return value[name]  # a field that is called as a method of Python's
            raise TemplateRefusal(f"the method {kind.__name__}.{name}")
        if kind is dict:
            try:
                return value[name]
            except KeyError:
                pass
        return environment.undefined(obj=value, name=name)
    if kind is Namespace and not name.startswith("_"):
        try:
            return getattr(value, name)
        except AttributeError:
            return environment.undefined(obj=value, name=name)
    if kind is LoopContext:
        if name == "cycle":
            return Function(lambda meter, loop, *values: loop.cycle(*values), value)
        if name in OF_LOOPS:
            return getattr(value, name)
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    raise TemplateRefusal(f"the attribute {name!r} of a {kind.__name__}")


def item(environment: jinja2.Environment, value: Any, key: Any) -> Any:
    """Return `value[key]`."""
    kind = type(value)
    if kind is dict:
        if isinstance(key, _SCALARS) and key in value:
            return value[key]
    elif kind in (str, list, tuple, range, markupsafe.Markup):
        if isinstance(key, int):
            try:
                return value[key]
            except IndexError:
                pass
    elif isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    if isinstance(key, str):
        return attribute(environment, value, str.__str__(key))
    return environment.undefined(obj=value, name=key)


def cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return `value[start:stop:step]`."""
    meter, kind = current(), type(value)
    if kind is dict:
        raise TypeError("a dict has no slices")
    if kind in (str, list, tuple, markupsafe.Markup):
        length = len(range(*slice(start, stop, step).indices(len(value))))
        if isinstance(value, str):
            return meter.text(value[start:stop:step])
        meter.entries(length, new=False)
    return value[start:stop:step]


# Operators.


def binary(operation: str, left: Any, right: Any) -> Any:
    """Return `left operation right`."""
    meter = current()
    meter.step()
    kind, other = type(left), type(right)
    if operation == "+":
        if isinstance(left, str) and isinstance(right, str):
            marked = markupsafe.Markup in (kind, other)  # the other text is escaped then
            meter.expect((len(left) + len(right)) * (6 if marked else 1))
            return meter.text(left + right)
        if kind is other and kind in (list, tuple):
            meter.entries(len(left) + len(right), new=False)
            return left + right
    elif operation == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str):
                meter.expect(len(value) * max(0, times))
                return meter.text(str.__str__(value) * times)
            if isinstance(times, int) and type(value) in (list, tuple):
                meter.entries(len(value) * max(0, times), new=False)
                return value * times
        if isinstance(left, int) and isinstance(right, int):
            _expect_bits(left.bit_length() + right.bit_length())
    elif operation == "%" and isinstance(left, str):
        return format_strings.percent(meter, str.__str__(left), right)
    elif operation == "**" and isinstance(left, int) and isinstance(right, int) and right > 0:
        _expect_bits(left.bit_length() * right)
    if not isinstance(left, jinja2.Undefined) and not isinstance(right, jinja2.Undefined):
        for value in (left, right):
            if not isinstance(value, int | float):
                raise TypeError(f"{operation} of {kind.__name__!r} and {other.__name__!r} is not supported")
    return meter.number(_OPERATORS[operation](left, right))


def _expect_bits(bits: int) -> None:
    if bits > BITS:
        raise too_many_bits(bits)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow,
}  # fmt: skip


def equal(left: Any, right: Any) -> bool:
    """Return `left == right`."""
    _expect_comparison(left, right)
    return bool(left == right)


def _expect_comparison(left: Any, right: Any) -> None:
    meter = current()
    if isinstance(left, str) and isinstance(right, str):
        meter.step(min(len(left), len(right)))
    elif type(left) in (list, tuple, dict) and type(right) in (list, tuple, dict):
        for value in (left, right):
            characters, items = meter.measure(value)
            meter.at_once(characters + 24 * items)
    else:
        meter.step()


def contains(container: Any, value: Any) -> bool:
    """Return `value in container`."""
    meter, kind = current(), type(container)
    if isinstance(container, str):
        meter.at_once(len(container))
        return _text_argument(value) in container
    if kind is dict:
        meter.step()
        return not isinstance(value, jinja2.Undefined) and _key(value) in container
    if kind is list or kind is tuple:
        if type(value) in (list, tuple, dict):
            return any(equal(value, other) for other in container)
        meter.at_once(len(container) * (3 + (len(value) // 4 if isinstance(value, str) else 0)))
        return value in container
    if kind is range or isinstance(container, jinja2.Undefined):
        meter.step(len(container))
        return value in container
    raise TypeError(f"argument of type {kind.__name__!r} is not iterable")


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def ordered(left: Any, right: Any) -> bool:
        _expect_comparison(left, right)
        return compare(left, right)

    return ordered


COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "eq": equal,
    "ne": lambda left, right: not equal(left, right),
    "lt": _ordered(operator.lt), "lteq": _ordered(operator.le),
    "gt": _ordered(operator.gt), "gteq": _ordered(operator.ge),
    "in": lambda value, container: contains(container, value),
    "notin": lambda value, container: not contains(container, value),
}  # fmt: skip


def compared(operators: Sequence[str], values: Sequence[Any]) -> Any:
    """Return `values[0] operators[0] values[1] …`."""
    return all(COMPARISONS[name](*values[index : index + 2]) for index, name in enumerate(operators))


def written(values: Sequence[Any]) -> str:
    """Return the texts of values in a row, which is what `~` makes of them."""
    meter = current()
    texts = [text_of(meter, value) for value in values]
    meter.expect(sum(map(len, texts)))
    return meter.text("".join(texts))


def counted(value: Any) -> Any:
    """Return a list, tuple or dict that a template wrote down."""
    current().entries(len(value))
    return value


def mapping(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict that a template wrote down with keys that it computes."""
    current().entries(len(pairs))
    return {_key(key): value for key, value in pairs}


class Rounds:
    """The items of a loop, whose rounds are counted."""

    __slots__ = ("items",)

    def __init__(self, items: Any) -> None:
        if type(items) not in (list, tuple, dict, str, range, markupsafe.Markup):
            if not isinstance(items, jinja2.Undefined):
                raise TypeError(f"{type(items).__name__!r} object is not iterable")
            items = ()
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Any:
        meter = current()
        for each in self.items:
            meter.step()
            yield each


# Functions.


def _range(meter: Meter, /, *limits: int) -> range:
    rounds = range(*limits)
    if len(rounds) > _RANGE:
        raise TemplateLimit(f"a range of {len(rounds):,} was too long, where {_RANGE:,} are allowed")
    return rounds


def _dict(meter: Meter, values: Any = (), /, **named: Any) -> dict[Any, Any]:
    meter.entries(len(values) + len(named))
    if type(values) is not dict:
        values = [(_text_argument(key), value) for key, value in _entries(meter, values)]
    return dict(values, **named)


def _namespace(meter: Meter, values: Any = (), /, **named: Any) -> Namespace:
    return Namespace(_dict(meter, values, **named))


def _raise_exception(meter: Meter, message: Any = "") -> None:
    raise jinja2.TemplateError(text_of(meter, message))


def _strftime_now(meter: Meter, form: str) -> str:
    return format_strings.date(form)


def _global(operation: Operation) -> Function:
    return Function(lambda meter, owner, /, *args, **named: operation(meter, *args, **named))


FUNCTIONS: Final[Mapping[str, Function]] = {
    "range": _global(_range), "dict": _global(_dict), "namespace": _global(_namespace),
    "raise_exception": _global(_raise_exception), "strftime_now": _global(_strftime_now),
}  # fmt: skip


# Filters. The first arguments are the environment, the meter and the value.


def _entries(meter: Meter, value: Any) -> Sequence[Any]:
    """Return the entries of a value that is a collection."""
    kind = type(value)
    if kind is list or kind is tuple:
        meter.step(len(value))
        return value  # type: ignore[no-any-return]
    if kind in (str, dict, range, markupsafe.Markup):
        meter.entries(len(value), new=kind is not dict)
        return list(value)
    if isinstance(value, jinja2.Undefined):
        return ()
    raise TypeError(f"{kind.__name__!r} object is not iterable")


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
    entries = _entries(meter, value or ())
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
        for entry in _entries(meter, value or ()):
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
            if not isinstance(each, _SCALARS):
                raise TypeError(f"{type(each).__name__!r} is not sorted")
            characters += len(each) if isinstance(each, str) else 1
        keyed.append((keys, entry))
    # Each of n entries is compared log n times, in part by Python's functions.
    meter.at_once((characters // 4 + 24 * len(keyed)) * max(1, len(keyed).bit_length()) // 2)
    meter.entries(2 * len(keyed))
    keyed.sort(key=operator.itemgetter(0), reverse=bool(reverse))
    return [entry for _, entry in keyed]


def _lower(meter: Meter, value: Any) -> Any:
    return _TEXT_METHODS["lower"](meter, value) if isinstance(value, str) else value


def _sort(
    environment: Any, meter: Meter, value: Any, reverse: bool = False, case_sensitive: bool = False,
    attribute: Any = None,
) -> list[Any]:  # fmt: skip
    paths = attribute.split(",") if isinstance(attribute, str) else [attribute]
    getters = [_getter(environment, path) for path in paths]
    return _sorted(
        meter, _entries(meter, value), lambda entry: tuple(get(entry) for get in getters), reverse, not case_sensitive
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
    return _items(meter, value)


def _unique(
    environment: Any, meter: Meter, value: Any, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    get, results = _getter(environment, attribute), []
    seen: dict[str, None] = {}
    for entry in _entries(meter, value):
        meter.step()
        key = _key(get(entry))
        kind = "" if isinstance(key, str) else "number "
        key = kind + text_of(meter, key if case_sensitive else _lower(meter, key))
        if key not in seen:
            seen[key] = None
            results.append(entry)
    meter.entries(2 * len(results))
    return results


def _extreme(name: str, *, last: bool) -> Operation:
    def extreme(environment: Any, meter: Meter, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        ordered = _sorted(meter, _entries(meter, value), _getter(environment, attribute), last, not case_sensitive)
        return ordered[0] if ordered else environment.undefined(f"No {name}, the sequence was empty.")

    return extreme


def _sum(environment: Any, meter: Meter, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    get, total = _getter(environment, attribute), start
    for entry in _entries(meter, value):
        number = get(entry)
        if not isinstance(number, int | float) or not isinstance(total, int | float):
            raise TypeError(f"sum is for numbers, not for {type(number).__name__!r}")
        total = binary("+", total, number)
    return total


def _join(environment: Any, meter: Meter, value: Any, d: Any = "", attribute: Any = None) -> str:
    get, texts = _getter(environment, attribute), []
    for entry in _entries(meter, value):
        meter.step()
        texts.append(text_of(meter, get(entry)))
    return _put_together(meter, text_of(meter, d), texts)


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
    entries = _entries(meter, value)
    if entries is value or not entries:
        meter.entries(len(entries), new=False)
        return list(entries)
    return entries  # type: ignore[return-value]


def _reverse(environment: Any, meter: Meter, value: Any) -> Any:
    if isinstance(value, str):
        return cut(str.__str__(value), None, None, -1)
    return cut(_entries(meter, value), None, None, -1)


def _default(environment: Any, meter: Meter, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    return default_value if isinstance(value, jinja2.Undefined) or (boolean and not value) else value


def _of_text(method: Operation) -> Operation:
    def of_text(environment: Any, meter: Meter, value: Any, /, *args: Any, **named: Any) -> Any:
        return method(meter, text_of(meter, value), *args, **named)

    return of_text


def _trim(environment: Any, meter: Meter, value: Any, chars: str | None = None) -> str:
    return _TEXT_METHODS["strip"](meter, text_of(meter, value), chars)  # type: ignore[no-any-return]


def _replace_in(environment: Any, meter: Meter, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replace(meter, text_of(meter, s), text_of(meter, old), text_of(meter, new), -1 if count is None else count)


def _title(environment: Any, meter: Meter, value: Any) -> str:
    """Return a text whose words, which spaces, hyphens and opening brackets begin, begin with a capital alone."""
    text = text_of(meter, value)
    meter.at_once(5 * len(text))
    lower, letters, begins = text.lower(), [], True
    if len(lower) != len(text):  # of a letter whose small form is two
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
    lines = _splitlines(meter, text + "\n")
    indented = [margin + line if index and (line or blank) else line for index, line in enumerate(lines)]
    return _put_together(meter, "\n", [margin + indented[0], *indented[1:]] if first else indented)


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
        elif len(_text_argument(affix)) > 16:
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
    "trim": _trim, "upper": _of_text(_TEXT_METHODS["upper"]), "lower": _of_text(_TEXT_METHODS["lower"]),
    "capitalize": _of_text(_TEXT_METHODS["capitalize"]), "title": _title, "replace": _replace_in, "indent": _indent,
    "format": _format, "int": _to_int, "float": _to_float, "round": _round,
    "abs": lambda environment, meter, value: abs(_number(value)),
    "length": _length, "count": _length, "list": _list, "items": _items_of, "dictsort": _dictsort,
    "first": _first, "last": _last, "reverse": _reverse, "join": _join, "map": _map,
    "select": _chosen(by_attribute=False, kept=True), "reject": _chosen(by_attribute=False, kept=False),
    "selectattr": _chosen(by_attribute=True, kept=True), "rejectattr": _chosen(by_attribute=True, kept=False),
    "sort": _sort, "unique": _unique, "sum": _sum,
    "min": _extreme("min item", last=False), "max": _extreme("max item", last=True),
}  # fmt: skip

# Tests. Those of Jinja's that are taken as they are look at a value's type alone.
TESTS: Final[dict[str, Operation]] = {
    **{
        name: jinja2.tests.TESTS[name]
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
