"""`rekindle.mcp_tools`: tools of a server as tools of a chat, the user's consent, and servers that behave badly."""

from __future__ import annotations

import contextlib
import gc
import gzip
import http.server
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pydantic
import pytest

import rekindle
from helpers.chatting import saying
from helpers.sessions import eventually, threads
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import ToolServerOffer, ToolServerTools
from rekindle.errors import InvalidRequest, ToolServerError

pytest.importorskip("mcp.server.mcpserver", reason="the extra `mcp`, version 2")
from mcp.client import streamable_http
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import ImageContent, TextContent

from rekindle._src.integrations.mcp import consent as consents
from rekindle._src.integrations.mcp import limits, tools, transports

anyio_test = pytest.mark.anyio
PIXEL = "iVBORw0KGgo="


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread, no program and no consent stay; servers of the library set up logging for the whole process."""
    root, before = logging.getLogger(), threads()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    consents.granted.clear()
    eventually(lambda: threads() <= before)


def calculator(seen: list[str] | None = None) -> MCPServer:
    server = MCPServer("calc", log_level="CRITICAL")
    ended = seen if seen is not None else []

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    async def wait() -> str:
        """Wait until it is cancelled."""
        try:
            ended.append("began")
            await anyio.sleep_forever()
        finally:
            ended.append("left")

    @server.tool()
    def picture() -> list[TextContent | ImageContent]:
        return [TextContent(type="text", text="Here:"), ImageContent(type="image", data=PIXEL, mime_type="image/png")]

    @server.tool()
    def long() -> str:
        return "x" * (limits.MOST_RESULT + 7)

    @server.tool()
    def broken() -> str:
        raise ValueError("no luck")

    return server


def yes(offer: ToolServerOffer) -> bool:
    return True


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def adder(prompt: str) -> str:
    """A model that adds by a tool, and then says what the tool said."""
    _, tool, result = prompt.rpartition("<|tool|>")
    return f"It is {result.removesuffix('<|assistant|>')}." if tool else called("calc_add", a=2, b=3)


@anyio_test
async def test_a_servers_tools_are_tools_of_a_chat() -> None:
    offers: list[ToolServerOffer] = []

    def consent(offer: ToolServerOffer) -> bool:
        offers.append(offer)
        return True

    with saying(adder) as session:
        async with rekindle.mcp_tools(calculator(), only=["add"], consent=consent) as opened:
            run = await session.chat("What is 2 + 3?", tools=opened, run_tools=True)
            assert run.content == "It is 5." and run.messages[2]["content"] == "5"
            assert "Add two numbers." in run.rounds[0].prompt and opened.names == ("calc_add",)
            chat = session.conversation(tools=[*opened], run_tools=True)
            assert (await chat.say("And again?")).content == "It is 5."
            assert isinstance(opened, ToolServerTools) and opened.server == "calc" and not opened.closed
            assert "Add two numbers." in opened._repr_html_()
        assert opened.closed and "closed" in repr(opened) and "closed" in opened._repr_html_()
        run = await session.chat("What is 2 + 3?", tools=opened, run_tools=True)
        assert "was disconnected" in run.messages[2]["content"]
    assert [offer.names for offer in offers] == [("calc_add",)]
    assert "calc_add: Add two numbers." in str(offers[0]) and "1 tool" in repr(offers[0])


def test_without_an_event_loop() -> None:
    with saying(adder) as session, rekindle.mcp_tools(calculator(), consent=yes).result_sync() as opened:
        assert session.chat("2 + 3?", tools=opened, run_tools=True).result_sync().content == "It is 5."
        assert len(opened) == 5 and opened[0].__name__ == "calc_add" and len(opened[1:3]) == 2


@anyio_test
async def test_results_are_text_and_bounded() -> None:
    async with rekindle.mcp_tools(calculator(), consent=yes, name="c") as opened:
        functions = dict(zip(opened.names, opened, strict=True))
        assert await functions["c_add"](a=2, b=3) == "5" and repr(functions["c_add"]) == "<RemoteTool c_add>"
        text = await functions["c_picture"]()
        assert text.startswith("Here:\n[image of 9 bytes, image/png: only text is passed on]")
        text = await functions["c_long"]()
        assert text.endswith("\n[7 more characters of the result are left out]")
        assert len(text) < limits.MOST_RESULT + 100
        for name, words in (("broken", "Error executing tool broken"), ("add", "Field required")):
            with pytest.raises(ToolServerError, match=words) as refused:
                await functions[f"c_{name}"]()
            assert (refused.value.server, refused.value.tool) == ("c", name)
            assert "Check its arguments" in str(refused.value)


@anyio_test
async def test_a_call_that_is_cancelled_is_cancelled_at_the_server() -> None:
    seen: list[str] = []
    async with rekindle.mcp_tools(calculator(seen), only=["wait", "add"], consent=yes) as opened:
        async with anyio.create_task_group() as group:
            group.start_soon(opened[0])
            await anyio.to_thread.run_sync(eventually, lambda: seen == ["began"])
            group.cancel_scope.cancel()
        await anyio.to_thread.run_sync(eventually, lambda: seen == ["began", "left"])
        assert await opened[1](a=1, b=1) == "2"


@anyio_test
async def test_closing_ends_calls_with_an_error() -> None:
    seen: list[str] = []
    opened = await rekindle.mcp_tools(calculator(seen), only=["wait"], consent=yes)
    errors: list[BaseException] = []

    async def wait() -> None:
        try:
            await opened[0]()
        except ToolServerError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.to_thread.run_sync(eventually, lambda: seen == ["began"])
        await opened.aclose()
    assert len(errors) == 1 and "was disconnected" in str(errors[0])


# Consent.


@anyio_test
async def test_nobody_to_ask_means_no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ToolServerError, match=r"nobody to ask\. Pass consent=function"):
        await rekindle.mcp_tools(calculator())


@anyio_test
@pytest.mark.parametrize("answer", [False, None, 1, "yes"])
async def test_anything_but_true_declines(answer: Any) -> None:
    with pytest.raises(ToolServerError, match="it was declined"):
        await rekindle.mcp_tools(calculator(), consent=lambda offer: answer)


@anyio_test
async def test_consent_may_be_async() -> None:
    async def consent(offer: ToolServerOffer) -> bool:
        await anyio.lowlevel.checkpoint()
        return offer.server == "calc"

    async with rekindle.mcp_tools(calculator(), consent=consent) as opened:
        assert len(opened) == 5
    with pytest.raises(InvalidRequest, match="is async"):
        await anyio.to_thread.run_sync(rekindle.mcp_tools(calculator(), consent=consent).result_sync)


@anyio_test
async def test_a_yes_in_the_terminal_holds_for_these_tools_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    answers, asked = ["", "n", "Y", "y"], list[str]()

    def typed(question: str) -> str:
        asked.append(question)
        return answers.pop(0)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    for _ in range(2):
        with pytest.raises(ToolServerError, match="declined"):
            await rekindle.mcp_tools(calculator(), only=["add"])
    assert "The tool server calc (calc, in this process) offers 1 tool:" in capsys.readouterr().out
    for _ in range(2):
        async with rekindle.mcp_tools(calculator(), only=["add"]) as opened:
            assert len(opened) == 1
    assert len(asked) == 3 and "[y/N]" in asked[0], "the same tools are asked for once"
    async with rekindle.mcp_tools(calculator()) as opened:
        assert len(opened) == 5
    assert len(asked) == 4


@pytest.mark.thorough
@pytest.mark.parametrize(("typed", "said"), [("y", "5"), ("", "declined"), (None, "nobody to ask")])
def test_a_notebook_asks_below_the_cell(typed: str | None, said: str) -> None:
    from jupyter_client.manager import start_new_kernel

    code = (
        "import rekindle\nfrom mcp.server import MCPServer\nserver = MCPServer('calc')\n"
        "@server.tool()\ndef add(a: int, b: int) -> int:\n    'Adds.'\n    return a + b\n"
        "async with rekindle.mcp_tools(server) as tools:\n    print('got', await tools[0](a=2, b=3))\n"
    )
    manager, client = start_new_kernel(kernel_name="python3")
    texts: list[str] = []

    def show(message: dict[str, Any]) -> None:
        content = message["content"]
        texts.append(str(content.get("data") or content.get("text") or content.get("traceback") or ""))

    try:
        client.execute_interactive(
            code, allow_stdin=typed is not None, stdin_hook=lambda _: client.input(typed or ""), output_hook=show,
            timeout=120,
        )  # fmt: skip
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    out = "\n".join(texts)
    assert "calc_add" in out and "Adds." in out and said in out
    assert ("got 5" in out) == (typed == "y")


# Arguments.


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"server": 3}, "server"), ({"server": "uvx mcp-server-time"}, "server"), ({"server": []}, "server"),
        ({"server": ["a", 3]}, "server"), ({"server": ["a\0b"]}, "server"), ({"server": "http://[::1"}, "server"),
        ({"server": {"command": "a", "port": 3}}, "server"), ({"server": {"args": ["a"]}}, "server"),
        ({"server": {"command": "a", "args": "b"}}, "server.args"),
        ({"server": {"command": "a", "cwd": 3}}, "server.cwd"),
        ({"server": {"command": "a", "env": {"A": 1}}}, "server.env"),
        ({"server": {"url": "http://a", "headers": ["a"]}}, "server.headers"),
        ({"name": "a b"}, "name"), ({"name": ""}, "name"), ({"name": "a" * 33}, "name"), ({"only": "add"}, "only"),
        ({"only": [1]}, "only"), ({"consent": True}, "consent"), ({"timeout": 0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"), ({"timeout": True}, "timeout"), ({"mode": "old"}, "mode"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_started(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rekindle.mcp_tools(**{"server": ["true"], **given})
    assert refused.value.field == field


def test_secrets_of_a_server_are_not_shown() -> None:
    target = transports.target_of({"url": "https://me:pass@host:8443/mcp?key=secret", "headers": {"x": "secret"}})
    assert target.shown == "https://host:8443/mcp"
    assert transports.target_of({"command": "run", "args": ["it"], "env": {"KEY": "secret"}}).shown == "run it"
    command = ["run", "--api-key", "secret", "--token=secret", "MY_KEY=secret", "--port", "80", "file"]
    assert transports.target_of(command).shown == "run --api-key … --token=… MY_KEY=… --port 80 file"
    for wrong in ("wss://me:secret@host/?key=secret", ["run", "secret", 5]):
        with pytest.raises(InvalidRequest) as raised:
            transports.target_of(wrong)
        assert "secret" not in str(raised.value)


def test_another_folder_or_key_is_another_server() -> None:
    """A yes to one does not hold for another, whatever is shown of them."""
    entries: list[Any] = [
        ["run"], {"command": "run", "cwd": "/"},
        {"command": "run", "env": {"A": "1"}}, {"command": "run", "env": {"A": "2"}},
        "https://host/mcp", "https://host/mcp?user=b", {"url": "https://host/mcp", "headers": {"x": "1"}},
    ]  # fmt: skip
    targets = [transports.target_of(entry) for entry in entries]
    assert {target.shown for target in targets} == {"run", "https://host/mcp"}
    digests = {ToolServerOffer("s", one.shown, (), one.identity).digest() for one in targets}
    assert len(digests) == len(entries)


def test_the_end_of_a_long_description_is_said_to_be_missing() -> None:
    tool = {"function": {"name": "s_go", "description": "x" * 1_300}}
    assert "(1,000 more characters)" in str(ToolServerOffer("s", "run", (tool,)))


@anyio_test
async def test_tools_in_a_list_keep_the_connection() -> None:
    tools = [*await rekindle.mcp_tools(calculator(), only=["add"], consent=yes)]
    gc.collect()
    assert await tools[0](a=2, b=3) == "5"


@anyio_test
async def test_unknown_tools_are_told_the_others() -> None:
    with pytest.raises(InvalidRequest, match=r"is no tool of calc\. Its tools are: add, wait, picture, long, broken"):
        await rekindle.mcp_tools(calculator(), only=["ad"], consent=yes)


# Servers that behave badly: programs that answer as `ANSWERS` says.

PROGRAM = """
import json, sys, time
def send(number, result):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}) + "\\n"); sys.stdout.flush()
TOOL = {"name": "go", "description": "Goes.", "inputSchema": {"type": "object", "properties": {}}}
def tools(): return [TOOL]
def answer(number): send(number, {"content": [{"type": "text", "text": "gone"}]})
ANSWERS
for line in sys.stdin:
    message = json.loads(line)
    number, method = message.get("id"), message["method"]
    if method == "initialize":
        send(number, {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                      "serverInfo": {"name": "a \\x1b[31mbad\\u202e one", "version": "1"}})
    elif method == "tools/list":
        send(number, {"tools": tools()})
    elif method == "tools/call":
        answer(number)
    elif number is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no"}}), flush=True)
