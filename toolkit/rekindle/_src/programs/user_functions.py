"""A user's functions that steps contain: their checks, what they raised in words, and a hash of code and values."""

from __future__ import annotations

import functools
import hashlib
import itertools
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rekindle.errors import ConfigError

MAX_DEPTH = 8  # of functions that use other functions
MAX_VALUES = 20_000  # bounds the time for a function that uses a large object, such as a session, as a global


def check_function(function: Any, name: Any, version: Any) -> None:
    """Raise ConfigError if it can't be called, or if its name or version is not a text."""
    if not callable(function):
        raise ConfigError("function", function, "is not callable", "Pass a pure JAX function")
    for field, value in (("name", name), ("version", version)):
        if not isinstance(value, str) or not value:
            raise ConfigError(field, value, "must be a non-empty string", "Name it")


def check_all(field: str, functions: Sequence[Any], kind: type, most: int) -> None:
    """Raise ConfigError for a session's functions of a wrong type, with equal names, or too many."""
    for function in functions:
        if not isinstance(function, kind):
            fix = f"Pass rekindle.{kind.__name__}(function, name='…')"
            raise ConfigError(field, function, f"is not a {kind.__name__}", fix)
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise ConfigError(field, names, "contains a name twice", f"Name every {field.removesuffix('s')} differently")
    if len(names) > most:
        raise ConfigError(field, names, f"has more than {most}", "Combine some into one")


def problem_of(function: Callable[..., Any], error: Exception, arguments: str) -> str:
    """Return in words that a user's function raised an error, with the line of the function where it is known."""
    code, where = getattr(function, "__code__", None), ""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if code is frame.f_code]
    if code is not None and lines:
        where = f" in its line {lines[-1] - code.co_firstlineno + 1}"
    cause = (str(error).strip() or "without a message").split("\n")[0]
    return f"raised {type(error).__name__}{where} {arguments}: {cause}"


def function_hash(function: Any) -> str:
    """Return a hash that is the same in every process for the same code and captured values, and differs for others.

    Globals that the function uses are values too: numbers, strings, arrays and functions of the user's own. Modules,
    classes and the functions of jax and numpy are hashed by their names alone.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in itertools.islice(_parts(function, 0), MAX_VALUES):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    if depth > MAX_DEPTH:
        return
    yield type(value).__qualname__.encode()
    if isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords), depth + 1)
    elif isinstance(value, types.FunctionType):
        yield from _function(value, depth)
    elif isinstance(value, types.MethodType):
        yield from _parts((value.__func__, value.__self__), depth + 1)
    elif isinstance(value, types.CodeType):
        yield from _code(value, depth)
    elif isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
        yield str(getattr(value, "__qualname__", value.__name__)).encode()
    elif isinstance(value, dict):
        for name in sorted(value, key=repr):
            yield repr(name).encode()
            yield from _parts(value[name], depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item, depth + 1)
    elif isinstance(value, set | frozenset):
        yield from sorted(repr(item).encode() for item in value)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
        yield f"{array.dtype} {array.shape}".encode()
        yield np.ascontiguousarray(array).tobytes()
    elif hasattr(value, "__wrapped__"):  # jax.jit, functools.wraps
        yield from _parts(value.__wrapped__, depth + 1)
    elif hasattr(value, "__dict__"):  # an object of a user's class
        yield from _parts(type(value).__dict__.get("__call__"), depth + 1)
        yield from _parts(vars(value), depth + 1)


def _function(function: types.FunctionType, depth: int) -> Iterator[bytes]:
    code = function.__code__
    if depth and str(function.__module__).partition(".")[0] in ("jax", "numpy"):  # their versions are in the key anyway
        yield function.__qualname__.encode()
        return
    yield from _code(code, depth)
    yield from _parts((function.__defaults__, function.__kwdefaults__), depth + 1)
    for cell in function.__closure__ or ():
        try:
            captured = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if captured is not function:
            yield from _parts(captured, depth + 1)
    for name in sorted(_names(code)):
        if name in function.__globals__ and function.__globals__[name] is not function:
            yield name.encode()
            yield from _parts(function.__globals__[name], depth + 1)


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _code(code: types.CodeType, depth: int) -> Iterator[bytes]:
    """Yield the parts of a code object, without line numbers and file names, which change when a notebook is edited."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode()
    yield from _parts(code.co_consts, depth + 1)
