"""Step programs that call their parts one after the other (`step_parts.py`).

To its callers such a program is like a compiled one: it has the same arguments and results, and donates the same
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.flags import GREEDY
from rekindle._src.programs.ledger import Compiled
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.step import Operands, Scores, StepOutput
from rekindle._src.programs.step_parts import Cut, Opened


class LayeredProgram:
    """A program that runs its parts one after the other."""

    def __init__(
        self,
        cut: Cut,
        opening: Compiled,
        layers: Sequence[Compiled],
        greedy: Compiled | None,
        rest: Callable[[], Compiled],
    ) -> None:
        """Put parts together. `greedy` is the closing of greedy steps without other options; `rest` returns that of all
        other steps."""
        self._cut, self._opening, self._layers, self._greedy, self._rest = cut, opening, layers, greedy, rest

    def complete(self) -> None:
        """Make the closing that serves all steps, unless it is ready."""
        self._rest()

    def as_text(self) -> str:
        """Return the text of the opening and the layers, as XLA compiled them."""
        return "\n".join(part.as_text() for part in (self._opening, *dict.fromkeys(self._layers)))

    def _run(
        self, leaves: Sequence[Any], kv: paged.KV, last_token: Any, ints: Any, floats: Any
    ) -> tuple[tuple[Any, ...], paged.KV, Opened]:
        """Run the opening and the layers. Return the outer leaves, the pages, and the inputs of the closing."""
        cut = self._cut
        outer = tuple(leaves[index] for index in cut.outer)
        opened: Opened = self._opening(outer, last_token, ints, floats)
        x, tables, paging, new_kv = opened.x, opened.tables, opened.inputs.paging, list(kv)
        for number, (layer, indices, source) in enumerate(zip(self._layers, cut.layers, cut.sources, strict=True)):
            own, mine = opened.own[number : number + 1], tuple(leaves[index] for index in indices)
            new_kv[source], x = layer(mine, new_kv[source], x, tables, paging, *own)
        return outer, tuple(new_kv), opened._replace(x=x)


class LayeredStep(LayeredProgram):
    """A step made of parts."""

    def __call__(
        self, leaves: Sequence[Any], kv: paged.KV, state: RequestState, ints: Any, floats: Any, operands: Operands
    ) -> tuple[paged.KV, RequestState, StepOutput]:
        greedy = self._greedy if int(ints[0]) & ~int(GREEDY) == 0 else None
        closing = greedy or self._rest()  # before pages are donated, since it may have to compile
        outer, new_kv, opened = self._run(leaves, kv, state.last_token, ints, floats)
        new_state, output = closing(outer, state, opened.x, opened.inputs)
        return new_kv, new_state, output


class LayeredForward(LayeredProgram):
    """The first half of a late step, made of parts."""

    def __call__(
        self, leaves: Sequence[Any], kv: paged.KV, last_token: Any, ints: Any, floats: Any, operands: Operands
    ) -> tuple[paged.KV, Scores, Any]:
        closing = self._rest()
        outer, new_kv, opened = self._run(leaves, kv, last_token, ints, floats)
        return new_kv, *closing(outer, opened.x, opened.inputs)
