"""The progress of a list of prompts or a table's rows: tokens per second, the time left, the program in compilation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rekindle._src.core.activity import Activity, State
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.mailbox import Mailbox
from rekindle._src.dispatch.messages import Engine


def shown(engine: Engine, sampling: Sampling) -> Callable[[Sequence[Mailbox]], Activity]:
    """Return a function that shows a batch of requests with these options while it runs."""
    compiling = compiled_in(engine)

    def show(mailboxes: Sequence[Mailbox]) -> Activity:
        return Activity(BatchProgress(mailboxes, sampling, compiling).look, quiet=engine.config.quiet)

    return show


def compiled_in(engine: Engine) -> Callable[[], str]:
    """Return a function that names the program that all requests wait for; empty if there is none."""
    return str if engine.program_wait is None else engine.program_wait.describe


class BatchProgress:
    """Reads the mailboxes of a batch. The cost of a look is that of the deltas since the last one."""

    def __init__(self, mailboxes: Sequence[Mailbox], sampling: Sampling, compiling: Callable[[], str] = str) -> None:
        self._mailboxes, self._pace = mailboxes, Pace(compiling)
        self._most = max(1, sampling.max_tokens) * sampling.n  # tokens of a prompt
        self._read = [0] * len(mailboxes)  # deltas that were counted
        self._tokens = [0] * len(mailboxes)

    def look(self) -> State:
        """Return the batch's progress as one line, and the share that is complete."""
        for index, mailbox in enumerate(self._mailboxes):
            new = mailbox.deltas[self._read[index] :]
            self._read[index] += len(new)
            self._tokens[index] += sum(len(delta.token_ids) for delta in new)
        ended = [mailbox.ended for mailbox in self._mailboxes]
        # A running prompt counts for its share of max_tokens.
        shares = zip(ended, self._tokens, strict=True)
        fraction = sum(1.0 if end else min(1.0, tokens / self._most) for end, tokens in shares) / len(ended)
        words = self._pace.look(sum(self._tokens), fraction)
        return State(", ".join([f"{sum(ended)} of {len(ended)} prompts", *words]), fraction)


class Pace:
    """The rate of tokens since the first of them, without the time in which all requests waited for a program."""

    def __init__(self, compiling: Callable[[], str] = str) -> None:
        self._compiling = compiling
        self._first: tuple[int, float] | None = None  # the first count of tokens above zero, and the share then
        self._latest = (0.0, 0)  # the time of the last look, and its count of tokens
        self._running = 0.0  # seconds

    def look(self, total: int, fraction: float | None) -> list[str]:
        """Return the rate, the time left and the program in compilation, from all tokens and the share so far."""
        now, compiling, words = time.monotonic(), self._compiling(), []
        previous, counted = self._latest
        self._latest = now, total
        if self._first is None:
            self._first = (total, fraction or 0.0) if total else None
        else:
            self._running += now - previous if total > counted or not compiling else 0.0
            tokens, share = total - self._first[0], (fraction or 0.0) - self._first[1]
            if tokens and self._running:
                words.append(f"{tokens / self._running:,.0f} tokens/s")
            if share > 0 and fraction is not None and not compiling:
                words.append(f"{self._running / share * (1 - fraction):,.0f} s left")
        return [*words, compiling] if compiling else words
