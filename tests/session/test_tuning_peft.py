"""A training against PEFT's of the same model, data, rank, order and beginning, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.capabilities.tuning.batches import order_of
from rekindle._src.capabilities.tuning.run import rate_at
from rekindle._src.capabilities.tuning.sites import trained_matrices
from rekindle._src.capabilities.tuning.trainer import initial_pairs

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RANK, STEPS, BATCH, SEED, RATE = 4, 12, 4, 3, 1e-2
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 4, "max_tokens_per_step": 32, "max_model_len": 64, "precompile": "lazy",
    "disk_memory": 0, "quiet": True,
}  # fmt: skip


def lines(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, size).tolist() for size in (5, 9, 17, 18, 26, 7, 30)]


def opened(folder: Path) -> Any:
    models: Any = transformers.AutoModelForCausalLM
    return models.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def targets(name: str, config: Any) -> list[str]:
    """The modules that PEFT trains, too."""
    names = {module.rpartition(".")[2] for one in trained_matrices(config, "all") for module in one.site.modules}
    return sorted(names - {"out_proj"} if name == "falcon-h1" else names)  # PEFT refuses that one in Mamba's layers


def of_peft(folder: Path, config: Any, names: list[str], data: list[list[int]]) -> tuple[list[float], Any]:
    """The losses of each step, and the model at the end."""
    base = opened(folder)
    matrices = trained_matrices(config, names)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    arrays = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for matrix, (down, _) in zip(matrices, initial_pairs(matrices, RANK, SEED), strict=True):
        for place, index in enumerate(matrix.modules):
            name = f"base_model.model.{matrix.site.modules[index]}.lora_A.default.weight"
            arrays[name].data = torch.from_numpy(down[place * RANK : (place + 1) * RANK].copy())
    optimizer = torch.optim.Adam(arrays.values(), lr=1.0)
    order, losses = order_of(len(data), BATCH, SEED), []
    for step in range(STEPS):
        chosen = [data[index] for index in next(order)]
        count = sum(len(line) - 1 for line in chosen)
        total = 0.0
        for line in chosen:
            ids = torch.tensor([line])
            loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum") / count
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(arrays.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, STEPS, RATE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def mean_loss(model: Any, data: list[list[int]]) -> float:
    """The loss of all lines: those of one step differ from those of another by what is in them, too."""
    with torch.no_grad():
        logits = [model(torch.tensor([line])).logits[0, :-1] for line in data]
    targets = torch.cat([torch.tensor(line[1:]) for line in data])
    return float(torch.nn.functional.cross_entropy(torch.cat(logits), targets))


@pytest.mark.filterwarnings("ignore")  # of transformers and PEFT
@pytest.mark.parametrize(
    "name",
    by_default(["llama", "qwen3", "gemma2", "lfm2", "falcon-h1", "apertus", "ling3"], lambda name: name == "llama"),
)
def test_the_loss_curve_is_pefts(name: str, tmp_path: Path) -> None:
    """Within 1 % by the promise; here within rounding. PEFT reads what is saved, and computes the same with it."""
    raw = checkpoints.CASES[name]
    checkpoints.needs_transformers(raw)
    state = checkpoints.tensors(raw, seed=7)
    model = checkpoints.model(raw, state)
    data = lines(model.config.vocab_size)
    folder = checkpoints.write(tmp_path / "model", raw, state)
    names = targets(name, model.config)
    expected, trained = of_peft(folder, model.config, names, data)
    with rekindle.open_sync(model, cache_dir=str(tmp_path / "cache"), **OPTIONS) as session:
        options: Any = {"rank": RANK, "steps": STEPS, "batch": BATCH, "seed": SEED, "learning_rate": RATE}
        run = session.tune("mine", data, targets=names, **options)
        run.result_sync()
        session.save_adapter("mine", tmp_path / "mine").result_sync()
    losses = [step.loss for step in run.history]
    with trained.disable_adapter():
        untrained = mean_loss(trained, data)
    # Logits that are capped learn slowly: Gemma 2 takes 0.15 off 5.11 in these steps, and the others 1.1 and more.
    assert mean_loss(trained, data) < untrained - 0.1, "there is something to learn"
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    base = opened(folder)
    loaded: Any = peft.PeftModel.from_pretrained(base, tmp_path / "mine")
    ids = torch.tensor([data[-1]])
    with torch.no_grad():
        ours, theirs = loaded(ids).logits, trained(ids).logits
        with loaded.disable_adapter():
            before = loaded(ids).logits
    moved = float((theirs - before).abs().max())
    assert float((ours - theirs).abs().max()) < 0.02 * moved
