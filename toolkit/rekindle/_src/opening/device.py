"""The device of an open session: its weights, pages and programs when it sleeps, swaps, recovers and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rekindle._src.core.records import PageMove
from rekindle._src.dispatch.device import Device, FreedMemory
from rekindle._src.execution.runner import Runner
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.unpacking import words
from rekindle._src.opening.blueprint import Blueprint
from rekindle._src.opening.cache import SessionCache
from rekindle._src.opening.programs import SessionPrograms
from rekindle._src.opening.weights import Weights
from rekindle._src.processes.others import OtherProcesses
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.collectives import collective_times
from rekindle.errors import InvalidRequest


class Sleeper(Protocol):
    """An owner of weights that are not the model's own."""

    def sleep(self) -> int:
        """Give their memory back. Return its bytes."""
        ...

    def wake(self) -> None:
        """Go on."""


class ModelDevice(Device):
    """A device with a model: everything that its owners, opened together, can do for a session."""

    has_weights = True

    def __init__(
        self,
        plan: Blueprint,
        weights: Weights,
        programs: SessionPrograms,
        cache: SessionCache,
        runner: Runner,
        others: OtherProcesses,
        sleepers: Sequence[Sleeper] = (),
        swapped: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Functions in `swapped` are called when the model has other weights."""
        self._plan, self._weights, self._programs, self._cache = plan, weights, programs, cache
        self._runner, self._others, self._sleepers, self._swapped = runner, others, sleepers, swapped
        self.owners = contextlib.ExitStack()  # closes them in reverse order of their opening
        self.weights: str = weights_in_words(weights.model, plan)
        self.is_merged: bool = weights.changed
        self.is_alone: bool = others.agreement is None
        config, placement = plan.config, plan.placement
        local = placement.local_config(plan.model)
        self.mesh = placement.report(paged.page_bytes(local, config.page_size, config.kv_dtype))
        # Measured here, before there are any steps.
        one = plan.programs.config
        self._collectives = collective_times(placement, one.max_requests, one.max_tokens_per_step)

    @property
    def model(self) -> LoadedModel:
        return self._weights.model

    def swap(self, weights: Any) -> bytes:
        if self._weights.asleep:
            raise InvalidRequest("weights", weights, "can't be swapped while the session sleeps", "Use wake(weights=…)")
        model = self._weights.replacement(weights)
        self._runner.swap_weights(self._plan.leaves_of(model))
        self._weights.use(model, weights)
        for follow in self._swapped:
            follow()
        return self._root(weights)

    def _root(self, weights: Any) -> bytes:
        return self._cache.use(self.model.fingerprint, str(weights) if isinstance(weights, str | Path) else "")

    def set_aside(self, leaving: Sequence[PageMove]) -> None:
        self._runner.set_aside(leaving)

    def sleep(self, leaving: Sequence[PageMove], drop: bool) -> FreedMemory:
        if drop:
            self._weights.check_dropped()
        pages = self._runner.page_bytes
        self._runner.sleep(leaving)
        others = sum(sleeper.sleep() for sleeper in self._sleepers)
        return FreedMemory(self._weights.sleep(drop) + others, pages)

    def wake(self, weights: Any) -> bytes | None:
        self._weights.wake(weights)
        root = None if weights is None else self._root(weights)
        self._runner.wake(self._plan.leaves_of(self.model))
        self._weights.woken()
        for sleeper in self._sleepers:
            sleeper.wake()
        return root

    def recover(self) -> bool:
        return self._runner.recover()

    def collective_seconds(self, steps: Mapping[str, int]) -> float | None:
        return None if self._collectives is None else self._collectives.steps(steps)

    def prepare_restart(self, *, demanded: bool) -> bool:
        return self._programs.prepare_restart(demanded=demanded)

    def watch(self, lost: Callable[[BaseException], object]) -> None:
        self._others.watch(lost)

    def drop_altered(self, digest: str) -> None:
        self._cache.drop_altered(digest)

    def close(self) -> None:
        self.owners.close()


def weights_in_words(model: LoadedModel, plan: Blueprint) -> str:
    """Describe the formats of the weights, the memory of each, and why it is not the dtype alone."""
    reasons = [words(model.graph)]
    if plan.config.quantize is not None:
        reasons.insert(0, f"by quantize={plan.config.quantize!r}")
    elif " bits " in model.held:
        reasons.insert(0, "in the groups of the checkpoint: quantize is None")
    text = "; ".join(filter(None, reasons))
    return f"{model.held} ({text})" if text else model.held
