"""Bounds on the options of a request, on grammars, and on what a session does for one."""

from __future__ import annotations

import json
from collections.abc import Callable

from project.bounds.records import OURS, PACE, SHOWN, SMALL, STRANGER, TIME, Bound, Other, within
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
                if guide.fill(mask) or grammars._automata.nbytes * 64 > automata_module.MOST_BYTES * count:
                    return grammars, guides
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                guide.consume(int(draw.choice(np.flatnonzero(bits))))

    return work


BOUNDS: list[Bound] = [
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
]

OTHERS: dict[str, dict[str, Other]] = {
    "calls/chat_prompt.py": {"MAX_BUDGET": OURS, "MAX_MESSAGE": OURS},
    "calls/chats.py": {"MAX_ROUNDS": OURS},
    "calls/conversation.py": {"MOST_BYTES": OURS},
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
        "MAX_DRY_WINDOW": SMALL, "MAX_MATCH": Other("rounds of a step, each of which compares MAX_DRY_WINDOW integers"),
        "MAX_BREAKERS": Other("searched for in a thread, 60 times at most: more ways to spell them are refused"),
        "MAX_BREAKER": SMALL,
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
