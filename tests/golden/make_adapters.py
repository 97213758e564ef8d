"""Writes adapters.npz next to this file: what PEFT and transformers compute for random adapters over six families.

    python tests/golden/make_adapters.py

It needs torch, transformers and peft; the test that reads the file needs none of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
PROMPT = [int(token) for token in np.random.default_rng(43).integers(3, 160, 20)]
NEW = 12
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# Of each family one case, and the names of the modules that adapters may have there.
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (*ATTENTION, *MLP),
    "qwen3": (*ATTENTION, *MLP),
    "gemma2": (*ATTENTION, *MLP),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "qwen3-moe": ATTENTION,
    "qwen3.5-tied-biases": (*ATTENTION, *MLP, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
}
EXPERTS = ("gate_up_proj", "down_proj")  # of all experts in one tensor, as `target_parameters` means them
RANKS = (1, 2, 4, 8, 16, 3, 5, 12)


def kinds(name: str) -> list[dict[str, Any]]:
    """Eight adapters of different ranks, targets and scales."""
    targets = FAMILIES[name]
    first, rest = targets[: len(targets) // 2], targets[len(targets) // 2 :]
    chosen = (targets, first, rest, targets, targets[-1:], targets, first, rest)
    fields: list[dict[str, Any]] = [
        {}, {"use_rslora": True}, {"lora_alpha": 3}, {"layers": (1,)},
        {}, {"rank_pattern": {targets[0]: 7}}, {"alpha_pattern": {targets[0]: 2}}, {"lora_alpha": 10},
    ]  # fmt: skip
    made = [
        {"rank": rank, "targets": names, "seed": seed, **own}
        for seed, (rank, names, own) in enumerate(zip(RANKS, chosen, fields, strict=True))
    ]
    if name.endswith("-moe"):
        made[0] |= {"experts": EXPERTS}
        made[1] |= {"experts": EXPERTS[:1], "targets": ()}
        made[2] |= {"experts": EXPERTS[1:]}
        made[5] |= {"targets": ("q_proj", "gate_proj", "up_proj", "down_proj")}  # one tensor for each expert
        made[7] |= {"experts": EXPERTS, "use_rslora": True}
    return made


def run(base: Path, folder: Path) -> tuple[NDArray[np.float32], list[int]]:
    """Return the log-probabilities of the prompt's tokens, and the greedy text after it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder).eval()
    ids, scores = list(PROMPT), None
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
            if scores is None:
                scores = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].numpy()
            ids.append(int(logits[-1].argmax()))
    assert scores is not None
    return scores, ids[len(PROMPT) :]


def main() -> None:
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "toolkit"), str(HERE.parents[1] / "kernels")]
    from helpers import adapters, checkpoints
    from rekindle._src.models.registry import config_from_hf

    arrays: dict[str, NDArray[Any]] = {}
    for name in FAMILIES:
        raw = checkpoints.CASES[name]
        with tempfile.TemporaryDirectory() as root:
            base = checkpoints.write(Path(root) / "base", raw)
            results = []
            for number, kind in enumerate(kinds(name)):
                folder = adapters.write(Path(root) / str(number), config_from_hf(raw), **kind)
                results.append(run(base, folder))
        arrays[f"{name}/scores"] = np.stack([scores for scores, _ in results])
        arrays[f"{name}/greedy"] = np.asarray([greedy for _, greedy in results], np.int32)
        print(f"{name}: {len({tuple(greedy) for _, greedy in results})} different texts")
    np.savez_compressed(HERE / "adapters.npz", **arrays)


if __name__ == "__main__":
    main()
