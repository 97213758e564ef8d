"""Sessions in trainers of others: TRL's rollout function, Tunix's rollout worker."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import rekindle
from rekindle import Session
from rekindle.trl import rollout_func

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")
PROMPTS = ["Once upon a time there", "Once upon a time there", "The cat"]
OPTIONS: dict[str, Any] = {"max_requests": 4, "max_tokens_per_step": 64, "max_model_len": 64, "precompile": "lazy"}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync("tiny", dtype="float32", disk_memory=0, seed=0, quiet=True, **OPTIONS) as made:
        yield made


def expected(prompts: list[list[int]], completions: list[list[int]]) -> list[np.ndarray]:
    """The plain model's log-probabilities of completions."""
    model = rekindle.models.load(rekindle.tiny.folder(), dtype="float32")
    tokens = np.zeros((len(prompts), 64), np.int32)  # of one size: the padding after a line does not matter
    for line, prompt, completion in zip(tokens, prompts, completions, strict=True):
        line[: len(prompt) + len(completion)] = [*prompt, *completion]
    every = np.asarray(rekindle.models.token_logprobs(model, tokens))
    return [
        line[len(prompt) : len(prompt) + len(completion)]
        for line, prompt, completion in zip(every, prompts, completions, strict=True)
    ]


class TorchModel:
    """The parts of a trainer's model that the rollout function uses: the shipped weights, and a count of saves."""

    saved = 0

    def save_pretrained(self, folder: str) -> None:
        self.saved += 1
        shutil.copytree(rekindle.tiny.folder(), folder, dirs_exist_ok=True)


@pytest.mark.thorough
def test_trls_trainers_get_tokens_and_log_probabilities(session: Session) -> None:
    model = TorchModel()
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, min_p=None, max_completion_length=6),
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped),
        model=model,
    )
    roll = rollout_func(session, seed=3)
    first = roll(PROMPTS, trainer)
    again = roll([[{"role": "user", "content": "Who are you?"}]], trainer)
    assert model.saved == 1, "weights move once in each optimizer step"
    trainer.state.global_step = 1
    later = roll(PROMPTS, trainer)
    assert model.saved == 2
    assert set(first) == {"prompt_ids", "completion_ids", "logprobs", "weights_versions"}
    assert [len(ids) for ids in first["completion_ids"]] == [len(values) for values in first["logprobs"]]
    assert max(map(len, first["completion_ids"])) == 6
    assert first["prompt_ids"][:2] == [session.tokenizer.encode(PROMPTS[0])] * 2
    own = expected(first["prompt_ids"], first["completion_ids"])
    for values, reference in zip(first["logprobs"], own, strict=True):
        np.testing.assert_allclose(values, reference, atol=2e-4)
    assert session.tokenizer.decode(again["prompt_ids"][0], skip_special_tokens=False) == session.render(
        [{"role": "user", "content": "Who are you?"}]
    )
    assert first["completion_ids"][0] != first["completion_ids"][1], "each completion of a prompt is a draw of its own"
    assert later["completion_ids"] != first["completion_ids"], "and so is each call"
    start = first["weights_versions"][0][0]
    assert {version for line in later["weights_versions"] for version in line} == {start + 1}


def test_tunix_workers_generate_score_and_take_parameters(session: Session) -> None:
    base = pytest.importorskip("tunix.rl.rollout.base_rollout", reason="Tunix is the extra `tunix`")
    from rekindle.tunix import RekindleRollout

    worker = RekindleRollout(session, pad_id=0)
    assert isinstance(worker, base.BaseRollout) and worker.pad_id() == 0 and worker.eos_id() == 2
    config = base.RolloutConfig(max_tokens_to_generate=6, temperature=1.0, max_prompt_length=12, seed=jax.random.key(4))
    out = worker.generate(PROMPTS, config)
    assert isinstance(out, base.RolloutOutput) and len(out.text) == len(out.tokens) == 3
    assert out.left_padded_prompt_tokens.shape == (3, 12)
    assert out.tokens[0].tolist() != out.tokens[1].tolist(), "each completion of a prompt is a draw of its own"
    for line, prompt in enumerate(PROMPTS):
        ids = session.tokenizer.encode(prompt)
        assert out.left_padded_prompt_tokens[line].tolist() == [0] * (12 - len(ids)) + ids
    logps = scored(worker, out)
    doubled = jax.tree.map(lambda leaf: leaf * 1.01, nnx.state(worker.model(), nnx.Param))
    worker.update_params(doubled)
    assert np.abs(scored(worker, out, changed=True) - logps).max() > 1e-3
    scored(worker, worker.generate(PROMPTS, config))


def scored(worker: Any, out: Any, *, changed: bool = False) -> np.ndarray:
    """The worker's own log-probabilities of what it made, which are those of the draws unless weights changed."""
    width = max(map(len, out.tokens))
    tokens, drawn = np.zeros((len(out.tokens), width), np.int32), np.zeros((len(out.tokens), width), np.float32)
    for line, (ids, values) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        tokens[line, : len(ids)], drawn[line, : len(ids)] = ids, values
    logps = np.asarray(worker.get_per_token_logps(out.left_padded_prompt_tokens, tokens))
    if not changed:
        np.testing.assert_allclose(logps, drawn, atol=2e-4)
    return logps


def test_without_the_package_the_error_names_it() -> None:
    if importlib.util.find_spec("tunix") is not None:
        pytest.skip("Tunix is installed")
    with pytest.raises(rekindle.MissingExtra, match="google-tunix"):
        importlib.import_module("rekindle.tunix")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # other people's packages deprecate as they like
def test_a_grpo_trainer_of_trl_learns(session: Session, tmp_path: Path) -> None:
    """Some optimizer steps of TRL's own trainer, whose completions all come from the session."""
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl")
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    folder = str(rekindle.tiny.folder())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    versions: list[set[int]] = []

    def reward(completions: list[str], weights_versions: list[list[int]], **_: Any) -> list[float]:
        versions.append({version for line in weights_versions for version in line})
        return [text.count("e") / 8 for text in completions]

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=12,
        max_steps=3, learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS[1:] * 8]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        rollout_func=rollout_func(session, seed=0),
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(history) == 3 and all(entry["grad_norm"] > 0 for entry in history)
    assert any((old != new).any() for old, new in zip(before, model.parameters(), strict=True))
    first = min(versions[0])
    assert versions == [{first}, {first + 1}, {first + 2}], "each step draws with the weights of the one before"
