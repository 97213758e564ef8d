"""A feature of steps: the parts of one capability in a step.

Log-probabilities, penalties, processors, pooling and masks are features. The modules that pack, run and read steps go
through the session's `features.Features` in order and name none of them. Packing and reading know a feature's
`RowOption`, programs know its `StepPart`, and the request state has its `SlotState`. A capability returns its features
from the `features` of its plan.
"""

from __future__ import annotations

import dataclasses
from typing import Generic

from rekindle._src.programs.request_state import SlotState
from rekindle._src.programs.row_option import Own, RowOption
from rekindle._src.programs.step_part import Operands, StepPart


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Feature(Generic[Own, Operands]):
    """An addition to rows, to the program of a step, and to the request state. Each part may be the plain one."""

    row: RowOption[Own] = dataclasses.field(default_factory=RowOption)
    part: StepPart[Own, Operands] = dataclasses.field(default_factory=StepPart)
    slot: SlotState = dataclasses.field(default_factory=SlotState)
