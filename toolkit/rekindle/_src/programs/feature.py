"""A feature of steps: what one capability adds to a row, to a step's buffers, to its program, and to its results.

Log-probabilities, penalties, processors, pooling and masks are features, each of them one class.
The modules that pack, run and read steps go through the session's `features.Features` in order and name none of them.
A new feature overrides the methods that it needs, and is in the `features` of its capability's plan.

Axes: R decode rows, S prefill sequences, N = R + S, T prefill tokens, W pages of a sequence, V vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from numpy.typing import NDArray

from rekindle._src.core.extension import DeviceLoad, Extension
from rekindle._src.core.records import IntArray, Request, Row, StepPlan
from rekindle._src.core.sampling import Sampling
from rekindle._src.models.base import Model
from rekindle._src.models.hooks import NO_DELTAS, Deltas, Listener
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.kv_layout import KV, Paging
from rekindle._src.programs.partitioning import POOLED, ROWS, WHOLE
from rekindle._src.programs.request_state import RequestState
from rekindle_kernels import SMALL_TOP_K, Choice

T = TypeVar("T")
Own = TypeVar("Own")  # a feature's inputs in a step, a pytree
Operands = TypeVar("Operands")  # its arrays in addition to the weights, a pytree


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


FIRST_PROCESSOR = 12  # bit
MAX_PROCESSORS = 16
GREEDY = (
    RowFlag.SAMPLES | RowFlag.KEPT | RowFlag.CHOOSES
)  # all the flags of steps of greedy rows without further options
PROCESSORS = ((1 << MAX_PROCESSORS) - 1) << FIRST_PROCESSOR


def drawing_flags(sampling: Sampling) -> int:
    """Return the bits of the sampling options that affect how a token is drawn."""
    flags = RowFlag(0)
    if not sampling.greedy:
        flags |= RowFlag.DRAWS
        flags |= RowFlag.TOP_K * (sampling.top_k > 0)
        flags |= RowFlag.LARGE_K * (sampling.top_k > SMALL_TOP_K)
        flags |= RowFlag.TOP_P * (sampling.top_p < 1.0)
    return int(flags)


def branch(condition: Array | bool, yes: Callable[[], T], no: Callable[[], T]) -> T:
    """Run `lax.cond`, or just one of the branches where the condition is known while the program is traced."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    result: T = lax.cond(condition, yes, no)
    return result


def wanting(option: str | type[Extension]) -> Callable[[Request], object]:
    """Return a function that is true of the requests with an option; see `Feature.option`."""
    return attrgetter(option) if isinstance(option, str) else lambda request: option in request.extensions


class StepInputs(NamedTuple):
    """The unpacked inputs of a step, on the device."""

    slots: Array  # [N]
    lengths: Array  # [N]: tokens of the sequence, this step's included; 0 in an empty row
    tokens: Array  # [R + T]
    positions: Array  # [R + T]
    page_ids: Array  # [R + T]: the page for each token's keys and values
    offsets: Array  # [R + T]: their place in that page
    prompt_lengths: Array  # [R + T]: of the token's sequence
    page_table: Array  # [N, W]
    cu_lengths: Array  # [S + 1]: half-open offsets of the prefills within the prefill tokens
    num_prefills: Array  # []
    last: Array  # [N]: index of each sequence's last token
    flags: Array  # [N]: `RowFlag`s of each row
    any_flags: Array | RowFlag  # []: the union of `flags`, or a Flag where it is known while the program is traced
    choice: Choice
    own: tuple[object, ...]  # of each feature: the result of its `unpack`
    sides: Mapping[str, tuple[Array, ...]]  # what layers use of each side cache, by its name; see `Paging`

    def flag(self, flag: int) -> Array:
        return (self.flags & flag) != 0

    @property
    def decode_rows(self) -> int:
        return self.lengths.shape[0] - self.cu_lengths.shape[0] + 1

    def of_tokens(self, values: Array) -> Array:
        """Return the value of each token's row [R + T], of integers [N] of rows; 0 for padding."""
        rows = self.decode_rows
        tokens = self.tokens.shape[0] - rows
        decoded = values[:rows]
        if not tokens:
            return decoded
        index = lax.iota(jnp.int32, tokens)
        sequence = (index[:, None] >= self.cu_lengths[1:]).astype(jnp.int32).sum(axis=1)
        sequences = len(values) - rows
        prefilled = jnp.where(sequence < sequences, values[rows:][sequence.clip(max=sequences - 1)], 0)
        return jnp.concatenate([decoded, prefilled])

    @property
    def paging(self) -> Paging:
        return Paging(*(getattr(self, name) for name in Paging._fields))

    @property
    def rope_lengths(self) -> Array:
        """The length of the sequence that each token's rope assumes, as in `rope.tables` [R + T]."""
        return jnp.maximum(self.prompt_lengths, self.positions + 1)


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
    ints: Array  # [N, Feature.ints]
    row_ints: Array  # [N, Feature.row_ints]
    floats: Array  # [N, len(Feature.neutral)]
    tokens: Array  # [T]


