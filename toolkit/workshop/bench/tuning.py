"""An adapter's training beside PEFT with transformers: seconds of a step, tokens/s, peak memory and losses.

    python tuning.py MODEL FOLDER [--steps 6] [--tokens 512] [--rank 16] [--threads 2]

MODEL is what rekindle opens, such as a GGUF file, and FOLDER the same weights for transformers (`rekindle export MODEL
FOLDER --type f32`). Each runs in a process of its own, one after the other, with the same data, rank, order, first
matrices and learning rates. The first step is not counted: it compiles or warms up. Memory is the highest of the
process, less what it had before the training's libraries were imported.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

RATE, SEED = 1e-3, 0


def data(count: int, tokens: int) -> list[list[int]]:
    """Return lines of ids that repeat themselves, so that there is something to learn."""
    random = np.random.default_rng(SEED)
    return [np.tile(random.integers(1000, 20000, 64), tokens // 64 + 1)[:tokens].tolist() for _ in range(count)]


def of_rekindle(arguments: argparse.Namespace) -> dict[str, Any]:
    import rekindle

    options: Any = {"precompile": "lazy", "disk_memory": 0, "quiet": True, "max_model_len": 256, "max_requests": 2}
    with rekindle.open_sync(arguments.model, **options) as session:
        opened = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        run = session.tune(
            "bench", data(4, arguments.tokens), rank=arguments.rank, steps=arguments.steps, batch=1, seed=SEED,
            learning_rate=RATE, every=1_000_000,
        )  # fmt: skip
        report = run.result_sync()
        steps = [step.seconds for step in run.history]
        losses = [step.loss for step in run.history]
    return {"opened MiB": opened, "steps": steps, "losses": losses, "pause": report.longest_pause}


def of_peft(arguments: argparse.Namespace) -> dict[str, Any]:
    import peft
    import torch
    import transformers

    from rekindle._src.capabilities.tuning.batches import order_of
    from rekindle._src.capabilities.tuning.run import rate_at
    from rekindle._src.capabilities.tuning.sites import trained_matrices
    from rekindle._src.capabilities.tuning.trainer import initial_pairs
    from rekindle.models import config_from_hf

    torch.set_num_threads(arguments.threads)
    models: Any = transformers.AutoModelForCausalLM
    base = models.from_pretrained(arguments.folder, dtype=torch.float32)
    opened = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    matrices = trained_matrices(config_from_hf(base.config.to_dict()), "all")
    names = sorted({module.rpartition(".")[2] for one in matrices for module in one.site.modules})
    rank = arguments.rank
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names))
    arrays = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for matrix, (down, _) in zip(matrices, initial_pairs(matrices, rank, SEED), strict=True):
        for place, index in enumerate(matrix.modules):
            name = f"base_model.model.{matrix.site.modules[index]}.lora_A.default.weight"
            arrays[name].data = torch.from_numpy(down[place * rank : (place + 1) * rank].copy())
    optimizer = torch.optim.Adam(arrays.values(), lr=1.0)
    lines, steps, losses = data(4, arguments.tokens), [], []
    order = order_of(len(lines), 1, SEED)
    for step in range(arguments.steps):
        start = time.perf_counter()
        ids = torch.tensor([lines[index] for index in next(order)])
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(arrays.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, arguments.steps, RATE)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
        losses.append(float(loss))
    return {"opened MiB": opened, "steps": steps, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--only", choices=("rekindle", "peft"))
    for name, value in (("steps", 6), ("tokens", 512), ("rank", 16), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    if arguments.only:
        measured = of_rekindle(arguments) if arguments.only == "rekindle" else of_peft(arguments)
        measured["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(measured))
        return
    for name in ("rekindle", "peft"):
        done = subprocess.run([sys.executable, *sys.argv, "--only", name], check=True, capture_output=True, text=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        seconds = statistics.median(measured["steps"][1:])
        print(
            f"{name}: {seconds:.2f} s a step, {arguments.tokens / seconds:.0f} tokens/s, "
            f"peak {measured['peak MiB']:.0f} MiB ({measured['opened MiB']:.0f} opened), "
            f"losses {' '.join(f'{loss:.4f}' for loss in measured['losses'])}"
        )


if __name__ == "__main__":
    main()
