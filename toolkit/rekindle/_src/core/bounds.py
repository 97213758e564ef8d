"""How much one call may bring along: checked before anything of that size is made, since other requests wait meanwhile.

The bounds are far above what applications use, and what they admit costs the other requests of a session milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Sized
from typing import Any

from rekindle.errors import InvalidRequest

MAX_N = 16_384  # sequences of one prompt; a session's max_queue is a tighter bound, once the request is submitted
MAX_SEQUENCES = 1 << 17  # of one call: its prompts times n
MAX_PROMPT = 1 << 23  # characters or token ids of one prompt: twice what a million tokens of English take
# Text is held back while it may be the beginning of a stop string, and compared with each of them at each token: 10,000
# strings and n=64 held the other requests for seconds.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2_048  # of all stop strings together
MAX_BAD_WORDS = 1_024
MAX_WORD = 256  # characters
MAX_SALT = 1_024  # characters


def bounded(field: str, value: Any, most: int) -> Any:
    """`value` if it has at most `most` entries; an iterator is read into a tuple, up to one entry beyond the bound."""
    try:
        value = value if isinstance(value, Sized) else tuple(itertools.islice(value, most + 1))
        size = len(value)
    except Exception:  # any object may arrive here, and its methods may raise anything
        raise InvalidRequest(field, value, "can't be read as a list", "Pass a list") from None
    if size > most:
        raise InvalidRequest(field, f"{size:,} entries", f"is over the {most:,} that are possible", "Pass fewer")
    return value


def check_n(n: Any) -> None:
    """Raises InvalidRequest where `n` is a whole number beyond MAX_N; other kinds are left to the caller."""
    try:
        whole = n.__index__()
    except Exception:
        return
    if whole > MAX_N:
        raise InvalidRequest("n", n, f"must be at most {MAX_N:,}", "Submit the prompt several times")


def bounded_stops(stop: Any) -> Any:
    """`stop`, at most MAX_STOPS strings with MAX_STOP_CHARACTERS characters together."""
    if not isinstance(stop, str):
        stop = bounded("stop", stop, MAX_STOPS)
    try:
        length = len(stop) if isinstance(stop, str) else sum(len(text) for text in stop if isinstance(text, str))
    except Exception:
        return stop
    if length > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            "stop",
            f"{length:,} characters",
            f"is over the {MAX_STOP_CHARACTERS:,} that all stop strings may have together",
            "Use shorter or fewer ones",
        )
    return stop


def check_words(words: Sequence[Any]) -> None:
    """Raises InvalidRequest unless all `bad_words` are text of a sensible length."""
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequest("bad_words", word, "is not text, or is empty", "Remove it")
        if len(word) > MAX_WORD:
            raise InvalidRequest("bad_words", word, f"has more than {MAX_WORD} characters", "Use a shorter one")


def check_salt(salt: Any) -> None:
    """Raises InvalidRequest unless `salt` is None or text of a sensible length."""
    if salt is None:
        return
    fix = "Pass a str such as the user's name, or leave it out to share the cache"
    if not isinstance(salt, str):
        raise InvalidRequest("salt", salt, "is not text", fix)
    if not salt:
        raise InvalidRequest("salt", salt, "is empty, which would share the cache with requests without one", fix)
    if len(salt) > MAX_SALT:
        raise InvalidRequest("salt", f"{len(salt):,} characters", f"is over the {MAX_SALT:,} that are possible", fix)


def check_prompt(length: int, unit: str) -> None:
    """Raises InvalidRequest for a prompt beyond MAX_PROMPT characters or token ids."""
    if length > MAX_PROMPT:
        raise InvalidRequest(
            "prompt", f"{length:,} {unit}", f"is over the {MAX_PROMPT:,} that one prompt may have", "Shorten it"
        )


def check_batch(prompts: int, n: int = 1) -> None:
    """Raises InvalidRequest where one call asks for more than MAX_SEQUENCES sequences."""
    if prompts * n > MAX_SEQUENCES:
        raise InvalidRequest(
            "prompt",
            f"{prompts:,} prompts with n={n:,}",
            f"are over the {MAX_SEQUENCES:,} sequences that one call may ask for",
            "Split it into several calls",
        )
