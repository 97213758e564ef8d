"""Extensions of a request together, and reports of events that are merged."""

from __future__ import annotations

import pickle

from rekindle._src.capabilities.captures.tapped import RequestTaps
from rekindle._src.capabilities.pooling.request import PromptPooling
from rekindle._src.capabilities.scores.request import PromptScoring
from rekindle._src.core.captured import Backlog
from rekindle._src.core.extension import NONE, Extensions
from rekindle._src.core.records import RowResult, TokenEvent, TokenLogprobs
from rekindle._src.core.report import NO_REPORTS
from rekindle._src.core.report_kinds import LOGPROBS, PROMPT_LOGPROBS


def test_their_answers_are_those_of_all() -> None:
    assert not NONE and NONE.generates and not NONE.holding and NONE.reusable(7) == 7
    tapped = RequestTaps(keys=("norm",), wanted=((5, 9),), digest="d", backlog=Backlog(1))
    both = Extensions(PromptScoring(3), tapped)
    assert both.get(RequestTaps) is tapped and PromptPooling not in both
    assert both.altered == ("steer-d",) and both.generates and both.by_position
    assert both.reusable(20) == 3 and both.reusable(2) == 2
    assert both.holding == (tapped,) and not tapped.held
    embedded = both.plus(PromptPooling("last"))
    assert not embedded.generates and both.generates and embedded.reusable(2) == 1
    other = both.plus(RequestTaps(digest="e"))
    assert other.altered == ("steer-e",) and list(other) == list(both), "it replaces the one of its class"


def test_another_sequence_shares_what_does_not_change() -> None:
    scored, tapped = PromptScoring(3), RequestTaps(backlog=Backlog(1))
    other = Extensions(scored, tapped).another()
    assert other.get(PromptScoring) is scored
    assert other[RequestTaps].backlog is not None and other[RequestTaps].backlog is not tapped.backlog
    assert NONE.another() is NONE


def test_reports_of_merged_events_follow_each_other_and_can_be_sent() -> None:
    first, second = (TokenLogprobs(token, -1.0) for token in (1, 2))
    result = RowResult("r", 0, 1, {PROMPT_LOGPROBS.name: (first, second)}).reporting(LOGPROBS, first)
    one = result.reporting(PROMPT_LOGPROBS).event(0)
    assert LOGPROBS.of(one) == (first,) and PROMPT_LOGPROBS.of(one) == ()
    assert not RowResult("r", 0, None).delivers and result.delivers
    whole = one.merged_with(TokenEvent("r", (5,))).merged_with(TokenEvent("r", (6,), {LOGPROBS.name: (second,)}))
    assert LOGPROBS.of(whole) == (first, second) and whole.token_ids == (1, 5, 6)
    for event in (whole, TokenEvent("r")):
        assert pickle.loads(pickle.dumps(event)) == event
    assert NO_REPORTS == {}
