"""Compiled grammars of one model: made in a worker thread within bounds of size and time, and kept.

A grammar that compiles quickly can still be slow to follow, which every request in the step would wait for. So its
first mask is computed here, and a grammar that allows nothing, or whose mask takes too long, is refused at once.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle._src.core.guides import mask_words
from rekindle._src.structured.guide import Guide, Reasoning, first_line
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Spec

COMPILING = 2  # at once; one that is given up goes on in its thread
KEPT = 256  # compiled grammars; the least recently used one goes first
SLOWEST_MASK = 0.1  # seconds; 99 of 100 masks of real schemas take less than 2 ms with 152,000 tokens
_FIXES = {
    "schema": "Change the schema, or pass lenient=True to leave out what can't be checked",
    "regex": "Use the syntax of Rust's regex crate: no look-around, no back-references",
    "grammar": "Use Lark's notation with a rule `start`, or llama.cpp's with a rule `root`",
    "choice": "Use fewer or shorter strings",
    "json": "Report it: this grammar is built in",
}


class Grammar:
    """A compiled spec; every sequence follows it with a guide of its own."""

    def __init__(self, spec: Spec, matcher: Any, ends: frozenset[int], warnings: Sequence[str]) -> None:
        self.spec = spec
        self.warnings: tuple[str, ...] = tuple(warnings)  # what a lenient schema left out
        self._matcher, self._ends = matcher, ends

    def guide(self, eos_ids: Collection[int], reasoning: Reasoning | None = None) -> Guide:
        """A guide at the beginning of a text that may end with one of `eos_ids`."""
        return Guide(self._matcher.deep_copy(), self._ends, eos_ids, reasoning)


class Grammars:
    """Compiles specs for one tokenizer and a vocabulary that may be larger than it, and keeps the latest ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiling = threading.BoundedSemaphore(COMPILING)
        self._llguidance: Any = None  # the tokenizer as llguidance knows it, made when first needed
        self._kept: collections.OrderedDict[Spec, Grammar] = collections.OrderedDict()
        self.compiled: int = 0

    def find(self, spec: Spec) -> Grammar | None:
        """A grammar that was compiled before."""
        with self._lock:
            found = self._kept.get(spec)
            if found is not None:
                self._kept.move_to_end(spec)
            return found

    def compile(self, spec: Spec, *, patience: float | None = None) -> Grammar:
        """Compile a spec, which takes milliseconds to seconds. Raises `InvalidRequest` with llguidance's message.

        Waits at most `patience` seconds for others that compile.
        """
        found = self.find(spec)
        if found is not None:
            return found
        if not self._compiling.acquire(timeout=patience):
            raise InvalidRequest(
                spec.kind, spec.text, "waited too long for other grammars to compile", "Submit it later"
            )
        try:
            return self._compile(spec)
        finally:
            self._compiling.release()

    def _compile(self, spec: Spec) -> Grammar:
        tokenizer = self._ready(spec)
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)
        try:
            text = _text(spec)
            matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        except ValueError as error:
            raise _refused(spec, str(error)) from None
        if matcher.is_error():
            raise _refused(spec, matcher.get_error())
        ends = frozenset(tokenizer.eos_tokens)
        self._probe(spec, Guide(matcher.deep_copy(), ends, ends))
        grammar = Grammar(spec, matcher, ends, matcher.get_grammar_warnings())
        with self._lock:
            self.compiled += 1
            self._kept[spec] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _probe(self, spec: Spec, guide: Guide) -> None:
        start = time.perf_counter()
        problem = guide.fill(np.zeros(mask_words(self._vocab_size), np.int32))
        if problem:
            raise _refused(spec, f"nothing fits it: {problem}")
        if (took := time.perf_counter() - start) > SLOWEST_MASK:
            raise _refused(
                spec, f"finding the tokens that may begin it took {took * 1e3:.0f} ms, which all would wait for"
            )

    def _ready(self, spec: Spec) -> Any:
        with self._lock:
            if self._llguidance is None:
                import llguidance

                text, eos = self._tokenizer.backend.to_str(), self._ends()
                if not eos:
                    raise InvalidRequest(spec.kind, spec.text, "needs a model with an end token", "Use another model")
                try:
                    self._llguidance = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
                except ValueError as error:
                    problem = f"can't be followed with this model's tokenizer: {first_line(str(error))}"
                    raise InvalidRequest(spec.kind, spec.text, problem, "Use another model") from None
            return self._llguidance

    def _ends(self) -> list[int]:
        """The end tokens; of a model without any, a token that no text has, since llguidance needs one."""
        size = min(self._vocab_size, self._tokenizer.vocab_size)
        eos = [token for token in self._tokenizer.eos_ids if 0 <= token < size]
        return eos or [token for token in sorted(self._tokenizer.special_ids) if token < size][:1]


def _text(spec: Spec) -> str:
    """The grammar as llguidance takes it."""
    import llguidance

    if spec.kind in ("schema", "json"):
        # Options of llguidance inside a schema stand below these; options that a client may set are ours alone.
        options: Any = {
            "whitespace_flexible": spec.whitespace_flexible,
            "lenient": spec.lenient,
            "coerce_one_of": spec.lenient,
        }
        return str(llguidance.LLMatcher.grammar_from_json_schema(spec.text, overrides=options))
    if spec.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(spec.text))
    return str(llguidance.grammar_from("grammar" if spec.kind == "grammar" else "choice", spec.text))


def _refused(spec: Spec, message: str) -> InvalidRequest:
    return InvalidRequest(spec.kind, spec.text, f"can't be followed: {first_line(message)}", _FIXES[spec.kind])
