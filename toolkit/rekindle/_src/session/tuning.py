"""Trainings of adapters in an open session: `session.tune`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rekindle._src.calls.call import Call
from rekindle._src.capabilities.tuning.batches import BatchPlan
from rekindle._src.capabilities.tuning.checkpoint import TrainingCheckpoints
from rekindle._src.capabilities.tuning.data import LineMaker
from rekindle._src.capabilities.tuning.owner import TUNING
from rekindle._src.capabilities.tuning.request import TuneOptions
from rekindle._src.capabilities.tuning.run import (
    DrawnCompletion,
    TrainingRun,
    TuningProbe,
    TuningReport,
    TuningRoom,
    TuningStep,
)
from rekindle._src.capabilities.tuning.sites import trained_matrices
from rekindle._src.capabilities.tuning.step import TrainingCut
from rekindle._src.capabilities.tuning.trainer import Trainer
from rekindle._src.core.activity import in_notebook
from rekindle._src.core.names import checked_name
from rekindle._src.core.records import IntArray
from rekindle._src.dispatch.threads import run_sync
from rekindle._src.evaluation.rollouts import RolloutRequests
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.nn.packing import matrix_shape
from rekindle._src.session import adapters
from rekindle._src.session.client import Client
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.notebook.training import TrainingView

T = TypeVar("T")
_ANOTHER = "Open a generating model on one device with rekindle.open"
PROBE_TOKENS = 64


class Tuning(Call[TuningReport]):
    """A training of an adapter, which goes on by itself. Await it for its `TuningReport`.

    `history` has the loss of each step so far, `probes` the texts of the probe. `cancel` ends it, and the adapter of
    its last step stays loaded. Cancelling a task that awaits it cancels it, too.
    """

    _awaited = "await run"

    # Any: the signature of a public class names no private type.
    def __init__(self, run: Any) -> None:
        self._run: TrainingRun = run

    @property
    def name(self) -> str:
        """The name of the adapter."""
        return self._run.name

    @property
    def history(self) -> tuple[TuningStep, ...]:
        """The steps that were taken, with loss, learning rate, tokens and seconds."""
        return self._run.history

    @property
    def probes(self) -> tuple[TuningProbe, ...]:
        """The texts of the probe so far."""
        return self._run.probes

    @property
    def done(self) -> bool:
        """True once it has ended."""
        return self._run.ended.filled

    @property
    def resumed_at(self) -> int:
        """The steps that an earlier kernel took; 0 for a training from the beginning."""
        return self._run.resumed_at

    def cancel(self) -> None:
        """End it from any thread, after the program or the text in progress. Its last whole step stays loaded."""
        self._run.cancel()

    @property
    def steps(self) -> int:
        """The steps that it is to take."""
        return self._run.options.steps

    @property
    def state(self) -> str:
        """One of "running", "ended", "cancelled" and "failed", with the reason."""
        ended = self._run.ended
        if not ended.filled:
            return "running"
        if ended.error is not None:
            return f"failed: {ended.error}"
        return "ended" if len(self.history) == self.steps else "cancelled"

    def watch(self) -> TrainingView:
        """Return it as a live view with a button that ends it: show it at the end of a cell, or show the run itself."""
        from rekindle._src.notebook.training import TrainingView  # widgets, which trainings do without

        return TrainingView(self)

    async def _result(self) -> TuningReport:
        try:
            return await self._run.ended.get()
        except BaseException:
            self._run.cancel()
            raise

    def __repr__(self) -> str:
        from rekindle._src.views.tuning import sparkline

        run, losses = self._run, [step.loss for step in self.history]
        loss = f", loss {losses[-1]:.3f} {sparkline(losses)}" if losses else ""
        resumed = f", resumed after {run.resumed_at}" if run.resumed_at else ""
        return f"<Tuning {run.name!r}: {len(losses)} of {self.steps} steps{loss}{resumed}, {self.state}>"

    def _repr_html_(self) -> str:
        from rekindle._src.views.tuning import tuning

        return str(tuning(self))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if in_notebook() and not self.done:
            display(self.watch())
        else:
            display({"text/plain": repr(self), "text/html": self._repr_html_()}, raw=True)


def tuning(client: Client, requests: RolloutRequests, name: str, data: object, options: Mapping[str, Any]) -> Tuning:
    """Start a training; see `Session.tune`."""
    client.host.check()
    checked, name = TuneOptions(**options), checked_name("name", name)
    owner, device = TUNING.of(client.front), client.engine.device
    if owner is None or not device.has_weights or client.front.embedder.alone or device.is_merged:
        raise InvalidRequest("session", client.front.model, "can't be tuned", _ANOTHER)
    adapters.shelf_of(client).check_room(name, checked.rank)
    plan, model = owner.plan, _awake(client)
    matrices = trained_matrices(plan.model, checked.targets)
    cut = TrainingCut.of(plan.graph, plan.leaves, matrices, checked.scale)
    largest = max(sum(prod(matrix_shape(plan.leaves[index])) for index in own) for own in cut.cut.layers)
    unit = 2 if checked.loss in ("dpo", "ipo") else checked.generations if checked.loss == "grpo" else 1
    room = TuningRoom(
        partial(_exclusive, client),
        partial(_awake, client),
        lambda: client.host.limiter.inside > 0,
        partial(adapters.put, client),
        partial(_complete, requests, name),
        partial(_draw, requests, name, checked),
        owner.closed,
    )
    causes = {"weights": model.fingerprint, "options": checked.causes}
    longest = min(checked.max_length, plan.model.max_position_embeddings)
    run = TrainingRun(
        name,
        data,
        checked,
        LineMaker(client.front.tokenizer, client.front.chat, client.front.vocab_size, longest),
        Trainer(owner, cut, matrices, checked.rank, checked.optimizer),
        BatchPlan.of(largest, plan.model.vocab_size, checked.batch * unit, 2 if checked.loss in ("dpo", "ipo") else 1),
        room,
        lambda data: TrainingCheckpoints(client.front.config.cache_folder, name, {**causes, "data": data}),
        quiet=client.front.config.quiet,
    )
    client.add_training(run.ended)  # before the session is found awake: from then on it is not put to sleep
    try:
        _awake(client)
        run.start()
    except BaseException as error:
        run.ended.fail(error)
        raise
    return Tuning(run)


def _exclusive(client: Client, job: Callable[[], T]) -> T:
    return run_sync(client.exclusive(job, lambda _: None))


def _awake(client: Client) -> LoadedModel:
    client.host.check()
    if client.asleep:
        raise InvalidRequest("session", client.front.model, "sleeps", "Await session.wake(), and tune again")
    model: LoadedModel = client.engine.device.model
    return model


def _complete(requests: RolloutRequests, name: str, prompt: str) -> str:
    return requests.rollout_sync(prompt, n=1, adapter=name, temperature=0.0, max_tokens=PROBE_TOKENS).texts[0]


def _draw(
    requests: RolloutRequests, name: str, options: TuneOptions, prompts: Sequence[IntArray], step: int
) -> list[list[DrawnCompletion]]:
    """Return completions of prompts by the adapter as it is."""
    batch = requests.rollout_sync(
        [ids.tolist() for ids in prompts],
        n=options.generations,
        adapter=name,
        max_tokens=options.max_tokens,
        seed=(options.seed + step) % (1 << 31),
    )
    groups: list[list[DrawnCompletion]] = [[] for _ in prompts]
    for line, group in enumerate(batch.groups.tolist()):
        mask = batch.completion_mask[line]
        drawn = batch.logprobs[line][mask].astype(np.float64)
        groups[group].append(DrawnCompletion(batch.tokens[line][mask], drawn, batch.texts[line]))
    return groups
