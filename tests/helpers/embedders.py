"""Tiny random embedders as sentence-transformers' folders: a checkpoint, and how its states become vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from helpers import checkpoints
from helpers.families import FAMILY_CASES, GEMMA3, case

WORDS = 150  # of the vocabulary; token ids from 5 on
OLD = "sentence_transformers.models"
NEW = {  # as version 6 saves them
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}


class Case(NamedTuple):
    """An embedder."""

    raw: dict[str, Any]
    mode: str
    dense: tuple[tuple[int, bool, str], ...] = ()  # outputs, bias, activation
    normalize: bool = True
    new: bool = False  # written as version 6 of sentence-transformers does, else as version 2
    default_prompt: str | None = None


EMBEDS = FAMILY_CASES["modernbert"].embeds
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
CASES = {
    "qwen3": Case(case("qwen3", "Qwen3ForCausalLM", head_dim=12, tie_word_embeddings=True), "lasttoken"),
    "qwen3-without-head": Case(case("qwen3", "Qwen3ForCausalLM", head_dim=12), "lasttoken", new=True),
    "gemma3": Case(
        {
            **case("gemma3_text", "Gemma3TextModel", **GEMMA3), "use_bidirectional_attention": True,
            "sliding_window": 12,
        },
        "mean", ((96, False, IDENTITY), (48, True, TANH)), new=True, default_prompt="document",
    ),
    "modernbert": Case(EMBEDS["modernbert"], "cls"),
    "modernbert-mean": Case(EMBEDS["modernbert-biases"], "mean", normalize=False),
}  # fmt: skip
PROMPTS = {"query": "w140 w141 w142 : ", "document": "w7 "}


def texts() -> list[str]:
    """Texts of many lengths; the longest is wider than any window."""
    random = np.random.default_rng(17)
    return [" ".join(f"w{word}" for word in random.integers(0, WORDS, count)) for count in (1, 3, 12, 13, 40, 70, 5, 2)]


def write(folder: Path, name: str) -> Path:
    """The folder of one of the CASES."""
    it = CASES[name]
    state = checkpoints.tensors(it.raw, seed=5)
    state = {key.removeprefix("model."): value for key, value in state.items() if not key.startswith("lm_head")}
    checkpoints.write(folder, it.raw, state)
    kinds = ["Transformer", "Pooling", *["Dense"] * len(it.dense), *["Normalize"] * it.normalize]
    places = ["" if not number else f"{number}_{kind}" for number, kind in enumerate(kinds)]
    modules = [
        {"idx": number, "name": str(number), "path": place, "type": NEW[kind] if it.new else f"{OLD}.{kind}"}
        for number, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    _json(folder / "modules.json", modules)
    _json(folder / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    _json(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": it.default_prompt})
    size = it.raw["hidden_size"]
    old = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    modes = {f"pooling_mode_{value}": key == it.mode for key, value in old.items()}
    pooling = {"embedding_dimension": size, "pooling_mode": it.mode, "include_prompt": True}
    _json(folder / "1_Pooling" / "config.json", pooling if it.new else {"word_embedding_dimension": size, **modes})
    random = np.random.default_rng(3)
    for place, (outputs, bias, activation) in zip(places[2:], it.dense, strict=False):
        fields = {"in_features": size, "out_features": outputs, "bias": bias, "activation_function": activation}
        _json(folder / place / "config.json", fields)
        tensors: dict[str, NDArray[np.float32]] = {
            "linear.weight": (random.standard_normal((outputs, size)) * size**-0.5).astype(np.float32)
        }
        if bias:
            tensors["linear.bias"] = random.standard_normal(outputs).astype(np.float32)
        save_file(tensors, folder / place / "model.safetensors")
        size = outputs
    _tokenizer(folder)
    return folder


def _tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words, with a token before and one after each text."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    specials = ["<pad>", "<s>", "</s>", "<unk>", ":"]
    vocab = {word: number for number, word in enumerate([*specials, *(f"w{number}" for number in range(WORDS))])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.add_special_tokens(specials[:4])
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
    )
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
