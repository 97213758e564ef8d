"""The names of programs, and the sizes of steps: the choice of a bucket for each of them.

A step of `rows` decode rows and `tokens` prefill tokens runs in the smallest program that holds both; the rest is
padding. Sizes fall by powers: by 2 for steps of decode rows alone, which are short so that padding shows, and by more
where prefill tokens dominate. Programs do not differ by context length, which the kernels handle. Helpers are programs
that are no steps: they make a session's memory, fill slots and tables, and move pages.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rekindle._src.core.config import EngineConfig
from rekindle.errors import ConfigError

SMALLEST_ROWS = 2  # in XLA on CPU, a product with a single row is up to 20 times slower
SMALLEST_TOKENS = 32
TOKENS_STEP = 4  # prefill buckets: 512, 128, 32
MIXED_ROWS_STEP = 8  # decode rows in steps with prefill tokens: 16, 2
MAX_PREFILL_ROWS = 64
LATE_ROWS = 8
REPEATED_ROWS = 8


class ProgramVariant(enum.IntFlag):
    """The features that a program contains and others don't; its name has them in words.

    Operations on an IntFlag take a microsecond: what every step does is done with plain integers, or looked up.
    """

    PROCESSORS = enum.auto()  # the user's logits processors
    POOLING = enum.auto()  # pooled hidden states
    DISTRIBUTION = enum.auto()  # log-probabilities of the whole vocabulary
    ADAPTERS = enum.auto()
    STEERING = enum.auto()  # changes of the residual stream
    INNER_STEERING = enum.auto()  # these, and changes of the outputs of attention and MLP
    CAPTURES = enum.auto()  # results of the residual stream
    INNER_CAPTURES = enum.auto()  # these, and results from inside layers
    TAPS = enum.auto()  # the user's taps
    PICTURES = enum.auto()  # rows of pictures in the place of embeddings
    PROMPT_LOGPROBS = enum.auto()  # log-probabilities of prompts' own tokens
    DRAFTS = enum.auto()  # drafts where layers have states, and the model's own head
    SAMPLERS = enum.auto()  # samplers beyond those of every program

    @property
    def words(self) -> tuple[str, ...]:
        """The names of the features, as programs' names have them."""
        return tuple(str(feature.name).lower().replace("_", "-") for feature in self)


class StepSpan(enum.StrEnum):
    """How much of a step a program computes."""

    ALL = ""
    GATED = "gated"  # all of a step with guided rows; it waits for its masks
    FORWARD = "forward"  # elsewhere, guided rows need two programs: all up to the logits,
    CHOICE = "choice"  # and the choice of tokens
    HALVES = "halves"  # no program: the size of a step of these two
    REPEATED = "repeated"  # several decode steps, one after the other; see `repeated`


