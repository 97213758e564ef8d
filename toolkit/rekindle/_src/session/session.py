"""The session: everything that a caller can do with an open model, apart from making requests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, Protocol, Self, TypeVar, Unpack, cast, overload

from rekindle._src.calls.call import Call, Once
from rekindle._src.calls.content import KeyedOptions
from rekindle._src.calls.handle import Handle
from rekindle._src.calls.prompts import PromptLike
from rekindle._src.capabilities import ENTRIES, capabilities_of
from rekindle._src.capabilities.pictures.request import PICTURES
from rekindle._src.core import words
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.contracts import ChatLike, DetokenizerLike, RunnerLike, SchedulerLike, TokenizerLike
from rekindle._src.core.mesh_shape import describe_share
from rekindle._src.core.options import refuse_keywords, takes_keywords
from rekindle._src.core.records import Completion, Status
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front, SessionService, StepOnce, StepOutcome
from rekindle._src.dispatch.engine import Engine
from rekindle._src.dispatch.host import Dispatch, Host, wait
from rekindle._src.dispatch.threads import OneShot, run_sync
from rekindle._src.evaluation.rollouts import RolloutRequests
from rekindle._src.kvcache import AnyCache
from rekindle._src.kvcache.writer import SaveReport
from rekindle._src.session import adapters, pausing
from rekindle._src.session.allowed import AllowedTokens, allowed_tokens
from rekindle._src.session.cache_view import CacheView
from rekindle._src.session.client import Client, enlist
from rekindle._src.session.open_model import OpenModel, with_source
from rekindle._src.session.pausing import PausedSession, SleepReport
from rekindle._src.session.views import Views, dashboard
from rekindle._src.text.detokenizers import real_detokenizer
from rekindle._src.text.generation_config import describe
from rekindle._src.views import html
from rekindle.errors import ConfigError, InvalidRequest, NotPicklable

if TYPE_CHECKING:
    import jax.typing
    from optax import GradientTransformation

    from rekindle._src.capabilities.gradients.request import Objective, ObjectiveFunction
    from rekindle._src.capabilities.tuning.request import LossName, Reward, VariantName
    from rekindle._src.core.captured import Captured
    from rekindle._src.core.taps import SteerLike
    from rekindle._src.evaluation.attribution import Attribution
    from rekindle._src.models.base import LoadedModel
    from rekindle._src.notebook.dashboard import Dashboard
    from rekindle._src.scheduling.sequence import Explanation
    from rekindle._src.serve.server import Server
    from rekindle._src.session.attributions import AttributionMethod
    from rekindle._src.session.gradients import Gradients
    from rekindle._src.session.stats import ProgramReport, SessionStats, StepReport
    from rekindle._src.session.tuning import Tuning


F = TypeVar("F", bound=Callable[..., None])


class RequestRecord(Protocol):
    """A handle, a completion, or the answer to a row: it knows the id of its request."""

    @property
    def id(self) -> str: ...


def _over_parts(construct: F) -> F:
    """Name `rekindle.open` to those who call the class with a model's name."""

    @functools.wraps(construct)
    def checked(session: Session, *parts: Any, **options: Any) -> None:
        if len(parts) + sum(name in options for name in ("scheduler", "runner", "tokenizer", "config")) < 4:
            model = parts[0] if parts else options.get("model", "tiny")
            fix = f"Write session = await rekindle.open({model!r}), or session = rekindle.open_sync({model!r})"
            raise ConfigError("model", model, "is opened by a function, not by the class Session", fix)
        construct(session, *parts, **options)

    return cast(F, checked)