class FeatureRead(NamedTuple):
    """The results that the host reads for a feature, of the rows of a step, or of one data shard's."""

    plan: StepPlan
    tokens: Sequence[int | None]  # the token that each row chose, if any
    places: Sequence[int]  # of each row in the program
    columns: NDArray[np.int32]  # [rows of the program, Feature.width]
    output: object  # as `on_host` returns it; None if the program has none


class ChosenStep(NamedTuple, Generic[Own, Operands]):
    """A whole step after its tokens are chosen, on the device."""

    model: Model
    read: Array  # [R + T, F]: what a drafter reads of each token, the final hidden state or the inputs of layers
    inputs: StepInputs
    own: Own  # of the feature: the result of its `unpack`
    operands: Operands  # of the feature
    tokens: Array  # [N]: chosen by the rows
    state: RequestState  # after the step


class Helpers(Protocol):
    """Programs that are no steps, which a feature may call while it reads results."""

    def lens(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the logits of rows of the residual stream."""
        ...


RowReports = Sequence[dict[str, tuple[Any, ...]]]  # of each row


class Hooks(NamedTuple):
    """The hooks of a feature inside the layers of a step; see `models/hooks.py`."""

    listener: Listener | None = None
    deltas: Deltas = NO_DELTAS
    kept: object = None  # for `Feature.output`
    coordinates: Array | None = None  # int32 [R + T, 3]: of the tokens' positions, for ropes that have some
    sees: Array | None = None  # int32 [R + T], as in `AttentionInputs`
    tokens: Array | None = None  # [R + T]: the embedded tokens, where they differ from the step's own


NO_HOOKS = Hooks()


class Feature(Generic[Own, Operands]):
    """A feature that does nothing, and the base of all others. Its type parameters are its own inputs and operands."""

    # What of a request wants it, an attribute or an extension: no rows of requests without one take part.
    option: str | type[Extension] = "sampling"
    bits: int = 0  # flags of its rows; a step without one of them reads no results of it
    steady: int = 0  # those flags that hold in rows, too, which choose no token
    changing: int = 0  # flags of steps where it changes logits
    history: int = 0  # flags of rows that read the earlier tokens of their requests, with `draft_rows.histories`
    variant: ProgramVariant = PLAIN_VARIANT  # the variant of programs that contain it; without one, all do
    instead: ProgramVariant = PLAIN_VARIANT  # the features that no program contains along with it
    warmed: bool = False  # the variant is part of the lattice that is compiled ahead; if not, as needed
    inside: bool = False  # it has hooks or operands, so that its variant is not made of parts
    matrices: str = ""  # the dtype of matrices among its operands that its variant multiplies rows by
    operands: Operands = ()  # type: ignore[assignment]  # others of the same shapes may replace them between steps
    operand_layout: object = WHOLE  # how these lie on the devices of a mesh, or a tree of it

    # Of a row: integers and floats that are constant while its request has its slot, integers of its own, and one for
    # each of its prefill tokens
    ints: int = 0
    neutral: tuple[float, ...] = ()  # a float for each column, and its value in an empty row
    row_ints: int = 0
    per_token: bool = False
    side: str = ""  # the name of the side cache that has these slots

    # Of the result: columns of integers next to each row's token, and an array of its own
    width: int = 0
    follows: bool = False  # it writes into pages once tokens are chosen: see `follow`
    # Layers whose inputs in the residual stream all steps keep for it in the request state, where the model's number of
    # layers stands for the last one's output; see `ChosenStep.read`
    streams: tuple[int, ...] = ()
    has_output: bool = False
    copied: bool = True  # the array is copied to the host as soon as it is there, in programs of the variant
    shard_axis: int = 0  # of the array, along which data shards follow each other

    @property
    def operand_shapes(self) -> object:
        """The shapes of `operands`, of one data shard where each has its own."""
        return jax.eval_shape(lambda: self.operands)

    @property
    def output_layout(self) -> object:
        """The layout of `output` on the devices of a mesh, or a tree of it."""
        return POOLED if self.shard_axis else ROWS

    def attach(self, helpers: Helpers) -> None:
        """Take the programs that it may call while it reads results. Called once."""

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

    def load(self, loads: Sequence[DeviceLoad]) -> None:
        """Take this feature's part of a plan's data for the device, on its thread and in the order of plans."""

    def free(self) -> None:
        """Let go of arrays on the device, because the session goes to sleep or ends; a later step makes them again."""

    def in_plan(self, plan: StepPlan) -> bool:
        """True if a step needs a program of the feature's variant; asked in every step, of up to hundreds of rows."""
        wants = wanting(self.option)
        return any(wants(row.request) for row in plan.rows)

    def prepare(self, plans: Sequence[StepPlan], rows: int) -> None:
        """Replace `operands` by the operands of a step that contains the feature, from its plan for each data shard.

        Prompts begin after `rows` tokens.
        """

    def write_rows(self, plan: StepPlan, rows: Sequence[tuple[int, Row]], out: IntArray) -> None:
        """Write the integers of a step's rows [N, row_ints], each 0 so far, at the places of its `rows`."""
        for place, row in rows:
            self.write_row(row, out[place])

    def write_row(self, row: Row, out: IntArray) -> None:
        """Write the integers of a row [row_ints], each 0 so far."""

    def write_tokens(self, row: Row, out: IntArray) -> None:
        """Write the integers of a prefill row's tokens, each -1 so far, if its flags have one of `bits`."""

    # -- its part of the program, each a pure function

    def unpack(self, columns: Columns) -> Own:
        """Return the feature's inputs; None for a feature without any."""
        nothing: Any = None
        return nothing

    def for_layers(self, own: Own, places: TokenPlaces) -> tuple[Array, ...]:
        """Return the arrays that layers use with the side cache `side`, from the feature's inputs."""
        raise NotImplementedError

    def hooks(self, inputs: StepInputs, own: Own, operands: Operands) -> Hooks:
        """Before the layers: return the feature's hooks inside them."""
        return NO_HOOKS

    def change(self, logits: Array, inputs: StepInputs, own: Own, state: RequestState) -> Array:
        """Before the choice: return logits [N, V], in steps that have a flag of `changing`."""
        return logits

    def columns(self, logits: Array, tokens: Array, inputs: StepInputs, chosen_from: Callable[[], Array]) -> Array:
        """After the choice: return integers [N, width] for the host, from the model's own logits and the tokens [N].

        `chosen_from` computes the logits that tokens are chosen from: after all changes, including masks.
        """
        raise NotImplementedError

    def follow(self, step: ChosenStep[Own, Operands], kv: KV) -> KV:
        """After the choice: return the pages with the feature's own entries written."""
        raise NotImplementedError

    def output(self, model: Model, hidden: Array, inputs: StepInputs, own: Own, kept: object) -> object:
        """At the end: return an array for the host, or a pytree of arrays. `hidden` [R + T, E] follows the final norm;
        see `Hooks` for `kept`.

        It is copied to the host in each step of the feature's variant; without one, in steps that have its flags.
        """
        raise NotImplementedError

    # -- its result is read

    def on_host(self, output: object, plan: StepPlan) -> object:
        """Wait for the output of a step. Return it in the host's memory: an array, or a dict of arrays."""
        return np.asarray(output)

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        """Add the feature's reports to each row's; see report.py."""
