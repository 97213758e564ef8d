"""The implementations of one operation, and the choice among them.

A frozen record holds the static facts of a call of an operation (platform, shapes, dtypes, options). Each
implementation reports through `supports(call)` why it can't serve such a call; the first that can is taken. This
happens while a program is traced, so it costs nothing when the program runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

READS_ALL = "rows choose pages"  # why an implementation that reads all of them can't serve


class Facts(Protocol):
    """The static facts of a call; each operation has a record with more of them."""

    @property
    def platform(self) -> str:
        """The platform of the call: "cpu", "gpu" or "tpu"."""
        ...


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    run: Callable[..., Any]  # with the arguments that the operation's module lists
    supports: Callable[[Any], str | None]  # None, or the reason why it can't serve a call with these facts
    give_up: Callable[[Exception], bool] | None = None  # after a failure at run time: refuse from now on
    deterministic: bool = False  # serves calls whose results may not depend on the rest of the batch
    one_call: bool = False  # it is always a single operation of the program
    chooses_pages: bool = False  # of attention: rows may attend to those pages alone that they choose

    def reason_against(self, call: Facts) -> str | None:
        """Return why it can't serve a call; None if it can."""
        if getattr(call, "deterministic", False) and not self.deterministic:
            return "its results for a row depend on what is computed with it"
        if getattr(call, "most_pages", None) is not None and not self.chooses_pages:
            return READS_ALL
        return self.supports(call)


@dataclass(frozen=True, slots=True)
class Registration:
    """The place of an implementation; its module is imported when the implementation is first used."""

    name: str
    module: str  # ".xla.linear" is one of this package
    attribute: str
    platforms: tuple[str, ...]  # on which it is chosen; one without any runs only by name


@dataclass(eq=False, slots=True)
class Registry:
    """The implementations of one operation, in order of preference."""

    operation: str
    entries: list[Registration] = field(default_factory=list)

    def register(self, name: str, module: str, attribute: str, *, platforms: tuple[str, ...] = ()) -> None:
        """Add the implementation that `attribute` of `module` holds, after the existing ones."""
        assert name not in self.names(), f"{self.operation} has an implementation {name!r} already"
        self.entries.append(Registration(name, module, attribute, platforms))

    def names(self) -> tuple[str, ...]:
        """Return the names that `implementation=` accepts, in order of preference."""
        return tuple(entry.name for entry in self.entries)

    def load(self, name: str) -> Implementation:
        """Return the implementation called `name`. Raise ValueError for an unknown one."""
        for entry in self.entries:
            if entry.name == name:
                loaded: Implementation = getattr(
                    importlib.import_module(entry.module, "rekindle_kernels"), entry.attribute
                )
                return loaded
        known = ", ".join(self.names())
        raise ValueError(f"unknown implementation {name!r} of {self.operation}; there are {known}")

    def on(self, platform: str) -> tuple[Implementation, ...]:
        """Return the implementations for `platform`, in order of preference."""
        return tuple(self.load(entry.name) for entry in self.entries if platform in entry.platforms)

    def choose(self, call: Facts, implementation: str | None = None) -> Implementation:
        """Return the named implementation, or the first that supports `call`. Raise ValueError with reasons if none."""
        if implementation is None:
            for entry in self.entries:
                if call.platform in entry.platforms:
                    candidate = self.load(entry.name)
                    if candidate.reason_against(call) is None:
                        return candidate
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.reasons(call).items())
            raise ValueError(f"no implementation of {self.operation} can serve this call on {call.platform}: {reasons}")
        named = self.load(implementation)
        reason = named.reason_against(call)
        if reason is not None:
            raise ValueError(
                f"implementation {implementation!r} of {self.operation} can't serve this call: {reason}; "
                "pass None to choose one"
            )
        return named

    def reasons(self, call: Facts) -> dict[str, str | None]:
        """Return for each implementation on the call's platform why it can't serve the call, or None if it can."""
        return {candidate.name: candidate.reason_against(call) for candidate in self.on(call.platform)}


def anything(call: Facts) -> None:
    """Return None: the `supports` of an implementation that serves every call."""


def current_platform() -> str:
    """Return the platform of a call traced now: the default device's, else the default backend's."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    name = getattr(device, "platform", device) if device is not None else jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(str(name), str(name))