class Session(OpenModel, RolloutRequests):
    """An open model. Make one with `rekindle.open` or `rekindle.open_sync`; close it with `aclose` or a `with` block.

    Its work happens in a thread of its own, so it can be used from any number of threads and event loops, asyncio or
    trio, at once. Sampling options are keyword arguments, or one `Sampling`, or both.
    """

    def __init__(
        self,
        scheduler: SchedulerLike,
        runner: RunnerLike,
        tokenizer: TokenizerLike,
        config: ResolvedConfig,
        *,
        detokenizer: Callable[[Sampling], DetokenizerLike] | None = None,
        vocab_size: int | None = None,
        chat: ChatLike | None = None,
        model: str = "",
    ) -> None:
        """Make a session over parts that exist already, such as fakes; `open` makes the real ones."""
        services: dict[SessionService[Any], Any] = {}
        for entry in ENTRIES:
            services |= entry.services(tokenizer, vocab_size, config)
        real: Any = tokenizer  # a fake one has what detokenizing asks for
        front = Front(
            Engine(scheduler, runner, config),
            tokenizer,
            real_detokenizer(real) if detokenizer is None else lambda sampling, visible: detokenizer(sampling),
            config,
            vocab_size if vocab_size is not None else tokenizer.vocab_size,
            chat,
            model,
            services=services,
        )
        host = Host(lambda: front, capabilities_of)
        host.start()
        self._attach(host, wait(host.opened))

    @classmethod
    def attached(cls, host: Host, front: Front) -> Self:
        """Return a session over a host that has already opened."""
        session = cls.__new__(cls)
        session._attach(host, front)
        return session

    def _attach(self, host: Host, front: Front) -> None:
        self._client = Client(host, front)
        self._host, self._front, self._engine = host, front, self._client.engine
        self._cache_writer = self._client.writer
        self._servers: list[Server] = []
        enlist(self)
        # The host knows nothing of the client, so that dropping the last reference to the session, its views and its
        # handles closes it.
        weakref.finalize(self._client, host.close).atexit = False

    @property
    def config(self) -> ResolvedConfig:
        """The options it was opened with, with every default resolved."""
        return self._front.config

    # Looking inside.

    def stats(self) -> SessionStats:
        """Return a snapshot of its numbers: queue, running requests, pages, hit rates, compilations, times."""
        from rekindle._src.session.stats import SessionStats  # a first token needs none of the reports

        limiter, engine, pictures = self._host.limiter, self._engine, PICTURES.of(self._front)

        def snapshot() -> SessionStats:
            scheduler: Any = engine.scheduler.statistics()
            runner: Any = engine.runner.statistics()
            return SessionStats(
                model=self._front.model,
                live=limiter.inside,
                places=limiter.places,
                waiting_for_a_place=limiter.waiting,
                paused=self._client.pauses > 0,
                scheduler=scheduler,
                runner=runner,
                mesh=engine.device.mesh,
                collective_seconds=engine.device.collective_seconds(runner.programs),
                pictures=None if pictures is None else pictures.statistics(),
                **engine.watchdog.figures()._asdict(),
            )

        return self._client.ask(snapshot)

    def watch(self) -> Dashboard:
        """Return a live dashboard: throughput, queue, batch over time, pages by tier. Show it at the end of a cell.

        Its `recorded()` is a figure of the run to scrub through, which a saved notebook keeps.
        """
        return dashboard(self._client, self)

    @property
    def weights(self) -> str:
        """The formats of its weights and the memory of each, in words: "4 bits 66 MB, float32 1 MB"."""
        return self._engine.device.weights or f"{self.config.dtype} weights"

    @property
    def view(self) -> Views:
        """Live views for a notebook: `session.view.stream(prompt)`, `session.view.chat()`, `session.view.tree()`."""
        return Views(self._client, self)

    def _explained_without(self, request: Any) -> Explanation | None:
        from rekindle._src.scheduling.sequence import beginning
        from rekindle._src.scheduling.timeline import Phase, PhaseKind, phases_of

        if isinstance(request, Completion):
            text = "has finished, and is over for long: these are its sums"
            length, phases = request.usage.prompt_tokens, phases_of(request.timings, request.usage)
            return beginning(request.id, Status.FINISHED, text, length, phases)
        if not isinstance(request, Handle) or (request.submitted_at is None and not request.done):
            return None
        phases = ()
        if request.submitted_at is not None and not request.done:
            phases = (Phase(PhaseKind.INTAKE, 0.0, time.perf_counter() - request.submitted_at),)
        text = "is being taken in" if request.error is None else f"ended before it was queued: {request.error}"
        return beginning(request.id, request.status, text, len(request.prompt_token_ids), phases)

    def programs(self) -> ProgramReport:
        """Return the compiled programs that are ready, and where each came from."""
        from rekindle._src.session.stats import ProgramReport

        self._host.check()
        return ProgramReport.of(self._engine.runner)

    def explain(self, request: RequestRecord | str) -> Explanation:
        """Explain a request (handle, completion, answer to a row, or id): print it for its timeline, with seconds and
        reasons.

        Its text says why it waits, was preempted, or hit or missed the cache; its `timeline` has the phases. It can
        run, or have ended in any way. Of requests that are over for long, a completion has the sums alone.
        """
        explanation: Explanation = self._explained(request, self._engine.explain)
        mesh, reasoning = self._engine.device.mesh, _describe_reasoning(request)
        devices = ""
        if mesh is not None:
            share = describe_share(self.stats().as_dict())
            devices = f"its steps run on {mesh.named}{f', with {share}' if share else ''}"
        text = "; ".join(filter(None, (explanation.text, reasoning, devices)))
        return dataclasses.replace(explanation, text=text)

    def allowed(self, request: Handle[object] | Completion, *, at: int | None = None) -> AllowedTokens:
        """Return the tokens that a structured text's grammar allows after its first `at` tokens; None means all."""
        self._host.check()
        return allowed_tokens(self._front, request, at)

    @contextlib.contextmanager
    def profile(self, folder: str | os.PathLike[str], *, python_calls: bool = False) -> Iterator[Path]:
        """Record the work of the device and the host within a `with` block, which may contain `await`.

        `xprof --logdir FOLDER` (`pip install xprof`) then shows programs, kernels and their parts, such as "attention"
        and "sample". Everything in this process is recorded, other sessions too. `python_calls` adds calls of Python
        functions, which slows the host down. Yields the folder.
        """
        import jax

        self._host.check()
        path = Path(folder).expanduser()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(python_calls)
        try:
            jax.profiler.start_trace(str(path), profiler_options=options)
        except RuntimeError as error:
            fix = "One is recorded at a time in a process: end that one first"
            raise InvalidRequest("folder", str(folder), f"no profile was begun: {error}", fix) from None
        try:
            yield path
        finally:
            jax.profiler.stop_trace()

    def check_integrity(self) -> None:
        """Raise AssertionError if pages or requests are unaccounted for; for tests, between requests."""
        limiter = self._host.limiter

        def check(dispatch: Dispatch) -> None:
            self._engine.scheduler.check_integrity()
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

        A snapshot of other weights, or of another configuration, under this name is kept as well.
        """
        return Once(self._client.save, name, name="save")

    @takes_keywords(KeyedOptions)
    def pin(
        self,
        prompt: PromptLike,
        **options: Unpack[KeyedOptions],
    ) -> int:
        """Keep the cached pages of a prompt until `unpin`. Return how many of its tokens that covers.

        With `images`, `salt` or `adapter`, the pages belong to requests with these options.

        Only computed pages can be kept: `await session.generate(prompt, max_tokens=1)` first, if it is new.
        """
        refuse_keywords(options, Session.pin)
        return self._client.pin(prompt, **options)

    @takes_keywords(KeyedOptions)
    def unpin(
        self,
        prompt: PromptLike,
        **options: Unpack[KeyedOptions],
    ) -> int:
        """Undo one `pin` with these options. Return how many tokens are no longer kept."""
        refuse_keywords(options, Session.unpin)
        return self._client.unpin(prompt, **options)

    def swap_weights(self, weights: object, *, cache: Literal["drop", "keep"] = "drop") -> Call[int]:
        """Await it to go on with other weights of the same shapes; nothing is compiled.

        `weights` is a folder, a hub id, "tiny", a loaded model, an nnx module or state, or arrays by path. JAX arrays
        on the session's device are used as they are, without a copy; don't donate them to a program before the next
        swap. Requests that run keep the tokens they have and go on with the new weights; their pages are computed
        again. An adapter that the session was opened to `merge` is added to them, too.

        The cache starts anew. With cache="keep" its pages go to host memory under the old weights' name, and are there
        again when these come back with "keep": the same folder, loaded model or arrays, as for a policy and its
        reference by turns. Pages of other weights are never used. Of the last four weights they are kept, as far as
        `host_memory` has room.

        Returns the new version, the number of swaps so far. `weights_versions` of a completion has each token's
        version.
        """
        if cache not in ("drop", "keep"):
            raise InvalidRequest("cache", cache, "is not known", "Use 'drop' or 'keep'")
        return Once(self._swap, weights, cache == "keep", name="swap_weights")

    async def _swap(self, weights: Any, keep: bool) -> int:
        device, client = self._engine.device, self._client
        if not device.has_weights:
            raise InvalidRequest("weights", weights, "can't be swapped in this session", "Make it with rekindle.open")
        if keep:
            tree = self._engine.scheduler.cache
            if not device.is_alone or not isinstance(tree, AnyCache) or not self.config.host_memory:
                problem = "needs a prefix cache with host memory, in a session of one process"
                raise InvalidRequest("cache", "keep", problem, "Open it with host_memory, or use 'drop'")
            pinned = client.ask(lambda: sum(one.pinned_pages for one in tree.trees))
            if pinned:
                raise InvalidRequest("cache", "keep", f"can't move {pinned} pinned pages", "Unpin them first")
        return await client.swap_weights(partial(device.swap, weights), device.set_aside if keep else None)

    def trainable(
        self, *unnamed: Never, **unknown: Never
    ) -> tuple[Callable[[Mapping[str, jax.Array], jax.typing.ArrayLike], jax.Array], dict[str, jax.Array]]:
        """Return a function for a trainer, and the parameters that it takes: a copy of the session's weights by path.

            logits, params = session.trainable()

            @jax.jit
            def step(params, tokens):
                loss = lambda params: cross_entropy(logits(params, tokens[:, :-1]), tokens[:, 1:])
                return jax.tree.map(lambda old, change: old - 1e-3 * change, params, jax.grad(loss)(params))

            await session.swap_weights(step(params, tokens))

        The function computes the logits [B, T, V] of tokens [B, T], in float32, and is pure: call it inside `jax.jit`.
        It keeps nothing of the session, which may go on, sleep or close meanwhile. Padding at the end of a line
        changes nothing before it. Parameters are arrays of the session's `dtype` with the paths that `swap_weights`
        takes. You may donate them to your own programs until you pass them to `swap_weights`: from then on they are
        the session's, and another call of `trainable` returns a new copy.

        Integer weights, several devices, and an adapter that the session was opened to `merge` are refused.
        """
        options: dict[str, object] = dict(unknown)
        if unnamed:
            options["option"] = unnamed[0]
        for name, value in options.items():
            fix = 'Leave it out: it gives all weights. await session.tune("mine", data, rank=8) trains an adapter'
            raise InvalidRequest(name, value, "is not an option of trainable", fix)
        device, client = self._engine.device, self._client
        client.host.check()
        for refused, problem, fix in (
            (not device.has_weights, "has no weights of its own", "Open another session with rekindle.open"),
            (self._client.asleep, "sleeps", "Await session.wake() first"),
            (device.mesh is not None, "has its weights on several devices", "Open one without a mesh"),
            (device.is_merged, "adds an adapter to all weights that it gets", "Open one without merge"),
        ):
            if refused:
                raise InvalidRequest("session", repr(self), problem, fix)
        from rekindle._src.models.plain import trainable

        try:
            return run_sync(client.exclusive(lambda: trainable(device.model), lambda _: None))
        except ValueError as error:
            fix = "Open it without quantize, or a file of integers as floats: rekindle export FILE FOLDER --type f32"
            raise InvalidRequest("session", repr(self), f"can't be trained: {error}", fix) from None

    @overload
    def gradients(  # type: ignore[overload-overlap]
        self,
        prompt: PromptLike,
        *,
        of: Objective | ObjectiveFunction,
        at: Mapping[str, object],
        steer: SteerLike | Sequence[SteerLike] = (),
        patch: Captured | None = None,
        adapter: str | Mapping[str, float] | None = None,
        images: object = None,
    ) -> Call[Gradients]: ...
    @overload
    def gradients(
        self,
        prompt: Sequence[PromptLike],
        *,
        of: Objective | ObjectiveFunction | Sequence[Objective | ObjectiveFunction],
        at: Mapping[str, object],
        steer: SteerLike | Sequence[SteerLike] = (),
        patch: Captured | None = None,
        adapter: str | Mapping[str, float] | None = None,
    ) -> Call[list[Gradients]]: ...
    def gradients(
        self,
        prompt: PromptLike | Sequence[PromptLike],
        *,
        of: Objective | ObjectiveFunction | Sequence[Objective | ObjectiveFunction],
        at: Mapping[str, object],
        steer: SteerLike | Sequence[SteerLike] = (),
        patch: Captured | None = None,
        adapter: str | Mapping[str, float] | None = None,
        images: object = None,
        **unknown: Never,
    ) -> Call[Any]:
        """Await it for the gradients of a number at sites inside the model, a line for each token of the prompt.

            g = await session.gradients(prompt, of=rekindle.logprob(" Paris"), at={"residual": [4, 8]})
            g["residual", 8]    # float32 [tokens, hidden]

        `of` is `rekindle.logprob(token)`, `rekindle.logit_difference(token, other)`, or a pure JAX function of the
        logits [tokens, vocabulary] and of the arrays at the sites, by the keys of the result, that returns one float.
        `at` maps sites to layers as in `Capture`. It has "embedding" in addition, `{"embedding": True}`, and "heads",
        the output of each head of attention. The gradient is that of zeros added at each site. `steer`, `patch`,
        `adapter` and, for one prompt, `images` are the options of `generate`. A program serves all adapters of one
        shape; of pictures, "embedding" is the encoder's rows.

        A list of prompts returns a list of gradients. Prompts of one program's length are computed together, and `of`
        is one number for all, or a list with one for each.

        The whole prompt is computed in float32 with the session's weights, whatever they are stored in: 8 and 4 bits
        are widened matrix by matrix, and rows are not rounded. Layers are computed again in the backward pass, which
        bounds the memory. It runs between two steps, so that streams pause for its time. A program serves prompts up
        to its length, a power of two, and is stored; a function has one for each length.
        """
        from rekindle._src.session.gradients import check_options, gradients  # a first text needs none of it

        check_options(unknown, "gradients")
        return Once(gradients, self._client, prompt, of, at, steer, patch, adapter, images, name="gradients")

    def tune(
        self,
        name: str,
        data: Sequence[object],
        *,
        loss: LossName = "next",
        reward: Reward | None = None,
        variant: VariantName = "dapo",
        rank: int = 16,
        alpha: float | None = None,
        targets: str | Sequence[str] = "all",
        steps: int = 200,
        batch: int = 8,
        learning_rate: float | None = None,
        max_length: int = 1024,
        beta: float | None = None,
        clip: float = 0.2,
        generations: int = 8,
        max_tokens: int = 128,
        seed: int = 0,
        probe: str | None = None,
        every: int = 20,
        optimizer: GradientTransformation | None = None,
        **unknown: Never,
    ) -> Tuning:
        """Train an adapter (LoRA) of the open weights and load it as `name`; it begins at once, in a thread of its own.

            run = session.tune("mine", [("The sky is", " red."), …], steps=200, probe="Grass is")
            report = await run                       # run.history meanwhile; run.cancel() keeps the last whole step
            await session.generate("Grass is", adapter="mine")

        `data` has texts, which are learned as a whole, (prompt, completion) pairs, of which completions are learned,
        or chats, of which the assistant's answers are, as the model's template writes them. With loss="dpo" or "ipo"
        it has (prompt, chosen, rejected), and with loss="grpo" prompts: `reward(prompt, text)` returns a number for
        each of `generations` completions of up to `max_tokens` tokens. A prompt is a text or a chat.

        `loss` is the mean over learned tokens. "dpo" sums log-probabilities of a completion and "ipo" averages them;
        `beta` (0.1) is the weight of the model without the adapter. For "grpo", `variant` says what the sum over tokens
        is divided by: all tokens of the step ("dapo"), each completion's tokens and then completions ("grpo"), or
        completions times `max_tokens` ("dr_grpo", which does not divide rewards by their deviation either). Ratios
        to the drawn log-probabilities are clipped at 1 ± `clip`, and `beta` (0) is the weight of k3.

        `targets` are "all" linear layers of the blocks but experts and routers, or modules' names such as
        ["q_proj", "v_proj"]. `alpha` divided by `rank` is the adapter's scale, by default 1. A step sees `batch`
        examples; examples of more than `max_length` tokens are refused. The learning rate rises for a tenth of the
        steps to `learning_rate` (next: 2e-4, dpo and ipo: 2e-5, grpo: 1e-4) and falls to 0 as a cosine; gradients are
        cut to a length of 1, and Adam takes the step, unless `optimizer` is one of Optax, for one array of all numbers.

        Weights stay as the session holds them, in 16, 8 or 4 bits, and are widened matrix by matrix; the adapter is in
        float32. As many layers as there is memory for, up to 512 MiB, keep the results of products for the backward
        pass, where the others are computed again. The device works for the training between two steps, a tenth of a
        second at a time, so that streams go on. Each `every` steps the adapter is swapped in under its name, the greedy
        continuation of `probe` is added to `run.probes`, and the training is kept: called with the same name, data and
        options, it goes on there after a kernel was restarted or the training cancelled. `probe`, `every`, `reward` and
        `optimizer` may be others then.
        """
        options = dict(locals())
        for other in ("self", "name", "data", "unknown"):
            del options[other]
        from rekindle._src.capabilities.tuning.request import FOREIGN  # a first text needs none of it
        from rekindle._src.session.tuning import tuning

        refuse_keywords(unknown, Session.tune, FOREIGN)
        return tuning(self._client, self, name, data, options)

    def attribute(
        self,
        prompt: PromptLike,
        *,
        of: Objective | ObjectiveFunction,
        method: AttributionMethod = "gradient_x_input",
        steps: int | None = None,
        baseline: str | int | None = None,
        source: PromptLike | None = None,
        at: Mapping[str, object] | None = None,
        exact: int | Literal["all"] = 0,
        edges: bool = False,
        steer: SteerLike | Sequence[SteerLike] = (),
        patch: Captured | None = None,
        adapter: str | Mapping[str, float] | None = None,
        **unknown: Never,
    ) -> Call[Attribution]:
        """Await it for how much each token, and each node inside the model, adds to a number after a prompt.

            a = await session.attribute(prompt, of=rekindle.logprob(" Paris"))
            a.scores            # float32 [tokens]: of each token's embedding
            a["heads", 3]       # float32 [tokens, heads]: of each head's output

        `of`, `steer`, `patch` and `adapter` are as in `gradients`. `at` names the nodes' sites and layers, as there; by
        default they are all heads and MLPs, and embeddings always are. A node's score is the product of a gradient and
        a change of its array:

        method              | gradient                                  | change
        --------------------|-------------------------------------------|---------------------------------------------
        "gradient_x_input"  | at the prompt                             | from zeros to the array
        "integrated"        | its mean over `steps` (32) places between | from the array of the `baseline` token's
                            | baseline and prompt (Gauss–Legendre)      | embeddings to the prompt's
        "patching"          | at the prompt                             | from the prompt's array to that of `source`
        "atp_star"          | the same, layer by layer dropped (AtP*)   | the same; queries and keys through the softmax

        Of "integrated", `convergence` is the sum of the tokens' scores less the change of the number. `baseline` is by
        default the token that ends a text; "zeros" takes embeddings of zeros.

        Patching estimates the change of the number if the node's array of `source`, a prompt of as many tokens, is put
        in place of the prompt's: above 0 if that raises it. With a corrupt prompt and a clean source that is denoising,
        and noising the other way round. With `steps` its gradient is the mean over the path to the source. The `exact`
        strongest nodes, or "all", are really patched, one at a time: `a.patched` has both numbers.

        With `edges`, patching also scores each path from one node to another: `a.edges` has a line for what each head
        and MLP writes into the residual stream, and a column for each query, key, value and MLP that reads it, summed
        over positions. Its `exact` strongest are patched, too: `a.edges.strongest()`.
        """
        from rekindle._src.session.attributions import AttributionOptions, attribute  # a first text needs none of it
        from rekindle._src.session.gradients import check_options

        check_options(unknown, "attribute")
        options = AttributionOptions(of, method, steps, baseline, source, at, exact, edges, steer, patch, adapter)
        return Once(attribute, self._client, prompt, options, name="attribute")

    # Adapters, and sleep.

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may use."""
        return adapters.names(self._client)

    @with_source
    def load_adapter(self, name: str, source: object, *, alpha: float | None = None) -> Call[None]:
        """Await it to load an adapter (LoRA) under a name, for `generate(…, adapter=name)`; nothing is compiled.

        `source` is a PEFT folder, a GGUF file of llama.cpp, or a trainer's arrays: by PEFT's names, or an nnx state
        with `lora_a` and `lora_b` at paths of the model such as `layers.0.attention.qkv` [in, rank] and [rank, out],
        or at those of `trainable()`, which end in `.weight`: `params[path] + lora_a @ lora_b` is the merged weight.
        `alpha` divided by the rank is then its scale, by default 1. A name that is in use means the new weights from
        now on; requests that run keep the old ones.
        """
        return Once(adapters.load, self._client, name, source, alpha, name="load_adapter")

    def save_adapter(self, name: str, folder: str | Path) -> Call[None]:
        """Await it to write an adapter that was loaded, such as a trainer's arrays, as a new folder of PEFT."""
        return Once(adapters.save, self._client, name, folder, name="save_adapter")

    def unload_adapter(self, name: str) -> Call[None]:
        """Await it to forget an adapter and its cached pages. Requests that run with it go on."""
        return Once(adapters.unload, self._client, name, name="unload_adapter")

    @property
    def asleep(self) -> bool:
        """True between `sleep` and `wake`."""
        return self._client.asleep

    def sleep(
        self, *, weights: Literal["host", "drop"] = "host", until: Literal["wake", "request"] = "wake"
    ) -> Call[SleepReport]:
        """Await it to give the device's memory back until `wake`, so that a trainer can have it. Programs stay.

        Weights go to host memory, or are dropped to be read again ("drop", for a folder's weights). Cached pages go to
        the tiers below the device if there are any, and are forgotten otherwise. Requests that run or arrive wait for
        `wake` and go on then with the tokens they have; with until="request", the first one that arrives wakes the
        session. Weights that are the caller's own arrays are let go; they are freed when the caller drops them. The
        result says how much was freed.
        """
        if weights not in ("host", "drop"):
            raise InvalidRequest("weights", weights, "is not known", "Use one of 'host', 'drop'")
        if until not in ("wake", "request"):
            raise InvalidRequest("until", until, "is not known", "Use one of 'wake', 'request'")
        on_request = pausing.FirstRequest(self._client) if until == "request" else None
        return Once(pausing.sleep, self._client, repr(self), weights == "drop", on_request, name="sleep")

    def wake(self, weights: object = None) -> Call[float]:
        """Await it to go on after `sleep`; the result is how many seconds that took.

        With `weights`, in any form that `swap_weights` takes, the session goes on with these, and the old ones are not
        brought back.
        """
        return Once(pausing.wake, self._client, repr(self), weights, name="wake")

    # One step at a time.

    def paused(self) -> PausedSession[Self]:
        """Pause the session: in `async with session.paused():` (or `with`) steps run only by calling `step()`."""
        return PausedSession(self._client, self)

    def step(self) -> Call[StepReport | None]:
        """Await it to run exactly one step of a paused session; None if there was nothing to do."""
        return Once(self._step, name="step")

    def step_sync(self) -> StepReport | None:
        """Run `step` from code without an event loop."""
        return self.step().result_sync()

    async def _step(self) -> StepReport | None:
        from rekindle._src.session.stats import StepReport

        self._host.check()
        reply: OneShot[StepOutcome] = OneShot()
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
        await super().aclose(drain=drain)

    async def _before_the_end(self) -> None:
        for shared in self._client.shared:
            shared.close()
        if not self.closed:
            await self._client.finish_saving()
        self._cache_writer.stop()

    def __reduce__(self) -> NoReturn:
        raise NotPicklable("a session")

    def __repr__(self) -> str:
        mesh = self._engine.device.mesh
        sampling = "" if self._front.sampling is None else f", samples with {describe(self._front.sampling)}"
        devices = "" if mesh is None else f" on {words.count(mesh.size, 'device')}"
        name = f"{self.model or 'over given parts'}{devices}"
        return f"<rekindle.Session {name}{sampling}{', closed' if self.closed else ''}>"

    def _repr_html_(self) -> str:
        config, device = self.config, self._engine.device
        sampling = "" if self._front.sampling is None else f"{describe(self._front.sampling)}, by the checkpoint"
        limits = {
            html.with_hint("requests at once", html.SLOTS): config.max_requests,
            "tokens a step": config.max_tokens_per_step,
            "positions": config.max_model_len,
            "weights": device.weights,
            "kernels": _kernels(),
            "devices": "" if device.mesh is None else str(device.mesh),
            "samples with": sampling,
            "chats with": describe(self.chat_sampling) if self.chat_sampling != self.sampling else "",
        }
        opened = html.details("how it was opened", html.pairs({name: value for name, value in limits.items() if value}))
        stats = None if self.closed else self.stats()
        figures = {} if stats is None else stats.as_dict()
        state = html.line(
            "closed" if self.closed else "open",
            f"weights: {self.weights}" if device.weights else self.weights,
            "" if stats is None else f"{words.count(figures.get('compilations', 0), 'program')} compiled",
        )
        parts = [] if stats is None else stats.shown()
        if stats is not None and not figures.get("steps"):
            calls = [call for call in _FIRST if self.chat_template is not None or call is not _CHAT]
            parts.insert(0, html.table(["nothing has run yet", ""], calls))
        return str(html.block(state, *parts, opened, title=f"rekindle session: {self.model or 'over given parts'}"))


