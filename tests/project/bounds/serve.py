"""Bounds on what HTTP clients send."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from project.bounds.records import SHOWN, SMALL, STRANGER, TIME, Bound, Other, within
from rekindle._src.serve import bodies, exchange, generation, info, ledger, life, listening, openai_fields, responses
from rekindle._src.serve.bodies import IN_A_THREAD, VALUES_PER_NAME

BODY = 32 << 20  # the default of body_limit
VALUES = max(IN_A_THREAD, BODY // bodies.BYTES_PER_VALUE)
DESCRIPTORS = 1_024  # the usual limit of a process


def read(data: bytes) -> Callable[[], object]:
    """Read a body as the server does."""

    def work() -> object:
        bodies.check_size(data, BODY)
        value = bodies.parse(data)
        return value, ledger.bytes_of(value)

    return work


def values(count: int) -> Callable[[], object]:
    return read(b"[" + b"[]," * (count // 2) + b"[]]")


def names(count: int) -> Callable[[], object]:
    return read(b"{" + b",".join(b'"%06d":1' % number for number in range(count)) + b"}")


def digits(count: int) -> Callable[[], object]:
    return read(b"[" + b",".join([b"9" * bodies.MOST_DIGITS] * count) + b"]")


def escapes(count: int) -> Callable[[], object]:
    return read(b'["' + (b"a" * ((1 << 20) - 12) + b"\\ud83d\\ude00") * count + b'"]')


def parts(count: int) -> Callable[[], object]:
    """Messages of many parts, read and made into those of a session."""
    from rekindle._src.serve.chat import plain_messages

    each = -(-count // openai_fields.MOST_MESSAGES)
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * each}
    data = json.dumps({"messages": [message] * (count // each)}, separators=(",", ":")).encode()

    def no_picture(part: Any, path: str) -> Any:
        raise AssertionError(path)

    def work() -> object:
        bodies.check_size(data, BODY)
        fields = openai_fields.CHAT.read(bodies.parse(data), strict=True, unknown=lambda path, name: None)
        return plain_messages(fields["messages"], no_picture)

    return work


def repeated(count: int) -> Callable[[], object]:
    """Fields of a request for a response, written into its three objects."""
    from rekindle._src.serve.responses import RESPONSES

    size = responses.MOST_REPEATED // 2
    lists: list[Any] = [[[] for _ in range(1_000)] for _ in range(size // 1_001)]
    numbers = [[0.1234567890123456] * 1_000 for _ in range(size // 25_000)]
    values = [("tools", [{"type": "function", "name": "f", "x": lists, "y": numbers}]),
              ("tool_choice", {"type": "function", "name": "f", "x": lists, "y": numbers}),
              ("text", {"x": lists, "y": numbers})][:count]  # fmt: skip

    def work() -> object:
        fields = RESPONSES.read({"input": "hi", **dict(values)}, strict=True, unknown=lambda path, name: None)
        return [max(map(len, bodies.pieces({name: fields[name] for name, _ in values}))) for _ in range(3)]

    return work


def kept(count: int) -> Callable[[], object]:
    store = exchange.KeptItems()
    length = exchange.MOST_CHARACTERS // exchange.MOST_ITEMS - 8

    def work() -> object:
        for number in range(count):
            text = "😀" * length
            content = [{"type": "output_text", "text": text, "annotations": []}]
            store.keep("", [{"id": f"m{number}", "type": "message", "role": "assistant", "content": content}])
        return store

    return work


def tiny() -> Any:
    from rekindle import tiny as model
    from rekindle._src.text.tokenizer import Tokenizer

    return Tokenizer.load(model.folder())


def encoded(count: int) -> Callable[[], object]:
    tokenizer, text = tiny(), "😀é x9" * (count * 1_000 // 5)
    return lambda: tokenizer.encode(text, add_special_tokens=False)


def decoded(count: int) -> Callable[[], object]:
    tokenizer = tiny()
    ids = [number % tokenizer.vocab_size for number in range(count)]
    return lambda: tokenizer.decode(ids, skip_special_tokens=False)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def _server() -> Any:
    from serve.conftest import chatting_session

    with (
        contextlib.closing(chatting_session(step_seconds=0.005)) as session,
        contextlib.closing(session.serve().result_sync()) as server,
    ):
        yield server


def connections(count: int, *sent: bytes, seconds: float = 0.3) -> Callable[[], object]:
    """Connections to a server, each of which sends something and waits."""

    def work() -> object:
        with _server() as server, contextlib.ExitStack() as stack:
            for _ in range(count):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                client.settimeout(0.2)
                with contextlib.suppress(OSError):  # the server reads no further
                    for piece in sent:
                        client.sendall(piece)
            threading.Event().wait(seconds)
        return None

    return work


def heads(count: int) -> Callable[[], object]:
    return connections(count, HEAD + b"X: " + b"a" * (listening.HEAD_BYTES - 200))


def ahead(count: int) -> Callable[[], object]:
    long = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "stream": True}).encode()
    first = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(long), long)
    return connections(count, first, HEAD + b"Content-Length: %d\r\n\r\n" % BODY, b" " * (1 << 20))


def unfinished(count: int) -> Callable[[], object]:
    return connections(count, HEAD + b"Content-Length: %d\r\n\r\n" % BODY, *[b" " * (1 << 20)] * 31)


def headers(count: int) -> Callable[[], object]:
    each = life.MOST_HEADER_BYTES // life.MOST_HEADERS - 40
    others = [(b"x-%d" % number, b"a" * each) for number in range(life.MOST_HEADERS - 1)]
    scope = {"headers": [(b"host", b"localhost"), *others], "server": ("127.0.0.1", 80)}
    hosts = life.Hosts()

    def work() -> object:
        for _ in range(count):
            life.check_size(scope)
            hosts.check(scope, keyed=False)
        return None

    return work


BOUNDS: list[Bound] = [
    STRANGER(
        "serve/bodies.py: BYTES_PER_VALUE",
        counts="values of a body",
        most=VALUES,
        unit="an empty list",
        feed=values,
        count=VALUES // 8,
        seconds=3,
        mib=100 * VALUES / 2**20,
    ),
    STRANGER(
        "serve/bodies.py: VALUES_PER_NAME",
        counts="named fields of a body",
        most=VALUES // VALUES_PER_NAME,
        unit="a field with a name of its own",
        feed=names,
        count=VALUES // VALUES_PER_NAME // 4,
        seconds=1,
        mib=48,
    ),
    STRANGER(
        "serve/bodies.py: MOST_DIGITS",
        counts="long numbers of a body",
        most=BODY // (bodies.MOST_DIGITS + 1),
        unit="a whole number of 1,000 digits",
        feed=digits,
        count=2_000,
        seconds=2,
        mib=128,
    ),
    STRANGER(
        "serve/app.py: body_limit",
        counts="MiB of a body",
        most=BODY >> 20,
        unit="text with an escape that makes it four bytes wide",
        feed=escapes,
        count=4,
        seconds=3,
        mib=9 * 32,
    ),
    STRANGER(
        "serve/openai_fields.py: MOST_MESSAGES",
        counts="parts of messages",
        most=VALUES // VALUES_PER_NAME // 2,
        unit="an empty text",
        feed=parts,
        count=VALUES // VALUES_PER_NAME // 16,
        seconds=3,
        mib=96,
    ),
    STRANGER(
        "serve/responses.py: MOST_REPEATED, MOST_METADATA",
        counts="fields that come back with a response",
        most=3,
        unit="numbers with fractions, and empty lists",
        feed=repeated,
        count=3,
        seconds=2,
        mib=32,
    ),
    STRANGER(
        "serve/exchange.py: MOST_ITEMS, MOST_CHARACTERS",
        counts="kept items of answers",
        most=exchange.MOST_ITEMS,
        unit="a text of emoji",
        feed=kept,
        count=exchange.MOST_ITEMS // 4,
        seconds=1,
        mib=96,
    ),
    STRANGER(
        "serve/generation.py: MOST_CHARACTERS",
        counts="thousands of characters to encode",
        most=generation.MOST_CHARACTERS // 1_000,
        unit="short words with accents and emoji",
        feed=encoded,
        count=128,
        seconds=4,
        mib=512,
    ),
    STRANGER(
        "serve/info.py: MOST_IDS",
        counts="token ids to decode",
        most=info.MOST_IDS,
        unit="any token",
        feed=decoded,
        count=info.MOST_IDS // 4,
        seconds=1,
        mib=64,
    ),
    STRANGER(
        "serve/life.py: MOST_HEADERS, MOST_HEADER_BYTES",
        counts="headers, a thousand times",
        most=1_000,
        unit="128 headers of 64 KiB",
        feed=headers,
        count=100,
        seconds=0.2,
        mib=1,
    ),
    STRANGER(
        "serve/listening.py: HEAD_BYTES",
        counts="connections with an unfinished head",
        most=DESCRIPTORS,
        unit="a head of 64 KiB",
        feed=heads,
        count=128,
        seconds=5,
        mib=256,
    ),
    STRANGER(
        "serve/listening.py: AHEAD",
        counts="connections with a request ahead",
        most=DESCRIPTORS,
        unit="a body of a request whose turn has not come",
        feed=ahead,
        count=64,
        seconds=20,
        mib=512,
    ),
    STRANGER(
        "serve/ledger.py: REQUEST_MEMORY, SHARE",
        counts="bodies that arrive",
        most=100,
        unit="31 MiB of a body of 32",
        feed=unfinished,
        count=100,
        seconds=20,
        mib=ledger.REQUEST_MEMORY / ledger.SHARE / 2**20,
    ),
]

OTHERS: dict[str, dict[str, Other]] = {
    "serve/completions.py": {"MAX_TOKENS": Other("a default")},
    "serve/decisions.py": {
        "MOST_OPTIONS": within("prompts of a request: each option is one, at most"),
        "MOST_QUESTIONS": within("prompts of a request"), "MOST_CHOICES": within("prompts of a request"),
        "MOST_LEVELS": within("prompts of a request"), "MOST_DOCUMENTS": within("prompts of a request"),
        "MOST_TOKENS": Other(
            "tokens of a request's prompts, all that is in each of them: 8 bytes each while they are encoded, 32 MiB. "
            "Log-probabilities of options are counted as memory, 250 bytes a character"
        ),
    },
    "serve/errors.py": {"_LONGEST_PLACE": SHOWN},
    "serve/fields.py": {"_MOST_LOGGED": SMALL},
    "serve/ledger.py": {},
    "serve/life.py": {
        "LONGEST_DRAIN": TIME, "_LONGEST_WAIT": TIME, "_LONGEST_NAME": within("header bytes: it is cut from one"),
    },
    "serve/logprobs.py": {"_MOST_REMEMBERED": Other("a token's text and bytes, 300 bytes each: 20 MiB")},
    "serve/openai_fields.py": {
        "MOST_PROMPTS": within("parts of messages: a prompt is cheaper"),
        "MOST_N": Other("sequences: each has a place of the queue. A token with 20 log-probabilities is 1.7 kB"),
        "MOST": Other("the largest number of a field"), "MOST_TEMPERATURE": Other("the largest number of a field"),
    },
    "serve/pictures.py": {
        "LIMITS": within("pictures"), "MOST_URLS": TIME,
    },
    "serve/web_urls.py": {"LONGEST_URL": SMALL},
    "serve/fetching.py": {},
}  # fmt: skip
