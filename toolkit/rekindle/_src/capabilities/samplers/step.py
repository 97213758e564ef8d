"""Samplers in a step: logits are narrowed by chains of the rows' own, in programs of a variant of their own.

Axes: N rows, V vocabulary, L slots, W latest tokens that a slot keeps.

A request's options are constant while it has its slot, so `admit` writes them there, with its breakers and its latest
tokens. Steps of other requests bring nothing more, and their programs pass these arrays through. Numbers that a sampler
carries from token to token, such as mirostat's, are in the slot as well: the next step is dispatched before the host
has read them. They come to the host next to each token for the case that the request has to enter a slot again.

Drafts are rows of one step. A draft's row sees the drafts before it as tokens of the text, and carries on as if each
had been chosen; where one was not, no later row counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from rekindle._src.capabilities.plans import CapabilityPlan
from rekindle._src.capabilities.samplers import chain
from rekindle._src.capabilities.samplers.breakers import no_breakers
from rekindle._src.capabilities.samplers.chain import CARRIED, LONGEST, Context, Numbers, SamplerKind
from rekindle._src.capabilities.samplers.repetition import CLASSES, PER_WORD, REST, SEQUENCES, Breakers, Dry, Window
from rekindle._src.capabilities.samplers.repetition import penalties as dry_penalties
from rekindle._src.capabilities.samplers.request import CARRIED as CARRIED_REPORT
from rekindle._src.capabilities.samplers.request import SamplerChain
from rekindle._src.core.records import IntArray, Request, Row, StepPlan
from rekindle._src.core.samplers import ADAPTIVE, MAX_DRY_WINDOW, PENALTIES
from rekindle._src.core.sampling import Sampling
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.programs.buckets import ProgramVariant
from rekindle._src.programs.draft_rows import draft_places
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.request_state import NOWHERE, SlotAdmission, SlotState
from rekindle._src.programs.row_option import FeatureRead, RowFlag, RowOption, RowReports
from rekindle._src.programs.step_part import DrawnTokens, NarrowedLogits, StepInputs, StepPart, branch

FLOATS = len(Numbers._fields)
RESTS = CLASSES, SEQUENCES, 1 + REST


class SamplerSlots(NamedTuple):
    """The state of each slot."""

    numbers: Array  # float32 [L, FLOATS]
    chains: Array  # int32 [L, LONGEST + 1]
    carried: Array  # float32 [L, CARRIED]
    recent: Array  # int32 [L, W]: the latest tokens, each at its position modulo W; -1 for none, and what isn't text
    classes: Array  # int32 [L, ceil(V / PER_WORD)]
    rests: Array  # int32 [L, CLASSES, SEQUENCES, 1 + REST]


class KeptChains(NamedTuple):
    """The values of rows that `Chains.note` reads."""

    before: Array  # [N, V]: logits before the last sampler
    numbers: Numbers
    carried: Array  # [N, CARRIED]


def numbers_of(sampling: Sampling, vocab_size: int) -> Numbers:
    """Return the options of a request, as Python's numbers."""
    values = {name: float(getattr(sampling, name)) for name in Numbers._fields}
    values["top_k"] = min(values["top_k"], float(vocab_size))
    if sampling.dry_penalty_last_n < 0:
        values["dry_penalty_last_n"] = float(MAX_DRY_WINDOW)
    if ADAPTIVE not in sampling.order:
        values["adaptive_target"] = -1.0
    return Numbers(**cast(dict[str, Array], values))


def chain_of(sampling: Sampling) -> list[int]:
    """Return the chain of a request, LONGEST + 1 long. Penalties are not in it: they come before the masks."""
    kinds = [int(SamplerKind[name.upper()]) for name in sampling.order if name not in (PENALTIES, ADAPTIVE)]
    return kinds + [int(SamplerKind.END)] * (LONGEST + 1 - len(kinds))


