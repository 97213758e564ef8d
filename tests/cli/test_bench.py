"""`rekindle bench` at toy sizes: what it says follows from what it measured. No timing is asserted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from helpers import checkpoints
from rekindle._src.bench import limits, workloads
from rekindle._src.bench.shapes import SHAPES, hf_config, write_checkpoint
from rekindle._src.cli import bench
from rekindle._src.cli.main import main, parser
from rekindle._src.cli.usage import engine_options
from rekindle._src.models.base import abstract_model
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.registry import config_from_hf
from rekindle._src.text import Tokenizer
from rekindle.errors import RekindleError

LIMITS = limits.MachineLimits(read_gb_per_s=40.0, bf16_gflop_per_s=800.0, f32_gflop_per_s=400.0, int8_gflop_per_s=600.0)


def work(shape: str, quantize: str | None = None) -> limits.Work:
    return limits.Work.of(*abstract_model(config_from_hf(hf_config(shape)), "bfloat16", quantize))


def test_a_token_reads_every_weight_but_an_embedding_that_is_not_the_head() -> None:
    layers = 30 * (576 * (9 + 2 * 3) * 64 + 576 * 576 + 3 * 576 * 1536)
    head = 49152 * 576
    norms = 61 * 576 * 4
    assert work("135m").prefill_flop == 2 * layers
    assert work("135m").decode_bytes == 2 * (layers + head) + norms
    assert work("135m", "int8").decode_bytes == pytest.approx(layers + head, rel=0.02)
    untied = SHAPES["8b"]
    table = untied["vocab_size"] * untied["hidden_size"]
    assert work("8b").decode_bytes == pytest.approx(work("8b").prefill_flop + 2 * table, rel=1e-3)


def test_a_token_reads_its_own_experts() -> None:
    raw = checkpoints.CASES["qwen3-moe"]
    few, every = (
        limits.Work.of(*abstract_model(config_from_hf(raw | {"num_experts_per_tok": chosen}), "bfloat16"))
        for chosen in (2, raw["num_experts"])
    )
    config = config_from_hf(raw)
    experts = sum(spec.num_experts - 2 for spec in config.moe or () if spec)
    one = 3 * config.hidden_size * raw["moe_intermediate_size"]
    assert every.decode_bytes - few.decode_bytes == experts * one * 2
    assert every.prefill_flop - few.prefill_flop == experts * one * 2


def test_shares_are_of_the_limit_that_binds() -> None:
    small = work("135m")
    rate = 0.5 * 40e9 / small.decode_bytes
    assert bench.shares("W1", {"decode_tok_s": rate}, small, LIMITS, {}) == {"share_of_read": pytest.approx(0.5)}
    flop = {"prefill_tok_s": 400e9 / small.prefill_flop}
    for options, share in (({}, 0.5), ({"dtype": "float32"}, 1.0), ({"quantize": "int8"}, 0.5)):
        assert bench.shares("W2", flop, small, LIMITS, options) == {"share_of_product": pytest.approx(share)}
    assert bench.shares("W3", {}, small, LIMITS, {}) == {}


def test_the_device_is_idle_in_all_time_that_no_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = iter((10.0, 14.0)), iter((1.0, 4.0))
    monkeypatch.setattr(workloads.time, "perf_counter", lambda: next(clock))
    session: Any = SimpleNamespace(stats=lambda: SimpleNamespace(device_seconds=next(busy)))
    assert workloads.Idleness(session).share == 0.25


def test_limits_are_measured() -> None:
    found = limits.measure(size=64, repeat=1, read_bytes=1 << 20)
    assert min(found.read_gb_per_s, found.bf16_gflop_per_s, found.f32_gflop_per_s, found.int8_gflop_per_s) > 0


def test_a_shape_becomes_a_checkpoint_that_opens(tmp_path: Path) -> None:
    folder = write_checkpoint("micro", tmp_path / "micro")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    model = load(folder, dtype="float32")
    assert model.config == config_from_hf(hf_config("micro"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == model.config.vocab_size and tokenizer.eos_ids == (2,)
    assert tokenizer.decode(tokenizer.encode("a fire")) == "a fire"
    assert write_checkpoint("micro", folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "a complete folder is not written again"


def test_a_workload_has_rows_for_what_is_guessed() -> None:
    arguments = parser().parse_args(["bench", "--prompt-lookup", "7"])
    assert bench.needed("tiny", "W1", engine_options(arguments)) == {"max_model_len": 1024, "max_requests": 8}
    assert bench.needed("micro", "W3", {}) == {"max_model_len": 2048, "max_requests": 32}


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--workloads", "W1,W9"])
    assert "W9" in capsys.readouterr().err


@pytest.mark.anyio
@pytest.mark.parametrize(("context", "length"), [(1024, 1023), (2048, 1024)])
async def test_a_prompt_is_no_longer_than_the_context_allows(context: int, length: int) -> None:
    asked: list[int] = []

    async def generate(prompt: list[int], **options: Any) -> Any:
        asked.append(len(prompt))
        return SimpleNamespace(timings=SimpleNamespace(first_token=0.5))

    async def clear(*, tier: str) -> None: ...

    config = SimpleNamespace(max_model_len=context)
    session: Any = SimpleNamespace(config=config, generate=generate, cache=SimpleNamespace(clear=clear))
    figures = await workloads.prefill(session, workloads.RandomPrompts(100))
    assert asked == [length] and figures == {"prefill_tok_s": 2 * length}


@pytest.mark.slow
def test_fresh_processes_start_and_restart(tmp_path: Path) -> None:
    folder = str(write_checkpoint("micro", tmp_path / "micro"))
    started = workloads.first_token(folder, {})
    assert 0 < started["warm_s"] < started["cold_s"], "the second process compiles nothing"
    again = workloads.restart(folder, {"max_requests": 16})
    assert again["restored_share"] == again["restored_prefill_s"] / again["cold_prefill_s"] > 0


def test_runs_in_which_a_program_was_compiled_are_not_counted() -> None:
    compilations, calls = [3, 3, 5, 5, 6, 6, 6], iter(range(100))
    session = SimpleNamespace(stats=lambda: SimpleNamespace(compilations=compilations[ran[0]]))
    ran = [0]

    async def workload() -> dict[str, float]:
        ran[0] += 1
        return {"run": float(next(calls))}

    assert anyio.run(bench.timed_runs, cast(Any, session), workload, 3) == [{"run": 2.0}, {"run": 4.0}, {"run": 5.0}]
    compilations[:] = range(100)
    with pytest.raises(RekindleError, match="still compiled after 7 runs"):
        anyio.run(bench.timed_runs, cast(Any, session), workload, 1)
