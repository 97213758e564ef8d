"""The environment that compiles chat templates, with bounds of time and memory, since they come from a download.

Jinja's sandbox keeps a template from reaching the interpreter, but not from computing for ever: nested loops, macros
that call themselves twice, a string doubled forty times. A `BoundedEnvironment` counts each loop round, call, filter
and new value. Operations that could make a large value in a single C call, such as `"x" * 10**9` or `center(10**9)`,
are estimated before they run, because nothing can interrupt them afterwards.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

SECONDS = 5.0  # templates in use take milliseconds; a loaded machine may take a hundred times as long
CHARACTERS = 16 << 20  # of one value, and of the whole prompt: some four million tokens
ITEMS = 1 << 18  # of one value: list entries, dict values, and those within them
WORK = 256 << 20  # characters and items of all values of a rendering, discarded ones included
_BITS = 1 << 17  # of one number
# Field widths of six digits, which pad to 100,000 characters and more, and widths that the values give.
_PERCENT = re.compile(r"%[^A-Za-z%]*\d{6}"), re.compile(r"%[^A-Za-z%]*\*")
_BRACES = re.compile(r"\{[^{}]*:[^{}]*\d{6}"), re.compile(r"\{[^{}]*:[^{}]*\{")
_WITHOUT = (
    "pprint",
    "urlize",
)  # filters that are slow in the length of their input; chat templates have no use for them

_WIDTH = re.compile(r"%[^A-Za-z]*[0-9]{2}")  # a field width: the C library pads to it
_local = threading.local()


class TemplateLimit(Exception):
    """A template used more time or memory than it may."""


class _Meter:
    """The usage of one rendering so far."""

    __slots__ = ("deadline", "steps", "total")

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.steps = self.total = 0

    def step(self) -> None:
        self.steps += 1
        if not self.steps % 64 and time.monotonic() > self.deadline:
            raise TemplateLimit(f"it ran for more than {SECONDS:.0f} s")

    def expect(self, size: int) -> None:
        """Raise `TemplateLimit` if a value of `size` characters would be too large."""
        if size > CHARACTERS:
            raise TemplateLimit(f"it made a value of {size:,} characters; at most {CHARACTERS:,} are allowed")

    def weigh(self, value: Any) -> Any:
        """Count the value and return it. A list counts with all its contents, as often as they are in it."""
        self.step()
        size = items = 0
        stack = [value]
        while stack:
            item = stack.pop()
            items += 1
            if isinstance(item, str | bytes):
                size += len(item)
            elif isinstance(item, Mapping):
                stack += item.values()
            elif isinstance(item, list | tuple):
                stack += item
            elif isinstance(item, jinja2.utils.Namespace):
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
            if items + len(stack) > ITEMS:
                raise TemplateLimit(f"it made a value of more than {ITEMS:,} items")
            self.expect(size)
        self.total += size + items
        if self.total > WORK:
            raise TemplateLimit(f"the values that it made are {WORK:,} characters and more in all")
        return value


@contextlib.contextmanager
def metered(seconds: float | None = None) -> Iterator[None]:
    """Count the usage of this thread's template within the block; raises `TemplateLimit` when it is too much."""
    before = getattr(_local, "meter", None)
    _local.meter = _Meter(SECONDS if seconds is None else seconds)
    try:
        yield
    finally:
        _local.meter = before


def _meter() -> _Meter:
    meter: _Meter | None = getattr(_local, "meter", None)
    return _Meter(SECONDS) if meter is None else meter


def joined(pieces: Iterable[str]) -> str:
    """Return the pieces as one string, bounded as every value is."""
    meter, parts, size = _meter(), [], 0
    for piece in pieces:
        size += len(piece)
        meter.expect(size)
        meter.step()
        parts.append(piece)
    return "".join(parts)


def _rounds(items: Iterable[Any]) -> Iterable[Any]:
    """Return the items of a loop such that every round is counted."""
    return _Rounds(items) if hasattr(items, "__len__") else _counted(items)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    meter = _meter()
    for item in items:
        meter.step()
        yield item


class _Rounds:
    """A collection with a length, which `loop` may read."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self.items)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, in which every loop, call, filter and operator is counted and bounded."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    concat = staticmethod(joined)  # joins the output of macros and blocks

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        del self.globals["lipsum"]  # makes text of any length
        for name in _WITHOUT:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(name, function)
        self.filters["_rounds"], self.filters["_weigh"] = _rounds, lambda value: _meter().weigh(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _through("_rounds", loop.iter)
        _wrap(tree)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _meter()
        _expect_operator(meter, operator, left, right)
        return meter.weigh(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja2)
        meter = _meter()
        meter.step()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int):
            if name == "join" and args and not isinstance(args[0], list | tuple):
                args = (list(_counted(args[0])), *args[1:])
            meter.expect(_size_of_method(owner, name, [*args, *kwargs.values()]))
        return meter.weigh(super().call(__context, __obj, *args, **kwargs))


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _wrap(node: nodes.Node) -> None:
    """Put `_weigh` around expressions that make a value without a call: displays, and `~`, which then joins pairs."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_wrapped(item) for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _wrapped(value))


