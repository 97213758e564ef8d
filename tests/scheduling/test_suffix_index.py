"""The index of a session's texts proposes what a search through all of them would find, within its bytes."""

from __future__ import annotations

import itertools
import sys
import time
from array import array

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from helpers.fakes import FakeModel, make_request
from helpers.scheduling import Loop, LoopBuilder, exact
from rekindle._src.core.prefix import SHARED, PageNamespace
from rekindle._src.core.records import Request
from rekindle._src.drafts.repeats import SIZE, RepeatChances
from rekindle._src.drafts.suffix import DEPTH, PastLookup, SuffixDrafter, SuffixIndex, mixed_in

ROOTS = (None, "one tenant", "another")


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


class Search:
    """Every text as a list, and every run of tokens in the order in which it came to an end."""

    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self.texts: dict[int, tuple[str | None, list[int]]] = {}
        self.runs: list[tuple[int, int, int]] = []  # entry of the table, text, end

    def add(self, number: int, token: int) -> None:
        root, tokens = self.texts[number]
        tokens.append(token)
        if len(tokens) >= SIZE:
            self.runs.append((self.entry(root, tokens), number, len(tokens)))

    def entry(self, root: str | None, tokens: list[int]) -> int:
        key = 0
        for token in tokens[-SIZE:]:
            key = key << 20 | token
        return self.index.entry(key & ((1 << 60) - 1), mixed_in(PageNamespace(root)))

    def latest(self, number: int) -> tuple[int, int] | None:
        """The text and place after the latest run that shares the entry, if it is this very run and something follows
        it, or would if the text repeated itself."""
        root, tokens = self.texts[number]
        if len(tokens) < SIZE:
            return None
        entry = self.entry(root, tokens)
        before = [run for run in self.runs[:-1] if run[0] == entry]
        if not before:
            return None
        _, other, end = before[-1]
        other_root, earlier = self.texts[other]
        if other_root != root or earlier[end - SIZE : end] != tokens[-SIZE:]:
            return None
        return (other, end) if end < len(earlier) else None


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.sampled_from(ROOTS), st.lists(st.integers(0, 3), min_size=1, max_size=30)), min_size=1, max_size=5
    ),
    outputs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=80),
    entries=st.sampled_from([64, 4096]),
)
@example([(None, [0]), ("one tenant", [0]), ("one tenant", [1, 2, 1, 0])], [(1, 1), (1, 2), (1, 1)], 64)
def test_it_finds_what_a_search_finds(
    prompts: list[tuple[str | None, list[int]]], outputs: list[tuple[int, int]], entries: int
) -> None:
    """Texts of several roots grow by turns. With few entries, runs displace each other."""
    index = SuffixIndex(16 * entries)
    search, chances, lookups = Search(index), RepeatChances(), list[PastLookup]()
    followed: dict[int, tuple[int, int] | None] = {}
    for row, (root, prompt) in enumerate(prompts):
        text = index.begin(PageNamespace(root), ids(prompt))
        search.texts[text.number] = root, []
        for token in prompt:
            search.add(text.number, token)
        lookups.append(PastLookup(chances, index, text))
        followed[row] = search.latest(text.number)
        check(lookups[row], search, followed[row])
    for which, token in outputs:
        lookup = lookups[(row := which % len(lookups))]
        number, source = lookup.text.number, followed[row]
        lookup.push(token)
        search.add(number, token)
        if source is not None and search.texts[source[0]][1][source[1] : source[1] + 1] == [token]:
            followed[row] = source[0], source[1] + 1
        else:
            followed[row] = search.latest(number)
        check(lookup, search, followed[row])


def check(lookup: PastLookup, search: Search, source: tuple[int, int] | None) -> None:
    proposal = lookup.propose(0, 5)
    assert (lookup.source is None) == (source is None)
    if source is None:
        assert proposal is None
        return
    _, earlier = search.texts[source[0]]
    own = search.texts[lookup.text.number][1]
    after = earlier[source[1] :]
    if earlier is own:
        after = after * 5
    assert (list(proposal.tokens) if proposal else []) == after[:5]
    assert earlier[source[1] - SIZE : source[1]] == own[-SIZE:]


def test_how_far_a_text_is_the_same_counts() -> None:
    index = SuffixIndex()
    past = list(range(100, 140))
    index.end(index.begin(SHARED, ids(past)))
    lookup = PastLookup(RepeatChances(), index, index.begin(SHARED, ids([7, *past[3:9]])))
    lookup.push(past[9])
    assert lookup.length == 7 - SIZE
    for token in past[10:35]:
        lookup.push(token)
    assert lookup.length == 7 - SIZE + 25
    deep = PastLookup(RepeatChances(), index, index.begin(SHARED, ids(past[:30])))
    assert deep.length == DEPTH - SIZE, "no more are compared"


