"""The harness in `bench/peers`: what it asks of engines, and what it makes of their answers. The engines are fakes."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import io
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rekindle

PEERS = Path(__file__).parents[2] / "toolkit/workshop/bench/peers"
VOCAB = 50


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its files import each other by their plain names, as scripts in one folder do."""
    names = [path.stem for path in PEERS.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(str(PEERS))
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(load("engine"), "time", SimpleNamespace(perf_counter=clock.now, sleep=clock.sleep))
    return clock


class Clock:
    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def load(name: str) -> Any:
    return importlib.import_module(name)


def setting(**changes: Any) -> Any:
    return load("engine").Setting(**{"folder": "f", "bits": 16, "threads": 2, "scratch": "s", "cache": "c"} | changes)


def test_a_closed_batch_is_there_at_once(clock: Clock) -> None:
    arrivals = load("engine").Arrivals(3, None)
    assert arrivals
    assert arrivals.due(idle=True) == [0, 1, 2]
    assert not arrivals
    assert arrivals.due(idle=True) == [] and clock.slept == []


def test_requests_come_when_they_are_due_and_only_an_idle_engine_sleeps(clock: Clock) -> None:
    arrivals = load("engine").Arrivals(4, [2.0, 0.5, 2.0, 3.0])
    assert arrivals.due(idle=False) == [] and clock.slept == []
    assert arrivals.due(idle=True) == [1] and clock.slept == [0.5]
    clock.time += 1.75
    assert arrivals.now() == 2.25
    assert arrivals.due(idle=True) == [0, 2] and clock.slept == [0.5]
    assert arrivals.due(idle=False) == [] and arrivals
    assert arrivals.due(idle=True) == [3] and clock.slept == [0.5, 0.75]


def test_the_slowest_capacity_sets_the_rate_for_everybody() -> None:
    plans = load("plans")
    capacities = {"quick": 8.0, "slow": 2.0}
    one, same, other = (plans.arrivals(plans.Draw(VOCAB, seed), capacities) for seed in (7, 7, 8))
    assert one.batches == same.batches
    assert one.batches != other.batches
    for share, batch in zip(plans.SHARES, one.batches, strict=True):
        *at, flood = batch.at
        assert at == sorted(at) and at[0] >= 0 and at[-1] <= plans.COUNT / (2.0 * share / 100)
        assert flood == at[plans.COUNT // 2] and len(batch.prompts[-1]) == plans.FLOOD
        assert len(batch.prompts) == len(batch.outputs) == len(batch.at) == plans.COUNT + 1
    assert one.batches[0].at[-2] > one.batches[2].at[-2]


def test_capacity_is_of_the_better_closed_batch_after_a_warm_one() -> None:
    plan = load("plans").capacity(load("plans").Draw(VOCAB, 0))
    assert [batch.at is None for batch in plan.batches] == [False, True, True]
    answers = [load("engine").Answer(wall, [], []) for wall in (1.0, 8.0, 4.0)]
    assert plan.figures(plan.batches, answers) == {"capacity_req_s": load("plans").COUNT / 4.0}


def test_latencies_count_from_each_arrival_and_leave_the_long_prompt_apart() -> None:
    batch = load("plans").Batch([[3], [4], [5]], [3, 2, 1], at=[1.0, 2.0, 2.0])
    answer = load("engine").Answer(9.0, [[1.25, 1.5, 2.5], [2.5, 2.75], [8.0]], [])
    figures = load("plans").latencies(batch, answer)
    assert figures["ttft_p50_ms"] == 375.0
    assert figures["ttft_p99_ms"] == pytest.approx(500, rel=0.01)
    assert figures["gap_max_ms"] == 1000.0 and figures["flood_ttft_ms"] == 6000.0


class Steady:
    """Answers one request after another, each in the same time, and says what it was asked."""

    notes = "steady"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[Any] = []

    def generate(
        self, prompts: Sequence[list[int]], outputs: Sequence[int], *, keep: bool = False, at: Any = None
    ) -> Any:
        self.asked.append(at)
        now, times = 0.0, []
        for new, begin in zip(outputs, at or [0.0] * len(prompts), strict=True):
            start = max(now, begin)
            now = start + self.seconds
            times.append(list(np.linspace(start, now, new + 1)[1:]))
        return load("engine").Answer(now, times, [[7] * new for new in outputs])


class Closed(Steady):
    def generate(self, *batch: Any, at: Any = None, **more: Any) -> Any:
        if at is not None:
            raise NotImplementedError("nobody gets in")
        return super().generate(*batch, **more)


def race(monkeypatch: pytest.MonkeyPatch, engines: dict[str, Steady]) -> Any:
    rounds = load("rounds")

    class Process:
        """In this one."""

        alive = True

        def __init__(self, name: str, *rest: Any) -> None:
            self.name = name

        def ask(self, do: str, **command: Any) -> dict[str, Any]:
            engine = engines[self.name]
            try:
                known = {"notes": engine.notes, "resident_bytes": 5e6}
                return dataclasses.asdict(engine.generate(**command)) if do == "generate" else known
            except NotImplementedError as error:
                raise rounds.EngineFailed(f"{type(error).__name__}: {error}") from error

        def once(self, **command: Any) -> None: ...

        def wait(self) -> None: ...

        def cpu_seconds(self) -> float:
            return 0.0

    monkeypatch.setattr(rounds, "Process", Process)
    monkeypatch.setattr(rounds, "settle", lambda engines: None)
    return rounds.Race(dict.fromkeys(engines, setting()), dict.fromkeys(engines, "python"), VOCAB, io.StringIO(), dict)


def test_a_race_sends_everybody_the_same_arrivals_and_pairs_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"rekindle": Steady(0.1), "openvino": Steady(0.2), "transformers": Closed(0.1)}
    one = race(monkeypatch, engines)
    one.run(["W1", "W7"], 2)
    assert one.capacity == {"rekindle": pytest.approx(10), "openvino": pytest.approx(5)}
    ours, theirs = engines["rekindle"].asked, engines["openvino"].asked
    assert ours == theirs and len(ours) == 3 + 3 + 2 * 3  # W1 in each round, round 0, two rounds of three shares
    assert {name: len(found["W7"]) for name, found in one.figures.items() if "W7" in found} == {
        "rekindle": 2,
        "openvino": 2,
    }
    assert len(one.figures["transformers"]["W1"]) == 2
    assert all("cores_used_by_others" in figures for figures in one.figures["rekindle"]["W7"])
    table = load("rounds")
    summary = table.summary(one, shape="tiny", bits=16)
    ratio = summary["ratios"]["W7 ttft_p99_ms_at_95"]
    assert ratio["peer"] == "openvino" and ratio["ratio"] > 2  # twice as quick, and no queue
    text = table.text(summary)
    assert "transformers: W7: NotImplementedError: nobody gets in" in text
    assert "rekindle 10.00, openvino 5.00" in text
    assert "MB resident after all rounds: rekindle 5, openvino 5, transformers 5" in text
    rows = [line for line in text.splitlines() if line.startswith("| W7")]
    assert len(rows) == 15 and all(" n/a " in row for row in rows)


def test_a_race_without_arrivals_has_no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    one = race(monkeypatch, {"rekindle": Steady(0.1)})
    one.run(["W1"], 1)
    assert one.capacity == {}
    assert "capacity" not in load("rounds").text(load("rounds").summary(one, shape="tiny", bits=16))


# The engines' own files, over fakes of what they import.

AT = [0.0, 4.0, 0.5]  # the second comes when the others are done


@dataclasses.dataclass
class Handle:
    left: int
    ready: int = 0

    def can_read(self) -> bool:
        return self.ready > 0

    def read(self) -> dict[int, Any]:
        self.ready -= 1
        return {0: SimpleNamespace(generated_ids=[7])}


class Pipeline:
    """OpenVINO's, where every step takes a second and gives everybody a token."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.handles: list[Handle] = []
        self.added: list[float] = []

    def add_request(self, number: int, tokens: Any, config: Any) -> Handle:
        self.added.append(self.clock.time - 100.0)
        self.handles.append(Handle(config.max_new_tokens))
        return self.handles[-1]

    def has_non_finished_requests(self) -> bool:
        return any(handle.left for handle in self.handles)

    def step(self) -> None:
        assert self.has_non_finished_requests()
        self.clock.time += 1.0
        for handle in self.handles:
            if handle.left:
                handle.left, handle.ready = handle.left - 1, handle.ready + 1


def test_openvino_is_given_requests_as_they_come(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    pipeline = Pipeline(clock)
    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace, GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=lambda *options: pipeline,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=np.asarray, __version__="1"))
    opened = load("with_openvino").open(setting())
    answer = opened.generate([[3], [4], [5]], [2, 1, 2], at=AT)
    assert answer.times == [[1.0, 2.0], [5.0], [2.0, 3.0]]
    assert answer.ids == [[7, 7], [7], [7, 7]] and answer.wall == 5.0
    assert pipeline.added == [0.0, 1.0, 4.0] and clock.slept == [1.0]
    closed = opened.generate([[3], [4]], [2, 1])
    assert closed.times == [[1.0, 2.0], [1.0]]


class Llama(ModuleType):
    """llama.cpp's functions, as far as the loop calls them; a call takes a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("llama_cpp")
        self.clock = clock
        self.calls: list[list[tuple[int, int]]] = []  # of each: sequence and position of every token

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: SimpleNamespace()

    def llama_vocab_n_tokens(self, vocab: Any) -> int:
        return VOCAB

    def llama_batch_init(self, size: int, *rest: int) -> Any:
        names = ("token", "pos", "n_seq_id", "logits")
        return SimpleNamespace(seq_id=[[0] for _ in range(size)], **{name: [0] * size for name in names})

    def llama_decode(self, context: Any, batch: Any) -> int:
        assert batch.n_tokens > 0
        self.clock.time += 1.0
        self.calls.append([(batch.seq_id[i][0], batch.pos[i]) for i in range(batch.n_tokens)])
        return 0

    def llama_get_logits(self, context: Any) -> Any:
        return ctypes.cast((ctypes.c_float * (VOCAB * 8))(), ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_takes_turns_between_a_prompt_and_whoever_decodes(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    api = Llama(clock)
    monkeypatch.setitem(sys.modules, "llama_cpp", api)
    opened = load("with_llama_cpp").open(setting())
    long = load("with_llama_cpp").BATCH
    answer = opened.generate([[3, 4], [3] * long, [5, 6]], [4, 1, 1], at=[0.0, 0.5, 30.0])
    sequences = [{sequence for sequence, _ in call} for call in api.calls]
    assert sequences == [{0}, {0}, {1}, {0}, {0}, {2}]
    assert [len(call) for call in api.calls] == [2, 1, long, 1, 1, 2]
    assert answer.times == [[1.0, 2.0, 4.0, 5.0], [3.0], [31.0]]
    api.calls.clear()
    opened.generate([[3, 4], [5, 6]], [2, 2])
    assert api.calls == [[(0, 0), (0, 1)], [(1, 0), (1, 1)], [(0, 2), (1, 2)]]


def test_rekindle_is_asked_when_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        config = SimpleNamespace(quantize=None, kv_dtype="bfloat16", page_size=32)

        async def stream(self, prompt: list[int], *, max_tokens: int, ignore_eos: bool) -> AsyncIterator[Any]:
            yield SimpleNamespace(token_ids=prompt * max_tokens)

    monkeypatch.setattr(rekindle, "open_sync", lambda folder, **options: Session())
    at = [0.05, 0.0]
    answer = load("with_rekindle").open(setting()).generate([[3], [4]], [2, 1], at=at)
    assert answer.ids == [[3, 3], [4]]
    assert all(times[0] >= begin for times, begin in zip(answer.times, at, strict=True))


def test_transformers_says_why_it_takes_no_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(inference_mode=lambda: lambda function: function))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    kind = load("with_transformers").Transformers
    with pytest.raises(NotImplementedError, match="continuous batching"):
        kind.generate(object.__new__(kind), [[3]], [1], at=[0.0])


# A file that everybody opens.


def test_a_race_over_a_file_names_it_and_sets_our_own_other_engine_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"rekindle": Steady(0.1), "rekindle_int8": Steady(0.15), "llama_server": Steady(0.2)}
    one = race(monkeypatch, engines)
    one.run(["W1"], 1)
    summary = load("rounds").summary(one, shape="tiny", bits=None, file="tiny-q4_0.gguf", file_mb=1234.5)
    assert summary["ratios"]["W1 decode_tok_s"]["peer"] == "llama_server"
    assert summary["ratios"]["W1 decode_tok_s"]["ratio"] == pytest.approx(2)
    text = load("rounds").text(summary)
    assert text.startswith("\ntiny-q4_0.gguf (1,234 MB) (medians of 1 rounds")
    assert "rekindle / rekindle_int8: W1 decode_tok_s 1.50×, W1 ttft_ms 1.50×" in text


def test_engines_open_the_file_in_its_own_precision(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    opened: list[tuple[Any, dict[str, Any]]] = []

    def open_sync(model: str, **options: Any) -> Any:
        opened.append((model, options))
        return SimpleNamespace(config=SimpleNamespace(dtype="auto", quantize=None, kv_dtype="auto", page_size=16))

    monkeypatch.setattr(rekindle, "open_sync", open_sync)
    file = setting(file="m.gguf")
    load("with_rekindle").open(file)
    options = SimpleNamespace(llama_server=None, workloads=["W1", "W3"])
    load("with_rekindle").open(load("run").setting_of("rekindle_int8", file, Path("s"), options, None))
    load("with_rekindle").open(setting())
    assert [model for model, _ in opened] == ["m.gguf", "f", "f"]
    assert not {"dtype", "quantize"} & opened[0][1].keys()
    assert [options["quantize"] for _, options in opened[1:]] == ["int8", None]
    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace, ContinuousBatchingPipeline=lambda path, *rest: opened.append((path, {})),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(__version__="1"))
    load("with_openvino").open(file)
    assert opened[-1][0] == "m.gguf"


def test_llama_cpps_server_is_asked_for_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int, int]] = []

    class Running:
        def __init__(self, program: Path, file: Path, *, rows: int, context: int, options: Sequence[str]) -> None:
            started.append((str(file), rows, context))

        def __enter__(self) -> Running:
            return self

        def __exit__(self, *error: object) -> None:
            started.clear()

        def answers(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
            assert all(one["ignore_eos"] and not one["cache_prompt"] for one in asked)
            timings = {"prompt_ms": 500.0, "predicted_ms": 300.0}
            return [{"tokens": [7] * one["n_predict"], "timings": timings} for one in asked]

    server = load("with_llama_server")
    monkeypatch.setattr(server, "LlamaServer", Running)
    opened = server.open(setting(file="m.gguf", program="/bin/llama-server"))
    answer = opened.generate([[3] * 200], [4])
    assert answer.times == [[0.5, pytest.approx(0.6), pytest.approx(0.7), pytest.approx(0.8)]]
    assert answer.wall == pytest.approx(0.8) and answer.ids == [[7] * 4]
    assert opened.generate([[3] * 100], [1]).times == [[0.5]]
    both = opened.generate([[3] * 100, [4] * 600], [1, 2])
    assert both.times == [[], []] and [len(ids) for ids in both.ids] == [1, 2]
    assert started == [("m.gguf", 1, 256), ("m.gguf", 2, 768)]
    with pytest.raises(NotImplementedError, match="whole batches"):
        opened.generate([[3]], [1], at=[0.0])
    opened.close()
    assert started == []
