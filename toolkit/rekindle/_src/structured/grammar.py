"""Compiled grammars of one model: made within bounds of size, time, memory and stack, and kept.

A grammar that compiles quickly can still be slow to follow, which every request in the step would wait for. So its
first mask is computed here, and a grammar that allows nothing, or whose mask takes too long, is refused at once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle._src.core.guides import mask_words
from rekindle._src.structured import compile_worker
from rekindle._src.structured.compilers import Compilers, Job, busy_error, first_line, refusal_error
from rekindle._src.structured.endings import Bounds, Ending, Spelling
from rekindle._src.structured.guide import First, Guide, Reasoning, forced_run
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.structured.spec import Spec

KEPT = 256  # compiled grammars, and refused ones; the least recently used one goes first


class Grammar:
    """A compiled spec; every sequence follows it with a guide of its own."""

    def __init__(
        self, spec: Spec, matcher: Any, ends: frozenset[int], warnings: Sequence[str], first: First | None = None
    ) -> None:
        self.spec = spec
        self.warnings: tuple[str, ...] = tuple(warnings)  # rules that a lenient schema left out
        self._matcher, self._ends, self._first = matcher, ends, first
        self.bounds: Bounds | None = None

    def guide(self, eos_ids: Collection[int], reasoning: Reasoning | None = None, budget: int | None = None) -> Guide:
        """Make a guide for a new text that may end with one of `eos_ids`; JSON ends within `budget` tokens."""
        ending = None if self.bounds is None else Ending(self.bounds, budget)
        return Guide(self._matcher.deep_copy(), self._ends, eos_ids, reasoning, self._first, ending)


class Grammars:
    """Compiles specs for one tokenizer and a vocabulary that may be larger than it, and keeps the latest ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.RLock()  # a job may end in a thread that begins another one
        self._reading = threading.Lock()  # held while the tokenizer is made, which may take a second
        self._llguidance: Any = None  # the tokenizer as llguidance knows it, made when first needed
        self._spelling: Spelling | None = None
        self._grammars: collections.OrderedDict[Spec, Grammar] = collections.OrderedDict()
        self._refusals: collections.OrderedDict[bytes, tuple[str, str]] = collections.OrderedDict()
        self._jobs: dict[Spec, Job[Grammar]] = {}
        self._compilers = Compilers(self._compile, self._needs, self._ready)
        self.compiled: int = 0

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
            job = self._jobs[spec] = self._compilers.submit(spec, caller)
        job.future.add_done_callback(lambda future: self._on_done(spec, future))
        return job

    def leave(self, job: Job[Grammar]) -> None:
        """Stop waiting; a job that has not begun is dropped when nothing waits for it."""
        with self._lock:
            job.waiting -= 1
            if not job.waiting and not job.started and self._jobs.get(job.spec) is job:
                del self._jobs[job.spec]
                self._compilers.drop(job)

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
        self._compilers.close()

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
        grammar = Grammar(spec, matcher, ends, matcher.get_grammar_warnings(), first)
        if spec.kind in ("schema", "json"):
            grammar.bounds = Bounds(self._spelled(tokenizer), spec.kind, spec.text)
        with self._lock:
            self.compiled += 1
            self._grammars[spec] = grammar
            while len(self._grammars) > KEPT:
                self._grammars.popitem(last=False)
        return grammar

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
        return self._tokenizer.backend.to_str() if spelled is None else compile_worker.tokens_message(*spelled)

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
    """Return the error of a request whose grammar has not begun to compile after so many seconds."""
    return busy_error(f"this one has waited for {seconds:g} s")


def _digest(spec: Spec) -> bytes:
    return hashlib.sha256(repr(dataclasses.astuple(spec)).encode("utf-8", "surrogatepass")).digest()
