"""The session: everything that a caller can do with an open model beside making requests."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rekindle._src.core import html
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.contracts import DetokenizerLike, RunnerLike, SchedulerLike, TokenizerLike
from rekindle._src.core.mesh_report import describe_share
from rekindle._src.core.records import Completion
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.dispatch import Dispatch
from rekindle._src.dispatch.host import Host, wait
from rekindle._src.dispatch.mailbox import OneShot
from rekindle._src.dispatch.messages import Engine, StepOnce, Stepped
from rekindle._src.dispatch.wakeups import run_sync
from rekindle._src.session.allowed import AllowedTokens, allowed_tokens
from rekindle._src.session.cache_view import CacheView
from rekindle._src.session.cache_writer import SaveReport
from rekindle._src.session.call import Call, Once
from rekindle._src.session.client import Client
from rekindle._src.session.conversations import Conversations
from rekindle._src.session.embedding import Embedding
from rekindle._src.session.handle import Handle
from rekindle._src.session.pausing import Paused
from rekindle._src.session.profiling import Profiling
from rekindle._src.session.prompts import PromptLike
from rekindle._src.session.row_mapping import RowMapping
from rekindle._src.session.serving import Serving
from rekindle._src.session.views import Views, dashboard
from rekindle._src.text.detokenizer import real_detokenizer
from rekindle._src.text.generation_config import describe
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest, NotPicklable

if TYPE_CHECKING:
    from rekindle._src.scheduling.explain import Explanation
    from rekindle._src.serve.server import Server
    from rekindle._src.session.stats import ProgramReport, SessionStats, StepReport


class Session(RowMapping, Embedding, Conversations, Serving, Profiling):
    """An open model. Make one with `rekindle.open` or `rekindle.open_sync`; close it with `aclose` or a `with` block.

    Its work happens in a thread of its own, so it can be used from any number of threads and event loops, asyncio or
    trio, at once. Sampling options are keyword arguments, or one `Sampling`, or both.
    """

    def __init__(
        self,
        scheduler: SchedulerLike,
        runner: RunnerLike,
        tokenizer: TokenizerLike,
        config: EngineConfig,
        *,
        detokenizer: Callable[[Sampling], DetokenizerLike] | None = None,
        vocab_size: int | None = None,
        chat: Any = None,
        model: str = "",
    ) -> None:
        """Make a session over parts that exist already, such as fakes; `open` makes the real ones."""
        from rekindle._src.structured.grammar import Grammars

        engine = Engine(
            scheduler,
            runner,
            tokenizer,
            real_detokenizer(tokenizer) if detokenizer is None else lambda sampling, visible: detokenizer(sampling),
            config,
            vocab_size if vocab_size is not None else tokenizer.vocab_size,
            chat,
            model,
            grammars=Grammars(tokenizer, vocab_size or tokenizer.vocab_size)
            if isinstance(tokenizer, Tokenizer)
            else None,
        )
        host = Host(lambda: engine)
        host.start()
        self._attach(host, wait(host.opened))

    @classmethod
    def attached(cls, host: Host, engine: Engine) -> Self:
        """Return a session over a host that has already opened."""
        session = cls.__new__(cls)
        session._attach(host, engine)
        return session

    def _attach(self, host: Host, engine: Engine) -> None:
        self._client = Client(host, engine)
        self._host, self._engine, self._cache_writer = host, engine, self._client.writer
        self._servers: list[Server] = []
        # The host knows nothing of the client, so that dropping the last reference to the session, its views and its
        # handles closes it.
        weakref.finalize(self._client, host.close).atexit = False

    @property
    def config(self) -> EngineConfig:
        """The options it was opened with, with every default resolved."""
        return self._engine.config

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: `encode(text)` and `decode(ids)`."""
        return self._engine.tokenizer

    @property
    def model(self) -> str:
        """The name or folder it was opened with."""
        return self._engine.model

    @property
    def closed(self) -> bool:
        """True once it was closed; it takes no requests then."""
        return self._host.closing

    # Looking inside.

    def stats(self) -> SessionStats:
        """Return a snapshot of its numbers: queue, running requests, pages, hit rates, compilations, times."""
        from rekindle._src.session.stats import SessionStats  # a first token needs none of the reports

        limiter, engine = self._host.limiter, self._engine

        def snapshot(dispatch: Dispatch) -> SessionStats:
            scheduler: Any = engine.scheduler.statistics()
            runner: Any = engine.runner.statistics()
            return SessionStats(
                model=engine.model,
                live=limiter.inside,
                places=limiter.places,
                waiting_for_a_place=limiter.waiting,
                paused=self._client.pauses > 0,
                scheduler=scheduler,
                runner=runner,
                mesh=engine.mesh,
                collective_seconds=engine.collective_seconds and engine.collective_seconds(runner.programs),
                **dispatch.watchdog.figures()._asdict(),
            )

        self._host.check()
        return wait(self._host.call(snapshot))

    def watch(self) -> Any:
        """Return a live dashboard: throughput, queue, batch over time, pages by tier. Show it at the end of a cell."""
        return dashboard(self._client, self)

    @property
    def view(self) -> Views:
        """Live views for a notebook: `session.view.stream(prompt)`, `session.view.chat()`, `session.view.tree()`."""
        return Views(self._client, self)

    def programs(self) -> ProgramReport:
        """Return the compiled programs that are ready, and where each came from."""
        from rekindle._src.session.stats import ProgramReport

        self._host.check()
        return ProgramReport.of(self._engine.runner)

    def explain(self, request: Handle[Any] | Completion | str) -> Explanation:
        """Explain why a request (handle, completion or id) waits, was preempted, or hit or missed the cache."""
        request_id = request if isinstance(request, str) else getattr(request, "request_ids", (request.id,))[0]
        explanation: Explanation | None = self._client.ask(lambda: self._engine.scheduler.explain(request_id))
        if explanation is None:
            raise InvalidRequest(
                "request", request_id, "is not known: not submitted yet, or over for long", "Ask while it is recent"
            )
        mesh = self._engine.mesh
        if mesh is None:
            return explanation
        share = describe_share(self.stats().as_dict())
        devices = f"its steps run on {mesh.named}{f', with {share}' if share else ''}"
        return dataclasses.replace(explanation, text=f"{explanation.text}; {devices}")

    def allowed(self, request: Handle[Any] | Completion, *, at: int | None = None) -> AllowedTokens:
        """Return the tokens that a structured text's grammar allows after its first `at` tokens; None means all."""
        self._host.check()
        return allowed_tokens(self._engine, request, at)

    def check_integrity(self) -> None:
        """Raise AssertionError if pages or requests are unaccounted for; for tests, between requests."""
        limiter = self._host.limiter

        def check(dispatch: Dispatch) -> None:
            dispatch.engine.scheduler.check_integrity()
            alive = sum(len(mailbox.results) for mailbox in dispatch.mailboxes)
            assert len(dispatch.outputs) <= alive <= limiter.inside, "requests and places disagree"

        self._host.check()
        wait(self._host.call(check))

    # The cache and the weights.

    @property
    def cache(self) -> CacheView:
        """The prefix cache: `tree()`, `stats()`, `explain(prompt)`, `prune`, `clear`, snapshots, prefixes as files."""
        return CacheView(self._client)

    def save(self, name: str) -> Call[SaveReport]:
        """Await it to keep every cached page under `name`, for `open(..., restore=name)`; writes only new pages.

        A snapshot of other weights or of another configuration under this name stays beside it.
        """
        return Once(self._cache_writer.save, name, name="save")

    def pin(self, prompt: PromptLike, *, salt: str | None = None) -> int:
        """Keep the cached pages of a prompt until `unpin`. Return how many of its tokens that covers.

        With `salt`, the pages are those of requests with that salt.

        Only computed pages can be kept: `await session.generate(prompt, max_tokens=1)` first, if it is new.
        """
        return self._client.pin(prompt, salt)

    def unpin(self, prompt: PromptLike, *, salt: str | None = None) -> int:
        """Undo one `pin` with this `salt`. Return how many tokens are no longer kept."""
        return self._client.unpin(prompt, salt)

    def swap_weights(self, weights: Any) -> Call[None]:
        """Await it to go on with other weights of the same shapes; nothing is compiled.

        `weights` is a folder, a hub id, "tiny", a loaded model, an nnx module or state, or arrays by path. Requests
        that run keep the tokens they have and go on with the new weights; their pages are computed again, and the
        cache starts anew.
        """
        return Once(self._swap, weights, name="swap_weights")

    async def _swap(self, weights: Any) -> None:
        swap = self._engine.swap
        if swap is None:
            raise InvalidRequest("weights", weights, "can't be swapped in this session", "Make it with rekindle.open")
        await self._client.swap_weights(partial(swap, weights))

    # One step at a time.

    def paused(self) -> Paused[Self]:
        """Pause the session: in `async with session.paused():` (or `with`) no step runs but those of `step()`."""
        return Paused(self._client, self)

    def step(self) -> Call[StepReport | None]:
        """Await it to run exactly one step of a paused session; None if there was nothing to do."""
        return Once(self._step, name="step")

    def step_sync(self) -> StepReport | None:
        """Run `step` from code without an event loop."""
        return self.step().result_sync()

    async def _step(self) -> StepReport | None:
        from rekindle._src.session.stats import StepReport

        self._host.check()
        reply: OneShot[Stepped] = OneShot()
        stepped = await self._host.send(StepOnce(reply), reply).get()
        if stepped.result is None:
            return None
        return StepReport.of(stepped.result, stepped.events, self._client.text)

    # Its end.

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Close the session: requests may go on for `drain` seconds, then they end with `SessionClosed`.

        Closing it again is harmless. Returns when the device memory has been freed and the threads have ended, or
        after a few seconds if the device hangs.
        """
        if self._host.forked:
            return  # its threads are the parent's
        for server in self._servers:
            await server.aclose(drain=drain)
        for shared in self._client.shared:
            shared.close()
        if self.config.restore is not None and not self.closed:
            await self._cache_writer.finish()
        self._cache_writer.stop()
        self._host.close(drain)
        await self._host.ended.get()
        self._host.join(1.0)  # it has nothing left to do but return

    def close(self, *, drain: float = 0.0) -> None:
        """Run `aclose` from code without an event loop."""
        run_sync(self.aclose(drain=drain))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def sampling(self) -> Sampling:
        """The options of a request without options of its own: those of generation_config.json, or greedy."""
        return self._engine.sampling or Sampling()

    def __reduce__(self) -> NoReturn:
        raise NotPicklable("a session")

    def __repr__(self) -> str:
        sampling = "" if self._engine.sampling is None else f", samples with {describe(self._engine.sampling)}"
        devices = "" if self._engine.mesh is None else f" on {html.count(self._engine.mesh.size, 'device')}"
        name = f"{self.model or 'over given parts'}{devices}"
        return f"<rekindle.Session {name}{sampling}{', closed' if self.closed else ''}>"

    def _repr_html_(self) -> str:
        config = self.config
        return str(
            html.block(
                html.line(
                    "closed" if self.closed else "open",
                    f"weights: {self._engine.weights}" if self._engine.weights else f"{config.dtype} weights",
                    html.with_hint(f"up to {config.max_requests} requests at once", html.SLOTS),
                    f"{config.max_tokens_per_step} tokens a step",
                    f"{config.max_model_len} positions",
                    _kernels(),
                    "" if self._engine.mesh is None else str(self._engine.mesh),
                    ""
                    if self._engine.sampling is None
                    else f"samples with {describe(self._engine.sampling)}, by the checkpoint",
                ),
                *([] if self.closed else self.stats().shown()),
                title=f"rekindle session: {self.model or 'over given parts'}",
            )
        )


def _kernels() -> str:
    """Return the state of the native kernels; empty where there are none."""
    from rekindle_kernels import current_platform, kernel_being_compiled, unavailable_reason

    if current_platform() != "cpu":
        return ""
    if name := kernel_being_compiled():
        return f"compiling kernel {name}"
    reason = unavailable_reason()
    return "native kernels" if reason is None else f"no native kernels: {reason.partition(':')[0]}"
