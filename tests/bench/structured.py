"""What a grammar costs: tokens/s of guided requests against free ones, and of texts of which much is forced.

    python tests/bench/structured.py [135m] [--rows 16] [--quantize int8] [--tokens 96] [--repeat 5]

`any text` follows an expression that allows everything, so that it makes as many tokens as a free request and every
mask is computed. `strings` follows a schema of long strings, `record` one whose names are most of the text, so that
drafts of forced tokens pay. Ratios are medians over rounds in which the kinds take turns. Weights are random, and the
tokenizer is trained on Python's own sources to the size of the model's vocabulary.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import rekindle
from rekindle._src.bench.shapes import random_shape

NAMES = ["identifier", "description", "category_name", "priority_level", "responsible_person", "department"]
SHORT, LONG = {"enum": ["low", "high", "none"]}, {"type": "string", "minLength": 200, "maxLength": 2000}


def schema(part: dict[str, Any]) -> dict[str, Any]:
    """A list of records whose fields are all of one kind."""
    record = {
        "type": "object", "properties": dict.fromkeys(NAMES, part), "required": NAMES, "additionalProperties": False,
    }  # fmt: skip
    return {"type": "array", "items": record, "minItems": 50}


KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "any text": {"regex": r"(.|\n)*"},
    "strings": {"schema": schema(LONG)},
    "record": {"schema": schema(SHORT)},
}


def tokenizer(vocab: int, folder: Path) -> Path:
    """A folder with a byte-level BPE of so many tokens."""
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|pad|>", "<|start|>", "<|end|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        sources = Path(sysconfig.get_path("stdlib")).glob("*/*.py")
        backend.train_from_iterator((path.read_text(errors="ignore") for path in sources), trainer)
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def rate(session: rekindle.Session, rows: int, tokens: int, seed: int, options: dict[str, Any]) -> float:
    """Generated tokens per second of so many requests at once."""
    prompts = [f"def example_{seed}_{row}(" for row in range(rows)]
    start = time.perf_counter()
    done = session.generate_sync(
        prompts, max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True, errors="return", **options
    )
    made = [one for one in done if isinstance(one, rekindle.Completion)]
    assert len(made) == rows, done
    return sum(len(one.token_ids) for one in made) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quantize")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "rekindle-structured-bench")
    given = parser.parse_args()
    model = random_shape(given.shape, quantize=given.quantize)
    folder = tokenizer(model.config.vocab_size, given.folder / given.shape)
    model = dataclasses.replace(model, folder=folder)
    options: dict[str, Any] = {"max_requests": max(8, given.rows), "max_model_len": 1024, "cache_dir": given.folder}
    with rekindle.open_sync(model, quiet=True, disk_memory=0, generation_config="greedy", **options) as session:
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for seed in range(given.repeat + 1):
            for kind, asked in KINDS.items():
                found[kind].append(rate(session, given.rows, given.tokens, seed, asked))
            if not seed:
                before = session.stats()
        after = session.stats()
        origins = {record.origin for record in session.programs() if record.name.endswith(("f", "c"))}
    print(
        f"{given.shape} {given.quantize or '16 bits'}, {given.rows} rows; guided programs were {' and '.join(origins)}"
    )
    print(f"compiled while serving: {after.compilations - before.compilations}")
    for kind, rates in found.items():
        ratios = [one / free for one, free in zip(rates[1:], found["free"][1:], strict=True)]
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        print(
            f"{kind:9} {statistics.median(rates[1:]):7.1f} tokens/s, ratio {statistics.median(ratios):.3f} ({spread})"
        )


if __name__ == "__main__":
    main()
