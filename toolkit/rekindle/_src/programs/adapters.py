"""Adapters in a step: rows with different ones, and with none, in one batch, in programs of a variant of their own.

Axes: R decode rows, S prefill sequences, N = R + S, T tokens of the step.

Each linear layer that may have adapters is replaced by one that adds them: `rekindle_kernels.add_adapters`, once for
each chunk of the stacks. Tokens without an adapter keep their numbers to the last bit. On a CPU these are native calls,
which runs of other native calls go through.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

import rekindle_kernels
from rekindle._src.core.records import AdapterLoad, Request, StepPlan
from rekindle._src.models.adapters.adapted import adapt, adapt_experts
from rekindle._src.models.base import Model
from rekindle._src.programs.adapter_stacks import Chunk, Operands, Stacks
from rekindle._src.programs.buckets import ADAPTED
from rekindle._src.programs.feature import Columns, Feature, StepInputs
from rekindle_kernels import AdaptedTokens

if TYPE_CHECKING:
    from rekindle._src.models.nn.linear import RMSNorm

log = logging.getLogger("rekindle.session")


class Adapters(Feature):
    """The adapters of rows. Operands are the stacks, which `load` changes between steps."""

    variant, inside, ints = ADAPTED, True, 1

    def __init__(self, stacks: Stacks, *, ahead: bool = False, implementation: str | None = None) -> None:
        self.stacks, self.warmed = stacks, ahead
        self._implementation, self.matrices = implementation, stacks.dtype
        self._failed: dict[str, AdapterLoad] = {}  # by digest; tried again for each request

    @property
    def operands(self) -> Operands:  # type: ignore[override]
        return self.stacks.operands

    @property
    def operand_shapes(self) -> Operands:
        return self.stacks.shapes

    @property
    def operand_layout(self) -> Any:  # type: ignore[override]
        return self.stacks.layout

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        for load in loads:
            units = set(load.units)
            for digest, failed in tuple(self._failed.items()):
                if digest == load.adapter.digest or failed.slot == load.slot or not units.isdisjoint(failed.units):
                    del self._failed[digest]
            try:
                self.stacks.put(load)
            except Exception as error:
                log.warning("the adapter %r could not be put on the device: %r", load.adapter.name, error)
                self._failed[load.adapter.digest] = load

    def free(self) -> None:
        self.stacks.free()

    def constants(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        if request.adapter is None:
            return (0,), ()
        digest = request.adapter.digest
        failed = self._failed.get(digest)
        if failed is not None:
            self.stacks.put(failed)
            del self._failed[digest]
        return (self.stacks.slot(digest),), ()

    def in_plan(self, plan: StepPlan) -> bool:
        for rows in (plan.decode, plan.prefill):
            for row in rows:
                if row.request.adapter is not None:
                    return True
        return False

    def unpack(self, columns: Columns) -> Any:
        return columns.ints[:, 0]

    def model(self, model: Model, inputs: StepInputs, own: Any, operands: Any) -> tuple[Model, Any]:
        tokens = AdaptedTokens.of(inputs.of_tokens(own))
        experts: dict[str, dict[str, _Delta]] = {}
        for index, site in enumerate(self.stacks.sites):
            own = [Chunk(*map(self.stacks.own, chunk)) for chunk in operands.stacks[index]]
            delta = _Delta(
                own, operands.owners, self.stacks.outputs(site), index * len(own), tokens, self._implementation
            )
            if site.experts:
                path, _, name = site.path.rpartition(".")
                experts.setdefault(path, {})[name] = delta
            else:
                adapt(model, site.path, delta)
        for path, deltas in experts.items():
            adapt_experts(model, path, **deltas)
        return model, None


class _Delta:
    """The sum that the adapters of a step's tokens add at one site."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        owners: Array,
        outputs: tuple[int, ...],
        first: int,
        tokens: AdaptedTokens,
        implementation: str | None,
    ) -> None:
        self._chunks, self._owners, self._outputs, self._first = chunks, owners, outputs, first
        self._tokens, self._implementation = tokens, implementation

    def add(self, y: Array, x: Array, gate: str | None = None, norm: RMSNorm | None = None) -> Array:
        """Return y [T, out] plus what the adapters make of x [T, in]; with the name of an activation, gated by it."""
        if norm is not None and len(self._chunks) > 1:
            x, norm = norm(x), None  # once for all of them
        flat, rows = y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        with jax.named_scope("adapters"):
            added = self._added(flat, rows, self._owners, self._tokens, self._first, gate, norm)
        return added.reshape(*y.shape[:-1], -1)

    @property
    def needed(self) -> Array:
        """A bool: true if an adapter on the device has a product here."""
        return (self._own_owners > 0).any()

    def add_to_rows(self, y: Array, x: Array, sizes: Array, tokens: Array) -> Array:
        """Return y [M, out] plus what the adapters make of x [M, in], rows of tokens sorted by expert.

        Each expert of an adapter has rows of rank of its own: to the products, it is an adapter.
        """
        count, place = sizes.shape[0], jnp.arange(x.shape[0])
        experts = jnp.repeat(jnp.arange(count), sizes, total_repeat_length=x.shape[0])
        slots = jnp.where(place < sizes.sum(), self._tokens.slots[tokens], 0)  # the rest is of other devices' experts
        own = self._own_owners[:, None]
        owners = jnp.where(own > 0, own * count + jnp.arange(count)[:, None], 0).reshape(len(self._chunks), -1)
        pairs = AdaptedTokens.of(jnp.where(slots > 0, slots * count + experts, 0).astype(jnp.int32))
        return self._added(y, x, owners.astype(jnp.int32), pairs, 0)

    @property
    def _own_owners(self) -> Array:
        """[chunks, UNITS]: those of this site."""
        own: Array = self._owners[self._first : self._first + len(self._chunks)]
        return own

    def _added(
        self,
        y: Array,
        x: Array,
        owners: Array,
        tokens: AdaptedTokens,
        first: int,
        gate: str | None = None,
        norm: RMSNorm | None = None,
    ) -> Array:
        last = len(self._chunks) - 1
        for index, chunk in enumerate(self._chunks):
            y = rekindle_kernels.add_adapters(
                y,
                x,
                chunk.down,
                chunk.up,
                owners,
                tokens,
                place=first + index,
                outputs=self._outputs,
                gate=gate if index == last else None,
                norm=None if norm is None else norm.weight[...],
                eps=0.0 if norm is None else norm.eps,
                implementation=self._implementation,
            )
        return y
