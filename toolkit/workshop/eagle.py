"""`python -m workshop.eagle`: train a head of EAGLE-3 that drafts for a model, on what the model itself says.

    python -m workshop.eagle MODEL TEXTS HEAD [--write 400] [--corpus] [--minutes 20] [--vocab 8192] [--unroll 3]
                             [--seed 0]

TEXTS has one text in each line, as JSON: [kind, prompt, ids of the answer]. With `--write` the model answers so many
prompts first, two thirds of them at temperature 0.8: those below, or with `--corpus` requests of the embedded model's
corpus, for a model of `workshop.tiny.train`. The states that the head reads are computed once. Then the head
learns what the model would say next, several drafts in a row: each further one reads the head's own state, as it will
when it drafts, and the text's own token. At the end, HEAD is a folder that `rekindle.open(MODEL, drafts=HEAD)` takes.
Every twentieth text is held out; of those, the share of places is printed whose first 1 to 4 drafts all are right.

B texts, S places of a text, E hidden size, F size of what the head reads, D tokens that it can draft, H query heads,
K kv heads, I place of a draft in a row.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from numpy.typing import NDArray
from safetensors.numpy import save_file

import rekindle
from rekindle._src.models.base import LoadedModel, merge
from rekindle._src.models.hooks import stream_at
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.text.tokenizer import Tokenizer
from workshop.tiny.corpus import REQUESTS, TRAIN, requests
from workshop.tiny.train import EPS, FIRST, SECOND, causal

LENGTH, ROWS = 256, 2  # places of a text, and texts in a batch
SHOWN = 4  # drafts whose share of right ones is printed
HELD_OUT = 20  # of so many texts, one
WARMUP, RATE, DECAY = 20, 6e-4, 0.01  # steps; of Adam
NOUNS = (
    "rivers", "the moon", "bread", "bridges", "winter", "chess", "trains", "honey bees", "volcanoes", "libraries",
    "music", "glass", "maps", "gardens", "whales", "clocks", "paper", "the sea", "mountains", "rice", "cities", "tea",
    "coffee", "horses", "rain", "the sun", "forests", "money", "ships", "castles", "kites", "cooking", "schools",
    "owls", "deserts", "football", "painting", "windmills", "airplanes", "salt", "wolves", "markets", "islands",
    "theatres",
)  # fmt: skip
TASKS = (
    "reverses a string", "finds the largest number in a list", "counts words in a file", "checks if a number is prime",
    "sorts a list of tuples", "merges two dictionaries", "computes factorials", "reads a CSV file", "computes the mean",
    "removes duplicates from a list", "converts Celsius to Fahrenheit", "flattens a nested list", "counts vowels",
    "finds all even numbers", "checks for palindromes", "adds two matrices", "searches a sorted list", "parses a date",
    "computes Fibonacci numbers", "writes a dictionary to a file", "splits a list into chunks", "sums the digits",
)  # fmt: skip
ASKED = {
    "prose": (
        "Write a short story about {}.", "Explain {} to a child.", "Write an essay about {}.", "What is known of {}?",
        "Give me five tips about {}.", "Write a letter to a friend about {}.", "Describe the history of {}.",
    ),
    "code": (
        "Write a Python function that {}, with tests.", "Write a Python function that {}, with a docstring.",
        "Write a class in Python that {}.", "Write JavaScript that {}.", "Explain a Python program that {}.",
    ),
    "json": (
        "Write a JSON list of five records about {}, each with a name, a year and a description.",
        "Write a JSON object with ten facts about {}.",
    ),
    "edits": (
        "Add a comment to every line of this function:\n\n```python\n{}```",
        "Rewrite this function with types and a docstring:\n\n```python\n{}```",
    ),
}  # fmt: skip
Weights = dict[str, Array]  # of the head, by their names in its checkpoint


class Text(NamedTuple):
    """A prompt and the model's answer."""

    ids: list[int]
    start: int  # of the answer


class Batch(NamedTuple):
    """Texts, padded, and what the model made of them."""

    tokens: Array  # int32 [B, S]
    answers: Array  # [B, S]: the place belongs to an answer
    read: Array  # [B, S, F]: the inputs of the layers that the head reads
    hidden: Array  # [B, S, E]: the final hidden state


