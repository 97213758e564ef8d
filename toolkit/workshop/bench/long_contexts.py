"""Decode and prompt speed of long contexts, perplexity and a planted fact, for each kind of cache, next to llama.cpp.

    python long_contexts.py FILE.gguf --llama FOLDER [--part speed perplexity fact] [--depth 1024 4096 16384 32768]

FOLDER has llama-bench, llama-perplexity and llama-completion; both engines open the same file, with as many threads.
llama.cpp runs with flash attention. In each round the engines and kinds take turns, in an order that rotates; decoding
is one stream of `tokens` after a prompt of `depth` tokens, and the prompt's own pace is given next to it. Depths beyond
the model's context are left out. Perplexity is that of the second half of each window, as llama-perplexity counts it.
The default text is this repository's guide, repeated as often as the deepest prompt needs.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
from budgets import step
from caches import ANSWER, planted

import rekindle
from rekindle._src.programs import kv_layout as paged

THEIRS = {"f16": "f16", "q8_0": "q8_0", "q4_0": "q4_0"}
OURS = ("bfloat16", "int8", "int8-int4", "int4")
BUDGETED = re.compile(r"(.+)\+(\d+)")  # a kind of cache, and an attention budget


class Pace(NamedTuple):
    """Tokens per second."""

    prompt: float
    decode: float


class Ours:
    """A session with a kind of cache."""

    def __init__(self, path: Path, kind: str, longest: int, tokens: Sequence[int]) -> None:
        self.tokens, budget = tokens, BUDGETED.fullmatch(kind)
        options: dict[str, Any] = {"kv_dtype": budget[1] if budget else kind, "disk_memory": 0, "quiet": True}
        options |= {"attention_budget": int(budget[2])} if budget else {}
        self.session = rekindle.open_sync(path, max_requests=1, max_model_len=longest, host_memory=0, **options)

    def pace(self, depth: int, count: int) -> Pace:
        """The first generation computes the prompt; the second finds it in the cache, but for its last token."""
        ask: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        self.session.cache.clear(tier="memory").result_sync()

        def seconds(new: int) -> float:
            started = time.perf_counter()
            self.session.generate_sync(list(self.tokens[:depth]), max_tokens=new, **ask)
            return time.perf_counter() - started

        first, one, many = seconds(1), seconds(1), seconds(count + 1)
        return Pace(depth / first, count / (many - one))

    def answer(self, prompt: Sequence[int]) -> str:
        return self.session.generate_sync(list(prompt), max_tokens=10, temperature=0.0).text


def bench(programs: Path, path: Path, kind: str, depth: int, count: int, threads: int) -> Pace:
    """Return llama-bench's pace."""
    common = [programs / "llama-bench", "-m", path, "-fa", "on", "-ctk", kind, "-ctv", kind, "-t", threads, "-r", 1]
    tests = {"prompt": ["-p", depth, "-n", 0], "decode": ["-p", 0, "-n", count, "-d", depth]}
    found = {}
    for name, test in tests.items():
        done = subprocess.run([*map(str, (*common, *test)), "-o", "json"], capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout)[0]["avg_ts"]
    return Pace(**found)


