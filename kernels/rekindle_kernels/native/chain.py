"""Runs of native calls as one call of XLA: a chain.

A step of a model of 30 layers is 270 native calls with nothing between them but reshapes. To XLA each is an instruction
to load and to schedule, and threads to wake. `chained` looks through a function's jaxpr for such runs and replaces each
by a single call, whose kernel (kernels/chain_runner.py) makes the calls of the run; what flows between them lies in
scratch memory. It does the same in the bodies of loops.

A program has a fixed number of tokens, and a prompt seldom has as many. The operands of prefill attention say how many
tokens there are: in a run with it, no kernel computes the rows after the last one, and they are left undefined. In a
run with any attention, products also skip the trailing decode rows without a sequence. After an attention call with an
`unread` operand, they skip that many rows of the first prompt as well.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels.native import chain_plan
from rekindle_kernels.native.build import PREFIX, builds, ensure
from rekindle_kernels.native.calling import forward_only
from rekindle_kernels.native.chain_plan import CHAIN, OPERAND, RESULT, Buffer, Step
from rekindle_kernels.native.kernel_table import ADAPTERS, GEMM, KernelSpec, Variant, identify

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

STACKS = ("down", "up", "owners", "slots")  # operands of adapters that products before them take, too


def chains() -> bool:
    """REKINDLE_CHAIN=0 leaves native calls alone, for looking at them in a profile."""
    return os.environ.get("REKINDLE_CHAIN", "1") != "0"


def chained(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, to be compiled, with its runs of native calls as one call each."""
    if not chains() or not builds(CHAIN):
        return function

    @functools.wraps(function)
    def one(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        flat = lambda *leaves: function(*jax.tree.unflatten(tree, leaves))  # noqa: E731
        with forward_only():  # a call in place of a run has no derivative
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
    """The shape and dtype of an operand or result."""

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
        known = {name: value for name, value in zip(equation.invars, values, strict=True) if not _is_literal(name)}
        alone = self.jaxpr.replace(
            constvars=[],
            invars=list(known),
            outvars=equation.outvars,
            eqns=[equation],
            effects=equation.effects,
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        return jax.core.eval_jaxpr(alone, (), *known.values())

    @cached_property
    def kernel(self) -> Variant | None:
        """The kernel of a native call, if it has a table."""
        target = self.equation.params["target_name"] if self.equation.primitive.name == "ffi_call" else ""
        return identify(target.removeprefix(PREFIX)) if target.startswith(PREFIX) else None

    @property
    def aliases(self) -> dict[int, int]:
        """The outputs of a native call that are written into the memory of inputs, and those inputs."""
        return {result: operand for operand, result in self.equation.params["input_output_aliases"]}

    @property
    def spec(self) -> KernelSpec:
        """The table of a native call."""
        assert self.kernel is not None, "an operation of XLA's"
        return self.kernel.spec

    def has(self, operand: str) -> bool:
        """True for a native call with this operand in its table."""
        return self.kernel is not None and self.kernel.spec.has(operand)

    @property
    def unread(self) -> Value | None:
        """The `unread` operand of an attention call: how many of the first prompt's rows to skip. None without one."""
        if not self.has("unread"):
            return None
        present = self.setting("present") or 0
        return self.operand("unread") if present & self.spec.present_bit("unread") else None

    def operand(self, name: str) -> Value:
        """Return an operand of a native call."""
        return self.inputs[self.spec.index(name)]

    def setting(self, name: str) -> int | None:
        """Return a setting of a native call; None if the program computes its settings."""
        packed = self.operand("settings").constant
        if packed is None or isinstance(packed, jax.core.Tracer):
            return None
        return int(packed[self.spec.setting_index(name)])


@dataclass(eq=False)
class Chain:
    """A run of native calls as one."""

    steps: list[Step]
    inputs: list[Value]
    outputs: list[Value]
    aliases: dict[int, int]  # results that are written into the memory of operands, by operand
    scratch: int  # bytes
    rows: chain_plan.RowCounts | None

    def bind(self, values: list[Any]) -> list[Any]:
        results = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self.outputs]
        scratch = jax.ShapeDtypeStruct((self.scratch,), jnp.uint8)
        call = jax.ffi.ffi_call(ensure(CHAIN), (*results, scratch), input_output_aliases=self.aliases)
        names = " ".join(sorted({PREFIX + step.kernel for step in self.steps}))  # `build.called_by` looks for them
        return list(call(chain_plan.encode(self.steps, len(results), self.rows), *values, kernels=names))[:-1]


def _read(values: dict[Value, Any], value: Value) -> Any:
    return values[value] if value.constant is None else value.constant


def _is_literal(atom: Any) -> bool:
    from jax.extend.core import Literal  # it imports Pallas, which only tracing can afford

    return isinstance(atom, Literal)


def _flattened(jaxpr: Jaxpr, inputs: Sequence[Value]) -> tuple[list[Operation], list[Value]]:
    """Operations and outputs, with what `differentiable` wraps taken out of its wrapping."""
    names: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    operations: list[Operation] = []

    def value(atom: Any) -> Value:
        return _described(atom.aval, atom.val) if _is_literal(atom) else names[atom]

    for equation in jaxpr.eqns:
        operands = [value(atom) for atom in equation.invars]
        results = [_described(variable.aval) for variable in equation.outvars]
        if equation.primitive.name == "custom_jvp_call":
            inner = equation.params["call_jaxpr"]
            inside, results = _flattened(inner.jaxpr, [*map(_described, inner.consts, inner.consts), *operands])
            operations += inside
        elif equation.primitive.name == "while":
            operations.append(Operation(jaxpr, _with_joined_body(equation), operands, results))
        elif equation.primitive.name == "broadcast_in_dim" and _small(operands[0], results[0]):
            results[0].constant = np.full(results[0].shape, operands[0].constant, results[0].dtype)
        else:
            operations.append(Operation(jaxpr, equation, operands, results))
        names.update(zip(equation.outvars, results, strict=True))
    return operations, [value(atom) for atom in jaxpr.outvars]


def _with_joined_body(loop: JaxprEqn) -> JaxprEqn:
    """Return a loop with the runs of native calls in its body joined, each into one call."""
    from jax.extend.core import jaxpr_as_fun  # it imports Pallas, which only tracing can afford

    body = loop.params["body_jaxpr"]
    if not _calls_kernels(body.jaxpr):  # tracing it once more would change nothing, and takes as long as the first time
        return loop
    joined = jax.make_jaxpr(chained(jaxpr_as_fun(body)))(*body.in_avals)
    return loop.replace(params={**loop.params, "body_jaxpr": joined})


def _calls_kernels(jaxpr: Jaxpr) -> bool:
    """True if a jaxpr has a native call, also in loops and branches."""
    from jax.extend.core import jaxprs_in_params

    return any(
        equation.primitive.name == "ffi_call" or any(map(_calls_kernels, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def _described(kind: Any, constant: Any = None) -> Value:
    return Value(kind.shape, kind.dtype, constant)


def _small(operand: Value, result: Value) -> bool:
    """True if a broadcast of it may as well be a constant."""
    return operand.constant is not None and operand.shape == () and prod(result.shape) <= 16


def _grouped(operations: Sequence[Operation], outputs: Sequence[Value]) -> list[Operation | Chain]:
    """Return the calls in their order: a run goes on past operations that need nothing of it, which come before it."""
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
        chains = operation.kernel is not None and all(
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
    """Return a run's calls as one, then the reshapes of what leaves it."""
    if sum(operation.kernel is not None for operation in run) < 2:
        return list(run)
    attention = _attention(run)
    tokens = None if attention is None else _tokens(attention)
    gaps = [Value((2,), jnp.dtype(jnp.int32)) for _ in range(chain_plan.GAPS)]
    unread = next((index for index, operation in enumerate(run) if operation.unread is not None), len(run))
    run = [
        _stepping_over(gaps[index > unread], operation) if _is_product_of(operation, tokens) else operation
        for index, operation in enumerate(run)
    ]
    run = _prefetching_adapters(run)
    buffers, inputs = _buffers(run, gaps)
    steps = [_step(operation, buffers, tokens) for operation in run if operation.kernel is not None]
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
    in_scratch = dict.fromkeys(buffer for buffer in buffers.values() if buffer.where == chain_plan.SCRATCH)
    scratch = chain_plan.place(in_scratch)
    rows = None if attention is None else _rows(attention, buffers)
    if rows is not None and unread < len(run):
        rows = replace(rows, unread=buffers[run[unread].operand("unread")].number)
    return [Chain(steps, inputs, outputs, aliases, scratch, rows), *views]


def _is_product_of(operation: Operation, tokens: int | None) -> bool:
    """True if it multiplies a row for each of the step's tokens, and does not say yet which of them."""
    if not operation.has("rows") or operation.operand("x").shape[0] != tokens:
        return False
    present = operation.setting("present")
    return present is not None and not present & operation.spec.present_bit("rows")


def _stepping_over(gap: Value, product: Operation) -> Operation:
    """Return a product that is told of the gap by the chain."""
    spec, inputs = product.spec, list(product.inputs)
    settings = np.array(product.operand("settings").constant)
    settings[spec.setting_index("present")] |= spec.present_bit("rows")
    inputs[spec.index("rows")] = gap
    inputs[spec.index("settings")] = _described(settings, settings)
    return replace(product, inputs=inputs)


def _prefetching_adapters(run: Sequence[Operation]) -> list[Operation]:
    """Return a run with its products changed to prefetch the rows of rank of the adapters added to them."""
    changed, maker = list(run), dict[Value, int]()  # the call that makes a value, under whatever shape
    for index, operation in enumerate(run):
        if operation.kernel is None:
            maker[operation.outputs[0]] = maker.get(operation.inputs[0], index)
            continue
        if operation.spec in ADAPTERS:
            number = maker.get(operation.operand("y"), index)
            stacks, place = [operation.operand(name) for name in STACKS], operation.setting("place")
            if place is not None and maker.keys().isdisjoint(stacks) and _is_gemm(changed[number]):
                changed[number] = _with_stacks(changed[number], stacks, place)
        maker.update(dict.fromkeys(operation.outputs, index))
    return changed


def _is_gemm(operation: Operation) -> bool:
    """True for products of several rows with known settings."""
    return operation.kernel is not None and operation.kernel.spec is GEMM and operation.setting("present") is not None


def _with_stacks(product: Operation, stacks: Sequence[Value], place: int) -> Operation:
    """Return a product that prefetches from the stacks of adapters at a place."""
    settings = np.array(product.operand("settings").constant)
    present = GEMM.setting_index("present")
    absent = [] if settings[present] & GEMM.present_bit("expert") else [_described(settings[:1], settings[:1])]
    settings[present] |= sum(map(GEMM.present_bit, STACKS))
    settings[GEMM.setting_index("place")] = place
    settings[GEMM.setting_index("number_bytes")] = stacks[0].dtype.itemsize
    inputs = [*product.inputs, *absent, *stacks]
    inputs[GEMM.index("settings")] = _described(settings, settings)
    return replace(product, inputs=inputs)


def _buffers(run: Sequence[Operation], gaps: Sequence[Value]) -> tuple[dict[Value, Buffer], list[Value]]:
    """Return the memory of every value of a run, and the values that go into it: equal constants are one."""
    buffers = {gap: Buffer(0, 0, 0, chain_plan.GAP, number) for number, gap in enumerate(gaps)}
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
    return buffers, list(inputs.values())


def _step(operation: Operation, buffers: dict[Value, Buffer], tokens: int | None) -> Step:
    """One call of a chain."""
    assert operation.kernel is not None, "an operation of XLA's"
    spec = operation.kernel.spec
    operands = [(buffers[value], value.shape) for value in operation.inputs]
    results = [(buffers[value], value.shape) for value in operation.outputs]
    per_token = [
        *((operands, index) for index, array in enumerate(spec.operands) if array.is_per_token),
        *((results, index) for index, array in enumerate(spec.results) if array.is_per_token),
    ]
    for called, index in per_token:
        buffer, shape = called[index]
        if shape[0] == tokens:
            called[index] = buffer, (chain_plan.ROWS, *shape[1:])
    return Step(operation.kernel.name, operands, results)


def _tokens(operation: Operation) -> int:
    """Return the number of the step's tokens: the rows of the first operand that has some for each."""
    return next(operation.operand(each.name) for each in operation.spec.operands if each.is_per_token).shape[0]


def _attention(run: Sequence[Operation]) -> Operation | None:
    """Return the run's first attention or layer with a state, one that knows of prompts if there are any, if all of
    them are over the same sequences."""
    found = [operation for operation in run if operation.has("lens")]
    if any(operation.setting("decode_rows") is None for operation in found):
        return None
    prompts = [operation for operation in found if operation.has("ends")]
    ends = {tuple(_identity(operation.operand(name)) for name in ("ends", "prompts")) for operation in prompts}
    lens = {(_identity(operation.operand("lens")), operation.setting("decode_rows")) for operation in found}
    return (prompts or found)[0] if len(ends) <= 1 and len(lens) == 1 else None


def _rows(attention: Operation, buffers: dict[Value, Buffer]) -> chain_plan.RowCounts:
    """Return where the chain finds how many rows there are."""
    names = ("lens", "ends", "prompts") if attention.has("ends") else ("lens",)
    places = {name: buffers[attention.operand(name)].number for name in names}
    tokens = _tokens(attention)
    most_prompts = attention.operand("ends").shape[0] - 1 if attention.has("ends") else 0
    return chain_plan.RowCounts(
        attention.setting("decode_rows") or 0, **places, tokens=tokens, most_prompts=most_prompts
    )


def _identity(value: Value) -> Any:
    """Return the key that tells values apart: for constants their contents."""
    if value.constant is None or isinstance(value.constant, jax.core.Tracer):
        return value
    array = np.asarray(value.constant, value.dtype)
    return array.shape, array.dtype, array.tobytes()
