"""A hash of a user's function: its code and the values that it uses, as far as they are visible from Python."""

from __future__ import annotations

import functools
import hashlib
import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

MAX_DEPTH = 8  # of functions that use other functions
MAX_VALUES = 20_000  # bounds the time for a function that uses a large object, such as a session, as a global


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
