"""Compiled grammars of one model: made within bounds of size, time, memory and stack, and kept.

A grammar that compiles quickly can still be slow to follow, which every request in the step would wait for. So its
first mask is computed here, and a grammar that allows nothing, or takes too long for its mask, is refused at once.

Each sequence follows a grammar with a guide of its own, over llguidance's matcher: it finds the allowed next tokens,
and follows the sampled ones.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import dataclasses
import hashlib
import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rekindle._src.core.records import GuideReport, Mask, NewGuide, mask_words
from rekindle._src.structured import compile_worker
from rekindle._src.structured.automata import MOST_BYTES, MOST_BYTES_A_REQUEST, Automata, Automaton
from rekindle._src.structured.compilers import Compilers, Job, busy_error, first_line, refusal_error
from rekindle._src.structured.endings import Bounds, Ending, Spelling
from rekindle._src.structured.reasoning import ReasoningGuide, ReasoningRules, TokenTexts
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Spec


AHEAD = 16  # most forced tokens that are reported


class First(NamedTuple):
    """A grammar's state at the beginning of a text."""

    mask: Mask
    run: tuple[int, ...]  # tokens that have to follow


_OPEN, _COMPLETE = GuideReport(), GuideReport(accepting=True)  # the reports of most tokens


class Guide:
    """The implementation of `GuideLike`.

    Of the tokenizer's end tokens only those in `eos_ids` may come, at a place where the text is complete. Where nothing
    else can come, an end token is allowed whatever the request's options, because the text is over there.
    """

    __slots__ = (
        "_at",
        "_automata",
        "_barred",
        "_ending",
        "_ends",
        "_first",
        "_matcher",
        "_run",
        "_skip",
        "accepting",
        "automaton",
        "consumed",
        "ended",
        "rows",
        "spent",
    )

    def __init__(
        self,
        matcher: Any,
        ends: frozenset[int],
        eos_ids: Collection[int],
        automata: Automata,
        automaton: Automaton,
        first: First | None = None,
        ending: Ending | None = None,
    ) -> None:
        """Set up; `first` is the matcher's state at the beginning, which may have taken long to compute."""
        self._matcher, self._ending = matcher, ending
        self._automata, self.automaton, self.rows = automata, automaton, Automaton()
        self._ends = ends
        self._barred = tuple(_without(token) for token in ends.difference(eos_ids))
        self._first = first  # until the grammar takes a token
        self._run: tuple[int, ...] = ()  # forced tokens; the ones before `_at` have come
        self._at = self._skip = 0
        self._look_ahead()
        self.spent: float = 0.0
        self.consumed: int = 0
        self.ended: bool = False
        self.accepting: bool = False

    def copy(self) -> Guide:
        clone = object.__new__(Guide)
        for name in Guide.__slots__:
            setattr(clone, name, getattr(self, name))
        clone._matcher, clone.rows = self._matcher.deep_copy(), Automaton()
        clone._ending = None if self._ending is None else self._ending.copy()
        return clone

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens that have to follow, in the tokenizer's usual spelling."""
        return self._run[self._at : self._at + AHEAD]

    def fill(self, mask: Mask) -> str:
        start = time.thread_time()
        problem = self._fill(mask)
        return problem or self._measured(time.thread_time() - start)

    def _measured(self, seconds: float) -> str:
        """Count a processor's seconds, as memory grows with them. Return the reason if it takes too much."""
        automaton, rows = self.automaton, self.rows
        automaton.since += seconds
        rows.since += seconds
        if automaton.since > automaton.due or rows.since > rows.due:
            self._automata.measure(self._matcher, automaton, rows)
        return automaton.problem or rows.problem

    def _fill(self, mask: Mask) -> str:
        if self._first is not None:
            mask[:] = self._first.mask
        else:
            data = ctypes.addressof(ctypes.c_int32.from_buffer(mask.data))  # a fifth of the time of `mask.ctypes`
            self._matcher.unsafe_compute_mask_ptr(data, mask.nbytes)
            if self._matcher.is_error():
                return self._error()
        view = mask.data  # reads and writes a word in a fifth of the time of an array
        words = [view[word] for word, _ in self._barred]
        for word, kept_bits in self._barred:
            view[word] &= kept_bits
        any_left = mask.tobytes() != bytes(mask.nbytes)  # a tenth of the time of `any`
        if not any_left:
            for (word, _), bits in zip(self._barred, words, strict=True):
                view[word] = bits
                any_left |= bits != 0
        elif self._ending is not None:
            self._ending.limit(mask, self._matcher, self.consumed, forced=self._at < len(self._run))
        return "" if any_left else "the grammar allows no token"

    def _error(self) -> str:
        """Measure the automaton, since a full one is not kept. Return the error of the matcher."""
        self._automata.measure(self._matcher, self.automaton, self.rows)
        return first_line(self._matcher.get_error())

    def consume(self, token: int) -> GuideReport:
        start = time.thread_time()
        report = self._consume(token)
        if problem := self._measured(time.thread_time() - start):
            self.ended = True
            return GuideReport(ended=True, problem=report.problem or problem)
        return report

    def _consume(self, token: int) -> GuideReport:
        self.consumed += 1
        self._first = None
        forced = self._at < len(self._run) and self._run[self._at] == token
        matcher = self._matcher
        if self.ended and token in self._ends:  # a fork of a text that an end token ended
            return GuideReport(ended=True, by_eos=True, accepting=True)
        if not matcher.consume_token(token):
            self.ended = True
            return GuideReport(ended=True, problem=self._error())
        self.accepting = matcher.is_accepting()
        self.ended = matcher.is_stopped()
        self._move_on(forced)
        by_eos = self.ended and token in self._ends
        self.accepting |= by_eos
        steered, searched, due = False, 0.0, 0.0
        ending = self._ending
        if ending is not None:
            ending.consume(token)
            steered, searched, due = ending.steered, ending.take_seconds(), ending.due(self.consumed)
        if forced or self.ended or self._run or steered or searched or due:
            return GuideReport(forced, self.ended, by_eos, self.accepting, self.ahead, "", steered, searched, due)
        return _COMPLETE if self.accepting else _OPEN

    def _move_on(self, forced: bool) -> None:
        """Keep the run of forced tokens, or compute the next one.

        llguidance computes a run in time that is proportional to its length, without letting other threads run. So it
        is kept while the text follows it. Where the model spells it otherwise, a long run is not recomputed at once.
        """
        left = len(self._run) - self._at
        if self.ended:
            self._run = ()
        elif forced and left > 1:
            self._at += 1
        elif not forced and left > AHEAD:
            self._run, self._skip = (), left // AHEAD
        elif self._skip:
            self._skip -= 1
        else:
            self._look_ahead()

    def _look_ahead(self) -> None:
        self._run = self._first.run if self._first is not None else forced_run(self._matcher)
        self._at = 0


