"""Heads of EAGLE-3 and DFlash draft what llama.cpp drafts, of the same two files.

llama.cpp has to be built, which takes some minutes; $REKINDLE_LLAMA_DRAFTS names the program that it makes of
helpers/llama_drafts.cpp:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-*.tar.gz
    cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -DLLAMA_CURL=OFF && cmake --build build --target llama
    g++ -std=gnu++17 -Iinclude -Iggml/include -Isrc …/tests/helpers/llama_drafts.cpp -o llama_drafts \\
        -Lbuild/bin -lllama -lggml -lggml-base -lggml-cpu -Wl,-rpath,$PWD/build/bin
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import block_heads, checkpoints, eagle
from helpers.draft_heads import Drafted, assert_likeliest
from helpers.gguf_files import convert
from rekindle._src.models.base import merge
from session.test_state_cache import tokens

pytestmark = pytest.mark.slow
# llama.cpp has the inputs of a Llama's layers, and not the output of the last one.
RAW = {**checkpoints.CASES["llama"], "max_position_embeddings": 512, "num_hidden_layers": 3}
READS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
COUNT = 4
PLACES = [5, 20, 47]  # of the tokens before drafts
TEXT = tokens(48, seed=4)


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}], ids=str)
def test_heads_of_eagle(changes: dict[str, Any], tmp_path: Path) -> None:
    raw = eagle.raw_of(RAW, **READS, **changes)
    state = eagle.tensors(raw)
    theirs = drafted(tmp_path, eagle.write_file(tmp_path / "head.gguf", raw, state))
    model, embedding = checkpoints.model(RAW, checkpoints.tensors(RAW)), checkpoints.tensors(RAW)
    read = eagle.streams(model, TEXT, raw["eagle_aux_hidden_state_layer_ids"])
    ours = eagle.drafts(raw, state, embedding["model.embed_tokens.weight"], read, TEXT, PLACES, COUNT)
    assert_likeliest(theirs, ours)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_heads_of_dflash(causal: bool, window: bool, tmp_path: Path) -> None:
    """llama.cpp's windows have one token less than those of transformers that reach both ways."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12} if window else {}
    raw = block_heads.raw_of(RAW, causal=causal, target_layer_ids=[0, 1], **layers)
    state = block_heads.tensors(raw)
    file = block_heads.write_file(tmp_path / "head.gguf", raw, state, vocab_size=RAW["vocab_size"])
    theirs = drafted(tmp_path, file, mask := block_heads.flat(raw)["mask_token_id"])
    model = checkpoints.model(RAW, checkpoints.tensors(RAW))
    read = eagle.streams(model, TEXT, tuple(layer + 1 for layer in block_heads.flat(raw)["target_layer_ids"]))
    module: Any = merge(model.graph, model.leaves)
    ours = {}
    for place in PLACES:
        embedded = np.asarray(module.embedded(jnp.array([TEXT[place], *[mask] * COUNT])))
        hidden = block_heads.hidden(raw, state, read[:place], embedded, inclusive=False)[1:]
        ours[place] = list(np.asarray(module.logits(jnp.asarray(hidden, jnp.float32))))
    for place, ids in theirs:  # each draft is of its own
        for logits, token in zip(ours[place], ids, strict=True):
            assert logits.max() - logits[token] <= 1e-3 * logits.std(), (place, ids)


def drafted(folder: Path, head: str, mask: int = 0) -> Drafted:
    """The drafts of llama.cpp after the text up to each place, for the model of these tests."""
    program = os.environ.get("REKINDLE_LLAMA_DRAFTS")
    if not program:
        pytest.skip("$REKINDLE_LLAMA_DRAFTS names no program")
    vocabulary = {"tokenizer.ggml.model": "none", "llama.vocab_size": RAW["vocab_size"]}
    model = convert(Path(checkpoints.write(folder / "model", RAW)), folder / "model.gguf", **vocabulary)
    texts = "".join(f"{place + 1} {' '.join(map(str, TEXT[: place + 1]))}\n" for place in PLACES)
    command = [program, str(model), head, str(COUNT), str(mask)]
    done = subprocess.run(command, input=texts, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    return [(place, [*map(int, line.split())]) for place, line in zip(PLACES, done.stdout.splitlines(), strict=True)]
