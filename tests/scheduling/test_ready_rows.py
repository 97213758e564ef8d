"""A row whose program is not ready is in no step, and holds nobody else up; a program that fails, fails its row."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import pytest

from helpers.fakes import EchoModel, make_request
from helpers.scheduling import Loop, LoopBuilder, exact
from rekindle._src.core.records import Request, Status
from rekindle._src.programs.buckets import StepSize
from rekindle._src.scheduling.sequence import Explanation
from rekindle._src.scheduling.timeline import PhaseKind


class Program(NamedTuple):
    """A program of the fake: for rows with these options, and for prompts or not."""

    options: frozenset[str]
    prompts: bool

    @property
    def name(self) -> str:
        return f"{'+'.join(sorted(self.options))}{' with prompts' if self.prompts else ''}"


class Fit(NamedTuple):
    ready: bool
    wanted: tuple[Program, ...] = ()


@dataclasses.dataclass
class Programs:
    """Programs of which none is ready until a test makes it. A row's need is its number of log-probabilities."""

    made: set[Program] = dataclasses.field(default_factory=set)
    errors: dict[Program, Exception] = dataclasses.field(default_factory=dict)
    wanted: tuple[Program, ...] = ()
    rows: int = 0  # the most decode rows of a step that was asked about
    drafting: bool = True
    ahead: bool = True
    most: int = 64  # decode rows of those that are ready

    def need(self, request: Request, start: int, length: int, *, samples: bool, decodes: bool) -> str:
        return "plain" if request.sampling.logprobs is None else f"{request.sampling.logprobs} logprobs"

    def fit(self, needs: frozenset[str], size: StepSize) -> Fit:
        program, self.rows = Program(needs, size.prefills > 0), max(self.rows, size.rows)
        if size.rows > self.most:
            program = Program(needs | {"larger"}, program.prompts)
        return Fit(True) if program in self.made else Fit(False, (program,))

    def drafts(self) -> bool:
        return self.drafting

    def repeats(self, needs: frozenset[str], size: StepSize) -> Fit:
        program = Program(needs | {"repeated"}, False)
        return Fit(True) if program in self.made else Fit(False, (program,))

    def want(self, wanted: tuple[Program, ...]) -> None:
        self.wanted = wanted

    def error(self, wanted: Program) -> Exception | None:
        return self.errors.get(wanted)

    def forget(self, wanted: Program) -> None:
        self.errors.pop(wanted, None)

    def make(self, *needs: str) -> None:
        for prompts in (False, True):
            self.made.add(Program(frozenset(needs), prompts))


def explained(loop: Loop, request: Request) -> Explanation:
    found = loop.scheduler.explain(request.id)
    assert found is not None
    return found


def started(programs: Programs, policy: str = "fcfs") -> tuple[Loop, Request]:
    """A loop in which a plain request streams."""
    programs.make("plain")
    loop = LoopBuilder().steps(programs=programs).queue(policy=policy).loop()
    stream = make_request("a stream", max_tokens=40)
    loop.submit(stream)
    for _ in range(3):
        loop.step()
    return loop, stream


def test_a_stream_has_a_token_in_every_step_while_another_request_waits() -> None:
    programs = Programs()
    loop, stream = started(programs)
    other = make_request("another", max_tokens=5, logprobs=2)
    loop.submit(other)
    for _ in range(10):
        before = len(loop.output(stream))
        assert loop.step()
        assert len(loop.output(stream)) == before + 1
    assert programs.wanted == (Program(frozenset({"plain", "2 logprobs"}), True),)
    assert loop.scheduler.held, "or the engine would take it for a defect where nothing else runs"
    waiting = explained(loop, other)
    assert "waits for program 2 logprobs+plain with prompts, which is being compiled" in waiting.text
    assert waiting.timeline[-1].kind is PhaseKind.COMPILING
    loop.scheduler.check_integrity()

    programs.made |= {programs.wanted[0]}
    for _ in range(4):
        loop.step()
    assert loop.output(other), "its prompt was computed"
    assert programs.wanted == (Program(frozenset({"plain", "2 logprobs"}), False),)
    programs.make("plain", "2 logprobs")
    programs.make("2 logprobs")
    loop.run()
    assert not programs.wanted
    exact(loop, stream, other)
    phases = [phase.kind for phase in explained(loop, other).timeline]
    assert PhaseKind.COMPILING in phases
    assert phases[-1] is PhaseKind.DECODE
    assert all(one is not other for one, other in itertools.pairwise(phases)), "a phase that nothing interrupted is one"