def forced_run(matcher: Any) -> tuple[int, ...]:
    """Return the tokens that have to follow."""
    return tuple(matcher.compute_ff_tokens())


def _without(token: int) -> tuple[int, int]:
    """Return the index of a token's word in a mask, and all bits of the word but the token's."""
    return token >> 5, int(~np.uint32(1 << (token & 31)).view(np.int32))


KEPT, KEPT_BYTES = 256, 128 << 20  # compiled grammars, and refused ones; the least recently used one goes first
# llguidance does not say how large a compiled grammar is. With a vocabulary of 49,152 tokens, resident memory grew for
# each choice by 80, 463 and 2,043 KiB (of 254, 2,887 and 12,220 characters), for each schema by 92, 160 and 417 KiB
# (of 160, 1,114 and 5,616 characters), and for each regex of 15 to 25,889 characters by up to 785 KiB.
_EXPRESSIONS = ("attern", '"format"', "\\u")  # signs of a regex in a schema: an escape may hide a keyword
_LEAST_BYTES, _EXPRESSION_BYTES, _BYTES_PER_CHARACTER = 64 << 10, 1 << 20, 180


class Grammar:
    """A compiled spec; every sequence follows it with a guide of its own."""

    def __init__(
        self,
        spec: Spec,
        matcher: Any,
        ends: frozenset[int],
        warnings: Sequence[str],
        texts: TokenTexts,
        automata: Automata,
        first: First | None = None,
    ) -> None:
        self.spec = spec
        self._texts = texts
        self._automata = automata
        self.automaton: Automaton = automata.open(matcher)
        self.warnings: tuple[str, ...] = tuple(warnings)  # rules that a lenient schema left out
        self._matcher, self._ends, self._first = matcher, ends, first
        self.bounds: Bounds | None = None
        plain = spec.kind in ("choice", "json") or (
            spec.kind == "schema" and not any(sign in spec.text for sign in _EXPRESSIONS)
        )
        self._compiled_bytes = (_LEAST_BYTES if plain else _EXPRESSION_BYTES) + _BYTES_PER_CHARACTER * len(spec.text)

    @property
    def nbytes(self) -> int:
        """About as much memory as it takes, which grows while texts follow it."""
        return max(self._compiled_bytes, self.automaton.nbytes)

    def guide(
        self, eos_ids: Collection[int], rules: ReasoningRules | None = None, budget: int | None = None
    ) -> NewGuide:
        """Make a guide for a new text that may end with one of `eos_ids`; JSON ends within `budget` tokens.

        By the `rules` of a reply it begins with the answer.
        """
        ending = None if self.bounds is None else Ending(self.bounds, budget)
        matcher = self._matcher.deep_copy()
        guide = Guide(matcher, self._ends, eos_ids, self._automata, self.automaton, self._first, ending)
        return guide if rules is None else ReasoningGuide(rules, self._texts, tuple(self._ends), guide)


