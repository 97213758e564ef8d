"""transformers' own reader of GGUF opens what is exported: its logits are those of the folder that went in.

It knows fewer architectures, and takes some numbers for those of published models; cases have these numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import checkpoints, vocabularies
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.opening.exporting import export
from workshop import reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
pytest.importorskip("gguf", reason="transformers needs it to read GGUF")

GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256}
CASES: dict[str, dict[str, Any]] = {
    "llama": {}, "llama-mqa-five-heads": {}, "mistral-window": {}, "qwen2": {}, "qwen3": {"head_dim": 128},
    "qwen3-moe": {"head_dim": 128, "moe_intermediate_size": 768},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {**GEMMA, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    "phi3": {"vocab_size": 33000, "sliding_window": None}, "gpt2": {"n_positions": 1024, "n_inner": 192},
}  # fmt: skip
PROMPT = [3, 9, 27, 81, 11, 5, 7]


def logits(path: Path, **options: Any) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    found: np.ndarray = model(torch.tensor([PROMPT])).logits.detach().numpy()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_the_folder(case: str, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "folder", checkpoints.CASES[case] | CASES[case])
    vocabularies.write(folder, vocabularies.byte_level(), bos_token="<s>", eos_token="</s>")
    export(folder, tmp_path / "model.gguf")
    found, expected = logits(tmp_path, gguf_file="model.gguf"), logits(folder)
    # The numbers are the same; GPT-2's matrices lie in memory in another order, so that sums are rounded differently.
    assert np.abs(found - expected).max() <= (1e-5 * expected.std() if case == "gpt2" else 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_both_readers_of_quantised_files_make_the_same_model(kind: str, tmp_path: Path) -> None:
    raw = checkpoints.CASES["llama"] | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    folder = checkpoints.write(tmp_path / "folder", raw)
    vocabularies.write(folder, vocabularies.byte_level(), bos_token="<s>", eos_token="</s>")
    file = export(folder, tmp_path / "model.gguf", type=kind)
    model = load(file, dtype="float32")
    ours, _ = reference.prefill(model, PROMPT, reference.empty_cache(model, 16))
    theirs = logits(tmp_path, gguf_file="model.gguf")[0]
    assert np.abs(np.asarray(ours) - theirs).max() < 2e-5 * theirs.std()