def test_where_nothing_else_runs_the_step_waits_for_its_program() -> None:
    programs = Programs()
    loop = LoopBuilder().steps(programs=programs).loop()
    loop.submit(request := make_request("alone", max_tokens=5, logprobs=2))
    assert loop.step()
    assert not programs.wanted and not loop.scheduler.held
    loop.run()
    exact(loop, request)


def test_further_rows_of_the_same_kind_do_not_wait() -> None:
    """They need a larger program, which the step makes where none are made ahead."""
    programs = Programs(ahead=False)
    loop, stream = started(programs)
    programs.made = {Program(frozenset({"plain"}), False)}  # none with prompts
    loop.submit(other := make_request("another", max_tokens=5))
    loop.step()
    assert explained(loop, other).timeline[-1].kind is PhaseKind.PREFILL
    loop.run()
    exact(loop, stream, other)


def test_a_stream_goes_on_while_a_larger_program_of_its_own_kind_is_made() -> None:
    """Another row with the same needs makes the step larger than every program that is ready."""
    programs = Programs()
    loop, stream = started(programs)
    programs.made = {Program(frozenset({"plain"}), False)}  # none with prompts
    loop.submit(other := make_request("another", max_tokens=5))
    for _ in range(5):
        before = len(loop.output(stream))
        assert loop.step()
        assert len(loop.output(stream)) == before + 1
    assert programs.wanted == (Program(frozenset({"plain"}), True),)
    assert explained(loop, other).timeline[-1].kind is PhaseKind.COMPILING

    programs.make("plain")
    loop.run()
    exact(loop, stream, other)


def test_a_senior_that_comes_later_does_not_stop_a_stream() -> None:
    programs = Programs()
    loop, stream = started(programs, policy="priority")
    programs.make("2 logprobs")  # it could run alone
    other = make_request("another", max_tokens=5, logprobs=2, priority=-10)
    loop.submit(other)
    for _ in range(5):
        before = len(loop.output(stream))
        loop.step()
        assert len(loop.output(stream)) == before + 1
    programs.made.add(Program(frozenset({"plain", "2 logprobs"}), True))
    for _ in range(8):  # its prompt joins; it decodes alone, or not yet
        before = len(loop.output(stream))
        loop.step()
        assert len(loop.output(stream)) == before + 1
    programs.make("plain", "2 logprobs")
    loop.run()
    exact(loop, stream, other)


def test_one_that_fails_alone_is_failed() -> None:
    programs = Programs()
    loop, stream = started(programs)
    broken, fine = (make_request(f"a {count}", max_tokens=5, logprobs=count) for count in (1, 2))
    loop.submit(broken)
    loop.submit(fine)
    loop.step()
    loop.step()
    assert programs.wanted == (Program(frozenset({"plain", "1 logprobs", "2 logprobs"}), True),)
    cause = ValueError("no such operation")
    for needs in ({"plain", "1 logprobs", "2 logprobs"}, {"plain", "1 logprobs"}):
        programs.errors[Program(frozenset(needs), True)] = cause
    loop.step()
    loop.take(*(events.events if (events := loop.engine.events()) else ()))
    error = loop.events[broken.id][-1].error
    assert error is not None and error.__cause__ is cause
    assert "could not be made" in str(error)
    assert loop.scheduler.status(fine.id) is Status.PREFILL
    assert programs.wanted == (Program(frozenset({"plain", "2 logprobs"}), True),)
    programs.make("plain", "2 logprobs")
    programs.make("2 logprobs")
    loop.run()
    exact(loop, stream, fine)

    again = make_request("a 1", max_tokens=5, logprobs=1)  # is tried again
    loop.submit(again)
    loop.run()
    exact(loop, again)


@pytest.mark.parametrize("alone", [False, True])
def test_aborted_while_it_waits(alone: bool) -> None:
    programs = Programs()
    loop, stream = started(programs)
    if alone:
        loop.run()
    other = make_request("another", max_tokens=5, logprobs=2)
    loop.submit(other)
    loop.step()
    loop.take(loop.scheduler.abort(other.id))
    loop.run()
    assert not programs.wanted
    assert not loop.scheduler.held
    exact(loop, stream)


