"""Adapters that PEFT trained and saved: what it computes with them, a session computes, whatever their config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from rekindle.errors import CheckpointError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn of each other
PROMPT = [int(token) for token in np.random.default_rng(44).integers(3, 160, 24)]
NEW = 10
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_requests": 2, "max_tokens_per_step": 64, "max_model_len": 64, "precompile": "lazy",
    "max_adapters": 1, "max_adapter_rank": 32, "disk_memory": 0, "seed": 0, "quiet": True,
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "list": ("llama", {"r": 6, "target_modules": [*ATTENTION, "down_proj"]}),
    "all-linear": ("qwen3", {"r": 4, "target_modules": "all-linear"}),
    "expression": ("llama", {"r": 4, "target_modules": r".*\.1\.(self_attn\.[qv]|mlp\.up)_proj"}),
    "rslora": ("gemma2", {"r": 9, "lora_alpha": 5, "use_rslora": True, "target_modules": [*ATTENTION, "gate_proj"]}),
    "patterns": (
        "llama",
        {
            "r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "alpha_pattern": {"v_proj": 32},
            "rank_pattern": {"q_proj": 11, r"0\.mlp\.up_proj": 2},
        },
    ),
    "layers": ("llama", {"r": 4, "target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [1]}),
    "exclude": ("qwen3", {"r": 4, "target_modules": ATTENTION, "exclude_modules": ["k_proj"]}),
    "fan-in-fan-out": ("gpt2", {"r": 5, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "experts": ("qwen3-moe", {"r": 3, "target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "one-of-the-experts": ("qwen3-moe", {"r": 3, "target_modules": [], "target_parameters": EXPERTS[1:]}),
    "delta": (
        "ling3",
        {
            "r": 4, "target_modules": ["q_proj", "f_proj", "g_proj", "b_proj", "o_proj", "q_b_proj", "up_proj"],
            "rank_pattern": {r"0\.self_attn\.forget_gate\.f_proj": 3},
        },
    ),
    "all-linear-without-gates": ("apertus", {"r": 4, "target_modules": "all-linear"}),
    "hybrid": ("qwen3.5-tied-biases", {"r": 4, "target_modules": ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj"]}),
}  # fmt: skip


def trained(base: Path, folder: Path, options: dict[str, Any]) -> Any:
    """A PEFT model after a few steps on random tokens; `folder` has what it saved."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    config = peft.LoraConfig(**{"lora_alpha": 16, "task_type": "CAUSAL_LM", "lora_dropout": 0.0} | options)
    model = peft.get_peft_model(model, config)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=2e-2)
    for _ in range(6):
        ids = torch.randint(3, 160, (4, 32))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    return model


def told(model: Any) -> tuple[np.ndarray, list[int]]:
    """Return the log-probabilities of the prompt's tokens, and the greedy text after it."""
    import torch

    ids, scores = list(PROMPT), None
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
            if scores is None:
                scores = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].numpy()
            ids.append(int(logits[-1].argmax()))
    assert scores is not None
    return scores, ids[len(PROMPT) :]


@pytest.mark.parametrize("name", CASES)
def test_what_peft_saved_is_what_it_computed(name: str, tmp_path: Path) -> None:
    family, options = CASES[name]
    base = checkpoints.write(tmp_path / "base", checkpoints.CASES[family])
    model = trained(base, tmp_path / "adapter", options)
    scores, greedy = told(model)
    with model.disable_adapter():
        without, _ = told(model)
    assert np.abs(scores - without).max() > 1e-2, "the adapter changes little"
    with rekindle.open_sync(checkpoints.case(family), adapters={"a": tmp_path / "adapter"}, **OPTIONS) as session:
        for adapter, expected in (("a", scores), (None, without)):
            done = session.generate_sync(PROMPT, adapter=adapter, max_tokens=NEW, ignore_eos=True, prompt_logprobs=0)
            np.testing.assert_allclose([entry.logprob for entry in done.prompt_logprobs or ()], expected, atol=1e-4)
            assert adapter is None or list(done.token_ids) == greedy


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"lora_bias": True}, {"bias": "lora_only"}, {"modules_to_save": ["lm_head"]}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_not_done_is_refused_as_peft_saved_it(options: dict[str, Any], tmp_path: Path) -> None:
    base = checkpoints.write(tmp_path / "base", checkpoints.CASES["llama"])
    trained(base, tmp_path / "adapter", {"r": 4, "target_modules": ["q_proj", "down_proj"], **options})
    with (
        rekindle.open_sync(checkpoints.case("llama"), **OPTIONS) as session,
        pytest.raises(CheckpointError, match=next(iter(options))),
    ):
        session.load_adapter("a", tmp_path / "adapter").result_sync()
