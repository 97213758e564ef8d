"""The option of a row: what a capability packs into a row and its step's buffers, and reads for it from the results.

Axes: R decode rows, S prefill sequences, N = R + S, T prefill tokens, V vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from jax import Array
from numpy.typing import NDArray

from rekindle._src.core.extension import Extension
from rekindle._src.core.records import IntArray, Request, Row, StepPlan
from rekindle._src.core.sampling import Sampling, draw_of
from rekindle_kernels import SMALL_TOP_K

Own = TypeVar("Own")  # a feature's inputs in a step, a pytree


class RowFlag(enum.IntFlag):
    """The flags of a row. Bits from FIRST_PROCESSOR up are the session's logits processors, in their order.

    One bit is left, the sign. A further option that changes logits has a float column in `LogitShaping` and sets
    PENALISED.
    """

    SAMPLES = 1  # the last position's logits choose a token
    DRAWS = 2  # temperature is above 0
    TOP_K = 4
    LARGE_K = 8  # top_k is above SMALL_TOP_K
    TOP_P = 16
    BIASED = 32
    PENALISED = 64
    BARRED = 128  # min_tokens is not reached: end tokens are masked
    LOGPROBS = 256
    PROMPT_LOGPROBS = 512
    KEPT = 1024  # the row's keys and values are in a shared page already and are not written again
    CHOOSES = 2048  # the row's logits are needed: it samples, or it is a draft
    SAMPLED_LOGPROBS = 1 << 28  # after the processors' bits
    DRAFT = 1 << 29  # a draft for a request that reads its earlier tokens
    NARROWED = 1 << 30  # its logits are narrowed before the draw: see `StepPart.narrow`


FIRST_PROCESSOR = 12  # bit
MAX_PROCESSORS = 16
GREEDY = (
    RowFlag.SAMPLES | RowFlag.KEPT | RowFlag.CHOOSES
)  # all the flags of steps of greedy rows without further options
PROCESSORS = ((1 << MAX_PROCESSORS) - 1) << FIRST_PROCESSOR


def drawing_flags(sampling: Sampling) -> int:
    """Return the bits of the sampling options that affect how a token is drawn."""
    flags = RowFlag(0)
    draw = draw_of(sampling)
    if not sampling.greedy:
        flags |= RowFlag.DRAWS
        flags |= RowFlag.TOP_K * (draw.top_k > 0)
        flags |= RowFlag.LARGE_K * (draw.top_k > SMALL_TOP_K)
        flags |= RowFlag.TOP_P * (draw.top_p < 1.0)
    return int(flags)


def wanting(option: str | type[Extension]) -> Callable[[Request], object]:
    """Return a function that is true of the requests with an option; see `RowOption.option`."""
    return attrgetter(option) if isinstance(option, str) else lambda request: option in request.extensions


class TokenPlaces(NamedTuple):
    """The places of a step's tokens in the pages of their sequences."""

    valid: Array  # [R + T]: not padding
    owners: Array  # [R + T]: the sequence
    pages: Array  # [R + T]: the index of the page in the sequence
    width: int  # places of a page table
    drafts: bool  # rows may be drafts that follow each other


class Columns(NamedTuple):
    """A feature's part of a step's buffers, on the device; None for missing parts, which it does not read."""

    flags: Array  # [N]
    ints: Array  # [N, RowOption.ints]
    row_ints: Array  # [N, RowOption.row_ints]
    floats: Array  # [N, len(RowOption.neutral)]
    tokens: Array  # [T]


class FeatureRead(NamedTuple):
    """The results that the host reads for a feature, of the rows of a step, or of one data shard's."""

    plan: StepPlan
    tokens: Sequence[int | None]  # the token that each row chose, if any
    places: Sequence[int]  # of each row in the program
    columns: NDArray[np.int32]  # [rows of the program, StepPart.width]
    output: object  # as `on_host` returns it; None if the program has none


class Helpers(Protocol):
    """Programs that are no steps, which a feature may call while it reads results."""

    def lens(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the logits of rows of the residual stream."""
        ...


RowReports = Sequence[dict[str, tuple[Any, ...]]]  # of each row


class RowOption(Generic[Own]):
    """The plain option, common to all rows: it carries nothing. The base of all others."""

    # What of a request wants it, an attribute or an extension: no rows of requests without one take part.
    option: str | type[Extension] = "sampling"
    bits: int = 0  # flags of its rows; a step without one of them reads no results of it
    steady: int = 0  # those flags that hold in rows, too, which choose no token
    history: int = 0  # flags of rows that read the earlier tokens of their requests, with `draft_rows.histories`

    # Of a row: integers and floats that are constant while its request has its slot, integers of its own, and one for
    # each of its prefill tokens
    ints: int = 0
    neutral: tuple[float, ...] = ()  # a float for each column, and its value in an empty row
    row_ints: int = 0
    per_token: bool = False
    side: str = ""  # the name of the side cache that has these slots
    # True if its rows may be in steps that the device repeats: the host has to know none of their tokens in between. A
    # request with flags that change from row to row is in none
    repeats: bool = False

    # -- a request with the `option` enters its slot

    def flags(self, request: Request) -> int:
        """Return the bits of a request's rows."""
        return 0

    def row_flags(self, request: Request) -> Callable[[Row], int] | None:
        """Return a function for bits that change from row to row, of a request that has such."""
        return None

    def constants(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the request's integers and floats, one for each column."""
        return (), self.neutral

    def reads_slot(self, request: Request) -> bool:
        """True if it reads more of the request's slot than its last token (`request_state.admit` writes it)."""
        return False

    # -- a step is packed

    def in_plan(self, plan: StepPlan) -> bool:
        """True if a step needs a program of the feature's variant; asked in every step, of up to hundreds of rows."""
        wants = wanting(self.option)
        return any(wants(row.request) for row in plan.rows)

    def write_rows(self, plan: StepPlan, rows: Sequence[tuple[int, Row]], out: IntArray) -> None:
        """Write the integers of a step's rows [N, row_ints], each 0 so far, at the places of its `rows`."""
        for place, row in rows:
            self.write_row(row, out[place])

    def write_row(self, row: Row, out: IntArray) -> None:
        """Write the integers of a row [row_ints], each 0 so far."""

    def write_tokens(self, row: Row, out: IntArray) -> None:
        """Write the integers of a prefill row's tokens, each -1 so far, if its flags have one of `bits`."""

    # -- it is unpacked in the program

    def unpack(self, columns: Columns) -> Own:
        """Return the feature's inputs; None for a feature without any."""
        nothing: Any = None
        return nothing

    def for_layers(self, own: Own, places: TokenPlaces) -> tuple[Array, ...]:
        """Return the arrays that layers use with the side cache `side`, from the feature's inputs."""
        raise NotImplementedError

    # -- its result is read

    def attach(self, helpers: Helpers) -> None:
        """Take the programs that it may call while it reads results. Called once."""

    def on_host(self, output: object, plan: StepPlan) -> object:
        """Wait for the output of a step. Return it in the host's memory: an array, or a dict of arrays."""
        return np.asarray(output)

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        """Add the feature's reports to each row's; see report.py."""
