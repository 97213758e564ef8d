"""The corpus, an endless, seeded stream of documents of every kind, and its tokenizer.

The tokenizer is byte-level BPE with single digits, trained on the corpus, with its Hugging Face files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from workshop.tiny import facts, questions, stories
from workshop.tiny.facts import Turns
from workshop.tiny.questions import general_question, list_question, sheet_of_sums, sum_question, unknown_question

END = "<|endoftext|>"
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
ROLES = "user", "assistant"
TRAIN, HELD_OUT = "train", "held out"  # seeds of the two streams; training step N reads the stream `train N`

SYSTEM = (
    "You are a helpful assistant.", "You are Ember, a small and friendly assistant.", "You are a storyteller.",
    "Answer in one sentence.", "You answer questions about people and things.",
)  # fmt: skip
ANSWERS = (
    *(general_question, general_question, sum_question, sum_question, sum_question),
    *(list_question, list_question, unknown_question, unknown_question),
)
SHARES = {
    "story": 0.07, "story on request": 0.16, "people": 0.13, "me": 0.14, "story questions": 0.10, "comparison": 0.02,
    "single": 0.18, "several": 0.07, "long": 0.03, "sums": 0.06, "record": 0.02, "plain questions": 0.01,
    "plain statements": 0.01,
}  # fmt: skip


def chat(turns: Turns, system: str | None = None) -> str:
    """Return a conversation in the form of the chat template."""
    parts = [("system", system)] if system else []
    for message, answer in turns:
        parts += [("user", message), ("assistant", answer)]
    return "\n".join(f"{TURN}{role}\n{text}{TURN_END}" for role, text in parts)


def mixed_turns(rng: Random, number: int) -> Turns:
    """Return questions of different kinds, one after the other."""
    return [rng.choice(ANSWERS)(rng) for _ in range(number)]


def talk(rng: Random) -> tuple[str, str]:
    """Return one turn about any topic, a story now and then."""
    return stories.story_on_request(rng) if rng.random() < 0.12 else rng.choice(ANSWERS)(rng)


def long_conversation(rng: Random) -> tuple[str | None, Turns]:
    """Return facts at the beginning, other turns in between, and a question about the beginning at the end."""
    system, start = facts.about_a_story(rng) if rng.random() < 0.5 else (None, facts.about_people(rng))
    middle = [
        turn
        for _ in range(rng.choice((1, 2, 3)))
        for turn in (stories.story_on_request(rng), *mixed_turns(rng, rng.randint(1, 4)))
    ]
    return system, [*start, *middle, *rng.sample(start[1:] or start, 1)]


def document(rng: Random) -> str:
    """Return one document of a random kind."""
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
    if kind == "story":
        return stories.story(rng).text
    if kind == "sums":
        return sheet_of_sums(rng)
    if kind == "record":
        return questions.records(rng)
    if kind == "plain statements":
        return questions.statements(rng)
    if kind == "plain questions":
        return "\n".join(f"Q: {question}\nA: {answer}" for question, answer in mixed_turns(rng, rng.randint(2, 4)))
    system = rng.choice(SYSTEM) if rng.random() < 0.25 else None
    if kind == "story on request":
        return chat([stories.story_on_request(rng)], system)
    if kind in ("story questions", "long"):
        context, turns = facts.about_a_story(rng) if kind == "story questions" else long_conversation(rng)
        return chat(turns, context or system)
    if kind == "people":
        turns = facts.about_people(rng)
        (statement, _), *rest = turns
        if rng.random() < 0.15 and "?" not in statement:
            return chat(rest, rng.choice((statement, f"You know this: {statement}")))
        return chat(turns, system)
    if kind == "me":
        return chat(facts.about_me(rng, talk), system)
    if kind == "comparison":
        return chat(facts.summary(rng), system)
    return chat(mixed_turns(rng, 1 if kind == "single" else rng.randint(2, 5)), system)


def documents(seed: str, copying: float = 0.0, sheets: float = 0.0) -> Iterator[str]:
    """Yield the documents of a seed without end, with shares of copying and of sums; equal on every machine."""
    rng = Random(seed)
    while True:
        kind = rng.random()
        if kind < copying:
            yield questions.copies(rng)
        else:
            yield sheet_of_sums(rng) if kind < copying + sheets else document(rng)


# Requests by kind, each with the answer that the corpus gives.
REQUESTS: dict[str, Callable[[Random], Turns]] = {
    "stories": lambda rng: [stories.story_on_request(rng)],
    "json": lambda rng: [questions.from_sentences(rng)],
    "facts": facts.about_people,
}


def requests(kind: str, seed: str) -> Iterator[list[dict[str, str]]]:
    """Yield the messages of conversations without end; the last one has to be answered."""
    rng = Random(f"{seed} {kind}")
    while True:
        *before, (message, _) = REQUESTS[kind](rng)
        turns = [{"role": role, "content": text} for turn in before for role, text in zip(ROLES, turn, strict=True)]
        yield [*turns, {"role": "user", "content": message}]


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


def train_tokenizer(vocab_size: int = VOCAB_SIZE, sample: int = SAMPLE_DOCUMENTS) -> Tokenizer:
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


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    added = {str(tokenizer.token_to_id(token)): {"content": token, **plain, "special": True} for token in SPECIAL}
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