def llama_perplexity(programs: Path, path: Path, kind: str, text: Path, length: int, windows: int) -> float:
    command = [programs / "llama-perplexity", "-m", path, "-f", text, "-c", length, "--chunks", windows, "-fa", "on"]
    command += ["-ctk", kind, "-ctv", kind]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    (found,) = re.findall(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    return float(found)


def llama_answer(programs: Path, path: Path, kind: str, prompt: str, context: int) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(prompt)
        file.flush()
        command = [programs / "llama-completion", "-m", path, "-f", file.name, "-c", context, "-n", 10, "--temp", 0]
        command += ["-no-cnv", "--no-display-prompt", "-fa", "on", "-ctk", kind, "-ctv", kind]
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def our_perplexity(model: Any, kind: str, windows: Sequence[Sequence[int]]) -> float:
    """Return the perplexity of the second halves of windows, computed through pages of that kind."""
    losses = []
    for window in windows:
        shapes = paged.abstract(model.config, 2 + len(window) // 32, 32, kind)
        kv = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        half = len(window) // 2
        _, kv = step(model.graph, model.leaves, kv, jnp.asarray(window[:half]), jnp.int32(0), False)
        for first in range(half, len(window), 64):
            part = jnp.asarray(window[first : first + 64])
            logits, kv = step(model.graph, model.leaves, kv, part, jnp.int32(first), True)
            odds = jax.nn.log_softmax(np.asarray(logits, np.float32), axis=-1)
            following = window[first + 1 : first + 1 + len(part)]
            losses += [-float(odds[index, token]) for index, token in enumerate(following)]
    return float(np.exp(np.mean(losses)))


def speeds(given: Any, tokens: Sequence[int], depths: Sequence[int]) -> Iterator[str]:
    sessions = {kind: Ours(given.file, kind, max(depths) + given.tokens + 64, tokens) for kind in given.kinds}
    engines = [*(("rekindle", kind) for kind in given.kinds)]
    engines += [("llama.cpp", kind) for kind in given.theirs if given.llama is not None]
    for depth in depths:
        paces: dict[tuple[str, str], list[Pace]] = {engine: [] for engine in engines}
        for number, (engine, kind) in harness.turns(engines, given.rounds):
            if engine == "rekindle":
                pace = sessions[kind].pace(depth, given.tokens)
            elif number < 0:
                continue  # it has nothing to warm up
            else:
                pace = bench(given.llama, given.file, kind, depth, given.tokens, given.threads)
            if number >= 0:
                paces[engine, kind].append(pace)
        for (engine, kind), found in paces.items():
            prompt, decode = (statistics.median(column) for column in zip(*found, strict=True))
            yield f"| {depth} | {engine} | {kind} | {prompt:.0f} | {decode:.1f} |"
    for one in sessions.values():
        one.session.close()


def main() -> None:
    parts, guide = ["speed", "perplexity", "fact"], sorted((harness.ROOT / "tutorials/guide").glob("*.md"))
    given = harness.options(
        __doc__, "file", file=Path, llama=Path, text=guide, part=(parts, parts), theirs=(list(THEIRS), list(THEIRS)),
        kinds=list(OURS), depth=[1024, 4096, 16384, 32768], tokens=32, rounds=3, threads=2, length=1024, windows=4,
        facts=[1000, 4000, 8000],
    )  # fmt: skip
    tokenizer, context = rekindle.models.Tokenizer.load(given.file), context_of(given.file)
    text = "\n".join(file.read_text() for file in given.text)
    once = tokenizer.encode(text)
    depths = [depth for depth in given.depth if depth + given.tokens + 64 <= context]
    tokens = list(itertools.islice(itertools.cycle(once), max([*depths, *given.facts, len(once)])))
    if "speed" in given.part and depths:
        harness.table("after", "engine", "cache", "prompt, tokens/s", "decode, tokens/s")
        for line in speeds(given, tokens, depths):
            print(line, flush=True)
    kinds = [kind for kind in given.kinds if not BUDGETED.fullmatch(kind)]
    if "perplexity" in given.part:
        harness.table("engine", "cache", f"perplexity of {given.windows} windows of {given.length}")
        model = rekindle.models.load(given.file, dtype="float32")
        windows = [tokens[at * given.length : (at + 1) * given.length] for at in range(given.windows)]
        for kind in kinds:
            print(f"| rekindle | {kind} | {our_perplexity(model, kind, windows):.4f} |", flush=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            for kind in given.theirs if given.llama is not None else []:
                theirs = llama_perplexity(given.llama, given.file, kind, Path(file.name), given.length, given.windows)
                print(f"| llama.cpp | {kind} | {theirs:.4f} |", flush=True)
    facts = [length for length in given.facts if length + 80 <= context] if "fact" in given.part else []
    if facts:
        harness.table("engine", "cache", *(f"the fact at {length}" for length in facts))
    for kind in given.kinds if facts else []:
        ours = Ours(given.file, kind, max(facts) + 80, tokens)
        answers = [ours.answer(planted(tokenizer, tokens, length)) for length in facts]
        ours.session.close()
        print(f"| rekindle | {kind} | {' | '.join(map(found_in, answers))} |", flush=True)
    for kind in given.theirs if facts and given.llama is not None else []:
        prompts = [tokenizer.decode(planted(tokenizer, tokens, length)) for length in facts]
        answers = [llama_answer(given.llama, given.file, kind, prompt, max(facts) + 512) for prompt in prompts]
        print(f"| llama.cpp | {kind} | {' | '.join(map(found_in, answers))} |", flush=True)


def context_of(path: Path) -> int:
    return rekindle.models.load(path).config.max_position_embeddings


def found_in(answer: str) -> str:
    return "found" if ANSWER.strip() in answer else repr(answer.strip()[:20])


if __name__ == "__main__":
    main()
