"""Training an adapter, compared with PEFT: seconds of a step, tokens/s, peak memory and losses.

    python tuning.py MODEL FOLDER [--steps 6] [--tokens 512] [--rank 16] [--threads 2] [--pairs 2] [--nf4]
    python tuning.py MODEL FOLDER --only rekindle --steps 200

MODEL is what rekindle opens, such as a GGUF file, and FOLDER the same weights for transformers (`rekindle export MODEL
FOLDER --type f32`). Each runs in a process of its own, one after the other, with the same data, rank, order, first
matrices and learning rates; the next pair begins with the other one. With `--nf4`, PEFT's weights are those of
bitsandbytes in four bits, on the CPU. The first step is not counted: it compiles or warms up. Memory is the most of a
process; the least of all pairs counts, since the first one compiles. Losses are compared step by step.
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
    options["dtype"] = "float32"  # of weights that are not in groups: PEFT's are
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
    more: dict[str, Any] = {}
    if arguments.nf4:
        kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        more = {"quantization_config": transformers.BitsAndBytesConfig(**kind), "device_map": "cpu"}
    base = models.from_pretrained(arguments.folder, dtype=torch.float32, **more)
    opened = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    fields = {name: value for name, value in base.config.to_dict().items() if name != "quantization_config"}
    matrices = trained_matrices(config_from_hf(fields), "all")
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


def measured(name: str) -> dict[str, Any]:
    """Return the figures of a process of its own."""
    done = subprocess.run([sys.executable, *sys.argv, "--only", name], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--only", choices=("rekindle", "peft"))
    parser.add_argument("--nf4", action="store_true")
    for name, value in (("steps", 6), ("tokens", 512), ("rank", 16), ("threads", 2), ("pairs", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    if arguments.only:
        start = time.perf_counter()
        figures = of_rekindle(arguments) if arguments.only == "rekindle" else of_peft(arguments)
        figures["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures["seconds"] = time.perf_counter() - start
        print(json.dumps(figures))
        return
    names, found = ["rekindle", "peft"], dict[str, list[dict[str, Any]]](rekindle=[], peft=[])
    for number in range(arguments.pairs):
        for name in names[:: 1 if number % 2 == 0 else -1]:
            found[name].append(measured(name))
    rates, peaks = {}, {}
    for name, rounds in found.items():
        seconds = statistics.median(step for one in rounds for step in one["steps"][1:])
        rates[name], peaks[name] = arguments.tokens / seconds, min(one["peak MiB"] for one in rounds)
        print(
            f"{name}: {seconds:.2f} s a step, {rates[name]:.0f} tokens/s, peak {peaks[name]:.0f} MiB "
            f"({rounds[0]['opened MiB']:.0f} opened), {rounds[0]['seconds']:.0f} s in all, "
            f"losses {' '.join(f'{loss:.4f}' for loss in rounds[0]['losses'])}"
        )
    losses = (np.array(found[name][0]["losses"]) for name in names)
    apart = float(np.max([abs(first / second - 1) for first, second in zip(*losses, strict=True)]))
    print(
        f"rekindle compared with {'NF4 and ' * arguments.nf4}PEFT: {rates['rekindle'] / rates['peft']:.2f} × tokens/s, "
        f"{peaks['rekindle'] / peaks['peft']:.2f} × peak memory, losses within {apart:.2%}"
    )


if __name__ == "__main__":
    main()
