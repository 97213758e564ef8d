"""What drafts bring and cost: tokens/s with a session's drafters over those without, on texts of several kinds.

    python drafts.py [tiny | 135m | FILE.gguf | FOLDER] [--streams 1 4 16 32] [--kinds edits json prose]
                                 [--tokens 160] [--repeat 5] [--quantize int8] [--rows 32] [--small FOLDER]
                                 [--temperatures 1.0] [--skip 0] [--peer FOLDER] [--llama-server PROGRAM]

No small model writes edits. So a logits processor leads each request through a text of its own, token by token, in all
sessions alike: steps cost what they cost, and drafts fare as they would with a model that writes these texts. `edits`
are sources of Python after a prompt with an earlier version of them, `json` are records of one form, `prose` the pages
of this project, and `random` tokens in which nothing repeats: there drafts can only cost. `own` is what the model
itself says, and so are `answers-code` and its like, to the prompts of `workshop.eagle` without the first `--skip`, on
which a head may be trained: at each of the `--temperatures`, answers up to their ends. `tiny-stories` and its like are
answers to held-out requests of the embedded model's corpus, for the models of `workshop.tiny.train`. Sessions take
turns in each round; ratios are medians over rounds, with their range, of tokens in a second, and of tokens in a second
of the processor. `--small` is a model or a head that drafts, too: on led texts it is never right. `--peer` is a folder
with llama-cpp-python, which follows the same texts of one stream from the same GGUF file, with n-gram drafts of the
sizes that are tried; the best of them counts. With `--llama-server` and two GGUF files, llama.cpp's server takes turns
with the sessions, without drafts and with up to so many of the same small model, over the same prompts of one stream,
greedily.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from draft_peers import followed
from llama_server import LlamaServer

import rekindle
from rekindle import LogitsContext, LogitsProcessor
from workshop.eagle import ASKED
from workshop.eagle import prompts as asked
from workshop.tiny.corpus import HELD_OUT, REQUESTS, requests

SOURCES: dict[str, dict[str, Any]] = {
    "none": {"drafts": "none"},
    "lookup": {"prompt_lookup": 7},
    "suffix": {"drafts": "suffix"},
}
LED = "edits", "json", "prose", "random"
ANSWERS = *(f"answers-{kind}" for kind in ASKED), *(f"tiny-{kind}" for kind in REQUESTS)
OWN = "own", *ANSWERS
PEER_DRAFTS = 0, 5, 10
SERVER_DRAFTS = 0, 2, 4, 8


class Texts:
    """Tokens of prompts and of the texts that follow them."""

    def __init__(self, session: rekindle.Session, vocab: int, markers: int, given: Any) -> None:
        tokenizer, tokens = session.tokenizer, given.tokens
        self._tokenizer, self._first, self._tokens = tokenizer, vocab - markers, tokens
        self._rng = random.Random(1)
        self._code = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))
        pages = sorted((harness.ROOT / "tutorials/guide").glob("*.md"))
        self._prose = " ".join(page.read_text() for page in pages)
        self._words = sorted({word for word in self._prose.split() if word.isalpha()})
        self._asked: dict[str, list[list[int]]] = {kind: [] for kind in ANSWERS}

        def add(kind: str, messages: list[dict[str, str]]) -> None:
            self._asked[kind].append(list(tokenizer.encode(str(session.render(messages)))))

        for kind, message in asked(10_000, seed=0, repeat=False)[given.skip :]:
            add(f"answers-{kind}", [{"role": "user", "content": message}])
        for kind in REQUESTS:
            if f"tiny-{kind}" in given.kinds:
                for messages in itertools.islice(requests(kind, HELD_OUT), markers):
                    add(f"tiny-{kind}", messages)

    def make(self, kind: str, index: int) -> tuple[list[int], list[int]]:
        """Return the prompt and the text of one request."""
        rng = self._rng
        if kind in ANSWERS:
            prompts = self._asked[kind]
            return prompts[index % len(prompts)], []
        if kind == "edits":
            source = self._code[index % len(self._code)].read_text(errors="ignore")[: 8 * self._tokens]
            old = self._encode(source)[: self._tokens]
            new = [*old]
            for _ in range(max(1, len(new) // 60)):
                place = rng.randrange(len(new))
                new[place : place + rng.randrange(4)] = self._encode(" ".join(rng.sample(self._words, 2)))
            return old, self._sized(new)
        if kind == "json":
            records = [self._record(index * 100 + number) for number in range(1 + self._tokens // 20)]
            return self._encode(f"Rows of table {index} as JSON:"), self._sized(self._encode(json.dumps(records)))
        if kind == "prose":
            place = rng.randrange(len(self._prose) - 16 * self._tokens)
            return self._encode(f"Page {index}:"), self._sized(self._encode(self._prose[place:][: 16 * self._tokens]))
        return self._encode(f"Number {index}:"), [rng.randrange(10, self._first) for _ in range(self._tokens)]

    def _record(self, number: int) -> dict[str, Any]:
        sample = self._rng.sample
        return {
            "identifier": number,
            "title": " ".join(sample(self._words, 3)),
            "priority": self._rng.choice(["low", "high", "none"]),
            "department": self._rng.choice(["sales", "research", "law"]),
            "summary": " ".join(sample(self._words, 8)),
        }

    def _encode(self, text: str) -> list[int]:
        return [token for token in self._tokenizer.encode(text) if token < self._first]

    def _sized(self, tokens: list[int]) -> list[int]:
        return (tokens * (1 + self._tokens // len(tokens)))[: self._tokens]


def led(table: np.ndarray, first: int) -> LogitsProcessor:
    """A processor that lets nothing but the next token of a text in `table`; a marker in the prompt says which."""
    texts = jnp.asarray(table)

    def lead(logits: jax.Array, context: LogitsContext) -> jax.Array:
        which = jnp.argmax(context.in_prompt[:, first : first + len(table)], axis=1)
        place = jnp.clip(context.position - context.prompt_length, 0, table.shape[1] - 1)
        return logits.at[jnp.arange(len(logits)), texts[which, place]].set(1e4)

    return LogitsProcessor(lead, "led")


def main() -> None:
    given = harness.options(
        __doc__, "model", model="tiny", streams=[1, 4, 16, 32], kinds=([*LED, "own"], LED + OWN), tokens=160,
        repeat=5, quantize=str, rows=32, sources=(list(SOURCES), [*SOURCES, "model"]), small=str, temperatures=[1.0],
        skip=0, peer=str, llama_server=str,
    )  # fmt: skip
    if given.llama_server is not None:
        others = sorted({*given.kinds} - {*ANSWERS})
        if others or given.streams != [1] or given.temperatures != [0.0] or given.small is None:
            fix = "pass --small FILE --streams 1 --temperatures 0 and --kinds of answers"
            sys.exit(
                f"--llama-server compares greedy answers of one stream with the same small model: {fix} ({ANSWERS})"
            )
    sources = {name: SOURCES[name] for name in SOURCES if name in given.sources}
    if given.small is not None:
        sources["model"] = {"drafts": given.small}
    model = harness.model(given.model, quantize=given.quantize)
    texts_each = sum(given.streams) * (given.repeat + 1)
    with rekindle.open_sync(model, quiet=True, disk_memory=0, max_model_len=64) as session:
        vocab = session.tokenizer.vocab_size
        texts = Texts(session, vocab, texts_each, given)
    options: dict[str, Any] = {
        "max_requests": given.rows, "max_model_len": 2 * given.tokens + 96, "precompile": "all", "quiet": True,
        "disk_memory": 0, "generation_config": "greedy", "quantize": given.quantize if given.model == "tiny" else None,
    }  # fmt: skip
    wanted = [(kind, heat) for kind in given.kinds for heat in (given.temperatures if kind in OWN else [0.0])]
    for kind, heat in wanted:
        made = [texts.make(kind, index) for index in range(texts_each)]
        processors = []
        if kind in LED:
            processors = [led(np.array([text for _, text in made], np.int32), vocab - texts_each)]
        label = kind if kind in LED else f"{kind} at {heat:g}"
        with contextlib.ExitStack() as opened:
            sessions: dict[str, rekindle.Session | LlamaServer] = {
                name: opened.enter_context(rekindle.open_sync(model, processors=processors, **options, **source))
                for name, source in sources.items()
            }
            if given.llama_server is not None:
                sessions |= {f"llama.cpp-{size}": opened.enter_context(server(given, size)) for size in SERVER_DRAFTS}
            own = {name: one for name, one in sessions.items() if isinstance(one, rekindle.Session)}
            done = 0
            for streams in given.streams:
                rates: dict[str, list[float]] = {name: [] for name in sessions}
                shares: dict[str, list[float]] = {name: [] for name in sessions}
                before = {name: session.stats() for name, session in own.items()}
                for turn, name in harness.turns(sessions, given.repeat):
                    rows = range(done + (turn + 1) * streams, done + (turn + 2) * streams)
                    whole, busy = rate(sessions[name], kind, made, rows, given.tokens, vocab, heat)
                    rates[name].append(whole)
                    shares[name].append(busy)
                done += (given.repeat + 1) * streams
                line = f"{Path(given.model).name} {label:6} {streams:2} streams: "
                line += f"none {np.median(rates['none'][1:]):7.1f} tokens/s"
                for name in [name for name in own if name != "none"]:
                    ratio = harness.spread(harness.ratios(rates[name][1:], rates["none"][1:]))
                    ratio += f", processor {np.median(harness.ratios(shares[name][1:], shares['none'][1:])):.3f}"
                    stats = own[name].stats()
                    drafted = stats.drafted_tokens - before[name].drafted_tokens
                    accepted = stats.accepted_tokens - before[name].accepted_tokens
                    line += f"; {name} {ratio}, {accepted} of {drafted}"
                print(line, flush=True)
                if len(own) < len(sessions):
                    print(compared({name: one[1:] for name, one in rates.items()}, set(own)), flush=True)
                if given.peer is not None and kind in LED and streams == 1:
                    print(peer(given, made[done - given.repeat : done], rates), flush=True)


def server(given: Any, size: int) -> LlamaServer:
    """llama.cpp's server on the model's file, with up to so many drafts of the small model's."""
    drafts = ["-md", given.small, "--spec-draft-n-max", str(size)] if size else []
    options = ["--cache-ram", "0", "--no-cache-prompt", *drafts]
    return LlamaServer(
        Path(given.llama_server), Path(given.model), rows=1, context=2 * given.tokens + 96, options=options
    )


