"""The parts of a training: the lines of chats, the shapes of micro-batches, and losses against their formulas."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rekindle._src.capabilities.tuning.batches import BatchPlan, length_for
from rekindle._src.capabilities.tuning.checkpoint import MOST_TRAININGS, TrainingCheckpoints
from rekindle._src.capabilities.tuning.data import Line, LineMaker
from rekindle._src.capabilities.tuning.losses import NextToken, Policy, Preference, advantages_of
from rekindle._src.capabilities.tuning.memory import KEPT, check_room, need_of, room_of
from rekindle._src.capabilities.tuning.request import FOREIGN, TuneOptions
from rekindle._src.capabilities.tuning.sites import trained_matrices
from rekindle._src.capabilities.tuning.step import TrainingShape
from rekindle._src.capabilities.tuning.trainer import TrainerState
from rekindle._src.cli.main import main
from rekindle._src.core import memory
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest, OutOfMemory
from rekindle.tiny import folder

TOKENIZER, CHATS = Tokenizer.load(folder()), ChatTemplate.load(folder())
assert CHATS is not None
CHAT: Any = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Good night."},
]


def maker(longest: int = 256) -> LineMaker:
    return LineMaker(TOKENIZER, CHATS, TOKENIZER.vocab_size, longest)


def learned(line: Line) -> str:
    return TOKENIZER.decode(line.ids[line.learned].tolist(), skip_special_tokens=False)


def test_the_answers_of_a_chat_are_learned_alone() -> None:
    """With the token that ends each, as the template writes them, and nothing of the user's."""
    (line,) = maker().next_tokens([{"messages": CHAT}])
    assert learned(line) == "Good day.<|im_end|>Good night.<|im_end|>"
    whole = CHATS.render(CHAT, add_generation_prompt=False)
    assert TOKENIZER.decode(line.ids.tolist(), skip_special_tokens=False) == whole


def test_texts_pairs_and_preferences() -> None:
    text, pair, named = maker().next_tokens(
        ["Red.", ("The sky is", " red."), {"prompt": CHAT[:1], "completion": "Yes."}]
    )
    assert learned(text).startswith("Red.<|") and text.learned.all()
    assert learned(pair).startswith(" red.<|") and learned(named).startswith("Yes.<|")
    chosen, rejected = maker().preferences([(CHAT[:1], "Yes.", [{"role": "assistant", "content": "No."}])])
    assert learned(chosen).startswith("Yes.") and learned(rejected).startswith("No.")
    assert chosen.ids[: len(chosen.ids) - chosen.learned.sum()].tolist() == TOKENIZER.encode(
        CHATS.render(CHAT[:1]), add_special_tokens=False
    )
    with pytest.raises(InvalidRequest, match=r"data\[0\]='\d+ tokens'.*max_length=16"):
        maker(16).next_tokens([CHAT])


def test_lines_fill_micro_batches_of_few_shapes() -> None:
    lengths = [5, 17, 18, 30, 33, 64, 100, 3]
    lines = [Line(np.arange(size, dtype=np.int32), np.ones(size, np.bool_)) for size in lengths]
    plan = BatchPlan(tokens=128, chosen=16, most=8)
    batches = list(plan.batches(lines))
    assert sorted(line for batch in batches for line in batch.lines) == list(range(8))
    assert [batch.shape.tokens for batch in batches] == [128, 64, 32, 16]
    for batch in batches:
        assert batch.tokens.shape == (batch.shape.rows, batch.shape.tokens) and len(batch.places) % 16 == 0
        at = 0
        for row, (line, count) in enumerate(zip(batch.lines, batch.counts, strict=True)):
            assert count == lengths[line] - 1
            assert batch.targets[at : at + count].tolist() == lines[line].ids[1:].tolist()
            assert batch.places[at : at + count].tolist() == [row * batch.shape.tokens + k for k in range(count)]
            at += count
    assert [length_for(size) for size in (1, 16, 17, 24, 25, 48, 49)] == [16, 16, 24, 24, 32, 48, 64]


