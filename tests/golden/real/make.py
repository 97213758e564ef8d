"""Writes what llama.cpp makes of the two real files: tokens of texts, perplexities, likeliest and greedy tokens.

    python tests/golden/real/make.py FOLDER     # with a Python that has llama-cpp-python; FOLDER has the files

The perplexity "float32" is that of the same weights, unpacked to float32.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np

HERE = Path(__file__).parent
FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
TOKENS, GREEDY = 512, 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
]
TEXTS = ["Hello, World! 3.14  x", "naïve café — “quotes” 你好 😀\n\n\tindented", "don't DON'T we'll"]


def logits(model: api.Llama, ids: list[int]) -> np.ndarray:
    model.reset()
    model.eval(ids)
    return np.asarray(model.scores[: len(ids)], np.float64)


def perplexity(scores: np.ndarray, ids: list[int]) -> float:
    scores = scores[:-1] - scores[:-1].max(1, keepdims=True)
    own = scores[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(scores).sum(1))
    return math.exp(-own.mean())


def opened(path: Path) -> api.Llama:
    return api.Llama(str(path), n_ctx=TOKENS, n_batch=TOKENS, logits_all=True, verbose=False)


def greedy(model: api.Llama, ids: list[int]) -> list[int]:
    found = list[int]()
    model.reset()
    model.eval(ids)
    for _ in range(GREEDY):
        found.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(found[-1:])
    return found


def measured(path: Path) -> dict[str, Any]:
    model = opened(path)
    ids = model.tokenize((HERE / "text.txt").read_bytes(), add_bos=True, special=False)[:TOKENS]
    scores = logits(model, ids)
    prompts = {text: model.tokenize(text.encode(), add_bos=True, special=False) for text in PROMPTS}
    found = {
        "ids": ids,
        "perplexity": perplexity(scores, ids),
        "likeliest": scores.argmax(1).tolist(),
        "tokens": {text: model.tokenize(text.encode(), add_bos=True, special=False) for text in TEXTS},
        "greedy": {text: greedy(model, ids) for text, ids in prompts.items()},
    }
    model.close()
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "float32.gguf"
        options = api.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = api.LLAMA_FTYPE_ALL_F32, True
        assert api.llama_model_quantize(str(path).encode(), str(wide).encode(), ctypes.byref(options)) == 0
        found["float32"] = perplexity(logits(opened(wide), ids), ids)
    return found


if __name__ == "__main__":
    all_of = {name: measured(Path(sys.argv[1]) / file) for name, file in FILES.items()}
    (HERE / "llama_cpp.json").write_text(json.dumps({"version": api.__version__, **all_of}) + "\n")
    print({name: (one["perplexity"], one["float32"]) for name, one in all_of.items()})