def compared(rates: dict[str, list[float]], own: set[str]) -> str:
    """Compare the sessions' rates with the best of llama.cpp's, by its drafts."""
    theirs = {name: float(np.median(each)) for name, each in rates.items() if name not in own}
    best = max(theirs, key=lambda name: theirs[name])
    each = ", ".join(f"{name} {median:.1f}" for name, median in theirs.items())
    ratios = {name: harness.spread(harness.ratios(rates[name], rates[best])) for name in rates if name in own}
    return f"  {each} tokens/s; to its best: {ratios}"


def peer(given: Any, made: list[tuple[list[int], list[int]]], rates: dict[str, list[float]]) -> str:
    """Compare the sessions' rates of one stream with llama.cpp's over the same texts."""
    threads = len(os.sched_getaffinity(0))
    paths = os.pathsep.join([given.peer, str(Path(__file__).parent)])
    seconds = harness.child(followed, given.model, made, PEER_DRAFTS, threads, PYTHONPATH=paths)
    theirs = {int(size): [given.tokens / one for one in each] for size, each in seconds.items()}
    best = max(theirs, key=lambda size: float(np.median(theirs[size])))
    each = ", ".join(f"{size}: {np.median(one):.1f}" for size, one in theirs.items())
    own = {name: harness.spread(harness.ratios(one[1:], theirs[best])) for name, one in rates.items()}
    return f"  llama.cpp, tokens/s by its drafts: {each}; to its best: {own}"


