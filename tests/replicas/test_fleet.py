"""A fleet over replicas in this process: whatever dies, every request ends with the text that one session gives."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import rekindle
from helpers import small
from helpers.fleets import local_fleet
from helpers.sessions import CONFIG, eventually, fake_session
from helpers.thorough import by_default
from rekindle import (
    ConfigError,
    FinishReason,
    InvalidRequest,
    ProcessLost,
    QueueFull,
    ReplicaLost,
    RequestAborted,
    RequestQuarantined,
    Session,
    SessionClosed,
    Steer,
    StepFailed,
    open_sync,
)
from rekindle._src import replicas
from rekindle._src.replicas import routes
from rekindle._src.replicas.replica import failed

pytestmark = pytest.mark.anyio

SLOW: dict[str, Any] = {"step_seconds": 0.002}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 7, "n": 3},
    {"stop": ["e", "qq"]},
    {"stop": ["e"], "min_tokens": 20, "include_stop": True},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"stop_token_ids": [101, 102]},
]


def slow_session() -> Any:
    return fake_session(CONFIG, **SLOW)


def told(done: Any) -> Any:
    """What must not depend on where a request ran."""
    if isinstance(done, list):
        return [told(one) for one in done]
    return (
        done.text, done.token_ids, done.finish_reason, done.stop_reason, done.logprobs, done.prompt_logprobs,
        done.prompt, done.usage.completion_tokens, done.usage.prompt_tokens,
    )  # fmt: skip


def alone(prompt: str, **options: Any) -> Any:
    session = fake_session()
    try:
        return told(session.generate_sync(prompt, **options))
    finally:
        session.close()


async def test_a_folder_is_the_one_at_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not at the await, when the working directory may be another one."""
    (tmp_path / "model").mkdir()
    models: list[str] = []

    def start(model: str, *_: Any, **__: Any) -> Any:
        models.append(model)
        raise ConfigError("model", model, "is enough to know", "Start none")

    monkeypatch.setattr(replicas, "on_ray", SimpleNamespace(parts=start), raising=False)  # needs no Ray
    monkeypatch.chdir(tmp_path)
    opening = rekindle.fleet("model")
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match="is enough"):
        await opening
    assert models == [str((tmp_path / "model").resolve())]


async def test_it_answers_as_a_session_does() -> None:
    with local_fleet() as (fleet, _):
        for options in VARIANTS:
            done = await fleet.generate("Once upon a time", max_tokens=30, **options)
            assert told(done) == alone("Once upon a time", max_tokens=30, **options), options
        many = await fleet.generate(["a", "b", "c"], max_tokens=5)
        assert [one.text for one in many] == [alone(prompt, max_tokens=5)[0] for prompt in "abc"]
        pieces = [delta.text async for delta in fleet.stream("Once", max_tokens=20)]
        assert "".join(pieces) == alone("Once", max_tokens=20)[0]


@pytest.mark.parametrize(
    ("options", "after"),
    by_default(itertools.product(VARIANTS, (7, 0)), lambda case: case[1] == 7 or case[0] is VARIANTS[0]),
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_a_request_goes_on_where_its_replica_died(options: dict[str, Any], after: int) -> None:
    given = {"max_tokens": 60, **options}
    with local_fleet(slow_session) as (fleet, replicas):
        replicas[1].after = after  # the router chooses it
        handle = fleet.submit("Once upon a time there was", **given)
        deltas = [delta async for delta in handle]
        done = await handle
        assert told(done) == alone("Once upon a time there was", **given)
        first = done[0] if isinstance(done, list) else done
        assert "".join(delta.text for delta in deltas if delta.index == 0) == first.text
        stats = fleet.stats()
        if after < 7:
            assert stats.lost == 1 and stats.moved >= 1


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_many_streams_and_deaths_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "DEATHS", 9)  # deaths a tenth of a second apart say nothing about a request
    draw = random.Random(4)
    prompts = [f"{draw.choice(['Tom', 'Anna', 'A dog'])} {number}" for number in range(60)]
    options = [{**draw.choice(VARIANTS), "max_tokens": draw.randint(5, 80)} for _ in prompts]
    for one in options:
        one.pop("n", None)
        if one.get("min_tokens", 0) > one["max_tokens"]:
            one.pop("min_tokens")
    found: dict[int, Any] = {}
    with local_fleet(slow_session, replicas=3) as (fleet, replicas):

        async def ask(number: int) -> None:
            found[number] = told(await fleet.generate(prompts[number], **options[number]))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(len(prompts)):
                    group.start_soon(ask, number)
                for _ in range(8):
                    await anyio.sleep(0.1)
                    draw.choice([one for one in replicas if one.session is not None] or replicas).die()
        stats = fleet.stats()
    assert stats.lost >= 3 and stats.moved >= 1
    for number, prompt in enumerate(prompts):
        assert found[number] == alone(prompt, **options[number]), (prompt, options[number])


