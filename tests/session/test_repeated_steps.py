"""Sessions whose device takes several steps in one dispatch: the same tokens, one delta for each, nothing compiled."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

import rekindle
from helpers.driving import tiny_config, tiny_model
from helpers.sessions import engine_of
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.programs.buckets import Bucket, StepSpan
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.repeated import MOST_STEPS

pytestmark = pytest.mark.usefixtures("shared_programs")
OPTIONS: dict[str, Any] = {"precompile": "lazy", "prefix_cache": False, "quiet": True, "max_requests": 4, "seed": 0}
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 60},
    {"temperature": 0.9, "seed": 3, "max_tokens": 47, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "max_tokens": 33, "top_k": 40, "repetition_penalty": 1.2, "logit_bias": {20: 2.0}},
)


def let_repeat(session: Session, most: int) -> None:
    """Let dispatches have up to `most` steps, however long these take on a busy machine."""
    repeats = engine_of(session).scheduler._repeats
    repeats._most, repeats._limits = most, dataclasses.replace(repeats._limits, repeated_seconds=math.inf)


def repeated_dispatches(session: Session) -> int:
    programs = engine_of(session).runner.statistics().programs
    return sum(count for name, count in programs.items() if name.endswith("+repeated"))


async def texts(session: Session) -> list[tuple[Any, ...]]:
    """The tokens, log-probabilities and deltas of all requests, which run together."""
    found: list[tuple[Any, ...]] = [()] * len(REQUESTS)

    async def one(index: int, options: dict[str, Any]) -> None:
        tokens, sizes, scores = list[int](), list[int](), list[Any]()
        async for delta in session.stream("Once upon a time", ignore_eos=True, **options):
            tokens += delta.token_ids
            scores += delta.logprobs or ()
            sizes.append(len(delta.token_ids))
        found[index] = tokens, [(score.token_id, score.logprob, score.top_ids) for score in scores], max(sizes)

    async with anyio.create_task_group() as group:
        for index, options in enumerate(REQUESTS):
            group.start_soon(one, index, options)
    return found


@pytest.mark.anyio
async def test_repeated_steps_give_the_same_texts(tmp_path: Path) -> None:
    async with rekindle.open("tiny", cache_dir=tmp_path, dtype="float32", **OPTIONS) as session:
        programs = engine_of(session).runner.programs
        assert {key.rows for key in programs.lattice.repeated} <= {1, 2, 4}
        let_repeat(session, 1)
        single = await texts(session)
        assert repeated_dispatches(session) == 0
        for key in programs.lattice.repeated:
            programs.get(key)
        let_repeat(session, MOST_STEPS)
        steps = engine_of(session).runner.statistics().steps
        together = await texts(session)
        assert repeated_dispatches(session) >= 8
        # Single ones would be 60 at least; requests that come one after the other wait for each other's prompts.
        assert engine_of(session).runner.statistics().steps - steps < 40
    for (tokens, scores, _), (expected, expected_scores, _) in zip(together, single, strict=True):
        assert tokens == expected
        assert [score[::2] for score in scores] == [score[::2] for score in expected_scores]
        assert [score[1] for score in scores] == pytest.approx([score[1] for score in expected_scores], abs=1e-4)
    assert [largest for *_, largest in together] == [largest for *_, largest in single]


@pytest.mark.anyio
async def test_a_cancelled_stream_and_a_stopped_one_leave_nothing_behind(tmp_path: Path) -> None:
    async with rekindle.open("tiny", cache_dir=tmp_path, **{**OPTIONS, "prefix_cache": True}) as session:
        programs = engine_of(session).runner.programs
        for key in programs.lattice.repeated:
            programs.get(key)
        let_repeat(session, MOST_STEPS)
        plain = await session.generate("Once upon a time", max_tokens=80, temperature=0, ignore_eos=True)
        stop = plain.token_ids[43]
        stopped = await session.generate("Once upon a time", max_tokens=80, temperature=0, stop_token_ids=[stop])
        end = plain.token_ids.index(stop)
        assert stopped.token_ids == plain.token_ids[: end + 1]
        handle = session.submit("Once upon a time", max_tokens=400, temperature=0, ignore_eos=True)
        async for _ in handle:
            break
        handle.cancel()
        with pytest.raises(rekindle.errors.RequestAborted):
            await handle
        again = await session.generate("Once upon a time", max_tokens=80, temperature=0, ignore_eos=True)
        assert again.token_ids == plain.token_ids
        assert repeated_dispatches(session) > 10
        engine_of(session).scheduler.check_integrity()
        assert engine_of(session).scheduler.statistics().pages_held == 0


def answer_in_a_process(folder: str) -> None:
    """Print what a session computes that repeats steps as soon as it has programs, and how many it compiled."""
    with rekindle.open_sync("tiny", cache_dir=folder, **OPTIONS | {"precompile": "all"}) as session:
        let_repeat(session, MOST_STEPS)
        done = session.generate_sync("Once upon a time", max_tokens=60, temperature=0.0, ignore_eos=True)
        figures = session.stats().compilations, repeated_dispatches(session)
    print(json.dumps([done.token_ids, *figures]))


@pytest.mark.thorough  # it compiles all programs of a session
def test_another_process_finds_the_programs_that_repeat_steps(tmp_path: Path) -> None:
    code = "import sys; from session.test_repeated_steps import answer_in_a_process as run; run(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=500
        )
        assert not done.returncode, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (tokens, compiled, repeated), (again, recompiled, repeated_again) = found
    assert compiled and not recompiled
    assert min(repeated, repeated_again) > 4 and again == tokens


def test_only_small_models_on_one_cpu_device_repeat_steps() -> None:
    """The others' steps take so long that starting them does not show, or have not been measured."""
    model = tiny_model(seed=3)
    repeated = Programs(model.config, model.graph, model.leaves, tiny_config(max_requests=16)).lattice.repeated
    assert {key.span for key in repeated} == {StepSpan.REPEATED}
    assert [key.rows for key in repeated] in ([1, 8], [2, 8])
    fixed = Programs(model.config, model.graph, model.leaves, tiny_config(deterministic=True))
    assert repeated and not fixed.lattice.repeated
    assert Bucket(2, 0, span=StepSpan.REPEATED).name == "r2t0+repeated"
