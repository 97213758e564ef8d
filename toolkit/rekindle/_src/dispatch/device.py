"""The device of an engine, apart from its steps: sleep, other weights, recovery, preparing a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rekindle._src.core.mesh_shape import MeshReport
from rekindle._src.core.records import PageMove

if TYPE_CHECKING:
    from rekindle._src.models.base import LoadedModel


class FreedMemory(NamedTuple):
    """Bytes of device memory that were given back."""

    weights: int
    pages: int


class Device:
    """The device of an engine over fakes, which has no weights and can do nothing. A model's is a subclass.

    `swap`, `set_aside`, `sleep`, `wake`, `recover` and `close` are called on the device thread, while no step is in
    flight.
    """

    weights: str = ""  # their format, in words
    mesh: MeshReport | None = None  # the devices that share the model; None for one
    has_weights: bool = False  # `swap`, and `model` is one
    is_merged: bool = False  # something was added to its weights, and is added to those of each swap, too
    is_alone: bool = False  # no other process shares the model: it can sleep, and set pages aside

    @property
    def model(self) -> LoadedModel:
        """The loaded model that is in use."""
        raise NotImplementedError("no weights")

    def swap(self, weights: object) -> bytes:
        """Use other weights. Return the root key of the cache for them."""
        raise NotImplementedError("no weights")

    def set_aside(self, leaving: Sequence[PageMove]) -> None:
        """Read pages out to the tiers below."""
        raise NotImplementedError("no tiers")

    def sleep(self, leaving: Sequence[PageMove], drop: bool) -> FreedMemory:
        """Read pages out, then give device memory back. With `drop`, weights are read again from their source."""
        raise NotImplementedError("no weights")

    def wake(self, weights: object) -> bytes | None:
        """Go on, with other weights unless they are None. Return the cache's root key for other ones."""
        raise NotImplementedError("no weights")

    def recover(self) -> bool:
        """Make up for a failed step. Return True if pages were lost."""
        return False

    def collective_seconds(self, steps: Mapping[str, int]) -> float | None:
        """Return the seconds that collectives of so many steps of each program take alone; None where unknown."""
        return None

    def prepare_restart(self, *, demanded: bool) -> bool:
        """Make and store one program that a restart needs and this process did not. Return False if none is left.

        Called from any thread. `demanded` by a caller; otherwise nothing is made in a process that may be about to end.
        """
        return False

    def watch(self, lost: Callable[[BaseException], object]) -> None:
        """Have `lost` called, from any thread, when a process that shares the model is gone."""

    def drop_altered(self, digest: str) -> None:
        """Drop the cached pages that depend on a digest (`Extension.altered`). Called on the host's loop."""

    def close(self) -> None:
        """Free the resources that the runner does not own; called last of all."""
