"""A training from its first step to its last, in a thread of its own; the device works for it between two steps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax import Array

from rekindle._src.capabilities.tuning.batches import BatchPlan, MicroBatch, order_of
from rekindle._src.capabilities.tuning.checkpoint import TrainingCheckpoints
from rekindle._src.capabilities.tuning.data import Line, LineMaker, digest_of
from rekindle._src.capabilities.tuning.losses import Floats, Loss, NextToken, Policy, Preference, advantages_of
from rekindle._src.capabilities.tuning.memory import check_room
from rekindle._src.capabilities.tuning.request import TuneOptions
from rekindle._src.capabilities.tuning.trainer import Trainer
from rekindle._src.core.activity import Progress
from rekindle._src.core.drawable import Record
from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.threads import OneShot
from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.models.base import LoadedModel
from rekindle.errors import InvalidRequest, RekindleError, RequestFailed

T = TypeVar("T")
log = logging.getLogger("rekindle.tuning")
SLICE = 0.1  # seconds of the device at a time; a program that has begun ends
_WARMUP = 0.1  # of the steps
_MOST_FAILURES = 3  # steps in a row without a finite gradient


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TuningStep(Record):
    """One step of a training."""

    step: int  # 1 is the first
    loss: float
    learning_rate: float
    tokens: int  # learned
    seconds: float
    norm: float  # of the gradient, before it is limited
    reward: float | None = None  # the mean of the completions'
    difference: float | None = None  # the largest of a drawn token's log-probability and the training's

    _seconds = ("seconds",)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TuningProbe(Record):
    """The greedy text of the adapter after some steps."""

    step: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TuningReport(Record):
    """The result of a training."""

    name: str
    steps: int  # that were taken
    cancelled: bool
    loss: float  # of the last step; NaN without one
    tokens: int  # learned
    seconds: float
    longest_pause: float  # seconds of the device that other requests waited for at a time
    resumed_at: int = 0  # steps that were taken before a kernel was restarted

    _seconds = ("seconds", "longest_pause")


class DrawnCompletion(NamedTuple):
    """A completion of a prompt by the policy that is trained."""

    ids: IntArray
    logprobs: Floats
    text: str


class Slice(NamedTuple):
    """A slice of the device's time."""

    done: bool  # the work has come to its end
    seconds: float


class TuningRoom(NamedTuple):
    """The parts of an open session that a training uses. All of them block its thread."""

    exclusive: Callable[
        [Callable[[], Slice]], Slice
    ]  # calls a function on the device thread, while no step is in flight
    model: Callable[[], LoadedModel]  # raises while the session sleeps
    busy: Callable[[], bool]  # True while requests run
    put: Callable[[Adapter], None]  # gives an adapter its name in the session
    complete: Callable[[str], str]  # a probe's text
    draw: Callable[[Sequence[IntArray], int], list[list[DrawnCompletion]]]  # of prompts; with the number of the step
    closed: threading.Event


class TrainingStopped(Exception):
    """The training was cancelled, or its session closed."""


class _StepProgress(NamedTuple):
    done: int
    total: int
    loss: float

    def __str__(self) -> str:
        return f"step {self.done} of {self.total}, loss {self.loss:.3f}"