def test_a_step_that_is_to_run_now_has_all_rows() -> None:
    programs = Programs()
    loop, stream = started(programs)
    other = make_request("another", max_tokens=5, logprobs=2)
    loop.submit(other)
    loop.step()
    assert programs.wanted
    plan = loop.scheduler.plan(now=True)
    assert plan is not None
    assert {row.request.id for row in plan.rows} == {stream.id, other.id}
    assert not programs.wanted
    assert not loop.scheduler.held


def test_one_whose_prompt_is_cached_but_for_a_token_waits_once() -> None:
    """Its last token is a decode row: it is among those that decode, and among those that prefill."""
    programs = Programs()
    programs.make("plain")
    loop = LoopBuilder().steps(programs=programs).loop()
    prompt = list(range(17))  # two pages and a token
    loop.submit(first := make_request(prompt, max_tokens=30))
    for _ in range(4):
        loop.step()
    others = [make_request(prompt, max_tokens=3, logprobs=2) for _ in range(2)]
    for request in others:
        loop.submit(request)
    for _ in range(5):
        loop.step()
    assert explained(loop, others[0]).cached_tokens == 16
    assert programs.wanted == (Program(frozenset({"plain", "2 logprobs"}), False),)
    assert programs.rows == 3
    programs.make("plain", "2 logprobs")
    programs.make("2 logprobs")
    loop.run()
    exact(loop, first, *others)


def test_rows_wait_for_their_own_programs_though_the_one_that_they_share_is_ready() -> None:
    programs = Programs()
    loop, stream = started(programs)
    programs.make("plain", "1 logprobs", "2 logprobs")
    requests = [make_request([count] * 9, max_tokens=3, logprobs=count) for count in (1, 2)]
    for request in requests:
        loop.submit(request)
    loop.step()
    assert programs.wanted, "nothing is made, and both wait for ever"
    for count in (1, 2):
        programs.make("plain", f"{count} logprobs")
        programs.make(f"{count} logprobs")
    programs.make("1 logprobs", "2 logprobs")
    loop.run()
    exact(loop, stream, *requests)


def test_rows_that_wait_for_nothing_run() -> None:
    """Whatever the programs say: a step waits for its program then, with all of its rows."""
    programs = Programs()
    programs.fit = lambda needs, size: Fit(False)  # type: ignore[method-assign]
    loop = LoopBuilder().steps(programs=programs).loop()
    programs.make("plain")
    loop.submit(request := make_request([1] * 9, max_tokens=3))
    for _ in range(40):
        loop.step()
    assert not loop.scheduler.has_work
    exact(loop, request)


def repeating(programs: Programs) -> tuple[Loop, Request]:
    """Run the first steps of a text that lookup drafts, while the plainest program is ready."""
    programs.make("plain")
    loop = LoopBuilder(model=EchoModel(surprises=0.0)).steps(programs=programs).drafts(lookup=3).loop()
    loop.submit(stream := make_request("again and again and ", max_tokens=60))
    for _ in range(20):
        loop.step()
    return loop, stream


def test_nothing_is_drafted_before_the_programs_of_drafts_are_ready() -> None:
    programs = Programs(drafting=False)
    loop, stream = repeating(programs)
    assert not any(plan.drafted for plan in loop.runner.plans)
    programs.drafting = True
    loop.run()
    assert any(plan.drafted for plan in loop.runner.plans)
    exact(loop, stream)


@pytest.mark.parametrize("ahead", [True, False])
def test_drafts_make_no_step_larger_than_the_programs_that_are_ready(ahead: bool) -> None:
    """Where none are made ahead, the step makes its program."""
    programs = Programs(most=2, ahead=ahead)
    loop, stream = repeating(programs)
    # The first steps may wait for a program: no stream runs before them.
    largest = max(len(plan.decode) for plan in loop.runner.plans[4:])
    assert largest == 2 if ahead else largest > 2
    assert (Program(frozenset({"plain", "larger"}), False) in programs.wanted) == ahead
    programs.make("plain", "larger")
    loop.run()
    assert max(len(plan.decode) for plan in loop.runner.plans[4:]) > 2
    exact(loop, stream)
