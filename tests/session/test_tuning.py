"""`session.tune`: numbers, what a session has of it, errors, and what goes on meanwhile."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.sessions import eventually, front_of
from helpers.small import MODEL, OPTIONS, TINY, VOCAB, opening, plain, prompt
from helpers.thorough import by_default, trio_in_ci
from rekindle._src.capabilities.tuning.owner import TUNING
from rekindle._src.capabilities.tuning.run import TrainingRun
from rekindle._src.capabilities.tuning.trainer import Trainer
from rekindle._src.models.adapters.adapted import merged
from rekindle._src.models.adapters.reading import read_adapter
from rekindle._src.models.base import LoadedModel, graph_of
from rekindle._src.models.differentiable import StoredMatrix, widened
from rekindle._src.models.placement import random_model
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import config_from_hf
from rekindle.errors import ConfigError, InvalidRequest, SessionClosed

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
PAIRS: Any = [(prompt(seed, 6), [40] * 3) for seed in range(3)]  # ids, as the model has no words
STEPS = 60
LEARN: dict[str, Any] = {"rank": 4, "steps": STEPS, "batch": 3, "learning_rate": 4e-2}
LONG: dict[str, Any] = {"rank": 4, "steps": 100_000, "batch": 3, "learning_rate": 1e-4, "every": 1000}


def after(run: rekindle.Tuning, steps: int) -> Callable[[], bool]:
    """True once it has taken so many steps of its own: it may go on from those of the same training before it."""
    return lambda: len(run.history) >= run.resumed_at + steps or run.done


@pytest.mark.anyio
@trio_in_ci
async def test_an_adapter_learns_is_swapped_in_and_saved(tmp_path: Path) -> None:
    """Its rows say what was learned and others what they said before; the folder is the same adapter."""
    async with opening(precompile="lazy") as session:
        owner = TUNING.of(front_of(session))
        assert owner is not None
        run = session.tune("mine", PAIRS, **LEARN)
        report = await run
        assert report.steps == STEPS and not report.cancelled and run.done and session.adapters == ("mine",)
        losses = [step.loss for step in run.history]
        assert losses[-1] == report.loss < 0.7 < 6.0 < losses[0], losses
        assert [step.step for step in run.history] == list(range(1, STEPS + 1)) and report.tokens == STEPS * 9
        assert run.history[0].learning_rate < run.history[5].learning_rate == max(s.learning_rate for s in run.history)
        for ids, learned in PAIRS:
            done = await session.generate(ids, max_tokens=3, ignore_eos=True, adapter="mine")
            assert list(done.token_ids) == learned
            assert (await session.generate(ids, max_tokens=3, ignore_eos=True)).token_ids == plain(ids, 3)
        await session.save_adapter("mine", tmp_path / "mine")
        await session.load_adapter("again", tmp_path / "mine")
        done = await session.generate(PAIRS[0][0], max_tokens=3, ignore_eos=True, adapter="again")
        assert list(done.token_ids) == PAIRS[0][1]
        adapter = read_adapter(tmp_path / "mine", "mine", MODEL.config)
        assert adapter.trained_on == "float32" and merged(MODEL, adapter).fingerprint != MODEL.fingerprint
        with pytest.raises(ConfigError, match="held as 4 bits; merged into float32, it is another model"):
            merged(MODEL, dataclasses.replace(adapter, trained_on="4 bits"))
        made = owner.compilations
        again = await session.tune("other", PAIRS, **LEARN)
        assert again.loss == report.loss, "the same seed gives the same numbers"
        assert owner.compilations == made


@pytest.mark.anyio
async def test_streams_go_on_and_a_cancelled_training_stays_and_leaves_nothing() -> None:
    ids = prompt(9, 12)
    async with opening(precompile="lazy") as session:
        await session.tune("first", PAIRS, **{**LONG, "steps": 1})
        await session.unload_adapter("first")
        plain(ids, 40)  # what it keeps for other tests is no part of the training
        gc.collect()
        before = sum(array.nbytes for array in jax.live_arrays())
        run = session.tune("mine", PAIRS, **LONG)
        done = await session.generate(ids, max_tokens=40, ignore_eos=True)
        assert done.token_ids == plain(ids, 40) and not run.done
        await anyio.to_thread.run_sync(eventually, after(run, 2))
        run.cancel()
        report = await run
        assert report.cancelled and 2 <= report.steps == len(run.history) and session.adapters == ("mine",)
        assert report.longest_pause > 0
        assert (await run) is report, "it may be awaited again"
        names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
        await anyio.to_thread.run_sync(eventually, lambda: "rekindle tuning" not in names())
        del run
        await session.generate(ids, max_tokens=1)  # the device has another job than the training's last one

        def nothing_left() -> bool:
            gc.collect()
            return sum(array.nbytes for array in jax.live_arrays()) <= before + 256  # scalars that JAX keeps

        await anyio.to_thread.run_sync(eventually, nothing_left)
        session.check_integrity()


@pytest.mark.anyio
async def test_a_caller_that_leaves_ends_the_training() -> None:
    async with opening(precompile="lazy") as session:
        run = session.tune("mine", PAIRS, **LONG)
        await anyio.to_thread.run_sync(eventually, after(run, 1))
        with anyio.move_on_after(0):
            await run
        report = await run
        assert report.cancelled and session.adapters == ("mine",)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("within", by_default(["a batch", "the optimiser's program"]))
async def test_a_training_that_was_cut_off_goes_on_where_it_was(
    within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers come out as without the break; other data, or another rank, begin anew."""
    options: dict[str, Any] = {**LEARN, "every": 4}
    async with opening(precompile="lazy") as session:
        whole = session.tune("mine", PAIRS, **options)
        await whole
    task, update, runs = TrainingRun.task, Trainer.update, list[TrainingRun]()

    def cut_task(self: TrainingRun, step: int, *rest: Any) -> Any:
        runs.append(self)
        if step == 6 and within == "a batch":
            self.cancel()
        return task(self, step, *rest)

    def cut_update(self: Trainer, rate: float) -> Any:
        taken = self._update

        def cancelled(*operands: Any) -> Any:
            if len(runs) == 7 and within != "a batch":
                runs[-1].cancel()
            return taken(*operands)

        with monkeypatch.context() as patched:
            patched.setattr(self, "_update", cancelled)
            return (yield from update(self, rate))

    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "task", cut_task)
        patched.setattr(Trainer, "update", cut_update)
        async with opening(precompile="lazy", cache_dir=str(tmp_path)) as session:
            steps = (await session.tune("mine", PAIRS, **options)).steps
            assert steps == (6 if within == "a batch" else 7)
    async with opening(precompile="lazy", cache_dir=str(tmp_path)) as session:
        other = session.tune("mine", PAIRS[:2], **options)
        other.cancel()
        assert (await other).resumed_at == 0
        run = session.tune("mine", PAIRS, **options)
        report = await run
        assert report.resumed_at == steps == run.resumed_at and report.steps == STEPS
        assert [step.loss for step in run.history] == [step.loss for step in whole.history]
        assert f"resumed after {steps}" in repr(run)
        assert (await session.tune("mine", PAIRS, **options)).resumed_at == 0, "one that has ended begins anew"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.thorough