def _wrapped(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    _wrap(node)
    if isinstance(node, nodes.Concat):
        return _joined_by_two(node.nodes)
    if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _through("_weigh", node)
    return node


def _joined_by_two(parts: list[nodes.Expr]) -> nodes.Expr:
    """Return `a ~ b ~ c ~ d` as `(a ~ b) ~ (c ~ d)`: no join is more than twice as long as one allowed before it."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    pair = [_joined_by_two(parts[:half]), _joined_by_two(parts[half:])]
    return _through("_weigh", nodes.Concat(pair, lineno=parts[0].lineno))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # with jinja2's mark for filters that take the environment or the context
    def bounded(*args: Any, **options: Any) -> Any:
        arguments = list(args)
        while arguments and isinstance(arguments[0], jinja2.Environment | jinja2.runtime.Context | nodes.EvalContext):
            del arguments[0]
        meter = _meter()
        meter.step()
        if arguments:
            if name in ("join", "sum") and not isinstance(arguments[0], list | tuple | str):
                items = list(_counted(arguments[0]))
                args = tuple(items if argument is arguments[0] else argument for argument in args)
                arguments[0] = items
            meter.expect(_size_of_filter(name, arguments[0], [*arguments[1:], *options.values()]))
        return meter.weigh(function(*args, **options))

    return bounded


def _expect_operator(meter: _Meter, operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
                meter.expect(len(value) * max(0, times))
        if isinstance(left, int) and isinstance(right, int):
            _expect_number(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 0:
        _expect_number(left.bit_length() * right)
    elif operator == "%" and isinstance(left, str | bytes):
        numbers = right if isinstance(right, tuple) else (right,)
        meter.expect(_padded(left, _PERCENT, numbers))


def _expect_number(bits: int) -> None:
    if bits > _BITS:
        raise TemplateLimit(f"it made a number of {bits:,} bits")


def _largest(values: Sequence[Any]) -> int:
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


def _longest(values: Sequence[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, str | bytes)), default=0)


def _padded(form: Any, widths: tuple[re.Pattern[str], re.Pattern[str]], values: Sequence[Any]) -> int:
    """Return the size that a format string may ask for, by its own widths or by those among the values."""
    text = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    wide, from_values = widths
    if wide.search(text) or (from_values.search(text) and _largest(values) >= 100_000):
        return CHARACTERS + 1
    return 0


def _total(items: Any) -> int:
    return sum(len(str(item)) if isinstance(item, str | int | float) else 16 for item in items)


def _size_of_method(owner: Any, name: str, arguments: list[Any]) -> int:
    """Return an upper bound, or nearly one, of the size of a string's or number's method's result."""
    if isinstance(owner, int):
        return _largest(arguments)
    size = len(owner)
    if name in ("center", "ljust", "rjust", "zfill"):
        return size + _largest(arguments)
    if name == "expandtabs":
        return size + size * _largest(arguments)
    if name == "replace" and len(arguments) >= 2 and isinstance(arguments[0], type(owner)):
        return size + (owner.count(arguments[0]) * _longest(arguments[1:2]))
    if name == "join" and arguments:
        return _total(arguments[0]) + size * len(arguments[0])
    if name == "translate":
        values = arguments[0].values() if arguments and isinstance(arguments[0], Mapping) else ()
        return size * max(1, _longest(list(values)))
    if name in ("format", "format_map"):
        inner = list(arguments[0].values()) if arguments and isinstance(arguments[0], Mapping) else arguments
        return _padded(owner, _BRACES, inner)
    return 0


def _size_of_filter(name: str, value: Any, arguments: list[Any]) -> int:
    """Return the same for a filter. Filters not named here return about as much as their arguments hold."""
    size = len(value) if isinstance(value, str | list | tuple | Mapping) else 0
    if name in ("center", "batch", "slice", "round"):
        return size + _largest(arguments) * (8 if name == "round" else 1)
    if name == "indent" and isinstance(value, str):
        return size + (value.count("\n") + 1) * max(_largest(arguments), _longest(arguments))
    if name == "wordwrap":
        return size * (1 + _longest(arguments))
    if name == "replace" and isinstance(value, str) and len(arguments) >= 2:
        return size + value.count(str(arguments[0])) * len(str(arguments[1]))
    if name == "join":
        return _total(value) + size * _longest([str(argument) for argument in arguments[:1]])
    if name == "sum" and any(isinstance(argument, list | tuple) for argument in (*arguments, *value)):
        return size * size
    if name == "format":
        return _padded(value, _PERCENT, arguments)
    return 0


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
