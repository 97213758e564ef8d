"""Bounds on the options of a request, on grammars, and on what a session does for one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from project.bounds.records import OURS, PACE, SHOWN, SMALL, STRANGER, TIME, Bound, Other, within
from rekindle._src.calls.conversation import MOST_VALUES
from rekindle._src.core import options
from rekindle._src.structured import automata as automata_module
from rekindle._src.structured import compilers


def stops(count: int) -> Callable[[], object]:
    """Thousands of tokens, by whose text long stop strings are begun and broken off."""
    from project.bounds.serve import tiny
    from rekindle._src.text.detokenizer import Detokenizer

    tokenizer, others = tiny(), [f"{number:x}"[:1] + "b" for number in range(options.MAX_STOPS - 1)]
    long = "a" * (options.MAX_STOP_CHARACTERS - 2 * len(others) - 1) + "b"
    (a,), (c,) = (tokenizer.encode(letter, add_special_tokens=False) for letter in "ac")
    ids = ([a] * 100 + [c]) * (count * 1_000 // 101)

    def work() -> object:
        detokenizer = Detokenizer(tokenizer, [long, *others])
        return [detokenizer.push([one]) for one in ids]

    return work


def schemas(count: int) -> Callable[[], object]:
    """A grammar that takes too long, which a process of its own compiles."""
    from project.bounds.serve import tiny
    from rekindle._src.structured.grammar import Grammars
    from rekindle._src.structured.spec import Spec
    from rekindle.errors import RekindleError

    schema = {"type": "string", "maxLength": 60, "allOf": [{"pattern": f"a{index}.*b"} for index in range(60)]}
    tokenizer = tiny()

    def work() -> object:
        grammars = Grammars(tokenizer, tokenizer.vocab_size)
        try:
            for number in range(count):
                text = json.dumps(schema | {"maxLength": 60 + number})
                try:
                    grammars.compile(Spec("schema", text))
                except RekindleError as error:
                    error.__traceback__ = None
        finally:
            grammars.close()
        return None

    return work


def automata(count: int) -> Callable[[], object]:
    """Follow 16 grammars, whose states have a row for many letters, until they take so many parts of their bound."""
    from random import Random

    import numpy as np

    from project.bounds.serve import tiny
    from rekindle import Sampling
    from rekindle._src.core.records import mask_words
    from rekindle._src.structured.grammar import Grammars
    from rekindle._src.structured.spec import structure_of

    letters = [chr(code) for code in range(48, 123) if chr(code).isalnum()]
    pairs = "|".join(f"{letter}[^{letters[at - 1]}]" for at, letter in enumerate(letters))
    tokenizer, draw = tiny(), Random(1)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, 16)
    guides = []
    for number in range(16):
        structure = structure_of(Sampling(regex=f"({pairs}){{0,{3_000 + number}}}"))
        assert structure is not None
        guides.append(grammars.compile(structure.spec).guide(tokenizer.eos_ids))
    mask = np.zeros(mask_words(tokenizer.vocab_size), np.int32)

    def work() -> object:
        while True:
            for guide in guides:
                if guide.fill(mask) or grammars.automata.nbytes * 64 > automata_module.MOST_BYTES * count:
                    return grammars, guides
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                guide.consume(int(draw.choice(np.flatnonzero(bits))))

    return work


class Repeats:
    """A vocabulary of 262,144 tokens that are runs of one letter, so that each token could begin every breaker."""

    size, longest = 1 << 18, 16

    def decode(self, ids: list[int], **options: object) -> str:
        return "a" * (ids[0] % self.longest + 1)

    def encode(self, text: str, **options: object) -> list[int]:
        whole, rest = divmod(len(text), self.longest)
        return [self.longest - 1] * whole + [rest - 1] * bool(rest)


def breakers(count: int) -> Callable[[], object]:
    """Sort a vocabulary by breakers with so many bytes after their first ones; it is refused at the end."""
    from typing import Any

    from rekindle._src.capabilities.samplers.breakers import BreakerTables
    from rekindle.errors import InvalidRequest

    sizes = [size for size in (min(count, 39), count - 39) if size > 0] or [0]
    tokenizer: Any = Repeats()

    def work() -> object:
        tables = BreakerTables(tokenizer, Repeats.size)
        try:
            tables.table(tuple("a" * (1 + size) for size in sizes))
        except InvalidRequest as error:
            error.__traceback__ = None
        return tables

    return work


def repeating(count: int) -> Callable[[], object]:
    """A step's rows with DRY, whose texts repeat one token as far as it counts."""
    import jax
    import jax.numpy as jnp

    from rekindle._src.capabilities.samplers.breakers import no_breakers
    from rekindle._src.capabilities.samplers.repetition import Breakers, Dry, Window, penalties
    from rekindle._src.core.samplers import MAX_DRY_WINDOW

    rows, vocabulary = max(1, count), 1 << 17
    table = no_breakers(vocabulary)
    ours = Breakers(*(jnp.broadcast_to(jnp.asarray(part), (rows, *part.shape)) for part in table))
    window = Window(jnp.full((rows, MAX_DRY_WINDOW), 5, jnp.int32), jnp.full((rows,), MAX_DRY_WINDOW, jnp.int32))
    options = Dry(jnp.full((rows,), 0.8), jnp.full((rows,), 1.01), jnp.full((rows,), 2, jnp.int32))
    program = jax.jit(penalties, static_argnums=3).lower(window, ours, options, vocabulary).compile()
    return lambda: program(window, ours, options).block_until_ready()


