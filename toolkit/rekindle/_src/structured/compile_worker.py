"""Conversion of grammars to llguidance's form, and the jobs of the guards that try untrusted grammars first.

llguidance recurses where a grammar nests, and an overflow of its stack ends the process that it runs in. A guard reads
this file by itself, so it imports the standard library and llguidance alone.
"""

from __future__ import annotations

import base64
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Of the automaton that a grammar's regexes become while they are followed, by all sequences together; its bytes have a
# bound in `automata`. A text of maxLength makes 3 to 6 states for each character.
MOST_STATES = 1 << 17
SLOWEST_MASK = 0.1  # seconds; 99 of 100 masks of real schemas take less than 2 ms with 152,000 tokens


def grammar_text(kind: str, text: str, *, lenient: bool = False, whitespace_flexible: bool = False) -> str:
    """Return a grammar's text for llguidance. Raises `ValueError`."""
    import llguidance

    if kind in ("schema", "json"):
        # Options of llguidance inside a schema stand below these; clients may set our options only.
        options: Any = {"whitespace_flexible": whitespace_flexible, "lenient": lenient, "coerce_one_of": lenient}
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(text))
    return str(llguidance.grammar_from("grammar" if kind == "grammar" else "choice", text))


class Tokens:
    """A tokenizer as llguidance takes it: its tokens as they appear in texts, and a function that encodes."""

    is_tokenizer_wrapper = True

    def __init__(self, tokens: list[bytes], special: Sequence[int], end: int) -> None:
        self.tokens, self.special_token_ids = tokens, list(special)
        self.eos_token_id, self.bos_token_id = end, None
        self.encode: Callable[[str], list[int]] = lambda text: []

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def tokens_message(tokens: list[bytes], special: Sequence[int]) -> dict[str, Any]:
    """Return tokens in the form of a message, for `new_tokenizer`."""
    content = base64.b64encode(b"".join(tokens)).decode()
    return {"content": content, "lengths": [*map(len, tokens)], "special": list(special)}


def new_tokenizer(
    tokenizer: str | dict[str, Any],
    vocab_size: int,
    ends: Sequence[int],
    encode: Callable[[str], list[int]] | None = None,
) -> Any:
    """Return a tokenizer for `new_matcher`, from its JSON or from the result of `tokens_message`.

    Described tokens need `encode` for a text's usual spelling; without it the longest tokens are taken. Raises
    `ValueError` for a tokenizer that llguidance can't read.
    """
    import llguidance

    if isinstance(tokenizer, str):
        return llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(ends))
    content, at, tokens = base64.b64decode(tokenizer["content"]), 0, []
    for length in tokenizer["lengths"]:
        tokens.append(content[at : at + length])
        at += length
    tokens += [b""] * (vocab_size - len(tokens))  # rows of the embedding that no token has
    wrapper: Any = Tokens(tokens, tokenizer["special"], ends[0])
    converted = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(ends))
    wrapper.encode = encode or converted.greedy_tokenize
    return converted


def new_matcher(tokenizer: Any, text: str) -> Any:
    """Compile a grammar from its text for llguidance. Raises `ValueError`."""
    import llguidance

    # `automata` reads the reports of errors.
    limits = llguidance.LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=True)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(reason(matcher))
    return matcher


def reason(matcher: Any) -> str:
    """Return the error of a matcher, without the state and grammar that it lists below."""
    message: str = matcher.get_error()
    return message.strip().partition("\n<")[0].strip()


def first_mask(matcher: Any, mask: Any, size: int) -> None:
    """Write the mask of a text's first token, of `size` bytes. Raises `ValueError` if there is none, or it is slow."""
    start = time.thread_time()
    matcher.unsafe_compute_mask_ptr(mask, size)
    seconds = time.thread_time() - start
    if matcher.is_error():
        raise ValueError(f"nothing fits it: {reason(matcher)}")
    if seconds > SLOWEST_MASK:
        raise ValueError(f"finding the tokens that may begin it took {seconds * 1e3:.0f} ms, which all would wait for")


def prepare(settings: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Return the job of a guard: it tries the grammar with these arguments of `grammar_text`, and returns its text."""
    tokenizer = new_tokenizer(settings["tokenizer"], settings["vocab_size"], settings["ends"])
    size = 4 * -(-settings["vocab_size"] // 32)
    mask = ctypes.create_string_buffer(size + 4)

    def attempt(job: dict[str, Any]) -> dict[str, str]:
        try:
            text = grammar_text(**job)
            matcher = new_matcher(tokenizer, text).deep_copy()
            first_mask(matcher, -(-ctypes.addressof(mask) // 4) * 4, size)
            matcher.compute_ff_tokens()
        except ValueError as error:
            return {"refused": str(error)}
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return {"text": text}

    return attempt
