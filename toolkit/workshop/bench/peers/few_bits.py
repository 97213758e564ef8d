"""A model that llama.cpp's quantiser encodes in few bits: speed, memory and perplexity of rekindle and of llama.cpp.

    python peers/few_bits.py SmolLM2-135M-Instruct.Q4_1.gguf --python /tmp/peers/bin/python [--types iq3_s]

The quantiser's types of fewer than four bits have blocks of 256 inputs. Where a Llama's rows are no multiple of that,
zeros make them longer, with which it computes the same: SmolLM2's 576 inputs become 768. The importance that the
quantiser asks for is the mean square of each matrix's inputs, over the first half of the text. Both engines then read
the other half, in windows, and the same tokens: as they serve, and with float32 everywhere, which shows whether they
mean the same numbers. Speed is raced by `run.py`, whose paired ratios are printed. A table of all types comes last:
tokens/s of one stream and of a prompt, MB resident, and perplexities as served.

Where llama.cpp ends with an illegal instruction, in its code for AMX, REKINDLE_LLAMA_REPACK=0 does without that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
sys.path[:0] = [str(HERE), str(ROOT / "toolkit"), str(ROOT / "kernels")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from rekindle._src.models.base import LoadedModel, merge  # noqa: E402
from rekindle._src.models.hooks import Norm  # noqa: E402
from rekindle._src.models.loading.gguf.header import read_header  # noqa: E402
from rekindle._src.models.nn.linear import Linear, matrices  # noqa: E402
from rekindle.models import Tokenizer, export, load  # noqa: E402
from rekindle_kernels import gated  # noqa: E402
from rekindle_kernels.native import cpu  # noqa: E402
from workshop import reference  # noqa: E402

# llama.cpp's numbers of the mixtures, and of the files that have float32 alone.
TYPES = {
    "iq1_s": 24, "iq1_m": 31, "iq2_xxs": 19, "iq2_xs": 20, "iq2_s": 28, "iq2_m": 29, "iq3_xxs": 23, "iq3_s": 26,
    "iq4_nl": 25, "iq4_xs": 30, "tq1_0": 36, "tq2_0": 37,
}  # fmt: skip
FLOAT32 = 0
ENGINES = ("rekindle", "llama_cpp")
Pair = tuple[float, float] | None
BLOCK = 256  # inputs
WINDOW = 512  # tokens that are read with nothing before them
# The matrices of a GGUF file that are one of rekindle's.
PARTS = {
    "attention.qkv": ("attn_q", "attn_k", "attn_v"), "attention.out": ("attn_output",),
    "mlp.gate_up": ("ffn_gate", "ffn_up"), "mlp.down": ("ffn_down",),
}  # fmt: skip


def lengthened(file: Path, folder: Path) -> None:
    """Write a folder of the model's floats, each row of which is a multiple of BLOCK inputs."""
    export(file, folder)
    config = json.loads((folder / "config.json").read_text())
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, pairs = config["num_attention_heads"], config["num_key_value_heads"]
    if hidden % BLOCK == 0:
        return
    assert config["model_type"] == "llama", "zeros were only thought through for Llamas"
    assert hidden == heads * size, "hidden size and heads have to grow alike"
    longer = -(-hidden // BLOCK) * BLOCK
    assert (longer // size) * pairs % heads == 0, "its heads can't grow as they are grouped"
    grown = {hidden: longer, pairs * size: longer * pairs // heads}
    assert not grown.keys() & {config["vocab_size"], config["intermediate_size"]}, "sizes have to differ"
    share = hidden / longer  # the mean of a norm now counts zeros
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        values = tensor.astype(np.float32) * (math.sqrt(share) if tensor.ndim == 1 else 1.0)
        tensors[name] = np.pad(values, [(0, grown.get(length, length) - length) for length in values.shape])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "hidden_size": longer, "num_attention_heads": longer // size, "dtype": "float32",
        "num_key_value_heads": longer // size * pairs // heads, "rms_norm_eps": config["rms_norm_eps"] * share,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


class InputSquares:
    """A delta that adds nothing: it sums the squares of the inputs of a matrix, over the rows of a program."""

    def __init__(self, sums: dict[str, jax.Array], path: str) -> None:
        self._sums, self._path = sums, path

    def add(self, y: jax.Array, x: jax.Array, gate: str | None = None, norm: Norm | None = None) -> jax.Array:
        rows = (x if norm is None else norm(x)).astype(jnp.float32)
        self._sums[self._path] = jnp.square(rows).sum(0)
        return y if gate is None else gated(y, gate)


def importance(model: LoadedModel, windows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the mean square of the inputs of each matrix in the layers, by its name in a GGUF file."""
    inner = matrices(merge(model.graph, model.leaves))
    paths = [path for path, matrix in inner.items() if path.startswith("layers.") and isinstance(matrix, Linear)]
    cache = reference.empty_cache(model, WINDOW)

    @jax.jit
    def squares(leaves: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        sums: dict[str, jax.Array] = {}
        module = merge(model.graph, leaves, {path: InputSquares(sums, path) for path in paths})
        attend = reference.DenseCache(model.config, cache, jnp.int32(0), WINDOW)
        module(tokens, jnp.arange(WINDOW), attend, lengths=jnp.full(WINDOW, WINDOW))
        return sums

    whole = [window for window in windows if len(window) == WINDOW]
    found = [squares(model.leaves, jnp.asarray(window, jnp.int32)) for window in whole]
    named = {}
    for path in paths:
        _, layer, part = path.split(".", 2)
        mean = np.mean([np.asarray(sums[path]) for sums in found], axis=0) / WINDOW
        # The quantiser chooses among values by these weights, so none of a block may be 0.
        mean = np.maximum(mean, 1e-6 * mean.mean()).astype(np.float32)
        named |= {f"blk.{layer}.{name}.weight": mean for name in PARTS[part]}
    return named


def perplexity(model: LoadedModel, windows: Sequence[Sequence[int]]) -> float:
    """Return that of each token but the first of its window."""
    losses = []
    for window in windows:
        logits = reference.prefill(model, window, reference.empty_cache(model, len(window)))[0]
        odds = jax.nn.log_softmax(logits[:-1].astype(jnp.float32), axis=-1)
        losses.append(-np.asarray(odds[jnp.arange(len(window) - 1), jnp.asarray(window[1:])]))
    return float(np.exp(np.concatenate(losses).mean()))


def by_llama_cpp(python: str, function: str, *arguments: Any) -> Any:
    """Call a function of `with_llama_cpp` in the Python that has the package; both ways as JSON."""
    code = f"import json, sys; sys.path.insert(0, {str(HERE)!r}); import with_llama_cpp as api; "
    code += f"print(json.dumps(api.{function}(*json.loads(sys.argv[1]))))"
    command = [python, "-c", code, json.dumps(arguments, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama.cpp ended with status {done.returncode} at {function}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def types_in(file: Path) -> str:
    """Return the types of a file's matrices, the commonest first: how many there are of each."""
    counts = Counter(tensor.kind.name for tensor in read_header(file).tensors if len(tensor.shape) > 1)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def race(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `run.py` measures of both engines with this file."""
    report = options.work / f"{file.stem}.json"
    command = [sys.executable, str(HERE / "run.py"), "--file", str(file), "--engines", *ENGINES]
    command += ["--workloads", "W1", "W2", "--rounds", str(options.rounds), "--threads", str(options.threads)]
    command += ["--python", f"llama_cpp={options.python}", "--work", str(options.work), "--json", str(report)]
    subprocess.run(command, check=True)
    races: list[dict[str, Any]] = json.loads(report.read_text())["races"]
    return races[0]


class Row(NamedTuple):
    """A type's line of the table; pairs are rekindle's figure and llama.cpp's."""

    kind: str
    matrices: str
    megabytes: float
    stream: Pair = None
    prompt: Pair = None
    resident: Pair = None
    perplexity: Pair = None

    def __str__(self) -> str:
        pairs = (("{:.1f}", self.stream), ("{:,.0f}", self.prompt), ("{:,.0f}", self.resident))
        cells = [two(form, pair) for form, pair in (*pairs, ("{:.2f}", self.perplexity))]
        return f"| {' | '.join([self.kind.upper(), self.matrices, f'{self.megabytes:.0f}', *cells])} |"


def two(form: str, pair: Pair) -> str:
    return "" if pair is None else " / ".join(map(form.format, pair))


def with_speed(row: Row, report: dict[str, Any]) -> Row:
    """Return the row with the medians of a race; where an engine failed there are none."""
    medians, resident = report["medians"], report["resident_mb"]

    def both(workload: str, figure: str) -> Pair:
        ours, theirs = (medians.get(name, {}).get(workload, {}).get(figure) for name in ENGINES)
        return None if ours is None or theirs is None else (ours, theirs)

    ours, theirs = map(resident.get, ENGINES)
    return row._replace(
        stream=both("W1", "decode_tok_s"),
        prompt=both("W2", "prefill_tok_s"),
        resident=None if ours is None or theirs is None else (ours, theirs),
    )


def compare(kind: str, wide: Path, importances: Path, windows: list[list[int]], options: argparse.Namespace) -> Row:
    """Make the file of a type, and return and print what both engines make of it."""
    made, unpacked = options.work / f"{kind}.gguf", options.work / f"{kind}-float32.gguf"
    if not made.exists():
        part = made.with_suffix(".part")
        by_llama_cpp(options.python, "quantise", wide, part, TYPES[kind], importances)
        part.rename(made)
    row = Row(kind, types_in(made), made.stat().st_size / 1e6)
    print(f"\n{kind}: {row.megabytes:.0f} MB; {row.matrices}", flush=True)
    if options.rounds:
        row = with_speed(row, race(made, options))
    if not options.perplexity:
        return row
    if options.float32:
        by_llama_cpp(options.python, "quantise", made, unpacked, FLOAT32)
        exact, theirs = perplexity(load(made, dtype="float32"), windows), theirs_of(unpacked, windows, options)
        unpacked.unlink()
        say("perplexity with float32 everywhere", exact, theirs)
    served = perplexity(load(made), windows), theirs_of(made, windows, options)
    say("perplexity as served", *served)
    return row._replace(perplexity=served)


def theirs_of(file: Path, windows: list[list[int]], options: argparse.Namespace) -> float:
    return float(by_llama_cpp(options.python, "perplexity", file, windows, options.threads))


def say(what: str, ours: float, theirs: float) -> None:
    print(f"  {what}: rekindle {ours:.4f}, llama.cpp {theirs:.4f}, ratio - 1 {ours / theirs - 1:+.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file with trained weights, in any type")
    parser.add_argument("--types", nargs="+", choices=tuple(TYPES), default=["iq2_xs", "iq3_xxs", "iq4_nl", "iq4_xs"])
    parser.add_argument("--text", nargs="+", type=Path, help="default: the pages of this project's documentation")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text's each half, at most")
    parser.add_argument("--rounds", type=int, default=3, help="of the race; 0 measures no speed")
    parser.add_argument("--perplexity", action=argparse.BooleanOptionalAction, default=True, help="measure it")
    parser.add_argument(
        "--float32", action=argparse.BooleanOptionalAction, default=True, help="also with float32 everywhere"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--python", default=sys.executable, help="that has llama_cpp")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "rekindle-few-bits", help="files")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    pages = options.text or sorted((ROOT / "tutorials/guide").glob("*.md"))
    tokens = [*Tokenizer.load(options.model).encode("\n".join(page.read_text() for page in pages))]
    tokens = tokens[: 2 * options.tokens]
    half = len(tokens) // 2
    first, second = ([*windows_of(part)] for part in (tokens[:half], tokens[half:]))
    print(f"{cpu.model_name()}; {half} tokens say what is important, {sum(map(len, second))} are measured", flush=True)
    folder, wide, importances = (options.work / name for name in ("folder", "float32.gguf", "importance.npz"))
    if not importances.exists():
        lengthened(options.model, folder)
        export(folder, wide, type="f32")
        model = load(wide, dtype="float32")
        print(f"perplexity of {options.model.name}: {perplexity(load(options.model, dtype='float32'), second):.4f}")
        print(f"with longer rows, {model.config.hidden_size} inputs: {perplexity(model, second):.4f}", flush=True)
        np.savez(importances, **importance(model, first))
    rows = [compare(kind, wide, importances, second, options) for kind in options.types]
    print("\n| | its matrices | MB | one stream | a prompt of 1,024 | MB resident | perplexity |")
    print("|---" * len(Row._fields) + "|", *rows, sep="\n", flush=True)


def windows_of(tokens: list[int]) -> list[list[int]]:
    """Return windows of WINDOW tokens; what is left at the end is not read."""
    return [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW + 1, WINDOW)]


if __name__ == "__main__":
    main()
