"""The part that a session and a fleet share: requests, their model, servers over HTTP, and their end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, cast

from rekindle._src.calls.call import Call, Once
from rekindle._src.calls.embedding import EmbeddingMethods
from rekindle._src.calls.rows import RowMapping
from rekindle._src.capabilities.pictures.request import PICTURES
from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.foreign_calls import SESSION, ForeignClass, ForeignNames
from rekindle._src.core.pictures import PictureCost
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.threads import run_sync
from rekindle._src.evaluation.decision_requests import DecisionRequests
from rekindle._src.evaluation.scoring import ScoreRequests
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.serve.server import Server

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _named_as_called(kind: type) -> None:
    """Let Python's own errors name a session's calls as users write them: `score()`, not `ScoreRequests.score()`."""
    for owner in kind.__mro__:
        for name, entry in vars(owner).items():
            if inspect.isfunction(entry) and not name.startswith("_"):
                entry.__qualname__ = name


def with_source(load: F) -> F:
    """Ask for the source of an adapter that is only named, and for the name of one that only has a source."""

    @functools.wraps(load)
    def checked(model: OpenModel, *passed: object, **options: Any) -> Any:
        if len(passed) + ("name" in options) + ("source" in options) < 2:
            one = next(iter((*passed, *options.values())), "mine")
            named = isinstance(one, str) and "/" not in one
            call = f"{one!r}, folder" if named else '"mine", ' + (repr(one) if isinstance(one, str) else "source")
            fix = f"Write await session.load_adapter({call}): a folder of PEFT, a GGUF file or a trainer's arrays"
            raise InvalidRequest("source" if named else "name", None, "is missing", fix)
        return load(model, *passed, **options)

    return cast(F, checked)


class OpenModel(ForeignNames, RowMapping, EmbeddingMethods, ScoreRequests, DecisionRequests, metaclass=ForeignClass):
    """An open model: requests to it, its name and tokenizer, its end, and servers alongside the cells that use it.

    A session is one over an engine, a fleet one over its replicas.
    """

    _host: Host
    _front: Front
    _servers: list[Server]
    _foreign = SESSION

    if not TYPE_CHECKING:

        def __call__(self, *prompt: object, **options: object) -> NoReturn:
            raise TypeError(
                "a session is not called itself: write done = await session.generate(prompt), or "
                "reply = await session.chat(messages)"
            )

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer: `encode(text)` and `decode(ids)`."""
        return self._front.tokenizer

    @property
    def model(self) -> str:
        """The name or folder it was opened with."""
        return self._front.model

    @property
    def sampling(self) -> Sampling:
        """The options of a request without options of its own: taken from generation_config.json, or greedy."""
        return self._front.sampling or Sampling()

    @property
    def chat_sampling(self) -> Sampling:
        """The options of a chat without options of its own: taken from generation_config.json, or drawn at 0.8.

        They are greedy if the checkpoint turns sampling off, or with generation_config="greedy".
        """
        return self._front.chat_sampling or Sampling()

    @property
    def reads_pictures(self) -> bool:
        """True if a prompt may have pictures."""
        return PICTURES.of(self._front) is not None

    def picture_cost(self, width: int, height: int, *, field: str = "images") -> PictureCost:
        """Return the tokens that a picture of this size adds to its prompt, and the bytes of its encoded rows.

        Raises `InvalidRequest`, which names `field`, for a model of text alone and for a size that it can't read.
        """
        pictures = PICTURES.of(self._front)
        if pictures is None:
            fix = "Open a model that reads pictures"
            raise InvalidRequest(field, f"{width}×{height}", "can't be read by this model", fix)
        return pictures.cost(width, height, field)

    @property
    def compiling(self) -> str:
        """The program that its steps wait for now, in words; empty if they wait for none."""
        return self._front.program_wait.describe()

    @property
    def closed(self) -> bool:
        """True once it was closed; it takes no requests then."""
        return self._host.closing

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str | None = None,
        api_key: str | Sequence[str] | None = None,
        strict: bool = False,
        cors_origins: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        max_connections: int | None = None,
        body_limit: int = 32 << 20,
        request_memory: int = 1 << 30,
        max_queued_tokens: int = 1 << 20,
        trust_request_chat_template: bool = False,
        adapter_loading: bool = False,
        allow_urls: bool = False,
        metrics_names: Literal["rekindle", "vllm", "both"] = "rekindle",
    ) -> Call[Server]:
        """Await it to serve this session over HTTP as OpenAI's API, while cells go on using it.

        `port` 0 takes a free one; the result's `url` has it. `name` is the model's name, and `api_key` the key that
        requests have to send. Of `max_connections` three quarters may come from one address; by default there may be
        as many as the process has descriptors for. `rekindle.serve.app` explains the other options. Needs the extra
        `serve`.
        """
        return Once(
            self._serve,
            {
                "host": host,
                "port": port,
                "name": name,
                "api_key": api_key,
                "strict": strict,
                "cors_origins": cors_origins,
                "allowed_hosts": allowed_hosts,
                "max_connections": max_connections,
                "body_limit": body_limit,
                "request_memory": request_memory,
                "max_queued_tokens": max_queued_tokens,
                "trust_request_chat_template": trust_request_chat_template,
                "adapter_loading": adapter_loading,
                "allow_urls": allow_urls,
                "metrics_names": metrics_names,
            },
            name="serve",
        )

    async def _serve(self, options: Mapping[str, Any]) -> Server:
        from rekindle._src.serve.server import Server

        self._host.check()
        server = await Server(self, **options).start()
        self._servers.append(server)
        return server

    def _explained(self, request: Any, look: Callable[[str], T | None]) -> T:
        """Look up an explanation of a request, an id or an object with one, on the loop where `look` runs."""
        request_id = request if isinstance(request, str) else getattr(request, "id", None)
        request_id = getattr(request, "request_ids", (request_id,))[0]
        if not isinstance(request_id, str):
            raise InvalidRequest(
                "request",
                request,
                "is not a handle, a completion, the answer to a row, or an id",
                "Pass one of these; of several, explain(batch.handles[0]) or explain(completions[0])",
            )
        self._host.check()
        explanation = self._host.ask(lambda: look(request_id))
        if explanation is None:
            explanation = self._explained_without(request)
        if explanation is None:
            raise InvalidRequest(
                "request", request_id, "is not known: not submitted yet, or over for long", "Ask while it is recent"
            )
        return explanation

    def _explained_without(self, request: Any) -> Any:
        """Return the explanation that a handle or completion has itself; None if it has none."""
        return None

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Close it: requests may go on for `drain` seconds, then they end with `SessionClosed`."""
        if self._host.forked:
            return  # its threads are the parent's
        for server in self._servers:
            await server.aclose(drain=drain)
        await self._before_the_end()
        self._host.close(drain)
        await self._host.ended.get()
        self._host.join(1.0)  # it has nothing left to do but return

    async def _before_the_end(self) -> None:
        """Do the work that has to come before the requests end."""

    def close(self, *, drain: float = 0.0) -> None:
        """Call `aclose` from code without an event loop."""
        run_sync(self.aclose(drain=drain))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


_named_as_called(OpenModel)
