"""The part of a session that answers over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rekindle._src.dispatch.host import Host
from rekindle._src.session.call import Call, Once

if TYPE_CHECKING:
    from rekindle._src.serve.server import Server


class Serving:
    """Servers beside the cells that use the session."""

    _host: Host
    _servers: list[Server]

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
        max_queued_tokens: int = 1 << 20,
        trust_request_chat_template: bool = False,
        adapter_loading: bool = False,
        metrics_names: Literal["rekindle", "vllm", "both"] = "rekindle",
    ) -> Call[Server]:
        """Await it to serve this session over HTTP as OpenAI's API, beside the cells that use it.

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
                "max_queued_tokens": max_queued_tokens,
                "trust_request_chat_template": trust_request_chat_template,
                "adapter_loading": adapter_loading,
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
