"""What each precision costs in quality: perplexity on held-out text, and how far the next token's odds move.

    python quality.py [--model FOLDER] [--text FILE] [--tokens 16384] [--only int4 int4+calibrated]

Without a model it is the embedded one. Without a text, held-out documents of the corpus that it was trained on are
measured, and some of its training calibrate; `--model` may then be of `python -m workshop.tiny.train --size 30m`.
With one, the first half of the text calibrates and the other is measured. KL is that of float32 against the precision,
in nats per token. Activations are computed as a session computes them on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import numpy as np

import rekindle
from workshop import reference

LENGTH = 512
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int8-weight": {"quantize": "int8-weight"},
    "int8 but embedding": {"quantize": "int8", "quantize_embeddings": False},
    "int8-weight but embedding": {"quantize": "int8-weight", "quantize_embeddings": False},
    "int4-32": {"quantize": "int4-32"},
    "int4": {"quantize": "int4"},
    "int4-128": {"quantize": "int4-128"},
    "int4-32+calibrated": {"calibrate": "int4-32"},
    "int4+calibrated": {"calibrate": "int4"},
    "int4-128+calibrated": {"calibrate": "int4-128"},
    "mlp int4": {"quantize": {"mlp": "int4", "attention": "int8", "embedding": "int8"}},
}


def log_odds(model: rekindle.models.LoadedModel, windows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The log-probabilities [tokens, vocabulary] of every next token."""
    found = []
    for window in windows:
        logits = reference.prefill(model, window, reference.empty_cache(model, len(window)))[0]
        found.append(np.asarray(jax.nn.log_softmax(logits, axis=-1)))
    return found


def figures(
    exact: Sequence[np.ndarray], odds: Sequence[np.ndarray], windows: Sequence[Sequence[int]]
) -> tuple[float, float, float]:
    """Perplexity, KL of the exact odds against these, and the share of equal first choices."""
    losses = [-table[np.arange(len(w) - 1), w[1:]] for table, w in zip(odds, windows, strict=True)]
    p, q = np.concatenate(exact), np.concatenate(odds)
    same = p.argmax(-1) == q.argmax(-1)
    return float(np.exp(np.concatenate(losses).mean())), float((np.exp(p) * (p - q)).sum(-1).mean()), float(same.mean())


def windows_of(tokens: Sequence[int], most: int) -> list[list[int]]:
    cut = [list(tokens[start : start + LENGTH]) for start in range(0, min(len(tokens), most), LENGTH)]
    return [window for window in cut if len(window) > 8]


def tiny_texts(folder: Path, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Windows that calibrate, of the training documents, and held-out ones."""
    from tokenizers import Tokenizer

    from workshop.tiny.corpus import HELD_OUT, PAD, TRAIN, encoded, pack

    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    packed = (pack(encoded(words, name), tokens // LENGTH, LENGTH) for name in (f"{TRAIN} quality", HELD_OUT))
    calibrating, held = ([window[window != PAD].tolist() for window in windows] for windows in packed)
    return calibrating, held


def main() -> None:
    names = list(PRECISIONS)
    given = harness.options(__doc__, model=Path, text=Path, tokens=16384, only=(names, names))
    folder = given.model or rekindle.tiny.folder()
    if given.text is None:
        calibrating, held = tiny_texts(folder, given.tokens)
    else:
        tokens = rekindle.models.Tokenizer.load(folder).encode(given.text.read_text())
        half = len(tokens) // 2
        calibrating, held = windows_of(tokens[:half], given.tokens), windows_of(tokens[half:], given.tokens)
    exact = log_odds(rekindle.models.load(folder, dtype="float32"), held)
    print(f"{sum(map(len, held)):,} held-out tokens, {sum(map(len, calibrating)):,} that calibrate")
    print(f"{'':26}{'perplexity':>12}{'KL':>11}{'top-1':>8}{'MB':>8}{'seconds':>9}")
    for name in given.only:
        options, start = PRECISIONS[name], time.perf_counter()
        if "calibrate" in options:
            plan = options["calibrate"]
            model = rekindle.models.calibrate(folder, calibrating, quantize=plan, max_tokens=given.tokens)
        else:
            model = rekindle.models.load(folder, **options)
        seconds = time.perf_counter() - start
        perplexity, divergence, same = figures(exact, log_odds(model, held), held)
        print(
            f"{name:26}{perplexity:12.4f}{divergence:11.5f}{same:8.1%}{model.nbytes / 1e6:8.1f}{seconds:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