class TrainingRun:
    """A training that has been started. Its properties may be read in any thread."""

    def __init__(
        self,
        name: str,
        data: object,
        options: TuneOptions,
        maker: LineMaker,
        trainer: Trainer,
        plan: BatchPlan,
        room: TuningRoom,
        checkpoints: Callable[[str], TrainingCheckpoints],
        *,
        quiet: bool,
    ) -> None:
        self.name, self.options = name, options
        self._data, self._maker, self._trainer, self._plan, self._room = data, maker, trainer, plan, room
        self._checkpoints, self._bar = checkpoints, Progress(f"tuning {name}", quiet=quiet)
        self.ended: OneShot[TuningReport] = OneShot()
        self.history: tuple[TuningStep, ...] = ()
        self.probes: tuple[TuningProbe, ...] = ()
        self.resumed_at = 0
        self.longest_pause = 0.0
        self._stop = threading.Event()
        self._references: dict[int, Floats] = {}
        self._fingerprint = ""

    def start(self) -> None:
        """Start its thread."""
        threading.Thread(target=self.ended.run, args=(self._work,), name="rekindle tuning", daemon=True).start()

    def cancel(self) -> None:
        """End it soon. Its last whole step stays."""
        self._stop.set()

    @property
    def cancelled(self) -> bool:
        """True once it is to end before its last step."""
        return self._stop.is_set() or self._room.closed.is_set()

    # The whole of it.

    def _work(self) -> TuningReport:
        start = time.perf_counter()
        try:
            lines, prompts = self._lines()
            model = self._room.model()
            self._fingerprint = model.fingerprint
            self._trainer.prepare_update()
            kept = self._checkpoints(digest_of(lines))
            self._begin(kept)
            try:
                self._steps(lines, prompts, kept)
            except TrainingStopped:
                self._keep(kept)
            else:
                kept.remove()
            done = self.history[-1] if self.history else None
            return TuningReport(
                self.name,
                len(self.history),
                len(self.history) < self.options.steps,
                math.nan if done is None else done.loss,
                sum(one.tokens for one in self.history),
                time.perf_counter() - start,
                self.longest_pause,
                self.resumed_at,
            )
        finally:
            self._trainer.end()
            self._data = None

    def _lines(self) -> tuple[list[Line], list[tuple[object, list[int]]]]:
        """Return the lines of the training, and the prompts of completions that are drawn."""
        match self.options.loss:
            case "next":
                return self._maker.next_tokens(self._data), []
            case "grpo":
                prompts = self._maker.prompts(self._data)
                return [Line(np.asarray(ids, np.int32), np.zeros(len(ids), np.bool_)) for _, ids in prompts], prompts
            case _:
                return self._maker.preferences(self._data), []

    def _begin(self, kept: TrainingCheckpoints) -> None:
        found = kept.load()
        state = None
        if found is not None and self._trainer.fits(found.state):
            with contextlib.suppress(TypeError):
                self.history = tuple(TuningStep(*record) for record in found.records)
                state = found.state
                self.resumed_at = len(self.history)
                log.info("tuning %s goes on after step %d of %d", self.name, self.resumed_at, self.options.steps)
        self._trainer.begin(state, self.options.seed)

    def _steps(self, lines: list[Line], prompts: list[tuple[object, list[int]]], kept: TrainingCheckpoints) -> None:
        options, unit = self.options, self._plan.unit
        drawn = options.max_tokens if options.loss == "grpo" else 0
        shape = self._plan.shape(max(len(line.ids) for line in lines) + drawn)
        check_room(self._trainer.need(shape), shape)
        count = len(lines) // unit
        order = order_of(count, min(options.batch, count), options.seed)
        failures = 0
        if options.loss == "grpo" or self.history:
            self._room.put(self._trainer.adapter(self.name))
        for step in range(options.steps):
            chosen = next(order)
            if step < self.resumed_at:
                continue
            if step == self.resumed_at:
                self._probe()
            begun = time.perf_counter()
            items = [int(item) * unit + place for item in chosen for place in range(unit)]
            own, loss, reward = self.task(step, items, lines, prompts)
            value = 0.0
            for batch in self._batches(own):
                value += self._sliced(self._trainer.accumulate(self._leaves(), batch, loss))
            rate = rate_at(step, options.steps, options.rate)
            norm, taken = self._sliced(self._trainer.update(rate))
            failures = 0 if taken else failures + 1
            if failures == _MOST_FAILURES:
                raise RequestFailed(
                    f"The training of {self.name!r} has had no finite gradient for {failures} steps, up to step "
                    f"{step + 1}. Train with a smaller learning_rate than {options.rate:g}."
                )
            seconds = time.perf_counter() - begun
            tokens = sum(line.learned_count for line in own)
            apart = loss.apart if isinstance(loss, Policy) else None
            self.history += (TuningStep(step + 1, value, rate, tokens, seconds, norm, reward, apart),)
            self._bar(_StepProgress(step + 1, options.steps, value))
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                self._keep(kept)
                self._probe()
            elif options.loss == "grpo":
                self._room.put(self._trainer.adapter(self.name))
        if not self.history[self.resumed_at :]:  # the kept one had ended
            self._keep(kept)

    def _keep(self, kept: TrainingCheckpoints) -> None:
        """Keep the state of the training, and swap the adapter in as it is."""
        if not self.history:
            return
        try:
            kept.save(self._trainer.state(), [dataclasses.astuple(one) for one in self.history])
        except OSError as error:
            log.warning("the state of tuning %s is not kept: %s", self.name, error)
        self._room.put(self._trainer.adapter(self.name))

    def _probe(self) -> None:
        if self.options.probe is not None and self.history:
            self.probes += (TuningProbe(len(self.history), self._room.complete(self.options.probe)),)

    # A step.

    def task(
        self, step: int, items: Sequence[int], lines: Sequence[Line], prompts: Sequence[tuple[object, list[int]]]
    ) -> tuple[list[Line], Loss, float | None]:
        """Return the lines of a step, its loss, and the mean reward if there are rewards."""
        options = self.options
        if options.loss == "grpo":
            return self._drawn(step, items, lines, prompts)
        own = [lines[item] for item in items]
        if options.loss == "next":
            return own, NextToken([line.learned_count for line in own]), None
        missing = dict.fromkeys(item for item in items if item not in self._references)
        found = self._reference([lines[item] for item in missing])
        self._references.update(zip(missing, found, strict=True))
        references = [self._references[item] for item in items]
        return own, Preference(references, options.strength, means=options.loss == "ipo"), None

    def _drawn(
        self, step: int, items: Sequence[int], lines: Sequence[Line], prompts: Sequence[tuple[object, list[int]]]
    ) -> tuple[list[Line], Loss, float]:
        options = self.options
        groups = self._room.draw([lines[item].ids for item in items], step)
        rewards = np.array(
            [
                [_reward(options.reward, prompts[item][0], one.text) for one in group]
                for item, group in zip(items, groups, strict=True)
            ]
        )
        advantages = advantages_of(rewards, scaled=options.variant != "dr_grpo").ravel()
        own: list[Line] = []
        drawn: list[Floats] = []
        for item, group in zip(items, groups, strict=True):
            start = lines[item].ids
            for one in group:
                learned = np.arange(len(start) + len(one.ids)) >= len(start)
                own.append(Line(np.concatenate([start, one.ids]).astype(np.int32), learned))
                drawn.append(one.logprobs)
        references = self._reference(own) if options.strength else None
        loss = Policy(
            advantages.tolist(), drawn, references,
            variant=options.variant, beta=options.strength, clip=options.clip, most=options.max_tokens,
        )  # fmt: skip
        return own, loss, float(rewards.mean())

    def _reference(self, lines: Sequence[Line]) -> list[Floats]:
        """Return the log-probabilities of lines' learned tokens by the model without the adapter."""
        found: dict[int, Floats] = {}
        for batch in self._batches(lines):
            values = self._sliced(self._trainer.logprobs(self._leaves(), batch))
            found.update(zip(batch.lines, values, strict=True))
        return [found[index] for index in range(len(lines))]

    def _batches(self, lines: Sequence[Line]) -> list[MicroBatch]:
        """Cut lines into micro-batches, and make their programs."""
        batches = list(self._plan.batches(lines))
        for batch in batches:
            self._check()
            self._trainer.prepare(batch.shape)
        return batches

    # The device.

    def _leaves(self) -> Sequence[Array]:
        return self._room.model().leaves

    def _sliced(self, work: Generator[None, None, T]) -> T:
        """Run work on the device, a slice of time after another, with as much time for running requests."""
        results: list[T] = []
        while True:
            self._check()
            done, seconds = self._room.exclusive(lambda: self._advanced(work, results))
            self.longest_pause = max(self.longest_pause, seconds)
            if done:
                return results[0]
            if self._room.busy():
                self._stop.wait(seconds)

    def _advanced(self, work: Generator[None, None, T], results: list[T]) -> Slice:
        start = time.perf_counter()
        if self._room.model().fingerprint != self._fingerprint:
            fix = "Swap the old weights in again, and call session.tune as before: it goes on where it was"
            raise InvalidRequest("weights", "other ones", "were swapped in while an adapter was trained", fix)
        try:
            while time.perf_counter() - start < SLICE and not self.cancelled:
                next(work)
        except StopIteration as stop:
            results.append(stop.value)
        return Slice(bool(results), time.perf_counter() - start)

    def _check(self) -> None:
        if self.cancelled:
            raise TrainingStopped


def rate_at(step: int, steps: int, highest: float) -> float:
    """Return the learning rate of a step: up to the highest in a tenth of the steps, and down to 0 as a cosine."""
    warmup = max(1, int(steps * _WARMUP))
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _reward(reward: Any, prompt: Any, text: str) -> float:
    """Call a caller's function. Raise InvalidRequest if it raises, or returns anything but a finite number."""
    try:
        value = float(reward(prompt, text))
    except RekindleError:
        raise
    except Exception as error:
        problem = f"raised {type(error).__name__} for the completion {text[:80]!r}: {error}"
        raise InvalidRequest("reward", reward, problem, "Return a number for each prompt and text") from error
    if not math.isfinite(value):
        problem = f"returned {value} for the completion {text[:80]!r}"
        raise InvalidRequest("reward", reward, problem, "Return a finite number")
    return value