async def test_a_replica_that_hangs_is_replaced() -> None:
    with local_fleet(slow_session, hang=0.3) as (fleet, replicas):
        handle = fleet.submit("Once upon a time", max_tokens=200)
        await aiter(handle).__anext__()
        at = fleet.explain(handle).replica
        hanging = next(replica for replica in replicas if replica.name == at)
        hanging.hangs = True
        with anyio.fail_after(60):
            done = await handle
        assert told(done) == alone("Once upon a time", max_tokens=200)
        assert hanging.killed >= 1
        assert "has not answered" in next(one for one in fleet.stats().replicas if one.name == at).why
        assert fleet.explain(handle).moves == 1
        await anyio.to_thread.run_sync(lambda: eventually(lambda: fleet.stats().ready == 2))
        assert hanging.lives == 1 + hanging.killed


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_device_that_hangs_is_replaced() -> None:
    gates: list[threading.Event] = []

    def make() -> Any:
        gates.append(threading.Event())
        if len(gates) != 2:  # the first one only describes the model; the second hangs
            gates[-1].set()
        return fake_session(dataclasses.replace(CONFIG, step_timeout=0.2), gate=gates[-1])

    with local_fleet(make, replicas=1) as (fleet, replicas):
        with anyio.fail_after(60):
            done = await fleet.generate("Once upon a time", max_tokens=20)
        assert told(done) == alone("Once upon a time", max_tokens=20)
        assert replicas[0].killed == 1 and "on the device" in fleet.stats().replicas[0].why
        gates[1].set()


async def test_a_session_that_was_closed_under_the_fleet_is_replaced() -> None:
    with local_fleet(slow_session) as (fleet, replicas):
        handle = fleet.submit("Once upon a time", max_tokens=150)
        await aiter(handle).__anext__()
        at = fleet.explain(handle).replica
        next(replica for replica in replicas if replica.name == at).session.close()
        with anyio.fail_after(60):
            assert told(await handle) == alone("Once upon a time", max_tokens=150)


async def test_a_request_that_kills_replicas_is_quarantined() -> None:
    with local_fleet(slow_session, replicas=12) as (fleet, replicas):
        for replica in replicas:
            replica.poisoned = True
        with (
            anyio.fail_after(30),
            pytest.raises(RequestQuarantined, match="one after another, each before its token 1"),
        ):
            await fleet.generate("Once upon a time", max_tokens=400)
        assert fleet.stats().lost == 2
        for replica in replicas:
            replica.poisoned = False
        assert (await fleet.generate("b", max_tokens=3)).token_ids


async def test_when_no_replica_can_be_opened_again_requests_fail() -> None:
    with local_fleet(slow_session, replicas=1) as (fleet, replicas):
        await fleet.generate("a", max_tokens=2)
        replicas[0].broken = OSError("no such folder")
        replicas[0].die()
        with anyio.fail_after(60), pytest.raises(ReplicaLost, match="no such folder"):
            await fleet.generate("a", max_tokens=2)
        assert fleet.stats().replicas[0].state == "failed"
        with pytest.raises(ReplicaLost):
            await fleet.generate("a", max_tokens=2)
        replicas[0].broken = None
        await fleet.scale(1)
        assert (await fleet.generate("a", max_tokens=2)).token_ids


async def test_cancelling_reaches_the_replica() -> None:
    with local_fleet(slow_session) as (fleet, replicas):
        handle = fleet.submit("Once upon a time", max_tokens=400)
        await aiter(handle).__anext__()
        handle.cancel()
        with pytest.raises(RequestAborted):
            await handle
        async for delta in fleet.stream("Once upon a time", max_tokens=400):
            assert delta.text
            break
        await anyio.to_thread.run_sync(
            lambda: eventually(lambda: all(one.session.stats().live == 0 for one in replicas))
        )
        for replica in replicas:
            replica.session.check_integrity()
        await anyio.to_thread.run_sync(lambda: eventually(lambda: fleet.stats().live == 0))


