"""llama.cpp through the C API of llama-cpp-python: one loop that decodes every running sequence together.

Each sequence has a buffer of its own, its prompt is one call, and then all decode together: in trials never slower than
one buffer for all of them, or calls that mix prompts and decoding. Only a kept prefix needs the one buffer, where
sequences share it without a copy. When requests come one by one, a prompt and everybody's next token take turns, so
that those that decode wait for one prompt, not until none is left. Prompts in parts of CHUNK tokens halved the longest
gap and made the 99th percentile three times as long, and so did calls of CHUNK tokens that mix both.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp as api
import numpy as np
from engine import Answer, Arrivals, Moments, Prompt, Setting, shared_length

BATCH = 2048  # llama.cpp's defaults: tokens of one call, of which so many are computed at once
CHUNK = 512
KEPT = 8192  # tokens of the context that keeps a prefix


def quantise(wide: str, out: str, kind: int, importance: str | None = None) -> None:
    """Quantise a GGUF file by llama.cpp's own function; `kind` is its number of a type.

    `importance` is a file of NumPy's with the mean squares of a matrix's inputs, by the names of matrices.
    """
    options = api.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = kind, True
    kept = {} if importance is None else {name: np.ascontiguousarray(one) for name, one in np.load(importance).items()}
    entries = (api.llama_model_imatrix_data * (len(kept) + 1))()  # the last one has no name
    for entry, (name, values) in zip(entries, kept.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if kept:
        options.imatrix = entries
    assert api.llama_model_quantize(wide.encode(), out.encode(), ctypes.byref(options)) == 0, "it failed"


def loaded(file: str) -> Any:
    """Return the model of a file. REKINDLE_LLAMA_REPACK=0 leaves weights in the order that the file has."""
    options = api.llama_model_default_params()
    options.use_extra_bufts = os.environ.get("REKINDLE_LLAMA_REPACK") != "0"
    model = api.llama_model_load_from_file(file.encode(), options)
    assert model, f"{file!r} can't be loaded"
    return model


def perplexity(file: str, windows: Sequence[Prompt], threads: int) -> float:
    """Return the perplexity of each token but the first of its window, with keys and values in float32."""
    model = loaded(file)
    vocab_size, longest = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)), max(map(len, windows))
    options = api.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = longest
    options.n_threads = options.n_threads_batch = threads
    options.type_k = options.type_v = 0  # ggml's number of float32
    context, batch = api.llama_init_from_model(model, options), api.llama_batch_init(longest, 0, 1)
    total = count = 0.0
    for window in windows:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        for at, token in enumerate(window):
            batch.token[at], batch.pos[at], batch.logits[at] = token, at, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        batch.n_tokens = len(window)
        assert api.llama_decode(context, batch) == 0, "llama_decode failed"
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), (len(window), vocab_size))[:-1]
        highest = logits.max(1)
        sums = np.log(np.exp(logits - highest[:, None]).sum(1, dtype=np.float64)) + highest
        total += float((sums - logits[np.arange(len(window) - 1), window[1:]]).sum())
        count += len(window) - 1
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    return float(np.exp(total / count))


def open(setting: Setting) -> LlamaCpp:
    return LlamaCpp(setting)


class Shape(NamedTuple):
    """Of a context."""

    sequences: int
    length: int  # tokens of all its sequences together
    shared: bool  # one buffer for all sequences, so that they can share cells, or one for each


class Running:
    """A sequence that has begun."""

    def __init__(self, index: int, prompt: Prompt, outputs: int, done: int) -> None:
        self.index, self.outputs = index, outputs
        self.todo = prompt[done:]
        self.position = done


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _quiet(level: int, text: bytes, data: object) -> None: ...


class LlamaCpp:
    def __init__(self, setting: Setting) -> None:
        api.llama_log_set(_quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        self._model = loaded(setting.file)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._threads = setting.threads
        self._contexts: dict[Shape, api.llama_context_p] = {}  # made when first needed, which is in the warm-up
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self._kept: Prompt = []
        self.notes = f"batch {BATCH}, chunk {CHUNK}, f16 KV, flash attention auto"

    def generate(
        self, prompts: Sequence[Prompt], outputs: Sequence[int], *, keep: bool = False, at: Moments | None = None
    ) -> Answer:
        count = len(prompts)
        sharing = keep or bool(self._kept)
        if sharing:
            context = self._context(Shape(33, KEPT, True))
        else:
            longest = max(len(prompt) + new for prompt, new in zip(prompts, outputs, strict=True))
            context = self._context(Shape(count, count * (-(-longest // 256) * 256), False))
        memory = api.llama_get_memory(context)
        if not self._kept:
            api.llama_memory_clear(memory, False)
        times: list[list[float]] = [[] for _ in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        waiting: list[Running] = []
        decoded = False  # in the last call
        arrivals = Arrivals(count, at)
        while arrivals or waiting:
            for index in arrivals.due(idle=not waiting):
                prompt = prompts[index]
                done = min(shared_length([prompt, self._kept]), len(prompt) - 1) if self._kept else 0
                if done:
                    api.llama_memory_seq_cp(memory, 32, index, 0, done)
                waiting.append(Running(index, prompt, outputs[index], done))
            starting = [running for running in waiting if len(running.todo) > 1]
            decoding = [running for running in waiting if len(running.todo) == 1]
            decoded = not starting or (at is not None and bool(decoding) and not decoded)
            rows = self._fill(waiting if sharing else decoding if decoded else starting[:1])
            assert api.llama_decode(context, self._batch) == 0, "llama_decode failed"
            if not rows:
                continue
            logits = np.ctypeslib.as_array(api.llama_get_logits(context), (len(rows), self._vocab_size))
            chosen = logits.argmax(1).tolist()
            now = arrivals.now()
            for running, token in zip(rows, chosen, strict=True):
                times[running.index].append(now)
                ids[running.index].append(token)
                running.todo = [token]
                if len(ids[running.index]) == running.outputs:
                    waiting.remove(running)
                    if not keep:
                        api.llama_memory_seq_rm(memory, running.index, -1, -1)
        wall = arrivals.now()
        if keep:
            assert count == 1, "only one prompt can be kept"
            api.llama_memory_seq_cp(memory, 0, 32, 0, len(prompts[0]))
            api.llama_memory_seq_rm(memory, 0, -1, -1)
            self._kept = list(prompts[0])
        return Answer(wall, times, ids)

    def _fill(self, waiting: Sequence[Running]) -> list[Running]:
        """The next batch: whoever decodes first, prompts in what is left; returns those that get logits, in order."""
        rows = []
        size = 0
        for running in sorted(waiting, key=lambda running: len(running.todo) > 1):
            part = running.todo[: BATCH - size]
            running.todo = running.todo[len(part) :]
            for token in part:
                self._batch.token[size] = token
                self._batch.pos[size] = running.position
                self._batch.n_seq_id[size] = 1
                self._batch.seq_id[size][0] = running.index
                self._batch.logits[size] = 0
                running.position += 1
                size += 1
            if part and not running.todo:
                self._batch.logits[size - 1] = 1
                rows.append(running)
        self._batch.n_tokens = size
        return rows

    def _context(self, shape: Shape) -> api.llama_context_p:
        if shape not in self._contexts:
            options = api.llama_context_default_params()
            options.n_ctx, options.n_seq_max, options.kv_unified = shape.length, shape.sequences, shape.shared
            options.n_batch, options.n_ubatch = BATCH, CHUNK
            options.n_threads = options.n_threads_batch = self._threads
            self._contexts[shape] = api.llama_init_from_model(self._model, options)
            assert self._contexts[shape], f"no context of {shape}"
        return self._contexts[shape]

    def forget(self) -> None:
        self._kept = []

    def close(self) -> None:
        for context in self._contexts.values():
            api.llama_free(context)
        api.llama_model_free(self._model)
