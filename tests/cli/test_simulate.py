"""`rekindle simulate`, and what the simulation of a fleet promises."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from rekindle import ConfigError
from rekindle._src.bench.simulation import (
    LOADS,
    SimulatedRequest,
    StepCost,
    StepWork,
    chats,
    read_trace,
    simulate,
)
from rekindle._src.cli.main import main
from rekindle._src.core.config import EngineConfig

COST = StepCost(step=8e-3, row=30e-6, prefill=40e-6, context=5e-8, chunk=1e-3)
CONFIG = EngineConfig(
    max_requests=16, max_tokens_per_step=512, max_model_len=8192, page_size=16, device_pages=2000, policy="fcfs"
)


def test_one_request_takes_what_its_steps_cost() -> None:
    ask = chats(random.Random(1), 1, 1.0)[0]
    outcome = simulate([ask], CONFIG, COST)
    assert outcome.requests == 1 and outcome.refused == 0 and outcome.hit_rate == 0.0
    steps = -(-ask.length // CONFIG.max_tokens_per_step)
    least = steps * (COST.step + COST.chunk) + ask.length * COST.prefill
    assert outcome.first_token[0] == pytest.approx(least, rel=0.05)
    assert outcome.between[0] == pytest.approx(COST.step + COST.row + COST.context * ask.length, rel=0.05)


def test_it_repeats_itself() -> None:
    asks = chats(random.Random(1), 60, 4.0)
    assert simulate(asks, CONFIG, COST, replicas=3) == simulate(asks, CONFIG, COST, replicas=3)


def test_affinity_finds_more_in_the_cache() -> None:
    asks = chats(random.Random(2), 120, 12.0, systems=12, system_tokens=800)
    config = dataclasses.replace(CONFIG, device_pages=600)
    found = {name: simulate(asks, config, COST, replicas=4, router=name) for name in ("affinity", "round-robin")}
    assert found["affinity"].hit_rate > found["round-robin"].hit_rate + 0.05


def test_shortest_first_serves_chats_amid_a_flood() -> None:
    long = [SimulatedRequest(0.0, ((number, 3000),), 8, b"", b"") for number in range(6)]
    short = [SimulatedRequest(0.01 * number, ((100 + number, 40),), 8, b"", b"") for number in range(20)]
    config = dataclasses.replace(CONFIG, max_requests=32)
    by_policy = [
        simulate(sorted([*long, *short]), dataclasses.replace(config, policy=name), COST) for name in ("fcfs", "sjf")
    ]
    assert by_policy[1].first_token[0] < by_policy[0].first_token[0] / 3
    assert len(LOADS["floods"](random.Random(3), 120, 7.0)) == 120


def test_what_finds_no_place_is_refused() -> None:
    asks = [ask._replace(at=0.0) for ask in chats(random.Random(1), 40, 4.0)]
    outcome = simulate(asks, dataclasses.replace(CONFIG, max_requests=2, max_queue=8), COST)
    assert outcome.refused == 30 and outcome.requests == 10


def test_a_cost_is_found_again() -> None:
    draw = random.Random(0)
    sizes = [draw.choice([0, 0, 64, 300]) for _ in range(200)]
    works = [
        StepWork(draw.randint(0, 16), size, draw.randint(0, 4000), draw.randint(1, 4) if size else 0) for size in sizes
    ]
    found = StepCost.fit([(work, COST.seconds(work)) for work in works])
    for name, value in dataclasses.asdict(COST).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02), name
    noisy = [(work, COST.seconds(work) * draw.uniform(0.95, 1.05)) for work in works]
    assert min(dataclasses.asdict(StepCost.fit([*noisy, (works[0], 3.0)])).values()) >= 0.0
    with pytest.raises(ValueError, match="no steps"):
        StepCost.fit([])


TRACE = [
    {"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [1]},
    {"timestamp": 900, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
]


def test_noise_on_one_side_does_not_draw_the_cost_along() -> None:
    draw = random.Random(1)
    works = [StepWork(draw.randint(1, 8), draw.choice([0, 0, 0, 100]), draw.randint(0, 2000)) for _ in range(600)]
    cost = StepCost(step=2e-3, row=2e-4, prefill=2e-5, context=1e-7)
    steps = [(work, cost.seconds(work) * (draw.uniform(2, 4) if draw.random() < 0.3 else 1.0)) for work in works]
    found = StepCost.fit(steps)
    for work in works:
        assert found.seconds(work) == pytest.approx(cost.seconds(work), rel=0.05)
    spread = found.spread(steps)
    assert list(spread) == sorted(spread) and len(spread) == 100
    assert spread[50] == pytest.approx(1.0, abs=0.05) and spread[85] > 1.8


def test_a_simulation_has_costs_of_requests_and_varying_steps() -> None:
    ask = SimulatedRequest(0.0, ((1, 100),), 400, b"", b"")
    plain = simulate([ask], CONFIG, COST)
    later = simulate([ask], CONFIG, dataclasses.replace(COST, request=0.5))
    assert later.first_token[0] == pytest.approx(plain.first_token[0] + 0.5)
    assert later.between[0] == pytest.approx(plain.between[0])
    varied = simulate([ask], CONFIG, COST, spread=(0.5, 1.0, 1.0, 1.0, 3.0))
    assert varied.between[0] == pytest.approx(plain.between[0], rel=0.05)
    assert varied.between[1] == pytest.approx(3 * plain.between[1], rel=0.05)
    assert varied == simulate([ask], CONFIG, COST, spread=(0.5, 1.0, 1.0, 1.0, 3.0))


def test_a_recorded_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in TRACE))
    asks = read_trace(path)
    assert [ask.at for ask in asks] == [0.0, 0.5, 0.9]
    assert asks[1].length == 600 and (asks[1].tokens() == asks[2].tokens()).all()
    assert simulate(asks, CONFIG, COST).hit_rate > 0.3
    path.write_text('{"timestamp": 1, "input_length": 5}')
    with pytest.raises(ConfigError, match="line 1 is no request"):
        read_trace(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(path)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "30", "--replicas", "1,2", "--router", "shortest"]) == 0
    told = capsys.readouterr().out
    assert "30 requests" in told and told.count("shortest") == 2
    given = ["simulate", "--requests", "20", "--replicas", "2", "--load", "questions", "--json"]
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["router"] for one in found["outcomes"]] == ["affinity", "round-robin", "shortest"]
    with pytest.raises(SystemExit):
        main(["simulate", "--replicas", "0"])
    assert "no numbers above 0" in capsys.readouterr().err


def test_apart_streams_do_not_wait_for_long_prompts() -> None:
    long = [
        SimulatedRequest(0.05 * number, ((1000 + number, 3000),), 8, b"%d" % number, b"%d" % number)
        for number in range(40)
    ]
    short = [SimulatedRequest(0.0, ((number, 80),), 100, b"s%d" % number, b"s%d" % number) for number in range(8)]
    asks = sorted([*long, *short])
    config, cost = dataclasses.replace(CONFIG, max_requests=32), StepCost(1e-3, 30e-6, 100e-6, 5e-8)
    together = simulate(asks, config, cost, replicas=2)
    apart = simulate(asks, config, cost, roles={"prefill": 1, "decode": 1}, move=1e-7)
    assert apart.requests == together.requests == len(asks)
    assert apart.between[1] < together.between[1] / 2
    assert apart.hit_rate == together.hit_rate == 0.0
    assert apart.tokens_per_second > 0.4 * together.tokens_per_second


def test_roles_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "20", "--replicas", "2", "--roles", "1+1", "--router", "shortest"]) == 0
    assert "     1+1 shortest" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["simulate", "--roles", "1+0"])
