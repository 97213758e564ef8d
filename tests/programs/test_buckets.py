"""The lattice is small, covers every step that fits the limits, and picks the cheapest program."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from rekindle._src.core.config import EngineConfig
from rekindle._src.programs.buckets import (
    COPY,
    PLAIN_VARIANT,
    Bucket,
    ProgramVariant,
    StepSpan,
    bucket_for,
    combinations,
    gated,
    late_lattice,
    late_programs,
    lattice,
    prefill_rows,
    programs_of,
)
from rekindle._src.programs.warming import likely_first
from rekindle.errors import ConfigError


def test_a_single_row_has_a_program_where_that_pays() -> None:
    buckets = lattice(EngineConfig(), single=True)
    assert [bucket.name for bucket in buckets[:2]] == ["r1t0", "r2t0"]
    assert len(buckets) == len(lattice(EngineConfig())) + 1, "with prefill tokens it would save nothing"
    assert bucket_for(buckets, 16, rows=1, tokens=0, prefills=0) == Bucket(1, 0)


def test_the_default_lattice_is_small_and_has_no_row_bucket_of_one() -> None:
    buckets = lattice(EngineConfig())
    assert [bucket.name for bucket in buckets] == [
        "r2t0", "r4t0", "r8t0", "r16t0", "r2t32", "r2t128", "r2t512", "r16t32", "r16t128", "r16t512",
    ]  # fmt: skip
    assert len(lattice(EngineConfig(max_requests=1))) == 4


@pytest.mark.parametrize("requests", [1, 2, 3, 16, 100, 256])
@pytest.mark.parametrize("tokens", [1, 8, 32, 33, 512, 5000])
def test_names_differ_and_the_largest_sizes_are_there(requests: int, tokens: int) -> None:
    buckets = lattice(EngineConfig(max_requests=requests, max_tokens_per_step=tokens), [(ProgramVariant.PROCESSORS,)])
    assert len({bucket.name for bucket in buckets}) == len(buckets)
    assert max(bucket.tokens for bucket in buckets) == tokens
    assert {max(requests, 2)} == {max(b.rows for b in buckets if b.tokens == t) for t in {b.tokens for b in buckets}}
    assert min(bucket.rows for bucket in buckets) == 2


@hypothesis.given(st.data())
def test_every_step_within_the_limits_has_a_program_and_it_is_the_cheapest(data: st.DataObject) -> None:
    requests, most = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 600))
    buckets = lattice(EngineConfig(max_requests=requests, max_tokens_per_step=most))
    rows, tokens = data.draw(st.integers(0, requests)), data.draw(st.integers(0, most))
    prefills = data.draw(st.integers(min(tokens, 1), min(tokens, prefill_rows(most, requests))))
    found = bucket_for(buckets, requests, rows=rows, tokens=tokens, prefills=prefills)
    assert found.rows >= rows
    assert found.tokens >= tokens
    assert prefill_rows(found.tokens, requests) >= prefills
    for other in buckets:
        if other.cost < found.cost:
            assert other.rows < rows or other.tokens < tokens or prefill_rows(other.tokens, requests) < prefills


def test_a_step_beyond_the_lattice_raises() -> None:
    with pytest.raises(ConfigError, match="17 decode rows"):
        bucket_for(lattice(EngineConfig()), 16, rows=17, tokens=0, prefills=0)


def test_many_short_prefills_take_a_bucket_with_enough_rows() -> None:
    buckets = lattice(EngineConfig())
    assert bucket_for(buckets, 16, rows=0, tokens=30, prefills=4).tokens == 32
    assert bucket_for(buckets, 16, rows=0, tokens=30, prefills=5).tokens == 128
    assert bucket_for(buckets, 16, rows=1, tokens=0, prefills=0) == Bucket(2, 0)


def test_steps_with_guided_rows_have_fewer_sizes_and_two_programs_each() -> None:
    guided = late_lattice(lattice(EngineConfig(max_requests=16, max_tokens_per_step=512), single=True))
    assert [bucket.name for bucket in guided] == [
        f"{size}+halves" for size in ("r1t0", "r8t0", "r16t0", "r16t32", "r16t128", "r16t512")
    ]
    assert [half.name for half in guided[0].halves] == ["r1t0+forward", "r1t0+choice"]
    config = EngineConfig(max_requests=2, max_tokens_per_step=32)
    _, processed, *others = late_lattice(lattice(config, [(ProgramVariant.PROCESSORS,)]))
    assert processed.name == "r2t0+processors+halves"
    assert [size.name for size in others] == ["r2t32+halves", "r2t32+processors+halves"]
    assert [half.name for half in processed.halves] == ["r2t0+forward", "r2t0+processors+choice"], (
        "the model is the same"
    )


def test_where_a_program_can_wait_for_its_masks_a_guided_step_is_one() -> None:
    config = EngineConfig(max_requests=2, max_tokens_per_step=32)
    single, padded = lattice(config, single=True), lattice(config)
    one = late_lattice(single, StepSpan.GATED)
    assert [program.name for program in programs_of(one)] == ["r1t0+gated", "r2t0+gated", "r2t32+gated"]
    halves = programs_of(late_lattice(padded))
    assert [half.name for half in halves] == ["r2t0+forward", "r2t0+choice", "r2t32+forward", "r2t32+choice"]
    assert {gated(half, single) for half in halves} <= {*one}
    larger = lattice(EngineConfig(max_requests=16), single=True)
    assert gated(Bucket(2, 0, span=StepSpan.FORWARD), larger).name == "r1t0+gated", "the smallest without padding"
    names = {program.name for program in late_programs((single, padded), [(ProgramVariant.POOLING,)])}
    assert names >= {"r1t0+gated", "r2t32+gated", "r2t32+pooling+gated"}
    assert names >= {"r2t0+forward", "r2t32+pooling+forward", "r2t32+choice"}


def test_a_programs_name_says_in_words_what_it_contains() -> None:
    variants = ProgramVariant.INNER_STEERING | ProgramVariant.ADAPTERS
    assert Bucket(2, 32, variants, StepSpan.FORWARD).name == "r2t32+adapters+inner-steering+forward"
    *_, every = combinations([(variant,) for variant in ProgramVariant])
    name = Bucket(1024, 1 << 20, every, StepSpan.FORWARD).name
    assert len(name.encode()) < 256, "a message to other processes has the length of a name in a byte"


def test_of_a_group_a_program_has_one_variant_at_most() -> None:
    steering, inner, taps = ProgramVariant.STEERING, ProgramVariant.INNER_STEERING, ProgramVariant.TAPS
    found = combinations([(taps,), (steering, inner)])
    assert found == [PLAIN_VARIANT, steering, inner, taps, taps | steering, taps | inner]


def test_programs_that_are_no_steps_are_made_first() -> None:
    """The thread that runs steps makes one that it needs, and all streams wait for it."""
    plain, guided = Bucket(8, 0), Bucket(2, 0, span=StepSpan.GATED)
    assert likely_first([guided, plain, Bucket(1, 32), COPY]) == [COPY, Bucket(1, 32), plain, guided]
