"""Declaring an option once: its default, its check and the other places that offer it, next to its field.

    top_p: float = option(1.0, Real(0.0, 1.0, above=True, fix="Use a share such as 0.95"), also=("command", "http"))

The record's docstring says what each option means, in a table `Options:`, where editors and `help()` show it. The
command line, the HTTP server and the defaults of checkpoints take names, kinds and words from these declarations.
`None` for an option means its default. `takes_options` shows them in the signatures of functions that take `**options`:
Tab completes an option's name, and `?` lists them all.

The size of a call is checked before anything of that size is built, since other requests wait meanwhile. The limits are
far above the needs of applications, and calls within them cost a session's other requests milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from rekindle._src.core.foreign_names import Hint
from rekindle._src.core.names import nearest
from rekindle.errors import ConfigError, InvalidRequest

T = TypeVar("T")
Refusal = type[ConfigError] | type[InvalidRequest]
# "command": every command that opens a model; `rekindle serve` and `rekindle warm` take all options of a session.
# "http": fields of requests to a server; "checkpoint": generation_config.json.
Place = Literal["command", "http", "checkpoint"]
_UNITS = {
    "": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9,
    "TB": 10**12,
}  # fmt: skip
_ENTRY = re.compile(r"    (\w+) \((?:[^:']|'[^']*')*\): (.*)")  # an option in a docstring: name (default): words


class Validator(Protocol):
    """Returns a value in the form that the record keeps, or raises `error`. Any object may arrive here."""

    def __call__(self, name: str, value: Any, error: Refusal, /) -> Any: ...


def check_unicode(name: str, text: str, error: Refusal) -> None:
    """Raise the error for half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise error(name, text, "has half a surrogate pair", "Pass Unicode text") from None


class Whole(NamedTuple):
    """A whole number within inclusive bounds."""

    low: int | None = None
    high: int | None = None
    fix: str = ""
    problem: str = ""  # with a value out of bounds, where the usual words don't say it

    def __call__(self, name: str, value: object, error: Refusal, /) -> int:
        whole: Any = value
        if type(value) is not int:
            try:
                if isinstance(value, bool):
                    raise TypeError
                whole = whole.__index__()
            except Exception:
                raise error(name, value, "must be a whole number", "Pass an int") from None
        if (self.low is not None and whole < self.low) or (self.high is not None and whole > self.high):
            fix = self.fix or f"Use {self.low} or more, or leave it out"
            raise error(name, value, self.problem or _bounds(self.low, self.high), fix)
        return int(whole)


class Size(NamedTuple):
    """A number of bytes, also as text with a unit: "512MiB", "2GB"."""

    def __call__(self, name: str, value: object, error: Refusal, /) -> int:
        if isinstance(value, str):
            number = value.strip().rstrip("BbGgIiKkMmTt").strip()
            try:
                value = int(float(number) * _UNITS[value.strip()[len(number) :].strip().upper()])
            except (ValueError, KeyError, OverflowError):
                raise error(name, value, "is not a size", "Write 512MiB, 2GB or a number of bytes") from None
        elif isinstance(value, bool) or not hasattr(value, "__index__"):
            fix = 'Pass a number of bytes, or text such as "512MiB" or "2GB"'
            raise error(name, value, "is not a size", fix)
        return Whole(0)(name, value, error)

    @staticmethod
    def written(value: int) -> str:
        """Return a size as text in the largest unit that divides it: `256MiB`."""
        units = {unit: size for unit, size in reversed(_UNITS.items()) if unit.endswith("IB") and value}
        unit = next((unit for unit, size in units.items() if value % size == 0 and value >= size), "B")
        return f"{value // _UNITS[unit]}{unit.replace('IB', 'iB')}"


class Real(NamedTuple):
    """A finite number within inclusive bounds; or `above` the lower one."""

    low: float
    high: float | None = None
    fix: str = ""
    above: bool = False

    def __call__(self, name: str, value: object, error: Refusal, /) -> float:
        number: Any = value
        if type(value) is not float:
            if isinstance(value, (bool, str)):
                number = math.nan
            else:
                try:
                    number = float(number)
                except Exception:
                    number = math.nan
        if not math.isfinite(number):
            raise error(name, value, "must be a finite number", "Pass a float")
        too_low = number <= self.low if self.above else number < self.low
        if too_low or (self.high is not None and number > self.high):
            raise error(name, value, _bounds(self.low, self.high, above=self.above), self.fix)
        return float(number)


