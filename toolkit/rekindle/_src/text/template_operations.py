"""The operations that a chat template may use: methods and functions by their names, attributes and operators.

Methods and functions are limited to the needs of templates in use. Each operation takes time in proportion to its
operands and counts it before it runs (`Meter.at_once`), and counts what it makes. Anything else is refused by its name
(`TemplateRefusal`). Filters and tests are in `template_filters.py`.

The values of a template are texts, numbers, None, lists, tuples and dicts, ranges, Jinja's `Undefined` and macros,
its own `Function`s, and namespaces. The text of a namespace is a constant, and so no value leads to itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jinja2
import markupsafe
from jinja2.runtime import LoopContext

from rekindle._src.text import format_strings
from rekindle._src.text.template_limits import (
    BITS,
    ITEMS,
    Meter,
    TemplateLimit,
    TemplateRefusal,
    current,
    text_of,
    too_many_bits,
)

_RANGE = 100_000  # rounds of a range, as in Jinja's sandbox
_AFFIX = 64  # characters of a set of characters
SCALARS = (str, int, float, bool, type(None))
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


def text_argument(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is expected, not {type(value).__name__}")
    return value


def _strip(method: Callable[..., str]) -> Operation:
    def strip(meter: Meter, text: str, chars: str | None = None) -> str:
        if chars is not None and len(text_argument(chars)) > _AFFIX:
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
        meter.at_once(len(text) + 8 * min(limit, text.count(text_argument(separator))))
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
    meter.at_once(len(text) * max(1, len(text_argument(part))))


def split_lines(meter: Meter, text: str, keepends: bool = False) -> list[str]:
    meter.at_once(9 * len(text))
    return _all_pieces(meter, text.splitlines(bool(keepends)))


def _partition(meter: Meter, text: str, sep: str) -> tuple[str, str, str]:
    meter.at_once(len(text))
    meter.text(text)  # the parts are as long
    return text.partition(text_argument(sep))


def _rpartition(meter: Meter, text: str, sep: str) -> tuple[str, str, str]:
    _from_the_end(meter, text, sep)
    meter.text(text)
    return text.rpartition(sep)


def _affixed(method: Callable[..., bool]) -> Operation:
    def affixed(meter: Meter, text: str, affix: str | tuple[str, ...], *places: int) -> bool:
        affixes = affix if type(affix) is tuple else (affix,)
        meter.at_once(sum(len(text_argument(each)) + 1 for each in affixes))
        return method(text, affix, *places)

    return affixed


def _searched(method: Callable[..., int]) -> Operation:
    def searched(meter: Meter, text: str, part: str, *places: int) -> int:
        meter.at_once(len(text) + len(text_argument(part)))
        return method(text, part, *places)

    return searched


def _rfind(meter: Meter, text: str, part: str, *places: int) -> int:
    _from_the_end(meter, text, part)
    return text.rfind(part, *places)


def replace(meter: Meter, text: str, old: str, new: str, count: int = -1) -> str:
    meter.step(len(text))
    found = text.count(text_argument(old))
    found = found if count is None or count < 0 else min(found, count)
    meter.expect(len(text) + found * max(0, len(text_argument(new)) - len(old)))
    meter.at_once(2 * len(text) + 4 * found)
    return meter.text(text.replace(old, new, found))


def _without(method: Callable[[str, str], str]) -> Operation:
    def without(meter: Meter, text: str, affix: str) -> str:
        return meter.text(method(text, text_argument(affix)))

    return without


def entries_of(meter: Meter, value: Any) -> Sequence[Any]:
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


def _join_texts(meter: Meter, text: str, items: Any) -> str:
    texts = [text_argument(item) for item in entries_of(meter, items)]
    return put_together(meter, text, texts)


def put_together(meter: Meter, separator: str, texts: Sequence[str]) -> str:
    meter.at_once(4 * len(texts))
    meter.expect(sum(map(len, texts)) + len(separator) * max(0, len(texts) - 1))
    return meter.text(separator.join(texts))


def _format_text(meter: Meter, text: str, /, *args: Any, **named: Any) -> str:
    return format_strings.braces(meter, text, args, named)


def _get(meter: Meter, values: dict[Any, Any], key: Any, default: Any = None) -> Any:
    return default if isinstance(key, jinja2.Undefined) else values.get(key_of(key), default)


def key_of(key: Any) -> Any:
    """Return the key of a dict. Python computes the hash of a tuple in a tuple without a bound."""
    if not isinstance(key, SCALARS):
        raise TypeError(f"unhashable type: {type(key).__name__!r}")
    return key


def items_of_dict(meter: Meter, values: dict[Any, Any]) -> list[tuple[Any, Any]]:
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


TEXT_METHODS: dict[str, Operation] = {
    "strip": _strip(str.strip), "lstrip": _strip(str.lstrip), "rstrip": _strip(str.rstrip),
    "split": _split, "rsplit": _rsplit, "splitlines": split_lines, "partition": _partition, "rpartition": _rpartition,
    "startswith": _affixed(str.startswith), "endswith": _affixed(str.endswith),
    "find": _searched(str.find), "index": _searched(str.index), "count": _searched(str.count), "rfind": _rfind,
    "replace": replace, "removeprefix": _without(str.removeprefix), "removesuffix": _without(str.removesuffix),
    "upper": _changed(str.upper), "lower": _changed(str.lower), "title": _changed(str.title),
    "capitalize": _changed(str.capitalize), "join": _join_texts, "format": _format_text,
    "isalnum": _checked(str.isalnum), "isalpha": _checked(str.isalpha), "isdigit": _checked(str.isdigit),
    "isspace": _checked(str.isspace), "isupper": _checked(str.isupper), "islower": _checked(str.islower),
}  # fmt: skip
_LIST_METHODS: dict[str, Operation] = {"index": _index_in, "count": _count_in}
METHODS: Final[Mapping[type, dict[str, Operation]]] = {
    str: TEXT_METHODS, markupsafe.Markup: TEXT_METHODS, list: _LIST_METHODS, tuple: _LIST_METHODS,
    dict: {"get": _get, "items": items_of_dict, "keys": _keys, "values": _values},
}  # fmt: skip
# Names that Python gives to values of these types: any other name than a method's above is refused, not looked up.
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
        if isinstance(key, SCALARS) and key in value:
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
        return text_argument(value) in container
    if kind is dict:
        meter.step()
        return not isinstance(value, jinja2.Undefined) and key_of(value) in container
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
    """Return a dict written down in a template with computed keys."""
    current().entries(len(pairs))
    return {key_of(key): value for key, value in pairs}


class Rounds:
    """The items of a loop; its rounds are counted."""

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
        values = [(text_argument(key), value) for key, value in entries_of(meter, values)]
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
