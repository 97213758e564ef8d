"""A rollout function for the trainers of TRL, and the weights that they train."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rekindle._src.core.sampling import SamplingOptions
from rekindle._src.evaluation.rollouts import one_each
from rekindle._src.session.session import Session
from rekindle.errors import InvalidRequest

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of a trainer's arguments


def rollout_func(session: Session, **options: Any) -> Callable[[Sequence[Any], Any], dict[str, list[list[Any]]]]:
    """Return a function for `GRPOTrainer(rollout_func=…)` (or another trainer of TRL that takes one).

        trainer = GRPOTrainer(model, reward_funcs=reward, rollout_func=rollout_func(session), …)

    Prompts are texts, or messages, which the session's chat template renders. Sampling options are those of the
    trainer's arguments; `options` add to these, and come first. Before the first prompts of each optimizer step the
    trainer's weights become the session's: they pass a folder in memory or the system's temporary one, since they are
    torch's. Log-probabilities belong to the distribution that tokens were drawn from. With a `seed`, a run can be
    repeated; each call and each completion draws with one of its own. The result also has `weights_versions` of each
    token, which reward functions get.
    """
    loaded: list[int] = []  # the optimizer step of the session's weights
    calls = itertools.count()

    def roll(prompts: Sequence[Any], trainer: Any) -> dict[str, list[list[Any]]]:
        step = int(trainer.state.global_step)
        if loaded[-1:] != [step]:
            _take_weights(session, trainer)
            loaded[:] = [step]
        sampling = {name: getattr(trainer.args, name, None) for name in SAMPLING}
        sampling["max_tokens"] = getattr(trainer.args, "max_completion_length", None)
        if sampling["top_k"] is not None and sampling["top_k"] < 0:
            sampling["top_k"] = None  # some versions write "all of them" so
        sampling = {name: value for name, value in sampling.items() if value is not None} | options
        if sampling.get("seed") is not None:
            sampling["seed"] = int(np.random.SeedSequence([sampling["seed"], next(calls)]).generate_state(1)[0])
        texts = [prompt if isinstance(prompt, str) else session.render(prompt) for prompt in prompts]
        done = one_each(session, texts, cast(SamplingOptions, sampling))
        return {
            "prompt_ids": [list(one.prompt_token_ids) for one in done],
            "completion_ids": [list(one.token_ids) for one in done],
            "logprobs": [[entry.logprob for entry in one.logprobs or ()] for one in done],
            "weights_versions": [list(one.weights_versions) for one in done],
        }

    return roll


def _take_weights(session: Session, trainer: Any) -> None:
    """Put the trainer's weights into the session."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        fix = "Train the whole model, or write a rollout function that merges them before it saves"
        raise InvalidRequest("trainer", type(model).__name__, "trains adapters, which it saves alone", fix)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="rekindle-", dir=memory if memory.is_dir() else None) as folder:
        model.save_pretrained(folder)
        session.swap_weights(folder).result_sync()