async def test_a_probe_goes_on_in_another_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"rank": 1, "steps": 4, "every": 2, "probe": "The sky is"}
    task = TrainingRun.task

    def cut(self: TrainingRun, step: int, *rest: Any) -> Any:
        if step == 3:
            self.cancel()
        return task(self, step, *rest)

    for resumed, steps in (0, 3), (3, 4):
        with monkeypatch.context() as patched:
            if not resumed:
                patched.setattr(TrainingRun, "task", cut)
            async with await rekindle.open("tiny", **TINY, cache_dir=str(tmp_path)) as session:
                run = session.tune("mine", [("The sky is", " red.")], **options)
                report = await run
                assert (report.resumed_at, report.steps) == (resumed, steps)
                assert run.probes[0].step == resumed or not resumed


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_two_answers_to_one_prompt_are_no_pair() -> None:
    options: dict[str, Any] = {"loss": "grpo", "generations": 2, "max_tokens": 3, "steps": 2, "rank": 1}
    async with opening(precompile="lazy") as session:
        report = await session.tune("mine", PAIRS[0][:1], reward=lambda prompt, text: 1.0, **options)
        assert report.steps == 2


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_closed_session_and_swapped_weights_end_it_with_a_reason() -> None:
    async with opening(precompile="lazy") as session:
        run = session.tune("mine", PAIRS, **LONG)
        await anyio.to_thread.run_sync(eventually, after(run, 1))
        state = dict(zip(MODEL.graph.paths, MODEL.leaves, strict=True))
        await session.swap_weights({path: np.asarray(leaf) * 1.01 for path, leaf in state.items()})
        with pytest.raises(InvalidRequest, match="were swapped in"):
            await run
        await session.swap_weights(MODEL)
        run = session.tune("mine", PAIRS, **LONG)
        await anyio.to_thread.run_sync(eventually, after(run, 1))
    with pytest.raises(SessionClosed):
        await run


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_preferences_move_the_margin(tmp_path: Path) -> None:
    data: Any = [(ids, [50] * 2, [60] * 3) for ids, _ in PAIRS]
    for loss, begins in (("dpo", np.log(2)), ("ipo", 25.0)):
        async with opening(precompile="lazy") as session:
            run = session.tune("mine", data, **{**LEARN, "steps": 12}, loss=loss)  # type: ignore[arg-type]
            await run
            assert run.history[0].loss == pytest.approx(begins, rel=1e-5), "the model is its own reference"
            assert run.history[-1].loss < 0.8 * begins