def test_pictures_are_neither_looked_up_nor_proposed() -> None:
    """All pictures have the same tokens, which stand as -1 here; pages with one are named by numbers below that."""
    index, names = SuffixIndex(), [-70_000, -3, -900]
    index.end(index.begin(SHARED, ids([1, 2, 3, 4, -1, -1, -1, 50, 51, 52, 53, 54])))
    index.end(index.begin(SHARED, ids([11, 12, 13, 14, *names, 21, 22, 23, 24])))
    for prompt, token, expected in (
        ([1, 2], 3, [4]),
        ([-1, -1], 50, None),
        ([-1, -1, -1], 50, None),
        ([-1, 50, 51], 52, [53, 54]),
        ([11, 12], 13, [14]),
        ([12, 13], 14, None),
        ([*names[1:]], 21, None),
    ):
        lookup = PastLookup(RepeatChances(), index, index.begin(SHARED, ids([900, *prompt])))
        lookup.push(token)
        proposal = lookup.propose(0, 5)
        assert (None if proposal is None else list(proposal.tokens)) == expected, prompt
    again = index.begin(SHARED, ids([1, 2, 3, 4, -1, -1, -1, 50, 51, 52, 53, 54] * 4), known=48)
    assert len(again.tokens) == 48 and again.place > 0


def test_no_text_is_seen_from_another_root() -> None:
    index = SuffixIndex()
    secret = list(range(50, 90))
    index.end(index.begin(PageNamespace("a tenant"), ids(secret)))
    for root, sees in ((None, False), ("another", False), ("a tenant", True)):
        lookup = PastLookup(RepeatChances(), index, index.begin(PageNamespace(root), ids(secret[:10])))
        lookup.push(secret[10])
        assert (lookup.propose(0, 3) is not None) == sees, root
    index.end(index.begin(PageNamespace("\ud800"), ids(secret)))  # a salt that UTF-8 can't hold


def test_the_oldest_texts_leave_when_the_bytes_are_full() -> None:
    most = 1 << 16
    index = SuffixIndex(most)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 1 << 20, 200) for _ in range(400)]
    for tokens in texts:
        index.end(index.begin(SHARED, tokens.astype(np.int32)))
        assert index.bytes <= most
    kept = sum(sys.getsizeof(text.tokens) for text in index.ended.values()) + index.table.nbytes
    assert most // 2 < kept <= most
    oldest, latest = index.begin(SHARED, ids(texts[0][:9].tolist())), index.begin(SHARED, ids(texts[-1][:9].tolist()))
    lookups = [PastLookup(RepeatChances(), index, text) for text in (oldest, latest)]
    for lookup, tokens in zip(lookups, (texts[0], texts[-1]), strict=True):
        lookup.push(int(tokens[9]))
    assert [lookup.length >= 0 for lookup in lookups] == [False, True]


def test_a_text_of_use_outlives_others() -> None:
    index = SuffixIndex(1 << 16)
    rng = np.random.default_rng(2)
    used = rng.integers(0, 1 << 20, 200).astype(np.int32)
    first = index.begin(SHARED, used)
    index.end(first)
    for _ in range(200):
        index.end(index.begin(SHARED, rng.integers(0, 1 << 20, 200).astype(np.int32)))
        index.used(first)
    assert first.number in index.ended


def test_a_prompt_that_the_index_has_is_not_added_again() -> None:
    index = SuffixIndex()
    shared = list(range(1000, 3000))
    index.end(index.begin(SHARED, ids([*shared, 1, 2, 3, 4])))
    before = index.bytes
    for turn in range(50):
        index.end(index.begin(SHARED, ids([*shared, 10 + turn, 2, 3, 4]), known=len(shared)))
    assert index.bytes - before < 50 * 1000, "each adds what is new, and no more than that"
    lookup = PastLookup(RepeatChances(), index, index.begin(SHARED, ids([*shared, 99]), known=len(shared)))
    for token in shared[500:504]:
        lookup.push(token)
    proposal = lookup.propose(0, 3)
    assert proposal is not None and list(proposal.tokens) == shared[504:507]
    strange = index.begin(PageNamespace("another"), ids([*shared, 99]), known=len(shared))
    assert len(strange.tokens) == 2001, "what the pages of another root hold, this root's texts don't"


def test_a_cleared_index_knows_nothing_and_goes_on() -> None:
    index = SuffixIndex()
    past = list(range(100, 140))
    live = PastLookup(RepeatChances(), index, index.begin(SHARED, ids(past)))
    index.clear()
    lookup = PastLookup(RepeatChances(), index, index.begin(SHARED, ids(past[:9])))
    lookup.push(past[9])
    assert lookup.propose(0, 3) is None
    live.push(1)
    index.end(live.text)
    assert index.bytes == index.table.nbytes


