"""The figures of a session's scheduler and runner by their own names: `stats.running`, `stats.compilations`, …"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle._src.execution.runner import RunnerStatistics
    from rekindle._src.kvcache.statistics import CacheStatistics
    from rekindle._src.scheduling.explain import SchedulerStatistics


class Figures:
    """The figures that `SessionStats` takes over from its two parts."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def scheduler(self) -> SchedulerStatistics:
            """The scheduler's own figures."""
            ...

        @property
        def runner(self) -> RunnerStatistics:
            """The runner's own figures."""
            ...

    @property
    def waiting(self) -> int:
        """Sequences in the queue, parked and preempted ones included."""
        return self.scheduler.waiting

    @property
    def parked(self) -> int:
        """Waiting sequences that wait for a prefix which another request computes."""
        return self.scheduler.parked

    @property
    def running(self) -> int:
        """Sequences that steps compute now."""
        return self.scheduler.running

    @property
    def leaving(self) -> int:
        """Sequences that ended while a step in flight still contains them."""
        return self.scheduler.leaving

    @property
    def steps(self) -> int:
        """Steps of the engine so far."""
        return self.scheduler.steps

    @property
    def steps_in_flight(self) -> int:
        """Steps that were submitted to the device and not read yet."""
        return self.scheduler.steps_in_flight

    @property
    def pages_total(self) -> int:
        """KV pages on the device."""
        return self.scheduler.pages_total

    @property
    def pages_free(self) -> int:
        """Empty KV pages."""
        return self.scheduler.pages_free

    @property
    def pages_held(self) -> int:
        """KV pages held by running requests."""
        return self.scheduler.pages_held

    @property
    def pages_cached(self) -> int:
        """KV pages kept by the prefix cache alone, until room is needed."""
        return self.scheduler.pages_cached

    @property
    def reserve_fraction(self) -> float:
        """Share of the tokens that running requests may still make for which pages are reserved."""
        return self.scheduler.reserve_fraction

    @property
    def submitted(self) -> int:
        """Sequences submitted so far."""
        return self.scheduler.submitted

    @property
    def finished(self) -> int:
        """Sequences that ended by themselves, or at max_tokens."""
        return self.scheduler.finished

    @property
    def aborted(self) -> int:
        """Sequences that were cancelled, timed out, or abandoned by the loop over them."""
        return self.scheduler.aborted

    @property
    def failed(self) -> int:
        """Sequences that an error ended."""
        return self.scheduler.failed

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its pages to an older one and resumed later."""
        return self.scheduler.preemptions

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all admitted prompts."""
        return self.scheduler.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that hit the prefix cache."""
        return self.scheduler.cached_tokens

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that hit the prefix cache."""
        return self.scheduler.hit_rate

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed; a preempted sequence counts again."""
        return self.scheduler.prefill_tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled."""
        return self.scheduler.generated_tokens

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted by prompt_lookup and computed."""
        return self.scheduler.drafted_tokens

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that sampling confirmed."""
        return self.scheduler.accepted_tokens

    @property
    def shards(self) -> tuple[SchedulerStatistics, ...]:
        """The figures of each data shard of a mesh that has several; their sums are those of the session."""
        return self.scheduler.shards

    @property
    def cache(self) -> CacheStatistics | None:
        """Counts of the prefix cache; None without one."""
        return self.scheduler.cache

    @property
    def tokens(self) -> int:
        """Positions that steps computed, prompts and decoding together."""
        return self.runner.tokens

    @property
    def padding(self) -> int:
        """Padding positions computed because a program was larger than its step."""
        return self.runner.padding

    @property
    def host_seconds(self) -> float:
        """Seconds of packing and dispatch, compiling included."""
        return self.runner.host_seconds

    @property
    def device_seconds(self) -> float:
        """Seconds in which a step ran, as far as the host can tell."""
        return self.runner.device_seconds

    @property
    def traces(self) -> int:
        """Python functions traced by JAX."""
        return self.runner.traces

    @property
    def compilations(self) -> int:
        """Programs compiled; the others came from disk."""
        return self.runner.compilations

    @property
    def programs(self) -> dict[str, int]:
        """Steps by program."""
        return self.runner.programs

    @property
    def pages_out(self) -> int:
        """Pages copied from the device to host memory."""
        return self.runner.pages_out

    @property
    def pages_in(self) -> int:
        """Pages copied from host memory to the device."""
        return self.runner.pages_in

    @property
    def step_sizes(self) -> dict[int, int]:
        """Steps by their number of tokens, rounded up to a power of two."""
        return self.runner.step_sizes
