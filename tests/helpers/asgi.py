"""A client that calls an ASGI app in this process, on any event loop, and can go away in the middle of a stream."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import anyio


@dataclasses.dataclass
class Answer:
    """What came back, as far as it came."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json()["error"]
        return found

    @property
    def events(self) -> list[Any]:
        """The data of each event; [DONE] is the string itself."""
        blocks = [block for block in self.body.decode().split("\n\n") if block]
        lines = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
        return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]


async def send(
    app: Any, method: str, path: str, body: Any = None, *, raw: bytes | None = None,
    headers: Mapping[str, str] | None = None, leave: Callable[[Answer], bool] | None = None,
    leave_after: float | None = None,
    gone: anyio.Event | None = None,
    address: str = "127.0.0.1",
) -> Answer:  # fmt: skip
    """One request; the client goes away once `leave(answer)` is true, after some seconds, or when `gone` is set."""
    data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    given = {"content-type": "application/json", **(headers or {})}
    answer, gone = Answer(), gone or anyio.Event()
    sent = False
    query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": query[0], "raw_path": query[0].encode(), "query_string": query[2].encode(), "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": (address, 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def respond(message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        if gone.is_set():
            raise OSError("the client is gone")
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")
            answer.complete = not message.get("more_body", False)
        if leave is not None and leave(answer):
            gone.set()

    async def go() -> None:
        assert leave_after is not None
        await anyio.sleep(leave_after)
        gone.set()

    async with anyio.create_task_group() as group:
        if leave_after is not None:
            group.start_soon(go)
        await app(scope, receive, respond)
        group.cancel_scope.cancel()
    return answer


async def post(app: Any, path: str, body: Any = None, **options: Any) -> Answer:
    return await send(app, "POST", path, body, **options)


async def get(app: Any, path: str, **options: Any) -> Answer:
    return await send(app, "GET", path, **options)


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something has happened in another task or thread."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 (what it waits for has no event)
            await anyio.sleep(0.005)
