"""Capabilities: a new one is one class, what several find wrong is told in their order, and records name none."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from helpers.fakes import EOS
from helpers.sessions import client_of, fake_front, opened, submission
from rekindle import Session
from rekindle._src import capabilities
from rekindle._src.capabilities import capabilities_of
from rekindle._src.capabilities.adapters.request import AdapterIntake, AdapterUse
from rekindle._src.capabilities.entry import CapabilityEntry
from rekindle._src.core.extension import Extension
from rekindle._src.core.records import Request, Row, RowResult, TokenEvent
from rekindle._src.core.report import Report
from rekindle._src.dispatch import intake
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Fields, KeyedPrompt, Part, SequenceEnd
from rekindle._src.dispatch.threads import OneShot
from rekindle._src.kvcache import PrefixCache
from rekindle._src.scheduling.followers import FollowedExtension, Follower
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

COUNTS: Report[int] = Report("counts")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Counted(FollowedExtension):
    """Its tokens are counted, from a number on."""

    first: int
    again: bool = False  # of another sequence of the prompt

    @property
    def altered(self) -> tuple[str, ...]:
        return ("counted",)

    def follower(self, request: Request, cache: PrefixCache | None) -> Follower:
        return Counter(self)

    def another(self) -> Counted:
        return Counted(self.first, again=True)


class Counter(Follower):
    __slots__ = ("_count",)

    def __init__(self, counted: Counted) -> None:
        self._count = counted.first

    def take(self, row: Row, output: RowResult) -> RowResult:
        self._count += output.token_id is not None
        return output.reporting(COUNTS, self._count)


class CountedOutput(Part):
    def __init__(self, counted: Counted) -> None:
        self.counted, self.counts = counted, list[int]()
        self.wait: OneShot[int] = OneShot()

    def take(self, event: TokenEvent) -> None:
        self.counts += COUNTS.of(event)

    def ending(self, count: int) -> OneShot[int]:
        self.wait.put(100 * self.counted.again)
        return self.wait

    def take_over(self, value: int) -> None:
        self.counts.append(value)

    def completion(self, end: SequenceEnd) -> Fields:
        return {"covered": sum(self.counts[-2:])}


class Counting(Capability):
    """A capability that only this file knows: it takes part in requests with a bias of token 7."""

    async def resource(self, submission: Submission, front: Front) -> int:
        return 1000

    def admit(self, submission: Submission, token_ids: Any, front: Front, resource: int) -> Counted | None:
        bias = submission.sampling.logit_bias.get(7)
        if bias is None:
            return None
        if bias < 0:
            raise InvalidRequest("logit_bias", bias, "counts down", "Count up")
        return Counted(resource + int(bias))

    def keying(self, prompt: KeyedPrompt, front: Front) -> Counted | None:
        return Counted(0) if 7 in prompt.sampling.logit_bias else None

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        counted = request.extensions.get(Counted)
        return None if counted is None else CountedOutput(counted)


class CountingEntry(CapabilityEntry):
    def intake(self) -> Sequence[Capability]:
        return (Counting(),)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr(capabilities, "ENTRIES", (*capabilities.ENTRIES, CountingEntry()))
    with opened() as fake:
        yield fake


def test_a_new_capability_is_one_class_and_what_it_names(session: Session) -> None:
    prompt = list(range(40, 60))
    plain = session.generate_sync(prompt, max_tokens=4)
    assert plain.covered == 0
    many = session.generate_sync(prompt, max_tokens=4, logit_bias={7: 20}, logprobs=1, n=3)
    assert [done.covered for done in many] == [1024, 1124, 1124], "the last count, and what the completion waited for"
    assert all(done.logprobs is not None and len(done.logprobs) == 4 for done in many)
    assert many[0].usage.cached_tokens == 0, "its pages are others than those of plain requests"
    again = session.generate_sync(prompt, max_tokens=4, logit_bias={7: 20})
    assert again.usage.cached_tokens > 0
    with pytest.raises(InvalidRequest, match="counts down"):
        session.generate_sync(prompt, logit_bias={7: -1})
    size = session.config.page_size
    assert size is not None
    pages = len(prompt) // size * size
    assert client_of(session).pin(prompt, logit_bias={7: 20}) == pages, "its pages are named by the same options"
    assert client_of(session).unpin(prompt, logit_bias={7: 20}) == pages


WRONG: dict[str, dict[str, Any]] = {  # in the order in which they are told
    "stop_token_ids": {"stop_token_ids": (999,)},
    "logit_bias": {"logit_bias": {999: 1.0}},
    "logprob_token_ids": {"logprob_token_ids": (999,)},
    "allowed_token_ids": {"allowed_token_ids": (999,)},
    "processors": {"processors": ("p",)},
    "adapter": {"adapter": "a"},
    "capture": {"capture": {"residual": "all"}},
    "priority": {"priority": 1},
    "bad_words": {"bad_words": ("x",)},  # without a tokenizer
}


@pytest.mark.parametrize("place", range(-1, len(WRONG)))
def test_the_first_that_is_wrong_is_told(place: int) -> None:
    fields = ["prompt", *WRONG]
    options: dict[str, Any] = {}
    for field in fields[max(1, place + 1) :]:
        options |= WRONG[field]
    ids = np.array([EOS + 5] if place < 0 else [1], np.int32)
    front = fake_front()._replace(tokenizer=Tokenizer(None, eos_ids=(EOS,)))
    with pytest.raises(InvalidRequest) as caught:
        intake.prepare(submission(**options), ids, front, random.Random(0), capabilities_of())
    assert caught.value.field == fields[place + 1]


def test_capabilities_that_change_pages_say_so_for_a_prompt_alone() -> None:
    """`session.pin` and its like find the pages of a request with the same options: its namespace and token names."""
    changing = [one for one in capabilities_of().entries if changes_pages(type(one))]
    assert [type(one).__name__ for one in changing] == ["AdapterIntake", "PictureIntake", "TapIntake"]
    assert all(type(one).keying is not Capability.keying for one in changing)


def changes_pages(capability: type[Capability]) -> bool:
    """True if requests carry something of it on which pages depend."""
    carried = AdapterUse if capability is AdapterIntake else get_type_hints(capability.admit)["return"]
    kinds = [kind for kind in get_args(carried) or (carried,) if kind not in (type(None), Extension)]
    return any(kind.altered is not Extension.altered or kind.names is not Extension.names for kind in kinds)


def test_records_have_no_field_of_a_capability() -> None:
    """Records have no field of a capability: it uses an extension of the request, or a report of the row."""
    assert [field.name for field in dataclasses.fields(Request)] == [
        "id", "token_ids", "sampling", "stop_ids", "eos_ids", "arrival", "group", "index", "resumed", "caller",
        "messages", "extensions",
    ]  # fmt: skip
    assert RowResult._fields == ("request_id", "epoch", "token_id", "reports", "error", "finite")
    assert TokenEvent._fields == (
        "request_id", "token_ids", "reports", "cached_tokens", "finish_reason", "error", "weights_version",
    )  # fmt: skip
    assert Submission._fields == (
        "id", "text", "token_ids", "add_special_tokens", "sampling", "mailbox", "arrival", "render", "extensions",
        "messages", "long", "caller",
    )  # fmt: skip