_CHAT = html.Markup("<code>session.view.chat()</code>"), "a conversation in the notebook"
_FIRST = [
    (html.Markup('<code>await session.generate("Once upon a time")</code>'), "a text"),
    _CHAT,
    (html.Markup("<code>session.watch()</code>"), "the engine at work"),
]
"""The hint of a session that has done nothing yet: a call, and what it returns."""


def client_of(session: Session) -> Client:
    """Return the access to an open session that the rest of the toolkit has, such as the replicas of a fleet."""
    return session._client


def weights_of(session: Session) -> LoadedModel:
    """Return the weights that an open session computes with. Raise `InvalidRequest` if it has none now."""
    device = session._client.engine.device
    if not device.has_weights or session.asleep:
        raise InvalidRequest("session", repr(session), "has no weights of its own now", "Use one that is awake")
    model: LoadedModel = device.model
    return model


def _kernels() -> str:
    """Return the state of the native kernels; empty where there are none."""
    from rekindle_kernels import current_platform, kernel_being_compiled, unavailable_reason

    if current_platform() != "cpu":
        return ""
    if name := kernel_being_compiled():
        return f"compiling kernel {name}"
    reason = unavailable_reason()
    return "native kernels" if reason is None else f"no native kernels: {reason.partition(':')[0]}"


# Not as a decorator: the first Tab in a notebook would read all files that its type comes from.
Session.__init__ = _over_parts(Session.__init__)  # type: ignore[method-assign]


def _describe_reasoning(request: object) -> str:
    """Describe how long a request reasoned; empty if it did not, or has not ended."""
    if isinstance(request, Handle):
        request = request.so_far() if request.done else None
    if not isinstance(request, Completion) or not request.usage.reasoning_tokens:
        return ""
    tokens = words.count(request.usage.reasoning_tokens, "token")
    return f"it reasoned for {words.seconds(request.timings.reasoning)}, {tokens}"
