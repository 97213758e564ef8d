"""Writes a file for each family next to this one: what transformers computes for its cases, of `helpers.families`.

    python tests/golden/make.py [MODEL_TYPE ...]

writes those of some families, or of all. It needs torch and transformers; the tests that read the files need neither.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
PROMPT = [int(token) for token in np.random.default_rng(24).integers(3, 160, 24)]
NEW = 64
KEPT = (0, 1, 9, 23)  # positions of the prompt whose logits are kept


class Golden(NamedTuple):
    """What transformers says about a prompt."""

    logits: NDArray[np.float32]  # [len(prompt), V]
    greedy: list[int]


def run(folder: Path, prompt: list[int] = PROMPT, new: int = NEW) -> Golden:
    """Prefill in one call, then greedy decoding one token at a time over transformers' own cache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), f"transformers would not load the checkpoint as it is: {info}"
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), past_key_values=cache).logits[0]
        greedy = [int(logits[-1].argmax())]
        while len(greedy) < new:
            step = model(torch.tensor([greedy[-1:]]), past_key_values=cache).logits[0, -1]
            greedy.append(int(step.argmax()))
    return Golden(logits.float().numpy(), greedy)


def main() -> None:
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "toolkit"), str(HERE.parents[1] / "kernels")]
    from helpers import checkpoints

    for model_type in sys.argv[1:] or checkpoints.GENERATING:
        arrays: dict[str, NDArray[Any]] = {}
        for name, raw in checkpoints.FAMILY_CASES[model_type].cases.items():
            with tempfile.TemporaryDirectory() as folder:
                golden = run(checkpoints.write(Path(folder), raw))
            arrays[f"{name}/logits"] = golden.logits[list(KEPT)]
            arrays[f"{name}/greedy"] = np.asarray(golden.greedy, np.int32)
            print(f"{name}: {len(set(golden.greedy))} different tokens, deviation {golden.logits.std():.2f}")
        np.savez_compressed(HERE / f"{model_type}.npz", **arrays)


if __name__ == "__main__":
    main()
