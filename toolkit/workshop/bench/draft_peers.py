"""llama.cpp with its Python package's n-gram drafts, over texts that are given: the other side of `drafts.py --peer`.

The package's own loop samples. Here a text is followed token by token instead, as it is in `drafts.py`: a step computes
the token and the drafts after it, takes those drafts that the text has, and forgets the rest.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _quiet(level: int, text: bytes, data: object) -> None: ...


def followed(file: str, made: Sequence[tuple[list[int], list[int]]], sizes: Sequence[int], threads: int) -> Any:
    """Return, by the number of drafts in a step, the seconds of each text after its prompt, the prompt's included."""
    import llama_cpp as api
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    api.llama_log_set(_quiet, ctypes.c_void_p(0))
    api.llama_backend_init()
    loading = api.llama_model_default_params()
    loading.use_extra_bufts = os.environ.get("REKINDLE_LLAMA_REPACK") != "0"  # as in `peers/with_llama_cpp.py`
    model = api.llama_model_load_from_file(file.encode(), loading)
    assert model, f"{file!r} can't be loaded"
    options = api.llama_context_default_params()
    longest = max(len(prompt) + len(text) for prompt, text in made)
    options.n_ctx, options.n_batch = longest + max(sizes) + 1, longest
    options.n_threads = options.n_threads_batch = threads
    context, batch = api.llama_init_from_model(model, options), api.llama_batch_init(longest, 0, 1)
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def decode(tokens: Sequence[int], start: int, *, every: bool) -> None:
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at] = token, start + at
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            batch.logits[at] = every or at == len(tokens) - 1
        batch.n_tokens = len(tokens)
        assert api.llama_decode(context, batch) == 0, "llama_decode failed"
        rows = len(tokens) if every else 1
        np.ctypeslib.as_array(api.llama_get_logits(context), (rows, vocab_size)).argmax(1)  # as a greedy sampler does

    def seconds(prompt: list[int], text: list[int], size: int) -> float:
        memory, drafter = api.llama_get_memory(context), LlamaPromptLookupDecoding(2, size)
        api.llama_memory_clear(memory, False)
        began = time.perf_counter()
        decode(prompt, 0, every=False)
        place, whole = len(prompt), np.array([*prompt, *text], np.intc)
        while place < len(whole) - 1:
            drafts = drafter(whole[: place + 1])[: len(whole) - place - 2].tolist() if size else []
            decode([int(whole[place]), *drafts], place, every=True)
            right = 0
            while right < len(drafts) and drafts[right] == whole[place + 1 + right]:
                right += 1
            place += right + 1
            api.llama_memory_seq_rm(memory, 0, place, -1)
        return time.perf_counter() - began

    return {size: [seconds(prompt, text, size) for prompt, text in made] for size in sizes}
