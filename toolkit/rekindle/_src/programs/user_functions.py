"""Functions of the user in steps, which are pure JAX functions, and logits processors as one kind of them.

A processor sees the model's raw logits, before every other option. A request names its own in `Sampling.processors`. A
step with such a row runs in the variant of its program that contains all of the session's processors, each applied to
the rows that name it. Name, version and a hash of the function's code and values are part of the key of stored
programs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.core.drawable import Record
from rekindle._src.core.records import Request
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.draft_rows import histories
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import FIRST_PROCESSOR, MAX_PROCESSORS, PROCESSORS, RowOption
from rekindle._src.programs.step_part import StepInputs, StepPart, branch
from rekindle.errors import ConfigError

MAX_DEPTH = 8  # of functions that use other functions
MAX_VALUES = 20_000  # bounds the time for a function that uses a large object, such as a session, as a global


class UserFunction(Protocol):
    """A function of the user's with a name."""

    @property
    def name(self) -> str: ...


def check_function(function: object, name: object, version: object) -> None:
    """Raise ConfigError if it can't be called, or if its name or version is not a text."""
    if not callable(function):
        raise ConfigError("function", function, "is not callable", "Pass a pure JAX function")
    for field, value in (("name", name), ("version", version)):
        if not isinstance(value, str) or not value:
            raise ConfigError(field, value, "must be a non-empty string", "Name it")


def check_all(field: str, functions: Sequence[UserFunction], kind: type, most: int) -> None:
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


def problem_of(function: Callable[..., object], error: Exception, arguments: str) -> str:
    """Return in words that a user's function raised an error, with the line of the function where it is known."""
    code, where = getattr(function, "__code__", None), ""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if code is frame.f_code]
    if code is not None and lines:
        where = f" in its line {lines[-1] - code.co_firstlineno + 1}"
    cause = (str(error).strip() or "without a message").split("\n")[0]
    return f"raised {type(error).__name__}{where} {arguments}: {cause}"


def function_hash(function: object) -> str:
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


class LogitsContext(NamedTuple):
    """The arrays that a processor may read in addition to the logits; N rows, V vocabulary."""

    position: Array  # int32 [N]: index, in the sequence, of the token to choose
    prompt_length: Array  # int32 [N]
    last_token: Array  # int32 [N]: the token before that one
    in_prompt: Array  # bool [N, V]
    generated: Array  # int32 [N, V]: the number of times that each token was generated so far


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LogitsProcessor(Record):
    """A `function(logits float32 [N, V], context) -> float32 [N, V]` of independent rows; traced once per program.

    Rows that choose no token in a step may have any values. Change `version` when something changes that is not visible
    in the function's own code, such as code that it imports.
    """

    function: Callable[[Array, LogitsContext], Array]
    name: str
    version: str = "1"

    def __post_init__(self) -> None:
        check_function(self.function, self.name, self.version)

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of compiled programs: processors with equal keys compile to equal programs."""
        return self.name, self.version, function_hash(self.function)


def check_processors(processors: Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Check and return the session's processors. Raise ConfigError for a wrong type, equal names, or too many."""
    check_all("processors", processors, LogitsProcessor, MAX_PROCESSORS)
    return tuple(processors)


def check_results(processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
    """Raise ConfigError for a processor that fails for logits of this vocabulary, or changes their shape."""
    rows = 2
    numbers: Any
    table: Any
    numbers, table = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, vocab_size), jnp.int32)
    logits = jax.ShapeDtypeStruct(table.shape, jnp.float32)
    in_prompt: Any = jax.ShapeDtypeStruct(table.shape, jnp.bool_)
    context = LogitsContext(numbers, numbers, numbers, in_prompt, table)
    for processor in processors:
        fix = "Use jax.numpy, and return logits of the shape that it was given"
        try:
            result = jax.eval_shape(processor.function, logits, context)
        except Exception as error:  # code of the user's
            problem = problem_of(processor.function, error, f"for logits {logits.shape}")
            raise ConfigError("processors", processor.name, problem, fix) from None  # the chain is JAX's
        _check_shape(processor, getattr(result, "shape", None), logits.shape)


def _check_shape(processor: LogitsProcessor, shape: tuple[int, ...] | None, expected: tuple[int, ...]) -> None:
    if shape != expected:
        returned = "no array" if shape is None else f"shape {shape}"
        problem = f"returned {returned} for logits of shape {expected}"
        raise ConfigError("processors", processor.name, problem, "Return one number for each token: the same shape")


def process(processors: Sequence[LogitsProcessor], logits: Array, flags: Array, context: LogitsContext) -> Array:
    """Apply to each row of the logits [N, V] the processors that its flags name."""
    for index, processor in enumerate(processors):
        changed = processor.function(logits, context)
        _check_shape(processor, changed.shape, logits.shape)
        selected = (flags >> (FIRST_PROCESSOR + index)) & 1 == 1
        logits = jnp.where(selected[:, None], changed.astype(jnp.float32), logits)
    return logits


class ProcessorsOption(RowOption):
    """The processors that a request names: a flag for each."""

    option, history = "sampling.processors", PROCESSORS

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._bits = {processor.name: 1 << FIRST_PROCESSOR + index for index, processor in enumerate(processors)}

    def flags(self, request: Request) -> int:
        return sum(self._bits[name] for name in set(request.sampling.processors))

    def reads_slot(self, request: Request) -> bool:
        return True


class Processors(StepPart[None, tuple[()]]):
    """The session's processors, in the programs of a variant that is compiled ahead."""

    changing, variant, warmed = PROCESSORS, ProgramVariant.PROCESSORS, True

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = tuple(processors)

    def change(self, logits: Array, inputs: StepInputs, own: None, state: RequestState) -> Array:
        history = histories(state, inputs)
        context = LogitsContext(
            position=inputs.lengths,
            prompt_length=inputs.prompt_lengths[inputs.last],
            last_token=inputs.tokens[inputs.last],
            in_prompt=(history & 1) == 1,
            generated=history >> 1,
        )
        return branch(
            inputs.any_flags & PROCESSORS != 0,
            lambda: process(self._processors, logits, inputs.flags, context),
            lambda: logits,
        )