def weights_of(formula: Callable[[list[Any]], Any], logprobs: Sequence[Any]) -> tuple[float, list[Any]]:
    """A formula's value, and the weights that its derivatives are."""
    with jax.enable_x64(True):
        values = [jnp.asarray(one) for one in logprobs]
        value, slopes = jax.value_and_grad(formula)(values)
        return float(value), [-np.asarray(slope) for slope in slopes]


def assert_part(loss: Any, formula: Callable[[list[Any]], Any], logprobs: Sequence[Any]) -> None:
    value, weights = weights_of(formula, logprobs)
    found = loss.weigh(range(len(logprobs)), logprobs)
    assert found.value == pytest.approx(value, rel=1e-9)
    for one, right in zip(found.weights, weights, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-6, atol=1e-12)


RNG = np.random.default_rng(0)
LOGPROBS = [-RNG.exponential(size=size) for size in (3, 5, 2, 4)]
REFERENCES = [one + RNG.normal(size=len(one)) * 0.3 for one in LOGPROBS]


def test_next_tokens_and_preferences_have_the_derivatives_of_their_formulas() -> None:
    total = sum(map(len, LOGPROBS))
    assert_part(NextToken([len(one) for one in LOGPROBS]), lambda own: -sum(one.sum() for one in own) / total, LOGPROBS)

    def margins(own: list[Any], *, means: bool) -> list[Any]:
        size = jnp.mean if means else jnp.sum
        away = [size(one - reference) for one, reference in zip(own, REFERENCES, strict=True)]
        return [away[0] - away[1], away[2] - away[3]]

    def dpo(own: list[Any]) -> Any:
        return -sum(jnp.log(jax.nn.sigmoid(0.3 * margin)) for margin in margins(own, means=False)) / 2

    def ipo(own: list[Any]) -> Any:
        return sum((margin - 1 / 0.6) ** 2 for margin in margins(own, means=True)) / 2

    assert_part(Preference(REFERENCES, 0.3, means=False), dpo, LOGPROBS)
    assert_part(Preference(REFERENCES, 0.3, means=True), ipo, LOGPROBS)


@pytest.mark.parametrize("variant", ["dapo", "grpo", "dr_grpo"])
def test_grpo_has_the_derivatives_of_its_variants(variant: str) -> None:
    """Ratios beyond the clip on both sides included, with the weight of k3."""
    advantages, drawn = [1.0, -0.5, 2.0, -1.5], [one + RNG.normal(size=len(one)) * 0.4 for one in LOGPROBS]
    counts, most = [len(one) for one in LOGPROBS], 8

    def formula(own: list[Any]) -> Any:
        parts = []
        for one, old, reference, advantage in zip(own, drawn, REFERENCES, advantages, strict=True):
            ratio = jnp.exp(one - old)
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
            away = reference - one
            parts.append(-gain + 0.04 * (jnp.exp(away) - away - 1))
        if variant == "grpo":
            return sum(part.mean() for part in parts) / len(parts)
        return sum(part.sum() for part in parts) / (sum(counts) if variant == "dapo" else len(parts) * most)

    loss = Policy(advantages, drawn, REFERENCES, variant=variant, beta=0.04, clip=0.2, most=most)
    assert_part(loss, formula, LOGPROBS)
    assert loss.apart == max(np.abs(one - old).max() for one, old in zip(LOGPROBS, drawn, strict=True))


def test_advantages_have_bessels_deviation() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    scaled = advantages_of(rewards, scaled=True)
    np.testing.assert_allclose(scaled[0], [0.5 / (0.57735027 + 1e-4), *[-0.5 / (0.57735027 + 1e-4)] * 2, scaled[0, 0]])
    assert not scaled[1].any()
    assert advantages_of(rewards, scaled=False)[0].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_only_the_latest_state_of_few_trainings_is_kept(tmp_path: Path) -> None:
    states = [TrainerState(np.full(3, step, np.float32), (np.int32(step),)) for step in range(3)]
    kept = TrainingCheckpoints(tmp_path, "mine", {"data": "a"})
    assert kept.load() is None
    for step, state in enumerate(states):
        kept.save(state, [(step,)] * (step + 1))
    found = kept.load()
    assert found is not None and found.state.numbers.tolist() == [2.0] * 3 and len(found.records) == 3
    assert TrainingCheckpoints(tmp_path, "mine", {"data": "b"}).load() is None
    (path,) = (tmp_path / "tuning").iterdir()
    for file in path.rglob("*.npz"):
        file.write_bytes(b"no")
    assert kept.load() is None, "one that is damaged is none"
    for number in range(MOST_TRAININGS + 3):
        TrainingCheckpoints(tmp_path, f"other {number}", {}).save(states[0], [(0,)])
    assert len(list((tmp_path / "tuning").iterdir())) == MOST_TRAININGS


