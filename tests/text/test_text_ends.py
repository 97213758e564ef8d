"""A text ends by a function of the caller's, or where it repeats itself, whatever the grouping of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers.small import TINY
from rekindle._src.core.sampling import Sampling
from rekindle._src.text.detokenizer import Detokenizer
from rekindle._src.text.text_ends import LEAST_REPEATED, LONGEST_BLOCK, RepeatDetector, WatchedText
from rekindle.tiny import folder


def ends_at(tokens: Sequence[int], times: int) -> int | None:
    """How many tokens it takes, by looking at every block after each token."""
    for count in range(1, len(tokens) + 1):
        for block in range(1, LONGEST_BLOCK + 1):
            run = 0
            while run + block < count and tokens[count - 1 - run] == tokens[count - 1 - run - block]:
                run += 1
            if run >= block * (times - 1) and run + block >= LEAST_REPEATED:
                return count
    return None


@pytest.mark.parametrize("seed", range(12))
def test_repetitions_are_those_of_a_plain_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 4, rng.integers(1, 70))
    tokens = [*rng.integers(0, 3, 40).tolist(), *np.tile(block, 6).tolist(), *rng.integers(0, 3, 9).tolist()]
    times = int(rng.integers(2, 6))
    repetition = RepeatDetector(times)
    found = next((count for count, token in enumerate(tokens, start=1) if repetition.push(token)), None)
    assert found == ends_at(tokens, times)


def test_a_line_of_dashes_is_no_repetition() -> None:
    repetition = RepeatDetector(2)
    assert not any(repetition.push(7) for _ in range(LEAST_REPEATED - 1))
    assert repetition.push(7)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_end_does_not_depend_on_how_tokens_come(size: int) -> None:
    from rekindle._src.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder())
    tokens = tokenizer.encode("Once upon a time there was a fire, and then there was none.", add_special_tokens=False)
    seen: list[int] = []

    def until(text: str, so_far: Sequence[int]) -> bool:
        seen.append(len(so_far))
        return "was" in text

    watched = WatchedText(Detokenizer(tokenizer, stop=("nothing",)), until=until, repeats=0)
    text = "".join(watched.push(tokens[first : first + size]).text for first in range(0, len(tokens), size))
    assert text.endswith("was") and watched.stopped == "until"
    assert seen == list(range(1, watched.tokens + 1)) and watched.released == watched.tokens


def test_a_stop_string_comes_before_the_function() -> None:
    from rekindle._src.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder())
    tokens = tokenizer.encode("Once upon a time there was a fire", add_special_tokens=False)
    watched = WatchedText(Detokenizer(tokenizer, stop=("there",)), until=lambda text, _: "fire" in text, repeats=0)
    assert watched.push(tokens).text == "Once upon a time " and watched.stopped == "there"


@pytest.mark.anyio
async def test_a_session_ends_texts_by_a_function() -> None:
    async with rekindle.open("tiny", **TINY, drafts="none") as session:
        whole = await session.generate("Once upon a time", max_tokens=24)
        done = await session.generate("Once upon a time", max_tokens=24, until=lambda text, tokens: len(tokens) == 5)
        assert (done.finish_reason, done.stop_reason) == ("stop", "until")
        assert done.token_ids == whole.token_ids[:5]
        least = await session.generate("Once", max_tokens=9, min_tokens=6, until=lambda text, tokens: True)
        assert len(least.token_ids) == 7
        with pytest.raises(rekindle.errors.RequestFailed, match="ZeroDivisionError"):
            await session.generate("Once", until=lambda text, tokens: 1 // 0)
        options: dict[str, Any] = {"logit_bias": {whole.token_ids[0]: 1e4}, "max_tokens": 200, "ignore_eos": True}
        stuck = await session.generate("Once upon a time", stop_repeats=4, **options)
        assert (stuck.stop_reason, len(stuck.token_ids)) == ("repeats", LEAST_REPEATED)
        assert (await session.generate("Once", max_tokens=2)).finish_reason == "length"  # the session goes on


@pytest.mark.parametrize(("name", "value"), [("until", "x"), ("stop_repeats", 1), ("stop_repeats", -1)])
def test_a_wrong_end_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(rekindle.errors.InvalidRequest) as caught:
        Sampling(**{name: value})
    assert caught.value.field == name