class Grammars:
    """Compiles specs for one tokenizer and a vocabulary that may be larger than it, and keeps the latest ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_requests: int = 1) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.RLock()  # a job may end in a thread that begins another one
        self._reading = threading.Lock()  # held while the tokenizer is made, which may take a second
        self._llguidance: Any = None  # the tokenizer as llguidance knows it, made when first needed
        self._spelling: Spelling | None = None
        self._grammars: collections.OrderedDict[Spec, Grammar] = collections.OrderedDict()
        self._refusals: collections.OrderedDict[bytes, tuple[str, str]] = collections.OrderedDict()
        self._jobs: dict[Spec, Job[Grammar]] = {}
        self.compilers = Compilers(self._compile, self._needs, self._ready)
        self.texts: TokenTexts = TokenTexts(tokenizer)
        self.automata = Automata(max(MOST_BYTES, max_requests * MOST_BYTES_A_REQUEST), self._forget)
        self.compiled: int = 0

    @property
    def kept_bytes(self) -> int:
        """About as much memory as the kept grammars take."""
        with self._lock:
            return sum(grammar.nbytes for grammar in self._grammars.values())

    @property
    def kept(self) -> tuple[Grammar, ...]:
        """The kept grammars; the least recently used one is the first."""
        with self._lock:
            return tuple(self._grammars.values())

    def find(self, spec: Spec) -> Grammar | None:
        """Return a grammar that was compiled before, or None."""
        with self._lock:
            match = self._grammars.get(spec)
            if match is not None:
                self._grammars.move_to_end(spec)
            return match

    def begin(self, spec: Spec, caller: str = "") -> Job[Grammar]:
        """Begin to compile a spec, or join others that wait for it; call `leave` to stop waiting.

        Its future raises `InvalidRequest` for a spec that can't be followed. Raises `Busy` if too many wait already.
        """
        with self._lock:
            refusal = self._refusals.get(_digest(spec))
            if refusal is not None:
                self._refusals.move_to_end(_digest(spec))
                raise InvalidRequest(spec.kind, spec.text, *refusal)
            job = self._jobs.get(spec)
            if job is not None and not job.future.done():
                job.waiting += 1
                return job
            job = self._jobs[spec] = self.compilers.submit(spec, caller)
        job.future.add_done_callback(lambda future: self._on_done(spec, future))
        return job

    def leave(self, job: Job[Grammar]) -> None:
        """Stop waiting; a job that has not begun is dropped when nothing waits for it."""
        with self._lock:
            job.waiting -= 1
            if not job.waiting and not job.started and self._jobs.get(job.spec) is job:
                del self._jobs[job.spec]
                self.compilers.drop(job)

    def reasoning_guide(self, rules: ReasoningRules) -> NewGuide:
        """Make a guide for a reply with a budget for its reasoning and a free answer."""
        return ReasoningGuide(rules, self.texts, (), None)

    def compile(self, spec: Spec, *, patience: float | None = None) -> Grammar:
        """Compile a spec, which takes milliseconds to seconds, and block this thread until then.

        Waits at most `patience` seconds for others that compile. Raises as `begin` does.
        """
        match = self.find(spec)
        if match is not None:
            return match
        job = self.begin(spec)
        try:
            try:
                return job.future.result(patience)
            except concurrent.futures.TimeoutError:
                if job.started or patience is None:
                    return job.future.result()
                raise wait_error(patience) from None
        finally:
            self.leave(job)

    def close(self) -> None:
        """End the processes that compile."""
        self.compilers.close()

    def _on_done(self, spec: Spec, future: concurrent.futures.Future[Grammar]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            if (job := self._jobs.get(spec)) is not None and job.future is future:
                del self._jobs[spec]
            if isinstance(error, InvalidRequest):
                self._refusals[_digest(spec)] = error.problem, error.fix
                while len(self._refusals) > KEPT:
                    self._refusals.popitem(last=False)

    def _compile(self, spec: Spec, text: str) -> Grammar:
        tokenizer = self._ready(spec)
        mask = np.zeros(mask_words(self._vocab_size), np.int32)
        try:
            matcher = compile_worker.new_matcher(tokenizer, text)
            compile_worker.first_mask(matcher.deep_copy(), mask.ctypes.data, mask.nbytes)
        except ValueError as error:
            raise refusal_error(spec, str(error)) from None
        ends = frozenset(tokenizer.eos_tokens)
        first = First(mask, forced_run(matcher.deep_copy()))
        grammar = Grammar(spec, matcher, ends, matcher.get_grammar_warnings(), self.texts, self.automata, first)
        if spec.kind in ("schema", "json"):
            grammar.bounds = Bounds(self._spelled(tokenizer), spec.kind, spec.text)
        with self._lock:
            self.compiled += 1
            self._grammars[spec] = grammar
            self._grammars.move_to_end(spec)
            kept_bytes = self.kept_bytes
            while len(self._grammars) > KEPT or (kept_bytes > KEPT_BYTES and len(self._grammars) > 1):
                kept_bytes -= self._grammars.popitem(last=False)[1].nbytes
        return grammar

    def _forget(self, automaton: Automaton | None) -> bool:
        """Drop the kept grammar with this automaton, or the least recently used one. True if there was one."""
        with self._lock:
            for spec, grammar in self._grammars.items():
                if automaton is None or grammar.automaton is automaton:
                    del self._grammars[spec]
                    return True
            return False

    def _needs(self, spec: Spec) -> dict[str, Any]:
        return {"tokenizer": self._tokenizer_message(), "vocab_size": self._vocab_size, "ends": self._ends(spec)}

    def _ready(self, spec: Spec) -> Any:
        with self._reading:
            if self._llguidance is None:
                message, ends = self._tokenizer_message(), self._ends(spec)
                try:
                    self._llguidance = compile_worker.new_tokenizer(message, self._vocab_size, ends, self._encode)
                except ValueError as error:
                    problem = f"can't be followed with this model's tokenizer: {first_line(str(error))}"
                    raise InvalidRequest(spec.kind, spec.text, problem, "Use another model") from None
            return self._llguidance

    def _tokenizer_message(self) -> str | dict[str, Any]:
        spelled = self._tokenizer.spelled()
        return self._tokenizer.definition().decode() if spelled is None else compile_worker.tokens_message(*spelled)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _spelled(self, tokenizer: Any) -> Spelling:
        with self._reading:
            if self._spelling is None:
                tokens = (tokenizer.decode_bytes([token]) for token in range(self._vocab_size))
                self._spelling = Spelling(tokens, tokenizer.eos_tokens, self._vocab_size)
            return self._spelling

    def _ends(self, spec: Spec) -> list[int]:
        """Return the end tokens; of a model without any, a token that no text has, since llguidance needs one."""
        size = min(self._vocab_size, self._tokenizer.vocab_size)
        ends = [token for token in self._tokenizer.eos_ids if 0 <= token < size]
        ends = ends or [token for token in sorted(self._tokenizer.special_ids) if token < size][:1]
        if not ends:
            raise InvalidRequest(spec.kind, spec.text, "needs a model with an end token", "Use another model")
        return ends


def wait_error(seconds: float) -> Exception:
    """Return the error for a request that waited this many seconds for its grammar to begin compiling."""
    return busy_error(f"this one has waited for {seconds:g} s")


def _digest(spec: Spec) -> bytes:
    return hashlib.sha256(repr(dataclasses.astuple(spec)).encode("utf-8", "surrogatepass")).digest()
