"""The capabilities of a session: each is a folder, and an entry in `ENTRIES`, the only list of them.

The rooms below name none. Intake, the plan of programs, the blueprint and the front take what the entries make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._src.capabilities.adapters import AdaptersEntry
from rekindle._src.capabilities.captures import CapturesEntry
from rekindle._src.capabilities.entry import CapabilityEntry
from rekindle._src.capabilities.gradients import GradientsEntry
from rekindle._src.capabilities.guides import GuidesEntry
from rekindle._src.capabilities.options import OptionsEntry, PriorityEntry
from rekindle._src.capabilities.overflow import OverflowEntry
from rekindle._src.capabilities.pictures import PicturesEntry
from rekindle._src.capabilities.pooling import PoolingEntry
from rekindle._src.capabilities.replies import RepliesEntry
from rekindle._src.capabilities.samplers import SamplersEntry
from rekindle._src.capabilities.scores import ScoresEntry
from rekindle._src.capabilities.soft_prompts import SoftPromptsEntry
from rekindle._src.capabilities.tuning import TuningEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.additions import Additions, CheckedAdditions
    from rekindle._src.dispatch.capabilities import Capabilities

# Of several capabilities that refuse a request, the first one's error is told. Namespaces of cached pages have the
# digests of extensions in this order, and steps have the features of each kind in it.
ENTRIES: tuple[CapabilityEntry, ...] = (
    PoolingEntry(),
    OptionsEntry(),
    AdaptersEntry(),
    PicturesEntry(),
    SoftPromptsEntry(),
    CapturesEntry(),
    PriorityEntry(),
    SamplersEntry(),
    ScoresEntry(),
    GuidesEntry(),
    RepliesEntry(),
    OverflowEntry(),
    GradientsEntry(),
    TuningEntry(),
)


def capabilities_of() -> Capabilities:
    """Return the capabilities of a session's requests."""
    from rekindle._src.dispatch.capabilities import Capabilities  # with the engine, in a thread of the session's

    return Capabilities(*[capability for entry in ENTRIES for capability in entry.intake()])


def checked(additions: Additions) -> CheckedAdditions:
    """Return the arguments of `open` that belong to capabilities, as far as they are checked without JAX."""
    merged: CheckedAdditions = {}
    for entry in ENTRIES:
        merged |= entry.checked(additions)
    return merged


def complete(additions: CheckedAdditions) -> CheckedAdditions:
    """Return the same arguments, checked in full on the session's thread. Raise ConfigError."""
    merged: CheckedAdditions = {**additions}
    for entry in ENTRIES:
        merged |= entry.complete(additions)
    return merged