_WITHOUT_MASKS = StepSpan.ALL, StepSpan.REPEATED
PLAIN_VARIANT = ProgramVariant(0)
# Of two programs of a step, the second has these variants and the first one all others.
_OF_CHOICE = ProgramVariant.PROCESSORS | ProgramVariant.DISTRIBUTION | ProgramVariant.SAMPLERS
_OF_PROMPTS = ProgramVariant.POOLING | ProgramVariant.PROMPT_LOGPROBS  # steps without a prompt need neither


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static sizes of one step program."""

    rows: int  # decode rows, padding included
    tokens: int  # prefill tokens, padding included
    variants: ProgramVariant = PLAIN_VARIANT
    span: StepSpan = StepSpan.ALL

    @property
    def name(self) -> str:
        """The sizes, and what makes the program another one than the plain one: `r2t32+adapters+forward`."""
        sizes = f"r{self.rows}t{self.tokens}"
        return sizes + _additions(self.variants, self.span) if self.variants or self.span else sizes

    @property
    def late(self) -> bool:
        """True if it is, or is part of, a step with guided rows."""
        return self.span not in _WITHOUT_MASKS

    @property
    def halves(self) -> tuple[Bucket, Bucket]:
        """The forward and the choice program of a guided step of this size."""
        of_forward, of_choice = _divided(int(self.variants))
        forward = Bucket(self.rows, self.tokens, of_forward, StepSpan.FORWARD)
        return forward, Bucket(self.rows, self.tokens, of_choice, StepSpan.CHOICE)

    @property
    def programs(self) -> tuple[Bucket, ...]:
        """The programs that a step of this size runs."""
        return self.halves if self.span is StepSpan.HALVES else (self,)

    @property
    def cost(self) -> int:
        """Tokens of the program, padding included."""
        return self.rows + self.tokens


@functools.cache
def _divided(variants: int) -> tuple[ProgramVariant, ProgramVariant]:
    """Divide variants between the first half of a guided step and the second one."""
    return ProgramVariant(variants & ~int(_OF_CHOICE)), ProgramVariant(variants & int(_OF_CHOICE))


@functools.cache
def _additions(variants: ProgramVariant, span: StepSpan) -> str:
    return "".join(f"+{word}" for word in (*variants.words, span) if word)


def prefill_rows(tokens: int, max_requests: int) -> int:
    """Return how many sequences may prefill in a step of `tokens` prefill tokens. Each costs a row of logits."""
    return min(max_requests, max(1, tokens // 8), MAX_PREFILL_ROWS) if tokens else 0


def _powers(largest: int, smallest: int, step: int) -> tuple[int, ...]:
    """Return largest, largest / step, … while above `smallest`, then `smallest`; ascending."""
    sizes = {min(largest, smallest)}
    while largest > smallest:
        sizes.add(largest)
        largest = -(-largest // step)
    return tuple(sorted(sizes))


def row_sizes(max_requests: int, *, mixed: bool) -> tuple[int, ...]:
    """Return the numbers of decode rows that programs have, with prefill tokens (`mixed`) or without; ascending."""
    return _powers(max(max_requests, SMALLEST_ROWS), SMALLEST_ROWS, MIXED_ROWS_STEP if mixed else 2)


def padded_rows(rows: int, max_requests: int, *, mixed: bool) -> int:
    """Return the rows of the program that runs `rows` decode rows, padding included."""
    return next(size for size in row_sizes(max_requests, mixed=mixed) if size >= rows)


def lattice(
    config: EngineConfig, variants: Sequence[Sequence[ProgramVariant]] = (), *, single: bool = False
) -> tuple[Bucket, ...]:
    """Return every step program that is compiled ahead, in each of the `combinations` of `variants`.

    With `single`, one row has a program of its own (135M on CPU, native products: 7.3 ms, 9.1 with one row of padding).
    """
    most = config.max_requests
    combined = combinations(variants)
    sizes = (*((1,) if single else ()), *row_sizes(most, mixed=False))
    decode = [Bucket(rows, 0, chosen) for chosen in combined for rows in sizes]
    mixed = [
        Bucket(rows, tokens, chosen)
        for chosen in combined
        for rows in row_sizes(most, mixed=True)
        for tokens in _powers(config.max_tokens_per_step, SMALLEST_TOKENS, TOKENS_STEP)
    ]
    return tuple(decode + mixed)


@functools.cache
def late_lattice(plain: tuple[Bucket, ...], span: StepSpan = StepSpan.HALVES) -> tuple[Bucket, ...]:
    """Return the sizes of steps with guided rows. There are fewer than for other steps, because few requests have a
    guide.

    Of the decode steps these are the smallest and those from LATE_ROWS rows on, which drafts fill up. With prefill
    tokens, where a guided row samples only while a prompt comes in, it is the largest number of rows.
    """
    least, most = min(bucket.rows for bucket in plain), max(bucket.rows for bucket in plain)
    few = min(LATE_ROWS, most)
    sizes = [
        bucket
        for bucket in plain
        if bucket.rows == most or (not bucket.tokens and (bucket.rows == least or bucket.rows >= few))
    ]
    return tuple(dataclasses.replace(bucket, span=span) for bucket in sizes)


def repeated_lattice(plain: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """Return the programs that repeat decode steps: the smallest size, and one for up to REPEATED_ROWS rows."""
    decode = sorted(bucket for bucket in plain if not bucket.tokens and not bucket.variants)
    few = next((bucket for bucket in decode if bucket.rows >= REPEATED_ROWS), decode[-1])
    return tuple(dataclasses.replace(size, span=StepSpan.REPEATED) for size in dict.fromkeys((decode[0], few)))


def programs_of(sizes: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Return the programs that steps of these sizes run."""
    return tuple(dict.fromkeys(program for size in sizes for program in size.programs))


