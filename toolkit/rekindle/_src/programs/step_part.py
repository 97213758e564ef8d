"""A part of a step: what a capability computes in the program of a step, and the operands that it brings.

Axes: R decode rows, S prefill sequences, N = R + S, T prefill tokens, W pages of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
from jax import Array, lax
from jax import numpy as jnp

from rekindle._src.core.extension import DeviceLoad
from rekindle._src.core.records import StepPlan
from rekindle._src.models.base import Model
from rekindle._src.models.hooks import NO_DELTAS, Deltas, Listener
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.kv_layout import KV, Paging
from rekindle._src.programs.partitioning import ROWS, WHOLE
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import Own, RowFlag
from rekindle_kernels import Choice

T = TypeVar("T")
Operands = TypeVar("Operands")  # arrays of a part in addition to the weights, a pytree


def branch(condition: Array | bool, yes: Callable[[], T], no: Callable[[], T]) -> T:
    """Run `lax.cond`, or just one of the branches where the condition is known while the program is traced."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    result: T = lax.cond(condition, yes, no)
    return result


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


class ChosenStep(NamedTuple, Generic[Own, Operands]):
    """A whole step after its tokens are chosen, on the device."""

    model: Model
    read: Array  # [R + T, F]: what a drafter reads of each token, the final hidden state or the inputs of layers
    inputs: StepInputs
    own: Own  # of the feature: the result of its `RowOption.unpack`
    operands: Operands  # of the feature
    tokens: Array  # [N]: chosen by the rows
    state: RequestState  # after the step


class NarrowedLogits(NamedTuple):
    """Logits that a feature has narrowed."""

    logits: Array  # [N, V]: minus infinity where a token may not be drawn
    kept: object  # for `StepPart.note`


class DrawnTokens(NamedTuple):
    """The tokens of a step, drawn from narrowed logits."""

    tokens: Array  # [N]
    counted: Array  # bool [N]: the token is now its request's: it was sampled, or follows an accepted draft
    kept: object  # from `StepPart.narrow`


class Hooks(NamedTuple):
    """The hooks of a feature inside the layers of a step; see `models/hooks.py`."""

    listener: Listener | None = None
    deltas: Deltas = NO_DELTAS
    kept: object = None  # for `StepPart.output`
    coordinates: Array | None = None  # int32 [R + T, 3]: of the tokens' positions, for ropes that have some
    sees: Array | None = None  # int32 [R + T], as in `AttentionInputs`
    tokens: Array | None = None  # [R + T]: the embedded tokens, where they differ from the step's own


NO_HOOKS = Hooks()


class StepPart(Generic[Own, Operands]):
    """A part that computes nothing, and the base of all others. Its type parameters are its inputs and operands."""

    variant: ProgramVariant = PLAIN_VARIANT  # the variant of programs that contain it; without one, all do
    instead: ProgramVariant = PLAIN_VARIANT  # the features that no program contains along with it
    warmed: bool = False  # the variant is part of the lattice that is compiled ahead; if not, as needed
    inside: bool = False  # it has hooks or operands, so that its variant is not made of parts
    changing: int = 0  # flags of steps where it changes logits
    matrices: str = ""  # the dtype of matrices among its operands that its variant multiplies rows by
    operands: Operands = ()  # type: ignore[assignment]  # others of the same shapes may replace them between steps
    operand_layout: object = WHOLE  # how these lie on the devices of a mesh, or a tree of it

    # Of the result: columns of integers next to each row's token, and an array of its own
    width: int = 0
    follows: bool = False  # it writes into pages once tokens are chosen: see `follow`
    narrows: bool = False  # it decides which tokens may be drawn, and keeps a state in slots: see `narrow` and `note`
    # Layers whose inputs in the residual stream all steps keep for it in the request state, where the model's number of
    # layers stands for the last one's output; see `ChosenStep.read`
    streams: tuple[int, ...] = ()
    has_output: bool = False
    copied: bool = True  # the array is copied to the host as soon as it is there, in programs of the variant

    @property
    def operand_shapes(self) -> object:
        """The shapes of `operands`."""
        return jax.eval_shape(lambda: self.operands)

    @property
    def output_layout(self) -> object:
        """The layout of `output` on the devices of a mesh, or a tree of it."""
        return ROWS

    # -- operands on the device

    def load(self, loads: Sequence[DeviceLoad]) -> None:
        """Take this feature's part of a plan's data for the device, on its thread and in the order of plans."""

    def free(self) -> None:
        """Let go of arrays on the device, because the session goes to sleep or ends; a later step makes them again."""

    def prepare(self, plan: StepPlan, rows: int) -> None:
        """Replace `operands` by the operands of a step that contains the feature. Prompts begin after `rows` tokens."""

    # -- in the program, each a pure function; `own` is the result of `RowOption.unpack`

    def hooks(self, inputs: StepInputs, own: Own, operands: Operands) -> Hooks:
        """Before the layers: return the feature's hooks inside them."""
        return NO_HOOKS

    def change(self, logits: Array, inputs: StepInputs, own: Own, state: RequestState) -> Array:
        """Before the choice: return logits [N, V], in steps that have a flag of `changing`."""
        return logits

    def narrow(self, logits: Array, inputs: StepInputs, own: Own, slots: object) -> NarrowedLogits:
        """Before the draw: narrow logits [N, V], which have passed all changes and masks, by the feature's `slots`."""
        raise NotImplementedError

    def note(self, drawn: DrawnTokens, inputs: StepInputs, own: Own, slots: object) -> tuple[object, Array]:
        """After the draw: return the feature's new `slots`, and its columns for the host [N, width]."""
        raise NotImplementedError

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