class Flag(NamedTuple):
    """Accepts True and False."""

    def __call__(self, name: str, value: object, error: Refusal, /) -> bool:
        if not isinstance(value, bool):
            raise error(name, value, "must be True or False", f"Pass {name}=True, or leave it out")
        return value


class Word(NamedTuple):
    """Accepts one of the words that are `known`."""

    known: tuple[str, ...]

    def __call__(self, name: str, value: object, error: Refusal, /) -> str:
        if isinstance(value, str) and value in self.known:
            return value
        nearby = nearest(value, self.known) if isinstance(value, str) else None
        close = f"Did you mean {nearby!r}? " if nearby else ""
        raise error(name, value, "is not known", f"{close}Use one of {', '.join(map(repr, self.known))}")


class Text(NamedTuple):
    """Accepts text; with `path` also paths, which it converts to text."""

    path: bool = False

    def __call__(self, name: str, value: Any, error: Refusal, /) -> str:
        if self.path and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str):
            raise error(name, value, "is not text", "Pass a str" + " or a Path" * self.path)
        return value


def _bounds(low: float | None, high: float | None, *, above: bool = False) -> str:
    if above:
        return f"must be above {low:g}" + (f" and at most {high:g}" if high is not None else "")
    return f"must be at least {low:g}" if high is None else f"must be from {low:g} to {high:g}"


class TextForm(NamedTuple):
    """How a command line spells an option, where its check does not tell."""

    shape: str  # shown in the help, such as N
    read: Callable[[str], Any] | None = None  # None: the check reads the text


class Option(NamedTuple):
    """The declaration of one option."""

    name: str
    default: object  # or a function that makes it, for a mapping
    check: Validator
    also: tuple[Place, ...]  # where else it is offered
    text: TextForm | None

    def new_default(self) -> object:
        """Return the default value; one that a type makes is a new object each time."""
        return self.default() if isinstance(self.default, type) else self.default


