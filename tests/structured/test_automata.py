"""Memory of the automata that grammars become: all of a session's have one bound, whichever texts follow them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from helpers.guides import allowed_in
from rekindle import Sampling, tiny
from rekindle._src.core.records import mask_words
from rekindle._src.structured import automata, compile_worker
from rekindle._src.structured import grammar as grammars_module
from rekindle._src.structured.grammar import Grammars
from rekindle._src.structured.spec import structure_of
from rekindle._src.text.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
TOKENIZER = Tokenizer.load(tiny.folder())
VOCAB = 2048
GROWING = "(.|\n)*a(.|\n){300}"  # a new state remembers where each of the last 300 characters was an "a"


def guide(grammars: Grammars, **options: Any) -> Any:
    structure = structure_of(Sampling(**options))
    assert structure is not None
    return grammars.compile(structure.spec).guide(TOKENIZER.eos_ids)


class RandomText:
    """A text of random tokens."""

    def __init__(self, guide: Any) -> None:
        self.guide, self._draw = guide, random.Random(1)

    def write(self, count: int) -> str:
        """Write so many tokens, or up to a problem, which is returned."""
        mask = np.zeros(mask_words(VOCAB), np.int32)
        for _ in range(count):
            if problem := self.guide.fill(mask):
                return str(problem)
            tokens = sorted(allowed_in(mask) - set(TOKENIZER.eos_ids))
            report = self.guide.consume(self._draw.choice(tokens))
            assert report.ended == bool(report.problem)
            if report.problem:
                return str(report.problem)
        return ""


@pytest.fixture
def measures_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure an automaton at each token, not after so many seconds of a processor."""
    monkeypatch.setattr(automata, "PACE", -1.0)
    monkeypatch.setattr(automata, "SHARE", 0)


def test_a_grammar_with_all_its_states_fails_no_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are those of all texts that ever followed it, and a text that needs a further one fails."""
    few = 2_000
    monkeypatch.setattr(automata, "LARGE", automata.LARGE * few // compile_worker.MOST_STATES)
    monkeypatch.setattr(compile_worker, "MOST_STATES", few)
    made = Grammars(TOKENIZER, VOCAB)
    assert RandomText(guide(made, regex=GROWING)).write(400)
    assert not RandomText(guide(made, regex=GROWING)).write(50)
    assert made.compiled == 2


@pytest.mark.usefixtures("measures_always")
def test_a_large_automaton_is_kept_for_no_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automata, "LARGE", 4 << 20)
    made = Grammars(TOKENIZER, VOCAB)
    text = RandomText(guide(made, regex=GROWING))
    small = made.kept_bytes
    assert not text.write(30) and small <= made.kept_bytes < 4 << 20, "it is kept, and its growth counted"
    assert not text.write(170) and not made.kept_bytes, "texts that follow it go on"
    assert made.automata.nbytes > 4 << 20, "and it counts until they have ended"
    del text
    assert made.automata.nbytes == 0
    assert not RandomText(guide(made, regex=GROWING)).write(5) and made.compiled == 2


@pytest.mark.usefixtures("measures_always")
def test_automata_have_one_bound_and_the_largest_one_s_text_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 12 << 20
    monkeypatch.setattr(grammars_module, "MOST_BYTES", most)
    made = Grammars(TOKENIZER, VOCAB)
    neighbour = RandomText(guide(made, schema={"type": "array", "items": {"type": "string"}, "minItems": 1_000}))
    growing = {number: RandomText(guide(made, regex=f"{GROWING}{'b' * number}")) for number in range(4)}
    problems: list[str] = []
    while len(problems) < 2:
        for number, text in [*growing.items()]:
            before = {other: one.guide.automaton.nbytes for other, one in growing.items()}
            if problem := text.write(2):
                assert before[number] > 0.9 * max(before.values()), "of several a large one's text fails"
                problems.append(problem)
                del growing[number]
            del text
        assert not neighbour.write(1)
        assert made.automata.nbytes <= most
    assert growing
    assert all("MiB, and the grammars of all running requests may take 12 MiB" in problem for problem in problems)


@pytest.mark.usefixtures("measures_always")
def test_texts_that_fail_and_are_not_read_count_up_to_twice_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An automaton whose texts fail next counts no more, but is there until they are read."""
    most = 4 << 20
    monkeypatch.setattr(grammars_module, "MOST_BYTES", most)
    made = Grammars(TOKENIZER, VOCAB)
    unread = []
    for number in range(8):
        text = RandomText(guide(made, regex=f"{GROWING}{'b' * number}"))
        text.write(150)
        unread.append(text)
    accounts = [text.guide.automaton for text in unread]
    assert all(account.problem for account in accounts[2:])
    assert sum(account.nbytes for account in accounts) <= 2 * most + len(accounts) * (1 << 20)


@pytest.mark.usefixtures("measures_always")
def test_rows_of_an_ambiguous_grammar_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose regexes are small, and whose texts can be read in many ways."""
    monkeypatch.setattr(grammars_module, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(grammars_module, "MOST_BYTES_A_REQUEST", 0)
    made = Grammars(TOKENIZER, VOCAB)
    text = RandomText(guide(made, grammar="start: s\ns: s s | /./"))
    assert "may take 1 MiB" in text.write(100)
    assert text.guide.automaton.nbytes < 1 << 19


def test_a_copy_s_rows_are_its_own() -> None:
    made = Grammars(TOKENIZER, VOCAB)
    one = guide(made, regex=GROWING)
    other = one.copy()
    assert other.automaton is one.automaton and other.rows is not one.rows


def test_more_requests_may_take_more() -> None:
    assert Grammars(TOKENIZER, VOCAB, 16).automata.most == 256 << 20
    assert Grammars(TOKENIZER, VOCAB, 256).automata.most == 1024 << 20
