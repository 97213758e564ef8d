"""What a grammar costs: tokens/s of guided requests against free ones, and of texts of which much is forced.

    python structured.py [135m | tiny | FILE.gguf] [--rows 16] [--quantize int8] [--tokens 96] [--repeat 5]
                                     [--llama-server PROGRAM [--llama-options=--no-repack]]

`any text` follows an expression that allows everything, so that it makes as many tokens as a free request and every
mask is computed. `strings` follows a schema of long strings, `record` one whose names are most of the text, so that
drafts of forced tokens pay. Ratios are medians over rounds in which the kinds take turns. `tiny` and a file or folder
have their own weights and tokenizer. Those of a shape are random, and its tokenizer is trained on Python's own sources
to the size of the model's vocabulary. With llama.cpp's server, which gets
the same weights and schemas, the last columns are its tokens/s, what its grammar costs it, and ours over its tokens/s.
It draws a token first, and asks the grammar about all others only if that one is not allowed. With random weights it
has to almost always in `record` and seldom inside of `strings`; a trained model is between them. Its threads spin, so
that a figure of a machine that does anything else says nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import tokenizers
from llama_server import LlamaServer
from tokenizers import decoders, models, pre_tokenizers, trainers

import rekindle
from rekindle._src.bench.shapes import write_checkpoint
from rekindle._src.opening.exporting import export

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


def checkpoint(shape: str, folder: Path) -> Path:
    """A folder with weights of that shape and the trained tokenizer."""
    weights = write_checkpoint(shape, folder / f"{shape}-weights")
    config = json.loads((weights / "config.json").read_text())
    for file in tokenizer(config["vocab_size"], folder / shape).iterdir():
        shutil.copy(file, weights)
    return weights


def gguf(weights: Path, quantize: str | None) -> Path:
    """The same weights for llama.cpp."""
    kind = {None: "bf16", "int8": "q8_0"}[quantize]
    file = weights.parent / f"{weights.name}-{kind}.gguf"
    return file if file.exists() else export(weights, file, type=kind)


def prompts_of(seed: int, rows: int) -> list[str]:
    """Short prompts that have nothing in common with those of other seeds."""
    return [f"def example_{seed}_{row}(" for row in range(rows)]


def rate(session: rekindle.Session, rows: int, tokens: int, seed: int, options: dict[str, Any]) -> float:
    """Generated tokens per second of so many requests at once."""
    prompts = prompts_of(seed, rows)
    start = time.perf_counter()
    done = session.generate_sync(
        prompts, max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True, errors="return", **options
    )
    made = [one for one in done if isinstance(one, rekindle.Completion)]
    assert len(made) == rows, done
    return sum(len(one.token_ids) for one in made) / (time.perf_counter() - start)


def main() -> None:
    given = harness.options(
        __doc__, "shape", shape="135m", rows=16, tokens=96, repeat=5, quantize=(str, ["int8"]),
        kinds=(list(KINDS), KINDS), folder=Path(tempfile.gettempdir()) / "rekindle-structured-bench",
        llama_server=(Path, "llama.cpp's program of that name"), llama_options=([], "for that program"),
    )  # fmt: skip
    kinds = {kind: KINDS[kind] for kind in dict.fromkeys(["free", *given.kinds])}
    options: dict[str, Any] = {"max_requests": max(8, given.rows), "max_model_len": 1024, "cache_dir": given.folder}
    options |= {"precompile": "all", "structured": True}  # whole programs from the first round on
    model: Any
    if given.shape == "tiny" or Path(given.shape).exists():
        model, options["quantize"] = given.shape, given.quantize
    elif given.llama_server is None:
        model = harness.model(given.shape, quantize=given.quantize)
        model = dataclasses.replace(model, folder=tokenizer(model.config.vocab_size, given.folder / given.shape))
    else:
        model, options["quantize"] = checkpoint(given.shape, given.folder), given.quantize
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    theirs: dict[str, list[float]] = {kind: [] for kind in kinds if "regex" not in kinds[kind]}
    with contextlib.ExitStack() as opened:
        session = opened.enter_context(
            rekindle.open_sync(model, quiet=True, disk_memory=0, generation_config="greedy", **options)
        )
        peer: LlamaServer | None = None
        if given.llama_server is not None:
            file = gguf(model, given.quantize)
            peer = LlamaServer(given.llama_server, file, rows=given.rows, context=1024, options=given.llama_options)
            opened.enter_context(peer)
        for seed in range(given.repeat + 1):
            for kind, asked in kinds.items():
                found[kind].append(rate(session, given.rows, given.tokens, seed, asked))
                if peer is not None and kind in theirs:
                    prompts = prompts_of(seed, given.rows)
                    theirs[kind].append(peer.rate(prompts, given.tokens, seed, asked.get("schema")))
            if not seed:
                before = session.stats()
        after = session.stats()
        origins = {
            record.origin for record in session.programs() if record.name.endswith(("+gated", "+forward", "+choice"))
        }
    print(
        f"{given.shape} {given.quantize or '16 bits'}, {given.rows} rows; guided programs were {' and '.join(origins)}"
    )
    print(f"compiled while serving: {after.compilations - before.compilations}")
    for kind in kinds:
        line = f"{kind:9} {rate_of(found[kind])}, ratio {compared(found[kind], found['free'])}"
        if theirs.get(kind):
            line += f"; llama.cpp {rate_of(theirs[kind])}, ratio {compared(theirs[kind], theirs['free'])}"
            line += f"; ours over theirs {compared(found[kind], theirs[kind])}"
        print(line)


def rate_of(rates: list[float]) -> str:
    """The median of all rounds but the first."""
    return f"{statistics.median(rates[1:]):7.1f} tokens/s"


def compared(ones: list[float], others: list[float]) -> str:
    """The median of the ratios of each round but the first, and their range."""
    return harness.spread(harness.ratios(ones[1:], others[1:]))


if __name__ == "__main__":
    main()