def option(default: Any, check: Validator, *, also: tuple[Place, ...] = (), text: TextForm | None = None) -> Any:
    """Declare a field of a record of options. A type as the default is called for each record."""
    metadata = {"option": (check, also, text)}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options_of(record: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in their order."""
    options = []
    for field in dataclasses.fields(record):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory
        options.append(Option(field.name, default, *field.metadata["option"]))
    return tuple(options)


@functools.cache
def _names(record: type) -> tuple[str, ...]:
    return tuple(option.name for option in options_of(record))


@functools.cache
def words_of(record: type) -> Mapping[str, str]:
    """Return the record's documentation of each option; empty where Python runs without docstrings."""
    words: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(record.__doc__ or "").partition("Options:\n")[2].splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry is not None:
            name = entry[1]
            words[name] = entry[2]
        elif name:
            words[name] += f" {line.strip()}"
    return words


def check_options(record: Any, error: Refusal) -> None:
    """Replace each value of a new record by its checked form, and None by the default."""
    for entry in options_of(record.__class__):
        value = getattr(record, entry.name)
        if value is not entry.default:
            checked = entry.new_default() if value is None else entry.check(entry.name, value, error)
            object.__setattr__(record, entry.name, checked)


class _Door(NamedTuple):
    """How users reach a record of options."""

    record: type
    error: Refusal
    kind: str  # what its options are called
    advice: str  # for one of its options that was passed elsewhere
    foreign: Mapping[str, Hint]


_doors: list[_Door] = []


def door(error: Refusal, kind: str, advice: str, foreign: Mapping[str, Hint]) -> Callable[[type[T]], type[T]]:
    """Register a record of options, so that an unknown one gets advice; `advice` may contain `{name}`."""

    def register(record: type[T]) -> type[T]:
        _doors.append(_Door(record, error, kind, advice, foreign))
        return record

    return register


def refuse_unknown(record: type, options: Mapping[str, Any]) -> None:
    """Raise for the first option that a record does not have, and name the likely one."""
    known = _names(record)
    for name, value in options.items():
        if name not in known:
            here = next(entry for entry in _doors if entry.record is record)
            raise here.error(name, value, f"is not {here.kind}", _advice(name, here))


def _advice(name: str, here: _Door) -> str:
    if name in here.foreign:
        return here.foreign[name].fix
    for other in _doors:
        if other is not here and name in _names(other.record):
            return other.advice.format(name=name)
    known = _names(here.record)
    close = nearest(name, known)
    return (
        f"Did you mean {close!r}?"
        if close
        else f"help(rekindle.{here.record.__name__}) lists the {len(known)} there are"
    )


def refuse_keywords(
    keywords: Mapping[str, object], call: Callable[..., object], foreign: Mapping[str, str] | None = None
) -> None:
    """Raise for the first keyword that a call does not take, and name the likely one.

    `foreign` maps options of other libraries to advice.
    """
    if not keywords:
        return
    known = [
        parameter.name
        for parameter in inspect.signature(call).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for name, value in keywords.items():
        if name in known:
            continue
        close = nearest(name, known)
        fix = f"Did you mean {close!r}?" if close else f"Known are: {', '.join(known)}"
        fix = (foreign or {}).get(name, fix)
        raise InvalidRequest(name, value, f"is not an option of {call.__name__}", fix)


# For type checkers alone, which know this name wherever it comes from. The first Tab in a notebook infers the type of a
# decorated call: by typing's own name, or by these two, it would parse `typing` and `types`, a third of its time. Where
# it finds none, it follows the function through its result.
TYPE_CHECKING = False
if TYPE_CHECKING:
    F = TypeVar("F", bound=Callable[..., Any])

    class Decorator(Protocol):
        """A decorator that returns the function itself."""

        def __call__(self, function: F, /) -> F: ...


class NoArgument:
    """Stands for an argument that was not passed. Calls refuse it by their own checks, or by `refuse_missing`."""

    def __repr__(self) -> str:
        return "nothing"


_NO_ARGUMENT = NoArgument()


def _with_missing(function: Any, signature: inspect.Signature) -> None:
    """Let positional arguments without a default be missing: the function then refuses them with an `InvalidRequest`.

    Python's own TypeError would say that `prompt` is missing where it was passed by its name.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        parameter
        for parameter in tuple(signature.parameters.values())[1:]  # without self
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty
    ]
    function.__defaults__ = (_NO_ARGUMENT,) * len(required) + (function.__defaults__ or ())


def refuse_missing(call: Callable[..., object], **arguments: object) -> None:
    """Raise for the first of these positional arguments that was not passed, and say how the call is written.

    A call passes the arguments that it has no check of its own for, after it has refused unknown keywords.
    """
    for name, value in arguments.items():
        if isinstance(value, NoArgument):
            required = [one for one in inspect.signature(call).parameters.values() if one.default is one.empty][1:]
            words = (f"{one.name}=…" if one.kind is one.KEYWORD_ONLY else one.name for one in required)
            raise InvalidRequest(name, value, "is missing", f"Write {call.__name__}({', '.join(words)})")


class _Annotation(str):
    """An annotation as it stands in the source; `inspect` would show a plain string in quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _keywords(record: type) -> list[inspect.Parameter]:
    """Return the keys of a TypedDict as parameters. None leaves one out."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_Annotation(getattr(kind, "__forward_arg__", kind)),
        )
        for name, kind in record.__annotations__.items()
    ]


def _with_keywords(explicit: list[inspect.Parameter], record: type) -> list[inspect.Parameter]:
    """Return parameters with the keys of a TypedDict before the other keywords."""
    place = next((at for at, one in enumerate(explicit) if one.kind is inspect.Parameter.KEYWORD_ONLY), len(explicit))
    return [*explicit[:place], *_keywords(record), *explicit[place:]]


def takes_keywords(record: type) -> Decorator:
    """Show the keys of a TypedDict instead of `**options` in a method's signature. The method refuses others.

    It gets a value for positional arguments that were not passed, and refuses it at once: see `refuse_missing`.
    """

    def apply(function: F) -> F:
        signature = inspect.signature(function)
        explicit = [
            parameter.replace(annotation=_bare(parameter.annotation))
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=_with_keywords(explicit, record), return_annotation=_bare(signature.return_annotation)
        )
        _with_missing(function, signature)
        return function

    return apply


def takes_options(record: type, *, returns: str = "", also: type | None = None, **defaults: object) -> Decorator:
    """Show the fields of a dataclass instead of `**options`: in the signature, and with meanings in the docstring.

    The docstring of `record` has to end with a section "Options:". `returns` is shown as the type of the result; a
    function with overloads needs it. The keys of the TypedDict `also` come before all keywords. `defaults` override the
    dataclass's own. A call of a session gets a value for positional arguments that were not passed, and refuses it: see
    `refuse_missing`.
    """
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[field.name]
            if field.name in defaults
            else field.default_factory()
            if callable(field.default_factory)
            else field.default,
            annotation=_Annotation(field.type),
        )
        for field in dataclasses.fields(record)
    ]
    names = {field.name for field in fields}
    _, heading, table = inspect.cleandoc(record.__doc__ or "").partition("Options:\n")

    def apply(function: F) -> F:
        signature = inspect.signature(function)
        explicit = [
            parameter.replace(annotation=_bare(parameter.annotation))
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in names
        ]
        explicit = explicit if also is None else _with_keywords(explicit, also)
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*explicit, *fields], return_annotation=_bare(returns or signature.return_annotation)
        )
        if any(entry.record is record and entry.error is InvalidRequest for entry in _doors):  # a call of a session
            _with_missing(function, signature)
        if function.__doc__ is not None:  # python -OO has none
            function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{heading}{table}"
        return function

    return apply


def _bare(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


MAX_N = 16_384  # sequences of one prompt; a session's max_queue is a tighter bound, once the request is submitted
MAX_SEQUENCES = 1 << 17  # of one call: its prompts times n
MAX_PROMPT = 1 << 23  # characters or token ids of one prompt: twice as many as a million tokens of English have
# Text is held back while it may be the beginning of a stop string, and compared with each of them at each token: 10,000
# strings and n=64 held the other requests for seconds.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2_048  # of all stop strings together
MAX_BAD_WORDS = 1_024
MAX_WORD = 256  # characters
MAX_SALT = 1_024  # characters


def bounded(field: str, value: Any, limit: int) -> Any:
    """Return `value` if it has at most `limit` entries. An iterator is read into a tuple, up to one entry beyond."""
    try:
        value = value if isinstance(value, Sized) else tuple(itertools.islice(value, limit + 1))
        size = len(value)
    except Exception:  # any object may arrive here, and its methods may raise anything
        raise InvalidRequest(field, value, "can't be read as a list", "Pass a list") from None
    if size > limit:
        raise InvalidRequest(field, f"{size:,} entries", f"is over the {limit:,} that are possible", "Pass fewer")
    return value


def check_n(n: Any) -> None:
    """Raise InvalidRequest if `n` is a whole number above MAX_N; the caller checks other kinds."""
    try:
        whole = n.__index__()
    except Exception:
        return
    if whole > MAX_N:
        raise InvalidRequest("n", n, f"must be at most {MAX_N:,}", "Submit the prompt several times")


def bounded_stops(stop: Any) -> Any:
    """Return `stop`, at most MAX_STOPS strings with MAX_STOP_CHARACTERS characters together."""
    if not isinstance(stop, str):
        stop = bounded("stop", stop, MAX_STOPS)
    try:
        length = len(stop) if isinstance(stop, str) else sum(len(text) for text in stop if isinstance(text, str))
    except Exception:
        return stop
    if length > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            "stop",
            f"{length:,} characters",
            f"is over the {MAX_STOP_CHARACTERS:,} that all stop strings may have together",
            "Use shorter or fewer ones",
        )
    return stop


def check_words(words: Sequence[Any]) -> None:
    """Raise InvalidRequest unless all `bad_words` are texts of a sensible length."""
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequest("bad_words", word, "is not text, or is empty", "Remove it")
        if len(word) > MAX_WORD:
            raise InvalidRequest("bad_words", word, f"has more than {MAX_WORD} characters", "Use a shorter one")


def check_salt(salt: object) -> None:
    """Raise InvalidRequest unless `salt` is None or a text of a sensible length."""
    if salt is None:
        return
    fix = "Pass a str such as the user's name, or leave it out to share the cache"
    if not isinstance(salt, str):
        raise InvalidRequest("salt", salt, "is not text", fix)
    if not salt:
        raise InvalidRequest("salt", salt, "is empty, which would share the cache with requests without one", fix)
    if len(salt) > MAX_SALT:
        raise InvalidRequest("salt", f"{len(salt):,} characters", f"is over the {MAX_SALT:,} that are possible", fix)


def check_prompt(length: int, unit: str) -> None:
    """Raise InvalidRequest for a prompt of more than MAX_PROMPT characters or token ids."""
    if length > MAX_PROMPT:
        raise InvalidRequest(
            "prompt", f"{length:,} {unit}", f"is over the {MAX_PROMPT:,} that one prompt may have", "Shorten it"
        )


def check_batch(prompts: int, n: int = 1) -> None:
    """Raise InvalidRequest if one call asks for more than MAX_SEQUENCES sequences."""
    if prompts * n > MAX_SEQUENCES:
        raise InvalidRequest(
            "prompt",
            f"{prompts:,} prompts with n={n:,}",
            f"are over the {MAX_SEQUENCES:,} sequences that one call may ask for",
            "Split it into several calls",
        )