def conversation(count: int) -> Callable[[], object]:
    """A saved conversation of empty lists."""
    import tempfile
    from pathlib import Path

    from rekindle._src.calls import conversation
    from rekindle.errors import InvalidRequest

    path = Path(tempfile.mkdtemp()) / "chat.json"
    path.write_bytes(b'{"messages":[' + b"[]," * (count // 2 - 8) + b"[]]}")

    def work() -> object:
        with contextlib.suppress(InvalidRequest):  # it is parsed, and no conversation
            conversation.read(path)
        return None

    return work


BOUNDS: list[Bound] = [
    STRANGER(
        "calls/conversation.py: MOST_BYTES, MOST_TEXT, MOST_VALUES",
        counts="values of a saved conversation",
        most=MOST_VALUES,
        unit="an empty list",
        feed=conversation,
        count=MOST_VALUES // 4,
        seconds=1,
        mib=64,
    ),
    STRANGER(
        "core/options.py: MAX_STOPS, MAX_STOP_CHARACTERS",
        counts="thousands of tokens before stop strings",
        most=4,
        unit="a token that breaks one off",
        feed=stops,
        count=4,
        seconds=2,
        mib=8,
    ),
    STRANGER(
        "structured/compilers.py: COMPILE_SECONDS",
        counts="grammars that are compiled",
        most=1,
        unit="one that takes too long",
        feed=schemas,
        count=1,
        seconds=compilers.COMPILE_SECONDS + 1,
        mib=256,
    ),
    STRANGER(
        "structured/automata.py: MOST_BYTES, MOST_BYTES_A_REQUEST",
        counts="64ths of the memory of grammars that texts follow",
        most=64,
        unit="states of a regex with many letters",
        feed=automata,
        count=64,
        seconds=20,
        mib=288,
    ),
    STRANGER(
        "capabilities/samplers/repetition.py: CLASSES, SEQUENCES",
        counts="bytes of DRY's breakers after their first ones",
        most=60,
        unit="one of a run that all tokens are parts of",
        feed=breakers,
        count=60,
        seconds=1,
        mib=64,
    ),
    STRANGER(
        "core/samplers.py: MAX_DRY_WINDOW, MAX_MATCH",
        counts="rows of a step with DRY",
        most=32,
        unit="a text that repeats a token",
        feed=repeating,
        count=32,
        seconds=0.2,
        mib=96,
    ),
]

OTHERS: dict[str, dict[str, Other]] = {
    "calls/chat_prompt.py": {"MAX_BUDGET": OURS, "MAX_MESSAGE": OURS},
    "calls/chats.py": {"MAX_ROUNDS": OURS},
    "calls/rows.py": {"_LONGEST_ERROR": SHOWN},
    "calls/tool_functions.py": {"MAX_TOOLS": within("values of a body"), "_MOST_NESTED": OURS},
    "core/options.py": {
        "MAX_N": within("the places of the queue"), "MAX_SEQUENCES": within("the places of the queue"),
        "MAX_PROMPT": within("thousands of characters to encode"),
        "MAX_BAD_WORDS": within("thousands of characters to encode: 262,144 of them"), "MAX_WORD": SMALL,
        "MAX_SALT": SMALL,
    },
    "core/sampling.py": {
        "MAX_LOGPROBS": Other("every step gives as many"), "MAX_VOCABULARY": Other("compared with the weights"),
        "MAX_LOGPROB_IDS": SMALL, "MAX_REPEATS": SMALL, "MAX_STOP_TOKEN_IDS": SMALL, "MAX_LOGIT_BIAS": SMALL,
        "MAX_CHOICES": within("a grammar, which a process of its own compiles within COMPILE_SECONDS"),
        "MAX_ALLOWED_TOKENS": SMALL, "MAX_ADAPTERS": SMALL, "MAX_STEERS": SMALL, "MAX_PROCESSORS": SMALL,
        "MAX_STRUCTURE": within("a grammar, which a process of its own compiles within COMPILE_SECONDS"),
    },
    "core/samplers.py": {
        "MAX_BREAKERS": within("bytes of DRY's breakers after their first ones"),
        "MAX_BREAKER": within("bytes of DRY's breakers after their first ones"),
    },
    "capabilities/samplers/chain.py": {"LONGEST": SMALL},
    "capabilities/samplers/repetition.py": {"LARGEST_LOG": OURS},
    "capabilities/samplers/step.py": {"_LARGEST": OURS},
    "text/text_ends.py": {"LONGEST_BLOCK": SMALL},
    "capabilities/captures/tapped.py": {"MAX_RUNS": OURS, "MAX_VECTORS": OURS, "MAX_PATCHES": OURS},
    "capabilities/captures/writer.py": {"MOST_UNATTENDED": Other("threads, of which each waits for a disk")},
    "programs/row_option.py": {"MAX_PROCESSORS": OURS},
    "capabilities/captures/custom.py": {"MAX_TAPS": OURS},
    "programs/user_functions.py": {"MAX_DEPTH": OURS, "MAX_VALUES": OURS},
    "evaluation/decisions/questions.py": {"MAX_OPTIONS": OURS, "MAX_QUESTIONS": OURS, "MAX_TEXT": OURS},
    "evaluation/decisions/ranking.py": {"MAX_DOCUMENTS": OURS},
    "scheduling/slow_rows.py": {"LONGEST": TIME},
    "core/guard.py": {
        "LONGEST_ANSWER": within("a grammar, which a process of its own compiles within COMPILE_SECONDS"),
    },
    "structured/compilers.py": {
        "LONGEST": TIME, "MOST_WAITING": TIME, "_MOST_SAID": SHOWN,
        "MOST_LEVELS": within("a grammar, which a process of its own compiles within COMPILE_SECONDS"),
    },
    "structured/endings.py": {"_LONGEST": TIME, "_MOST_TRIED": TIME, "_MOST_AT_ONCE": PACE},
    "structured/compile_worker.py": {
        "MOST_STATES": within("64ths of the memory of grammars that texts follow"),
    },
    "structured/spec.py": {"_MOST_LEVELS": SMALL},
}  # fmt: skip