class Shape(NamedTuple):
    """The sizes of a head's layer."""

    heads: int
    kv_heads: int
    size: int
    eps: float
    theta: float


def functions(count: int) -> list[str]:
    """Return small functions of Python's own library."""
    found = list[str]()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py")):
        source = file.read_text(errors="ignore")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and 100 < len(text := ast.unparse(node)) < 300:
                found.append(text + "\n")
    return found[:: max(1, len(found) // count)][:count]


def prompts(count: int, seed: int, *, repeat: bool = True) -> list[tuple[str, str]]:
    """Return kinds and messages, in random order; after all of them they come again, if they `repeat`."""
    subjects = {"code": TASKS, "edits": tuple(functions(len(NOUNS)))}
    every = [
        (kind, form.format(subject))
        for kind, forms in ASKED.items()
        for form in forms
        for subject in subjects.get(kind, NOUNS)
    ]
    random.Random(seed).shuffle(every)
    return [every[place % len(every)] for place in range(count if repeat else min(count, len(every)))]


def conversations(count: int, seed: int, *, of_corpus: bool) -> list[tuple[str, list[dict[str, str]]]]:
    """Return kinds and messages, in random order."""
    if not of_corpus:
        return [(kind, [{"role": "user", "content": message}]) for kind, message in prompts(count, seed)]
    streams, rng = {kind: requests(kind, f"{TRAIN} {seed}") for kind in REQUESTS}, random.Random(seed)
    return [(kind, next(streams[kind])) for kind in rng.choices(list(streams), k=count)]


def write_texts(model: str, file: Path, questions: Sequence[tuple[str, list[dict[str, str]]]]) -> None:
    """Let the model answer, many at once, and write its answers to a file."""
    with rekindle.open_sync(model, max_requests=16, max_model_len=512, disk_memory=0) as session:
        rendered = [str(session.render(messages)) for _, messages in questions]
        handles = [
            session.submit(prompt, max_tokens=LENGTH - 64, temperature=0.8 if place % 3 else 0.0, seed=place)
            for place, prompt in enumerate(rendered)
        ]
        with file.open("w") as out:
            for (kind, _), prompt, handle in zip(questions, rendered, handles, strict=True):
                out.write(json.dumps([kind, prompt, list(handle.result_sync().token_ids)]) + "\n")
                out.flush()  # a run that is ended early has its texts


def read_texts(file: Path, tokenizer: Tokenizer) -> list[Text]:
    """Return the texts of a file, cut to `LENGTH` tokens; those with hardly an answer are left out."""
    texts = []
    for line in file.read_text().splitlines():
        _, prompt, answer = json.loads(line)
        ids = [*tokenizer.encode(prompt), *answer]
        start = len(ids) - len(answer)
        if min(len(ids), LENGTH) - start > 2 * SHOWN:
            texts.append(Text(ids[:LENGTH], start))
    return texts


def batches(model: LoadedModel, texts: Sequence[Text], reads: tuple[int, ...]) -> Iterator[Batch]:
    """Yield texts, and what the model makes of them."""

    @jax.jit
    def states(leaves: tuple[Array, ...], tokens: Array) -> tuple[Array, Array]:
        module, streams = merge(model.graph, leaves), dict[int, Array]()
        attend = causal(ROWS, LENGTH, model.config.attention[0].scale)
        places = jnp.tile(jnp.arange(LENGTH), ROWS)
        hidden = module(tokens.reshape(-1), places, attend, listeners=[stream_at(streams, reads)])
        read = jnp.concatenate([streams[layer] for layer in reads], axis=-1)
        shape = (ROWS, LENGTH, -1)
        return read.reshape(shape).astype(jnp.bfloat16), hidden.reshape(shape).astype(jnp.bfloat16)

    for place in range(0, len(texts), ROWS):
        tokens, answers = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), bool)
        for row, text in enumerate(texts[place : place + ROWS]):
            tokens[row, : len(text.ids)] = text.ids
            answers[row, text.start : len(text.ids)] = True
        yield Batch(jnp.asarray(tokens), jnp.asarray(answers), *states(model.leaves, jnp.asarray(tokens)))


