"""A hand-written driver of the runner: builds `StepPlan`s directly, without a scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import Request, Row, SlotPair, StepPlan, StepResult, TokenLogprobs
from rekindle._src.core.report_kinds import LOGPROBS, PROMPT_LOGPROBS
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.engine import Engine
from rekindle._src.execution.runner import Runner
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.placement import random_model
from rekindle._src.models.registry import config_from_hf
from rekindle._src.programs.side_caches import WindowPages
from rekindle._src.scheduling.page_runs import SequencePages
from workshop import reference

TINY = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def tiny_model(seed: int = 0) -> LoadedModel:
    """Two layers of float32."""
    return random_model(config_from_hf(TINY), seed=seed)


def tiny_config(**changes: object) -> EngineConfig:
    """Small and resolved."""
    values = {
        "dtype": "float32", "kv_dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 64,
        "page_size": 8, "device_pages": 40, **changes,
    }  # fmt: skip
    return EngineConfig(**values)  # type: ignore[arg-type]


CONTEXT = 64


def plain_logits(
    model: LoadedModel, tokens: Sequence[int], cache: reference.Cache, start: int = 0
) -> tuple[np.ndarray, reference.Cache]:
    """Logits of each of `tokens`, eight or one at a time over a cache of one size: two programs for every test."""
    parts, done = [], 0
    while done < len(tokens):
        some = np.array(tokens[done : done + (8 if len(tokens) - done >= 8 else 1)], np.int32)
        position = np.int32(start + done)
        logits, cache = reference.forward(model.graph, model.leaves, cache, some, position, position + np.int32(1))
        parts.append(np.asarray(logits))
        done += len(some)
    return np.concatenate(parts), cache


def plain_tokens(
    model: LoadedModel, prompt: Sequence[int], count: int,
    choose: Callable[[np.ndarray, list[int]], int] = lambda logits, output: int(np.argmax(logits)), *,
    context: int = CONTEXT,
) -> tuple[list[int], list[np.ndarray]]:  # fmt: skip
    """The plain loop: tokens, and the logits that each was chosen from."""
    logits, cache = plain_logits(model, prompt, reference.empty_cache(model, context))
    output, seen = [choose(logits[-1], [])], [logits[-1]]
    while len(output) < count:
        logits, cache = plain_logits(model, output[-1:], cache, len(prompt) + len(output) - 1)
        output.append(choose(logits[-1], output))
        seen.append(logits[-1])
    return output, seen


@dataclasses.dataclass
class Live:
    """A request as the driver runs it."""

    request: Request
    slot: int
    pages: np.ndarray
    held: SequencePages | None = None  # its pages of layers with a window, if these have pages of their own
    computed: int = 0
    planned: int = 0  # tokens sampled by steps planned so far
    epoch: int = 0
    fresh: bool = True
    outputs: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    earlier: np.ndarray | None = None

    @property
    def done(self) -> bool:
        return self.planned >= self.request.sampling.max_tokens


class Plans:
    """The driver in the place of a scheduler: every turn has the next chunk of each request."""

    def __init__(self, driver: Driver, lives: Sequence[Live], chunk: int) -> None:
        self.driver, self.lives, self.chunk = driver, lives, chunk

    @property
    def has_work(self) -> bool:
        return any(not live.done for live in self.lives)

    def plan(self, *, now: bool = False) -> StepPlan | None:
        return self.driver.plan([(live, self.chunk) for live in self.lives if not live.done]) if self.has_work else None

    def commit(self, result: StepResult) -> tuple[()]:
        self.driver.commit(result, self.lives)
        return ()

    def failures(self) -> tuple[()]:
        return ()

    def fail(self, plan: StepPlan, cause: BaseException) -> tuple[()]:
        raise cause


class Driver:
    """Owns pages and slots of a few requests and runs the steps it is told to.

    Each request has all its pages at once, also in layers with a window, and one slot of states if the model has any.
    """

    def __init__(self, runner: Runner, page_size: int = 8) -> None:
        self.runner, self.page_size = runner, page_size
        self.free_pages = list(range(1, runner.config.device_pages or 0))
        windows = [plan for plan in runner.programs.recipes.sides if isinstance(plan, WindowPages)]
        self.free_windows = list(range(1, windows[0].slots)) if windows else []
        self.free_slots = list(range(runner.config.max_requests))
        self.steps = 0

    def add(
        self, prompt: Sequence[int], sampling: Sampling, *, ends: Sequence[int] = (), slot: int | None = None
    ) -> Live:
        """A slot and all its pages at once, in an order that is not the order of their ids."""
        count = -(-(len(prompt) + sampling.max_tokens) // self.page_size)
        pages = np.array([self.free_pages.pop(3 if len(self.free_pages) > 3 else 0) for _ in range(count)], np.int32)
        held = None
        if self.free_windows:
            held = SequencePages(WindowPages.words, self.runner.programs.recipes.model.window, self.page_size)
            held.pages = [self.free_windows.pop() for _ in range(count)]
        slot = self.free_slots.pop() if slot is None else slot
        request = Request(f"r{self.steps}-{slot}", np.array(prompt, np.int32), sampling, eos_ids=frozenset(ends))
        return Live(request, slot, pages, held)

    def remove(self, live: Live) -> None:
        self.free_pages.extend(live.pages.tolist())
        self.free_windows.extend(live.held.pages if live.held else ())
        self.free_slots.append(live.slot)

    def preempt(self, live: Live) -> None:
        """Forget what was computed; it resumes in whatever slot it is given, with its output as part of its tokens."""
        live.computed, live.epoch, live.fresh = 0, live.epoch + 1, True
        live.earlier = np.array(live.outputs, np.int32) if live.outputs else None

    def row(self, live: Live, chunk: int | None = None) -> Row:
        """The next row: a decode row when only the last token is missing, else a prefill chunk."""
        known = [*live.request.token_ids.tolist(), *live.outputs]
        start, total = live.computed, live.request.prompt_length + live.planned
        decode = start == total - 1 and live.planned > 0 and not live.fresh
        length = 1 if decode else min(chunk or total, total - start)
        end = start + length
        sides = tuple(
            SlotPair(live.slot + 1, live.slot + 1) if live.held is None else live.held.run(start, end)
            for _ in self.runner.programs.recipes.sides
        )
        row = Row(
            request=live.request, epoch=live.epoch, slot=live.slot, start=start, length=length,
            pages=live.pages[: -(-end // self.page_size)],
            token_ids=None if decode else np.array(known[start:end], np.int32), samples=end == total, fresh=live.fresh,
            generated=live.planned, outputs=live.earlier if live.fresh else None,
            sides=sides,
        )  # fmt: skip
        live.fresh, live.computed = False, end
        live.planned += row.samples
        return row

    def plan(self, parts: Sequence[tuple[Live, int | None]]) -> StepPlan:
        rows = [(self.row(live, chunk)) for live, chunk in parts]
        self.steps += 1
        return StepPlan(
            self.steps,
            tuple(row for row in rows if row.token_ids is None),
            tuple(row for row in rows if row.token_ids is not None),
        )

    def commit(self, result: StepResult, lives: Sequence[Live]) -> None:
        by_id = {live.request.id: live for live in lives}
        for row in result.rows:
            live = by_id[row.request_id]
            live.prompt_logprobs.extend(PROMPT_LOGPROBS.of(row))
            if row.token_id is not None:
                live.outputs.append(row.token_id)
                live.logprobs.append(next(iter(LOGPROBS.of(row)), None))

    def step(self, parts: Sequence[tuple[Live, int | None]]) -> StepResult:
        result = self.runner.fetch(self.runner.dispatch(self.plan(parts)))
        self.commit(result, [live for live, _ in parts])
        return result

    def finish(self, lives: Sequence[Live], chunk: int = 7) -> None:
        """Run them all to their ends, in turns of the engine."""
        engine = Engine(cast(Any, Plans(self, lives, chunk)), self.runner)
        while engine.turn() is not None:
            pass

    def solo(self, prompt: Sequence[int], sampling: Sampling, *, ends: Sequence[int] = (), chunk: int = 64) -> Live:
        live = self.add(prompt, sampling, ends=ends)
        self.finish([live], chunk)
        self.remove(live)
        return live