class ChainState(SlotState[SamplerSlots]):
    """The options, breakers and latest tokens of a request in its slot."""

    def __init__(self, vocab_size: int, context: int) -> None:
        self._vocab_size, self._words = vocab_size, -(-vocab_size // PER_WORD)
        self._window = min(context, MAX_DRY_WINDOW)
        self._rests = int(np.prod(RESTS))
        self.ints, self.floats = LONGEST + 1 + self._words + self._rests, FLOATS + CARRIED

    def shapes(self, slots: int) -> SamplerSlots:
        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((slots, *shape), jnp.int32)

        def floats(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((slots, *shape), jnp.float32)

        leaves: Sequence[Any] = (
            floats(FLOATS), ints(LONGEST + 1), floats(CARRIED), ints(self._window), ints(self._words), ints(*RESTS)
        )  # fmt: skip
        return SamplerSlots(*leaves)

    def pack(self, row: Row, ints: IntArray, floats: NDArray[np.float32]) -> None:
        own = row.request.extensions.get(SamplerChain)
        if own is None:
            return
        sampling = row.request.sampling
        table = no_breakers(self._vocab_size) if own.breakers is None else own.breakers
        ints[: LONGEST + 1] = chain_of(sampling)
        ints[LONGEST + 1 : -self._rests] = table.classes
        ints[-self._rests :] = table.rests.reshape(-1)
        floats[:FLOATS] = np.clip(numbers_of(sampling, self._vocab_size), -_LARGEST, _LARGEST)
        floats[FLOATS:] = own.carried(0 if row.outputs is None else len(row.outputs))

    def admit(self, arrays: SamplerSlots, admission: SlotAdmission) -> SamplerSlots:
        slot, tokens, ints, floats = admission
        chains, classes, rests = jnp.split(ints, (LONGEST + 1, LONGEST + 1 + self._words))
        count = jnp.where(tokens != NOWHERE, lax.iota(jnp.int32, tokens.shape[0]) + 1, 0).max()
        # The latest position that is kept at each place.
        latest = count - 1 - (count - 1 - lax.iota(jnp.int32, self._window)) % self._window
        kept = tokens[jnp.maximum(latest, 0)]
        recent = jnp.where((latest >= 0) & (kept != NOWHERE), kept, -1)
        new = floats[:FLOATS], chains, floats[FLOATS:], recent, classes, rests.reshape(RESTS)
        return SamplerSlots(*(array.at[slot].set(part) for array, part in zip(arrays, new, strict=True)))


_LARGEST = float(np.finfo(np.float32).max)


class ChainOption(RowOption):
    """The flag of rows with a chain, and the numbers that they carry."""

    option, bits = SamplerChain, int(RowFlag.NARROWED)
    history = int(RowFlag.NARROWED)

    def flags(self, request: Request) -> int:
        return self.bits

    def reads_slot(self, request: Request) -> bool:
        return True

    def in_plan(self, plan: StepPlan) -> bool:
        rows = [row for row in plan.rows if row.request.extensions]
        return any(row.samples and SamplerChain in row.request.extensions for row in rows)

    def read(self, read: FeatureRead, reports: RowReports) -> None:
        for row, token, place, own in zip(read.plan.rows, read.tokens, read.places, reports, strict=True):
            chain = row.request.extensions.get(SamplerChain)
            if chain is not None and chain.carries and token is not None:
                CARRIED_REPORT.put(own, tuple(read.columns[place].view(np.float32).tolist()))


class Chains(StepPart[None, tuple[()]]):
    """Narrows the logits of rows by their chains."""

    variant, narrows, width = ProgramVariant.SAMPLERS, True, CARRIED

    def __init__(self, vocab_size: int, *, deterministic: bool) -> None:
        self._vocab_size, self._deterministic = vocab_size, deterministic

    def narrow(self, logits: Array, inputs: StepInputs, own: None, slots: object) -> NarrowedLogits:
        assert isinstance(slots, SamplerSlots)
        rows, mine = inputs.slots, inputs.flag(RowFlag.NARROWED)
        values = slots.numbers[rows]
        numbers = Numbers(*(values[:, column] for column in range(FLOATS)))
        numbers = numbers._replace(
            mirostat=jnp.where(mine, numbers.mirostat, 0.0),
            adaptive_target=jnp.where(mine, numbers.adaptive_target, -1.0),
        )
        chains = jnp.where(mine[:, None], slots.chains[rows], int(SamplerKind.END))

        def penalties() -> Array:
            options = Dry(numbers.dry_multiplier, numbers.dry_base, numbers.dry_allowed_length.astype(jnp.int32))
            breakers = Breakers(slots.classes[rows], slots.rests[rows])
            return dry_penalties(self._window(inputs, slots, numbers), breakers, options, self._vocab_size)

        with jax.named_scope("samplers"):
            fixed = self._deterministic
            context = Context(inputs.choice.seed, inputs.lengths, penalties, fixed)
            before = chain.narrow(logits, numbers, chains, context)
            carried = slots.carried[rows]

            def last() -> tuple[Array, Array]:
                numbers_here = _after_drafts(before, numbers, carried, inputs, deterministic=fixed)
                return chain.last(before, numbers, numbers_here, deterministic=fixed), numbers_here

            after, carried = branch(jnp.any(chain.carries(numbers)), last, lambda: (before, carried))
        return NarrowedLogits(after, KeptChains(before, numbers, carried))

    def note(self, drawn: DrawnTokens, inputs: StepInputs, own: None, slots: object) -> tuple[object, Array]:
        assert isinstance(slots, SamplerSlots)
        assert isinstance(drawn.kept, KeptChains)
        kept, scratch = drawn.kept, slots.recent.shape[0] - 1
        rows, mine = inputs.slots, inputs.flag(RowFlag.NARROWED)

        def carry_on() -> Array:
            fixed = self._deterministic
            return chain.carry_on(kept.before, kept.numbers, kept.carried, drawn.tokens, deterministic=fixed)

        carried = branch(jnp.any(chain.carries(kept.numbers)), carry_on, lambda: kept.carried)
        counted = jnp.where(drawn.counted & mine, rows, scratch)
        places = inputs.lengths % slots.recent.shape[1]
        # Of a chain of drafts, the last row that counts has the numbers after it.
        follows = jnp.roll(drawn.counted & (draft_places(inputs) > 0), -1).at[-1].set(False)
        final = jnp.where(drawn.counted & mine & ~follows, rows, scratch)
        new = slots._replace(
            recent=slots.recent.at[counted, places].set(drawn.tokens), carried=slots.carried.at[final].set(carried)
        )
        return new, lax.bitcast_convert_type(carried, jnp.int32)

    def _window(self, inputs: StepInputs, slots: SamplerSlots, numbers: Numbers) -> Window:
        """Return the latest tokens of each row, its drafts among them."""
        width = slots.recent.shape[1]
        back = lax.iota(jnp.int32, width)
        positions = inputs.lengths[:, None] - 1 - back
        tokens = jnp.take_along_axis(slots.recent[inputs.slots], positions % width, axis=1)
        places, own = draft_places(inputs), inputs.tokens[inputs.last]

        def with_draft(place: Array, tokens: Array) -> Array:
            """Put the draft that came `place` rows before, if there is one."""
            drafted = jnp.where(places > place, jnp.roll(own, place), tokens[:, place])
            return tokens.at[:, place].set(drafted)

        tokens = lax.fori_loop(0, jnp.minimum(places.max(), width), with_draft, tokens)
        counting = jnp.minimum(inputs.lengths, numbers.dry_penalty_last_n.astype(jnp.int32))
        return Window(jnp.where(positions >= 0, tokens, -1), jnp.minimum(counting, width))


def _after_drafts(logits: Array, numbers: Numbers, carried: Array, inputs: StepInputs, *, deterministic: bool) -> Array:
    """Return the numbers [N, CARRIED] of each row: its slot's, carried on by the drafts up to its own."""
    places, drafts = draft_places(inputs), inputs.tokens[inputs.last]
    following = jnp.roll(drafts, -1)  # a row's choice, if the draft after it is right

    def next_place(place: Array, carried: Array) -> Array:
        after = chain.carry_on(logits, numbers, carried, following, deterministic=deterministic)
        return jnp.where((places == place + 1)[:, None], jnp.roll(after, 1, axis=0), carried)

    result: Array = lax.fori_loop(0, places.max(), next_place, carried)
    return result


class SamplersPlan(CapabilityPlan):
    """Any session has samplers; programs with them are made as needed."""

    def features(self, plan: ProgramPlan) -> Sequence[Feature]:
        vocab_size, config = plan.model.vocab_size, plan.config
        context = pages_for(config.max_model_len, config.page_size) * config.page_size
        part = Chains(vocab_size, deterministic=plan.graph.precision.deterministic)
        return (Feature(ChainOption(), part, ChainState(vocab_size, context)),)