@pytest.mark.clock
@pytest.mark.parametrize("kind", ["new", "repeated", "periodic"])
def test_a_token_costs_as_much_in_a_long_text(kind: str) -> None:
    def tokens(count: int) -> list[int]:
        return {
            "new": list(range(count)),
            "repeated": list(itertools.islice(itertools.cycle([*range(50), 7, 7, 7]), count)),
            "periodic": [1, 2] * (count // 2),
        }[kind]

    def seconds(count: int) -> float:
        index = SuffixIndex()
        lookup = PastLookup(RepeatChances(), index, index.begin(SHARED, ids(tokens(100))))
        start = time.process_time()
        for token in tokens(count):
            lookup.push(token)
        return time.process_time() - start

    seconds(1000)
    ratios = [seconds(16_000) / max(1e-6, seconds(4_000)) for _ in range(3)]
    assert min(ratios) < 8, ratios


NEW = FakeModel(alphabet=tuple(range(32, 127)))  # its texts repeat nothing


def runs(first: Request) -> Loop:
    loop = LoopBuilder(model=NEW, max_tokens_per_step=64).drafts(source="suffix").loop()
    loop.submit(first)
    loop.run()
    return loop


def test_a_text_that_an_earlier_request_made_takes_fewer_steps() -> None:
    """Nothing repeats within it: only the session's past helps."""
    prompt, options = "another text, which ", {"max_tokens": 60, "eos_ids": ()}
    loop = runs(make_request(prompt, id="first", **options))
    before = loop.scheduler.statistics().steps
    again = make_request(prompt, id="again", **options)
    loop.submit(again)
    loop.run()
    exact(loop, again)
    assert loop.scheduler.statistics().steps - before < 0.5 * before
    counts = loop.scheduler.statistics().drafters["suffix"]
    assert counts.accepted > 30
    explained = str(loop.scheduler.explain("again"))
    assert "drafts of earlier texts were accepted" in explained


def test_texts_of_a_full_batch_are_known_to_later_requests() -> None:
    options = {"max_tokens": 60, "eos_ids": ()}
    prompts = [f"{index} of several texts, which " for index in range(4)]
    loop = LoopBuilder(model=NEW, max_tokens_per_step=256, max_requests=4).drafts(source="suffix").loop()
    for prompt in prompts:
        loop.submit(make_request(prompt, **options))
    loop.run()
    before = loop.scheduler.statistics()
    assert before.drafted_tokens == 0, "there is no room"
    again = make_request(prompts[1], **options)
    loop.submit(again)
    loop.run()
    exact(loop, again)
    assert loop.scheduler.statistics().accepted_tokens > 30


def test_requests_with_another_salt_have_nothing_of_it() -> None:
    prompt, options = "another text, which ", {"max_tokens": 60, "eos_ids": ()}
    loop = runs(make_request(prompt, id="first", salt="mine", **options))
    steps, drafted = [], []
    for salt in ("mine", "other", None):
        before = loop.scheduler.statistics()
        again = make_request(prompt, id=f"again {salt}", salt=salt, **options)
        loop.submit(again)
        loop.run()
        exact(loop, again)
        after = loop.scheduler.statistics()
        steps.append(after.steps - before.steps)
        drafted.append(after.drafted_tokens - before.drafted_tokens)
    fresh = runs(make_request(prompt, id="alone", **options)).scheduler.statistics()
    assert steps[0] < 0.6 * steps[1]
    assert steps[1:] == [fresh.steps] * 2 and drafted[1:] == [fresh.drafted_tokens] * 2


def test_clearing_the_cache_forgets_texts() -> None:
    prompt, options = "another text, which ", {"max_tokens": 60, "eos_ids": ()}
    loop = runs(make_request(prompt, id="first", **options))
    first = loop.scheduler.statistics()
    loop.scheduler.flush_cache()
    loop.submit(make_request(prompt, id="again", **options))
    loop.run()
    assert loop.scheduler.statistics().steps == 2 * first.steps


def test_the_texts_of_requests_that_ended_are_no_longer_live() -> None:
    drafter = SuffixDrafter()
    loop = (
        LoopBuilder(model=NEW, max_requests=4, pages=40, page_size=4).drafts(source="suffix", drafters=[drafter]).loop()
    )
    requests = [make_request(f"{index} and some text, ", max_tokens=30) for index in range(9)]
    for request in requests:
        loop.submit(request)
    for _ in range(20):
        loop.step()
    loop.take(loop.scheduler.abort(requests[0].id))
    loop.run()
    exact(loop, *requests[1:])
    assert not drafter.index.live
    assert all(isinstance(text.tokens, array) for text in drafter.index.ended.values())