def test_no_state_is_read_that_another_user_could_have_written(tmp_path: Path) -> None:
    """Its numbers would become an adapter, and opening it a file of any size."""
    cache, state = tmp_path / "cache", TrainerState(np.ones(3, np.float32), ())
    kept = TrainingCheckpoints(cache, "mine", {"data": "a"})
    kept.save(state, [(0,)])
    ((path,),) = [[*(cache / "tuning").iterdir()]]
    assert kept.load() is not None and {one.stat().st_mode & 0o077 for one in path.rglob("*")} == {0}
    (numbers,) = path.rglob("*.npz")
    numbers.chmod(0o666)
    assert kept.load() is None, "a file that others can write"
    numbers.rename(tmp_path / "elsewhere.npz")
    numbers.symlink_to(tmp_path / "elsewhere.npz")
    assert kept.load() is None, "a link"
    numbers.unlink()
    os.mkfifo(numbers, 0o600)
    assert kept.load() is None, "a FIFO is not waited for"
    numbers.unlink()
    (tmp_path / "elsewhere.npz").rename(numbers)
    numbers.chmod(0o600)
    assert kept.load() is not None
    cache.chmod(0o777)
    before = sorted(cache.rglob("*"))
    distrusting = TrainingCheckpoints(cache, "mine", {"data": "a"})
    assert distrusting.load() is None, "a folder that others can write"
    distrusting.save(state, [(0,), (1,)])
    distrusting.remove()
    assert sorted(cache.rglob("*")) == before


@pytest.mark.parametrize("records", ['[["<b>"]]', "[1]", "{}", "[[[1.0]]]", "[[true]]"])
def test_a_history_that_is_not_numbers_is_none(tmp_path: Path, records: str) -> None:
    kept = TrainingCheckpoints(tmp_path, "mine", {"data": "a"})
    kept.save(TrainerState(np.ones(3, np.float32), ()), [(0, None, 0.5)])
    assert kept.load() is not None
    (history,) = tmp_path.rglob("history.json")
    history.write_text(records)
    assert kept.load() is None


def test_the_command_line_knows_kept_trainings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TrainingCheckpoints(tmp_path / "cache", "mine", {}).save(TrainerState(np.ones(3, np.float32), ()), [(0,)])
    assert main(["cache", "clear", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "dropped 1 entries" in capsys.readouterr().out
    assert not [*(tmp_path / "cache" / "tuning").iterdir()]


def test_a_training_that_does_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(folder()).config
    need = need_of(config, trained_matrices(config, "all"), 16, TrainingShape(8, 128, 256), 4_000_000)
    assert need.total > need.adapter + need.inputs > 0
    monkeypatch.setattr(memory, "available", lambda: need.total // 2)
    with pytest.raises(OutOfMemory, match=r"Training needs [0-9.]+ MiB.*8 rows of 128 tokens.* are free"):
        check_room(need, TrainingShape(8, 128, 256))
    monkeypatch.setattr(memory, "device_available", lambda: 2 * need.total)
    check_room(need, TrainingShape(8, 128, 256))  # the device's memory counts
    assert room_of(need) == min(KEPT, need.total // 2)


def test_options_of_other_libraries_are_none_of_ours() -> None:
    ours = {field.name for field in dataclasses.fields(TuneOptions)}
    assert not ours & FOREIGN.keys()
    advice = [fix.removeprefix("Use ").split()[0] for fix in FOREIGN.values() if fix.endswith("the same value")]
    assert len(advice) > 20 and set(advice) <= ours