def rate(
    session: rekindle.Session | LlamaServer, kind: str, made: list[tuple[list[int], list[int]]], rows: range,
    tokens: int, vocab: int, heat: float,
) -> tuple[float, float]:  # fmt: skip
    """Generated tokens of requests at once whose texts are these `rows`, in a second and in one of the processor."""
    first = vocab - len(made)
    if isinstance(session, LlamaServer):
        fields = {"n_predict": tokens, "temperature": heat, "seed": rows.start, "cache_prompt": False}
        answer, *_ = session.answers([{"prompt": made[row][0], **fields} for row in rows])
        times = answer["timings"]  # the server's own, in which there is no HTTP
        return 1e3 * answer["tokens_predicted"] / (times["prompt_ms"] + times["predicted_ms"]), float("nan")
    answers = kind in ANSWERS
    prompts = [made[row][0] if answers else [first + row, *made[row][0]] for row in rows]
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": not answers, "temperature": heat}
    options |= {"processors": ["led"]} if kind in LED else {"seed": rows.start}
    start, busy = time.perf_counter(), time.process_time()
    done = session.generate_sync(prompts, **options)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    for row, one in zip(rows, done, strict=True):
        assert kind in OWN or list(one.token_ids) == made[row][1], f"text {row} was not followed"
    count = sum(len(one.token_ids) for one in done)
    return count / seconds, count / busy


if __name__ == "__main__":
    main()
