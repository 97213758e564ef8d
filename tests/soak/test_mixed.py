"""The mixed load: every kind of call at once over a model with states, with adapters and captures.

    pytest -m slow -s tests/soak/test_mixed.py                           # some hundred calls
    REKINDLE_MIXED_CALLS=20000 pytest -m soak -s tests/soak/test_mixed.py

Completions, whole vocabularies of log-probabilities, drawn texts, captures, scores, rollouts and embeddings, with one
of two adapters or none, by callers on asyncio and on trio, while others cancel theirs or leave, adapters come and go,
and the cache is saved, pruned and emptied. Each answer is the one that its call had alone, and nothing is left.
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

import rekindle
from helpers import adapters, checkpoints
from helpers.sessions import wait_until_idle
from rekindle import Capture, Session
from rekindle.errors import RequestAborted
from soak.test_soak import GROWTH, Figures

CALLS = int(os.environ.get("REKINDLE_MIXED_CALLS", "0"))
FEW, MANY = 160, 5_000
AT_ONCE, PROMPTS, SHARED = 10, 6, 64
SITES: Any = {"residual": [1], "norm": True}
LONG = ("qwen3.5", "lfm2", "gemma3")  # states of two kinds, and windows
NAMES = (None, "one", "two")  # of adapters
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 256, "page_size": 16,
    "device_pages": 41, "host_memory": 1 << 20, "disk_memory": 8 << 20, "max_adapters": 3, "max_adapter_rank": 8,
    "precompile": "lazy", "seed": 0, "quiet": True,
}  # fmt: skip
CLOSE = 2e-3  # of numbers: a batch rounds otherwise than a request alone
Answer = dict[str, Any]
Ask = Callable[[Session], Awaitable[Answer]]


class Call(NamedTuple):
    """A call, and what it is made with: `ask` makes it whole, `submit` hands in a request that may be cancelled."""

    kind: str
    ask: Ask
    ids: list[int]
    options: dict[str, Any]


def arrays(done: Any) -> Answer:
    """What a completion says, as tokens and numbers."""
    found: Answer = {"tokens": done.token_ids}
    for place, entry in enumerate(done.logprobs or ()):
        order = np.argsort(entry.top_ids)  # equal ones have no order
        found[f"logprob {place}"] = np.array([entry.logprob, *np.asarray(entry.top_logprobs)[order]])
    for key, array in (done.captured or {}).items():
        found[f"captured {key}"] = np.asarray(array, np.float32)
    return found


def calls(vocab: int) -> list[Call]:
    """Each kind of call with each prompt, and the adapters by turns."""
    numbers = np.random.default_rng(3)
    shared = numbers.integers(3, vocab, SHARED).tolist()
    made: list[Call] = []
    for index in range(PROMPTS):
        own = numbers.integers(3, vocab, 8 + 17 * index).tolist()
        ids = [*shared, *own] if index % 2 else own
        kinds: dict[str, dict[str, Any]] = {
            "greedy": {},
            "whole vocabulary": {"logprobs": vocab},
            "drawn": {"temperature": 1.0, "seed": index, "logprobs_of": "sampled", "logprobs": 1},
            "captured": {"capture": SITES},
            "kept": {"capture": Capture(SITES, keep=True)},
        }
        adapter = NAMES[index % len(NAMES)]
        for kind, own_options in kinds.items():
            options = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "adapter": adapter, **own_options}
            made.append(Call(kind, _generate(ids, options), ids, options))
        plain = {"max_tokens": 20, "ignore_eos": True, "adapter": adapter}
        made.append(Call("score", _score(ids, adapter), ids, plain))
        made.append(Call("rollout", _rollout(ids, adapter, index), ids, plain))
        made.append(Call("embed", _embed(ids, adapter), ids, plain))
    return made


def _generate(ids: list[int], options: dict[str, Any]) -> Ask:
    async def ask(session: Session) -> Answer:
        return arrays(await session.generate(ids, **options))

    return ask


def _score(ids: list[int], adapter: str | None) -> Ask:
    async def ask(session: Session) -> Answer:
        scores = await session.score(ids, [[5, 6], [7], [8, 9, 10]], adapter=adapter)
        return {"tokens": [score.token_ids for score in scores], "scores": np.array([one.logprob for one in scores])}

    return ask


def _rollout(ids: list[int], adapter: str | None, seed: int) -> Ask:
    async def ask(session: Session) -> Answer:
        batch = await session.rollout([ids, ids[:9]], n=2, max_tokens=4, seed=seed, adapter=adapter, ignore_eos=True)
        return {"tokens": batch.tokens.tolist(), "logprobs": np.asarray(batch.logprobs)}

    return ask


def _embed(ids: list[int], adapter: str | None) -> Ask:
    async def ask(session: Session) -> Answer:
        return {"tokens": len(ids), "vectors": np.asarray(await session.embed([ids, ids[:5]], adapter=adapter))}

    return ask


def check(call: Call, answer: Answer, alone: Answer) -> None:
    assert answer.keys() == alone.keys() and answer["tokens"] == alone["tokens"], f"{call.kind}: another answer"
    for key in answer.keys() - {"tokens"}:
        np.testing.assert_allclose(answer[key], alone[key], rtol=0, atol=CLOSE, err_msg=f"{call.kind}: {key}")


class Mixed:
    """Makes calls at random, and counts them."""

    def __init__(self, session: Session, known: list[tuple[Call, Answer]], third: Path) -> None:
        self.session, self.known, self.third = session, known, third
        self.draw = random.Random(7)
        self.counts: collections.Counter[str] = collections.Counter()
        self.left = 0

    async def run(self, count: int) -> None:
        self.left = count
        async with anyio.create_task_group() as group:
            for _ in range(AT_ONCE):
                group.start_soon(self.caller)
            group.start_soon(self.operator)

    async def caller(self) -> None:
        while self.left > 0:
            self.left -= 1
            call, alone = self.draw.choice(self.known)
            fate = self.draw.random()
            if fate < 0.1:
                await self.cancelled(call)
            elif fate < 0.2:
                async for _ in self.session.stream(call.ids, **call.options):
                    break
                self.counts["left"] += 1
            else:
                check(call, await call.ask(self.session), alone)
                self.counts[call.kind] += 1

    async def cancelled(self, call: Call) -> None:
        handle = self.session.submit(call.ids, **call.options)
        await anyio.sleep(self.draw.uniform(0.0, 0.05))
        handle.cancel()
        with suppress(RequestAborted):
            await handle
        self.counts["cancelled"] += 1

    async def operator(self) -> None:
        """Load and unload an adapter that takes the place of another, save, prune and empty the cache."""
        session = self.session
        while self.left > 0:
            await anyio.sleep(self.draw.uniform(0.05, 0.3))
            what = self.draw.choice(("adapter", "save", "prune", "flush"))
            if what == "adapter":
                await session.load_adapter("three", self.third)
                await session.generate(self.known[0][0].ids, max_tokens=2, adapter="three")
                await session.unload_adapter("three")
            elif what == "save":
                await session.save("mixed")
            elif what == "prune":
                session.cache.prune(to=self.draw.choice((0, 1 << 18)))
            else:
                await session.cache.clear()
            self.counts[what] += 1


def mixed(name: str, folder: Path, count: int) -> collections.Counter[str]:
    raw = {**checkpoints.CASES[name], "max_position_embeddings": 256}
    model = checkpoints.model(raw, checkpoints.tensors(raw))
    written = [adapters.write(folder / f"a{seed}", model.config, seed=seed, rank=4) for seed in range(3)]
    options = {**OPTIONS, "adapters": {"one": written[0], "two": written[1]}}
    made = calls(model.config.vocab_size)
    with rekindle.open_sync(model, cache_dir=str(folder / "alone"), **options) as session:

        async def alone() -> list[tuple[Call, Answer]]:
            known = []
            for call in made:
                await session.cache.clear()
                known.append((call, await call.ask(session)))
            return known

        known = anyio.run(alone)
    greedy = [answer["tokens"] for call, answer in known if call.kind == "greedy"]
    assert len({*greedy}) == PROMPTS, "prompts and adapters change little"
    with rekindle.open_sync(model, cache_dir=str(folder / "cache"), **options) as session:
        load, before = Mixed(session, known, written[2]), None
        for part, backend in enumerate(("asyncio", "trio", "asyncio", "trio")):
            anyio.run(load.run, count // 4, backend=backend)
            wait_until_idle(session)
            figures = Figures()
            print(f"{name}: {dict(load.counts)}; {figures}", flush=True)
            if part == 1:
                before = figures
        assert before is not None
        assert figures.resident <= before.resident + GROWTH
        assert figures.threads <= before.threads + 2 and figures.descriptors <= before.descriptors + 4
        stats = session.stats()
        assert not stats.live and not stats.running and set(session.adapters) == {"one", "two"}
        session.check_integrity()
    return load.counts


@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("qwen3.5", FEW, marks=pytest.mark.slow, id="qwen3.5"),
        *(pytest.param(name, MANY, marks=pytest.mark.soak, id=f"{name}, long") for name in LONG),
    ],
)
def test_each_call_has_the_answer_that_it_had_alone(name: str, count: int, tmp_path: Path) -> None:
    counts = mixed(name, tmp_path, CALLS or count)
    assert {"greedy", "whole vocabulary", "drawn", "captured", "kept", "score", "rollout", "embed"} <= counts.keys()