async def test_a_stop_string_ends_the_request_in_its_replica() -> None:
    with local_fleet(slow_session) as (fleet, replicas):
        done = await fleet.generate("Once upon a time", max_tokens=400, stop=["a"])
        assert done.finish_reason is FinishReason.STOP
        await anyio.to_thread.run_sync(
            lambda: eventually(lambda: all(one.session.stats().live == 0 for one in replicas))
        )


async def test_a_full_fleet_refuses() -> None:
    config = dataclasses.replace(CONFIG, max_requests=1, max_queue=1)
    with local_fleet(lambda: fake_session(config, **SLOW)) as (fleet, _):
        assert fleet.stats().places == 4
        held = [fleet.submit("Once upon a time", max_tokens=300) for _ in range(4)]
        with pytest.raises(QueueFull):
            fleet.submit("Once upon a time", max_tokens=300)
        for handle in held:
            handle.cancel()


async def test_errors_of_requests_have_their_types() -> None:
    with local_fleet() as (fleet, _):
        with pytest.raises(InvalidRequest, match="temprature"):
            fleet.generate("a", temprature=1)
        with pytest.raises(InvalidRequest, match="max_model_len"):
            await fleet.generate("a" * 600)
        with pytest.raises(InvalidRequest, match="not a processor"):
            await fleet.generate("a", processors=["x"])
        for options, words in (
            ({"capture": {"residual": [0]}}, "capture=.*: needs the model's own process"),
            ({"steer": Steer(0, scale=2.0, mode="scale")}, "steer=.*: needs the model's own process"),
            ({"steer": "polite"}, "steer='polite': is not a steering vector of this session"),
            ({"taps": "mine"}, "taps=.*: needs the model's own process"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await fleet.generate("a", **options)
        with pytest.raises(ConfigError, match="replicas"):
            fleet.scale(0)


@pytest.mark.thorough
async def test_scaling_down_moves_what_does_not_end_in_time() -> None:
    with local_fleet(slow_session, replicas=3, router="shortest") as (fleet, replicas):
        handles = [fleet.submit(f"{number} Once upon a time", max_tokens=200) for number in range(9)]
        await aiter(handles[-1]).__anext__()
        await fleet.scale(1, drain=0.05)
        stats = fleet.stats()
        assert len(stats.replicas) == 1 and stats.moved >= 1 and stats.lost == 0
        assert [replica.closed for replica in replicas] == [False, True, True]
        for number, handle in enumerate(handles):
            assert told(await handle) == alone(f"{number} Once upon a time", max_tokens=200)
        await fleet.scale(2)
        await anyio.to_thread.run_sync(lambda: eventually(lambda: fleet.stats().ready == 2))


async def test_scaling_down_waits_for_what_ends_in_time() -> None:
    with local_fleet(slow_session, router="shortest") as (fleet, _):
        handles = [fleet.submit(f"{number} Once", max_tokens=30) for number in range(4)]
        await fleet.scale(1, drain=20)
        assert fleet.stats().moved == 0
        for handle in handles:
            await handle


async def test_closing_ends_what_runs() -> None:
    with local_fleet(slow_session) as (fleet, replicas):
        handle = fleet.submit("Once upon a time", max_tokens=400)
        await aiter(handle).__anext__()
        await fleet.aclose()
        with pytest.raises(SessionClosed):
            await handle
        with pytest.raises(SessionClosed):
            fleet.submit("a")
        assert all(replica.closed for replica in replicas)
        await fleet.aclose()


async def test_closing_with_a_drain_lets_requests_end() -> None:
    with local_fleet(slow_session) as (fleet, _):
        handle = fleet.submit("Once upon a time", max_tokens=60)
        await aiter(handle).__anext__()
        await fleet.aclose(drain=20)
        assert len((await handle).token_ids) == 60


async def test_conversations_stay_where_they_are() -> None:
    with local_fleet(replicas=4) as (fleet, _):
        await anyio.to_thread.run_sync(lambda: eventually(lambda: fleet.stats().ready == 4))
        places = set()
        for turn in range(4):
            prompt = "a system prompt that is long enough to count as one, with all that it says about the answer " * 2
            handle = fleet.submit(prompt + "and the user's question. " * 6 + "more" * turn, max_tokens=3)
            await handle
            places.add(fleet.explain(handle).replica)
        assert len(places) == 1
        assert "own replica" in fleet.explain(handle).why


async def test_figures() -> None:
    with local_fleet(router="round-robin") as (fleet, _):
        for number in range(4):
            await fleet.generate(f"{number} Once upon a time", max_tokens=5)
        await anyio.to_thread.run_sync(lambda: eventually(lambda: fleet.stats().generated_tokens == 20))
        stats = fleet.stats()
        assert [one.routed for one in stats.replicas] == [2, 2] and stats.imbalance == 1.0
        assert stats.prompt_tokens > 0 and stats.pages_total == 1022
        assert "round-robin" in stats._repr_html_() and "2 of 2" in repr(stats)
        assert stats.as_dict()["generated_tokens"] == 20
        assert "<Fleet over fake: 2 of 2" in repr(fleet)


@pytest.mark.thorough
async def test_a_replica_that_fails_to_open_now_and_then_is_not_given_up() -> None:
    with local_fleet(slow_session, replicas=1) as (fleet, replicas):
        for lives in range(2, 6):
            replicas[0].broken = OSError("for a moment")
            replicas[0].die()
            await anyio.to_thread.run_sync(lambda: eventually(lambda: "for a moment" in fleet.stats().replicas[0].why))
            replicas[0].broken = None
            await anyio.to_thread.run_sync(
                lambda lives=lives: eventually(lambda: replicas[0].lives == lives and fleet.stats().ready == 1)
            )
            await fleet.generate("a", max_tokens=2)


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_metrics_of_a_fleet() -> None:
    pytest.importorskip("prometheus_client", reason="metrics need the extra `serve`")
    from rekindle._src.serve.life import Life
    from rekindle._src.serve.metrics import Metrics
    from rekindle._src.serve.models import Models

    with local_fleet(slow_session) as (fleet, replicas):
        metrics = Metrics(Models(fleet, "fake"), Life(max_queued_tokens=100))

        def steps() -> int:
            text = metrics.text("")[0].decode()
            assert 'rekindle_replicas_ready{model_name="fake"}' in text
            found = re.search(r'rekindle_iteration_tokens_total_count\{model_name="fake"\} (\d+)', text)
            assert found is not None, text
            return int(found[1])

        await fleet.generate("Once upon a time", max_tokens=10)
        await anyio.to_thread.run_sync(lambda: eventually(lambda: steps() >= 10))
        before = steps()
        for replica in replicas:
            replica.die()
        await anyio.to_thread.run_sync(lambda: eventually(lambda: fleet.stats().lost == 2))
        assert steps() >= before, "a process that was replaced takes its counts along"


async def test_a_new_replica_gets_its_share_of_what_waits() -> None:
    with local_fleet(slow_session, replicas=1, router="shortest") as (fleet, _):
        handles = [fleet.submit(f"{number} Once upon a time", max_tokens=60) for number in range(30)]
        await aiter(handles[0]).__anext__()
        running = [handle for handle in handles if fleet.explain(handle).replica == "local-0"]
        assert len(running) == 30
        await fleet.scale(2)
        for number, handle in enumerate(handles):
            assert told(await handle) == alone(f"{number} Once upon a time", max_tokens=60)
        there = Counter(fleet.explain(handle).replica for handle in handles)
        assert there["local-1"] >= 8
        assert fleet.explain(handles[0]).replica == "local-0"
        assert (fleet.stats().lost, fleet.stats().moved) == (0, 0)


def test_a_step_that_failed_with_a_lost_process_is_no_end_of_the_request() -> None:
    error = StepFailed("step 3 failed")
    error.__cause__ = ProcessLost("process 1 is gone")
    assert isinstance(failed("a", error).error, SessionClosed)
    error.__cause__ = ValueError("too large")
    told_error = failed("a", error).error
    assert isinstance(told_error, StepFailed) and "too large" in str(told_error)


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_programs")
async def test_changes_that_replicas_were_opened_with_are_used_by_name() -> None:
    change = Steer(0, np.random.default_rng(0).standard_normal(small.MODEL.config.hidden_size), 5.0)
    ids = small.prompt(1, 9)
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}

    def make() -> Session:
        return open_sync(small.MODEL, steering={"polite": change}, **{**small.OPTIONS, "precompile": "lazy"})

    with make() as session:
        expected = [session.generate_sync(ids, **options, steer=steer).token_ids for steer in ((), change)]
        expected.append(session.generate_sync(ids, **options, steer={"polite": -1.0}).token_ids)
    with local_fleet(make, replicas=1) as (fleet, _):
        for steer, tokens in zip(((), "polite", {"polite": -1.0}), expected, strict=True):
            assert (await fleet.generate(ids, **options, steer=steer)).token_ids == tokens
    assert len({*expected}) == 3