def values(model: LoadedModel) -> dict[str, Array]:
    """Return the arrays of a model by path, as numbers."""
    dtype = jnp.dtype(model.graph.precision.weights)
    leaves = zip(model.graph.paths, model.leaves, strict=True)
    bits = jax.lax.bitcast_convert_type
    return {path: bits(leaf, dtype) if leaf.dtype == jnp.uint16 else leaf for path, leaf in leaves}


def initial(model: LoadedModel, ids: NDArray[Any], reads: tuple[int, ...], seed: int) -> Weights:
    """Return a head that ends as the model does: its last reading, the norms, the MLP and the scores."""
    own, config, rng = values(model), model.config, np.random.default_rng(seed)
    last, E, inner = f"layers.{config.num_layers - 1}", config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv, gate_up = (np.asarray(own[f"{last}.{name}.weight"], np.float32) for name in ("attention.qkv", "mlp.gate_up"))
    parts = np.split(qkv, [queries, queries + keys])
    head = own["embed.weight"] if config.tie_embeddings else own["head.weight"]
    weights = {
        "fc.weight": np.concatenate([*[np.zeros((E, E))] * (len(reads) - 1), np.eye(E)], axis=1),
        "norm.weight": own["norm.weight"],
        "lm_head.weight": np.asarray(head)[ids],
        "midlayer.input_layernorm.weight": np.ones(E),
        "midlayer.hidden_norm.weight": own[f"{last}.attention_norm.weight"],
        "midlayer.post_attention_layernorm.weight": own[f"{last}.mlp_norm.weight"],
        "midlayer.self_attn.o_proj.weight": own[f"{last}.attention.out.weight"],
        "midlayer.mlp.gate_proj.weight": gate_up[:inner],
        "midlayer.mlp.up_proj.weight": gate_up[inner:],
        "midlayer.mlp.down_proj.weight": own[f"{last}.mlp.down.weight"],
    }
    for name, part in zip("qkv", parts, strict=True):
        embedded = rng.standard_normal(part.shape) * E**-0.5
        weights[f"midlayer.self_attn.{name}_proj.weight"] = np.concatenate([embedded, part], axis=1)
    return {name: jnp.asarray(np.asarray(value), jnp.float32) for name, value in weights.items()}


