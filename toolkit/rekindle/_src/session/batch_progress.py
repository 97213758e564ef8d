"""How far a list of prompts has come: prompts that ended, tokens per second, the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rekindle._src.core.activity import Activity, State
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.mailbox import Mailbox
from rekindle._src.dispatch.messages import Engine


def shown(engine: Engine, sampling: Sampling) -> Callable[[Sequence[Mailbox]], Activity]:
    """A function that shows a batch of requests with these options while it runs."""
    compiling = str if engine.program_wait is None else engine.program_wait.describe

    def show(mailboxes: Sequence[Mailbox]) -> Activity:
        return Activity(BatchProgress(mailboxes, sampling, compiling).look, quiet=engine.config.quiet)

    return show


class BatchProgress:
    """Reads the mailboxes of a batch; a look costs what came since the one before."""

    def __init__(self, mailboxes: Sequence[Mailbox], sampling: Sampling, compiling: Callable[[], str] = str) -> None:
        self._mailboxes, self._compiling = mailboxes, compiling
        self._most = max(1, sampling.max_tokens) * sampling.n  # tokens of a prompt
        self._read = [0] * len(mailboxes)  # deltas that were counted
        self._tokens = [0] * len(mailboxes)
        self._first: tuple[int, float] | None = None  # how many tokens were seen first, and the share that was done
        self._latest = (0.0, 0)  # when the last look was, and how many tokens it saw
        self._running = 0.0  # seconds since the first tokens, without those in which all waited for a program

    def look(self) -> State:
        """The batch as one line, and the share of it that is done."""
        now = time.monotonic()
        for index, mailbox in enumerate(self._mailboxes):
            new = mailbox.deltas[self._read[index] :]
            self._read[index] += len(new)
            self._tokens[index] += sum(len(delta.token_ids) for delta in new)
        ended = [mailbox.ended for mailbox in self._mailboxes]
        # A prompt that runs counts for the share of max_tokens that it has.
        shares = zip(ended, self._tokens, strict=True)
        fraction = sum(1.0 if end else min(1.0, tokens / self._most) for end, tokens in shares) / len(ended)
        line = f"{sum(ended)} of {len(ended)} prompts"
        total, compiling = sum(self._tokens), self._compiling()
        before, seen = self._latest
        self._latest = now, total
        if self._first is None:
            self._first = (total, fraction) if total else None
        else:
            self._running += now - before if total > seen or not compiling else 0.0
            made, done = total - self._first[0], fraction - self._first[1]
            if made and self._running:
                line += f", {made / self._running:,.0f} tokens/s"
            if done > 0 and not compiling:
                line += f", {self._running / done * (1 - fraction):.0f} s left"
        return State(f"{line}, {compiling}" if compiling else line, fraction)
