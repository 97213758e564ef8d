"""A session's adapters: by name in host memory; the device gets the ones that requests need.

A request has the adapter that its name meant when it was taken in, until it ends. A name that is loaded again, or
unloaded, changes later requests alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from rekindle._src.capabilities.adapters.request import ADAPTERS, AdapterUse
from rekindle._src.capabilities.adapters.slots import UNIT, units_for
from rekindle._src.capabilities.plans import Owner, SessionPlan, WeightsChange
from rekindle._src.core.names import checked_name
from rekindle._src.dispatch.apart import JobThreads
from rekindle._src.dispatch.backend import Services
from rekindle._src.models.adapters.adapted import merged
from rekindle._src.models.adapters.adapter import Adapter, combined
from rekindle._src.models.adapters.budget import Budget
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.adapters.writing import write_folder
from rekindle._src.models.config import ModelConfig
from rekindle.errors import CheckpointError, ConfigError, InvalidRequest, RekindleError

AT_ONCE = 4  # adapters that are read at a time
SECONDS = 300.0  # to read an adapter: 15 GB from a slow disk
_SUMS = 16  # sums of adapters that are kept


class AdapterShelf(Owner):
    """The adapters that a session has by name. Its methods may be called from any thread."""

    def __init__(
        self, model: ModelConfig, most: int, rank: int, *, dtype: str = "float32", refused: str = "", base: str = ""
    ) -> None:
        """`dtype` is the matrices' dtype on the device, `base` the model's name."""
        self._model, self._units, self._dtype, self._base = model, most * units_for(rank), dtype, base
        self._refused = refused if most else "the session was opened with max_adapters=0"
        self._adapters: dict[str, Adapter] = {}
        self._sums: OrderedDict[tuple[tuple[str, float], ...], Adapter] = OrderedDict()
        self._lock = threading.Lock()
        self.threads = JobThreads(AT_ONCE, SECONDS, "rekindle adapters")  # that read

    @classmethod
    def open(
        cls, plan: SessionPlan, sources: Mapping[str, object], merge: object = None, *, refused: str = ""
    ) -> AdapterShelf:
        """Return the adapters that a session is opened with; `merge` is an adapter that is added to the weights.

        None can be loaded if they are `refused`, for that reason.
        """
        config, model = plan.config, plan.programs.model
        most, rank, dtype = config.max_adapters, config.max_adapter_rank, plan.programs.graph.precision.weights
        shelf = cls(model, most, rank, dtype=dtype, refused=refused, base=plan.name)
        for name, source in sources.items():
            plan.show(f"adapter {name}")
            shelf.put(shelf.read(name, source))
        if merge is not None:
            shelf.change = shelf.merging(merge)
        return shelf

    @property
    def services(self) -> Services:
        return {ADAPTERS: self}

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of their first load."""
        return tuple(self._adapters)

    def all(self) -> dict[str, Adapter]:
        """Return the adapters by name."""
        with self._lock:
            return dict(self._adapters)

    def read(
        self, name: str, source: object, alpha: float | None = None, wanted: Callable[[], bool] = lambda: True
    ) -> Adapter:
        """Read an adapter and check that it fits; nothing is changed. It ends early once `wanted` returns False."""
        checked_name("adapter", name)
        if self._refused:
            raise ConfigError("adapter", name, f"can't be loaded: {self._refused}", "Open another session for it")
        try:
            adapter = read_adapter(
                source,
                name,
                self._model,
                alpha=alpha,
                fits=partial(self._check_rank, name),
                budget=Budget(wanted=wanted),
            )
        except (OSError, MemoryError) as error:
            if isinstance(error, RekindleError):
                raise
            raise CheckpointError(
                f"The adapter {name!r} can't be read now: {error or type(error).__name__}. Check its disk and the "
                "memory, and load it again."
            ) from error
        return self._fitting(adapter, name)

    def check_room(self, name: str, rank: int) -> None:
        """Raise ConfigError if an adapter of this rank can't be loaded."""
        if self._refused:
            problem = f"can't be loaded: {self._refused}"
            raise ConfigError("adapter", name, problem, "Open another session for it")
        self._check_rank(name, rank)

    def merging(self, source: object) -> WeightsChange:
        """Read an adapter of any rank. Return the change that adds it to a model's weights."""
        return WeightsChange("merging an adapter", partial(merged, adapter=read_adapter(source, "merged", self._model)))

    def put(self, adapter: Adapter) -> Adapter | None:
        """Enter an adapter under its name. Return the one that had it, if it is another."""
        with self._lock:
            old = self._adapters.get(adapter.name)
            self._adapters[adapter.name] = adapter
            return old if old is not None and not self._has(old.digest) else None

    def write(self, name: str, folder: Path) -> None:
        """Write an adapter as a new folder of PEFT."""
        with self._lock:
            adapter = self._adapters.get(name)
        if adapter is None:
            raise self._unknown("name", name)
        try:
            write_folder(adapter, folder, sites_of(self._model), self._base)
        except FileExistsError:
            raise ConfigError("folder", str(folder), "exists already", "Pass a new one") from None
        except OSError as error:
            raise ConfigError("folder", str(folder), f"can't be written: {error}", "Pass another one") from error

    def remove(self, name: str) -> Adapter | None:
        """Forget an adapter. Return it, unless another name means the same weights."""
        with self._lock:
            if name not in self._adapters:
                raise self._unknown("name", name)
            old = self._adapters.pop(name)
            return None if self._has(old.digest) else old

    def use(self, value: str | Mapping[str, float]) -> AdapterUse:
        """Return the adapter for a request with this option, and the digests that its pages depend on."""
        with self._lock:
            if isinstance(value, str):
                adapter = self._adapters.get(value)
                if adapter is None:
                    raise self._unknown("adapter", value)
                return AdapterUse(adapter, (adapter.digest,))
            parts: list[tuple[Adapter, float]] = []
            for name, weight in value.items():
                if name not in self._adapters:
                    raise self._unknown("adapter", name)
                parts.append((self._adapters[name], float(weight)))
            key = tuple((adapter.digest, weight) for adapter, weight in parts)
            whole = self._sums.pop(key, None) or self._fitting(combined(parts), value)
            self._sums[key] = whole
            if len(self._sums) > _SUMS:
                self._sums.popitem(last=False)
        return AdapterUse(whole, tuple(dict.fromkeys((whole.digest, *(adapter.digest for adapter, _ in parts)))))

    def _has(self, digest: str) -> bool:
        return any(adapter.digest == digest for adapter in self._adapters.values())

    def _fitting(self, adapter: Adapter, value: object) -> Adapter:
        """Return an adapter that fits on the device. Raise ConfigError for others."""
        self._check_rank(value, adapter.rank)
        if self._dtype == "float16" and (largest := adapter.largest) > float(np.finfo(np.float16).max):
            problem = (
                f"has numbers up to {largest:.3g}, and float16 holds up to 65504: the rows next to it would be NaN, too"
            )
            raise ConfigError("adapter", value, problem, 'Open the model with dtype="bfloat16"')
        return adapter

    def _check_rank(self, value: object, rank: int) -> None:
        if units_for(rank) > self._units:
            room = self._units * UNIT
            problem = f"has rank {rank}, and all adapters on the device together have room for {room}"
            raise ConfigError("adapter", value, problem, f"Open with max_adapter_rank={rank} or more")

    def _unknown(self, field: str, name: str) -> InvalidRequest:
        known = ", ".join(map(repr, self._adapters)) or "none"
        fix = f"Load it with await session.load_adapter({name!r}, folder)"
        return InvalidRequest(field, name, f"is not an adapter of this session; known: {known}", fix)
