"""Buckets: the sizes of the step programs, and the choice of one for a step.

A step of `rows` decode rows and `tokens` prefill tokens runs in the smallest program that holds both; the rest is
padding. Sizes fall by powers: by 2 for steps of decode rows alone, which are short so that padding shows, and by more
where prefill tokens dominate. Programs do not differ by context length, which the kernels handle.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from rekindle._src.core.config import EngineConfig
from rekindle.errors import ConfigError

SMALLEST_ROWS = 2  # in XLA on CPU, a product with a single row is up to 20 times slower
SMALLEST_TOKENS = 32
TOKENS_STEP = 4  # prefill buckets: 512, 128, 32
MIXED_ROWS_STEP = 8  # decode rows beside prefill tokens: 16, 2
MAX_PREFILL_ROWS = 64
FORWARD, CHOICE, BOTH, GATED = "f", "c", "g", "m"
GUIDED_ROWS = 8


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static sizes of one step program."""

    rows: int  # decode rows, padding included
    tokens: int  # prefill tokens, padding included
    processed: bool = False  # the variant that contains the user's logits processors
    pools: bool = False  # the variant that also pools the hidden states of its prefill sequences
    # Of a step with guided rows: GATED is one program that waits for its masks. Elsewhere there are two, FORWARD and
    # CHOICE, and BOTH for their sizes.
    part: str = ""

    @property
    def name(self) -> str:
        return f"r{self.rows}t{self.tokens}" + ("p" if self.processed else "") + ("e" if self.pools else "") + self.part

    @property
    def halves(self) -> tuple[Bucket, Bucket]:
        """The forward and the choice program of a guided step of this size."""
        forward = dataclasses.replace(self, processed=False, part=FORWARD)
        return forward, dataclasses.replace(self, pools=False, part=CHOICE)

    @property
    def programs(self) -> tuple[Bucket, ...]:
        """The programs that a step of this size runs."""
        return self.halves if self.part == BOTH else (self,)

    @property
    def cost(self) -> int:
        """Tokens of the program, padding included."""
        return self.rows + self.tokens


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


def lattice(config: EngineConfig, *, processed: bool = False, single: bool = False) -> tuple[Bucket, ...]:
    """Return every step program of a session; with `processed`, also the variants with logits processors.

    With `single`, one row has a program of its own (135M on CPU, native products: 7.3 ms, 9.1 with one row of padding).
    """
    most = config.max_requests
    variants = (False, True) if processed else (False,)
    sizes = (*((1,) if single else ()), *row_sizes(most, mixed=False))
    decode = [Bucket(rows, 0, variant) for variant in variants for rows in sizes]
    mixed = [
        Bucket(rows, tokens, variant)
        for variant in variants
        for rows in row_sizes(most, mixed=True)
        for tokens in _powers(config.max_tokens_per_step, SMALLEST_TOKENS, TOKENS_STEP)
    ]
    return tuple(decode + mixed)


@functools.cache
def guided_lattice(plain: tuple[Bucket, ...], part: str = BOTH) -> tuple[Bucket, ...]:
    """Return the sizes of steps with guided rows: fewer than those of other steps, because few requests have a guide.

    Of the decode steps the smallest and those from GUIDED_ROWS rows on, which drafts fill up; beside prefill tokens,
    where a guided row samples only while a prompt comes in, the largest number of rows.
    """
    least, most = min(bucket.rows for bucket in plain), max(bucket.rows for bucket in plain)
    few = min(GUIDED_ROWS, most)
    sizes = [
        bucket
        for bucket in plain
        if bucket.rows == most or (not bucket.tokens and (bucket.rows == least or bucket.rows >= few))
    ]
    return tuple(dataclasses.replace(bucket, part=part) for bucket in sizes)


def programs_of(sizes: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Return the programs that steps of these sizes run."""
    return tuple(dict.fromkeys(program for size in sizes for program in size.programs))


def pooling_lattice(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Return the variants of buckets with prefill tokens that also pool hidden states."""
    return tuple(dataclasses.replace(bucket, pools=True) for bucket in buckets if bucket.tokens)


def gated(half: Bucket, plain: tuple[Bucket, ...]) -> Bucket:
    """Return the program that waits for its masks, in place of a half; the smallest may have fewer rows than that."""
    size = dataclasses.replace(half, pools=False, part=GATED)
    return size if size in guided_lattice(plain, GATED) else dataclasses.replace(size, rows=1)


def guided_programs(lattices: Iterable[tuple[Bucket, ...]]) -> tuple[Bucket, ...]:
    """Return every program that steps with guided rows may run, from the sizes of other steps."""
    sizes = [size for part in (GATED, BOTH) for plain in lattices for size in guided_lattice(plain, part)]
    return programs_of((*sizes, *pooling_lattice(sizes)))


def bucket_for(
    buckets: Iterable[Bucket], max_requests: int, *, rows: int, tokens: int, prefills: int, processed: bool = False
) -> Bucket:
    """Return the bucket with the fewest tokens that holds the step. Raise ConfigError if there is none."""
    fitting = [
        bucket
        for bucket in buckets
        if bucket.rows >= rows
        and bucket.tokens >= tokens
        and prefill_rows(bucket.tokens, max_requests) >= prefills
        and bucket.processed == processed
    ]
    if not fitting:
        raise ConfigError(
            "step",
            f"{rows} decode rows, {prefills} prefills of {tokens} tokens",
            "is larger than every compiled program",
            "Plan smaller steps",
        )
    return min(fitting, key=lambda bucket: (bucket.cost, bucket.rows))
