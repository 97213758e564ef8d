"""The breakers of DRY in a vocabulary: which tokens begin one, and what may follow them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.to_thread
import numpy as np
import pytest

from helpers.asgi import until
from helpers.bounds import Within
from rekindle._src.capabilities.samplers import breakers
from rekindle._src.capabilities.samplers.breakers import BreakerTable, BreakerTables
from rekindle._src.capabilities.samplers.repetition import CLASSES, PER_WORD, SEQUENCES
from rekindle._src.capabilities.samplers.request import SamplersIntake
from rekindle._src.core.sampling import Sampling
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest
from rekindle.tiny import folder

TOKENIZER = Tokenizer.load(folder())
VOCAB = TOKENIZER.vocab_size


def ways(table: BreakerTable, token: int) -> set[tuple[int, ...]]:
    """The rests that may follow a token."""
    number = (int(table.classes[token // PER_WORD]) >> (4 * (token % PER_WORD))) & 15
    if not number:
        return set()
    return {tuple(row[1 : 1 + row[0]].tolist()) for row in table.rests[number - 1] if row[0] >= 0}


@pytest.mark.parametrize("given", [("\n", ".", '"'), ("fire",), ("re", "once", "e"), ("é",), ()], ids=repr)
def test_a_breaker_is_in_a_token_or_begins_at_its_end(given: tuple[str, ...]) -> None:
    table = BreakerTables(TOKENIZER, VOCAB).table(given)
    begun = 0
    for token in range(VOCAB):
        text = TOKENIZER.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            continue  # a part of a character
        expected = set()
        for breaker in given:
            if breaker in text:
                expected.add(())
                continue
            ends = [size for size in range(1, len(breaker)) if text.endswith(breaker[:size])]
            expected |= {tuple(TOKENIZER.encode(breaker[size:], add_special_tokens=False)) for size in ends}
        assert ways(table, token) == expected, text
        begun += bool(expected)
    assert begun or given in ((), ("é",))


def test_threads_that_ask_for_the_same_table_make_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, found, make, begin = list[int](), list[BreakerTable](), breakers.make_table, threading.Barrier(4)

    def counting(*given: Any) -> BreakerTable:
        made.append(1)
        return make(*given)

    def ask() -> None:
        begin.wait()
        found.append(tables.table(("\n", "fire")))

    monkeypatch.setattr(breakers, "make_table", counting)
    tables = BreakerTables(TOKENIZER, VOCAB)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and all(table is found[0] for table in found) and len(found) == 4


def test_tables_are_remembered_and_too_many_ways_are_refused() -> None:
    tables = BreakerTables(TOKENIZER, VOCAB)
    assert tables.find(("a",)) is None
    assert tables.table(("a",)) is tables.table(("a",)) is tables.find(("a",))
    with pytest.raises(InvalidRequest, match="dry_sequence_breakers"):
        tables.table(("abcdefghijklmnopqrstuvwxyz", "zyxwvutsrqponmlkjihgfedcba"))
    with pytest.raises(InvalidRequest, match="bytes"):
        tables.table(tuple("x" * 40 for _ in range(16)))
    assert np.asarray(tables.table(())[1]).shape[:2] == (CLASSES, SEQUENCES)


def test_frequent_letters_are_found_as_fast_as_rare_ones(within: Within) -> None:
    """Each place of a letter was an object: sixteen letters took 2.9 s for a vocabulary of 49,152 tokens."""

    class Repeating:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "etaoin" * 40

    texts = breakers._Texts(cast(Any, Repeating()), 5_000)
    with within(1.0):
        for letter in "etaoin" * 3:
            assert len(texts.spelling(letter.encode()).whole) == 5_000
        assert not len(texts.spelling(b"x").whole) and not len(texts.spelling(b"etaoin" * 9 + b"x").whole)


@pytest.mark.anyio
async def test_requests_for_tables_take_turns_and_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty that waited for one table after the other had all threads, so that long prompts of others waited too."""
    intake, made, on, make = SamplersIntake(), list[str](), threading.Event(), breakers.make_table

    def held(texts: Any, given: tuple[str, ...], *rest: Any) -> BreakerTable:
        made.append(given[0])
        assert on.wait(60)
        return make(texts, given, *rest)

    monkeypatch.setattr(breakers, "make_table", held)
    front: Any = SimpleNamespace(tokenizer=TOKENIZER, vocab_size=VOCAB)

    async def ask(caller: str, name: str) -> None:
        sampling = Sampling(dry_multiplier=0.8, dry_sequence_breakers=(name,))
        submission: Any = SimpleNamespace(sampling=sampling, caller=caller)
        assert intake.waits(submission, front)
        assert await intake.resource(submission, front) is not None

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "a", "a0")
        await until(lambda: bool(made))
        for number in range(1, 50):
            group.start_soon(ask, "a", f"a{number}")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(ask, "b", "b0")
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(60):
            assert await anyio.to_thread.run_sync(lambda: True), "there are threads for others"
        on.set()
    assert len(made) == 51 and made.index("b0") == 2, "one of a's, which was next, and then b's"