def _product(x: Array, matrix: Array) -> Array:
    """Return x [..., in] · matrix [out, in], of values that are rounded to bfloat16."""
    x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    return jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotated(x: Array, positions: Array, theta: float) -> Array:
    """Return heads [B, S, H, size], rotated to their positions [S]."""
    size = x.shape[-1]
    angles = positions[:, None] * theta ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def drafts(weights: Weights, shape: Shape, table: Array, batch: Batch, count: int) -> list[Array]:
    """Return the scores [B, S, D] of `count` drafts after each place; draft I is for the token I + 2 further on.

    The draft I + 1 attends to the entries of the places up to its own, and to those of the drafts before it.
    """
    B, S = batch.tokens.shape
    heads, kv_heads, size, eps, theta = shape
    layer = {name.removeprefix("midlayer."): value for name, value in weights.items()}
    state = _product(batch.read, weights["fc.weight"])
    seen = jnp.arange(S)[:, None] >= jnp.arange(S)
    all_keys, all_values, found = list[Array](), list[Array](), list[Array]()
    for place in range(count):
        embedded = table[jnp.roll(batch.tokens, -1 - place, axis=1)].astype(jnp.float32)
        normed = _norm(embedded, layer["input_layernorm.weight"], eps)
        both = jnp.concatenate([normed, _norm(state, layer["hidden_norm.weight"], eps)], axis=-1)
        q, k, v = (_product(both, layer[f"self_attn.{name}_proj.weight"]).reshape(B, S, -1, size) for name in "qkv")
        positions = jnp.arange(S) + place
        q = _rotated(q, positions, theta).reshape(B, S, kv_heads, heads // kv_heads, size) * size**-0.5
        all_keys.append(_rotated(k, positions, theta))
        all_values.append(v)
        scores = [jnp.where(seen, jnp.einsum("bskgd,btkd->bkgst", q, all_keys[0]), -1e30)]
        scores += [jnp.einsum("bskgd,bskd->bkgs", q, own)[..., None] for own in all_keys[1:]]
        shares = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        attended = jnp.einsum("bkgst,btkd->bskgd", shares[..., :S], all_values[0])
        for number, own in enumerate(all_values[1:]):
            attended += shares[..., S + number].transpose(0, 3, 1, 2)[..., None] * own[:, :, :, None]
        x = state + _product(attended.reshape(B, S, -1), layer["self_attn.o_proj.weight"])
        inner = _norm(x, layer["post_attention_layernorm.weight"], eps)
        gate = jax.nn.silu(_product(inner, layer["mlp.gate_proj.weight"]))
        state = x + _product(gate * _product(inner, layer["mlp.up_proj.weight"]), layer["mlp.down_proj.weight"])
        found.append(_product(_norm(state, weights["norm.weight"], eps), weights["lm_head.weight"]))
    return found


def _answered(batch: Batch, place: int) -> Array:
    """Return which places [B, S] have an answer's token I + 2 further on."""
    S = batch.tokens.shape[1]
    return jnp.roll(batch.answers, -2 - place, axis=1) & (jnp.arange(S) < S - 2 - place)


def loss(weights: Weights, shape: Shape, model: tuple[Array, Array], batch: Batch, unroll: int) -> Array:
    """Return how far the scores of drafts are from what the model itself would say there: the mean cross entropy.

    `model` is its embedding, and the rows of its head for the tokens that can be drafted.
    """
    table, head = model
    wanted = jax.nn.softmax(_product(batch.hidden, head), axis=-1)
    total = jnp.zeros(())
    for place, scores in enumerate(drafts(weights, shape, table, batch, unroll)):
        likely = jnp.roll(wanted, -1 - place, axis=1)
        each = -(likely * jax.nn.log_softmax(scores, axis=-1)).sum(axis=-1)
        counts = _answered(batch, place)
        total += 0.8**place * jnp.where(counts, each, 0.0).sum() / jnp.maximum(counts.sum(), 1)
    return total


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def step(
    shape: Shape, unroll: int, state: tuple[Weights, Weights, Weights], model: tuple[Array, Array], batch: Batch,
    number: Array, rate: Array,
) -> tuple[tuple[Weights, Weights, Weights], Array]:  # fmt: skip
    """Return the weights and Adam's means after step `number`, counted from 1, and the loss before it."""
    weights, means, squares = state
    value, gradients = jax.value_and_grad(loss)(weights, shape, model, batch, unroll)
    size = jnp.sqrt(sum(jnp.vdot(one, one) for one in gradients.values()))
    gradients = {name: one * jnp.minimum(1.0, 1.0 / (size + EPS)) for name, one in gradients.items()}
    means = {name: FIRST * means[name] + (1 - FIRST) * one for name, one in gradients.items()}
    squares = {name: SECOND * squares[name] + (1 - SECOND) * one**2 for name, one in gradients.items()}
    for name, mean in means.items():
        root = jnp.sqrt(squares[name] / (1 - SECOND**number)) + EPS
        decay = DECAY if weights[name].ndim > 1 else 0.0
        weights[name] = weights[name] - rate * (mean / (1 - FIRST**number) / root + decay * weights[name])
    return (weights, means, squares), value


@partial(jax.jit, static_argnums=1)
def right(weights: Weights, shape: Shape, table: Array, ids: Array, batch: Batch) -> tuple[Array, Array]:
    """Count the places with their first 1 to SHOWN drafts right, and all places [SHOWN]."""
    counts, matches, so_far = list[Array](), list[Array](), jnp.ones(batch.tokens.shape, bool)
    whole = _answered(batch, SHOWN - 1)
    for place, scores in enumerate(drafts(weights, shape, table, batch, SHOWN)):
        so_far &= ids[scores.argmax(-1)] == jnp.roll(batch.tokens, -2 - place, axis=1)
        matches.append((so_far & whole).sum())
        counts.append(whole.sum())
    return jnp.stack(matches), jnp.stack(counts)


def acceptance(weights: Weights, shape: Shape, table: Array, ids: Array, held: Sequence[Batch]) -> list[float]:
    """Return the shares of places in texts with their first 1 to SHOWN drafts right."""
    pairs = [right(weights, shape, table, ids, batch) for batch in held]
    matches, counts = (np.sum([np.asarray(pair[part]) for pair in pairs], axis=0) for part in (0, 1))
    return [round(float(share), 3) for share in matches / np.maximum(counts, 1)]


def save(folder: Path, weights: Weights, ids: NDArray[Any], model: LoadedModel, reads: tuple[int, ...]) -> None:
    """Write a checkpoint of the head."""
    folder.mkdir(parents=True, exist_ok=True)
    config, rope = model.config, model.config.attention[0].rope
    assert rope is not None, "the model rotates"
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": config.vocab_size,
        "draft_vocab_size": len(ids), "hidden_size": config.hidden_size, "num_hidden_layers": 1,
        "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "hidden_act": config.activation,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(reads),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
    state: dict[str, Any] = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in weights.items()}
    state["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
    state["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, folder / "model.safetensors")


def train(arguments: argparse.Namespace) -> None:
    model = load(arguments.model, dtype="bfloat16")
    config, tokenizer = model.config, Tokenizer.load(Path(arguments.model))
    texts = read_texts(Path(arguments.texts), tokenizer)
    held_out, others = texts[::HELD_OUT], [text for place, text in enumerate(texts) if place % HELD_OUT]
    often = Counter(token for text in others for token in text.ids[text.start :])
    common = [token for token, _ in often.most_common(arguments.vocab)]
    rest = (token for token in range(config.vocab_size) if token not in often)
    ids = np.sort([*common, *(token for _, token in zip(range(arguments.vocab - len(common)), rest, strict=False))])
    reads = (2, config.num_layers // 2, config.num_layers - 3)
    start = time.perf_counter()
    held, batched = list(batches(model, held_out, reads)), list(batches(model, others, reads))
    count = sum(len(text.ids) - text.start for text in texts)
    print(f"{len(texts)} texts, {count:,} tokens of answers, {time.perf_counter() - start:.0f} s", flush=True)
    own, rope = values(model), config.attention[0].rope
    assert rope is not None, "the model rotates"
    shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps, rope.theta)
    weights = initial(model, ids, reads, arguments.seed)
    ends = own["embed.weight"], jnp.array(weights["lm_head.weight"])
    zeros = {name: jnp.zeros_like(value) for name, value in weights.items()}
    state = weights, zeros, {name: jnp.zeros_like(value) for name, value in weights.items()}
    rng, number, mean, limit = random.Random(arguments.seed), 0, math.nan, 60.0 * arguments.minutes
    start, shown = time.perf_counter(), 0.0
    while (spent := time.perf_counter() - start) < limit:
        rate = RATE * min(1.0, (number + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * spent / limit))
        number += 1
        batch = batched[rng.randrange(len(batched))]
        state, value = step(shape, arguments.unroll, state, ends, batch, jnp.float32(number), jnp.float32(rate))
        mean = float(value) if math.isnan(mean) else 0.95 * mean + 0.05 * float(value)
        if spent - shown > limit / 10:
            shown = spent
            shares = acceptance(state[0], shape, ends[0], jnp.asarray(ids), held)
            print(f"step {number}, {spent:.0f} s, loss {mean:.3f}, held out {shares}", flush=True)
            save(Path(arguments.head), state[0], ids, model, reads)
    shares = acceptance(state[0], shape, ends[0], jnp.asarray(ids), held)
    print(f"done: step {number}, loss {mean:.3f}, held out {shares}", flush=True)
    save(Path(arguments.head), state[0], ids, model, reads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "texts", "head"):
        parser.add_argument(name)
    parser.add_argument("--write", type=int, default=0)
    parser.add_argument("--corpus", action="store_true")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--unroll", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.write:
        questions = conversations(arguments.write, arguments.seed, of_corpus=arguments.corpus)
        write_texts(arguments.model, Path(arguments.texts), questions)
    train(arguments)


if __name__ == "__main__":
    main()