@pytest.mark.parametrize("kind", by_default(["int4", "int8"], lambda kind: kind == "int4"))
@pytest.mark.thorough
def test_a_quantised_base_is_trained_as_its_floats_are(kind: str, tmp_path: Path) -> None:
    """The same losses come out for the stored integers as for the widened weights, and nothing but these is held."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_from_hf({**checkpoints.CASES["llama"], **sizes, "head_dim": 16})
    model = random_model(config, seed=1, dtype="float32", quantize=kind)
    leaves = dict(zip(model.graph.paths, model.leaves, strict=True))
    graph, _ = graph_of(config, Precision.of("float32"))
    floats = []
    for path in graph.paths:
        parts = (leaves.get(path.removesuffix("weight") + part) for part in ("scale", "minimum"))
        stored = StoredMatrix(leaves[path], *(parts if path.endswith("weight") else (None, None)))
        floats.append(widened(stored, "float32"))
    wide = LoadedModel(config, graph, tuple(floats), f"{model.fingerprint} widened")
    losses = []
    for number, one in enumerate((model, wide)):
        options: Any = {**OPTIONS, "precompile": "lazy", "cache_dir": str(tmp_path / str(number))}
        with rekindle.open_sync(one, **options) as session:
            run = session.tune(
                "mine", [list(range(3, 40)), list(range(90, 110))], rank=2, steps=6, batch=2, learning_rate=1e-2
            )
            run.result_sync()
            losses.append([step.loss for step in run.history])
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize("variant", by_default(["dapo", "grpo", "dr_grpo"], lambda variant: variant == "dapo"))
def test_rewards_are_raised(variant: Any) -> None:
    """Completions in words of one kind; the session draws with the log-probabilities of the training."""
    seen: list[tuple[Any, str]] = []

    def reward(prompt: Any, text: str) -> float:
        seen.append((prompt, text))
        return float(text.count("the"))

    prompts = ["Once upon a time", [{"role": "user", "content": "Tell me a story"}]]
    options: Any = {"rank": 4, "steps": 8, "batch": 2, "generations": 8, "max_tokens": 8, "learning_rate": 1e-2}
    with rekindle.open_sync("tiny", **TINY) as session:
        run = session.tune("mine", prompts, loss="grpo", reward=reward, variant=variant, **options)
        run.result_sync()
        rewards = [step.reward for step in run.history]
        assert all(one is not None for one in rewards) and sum(rewards[-3:]) > sum(rewards[:3]), rewards
        assert len(seen) == 8 * 2 * 8 and {id(prompt) for prompt, _ in seen} == {id(prompt) for prompt in prompts}
        assert all(step.difference is not None and step.difference < 1e-3 for step in run.history), run.history
        with pytest.raises(InvalidRequest, match="raised ZeroDivisionError for the completion"):
            session.tune("other", prompts, loss="grpo", reward=lambda prompt, text: 1 / 0, **options).result_sync()


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ([], {}, "data=.*is empty"),
        ("a text", {}, "data='a text'.*must be a list"),
        ([([3, 4], [])], {}, r"data\[0\]=.*not a completion"),
        ([[3, 4, VOCAB]], {}, rf"data\[0\]={VOCAB}.*not a token id"),
        ([[3, 4], 3], {}, r"data\[1\]=3.*not a text, a pair or a chat"),
        ([[3]], {}, r"data\[0\]=.*no token to learn"),
        ([[3] * 40], {"max_length": 32}, r"data\[0\]='40 tokens'.*max_length=32"),
        ([[{"role": "user", "content": "x"}]], {}, r"data\[0\]=.*no message of the assistant"),
        ([[3, 4]], {"loss": "dpo"}, r"data\[0\]=.*two completions"),
        ([[3, 4]], {"loss": "orpo"}, "loss='orpo'"),
        ([[3, 4]], {"loss": "grpo"}, "reward=None"),
        ([[3, 4]], {"reward": len}, "reward=.*has no use"),
        ([[3, 4]], {"rank": 0}, "rank=0"),
        ([[3, 4]], {"rank": 4096}, "has rank 4096"),
        ([[3, 4]], {"steps": True}, "steps=True"),
        ([[3, 4]], {"seed": -1}, "seed=-1"),
        ([[3, 4]], {"learning_rate": "1e-3"}, "learning_rate='1e-3'"),
        ([[3, 4]], {"learning_rate": float("nan")}, "learning_rate=nan"),
        ([[3, 4]], {"targets": ["k_prj"]}, "targets='k_prj'.*'k_proj'"),
        ([[3, 4]], {"targets": []}, "targets="),
        ([[3, 4]], {"optimizer": 3}, "optimizer=3"),
        ([[3, 4]], {"loss": "ipo", "beta": 0}, "beta=0"),
    ],
)
def test_bad_input_is_refused_by_its_name(quiet: Any, data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidRequest, ConfigError), match=words):
        quiet.tune("mine", data, **options).result_sync()


@pytest.fixture(scope="module")
def quiet() -> Any:
    with rekindle.open_sync(MODEL, **{**OPTIONS, "precompile": "lazy"}) as session:
        yield session
