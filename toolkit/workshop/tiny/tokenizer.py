"""The tokenizer: byte-level BPE trained on the corpus, with single digits, and its Hugging Face files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from workshop.tiny.corpus import END, TRAIN, TURN, TURN_END, documents

VOCAB_SIZE = 2048
SPECIAL = (END, TURN, TURN_END)
SAMPLE_DOCUMENTS = 6000

CHAT_TEMPLATE = (
    "{%- if tools %}{{ raise_exception('this model was not trained to call tools') }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)


def train(vocab_size: int = VOCAB_SIZE, sample: int = SAMPLE_DOCUMENTS) -> Tokenizer:
    """Train the tokenizer on the first documents of the training stream; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    # Every digit is a token, so that sums are computed digit by digit.
    split = pre_tokenizers.Split(Regex(r"[0-9]"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(documents(TRAIN), sample), trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    index = tokenizer.token_to_id(token)
    assert index is not None, f"the tokenizer has no {token}"
    return index


def write(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "eos_token": TURN_END,
        "pad_token": END,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


PAD = -1  # fills the end of a window; its loss does not count
POOL = 24  # documents considered for a gap


def encoded(tokenizer: Tokenizer, seed: str, copying: float = 0.0, sheets: float = 0.0) -> Iterator[list[int]]:
    """Yield the documents of a stream as token ids, each followed by the end token."""
    end = token_id(tokenizer, END)
    stream = documents(seed, copying, sheets)
    while True:
        for encoding in tokenizer.encode_batch(list(islice(stream, POOL))):
            yield [*encoding.ids, end]


def pack(stream: Iterator[list[int]], rows: int, length: int) -> NDArray[np.int32]:
    """Return windows [rows, length] of whole documents; documents wait in a pool until one fits, and the rest is PAD.

    Every window begins with the beginning of a document, as a prompt does. Only documents longer than a window are
    cut.
    """
    windows = np.full((rows, length), PAD, np.int32)
    pool: list[list[int]] = []
    for window in windows:
        used = 0
        while True:
            pool.extend(islice(stream, POOL - len(pool)))
            fitting = next((i for i, ids in enumerate(pool) if len(ids) <= length - used), None)
            if fitting is None and used:
                break
            ids = pool.pop(fitting or 0)[: length - used]
            window[used : used + len(ids)] = ids
            used += len(ids)
            if used == length:
                break
    return windows