"""


def program(answers: str) -> list[str]:
    return [sys.executable, "-S", "-c", PROGRAM.replace("ANSWERS", answers)]


@anyio_test
async def test_a_program_speaks_on_its_pipes_and_ends_with_the_block(tmp_path: Any) -> None:
    place = tmp_path / "pids"
    answers = (
        "import os, subprocess\nprint('no message'); print('[1, 2]')\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(place)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')"
    )
    async with rekindle.mcp_tools(program(answers), consent=yes) as opened:
        assert opened.names == ("a___31mbad__one_go",)
        assert await opened[0]() == "gone"
        pids = [int(word) for word in place.read_text().split()]
        assert all(map(alive, pids))
    assert not alive(pids[0])
    await anyio.to_thread.run_sync(eventually, lambda: not alive(pids[1]))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@anyio_test
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("def answer(number): time.sleep(1000)", "did not answer within 0.5 s. Pass a larger timeout"),
        ("def answer(number): print('out of luck', file=sys.stderr); sys.exit(3)", "it ended, and wrote: out of luck"),
        ("def answer(number): sys.exit(0)", "is gone: it has closed the connection. Connect again"),
        ("def answer(number):\n  for _ in range(100): sys.stdout.write('x' * (1 << 20))\n  answer2(number)",
         "is gone: it sent a line of more than 4 MiB"),
        ("def answer(number): send(number, {'content': [1] * 200_000})", "a message of more than 32,768 JSON values"),
        ("def answer(number): send(number, {'content': json.loads('[' * 99 + ']' * 99)})", "of more than 64 levels"),
        ("def answer(number): send(number, {'content': 3})", "sent an answer that is none of the protocol"),
        ("def answer(number): send(number, {'content': [], 'isError': True})", "failed without a word"),
        ("def answer(number): print(json.dumps({'jsonrpc': '2.0', 'id': number, "
         "'error': {'code': 7, 'message': 'no\\x1b[2J'}}), flush=True)", "answered with an error: no\ufffd"),
    ],
    ids=["hangs", "dies", "ends", "100-mib", "values", "deep", "wrong", "silent", "refuses"],
)  # fmt: skip
async def test_a_bad_answer_costs_its_call_with_one_typed_error(answers: str, words: str) -> None:
    async with rekindle.mcp_tools(program(answers), name="bad", consent=yes, timeout=600) as opened:
        if "1000" in answers:
            opened._lease.connection._timeout = 0.5
        with pytest.raises(ToolServerError) as refused:
            await opened[0]()
        assert words in str(refused.value) and (refused.value.server, refused.value.tool) == ("bad", "go")
        assert "\x1b" not in str(refused.value)


@anyio_test
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("def tools(): time.sleep(1000)", "did not answer within 3 s"),
        ("def tools(): print('bye', file=sys.stderr); sys.exit(3)", "wrote: bye"),
        ("def tools(): return [TOOL | {'inputSchema': {'type': 'string'}}]", "an answer that is none of the protocol"),
        ("MANY = {str(number): {} for number in range(9_999)}\n"
         "def tools(): return [TOOL | {'inputSchema': {'type': 'object', 'properties': MANY}}]",
         "characters of description and schema, over 32,768. Pass only=[…] without it"),
        ("def tools(): return [TOOL | {'description': 'x' * 32_768}]", "over 32,768"),
        ("def tools(): return [TOOL | {'name': str(n)} for n in range(129)]", "129 tools, and a chat gets 128. Pass"),
        ("def tools(): return [TOOL | {'name': str(n)} for n in range(1_025)]", "lists more than 1,024 tools"),
        ("def tools(): return [TOOL | {'name': 'x' * 64}]", "has a name of 68 characters"),
        ("def tools(): return [TOOL | {'name': 'a.b'}, TOOL | {'name': 'a b'}]", "the same name as another: bad_a_b"),
        ("def tools(): return [TOOL | {'name': 3}]", "sent an answer that is none of the protocol"),
    ],
    ids=["hangs", "dies", "no-schema", "large-schema", "long", "many", "listed", "long-name", "same-name", "wrong"],
)  # fmt: skip
async def test_a_bad_list_of_tools_is_refused_with_one_typed_error(answers: str, words: str) -> None:
    with pytest.raises(ToolServerError) as refused:
        await rekindle.mcp_tools(program(answers), name="bad", consent=yes, timeout=3 if "1000" in answers else 600)
    assert words in str(refused.value) and refused.value.server == "bad"


@anyio_test
async def test_no_schema_of_a_server_is_run() -> None:
    """The library would match its pattern for hours."""
    answers = (
        "pattern = {'type': 'string', 'pattern': '^(a+)+$'}\n"
        "TOOL['outputSchema'] = {'type': 'object', 'properties': {'a': pattern}}\n"
        "def answer(number): send(number, {'content': [], 'structuredContent': {'a': 'a' * 60 + '!'}})"
    )
    async with rekindle.mcp_tools(program(answers), consent=yes) as opened:
        assert json.loads(await opened[0]()) == {"a": "a" * 60 + "!"}


@anyio_test
@pytest.mark.parametrize("method", ["elicitation/create", "sampling/createMessage", "roots/list"])
async def test_questions_of_a_server_get_no_answer(method: str) -> None:
    params = {
        "elicitation/create": {"message": "Who?", "requestedSchema": {"type": "object", "properties": {}}},
        "sampling/createMessage": {"messages": [], "maxTokens": 4},
    }.get(method, {})
    question = {"jsonrpc": "2.0", "id": "q", "method": method, "params": params}
    answers = (
        "def answer(number):\n"
        f"  print({json.dumps(question)!r}, flush=True)\n"
        "  reply = json.loads(sys.stdin.readline())\n"
        "  send(number, {'content': [{'type': 'text', 'text': json.dumps(reply)}]})"
    )
    async with rekindle.mcp_tools(program(answers), consent=yes) as opened:
        reply = json.loads(await opened[0]())
    assert reply["id"] == "q" and "error" in reply and "result" not in reply


@anyio_test
async def test_a_tool_that_asks_its_user_fails_by_name() -> None:
    class Name(pydantic.BaseModel):
        name: str

    server = MCPServer("asking", log_level="CRITICAL")

    @server.tool()
    async def who(ctx: Context) -> str:
        return str(await ctx.elicit("Who?", schema=Name))

    async with rekindle.mcp_tools(server, consent=yes) as opened:
        with pytest.raises(ToolServerError) as refused:
            await opened[0]()
    assert refused.value.tool == "who"


@anyio_test
async def test_pages_of_tools_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = "send_ = send\ndef send(number, result): send_(number, {**result, 'nextCursor': 'more'})"
    with pytest.raises(ToolServerError, match="more than 64 pages"):
        await rekindle.mcp_tools(program(answers), consent=yes)


@anyio_test
async def test_what_can_not_be_started_is_said() -> None:
    with pytest.raises(ToolServerError, match=r"the tool server /no/such can't be started.*Check the command"):
        await rekindle.mcp_tools(["/no/such"], consent=yes)
    with pytest.raises(ToolServerError, match="All connection attempts failed"):
        await rekindle.mcp_tools("http://127.0.0.1:1/mcp", consent=yes)


@contextlib.contextmanager
def answering(headers: dict[str, str], body: bytes, count: int) -> Iterator[str]:
    """An HTTP server that answers every request in this way; the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(count):
                    self.wfile.write(body)

        def log_message(self, *details: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@anyio_test
@pytest.mark.parametrize(
    ("headers", "body", "count", "words"),
    [
        ({"content-type": "application/json"}, b"x" * (1 << 20), 100, "sent a body of more than 4 MiB"),
        ({"content-type": "text/event-stream"}, b"data: " + b"x" * (1 << 20), 100, "SSE"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, gzip.compress(bytes(1 << 20)), 1, "packed"),
    ],
    ids=["json", "events", "packed"],
)
async def test_bodies_are_bounded(headers: dict[str, str], body: bytes, count: int, words: str) -> None:
    with answering(headers, body, count) as url, pytest.raises(ToolServerError, match=words):
        await rekindle.mcp_tools(url, consent=yes)


class ParsedMessages:
    """The messages that the protocol's library parses, which holds the interpreter's lock throughout."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commas: list[int] = []
        self._adapter = transports.jsonrpc_message_adapter
        for module in (transports, streamable_http):
            monkeypatch.setattr(module, "jsonrpc_message_adapter", self)

    def validate_json(self, data: bytes | str, **options: Any) -> Any:
        self.commas.append(data.count("," if isinstance(data, str) else b","))
        return self._adapter.validate_json(data, **options)


LISTS = b"[" + b"[]," * 200_000 + b"[]]"


@anyio_test
@pytest.mark.parametrize("id_first", [True, False])
async def test_a_programs_line_of_too_many_values_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch, id_first: bool
) -> None:
    lists = "'[' + '[],' * 200_000 + '[]]'"
    answers = (
        "def answer(number):\n"
        f'  sys.stdout.write(\'{{"jsonrpc":"2.0","method":"x","params":{{"a":\' + {lists} + \'}}}}\\n\')\n'
        + (
            f'  sys.stdout.write(\'{{"jsonrpc":"2.0","id":%d,"result":\' % number + {lists} + \'}}\\n\')'
            if id_first
            else f'  sys.stdout.write(\'{{"result":\' + {lists} + \',"jsonrpc":"2.0","id":%d}}\\n\' % number)'
        )
        + "\n  sys.stdout.flush()"
    )
    parsed = ParsedMessages(monkeypatch)
    async with rekindle.mcp_tools(program(answers), name="bad", consent=yes, timeout=600) as opened:
        for _ in range(2):  # it costs that call alone
            with pytest.raises(ToolServerError, match="more than 32,768 JSON values"):
                await opened[0]()
    assert max(parsed.commas) < limits.MOST_MARKS


@anyio_test
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b'{"jsonrpc":"2.0","id":1,"result":' + LISTS + b"}"),
        ("application/json", b'{"jsonrpc":"1","result":' + LISTS + b"}"),
        ("text/event-stream", b'data: {"jsonrpc":"2.0","id":1,"result":' + LISTS + b"}\n\n"),
        ("text/event-stream", b': "\ndata: {"jsonrpc":"2.0","id":1,"result":' + LISTS + b"}\n\n"),
        ("text/event-stream; charset=utf-7", b"data: +AFs-\n\n"),
    ],
    ids=["json", "no-id", "event", "quote", "utf-7"],
)
async def test_a_body_of_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch, kind: str, body: bytes) -> None:
    parsed = ParsedMessages(monkeypatch)
    with answering({"content-type": kind}, body, 1) as url, pytest.raises(ToolServerError):
        await rekindle.mcp_tools(url, consent=yes)
    assert max(parsed.commas, default=0) < limits.MOST_MARKS


@anyio_test
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
async def test_values_of_an_event_are_counted_over_its_lines(end: bytes, size: int) -> None:
    async def chunks(lines: list[bytes]) -> AsyncGenerator[bytes, None]:
        data = end.join(lines)
        for at in range(0, len(data), size):
            yield data[at : at + size]

    line = b"data: " + b"[]," * (limits.MOST_MARKS // 300)  # two marks each
    one = [line] * 100 + [b""]
    passed = [part async for part in transports.BoundedEvents(chunks([*one, b"", *one, b""]))]
    assert b"".join(passed) == end.join([*one, b"", *one, b""])
    async with contextlib.aclosing(chunks([*one[:-1], *one, b""])) as many:
        with pytest.raises(transports.httpx2.SSEError, match="more than 32,768 JSON values"):
            async for _ in transports.BoundedEvents(many):
                pass


def ping(number: int) -> Any:
    return transports.SessionMessage(transports.JSONRPCRequest(jsonrpc="2.0", id=number, method="ping"))


@anyio_test
async def test_questions_without_an_answer_are_bounded() -> None:
    """The library has a task for each, which waits until the server reads its answer."""
    to_client, received = anyio.create_memory_object_stream[Any](100)
    sent, to_server = anyio.create_memory_object_stream[Any](100)
    answers = transports.AnswersDue(sent)
    checks = transports.MessageChecks(received, answers)
    result = transports.SessionMessage(transports.JSONRPCResponse(jsonrpc="2.0", id=1, result={}))
    async with to_client, received, sent, to_server:
        for number in range(50):
            await to_client.send(ping(number))
        await to_client.send(result)
        numbers = [(await checks.receive()).message.id for _ in range(limits.MOST_ASKED)]
        assert numbers == list(range(limits.MOST_ASKED)) and await checks.receive() is result
        await answers.send(result)
        await to_client.send(ping(77))
        await to_client.send(ping(78))
        await to_client.send(result)
        assert (await checks.receive()).message.id == 77 and await checks.receive() is result
        # The library never answers a question that was taken back, and takes 5 and "5" for one.
        note = transports.JSONRPCNotification(
            jsonrpc="2.0", method="notifications/cancelled", params={"requestId": "5"}
        )
        for message in (transports.SessionMessage(note), ping(77), ping(79), ping(80), result):
            await to_client.send(message)
        assert (await checks.receive()).message is note
        assert (await checks.receive()).message.id == 79 and await checks.receive() is result


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"jsonrpc":"2.0","id":7,"result":[…]}', 7),
        ('{"id": 7, "jsonrpc": "2.0", "error": {"data":[…]}}', 7),
        ('{"result":[…],"jsonrpc":"2.0","id":7}\n', 7),
        ('{"jsonrpc":"2.0","error":{"data":[…]},"id":7}', 7),
        # Its questions may have the numbers of ours, and are no answers to them.
        ('{"jsonrpc":"2.0","id":7,"method":"ping","params":[…]}', None),
        ('{"jsonrpc":"2.0","method":"ping","params":[…],"id":7}', None),
        ('{"params":[…],"method":"ping","jsonrpc":"2.0","id":7}', None),
        ('{"jsonrpc":"2.0","id":"7","result":[…]}', None),
    ],
)
def test_the_number_of_an_answer_that_is_not_parsed(text: str, number: int | None) -> None:
    assert limits.id_of(text.replace("…", "[]," * 200 + "[]").encode()) == number


def test_a_message_with_as_many_named_objects_as_values_are_allowed_is_parsed() -> None:
    objects = ",".join(f'"{place}":{{}}' for place in range(limits.MOST_VALUES - 100))
    assert limits.unparsed_problem(f"{{{objects}}}".encode()) is None


@anyio_test
async def test_a_server_that_sends_more_than_calls_need_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    clock = SimpleNamespace(current_time=lambda: 1_000.0, sleep=sleep)
    monkeypatch.setattr(transports, "anyio", clock)
    pace = transports.MessagePace()
    for _ in range(transports.BURST):
        await pace.wait()
    assert not pauses
    for number in range(1, 4):
        await pace.wait()
        assert pauses[-1] == number / transports.RATE
    connections, first = transports.Reconnections(), transports.httpx2.Request("GET", "http://h/")
    await connections.wait(first)
    assert len(pauses) == 3
    first.headers["last-event-id"] = "1"
    await connections.wait(first)
    assert pauses[3:] == [transports.RECONNECTION_SECONDS]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_url_is_connected_to() -> None:
    import uvicorn

    app = calculator().streamable_http_app()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    async with anyio.create_task_group() as group:
        group.start_soon(server.serve)
        while not server.started:  # noqa: ASYNC110 (it has no event)
            await anyio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        entry = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"x-name": "value"}}
        async with rekindle.mcp_tools(entry, consent=yes) as opened:
            assert await dict(zip(opened.names, opened, strict=True))["calc_add"](a=2, b=3) == "5"
        server.should_exit = True


def test_every_connection_ends_with_the_interpreter() -> None:
    code = (
        "import rekindle, sys\n"
        f"tools = rekindle.mcp_tools({program('')!r}, consent=lambda offer: True).result_sync()\n"
        "print(tools.names[0])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert ended.returncode == 0 and ended.stdout.strip().endswith("_go") and not ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [1, {"b": "c"}]}, None), ("text", None), ([0] * limits.MOST_VALUES, None),
        ([0] * (limits.MOST_VALUES + 1), "more than 32,768 JSON values"),
        ([[0] * 200] * 200, "more than 32,768 JSON values"),
    ],
)  # fmt: skip
def test_values_are_counted(value: object, problem: str | None) -> None:
    found = limits.problem_of(value)
    assert (found is None) if problem is None else problem in (found or "")


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"type": "object"}, None), ({}, None), ([], "no JSON schema of an object"), ({"properties": 3}, "by name"),
        ({"type": "string"}, "no JSON schema of an object"), ({"enum": [0] * 40_000}, "has a schema of more than"),
        ({"title": "x" * 40_000}, "over 32,768"),
    ],
)  # fmt: skip
def test_schemas_are_bounded(parameters: object, problem: str | None) -> None:
    found = limits.schema_problem(parameters, "A description.")
    assert (found is None) if problem is None else problem in (found or "")


def test_names_have_the_letters_that_calls_may_have() -> None:
    assert limits.safe_name("a.b/c d\u00e9\u202e-_9") == "a_b_c_d__-_9"
    assert tools.LONGEST == 86_400.0
