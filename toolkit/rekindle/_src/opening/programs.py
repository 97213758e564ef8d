"""The programs of an open session: made ahead, demanded by steps, or stored for a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rekindle._src.core.memory import given_back
from rekindle._src.dispatch.threads import Contexts
from rekindle._src.opening.blueprint import Blueprint
from rekindle._src.opening.open_request import OpeningProgress
from rekindle._src.programs.buckets import Key
from rekindle._src.programs.demand import Demand, StepPrograms
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.user_functions import check_results
from rekindle._src.programs.warming import KERNEL_SECONDS, Warming, finish_at_exit, needed_after_restart, warm
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.tokenizer import Tokenizer

log = logging.getLogger("rekindle.engine")
QUESTION = "What is the difference between a crocodile and an alligator?"  # as long as most first messages


class SessionPrograms:
    """Programs, and the threads that make them."""

    def __init__(self, programs: Programs, warming: Warming, contexts: Contexts, *, background: bool) -> None:
        self.all: Programs = programs
        self._warming, self._contexts, self._background = warming, contexts, background
        self._demand: Demand | None = None

    @classmethod
    def open(cls, plan: Blueprint, shown: OpeningProgress, contexts: Contexts) -> SessionPrograms:
        """Begin to load or compile programs. They need shapes alone, so that weights are read meanwhile."""
        programs = Programs.open(plan.programs)
        if not programs.traced_processors:
            check_results(plan.programs.processors, plan.model.vocab_size)
        warming = Warming(
            programs,
            plan.precompile,
            restoring=plan.config.restores is not None,
            progress=shown.warmed if plan.precompile == "all" else None,  # otherwise opening does not wait for them
            contexts=given_back(contexts),  # memory that reading stored programs took
        )
        shown.compiling = lambda: warming.describe_kernels() or programs.counts.describe_compiling()
        return cls(programs, warming, contexts, background=plan.precompile == "background")

    def wait_for_kernels(self, show: Callable[[str], None]) -> None:
        """Wait until native kernels are ready, for minutes at most: no step runs before."""
        warming = self._warming
        if warming.waits_for_kernels:
            show("compiling for this processor, once")
        warming.wait_for_kernels()
        if warming.late_kernels:
            log.warning(
                "%d native kernels are not compiled after %.0f s, as other programs keep this machine busy: XLA does "
                "their work until this process ends, more slowly. They go on being compiled, and a restart finds them. "
                'precompile="all" waits for them',
                len(warming.late_kernels),
                KERNEL_SECONDS,
            )

    def on_demand(self) -> StepPrograms | None:
        """Return programs as rows demand them; None where all devices have to run the same steps."""
        programs = self.all
        if programs.recipes.parts.in_step:
            return None
        self._demand = Demand(programs, contexts=self._contexts)
        finish_at_exit(self._demand)
        return StepPrograms(programs, self._demand, background=self._background)

    def restorable(self) -> list[Key]:
        """Load and return the stored programs that the first request for restored pages needs."""
        return self._warming.restorable()

    def fillable(self) -> bool:
        """True if pages can be brought to the device without compiling."""
        programs = self.all
        keys = [*programs.lattice.fills, *(side.fill for side in programs.recipes.sides)]
        return programs.made(keys) or programs.moved_by_host(keys)

    def opened(self) -> None:
        """Go on when the session is open. Raise the `CompileError` of a program that has to be ready by now."""
        self._warming.opened()

    def expecting_chat(self, chat: ChatTemplate | None, tokenizer: Tokenizer, *, drawn: bool) -> Callable[[], None]:
        """Return a function that makes the programs of a first message ahead; it does nothing without chats."""
        if chat is None or not tokenizer.has_text:
            return lambda: None

        def tokens() -> int:
            text = chat.prepare([{"role": "user", "content": QUESTION}])()
            return len(tokenizer.encode(text, add_special_tokens=False))

        return lambda: self._warming.expect(tokens, drawn=drawn)

    def prepare_restart(self, *, demanded: bool) -> bool:
        """Make and store one program that a restart needs and this process did not. Return False if none is left."""
        programs = self.all
        if self._warming.in_peace and not demanded:
            return True
        missing = [key for key in needed_after_restart(programs) if not programs.ready(key)][:1]
        warm(programs, missing, contexts=self._contexts, workers=1)
        if not missing:
            programs.replace_parts()
            programs.flush()
        return bool(missing)

    def close(self) -> None:
        """Make no further program, and release the existing ones."""
        self._warming.stop()
        if self._demand is not None:
            self._demand.stop()
        self.all.close()
