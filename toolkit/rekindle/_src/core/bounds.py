"""Limits on the size of one call, checked before anything of that size is built, since other requests wait meanwhile.

The limits are far above the needs of applications, and calls within them cost a session's other requests milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Sized
from typing import Any

from rekindle.errors import InvalidRequest

MAX_N = 16_384  # sequences of one prompt; a session's max_queue is a tighter bound, once the request is submitted
MAX_SEQUENCES = 1 << 17  # of one call: its prompts times n
MAX_PROMPT = 1 << 23  # characters or token ids of one prompt: twice as many as a million tokens of English have
# Text is held back while it may be the beginning of a stop string, and compared with each of them at each token: 10,000
# strings and n=64 held the other requests for seconds.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2_048  # of all stop strings together
MAX_BAD_WORDS = 1_024
MAX_WORD = 256  # characters
MAX_SALT = 1_024  # characters


def bounded(field: str, value: Any, limit: int) -> Any:
    """Return `value` if it has at most `limit` entries. An iterator is read into a tuple, up to one entry beyond."""
    try:
        value = value if isinstance(value, Sized) else tuple(itertools.islice(value, limit + 1))
        size = len(value)
    except Exception:  # any object may arrive here, and its methods may raise anything
        raise InvalidRequest(field, value, "can't be read as a list", "Pass a list") from None
    if size > limit:
        raise InvalidRequest(field, f"{size:,} entries", f"is over the {limit:,} that are possible", "Pass fewer")
    return value


def check_n(n: Any) -> None:
    """Raise InvalidRequest if `n` is a whole number above MAX_N; the caller checks other kinds."""
    try:
        whole = n.__index__()
    except Exception:
        return
    if whole > MAX_N:
        raise InvalidRequest("n", n, f"must be at most {MAX_N:,}", "Submit the prompt several times")


def bounded_stops(stop: Any) -> Any:
    """Return `stop`, at most MAX_STOPS strings with MAX_STOP_CHARACTERS characters together."""
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
    """Raise InvalidRequest unless all `bad_words` are texts of a sensible length."""
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequest("bad_words", word, "is not text, or is empty", "Remove it")
        if len(word) > MAX_WORD:
            raise InvalidRequest("bad_words", word, f"has more than {MAX_WORD} characters", "Use a shorter one")


def check_salt(salt: Any) -> None:
    """Raise InvalidRequest unless `salt` is None or a text of a sensible length."""
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
    """Raise InvalidRequest for a prompt of more than MAX_PROMPT characters or token ids."""
    if length > MAX_PROMPT:
        raise InvalidRequest(
            "prompt", f"{length:,} {unit}", f"is over the {MAX_PROMPT:,} that one prompt may have", "Shorten it"
        )


def check_batch(prompts: int, n: int = 1) -> None:
    """Raise InvalidRequest if one call asks for more than MAX_SEQUENCES sequences."""
    if prompts * n > MAX_SEQUENCES:
        raise InvalidRequest(
            "prompt",
            f"{prompts:,} prompts with n={n:,}",
            f"are over the {MAX_SEQUENCES:,} sequences that one call may ask for",
            "Split it into several calls",
        )
