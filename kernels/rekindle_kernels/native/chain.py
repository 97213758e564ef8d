"""Runs of native calls as one call of XLA: a chain.

A step of a model of 30 layers is 270 native calls with nothing between them but reshapes. To XLA each is an instruction
to load and to schedule, and threads to wake. `chained` looks through a function's jaxpr for such runs and replaces each
by a single call, whose kernel (chaining.py) makes the calls of the run; what flows between them lies in scratch memory.

A program has a fixed number of tokens, and a prompt seldom has as many. In a run with prefill attention, whose operands
say how many there are, no kernel computes the rows behind them: they are left undefined. So are, in a run with any
attention, the products' rows for sequences of length 0 behind all others that decode.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from rekindle_kernels.native import plan, zeros
from rekindle_kernels.native.build import PREFIX, builds, ensure
from rekindle_kernels.native.plan import OPERAND, RESULT, Buffer, Step

NAME = "chain"
# Operands and results of each kind of kernel that have one row per token.
PER_TOKEN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "norm": ((0,), (0,)),
    "matvec": ((2, 3), (0,)),
    "panels": ((2, 3), (0,)),
    "split": ((0, 1, 2, 3), (0, 1, 2)),
    "write": ((1, 2, 3, 4), ()),
    "prefill": ((0, 10), (0,)),
}
# Operands of attention: queries and lengths of sequences; of "prefill" ends of the prompts and how many there are; of
# each kind numbers, the first of which is the rows that decode.
QUERIES, LENGTHS, ENDS, PROMPTS = 0, 4, 7, 8
RULES = {"decode": 7, "prefill": 9}
ROWS_OF_PRODUCT, GAP_OF_PRODUCT = 2, 4  # operands of "matvec" and "panels"


def chains() -> bool:
    """REKINDLE_CHAIN=0 leaves native calls alone, for looking at them in a profile."""
    return os.environ.get("REKINDLE_CHAIN", "1") != "0"


def chained(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be compiled, with its runs of native calls as one call each."""
    if not chains() or not builds(NAME):
        return function

    @functools.wraps(function)
    def one(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        flat = lambda *leaves: function(*jax.tree.unflatten(tree, leaves))  # noqa: E731
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        inputs = [_described(leaf) for leaf in leaves]
        constants = [_described(constant, constant) for constant in closed.consts]
        operations, outputs = _flattened(closed.jaxpr, [*constants, *inputs])
        values = dict(zip(inputs, leaves, strict=True))
        for operation in _grouped(operations, outputs):
            results = operation.bind([_read(values, value) for value in operation.inputs])
            values.update(zip(operation.outputs, results, strict=True))
        return jax.tree.unflatten(jax.tree.structure(shape), [_read(values, value) for value in outputs])

    return one


@dataclass(eq=False)
class Value:
    """What an operation takes or gives."""

    shape: tuple[int, ...]
    dtype: Any
    constant: Any = None


@dataclass(eq=False)
class Operation:
    """One equation of a jaxpr."""

    jaxpr: Jaxpr
    equation: JaxprEqn
    inputs: list[Value]
    outputs: list[Value]

    def bind(self, values: list[Any]) -> list[Any]:
        equation = self.equation
        known = {
            variable: value
            for variable, value in zip(equation.invars, values, strict=True)
            if not isinstance(variable, Literal)
        }
        alone = self.jaxpr.replace(
            constvars=[],
            invars=list(known),
            outvars=equation.outvars,
            eqns=[equation],
            effects=equation.effects,
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        return jax.core.eval_jaxpr(alone, (), *known.values())

    @property
    def kernel(self) -> str | None:
        """Of a native call."""
        target = self.equation.params["target_name"] if self.equation.primitive.name == "ffi_call" else ""
        return target.removeprefix(PREFIX) if target.startswith(PREFIX) else None

    @property
    def aliases(self) -> dict[int, int]:
        """Of a native call: outputs that are written into the memory of inputs."""
        return {result: operand for operand, result in self.equation.params["input_output_aliases"]}


@dataclass(eq=False)
class Chain:
    """A run of native calls."""

    steps: list[Step]
    inputs: list[Value]
    outputs: list[Value]
    aliases: dict[int, int]  # results that are written into the memory of operands, by operand
    scratch: int  # bytes
    rows: plan.Rows | None

    def bind(self, values: list[Any]) -> list[Any]:
        results = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self.outputs]
        scratch = jax.ShapeDtypeStruct((self.scratch,), jnp.uint8)
        call = jax.ffi.ffi_call(ensure(NAME), (*results, scratch), input_output_aliases=self.aliases)
        names = " ".join(sorted({PREFIX + step.kernel for step in self.steps}))  # for `build.called_by`
        return list(call(plan.written(self.steps, len(results), self.rows), *values, kernels=names))[:-1]


def _read(values: dict[Value, Any], value: Value) -> Any:
    return values[value] if value.constant is None else value.constant


def _flattened(jaxpr: Jaxpr, inputs: Sequence[Value]) -> tuple[list[Operation], list[Value]]:
    """Operations and outputs, with what `differentiable` wraps taken out of its wrapping."""
    names: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    operations: list[Operation] = []

    def value(atom: Any) -> Value:
        return _described(atom.aval, atom.val) if isinstance(atom, Literal) else names[atom]

    for equation in jaxpr.eqns:
        operands = [value(atom) for atom in equation.invars]
        results = [_described(variable.aval) for variable in equation.outvars]
        if equation.primitive.name == "custom_jvp_call":
            inner = equation.params["call_jaxpr"]
            inside, results = _flattened(inner.jaxpr, [*map(_described, inner.consts, inner.consts), *operands])
            operations += inside
        elif equation.primitive.name == "broadcast_in_dim" and _small(operands[0], results[0]):
            results[0].constant = np.full(results[0].shape, operands[0].constant, results[0].dtype)
        else:
            operations.append(Operation(jaxpr, equation, operands, results))
        names.update(zip(equation.outvars, results, strict=True))
    return operations, [value(atom) for atom in jaxpr.outvars]


def _described(kind: Any, constant: Any = None) -> Value:
    return Value(kind.shape, kind.dtype, constant)


def _small(operand: Value, result: Value) -> bool:
    """Whether a broadcast of it may as well be a constant."""
    return operand.constant is not None and operand.shape == () and prod(result.shape) <= 16


def _grouped(operations: Sequence[Operation], outputs: Sequence[Value]) -> list[Operation | Chain]:
    """What to do in which order: a run goes on past operations that need nothing of it, which come before it."""
    last = {value: index for index, operation in enumerate(operations) for value in operation.inputs}
    last.update(dict.fromkeys(outputs, len(operations)))
    free = _last_of_memory(operations, last)
    order: list[Operation | Chain] = []
    run: list[Operation] = []
    made: set[Value] = set()

    def close(end: int) -> None:
        order.extend(_made_one(run, {value for value in made if last.get(value, 0) >= end}))
        run.clear()
        made.clear()

    for index, operation in enumerate(operations):
        chains = operation.kernel not in (None, NAME, zeros.NAME) and all(
            free[operation.inputs[operand]] == index for operand in operation.aliases.values()
        )
        views = operation.equation.primitive.name == "reshape" and operation.inputs[0] in made
        if chains or views:
            run.append(operation)
            made.update(operation.outputs)
            continue
        if any(value in made for value in operation.inputs):
            close(index)
        order.append(operation)
    close(len(operations))
    return order


def _last_of_memory(operations: Sequence[Operation], last: dict[Value, int]) -> dict[Value, int]:
    """When a value's memory is read last, under whatever shape."""
    base: dict[Value, Value] = {}
    for operation in operations:
        if operation.equation.primitive.name == "reshape":
            base[operation.outputs[0]] = base.get(operation.inputs[0], operation.inputs[0])
    latest: dict[Value, int] = {}
    for value, index in last.items():
        owner = base.get(value, value)
        latest[owner] = max(latest.get(owner, index), index)
    return {value: latest[base.get(value, value)] for value in last}


def _made_one(run: Sequence[Operation], leaving: set[Value]) -> list[Operation | Chain]:
    """A run's calls as one, then the reshapes of what leaves it."""
    if sum(operation.kernel is not None for operation in run) < 2:
        return list(run)
    buffers: dict[Value, Buffer] = {}
    steps: list[Step] = []
    attention = _attention(run)
    tokens = None if attention is None else attention.inputs[QUERIES].shape[0]
    gap = Buffer(0, 0, 0, plan.GAP)
    inputs: dict[Any, Value] = {}
    for number, operation in enumerate(run):
        for value in operation.inputs:
            if value not in buffers:
                known = inputs.setdefault(_identity(value), value)
                buffers[value] = buffers.get(known) or Buffer(0, 0, 0, OPERAND, len(inputs))
            buffers[value].last = number
        for index, value in enumerate(operation.outputs):
            if operation.kernel is None:
                buffers[value] = buffers[operation.inputs[0]]
            elif index in operation.aliases:
                buffers[value] = buffers[operation.inputs[operation.aliases[index]]]
            else:
                buffers[value] = Buffer(prod(value.shape) * value.dtype.itemsize, number, number)
        if operation.kernel is not None:
            shapes = _shapes(operation, tokens)
            operands = [(buffers[value], next(shapes)) for value in operation.inputs]
            if _is_product_of(operation, tokens):
                operands[GAP_OF_PRODUCT] = gap, operands[GAP_OF_PRODUCT][1]
            results = [(buffers[value], next(shapes)) for value in operation.outputs]
            steps.append(Step(operation.kernel, operands, results))
    views: list[Operation | Chain] = []
    for operation in reversed(run):
        if operation.kernel is None and operation.outputs[0] in leaving:
            views.insert(0, operation)
            leaving = leaving - {operation.outputs[0]} | {operation.inputs[0]}
    outputs = [value for operation in run for value in operation.outputs if value in leaving]
    aliases = {}
    for index, value in enumerate(outputs):
        if buffers[value].where == OPERAND:
            aliases[buffers[value].number] = index
        else:
            buffers[value].where, buffers[value].number = RESULT, index
    scratch = plan.place({buffer for buffer in buffers.values() if buffer.where == plan.SCRATCH})
    rows = None
    if attention is not None:
        told = (LENGTHS, ENDS, PROMPTS) if _kind(attention) == "prefill" else (LENGTHS,)
        rows = plan.Rows(_decoding(attention), *(buffers[attention.inputs[index]].number for index in told))
    return [Chain(steps, list(inputs.values()), outputs, aliases, scratch, rows), *views]


def _attention(run: Sequence[Operation]) -> Operation | None:
    """The run's first attention, of prompts if there are any, if all of them are over the same sequences."""
    found = [operation for operation in run if _kind(operation) in RULES]
    if any(operation.inputs[RULES[_kind(operation)]].constant is None for operation in found):
        return None
    prompts = [operation for operation in found if _kind(operation) == "prefill"]
    ends = {tuple(_identity(operation.inputs[index]) for index in (ENDS, PROMPTS)) for operation in prompts}
    lengths = {(_identity(operation.inputs[LENGTHS]), _decoding(operation)) for operation in found}
    return (prompts or found)[0] if len(ends) <= 1 and len(lengths) == 1 else None


def _decoding(attention: Operation) -> int:
    """Rows that decode, those of nobody included."""
    return int(attention.inputs[RULES[_kind(attention)]].constant[0])


def _is_product_of(operation: Operation, tokens: int | None) -> bool:
    """Whether its rows are the step's tokens, and nobody has said how many there are."""
    if _kind(operation) not in ("matvec", "panels"):
        return False
    x, gap = operation.inputs[ROWS_OF_PRODUCT], operation.inputs[GAP_OF_PRODUCT]
    return x.shape[0] == tokens and gap.constant is not None


def _kind(operation: Operation) -> str:
    return (operation.kernel or "").split("_")[0]


def _shapes(operation: Operation, tokens: int | None) -> Iterator[tuple[int, ...]]:
    """Of a call's operands, then of its results; ROWS where it has one row for each of so many tokens."""
    per_kind = PER_TOKEN.get(_kind(operation), ((), ()))
    for values, per_token in zip((operation.inputs, operation.outputs), per_kind, strict=True):
        for index, value in enumerate(values):
            is_row = index in per_token and value.shape[0] == tokens
            yield (plan.ROWS, *value.shape[1:]) if is_row else value.shape


def _identity(value: Value) -> Any:
    """The same for equal constants."""
    if value.constant is None or isinstance(value.constant, jax.core.Tracer):
        return value
    array = np.asarray(value.constant, value.dtype)
    return array.shape, array.dtype, array.tobytes()