@functools.cache
def with_variants(buckets: tuple[Bucket, ...], more: ProgramVariant) -> tuple[Bucket, ...]:
    """Return the buckets with these variants in addition, where steps of their sizes can need them."""
    union = {variants: variants | more for variants in {bucket.variants for bucket in buckets}}
    every = not more & _OF_PROMPTS
    return tuple(
        Bucket(bucket.rows, bucket.tokens, union[bucket.variants], bucket.span)
        for bucket in buckets
        if every or bucket.tokens
    )


def combinations(groups: Sequence[Sequence[ProgramVariant]]) -> list[ProgramVariant]:
    """Return every combination of variants, at most one of each group; the first is none of them."""
    choices = itertools.product(*((0, *map(int, group)) for group in groups))
    return [ProgramVariant(sum(chosen)) for chosen in choices]  # each is a bit of its own


def gated(half: Bucket, plain: tuple[Bucket, ...]) -> Bucket:
    """Return the program that waits for its masks, in place of a half; the smallest may have fewer rows than that."""
    size = dataclasses.replace(half, variants=half.variants & ~_OF_PROMPTS, span=StepSpan.GATED)
    return size if size in late_lattice(plain, StepSpan.GATED) else dataclasses.replace(size, rows=1)


def late_programs(
    lattices: Iterable[tuple[Bucket, ...]], variants: Sequence[Sequence[ProgramVariant]] = ()
) -> tuple[Bucket, ...]:
    """Return every program that steps with guided rows may run, from the sizes of other steps and further variants."""
    combined, plain = combinations(variants), tuple(lattices)
    # Each half has variants of its own, so that no half comes with those of the other one.
    parts = dict.fromkeys(part for more in combined for part in _divided(int(more)))
    every = ((StepSpan.GATED, combined), (StepSpan.HALVES, parts))
    sizes = {span: tuple(size for each in plain for size in late_lattice(each, span)) for span, _ in every}
    return programs_of(size for span, chosen in every for more in chosen for size in with_variants(sizes[span], more))


def bucket_for(
    buckets: Iterable[Bucket],
    max_requests: int,
    *,
    rows: int,
    tokens: int,
    prefills: int,
    variants: ProgramVariant = PLAIN_VARIANT,
) -> Bucket:
    """Return the bucket with the fewest tokens that holds the step. Raise ConfigError if there is none."""
    fitting = [
        bucket
        for bucket in buckets
        if bucket.rows >= rows
        and bucket.tokens >= tokens
        and prefill_rows(bucket.tokens, max_requests) >= prefills
        and bucket.variants == variants
    ]
    if not fitting:
        raise ConfigError(
            "step",
            f"{rows} decode rows, {prefills} prefills of {tokens} tokens",
            "is larger than every compiled program",
            "Plan smaller steps",
        )
    return min(fitting, key=lambda bucket: (bucket.cost, bucket.rows))


FEW = 4  # pages of one gather or scatter; where XLA fills pages on CPU, it compiles an operation for each and layer
MANY = 64, 32, 16, 8
FILLED = 32  # pages that one native call fills on CPU: starting it once takes 2 ms less than eight times (135M)
TRANSFER = 32 << 20  # bytes; beyond, starting a transfer takes little compared with the copying


@dataclasses.dataclass(frozen=True, slots=True)
class Helper:
    """A program that is not a step.

    "memory" makes pages and state, "admit" writes a request's history into its slot, "tables" writes whole page tables,
    "gather" and "scatter" move pages; "collect" is a gather that gives each process of several the whole pages.
    "copy" copies pages on the device. "lens" computes logits of rows of the residual stream.
    A side cache's programs (`side_caches`) move its entries: "states_out" and "states_in", for example.
    """

    kind: str
    pages: int = 0  # pages that it moves, or rows

    @property
    def name(self) -> str:
        return f"{self.kind}{self.pages}" if self.pages > FEW else self.kind


class StepSize(NamedTuple):
    """The size of a step before its program is chosen."""

    rows: int = 0  # decode rows
    prefills: int = 0
    tokens: int = 0  # of prefills


Key = Bucket | Helper  # the name of a program: a step is named by its bucket
MEMORY, ADMIT, TABLES = Helper("memory"), Helper("admit"), Helper("tables")
GATHER, SCATTER, COLLECT = Helper("gather", FEW), Helper("scatter", FEW), Helper("collect", FEW)
COPY = Helper("copy", FEW)


LENS = Helper("lens", 32)
