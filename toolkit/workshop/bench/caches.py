"""What a cache in fewer bits costs and brings: perplexity, a planted fact, bytes per token and the pace of decoding.

    python caches.py [--model FILE] [--text FILES] [--part perplexity fact speed] [--kinds bfloat16 int8 int8-int4 int4]

Perplexity is that of windows of a text, with keys and values rounded as the pages of each kind round them, with and
without rotation; everything else is computed in float32. A fact is planted at a third of a long text and asked for at
its end, in sessions: the figure is the mean log-probability of the answer's tokens. The pace is that of one stream with
a full context, in sessions that take turns. The default text is this repository's guide.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import rekindle
from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.programs.kv_layout import page_bytes
from rekindle_kernels.packed_pages import quantize_four_bits, rotate, unpack
from rekindle_kernels.pages import quantize
from workshop import reference

ROUND = 48  # tokens of a timed answer
FACT, QUESTION, ANSWER = (
    "The secret number of the lighthouse is 7-4-1-9.",
    "The secret number of the lighthouse is",
    " 7-4-1-9",
)
Rounding = Callable[[jax.Array], jax.Array]


def _of(bits: int, rotated: bool) -> Rounding:
    """Return vectors rounded to so many bits by a scale each; 0 and 16 are float32 and bfloat16."""

    def rounded(x: jax.Array) -> jax.Array:
        if bits == 0:
            return x
        if bits == 16:
            return x.astype(jnp.bfloat16).astype(jnp.float32)
        y = rotate(x) if rotated else x
        codes, scales = quantize_four_bits(y) if bits == 4 else quantize(y, jnp.dtype(jnp.int8))
        y = (unpack(codes) if bits == 4 else codes).astype(jnp.float32) * scales[..., None]
        return rotate(y) if rotated else y

    return rounded


# The rounding of keys, and of values
ROUNDINGS: dict[str, tuple[Rounding, Rounding]] = {
    "float32": (_of(0, False), _of(0, False)),
    "bfloat16": (_of(16, False), _of(16, False)),
    "int8": (_of(8, False), _of(8, False)),
    "int8, rotated": (_of(8, True), _of(8, True)),
    "int8-int4": (_of(8, True), _of(4, True)),
    "int8-int4, not rotated": (_of(8, False), _of(4, False)),
    "int4": (_of(4, True), _of(4, True)),
    "int4, not rotated": (_of(4, False), _of(4, False)),
}


class RoundedCache(reference.DenseCache):
    """A dense cache whose keys and values are rounded as they are written."""

    rounding = ROUNDINGS["float32"]

    def __call__(self, layer: int, q: Any, k: Any, v: Any, sinks: Any = None, /) -> jax.Array:
        keys, values = self.rounding
        return super().__call__(layer, q, None if k is None else keys(k), None if v is None else values(v), sinks)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _losses(graph: Graph, leaves: Sequence[Any], tokens: jax.Array, name: str) -> jax.Array:
    """Return the losses of a window's tokens, with keys and values in rounding `name`."""
    model, count, config = merge(graph, leaves), tokens.shape[0], graph.config
    empty = reference.empty_cache(LoadedModel(config, graph, tuple(leaves), ""), count)
    cache = RoundedCache(config, empty, jnp.int32(0), count)
    cache.rounding = ROUNDINGS[name]
    hidden = model(tokens, jnp.arange(count), cache, lengths=jnp.arange(1, count + 1))
    odds = jax.nn.log_softmax(model.logits(hidden), axis=-1)
    return -jnp.take_along_axis(odds[:-1], tokens[1:, None], axis=-1)[:, 0]


def perplexities(path: Path, tokens: Sequence[int], length: int, windows: int) -> Iterator[tuple[str, float]]:
    model = rekindle.models.load(path, dtype="float32")
    cut = [jnp.asarray(tokens[at * length : (at + 1) * length], jnp.int32) for at in range(windows)]
    for name in ROUNDINGS:
        losses = [_losses(model.graph, model.leaves, window, name) for window in cut]
        yield name, float(np.exp(np.mean(np.concatenate(losses))))


def open_session(path: Path, kind: str, length: int) -> rekindle.Session:
    options: dict[str, Any] = {"max_requests": 2, "max_model_len": length, "disk_memory": 0, "quiet": True}
    return rekindle.open_sync(path, kv_dtype=kind, **options)


def planted(tokenizer: Any, words: Sequence[int], length: int) -> list[int]:
    """Return about `length` tokens with the fact at a third of them, and the question at their end."""
    fact, question = tokenizer.encode("\n" + FACT + "\n"), tokenizer.encode("\n" + QUESTION)
    rest = length - len(fact) - len(question) - 8
    return [*words[: rest // 3], *fact, *words[rest // 3 : rest], *question]


def fact(session: rekindle.Session, words: Sequence[int], length: int) -> float:
    """Return the mean log-probability of the answer after `length` tokens with the fact in them."""
    (score,) = session.score(planted(session.tokenizer, words, length), [ANSWER]).result_sync()
    return statistics.fmean(score.logprobs)


def seconds_per_token(session: rekindle.Session, prompt: Sequence[int]) -> float:
    def answered(count: int) -> float:
        started = time.perf_counter()
        session.generate_sync(list(prompt), max_tokens=count, temperature=0.0, ignore_eos=True)
        return time.perf_counter() - started

    return (answered(ROUND + 1) - answered(1)) / ROUND


def main() -> None:
    parts, kinds = ["perplexity", "fact", "speed"], ["bfloat16", "int8", "int8-int4", "int4"]
    guide = sorted((harness.ROOT / "tutorials/guide").glob("*.md"))
    given = harness.options(
        __doc__, model=Path, text=guide, part=(parts, parts), kinds=kinds, length=1024, windows=4,
        fact=[1000, 2000, 4000], speed=[4000], rounds=5,
    )  # fmt: skip
    path = given.model or rekindle.tiny.folder()
    tokens = rekindle.models.Tokenizer.load(path).encode("\n".join(file.read_text() for file in given.text))
    config = rekindle.models.load(path).config
    for kind in given.kinds:
        print(f"{kind:26}{page_bytes(config, 32, kind) // 32:8,} bytes per token", flush=True)
    if "perplexity" in given.part:
        for name, perplexity in perplexities(path, tokens, given.length, given.windows):
            print(f"{name:26}{perplexity:10.4f} perplexity of {given.windows} windows of {given.length}", flush=True)
    if "fact" in given.part:
        for kind in given.kinds:
            with open_session(path, kind, max(given.fact) + 64) as session:
                found = [fact(session, tokens, length) for length in given.fact]
            print(f"{kind:26}" + "".join(f"{one:10.3f} at {at}" for one, at in zip(found, given.fact, strict=True)))
    for length in given.speed if "speed" in given.part else []:
        sessions = {kind: open_session(path, kind, length + 2 * ROUND) for kind in given.kinds}
        paces: dict[str, list[float]] = {kind: [] for kind in sessions}
        for round_ in range(given.rounds + 1):
            for kind, session in sessions.items():
                pace = seconds_per_token(session, tokens[:length])
                if round_:  # the first one computes the prompt
                    paces[kind].append(pace)
        for kind, found in paces.items():
            against = statistics.median(a / b for a, b in zip(found, paces[given.kinds[0]], strict=True))
            print(f"{kind:26}{1e3 * statistics.median(found):8.2f} ms a token at {length}, {against:.2f} of the first")
        for session in sessions.values():
            session.close()


if __name__ == "__main__":
    main()
