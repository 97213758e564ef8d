"""The seam of drafters in the runner: the tasks that they have on the device before a step."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle._src.core.records import DraftTask
from rekindle._src.execution.device_calls import DeviceCalls


class DraftWorker:
    """Does the drafting tasks of steps. This one is for sessions that draft on the host, and owns nothing."""

    def work(self, tasks: Sequence[DraftTask], calls: DeviceCalls) -> bool:
        """Run tasks. If any of them drafts, wait for the tokens, write them into the tasks' rows, and return True.

        `calls` reach the session's model with its pages and state.
        """
        raise NotImplementedError

    def renew(self) -> None:
        """Replace what was lost with a failed step."""

    def swapped(self) -> None:
        """Follow the model, which has other weights now."""

    def sleep(self) -> int:
        """Give the memory of its weights back. Return their bytes."""
        return 0

    def wake(self) -> None:
        """Go on."""

    def close(self) -> None:
        """Free its resources."""


NO_WORKER = DraftWorker()
