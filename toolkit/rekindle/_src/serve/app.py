"""The ASGI app: routes, API keys, cross-origin rules, and models that are opened during its startup."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import anyio

from rekindle._src.serve import adapters, info
from rekindle._src.serve.anthropic import COUNT_TOKENS, MESSAGES, Anthropic, count_tokens, messages
from rekindle._src.serve.bodies import dumps, header
from rekindle._src.serve.chat import chat
from rekindle._src.serve.completions import EMBEDDINGS, completions, embeddings
from rekindle._src.serve.decisions import DECISIONS, RERANK, decisions, rerank
from rekindle._src.serve.errors import ApiError
from rekindle._src.serve.exchange import Dialect, Exchange, Handler, JsonEndpoint, OpenAI, Receive, Scope, Send, Service
from rekindle._src.serve.fields import Endpoint, document
from rekindle._src.serve.ledger import REQUEST_MEMORY
from rekindle._src.serve.life import Hosts, Life, check_bound, check_origins, check_size
from rekindle._src.serve.metrics import Names
from rekindle._src.serve.models import Models
from rekindle._src.serve.openai_fields import CHAT, COMPLETIONS
from rekindle._src.serve.page import WebPage
from rekindle._src.serve.responses import RESPONSES, Responses, responses
from rekindle.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from rekindle._src.serve.fetching import Fetcher

log = logging.getLogger("rekindle.server")
POSTS: tuple[tuple[Endpoint, Handler, Dialect], ...] = (
    (CHAT, chat, OpenAI()),
    (COMPLETIONS, completions, OpenAI()),
    (EMBEDDINGS, embeddings, OpenAI()),
    (DECISIONS, decisions, OpenAI()),
    (RERANK, rerank, OpenAI()),
    (RESPONSES, responses, Responses()),
    (MESSAGES, messages, Anthropic()),
    (COUNT_TOKENS, count_tokens, Anthropic()),
    (info.TOKENIZE, info.tokenize, OpenAI()),
    (info.DETOKENIZE, info.detokenize, OpenAI()),
    (info.ABORT, info.abort, OpenAI()),
    (info.LOAD_MODEL, info.load_model, OpenAI()),
    (info.UNLOAD_MODEL, info.unload_model, OpenAI()),
)
GETS: tuple[tuple[str, Handler, str], ...] = (
    ("/v1/models", info.list_models, "The models that are served"),
    ("/v1/models/{name}", info.one_model, "One model"),
    ("/models", info.list_models, "The same as /v1/models, as llama.cpp's router names it"),
    ("/tokenizer_info", info.tokenizer_info, "Special tokens and the chat template of the first model"),
    ("/health", info.health, "200 if every model answers"),
    ("/ping", info.health, "The same as /health"),
    ("/version", info.version, "The version of rekindle"),
    ("/metrics", info.metrics, "Figures for Prometheus"),
)

OPEN_PATHS = frozenset(("/health", "/ping", "/"))  # for load balancers, and the page that asks for a key


def app(
    session: object,
    *,
    name: str | None = None,
    api_key: str | Sequence[str] | None = None,
    strict: bool = False,
    body_limit: int = 32 << 20,
    request_memory: int = REQUEST_MEMORY,
    max_queued_tokens: int = 1 << 20,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    trust_request_chat_template: bool = False,
    adapter_loading: bool = False,
    allow_urls: bool = False,
    metrics_names: Names = "rekindle",
    opened: Callable[[str], object] | None = None,
    failed: Callable[[BaseException], object] | None = None,
) -> Starlette:
    """Return an ASGI app that serves a session, or several by name, as OpenAI's API. It closes none of them.

    A shelf is several by name; a request loads the model that it names.

    `session` may still be opening: /health and requests get 503 until it is open. Then the app calls `opened` with its
    name, or `failed` with the error, which is logged if there is no `failed`.

    Options:
        name: the model's name for clients; by default the last part of the name that it was opened with.
        api_key: one or more keys; a request must send one of them.
        strict: refuse unknown fields with 400; by default they are ignored with one line in the log.
        body_limit: the most bytes of a request.
        request_memory: the most bytes that all requests may take in memory, as they arrive, parsed and with their
            pictures; of one client, half of it. Beyond it, requests get 503.
        max_queued_tokens: the most prompt tokens that may wait; beyond it, requests get 429.
        cors_origins: origins whose web pages may use the server.
        allowed_hosts: names that the Host header may have, such as "llm.example.org", "*.example.org" or "*", in
            addition to addresses and localhost. By default any name is allowed, except in requests from this machine to
            a server without keys.
        trust_request_chat_template: let requests send a chat template, which is code.
        adapter_loading: let requests load adapters from folders of the server, and unload them:
            /v1/load_lora_adapter and /v1/unload_lora_adapter.
        allow_urls: fetch pictures that requests name by http or https URLs, from public addresses alone.
        metrics_names: "rekindle", "vllm" for the names that published dashboards read, or "both".
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtra("starlette", "serve") from error
    check_bound("body_limit", body_limit)
    check_bound("request_memory", request_memory)
    check_bound("max_queued_tokens", max_queued_tokens)
    check_origins(cors_origins)
    if metrics_names not in get_args(Names):
        raise ConfigError("metrics_names", metrics_names, "is not known", "Use 'rekindle', 'vllm' or 'both'")
    service = Service(
        Models(session, name),
        Life(max_queued_tokens=max_queued_tokens),
        strict=strict,
        body_limit=body_limit,
        request_memory=request_memory,
        trust_templates=trust_request_chat_template,
        metrics_names=metrics_names,
        hosts=Hosts(allowed_hosts),
        fetcher=_fetcher() if allow_urls else None,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            for served in service.models.by_name.values():
                if served.opening is not None:
                    group.start_soon(load, served)
            yield
            group.cancel_scope.cancel()

    async def load(served: Any) -> None:
        try:
            await served.load()
            if opened is not None:
                opened(served.name)
        except Exception as error:
            if failed is None:
                log.error("the model %r could not be opened: %s", served.name, error)
            else:
                failed(error)

    posts = (*POSTS, *adapters.LOADING) if adapter_loading else POSTS
    dialects = {endpoint.path: dialect for endpoint, _, dialect in posts}

    async def on_http_error(request: Any, error: Any) -> Any:
        async def respond(scope: Any, receive: Any, send: Any) -> None:
            path, status = scope["path"], error.status_code
            refused = info.not_found(path)
            if status != 404:
                method = "POST" if path in dialects else "GET"
                message = f"{scope['method']} is not possible for {path[:200]!r}. Use {method}"
                refused = ApiError(status, message, code="not_allowed")
            await Exchange(service, scope, send).fail(refused, OpenAI())
            service.metrics.http("other", status)

        return respond

    routes = [
        Route(endpoint.path, JsonEndpoint(service, endpoint, handler, dialect), methods=["POST"])
        for endpoint, handler, dialect in posts
    ]
    keys = ApiKeys(api_key)
    summaries = [(path, summary) for path, _, summary in GETS]
    description = document([endpoint for endpoint, _, _ in posts], summaries, keys=bool(keys))
    written: list[bytes] = []  # at the first request: writing it takes as long as hundreds of requests

    async def openapi(exchange: Exchange, fields: dict[str, Any]) -> None:
        if not written:
            written.append(dumps(description).encode())
        await exchange.reply_bytes(written[0], b"application/json")

    routes += [
        # A model's name may have slashes.
        Route(path.replace("{name}", "{name:path}"), info.Get(service, path, handler), methods=["GET"])
        for path, handler, _ in (*GETS, ("/openapi.json", openapi, ""))
    ]
    routes.append(Route("/", WebPage(service), methods=["GET"]))
    middleware = [Middleware(Guard, keys=keys, service=service, dialects=dialects)]
    if cors_origins:
        cors = {"allow_origins": list(cors_origins), "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, **cors))  # type: ignore[arg-type]
    handlers: Any = {HTTPException: on_http_error}
    starlette = Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)
    starlette.state.rekindle = service
    return starlette


def _fetcher() -> Fetcher:
    """Return the fetcher of pictures. Raises `MissingExtra`."""
    try:
        from rekindle._src.serve.fetching import Fetcher
    except ImportError as error:
        raise MissingExtra("h11", "serve") from error
    return Fetcher()


class ApiKeys:
    """The API keys of a server, compared in constant time. Without any, every request may pass."""

    def __init__(self, keys: str | Sequence[str] | None) -> None:
        entries = [keys] if isinstance(keys, str) else list(keys or ())
        for key in entries:
            if not isinstance(key, str) or not key or not key.isascii() or key != key.strip():
                raise ConfigError("api_key", "…", "is not a key", "Pass printable ASCII without spaces around it")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in entries]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, scope: Scope) -> bytes:
        """Return the digest of the sender's key, or b"" without keys. Raise `ApiError` (401) for a wrong key."""
        if not self._digests:
            return b""
        bearer = header(scope, b"authorization") or ""
        kind, _, token = bearer.partition(" ")
        key = token.strip() if kind.lower() == "bearer" else header(scope, b"x-api-key") or ""
        digest = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        match = b""
        for candidate in self._digests:  # compare with all, so that the time reveals nothing
            match = candidate if hmac.compare_digest(candidate, digest) else match
        if not match:
            raise ApiError(
                401, "the API key is missing or wrong. Send it as Authorization: Bearer … or x-api-key",
                type="authentication_error", code="invalid_api_key",
            )  # fmt: skip
        return match


class Guard:
    """ASGI middleware that passes requests with a valid key, bounded headers and an allowed host."""

    def __init__(self, app: object, keys: ApiKeys, service: Service, dialects: Mapping[str, Dialect]) -> None:
        self._app, self._keys, self._service, self._dialects = app, keys, service, dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_size(scope)
                self._service.hosts.check(scope, keyed=bool(self._keys))
                if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                    scope["rekindle.key"] = self._keys.owner(scope)
            except ApiError as refused:
                dialect = self._dialects.get(scope["path"], OpenAI())
                await Exchange(self._service, scope, send).fail(refused, dialect)
                # Clients can invent any number of paths.
                path = scope["path"] if scope["path"] in self._dialects else "other"
                self._service.metrics.http(path, refused.status)
                return
        await self._app(scope, receive, send)  # type: ignore[operator]
