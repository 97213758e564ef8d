"""Patterns of a stranger's file match as Python's do, in pieces as well, in steps that grow with the text."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.text.replies.patterns import Pattern, PatternError, PatternSearch

PATTERNS = (
    r"\n?</response>", r"<\|channel\|>to=functions\.(?P<name>\w+).*?<\|message\|>", r"<call>\s*<f=(?P<name>\w+)>",
    r"(?:<\|m\|>)?[^<]*<\|c\|>", r"<p=(?P<key>\w+)>\s*(?P<value>.*?)\s*</p>", r"a{2,3}b?", r"(a|ab)(c|bcd)*",
    r"[^a-c\]]+x", r"a*?b|c+", r"(?P<x>a+)(?P<y>a*)", r"\w+\d{2}", r"[\w.-]+:", r"a{,2}b", r"^a|b", r"[a\-z]\S\W\D",
)  # fmt: skip
PIECES = (
    *"abcx12 <>|/=pf.:-]\n", "</response>", "<|channel|>to=functions.f", "<|message|>", "<call>", "<f=g>", "<|m|>",
    "<|c|>", "<p=k>", "</p>", "aab", "abcd",
)  # fmt: skip


@given(
    pattern=st.sampled_from(PATTERNS),
    text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_matches_are_those_of_python(pattern: str, text: str, cuts: list[int]) -> None:
    read = Pattern.parse(pattern)
    expected = [(match.start(), match.end(), match.groupdict()) for match in re.finditer(pattern, text, re.DOTALL)]
    found = []
    for match in read.finditer(text, 10**6):
        groups = {name: text[start:end] for name, start, end in match.groups}
        found.append((match.start, match.end, {name: groups.get(name) for name in read.names}))
    assert found == expected
    search = PatternSearch(read, 0)
    for start, end in itertools.pairwise(sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})):
        search.feed(text[:end], 0, ended=False, limit=10**6)
        assert search.decided or search.pending <= end, start
    search.feed(text, 0, ended=True, limit=10**6)
    assert (search.match and (search.match.start, search.match.end)) == (expected[0][:2] if expected else None)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?=a)", "an assertion or a flag"), ("(?<!a)b", "an assertion or a flag"), ("(?i)a", "an assertion or a flag"),
        (r"(a)\1", "not read"), (r"\bx", "not read"), ("a**", "a repetition of a"), ("a*+", "a repetition of"),
        ("a{1000}", "counts nothing"), ("[", "does not close"), ("(a", "does not close"), ("a)", "too many"),
        ("*", "nothing before it"), ("x" * 2000, "2,000 characters"), ("(?:a{200}){200}", "256 steps"),
        ("(((((){256}){256}){256}){256})", "256 steps"), ("(" * 400, "nested"), ("[z-a]", "a range"),
        ("^*", "repeats an assertion"), (f"[{'a-z' * 33}]", "more than 32 ranges"),
        (rf"[{chr(92)}W{chr(92)}d{'a-z' * 31}]", "more than 32 ranges"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_with_the_reason(pattern: str, problem: str) -> None:
    with pytest.raises(PatternError, match=re.escape(problem)):
        Pattern.parse(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a*)*b", "a"), ("(a|a)*b", "a"), (r"(?:\w+\s*)*:", "ab "), (r"<p=(?P<key>\w+)>(?P<value>.*?)</p>", "<p=a>"),
        ("(?:a?){64}a{64}", "a"), (".*.*.*x", "ab"),
    ],
)  # fmt: skip
def test_steps_grow_with_the_text_and_no_faster(pattern: str, text: str) -> None:
    read = Pattern.parse(pattern)

    def steps(count: int) -> int:
        search = PatternSearch(read, 0)
        search.feed(text * count, 0, ended=True, limit=256)
        return search.steps

    assert steps(4_000) <= 8.5 * steps(500)
    assert steps(500) <= len(text) * 500 * len(read.program)


def test_a_class_may_have_so_many_ranges() -> None:
    assert Pattern.parse(f"[{'a-z' * 32}_,;]").program


def test_a_search_ends_with_its_budget() -> None:
    """And not with the text: one search may read all of it."""
    read, looks = Pattern.parse("(?:a?){64}b"), list[str]()

    def accepts(character: str) -> bool:
        looks.append(character)
        return character == "a"

    counted = dataclasses.replace(
        read, program=tuple(step._replace(accepts=accepts) if step.accepts else step for step in read.program)
    )
    with pytest.raises(PatternError, match="too many steps"):
        list(counted.finditer("a" * 1_000, 2_000))
    assert 0 < len(looks) <= 2_000 + len(read.program)


def test_a_whole_text_may_take_so_many_steps() -> None:
    with pytest.raises(PatternError, match="too many steps"):
        list(Pattern.parse("(?:a.*)?").finditer("a\n" * 500 + "b", 1_000))
